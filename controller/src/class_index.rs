//! An index of DeviceClasses: the sharing modes of the devices that each class selects. It
//! evaluates the selectors on one published device per kind, and on four built-in samples
//! for clusters without nodes.

use crate::classes::Classes;
use crate::device_index::DeviceSummary;
use divvy_api::Quantity;
use divvy_api::check::{Class, GpuMemory, KnownGpus};
use divvy_api::names::DRIVER;
use divvy_api::sharing::Mode;
use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, DeviceClass, DeviceClassSpec, DeviceSelector};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::sync::watch;

/// The modes of every class, as of one moment.
#[derive(Clone, Debug, Default)]
pub struct ClassIndex {
    classes: BTreeMap<String, Class>,
    samples: Vec<(Mode, Device)>,
}

impl ClassIndex {
    /// Evaluates every class. CEL expressions of administrators can block, so call it on a
    /// blocking thread.
    pub fn of(devices: &DeviceSummary, classes: &Classes) -> Self {
        let published = devices.samples.iter().filter_map(|device| Some((mode(device)?, device.clone())));
        let samples: Vec<(Mode, Device)> = published.chain(built_in_samples()).collect();
        let mut index = Self { classes: BTreeMap::new(), samples };
        for (name, class) in classes {
            if let Some(evaluated) = index.evaluate(class) {
                index.classes.insert(name.clone(), evaluated);
            }
        }
        index
    }

    /// The class of that name, or `None` if it is absent or its selectors cannot be evaluated.
    pub fn class(&self, name: &str) -> Option<Class> {
        self.classes.get(name).cloned()
    }

    /// The MIG profiles that nodes publish.
    pub fn profiles(&self) -> BTreeSet<String> {
        let texts = self.samples.iter().filter_map(|(_, device)| text(device, "profile"));
        texts.map(str::to_owned).collect()
    }

    /// The whole GPUs that nodes publish, one for each product and size.
    pub fn gpus(&self) -> KnownGpus {
        let whole = self.samples.iter().filter(|(mode, _)| *mode == Mode::Whole);
        let memory = |device: &Device| {
            let memory = &device.capacity.as_ref()?.get("memory")?.value;
            Quantity::try_from(memory).ok()?.as_bytes()
        };
        let models = whole.filter_map(|(_, device)| {
            Some(GpuMemory { model: text(device, "productName")?.to_owned(), bytes: memory(device)? })
        });
        KnownGpus { models: models.collect(), complete: true }
    }

    /// Evaluates one class. A class that names our driver but selects no published device has
    /// unknown modes, not an empty set.
    fn evaluate(&self, class: &DeviceClass) -> Option<Class> {
        let selectors = class.spec.iter().flat_map(|spec| spec.selectors.iter().flatten());
        let names_our_driver =
            selectors.filter_map(|selector| selector.cel.as_ref()).any(|cel| cel.expression.contains(DRIVER));
        match self.selected(class, &Mode::ALL.into()) {
            Ok(modes) if modes.is_empty() && names_our_driver => {
                Class::well_known(class.metadata.name.as_deref()?).map(|_| Class::of(class, None))
            }
            Ok(modes) => Some(Class::of(class, Some(modes))),
            Err(why) => {
                tracing::warn!(
                    class = class.metadata.name,
                    why,
                    "cannot evaluate the selectors of a DeviceClass"
                );
                None
            }
        }
    }

    /// The subset of `modes` that the selectors accept, or all of them if that cannot be
    /// determined.
    pub fn narrow(&self, modes: BTreeSet<Mode>, selectors: &[DeviceSelector]) -> BTreeSet<Mode> {
        if modes.len() < 2 || selectors.is_empty() {
            return modes;
        }
        let spec = DeviceClassSpec { selectors: Some(selectors.to_vec()), ..DeviceClassSpec::default() };
        match self.selected(&DeviceClass { spec: Some(spec), ..DeviceClass::default() }, &modes) {
            Ok(left) if !left.is_empty() => left,
            _ => modes,
        }
    }

    fn selected(&self, class: &DeviceClass, among: &BTreeSet<Mode>) -> Result<BTreeSet<Mode>, String> {
        let (modes, devices): (Vec<Mode>, Vec<Device>) =
            self.samples.iter().filter(|(mode, _)| among.contains(mode)).cloned().unzip();
        let selected = divvy_alloc::selected(class, DRIVER, &devices)?;
        Ok(modes.into_iter().zip(selected).filter(|(_, selected)| *selected).map(|(mode, _)| mode).collect())
    }
}

/// A text attribute of the device.
fn text<'a>(device: &'a Device, name: &str) -> Option<&'a str> {
    device.attributes.as_ref()?.get(name)?.string.as_deref()
}

