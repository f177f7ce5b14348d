//! The exported symbols: exactly those in the list, with the right soname. None crashes on NULL.
#![allow(unsafe_code, reason = "the library is loaded and called through C")]

mod common;
mod elf;

use std::collections::BTreeSet;

use common::{Code, INVALID_ARGUMENT, NOT_SUPPORTED, Node, SUCCESS, UNINITIALIZED};

/// Name and kind of each symbol: "real", or the arguments of a stub.
fn list() -> impl Iterator<Item = (&'static str, &'static str)> {
    let lines = include_str!("../symbols.txt").lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split_once(' '))
}

fn listed() -> BTreeSet<String> {
    list().map(|(name, _)| name.to_owned()).collect()
}

#[test]
fn library_exports_exactly_the_listed_symbols() {
    let file = elf::Dynamic::read(&divvy_sim::library().expect("cargo built the library"));
    let listed = listed();
    assert_eq!(listed.len(), 437);
    assert_eq!(file.exported.difference(&listed).collect::<Vec<_>>(), Vec::<&String>::new());
    assert_eq!(listed.difference(&file.exported).collect::<Vec<_>>(), Vec::<&String>::new());
}

#[test]
fn soname_is_the_real_one() {
    let file = elf::Dynamic::read(&divvy_sim::library().expect("cargo built the library"));
    assert_eq!(file.soname, "libnvidia-ml.so.1");
}

type Zeros = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64) -> Code;

/// Calls each symbol with all arguments zero.
fn with_zeros(library: &libloading::Library, check: impl Fn(&str, &str, Code)) {
    let lifecycle = ["nvmlInit", "nvmlInit_v2", "nvmlInitWithFlags", "nvmlShutdown", "nvmlErrorString"];
    for (name, arguments) in list().filter(|(name, _)| !lifecycle.contains(name)) {
        // SAFETY: in the C calling convention a function ignores additional arguments. Zeros are
        // NULL or 0.
        let code =
            unsafe { library.get::<Zeros>(name.as_bytes()).expect("exported")(0, 0, 0, 0, 0, 0, 0, 0) };
        check(name, arguments, code);
    }
}

#[test]
fn zero_arguments_crash_no_call() {
    let node = Node::up("H100-SXM5-80GB");
    // SAFETY: loading the library runs no initialisation code.
    let library = unsafe { libloading::Library::new(node.library()) }.expect("a library");
    with_zeros(&library, |name, _, code| assert_eq!(code, UNINITIALIZED, "{name} before init"));
    // SAFETY: the signature is the header's.
    let init = unsafe { library.get::<unsafe extern "C" fn() -> Code>(b"nvmlInit_v2") }.expect("exported");
    // SAFETY: the function has no arguments.
    assert_eq!(unsafe { init() }, SUCCESS);
    with_zeros(&library, |name, arguments, code| {
        // A stub without pointers has no argument that could be missing.
        let numbers = arguments.split(',').all(|kind| matches!(kind, "word" | "long" | "void"));
        assert_eq!(code, if numbers { NOT_SUPPORTED } else { INVALID_ARGUMENT }, "{name} after init");
    });
}
