//! How the daemon is linked.
//!
//! A position-independent program brings a list of the addresses in it that the
//! loader has to correct, and the loader reads all of it: half a megabyte that
//! stays in memory. Packed (RELR) it takes a few kilobytes. Loaders know it since
//! glibc 2.36, which is what the image has; linkers since binutils 2.38 and lld 15.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_ENV").as_deref() == Ok("gnu") {
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}
