//! The GPUs as the kernel shows them, and their comparison with NVML's list.
//!
//! NVML lists only GPUs with a device node, and only those that it found when it was opened. The
//! kernel shows every GPU that the GPU driver is bound to. A GPU that is not initialised yet has no
//! UUID there, and only its bus id counts.

use divvy_api::GpuUuid;
use divvy_model::inventory::Gpu;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

/// The files of the kernel that are read.
#[derive(Clone, Debug)]
pub(super) struct Kernel {
    /// `<proc>/driver/nvidia/gpus`, which exists while the GPU driver's module is loaded.
    gpus: PathBuf,
    /// `<sys>/bus/pci/drivers/nvidia`, with a link for each device that the driver is bound to.
    bound: PathBuf,
    /// Directory of the device nodes.
    dev: PathBuf,
}

/// The GPUs of one reading.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct KernelView {
    /// By bus id; `None` while the GPU driver's module is not loaded.
    gpus: Option<BTreeMap<String, KernelGpu>>,
}

/// One GPU; `None` where the kernel does not know a value yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct KernelGpu {
    uuid: Option<GpuUuid>,
    minor: Option<u32>,
}

/// The names that change when a GPU or its device node comes or goes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Listing(BTreeSet<String>);

/// A GPU of NVML's list; `None` where NVML cannot read a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NvmlGpu {
    pub(super) bus_id: Option<String>,
    pub(super) uuid: Option<GpuUuid>,
}

/// Numbers of GPUs in both lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuCounts {
    /// GPUs that the kernel shows.
    pub kernel: usize,
    /// GPUs that NVML lists, unreadable ones included.
    pub nvml: usize,
}

/// Difference between the kernel and NVML.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Difference {
    pub(super) counts: GpuCounts,
    /// Bus ids of GPUs that NVML does not list, or lists with another UUID.
    pub(super) unlisted: BTreeSet<String>,
    /// GPUs of NVML that the kernel does not show.
    pub(super) vanished: BTreeSet<GpuUuid>,
}

impl fmt::Display for GpuCounts {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "the kernel driver shows {} GPUs, NVML {}", self.kernel, self.nvml)
    }
}

impl Kernel {
    /// `dev` is the directory of the device nodes.
    pub(super) fn new(proc_root: &Path, sys_root: &Path, dev: PathBuf) -> Self {
        Self {
            gpus: proc_root.join("driver/nvidia/gpus"),
            bound: sys_root.join("bus/pci/drivers/nvidia"),
            dev,
        }
    }

    /// Lists names without reading a file, so it does not wait for the GPU driver.
    pub(super) fn listing(&self) -> Listing {
        let nodes = names(&self.dev).into_iter().flatten().filter(|name| {
            name.strip_prefix("nvidia").is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_digit()))
        });
        let gpus = names(&self.gpus).into_iter().flatten().chain(names(&self.bound).into_iter().flatten());
        Listing(nodes.chain(gpus).collect())
    }

    /// Reads all GPUs on another thread; `None` if that takes longer than `timeout`.
    pub(super) fn read_within(&self, timeout: Duration) -> Option<KernelView> {
        let (answer, view) = mpsc::channel();
        let kernel = self.clone();
        let reader = std::thread::Builder::new().name("kernel-gpus".to_owned());
        reader.spawn(move || answer.send(kernel.read())).ok()?;
        view.recv_timeout(timeout).ok()
    }

    /// Reads all GPUs. May wait for the GPU driver's lock, so it runs on a thread of its own.
    pub(super) fn read(&self) -> KernelView {
        let Some(listed) = names(&self.gpus) else { return KernelView::default() };
        let mut gpus = BTreeMap::new();
        let mut excluded = BTreeSet::new();
        for bus_id in listed {
            let text = std::fs::read_to_string(self.gpus.join(&bus_id).join("information"));
            let bus_id = bus_id.to_ascii_lowercase();
            match parse(&text.unwrap_or_default()) {
                Some(gpu) => drop(gpus.insert(bus_id, gpu)),
                None => drop(excluded.insert(bus_id)),
            }
        }
        for bus_id in names(&self.bound).into_iter().flatten().filter(|name| name.contains(':')) {
            let lower = bus_id.to_ascii_lowercase();
            if !excluded.contains(&lower) && is_gpu(&self.bound.join(bus_id)) {
                gpus.entry(lower).or_default();
            }
        }
        KernelView { gpus: Some(gpus) }
    }
}

