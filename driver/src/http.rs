//! `/metrics`, `/livez` and `/readyz`.
//!
//! Ready means: a claim that the scheduler places here would be prepared. Each
//! condition has a name and, while it is not met, a sentence; `/readyz` prints
//! them all. Alive means only that this daemon still answers: a GPU that hangs
//! is not cured by a restart.

use crate::metrics::Metrics;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// What must be true before claims can be prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Condition {
    /// Local recovery has ended.
    Recovered,
    /// The GPU driver is there.
    GpuDriver,
    /// CDI files can be written and have what they need.
    Cdi,
    /// The pool is published.
    Published,
    /// The kubelet knows us.
    Registered,
}

impl Condition {
    const ALL: [Self; 5] = [Self::Recovered, Self::GpuDriver, Self::Cdi, Self::Published, Self::Registered];

    fn name(self) -> &'static str {
        match self {
            Self::Recovered => "recovered",
            Self::GpuDriver => "gpu-driver",
            Self::Cdi => "cdi",
            Self::Published => "published",
            Self::Registered => "registered",
        }
    }
}

/// All conditions; none is met at first.
#[derive(Clone, Debug)]
pub struct Readiness {
    unmet: Arc<Mutex<BTreeMap<Condition, String>>>,
}

impl Default for Readiness {
    fn default() -> Self {
        let unmet = Condition::ALL.map(|condition| (condition, "not yet".to_owned()));
        Self { unmet: Arc::new(Mutex::new(unmet.into())) }
    }
}

impl Readiness {
    /// Notes a condition as met or as not met; a change is one log line.
    pub fn set(&self, condition: Condition, state: Result<(), String>) {
        let mut unmet = self.lock();
        match state {
            Ok(()) => {
                if unmet.remove(&condition).is_some() {
                    tracing::info!(condition = condition.name(), "ready");
                }
            }
            Err(why) => {
                // Reasons may come and go with each attempt; the change of state is the news.
                match unmet.insert(condition, why.clone()) {
                    None => tracing::warn!(condition = condition.name(), why, "not ready"),
                    Some(before) if before != why => {
                        tracing::debug!(condition = condition.name(), why, "still not ready");
                    }
                    Some(_) => {}
                }
            }
        }
    }

    /// Whether all conditions are met.
    pub fn is_ready(&self) -> bool {
        self.lock().is_empty()
    }

    fn report(&self) -> String {
        let unmet = self.lock();
        let mut out = String::new();
        for condition in Condition::ALL {
            let name = condition.name();
            // Writing to a string cannot fail.
            let _ = match unmet.get(&condition) {
                None => writeln!(out, "[+]{name} ok"),
                Some(why) => writeln!(out, "[-]{name} failed: {why}"),
            };
        }
        out
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Condition, String>> {
        self.unmet.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why nothing is served.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}; choose another with --http-address")]
pub struct HttpError {
    address: SocketAddr,
    #[source]
    cause: std::io::Error,
}

/// Binds now, so that a taken port is an error of the start.
pub async fn bind(address: SocketAddr) -> Result<TcpListener, HttpError> {
    TcpListener::bind(address).await.map_err(|cause| HttpError { address, cause })
}

/// Serves until `stop`.
pub async fn serve(
    listener: TcpListener,
    metrics: Metrics,
    readiness: Readiness,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let router = Router::new()
        .route("/metrics", get(scrape))
        .route("/livez", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .with_state((metrics, readiness));
    axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await
}

async fn scrape(State((metrics, readiness)): State<(Metrics, Readiness)>) -> impl IntoResponse {
    const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match metrics.render(readiness.is_ready()) {
        Ok(text) => (StatusCode::OK, [(header::CONTENT_TYPE, OPENMETRICS)], text),
        Err(err) => (
            StatusCode::INTERNAL_SERVER_ERROR,
            [(header::CONTENT_TYPE, "text/plain")],
            format!("metrics cannot be written: {err}\n"),
        ),
    }
}

async fn ready(State((_, readiness)): State<(Metrics, Readiness)>) -> impl IntoResponse {
    let code = if readiness.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, readiness.report())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_ready_when_every_condition_is_met_and_says_what_is_not() {
        let readiness = Readiness::default();
        for condition in Condition::ALL {
            assert!(!readiness.is_ready());
            readiness.set(condition, Ok(()));
        }
        assert!(readiness.is_ready());
        readiness.set(Condition::Cdi, Err("no directory".to_owned()));
        assert!(!readiness.is_ready());
        assert_eq!(
            readiness.report(),
            "[+]recovered ok\n[+]gpu-driver ok\n[-]cdi failed: no directory\n[+]published ok\n[+]registered ok\n"
        );
    }
}
