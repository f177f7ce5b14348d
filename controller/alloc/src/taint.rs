//! Taints and tolerations of devices.

use k8s_openapi::api::resource::v1::{DeviceTaint, DeviceToleration};

/// The first taint that prevents allocation and is not tolerated. Unknown effects prevent nothing.
pub(crate) fn untolerated<'a>(
    taints: Option<&'a Vec<DeviceTaint>>,
    tolerations: &[DeviceToleration],
) -> Option<&'a DeviceTaint> {
    let keeps_away = |taint: &&DeviceTaint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute");
    let tolerated = |taint: &DeviceTaint| tolerations.iter().any(|toleration| tolerates(toleration, taint));
    taints?.iter().filter(keeps_away).find(|taint| !tolerated(taint))
}

fn tolerates(toleration: &DeviceToleration, taint: &DeviceTaint) -> bool {
    let any_or =
        |wanted: &Option<String>, found: &str| wanted.as_deref().is_none_or(|w| w.is_empty() || w == found);
    let same_value =
        toleration.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default();
    any_or(&toleration.effect, &taint.effect)
        && any_or(&toleration.key, &taint.key)
        && match toleration.operator.as_deref().unwrap_or_default() {
            "Exists" => true,
            "" | "Equal" => same_value,
            _ => false,
        }
}