/// The mode by the device's `type` attribute.
fn mode(device: &Device) -> Option<Mode> {
    match text(device, "type")? {
        "gpu" => Some(Mode::Whole),
        "share" => Some(Mode::Share),
        "mig" => Some(Mode::Mig),
        "timeslice" => Some(Mode::Timeslice),
        "mps" => Some(Mode::Mps),
        _ => None,
    }
}

/// Built-in samples, one device per mode.
fn built_in_samples() -> [(Mode, Device); 5] {
    let device = |mode, type_: &str| {
        let text = DeviceAttribute { string: Some(type_.to_owned()), ..DeviceAttribute::default() };
        let attributes = Some([("type".to_owned(), text)].into());
        (mode, Device { name: type_.to_owned(), attributes, ..Device::default() })
    };
    [
        device(Mode::Whole, "gpu"),
        device(Mode::Share, "share"),
        device(Mode::Mig, "mig"),
        device(Mode::Timeslice, "timeslice"),
        device(Mode::Mps, "mps"),
    ]
}

/// Updates the index until a channel closes.
pub async fn run(
    mut devices: watch::Receiver<Option<Arc<DeviceSummary>>>,
    mut classes: watch::Receiver<Option<Arc<Classes>>>,
    index: watch::Sender<Arc<ClassIndex>>,
) {
    loop {
        let inputs = (devices.borrow_and_update().clone(), classes.borrow_and_update().clone());
        // Without slices, classes are evaluated by name and with the built-in samples.
        if let (devices, Some(classes)) = inputs {
            let devices = devices.unwrap_or_default();
            match tokio::task::spawn_blocking(move || ClassIndex::of(&devices, &classes)).await {
                Ok(built) => drop(index.send_replace(Arc::new(built))),
                Err(cause) => tracing::error!(%cause, "the evaluation of DeviceClasses failed"),
            }
        }
        let changed = tokio::select! {
            changed = devices.changed() => changed,
            changed = classes.changed() => changed,
        };
        if changed.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn index(classes: &[(&str, &[&str])]) -> ClassIndex {
        let class = |(name, selectors): &(&str, &[&str])| {
            let selectors: Vec<_> =
                selectors.iter().map(|text| json!({"cel": {"expression": text}})).collect();
            let class = json!({"metadata": {"name": name}, "spec": {"selectors": selectors}});
            ((*name).to_owned(), Arc::new(serde_json::from_value(class).unwrap()))
        };
        let sample = json!({"name": "gpu-0", "attributes": {"type": {"string": "gpu"},
            "productName": {"string": "NVIDIA L4"}}});
        let devices = DeviceSummary {
            profiles: BTreeSet::new(),
            samples: vec![serde_json::from_value(sample).unwrap()],
        };
        ClassIndex::of(&devices, &classes.iter().map(class).collect())
    }

    const TYPE: &str = "device.attributes['gpu.divvy.dev'].type";

    #[test]
    fn class_has_the_modes_of_the_devices_it_selects() {
        let mps = format!("{TYPE} == 'mps'");
        let shared = format!("{TYPE} in ['timeslice', 'mps']");
        let index = index(&[
            ("mps.divvy.dev", &[&mps]),
            ("mine", &[&mps]),
            ("shared", &[&shared]),
            ("l4", &["device.attributes['gpu.divvy.dev'].productName == 'NVIDIA L4'"]),
            ("b200", &["device.attributes['gpu.divvy.dev'].productName == 'NVIDIA B200'"]),
            ("gpu.nvidia.com", &["device.driver == 'gpu.nvidia.com'"]),
            ("broken", &["device."]),
        ]);
        let modes = |name: &str| index.class(name).map(|class| class.modes.into_iter().collect::<Vec<_>>());
        assert_eq!(modes("mps.divvy.dev"), Some(vec![Mode::Mps]));
        assert_eq!(modes("mine"), Some(vec![Mode::Mps]));
        assert_eq!(modes("shared"), Some(vec![Mode::Timeslice, Mode::Mps]));
        assert_eq!(modes("l4"), Some(vec![Mode::Whole]));
        assert_eq!(modes("b200"), None, "no published device matches");
        assert_eq!(modes("gpu.nvidia.com"), Some(vec![]));
        assert_eq!((modes("broken"), modes("absent")), (None, None));
    }

    #[test]
    fn request_selectors_narrow_the_modes_of_a_class() {
        let index = index(&[]);
        let check = |selector: &str, expected: &[Mode]| {
            let selector = serde_json::from_value(json!({"cel": {"expression": selector}})).unwrap();
            let left = index.narrow([Mode::Timeslice, Mode::Mps].into(), &[selector]);
            assert_eq!(left.into_iter().collect::<Vec<_>>(), expected);
        };
        check(&format!("{TYPE} == 'mps'"), &[Mode::Mps]);
        check(&format!("{TYPE} == 'gpu'"), &[Mode::Timeslice, Mode::Mps]);
        check("device.", &[Mode::Timeslice, Mode::Mps]);
    }
}
