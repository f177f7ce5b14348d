//! GPU models: one data file each in `models/`, with the source of every figure.
//!
//! The figures are data because formulas are wrong: a `1g.20gb` of an H100 has 26 multiprocessors,
//! not 32, and profile ids are opaque. Figures with `verified = false` were derived or come from
//! documents; all others were printed by a real card. A file is parsed when its model is first
//! used. [`node`] describes nodes with these GPUs as the node daemon does.

pub mod list;
pub mod node;

pub use divvy_model::Placement;
pub use list::{ListError, parse_list};

use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::OnceLock;

macro_rules! files {
    ($($key:literal),* $(,)?) => {
        [$(File {
            key: $key,
            text: include_str!(concat!("../models/", $key, ".toml")),
            row: OnceLock::new(),
        },)*]
    };
}

struct File {
    key: &'static str,
    text: &'static str,
    row: OnceLock<GpuModel>,
}

static FILES: [File; 16] = files![
    "T4",
    "L4",
    "L40S",
    "A10",
    "A30-24GB",
    "A100-SXM4-40GB",
    "A100-SXM4-80GB",
    "H100-SXM5-80GB",
    "H100-PCIe-80GB",
    "H100-NVL-94GB",
    "GH200-96GB",
    "H200-SXM-141GB",
    "B200-180GB",
    "GB200-186GB",
    "B300-269GB",
    "RTX-PRO-6000",
];

/// A model of the catalogue.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Model(&'static GpuModel);

/// Properties that all GPUs of a model share.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuModel {
    /// Name of the model in the catalogue: `H100-SXM5-80GB`.
    pub key: String,
    /// `nvmlDeviceGetName`.
    pub product: String,
    /// Source of the figures in this file, except those of profiles.
    pub source: String,
    pub verified: bool,
    /// `nvmlBrandType_t`.
    pub brand: u32,
    pub architecture: Architecture,
    pub compute_capability: (u32, u32),
    /// PCI device id, without the vendor.
    pub device_id: u16,
    /// Whether it is a display controller (PCI class 0x0300) instead of a 3D controller (0x0302).
    #[serde(default)]
    pub display: bool,
    pub memory_total_mib: u64,
    /// Part of the total memory that the driver reserves.
    pub memory_reserved_mib: u64,
    pub bar1_mib: u64,
    pub multiprocessors: u32,
    pub power_watts: u32,
    pub pcie_generation: u32,
    pub encoders: u32,
    pub decoders: u32,
    #[serde(default)]
    pub jpeg_engines: u32,
    #[serde(default)]
    pub ofa_engines: u32,
    /// Number of NVLink links; 0 without NVLink.
    #[serde(default)]
    pub nvlink_links: u32,
    /// Whether the links lead to NVSwitches, so that all GPUs of the node reach each other.
    #[serde(default)]
    pub nvswitch: bool,
    /// Bandwidth of one link in each direction, in MiB/s.
    #[serde(default)]
    pub nvlink_mib_per_second: u32,
    pub addressing: Addressing,
    /// Whether the GPU registers with a fabric manager.
    #[serde(default)]
    pub fabric: bool,
    /// Whether each GPU has its own PCI domain (Grace).
    #[serde(default)]
    pub own_pci_domain: bool,
    pub time_slicing: TimeSlicing,
    /// Absent on GPUs without MIG.
    pub mig: Option<MigModel>,
}

/// `nvmlDeviceArchitecture_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub enum Architecture {
    Turing = 6,
    Ampere = 7,
    Ada = 8,
    Hopper = 9,
    Blackwell = 10,
}

/// How the GPU reaches pageable memory: `nvmlDeviceAddressingModeType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Addressing {
    Hmm = 1,
    Ats = 2,
}

