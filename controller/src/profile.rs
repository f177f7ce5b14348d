//! Names of MIG profiles: as NVML writes them, and in Kubernetes object names.
//!
//! A profile is `1g.10gb`, with at most one attribute: `1g.10gb+me`, `1g.24gb-me`,
//! `2g.48gb+me.all`. Kubernetes names cannot contain `+`, so it becomes `.`, as in the resource
//! names of NVIDIA's device plugin (k8s-device-plugin, internal/rm/nvml_manager.go). The mapping
//! is injective: after `gb`, a `.` always stands for `+`. Other spellings get no class.

use std::fmt;

/// The name of a MIG profile.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Profile(String);

/// Suffix of the names of managed classes.
const DOMAIN: &str = "divvy.dev";

impl Profile {
    /// Parses the value of a device's `profile` attribute.
    pub fn parse(text: &str) -> Option<Self> {
        let (slices, rest) = number(text)?;
        let (memory, rest) = number(rest.strip_prefix("g.")?)?;
        let rest = rest.strip_prefix("gb")?;
        let suffix = rest.strip_prefix(['+', '-']);
        let known = match suffix {
            None => rest.is_empty(),
            Some(words) => words.split('.').all(|word| {
                !word.is_empty() && word.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
            }),
        };
        // The length limit keeps the derived names valid for any input.
        (known && slices.len() + memory.len() <= 8 && text.len() <= 40).then(|| Self(text.to_owned()))
    }

    /// The name as NVML writes it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn plain(&self) -> String {
        self.0.replace('+', ".")
    }

    /// For example `mig-1g.10gb.divvy.dev`.
    pub fn class_name(&self) -> String {
        format!("mig-{}.{DOMAIN}", self.plain())
    }

    /// For example `nvidia.com/mig-1g.10gb`.
    pub fn resource_name(&self) -> String {
        format!("nvidia.com/mig-{}", self.plain())
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

/// Splits off leading digits that do not start with a zero.
fn number(text: &str) -> Option<(&str, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    (!digits.is_empty() && !digits.starts_with('0')).then_some((digits, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(profile: &str, names: Option<(&str, &str)>) {
        let found = Profile::parse(profile).map(|profile| (profile.class_name(), profile.resource_name()));
        assert_eq!(
            found,
            names.map(|(class, resource)| (class.to_owned(), resource.to_owned())),
            "{profile}"
        );
    }

    #[test]
    fn profile_has_one_class_and_one_resource_name() {
        check("1g.10gb", Some(("mig-1g.10gb.divvy.dev", "nvidia.com/mig-1g.10gb")));
        check("1g.24gb+me", Some(("mig-1g.24gb.me.divvy.dev", "nvidia.com/mig-1g.24gb.me")));
        check("1g.24gb-me", Some(("mig-1g.24gb-me.divvy.dev", "nvidia.com/mig-1g.24gb-me")));
        check("2g.48gb+me.all", Some(("mig-2g.48gb.me.all.divvy.dev", "nvidia.com/mig-2g.48gb.me.all")));
    }

    #[test]
    fn malformed_profiles_are_rejected() {
        for text in [
            "",
            "1g",
            "1g.10gb+",
            "1g.10gb.me",
            "1g.10gb+me+x",
            "1G.10gb",
            "01g.5gb",
            "1g.5gb-a..b",
            "1c.1g.5gb",
        ] {
            check(text, None);
        }
    }

    proptest! {
        #[test]
        fn different_profiles_have_different_names(
            one in "[1-4]g\\.[1-3]0gb([+-][ab]{1,2}(\\.[ab])?)?",
            other in "[1-4]g\\.[1-3]0gb([+-][ab]{1,2}(\\.[ab])?)?",
        ) {
            let (a, b) = (Profile::parse(&one).unwrap(), Profile::parse(&other).unwrap());
            prop_assert_eq!(one == other, a.class_name() == b.class_name());
            prop_assert_eq!(one == other, a.resource_name() == b.resource_name());
        }

        #[test]
        fn derived_names_are_valid_for_any_input(text in "[0-9a-zG.+-]{0,24}|\\PC{0,60}") {
            if let Some(profile) = Profile::parse(&text) {
                prop_assert!(divvy_daemon::args::object_name(&profile.class_name()).is_ok());
                prop_assert!(profile.class_name().len() <= 63);
            }
        }
    }
}
