//! The TLS socket: a self-signed certificate, and an accept loop that can close all connections.

use super::{Outage, Server, http};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use std::net::IpAddr;
use std::sync::Arc;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// A self-signed certificate, which is its own certificate authority.
pub(crate) struct Certificate(rcgen::CertifiedKey<rcgen::KeyPair>);

// Without the key, so that it does not appear in logs.
impl std::fmt::Debug for Certificate {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Certificate")
    }
}

impl Certificate {
    pub(crate) fn new(address: IpAddr) -> anyhow::Result<Self> {
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned(), address.to_string()];
        Ok(Self(rcgen::generate_simple_self_signed(names)?))
    }

    pub(crate) fn pem(&self) -> String {
        self.0.cert.pem()
    }

    pub(crate) fn der(&self) -> Vec<u8> {
        self.0.cert.der().to_vec()
    }

    pub(crate) fn acceptor(&self) -> anyhow::Result<TlsAcceptor> {
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(self.0.signing_key.serialize_der()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![self.0.cert.der().clone()], key)?;
        Ok(TlsAcceptor::from(Arc::new(config)))
    }
}

/// Serves until it is stopped; connections end with it.
pub(crate) async fn serve(
    server: Arc<Server>,
    listener: TcpListener,
    acceptor: TlsAcceptor,
    stop: CancellationToken,
) {
    let connections = TaskTracker::new();
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                // Too many open files, or the client disconnected: the next accept may succeed.
                Err(_) => {
                    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                    continue;
                }
            },
            () = stop.cancelled() => break,
        };
        if server.outage() == Some(Outage::Refuse) {
            continue;
        }
        let (server, acceptor, stop) = (server.clone(), acceptor.clone(), stop.clone());
        connections.spawn(async move {
            let cut = cut(&server);
            tokio::select! {
                () = connection(server.clone(), acceptor, stream) => {}
                () = cut => {}
                () = stop.cancelled() => {}
            }
        });
    }
    connections.close();
    connections.wait().await;
}

async fn connection(server: Arc<Server>, acceptor: TlsAcceptor, stream: TcpStream) {
    let _ = stream.set_nodelay(true);
    let Ok(stream) = acceptor.accept(stream).await else { return };
    let service = TowerToHyperService::new(http::router(server));
    // A client that disconnects is not an error.
    let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
}

/// Returns when connections must be closed.
async fn cut(server: &Server) {
    let mut changed = server.changed.subscribe();
    while server.outage() != Some(Outage::Refuse) {
        if changed.changed().await.is_err() {
            return;
        }
    }
}
