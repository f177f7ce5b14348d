//! The direction of dependencies, held by what cargo itself says: `api` is the
//! language, `driver` the hands, `controller` the voice, `e2e` the world.
//!
//! Only normal and build edges count: tests may use the simulator and the fakes.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// Which crates of the house each crate may name, `*` for the world that sees everything.
const MAY_USE: &[(&str, &[&str])] = &[
    ("divvy-api", &[]),
    ("divvy-model", &["divvy-api"]),
    ("divvy-kubelet", &[]),
    ("divvy-pages", &[]),
    ("divvy-nvml", &["divvy-api", "divvy-model"]),
    ("divvy-slices", &["divvy-api", "divvy-model"]),
    ("divvy-alloc", &["divvy-api", "divvy-model"]),
    ("divvy-hook", &[]),
    ("divvy-tree", &[]),
    ("divvy-keeper", &["divvy-api", "divvy-tree"]),
    ("divvy-interposer-core", &["divvy-pages"]),
    ("divvy-interposer", &["divvy-pages", "divvy-interposer-core"]),
    ("divvy-daemon", &[]),
    ("divvy-controller", &["divvy-api", "divvy-model", "divvy-alloc", "divvy-daemon"]),
    (
        "divvy-driver",
        &[
            "divvy-api",
            "divvy-model",
            "divvy-pages",
            "divvy-kubelet",
            "divvy-nvml",
            "divvy-slices",
            "divvy-daemon",
            "divvy-tree",
        ],
    ),
    ("divvy-sim", &["divvy-api", "divvy-model"]),
    ("divvy-sim-nvml", &["divvy-sim"]),
    ("divvy-sim-cuda", &["divvy-sim"]),
    ("divvy-crash", &[]),
    (
        "divvy-escape",
        &["divvy-api", "divvy-pages", "divvy-driver", "divvy-sim", "divvy-sim-nvml", "divvy-sim-cuda"],
    ),
    ("divvy-fakes", &["divvy-api", "divvy-kubelet"]),
    ("divvy-e2e", &["*"]),
    (
        "divvy",
        &[
            "divvy-api",
            "divvy-model",
            "divvy-alloc",
            "divvy-driver?",
            "divvy-hook?",
            "divvy-keeper?",
            "divvy-kubelet?",
            "divvy-nvml?",
            "divvy-slices?",
            "divvy-sim?",
            "divvy-sim-nvml?",
            "divvy-fakes?",
            "divvy-escape?",
        ],
    ),
];

/// Crates from outside that only the named crates may reach, directly or not.
const ONLY_REACHED_BY: &[(&str, &[&str])] = &[
    ("nvml-wrapper", &["divvy-nvml", "divvy-driver", "divvy-escape", "divvy", "divvy-e2e"]),
    ("nvml-wrapper-sys", &["divvy-nvml", "divvy-driver", "divvy-escape", "divvy", "divvy-e2e"]),
];

/// What the pure crates must not reach, directly or not.
const PURE: &[&str] = &["divvy-api", "divvy-model", "divvy-alloc"];
const IMPURE: &[&str] = &["tokio", "kube", "kube-client", "tonic", "hyper", "axum"];

struct House {
    /// Members by name, with their declared normal and build edges; `?` marks an optional one.
    declared: BTreeMap<String, BTreeSet<String>>,
    /// Resolved normal and build edges of every package, by name.
    resolved: BTreeMap<String, BTreeSet<String>>,
}

fn house() -> House {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let out = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--locked"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo metadata starts");
    assert!(out.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&out.stderr));
    let metadata: Value = serde_json::from_slice(&out.stdout).expect("cargo metadata prints JSON");

    let name_of: BTreeMap<&str, &str> =
        list(&metadata["packages"]).map(|p| (text(&p["id"]), text(&p["name"]))).collect();
    let members: BTreeSet<&str> =
        list(&metadata["workspace_members"]).filter_map(|id| name_of.get(text(id)).copied()).collect();
    let declared = list(&metadata["packages"])
        .filter(|package| members.contains(text(&package["name"])))
        .map(|package| {
            let edges = list(&package["dependencies"])
                .filter(|edge| edge["kind"] != "dev")
                .map(|edge| {
                    let optional = if edge["optional"] == true { "?" } else { "" };
                    format!("{}{optional}", text(&edge["name"]))
                })
                .collect();
            (text(&package["name"]).to_owned(), edges)
        })
        .collect();
    let mut resolved: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for node in list(&metadata["resolve"]["nodes"]) {
        let edges = list(&node["deps"])
            .filter(|dep| list(&dep["dep_kinds"]).any(|kind| kind["kind"] != "dev"))
            .map(|dep| name_of[text(&dep["pkg"])].to_owned());
        resolved.entry(name_of[text(&node["id"])].to_owned()).or_default().extend(edges);
    }
    House { declared, resolved }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

impl House {
    /// Everything a package reaches.
    fn reach(&self, from: &str) -> BTreeSet<&str> {
        let mut seen = BTreeSet::new();
        let mut open = vec![from];
        while let Some(name) = open.pop() {
            for next in self.resolved.get(name).into_iter().flatten() {
                if seen.insert(next.as_str()) {
                    open.push(next);
                }
            }
        }
        seen
    }
}

#[test]
fn dependencies_point_one_way() {
    let house = house();
    let rules: BTreeMap<&str, &[&str]> = MAY_USE.iter().copied().collect();
    for (member, edges) in &house.declared {
        let may = rules.get(member.as_str()).unwrap_or_else(|| panic!("{member} has no rule in this test"));
        for edge in edges.iter().filter(|edge| house.declared.contains_key(edge.trim_end_matches('?'))) {
            assert!(may.contains(&"*") || may.contains(&edge.as_str()), "{member} must not depend on {edge}");
        }
    }
}

#[test]
fn every_rule_is_about_a_crate_that_exists() {
    let house = house();
    for (member, _) in MAY_USE {
        assert!(house.declared.contains_key(*member), "{member} is not a member of the workspace");
    }
}

#[test]
fn nvml_is_called_from_one_crate() {
    let house = house();
    for (outside, _) in ONLY_REACHED_BY {
        for (member, edges) in &house.declared {
            let direct = edges.contains(*outside);
            assert!(!direct || member == "divvy-nvml", "{member} must not depend on {outside}");
        }
    }
    for (outside, allowed) in ONLY_REACHED_BY {
        for member in house.declared.keys() {
            let reaches = house.reach(member).contains(outside);
            assert!(!reaches || allowed.contains(&member.as_str()), "{member} reaches {outside}");
        }
    }
}

#[test]
fn pure_crates_reach_no_runtime_and_no_network() {
    let house = house();
    for member in PURE {
        let reach = house.reach(member);
        for impure in IMPURE {
            assert!(!reach.contains(impure), "{member} reaches {impure}");
        }
    }
}

#[test]
fn product_crates_reach_no_simulator() {
    let house = house();
    for product in [
        "divvy-api",
        "divvy-model",
        "divvy-kubelet",
        "divvy-nvml",
        "divvy-slices",
        "divvy-alloc",
        "divvy-hook",
        "divvy-driver",
        "divvy-keeper",
        "divvy-tree",
        "divvy-daemon",
        "divvy-controller",
    ] {
        let reach = house.reach(product);
        for world in
            ["divvy-sim", "divvy-sim-nvml", "divvy-sim-cuda", "divvy-fakes", "divvy-crash", "divvy-e2e"]
        {
            assert!(!reach.contains(world), "{product} reaches {world}");
        }
    }
}
