//! The file `gpu-numbers.json` in the state directory: the numbers of the GPUs that this node has or
//! misses, and their last descriptions, so that a missing GPU stays published after a restart. It
//! also names the GPUs that were read in a boot, because minors are valid only within one boot.
//!
//! A number must survive a power failure, and the file changes only when the hardware does, so it is
//! replaced as a whole, with fsync. A damaged file is renamed and ignored. A single description in
//! an unknown form is dropped; its number stays.

use divvy_api::GpuUuid;
use divvy_model::inventory::{Gpu, Inventory, Mig, MigMode, MigToggle};
use divvy_model::numbers::GpuNumbers;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};

const FILE: &str = "gpu-numbers.json";
const VERSION: u32 = 1;

/// The file and its contents.
pub(super) struct GpuNumbersFile {
    path: PathBuf,
    pub(super) numbers: GpuNumbers,
    /// Descriptions from the last reading, for GPUs that cannot be read now.
    pub(super) last: Inventory,
    /// The boot of the last change, and the GPUs that were read in it.
    pub(super) boot: Option<Boot>,
    /// Since when a GPU is missing, in seconds since the Unix epoch.
    pub(super) missing_since: BTreeMap<GpuUuid, u64>,
    written: Vec<u8>,
}

/// The GPUs whose minors are known in one boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Boot {
    /// The kernel's boot id.
    pub(super) id: String,
    pub(super) read: BTreeSet<GpuUuid>,
    /// GPUs that operators have, for example to reset them.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(super) handed_over: BTreeSet<GpuUuid>,
}

#[derive(Serialize, Deserialize)]
struct Document {
    version: u32,
    numbers: GpuNumbers,
    gpus: Vec<Box<RawValue>>,
    // Builds before this field ignore it and drop it when they write the file. Then the boot is
    // unknown, which is safe.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    boot: Option<Boot>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    missing_since: BTreeMap<GpuUuid, u64>,
}

impl Document {
    fn empty() -> Self {
        Self {
            version: VERSION,
            numbers: GpuNumbers::default(),
            gpus: Vec::new(),
            boot: None,
            missing_since: BTreeMap::new(),
        }
    }
}

/// Why the file could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {path}; GPU numbers may change at the next start")]
pub(super) struct StoreError {
    path: PathBuf,
    #[source]
    cause: std::io::Error,
}

impl GpuNumbersFile {
    /// Reads the file. A missing or damaged file counts as empty.
    pub(super) fn load(state_dir: &Path) -> Self {
        let path = state_dir.join(FILE);
        remove_temporary_files(state_dir, FILE);
        let written = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(cause) => {
                if cause.kind() != std::io::ErrorKind::NotFound {
                    tracing::warn!(
                        path = %path.display(), %cause,
                        "cannot read the GPU numbers; starting without them"
                    );
                }
                Vec::new()
            }
        };
        let document = match parse(&written) {
            Ok(document) => document.unwrap_or_else(Document::empty),
            Err(cause) => {
                let damaged = path.with_extension("json.damaged");
                let moved = std::fs::rename(&path, &damaged).is_ok();
                tracing::warn!(
                    path = %path.display(), renamed_to = %damaged.display(), moved, cause,
                    "GPU numbers are damaged; GPUs are numbered again"
                );
                Document::empty()
            }
        };
        let mut gpus: Vec<Gpu> =
            document.gpus.iter().filter_map(|gpu| serde_json::from_str(gpu.get()).ok()).collect();
        // A description without its number, or with another one, is dropped.
        gpus.retain(|gpu| {
            document.numbers.iter().any(|(uuid, number)| (uuid, number) == (&gpu.uuid, gpu.number))
        });
        let last = Inventory { gpus, ..Inventory::default() };
        let Document { numbers, boot, missing_since, .. } = document;
        Self { path, numbers, last, boot, missing_since, written }
    }

    /// Stores the inventory's numbers and descriptions, if they changed.
    pub(super) fn store(&mut self, inventory: &Inventory) -> Result<(), StoreError> {
        let gpus =
            inventory.gpus.iter().map(description).map(|gpu| to_raw_value(&gpu)).collect::<Result<_, _>>();
        let bytes = gpus.and_then(|gpus| {
            serde_json::to_vec(&Document {
                version: VERSION,
                numbers: self.numbers.clone(),
                gpus,
                boot: self.boot.clone(),
                missing_since: self.missing_since.clone(),
            })
        });
        let failed = |cause| StoreError { path: self.path.clone(), cause };
        let bytes = bytes.map_err(|cause| failed(cause.into()))?;
        if bytes != self.written {
            write(&self.path, &bytes).map_err(failed)?;
            self.written = bytes;
        }
        Ok(())
    }
}

