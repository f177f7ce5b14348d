//! A fake kubelet, from the view of a DRA driver: it finds registration sockets, registers the
//! plugins, sends claims to the service socket, follows the health stream and lists its pods.

// It copies these properties of the real kubelet, because drivers can fail on them.
//
// It calls the registration socket with a percent-encoded path as `:authority` (see `authority.rs`), and the
// service socket with `localhost`.
//
// `GetInfo` must answer within one second, `NotifyRegistrationStatus` within five, a call within 45.
//
// It uses the first service in the plugin's list that it supports. One connection carries all calls
// and health.
//
// The answer to a prepare must contain each UID once. An unknown or a missing UID fails the whole call.
//
// A health entry that is not repeated within its timeout becomes unknown.
//
// At its start it deletes the node's ResourceSlices before plugins register.

mod authority;
mod plugin;
mod pod_resources;
mod registry;

pub use authority::{encode_authority, get_info};
pub use plugin::{CallError, DeviceHealth, HealthKey, HealthService, Outcome, Outcomes, Plugin, Service};
pub use pod_resources::PodResourcesMode;

use divvy_kubelet::dra::v1::Claim;
use pod_resources::KnownClaims;
use registry::Registry;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// The DRA services that this kubelet supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Versions {
    /// Kubernetes 1.34 and later.
    All,
    /// An older kubelet: neither `v1.DRAPlugin` nor `v1.DRAResourceHealth`.
    OnlyV1beta1,
}

/// Called when the kubelet deletes all ResourceSlices of its node.
pub type Wipe = Arc<dyn Fn() + Send + Sync>;

/// Options of the fake kubelet.
#[derive(Clone)]
pub struct KubeletOptions {
    pub versions: Versions,
    /// Timeout of a prepare or unprepare call.
    pub call_timeout: Duration,
    /// The number of registrations to refuse first (`plugin_registered: false`).
    pub refuse: u32,
    /// Called at every start, before the first registration.
    pub wipe: Option<Wipe>,
}

impl Default for KubeletOptions {
    fn default() -> Self {
        Self { versions: Versions::All, call_timeout: Duration::from_secs(45), refuse: 0, wipe: None }
    }
}

/// A running kubelet over one root directory.
pub struct FakeKubelet {
    root: PathBuf,
    options: KubeletOptions,
    registry: Arc<Registry>,
    known: KnownClaims,
    stop: CancellationToken,
}

impl FakeKubelet {
    /// Starts on `<root>/plugins_registry`, which is created if it is missing. Must be called within a tokio
    /// runtime.
    pub fn start(root: &Path, options: KubeletOptions) -> std::io::Result<Self> {
        std::fs::create_dir_all(root.join("plugins_registry"))?;
        let known = KnownClaims::new();
        let (registry, stop) = Self::boot(root, &options, &known);
        Ok(Self { root: root.to_owned(), options, registry, known, stop })
    }

    fn boot(
        root: &Path,
        options: &KubeletOptions,
        known: &KnownClaims,
    ) -> (Arc<Registry>, CancellationToken) {
        if let Some(wipe) = &options.wipe {
            wipe();
        }
        let stop = CancellationToken::new();
        let registry = Arc::new(Registry::new(options.clone(), stop.clone()));
        tokio::spawn(Arc::clone(&registry).watch(root.join("plugins_registry")));
        tokio::spawn(known.clone().serve(root.to_owned(), stop.clone()));
        (registry, stop)
    }

    /// Stops this kubelet: it closes its connections and calls no plugin any more.
    pub fn stop(&self) {
        self.stop.cancel();
        self.registry.forget();
    }

    /// Restarts: slices are deleted, and plugins are registered again.
    pub fn restart(&mut self) {
        self.stop();
        (self.registry, self.stop) = Self::boot(&self.root, &self.options, &self.known);
    }

    /// Changes how the pod-resources API answers.
    pub fn set_pod_resources(&self, mode: PodResourcesMode) {
        self.known.set_mode(mode);
    }

    /// Removes the claim's pod from the list, as a deletion by force does. The driver is not called.
    pub fn delete_pod_by_force(&self, claim: &Claim) {
        self.known.remove(claim);
    }

    /// The registered plugins of a driver, in order of registration.
    pub fn plugins(&self, driver: &str) -> Vec<Plugin> {
        self.registry.plugins(driver)
    }

    /// The errors of all registrations so far, oldest first.
    pub fn registration_errors(&self) -> Vec<String> {
        self.registry.errors()
    }

    /// Waits until `count` instances of the driver are registered.
    pub async fn wait_registered(
        &self,
        driver: &str,
        count: usize,
        within: Duration,
    ) -> Result<(), CallError> {
        let deadline = tokio::time::Instant::now() + within;
        while self.plugins(driver).len() != count {
            if tokio::time::Instant::now() > deadline {
                return Err(CallError::NotRegistered {
                    driver: driver.to_owned(),
                    errors: self.registration_errors().join("; "),
                });
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    /// Calls NodePrepareResources on the driver's most recently registered plugin.
    pub async fn prepare(&self, driver: &str, claims: &[Claim]) -> Result<Outcomes, CallError> {
        let outcomes = self.latest(driver)?.prepare(claims, self.options.call_timeout).await?;
        for claim in claims {
            if let Some(Ok(devices)) = outcomes.get(&claim.uid) {
                self.known.prepared(driver, claim, devices);
            }
        }
        Ok(outcomes)
    }

    /// Calls NodeUnprepareResources on the driver's most recently registered plugin.
    pub async fn unprepare(&self, driver: &str, claims: &[Claim]) -> Result<Outcomes, CallError> {
        let outcomes = self.latest(driver)?.unprepare(claims, self.options.call_timeout).await?;
        for claim in claims.iter().filter(|claim| matches!(outcomes.get(&claim.uid), Some(Ok(_)))) {
            self.known.remove(claim);
        }
        Ok(outcomes)
    }

    /// Repeats prepare, as for a waiting pod, until every claim is prepared or `within` has passed.
    pub async fn prepare_until_ok(
        &self,
        driver: &str,
        claims: &[Claim],
        within: Duration,
    ) -> Result<Outcomes, CallError> {
        let deadline = tokio::time::Instant::now() + within;
        loop {
            let last = match self.prepare(driver, claims).await {
                Ok(outcomes) if outcomes.values().all(Result::is_ok) => return Ok(outcomes),
                other => other,
            };
            if tokio::time::Instant::now() > deadline {
                return last;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn latest(&self, driver: &str) -> Result<Plugin, CallError> {
        self.plugins(driver).pop().ok_or_else(|| CallError::NotRegistered {
            driver: driver.to_owned(),
            errors: self.registration_errors().join("; "),
        })
    }
}

impl Drop for FakeKubelet {
    fn drop(&mut self) {
        self.stop();
    }
}
