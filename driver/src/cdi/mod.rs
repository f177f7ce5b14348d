//! Container Device Interface: how prepared claims get into containers.

mod claim_file;
pub mod document;
pub mod elf;
pub mod files;
pub mod hook;
pub mod library;
mod metadata;
pub mod nodes;
pub mod runtime;

pub use claim_file::{
    Cdi, CdiError, CdiId, ClaimDevice, MpsClient, ReadinessError, claim_file_name, claim_of_file,
};
pub use hook::HookMode;
pub use library::{DIRECTORY as LIBRARIES, Library};
pub use metadata::DIRECTORY as METADATA;
pub use nodes::DeviceNodes;
