//! A kubelet as a DRA driver sees one: it finds registration sockets, asks who
//! is there, dials the service socket once, sends claims and follows health.
//!
//! What it copies from the real kubelet, because drivers break on it:
//! - the registration socket is dialled with a percent-encoded path as
//!   `:authority` ([`authority`]); the service socket with `localhost`;
//! - `GetInfo` has one second, `NotifyRegistrationStatus` five, a call 45;
//! - the first service of the plugin's list that the kubelet knows is used, and
//!   one connection carries every call and the health stream;
//! - a prepare must answer each UID once: an unknown or a missing one fails the batch;
//! - a health entry that is not repeated within its timeout is unknown again;
//! - a start wipes the node's ResourceSlices before plugins register.

mod authority;
mod calls;
mod health;
mod registry;

pub use authority::{encode_authority, get_info};
pub use calls::{CallError, Outcome, Outcomes, Service};
pub use health::{DeviceHealth, HealthKey, HealthService};
pub use registry::Plugin;

use divvy_kubelet::dra::v1::Claim;
use registry::Registry;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Which DRA services this kubelet knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Versions {
    /// Kubernetes 1.34 and later.
    All,
    /// An older one: neither `v1.DRAPlugin` nor `v1.DRAResourceHealth`.
    OnlyV1beta1,
}

/// Called where the kubelet deletes all ResourceSlices of its node.
pub type Wipe = Arc<dyn Fn() + Send + Sync>;

/// How the kubelet behaves.
#[derive(Clone)]
pub struct KubeletOptions {
    pub versions: Versions,
    /// Deadline of a prepare or unprepare call.
    pub call_timeout: Duration,
    /// How many registrations are answered with `plugin_registered: false` first.
    pub refuse: u32,
    /// Runs at every start, before the first registration.
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
    stop: CancellationToken,
}

impl FakeKubelet {
    /// Starts on `<root>/plugins_registry`, which is made if it is not there.
    /// Must be called within a tokio runtime.
    pub fn start(root: &Path, options: KubeletOptions) -> std::io::Result<Self> {
        std::fs::create_dir_all(root.join("plugins_registry"))?;
        let (registry, stop) = Self::boot(root, &options);
        Ok(Self { root: root.to_owned(), options, registry, stop })
    }

    fn boot(root: &Path, options: &KubeletOptions) -> (Arc<Registry>, CancellationToken) {
        if let Some(wipe) = &options.wipe {
            wipe();
        }
        let stop = CancellationToken::new();
        let registry = Arc::new(Registry::new(options.clone(), stop.clone()));
        tokio::spawn(Arc::clone(&registry).watch(root.join("plugins_registry")));
        (registry, stop)
    }

    /// Ends this kubelet: connections close, nothing is called any more.
    pub fn stop(&self) {
        self.stop.cancel();
        self.registry.forget();
    }

    /// Stops and starts: slices are wiped, plugins register again.
    pub fn restart(&mut self) {
        self.stop();
        (self.registry, self.stop) = Self::boot(&self.root, &self.options);
    }

    /// The registered plugins of a driver, the most recent last.
    pub fn plugins(&self, driver: &str) -> Vec<Plugin> {
        self.registry.plugins(driver)
    }

    /// Errors of registrations so far, newest last.
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

    /// One NodePrepareResources to the driver's most recent instance.
    pub async fn prepare(&self, driver: &str, claims: &[Claim]) -> Result<Outcomes, CallError> {
        self.latest(driver)?.prepare(claims, self.options.call_timeout).await
    }

    /// One NodeUnprepareResources to the driver's most recent instance.
    pub async fn unprepare(&self, driver: &str, claims: &[Claim]) -> Result<Outcomes, CallError> {
        self.latest(driver)?.unprepare(claims, self.options.call_timeout).await
    }

    /// Prepares again and again, as for a pod that waits, until every claim is prepared.
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
