//! The registration service, and the two sockets between the kubelet and this driver.
//!
//! The service socket is created before the registration socket, because the kubelet connects to it as
//! soon as it has read `GetInfo`; they are removed in reverse. The registration socket answers for
//! the life of the daemon, because a restarted kubelet registers plugins again. Two instances in a
//! rolling update have their own sockets, named by pod UID.

use crate::paths::HostPaths;
use divvy_api::names::DRIVER;
use divvy_kubelet::registration::registration_server::Registration;
use divvy_kubelet::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use sha2::{Digest, Sha256};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tonic::{Request, Response, Status};

/// Maximum length of a socket path in bytes, without the terminating zero (`sun_path` has 108).
const SOCKET_PATH_MAX_BYTES: usize = 107;

/// UID of the pod in which this daemon runs, if two may run at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodUid(String);

/// A text that is not a pod UID.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a pod UID has 1 to 63 letters, digits and dashes")]
pub struct PodUidError;

impl FromStr for PodUid {
    type Err = PodUidError;

    fn from_str(text: &str) -> Result<Self, PodUidError> {
        let fits = (1..=63).contains(&text.len())
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        if fits { Ok(Self(text.to_owned())) } else { Err(PodUidError) }
    }
}

/// Paths of the two sockets.
///
/// The kubelet sends the percent-encoded path of the registration socket as HTTP/2 `:authority`. Rust's
/// `http` crate refuses it as a host, but accepts it as user information before an `@`. So the
/// name has an `@`, followed only by characters of a host name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sockets {
    pub service: PathBuf,
    pub registration: PathBuf,
}

