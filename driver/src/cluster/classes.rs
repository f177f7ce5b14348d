//! Share settings from the current DeviceClasses.
//!
//! An allocation contains a copy of its class's configuration. A later change of the class, or its
//! schedule, should also reach existing shares. So the daemon watches the classes, and replaces the
//! class's ShareConfig in each claim that it reads ([`resolve`]). Other configuration stays as
//! allocated, since it cannot change in a running container. Without a readable class, the
//! allocated copy applies; nothing waits for the API server.

use divvy_api::AllocatedClaim;
use divvy_api::config::{AppliedConfig, DeviceConfig, ShareConfig, Source};
use divvy_api::names::DRIVER;
use divvy_api::schema::Clock;
use divvy_api::sharing::ShareSettings;
use futures::StreamExt;
use k8s_openapi::api::resource::v1::DeviceClass;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::watch;

/// The ShareConfigs of all readable classes, by class name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClassIndex(BTreeMap<String, Vec<ShareConfig>>);

/// The current index; a clone follows the same index.
pub type Classes = watch::Receiver<Arc<ClassIndex>>;

/// Schedules have times in whole minutes.
const MINUTE: Duration = Duration::from_secs(60);

impl ClassIndex {
    fn set(&mut self, class: &DeviceClass) {
        let Some(name) = class.metadata.name.clone() else { return };
        let configs = class.spec.as_ref().and_then(|spec| spec.config.as_deref()).unwrap_or_default();
        let ours = configs.iter().filter_map(|config| config.opaque.as_ref().filter(|o| o.driver == DRIVER));
        let read = |opaque: &k8s_openapi::api::resource::v1::OpaqueDeviceConfiguration| {
            match DeviceConfig::from_value(&opaque.parameters.0) {
                Ok(DeviceConfig::ShareConfig(config)) => Ok(Some(config)),
                Ok(_) => Ok(None),
                Err(cause) => Err(cause),
            }
        };
        match ours.filter_map(|opaque| read(opaque).transpose()).collect() {
            Ok(configs) => drop(self.0.insert(name, configs)),
            Err(cause) => {
                tracing::warn!(
                    class = name, %cause,
                    "cannot read the ShareConfig of a DeviceClass; its shares keep their allocated settings"
                );
                self.0.remove(&name);
            }
        }
    }

    /// Whether no class has a ShareConfig.
    pub(crate) fn has_no_configs(&self) -> bool {
        self.0.values().all(Vec::is_empty)
    }

    pub(crate) fn has_schedules(&self) -> bool {
        self.0.values().flatten().any(|config| !config.schedule.is_empty())
    }
}

/// Replaces the class's share settings in a claim by the current ones, for this time of the day.
pub fn resolve(claim: &mut AllocatedClaim, index: &ClassIndex, now: Clock) {
    for device in &mut claim.devices {
        let was_valid = device.share_settings().is_ok();
        let class = device.class.as_ref().and_then(|class| index.0.get(class));
        if let Some(configs) = class {
            let applied = |config: &ShareConfig| AppliedConfig {
                config: DeviceConfig::ShareConfig(config.clone()),
                source: Source::Class,
            };
            let of_class = |old: &AppliedConfig| {
                old.source == Source::Class && matches!(old.config, DeviceConfig::ShareConfig(_))
            };
            device.configs.retain(|old| !of_class(old));
            // Configuration of the class precedes that of the claim.
            device.configs.splice(0..0, configs.iter().map(applied));
        }
        let mut allowed = ShareSettings::default().ceiling;
        for AppliedConfig { config, source } in &mut device.configs {
            match (config, source) {
                (DeviceConfig::ShareConfig(config), Source::Class) => {
                    *config = config.at(now);
                    allowed = config.ceiling.unwrap_or(ShareSettings::default().ceiling);
                }
                // The claim was within its class's ceiling when it was allocated, and stays within it.
                (DeviceConfig::ShareConfig(config), _) if was_valid => {
                    config.ceiling = config.ceiling.map(|asked| asked.min(allowed));
                }
                _ => {}
            }
        }
    }
}

/// The time of the day, in UTC.
pub fn now() -> Clock {
    Clock::at(since_epoch().as_secs())
}

pub(crate) fn since_epoch() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Time until the next whole minute, `since` being the time after the epoch. Schedules apply from the
/// start of a minute.
pub(crate) fn until_next_minute(since: Duration) -> Duration {
    MINUTE - Duration::from_nanos((since.as_nanos() % MINUTE.as_nanos()) as u64)
}

