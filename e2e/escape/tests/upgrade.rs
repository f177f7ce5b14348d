//! One container with shares of two claims, prepared before and after an upgrade of the library.
//! Both limits must hold, whichever of the two libraries the order of the devices selects.
//!
//! The mounts are compared with the committed answers of the CDI library that container runtimes
//! use. `DIVVY_REGENERATE=1 cargo test -p divvy-escape --test upgrade` regenerates the answers
//! (`e2e/oracle/cdi`; this needs Go).

mod common;

use common::{Program, built};
use divvy_api::sharing::Injection::{self, Preload, Shim};
use divvy_escape::cdi::{self, Prepared};
use divvy_escape::container::{Container, Recipe};
use divvy_escape::node::{CONTEXT, MIB, Node};
use serde_json::{Value, json};
use std::env::consts::ARCH;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

const LIBRARIES: [&str; 3] = ["libdivvy.so", "shim/libcuda.so.1", "shim/libnvidia-ml.so.1"];
/// The limits of the two shares, in bytes.
const OLD_LIMIT: u64 = 1024 * MIB;
const NEW_LIMIT: u64 = 2048 * MIB;

/// Copies the libraries as another build: with other content, so at another path on the host.
fn write_rebuilt(libraries: &Path, to: &Path) {
    std::fs::create_dir_all(to.join("shim")).expect("a directory");
    for name in LIBRARIES {
        let mut bytes = std::fs::read(libraries.join(name)).expect("a library");
        // The loader ignores bytes after the sections that the header describes.
        bytes.extend_from_slice(b"another build");
        std::fs::write(to.join(name), bytes).expect("a library");
    }
}

/// Writes files with that content in place of the libraries.
fn write_stand_ins(content: &str, to: &Path) {
    std::fs::create_dir_all(to.join("shim")).expect("a directory");
    for name in LIBRARIES {
        std::fs::write(to.join(name), content).expect("a file");
    }
}

/// One line per mount of a library or page: container path, host path and options.
fn describe<'a>(mounts: impl Iterator<Item = [&'a Value; 3]>, node: &Node) -> Vec<String> {
    let root = node.path().to_str().expect("a path that is text");
    let line = |[container, host, options]: [&Value; 3]| {
        let text =
            |value: &Value| value.as_str().expect("a path").replace(root, "/node").replace(ARCH, "ARCH");
        let options: Vec<&str> =
            options.as_array().expect("options").iter().filter_map(Value::as_str).collect();
        format!("{} from {} {}", text(container), text(host), options.join(","))
    };
    let ours = ["/run/divvy", "/ld.so.preload", "/libcuda.so", "/libnvidia-ml.so"];
    mounts.map(line).filter(|line| ours.iter().any(|part| line.contains(part))).collect()
}

/// The mounts that the runtimes' CDI library makes of these files, with the devices of each in this order.
fn ask_oracle(files: &[Value]) -> Value {
    let named = files.iter().enumerate().map(|(at, file)| (format!("{at}.json"), file.clone()));
    let device = |file: &Value| {
        let [kind, name] =
            [&file["kind"], &file["devices"][0]["name"]].map(|text| text.as_str().expect("text"));
        format!("{kind}={name}")
    };
    let devices: Vec<String> = files.iter().map(device).collect();
    let question = json!([{"files": named.collect::<serde_json::Map<_, _>>(), "devices": devices}]);
    let mut go = Command::new("go")
        .args(["run", "./cdi"])
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../oracle"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("go starts");
    go.stdin
        .take()
        .expect("stdin is piped")
        .write_all(question.to_string().as_bytes())
        .expect("go reads its input");
    let answer = go.wait_with_output().expect("go exits");
    assert!(answer.status.success(), "the oracle failed");
    serde_json::from_slice::<Vec<Value>>(&answer.stdout).expect("an answer").remove(0)
}

