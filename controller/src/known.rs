//! What is known of the cluster's DeviceClasses: what each makes of a GPU, found
//! by asking its selectors of one device of each kind on offer, and of four of our
//! own making for a cluster whose nodes are still to come.

use crate::classes::Classes;
use crate::seen::Offer;
use divvy_api::check::Class;
use divvy_api::names::DRIVER;
use divvy_api::sharing::Mode;
use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, DeviceClass, DeviceClassSpec, DeviceSelector};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::sync::watch;

/// All of it, as of some moment.
#[derive(Clone, Debug, Default)]
pub struct Known {
    classes: BTreeMap<String, Class>,
    samples: Vec<(Mode, Device)>,
}

impl Known {
    /// Asks every class. Evaluates CEL of administrators: not for an async thread.
    pub fn of(offer: &Offer, classes: &Classes) -> Self {
        let seen = offer.samples.iter().filter_map(|device| Some((mode(device)?, device.clone())));
        let samples: Vec<(Mode, Device)> = seen.chain(own()).collect();
        let mut known = Self { classes: BTreeMap::new(), samples };
        for (name, class) in classes {
            if let Some(read) = known.read(class) {
                known.classes.insert(name.clone(), read);
            }
        }
        known
    }

    /// The class of that name, or nothing where nobody can tell.
    pub fn class(&self, name: &str) -> Option<Class> {
        self.classes.get(name).cloned()
    }

    /// What a class makes of a GPU. One that is about our driver but selects
    /// nothing that is on offer now is unknown, not empty.
    fn read(&self, class: &DeviceClass) -> Option<Class> {
        let selectors = class.spec.iter().flat_map(|spec| spec.selectors.iter().flatten());
        let about_us =
            selectors.filter_map(|selector| selector.cel.as_ref()).any(|cel| cel.expression.contains(DRIVER));
        match self.selected(class, &Mode::ALL.into()) {
            Ok(modes) if modes.is_empty() && about_us => {
                Class::well_known(class.metadata.name.as_deref()?).map(|_| Class::of(class, None))
            }
            Ok(modes) => Some(Class::of(class, Some(modes))),
            Err(why) => {
                tracing::warn!(class = class.metadata.name, why, "DeviceClass cannot be read");
                None
            }
        }
    }

    /// What selectors leave of modes; all of them where nobody can tell.
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

/// By the attribute `type` of a device.
fn mode(device: &Device) -> Option<Mode> {
    match device.attributes.as_ref()?.get("type")?.string.as_deref()? {
        "gpu" => Some(Mode::Whole),
        "mig" => Some(Mode::Mig),
        "timeslice" => Some(Mode::Timeslice),
        "mps" => Some(Mode::Mps),
        _ => None,
    }
}

fn own() -> [(Mode, Device); 4] {
    let device = |mode, type_: &str| {
        let text = DeviceAttribute { string: Some(type_.to_owned()), ..DeviceAttribute::default() };
        let attributes = Some([("type".to_owned(), text)].into());
        (mode, Device { name: type_.to_owned(), attributes, ..Device::default() })
    };
    [
        device(Mode::Whole, "gpu"),
        device(Mode::Mig, "mig"),
        device(Mode::Timeslice, "timeslice"),
        device(Mode::Mps, "mps"),
    ]
}

/// Keeps it up to date until a channel closes.
pub async fn keep(
    mut offer: watch::Receiver<Option<Arc<Offer>>>,
    mut classes: watch::Receiver<Option<Arc<Classes>>>,
    known: watch::Sender<Arc<Known>>,
) {
    loop {
        let now = (offer.borrow_and_update().clone(), classes.borrow_and_update().clone());
        // Without slices the classes are read by their names and our own samples.
        if let (offer, Some(classes)) = now {
            let offer = offer.unwrap_or_default();
            match tokio::task::spawn_blocking(move || Known::of(&offer, &classes)).await {
                Ok(now) => drop(known.send_replace(Arc::new(now))),
                Err(cause) => tracing::error!(%cause, "DeviceClasses cannot be read"),
            }
        }
        let changed = tokio::select! {
            changed = offer.changed() => changed,
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

    fn known(classes: &[(&str, &[&str])]) -> Known {
        let class = |(name, selectors): &(&str, &[&str])| {
            let selectors: Vec<_> =
                selectors.iter().map(|text| json!({"cel": {"expression": text}})).collect();
            let class = json!({"metadata": {"name": name}, "spec": {"selectors": selectors}});
            ((*name).to_owned(), Arc::new(serde_json::from_value(class).unwrap()))
        };
        let sample = json!({"name": "gpu-0", "attributes": {"type": {"string": "gpu"}, "productName": {"string": "NVIDIA L4"}}});
        let offer =
            Offer { profiles: BTreeSet::new(), samples: vec![serde_json::from_value(sample).unwrap()] };
        Known::of(&offer, &classes.iter().map(class).collect())
    }

    const TYPE: &str = "device.attributes['gpu.divvy.dev'].type";

    #[test]
    fn a_class_is_what_its_selectors_select() {
        let mps = format!("{TYPE} == 'mps'");
        let cut = format!("{TYPE} in ['timeslice', 'mps']");
        let known = known(&[
            ("mps.divvy.dev", &[&mps]),
            ("mine", &[&mps]),
            ("cut", &[&cut]),
            ("l4", &["device.attributes['gpu.divvy.dev'].productName == 'NVIDIA L4'"]),
            ("b200", &["device.attributes['gpu.divvy.dev'].productName == 'NVIDIA B200'"]),
            ("gpu.nvidia.com", &["device.driver == 'gpu.nvidia.com'"]),
            ("broken", &["device."]),
        ]);
        let modes = |name: &str| known.class(name).map(|class| class.modes.into_iter().collect::<Vec<_>>());
        assert_eq!(modes("mps.divvy.dev"), Some(vec![Mode::Mps]));
        assert_eq!(modes("mine"), Some(vec![Mode::Mps]));
        assert_eq!(modes("cut"), Some(vec![Mode::Timeslice, Mode::Mps]));
        assert_eq!(modes("l4"), Some(vec![Mode::Whole]));
        assert_eq!(modes("b200"), None, "no such GPU on offer");
        assert_eq!(modes("gpu.nvidia.com"), Some(vec![]));
        assert_eq!((modes("broken"), modes("absent")), (None, None));
    }

    #[test]
    fn selectors_of_a_request_narrow_what_its_class_leaves_open() {
        let known = known(&[]);
        let check = |selector: &str, expected: &[Mode]| {
            let selector = serde_json::from_value(json!({"cel": {"expression": selector}})).unwrap();
            let left = known.narrow([Mode::Timeslice, Mode::Mps].into(), &[selector]);
            assert_eq!(left.into_iter().collect::<Vec<_>>(), expected);
        };
        check(&format!("{TYPE} == 'mps'"), &[Mode::Mps]);
        check(&format!("{TYPE} == 'gpu'"), &[Mode::Timeslice, Mode::Mps]);
        check("device.", &[Mode::Timeslice, Mode::Mps]);
    }
}
