//! `divvy allocate`: the scheduler's decision, without a cluster.
//!
//! It reads the output of `kubectl get resourceslices,deviceclasses,resourceclaims -o yaml`.
//! Devices of claims with an allocation are in use; the other claims are allocated in sequence, and
//! those of one pod together.

use crate::documents;
use anyhow::{Context, Result, anyhow, bail};
use divvy_alloc::{ClusterView, Release, allocate_pod};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{
    DeviceClass, DeviceRequestAllocationResult, ResourceClaim, ResourceSlice,
};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;

const AFTER_HELP: &str = "\
Examples:
  kubectl get resourceslices,deviceclasses,resourceclaims -A -o yaml > all.yaml
  divvy allocate --node node-1 all.yaml new-claims.yaml
  divvy allocate --node template -o json node.yaml deviceclasses.yaml claims.yaml";

/// See the command's help.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct AllocateArguments {
    /// Files with ResourceSlices, DeviceClasses and ResourceClaims, YAML or JSON; `-` is standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The node to allocate on
    #[arg(long)]
    node: String,
    /// The scheduler's Kubernetes version
    #[arg(long, default_value = "1.37", value_name = "VERSION", value_parser = release)]
    kubernetes: Release,
    /// Format of the output; JSON has one object per line and device
    #[arg(short, long, value_enum, default_value = "text")]
    output: Output,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Text,
    Json,
}

fn release(version: &str) -> Result<Release, String> {
    Release::of_version(version).ok_or_else(|| format!("{version:?} is not a version such as 1.37"))
}

#[derive(Default)]
struct Objects {
    slices: Vec<ResourceSlice>,
    classes: Vec<DeviceClass>,
    claims: Vec<ResourceClaim>,
}

/// Prints a line per device that each claim would get, with the consumed capacity of a shared
/// device, or the reason why a claim gets no device. Fails if a claim gets none.
pub(crate) fn run(arguments: &AllocateArguments) -> Result<ExitCode> {
    let mut objects = Objects::default();
    for file in &arguments.files {
        let text = documents::text(file)?;
        let documents = documents::documents(&text).map_err(|why| anyhow!("{}: {why}", file.display()))?;
        for document in documents {
            objects.take(document.value).with_context(|| file.display().to_string())?;
        }
    }
    let mut node = Node::default();
    node.metadata.name = Some(arguments.node.clone());
    let mut refused = 0;
    let (mut held, unallocated): (Vec<_>, Vec<_>) = objects.claims.into_iter().partition(is_allocated);
    for mut claims in by_pod(unallocated) {
        let view = ClusterView {
            slices: &objects.slices,
            classes: &objects.classes,
            claims: &held,
            node: &node,
            release: arguments.kubernetes,
        };
        let mut shares = 0_u32;
        let mut share_id = || {
            shares += 1;
            format!("share-{shares}")
        };
        let found = allocate_pod(&view, &claims.iter().collect::<Vec<_>>(), &mut share_id);
        match found {
            Ok(allocations) => {
                for (claim, allocation) in claims.iter_mut().zip(allocations) {
                    let devices =
                        allocation.devices.iter().flat_map(|devices| devices.results.iter().flatten());
                    devices.for_each(|result| match arguments.output {
                        Output::Text => println!("{}\t{}", name(claim), line(result)),
                        Output::Json => println!("{}", json!({"claim": name(claim), "allocated": result})),
                    });
                    claim.status.get_or_insert_default().allocation = Some(allocation);
                }
                held.append(&mut claims);
            }
            Err(why) => {
                refused += 1;
                claims.iter().for_each(|claim| match arguments.output {
                    Output::Text => println!("{}\trefused\t{why}", name(claim)),
                    Output::Json => println!("{}", json!({"claim": name(claim), "refused": why.to_string()})),
                });
            }
        }
    }
    Ok(if refused == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn name(claim: &ResourceClaim) -> &str {
    claim.metadata.name.as_deref().unwrap_or_default()
}

fn line(result: &DeviceRequestAllocationResult) -> String {
    let DeviceRequestAllocationResult { request, driver, pool, device, .. } = result;
    format!("{request}\t{driver}/{pool}/{device}{}", consumed(result))
}

/// Groups the claims that were generated for the same pod, in the order of their first claims.
fn by_pod(claims: Vec<ResourceClaim>) -> Vec<Vec<ResourceClaim>> {
    let pod = |claim: &ResourceClaim| {
        let owners = claim.metadata.owner_references.iter().flatten();
        owners.filter(|owner| owner.kind == "Pod").map(|owner| owner.uid.clone()).next()
    };
    let mut groups: Vec<(Option<String>, Vec<ResourceClaim>)> = Vec::new();
    for claim in claims {
        let owner = pod(&claim);
        match groups.iter_mut().find(|(other, _)| owner.is_some() && *other == owner) {
            Some((_, group)) => group.push(claim),
            None => groups.push((owner, vec![claim])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

/// The consumed capacities that are not zero.
fn consumed(result: &DeviceRequestAllocationResult) -> String {
    let amounts = result.consumed_capacity.iter().flatten().filter(|(_, amount)| amount.0 != "0");
    let amounts: Vec<String> = amounts.map(|(name, amount)| format!("{name}={}", amount.0)).collect();
    if amounts.is_empty() { String::new() } else { format!("\t{}", amounts.join(" ")) }
}

fn is_allocated(claim: &ResourceClaim) -> bool {
    claim.status.as_ref().is_some_and(|status| status.allocation.is_some())
}

impl Objects {
    fn take(&mut self, value: Value) -> Result<()> {
        match value["kind"].as_str() {
            Some("ResourceSlice") => self.slices.push(serde_json::from_value(value)?),
            Some("DeviceClass") => self.classes.push(serde_json::from_value(value)?),
            Some("ResourceClaim") => self.claims.push(serde_json::from_value(value)?),
            Some(other) => {
                bail!("unexpected kind {other}; give ResourceSlices, DeviceClasses and ResourceClaims")
            }
            None => bail!("a document has no kind"),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_are_grouped_by_their_pod() {
        let claim = |name: &str, kind: &str, uid: &str| {
            let owner = json!({"apiVersion": "v1", "kind": kind, "name": "x", "uid": uid});
            let metadata = json!({"name": name, "ownerReferences": [owner]});
            serde_json::from_value::<ResourceClaim>(json!({"metadata": metadata, "spec": {}})).unwrap()
        };
        let claims =
            [("a", "Pod", "1"), ("b", "Job", "1"), ("c", "Pod", "2"), ("d", "Pod", "1"), ("e", "Job", "1")];
        let claims = claims.map(|(name, kind, uid)| claim(name, kind, uid)).into();
        let groups = by_pod(claims);
        let names: Vec<Vec<&str>> = groups.iter().map(|group| group.iter().map(name).collect()).collect();
        assert_eq!(names, [vec!["a", "d"], vec!["b"], vec!["c"], vec!["e"]]);
    }
}
