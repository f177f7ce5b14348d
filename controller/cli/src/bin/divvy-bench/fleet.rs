//! An API server for one client that reads the slices of many nodes: a thousand
//! nodes' objects would take gigabytes in a real store, so each page is written
//! when it is asked for, from the slices of one node. Plain HTTP, lists and
//! watches of what the controller reads, and nothing is ever written.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// The node's name in the slices that are multiplied.
pub(crate) const NODE: &str = crate::world::NODE;

/// The server; it ends when this is dropped.
pub(crate) struct Fleet {
    pub(crate) kubeconfig: PathBuf,
    served: Arc<Served>,
    task: JoinHandle<()>,
}

/// What was asked of it so far.
#[derive(Default)]
struct Served {
    /// Of slices.
    bytes: AtomicU64,
    watches: AtomicU64,
}

impl Fleet {
    /// Serves the slices of one node (as JSON) under the names of so many.
    pub(crate) async fn start(dir: &Path, slices: Vec<String>, nodes: usize) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let kubeconfig = dir.join("fleet");
        let url = format!("http://{}", listener.local_addr()?);
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "f",
            "clusters": [{"name": "f", "cluster": {"server": url}}], "users": [{"name": "f", "user": {}}],
            "contexts": [{"name": "f", "context": {"cluster": "f", "user": "f"}}],
        });
        std::fs::write(&kubeconfig, config.to_string())?;
        let served = Arc::new(Served::default());
        let (slices, count) = (Arc::new(slices), served.clone());
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (slices, count) = (slices.clone(), count.clone());
                tokio::spawn(async move {
                    // A client that goes away is no error.
                    let _ = connection(stream, &slices, nodes, &count).await;
                });
            }
        });
        Ok(Self { kubeconfig, served, task })
    }

    /// Bytes of slices that were listed, once the client watches them.
    pub(crate) fn listed(&self) -> Option<u64> {
        let watched = self.served.watches.load(Ordering::Relaxed) > 0;
        watched.then(|| self.served.bytes.load(Ordering::Relaxed))
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn connection(stream: TcpStream, slices: &[String], nodes: usize, served: &Served) -> Result<()> {
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
            // Nothing happens any more; the end comes from the client.
            stream.read_line(&mut line).await?;
            return Ok(());
        }
        let (code, answer) = answer(&method, path, &query, &body, slices, nodes);
        if path.ends_with("/resourceslices") {
            served.bytes.fetch_add(answer.len() as u64, Ordering::Relaxed);
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
        let list = json!({"kind": format!("{kind}List"), "apiVersion": version, "metadata": {"resourceVersion": "1"}, "items": items});
        (200, list.to_string())
    };
    match (method, last) {
        ("GET", "resourceslices") => (200, page(query, slices, nodes)),
        ("GET", "deviceclasses") => {
            let owner = json!({"metadata": {"name": "mig.divvy.dev", "uid": "u", "resourceVersion": "1"}, "spec": {}});
            list("DeviceClass", "resource.k8s.io/v1", vec![owner])
        }
        ("GET", "secrets") => list("Secret", "v1", Vec::new()),
        ("GET", "validatingwebhookconfigurations") => {
            list("ValidatingWebhookConfiguration", "admissionregistration.k8s.io/v1", Vec::new())
        }
        ("POST" | "PUT", _) => (201, String::from_utf8_lossy(body).into_owned()),
        _ => {
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404});
            (404, status.to_string())
        }
    }
}

fn page(query: &HashMap<&str, &str>, slices: &[String], nodes: usize) -> String {
    let number = |key: &str| query.get(key).and_then(|text| text.parse::<usize>().ok());
    let (all, from) = (slices.len() * nodes, number("continue").unwrap_or(0));
    let to = (from + number("limit").filter(|limit| *limit > 0).unwrap_or(all)).min(all);
    let token = if to < all { format!(r#","continue":"{to}""#) } else { String::new() };
    let mut text = format!(
        r#"{{"kind":"ResourceSliceList","apiVersion":"resource.k8s.io/v1","metadata":{{"resourceVersion":"1"{token}}},"items":["#
    );
    for at in from..to {
        if at > from {
            text.push(',');
        }
        let node = format!("node-{:04}", at / slices.len());
        text.push_str(&slices[at % slices.len()].replace(NODE, &node));
    }
    text.push_str("]}");
    text
}
