//! The gRPC interfaces between the kubelet and a DRA driver: registration,
//! prepare and unprepare, and device health.
//!
//! `proto/` holds the wire interface, `generated/` the bindings made of it.
//! They are committed, so that a build needs no code generator; a test makes
//! them again and compares. Packages keep the names that the wire demands
//! (`v1.DRAResourceHealth` among them), modules have readable ones.
#![allow(clippy::all, clippy::unwrap_used, unreachable_pub, rust_2018_idioms)]

/// What a plugin says in its registration socket.
pub mod registration {
    include!("generated/pluginregistration_v1.rs");
}

/// Prepare and unprepare.
pub mod dra {
    pub mod v1 {
        include!("generated/dra_v1.rs");
    }
    /// As `v1`, without shares.
    pub mod v1beta1 {
        include!("generated/dra_v1beta1.rs");
    }
}

/// Device health, streamed.
pub mod health {
    pub mod v1 {
        include!("generated/dra_health_v1.rs");
    }
    /// Message for message as `v1`, under another package name.
    pub mod v1alpha1 {
        include!("generated/dra_health_v1alpha1.rs");
    }
}

/// The `type` of a DRA driver's `PluginInfo`.
pub const PLUGIN_TYPE: &str = "DRAPlugin";

/// Services as they are advertised in `PluginInfo::supported_versions`. The
/// kubelet takes the first of the plugin's list that it knows, so newest first.
pub const SUPPORTED_VERSIONS: [&str; 4] =
    ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"];
