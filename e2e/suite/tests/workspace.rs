//! Checks the direction of dependencies: between the crates of the workspace, as `cargo metadata`
//! reports them, and between the source files of each crate, by their `use` paths.
//!
//! Between crates only normal and build dependencies count: tests may use the simulator and the fakes.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The workspace crates that each crate may depend on: `*` allows all, `?` marks an optional dependency.
const MAY_USE: &[(&str, &[&str])] = &[
    ("divvy-api", &[]),
    ("divvy-model", &["divvy-api"]),
    ("divvy-catalogue", &["divvy-model"]),
    ("divvy-kubelet", &[]),
    ("divvy-pages", &[]),
    ("divvy-nvml", &["divvy-api", "divvy-model"]),
    ("divvy-slices", &["divvy-api", "divvy-model"]),
    ("divvy-alloc", &["divvy-api", "divvy-model"]),
    ("divvy-hook", &[]),
    ("divvy-mps-supervisor", &["divvy-api"]),
    ("divvy-interposer-core", &["divvy-pages"]),
    ("divvy-interposer", &["divvy-pages", "divvy-interposer-core"]),
    ("divvy-daemon", &[]),
    ("divvy-controller", &["divvy-api", "divvy-model", "divvy-alloc", "divvy-slices", "divvy-daemon"]),
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
            "divvy-mps-supervisor",
        ],
    ),
    ("divvy-sim", &["divvy-catalogue"]),
    ("divvy-sim-nvml", &["divvy-sim"]),
    ("divvy-sim-cuda", &["divvy-sim"]),
    ("divvy-crash", &[]),
    (
        "divvy-escape",
        &["divvy-api", "divvy-pages", "divvy-driver", "divvy-sim", "divvy-sim-nvml", "divvy-sim-cuda"],
    ),
    ("divvy-fakes", &["divvy-api", "divvy-kubelet"]),
    ("divvy-e2e", &["*"]),
    ("divvy-bench", &["*"]),
    (
        "divvy",
        &[
            "divvy-api",
            "divvy-model",
            "divvy-alloc",
            "divvy-catalogue",
            "divvy-slices",
            "divvy-driver?",
            "divvy-hook?",
            "divvy-mps-supervisor?",
            "divvy-kubelet?",
            "divvy-sim?",
            "divvy-sim-nvml?",
            "divvy-sim-cuda?",
            "divvy-fakes?",
        ],
    ),
];

/// External crates that only the named crates may reach, directly or transitively.
const ONLY_REACHED_BY: &[(&str, &[&str])] = &[
    ("nvml-wrapper", &["divvy-nvml", "divvy-driver", "divvy-escape", "divvy-bench", "divvy", "divvy-e2e"]),
    (
        "nvml-wrapper-sys",
        &["divvy-nvml", "divvy-driver", "divvy-escape", "divvy-bench", "divvy", "divvy-e2e"],
    ),
];

/// Crates without I/O; they must not reach any of `IMPURE`, directly or transitively.
const PURE: &[&str] = &["divvy-api", "divvy-model", "divvy-catalogue", "divvy-alloc"];
const IMPURE: &[&str] = &["tokio", "kube", "kube-client", "tonic", "hyper", "axum"];

/// The layers of divvy-driver from the bottom: each top-level folder or file of `driver/src`, and
/// those that it may import.
const DRIVER_LAYERS: &[(&str, &[&str])] = &[
    ("paths", &[]),
    ("inotify", &[]),
    ("metrics", &[]),
    ("containers", &["paths"]),
    ("gpu", &["paths", "inotify"]),
    ("shares", &["paths", "containers", "inotify", "gpu"]),
    ("cdi", &["paths", "containers", "gpu", "shares"]),
    ("cluster", &["inotify", "metrics", "gpu"]),
    ("claims", &["paths", "containers", "inotify", "metrics", "gpu", "shares", "cdi", "cluster"]),
    ("kubelet", &["paths", "metrics", "gpu", "cluster", "claims"]),
    ("daemon", &["paths", "metrics", "gpu", "shares", "cdi", "cluster", "claims", "kubelet"]),
];

