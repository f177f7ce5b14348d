//! What DeviceClasses say of shares now.
//!
//! An allocation carries the configuration that its class had at that moment. Who changes a class means
//! the shares that are there too, and a schedule changes with the hour. So the daemon follows the classes, and
//! of each claim that it reads the class's ShareConfig is put in the place of the one that was allocated
//! ([`resolve`]). All other configuration stays as it was allocated: it cannot change under a running container.
//!
//! A class that is gone, that cannot be read, or that says what is no ShareConfig leaves what was allocated.
//! So does an API server that does not answer: nobody waits for classes.

use crate::claims::Claims;
use crate::engine::{Engine, HeldShare};
use crate::service::chain;
use crate::turns::Turns;
use divvy_api::config::{AppliedConfig, DeviceConfig, ShareConfig, Source};
use divvy_api::names::DRIVER;
use divvy_api::schema::Clock;
use divvy_api::sharing::ShareSettings;
use divvy_api::{AllocatedClaim, ClaimRef, ClaimUid, ShareId};
use futures::StreamExt;
use k8s_openapi::api::resource::v1::DeviceClass;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::watch;

/// The ShareConfigs of each class that could be read, by its name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known(BTreeMap<String, Vec<ShareConfig>>);

/// What is known at the moment; a clone is the same.
pub type Classes = watch::Receiver<Arc<Known>>;

/// The times of a schedule are whole minutes.
const MINUTE: Duration = Duration::from_secs(60);
/// After the API server did not answer.
const AGAIN: Duration = Duration::from_secs(10);

impl Known {
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
                tracing::warn!(class = name, %cause, "shares stay as the class had them when they were allocated");
                self.0.remove(&name);
            }
        }
    }

    fn has_schedules(&self) -> bool {
        self.0.values().flatten().any(|config| !config.schedule.is_empty())
    }
}

/// Puts what classes say of shares at that time of the day into a claim.
pub fn resolve(claim: &mut AllocatedClaim, known: &Known, now: Clock) {
    for device in &mut claim.devices {
        let fitted = device.share_settings().is_ok();
        let class = device.class.as_ref().and_then(|class| known.0.get(class));
        if let Some(configs) = class {
            let applied = |config: &ShareConfig| AppliedConfig {
                config: DeviceConfig::ShareConfig(config.clone()),
                source: Source::Class,
            };
            let of_class = |old: &AppliedConfig| {
                old.source == Source::Class && matches!(old.config, DeviceConfig::ShareConfig(_))
            };
            device.configs.retain(|old| !of_class(old));
            // Classes come before claims.
            device.configs.splice(0..0, configs.iter().map(applied));
        }
        let mut allowed = ShareSettings::default().ceiling;
        for AppliedConfig { config, source } in &mut device.configs {
            match (config, source) {
                (DeviceConfig::ShareConfig(config), Source::Class) => {
                    *config = config.at(now);
                    allowed = config.ceiling.unwrap_or(ShareSettings::default().ceiling);
                }
                // It asked for no more than was allowed then, and gets no more than is allowed now.
                (DeviceConfig::ShareConfig(config), _) if fitted => {
                    config.ceiling = config.ceiling.map(|asked| asked.min(allowed));
                }
                _ => {}
            }
        }
    }
}