/// How processes without MPS share the GPU, or an instance of it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TimeSlicing {
    /// Default time slice of a process, in microseconds.
    pub slice_us: u32,
    /// Time that a change to another process takes, in microseconds. No process runs meanwhile.
    pub switch_us: u32,
    pub source: String,
    pub verified: bool,
}

/// MIG geometry of a model.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigModel {
    /// Number of memory slices. Placements lie in `0..grid`.
    pub grid: u32,
    /// Number of compute slices, which is also the maximum number of instances.
    pub compute_slices: u32,
    pub toggle: Toggle,
    #[serde(rename = "profile")]
    pub profiles: Vec<GiProfile>,
}

/// Requirement for a change of the MIG mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Toggle {
    /// A GPU reset. The mode is stored on the board and survives a reboot.
    Reset,
    /// An idle GPU. The mode is lost when the driver is unloaded.
    Live,
}

/// A GPU-instance profile.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GiProfile {
    /// `NVML_GPU_INSTANCE_PROFILE_*`.
    pub index: u32,
    /// Column ID of `nvidia-smi mig -lgip`; opaque.
    pub id: u32,
    pub name: String,
    pub memory_mib: u64,
    /// Multiprocessors.
    pub sm: u32,
    /// Copy engines.
    pub ce: u32,
    /// Decoders.
    pub dec: u32,
    /// Encoders.
    #[serde(default)]
    pub enc: u32,
    /// JPEG engines.
    pub jpg: u32,
    /// Optical-flow engines.
    pub ofa: u32,
    /// Maximum number of instances at once.
    pub instances: u32,
    /// Number of memory slices.
    pub size: u32,
    /// Allowed first memory slices.
    pub starts: Vec<u32>,
    pub source: String,
    pub verified: bool,
}

/// A compute-instance profile inside a GPU-instance profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CiProfile {
    /// `NVML_COMPUTE_INSTANCE_PROFILE_*`; the id is the same number.
    pub index: u32,
    /// Compute slices.
    pub slices: u32,
    pub sm: u32,
    /// Maximum number of instances in a GPU instance.
    pub instances: u32,
}

/// The catalogue has no model of that name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no GPU model {wanted:?} in the catalogue; known models: {}", keys().collect::<Vec<_>>().join(", "))]
pub struct NoSuchModel {
    wanted: String,
}

/// Names of all models.
pub fn keys() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|file| file.key)
}

/// All models.
pub fn all() -> impl Iterator<Item = Model> {
    FILES.iter().map(|file| Model(file.row()))
}

/// The model with that name, or the only one with that prefix (`H200`, `A100-SXM4-40`).
pub fn find(wanted: &str) -> Result<Model, NoSuchModel> {
    let lower = wanted.to_ascii_lowercase();
    let is = |file: &&File| file.key.eq_ignore_ascii_case(wanted);
    let mut begins = FILES.iter().filter(|file| file.key.to_ascii_lowercase().starts_with(&lower));
    let file = match FILES.iter().find(is) {
        Some(file) => Some(file),
        None => match (begins.next(), begins.next()) {
            (Some(file), None) if !wanted.is_empty() => Some(file),
            _ => None,
        },
    };
    file.map(|file| Model(file.row())).ok_or_else(|| NoSuchModel { wanted: wanted.to_owned() })
}

impl File {
    fn row(&self) -> &GpuModel {
        // The files are compiled in, and a test parses each of them.
        self.row.get_or_init(|| match toml::from_str(self.text) {
            Ok(row) => row,
            Err(error) => panic!("models/{}.toml: {error}", self.key),
        })
    }
}

impl Model {
    /// The properties of the model.
    pub const fn row(self) -> &'static GpuModel {
        self.0
    }
}

impl GpuModel {
    /// The GPU-instance profile with that id.
    pub fn profile(&self, id: u32) -> Option<&GiProfile> {
        self.mig.as_ref()?.profiles.iter().find(|profile| profile.id == id)
    }