struct Workspace {
    /// The directory of each member, by name.
    directories: BTreeMap<String, PathBuf>,
    /// Members by name, with their declared normal and build dependencies; `?` marks an optional one.
    declared: BTreeMap<String, BTreeSet<String>>,
    /// Resolved normal and build dependencies of every package, by name.
    resolved: BTreeMap<String, BTreeSet<String>>,
}

fn workspace() -> Workspace {
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
    let directories = list(&metadata["packages"])
        .filter(|package| members.contains(text(&package["name"])))
        .filter_map(|package| {
            let directory = Path::new(text(&package["manifest_path"])).parent()?;
            Some((text(&package["name"]).to_owned(), directory.to_owned()))
        })
        .collect();
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
    Workspace { directories, declared, resolved }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

impl Workspace {
    /// All packages that `from` depends on, directly or transitively.
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
    let workspace = workspace();
    let rules: BTreeMap<&str, &[&str]> = MAY_USE.iter().copied().collect();
    for (member, edges) in &workspace.declared {
        let may = rules.get(member.as_str()).unwrap_or_else(|| panic!("{member} has no rule in this test"));
        for edge in edges.iter().filter(|edge| workspace.declared.contains_key(edge.trim_end_matches('?'))) {
            assert!(may.contains(&"*") || may.contains(&edge.as_str()), "{member} must not depend on {edge}");
        }
    }
}

#[test]
fn every_rule_names_a_workspace_crate() {
    let workspace = workspace();
    for (member, _) in MAY_USE {
        assert!(workspace.declared.contains_key(*member), "{member} is not a member of the workspace");
    }
}

#[test]
fn nvml_is_called_from_one_crate() {
    let workspace = workspace();
    for (outside, _) in ONLY_REACHED_BY {
        for (member, edges) in &workspace.declared {
            let direct = edges.contains(*outside);
            assert!(!direct || member == "divvy-nvml", "{member} must not depend on {outside}");
        }
    }
    for (outside, allowed) in ONLY_REACHED_BY {
        for member in workspace.declared.keys() {
            let reaches = workspace.reach(member).contains(outside);
            assert!(!reaches || allowed.contains(&member.as_str()), "{member} reaches {outside}");
        }
    }
}

#[test]
fn pure_crates_reach_no_runtime_and_no_network() {
    let workspace = workspace();
    for member in PURE {
        let reach = workspace.reach(member);
        for impure in IMPURE {
            assert!(!reach.contains(impure), "{member} reaches {impure}");
        }
    }
}

#[test]
fn product_crates_reach_no_simulator() {
    let workspace = workspace();
    for product in [
        "divvy-api",
        "divvy-model",
        "divvy-catalogue",
        "divvy-kubelet",
        "divvy-nvml",
        "divvy-slices",
        "divvy-alloc",
        "divvy-hook",
        "divvy-driver",
        "divvy-mps-supervisor",
        "divvy-daemon",
        "divvy-controller",
    ] {
        let reach = workspace.reach(product);
        for test_crate in [
            "divvy-sim",
            "divvy-sim-nvml",
            "divvy-sim-cuda",
            "divvy-fakes",
            "divvy-crash",
            "divvy-e2e",
            "divvy-bench",
        ] {
            assert!(!reach.contains(test_crate), "{product} reaches {test_crate}");
        }
    }
}

/// The source files of a crate without its tests: text by path below `src`.
type Sources = BTreeMap<String, String>;
/// The files that each file imports.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// Reads the files below `src`, except test files, and `bin`, whose files are separate crates.
fn sources(src: &Path) -> Sources {
    let mut found = Sources::new();
    let mut directories = vec![src.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if path.is_dir() {
                if name != "tests" && path != src.join("bin") {
                    directories.push(path);
                }
            } else if name.ends_with(".rs") && name != "tests.rs" {
                let text = std::fs::read_to_string(&path).expect("a source file is readable");
                let below = path.strip_prefix(src).expect("the file is below src");
                found.insert(below.to_string_lossy().into_owned(), text);
            }
        }
    }
    found
}

