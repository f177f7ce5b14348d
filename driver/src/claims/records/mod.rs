//! Records: the persistent state of claims on this node, one file per claim.
//!
//! - `<state>/claims/<uid>.json`: the claim's record (`record`, `wire`)
//! - `<state>/gpus/<GPU UUID>`: lock, generation and owner of MIG mode (`locks`)
//! - `<state>/debts/`: debts of released claims (`debts`)
//! - `<state>/quarantine/`: records that could not be read
//!
//! A record is written before the hardware changes. It is removed after the hardware is restored or the
//! debt is written.

mod debts;
mod index;
mod locks;
mod record;
mod store;
mod wire;

pub use debts::Debt;
pub use index::Records;
pub use locks::{GpuFileError, LockError, Locked, LockedGpu, Locks};
pub use record::{ClaimRecord, DeviceRecord, HeldState, InstanceIds, PreparedDevice};
pub use store::{Quarantined, RecordError};
