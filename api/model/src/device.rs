//! Device names such as `gpu-0-mig-1g10gb-me-20-3`. The pattern is that of NVIDIA's DRA driver. A
//! name parses back to exactly its device, for every device that can be published.

use crate::inventory::{Gpu, Inventory, MigProfile};
use crate::numbers::GpuNumber;
use crate::placement::Placement;
use divvy_api::DeviceName;
use divvy_api::sharing::Mode;
use std::fmt;

/// The device that a name refers to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceId {
    /// `gpu-N`.
    Gpu(GpuNumber),
    /// `gpu-N-share`: the whole GPU for shares of its memory and compute time.
    Share(GpuNumber),
    /// `gpu-N-mig-<profile>-<profile id>-<start>`; `slug` is the profile's name in lower case
    /// without dots, with `+` and `,` as `-`.
    Mig { gpu: GpuNumber, slug: String, profile_id: u32, start: u32 },
    /// `gpu-N-timeslice`: the whole GPU, time-sliced.
    Timeslice(GpuNumber),
    /// `gpu-N-mps`: the whole GPU for clients of one MPS control daemon.
    Mps(GpuNumber),
    /// `gpu-N-observer`: the whole GPU for claims with adminAccess, which hold nothing.
    Observer(GpuNumber),
}

/// The name is not one of this driver.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not a device of this driver")]
pub struct DeviceNameError {
    pub name: String,
}

/// Why a device does not exist on this node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    #[error("device {device}: this node has no GPU number {}", device.gpu())]
    NoGpu { device: DeviceId },
    #[error("device {device}: GPU {} has no such MIG profile", device.gpu())]
    NoProfile { device: DeviceId },
    #[error("device {device}: profile {profile} cannot start at {start}")]
    NoPlacement { device: DeviceId, profile: String, start: u32 },
}

/// A MIG profile and the placement of an instance.
pub type Part<'a> = (&'a MigProfile, Placement);

/// A device name must be a DNS label.
const MAX_NAME: usize = 63;

impl DeviceId {
    /// The number of its GPU.
    pub fn gpu(&self) -> GpuNumber {
        match self {
            Self::Gpu(gpu)
            | Self::Share(gpu)
            | Self::Mig { gpu, .. }
            | Self::Timeslice(gpu)
            | Self::Mps(gpu)
            | Self::Observer(gpu) => *gpu,
        }
    }

    /// The mode that a claim for it gives to the GPU. An observer changes no mode, and sees the whole GPU.
    pub fn mode(&self) -> Mode {
        match self {
            Self::Gpu(_) | Self::Observer(_) => Mode::Whole,
            Self::Share(_) => Mode::Share,
            Self::Mig { .. } => Mode::Mig,
            Self::Timeslice(_) => Mode::Timeslice,
            Self::Mps(_) => Mode::Mps,
        }
    }

    /// The MIG device of a profile at a start.
    pub fn mig(gpu: GpuNumber, profile: &str, profile_id: u32, start: u32) -> Self {
        let slug = profile
            .chars()
            .filter(|c| *c != '.')
            .map(|c| if c == '+' || c == ',' { '-' } else { c.to_ascii_lowercase() })
            .collect();
        Self::Mig { gpu, slug, profile_id, start }
    }

    /// The GPU of the device on this node and, for a MIG device, the profile and placement.
    ///
    /// # Errors
    /// The node has no such GPU, profile or placement.
    pub fn resolve<'a>(&self, node: &'a Inventory) -> Result<(&'a Gpu, Option<Part<'a>>), ResolveError> {
        let gpu = node.gpu(self.gpu()).ok_or_else(|| ResolveError::NoGpu { device: self.clone() })?;
        let Self::Mig { profile_id, start, .. } = *self else {
            return Ok((gpu, None));
        };
        let named = |profile: &&MigProfile| Self::mig(gpu.number, &profile.name, profile_id, start) == *self;
        let profile = gpu.profile(profile_id).filter(named);
        let profile = profile.ok_or_else(|| ResolveError::NoProfile { device: self.clone() })?;
        match profile.placements.iter().find(|placement| placement.start == start) {
            Some(placement) => Ok((gpu, Some((profile, *placement)))),
            None => {
                Err(ResolveError::NoPlacement { device: self.clone(), profile: profile.name.clone(), start })
            }
        }
    }

    /// The name under which it is published.
    pub fn name(&self) -> DeviceName {
        DeviceName::from(self.to_string())
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu(gpu) => write!(out, "gpu-{gpu}"),
            Self::Share(gpu) => write!(out, "gpu-{gpu}-share"),
            Self::Mig { gpu, slug, profile_id, start } => {
                write!(out, "gpu-{gpu}-mig-{slug}-{profile_id}-{start}")
            }
            Self::Timeslice(gpu) => write!(out, "gpu-{gpu}-timeslice"),
            Self::Mps(gpu) => write!(out, "gpu-{gpu}-mps"),
            Self::Observer(gpu) => write!(out, "gpu-{gpu}-observer"),
        }
    }
}

/// Accepts only names that [`DeviceId`] writes: no sign, no leading zero, no other case.
impl TryFrom<&DeviceName> for DeviceId {
    type Error = DeviceNameError;
    fn try_from(name: &DeviceName) -> Result<Self, DeviceNameError> {
        parse(name.as_str()).ok_or_else(|| DeviceNameError { name: name.to_string() })
    }
}

