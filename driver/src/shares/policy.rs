//! What the policy page of a share says: the record of its device and the GPU, in
//! the words of the page. Pure, so that a page that a reboot took is made again as
//! it was.

use crate::plan::Part;
use crate::records::DeviceRecord;
use crate::sharing::ShareLimits;
use divvy_api::sharing::{Priority, ShareSettings};
use divvy_api::{ClaimUid, ShareId};
use divvy_model::{Gpu, share};
use divvy_pages::{Codec, Compute, Flags, GpuUuid, Memory, Policy, Text};

/// Why there is no page for a share.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} {value:?} cannot stand on a policy page")]
pub struct Unwritable {
    name: &'static str,
    value: String,
}

/// The policy of a share of that device, which lies on that GPU; a context is charged so many bytes there.
pub fn policy(
    claim: &ClaimUid,
    device: &DeviceRecord,
    share: &ShareId,
    limits: ShareLimits,
    gpu: &Gpu,
    context: u64,
) -> Result<Policy, Unwritable> {
    let mig = device.instance.as_ref().map(|ids| uuid("MIG UUID", &ids.uuid)).transpose()?;
    let physical = match &device.part {
        Part::Whole { .. } => gpu.memory_bytes,
        Part::Instance(key) => gpu.profile(key.profile_id).map_or(0, share::memory_of_profile),
    };
    let ShareSettings { observe_only, priority, weight, overcommit, encoders, decoders, .. } =
        limits.settings;
    let observing = if observe_only { Flags::OBSERVE_ONLY } else { Flags::default() };
    let managed = if overcommit > 100 { Flags::UVM } else { Flags::default() };
    Ok(Policy {
        claim: text("claim UID", claim.as_str())?,
        share: text("shareID", share.as_str())?,
        gpu: uuid("GPU UUID", gpu.uuid.as_str())?,
        mig,
        pci: text("PCI bus id", &nvml_bus_id(&gpu.pci_bus_id))?,
        memory: memory(limits.memory, overcommit, Memory { physical, context, ..Memory::default() }),
        compute: Compute {
            cores: limits.cores,
            ceiling: ceiling(limits),
            weight,
            priority: match priority {
                Priority::Low => 0,
                Priority::High => 1,
            },
            ..Compute::default()
        },
        codec: Codec { encoders, decoders },
        flags: Flags::STRICT.with(Flags::NVML_VIEW).with(observing).with(managed),
    })
}

/// What was claimed, and what may be held of it: the same, or more with managed memory beyond.
fn memory(claimed: u64, overcommit: u32, device: Memory) -> Memory {
    let fixed = Memory { limit: claimed, ..device };
    if overcommit <= 100 {
        return fixed;
    }
    let limit = claimed / 100 * u64::from(overcommit) + claimed % 100 * u64::from(overcommit) / 100;
    Memory { limit, soft: claimed, overcommit: limit, ..fixed }
}

/// Per cent at most; 0 where the guarantee is the ceiling, or where there is neither.
fn ceiling(limits: ShareLimits) -> u32 {
    match (limits.cores, limits.settings) {
        (0, ShareSettings { ceiling: 100, .. }) | (1.., ShareSettings { burst: false, .. }) => 0,
        (cores, ShareSettings { ceiling, .. }) => ceiling.max(cores),
    }
}

fn text<const N: usize>(name: &'static str, value: &str) -> Result<Text<N>, Unwritable> {
    Text::new(value).ok_or_else(|| Unwritable { name, value: value.to_owned() })
}

fn uuid(name: &'static str, text: &str) -> Result<GpuUuid, Unwritable> {
    GpuUuid::parse(text).ok_or_else(|| Unwritable { name, value: text.to_owned() })
}

/// `00000000:1A:00.0` of sysfs' `0000:1a:00.0`.
fn nvml_bus_id(sysfs: &str) -> String {
    format!("{sysfs:0>16}").to_uppercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bus_is_called_as_nvml_calls_it() {
        assert_eq!(nvml_bus_id("0000:1a:00.0"), "00000000:1A:00.0");
    }

    #[test]
    fn a_guarantee_is_the_ceiling_unless_the_class_names_one() {
        let check = |cores, ceiling, burst, page| {
            let settings = ShareSettings { ceiling, burst, ..ShareSettings::default() };
            assert_eq!(
                super::ceiling(ShareLimits { memory: 1, cores, settings }),
                page,
                "{cores} {ceiling} {burst}"
            );
        };
        check(30, 100, false, 0);
        check(30, 50, false, 0);
        check(30, 50, true, 50);
        check(30, 20, true, 30);
        check(0, 100, false, 0);
        check(0, 100, true, 0);
        check(0, 50, false, 50);
    }

    #[test]
    fn what_does_not_fit_on_a_page_is_named() {
        let error = text::<4>("shareID", "too long").unwrap_err();
        assert_eq!(error.to_string(), r#"shareID "too long" cannot stand on a policy page"#);
        assert!(uuid("GPU UUID", "GPU-a").is_err());
    }
}