/// The time of the day.
pub fn now() -> Clock {
    Clock::at(since_epoch().as_secs())
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Until the next whole minute, at that time since the epoch: a schedule holds from its very minute on.
fn to_the_minute(since: Duration) -> Duration {
    MINUTE - Duration::from_nanos((since.as_nanos() % MINUTE.as_nanos()) as u64)
}

/// Follows the classes for ever.
pub async fn follow(client: Client, now: watch::Sender<Arc<Known>>) {
    let mut events = std::pin::pin!(
        watcher(Api::<DeviceClass>::all(client), watcher::Config::default()).default_backoff()
    );
    let (mut known, mut listed) = (Known::default(), BTreeSet::new());
    let mut listing = true;
    let mut is_told = false;
    while let Some(event) = events.next().await {
        is_told &= matches!(event, Ok(Event::Init) | Err(_));
        match event {
            Ok(Event::Init) => {
                listing = true;
                listed.clear();
            }
            Ok(Event::InitApply(class)) => {
                listed.extend(class.metadata.name.clone());
                known.set(&class);
            }
            Ok(Event::InitDone) => {
                listing = false;
                known.0.retain(|name, _| listed.contains(name));
            }
            Ok(Event::Apply(class)) => known.set(&class),
            Ok(Event::Delete(class)) => drop(class.metadata.name.and_then(|name| known.0.remove(&name))),
            // Once for each time that it begins: it is tried again and again.
            Err(cause) if !is_told => {
                is_told = true;
                tracing::warn!(
                    %cause,
                    "DeviceClasses cannot be followed, shares go by what is known of them; may this ServiceAccount list and watch them?"
                );
            }
            Err(cause) => tracing::debug!(%cause, "DeviceClasses still cannot be followed"),
        }
        if !listing {
            now.send_if_modified(|before| {
                let changed = **before != known;
                if changed {
                    *before = Arc::new(known.clone());
                }
                changed
            });
        }
    }
}

/// Has prepared claims go by their classes.
pub struct Follower {
    pub classes: Classes,
    pub engine: Engine,
    pub claims: Claims,
    pub turns: Turns,
}

impl Follower {
    /// For ever: once the classes are known, after each change of one, and with each minute of the clock while one has a
    /// schedule.
    pub async fn run(mut self) {
        let mut known = BTreeMap::new();
        let mut pause = Duration::MAX;
        loop {
            tokio::select! {
                changed = self.classes.changed() => if changed.is_err() {
                    return std::future::pending().await;
                },
                () = tokio::time::sleep(pause) => {}
            }
            let classes = self.classes.borrow_and_update().clone();
            let all = self.change(&classes, &mut known).await;
            pause = match (all, classes.has_schedules()) {
                (false, _) => AGAIN,
                (true, true) => to_the_minute(since_epoch()),
                (true, false) => Duration::MAX,
            };
        }
    }

    /// False where a claim could not be read, or not changed.
    async fn change(&self, classes: &Known, known: &mut BTreeMap<ClaimUid, Allocated>) -> bool {
        let mut held: BTreeMap<ClaimUid, Held> = BTreeMap::new();
        for HeldShare { claim, share, settings, .. } in self.engine.shares() {
            let of_claim = held.entry(claim.uid.clone()).or_insert_with(|| Held::of(claim));
            of_claim.has_defaults &= settings == ShareSettings::default();
            of_claim.shares.insert(share);
        }
        known.retain(|uid, allocated| held.get(uid).is_some_and(|held| held.shares == allocated.shares));
        // As in most clusters: then who has the defaults has what it should, and no claim need be read.
        let silent = classes.0.values().all(Vec::is_empty);
        let mut all = true;
        for (uid, held) in held.into_iter().filter(|(_, held)| !(silent && held.has_defaults)) {
            let Held { claim, shares, .. } = held;
            let _turn = self.turns.take(&uid).await;
            if !known.contains_key(&uid) {
                match self.claims.as_allocated(&claim).await {
                    Ok(read) => drop(known.insert(uid.clone(), Allocated { claim: read, shares })),
                    Err(error) => {
                        all &= !error.is_outage();
                        tracing::debug!(%claim, error = chain(&error), "share settings not looked at");
                        continue;
                    }
                }
            }
            let Some(Allocated { claim: allocated, .. }) = known.get(&uid) else { continue };
            let mut allocated = allocated.clone();
            resolve(&mut allocated, classes, now());
            match self.engine.change_shares(&allocated).await {
                Ok(true) => tracing::info!(%claim, %uid, "share goes by its class as it is now"),
                Ok(false) => {}
                Err(error) => {
                    all = false;
                    let error = chain(&error);
                    tracing::warn!(%claim, %uid, error, "share does not go by its class as it is now");
                }
            }
        }
        all
    }
}

/// A claim as it was allocated. That does not change as long as it has these shares: who is allocated anew has others.
struct Allocated {
    claim: AllocatedClaim,
    shares: BTreeSet<ShareId>,
}

/// A claim that is prepared here with shares.
struct Held {
    claim: ClaimRef,
    shares: BTreeSet<ShareId>,
    /// All that classes could have said of them is what is so anyway.
    has_defaults: bool,
}

impl Held {
    fn of(claim: ClaimRef) -> Self {
        Self { claim, shares: BTreeSet::new(), has_defaults: true }
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

    /// Allocated when its class said `class`; it says `own` itself.
    fn claim(class: &Value, own: &Value) -> AllocatedClaim {
        let config = |source: &str, fields: &Value| json!({"source": source, "requests": ["r"], "opaque": {"driver": DRIVER, "parameters": config(fields)}});
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

    /// Ceiling and weight.
    fn settings(mut claim: AllocatedClaim, classes: &[DeviceClass], now: &str) -> Result<(u32, u32), String> {
        let mut known = Known::default();
        classes.iter().for_each(|class| known.set(class));
        resolve(&mut claim, &known, Clock::parse(now).unwrap());
        let settings = claim.devices[0].share_settings().map_err(|misfit| misfit.to_string())?;
        Ok((settings.ceiling, settings.weight))
    }

    #[test]
    fn a_share_goes_by_its_class_as_it_is_now() {
        let then = json!({"ceiling": 60, "weight": 7});
        let check = |own: Value, classes: &[DeviceClass], expected: (u32, u32)| {
            assert_eq!(settings(claim(&then, &own), classes, "12:00"), Ok(expected), "{own}");
        };
        check(json!({}), &[], (60, 7));
        check(json!({}), &[class("other", &json!({"weight": 1}))], (60, 7));
        check(json!({}), &[class("batch", &json!({"weight": 1}))], (100, 1));
        check(json!({"ceiling": 50}), &[class("batch", &json!({"ceiling": 80}))], (50, 100));
        check(json!({"ceiling": 50}), &[class("batch", &json!({"ceiling": 20}))], (20, 100));
        // What is none is left alone.
        check(json!({}), &[class("batch", &json!({"weight": "much"}))], (60, 7));
        let taken_away = [class("batch", &json!({"weight": 1})), class("batch", &json!({"weight": 0}))];
        check(json!({}), &taken_away, (60, 7));
    }

    #[test]
    fn a_claim_that_asked_for_more_than_its_class_allowed_is_refused_as_before() {
        let asked = claim(&json!({"ceiling": 60}), &json!({"ceiling": 70}));
        assert!(settings(asked, &[class("batch", &json!({"ceiling": 60}))], "12:00").is_err());
    }

    #[test]
    fn a_schedule_is_looked_at_when_a_minute_begins() {
        let check = |at_ms: u64, expected_ms: u64| {
            assert_eq!(
                to_the_minute(Duration::from_millis(at_ms)).as_millis(),
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
    fn the_hour_decides_where_a_class_has_a_schedule() {
        let night = json!({"ceiling": 30, "schedule": [{"from": "20:00", "to": "06:00", "ceiling": 100}]});
        for classes in [vec![], vec![class("batch", &night)]] {
            assert_eq!(settings(claim(&night, &json!({})), &classes, "12:00"), Ok((30, 100)));
            assert_eq!(settings(claim(&night, &json!({})), &classes, "23:00"), Ok((100, 100)));
        }
    }
}
