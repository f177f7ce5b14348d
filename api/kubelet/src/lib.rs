//! The gRPC interfaces between the kubelet and a DRA driver: registration, prepare and unprepare,
//! device health, and the kubelet's list of pods with their claims.
//!
//! `proto/` holds the vendored interfaces, `generated/` their bindings. The bindings are committed,
//! so a build needs no code generator; a test regenerates and compares them. Packages keep their
//! wire names (such as `v1.DRAResourceHealth`); modules have readable names.
#![allow(clippy::all, clippy::unwrap_used, unreachable_pub, rust_2018_idioms)]

/// The registration of a plugin with the kubelet.
pub mod registration {
    include!("generated/pluginregistration_v1.rs");
}

/// Prepare and unprepare.
pub mod dra {
    pub mod v1 {
        include!("generated/dra_v1.rs");
    }
    /// Like `v1`, without shares.
    pub mod v1beta1 {
        include!("generated/dra_v1beta1.rs");
    }
}

/// Device health, streamed.
pub mod health {
    pub mod v1 {
        include!("generated/dra_health_v1.rs");
    }
    /// The same messages as `v1` in another package.
    pub mod v1alpha1 {
        include!("generated/dra_health_v1alpha1.rs");
    }
}

/// The pods of the node and the claims of their containers, served by the kubelet.
pub mod pod_resources {
    include!("generated/podresources_v1.rs");
}

/// The `type` of a DRA driver's `PluginInfo`.
pub const PLUGIN_TYPE: &str = "DRAPlugin";

/// Services for `PluginInfo::supported_versions`, newest first: the kubelet takes the first one
/// that it supports.
pub const SUPPORTED_VERSIONS: [&str; 4] =
    ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"];
