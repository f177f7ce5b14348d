//! Linker options of the daemon.
//!
//! A position-independent program has a list of addresses that the loader must relocate. The loader
//! reads all of it, and half a megabyte stays in memory. In packed form (RELR) it takes a few kilobytes.
//! Loaders support that since glibc 2.36, which the image has; linkers since binutils 2.38 and lld 15.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_ENV").as_deref() == Ok("gnu") {
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}
