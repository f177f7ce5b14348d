//! An API server that shows the controller a cluster of many nodes.
//!
//! The objects of a thousand nodes would take gigabytes in a real store, so the server renders each
//! page on request from the slices of one node. It speaks plain HTTP, serves lists and watches of
//! what the controller reads, and stores nothing.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// The name in the slices that is replaced by the name of each node.
const TEMPLATE_NODE: &str = crate::node::NODE;

/// The running server; it stops when dropped.
pub(crate) struct LargeCluster {
    pub(crate) kubeconfig: PathBuf,
    served: Arc<Counters>,
    task: JoinHandle<()>,
}

/// Requests for ResourceSlices so far.
#[derive(Default)]
struct Counters {
    listed_bytes: AtomicU64,
    watches: AtomicU64,
}

impl LargeCluster {
    /// Serves the slices of one node, given as JSON, under the names of `nodes` nodes.
    pub(crate) async fn start(dir: &Path, slices: Vec<String>, nodes: usize) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let kubeconfig = dir.join("kubeconfig");
        let url = format!("http://{}", listener.local_addr()?);
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "f",
            "clusters": [{"name": "f", "cluster": {"server": url}}], "users": [{"name": "f", "user": {}}],
            "contexts": [{"name": "f", "context": {"cluster": "f", "user": "f"}}],
        });
        std::fs::write(&kubeconfig, config.to_string())?;
        let served = Arc::new(Counters::default());
        let (slices, count) = (Arc::new(slices), served.clone());
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (slices, count) = (slices.clone(), count.clone());
                tokio::spawn(async move {
                    // A disconnected client is not an error.
                    let _ = connection(stream, &slices, nodes, &count).await;
                });
            }
        });
        Ok(Self { kubeconfig, served, task })
    }

    /// Bytes of listed slices; `None` until the client watches slices.
    pub(crate) fn listed(&self) -> Option<u64> {
        let watched = self.served.watches.load(Ordering::Relaxed) > 0;
        watched.then(|| self.served.listed_bytes.load(Ordering::Relaxed))
    }
}

impl Drop for LargeCluster {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn connection(stream: TcpStream, slices: &[String], nodes: usize, served: &Counters) -> Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).await? == 0 {
            return Ok(());
        }
        let mut words = line.split_whitespace();
        let (method, target) =
            (words.next().context("no method")?.to_owned(), words.next().context("no target")?.to_owned());
        let mut length = 0;
        loop {
            let mut header = String::new();
            stream.read_line(&mut header).await?;
            match header.split_once(':') {
                None => break,
                Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                    length = value.trim().parse()?
                }
                Some(_) => {}
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await?;
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let query: HashMap<&str, &str> = query.split('&').filter_map(|pair| pair.split_once('=')).collect();
        if query.get("watch").is_some_and(|watch| matches!(*watch, "true" | "1")) {
            if path.ends_with("/resourceslices") {
                served.watches.fetch_add(1, Ordering::Relaxed);
            }
            let head =
                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
            stream.write_all(head.as_bytes()).await?;
            // No events follow: the client closes the connection.
            stream.read_line(&mut line).await?;
            return Ok(());
        }
        let (code, answer) = answer(&method, path, &query, &body, slices, nodes);
        if path.ends_with("/resourceslices") {
            served.listed_bytes.fetch_add(answer.len() as u64, Ordering::Relaxed);
        }
        let head = format!(
            "HTTP/1.1 {code} x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            answer.len()
        );
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(answer.as_bytes()).await?;
    }
}

fn answer(
    method: &str,
    path: &str,
    query: &HashMap<&str, &str>,
    body: &[u8],
    slices: &[String],
    nodes: usize,
) -> (u16, String) {
    let (_, last) = path.rsplit_once('/').unwrap_or_default();
    let list = |kind: &str, version: &str, items: Vec<Value>| {
        let list = json!({
            "kind": format!("{kind}List"), "apiVersion": version,
            "metadata": {"resourceVersion": "1"}, "items": items,
        });
        (200, list.to_string())
    };
    match (method, last) {
        ("GET", "resourceslices") => (200, page(query, slices, nodes)),
        ("GET", "deviceclasses") => {
            let metadata = json!({"name": "mig.divvy.dev", "uid": "u", "resourceVersion": "1"});
            let owner = json!({"metadata": metadata, "spec": {}});
            list("DeviceClass", "resource.k8s.io/v1", vec![owner])
        }
        ("GET", "secrets") => list("Secret", "v1", Vec::new()),
        ("GET", "validatingwebhookconfigurations") => {
            list("ValidatingWebhookConfiguration", "admissionregistration.k8s.io/v1", Vec::new())
        }
        ("POST" | "PUT", _) => (201, String::from_utf8_lossy(body).into_owned()),
        _ => {
            let status = json!({
                "kind": "Status", "apiVersion": "v1",
                "status": "Failure", "reason": "NotFound", "code": 404,
            });
            (404, status.to_string())
        }
    }
}

fn page(query: &HashMap<&str, &str>, slices: &[String], nodes: usize) -> String {
    let number = |key: &str| query.get(key).and_then(|text| text.parse::<usize>().ok());
    let (all, from) = (slices.len() * nodes, number("continue").unwrap_or(0));
    let to = (from + number("limit").filter(|limit| *limit > 0).unwrap_or(all)).min(all);
    let token = if to < all { format!(r#","continue":"{to}""#) } else { String::new() };
    let metadata = format!(r#"{{"resourceVersion":"1"{token}}}"#);
    let mut text = r#"{"kind":"ResourceSliceList","apiVersion":"resource.k8s.io/v1","#.to_owned();
    text.push_str(&format!(r#""metadata":{metadata},"items":["#));
    for at in from..to {
        if at > from {
            text.push(',');
        }
        let node = format!("node-{:04}", at / slices.len());
        text.push_str(&slices[at % slices.len()].replace(TEMPLATE_NODE, &node));
    }
    text.push_str("]}");
    text
}
