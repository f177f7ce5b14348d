//! Every way to look up a function returns the hook for hooked functions of NVIDIA's libraries, and
//! the same result as without this library otherwise.
//!
//! The tests use small libraries in C (`tests/loader`) as the driver.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Compiles `source` of `tests/loader` to `target` in the output directory.
fn compile(out: &Path, source: &str, target: &str, flags: &[&str]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/loader").join(source);
    let mut command = Command::new("cc");
    command.args(["-O1", "-w", "-fPIC", "-o"]).arg(out.join(target)).arg(source).args(flags);
    let status = command.current_dir(out).status().expect("cc starts");
    assert!(status.success(), "cc failed on {target}");
}

fn compiled() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("loader");
        std::fs::create_dir_all(&out).expect("a folder for the cases");
        let library = |source, target, soname: &str, more: &[&str]| {
            let soname = format!("-Wl,-soname,{soname}");
            compile(&out, source, target, &[&["-shared", "-Wl,-Bsymbolic", soname.as_str()], more].concat());
        };
        library("driver.c", "libcuda.so.1", "libcuda.so.1", &[]);
        library("driver.c", "libnvidia-ml.so.1", "libnvidia-ml.so.1", &[]);
        library("driver.c", "own.so", "own.so", &[]);
        library("needs.c", "needs.so", "needs.so", &["-L.", "-l:libcuda.so.1"]);
        compile(&out, "wrapper.c", "wrapper.so", &["-shared"]);
        compile(&out, "behind.c", "behind.so", &["-shared", "-ldl"]);
        compile(&out, "lookup.c", "lookup", &["-rdynamic", "-ldl"]);
        compile(
            &out,
            "lookup.c",
            "linked",
            &["-rdynamic", "-ldl", "-Wl,--no-as-needed", "-L.", "-l:libcuda.so.1"],
        );
        out
    })
}

/// The output of a test program with these libraries preloaded.
fn found(program: &str, preload: &[&Path]) -> BTreeMap<String, String> {
    let at = compiled();
    let files = ["libcuda.so.1", "needs.so", "own.so", "libnvidia-ml.so.1"].map(|file| at.join(file));
    let preload: Vec<&str> = preload.iter().map(|path| path.to_str().expect("a path in UTF-8")).collect();
    let mut command = Command::new(at.join(program));
    command.args(&files).env("LD_LIBRARY_PATH", at).env("LD_PRELOAD", preload.join(":"));
    let out = command.output().expect("the program starts");
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(
        out.status.success(),
        "{program}: {} {text} {}",
        out.status,
        String::from_utf8_lossy(&out.stderr)
    );
    assert_eq!(String::from_utf8_lossy(&out.stderr), "", "{program}: nothing else is printed");
    text.lines().filter_map(|line| line.split_once(": ")).map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
}

const HOOK: &str = "libdivvy.so";

/// Checks for each lookup which file contains the result, without and with the library.
fn check(program: &str, cases: &[(&str, &str, &str)]) {
    let plain = found(program, &[]);
    let hooked = found(program, &[&common::shipped().join(HOOK)]);
    for (way, without, with) in cases {
        assert_eq!(plain.get(*way).map(String::as_str), Some(*without), "{program}, {way}, without");
        assert_eq!(hooked.get(*way).map(String::as_str), Some(*with), "{program}, {way}, with");
    }
    let named: Vec<&str> = cases.iter().map(|(way, _, _)| *way).collect();
    for (way, answer) in &plain {
        assert!(
            named.contains(&way.as_str()) || hooked.get(way) == Some(answer),
            "{program}, {way}: {hooked:?}"
        );
    }
}

#[test]
fn every_lookup_returns_the_hook() {
    check(
        "lookup",
        &[
            // Without a loaded driver, its functions do not exist.
            ("at first", "none", "none"),
            ("next at first", "none", "none"),
            ("at first, error", "undefined symbol: cuMemAlloc_v2", "undefined symbol: cuMemAlloc_v2"),
            ("dlmopen", "libcuda.so.1", HOOK),
            ("absolute path", "libcuda.so.1", HOOK),
            ("opened again", "libcuda.so.1", HOOK),
            ("SONAME", "libcuda.so.1", HOOK),
            ("deep binding", "libcuda.so.1", HOOK),
            ("NVML", "libnvidia-ml.so.1", HOOK),
            ("libc's dlsym", "libc.so.6", HOOK),
            ("by libc's dlsym", "libcuda.so.1", HOOK),
            ("libc's dlsym by a name alone", "libc.so.6", HOOK),
            ("linked", "libcuda.so.1", HOOK),
            // libc searches the library's own scope, in which the driver follows.
            ("next of a library", "libcuda.so.1", HOOK),
            // The driver was opened with RTLD_LOCAL; the hook is global, and calls it.
            ("default", "none", HOOK),
            ("next of the program", "none", HOOK),
            // A weak reference, unresolved without the library. With it, the call works.
            ("called", "none", "12"),
        ],
    );
}

#[test]
fn linked_program_gets_the_hook() {
    check(
        "linked",
        &[
            ("at first", "libcuda.so.1", HOOK),
            ("next at first", "libcuda.so.1", HOOK),
            ("dlmopen", "libcuda.so.1", HOOK),
            ("absolute path", "libcuda.so.1", HOOK),
            ("opened again", "libcuda.so.1", HOOK),
            ("SONAME", "libcuda.so.1", HOOK),
            ("deep binding", "libcuda.so.1", HOOK),
            ("NVML", "libnvidia-ml.so.1", HOOK),
            ("libc's dlsym", "libc.so.6", HOOK),
            ("by libc's dlsym", "libcuda.so.1", HOOK),
            ("libc's dlsym by a name alone", "libc.so.6", HOOK),
            ("linked", "libcuda.so.1", HOOK),
            ("next of a library", "libcuda.so.1", HOOK),
            ("default", "libcuda.so.1", HOOK),
            ("next of the program", "libcuda.so.1", HOOK),
        ],
    );
}

/// `LD_PRELOAD` comes before `/etc/ld.so.preload`, so other interposers can precede this one.
#[test]
fn interposer_before_this_one_calls_the_hook() {
    let (wrapper, library) = (compiled().join("wrapper.so"), common::shipped().join(HOOK));
    let without = found("linked", &[&wrapper]);
    let with = found("linked", &[&wrapper, &library]);
    for found in [&without, &with] {
        assert_eq!(found["called"], "112");
        assert_eq!(found["default"], "wrapper.so");
    }
    assert_eq!((without["absolute path"].as_str(), with["absolute path"].as_str()), ("libcuda.so.1", HOOK));
}

/// It must find libc's function: a replacement would lead back to it in an endless loop.
#[test]
fn interposer_behind_this_one_still_finds_libc() {
    let found = found("lookup", &[&common::shipped().join(HOOK), &compiled().join("behind.so")]);
    assert_eq!((found["absolute path"].as_str(), found["libc's dlsym"].as_str()), (HOOK, "libc.so.6"));
}
