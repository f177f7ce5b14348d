//! Prometheus metrics of the controller.

use divvy_daemon::process::Process;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReviewLabels {
    kind: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClosingLabels {
    state: &'static str,
}

/// The states of a closing, in the order of [`Metrics::closings`].
const CLOSING_STATES: [&str; 3] = ["waiting", "allocated", "approved"];

/// All metrics of the controller. Clones share their values.
#[derive(Clone)]
pub struct Metrics {
    shared: Arc<Shared>,
}

struct Shared {
    registry: Mutex<Registry>,
    reviews: Family<ReviewLabels, Counter>,
    review: Histogram,
    closings: Family<ClosingLabels, Gauge>,
    removed: Gauge,
    leader: Gauge,
    slices: Gauge,
    profiles: Gauge,
    classes: Gauge,
    templates: Gauge,
    taken: Gauge,
    expires: Gauge,
    ready: Gauge,
    process: Process,
}

impl Default for Metrics {
    fn default() -> Self {
        let shared = Shared {
            registry: Mutex::default(),
            reviews: Family::default(),
            // From a review without API reads to the webhook's timeout, in seconds.
            review: Histogram::new([
                0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
            ]),
            closings: Family::default(),
            removed: Gauge::default(),
            leader: Gauge::default(),
            slices: Gauge::default(),
            profiles: Gauge::default(),
            classes: Gauge::default(),
            templates: Gauge::default(),
            taken: Gauge::default(),
            expires: Gauge::default(),
            ready: Gauge::default(),
            process: Process::default(),
        };
        let mut registry = Registry::default();
        shared.register(&mut registry);
        Self { shared: Arc::new(Shared { registry: Mutex::new(registry), ..shared }) }
    }
}

impl Shared {
    fn register(&self, registry: &mut Registry) {
        let build = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("divvy_build", "Version of this program", build);
        registry.register(
            "divvy_reviews",
            "Admission reviews by kind of object and result",
            self.reviews.clone(),
        );
        registry.register_with_unit(
            "divvy_review",
            "Time to answer an admission review",
            Unit::Seconds,
            self.review.clone(),
        );
        registry.register(
            "divvy_closings",
            "Modes of GPUs that are off and still published, by what they wait for",
            self.closings.clone(),
        );
        let gauges = [
            (
                "divvy_allocated_after_removal",
                "Claims that are allocated on devices that were removed",
                &self.removed,
            ),
            ("divvy_leader", "1 while this replica holds the lease and writes", &self.leader),
            ("divvy_slices_seen", "ResourceSlices of Divvy that the controller has indexed", &self.slices),
            ("divvy_mig_profiles", "MIG profiles that some node offers", &self.profiles),
            (
                "divvy_profile_classes",
                "DeviceClasses of MIG profiles that the controller manages",
                &self.classes,
            ),
            (
                "divvy_ported_templates",
                "ResourceClaimTemplates of pods with requests of other GPU schedulers",
                &self.templates,
            ),
            (
                "divvy_names_taken",
                "Names of DeviceClasses and extended resources that another owner already uses",
                &self.taken,
            ),
            ("divvy_ready", "1 while /readyz reports ready", &self.ready),
        ];
        for (name, help, gauge) in gauges {
            registry.register(name, help, gauge.clone());
        }
        registry.register_with_unit(
            "divvy_certificate_expiry_timestamp",
            "Expiry of the webhook's certificate, since the epoch; \
             0 if the controller does not manage the certificate",
            Unit::Seconds,
            self.expires.clone(),
        );
        self.process.register(registry);
    }
}

impl Metrics {
    /// Counts an answered review and its duration.
    pub fn reviewed(&self, kind: &'static str, result: &'static str, took: Duration) {
        self.shared.reviews.get_or_create(&ReviewLabels { kind, result }).inc();
        self.shared.review.observe(took.as_secs_f64());
    }

    /// Sets the number of closings in each state, and of claims on removed devices.
    pub fn closings(&self, counts: [usize; 3], removed: usize) {
        for (state, count) in CLOSING_STATES.into_iter().zip(counts) {
            self.shared.closings.get_or_create(&ClosingLabels { state }).set(count as i64);
        }
        self.shared.removed.set(removed as i64);
    }

    /// Sets whether this replica is the leader.
    pub fn leads(&self, leads: bool) {
        self.shared.leader.set(leads.into());
    }

    /// Sets the number of indexed ResourceSlices.
    pub fn slices(&self, count: usize) {
        self.shared.slices.set(count as i64);
    }

    /// Sets the number of MIG profiles that nodes offer.
    pub fn profiles(&self, count: usize) {
        self.shared.profiles.set(count as i64);
    }

    /// Sets the number of managed DeviceClasses.
    pub fn classes(&self, count: usize) {
        self.shared.classes.set(count as i64);
    }

    /// Sets the number of ResourceClaimTemplates of ported pods.
    pub fn templates(&self, count: usize) {
        self.shared.templates.set(count as i64);
    }

    /// Sets the number of names that another owner uses.
    pub fn names_taken(&self, count: usize) {
        self.shared.taken.set(count as i64);
    }

    /// Sets the certificate's expiry, in seconds since the epoch.
    pub fn certificate_expires(&self, at: i64) {
        self.shared.expires.set(at);
    }

    /// Encodes all metrics as OpenMetrics text.
    pub fn render(&self, ready: bool) -> Result<String, std::fmt::Error> {
        self.shared.ready.set(ready.into());
        self.shared.process.update();
        let registry = self.shared.registry.lock().unwrap_or_else(PoisonError::into_inner);
        let mut out = String::new();
        encode(&mut out, &registry)?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scrape_contains_recorded_values() {
        let metrics = Metrics::default();
        metrics.reviewed("Pod", "refused", Duration::from_millis(1));
        metrics.leads(true);
        let text = metrics.render(true).unwrap();
        for line in [
            "divvy_reviews_total{kind=\"Pod\",result=\"refused\"} 1",
            "divvy_review_seconds_count 1",
            "divvy_leader 1",
            "divvy_certificate_expiry_timestamp_seconds 0",
            "divvy_ready 1",
            "process_resident_memory_bytes ",
        ] {
            assert!(text.lines().any(|found| found.starts_with(line)), "{line} is not in\n{text}");
        }
    }
}
