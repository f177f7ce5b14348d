//! Does the container runtime read CDI files at all? A runtime with CDI off
//! starts containers without their GPUs or not at all, long after prepare has
//! said yes; so a configuration that surely has it off is a warning at start-up.
//!
//! Read line by line: only plain settings are understood, includes are not
//! followed, and silence means "not known", never "fine".

use std::path::Path;

/// Where runtimes keep their configuration.
pub const CONFIGS: [&str; 2] = ["/etc/containerd/config.toml", "/etc/crio/crio.conf"];

/// Why containers would not get their devices.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CdiOff {
    #[error(
        "this runtime has CDI off: {config} says enable_cdi = false; set it to true and restart the runtime"
    )]
    Disabled { config: String },
    #[error("this runtime has CDI off: {config} is of containerd 1.x, which needs enable_cdi = true")]
    NotEnabled { config: String },
    #[error(
        "this runtime does not read {cdi_dir}: {config} says cdi_spec_dirs = {dirs}; add it, or name another with --cdi-dir"
    )]
    OtherDirs { config: String, cdi_dir: String, dirs: String },
}

/// Reads the runtime's configuration, if there is one, where it is seen.
pub fn check(config: &Path, seen: &Path, cdi_dir: &Path) -> Option<CdiOff> {
    judge(&std::fs::read_to_string(seen).ok()?, &config.to_string_lossy(), cdi_dir)
}

fn judge(text: &str, config: &str, cdi_dir: &Path) -> Option<CdiOff> {
    let config = config.to_owned();
    match setting(text, "enable_cdi") {
        Some("false") => return Some(CdiOff::Disabled { config }),
        // Version 3 is written by containerd 2, where CDI is on unless it is switched off.
        None if setting(text, "version") == Some("2") && text.contains("io.containerd.grpc.v1.cri") => {
            return Some(CdiOff::NotEnabled { config });
        }
        _ => {}
    }
    let dirs = setting(text, "cdi_spec_dirs")?;
    let listed = dirs.contains(['"', '\'']) && dirs.ends_with(']');
    let reads = dirs.split(['"', '\'']).any(|dir| same(Path::new(dir), cdi_dir));
    (listed && !reads).then(|| CdiOff::OtherDirs {
        config,
        cdi_dir: cdi_dir.to_string_lossy().into_owned(),
        dirs: dirs.to_owned(),
    })
}

/// `/var/run` is `/run` on every node that has both.
fn same(one: &Path, other: &Path) -> bool {
    let short = |path: &Path| path.strip_prefix("/var/run").map(|rest| Path::new("/run").join(rest));
    let short = |path: &Path| short(path).unwrap_or_else(|_| path.to_owned());
    short(one) == short(other)
}

fn setting<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let line = line.split('#').next()?;
        let (key, value) = line.split_once('=')?;
        (key.trim() == name).then(|| value.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Option<&str>) {
        let found = judge(text, "c", Path::new("/var/run/cdi")).map(|off| format!("{off:?}"));
        assert_eq!(
            found.map(|text| text.split(' ').next().unwrap_or_default().to_owned()).as_deref(),
            expected,
            "{text}"
        );
    }

    #[test]
    fn a_configuration_that_surely_has_cdi_off_is_told_from_one_that_may_have_it_on() {
        const CRI: &str = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n";
        check("", None);
        check("version = 3\n", None);
        check("version = 3\nenable_cdi = false # no\n", Some("Disabled"));
        check(CRI, Some("NotEnabled"));
        check(&format!("{CRI}  enable_cdi = true\n"), None);
        check("cdi_spec_dirs = [\"/etc/cdi\", \"/run/cdi\"]", None);
        check("cdi_spec_dirs = ['/etc/cdi']", Some("OtherDirs"));
        check("cdi_spec_dirs = [\n \"/run/cdi\" ]", None);
        check("#enable_cdi = false", None);
    }

    proptest::proptest! {
        #[test]
        fn no_configuration_makes_it_panic(text in "((enable_cdi|cdi_spec_dirs|version|io.containerd.grpc.v1.cri|[=\\[\\]'\"# \n]|\\PC)){0,40}") {
            let _ = judge(&text, "c", Path::new("/run/cdi"));
        }
    }
}
