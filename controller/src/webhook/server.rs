//! The HTTPS server of the admission webhooks.
//!
//! Only the API server calls it, but no client is trusted: handshake, headers and body have
//! timeouts and size limits, and a body that is not an AdmissionReview gets 400. If data that a
//! review needs cannot be read in time, the answer is 503. The API server then applies the
//! `failurePolicy` of the webhook configuration, so the administrator decides.

use super::review::{NoVerdict, REVIEW_TIMEOUT, ReviewKind, Reviewer};
use crate::certificate::ServingCertificate;
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The path in the validating webhook configuration.
pub const PATH: &str = "/review";
/// The path in the mutating webhook configuration.
pub const FOREIGN_REQUESTS_PATH: &str = "/foreign-requests";
/// An API request has at most 3 MiB (`MaxRequestBodyBytes` of the API server), and the review
/// of an update contains the object twice.
const BODY_MAX_BYTES: usize = 8 << 20;
/// Time limit of a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Above the 90 s that the API server keeps an idle connection, so none is closed while in use.
const HEADER_TIMEOUT: Duration = Duration::from_secs(120);
/// Limits of concurrent connections and reviews; they bound the memory use.
const CONNECTIONS_MAX: usize = 256;
const REVIEWS_MAX: usize = 64;

#[derive(Clone)]
struct Server {
    reviewer: Reviewer,
    review_permits: Arc<Semaphore>,
}

/// Serves until `stop` is cancelled, then completes the open requests.
pub async fn serve(
    listener: TcpListener,
    current: Arc<ServingCertificate>,
    reviewer: Reviewer,
    stop: CancellationToken,
) -> Result<(), rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(current);
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let server = Server { reviewer, review_permits: Arc::new(Semaphore::new(REVIEWS_MAX)) };
    let validate = |server, body| answer(ReviewKind::Validate, server, body);
    let port = |server, body| answer(ReviewKind::PortRequests, server, body);
    let router =
        Router::new().route(PATH, post(validate)).route(FOREIGN_REQUESTS_PATH, post(port)).with_state(server);
    let (connections, graceful) = (TaskTracker::new(), Arc::new(GracefulShutdown::new()));
    let connection_permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let accepted = async {
            let permit = connection_permits.clone().acquire_owned().await;
            (listener.accept().await, permit)
        };
        let (accepted, permit) = tokio::select! {
            accepted = accepted => accepted,
            () = stop.cancelled() => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            // Out of file descriptors, or the client closed the connection: accept the next one.
            Err(_) => {
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        let (acceptor, router, watcher) = (acceptor.clone(), router.clone(), graceful.watcher());
        let stop = stop.clone();
        connections.spawn(async move {
            let _permit = permit;
            let handshake = tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake(acceptor, stream));
            let Some(Ok(Some(stream))) = stop.run_until_cancelled(handshake).await else { return };
            let mut builder = auto::Builder::new(TokioExecutor::new()).http1_only();
            builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
            let connection =
                builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)).into_owned();
            // A client that disconnects is not an error.
            let _ = watcher.watch(connection).await;
        });
    }
    connections.close();
    if let Some(graceful) = Arc::into_inner(graceful) {
        graceful.shutdown().await;
    }
    connections.wait().await;
    Ok(())
}

async fn handshake(
    acceptor: TlsAcceptor,
    stream: TcpStream,
) -> Option<tokio_rustls::server::TlsStream<TcpStream>> {
    let _ = stream.set_nodelay(true);
    match acceptor.accept(stream).await {
        Ok(stream) => Some(stream),
        Err(cause) => {
            tracing::debug!(%cause, "TLS handshake failed");
            None
        }
    }
}

async fn answer(kind: ReviewKind, State(server): State<Server>, body: Body) -> Response {
    let answer = async {
        let Ok(_permit) = server.review_permits.acquire().await else {
            return refuse(503, "the webhook is stopping");
        };
        match to_bytes(body, BODY_MAX_BYTES).await {
            Ok(body) => reviewed(kind, &server.reviewer, body.into()).await,
            Err(_) => refuse(413, "the request body is too large or incomplete"),
        }
    };
    match tokio::time::timeout(REVIEW_TIMEOUT, answer).await {
        Ok(answer) => answer,
        Err(_) => {
            server.reviewer.timed_out();
            refuse(503, "the review did not finish in time")
        }
    }
}

async fn reviewed(kind: ReviewKind, reviewer: &Reviewer, body: Vec<u8>) -> Response {
    match reviewer.review(kind, body).await {
        Ok(answer) => ([(header::CONTENT_TYPE, "application/json")], answer).into_response(),
        Err(NoVerdict::Malformed(why)) => refuse(400, &why),
        Err(NoVerdict::Unreadable(why)) => refuse(503, &why),
    }
}

fn refuse(code: u16, why: &str) -> Response {
    (StatusCode::from_u16(code).unwrap_or_default(), format!("{why}\n")).into_response()
}