/// `None` for an empty file, which a power failure during the first start may leave.
fn parse(bytes: &[u8]) -> Result<Option<Document>, String> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let document: Document = serde_json::from_slice(bytes).map_err(|cause| cause.to_string())?;
    match document.version {
        VERSION => Ok(Some(document)),
        newer => Err(format!("format {newer} is not format {VERSION}")),
    }
}

/// The description that survives a restart: without instances, conditions and presence.
fn description(gpu: &Gpu) -> Gpu {
    let mut gpu = gpu.clone();
    gpu.conditions.clear();
    gpu.presence = divvy_model::inventory::Presence::Missing;
    if let Mig::Supported { mode, toggle, instances, .. } = &mut gpu.mig {
        instances.clear();
        if *toggle == MigToggle::Live {
            *mode = MigMode::Off;
        }
    }
    gpu
}

/// Removes temporary files of interrupted writes of a file, of this process or another.
pub(super) fn remove_temporary_files(state_dir: &Path, file: &str) {
    for path in std::fs::read_dir(state_dir).into_iter().flatten().flatten().map(|entry| entry.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(file) && name.ends_with(".part") {
            // If this fails, the next start tries again.
            let _ = std::fs::remove_file(&path);
        }
    }
}

/// Replaces a file as a whole, with fsync.
pub(super) fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    match write_once(path, bytes) {
        // Another instance of the driver that just started removed the temporary file.
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => write_once(path, bytes),
        result => result,
    }
}

