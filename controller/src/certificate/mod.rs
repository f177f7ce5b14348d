//! The webhook's TLS certificate: creation, rotation and serving.

pub mod manager;
pub mod tls;

pub use manager::{CertificateManager, follow_dir};
pub use tls::{CertificateError, ServingCertificate, StoredCertificate, host};
