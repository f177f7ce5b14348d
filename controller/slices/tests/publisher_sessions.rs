//! The publisher against the in-process fake API server, without sockets. Tests with a paused
//! clock simulate hours in no real time.
#![allow(clippy::unwrap_used, reason = "test helpers")]

mod common;

use common::{inventory_of, is_observer, node, with_instance};
use divvy_api::sharing::Mode;
use divvy_fakes::apiserver::{FakeApi, FakeApiOptions, Gates};
use divvy_model::inventory::{Origin, Presence};
use divvy_model::{Inventory, ModeSet, Removals};
use divvy_slices::{Held, HeldDevices, PublishOptions, Published, SchedulerOptions, run};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

const H100: &str = "H100-SXM5-80GB";

/// A running publisher with its server, inventory and state.
struct PublisherFixture {
    api: FakeApi,
    inventory: watch::Sender<Arc<Inventory>>,
    published: watch::Receiver<Published>,
    stop: CancellationToken,
}

async fn api() -> FakeApi {
    let api = FakeApi::start(FakeApiOptions::default()).await.unwrap();
    put_node(&api);
    api
}

fn put_node(api: &FakeApi) {
    api.put(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "worker"}}));
}

impl PublisherFixture {
    /// Starts the publisher without waiting.
    fn start(api: FakeApi, inventory: Inventory) -> Self {
        Self::start_with(api, inventory, PublishOptions::new("worker"))
    }

    fn start_with(api: FakeApi, inventory: Inventory, options: PublishOptions) -> Self {
        let (inventory, receiver) = watch::channel(Arc::new(inventory));
        let (sender, published) = watch::channel(Published::default());
        let stop = CancellationToken::new();
        let (client, stopped) = (api.client_in_process(), stop.clone().cancelled_owned());
        tokio::spawn(run(client, options, receiver, sender, stopped));
        Self { api, inventory, published, stop }
    }

    /// Starts the publisher and waits for the first pool.
    async fn published(inventory: Inventory) -> Self {
        let mut fixture = Self::start(api().await, inventory);
        fixture.until(|published| published.in_sync).await;
        fixture
    }

    async fn until(&mut self, holds: impl FnMut(&Published) -> bool) -> Published {
        let day = Duration::from_secs(86_400);
        timeout(day, self.published.wait_for(holds))
            .await
            .expect("condition not met in time")
            .unwrap()
            .clone()
    }

    fn slices(&self) -> Vec<ResourceSlice> {
        self.api.list()
    }

    fn devices(&self) -> Vec<Device> {
        let devices = self.slices().into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default());
        devices.filter(|device| !is_observer(&device.name)).collect()
    }

    fn names(&self) -> Vec<String> {
        self.devices().into_iter().map(|device| device.name).collect()
    }

    /// Waits until the slices satisfy a condition and returns the elapsed time.
    async fn until_there(&self, mut holds: impl FnMut(&[ResourceSlice]) -> bool) -> Duration {
        let start = Instant::now();
        while !holds(&self.slices()) {
            assert!(start.elapsed() < Duration::from_secs(86_400), "condition not met in time");
            sleep(Duration::from_millis(200)).await;
        }
        start.elapsed()
    }
}

/// Whether the slices form one complete generation, which a scheduler requires.
fn complete(slices: &[ResourceSlice]) -> bool {
    let Some(first) = slices.first() else { return false };
    let pool = &first.spec.pool;
    slices.iter().all(|slice| slice.spec.pool == *pool) && pool.resource_slice_count == slices.len() as i64
}

#[tokio::test]
async fn pool_is_published_over_tls_and_owned_by_the_node() {
    let api = api().await;
    let (_inventory, receiver) = watch::channel(Arc::new(inventory_of(H100, 2)));
    let (sender, mut published) = watch::channel(Published::default());
    let publisher =
        run(api.client().unwrap(), PublishOptions::new("worker"), receiver, sender, std::future::pending());
    let seen = async { published.wait_for(|published| published.in_sync).await.unwrap().clone() };
    let seen = tokio::select! {
        () = publisher => unreachable!("it never stops"),
        seen = seen => seen,
    };
    let slices: Vec<ResourceSlice> = api.list();
    assert!(complete(&slices));
    assert_eq!((seen.generation, seen.slices, seen.devices), (1, slices.len(), 60));
    let uid = api.get::<Node>("", "worker").unwrap().metadata.uid;
    assert!(
        slices
            .iter()
            .all(|slice| Some(&slice.metadata.owner_references.as_ref().unwrap()[0].uid) == uid.as_ref())
    );
}

