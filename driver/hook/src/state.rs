//! Where the container's root is: the runtime's word, by the OCI runtime
//! specification. State comes on stdin and names the bundle, whose `config.json`
//! names the root. Both are the runtime's, not the image's.

use serde::Deserialize;
use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;

/// No runtime writes more.
const LARGEST_STATE: u64 = 1 << 20;
const LARGEST_CONFIG: u64 = 16 << 20;

/// Why the container's root is not known.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("OCI state on stdin cannot be read")]
    State(#[source] io::Error),
    #[error("{path} cannot be read")]
    Config {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

#[derive(Deserialize)]
struct State {
    bundle: PathBuf,
}

#[derive(Deserialize)]
struct Config {
    root: ConfigRoot,
}

#[derive(Deserialize)]
struct ConfigRoot {
    path: PathBuf,
}

/// Reads OCI state and answers the container's root on the host.
pub fn rootfs(state: impl Read) -> Result<PathBuf, StateError> {
    let state: State = parse(state, LARGEST_STATE).map_err(StateError::State)?;
    let path = state.bundle.join("config.json");
    let config = File::open(&path).and_then(|file| parse::<Config>(file, LARGEST_CONFIG));
    let config = config.map_err(|cause| StateError::Config { path, cause })?;
    Ok(state.bundle.join(config.root.path))
}

fn parse<T: serde::de::DeserializeOwned>(from: impl Read, largest: u64) -> io::Result<T> {
    let mut bytes = Vec::new();
    from.take(largest).read_to_end(&mut bytes)?;
    Ok(serde_json::from_slice(&bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(config: &str, expect: Option<&str>) {
        let bundle = tempfile::tempdir().unwrap();
        std::fs::write(bundle.path().join("config.json"), config).unwrap();
        let state =
            serde_json::json!({"ociVersion": "1.2.0", "bundle": bundle.path(), "id": "x"}).to_string();
        let found = rootfs(state.as_bytes()).ok();
        assert_eq!(found, expect.map(|path| bundle.path().join(path)), "{config}");
    }

    #[test]
    fn root_is_relative_to_the_bundle_or_absolute() {
        check(r#"{"root": {"path": "rootfs"}, "process": {}}"#, Some("rootfs"));
        check(r#"{"root": {"path": "/run/x/rootfs", "readonly": true}}"#, Some("/run/x/rootfs"));
        check(r#"{"process": {}}"#, None);
        check("", None);
    }

    #[test]
    fn endless_state_is_refused() {
        assert!(rootfs(io::repeat(b' ')).is_err());
    }
}
