//! `divvy config explain`: the settings of each GPU under a node configuration, and the rule that
//! each comes from.

use crate::documents;
use anyhow::{Context, Result, bail};
use divvy_api::names::DRIVER;
use divvy_model::nodeconfig::{Explained, Labels, Subject, ValueOrigin};
use divvy_model::{DeviceId, GpuNumber, GpuPolicy, NodeConfig};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use kube::Api;
use kube::api::ListParams;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

const AFTER_HELP: &str = "\
Examples:
  divvy config explain --config node-config.yaml
  divvy config explain --config node-config.yaml --gpus '8xNVIDIA H100 80GB HBM3'
  divvy config explain --config node-config.yaml --node node-1";

/// See the command's help.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ExplainArguments {
    /// The node configuration; `-` is standard input
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// GPUs to explain it for, as COUNTxPRODUCT, separated by commas; by default the GPUs that the
    /// cluster's nodes have published
    #[arg(long, value_name = "GPUS")]
    gpus: Option<String>,
    /// Labels of the node with these GPUs
    #[arg(long, value_name = "KEY=VALUE", value_delimiter = ',', requires = "gpus", value_parser = label)]
    node_labels: Vec<(String, String)>,
    /// Only this node of the cluster
    #[arg(long, value_name = "NAME", conflicts_with = "gpus")]
    node: Option<String>,
    /// Assume that the node daemons run with --exclusive-ownership
    #[arg(long)]
    exclusive_ownership: bool,
    /// The node daemons' --shares
    #[arg(long, value_name = "true|false", default_value_t = true, action = clap::ArgAction::Set)]
    shares: bool,
    /// Format of the output
    #[arg(short, long, value_enum, default_value = "text")]
    output: Output,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Text,
    Json,
}

/// A node and its GPUs, as number and product.
struct NodeGpus {
    /// Empty for the GPUs of `--gpus`.
    name: String,
    labels: Labels,
    gpus: Vec<(GpuNumber, String)>,
}