#[tokio::test(start_paused = true)]
async fn empty_node_publishes_an_empty_pool() {
    let fixture = PublisherFixture::published(Inventory::default()).await;
    assert_eq!(fixture.slices().len(), 1);
    assert_eq!(fixture.devices(), []);
}

#[tokio::test(start_paused = true)]
async fn unchanged_slices_are_not_rewritten() {
    let mut fixture = PublisherFixture::published(inventory_of(H100, 2)).await;
    let before = fixture.slices();
    fixture.inventory.send(Arc::new(inventory_of(H100, 2))).unwrap();
    sleep(Duration::from_secs(3600)).await;
    assert_eq!(fixture.slices(), before);
    // A second publisher, as in a rolling update, finds nothing to write either.
    fixture.stop.cancel();
    let mut second = PublisherFixture::start(fixture.api, inventory_of(H100, 2));
    assert_eq!(second.until(|published| published.in_sync).await.writes, 0);
    assert_eq!(second.slices(), before);
    fixture.published.wait_for(|_| false).await.unwrap_err();
}

#[tokio::test(start_paused = true)]
async fn deleted_slices_are_recreated_within_a_second() {
    let fixture = PublisherFixture::published(inventory_of(H100, 2)).await;
    let before = fixture.names();
    for _ in 0..3 {
        fixture.api.delete_all::<ResourceSlice>();
        let took = fixture.until_there(complete).await;
        assert!(took < Duration::from_secs(1), "{took:?}");
        assert_eq!(fixture.names(), before);
    }
    assert_eq!(fixture.slices()[0].spec.pool.generation, 4, "a generation was reused");
}

#[tokio::test(start_paused = true)]
async fn foreign_edits_are_repaired_with_growing_delays() {
    let fixture = PublisherFixture::published(inventory_of(H100, 1)).await;
    let good = fixture.names();
    let edit = || {
        let mut slice = fixture.slices().into_iter().find(|slice| slice.spec.devices.is_some()).unwrap();
        slice.spec.devices.as_mut().unwrap().truncate(1);
        let mut slice = serde_json::to_value(slice).unwrap();
        slice["apiVersion"] = json!("resource.k8s.io/v1");
        slice["kind"] = json!("ResourceSlice");
        fixture.api.put(slice);
    };
    let mut waits = Vec::new();
    for _ in 0..7 {
        edit();
        waits.push(fixture.until_there(|_| fixture.names() == good).await.as_secs());
    }
    assert_eq!(waits, [1, 2, 4, 8, 16, 30, 30]);
}

#[tokio::test(start_paused = true)]
async fn new_inventory_is_published_immediately() {
    let mut fixture = PublisherFixture::published(inventory_of(H100, 2)).await;
    let start = Instant::now();
    let mut inventory = inventory_of(H100, 2);
    inventory.gpus[1].presence = Presence::Missing;
    fixture.inventory.send(Arc::new(inventory)).unwrap();
    fixture.until(|published| published.generation == 2).await;
    assert!(start.elapsed() < Duration::from_millis(100));
    assert_eq!(fixture.devices().iter().filter(|device| device.taints.is_some()).count(), 29);
}

#[tokio::test(start_paused = true)]
async fn persisting_taint_keeps_its_time() {
    let mut inventory = inventory_of(H100, 2);
    inventory.gpus[1].presence = Presence::Missing;
    let mut fixture = PublisherFixture::published(inventory.clone()).await;
    let times = |fixture: &PublisherFixture| -> Vec<_> {
        let taints = fixture.devices().into_iter().flat_map(|device| device.taints.unwrap_or_default());
        taints
            .map(|taint| (taint.key, taint.time_added))
            .filter(|(key, _)| key.ends_with("missing"))
            .collect()
    };
    // The server sets its own time on a taint that is written without one.
    let mut slices = fixture.slices();
    for slice in &mut slices {
        for taint in
            slice.spec.devices.iter_mut().flatten().flat_map(|device| device.taints.iter_mut().flatten())
        {
            taint.time_added = serde_json::from_str("\"2026-01-01T00:00:00Z\"").unwrap();
        }
        let mut slice = serde_json::to_value(&slice).unwrap();
        slice["apiVersion"] = json!("resource.k8s.io/v1");
        slice["kind"] = json!("ResourceSlice");
        fixture.api.put(slice);
    }
    let before = times(&fixture);
    sleep(Duration::from_secs(60)).await;
    inventory.gpus[0].presence = Presence::Missing;
    fixture.inventory.send(Arc::new(inventory)).unwrap();
    fixture.until(|published| published.generation == 2).await;
    let kept = times(&fixture).into_iter().filter(|taint| before.contains(taint)).count();
    assert_eq!(kept, before.len());
}

