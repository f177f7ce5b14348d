//! Compares caches with those that glibc's `ldconfig` reads and writes.

#![allow(clippy::unwrap_used)] // A test may panic.

use divvy_hook::ldcache::Cache;
use proptest::prelude::*;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The entries that glibc reads from a cache, without the line that names the generator.
fn listed(cache: &Path) -> Vec<String> {
    let output = Command::new("/sbin/ldconfig").arg("-p").arg("-C").arg(cache).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().skip(1).filter(|line| !line.starts_with("Cache generated")).map(str::to_owned).collect()
}

/// Compares lists that are too long to print.
fn same(have: &[String], expect: &[String], what: &str) {
    for (have, expect) in have.iter().zip(expect) {
        assert_eq!(have, expect, "{what}");
    }
    assert_eq!(have.len(), expect.len(), "{what}");
}

/// A cache that glibc creates for this machine's libraries and a directory whose library has a
/// second build for a CPU level.
fn made_by_glibc(format: &str, dir: &Path) -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let library = maps
        .lines()
        .find_map(|line| Some(line.split_whitespace().nth(5)?).filter(|path| path.contains("libgcc_s")))
        .unwrap();
    let level = if cfg!(target_arch = "aarch64") { "atomics" } else { "x86-64-v2" };
    let levels = dir.join("lib/glibc-hwcaps").join(level);
    std::fs::create_dir_all(&levels).unwrap();
    for dir in [&levels, &dir.join("lib")] {
        std::fs::copy(library, dir.join("libgcc_s.so.1")).unwrap();
    }
    let (conf, path) = (dir.join("conf"), dir.join("cache"));
    std::fs::write(&conf, format!("{}\n", dir.join("lib").display())).unwrap();
    let command = Command::new("/sbin/ldconfig")
        .args(["-X", "-c", format, "-f"])
        .arg(conf)
        .arg("-C")
        .arg(&path)
        .status();
    assert!(command.unwrap().success());
    path
}

#[test]
fn glibc_reads_a_rewritten_cache_with_added_names() {
    for format in ["new", "compat"] {
        let dir = tempfile::tempdir().unwrap();
        let path = made_by_glibc(format, dir.path());
        // glibc misreads the CPU levels of its older format.
        let list = || -> Vec<String> {
            listed(&path).into_iter().filter(|line| format == "new" || !line.contains("hwcap:")).collect()
        };
        let bytes = std::fs::read(&path).unwrap();
        let before = list();
        assert!(format == "compat" || before.iter().any(|line| line.contains("hwcap:")), "no CPU level");
        let mut cache = Cache::parse(&bytes).unwrap();
        std::fs::write(&path, cache.to_bytes()).unwrap();
        same(&list(), &before, format);

        cache.add([(b"libdivvy.so.1".as_slice(), b"/l/libdivvy.so.1".as_slice())].into_iter());
        std::fs::write(&path, cache.to_bytes()).unwrap();
        let (ours, rest): (Vec<_>, Vec<_>) = list().into_iter().partition(|line| line.contains("libdivvy"));
        assert_eq!(ours.len(), 1);
        assert!(ours[0].contains("(libc6,") && ours[0].ends_with("=> /l/libdivvy.so.1"), "{ours:?}");
        same(&rest, &before, format);
    }
}

#[test]
fn binary_search_finds_every_name_of_glibc() {
    let dir = tempfile::tempdir().unwrap();
    let path = made_by_glibc("new", dir.path());
    let bytes = std::fs::read(&path).unwrap();
    let cache = Cache::parse(&bytes).unwrap();
    let lines = listed(&path);
    let plain = lines.iter().filter(|line| line.contains("(libc6,") && !line.contains("hwcap"));
    let names: Vec<&str> = plain.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(names.contains(&"libc.so.6"));
    for name in names {
        assert!(cache.find(name).is_some(), "{name}");
    }
}

#[test]
fn added_name_replaces_that_of_the_image() {
    let mut cache = Cache::default();
    cache.add([(b"libcuda.so.1".as_slice(), b"/stub/libcuda.so.1".as_slice())].into_iter());
    cache.add([(b"libcuda.so.1".as_slice(), b"/l/libcuda.so.1".as_slice())].into_iter());
    assert_eq!(cache.find("libcuda.so.1"), Some(b"/l/libcuda.so.1".as_slice()));
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(prop_oneof![Just(b'.'), b'0'..=b'9', b'a'..=b'c'], 1..12)
}

proptest! {
    #[test]
    fn added_names_are_found_after_a_round_trip(
        names in proptest::collection::btree_map(name(), name(), 0..40),
    ) {
        let mut cache = Cache::default();
        cache.add(names.iter().map(|(name, path)| (name.as_slice(), path.as_slice())));
        let bytes = cache.to_bytes();
        let read = Cache::parse(&bytes).unwrap();
        prop_assert_eq!(&read, &cache);
        for (name, path) in &names {
            let found = read.find(std::str::from_utf8(name).unwrap());
            // Names such as `1` and `01`, which compare as equal numbers, are equal in the loader's
            // order.
            prop_assert!(found.is_some(), "{:?}", name);
            let _ = path;
        }
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
        old: bool,
        at in 0usize..200,
        value: u32,
    ) {
        let _ = Cache::parse(&bytes);
        let mut cache = Cache::default();
        cache.add([(b"liba.so.1".as_slice(), b"/l/liba.so.1".as_slice())].into_iter());
        let mut file = cache.to_bytes();
        if old {
            let mut whole = b"ld.so-1.7.0\0\0\0\0\0".to_vec();
            whole.append(&mut file);
            file = whole;
        }
        prop_assert!(Cache::parse(&file).is_some());
        let at = at.min(file.len() - 4);
        file[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let _ = Cache::parse(&file).map(|cache| cache.to_bytes());
        let _ = Cache::parse(&file[..at]);
    }
}