/// Follows the classes for the life of the daemon.
pub async fn follow(client: Client, now: watch::Sender<Arc<ClassIndex>>) {
    let mut events = std::pin::pin!(
        watcher(Api::<DeviceClass>::all(client), watcher::Config::default()).default_backoff()
    );
    let (mut index, mut listed) = (ClassIndex::default(), BTreeSet::new());
    let mut listing = true;
    let mut is_reported = false;
    while let Some(event) = events.next().await {
        is_reported &= matches!(event, Ok(Event::Init) | Err(_));
        match event {
            Ok(Event::Init) => {
                listing = true;
                listed.clear();
            }
            Ok(Event::InitApply(class)) => {
                listed.extend(class.metadata.name.clone());
                index.set(&class);
            }
            Ok(Event::InitDone) => {
                listing = false;
                index.0.retain(|name, _| listed.contains(name));
            }
            Ok(Event::Apply(class)) => index.set(&class),
            Ok(Event::Delete(class)) => drop(class.metadata.name.and_then(|name| index.0.remove(&name))),
            // Logged once for each outage, since the watch is retried.
            Err(cause) if !is_reported => {
                is_reported = true;
                tracing::warn!(
                    %cause,
                    "cannot watch DeviceClasses; shares keep the last known settings. Check that this \
                     ServiceAccount may list and watch deviceclasses"
                );
            }
            Err(cause) => tracing::debug!(%cause, "still cannot watch DeviceClasses"),
        }
        if !listing {
            now.send_if_modified(|before| {
                let changed = **before != index;
                if changed {
                    *before = Arc::new(index.clone());
                }
                changed
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::resource::v1::ResourceClaim;
    use serde_json::{Value, json};

    fn config(fields: &Value) -> Value {
        let mut config = json!({"apiVersion": "resource.divvy.dev/v1alpha1", "kind": "ShareConfig"});
        config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        config
    }

    fn class(name: &str, fields: &Value) -> DeviceClass {
        let opaque = json!({"driver": DRIVER, "parameters": config(fields)});
        let class = json!({"metadata": {"name": name}, "spec": {"config": [{"opaque": opaque}]}});
        serde_json::from_value(class).unwrap()
    }

    /// A claim with `own` configuration, allocated while its class had the configuration `class`.
    fn claim(class: &Value, own: &Value) -> AllocatedClaim {
        let config = |source: &str, fields: &Value| {
            let opaque = json!({"driver": DRIVER, "parameters": config(fields)});
            json!({"source": source, "requests": ["r"], "opaque": opaque})
        };
        let result = json!({"request": "r", "driver": DRIVER, "pool": "n", "device": "gpu-0", "shareID": "s",
            "consumedCapacity": {"memory": "1Gi"}});
        let claim: ResourceClaim = serde_json::from_value(json!({
            "metadata": {"namespace": "ns", "name": "c", "uid": "u"},
            "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "batch"}}]}},
            "status": {"allocation": {"devices": {
                "results": [result], "config": [config("FromClass", class), config("FromClaim", own)],
            }}},
        }))
        .unwrap();
        AllocatedClaim::try_from(&claim).unwrap()
    }

    /// The resulting ceiling and weight.
    fn settings(mut claim: AllocatedClaim, classes: &[DeviceClass], now: &str) -> Result<(u32, u32), String> {
        let mut index = ClassIndex::default();
        classes.iter().for_each(|class| index.set(class));
        resolve(&mut claim, &index, Clock::parse(now).unwrap());
        let settings = claim.devices[0].share_settings().map_err(|misfit| misfit.to_string())?;
        Ok((settings.ceiling, settings.weight))
    }

    #[test]
    fn share_settings_come_from_the_current_class() {
        let then = json!({"ceiling": 60, "weight": 7});
        let check = |own: Value, classes: &[DeviceClass], expected: (u32, u32)| {
            assert_eq!(settings(claim(&then, &own), classes, "12:00"), Ok(expected), "{own}");
        };
        check(json!({}), &[], (60, 7));
        check(json!({}), &[class("other", &json!({"weight": 1}))], (60, 7));
        check(json!({}), &[class("batch", &json!({"weight": 1}))], (100, 1));
        check(json!({"ceiling": 50}), &[class("batch", &json!({"ceiling": 80}))], (50, 100));
        check(json!({"ceiling": 50}), &[class("batch", &json!({"ceiling": 20}))], (20, 100));
        // An invalid configuration leaves the allocated one in force.
        check(json!({}), &[class("batch", &json!({"weight": "much"}))], (60, 7));
        let taken_away = [class("batch", &json!({"weight": 1})), class("batch", &json!({"weight": 0}))];
        check(json!({}), &taken_away, (60, 7));
    }

    #[test]
    fn claim_above_the_ceiling_of_its_class_stays_refused() {
        let asked = claim(&json!({"ceiling": 60}), &json!({"ceiling": 70}));
        assert!(settings(asked, &[class("batch", &json!({"ceiling": 60}))], "12:00").is_err());
    }

    #[test]
    fn schedule_is_checked_at_the_start_of_a_minute() {
        let check = |at_ms: u64, expected_ms: u64| {
            assert_eq!(
                until_next_minute(Duration::from_millis(at_ms)).as_millis(),
                expected_ms.into(),
                "{at_ms}"
            );
        };
        check(0, 60_000);
        check(1, 59_999);
        check(59_999, 1);
        check(60_000, 60_000);
        check(1_790_000_000_000, 40_000);
    }

    #[test]
    fn schedule_of_a_class_applies_by_time_of_day() {
        let night = json!({"ceiling": 30, "schedule": [{"from": "20:00", "to": "06:00", "ceiling": 100}]});
        for classes in [vec![], vec![class("batch", &night)]] {
            assert_eq!(settings(claim(&night, &json!({})), &classes, "12:00"), Ok((30, 100)));
            assert_eq!(settings(claim(&night, &json!({})), &classes, "23:00"), Ok((100, 100)));
        }
    }
}
