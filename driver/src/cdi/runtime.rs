//! Checks whether the container runtime reads CDI files. With CDI off, containers start without their
//! GPUs or fail, long after the prepare succeeded, so a warning at start-up helps.
//!
//! Only plain settings are understood, and includes are not followed: no finding means "unknown".

use std::path::Path;

/// Usual configuration files of runtimes.
pub const CONFIGS: [&str; 2] = ["/etc/containerd/config.toml", "/etc/crio/crio.conf"];

/// Why containers would not get their devices.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CdiOff {
    #[error(
        "this runtime has CDI off: {config} sets enable_cdi = false; set it to true and restart the runtime"
    )]
    Disabled { config: String },
    #[error("this runtime has CDI off: {config} is of containerd 1.x, which needs enable_cdi = true")]
    NotEnabled { config: String },
    #[error(
        "this runtime does not read {cdi_dir}: {config} sets cdi_spec_dirs = {dirs}; add the directory, or \
         choose another with --cdi-dir"
    )]
    OtherDirs { config: String, cdi_dir: String, dirs: String },
}

/// Checks the runtime's configuration, if there is one. `local` is its path in this process.
pub fn check(config: &Path, local: &Path, cdi_dir: &Path) -> Option<CdiOff> {
    check_text(&std::fs::read_to_string(local).ok()?, &config.to_string_lossy(), cdi_dir)
}

fn check_text(text: &str, config: &str, cdi_dir: &Path) -> Option<CdiOff> {
    let config = config.to_owned();
    match setting(text, "enable_cdi") {
        Some("false") => return Some(CdiOff::Disabled { config }),
        // containerd 2 writes version 3, and has CDI on by default.
        None if setting(text, "version") == Some("2") && text.contains("io.containerd.grpc.v1.cri") => {
            return Some(CdiOff::NotEnabled { config });
        }
        _ => {}
    }
    let dirs = setting(text, "cdi_spec_dirs")?;
    let listed = dirs.contains(['"', '\'']) && dirs.ends_with(']');
    let reads = dirs.split(['"', '\'']).any(|dir| same_dir(Path::new(dir), cdi_dir));
    (listed && !reads).then(|| CdiOff::OtherDirs {
        config,
        cdi_dir: cdi_dir.to_string_lossy().into_owned(),
        dirs: dirs.to_owned(),
    })
}

/// Whether two directories are the same; `/var/run` is `/run` on every node that has both.
fn same_dir(one: &Path, other: &Path) -> bool {
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
        let found = check_text(text, "c", Path::new("/var/run/cdi")).map(|off| format!("{off:?}"));
        assert_eq!(
            found.map(|text| text.split(' ').next().unwrap_or_default().to_owned()).as_deref(),
            expected,
            "{text}"
        );
    }

    #[test]
    fn only_configurations_with_cdi_off_are_reported() {
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
        fn no_configuration_causes_a_panic(
            text in "((enable_cdi|cdi_spec_dirs|version|io.containerd.grpc.v1.cri|\
                [=\\[\\]'\"# \n]|\\PC)){0,40}",
        ) {
            let _ = check_text(&text, "c", Path::new("/run/cdi"));
        }
    }
}
