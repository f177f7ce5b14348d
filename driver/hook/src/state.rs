//! Which container, and where its root is: the runtime's word, by the OCI runtime
//! specification. State comes on stdin and names the container, its first process
//! and the bundle, whose `config.json` names the root. All are the runtime's, not
//! the image's.

use serde::Deserialize;
use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;

/// No runtime writes more.
const LARGEST_STATE: u64 = 1 << 20;
const LARGEST_CONFIG: u64 = 16 << 20;
const LONGEST_ID: usize = 200;

/// What the runtime says of the container.
#[derive(Debug, Deserialize)]
pub struct State {
    pub id: ContainerId,
    /// Its first process, as the host numbers it; absent where there is none.
    #[serde(default)]
    pub pid: u32,
    #[serde(default)]
    pub status: String,
    bundle: PathBuf,
}

/// The runtime's name of a container, which is also the name of a file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct ContainerId(String);

impl ContainerId {
    /// As text: letters, digits, `-`, `_` and `.`, never hidden, never a path.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for ContainerId {
    type Error = String;
    fn try_from(id: String) -> Result<Self, Self::Error> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        match !id.is_empty() && id.len() <= LONGEST_ID && !id.starts_with('.') && id.chars().all(plain) {
            true => Ok(Self(id)),
            false => Err(format!("container id {id:?} cannot name a file")),
        }
    }
}

/// Why the container is not known.
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
struct Config {
    root: ConfigRoot,
}

#[derive(Deserialize)]
struct ConfigRoot {
    path: PathBuf,
}

impl State {
    /// Reads OCI state.
    pub fn read(state: impl Read) -> Result<Self, StateError> {
        parse(state, LARGEST_STATE).map_err(StateError::State)
    }

    /// The container's root on the host.
    pub fn rootfs(&self) -> Result<PathBuf, StateError> {
        let path = self.bundle.join("config.json");
        let config = File::open(&path).and_then(|file| parse::<Config>(file, LARGEST_CONFIG));
        let config = config.map_err(|cause| StateError::Config { path, cause })?;
        Ok(self.bundle.join(config.root.path))
    }
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
    fn endless_state_is_refused() {
        assert!(State::read(io::repeat(b' ')).is_err());
    }

    #[test]
    fn a_container_id_names_a_file_and_no_path() {
        let read =
            |id: &str| State::read(serde_json::json!({"bundle": "/b", "id": id}).to_string().as_bytes());
        assert_eq!(read("4f-A_b.1").unwrap().id.as_str(), "4f-A_b.1");
        for id in ["", ".x", "..", "a/b", "a\0", &"x".repeat(201)] {
            assert!(read(id).is_err(), "{id:?}");
        }
    }
}