/// Uses stand-in libraries, whose content does not change from build to build.
#[test]
fn mounts_of_two_claims_match_the_runtime_library() {
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../oracle/vectors/cdi.json");
    let node = Node::up("L4").expect("a node");
    let share = |claim| node.share(claim, "share", MIB).expect("pages");
    let shares = [share("claim-1"), share("claim-2")];
    let libraries = ["before", "after"].map(|build| node.path().join(build));
    libraries.iter().for_each(|path| {
        write_stand_ins(path.to_str().expect("text").rsplit('/').next().expect("a name"), path)
    });
    let mut all = serde_json::Map::new();
    let regenerate = std::env::var_os("DIVVY_REGENERATE").is_some();
    for (old, new) in [(Preload, Preload), (Shim, Shim), (Preload, Shim), (Shim, Preload)] {
        let prepared = [(0, old), (1, new)].map(|(at, injection)| Prepared {
            share: shares[at].clone(),
            libraries: libraries[at].clone(),
            injection,
        });
        let files = prepared.each_ref().map(|prepared| cdi::file(&node, prepared).expect("a CDI file"));
        let name = format!("{}, then {}", old.as_str(), new.as_str());
        let ours = cdi::applied(&files).into_iter();
        let ours = describe(
            ours.map(|mount| ["containerPath", "hostPath", "options"].map(|field| &mount[field])),
            &node,
        );
        if regenerate {
            let answer = ask_oracle(&files);
            let mounts = answer.as_array().expect("mounts").iter();
            let theirs = mounts.map(|mount| ["destination", "source", "options"].map(|field| &mount[field]));
            all.insert(name, json!(describe(theirs, &node)));
        } else {
            let expected: Value =
                serde_json::from_slice(&std::fs::read(&committed).expect("answers")).expect("answers");
            assert_eq!(json!(ours), expected[&name], "{name}");
        }
    }
    if regenerate {
        let text = serde_json::to_string_pretty(&all).expect("text");
        std::fs::write(committed, text + "\n").expect("answers");
    }
}

fn check(old: Injection, new: Injection) {
    for new_is_last in [true, false] {
        let node = Node::up("L4").expect("a node");
        let (programs, enforcement) = built();
        programs.install(&node).expect("programs");
        let after = node.path().join("after");
        write_rebuilt(enforcement.library.parent().expect("a directory"), &after);
        let shares = [("claim-1", OLD_LIMIT), ("claim-2", NEW_LIMIT)]
            .map(|(claim, limit)| node.share(claim, "share", limit).expect("pages"));
        let mut prepared = vec![
            enforcement.prepare(&shares[0], old).expect("libraries"),
            Prepared { share: shares[1].clone(), libraries: after, injection: new },
        ];
        if !new_is_last {
            prepared.reverse();
        }
        let container =
            Container::start(&node, &Recipe { prepared, ..Recipe::default() }).expect("a container");
        let mut program = Program::start(&node, &container, None);
        let context = format!("{old:?} before, {new:?} after, the new one last: {new_is_last}");
        assert_eq!(
            program.allocate(OLD_LIMIT + NEW_LIMIT),
            (OLD_LIMIT + NEW_LIMIT - CONTEXT) / (16 * MIB) * (16 * MIB),
            "{context}"
        );
        let used: u64 = shares.iter().map(|share| share.used().expect("an account")).sum();
        assert_eq!(used, node.used(), "{context}");
        for (share, limit) in shares.iter().zip([OLD_LIMIT, NEW_LIMIT]) {
            let used = share.used().expect("an account");
            assert!(used <= limit && used > limit - 16 * MIB, "{context}: {used} of {limit}");
        }
    }
}

#[test]
fn preloaded_claims_before_and_after_upgrade_coexist() {
    check(Preload, Preload);
}

#[test]
fn shim_claims_before_and_after_upgrade_coexist() {
    check(Shim, Shim);
}

#[test]
fn preloaded_and_shim_claims_coexist_across_upgrade() {
    check(Preload, Shim);
    check(Shim, Preload);
}