fn names(dir: &Path) -> Option<Vec<String>> {
    let entries = std::fs::read_dir(dir).ok()?;
    Some(entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect())
}

/// Whether the PCI class is a display controller: VGA (0x0300) or 3D (0x0302). A virtual function of
/// a GPU that is shared by virtual machines is none: NVML lists only its physical function.
fn is_gpu(device: &Path) -> bool {
    if device.join("physfn").exists() {
        return false;
    }
    let class = std::fs::read_to_string(device.join("class")).unwrap_or_default();
    class.starts_with("0x0300") || class.starts_with("0x0302")
}

/// Parses an `information` file; `None` for a GPU that the module's parameters exclude from use.
fn parse(text: &str) -> Option<KernelGpu> {
    let field =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
    if field("GPU Excluded") == Some("Yes") {
        return None;
    }
    // Before the GPU is initialised, the UUID reads as `GPU-????????-...`.
    let uuid = field("GPU UUID").filter(|uuid| uuid.starts_with("GPU-") && !uuid.contains('?'));
    let minor = field("Device Minor").and_then(|minor| minor.parse().ok());
    Some(KernelGpu { uuid: uuid.map(GpuUuid::from), minor })
}

impl KernelView {
    /// Whether the last description of the GPU cannot be right any more: the GPU is gone, or its bus
    /// id has another minor or UUID. An unloaded module contradicts nothing.
    pub(super) fn contradicts(&self, gpu: &Gpu) -> bool {
        let Some(gpus) = &self.gpus else { return false };
        let by_uuid = gpus.values().find(|shown| shown.uuid.as_ref() == Some(&gpu.uuid));
        let shown = by_uuid.or_else(|| gpus.get(&gpu.pci_bus_id).filter(|shown| shown.uuid.is_none()));
        shown.is_none_or(|shown| shown.minor.is_some_and(|minor| minor != gpu.minor))
    }

    /// Whether the kernel shows the GPU with the UUID and the minor of its last description.
    pub(super) fn shows(&self, gpu: &Gpu) -> bool {
        let mut gpus = self.gpus.iter().flat_map(BTreeMap::values);
        gpus.any(|shown| shown.uuid.as_ref() == Some(&gpu.uuid) && shown.minor == Some(gpu.minor))
    }

    /// Whether the kernel shows this GPU, or may show it under an unknown UUID.
    pub(super) fn may_show(&self, uuid: &GpuUuid) -> bool {
        let mut gpus = self.gpus.iter().flat_map(BTreeMap::values);
        gpus.any(|shown| shown.uuid.as_ref().is_none_or(|shown| shown == uuid))
    }

    /// The same without the GPUs at these bus ids.
    pub(super) fn without(&self, bus_ids: &BTreeSet<String>) -> Self {
        let mut view = self.clone();
        view.gpus.iter_mut().for_each(|gpus| gpus.retain(|bus_id, _| !bus_ids.contains(bus_id)));
        view
    }