/// Why a socket could not be created.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    #[error(
        "no socket path in {dir} is short enough ({SOCKET_PATH_MAX_BYTES} bytes); use a shorter \
         --kubelet-root"
    )]
    TooLong { dir: PathBuf },
    #[error("cannot listen on {path}")]
    Listen {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

impl Sockets {
    /// Fixed names for a single instance, or names by pod UID. If a path is too long for a socket
    /// address, a shorter, hashed name is used.
    pub fn choose(paths: &HostPaths, instance: Option<&PodUid>) -> Result<Self, SocketError> {
        let (service, registration) = match instance {
            None => {
                (vec!["dra.sock".to_owned()], vec![format!("{DRIVER}@reg.sock"), "dra@reg.sock".to_owned()])
            }
            Some(PodUid(uid)) => {
                let hash = hash(uid);
                let (short, long) = (&hash[..16], &hash[..32]);
                (
                    vec![format!("dra-{uid}.sock"), format!("dra-{short}.sock")],
                    vec![
                        format!("{DRIVER}@{uid}.sock"),
                        format!("{DRIVER}@{short}.sock"),
                        format!("dra@{long}.sock"),
                    ],
                )
            }
        };
        Ok(Self {
            service: first_fit(&paths.plugin_dir(), &service)?,
            registration: first_fit(&paths.registry_dir(), &registration)?,
        })
    }
}

/// Digest in lower-case hexadecimal. It includes the driver's name, so that two drivers in one pod differ.
fn hash(uid: &str) -> String {
    let digest = Sha256::new().chain_update(DRIVER).chain_update([0]).chain_update(uid).finalize();
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn first_fit(dir: &Path, names: &[String]) -> Result<PathBuf, SocketError> {
    let mut paths = names.iter().map(|name| dir.join(name));
    paths
        .find(|path| path.as_os_str().len() <= SOCKET_PATH_MAX_BYTES)
        .ok_or_else(|| SocketError::TooLong { dir: dir.to_owned() })
}

/// The file of a listening socket. It is removed when this is dropped, unless another instance replaced it.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: Identity,
}

/// Inode number and time, because an inode number alone is soon reused.
type Identity = (u64, i64, i64);

fn identity(path: &Path) -> io::Result<Identity> {
    let data = std::fs::symlink_metadata(path)?;
    Ok((data.ino(), data.mtime(), data.mtime_nsec()))
}

impl SocketFile {
    /// Listens on the path, and replaces an existing file. Only the owner may connect.
    pub fn listen(path: &Path) -> Result<(Self, UnixListener), SocketError> {
        let attempt = || {
            match std::fs::remove_file(path) {
                Err(cause) if cause.kind() != io::ErrorKind::NotFound => return Err(cause),
                _ => {}
            }
            let listener = UnixListener::bind(path)?;
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
            Ok((listener, identity(path)?))
        };
        let (listener, identity) =
            attempt().map_err(|cause| SocketError::Listen { path: path.to_owned(), cause })?;
        Ok((Self { path: path.to_owned(), identity }, listener))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|found| found == self.identity) {
            // If the removal fails, the next start replaces the file.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Removes sockets of earlier instances without a listener: the kubelet would try to connect to a dead
/// registration socket forever.
pub fn remove_dead_sockets(sockets: &Sockets) {
    for (socket, prefix) in
        [(&sockets.registration, format!("{DRIVER}@")), (&sockets.service, "dra-".to_owned())]
    {
        let Some(entries) = socket.parent().and_then(|dir| std::fs::read_dir(dir).ok()) else { continue };
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let ours = name.starts_with(&prefix) && name.ends_with(".sock") && path != *socket;
            if ours
                && UnixStream::connect(&path).is_err_and(|err| err.kind() == io::ErrorKind::ConnectionRefused)
            {
                match std::fs::remove_file(&path) {
                    Ok(()) => {
                        tracing::info!(socket = %path.display(), "socket of an earlier instance removed")
                    }
                    Err(cause) => {
                        tracing::warn!(
                            socket = %path.display(), %cause,
                            "cannot remove a socket without listener"
                        )
                    }
                }
            }
        }
    }
}

/// State of the registration with the kubelet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegistrationState {
    Pending,
    Registered,
    Refused { error: String },
}

/// The registration service.
pub struct Registrar {
    endpoint: String,
    status: watch::Sender<RegistrationState>,
}

impl Registrar {
    /// Offers the given service socket; the kubelet's answer is sent to `status`.
    pub fn new(service: &Path, status: watch::Sender<RegistrationState>) -> Self {
        Self { endpoint: service.to_string_lossy().into_owned(), status }
    }
}

#[tonic::async_trait]
impl Registration for Registrar {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: divvy_kubelet::PLUGIN_TYPE.to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.endpoint.clone(),
            supported_versions: divvy_kubelet::SUPPORTED_VERSIONS.map(str::to_owned).to_vec(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let RegistrationStatus { plugin_registered, error } = request.into_inner();
        if plugin_registered {
            tracing::info!("registered with the kubelet");
            self.status.send_replace(RegistrationState::Registered);
        } else {
            tracing::error!(error, "the kubelet refused the registration; it will retry");
            self.status.send_replace(RegistrationState::Refused { error });
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0d5b1f0e-6c1b-4a39-9a55-3f6a0d6c2b11";

    fn paths(root: &str) -> HostPaths {
        HostPaths { kubelet_root: PathBuf::from(root), ..HostPaths::below(Path::new("/")) }
    }

    fn check(root: &str, uid: Option<&str>, service: &str, registration: &str) {
        let uid = uid.map(|uid| uid.parse().unwrap());
        let sockets = Sockets::choose(&paths(root), uid.as_ref()).unwrap();
        let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
        assert_eq!(
            (name(&sockets.service).as_str(), name(&sockets.registration).as_str()),
            (service, registration)
        );
        for path in [sockets.service, sockets.registration] {
            assert!(path.as_os_str().len() <= SOCKET_PATH_MAX_BYTES);
        }
    }

    #[test]
    fn socket_names_shrink_until_they_fit() {
        let uid = format!("{UID}.sock");
        check("/var/lib/kubelet", None, "dra.sock", "gpu.divvy.dev@reg.sock");
        check("/var/lib/kubelet", Some(UID), &format!("dra-{uid}"), &format!("gpu.divvy.dev@{uid}"));
        let digest = hash(UID);
        let root = format!("/{}", "k".repeat(45));
        check(
            &root,
            Some(UID),
            &format!("dra-{}.sock", &digest[..16]),
            &format!("gpu.divvy.dev@{}.sock", &digest[..16]),
        );
        assert!(Sockets::choose(&paths(&format!("/{}", "k".repeat(90))), None).is_err());
    }

    #[test]
    fn every_registration_socket_can_be_addressed_by_the_kubelet() {
        for uid in [None, Some(UID.parse().unwrap())] {
            let sockets = Sockets::choose(&paths("/var/lib/kubelet"), uid.as_ref()).unwrap();
            let encoded = sockets.registration.to_string_lossy().replace('/', "%2F");
            assert!(encoded.parse::<tonic::codegen::http::uri::Authority>().is_ok(), "{encoded}");
        }
    }

    #[test]
    fn pod_uid_is_safe_in_a_file_name() {
        for bad in ["", "../x", "a/b", "a@b", "a b", &"a".repeat(64)] {
            assert_eq!(bad.parse::<PodUid>(), Err(PodUidError));
        }
    }

    #[tokio::test]
    async fn socket_replaced_by_another_instance_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let first = SocketFile::listen(&path).unwrap();
        let second = SocketFile::listen(&path).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn only_dead_sockets_of_this_driver_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let paths = paths(&root.path().to_string_lossy());
        std::fs::create_dir_all(paths.registry_dir()).unwrap();
        std::fs::create_dir_all(paths.plugin_dir()).unwrap();
        let make = |name: &str| {
            let path = paths.registry_dir().join(name);
            (std::os::unix::net::UnixListener::bind(&path).unwrap(), path)
        };
        let dead = ["gpu.divvy.dev@dead.sock", "other.dev@dead.sock"].map(|name| make(name).1);
        let (_alive, alive) = make("gpu.divvy.dev@alive.sock");
        remove_dead_sockets(&Sockets::choose(&paths, None).unwrap());
        assert_eq!([dead[0].exists(), dead[1].exists(), alive.exists()], [false, true, true]);
    }
}
