//! The input of an allocation.

use crate::release::Release;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};

/// The cluster as the scheduler sees it when it considers one node.
#[derive(Clone, Copy, Debug)]
pub struct ClusterView<'a> {
    /// All slices of the cluster.
    pub slices: &'a [ResourceSlice],
    pub classes: &'a [DeviceClass],
    /// All claims. Those with an allocation hold devices.
    pub claims: &'a [ResourceClaim],
    pub node: &'a Node,
    /// The scheduler's release.
    pub release: Release,
}
