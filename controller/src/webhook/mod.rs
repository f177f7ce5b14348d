//! The webhook: TLS in, verdict out.
//!
//! Only the API server calls it, and nothing is believed all the same: handshake,
//! head and body have deadlines and bounds, and what is not an AdmissionReview is
//! answered with 400. Where something that is needed cannot be read in time
//! the answer is 503: then the API server does what its `failurePolicy` says, so
//! that the administrator decides and not this program.

mod review;
mod wire;

pub use review::Reviewer;

use crate::certificate::Current;
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

/// The path that a webhook configuration names.
pub const PATH: &str = "/review";
/// An object has at most 3 MiB on its way into the API server; a review of an
/// update holds it twice.
const BODY: usize = 8 << 20;
/// Answers come before the API server gives up, which is after 5 s.
const ANSWER: Duration = Duration::from_secs(4);
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Longer than the API server keeps an unused connection (90 s), so that it is never cut in use.
const HEAD: Duration = Duration::from_secs(120);
/// Connections at once, and reviews at once: what memory they can take is bounded.
const CONNECTIONS: usize = 256;
const REVIEWS: usize = 64;

#[derive(Clone)]
struct Server {
    reviewer: Reviewer,
    turns: Arc<Semaphore>,
}

/// Serves until `stop`, then ends what is under way.
pub async fn serve(
    listener: TcpListener,
    current: Arc<Current>,
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
    let server = Server { reviewer, turns: Arc::new(Semaphore::new(REVIEWS)) };
    let router = Router::new().route(PATH, post(answer)).with_state(server);
    let (connections, graceful) = (TaskTracker::new(), Arc::new(GracefulShutdown::new()));
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let accepted = async {
            let place = room.clone().acquire_owned().await;
            (listener.accept().await, place)
        };
        let (accepted, place) = tokio::select! {
            accepted = accepted => accepted,
            () = stop.cancelled() => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            // Out of descriptors, or the client went away: the next may do better.
            Err(_) => {
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        let (acceptor, router, watcher) = (acceptor.clone(), router.clone(), graceful.watcher());
        let stop = stop.clone();
        connections.spawn(async move {
            let _place = place;
            let handshake = tokio::time::timeout(HANDSHAKE, handshake(acceptor, stream));
            let Some(Ok(Some(stream))) = stop.run_until_cancelled(handshake).await else { return };
            let mut builder = auto::Builder::new(TokioExecutor::new()).http1_only();
            builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD);
            let connection =
                builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)).into_owned();
            // A client that goes away is no error of ours.
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
            tracing::debug!(%cause, "handshake failed");
            None
        }
    }
}

async fn answer(State(server): State<Server>, body: Body) -> Response {
    let answer = async {
        let Ok(_turn) = server.turns.acquire().await else { return refuse(503, "stopping") };
        match to_bytes(body, BODY).await {
            Ok(body) => reviewed(&server.reviewer, body.into()).await,
            Err(_) => refuse(413, "the body is too large or was cut"),
        }
    };
    match tokio::time::timeout(ANSWER, answer).await {
        Ok(answer) => answer,
        Err(_) => {
            server.reviewer.late();
            refuse(503, "not answered in time")
        }
    }
}

async fn reviewed(reviewer: &Reviewer, body: Vec<u8>) -> Response {
    match reviewer.review(body).await {
        Ok(answer) => ([(header::CONTENT_TYPE, "application/json")], answer).into_response(),
        Err(review::NoVerdict::Malformed(why)) => refuse(400, &why),
        Err(review::NoVerdict::Unreadable(why)) => refuse(503, &why),
    }
}

fn refuse(code: u16, why: &str) -> Response {
    (StatusCode::from_u16(code).unwrap_or_default(), format!("{why}\n")).into_response()
}
