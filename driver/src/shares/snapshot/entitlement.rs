//! The GPU time that a policy entitles a share to.

/// The whole time of a GPU, in nanoseconds per second.
pub(crate) const NS_PER_SECOND: u64 = 1_000_000_000;

/// A share's entitlement. Times are nanoseconds per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entitlement {
    /// Available whenever the share wants it.
    pub(crate) guarantee: u64,
    /// The most it may use while other shares want less; at least the guarantee.
    pub(crate) ceiling: u64,
    /// Its part of the time that is guaranteed to no share.
    pub(crate) weight: u32,
}

impl Entitlement {
    /// The entitlement of a policy. Without a guarantee, the weight decides. Without a ceiling, a
    /// share may use all that others leave, unless it has a guarantee: then the guarantee is the
    /// ceiling.
    pub(crate) fn of(compute: divvy_pages::Compute) -> Self {
        let time = |percent: u32| u64::from(percent.min(100)) * (NS_PER_SECOND / 100);
        let guarantee = time(compute.cores);
        let ceiling = match (compute.cores, compute.ceiling) {
            (0, 0) => NS_PER_SECOND,
            (_, 0) => guarantee,
            (_, ceiling) => time(ceiling).max(guarantee),
        };
        Self { guarantee, ceiling, weight: compute.weight.max(1) }
    }
}