#[tokio::test(start_paused = true)]
async fn publisher_survives_an_hour_without_the_api_server() {
    let mut fixture = PublisherFixture::published(inventory_of(H100, 1)).await;
    fixture.api.set_unavailable(true);
    fixture.until(|published| published.error.is_some()).await;
    sleep(Duration::from_secs(3600)).await;
    fixture.inventory.send(Arc::new(inventory_of(H100, 2))).unwrap();
    fixture.api.set_unavailable(false);
    let back = Instant::now();
    fixture.until(|published| published.in_sync && published.devices == 60).await;
    assert!(back.elapsed() <= Duration::from_secs(6), "{:?}", back.elapsed());
}

#[tokio::test(start_paused = true)]
async fn slow_or_failing_api_server_is_retried() {
    let api = api().await;
    api.set_outage(Some(divvy_fakes::apiserver::Outage::Answer503));
    let mut fixture = PublisherFixture::start(api, inventory_of(H100, 1));
    fixture.until(|published| published.error.is_some()).await;
    fixture.api.set_outage(None);
    fixture.until(|published| published.in_sync).await;
}

#[tokio::test(start_paused = true)]
async fn expired_watch_starts_a_new_session() {
    let fixture = PublisherFixture::published(inventory_of(H100, 1)).await;
    fixture.api.forget_history();
    sleep(Duration::from_secs(10)).await;
    fixture.api.delete_all::<ResourceSlice>();
    fixture.until_there(complete).await;
}

#[tokio::test(start_paused = true)]
async fn conflicting_update_is_retried_after_a_new_read() {
    let mut fixture = PublisherFixture::published(inventory_of(H100, 2)).await;
    fixture.api.fail_next("update", "resourceslices", 2, 409);
    let mut inventory = inventory_of(H100, 2);
    inventory.gpus[0].presence = Presence::Missing;
    fixture.inventory.send(Arc::new(inventory)).unwrap();
    fixture.until(|published| published.in_sync && published.generation == 2).await;
    assert!(complete(&fixture.slices()));
}

#[tokio::test(start_paused = true)]
async fn interrupted_write_is_completed() {
    let api = api().await;
    for code in [500, 429, 403] {
        api.fail_next("create", "resourceslices", 1, code);
    }
    let mut fixture = PublisherFixture::start(api, inventory_of(H100, 4));
    fixture.until(|published| published.in_sync).await;
    assert!(complete(&fixture.slices()));
}

#[tokio::test(start_paused = true)]
async fn rejected_pool_is_retried_slowly() {
    let mut fixture = PublisherFixture::published(inventory_of(H100, 1)).await;
    fixture.api.fail_next("update", "resourceslices", 1000, 422);
    let mut inventory = inventory_of(H100, 1);
    inventory.gpus[0].presence = Presence::Missing;
    fixture.inventory.send(Arc::new(inventory)).unwrap();
    let error = fixture.until(|published| published.error.is_some()).await.error.unwrap();
    assert!(error.contains("rejected slice 0000"), "{error}");
    sleep(Duration::from_secs(3600)).await;
    let tries = fixture.api.count("update", "resourceslices");
    assert!((2..=15).contains(&tries), "{tries} in an hour");
    // A new inventory is tried at once.
    fixture.inventory.send(Arc::new(inventory_of(H100, 1))).unwrap();
    fixture.until(|published| published.in_sync).await;
}

#[tokio::test(start_paused = true)]
async fn invalid_pool_is_not_sent() {
    let mut fixture = PublisherFixture::published(inventory_of(H100, 1)).await;
    fixture.api.clear_requests();
    let mut inventory = inventory_of(H100, 2);
    inventory.gpus[1].number = inventory.gpus[0].number;
    fixture.inventory.send(Arc::new(inventory)).unwrap();
    let error = fixture.until(|published| published.error.is_some()).await.error.unwrap();
    assert!(error.contains("is duplicated"), "{error}");
    assert!(
        fixture.api.requests().iter().all(|request| !matches!(request.verb, "create" | "update" | "delete"))
    );
}

