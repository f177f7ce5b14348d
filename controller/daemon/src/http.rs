//! The HTTP endpoints `/metrics`, `/livez` and `/readyz`.
//!
//! Each readiness condition has a name and, while it is not met, a reason; `/readyz` prints all. The
//! program is also ready without its optional conditions.
//! `/livez` only checks that the HTTP server answers, because a restart does not fix other hangs.

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

/// A condition for readiness. The type enumerates all conditions of a program.
pub trait Condition: Copy + Ord + Send + 'static {
    /// All conditions, in the order of the report.
    const ALL: &'static [Self];
    fn name(self) -> &'static str;
    /// Whether the program is not ready while the condition is not met.
    fn is_required(self) -> bool {
        true
    }
}

/// The state of all conditions. None is met at first. Clones share the state.
#[derive(Debug)]
pub struct Readiness<C> {
    unmet: Arc<Mutex<BTreeMap<C, String>>>,
}

impl<C> Clone for Readiness<C> {
    fn clone(&self) -> Self {
        Self { unmet: self.unmet.clone() }
    }
}

impl<C: Condition> Default for Readiness<C> {
    fn default() -> Self {
        let unmet = C::ALL.iter().map(|condition| (*condition, "not yet".to_owned())).collect();
        Self { unmet: Arc::new(Mutex::new(unmet)) }
    }
}

impl<C: Condition> Readiness<C> {
    /// Sets the state of a condition. A change between met and unmet is logged.
    pub fn set(&self, condition: C, state: Result<(), String>) {
        let mut unmet = self.lock();
        match state {
            Ok(()) => {
                if unmet.remove(&condition).is_some() {
                    tracing::info!(condition = condition.name(), "ready");
                }
            }
            Err(why) => {
                // The reason may change with each attempt; only the change of state is logged.
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

    /// Whether all required conditions are met.
    pub fn is_ready(&self) -> bool {
        !self.lock().keys().any(|condition| condition.is_required())
    }

    fn report(&self) -> String {
        let unmet = self.lock();
        let mut out = String::new();
        for condition in C::ALL {
            let name = condition.name();
            // Writing to a string cannot fail.
            let _ = match unmet.get(condition) {
                None => writeln!(out, "[+]{name} ok"),
                Some(why) if !condition.is_required() => writeln!(out, "[!]{name} degraded: {why}"),
                Some(why) => writeln!(out, "[-]{name} failed: {why}"),
            };
        }
        out
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<C, String>> {
        self.unmet.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The server cannot listen.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}; choose another with {flag}")]
pub struct HttpError {
    address: SocketAddr,
    flag: &'static str,
    #[source]
    cause: std::io::Error,
}

/// Listens on the address, so that a port in use is a startup error that names the flag. Logs the
/// address, because port 0 selects a free port.
pub async fn bind(address: SocketAddr, flag: &'static str) -> Result<TcpListener, HttpError> {
    let bound = async {
        let listener = TcpListener::bind(address).await?;
        tracing::info!(flag, address = %listener.local_addr()?, "listening");
        Ok(listener)
    };
    bound.await.map_err(|cause| HttpError { address, flag, cause })
}

/// Renders all metrics as OpenMetrics text. The argument is whether the program is ready.
pub type Render = Arc<dyn Fn(bool) -> Result<String, std::fmt::Error> + Send + Sync>;

/// Serves until `stop` is cancelled.
pub async fn serve<C: Condition>(
    listener: TcpListener,
    render: Render,
    readiness: Readiness<C>,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let router = Router::new()
        .route("/metrics", get(scrape::<C>))
        .route("/livez", get(async || "ok\n"))
        .route("/readyz", get(ready::<C>))
        .with_state((render, readiness));
    axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await
}

async fn scrape<C: Condition>(
    State((render, readiness)): State<(Render, Readiness<C>)>,
) -> impl IntoResponse {
    const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match render(readiness.is_ready()) {
        Ok(text) => (StatusCode::OK, [(header::CONTENT_TYPE, OPENMETRICS)], text),
        Err(err) => (
            StatusCode::INTERNAL_SERVER_ERROR,
            [(header::CONTENT_TYPE, "text/plain")],
            format!("metrics cannot be written: {err}\n"),
        ),
    }
}

async fn ready<C: Condition>(State((_, readiness)): State<(Render, Readiness<C>)>) -> impl IntoResponse {
    let code = if readiness.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, readiness.report())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    enum Part {
        One,
        Two,
        Extra,
    }

    impl Condition for Part {
        const ALL: &'static [Self] = &[Self::One, Self::Two, Self::Extra];
        fn name(self) -> &'static str {
            match self {
                Self::One => "one",
                Self::Two => "two",
                Self::Extra => "extra",
            }
        }
        fn is_required(self) -> bool {
            self != Self::Extra
        }
    }

    #[test]
    fn readiness_requires_every_condition() {
        let readiness = Readiness::default();
        for part in [Part::One, Part::Two] {
            assert!(!readiness.is_ready());
            readiness.set(part, Ok(()));
        }
        assert!(readiness.is_ready());
        assert_eq!(readiness.report(), "[+]one ok\n[+]two ok\n[!]extra degraded: not yet\n");
        readiness.set(Part::Extra, Ok(()));
        readiness.set(Part::Two, Err("no directory".to_owned()));
        assert!(!readiness.is_ready());
        assert_eq!(readiness.report(), "[+]one ok\n[-]two failed: no directory\n[+]extra ok\n");
    }
}
