//! Checks that the committed bindings match the vendored interfaces.
//!
//! `DIVVY_REGENERATE=1 cargo test -p divvy-kubelet` rewrites them.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

/// The vendored interface and the file of its bindings.
const INTERFACES: [(&str, &str); 6] = [
    ("pluginregistration/v1", "pluginregistration_v1.rs"),
    ("dra/v1", "dra_v1.rs"),
    ("dra/v1beta1", "dra_v1beta1.rs"),
    ("dra-health/v1", "dra_health_v1.rs"),
    ("dra-health/v1alpha1", "dra_health_v1alpha1.rs"),
    ("podresources/v1", "podresources_v1.rs"),
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// One descriptor set and one folder per interface, because several interfaces of the kubelet have
/// the package name `v1`.
fn generate(interface: &str, scratch: &Path) -> String {
    let include = root().join("proto").join(interface);
    let files = protox::compile([include.join("api.proto")], [&include]).unwrap();
    tonic_prost_build::configure().out_dir(scratch).compile_fds(files).unwrap();
    let mut made = std::fs::read_dir(scratch).unwrap().map(|entry| entry.unwrap().path());
    std::fs::read_to_string(made.next().unwrap()).unwrap()
}

#[test]
fn committed_bindings_match_the_interfaces() {
    let write = std::env::var_os("DIVVY_REGENERATE").is_some();
    for (interface, bindings) in INTERFACES {
        let scratch = tempfile::tempdir().unwrap();
        let fresh = generate(interface, scratch.path());
        let path = root().join("src/generated").join(bindings);
        if write {
            std::fs::write(&path, &fresh).unwrap();
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(committed == fresh, "{bindings} differs; run with DIVVY_REGENERATE=1 and commit");
    }
}

/// The kubelet calls these services, whatever the files are called.
#[test]
fn service_names_are_those_of_the_kubelet() {
    use divvy_kubelet::{dra, health, pod_resources, registration};
    for (name, expected) in [
        (registration::registration_server::SERVICE_NAME, "pluginregistration.Registration"),
        (dra::v1::dra_plugin_server::SERVICE_NAME, "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"),
        (dra::v1beta1::dra_plugin_server::SERVICE_NAME, "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin"),
        (health::v1::dra_resource_health_server::SERVICE_NAME, "v1.DRAResourceHealth"),
        (health::v1alpha1::dra_resource_health_server::SERVICE_NAME, "v1alpha1.DRAResourceHealth"),
        (pod_resources::pod_resources_lister_server::SERVICE_NAME, "v1.PodResourcesLister"),
    ] {
        assert_eq!(name, expected);
    }
}
