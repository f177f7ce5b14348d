//! `cuGetProcAddress` returns the same variant with and without the library, for every name,
//! version and flag: the hook if that variant is hooked, the driver's function otherwise.

mod common;

use common::container::Node;
use common::guest::Guest;
use std::collections::BTreeSet;

/// Entry point of the program in the container.
#[test]
fn scenario_program() {
    common::container::guest();
}

/// True for functions of `libcuda.so.1`; the decoder's functions have the same prefix.
fn is_cuda(name: &str) -> bool {
    name.starts_with("cu") && !name.starts_with("cuvid")
}

#[test]
fn every_variant_matches_the_driver() {
    let node = Node::newest("L4");
    let hooks: BTreeSet<String> = common::listed("hooks.txt").into_iter().collect();
    let plain = Guest::open(&node.sim.library("libcuda.so.1")).run(&["sweep"]);
    let share = node.share("claim", "share", node.policy(0, 1000));
    let hooked = node.container(&[share]).program().ask("sweep");
    let (plain, hooked): (Vec<&str>, Vec<&str>) = (plain.split(' ').collect(), hooked.split(' ').collect());
    assert_eq!(plain.len(), hooked.len());
    let mut seen = BTreeSet::new();
    for (plain, hooked) in plain.iter().zip(&hooked) {
        let (query, export) =
            plain.rsplit_once('@').map(|(said, _)| said.split_once('=').expect("an answer")).expect("a file");
        let expected = match hooks.contains(export) {
            true => format!("{query}={export}@libdivvy.so"),
            false => (*plain).to_owned(),
        };
        assert_eq!(*hooked, expected);
        seen.insert(export.to_owned());
    }
    let reached = hooks.iter().filter(|name| is_cuda(name)).filter(|name| !seen.contains(*name));
    assert_eq!(reached.collect::<Vec<_>>(), Vec::<&String>::new(), "hooks that no query gives");
}

/// For each hooked name, the list has all lines of the simulated driver's list, which another
/// program generated from the headers.
#[test]
fn variant_list_matches_the_headers() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../e2e/sim/cuda/symbols.txt");
    let theirs: BTreeSet<String> = std::fs::read_to_string(path)
        .expect("the simulator's list")
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty())
        .map(|line| {
            let [export, name, version, stream] =
                line.split(' ').collect::<Vec<_>>().try_into().expect("four words");
            format!("{name} {version} {} {export}", if stream == "legacy" { 0 } else { 2 })
        })
        .collect();
    let ours: BTreeSet<String> = common::listed("cuda.txt").into_iter().collect();
    let names: BTreeSet<&str> = ours.iter().filter_map(|line| line.split(' ').next()).collect();
    let missing: Vec<&String> = theirs
        .difference(&ours)
        .filter(|line| line.split(' ').next().is_some_and(|name| names.contains(name)))
        .collect();
    assert_eq!(missing, Vec::<&String>::new());
    let more: Vec<&String> = ours.difference(&theirs).collect();
    assert_eq!(
        more,
        ["cuGraphInstantiate 12000 0 cuGraphInstantiateWithFlags"],
        "a name of another function"
    );
}

#[test]
fn every_hook_is_in_the_variant_list() {
    let lines = common::listed("cuda.txt");
    let exports: BTreeSet<&str> = lines.iter().filter_map(|line| line.rsplit(' ').next()).collect();
    for hook in common::listed("hooks.txt").iter().filter(|name| is_cuda(name)) {
        assert!(exports.contains(hook.as_str()), "{hook} is no function of cuda.h");
    }
}
