//! Position of a GPU in the machine, from sysfs: PCIe root and NUMA node.
//!
//! The NUMA node is the one of the CPU. NVML also reports NUMA nodes on coherent systems, but those
//! are the GPU's own memory.

use std::path::{Path, PathBuf};

/// Sysfs below a configured root.
#[derive(Clone, Debug)]
pub struct Sysfs {
    root: PathBuf,
}

/// Position of a PCI device; `None` where sysfs does not report it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PciFacts {
    /// For example `pci0000:16`.
    pub pcie_root: Option<String>,
    pub numa_node: Option<u32>,
}

impl Sysfs {
    /// Sysfs mounted at `root`, normally `/sys`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Reads the position of the device with a bus id such as `0000:1a:00.0`.
    pub fn pci(&self, bus_id: &str) -> PciFacts {
        let link = self.root.join("bus/pci/devices").join(bus_id);
        let Ok(device) = link.canonicalize() else { return PciFacts::default() };
        let numa = std::fs::read_to_string(device.join("numa_node")).unwrap_or_default();
        PciFacts { pcie_root: pcie_root(&device), numa_node: numa.trim().parse().ok() }
    }
}

/// The first component of a device path that is a PCI root: `pciDDDD:BB`.
fn pcie_root(device: &Path) -> Option<String> {
    let is_root = |name: &str| {
        let address = name.strip_prefix("pci").and_then(|rest| rest.split_once(':'));
        address.is_some_and(|(domain, bus)| {
            domain.len() >= 4
                && bus.len() == 2
                && (domain.chars().chain(bus.chars())).all(|c| c.is_ascii_hexdigit())
        })
    };
    device
        .components()
        .filter_map(|part| part.as_os_str().to_str())
        .find(|name| is_root(name))
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn check(device: &str, numa: Option<&str>, facts: PciFacts) {
        let dir = tempfile::tempdir().expect("temporary directory");
        let at = dir.path().join("devices").join(device);
        fs::create_dir_all(&at).expect("device directory");
        if let Some(numa) = numa {
            fs::write(at.join("numa_node"), numa).expect("numa_node");
        }
        fs::create_dir_all(dir.path().join("bus/pci/devices")).expect("bus directory");
        symlink(&at, dir.path().join("bus/pci/devices/0000:1a:00.0")).expect("link");
        assert_eq!(Sysfs::new(dir.path()).pci("0000:1a:00.0"), facts, "{device}");
    }

    #[test]
    fn pcie_root_is_the_first_pci_component() {
        let root = |name: &str, numa_node| PciFacts { pcie_root: Some(name.to_owned()), numa_node };
        check("pci0000:16/0000:16:01.0/0000:1a:00.0", Some("1\n"), root("pci0000:16", Some(1)));
        check("LNXSYSTM:00/pci0008:00/0000:1a:00.0", Some("-1\n"), root("pci0008:00", None));
        check("pci10000:e0/0000:1a:00.0", None, root("pci10000:e0", None));
        check("platform/0000:1a:00.0", None, PciFacts::default());
    }

    #[test]
    fn device_unknown_to_sysfs_has_no_position() {
        assert_eq!(Sysfs::new("/nonexistent").pci("0000:1a:00.0"), PciFacts::default());
    }
}
