//! One container with shares of two claims, one prepared before an upgrade of the library and one after it. Whichever library
//! the container has, by the order in which the runtime is told of its devices, both limits hold together.
//!
//! What a runtime makes of the claims' files is what the library that runtimes use makes of them: its answers are committed.
//! `DIVVY_REGENERATE=1 cargo test -p divvy-escape --test upgrade` asks for them anew (`e2e/oracle/cdi`; it needs Go).

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
const OLD: u64 = 1024 * MIB;
const NEW: u64 = 2048 * MIB;

/// The libraries as another build: another content, so another place on the host.
fn rebuilt(libraries: &Path, to: &Path) {
    std::fs::create_dir_all(to.join("shim")).expect("a directory");
    for name in LIBRARIES {
        let mut bytes = std::fs::read(libraries.join(name)).expect("a library");
        // The loader reads what the header says and nothing behind it.
        bytes.extend_from_slice(b"another build");
        std::fs::write(to.join(name), bytes).expect("a library");
    }
}

/// Files of that content in the place of the libraries.
fn played(content: &str, to: &Path) {
    std::fs::create_dir_all(to.join("shim")).expect("a directory");
    for name in LIBRARIES {
        std::fs::write(to.join(name), content).expect("a file");
    }
}

/// Of mounts, those of the libraries and the pages: container and host path, and the options.
fn told<'a>(mounts: impl Iterator<Item = [&'a Value; 3]>, node: &Node) -> Vec<String> {
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

/// What the library that runtimes use makes of files with the devices of each in this order.
fn asked(files: &[Value]) -> Value {
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
    go.stdin.take().expect("its input").write_all(question.to_string().as_bytes()).expect("it reads");
    let answer = go.wait_with_output().expect("it ends");
    assert!(answer.status.success(), "the oracle failed");
    serde_json::from_slice::<Vec<Value>>(&answer.stdout).expect("an answer").remove(0)
}

/// Of libraries whose content does not change from build to build.
#[test]
fn a_container_has_of_two_claims_what_runtimes_make_of_them() {
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../oracle/vectors/cdi.json");
    let node = Node::up("L4").expect("a node");
    let share = |claim| node.share(claim, "share", MIB).expect("pages");
    let shares = [share("claim-1"), share("claim-2")];
    let libraries = ["before", "after"].map(|build| node.path().join(build));
    libraries
        .iter()
        .for_each(|path| played(path.to_str().expect("text").rsplit('/').next().expect("a name"), path));
    let mut all = serde_json::Map::new();
    let is_asked = std::env::var_os("DIVVY_REGENERATE").is_some();
    for (old, new) in [(Preload, Preload), (Shim, Shim), (Preload, Shim), (Shim, Preload)] {
        let prepared = [(0, old), (1, new)].map(|(at, injection)| Prepared {
            share: shares[at].clone(),
            libraries: libraries[at].clone(),
            injection,
        });
        let files = prepared.each_ref().map(|prepared| cdi::file(&node, prepared).expect("a CDI file"));
        let name = format!("{}, then {}", old.as_str(), new.as_str());
        let ours = cdi::applied(&files).into_iter();
        let ours = told(
            ours.map(|mount| ["containerPath", "hostPath", "options"].map(|field| &mount[field])),
            &node,
        );
        if is_asked {
            let answer = asked(&files);
            let mounts = answer.as_array().expect("mounts").iter();
            let theirs = mounts.map(|mount| ["destination", "source", "options"].map(|field| &mount[field]));
            all.insert(name, json!(told(theirs, &node)));
        } else {
            let known: Value =
                serde_json::from_slice(&std::fs::read(&committed).expect("answers")).expect("answers");
            assert_eq!(json!(ours), known[&name], "{name}");
        }
    }
    if is_asked {
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
        rebuilt(enforcement.library.parent().expect("a directory"), &after);
        let shares = [("claim-1", OLD), ("claim-2", NEW)]
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
        let what = format!("{old:?} before, {new:?} after, which is last: {new_is_last}");
        assert_eq!(program.takes(OLD + NEW), (OLD + NEW - CONTEXT) / (16 * MIB) * (16 * MIB), "{what}");
        let used: u64 = shares.iter().map(|share| share.used().expect("an account")).sum();
        assert_eq!(used, node.used(), "{what}");
        for (share, limit) in shares.iter().zip([OLD, NEW]) {
            let used = share.used().expect("an account");
            assert!(used <= limit && used > limit - 16 * MIB, "{what}: {used} of {limit}");
        }
    }
}

#[test]
fn claims_prepared_before_an_upgrade_and_after_it_live_in_one_container() {
    check(Preload, Preload);
}

#[test]
fn so_do_those_whose_library_stands_in_the_drivers_place() {
    check(Shim, Shim);
}

#[test]
fn and_claims_of_classes_that_differ_in_that() {
    check(Preload, Shim);
    check(Shim, Preload);
}