    /// The GPU-instance profile with that index.
    pub fn profile_at(&self, index: u32) -> Option<&GiProfile> {
        self.mig.as_ref()?.profiles.iter().find(|profile| profile.index == index)
    }

    /// The compute-instance profiles in a GPU instance of that profile, by index.
    pub fn ci_profiles<'a>(&'a self, gi: &'a GiProfile) -> impl Iterator<Item = CiProfile> + 'a {
        let slices = gi.slices();
        let per_slice = self.profile_at(0).map_or(gi.sm, |one| one.sm);
        let offered = CI_SIZES.iter().filter(move |(_, size)| match slices {
            7 => *size != 6 && *size != 8,
            _ => *size == slices || (*size < slices && *size <= 2),
        });
        let plain = offered.map(move |(index, size)| CiProfile {
            index: *index,
            slices: *size,
            sm: if *size == slices { gi.sm } else { per_slice * size },
            instances: slices / size,
        });
        // Media profiles have a second one-slice profile that carries the media engines.
        let media = CiProfile { index: CI_REV1, slices: 1, sm: per_slice, instances: 1 };
        plain.chain(gi.has_media().then_some(media))
    }

    /// The compute-instance profile with that id in a GPU instance of that profile.
    pub fn ci_profile(&self, gi: &GiProfile, id: u32) -> Option<CiProfile> {
        self.ci_profiles(gi).find(|profile| profile.index == id)
    }
}

/// Index and compute slices of the compute-instance profiles without media engines.
const CI_SIZES: &[(u32, u32)] = &[(0, 1), (1, 2), (2, 3), (3, 4), (4, 7), (5, 8), (6, 6)];
/// `NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1`.
const CI_REV1: u32 = 7;

impl MigModel {
    /// Whether the memory slice has no compute slice, so that no one-slice instance can use it.
    pub fn is_dead(&self, slice: u32) -> bool {
        let ones = self.profiles.iter().filter(|profile| profile.index == 0);
        !ones.flat_map(GiProfile::placements).any(|placement| placement.slices().contains(&slice))
    }

    /// The profile of the whole GPU. Its engines are all that the GPU has.
    pub fn whole(&self) -> Option<&GiProfile> {
        self.profiles.iter().find(|profile| profile.size == self.grid)
    }
}

impl GiProfile {
    /// The allowed placements, ascending.
    pub fn placements(&self) -> impl Iterator<Item = Placement> + '_ {
        self.starts.iter().map(|&start| Placement { start, size: self.size })
    }

    /// Number of compute slices, derived from the index.
    pub const fn slices(&self) -> u32 {
        match self.index {
            0 | 7 | 9 | 0xA | 0xD | 0xF => 1,
            1 | 8 | 0xB | 0xE | 0x10 => 2,
            2 | 0x11 => 3,
            3 | 0xC => 4,
            5 => 8,
            6 => 6,
            _ => 7,
        }
    }

    /// Whether it is a `+me` profile, of which only one GPU instance can exist because the GPU has
    /// one set of these engines.
    pub const fn has_media(&self) -> bool {
        matches!(self.index, 7 | 8)
    }

    /// Whether it is a `+gfx` profile, which supports graphics.
    pub const fn has_graphics(&self) -> bool {
        matches!(self.index, 0xA | 0xB | 0xC | 0x11)
    }

    /// Number of engines of each kind: copy, decode, encode, JPEG, optical flow.
    pub const fn engines(&self) -> [u32; 5] {
        [self.ce, self.dec, self.enc, self.jpg, self.ofa]
    }
}

impl From<Model> for String {
    fn from(model: Model) -> Self {
        model.0.key.clone()
    }
}

impl TryFrom<String> for Model {
    type Error = NoSuchModel;

    fn try_from(key: String) -> Result<Self, NoSuchModel> {
        find(&key)
    }
}

impl PartialEq for Model {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for Model {}

impl fmt::Debug for Model {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0.key)
    }
}
