//! Finds registration sockets and registers their plugins.
//!
//! A plugin exists from the answer to `GetInfo` until its socket file is removed. A replaced file
//! is another plugin. A failed registration is retried with exponential back-off, as by the
//! kubelet's reconciler.

use super::KubeletOptions;
use super::Versions;
use super::authority::{get_info, notify};
use super::plugin::{HealthService, Plugin, Service, unix};
use divvy_kubelet::registration::{PluginInfo, RegistrationStatus};
use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;

/// How often the directory is scanned. The real kubelet uses inotify.
const SCAN_INTERVAL: Duration = Duration::from_millis(25);
/// Initial and maximum back-off of failed registrations.
const INITIAL_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(5);
/// The real kubelet waits five seconds; a shorter delay only makes tests faster.
const HEALTH_REOPEN_DELAY: Duration = Duration::from_millis(200);

/// The identity of a file: inode number and modification time, because inode numbers are soon reused.
type FileId = (u64, i64, i64);

#[derive(Default)]
struct State {
    /// In order of registration.
    registered: Vec<(PathBuf, FileId, Plugin, CancellationToken)>,
    failed: BTreeMap<(PathBuf, FileId), (Instant, Duration)>,
    errors: Vec<String>,
    refused: u32,
}

pub(super) struct Registry {
    options: KubeletOptions,
    stop: CancellationToken,
    state: Mutex<State>,
}

impl Registry {
    pub(super) fn new(options: KubeletOptions, stop: CancellationToken) -> Self {
        Self { options, stop, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn plugins(&self, driver: &str) -> Vec<Plugin> {
        let state = self.state();
        let of_driver = state.registered.iter().filter(|(_, _, plugin, _)| plugin.info.name == driver);
        of_driver.map(|(_, _, plugin, _)| plugin.clone()).collect()
    }

    pub(super) fn errors(&self) -> Vec<String> {
        self.state().errors.clone()
    }

    pub(super) fn forget(&self) {
        for (_, _, _, gone) in self.state().registered.drain(..) {
            gone.cancel();
        }
    }

    pub(super) async fn watch(self: Arc<Self>, folder: PathBuf) {
        while !self.stop.is_cancelled() {
            let found = sockets(&folder);
            self.drop_missing(&found);
            for (socket, file) in found {
                if self.is_due(&socket, file) {
                    self.register(&socket, file).await;
                }
            }
            tokio::time::sleep(SCAN_INTERVAL).await;
        }
    }

    fn drop_missing(&self, found: &[(PathBuf, FileId)]) {
        self.state().registered.retain(|(socket, file, _, gone)| {
            let there = found.iter().any(|(path, number)| path == socket && number == file);
            if !there {
                gone.cancel();
            }
            there
        });
    }

    fn is_due(&self, socket: &Path, file: FileId) -> bool {
        let state = self.state();
        let known = state.registered.iter().any(|(path, number, ..)| path == socket && *number == file);
        let waiting =
            state.failed.get(&(socket.to_owned(), file)).is_some_and(|(at, _)| Instant::now() < *at);
        !known && !waiting
    }

    async fn register(&self, socket: &Path, file: FileId) {
        match self.try_register(socket).await {
            Ok(plugin) if !self.stop.is_cancelled() => {
                let gone = self.stop.child_token();
                if let Some(service) = plugin.health_service {
                    let follow = plugin.clone().follow_health(service, HEALTH_REOPEN_DELAY);
                    let gone = gone.clone();
                    tokio::spawn(async move {
                        gone.run_until_cancelled(follow).await;
                    });
                }
                self.state().registered.push((socket.to_owned(), file, plugin, gone));
            }
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(socket = %socket.display(), error, "registration failed");
                let mut state = self.state();
                state.errors.push(error);
                let key = (socket.to_owned(), file);
                let pause = state.failed.get(&key).map_or(INITIAL_BACKOFF, |(_, last)| *last * 2);
                let pause = pause.min(MAX_BACKOFF);
                state.failed.insert(key, (Instant::now() + pause, pause));
            }
        }
    }

    async fn try_register(&self, socket: &Path) -> Result<Plugin, String> {
        let info = get_info(socket).await?;
        let refusal = self.validate(&info).and_then(|service| {
            let mut state = self.state();
            if state.refused < self.options.refuse {
                state.refused += 1;
                return Err("the fake kubelet refuses this registration by its options".to_owned());
            }
            Ok(service)
        });
        let service = match refusal {
            Ok(service) => service,
            Err(error) => {
                let status = RegistrationStatus { plugin_registered: false, error: error.clone() };
                // The registration has failed, whatever the plugin answers.
                let _ = notify(socket, status).await;
                return Err(error);
            }
        };
        let dials = Arc::new(AtomicUsize::new(0));
        let connector = unix(PathBuf::from(&info.endpoint), Some(Arc::clone(&dials)));
        let channel = Endpoint::from_static("http://localhost").connect_with_connector_lazy(connector);
        notify(socket, RegistrationStatus { plugin_registered: true, error: String::new() }).await?;
        Ok(Plugin {
            health_service: health_service(&info, self.options.versions),
            info,
            registration_socket: socket.to_owned(),
            service,
            channel,
            cache: Arc::default(),
            dials,
        })
    }

    fn validate(&self, info: &PluginInfo) -> Result<Service, String> {
        if info.r#type != divvy_kubelet::PLUGIN_TYPE {
            return Err(format!("plugin type {:?} is not known", info.r#type));
        }
        if info.name.is_empty() || info.endpoint.is_empty() {
            return Err("name or endpoint is empty".to_owned());
        }
        let known = |version: &String| match (version.as_str(), self.options.versions) {
            ("v1.DRAPlugin", Versions::All) => Some(Service::V1),
            ("v1beta1.DRAPlugin", _) => Some(Service::V1beta1),
            _ => None,
        };
        let chosen = info.supported_versions.iter().find_map(known);
        chosen.ok_or_else(|| format!("none of {:?} is supported", info.supported_versions))
    }
}

/// The kubelet prefers v1, whatever the order of the plugin's list.
fn health_service(info: &PluginInfo, versions: Versions) -> Option<HealthService> {
    let offers = |name: &str| info.supported_versions.iter().any(|version| version == name);
    if versions == Versions::All && offers("v1.DRAResourceHealth") {
        Some(HealthService::V1)
    } else if offers("v1alpha1.DRAResourceHealth") {
        Some(HealthService::V1alpha1)
    } else {
        None
    }
}

fn sockets(folder: &Path) -> Vec<(PathBuf, FileId)> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        if let Ok(data) = entry.metadata()
            && data.file_type().is_socket()
            && !hidden
        {
            found.push((entry.path(), (data.ino(), data.mtime(), data.mtime_nsec())));
        }
    }
    found.sort();
    found
}
