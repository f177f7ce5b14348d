//! When an allocation is a share: the rule, and the figure that it needs.
//!
//! A GPU and a MIG instance are published with all of their memory, and an
//! allocation of them tells what it took. Taking less than all makes it a share,
//! and so does a guarantee of compute time. **A share of everything is the
//! whole**: naming all memory equals naming none, nothing is injected and nobody
//! else can have room. Who names compute time alone gets all memory and a limit.
//!
//! What is published and what is compared come from the same functions, so a rule
//! that rounds cannot make a whole GPU a share.

use crate::device::Part;
use crate::inventory::{Gpu, MigProfile};
use divvy_api::{Hold, Quantity, Share};

/// Why what an allocation took is not the part of a device; the message names the amount.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShareError {
    #[error(
        "takes {amount} of memory, expected at least 1Mi; this allocation is not of what Divvy publishes"
    )]
    Memory { amount: Quantity },
    #[error(
        "takes {amount} per cent of the cores, expected a whole number from 0 to 100; this allocation is not of what Divvy publishes"
    )]
    Cores { amount: Quantity },
}

/// Memory of a GPU, or of a part of it, as it is published: bytes in whole Mi; 0
/// where the GPU does not tell.
pub fn memory(gpu: &Gpu, part: Option<Part<'_>>) -> u64 {
    match part {
        None => gpu.memory_bytes >> 20 << 20,
        Some((profile, _)) => memory_of_profile(profile),
    }
}

/// Memory of an instance of a profile, in bytes.
pub fn memory_of_profile(profile: &MigProfile) -> u64 {
    profile.memory_mib.saturating_mul(1 << 20)
}

/// The share that an allocation is, of a GPU or MIG instance with so much
/// [`memory`]; none where the claim has it whole or looks on.
pub fn share(hold: &Hold, device_memory: u64) -> Result<Option<Share>, ShareError> {
    let Hold::Share { id, consumed } = hold else { return Ok(None) };
    let memory = match consumed.get("memory") {
        None => device_memory,
        Some(amount) => match amount.as_bytes() {
            Some(bytes) if bytes >= 1 << 20 => bytes.min(device_memory),
            _ => return Err(ShareError::Memory { amount: *amount }),
        },
    };
    let cores = match consumed.get("cores") {
        None => 0,
        Some(amount) => match amount.value().and_then(|percent| u32::try_from(percent).ok()) {
            Some(percent @ 0..=100) if amount.is_whole() => percent,
            _ => return Err(ShareError::Cores { amount: *amount }),
        },
    };
    let whole = memory == device_memory && cores == 0;
    Ok((!whole).then(|| Share { id: id.clone(), memory, cores }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::Mig;
    use crate::inventory::tests::{gpu, profile};
    use crate::placement::Placement;
    use proptest::prelude::*;

    const GI: u64 = 1 << 30;

    fn check(consumed: &[(&str, &str)], expected: Result<Option<(u64, u32)>, &str>) {
        let consumed = consumed.iter().map(|(name, amount)| ((*name).to_owned(), amount.parse().unwrap()));
        let hold = Hold::Share { id: "s".into(), consumed: consumed.collect() };
        let found = share(&hold, 80 * GI).map(|share| share.map(|share| (share.memory, share.cores)));
        assert_eq!(found.map_err(|error| error.to_string()), expected.map_err(str::to_owned), "{hold:?}");
    }

    #[test]
    fn less_memory_or_a_guarantee_of_compute_time_is_a_share() {
        check(&[("memory", "10Gi"), ("cores", "0")], Ok(Some((10 * GI, 0))));
        check(&[("memory", "10Gi"), ("cores", "30")], Ok(Some((10 * GI, 30))));
        check(&[("memory", "81919Mi")], Ok(Some((80 * GI - (1 << 20), 0))));
        check(&[("memory", "80Gi"), ("cores", "1")], Ok(Some((80 * GI, 1))));
        check(&[("cores", "100")], Ok(Some((80 * GI, 100))));
    }

    #[test]
    fn all_memory_is_the_whole() {
        check(&[("memory", "80Gi"), ("cores", "0"), ("decoders", "0")], Ok(None));
        check(&[("memory", "81920Mi")], Ok(None));
        check(&[], Ok(None));
        // The GPU driver tells less than when it was allocated.
        check(&[("memory", "81Gi")], Ok(None));
        assert_eq!(share(&Hold::Exclusive, 80 * GI), Ok(None));
        assert_eq!(share(&Hold::Admin { id: None }, 80 * GI), Ok(None));
    }

    #[test]
    fn what_is_not_published_is_refused() {
        let memory = |amount: &str| {
            format!(
                "takes {amount} of memory, expected at least 1Mi; this allocation is not of what Divvy publishes"
            )
        };
        for amount in ["0", "-1Gi", "1023Ki", "500m"] {
            check(&[("memory", amount)], Err(&memory(amount)));
        }
        for amount in ["101", "-1", "500m"] {
            let cores = format!(
                "takes {amount} per cent of the cores, expected a whole number from 0 to 100; this allocation is not of what Divvy publishes"
            );
            check(&[("cores", amount)], Err(&cores));
        }
    }

    #[test]
    fn memory_is_told_in_whole_mebibytes() {
        let mut gpu = gpu(0, Mig::Unsupported);
        gpu.memory_bytes += 4096;
        let profile = profile(19, "1g.10gb", &[(0, 1)]);
        assert_eq!(memory(&gpu, None), 81559 << 20);
        assert_eq!(memory(&gpu, Some((&profile, Placement { start: 0, size: 1 }))), 9984 << 20);
    }

    proptest! {
        #[test]
        fn a_share_is_never_more_than_the_device(taken in 1u64..200 << 10, all in 1u64..200 << 10, cores in 0u32..=100) {
            let consumed = [("memory", Quantity::bytes(taken << 20)), ("cores", Quantity::count(cores.into()))];
            let consumed = consumed.map(|(name, amount)| (name.to_owned(), amount)).into();
            let found = share(&Hold::Share { id: "s".into(), consumed }, all << 20).unwrap();
            prop_assert_eq!(found.is_none(), taken >= all && cores == 0);
            prop_assert!(found.is_none_or(|share| share.memory > 0 && share.memory <= all << 20));
        }
    }
}
