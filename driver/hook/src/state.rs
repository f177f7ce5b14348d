//! The OCI state of the container, by the OCI runtime specification. The state on stdin names the
//! container, its first process and the bundle, whose `config.json` names the root. All of it comes
//! from the runtime, not from the image.

use serde::Deserialize;
use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;

/// Larger input is rejected; runtimes write far less.
const MAX_STATE_BYTES: u64 = 1 << 20;
const MAX_CONFIG_BYTES: u64 = 16 << 20;
const MAX_ID_BYTES: usize = 200;

/// The OCI state of the container.
#[derive(Debug, Deserialize)]
pub struct State {
    pub id: ContainerId,
    /// PID of the first process in the host's namespace; 0 if there is none.
    #[serde(default)]
    pub pid: u32,
    #[serde(default)]
    pub status: String,
    bundle: PathBuf,
}

/// The runtime's id of a container. It is used as a file name.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct ContainerId(String);

impl ContainerId {
    /// The id: letters, digits, `-`, `_` and `.`, without a leading `.`, so it is neither a path
    /// nor hidden.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for ContainerId {
    type Error = String;
    fn try_from(id: String) -> Result<Self, Self::Error> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        match !id.is_empty() && id.len() <= MAX_ID_BYTES && !id.starts_with('.') && id.chars().all(plain) {
            true => Ok(Self(id)),
            false => Err(format!("container id {id:?} cannot be a file name")),
        }
    }
}

/// Why the state cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("cannot read the OCI state on stdin")]
    State(#[source] io::Error),
    #[error("cannot read {path}")]
    Config {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

#[derive(Deserialize)]
struct Config {
    root: ConfigRoot,
}

#[derive(Deserialize)]
struct ConfigRoot {
    path: PathBuf,
}

impl State {
    /// Reads the OCI state.
    pub fn read(state: impl Read) -> Result<Self, StateError> {
        parse(state, MAX_STATE_BYTES).map_err(StateError::State)
    }

    /// The path of the container's root on the host.
    pub fn rootfs(&self) -> Result<PathBuf, StateError> {
        let path = self.bundle.join("config.json");
        let config = File::open(&path).and_then(|file| parse::<Config>(file, MAX_CONFIG_BYTES));
        let config = config.map_err(|cause| StateError::Config { path, cause })?;
        Ok(self.bundle.join(config.root.path))
    }
}

fn parse<T: serde::de::DeserializeOwned>(from: impl Read, max_bytes: u64) -> io::Result<T> {
    let mut bytes = Vec::new();
    from.take(max_bytes).read_to_end(&mut bytes)?;
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
        let found = State::read(state.as_bytes()).and_then(|state| state.rootfs()).ok();
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
    fn endless_state_is_rejected() {
        assert!(State::read(io::repeat(b' ')).is_err());
    }

    #[test]
    fn container_id_must_be_a_plain_file_name() {
        let read =
            |id: &str| State::read(serde_json::json!({"bundle": "/b", "id": id}).to_string().as_bytes());
        assert_eq!(read("4f-A_b.1").unwrap().id.as_str(), "4f-A_b.1");
        for id in ["", ".x", "..", "a/b", "a\0", &"x".repeat(201)] {
            assert!(read(id).is_err(), "{id:?}");
        }
    }
}