/// Removes the annotation of every slice, as if an older publisher had written them.
fn without_annotations(api: &FakeApi) {
    for mut slice in api.list::<ResourceSlice>() {
        slice.metadata.annotations = None;
        let mut slice = serde_json::to_value(slice).unwrap();
        slice["apiVersion"] = json!("resource.k8s.io/v1");
        slice["kind"] = json!("ResourceSlice");
        api.put(slice);
    }
}

#[tokio::test(start_paused = true)]
async fn slices_of_an_older_publisher_get_annotations_once() {
    let fixture = PublisherFixture::published(inventory_of(H100, 2)).await;
    let annotations = |fixture: &PublisherFixture| -> Vec<_> {
        fixture.slices().into_iter().map(|slice| slice.metadata.annotations).collect()
    };
    let before = annotations(&fixture);
    assert!(before.iter().all(Option::is_some), "{before:?}");
    fixture.stop.cancel();
    without_annotations(&fixture.api);
    fixture.api.clear_requests();
    let mut second = PublisherFixture::start(fixture.api, inventory_of(H100, 2));
    let seen = second.until(|published| published.in_sync).await;
    assert_eq!((seen.generation, seen.writes), (1, before.len() as u64));
    assert_eq!(annotations(&second), before);
    sleep(Duration::from_secs(3600)).await;
    assert_eq!(second.api.count("update", "resourceslices"), before.len());
}

#[tokio::test(start_paused = true)]
async fn dropped_annotations_are_written_once() {
    let api = api().await;
    api.set_gates(Gates { annotations: false, ..Gates::default() });
    let mut fixture = PublisherFixture::start(api, inventory_of(H100, 2));
    fixture.until(|published| published.in_sync).await;
    let there = fixture.slices().len();
    assert_eq!(fixture.api.count("create", "resourceslices"), there);
    for minute in 0..60_usize {
        let mut inventory = inventory_of(H100, 2);
        inventory.gpus[0].presence = if minute % 2 == 0 { Presence::Missing } else { Presence::Present };
        fixture.inventory.send(Arc::new(inventory)).unwrap();
        fixture.until(|published| published.in_sync).await;
        fixture.api.forget_history();
        sleep(Duration::from_secs(60)).await;
    }
    fixture.api.clear_requests();
    fixture.api.forget_history();
    sleep(Duration::from_secs(3600)).await;
    assert_eq!(fixture.api.count("update", "resourceslices"), 0);
}

#[tokio::test(start_paused = true)]
async fn slices_return_after_their_node_is_recreated() {
    let fixture = PublisherFixture::published(inventory_of(H100, 1)).await;
    // The garbage collector deletes the slices of the deleted node.
    fixture.api.delete::<Node>("", "worker");
    fixture.api.delete_all::<ResourceSlice>();
    sleep(Duration::from_secs(60)).await;
    assert_eq!(fixture.slices(), []);
    put_node(&fixture.api);
    let uid = fixture.api.get::<Node>("", "worker").unwrap().metadata.uid.unwrap();
    fixture.until_there(complete).await;
    assert!(
        fixture.slices().iter().all(|slice| slice.metadata.owner_references.as_ref().unwrap()[0].uid == uid)
    );
}