fn write_once(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir)?;
    // Two instances may write during an upgrade, and in containers both have process id 1.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let temporary = path.with_extension(format!("json.{}-{}.part", std::process::id(), now.as_nanos()));
    let mut file = std::fs::File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)?;
    std::fs::File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use divvy_model::inventory::{MigProfile, Presence};
    use divvy_model::numbers::GpuNumber;
    use divvy_model::placement::Placement;

    fn gpu(number: u32) -> Gpu {
        Gpu {
            number: GpuNumber(number),
            uuid: format!("GPU-{number}").into(),
            minor: number,
            product: "NVIDIA L4".to_owned(),
            brand: "Nvidia".to_owned(),
            architecture: "Ada Lovelace".to_owned(),
            compute_capability: (8, 9),
            memory_bytes: 24_152_899_584,
            addressing_mode: None,
            pci_bus_id: "0000:1a:00.0".to_owned(),
            pcie_root: Some("pci0000:16".to_owned()),
            numa_node: Some(0),
            nvlink_group: None,
            nvlink_peers: 0,
            mig: Mig::Unsupported,
            presence: Presence::Present,
            conditions: Vec::new(),
            policy: Default::default(),
        }
    }

    fn mig_gpu(number: u32) -> Gpu {
        let profile = MigProfile {
            id: 19,
            index: 0,
            name: "1g.10gb".to_owned(),
            memory_mib: 9_984,
            multiprocessors: 16,
            copy_engines: 1,
            decoders: 1,
            encoders: 0,
            jpeg_engines: 1,
            ofa_engines: 0,
            max_instances: 7,
            placements: vec![Placement { start: 0, size: 1 }],
        };
        let mig = Mig::Supported {
            mode: MigMode::Off,
            toggle: MigToggle::Live,
            profiles: vec![profile],
            instances: Vec::new(),
        };
        Gpu { mig, ..gpu(number) }
    }

    fn store_sample(dir: &Path) -> Vec<u8> {
        let mut file = GpuNumbersFile::load(dir);
        let gpus: Vec<Gpu> = vec![gpu(0), mig_gpu(2)];
        for gpu in &gpus {
            file.numbers.number(&gpu.uuid, gpu.minor);
        }
        file.boot = Some(Boot {
            id: "b-1".to_owned(),
            read: [gpus[0].uuid.clone()].into(),
            handed_over: BTreeSet::new(),
        });
        file.missing_since = [(gpus[1].uuid.clone(), 1_700_000_000)].into();
        file.store(&Inventory { gpus, ..Inventory::default() }).expect("stored");
        std::fs::read(dir.join(FILE)).expect("file")
    }

    const GOLDEN: &str = include_str!("numbers.golden.json");

    #[test]
    fn bytes_of_the_file_do_not_change() {
        let dir = tempfile::tempdir().expect("temporary directory");
        assert_eq!(String::from_utf8(store_sample(dir.path())).expect("utf-8"), GOLDEN.trim_end());
    }

    #[test]
    fn stored_gpu_is_missing_with_its_number_after_restart() {
        let dir = tempfile::tempdir().expect("temporary directory");
        store_sample(dir.path());
        let file = GpuNumbersFile::load(dir.path());
        let missing = |gpu: Gpu| Gpu { presence: Presence::Missing, ..gpu };
        assert_eq!(file.last.gpus, [missing(gpu(0)), missing(mig_gpu(2))]);
        assert_eq!(file.numbers.iter().count(), 2);
        assert_eq!(file.boot.map(|boot| (boot.id, boot.read.len())), Some(("b-1".to_owned(), 1)));
        assert_eq!(file.missing_since.len(), 1);
    }

    #[test]
    fn file_of_an_earlier_build_has_no_boot() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let (earlier, _) = GOLDEN.split_once(",\"boot\"").expect("new fields at the end");
        std::fs::write(dir.path().join(FILE), format!("{earlier}}}")).expect("file");
        let file = GpuNumbersFile::load(dir.path());
        assert_eq!((file.last.gpus.len(), file.boot, file.missing_since.len()), (2, None, 0));
    }

    #[test]
    fn unknown_description_is_dropped_but_its_number_stays() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let other = GOLDEN.replace("\"product\":\"NVIDIA L4\"", "\"product\":{\"name\":\"L4\"},\"more\":1");
        std::fs::write(dir.path().join(FILE), other).expect("file");
        let file = GpuNumbersFile::load(dir.path());
        assert_eq!((file.last.gpus.len(), file.numbers.iter().count()), (0, 2));
    }

    #[test]
    fn temporary_files_are_removed_at_the_next_start() {
        let dir = tempfile::tempdir().expect("temporary directory");
        store_sample(dir.path());
        std::fs::write(dir.path().join("gpu-numbers.json.1-2.part"), "half").expect("file");
        assert_eq!(GpuNumbersFile::load(dir.path()).numbers.iter().count(), 2);
        let names =
            std::fs::read_dir(dir.path()).expect("directory").map(|entry| entry.expect("entry").file_name());
        assert_eq!(names.collect::<Vec<_>>(), [FILE]);
    }

    #[test]
    fn damaged_file_is_renamed_and_ignored() {
        let newer = GOLDEN.replacen("\"version\":1", "\"version\":2", 1);
        let cut = (1..GOLDEN.trim_end().len()).map(|at| &GOLDEN.as_bytes()[..at]);
        for bytes in cut.chain([newer.as_bytes(), b"\xff\0", b"[]"]) {
            let dir = tempfile::tempdir().expect("temporary directory");
            std::fs::write(dir.path().join(FILE), bytes).expect("file");
            let file = GpuNumbersFile::load(dir.path());
            assert_eq!(file.numbers, GpuNumbers::default());
            assert!(
                dir.path().join("gpu-numbers.json.damaged").exists(),
                "{:?}",
                String::from_utf8_lossy(bytes)
            );
        }
    }
}
