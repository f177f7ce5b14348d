//! The kinds of the devices of a slice, and the annotation that names them.
//!
//! The controller reads the metadata of all slices and the devices of few. Slices with the same
//! annotation have the same kinds of devices, so it reads one of them. The value is a fingerprint of
//! what class selectors see of the first device of each kind, without what differs between equal GPUs.

use crate::wire::{Content, Device};
use divvy_api::Quantity;
use divvy_api::names::DRIVER;
use k8s_openapi::api::resource::v1::{self as api, DeviceAttribute, DeviceCapacity};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// The annotation of a slice with the fingerprint of its kinds.
pub const ANNOTATION: &str = "gpu.divvy.dev/device-kinds";
/// Bytes of a fingerprint. A node cannot find a second content for 16 bytes of SHA-256.
const FINGERPRINT_BYTES: usize = 16;
/// Attributes that differ between equal GPUs, or change with the MIG mode of one.
const OF_ONE_GPU: [&str; 7] = [
    "uuid",
    "parentUUID",
    "nvlinkGroup",
    "nvlinkPeers",
    "resource.kubernetes.io/pciBusID",
    "resource.kubernetes.io/pcieRoot",
    "resource.kubernetes.io/numaNode",
];

/// Devices of one kind are equal for the purposes of class selection.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kind {
    /// `gpu`, `share`, `mig`, `timeslice` or `mps`.
    pub type_: String,
    pub product: String,
    pub profile: Option<String>,
}

impl Kind {
    /// The kind of a device with these attributes. `None` if it has no type.
    pub fn of(attributes: &BTreeMap<String, DeviceAttribute>) -> Option<Self> {
        let text = |name: &str| {
            let qualified = || attributes.get(&format!("{DRIVER}/{name}"));
            attributes.get(name).or_else(qualified).and_then(|value| value.string.clone())
        };
        let type_ = text("type")?;
        Some(Self { type_, product: text("productName").unwrap_or_default(), profile: text("profile") })
    }
}

/// The parts of a device that class selectors see.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    pub attributes: &'a BTreeMap<String, DeviceAttribute>,
    pub capacity: Option<&'a BTreeMap<String, DeviceCapacity>>,
    pub allow_multiple_allocations: bool,
}

impl<'a> Facts<'a> {
    fn of_wire(device: &'a Device) -> Option<Self> {
        Some(Self {
            attributes: device.attributes.as_deref()?,
            capacity: device.capacity.as_deref(),
            allow_multiple_allocations: device.allow_multiple_allocations.unwrap_or(false),
        })
    }

    /// The facts of a device from the server. `None` if it has no attributes.
    pub fn of(device: &'a api::Device) -> Option<Self> {
        Some(Self {
            attributes: device.attributes.as_ref()?,
            capacity: device.capacity.as_ref(),
            allow_multiple_allocations: device.allow_multiple_allocations.unwrap_or(false),
        })
    }
}

/// The fingerprint of the kinds of these devices. The first device of a kind represents it, and
/// devices without a type do not count.
pub fn fingerprint<'a>(devices: impl IntoIterator<Item = Facts<'a>>) -> String {
    let mut kinds = BTreeMap::new();
    for device in devices {
        if let Some(kind) = Kind::of(device.attributes) {
            kinds.entry(kind).or_insert(device);
        }
    }
    let mut hash = Sha256::new();
    for device in kinds.into_values() {
        // Writing to a hash cannot fail.
        let _ = serde_json::to_writer(&mut hash, &Normal::of(device));
    }
    hash.finalize()[..FINGERPRINT_BYTES].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The fingerprint that the annotation of a slice must have.
pub(crate) fn of_content(content: &Content) -> String {
    fingerprint(content.devices.iter().filter_map(Facts::of_wire))
}

/// The value of the annotation.
pub fn annotation(metadata: &ObjectMeta) -> Option<&str> {
    metadata.annotations.as_ref()?.get(ANNOTATION).map(String::as_str)
}

/// The normal form of a device: equal GPUs have the same one, and quantities are compared by value.
#[derive(Serialize)]
struct Normal<'a> {
    attributes: BTreeMap<&'a str, &'a DeviceAttribute>,
    capacity: BTreeMap<&'a str, String>,
    allow_multiple_allocations: bool,
}

impl<'a> Normal<'a> {
    fn of(device: Facts<'a>) -> Self {
        let of_kind = |name: &str| {
            let name = name.strip_prefix(DRIVER).and_then(|rest| rest.strip_prefix('/')).unwrap_or(name);
            !OF_ONE_GPU.contains(&name)
        };
        let attributes = device.attributes.iter().filter(|(name, _)| of_kind(name));
        let amount = |capacity: &DeviceCapacity| match capacity.value.0.parse::<Quantity>() {
            Ok(quantity) => quantity.as_nano().to_string(),
            Err(_) => capacity.value.0.clone(),
        };
        let capacity = device.capacity.into_iter().flatten();
        Self {
            attributes: attributes.map(|(name, value)| (name.as_str(), value)).collect(),
            capacity: capacity.map(|(name, value)| (name.as_str(), amount(value))).collect(),
            allow_multiple_allocations: device.allow_multiple_allocations,
        }
    }
}