/// The module path of a file: `a/b.rs` and `a/b/mod.rs` are `[a, b]`, the crate root is empty.
fn module_path(file: &str) -> Vec<&str> {
    let mut path: Vec<&str> = file.trim_end_matches(".rs").split('/').collect();
    if matches!(path.last(), Some(&("mod" | "lib" | "main"))) {
        path.pop();
    }
    path
}

/// The text without comments and without inline `#[cfg(test)]` modules.
fn without_tests(text: &str) -> String {
    let mut kept = String::new();
    let (mut is_test, mut depth) = (false, 0_usize);
    for line in text.lines() {
        let code = line.split("//").next().unwrap_or_default();
        let opened = code.matches('{').count();
        let closed = code.matches('}').count();
        if depth > 0 {
            depth = (depth + opened).saturating_sub(closed);
            continue;
        }
        let code = code.trim();
        if is_test && code.contains("mod ") && code.ends_with('{') {
            (is_test, depth) = (false, 1);
            continue;
        }
        is_test = code.starts_with("#[cfg(") && code.contains("test") || is_test && code.starts_with("#[");
        kept += code;
        kept.push('\n');
    }
    kept
}

/// The single paths of a `use` tree such as `crate::a::{self, b::C}`.
fn use_paths(tree: &str) -> Vec<String> {
    let Some((prefix, rest)) = tree.split_once('{') else {
        return vec![tree.split(" as ").next().unwrap_or_default().trim().to_owned()];
    };
    let inner = rest.trim_end().strip_suffix('}').unwrap_or(rest);
    let (mut parts, mut depth) = (vec![String::new()], 0_usize);
    for letter in inner.chars() {
        match letter {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        parts.last_mut().expect("there is a part").push(letter);
    }
    let parts = parts.iter().map(|part| part.trim()).filter(|part| !part.is_empty());
    parts.flat_map(|part| use_paths(&format!("{}{part}", prefix.trim()))).collect()
}

/// The imports between the files of a crate, by `use crate::`, `use super::` and `use self::` paths.
fn imports(sources: &Sources) -> Imports {
    let modules: BTreeMap<Vec<&str>, &String> =
        sources.keys().rev().map(|file| (module_path(file), file)).collect();
    let mut all = Imports::new();
    for (file, text) in sources {
        let own = module_path(file);
        let code = without_tests(text);
        let mut imported = BTreeSet::new();
        for statement in code.split(';') {
            let Some((_, tree)) = statement.rsplit_once("use ") else { continue };
            for path in use_paths(&tree.split_whitespace().collect::<Vec<_>>().join(" ")) {
                let mut segments: Vec<&str> = path.split("::").map(str::trim).collect();
                let mut module = match segments[0] {
                    "crate" => Vec::new(),
                    "self" | "super" => own.clone(),
                    _ => continue,
                };
                while matches!(segments.first(), Some(&("crate" | "self" | "super"))) {
                    if segments.remove(0) == "super" {
                        module.pop();
                    }
                }
                module.extend(segments);
                // The longest prefix that is a module: the rest names an item in it.
                let target = (0..=module.len()).rev().find_map(|end| modules.get(&module[..end]));
                if let Some(target) = target.filter(|target| **target != file) {
                    imported.insert((*target).clone());
                }
            }
        }
        all.insert(file.clone(), imported);
    }
    all
}

/// Groups of three or more files that import each other, directly or transitively.
fn circles(imports: &Imports) -> Vec<Vec<&str>> {
    let reach = |from: &str| {
        let mut seen = BTreeSet::new();
        let mut open = vec![from];
        while let Some(file) = open.pop() {
            for next in imports.get(file).into_iter().flatten() {
                if seen.insert(next.as_str()) {
                    open.push(next);
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        imports.keys().map(|file| (file.as_str(), reach(file))).collect();
    let mut groups = BTreeSet::new();
    for (file, from) in &reached {
        let group: Vec<&str> = from.iter().copied().filter(|to| reached[to].contains(file)).collect();
        if group.len() > 2 {
            groups.insert(group);
        }
    }
    groups.into_iter().collect()
}

/// Imports between top-level folders that the table of layers does not allow.
fn layer_violations(imports: &Imports, layers: &[(&str, &[&str])]) -> Vec<String> {
    let folder = |file: &str| file.split('/').next().unwrap_or_default().trim_end_matches(".rs").to_owned();
    let allowed: BTreeMap<&str, &[&str]> = layers.iter().copied().collect();
    let mut violations = Vec::new();
    for (file, targets) in imports.iter().filter(|_| !layers.is_empty()) {
        let from = folder(file);
        for target in targets {
            let to = folder(target);
            let may = allowed.get(from.as_str()).is_some_and(|may| may.contains(&to.as_str()));
            if from != to && !may {
                violations.push(format!("{file} must not import {target}"));
            }
        }
    }
    violations
}

#[test]
fn source_files_have_no_import_circles() {
    let mut found = Vec::new();
    for (member, directory) in &workspace().directories {
        let imports = imports(&sources(&directory.join("src")));
        found.extend(circles(&imports).iter().map(|files| format!("{member}: {}", files.join(", "))));
    }
    assert!(found.is_empty(), "files that import each other in a circle:\n{}", found.join("\n"));
}

#[test]
fn driver_imports_follow_its_layers() {
    let driver = &workspace().directories["divvy-driver"];
    let violations = layer_violations(&imports(&sources(&driver.join("src"))), DRIVER_LAYERS);
    assert!(violations.is_empty(), "{}", violations.join("\n"));
}

fn example(files: &[(&str, &str)]) -> Imports {
    imports(&files.iter().map(|(file, text)| ((*file).to_owned(), (*text).to_owned())).collect())
}

#[test]
fn imports_are_resolved_to_files() {
    let imports = example(&[
        ("lib.rs", "mod a; mod b; pub const LIMIT: u32 = 1;"),
        ("a.rs", "use crate::b::{self, inner::{Thing as Other, second}};\npub use crate::LIMIT;"),
        ("b/mod.rs", "mod inner;\n// use crate::a;\n#[cfg(test)]\nmod tests {\n    use crate::a;\n}\n"),
        ("b/inner.rs", "use super::Shared;\nuse std::fmt;\nuse self::deeper::Item;"),
    ]);
    let files = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(imports["a.rs"], files(&["b/inner.rs", "b/mod.rs", "lib.rs"]));
    assert_eq!(imports["b/mod.rs"], files(&[]));
    assert_eq!(imports["b/inner.rs"], files(&["b/mod.rs"]));
}

#[test]
fn circles_of_three_files_are_found() {
    let imports = example(&[
        ("a.rs", "use crate::b::B;"),
        ("b.rs", "use crate::c::C;"),
        ("c.rs", "use crate::a::A;"),
        ("d.rs", "use crate::a::A;\nuse crate::e::E;"),
        ("e.rs", "use crate::d::D;"),
    ]);
    assert_eq!(circles(&imports), [vec!["a.rs", "b.rs", "c.rs"]]);
    assert_eq!(
        circles(&example(&[("a.rs", "use crate::b;"), ("b.rs", "use crate::a;")])),
        Vec::<Vec<&str>>::new()
    );
}

#[test]
fn layer_violations_are_found() {
    let imports = example(&[
        ("top/mod.rs", "use crate::base::Item;"),
        ("base/mod.rs", "use crate::paths::Path;"),
        ("base/other.rs", "use crate::top::Thing;\nuse super::Item;"),
        ("paths.rs", ""),
    ]);
    let layers: &[(&str, &[&str])] = &[("top", &["base"]), ("base", &["paths"])];
    assert_eq!(layer_violations(&imports, layers), ["base/other.rs must not import top/mod.rs"]);
    assert_eq!(layer_violations(&imports, &[]), [""; 0]);
}
