//! An API server that shows the controller a cluster of many nodes.
//!
//! The objects of a thousand nodes would take gigabytes in a real store, so the server renders each
//! page on request from the slices of one node. It speaks plain HTTP, serves lists, watches and reads
//! of what the controller reads, whole or as metadata, and stores nothing.

use anyhow::{Context, Result};
use k8s_openapi::api::resource::v1::ResourceSlice;
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

/// Answers with ResourceSlices so far.
#[derive(Default)]
struct Counters {
    bytes: AtomicU64,
    reads: AtomicU64,
}

/// The slices of one node as JSON.
struct Template {
    slices: Vec<String>,
    /// The same objects as `PartialObjectMetadata`.
    metadata: Vec<String>,
}

impl Template {
    fn new(slices: &[ResourceSlice]) -> Result<Self> {
        let mut template = Self { slices: Vec::new(), metadata: Vec::new() };
        let owner = r#"k:{"uid":"7e5b0d9e-2f55-4c3b-9d6c-2d0f4f1f7a10"}"#;
        for slice in slices {
            let mut slice = serde_json::to_value(slice)?;
            // A real server adds them; they are most of the metadata.
            slice["metadata"]["managedFields"] = json!([{
                "apiVersion": "resource.k8s.io/v1", "fieldsType": "FieldsV1", "manager": "unknown",
                "operation": "Update", "time": "2026-01-01T00:00:00Z",
                "fieldsV1": {
                    "f:metadata": {
                        "f:annotations": {".": {}, "f:gpu.divvy.dev/device-kinds": {}},
                        "f:generateName": {},
                        "f:ownerReferences": {".": {}, owner: {}},
                    },
                    "f:spec": {
                        "f:devices": {}, "f:driver": {}, "f:nodeName": {},
                        "f:pool": {"f:generation": {}, "f:name": {}, "f:resourceSliceCount": {}},
                    },
                },
            }]);
            template.slices.push(slice.to_string());
            let metadata = &slice["metadata"];
            let metadata = json!({
                "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata,
            });
            template.metadata.push(metadata.to_string());
        }
        Ok(template)
    }

    /// The slice of that name, under the names of `nodes` nodes.
    fn slice(&self, name: &str, nodes: usize) -> Option<String> {
        let node = name.split_once("node-").and_then(|(_, rest)| rest.get(..4)?.parse::<usize>().ok())?;
        let node = node_name(Some(node).filter(|node| *node < nodes)?);
        let named = |slice: &&String| slice.contains(&format!("\"{}\"", name.replace(&node, TEMPLATE_NODE)));
        self.slices.iter().find(named).map(|slice| slice.replace(TEMPLATE_NODE, &node))
    }
}

fn node_name(number: usize) -> String {
    format!("node-{number:04}")
}

impl LargeCluster {
    /// Serves the slices of one node under the names of `nodes` nodes.
    pub(crate) async fn start(dir: &Path, slices: &[ResourceSlice], nodes: usize) -> Result<Self> {
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
        let (template, count) = (Arc::new(Template::new(slices)?), served.clone());
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (template, count) = (template.clone(), count.clone());
                tokio::spawn(async move {
                    // A disconnected client is not an error.
                    let _ = connection(stream, &template, nodes, &count).await;
                });
            }
        });
        Ok(Self { kubeconfig, served, task })
    }

    /// Bytes of lists and reads of slices.
    pub(crate) fn sent_bytes(&self) -> u64 {
        self.served.bytes.load(Ordering::Relaxed)
    }

    /// Reads of one slice.
    pub(crate) fn reads(&self) -> u64 {
        self.served.reads.load(Ordering::Relaxed)
    }
}

impl Drop for LargeCluster {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn connection(stream: TcpStream, template: &Template, nodes: usize, served: &Counters) -> Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).await? == 0 {
            return Ok(());
        }
        let mut words = line.split_whitespace();
        let (method, target) =
            (words.next().context("no method")?.to_owned(), words.next().context("no target")?.to_owned());
        let (mut length, mut metadata_only) = (0, false);
        loop {
            let mut header = String::new();
            stream.read_line(&mut header).await?;
            match header.split_once(':') {
                None => break,
                Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                    length = value.trim().parse()?
                }
                Some((name, value)) if name.eq_ignore_ascii_case("accept") => {
                    metadata_only = value.contains("as=PartialObjectMetadata");
                }
                Some(_) => {}
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await?;
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let query: HashMap<&str, &str> = query.split('&').filter_map(|pair| pair.split_once('=')).collect();
        if query.get("watch").is_some_and(|watch| matches!(*watch, "true" | "1")) {
            let head =
                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
            stream.write_all(head.as_bytes()).await?;
            // No events follow: the client closes the connection.
            stream.read_line(&mut line).await?;
            return Ok(());
        }
        let (code, answer) = match path.rsplit_once("/resourceslices") {
            Some((_, name)) => {
                let answer = match name.strip_prefix('/') {
                    None if metadata_only => {
                        Some(page(&query, "PartialObjectMetadata", &template.metadata, nodes))
                    }
                    None => Some(page(&query, "ResourceSlice", &template.slices, nodes)),
                    Some(name) => {
                        served.reads.fetch_add(1, Ordering::Relaxed);
                        template.slice(name, nodes)
                    }
                };
                served.bytes.fetch_add(answer.as_ref().map_or(0, String::len) as u64, Ordering::Relaxed);
                answer.map_or_else(not_found, |answer| (200, answer))
            }
            None => answer(&method, path, &body),
        };
        let head = format!(
            "HTTP/1.1 {code} x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            answer.len()
        );
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(answer.as_bytes()).await?;
    }
}

/// The answer to a request for another kind.
fn answer(method: &str, path: &str, body: &[u8]) -> (u16, String) {
    let (_, last) = path.rsplit_once('/').unwrap_or_default();
    let list = |kind: &str, version: &str, items: Vec<Value>| {
        let list = json!({
            "kind": format!("{kind}List"), "apiVersion": version,
            "metadata": {"resourceVersion": "1"}, "items": items,
        });
        (200, list.to_string())
    };
    match (method, last) {
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
        _ => not_found(),
    }
}

fn not_found() -> (u16, String) {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404,
    });
    (404, status.to_string())
}

/// A page of the objects of all nodes.
fn page(query: &HashMap<&str, &str>, kind: &str, objects: &[String], nodes: usize) -> String {
    let number = |key: &str| query.get(key).and_then(|text| text.parse::<usize>().ok());
    let (all, from) = (objects.len() * nodes, number("continue").unwrap_or(0));
    let to = (from + number("limit").filter(|limit| *limit > 0).unwrap_or(all)).min(all);
    let token = if to < all { format!(r#","continue":"{to}""#) } else { String::new() };
    let metadata = format!(r#"{{"resourceVersion":"1"{token}}}"#);
    let version = if kind == "ResourceSlice" { "resource.k8s.io/v1" } else { "meta.k8s.io/v1" };
    let mut text =
        format!(r#"{{"kind":"{kind}List","apiVersion":"{version}","metadata":{metadata},"items":["#);
    for at in from..to {
        if at > from {
            text.push(',');
        }
        let node = node_name(at / objects.len());
        text.push_str(&objects[at % objects.len()].replace(TEMPLATE_NODE, &node));
    }
    text.push_str("]}");
    text
}
