//! Users of the kernel module `nvidia`: processes that have NVML or CUDA initialised.
//!
//! Each holds a shared lock on one file, which the kernel releases when the process dies. The module
//! is unloaded under the exclusive lock. A process that may not open the file is not counted.

use crate::code::Code;
use crate::file_lock::TRY_LOCK;
use crate::sim::Sim;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::OwnedFd;

/// Name of the lock file in the state's directory.
const FILE: &str = "module-users";

/// Keeps the module loaded.
#[derive(Debug)]
pub struct ModuleUser {
    _lock: Option<OwnedFd>,
}

impl Sim {
    /// Makes this process a user of the module. Fails with DRIVER_NOT_LOADED while it is unloaded.
    pub fn use_module(&self) -> Result<ModuleUser, Code> {
        self.lock_module(FlockOperation::NonBlockingLockShared, Code::DriverNotLoaded)
    }

    /// Keeps new users away from the module. Fails with IN_USE if it has users.
    pub(crate) fn lock_unused_module(&self) -> Result<ModuleUser, Code> {
        self.lock_module(TRY_LOCK, Code::InUse)
    }

    fn lock_module(&self, operation: FlockOperation, refusal: Code) -> Result<ModuleUser, Code> {
        let path = self.dir().join(FILE);
        let open = |flags| rustix::fs::open(&path, flags | OFlags::CLOEXEC, Mode::from_raw_mode(0o644));
        let file = open(OFlags::RDONLY).or_else(|_| open(OFlags::RDONLY | OFlags::CREATE));
        let Ok(file) = file else { return Ok(ModuleUser { _lock: None }) };
        match rustix::fs::flock(&file, operation) {
            Err(Errno::WOULDBLOCK) => Err(refusal),
            _ => Ok(ModuleUser { _lock: Some(file) }),
        }
    }
}