fn parse(name: &str) -> Option<DeviceId> {
    if name.len() > MAX_NAME {
        return None;
    }
    let rest = name.strip_prefix("gpu-")?;
    if let Some(gpu) = rest.strip_suffix("-share") {
        return Some(DeviceId::Share(GpuNumber(number(gpu)?)));
    }
    if let Some(gpu) = rest.strip_suffix("-timeslice") {
        return Some(DeviceId::Timeslice(GpuNumber(number(gpu)?)));
    }
    if let Some(gpu) = rest.strip_suffix("-mps") {
        return Some(DeviceId::Mps(GpuNumber(number(gpu)?)));
    }
    if let Some(gpu) = rest.strip_suffix("-observer") {
        return Some(DeviceId::Observer(GpuNumber(number(gpu)?)));
    }
    let Some((gpu, rest)) = rest.split_once("-mig-") else {
        return Some(DeviceId::Gpu(GpuNumber(number(rest)?)));
    };
    let (rest, start) = rest.rsplit_once('-')?;
    let (slug, profile_id) = rest.rsplit_once('-')?;
    is_slug(slug).then_some(DeviceId::Mig {
        gpu: GpuNumber(number(gpu)?),
        slug: slug.to_owned(),
        profile_id: number(profile_id)?,
        start: number(start)?,
    })
}

/// A number in the form that `Display` writes.
fn number(text: &str) -> Option<u32> {
    let number: u32 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

/// Words of lower-case letters and digits, separated by single dashes.
fn is_slug(text: &str) -> bool {
    let word =
        |word: &str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    text.split('-').all(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::tests::{gpu, mig, profile};
    use proptest::prelude::*;

    fn id() -> impl Strategy<Value = DeviceId> {
        let slug = "[1-9][0-9]?g[1-9][0-9]{0,2}gb(-(me|gfx|me-all|[0-9]{1,2}))?";
        prop_oneof![
            any::<u32>().prop_map(|gpu| DeviceId::Gpu(GpuNumber(gpu))),
            any::<u32>().prop_map(|gpu| DeviceId::Share(GpuNumber(gpu))),
            any::<u32>().prop_map(|gpu| DeviceId::Timeslice(GpuNumber(gpu))),
            any::<u32>().prop_map(|gpu| DeviceId::Mps(GpuNumber(gpu))),
            any::<u32>().prop_map(|gpu| DeviceId::Observer(GpuNumber(gpu))),
            (any::<u32>(), slug, any::<u32>(), any::<u32>()).prop_map(|(gpu, slug, profile_id, start)| {
                DeviceId::Mig { gpu: GpuNumber(gpu), slug, profile_id, start }
            }),
        ]
    }

    proptest! {
        #[test]
        fn name_round_trips_to_its_device(id in id()) {
            prop_assert!(id.to_string().len() <= MAX_NAME);
            prop_assert_eq!(DeviceId::try_from(&id.name()), Ok(id));
        }

        #[test]
        fn device_has_one_name(
            text in "gpu-[0-9]{1,3}(-mig-[-0-9a-zG+]{0,12}-[0-9]{1,3}-[0-9]{1,2}|-[a-z]{3,9})?|.*",
        ) {
            let name = DeviceName::from(text);
            if let Ok(id) = DeviceId::try_from(&name) {
                prop_assert_eq!(id.name(), name);
            }
        }
    }

    #[test]
    fn malformed_names_are_rejected() {
        for name in [
            "",
            "gpu",
            "gpu-",
            "gpu--1",
            "gpu-+1",
            "gpu-01",
            "gpu-0 ",
            "GPU-0",
            "gpu-4294967296",
            "gpu-0-",
            "gpu-0-mig",
            "gpu-0-mig-",
            "gpu-0-mig-19-0",
            "gpu-0-mig--19-0",
            "gpu-0-mig-1g10gb-19",
            "gpu-0-mig-1g.10gb-19-0",
            "gpu-0-mig-1G10gb-19-0",
            "gpu-0-mig-1g10gb--19-0",
            "gpu-0-mig-1g10gb-019-0",
            "gpu-0-mig-1g10gb-19-00",
            "gpu-0-shares",
            "gpu-0-timeslices",
            "gpu-00-timeslice",
            "gpu--mps",
            "gpu-0-mps-1",
        ] {
            let found = DeviceId::try_from(&DeviceName::from(name));
            assert_eq!(found, Err(DeviceNameError { name: name.to_owned() }));
        }
    }

    #[test]
    fn device_resolves_to_gpu_and_profile() {
        let node = Inventory {
            gpus: vec![gpu(0, mig(vec![profile(19, "1g.10gb", &[(0, 1), (1, 1)])]))],
            ..Default::default()
        };
        let check = |name: &str, expected: Result<Option<(u32, u32)>, &str>| {
            let found = DeviceId::try_from(&DeviceName::from(name)).expect(name);
            let found =
                found.resolve(&node).map(|(_, part)| part.map(|(profile, place)| (profile.id, place.start)));
            assert_eq!(found.map_err(|error| error.to_string()), expected.map_err(str::to_owned), "{name}");
        };
        check("gpu-0", Ok(None));
        check("gpu-0-mig-1g10gb-19-1", Ok(Some((19, 1))));
        check("gpu-1", Err("device gpu-1: this node has no GPU number 1"));
        check("gpu-0-mig-1g10gb-20-0", Err("device gpu-0-mig-1g10gb-20-0: GPU 0 has no such MIG profile"));
        check("gpu-0-mig-1g12gb-19-0", Err("device gpu-0-mig-1g12gb-19-0: GPU 0 has no such MIG profile"));
        check(
            "gpu-0-mig-1g10gb-19-2",
            Err("device gpu-0-mig-1g10gb-19-2: profile 1g.10gb cannot start at 2"),
        );
    }
}