#[tokio::test(start_paused = true)]
async fn slices_are_adopted_by_a_replaced_node() {
    let fixture = PublisherFixture::published(inventory_of(H100, 1)).await;
    put_node(&fixture.api);
    let uid = fixture.api.get::<Node>("", "worker").unwrap().metadata.uid.unwrap();
    fixture
        .until_there(|slices| {
            slices.iter().all(|slice| slice.metadata.owner_references.as_ref().unwrap()[0].uid == uid)
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn without_counters_no_exclusive_devices_are_published() {
    let api = api().await;
    api.set_gates(Gates { partitionable_devices: false, ..Gates::default() });
    let h100 = divvy_catalogue::find(H100).unwrap().row();
    let cut = with_instance(common::gpu(h100, 1), 9, 4, Origin::Ours);
    let mut fixture = PublisherFixture::start(api, node(vec![common::gpu(h100, 0), cut]));
    let seen = fixture.until(|published| published.in_sync).await;
    assert!(seen.degraded.unwrap().contains("does not support shared counters"));
    assert_eq!(fixture.names(), ["gpu-0", "gpu-1-mig-3g40gb-9-4"]);
    // The feature gate is enabled and the server restarts.
    fixture.api.set_gates(Gates::default());
    fixture.api.set_version("v1.37.1");
    fixture.until(|published| published.degraded.is_none() && published.devices == 60).await;
}

#[tokio::test(start_paused = true)]
async fn scheduler_with_bugs_gets_no_counters() {
    let api = api().await;
    api.set_version("v1.36.1");
    let held = Arc::new(Mutex::new(Some(BTreeSet::from(["gpu-0-timeslice".to_owned()]))));
    let read = held.clone();
    let options = PublishOptions {
        held: HeldDevices::new(move || {
            Some(Held { unguarded: read.lock().unwrap().clone()?, ..Held::default() })
        }),
        ..PublishOptions::new("worker")
    };
    let mut fixture = PublisherFixture::start_with(api, inventory_of(H100, 2), options);
    let degraded = fixture.until(|published| published.in_sync).await.degraded.unwrap();
    assert!(degraded.starts_with("the scheduler 1.36.1 has kubernetes#139034"), "{degraded}");
    assert_eq!(fixture.names(), ["gpu-1", "gpu-0-timeslice"]);
    assert!(fixture.devices().iter().all(|device| device.consumes_counters.is_none()));
    // The claim is released.
    *held.lock().unwrap() = Some(BTreeSet::new());
    fixture.until_there(|_| fixture.names() == ["gpu-1", "gpu-0"]).await;
    // The control plane is upgraded.
    fixture.api.set_version("v1.36.2");
    fixture.until(|published| published.degraded.is_none() && published.devices == 60).await;
}

#[tokio::test(start_paused = true)]
async fn held_devices_stay_while_claims_are_not_known() {
    let api = api().await;
    api.set_version("v1.36.1");
    let held = Arc::new(Mutex::new(Some(BTreeSet::from(["gpu-0-timeslice".to_owned()]))));
    let options = || PublishOptions {
        held: HeldDevices::new({
            let read = held.clone();
            move || Some(Held { unguarded: read.lock().unwrap().clone()?, ..Held::default() })
        }),
        ..PublishOptions::new("worker")
    };
    let mut fixture = PublisherFixture::start_with(api, inventory_of(H100, 2), options());
    fixture.until(|published| published.in_sync).await;
    *held.lock().unwrap() = None;
    fixture.api.delete_all::<ResourceSlice>();
    fixture.until_there(complete).await;
    assert_eq!(fixture.names(), ["gpu-1", "gpu-0-timeslice"]);
    // A publisher that starts knows only what is published.
    fixture.stop.cancel();
    let before = fixture.slices();
    let mut second = PublisherFixture::start_with(fixture.api, inventory_of(H100, 2), options());
    assert_eq!(second.until(|published| published.in_sync).await.writes, 0);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(second.slices(), before);
    *held.lock().unwrap() = Some(BTreeSet::new());
    second.until_there(|_| second.names() == ["gpu-1", "gpu-0"]).await;
}

#[tokio::test(start_paused = true)]
async fn settings_select_the_bugs_of_the_scheduler() {
    let scheduler = |version: Option<&str>, ignored: &[u32]| SchedulerOptions {
        version: version.map(|version| version.parse().unwrap()),
        ignored_bugs: ignored.iter().copied().collect(),
    };
    for (server, scheduler, degraded) in [
        ("v1.37.0", scheduler(Some("1.36.1"), &[]), true),
        ("v1.36.1", scheduler(Some("1.36.2"), &[]), false),
        ("v1.36.1", scheduler(None, &[139_034, 138_882]), false),
    ] {
        let api = api().await;
        api.set_version(server);
        let options = PublishOptions { scheduler: scheduler.clone(), ..PublishOptions::new("worker") };
        let mut fixture = PublisherFixture::start_with(api, inventory_of(H100, 2), options);
        let seen = fixture.until(|published| published.in_sync).await;
        assert_eq!(seen.degraded.is_some(), degraded, "{server}, {scheduler:?}");
        assert_eq!(seen.devices, if degraded { 4 } else { 60 }, "{server}, {scheduler:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn without_consumable_capacity_no_shared_devices_exist() {
    let api = api().await;
    api.set_gates(Gates { consumable_capacity: false, ..Gates::default() });
    let mut fixture = PublisherFixture::start(api, inventory_of(H100, 2));
    let seen = fixture.until(|published| published.in_sync).await;
    assert!(
        seen.degraded
            .unwrap()
            .contains("does not support consumable capacity (each GPU or MIG instance goes to one claim")
    );
    assert_eq!(seen.devices, 54);
    assert!(fixture.devices().iter().all(|device| device.consumes_counters.is_some()));
    assert!(fixture.names().iter().all(|name| !name.ends_with("timeslice") && !name.ends_with("mps")));
    // The feature gate is enabled and the server restarts.
    fixture.api.set_gates(Gates::default());
    fixture.api.set_version("v1.37.1");
    fixture.until(|published| published.degraded.is_none() && published.devices == 60).await;
}

#[tokio::test(start_paused = true)]
async fn all_missing_features_are_reported_together() {
    let api = api().await;
    api.set_gates(Gates {
        partitionable_devices: false,
        consumable_capacity: false,
        device_taints: false,
        ..Gates::default()
    });
    let mut fixture = PublisherFixture::start(api, inventory_of(H100, 2));
    let degraded = fixture.until(|published| published.in_sync).await.degraded.unwrap();
    for lack in ["shared counters (", ", nor consumable capacity (", ", nor device taints ("] {
        assert!(degraded.contains(lack), "{degraded}");
    }
    assert_eq!(fixture.names(), ["gpu-1", "gpu-0"]);
}

#[tokio::test(start_paused = true)]
async fn without_taint_support_tainted_devices_are_omitted() {
    let api = api().await;
    api.set_gates(Gates { device_taints: false, ..Gates::default() });
    let mut inventory = inventory_of(H100, 2);
    inventory.gpus[0].presence = Presence::Missing;
    let mut fixture = PublisherFixture::start(api, inventory);
    let seen = fixture.until(|published| published.in_sync).await;
    assert!(seen.degraded.unwrap().contains("device taints"));
    assert!(fixture.names().iter().all(|name| name.starts_with("gpu-1")));
}

#[tokio::test(start_paused = true)]
async fn dropped_counters_are_detected_after_the_probe() {
    let fixture = PublisherFixture::published(Inventory::default()).await;
    // Same connection and version: only the answers to writes reveal it.
    fixture.api.set_gates(Gates { partitionable_devices: false, ..Gates::default() });
    let mut published = fixture.published.clone();
    fixture.inventory.send(Arc::new(inventory_of(H100, 1))).unwrap();
    published.wait_for(|published| published.in_sync && published.degraded.is_some()).await.unwrap();
    assert_eq!(fixture.names(), ["gpu-0"]);
    let devices = fixture
        .api
        .requests()
        .into_iter()
        .filter(|request| request.verb == "create" && !request.dry_run)
        .count();
    assert!(devices <= 3, "the instances were sent");
}

#[tokio::test(start_paused = true)]
async fn dropped_shares_are_detected_after_the_probe() {
    let fixture = PublisherFixture::published(Inventory::default()).await;
    fixture.api.set_gates(Gates { consumable_capacity: false, ..Gates::default() });
    let mut published = fixture.published.clone();
    fixture.inventory.send(Arc::new(inventory_of("L4", 1))).unwrap();
    published.wait_for(|published| published.in_sync && published.degraded.is_some()).await.unwrap();
    assert_eq!(fixture.names(), ["gpu-0"]);
}

#[tokio::test(start_paused = true)]
async fn devices_are_tainted_while_the_gpu_driver_is_absent() {
    let fixture = PublisherFixture::published(inventory_of(H100, 1)).await;
    let before = fixture.names();
    fixture.stop.cancel();
    let mut second = PublisherFixture::start(fixture.api, Inventory::default());
    second.until(|published| published.in_sync).await;
    assert_eq!(second.names(), before);
    let tainted =
        |device: &Device| device.taints.as_ref().is_some_and(|t| t[0].key == "gpu.divvy.dev/no-gpu-driver");
    assert!(second.devices().iter().all(tainted));
    second.inventory.send(Arc::new(inventory_of(H100, 1))).unwrap();
    second.until_there(|_| second.devices().iter().all(|device| device.taints.is_none())).await;
    assert_eq!(second.names(), before);
}

#[tokio::test(start_paused = true)]
async fn slices_stay_after_the_publisher_stops() {
    let mut fixture = PublisherFixture::published(inventory_of(H100, 1)).await;
    let before = fixture.slices();
    fixture.stop.cancel();
    fixture.published.wait_for(|_| false).await.unwrap_err();
    sleep(Duration::from_secs(60)).await;
    assert_eq!(fixture.slices(), before);
}

/// A node with one GPU, with these modes and this text of approvals.
fn with_modes(modes: &[Mode], removable: &str) -> Inventory {
    let mut inventory = inventory_of("L4", 1);
    inventory.gpus[0].policy.modes = modes.iter().copied().collect();
    inventory.gpus[0].policy.shares = false;
    inventory.removals = Removals::parse(Some(removable), None);
    inventory
}

impl PublisherFixture {
    /// Publishes an inventory and waits until the device is published with the taint, or is absent.
    async fn shows(&mut self, inventory: Inventory, device: &str, expected: Option<bool>) {
        self.inventory.send(Arc::new(inventory)).unwrap();
        self.until_there(|slices| {
            let all = || slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
            let found = all().find(|found| found.name == device);
            complete(slices) && found.map(|found| found.taints.is_some()) == expected
        })
        .await;
    }

    /// The annotation about modes that are off.
    fn modes_off(&self) -> String {
        let mut slices = self.slices();
        slices.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
        let annotations = slices.swap_remove(0).metadata.annotations.unwrap_or_default();
        annotations.get("gpu.divvy.dev/modes-off").cloned().unwrap_or_default()
    }

    /// The closing of the mode MPS.
    fn closing(&self) -> u64 {
        let all = ModeSet::parse(&self.modes_off());
        all.0.iter().find_map(|((_, mode), id)| (*mode == Mode::Mps).then_some(*id)).unwrap().unwrap().0
    }
}

const OPEN: [Mode; 2] = [Mode::Whole, Mode::Mps];

#[tokio::test(start_paused = true)]
async fn mode_is_removed_only_with_the_approval_of_its_closing() {
    let mut fixture = PublisherFixture::published(with_modes(&OPEN, "")).await;
    assert_eq!(fixture.names(), ["gpu-0", "gpu-0-mps"], "modes that were never on are absent");
    assert_eq!(fixture.modes_off(), "share:0 timeslice:0");
    fixture.shows(with_modes(&[Mode::Whole], ""), "gpu-0-mps", Some(true)).await;
    let first = fixture.closing();
    fixture.shows(with_modes(&OPEN, ""), "gpu-0-mps", Some(false)).await;
    fixture.shows(with_modes(&[Mode::Whole], ""), "gpu-0-mps", Some(true)).await;
    let second = fixture.closing();
    assert!(second > first, "{second} {first}");
    let stale = with_modes(&[Mode::Whole], &format!("mps@{first}:0"));
    fixture.inventory.send(Arc::new(stale)).unwrap();
    sleep(Duration::from_secs(3600)).await;
    assert_eq!(fixture.names(), ["gpu-0", "gpu-0-mps"], "the approval was of an earlier closing");
    fixture.shows(with_modes(&[Mode::Whole], &format!("mps@{second}:0")), "gpu-0-mps", None).await;
    assert_eq!(fixture.modes_off(), "share:0 timeslice:0 mps:0");
    // The controller may remove the approval then.
    fixture.inventory.send(Arc::new(with_modes(&[Mode::Whole], ""))).unwrap();
    sleep(Duration::from_secs(3600)).await;
    assert_eq!(fixture.names(), ["gpu-0"]);
    fixture.shows(with_modes(&OPEN, ""), "gpu-0-mps", Some(false)).await;
}

/// An observer takes part in no mode. If it counted as a whole GPU, a mode that was never on would close.
#[tokio::test(start_paused = true)]
async fn observer_does_not_keep_whole_gpus_published() {
    let mut fixture = PublisherFixture::published(with_modes(&[Mode::Timeslice], "")).await;
    assert_eq!(fixture.names(), ["gpu-0-timeslice"]);
    let more = [Mode::Timeslice, Mode::Mps];
    fixture.shows(with_modes(&more, ""), "gpu-0-mps", Some(false)).await;
    assert_eq!(fixture.names(), ["gpu-0-timeslice", "gpu-0-mps"]);
    fixture.stop.cancel();
    let mut second = PublisherFixture::start(fixture.api, with_modes(&more, ""));
    second.until(|published| published.in_sync).await;
    assert_eq!(second.names(), ["gpu-0-timeslice", "gpu-0-mps"]);
}

#[tokio::test(start_paused = true)]
async fn claim_on_a_removed_device_publishes_it_again() {
    let mut fixture = PublisherFixture::published(with_modes(&[Mode::Whole], "")).await;
    let allocated = |device: &str| {
        let mut inventory = with_modes(&[Mode::Whole], "");
        let entry = json!([{"device": device, "claim": {"namespace": "n", "name": "c", "uid": "u"}}]);
        inventory.removals = Removals::parse(None, Some(&entry.to_string()));
        inventory
    };
    fixture.shows(allocated("gpu-0-mps"), "gpu-0-mps", Some(true)).await;
    assert_eq!(fixture.names(), ["gpu-0", "gpu-0-mps"]);
    fixture.shows(allocated("gpu-0-timeslice"), "gpu-0-timeslice", Some(true)).await;
    assert_eq!(fixture.names(), ["gpu-0", "gpu-0-timeslice", "gpu-0-mps"], "it closes again");
}

#[tokio::test(start_paused = true)]
async fn held_device_stays_published_until_its_release() {
    let held = Arc::new(Mutex::new(Held::default()));
    let read = Arc::clone(&held);
    let options = PublishOptions {
        held: HeldDevices::new(move || Some(read.lock().unwrap().clone())),
        ..PublishOptions::new("worker")
    };
    let mut fixture = PublisherFixture::start_with(api().await, with_modes(&OPEN, ""), options);
    fixture.until(|published| published.in_sync).await;
    held.lock().unwrap().all.insert("gpu-0-mps".to_owned());
    fixture.shows(with_modes(&[Mode::Whole], ""), "gpu-0-mps", Some(true)).await;
    let approved = with_modes(&[Mode::Whole], &format!("mps@{}:0", fixture.closing()));
    fixture.inventory.send(Arc::new(approved.clone())).unwrap();
    sleep(Duration::from_secs(3600)).await;
    assert_eq!(fixture.names(), ["gpu-0", "gpu-0-mps"]);
    held.lock().unwrap().all.clear();
    fixture
        .until_there(|slices| slices.iter().all(|slice| !json!(slice).to_string().contains("mps\"")))
        .await;
    held.lock().unwrap().all.insert("gpu-0-mps".to_owned());
    fixture.shows(approved, "gpu-0-mps", Some(true)).await;
}

#[tokio::test(start_paused = true)]
async fn closing_survives_a_restart_and_ends_with_deleted_slices() {
    let dir = tempfile::tempdir().unwrap();
    let options = || PublishOptions {
        mode_file: Some(dir.path().join("state/modes.json")),
        ..PublishOptions::new("worker")
    };
    let mut fixture = PublisherFixture::start_with(api().await, with_modes(&OPEN, ""), options());
    fixture.until(|published| published.in_sync).await;
    fixture.shows(with_modes(&[Mode::Whole], ""), "gpu-0-mps", Some(true)).await;
    let first = fixture.closing();
    let restart = |fixture: PublisherFixture, modes: &[Mode]| {
        fixture.stop.cancel();
        PublisherFixture::start_with(fixture.api, with_modes(modes, ""), options())
    };
    let mut fixture = restart(fixture, &[Mode::Whole]);
    fixture.until(|published| published.in_sync).await;
    assert_eq!(fixture.closing(), first);
    fixture.stop.cancel();
    sleep(Duration::from_secs(1)).await;
    fixture.api.delete_all::<ResourceSlice>();
    let mut fixture = restart(fixture, &[Mode::Whole]);
    fixture.until(|published| published.in_sync).await;
    assert_eq!(fixture.names(), ["gpu-0", "gpu-0-mps"], "a claim may still be allocated");
    assert!(fixture.closing() > first);
    // The mode is turned off while the daemon is down and its slices are deleted.
    let mut fixture = restart(fixture, &OPEN);
    fixture.until(|published| published.in_sync).await;
    fixture.stop.cancel();
    sleep(Duration::from_secs(1)).await;
    fixture.api.delete_all::<ResourceSlice>();
    let mut fixture = restart(fixture, &[Mode::Whole]);
    fixture.until(|published| published.in_sync).await;
    assert_eq!(fixture.names(), ["gpu-0", "gpu-0-mps"]);
}