pub(crate) fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Prints the settings of each GPU.
pub(crate) fn run(arguments: &ExplainArguments) -> Result<ExitCode> {
    let text = documents::text(&arguments.config)?;
    let config = NodeConfig::parse(&text).with_context(|| arguments.config.display().to_string())?;
    let nodes = match &arguments.gpus {
        Some(gpus) => {
            let labels = arguments.node_labels.iter().cloned().collect();
            vec![NodeGpus { name: String::new(), labels, gpus: parse_gpus(gpus)? }]
        }
        None => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async { cluster_nodes(client().await?, arguments.node.as_deref()).await })?
        }
    };
    let (exclusive_ownership, shares) = (arguments.exclusive_ownership, arguments.shares);
    let defaults = GpuPolicy { exclusive_ownership, shares, ..GpuPolicy::default() };
    match arguments.output {
        Output::Text => {
            let blocks: Vec<_> = nodes.iter().map(|node| explain_node(&config, &defaults, node)).collect();
            print!("{}", blocks.join("\n"));
        }
        Output::Json => {
            let gpus: Vec<_> = nodes.iter().flat_map(|node| json_of(&config, &defaults, node)).collect();
            println!("{}", serde_json::to_string_pretty(&gpus)?);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Parses a list like `8xNVIDIA H100 80GB HBM3`, or with names of the catalogue, like
/// `8xH100-SXM5-80GB`.
fn parse_gpus(text: &str) -> Result<Vec<(GpuNumber, String)>> {
    let mut products = Vec::new();
    for part in text.split(',').map(str::trim) {
        let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        let (count, product) = match (part[..digits].parse::<usize>(), part[digits..].strip_prefix('x')) {
            (Ok(count @ 1..=64), Some(product)) => (count, product),
            (_, None) => (1, part),
            _ => bail!(
                "{part:?}: give COUNTxPRODUCT with a count from 1 to 64, such as \"8xNVIDIA H100 80GB HBM3\""
            ),
        };
        products.extend(std::iter::repeat_n(product_name(product), count));
    }
    Ok((0..).map(GpuNumber).zip(products).collect())
}

/// NVML's name of a product.
fn product_name(product: &str) -> String {
    divvy_catalogue::find(product).map_or_else(|_| product.to_owned(), |model| model.row().product.clone())
}

async fn client() -> Result<kube::Client> {
    match kube::Client::try_default().await {
        Err(kube::Error::InferConfig(_)) => {
            bail!("found neither a kubeconfig nor a ServiceAccount; set KUBECONFIG or give --gpus")
        }
        client => client.context("cannot connect to the cluster; give --gpus to explain without it"),
    }
}

async fn cluster_nodes(client: kube::Client, only: Option<&str>) -> Result<Vec<NodeGpus>> {
    let slices: Api<ResourceSlice> = Api::all(client.clone());
    let mut fields = format!("spec.driver={DRIVER}");
    if let Some(node) = only {
        write!(fields, ",spec.nodeName={node}")?;
    }
    // Read in pages: the slices of many nodes are large, and only two values of each device are kept.
    let (mut nodes, mut next): (BTreeMap<String, Vec<_>>, _) = (BTreeMap::new(), None);
    loop {
        let mut page = ListParams::default().fields(&fields).limit(50);
        page.continue_token = next;
        let list = slices.list(&page).await.context("cannot list ResourceSlices")?;
        for slice in list.items {
            let Some(node) = slice.spec.node_name else { continue };
            nodes.entry(node).or_default().extend(slice.spec.devices.iter().flatten().filter_map(gpu));
        }
        next = list.metadata.continue_.filter(|token| !token.is_empty());
        if next.is_none() {
            break;
        }
    }
    if nodes.is_empty() {
        bail!("no node has published GPUs of driver {DRIVER}; give --gpus");
    }
    let api: Api<Node> = Api::all(client);
    let mut found = Vec::new();
    for (name, mut gpus) in nodes {
        let node = api.get_metadata(&name).await.with_context(|| format!("cannot read node {name}"))?;
        gpus.sort();
        found.push(NodeGpus { name, labels: node.metadata.labels.unwrap_or_default(), gpus });
    }
    Ok(found)
}

fn gpu(device: &Device) -> Option<(GpuNumber, String)> {
    let Ok(DeviceId::Gpu(number)) = DeviceId::try_from(&device.name.as_str().into()) else { return None };
    let product = device.attributes.as_ref()?.get("productName")?.string.clone()?;
    Some((number, product))
}

/// A block per GPU; GPUs with the same settings share a block.
fn explain_node(config: &NodeConfig, defaults: &GpuPolicy, node: &NodeGpus) -> String {
    let mut blocks: Vec<(Vec<String>, &str, Explained)> = Vec::new();
    for (number, product) in &node.gpus {
        let explained = config.explain(defaults, Some(&node.labels), Subject { number: *number, product });
        let same = blocks.iter_mut().find(|(_, of, known)| of == product && *known == explained);
        match same {
            Some((names, ..)) => names.push(format!("gpu-{number}")),
            None => blocks.push((vec![format!("gpu-{number}")], product, explained)),
        }
    }
    let mut text = String::new();
    if !node.name.is_empty() {
        text.push_str(&format!("node {}\n", node.name));
    }
    for (names, product, explained) in blocks {
        text.push_str(&format!("{} ({product})\n", names.join(" ")));
        for (field, value, said) in rows(&explained) {
            text.push_str(&format!("  {field:<19} {value:<25} {said}\n"));
        }
    }
    text
}

/// The value and the origin of each field.
fn rows(explained: &Explained) -> Vec<(&'static str, String, ValueOrigin)> {
    let policy = &explained.policy;
    let modes: Vec<_> = policy.modes.iter().map(|mode| mode.as_str()).collect();
    let modes = if modes.is_empty() { "none".to_owned() } else { modes.join(" ") };
    let (effects, said) = (&policy.health, &explained.health);
    vec![
        ("modes", modes, explained.modes),
        ("slots", policy.slots.to_string(), explained.slots),
        ("interval", policy.interval.to_string(), explained.interval),
        ("mpsClients", policy.mps_clients.to_string(), explained.mps_clients),
        ("shares", policy.shares.to_string(), explained.shares),
        ("migShares", policy.mig_shares.to_string(), explained.mig_shares),
        ("exclusiveOwnership", policy.exclusive_ownership.to_string(), explained.exclusive_ownership),
        ("health.degraded", effects.degraded.as_str().to_owned(), said.degraded),
        ("health.needsReset", effects.needs_reset.as_str().to_owned(), said.needs_reset),
        ("health.stuck", effects.stuck.as_str().to_owned(), said.stuck),
        ("health.lost", effects.lost.as_str().to_owned(), said.lost),
    ]
}

/// The settings of each GPU, as JSON.
fn json_of(config: &NodeConfig, defaults: &GpuPolicy, node: &NodeGpus) -> Vec<Value> {
    let of_gpu = |(number, product): &(GpuNumber, String)| {
        let explained = config.explain(defaults, Some(&node.labels), Subject { number: *number, product });
        let setting = |(field, value, said): (&str, String, ValueOrigin)| {
            (field.to_owned(), json!({"value": value, "origin": said.to_string()}))
        };
        let settings: serde_json::Map<_, _> = rows(&explained).into_iter().map(setting).collect();
        json!({"node": node.name, "gpu": format!("gpu-{number}"), "product": product, "settings": settings})
    };
    node.gpus.iter().map(of_gpu).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_with_the_same_settings_share_a_block() {
        let config = "
apiVersion: resource.divvy.dev/v1alpha1
kind: NodeConfig
rules:
- match: {nodeLabels: {pool: a}}
  slots: 8
- match: {indices: [1]}
  dedicated: true
  health: {lost: NoExecute}
";
        let config = NodeConfig::parse(config).expect("a configuration");
        let node = NodeGpus {
            name: "n1".to_owned(),
            labels: [("pool".to_owned(), "a".to_owned())].into(),
            gpus: parse_gpus("3xNVIDIA L4").expect("a list"),
        };
        assert_eq!(
            explain_node(&config, &GpuPolicy::default(), &node),
            "node n1
gpu-0 gpu-2 (NVIDIA L4)
  modes               whole mig timeslice mps   default
  slots               8                         rules[0]
  interval            Default                   default
  mpsClients          4                         default
  shares              true                      default
  migShares           false                     default
  exclusiveOwnership  false                     default
  health.degraded     None                      default
  health.needsReset   NoSchedule                default
  health.stuck        NoSchedule                default
  health.lost         NoSchedule                default
gpu-1 (NVIDIA L4)
  modes               whole                     rules[1]
  slots               8                         rules[0]
  interval            Default                   default
  mpsClients          4                         default
  shares              false                     rules[1]
  migShares           false                     default
  exclusiveOwnership  false                     default
  health.degraded     None                      default
  health.needsReset   NoSchedule                default
  health.stuck        NoSchedule                default
  health.lost         NoExecute                 rules[1]
"
        );
    }

    #[cfg(feature = "demo")]
    #[tokio::test]
    async fn gpus_and_labels_come_from_the_cluster() {
        use serde_json::json;
        let api = divvy_fakes::apiserver::FakeApi::start(Default::default()).await.expect("an API server");
        let client = api.client().expect("a client");
        for node in ["a", "b"] {
            let metadata = json!({"name": node, "labels": {"pool": node}});
            api.put(json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata}));
            let device =
                |name: &str| json!({"name": name, "attributes": {"productName": {"string": "NVIDIA L4"}}});
            api.put(json!({
                "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": node},
                "spec": {
                    "driver": DRIVER, "nodeName": node,
                    "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
                    "devices": [device("gpu-1"), device("gpu-0"), device("gpu-0-timeslice")],
                },
            }));
        }
        let ask = async |only| {
            let nodes = cluster_nodes(client.clone(), only).await.map_err(|cause| cause.to_string())?;
            let nodes = nodes.into_iter().map(|node| {
                let gpus: Vec<_> =
                    node.gpus.iter().map(|(number, product)| format!("{number} {product}")).collect();
                format!("{} {} {}", node.name, node.labels["pool"], gpus.join(", "))
            });
            Ok::<_, String>(nodes.collect::<Vec<_>>())
        };
        let row = |node: &str| format!("{node} {node} 0 NVIDIA L4, 1 NVIDIA L4");
        assert_eq!(ask(None).await, Ok(vec![row("a"), row("b")]));
        assert_eq!(ask(Some("b")).await, Ok(vec![row("b")]));
        assert!(ask(Some("c")).await.is_err());
    }

    #[test]
    fn gpu_lists_have_counts() {
        let check = |text: &str, expected: &[&str]| {
            let found: Vec<_> =
                parse_gpus(text).expect(text).into_iter().map(|(_, product)| product).collect();
            assert_eq!(found, expected, "{text}");
        };
        check("2xA B", &["A B", "A B"]);
        check("Odd One, 1xThat Other", &["Odd One", "That Other"]);
        check("1xH100-SXM5-80GB", &["NVIDIA H100 80GB HBM3"]);
        assert!(parse_gpus("0xA").is_err() && parse_gpus("65xA").is_err());
    }
}
