//! The time between two resets of all GPUs: a reboot, or a reload of the GPU driver's kernel module.
//! State of an earlier epoch, such as a MIG instance, is gone from the hardware.

use serde::{Deserialize, Serialize};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// An epoch; `None` where the kernel does not tell.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Epoch {
    /// `/proc/sys/kernel/random/boot_id`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot: Option<String>,
    /// The inode of `/sys/module/nvidia`: sysfs gives each directory a number of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub module: Option<u64>,
}

impl Epoch {
    /// The current epoch, from these `/proc` and `/sys`.
    pub fn now(proc_root: &Path, sys_root: &Path) -> Self {
        let boot = std::fs::read_to_string(proc_root.join("sys/kernel/random/boot_id"));
        let boot = boot.ok().map(|id| id.trim().to_owned()).filter(|id| !id.is_empty());
        Self { boot, module: None }.with_module(sys_root)
    }

    /// The current epoch in the same boot. A process does not outlive its boot.
    #[must_use]
    pub fn with_module(&self, sys_root: &Path) -> Self {
        let module = std::fs::metadata(sys_root.join("module/nvidia"));
        Self { module: module.ok().map(|directory| directory.ino()), ..self.clone() }
    }

    /// Whether the GPUs were certainly reset between this epoch and a later one.
    pub fn is_over(&self, now: &Self) -> bool {
        let differ =
            |one: Option<&str>, other: Option<&str>| matches!((one, other), (Some(a), Some(b)) if a != b);
        differ(self.boot.as_deref(), now.boot.as_deref())
            || matches!((self.module, now.module), (Some(one), Some(other)) if one != other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epoch_is_over_after_a_reboot_or_a_module_reload() {
        let epoch = |boot: &str, module| Epoch { boot: (!boot.is_empty()).then(|| boot.to_owned()), module };
        let now = epoch("b", Some(2));
        for (before, over) in [
            (epoch("b", Some(2)), false),
            (epoch("a", Some(2)), true),
            (epoch("b", Some(1)), true),
            (epoch("b", None), false),
            (epoch("", Some(2)), false),
            (epoch("", None), false),
        ] {
            assert_eq!(before.is_over(&now), over, "{before:?}");
        }
        assert!(!now.is_over(&epoch("b", None)), "the module is unloaded for now");
    }
}
