//! Detects that the GPU operator is about to replace the GPU driver of this node.
//!
//! Its driver manager sets labels `nvidia.com/gpu.deploy.*` of the Node to
//! `paused-for-driver-upgrade`, unloads the kernel modules, and sets the labels back before the new
//! driver is loaded. Its upgrade controller also sets `nvidia.com/gpu-driver-upgrade-state`. Sources:
//! NVIDIA/k8s-driver-manager `cmd/driver-manager`, the operator's page "GPU Driver Upgrades".

use std::collections::BTreeMap;

const DEPLOY_PREFIX: &str = "nvidia.com/gpu.deploy.";
const PAUSED: &str = "paused-for-driver-upgrade";
const UPGRADE_STATE: &str = "nvidia.com/gpu-driver-upgrade-state";
/// The pods with GPUs are gone, and the driver's pod is replaced.
const RESTART_REQUIRED: &str = "pod-restart-required";

/// The label, as `key=value`, by which an upgrade asks clients of the GPU driver to let go of it.
pub fn announced(labels: &BTreeMap<String, String>) -> Option<String> {
    let asks = |key: &str, value: &str| {
        (key.starts_with(DEPLOY_PREFIX) && value == PAUSED)
            || (key == UPGRADE_STATE && value == RESTART_REQUIRED)
    };
    labels.iter().find(|(key, value)| asks(key, value)).map(|(key, value)| format!("{key}={value}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(labels: &[(&str, &str)], expected: Option<&str>) {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        assert_eq!(announced(&labels).as_deref(), expected, "{labels:?}");
    }

    #[test]
    fn labels_of_the_gpu_operator_announce_an_upgrade() {
        check(&[], None);
        check(&[("nvidia.com/gpu.deploy.driver", "true"), (UPGRADE_STATE, "upgrade-done")], None);
        for state in ["upgrade-required", "cordon-required", "drain-required", "validation-required"] {
            check(&[(UPGRADE_STATE, state)], None);
        }
        check(&[("nvidia.com/gpu.deploy.device-plugin", "paused-for-mig-change")], None);
        for operand in ["client", "device-plugin", "dcgm"] {
            let key = format!("nvidia.com/gpu.deploy.{operand}");
            check(&[(&key, PAUSED)], Some(&format!("{key}={PAUSED}")));
        }
        check(
            &[(UPGRADE_STATE, RESTART_REQUIRED)],
            Some("nvidia.com/gpu-driver-upgrade-state=pod-restart-required"),
        );
    }
}