    /// Compares NVML's list with the kernel's. `None` if they are the same, or if the module is not
    /// loaded.
    pub(super) fn differs(&self, nvml: &[NvmlGpu]) -> Option<Difference> {
        let gpus = self.gpus.as_ref()?;
        let is_same = |bus_id: &String, shown: &KernelGpu, listed: &NvmlGpu| {
            let same_bus = listed.bus_id.as_ref().is_none_or(|listed| listed == bus_id);
            match (&shown.uuid, &listed.uuid) {
                (Some(shown), Some(listed)) => same_bus && shown == listed,
                (None, Some(_)) => same_bus && listed.bus_id.is_some(),
                (_, None) => false,
            }
        };
        let unlisted: BTreeSet<String> = gpus
            .iter()
            .filter(|(bus_id, shown)| !nvml.iter().any(|listed| is_same(bus_id, shown, listed)))
            .map(|(bus_id, _)| bus_id.clone())
            .collect();
        let is_shown = |listed: &NvmlGpu| gpus.iter().any(|(bus_id, shown)| is_same(bus_id, shown, listed));
        let mut vanished: BTreeSet<GpuUuid> =
            nvml.iter().filter(|listed| !is_shown(listed)).filter_map(|listed| listed.uuid.clone()).collect();
        // A GPU without a readable bus id may be one that the kernel shows without a UUID.
        if gpus.values().any(|shown| shown.uuid.is_none()) {
            let no_bus = |uuid: &GpuUuid| {
                nvml.iter().any(|listed| listed.uuid.as_ref() == Some(uuid) && listed.bus_id.is_none())
            };
            vanished.retain(|uuid| !no_bus(uuid));
        }
        let counts = GpuCounts { kernel: gpus.len(), nvml: nvml.len() };
        (!unlisted.is_empty() || !vanished.is_empty()).then_some(Difference { counts, unlisted, vanished })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bus(gpu: u32) -> String {
        format!("0000:{gpu:02x}:00.0")
    }

    fn uuid(gpu: u32) -> GpuUuid {
        format!("GPU-{gpu}").into()
    }

    /// GPUs as (bus, UUID or `None`, minor).
    fn view(gpus: &[(u32, Option<u32>, u32)]) -> KernelView {
        let gpu = |(at, gpu, minor): &(u32, Option<u32>, u32)| {
            (bus(*at), KernelGpu { uuid: gpu.map(uuid), minor: Some(*minor) })
        };
        KernelView { gpus: Some(gpus.iter().map(gpu).collect()) }
    }

    /// GPUs as (bus or `None`, UUID or `None`).
    fn nvml(gpus: &[(Option<u32>, Option<u32>)]) -> Vec<NvmlGpu> {
        gpus.iter().map(|(at, gpu)| NvmlGpu { bus_id: at.map(bus), uuid: gpu.map(uuid) }).collect()
    }

    #[track_caller]
    fn check(kernel: &KernelView, listed: &[(Option<u32>, Option<u32>)], unlisted: &[u32], vanished: &[u32]) {
        let found = kernel.differs(&nvml(listed));
        let expected = (!unlisted.is_empty() || !vanished.is_empty()).then(|| Difference {
            counts: GpuCounts { kernel: kernel.gpus.as_ref().map_or(0, BTreeMap::len), nvml: listed.len() },
            unlisted: unlisted.iter().map(|at| bus(*at)).collect(),
            vanished: vanished.iter().map(|gpu| uuid(*gpu)).collect(),
        });
        assert_eq!(found, expected);
    }

    #[test]
    fn h2_lists_of_kernel_and_nvml_are_compared() {
        let two = view(&[(0, Some(0), 0), (1, Some(1), 1)]);
        let (first, second) = ((Some(0), Some(0)), (Some(1), Some(1)));
        check(&two, &[first, second], &[], &[]);
        check(&two, &[second, first], &[], &[]);
        check(&two, &[], &[0, 1], &[]);
        check(&two, &[first], &[1], &[]);
        check(&two, &[first, (Some(1), Some(9))], &[1], &[9]);
        check(&two, &[first, second, (Some(2), Some(2))], &[], &[2]);
        // A GPU that NVML cannot read has no bus id, or not even a UUID.
        check(&two, &[first, (None, Some(1))], &[], &[]);
        check(&two, &[first, (None, None)], &[1], &[]);
        // An uninitialised GPU has no UUID in the kernel.
        let raw = view(&[(0, Some(0), 0), (1, None, 1)]);
        check(&raw, &[first, second], &[], &[]);
        check(&raw, &[first], &[1], &[]);
        check(&raw, &[first, (None, Some(1))], &[1], &[]);
        // An unloaded module has no list to compare with.
        check(&KernelView::default(), &[first], &[], &[]);
        check(&view(&[]), &[first], &[], &[0]);
    }

    #[test]
    fn h1_gone_or_changed_gpu_is_contradicted() {
        let gpu = |minor: u32| {
            let json = include_str!("numbers.golden.json");
            let document: serde_json::Value = serde_json::from_str(json).unwrap();
            let gpu: Gpu = serde_json::from_value(document["gpus"][0].clone()).unwrap();
            Gpu { uuid: uuid(7), minor, pci_bus_id: bus(3), ..gpu }
        };
        let check = |kernel: &[(u32, Option<u32>, u32)], contradicts: bool| {
            assert_eq!(view(kernel).contradicts(&gpu(1)), contradicts, "{kernel:?}");
            let is_known = kernel.iter().any(|(_, gpu, _)| gpu.is_some());
            assert_eq!(view(kernel).shows(&gpu(1)), !contradicts && is_known, "{kernel:?}");
        };
        check(&[(3, Some(7), 1)], false);
        check(&[(3, None, 1)], false);
        check(&[(4, Some(7), 1)], false);
        check(&[(3, Some(7), 0)], true);
        check(&[(3, None, 0)], true);
        check(&[(3, Some(8), 1)], true);
        check(&[(4, None, 1)], true);
        check(&[], true);
        assert!(!KernelView::default().contradicts(&gpu(1)) && !KernelView::default().shows(&gpu(1)));
    }

    #[test]
    fn gpus_are_read_from_proc_and_the_pci_driver() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let kernel = Kernel::new(&dir.path().join("proc"), &dir.path().join("sys"), dir.path().join("dev"));
        assert_eq!(kernel.read(), KernelView::default());
        let before = kernel.listing();
        write("proc/driver/nvidia/gpus/0000:00:00.0/information", "GPU UUID: \t GPU-0\nDevice Minor: 0\n");
        write("proc/driver/nvidia/gpus/0000:03:00.0/information", "GPU Excluded: Yes\n");
        for (at, class) in
            [(0, "0x030200"), (1, "0x030000"), (2, "0x020000"), (3, "0x030200"), (4, "0x030200")]
        {
            write(&format!("sys/bus/pci/drivers/nvidia/{}/class", bus(at)), class);
        }
        write(&format!("sys/bus/pci/drivers/nvidia/{}/physfn", bus(4)), "");
        write("sys/bus/pci/drivers/nvidia/module", "");
        let mut expected = view(&[(0, Some(0), 0)]);
        expected.gpus.as_mut().unwrap().insert(bus(1), KernelGpu::default());
        assert_eq!(kernel.read_within(Duration::from_secs(20)), Some(expected));
        let without_nodes = kernel.listing();
        assert_ne!(without_nodes, before);
        write("dev/nvidiactl", "");
        assert_eq!(kernel.listing(), without_nodes);
        write("dev/nvidia0", "");
        assert_ne!(kernel.listing(), without_nodes);
    }

    #[test]
    fn information_of_any_form_is_parsed() {
        let text = "Model: \t\t NVIDIA L4\nGPU UUID: \t GPU-9\nDevice Minor: \t 3\nGPU Excluded:\t No\n";
        assert_eq!(parse(text), Some(KernelGpu { uuid: Some("GPU-9".into()), minor: Some(3) }));
        let raw = "GPU UUID: \t GPU-????????-????-????-????-????????????\nDevice Minor: \t 3\n";
        assert_eq!(parse(raw), Some(KernelGpu { uuid: None, minor: Some(3) }));
        assert_eq!(parse("GPU UUID: \t GPU-9\nGPU Excluded:\t Yes\n"), None);
        assert_eq!(parse(""), Some(KernelGpu::default()));
    }
}
