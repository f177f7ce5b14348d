//! Attributes, capacities and counters of the DRA API.
//!
//! The names are those of NVIDIA's DRA driver with our domain, so selectors can be converted by
//! search and replace. Values that the API would reject are truncated or left out, so that an
//! unusual product name does not make the whole node unpublishable.

use crate::amounts::{Amounts, DIMENSIONS, MEMORY};
use divvy_api::Quantity;
use divvy_model::inventory::{Gpu, Inventory};
use k8s_openapi::api::resource::v1::{DeviceAttribute, DeviceCapacity};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as WireQuantity;
use std::collections::BTreeMap;

/// The attributes that all devices of a GPU have in common.
pub(crate) fn common(node: &Inventory, gpu: &Gpu) -> BTreeMap<String, DeviceAttribute> {
    let (major, minor) = gpu.compute_capability;
    let (cuda_major, cuda_minor) = node.cuda_version;
    let cuda = (cuda_major > 0).then(|| version(&format!("{cuda_major}.{cuda_minor}.0")));
    [
        ("productName", text(&gpu.product)),
        ("brand", text(&gpu.brand)),
        ("architecture", text(&gpu.architecture)),
        ("cudaComputeCapability", Some(version(&format!("{major}.{minor}.0")))),
        ("driverVersion", semantic(&node.driver_version).map(|text| version(&text))),
        ("cudaDriverVersion", cuda),
        ("addressingMode", gpu.addressing_mode.as_deref().and_then(text)),
        ("resource.kubernetes.io/pciBusID", text(&gpu.pci_bus_id)),
        ("resource.kubernetes.io/pcieRoot", gpu.pcie_root.as_deref().and_then(text)),
        ("resource.kubernetes.io/numaNode", gpu.numa_node.map(|node| int(node.into()))),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some((name.to_owned(), value?)))
    .collect()
}

/// Converts a driver version such as `580.95.05` to a semantic version without leading zeros.
fn semantic(text: &str) -> Option<String> {
    let mut numbers = text.split('.').map(|part| part.parse::<u32>().ok());
    let major = numbers.next()??;
    let mut next = || numbers.next().map_or(Some(0), |number| number);
    Some(format!("{major}.{}.{}", next()?, next()?))
}

/// The amounts as API quantities.
pub(crate) fn quantities(amounts: &Amounts) -> [WireQuantity; DIMENSIONS.len()] {
    std::array::from_fn(|dimension| match (dimension, amounts[dimension]) {
        (MEMORY, bytes) => Quantity::bytes(bytes).into(),
        // Fast path for small counts, which are canonical already.
        (_, count @ 0..1000) => WireQuantity(count.to_string()),
        (_, count) => Quantity::count(count).into(),
    })
}

pub(crate) fn capacities(quantities: &[WireQuantity; DIMENSIONS.len()]) -> BTreeMap<String, DeviceCapacity> {
    let capacity = |value: &WireQuantity| DeviceCapacity { value: value.clone(), request_policy: None };
    DIMENSIONS
        .iter()
        .zip(quantities)
        .map(|((name, _), value)| ((*name).to_owned(), capacity(value)))
        .collect()
}

/// A string attribute, or `None` for an empty text. The API limits it to 64 bytes.
fn text(text: &str) -> Option<DeviceAttribute> {
    (!text.is_empty()).then(|| string(text))
}

pub(crate) fn string(text: &str) -> DeviceAttribute {
    let end = text.floor_char_boundary(crate::validate::ATTRIBUTE_MAX_BYTES);
    DeviceAttribute { string: Some(text[..end].to_owned()), ..Default::default() }
}

fn version(text: &str) -> DeviceAttribute {
    DeviceAttribute { version: Some(text.to_owned()), ..Default::default() }
}

pub(crate) fn int(value: i64) -> DeviceAttribute {
    DeviceAttribute { int: Some(value), ..Default::default() }
}

/// `None` for an empty list or map, because the API omits them.
pub(crate) fn non_empty<T>(list: T) -> Option<T>
where
    T: PartialEq + Default,
{
    (list != T::default()).then_some(list)
}
