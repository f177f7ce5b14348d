//! Kubernetes releases whose schedulers allocate differently.

/// A Kubernetes minor release. The scheduler of each is followed with its default features; 1.36
/// with the bugs fixed that 1.37 fixed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Release {
    V1_36,
    #[default]
    V1_37,
    V1_38,
}

impl Release {
    /// The closest known release of a version such as `1.37`, `v1.37.2` or `1.38.0-beta.0`. `None` if
    /// the text is not a version.
    pub fn of_version(version: &str) -> Option<Self> {
        let mut parts = version.strip_prefix('v').unwrap_or(version).split('.');
        let major: u32 = parts.next()?.parse().ok()?;
        let digits = parts.next()?;
        // Managed clusters append a plus sign: 1.37+.
        let minor: u32 = digits.strip_suffix('+').unwrap_or(digits).parse().ok()?;
        Some(match (major, minor) {
            (0, _) | (1, ..=36) => Self::V1_36,
            (1, 37) => Self::V1_37,
            _ => Self::V1_38,
        })
    }

    /// `DRAFractionalCapacityRange`: ranges of request policies can have fractions.
    pub(crate) fn has_fractional_ranges(self) -> bool {
        self >= Self::V1_37
    }

    /// Slices with compatibility groups are skipped, because the feature that evaluates them is off.
    pub(crate) fn skips_compatibility_groups(self) -> bool {
        self >= Self::V1_37
    }

    /// The driver's name is optional in the name of a capacity.
    pub(crate) fn qualifies_capacity_names(self) -> bool {
        self >= Self::V1_38
    }

    /// A negative capacity request is an error even if a policy rounds it up.
    pub(crate) fn refuses_negative_requests(self) -> bool {
        self >= Self::V1_38
    }

    /// A constraint on a list attribute is an error, not a mismatch.
    pub(crate) fn refuses_list_constraints(self) -> bool {
        self >= Self::V1_38
    }

    /// Versions that differ only in build metadata are equal.
    pub(crate) fn ignores_build_metadata(self) -> bool {
        self >= Self::V1_38
    }

    /// A device with shares cannot be allocated exclusively after it stopped allowing shares.
    pub(crate) fn respects_former_shares(self) -> bool {
        self >= Self::V1_38
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_selects_the_closest_release() {
        for (version, release) in [
            ("1.30.1", Some(Release::V1_36)),
            ("v1.36.6", Some(Release::V1_36)),
            ("1.37", Some(Release::V1_37)),
            ("1.37+", Some(Release::V1_37)),
            ("v1.38.0-beta.0", Some(Release::V1_38)),
            ("1.40.0", Some(Release::V1_38)),
            ("new", None),
            ("1.x", None),
            ("1", None),
        ] {
            assert_eq!(Release::of_version(version), release, "{version}");
        }
    }
}
