//! The built-in tour: claims for each mode of one GPU, fitted to the GPUs of the node.

use super::workloads::{self, Workloads};
use anyhow::{Context, Result};
use divvy_api::Quantity;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};

/// Placeholder for the UUID of the GPU of a scene, which is random.
const TOUR_GPU: &str = "TOUR-GPU-UUID";
const MIB_PER_GIB: u64 = 1024;

/// A scene of the tour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scene {
    Shares,
    Mig,
    Mps,
    Timeslice,
    Whole,
}

impl Scene {
    pub(crate) const ALL: [Self; 5] = [Self::Shares, Self::Mig, Self::Mps, Self::Timeslice, Self::Whole];

    const fn title(self) -> &'static str {
        match self {
            Self::Shares => "Shares: parts of the memory and of the time of one GPU",
            Self::Mig => "MIG: instances, created on demand",
            Self::Mps => "MPS: clients of one control daemon, with limits",
            Self::Timeslice => "Time-slicing: slots of one GPU, until none is free",
            Self::Whole => "Whole GPU: one claim gets all of it",
        }
    }

    const fn text(self) -> &'static str {
        match self {
            Self::Shares => include_str!("tour/shares.yaml"),
            Self::Mig => include_str!("tour/mig.yaml"),
            Self::Mps => include_str!("tour/mps.yaml"),
            Self::Timeslice => include_str!("tour/timeslice.yaml"),
            Self::Whole => include_str!("tour/whole.yaml"),
        }
    }

    /// The claims of the scene, or why no GPU of the node can show it.
    pub(crate) fn claims(self, slices: &[ResourceSlice]) -> Result<Result<Workloads, String>> {
        let gpu = match self {
            Self::Mig => match mig_gpu(slices) {
                Some(uuid) => uuid,
                None => return Ok(Err(why_no_mig(slices))),
            },
            _ => whole_gpu(slices).context("no GPU was published")?,
        };
        let sizes = Sizes::of(memory_mib(slices, &gpu).context("a GPU without memory")?);
        let text = self.text().replace(TOUR_GPU, &gpu);
        let text = sizes
            .placeholders()
            .iter()
            .fold(text, |text, (name, gib)| text.replace(name, &format!("{gib}Gi")));
        Ok(Ok(workloads::parse(&text, self.title())?))
    }
}

/// Sizes of claims in GiB: those of a large GPU, or smaller ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sizes {
    shares: (u64, u64),
    mps: (u64, u64),
}

impl Sizes {
    fn of(memory_mib: u64) -> Self {
        let gib = memory_mib / MIB_PER_GIB;
        match gib {
            0..20 => Self { shares: (gib / 3, gib / 2), mps: (gib / 4, gib / 3) },
            _ => Self { shares: (10, (gib - 13).min(30)), mps: (8, 10) },
        }
    }

    fn placeholders(self) -> [(&'static str, u64); 4] {
        let Self { shares, mps } = self;
        [("SHARE-SMALL", shares.0), ("SHARE-LARGE", shares.1), ("MPS-SMALL", mps.0), ("MPS-LARGE", mps.1)]
    }
}

fn devices(slices: &[ResourceSlice]) -> impl Iterator<Item = &Device> {
    slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten())
}

fn text(device: &Device, name: &str) -> Option<String> {
    device.attributes.as_ref()?.get(name)?.string.clone()
}

fn is_ready(device: &&Device) -> bool {
    device.taints.as_ref().is_none_or(Vec::is_empty)
}

/// The first GPU whose MIG devices are available.
fn mig_gpu(slices: &[ResourceSlice]) -> Option<String> {
    let ready = devices(slices).filter(is_ready).filter(|device| text(device, "parentUUID").is_some());
    ready.min_by_key(|device| &device.name).and_then(|device| text(device, "parentUUID"))
}

fn is_whole(device: &&Device) -> bool {
    text(device, "type").as_deref() == Some("gpu")
}

/// The first GPU that is available as a whole.
fn whole_gpu(slices: &[ResourceSlice]) -> Option<String> {
    let first = devices(slices).filter(is_whole).min_by_key(|device| (!is_ready(device), &device.name));
    first.and_then(|device| text(device, "uuid"))
}

fn memory_mib(slices: &[ResourceSlice], uuid: &str) -> Option<u64> {
    let gpu =
        devices(slices).filter(is_whole).find(|device| text(device, "uuid").as_deref() == Some(uuid))?;
    let memory = gpu.capacity.as_ref()?.get("memory")?;
    Some(Quantity::try_from(&memory.value).ok()?.as_bytes()? >> 20)
}

fn why_no_mig(slices: &[ResourceSlice]) -> String {
    let has_mig = devices(slices).any(|device| text(device, "parentUUID").is_some());
    let product = devices(slices).find_map(|device| text(device, "productName")).unwrap_or_default();
    match has_mig {
        true => format!(
            "MIG is left out: {product} needs a reset for it, so the demo turns it on only on every \
             second GPU; try --gpus with two GPUs"
        ),
        false => format!("MIG is left out: {product} has no MIG"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(memory_mib: u64, expected: [u64; 4]) {
        assert_eq!(Sizes::of(memory_mib).placeholders().map(|(_, gib)| gib), expected, "{memory_mib} MiB");
    }

    #[test]
    fn sizes_fit_the_gpu() {
        check(15_360, [5, 7, 3, 5]);
        check(23_034, [10, 9, 8, 10]);
        check(81_559, [10, 30, 8, 10]);
        check(275_040, [10, 30, 8, 10]);
    }
}
