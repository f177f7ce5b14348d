//! Bugs of schedulers that make devices with counters unsafe to publish, and the versions that have
//! them.
//!
//! The versions were read from the sources of `k8s.io/dynamic-resource-allocation`, whose patch
//! versions are those of Kubernetes.

use crate::pool::Support;
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// Version of a scheduler or an API server: major, minor and patch. Suffixes of vendors and
/// pre-releases do not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KubernetesVersion(u32, u32, u32);

/// The text is not a Kubernetes version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a version such as 1.36.2")]
pub struct VersionError(String);

/// A bug of schedulers.
#[derive(Debug, PartialEq, Eq)]
pub struct SchedulerBug {
    /// Number of the issue in `kubernetes/kubernetes`.
    pub issue: u32,
    effect: &'static str,
    /// Whether only devices with multiple allocations are affected.
    needs_shares: bool,
    /// The first version that has the bug, and the one that fixes it. The last range is the newest.
    ranges: &'static [(KubernetesVersion, KubernetesVersion)],
}

/// Which bugs to expect.
#[derive(Clone, Debug, Default)]
pub struct SchedulerOptions {
    /// The scheduler's version; `None` if it is that of the API server.
    pub version: Option<KubernetesVersion>,
    /// Issues that the vendor of the scheduler has fixed in an affected version.
    pub ignored_bugs: BTreeSet<u32>,
}

const BUGS: [SchedulerBug; 2] = [
    SchedulerBug {
        issue: 139_034,
        effect: "it gives overlapping devices to two claims",
        needs_shares: true,
        // Multiple allocations exist since 1.34. The fix was not picked to 1.34 and 1.35.
        ranges: &[(KubernetesVersion(1, 34, 0), KubernetesVersion(1, 36, 2))],
    },
    SchedulerBug {
        issue: 138_882,
        effect: "it panics on claims with allocationMode All",
        needs_shares: false,
        ranges: &[
            (KubernetesVersion(1, 35, 0), KubernetesVersion(1, 35, 6)),
            (KubernetesVersion(1, 36, 0), KubernetesVersion(1, 36, 2)),
        ],
    },
];

impl SchedulerBug {
    /// The version that fixes the bug for a scheduler that has it.
    fn fixed_in(&self, version: KubernetesVersion) -> Option<KubernetesVersion> {
        let range = self.ranges.iter().find(|(first, fixed)| (*first..*fixed).contains(&version))?;
        Some(range.1)
    }
}

/// Why devices with counters must not be published, as a text for operators. `None` if they are
/// safe. `server` is the `gitVersion` of the API server; a text that is no version has no bugs.
pub fn unsafe_counters(options: &SchedulerOptions, server: &str, support: Support) -> Option<String> {
    let version = options.version.or_else(|| server.parse().ok())?;
    let concerned = |bug: &&SchedulerBug| {
        let published = support.counters && (support.shares || !bug.needs_shares);
        published && !options.ignored_bugs.contains(&bug.issue)
    };
    let found: Vec<_> = BUGS
        .iter()
        .filter(concerned)
        .filter_map(|bug| bug.fixed_in(version).map(|fixed| (bug, fixed)))
        .collect();
    let upgrade = found.iter().map(|(_, fixed)| *fixed).max()?;
    let bugs: Vec<String> =
        found.iter().map(|(bug, _)| format!("kubernetes#{} ({})", bug.issue, bug.effect)).collect();
    Some(format!(
        "the scheduler {version} has {}; until it is upgraded to {upgrade}, only whole GPUs, existing MIG \
         instances and allocated devices are published",
        bugs.join(" and ")
    ))
}

/// Whether an issue is one of the known bugs.
pub fn is_known_bug(issue: u32) -> bool {
    BUGS.iter().any(|bug| bug.issue == issue)
}

impl FromStr for KubernetesVersion {
    type Err = VersionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let mut parts = text.strip_prefix('v').unwrap_or(text).splitn(3, '.');
            let digits = |part: &str| {
                let end = part.find(|char: char| !char.is_ascii_digit()).unwrap_or(part.len());
                part[..end].parse::<u32>().ok()
            };
            let (major, minor) = (digits(parts.next()?)?, digits(parts.next()?)?);
            let patch = parts.next().map_or(Some(0), digits)?;
            Some(Self(major, minor, patch))
        };
        parse().ok_or_else(|| VersionError(text.to_owned()))
    }
}

impl fmt::Display for KubernetesVersion {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}.{}.{}", self.0, self.1, self.2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(options: &SchedulerOptions, server: &str, support: Support, issues: &[u32]) {
        let found = unsafe_counters(options, server, support);
        for bug in &BUGS {
            let named = found.as_ref().is_some_and(|text| text.contains(&format!("#{} ", bug.issue)));
            assert_eq!(named, issues.contains(&bug.issue), "{server}, {options:?}: {found:?}");
        }
    }

    #[test]
    fn affected_versions_are_recognised() {
        let (double, panic) = (139_034, 138_882);
        for (version, issues) in [
            ("v1.33.4", [].as_slice()),
            ("v1.34.9", &[double]),
            ("v1.35.5", &[double, panic]),
            ("v1.35.6", &[double]),
            ("v1.36.0", &[double, panic]),
            ("v1.36.1-gke.100", &[double, panic]),
            ("v1.36.1+k3s1", &[double, panic]),
            ("v1.36.2", &[]),
            ("v1.37.0-alpha.1", &[]),
            ("v1.38.0-beta.0", &[]),
            ("v0.0.0-master+$Format:%H$", &[]),
            ("unknown", &[]),
        ] {
            check(&SchedulerOptions::default(), version, Support::default(), issues);
        }
    }

    #[test]
    fn only_published_features_are_concerned() {
        let options = SchedulerOptions::default();
        check(&options, "v1.36.1", Support { shares: false, ..Support::default() }, &[138_882]);
        check(&options, "v1.36.1", Support { counters: false, ..Support::default() }, &[]);
    }

    #[test]
    fn settings_override_the_version_of_the_server() {
        let version = |text: &str| SchedulerOptions { version: text.parse().ok(), ..Default::default() };
        check(&version("1.36.2"), "v1.36.1", Support::default(), &[]);
        check(&version("1.36"), "v1.37.0", Support::default(), &[139_034, 138_882]);
        let ignoring = |issues: &[u32]| SchedulerOptions {
            version: None,
            ignored_bugs: issues.iter().copied().collect(),
        };
        check(&ignoring(&[139_034]), "v1.36.1", Support::default(), &[138_882]);
        check(&ignoring(&[139_034, 138_882]), "v1.36.1", Support::default(), &[]);
    }

    #[test]
    fn text_names_the_bugs_and_the_upgrade() {
        let text = unsafe_counters(&SchedulerOptions::default(), "v1.35.5", Support::default());
        assert_eq!(
            text.as_deref(),
            Some(
                "the scheduler 1.35.5 has kubernetes#139034 (it gives overlapping devices to two claims) and \
                 kubernetes#138882 (it panics on claims with allocationMode All); until it is upgraded to \
                 1.36.2, only whole GPUs, existing MIG instances and allocated devices are published"
            )
        );
    }
}
