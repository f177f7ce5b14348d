//! The exported symbols: every function of the list, under the right soname, and none of them called through the dynamic
//! linker by the library itself.

#[path = "../../nvml/tests/elf/mod.rs"]
mod elf;

use std::collections::BTreeSet;

/// What the tests count calls with, which no header has.
const COUNTER: &str = "divvy_sim_cuda_calls";

fn library() -> elf::Dynamic {
    let program = std::env::current_exe().expect("this test");
    elf::Dynamic::read(&program.with_file_name("libdivvy_sim_cuda.so"))
}

fn listed() -> BTreeSet<String> {
    let lines = include_str!("../symbols.txt").lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split_once(' ')).map(|(name, _)| name.to_owned()).collect()
}

/// Of the driver's functions.
fn of_driver(names: &BTreeSet<String>) -> Vec<&String> {
    names.iter().filter(|name| name.starts_with("cu")).collect()
}

#[test]
fn the_library_exports_the_list_and_nothing_else() {
    let (listed, mut exported) = (listed(), library().exported);
    assert_eq!(listed.len(), 724);
    assert!(exported.remove(COUNTER));
    assert_eq!(exported.difference(&listed).collect::<Vec<_>>(), Vec::<&String>::new());
    assert_eq!(listed.difference(&exported).collect::<Vec<_>>(), Vec::<&String>::new());
}

#[test]
fn the_soname_is_the_real_one() {
    assert_eq!(library().soname, "libcuda.so.1");
}

/// Whoever defines the same names before it gets the program's calls and none of the library's own.
#[test]
fn its_own_calls_never_go_through_the_dynamic_linker() {
    let file = library();
    // That of the C library is looked up, which shows that the look-ups are found.
    assert!(!file.undefined.is_empty() && !file.relocated.is_empty());
    assert_eq!(of_driver(&file.undefined), Vec::<&String>::new());
    assert_eq!(of_driver(&file.relocated), Vec::<&String>::new());
}
