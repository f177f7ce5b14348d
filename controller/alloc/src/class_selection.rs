//! Which devices a DeviceClass selects, without an allocation.

use crate::cel::Selector;
use crate::stack::on_large_stack;
use k8s_openapi::api::resource::v1::{Device, DeviceClass};

/// For each device of the driver, whether the class selects it. A selector that fails on a device
/// does not select it.
///
/// # Errors
///
/// Fails if a selector does not compile; the error quotes the expression.
pub fn selected(class: &DeviceClass, driver: &str, devices: &[Device]) -> Result<Vec<bool>, String> {
    on_large_stack(|| select(class, driver, devices)).unwrap_or_else(Err)
}

fn select(class: &DeviceClass, driver: &str, devices: &[Device]) -> Result<Vec<bool>, String> {
    let wire = class.spec.iter().flat_map(|spec| spec.selectors.iter().flatten());
    let texts = wire.filter_map(|selector| selector.cel.as_ref()).map(|cel| cel.expression.as_str());
    let selectors = texts.map(Selector::compile).collect::<Result<Vec<_>, _>>()?;
    let matches = |device| selectors.iter().all(|selector| selector.matches(driver, device) == Ok(true));
    Ok(devices.iter().map(matches).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(selectors: &[&str], expected: Result<&[bool], &str>) {
        let device = |type_: &str| {
            let attributes = json!({"type": {"string": type_}});
            serde_json::from_value(json!({"name": type_, "attributes": attributes})).unwrap()
        };
        let devices: [Device; 3] = ["gpu", "mps", "mig"].map(device);
        let cel: Vec<_> = selectors.iter().map(|text| json!({"cel": {"expression": text}})).collect();
        let class = serde_json::from_value(json!({"metadata": {}, "spec": {"selectors": cel}})).unwrap();
        let found = selected(&class, "gpu.divvy.dev", &devices);
        match expected {
            Ok(expected) => assert_eq!(found.as_deref(), Ok(expected), "{selectors:?}"),
            Err(part) => assert!(found.as_ref().is_err_and(|why| why.contains(part)), "{found:?}"),
        }
    }

    #[test]
    fn class_selects_devices_that_match_all_selectors() {
        check(&[], Ok(&[true, true, true]));
        check(&["device.driver == 'gpu.divvy.dev'"], Ok(&[true, true, true]));
        check(&["device.driver == 'gpu.nvidia.com'"], Ok(&[false, false, false]));
        let type_ = "device.attributes['gpu.divvy.dev'].type";
        check(&[&format!("{type_} == 'mps'")], Ok(&[false, true, false]));
        check(&[&format!("{type_} != 'gpu'"), &format!("{type_} != 'mig'")], Ok(&[false, true, false]));
        check(&["device.attributes['gpu.divvy.dev'].absent == 1"], Ok(&[false, false, false]));
        check(&["device."], Err("device."));
    }
}
