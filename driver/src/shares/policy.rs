//! Builds the policy page of a share from its limits and its GPU. Pure, so that a page that was lost in
//! a reboot is written again with the same contents.

use crate::gpu::part::Part;
use crate::gpu::sharing::ShareLimits;
use divvy_api::sharing::{Priority, ShareSettings};
use divvy_api::{ClaimUid, ShareId};
use divvy_model::{Gpu, share};
use divvy_pages::{Codec, Compute, Flags, GpuUuid, Memory, Policy, Text};

/// A value that cannot be stored on a policy page.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} {value:?} cannot be stored on a policy page")]
pub struct Unwritable {
    name: &'static str,
    value: String,
}

/// The policy of a share of a device on that GPU. `context` is the charge for a new context, in bytes.
pub fn policy(
    claim: &ClaimUid,
    share: &ShareId,
    part: &Part,
    mig_uuid: Option<&str>,
    limits: ShareLimits,
    gpu: &Gpu,
    context: u64,
) -> Result<Policy, Unwritable> {
    let mig = mig_uuid.map(|mig| uuid("MIG UUID", mig)).transpose()?;
    let physical = match part {
        Part::Whole { .. } => gpu.memory_bytes,
        Part::Instance(key) => gpu.profile(key.profile_id).map_or(0, share::memory_of_profile),
    };
    let ShareSettings { observe_only, priority, weight, overcommit, encoders, decoders, messages, .. } =
        limits.settings;
    let observing = if observe_only { Flags::OBSERVE_ONLY } else { Flags::default() };
    let silent = if messages { Flags::default() } else { Flags::NO_MESSAGES };
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
        flags: Flags::STRICT.with(Flags::NVML_VIEW).with(observing).with(managed).with(silent),
    })
}

/// Memory limits: the claimed bytes, and with overcommit a larger limit that managed memory may use.
fn memory(claimed: u64, overcommit: u32, device: Memory) -> Memory {
    let fixed = Memory { limit: claimed, ..device };
    if overcommit <= 100 {
        return fixed;
    }
    let limit = claimed / 100 * u64::from(overcommit) + claimed % 100 * u64::from(overcommit) / 100;
    Memory { limit, soft: claimed, overcommit: limit, ..fixed }
}

/// Ceiling in per cent; 0 if the guarantee is also the ceiling, or if there is neither.
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

/// Converts the bus id `0000:1a:00.0` of sysfs to NVML's `00000000:1A:00.0`.
fn nvml_bus_id(sysfs: &str) -> String {
    format!("{sysfs:0>16}").to_uppercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_id_is_in_the_format_of_nvml() {
        assert_eq!(nvml_bus_id("0000:1a:00.0"), "00000000:1A:00.0");
    }

    #[test]
    fn guarantee_is_the_ceiling_unless_the_class_sets_one() {
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
    fn value_that_does_not_fit_is_named_in_the_error() {
        let error = text::<4>("shareID", "too long").unwrap_err();
        assert_eq!(error.to_string(), r#"shareID "too long" cannot be stored on a policy page"#);
        assert!(uuid("GPU UUID", "GPU-a").is_err());
    }
}
