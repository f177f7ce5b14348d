//! The publisher against the fake API server.
//!
//! Tests with a paused clock talk to the server in this process, without
//! sockets: while everybody waits the clock runs ahead, so an hour is nothing.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use common::{inventory_of, node, with_instance};
use divvy_fakes::apiserver::{FakeApi, FakeApiOptions, Gates};
use divvy_model::Inventory;
use divvy_model::inventory::{Origin, Presence};
use divvy_slices::{PublishOptions, Published, run};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

const H100: &str = "H100-SXM5-80GB";

/// A publisher at work, and everything around it.
struct Rig {
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

impl Rig {
    /// Starts without waiting for anything.
    fn start(api: FakeApi, inventory: Inventory) -> Self {
        let (inventory, receiver) = watch::channel(Arc::new(inventory));
        let (sender, published) = watch::channel(Published::default());
        let stop = CancellationToken::new();
        let (client, stopped) = (api.client_in_process(), stop.clone().cancelled_owned());
        tokio::spawn(run(client, PublishOptions::new("worker"), receiver, sender, stopped));
        Self { api, inventory, published, stop }
    }

    /// Starts and waits for the first pool.
    async fn published(inventory: Inventory) -> Self {
        let mut rig = Self::start(api().await, inventory);
        rig.until(|published| published.in_sync).await;
        rig
    }

    async fn until(&mut self, holds: impl FnMut(&Published) -> bool) -> Published {
        let day = Duration::from_secs(86_400);
        timeout(day, self.published.wait_for(holds)).await.expect("in time").unwrap().clone()
    }

    fn slices(&self) -> Vec<ResourceSlice> {
        self.api.list()
    }

    fn devices(&self) -> Vec<Device> {
        self.slices().into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default()).collect()
    }

    fn names(&self) -> Vec<String> {
        self.devices().into_iter().map(|device| device.name).collect()
    }

    /// Waits until the server shows what is wanted; gives how long it took.
    async fn until_there(&self, mut holds: impl FnMut(&[ResourceSlice]) -> bool) -> Duration {
        let start = Instant::now();
        while !holds(&self.slices()) {
            assert!(start.elapsed() < Duration::from_secs(86_400), "in time");
            sleep(Duration::from_millis(200)).await;
        }
        start.elapsed()
    }
}

/// One generation and complete: what a scheduler believes.
fn complete(slices: &[ResourceSlice]) -> bool {
    let Some(first) = slices.first() else { return false };
    let pool = &first.spec.pool;
    slices.iter().all(|slice| slice.spec.pool == *pool) && pool.resource_slice_count == slices.len() as i64
}

#[tokio::test]
async fn a_pool_is_published_over_tls_and_belongs_to_the_node() {
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
    assert_eq!((seen.generation, seen.slices, seen.devices), (1, slices.len(), 56));
    let uid = api.get::<Node>("", "worker").unwrap().metadata.uid;
    assert!(
        slices
            .iter()
            .all(|slice| Some(&slice.metadata.owner_references.as_ref().unwrap()[0].uid) == uid.as_ref())
    );
}

#[tokio::test(start_paused = true)]
async fn an_empty_node_publishes_an_empty_pool() {
    let rig = Rig::published(Inventory::default()).await;
    assert_eq!(rig.slices().len(), 1);
    assert_eq!(rig.devices(), []);
}

#[tokio::test(start_paused = true)]
async fn what_is_in_order_is_not_written_again() {
    let mut rig = Rig::published(inventory_of(H100, 2)).await;
    let before = rig.slices();
    rig.inventory.send(Arc::new(inventory_of(H100, 2))).unwrap();
    sleep(Duration::from_secs(3600)).await;
    assert_eq!(rig.slices(), before);
    // A second publisher, as in a rolling update, finds it in order too.
    rig.stop.cancel();
    let mut second = Rig::start(rig.api, inventory_of(H100, 2));
    assert_eq!(second.until(|published| published.in_sync).await.writes, 0);
    assert_eq!(second.slices(), before);
    rig.published.wait_for(|_| false).await.unwrap_err();
}

#[tokio::test(start_paused = true)]
async fn slices_that_a_kubelet_wipes_are_back_within_a_second() {
    let rig = Rig::published(inventory_of(H100, 2)).await;
    let before = rig.names();
    for _ in 0..3 {
        rig.api.delete_all::<ResourceSlice>();
        let took = rig.until_there(complete).await;
        assert!(took < Duration::from_secs(1), "{took:?}");
        assert_eq!(rig.names(), before);
    }
    assert_eq!(rig.slices()[0].spec.pool.generation, 4, "no generation is used twice");
}

#[tokio::test(start_paused = true)]
async fn a_foreign_edit_is_repaired_and_not_fought_over() {
    let rig = Rig::published(inventory_of(H100, 1)).await;
    let good = rig.names();
    let edit = || {
        let mut slice = rig.slices().into_iter().find(|slice| slice.spec.devices.is_some()).unwrap();
        slice.spec.devices.as_mut().unwrap().truncate(1);
        let mut slice = serde_json::to_value(slice).unwrap();
        slice["apiVersion"] = json!("resource.k8s.io/v1");
        slice["kind"] = json!("ResourceSlice");
        rig.api.put(slice);
    };
    let mut waits = Vec::new();
    for _ in 0..7 {
        edit();
        waits.push(rig.until_there(|_| rig.names() == good).await.as_secs());
    }
    assert_eq!(waits, [1, 2, 4, 8, 16, 30, 30]);
}

#[tokio::test(start_paused = true)]
async fn a_new_inventory_is_published_at_once() {
    let mut rig = Rig::published(inventory_of(H100, 2)).await;
    let start = Instant::now();
    let mut inventory = inventory_of(H100, 2);
    inventory.gpus[1].presence = Presence::Missing;
    rig.inventory.send(Arc::new(inventory)).unwrap();
    rig.until(|published| published.generation == 2).await;
    assert!(start.elapsed() < Duration::from_millis(100));
    assert_eq!(rig.devices().iter().filter(|device| device.taints.is_some()).count(), 28);
}

#[tokio::test(start_paused = true)]
async fn a_taint_keeps_the_time_at_which_it_was_added() {
    let mut inventory = inventory_of(H100, 2);
    inventory.gpus[1].presence = Presence::Missing;
    let mut rig = Rig::published(inventory.clone()).await;
    let times = |rig: &Rig| -> Vec<_> {
        let taints = rig.devices().into_iter().flat_map(|device| device.taints.unwrap_or_default());
        taints
            .map(|taint| (taint.key, taint.time_added))
            .filter(|(key, _)| key.ends_with("missing"))
            .collect()
    };
    // The server would write its own time into a taint that comes without one.
    let mut slices = rig.slices();
    for slice in &mut slices {
        for taint in
            slice.spec.devices.iter_mut().flatten().flat_map(|device| device.taints.iter_mut().flatten())
        {
            taint.time_added = serde_json::from_str("\"2026-01-01T00:00:00Z\"").unwrap();
        }
        let mut slice = serde_json::to_value(&slice).unwrap();
        slice["apiVersion"] = json!("resource.k8s.io/v1");
        slice["kind"] = json!("ResourceSlice");
        rig.api.put(slice);
    }
    let before = times(&rig);
    sleep(Duration::from_secs(60)).await;
    inventory.gpus[0].presence = Presence::Missing;
    rig.inventory.send(Arc::new(inventory)).unwrap();
    rig.until(|published| published.generation == 2).await;
    let kept = times(&rig).into_iter().filter(|taint| before.contains(taint)).count();
    assert_eq!(kept, before.len());
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_is_away_for_an_hour_is_waited_for() {
    let mut rig = Rig::published(inventory_of(H100, 1)).await;
    rig.api.set_unavailable(true);
    rig.until(|published| published.error.is_some()).await;
    sleep(Duration::from_secs(3600)).await;
    rig.inventory.send(Arc::new(inventory_of(H100, 2))).unwrap();
    rig.api.set_unavailable(false);
    let back = Instant::now();
    rig.until(|published| published.in_sync && published.devices == 56).await;
    assert!(back.elapsed() <= Duration::from_secs(6), "{:?}", back.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_is_late_or_answers_503_is_waited_for() {
    let api = api().await;
    api.set_outage(Some(divvy_fakes::apiserver::Outage::Answer503));
    let mut rig = Rig::start(api, inventory_of(H100, 1));
    rig.until(|published| published.error.is_some()).await;
    rig.api.set_outage(None);
    rig.until(|published| published.in_sync).await;
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_lost_its_place_starts_anew() {
    let rig = Rig::published(inventory_of(H100, 1)).await;
    rig.api.forget_history();
    sleep(Duration::from_secs(10)).await;
    rig.api.delete_all::<ResourceSlice>();
    rig.until_there(complete).await;
}

#[tokio::test(start_paused = true)]
async fn a_conflict_is_read_again() {
    let mut rig = Rig::published(inventory_of(H100, 2)).await;
    rig.api.fail_next("update", "resourceslices", 2, 409);
    let mut inventory = inventory_of(H100, 2);
    inventory.gpus[0].presence = Presence::Missing;
    rig.inventory.send(Arc::new(inventory)).unwrap();
    rig.until(|published| published.in_sync && published.generation == 2).await;
    assert!(complete(&rig.slices()));
}

#[tokio::test(start_paused = true)]
async fn a_write_that_fails_half_way_is_completed() {
    let api = api().await;
    for code in [500, 429, 403] {
        api.fail_next("create", "resourceslices", 1, code);
    }
    let mut rig = Rig::start(api, inventory_of(H100, 4));
    rig.until(|published| published.in_sync).await;
    assert!(complete(&rig.slices()));
}

#[tokio::test(start_paused = true)]
async fn a_refusal_is_not_repeated_in_haste() {
    let mut rig = Rig::published(inventory_of(H100, 1)).await;
    rig.api.fail_next("update", "resourceslices", 1000, 422);
    let mut inventory = inventory_of(H100, 1);
    inventory.gpus[0].presence = Presence::Missing;
    rig.inventory.send(Arc::new(inventory)).unwrap();
    let error = rig.until(|published| published.error.is_some()).await.error.unwrap();
    assert!(error.contains("refused slice 0000"), "{error}");
    sleep(Duration::from_secs(3600)).await;
    let tries = rig.api.count("update", "resourceslices");
    assert!((2..=15).contains(&tries), "{tries} in an hour");
    // A new inventory is a new chance, at once.
    rig.inventory.send(Arc::new(inventory_of(H100, 1))).unwrap();
    rig.until(|published| published.in_sync).await;
}

#[tokio::test(start_paused = true)]
async fn a_pool_that_would_be_invalid_is_not_sent() {
    let mut rig = Rig::published(inventory_of(H100, 1)).await;
    rig.api.clear_requests();
    let mut inventory = inventory_of(H100, 2);
    inventory.gpus[1].number = inventory.gpus[0].number;
    rig.inventory.send(Arc::new(inventory)).unwrap();
    let error = rig.until(|published| published.error.is_some()).await.error.unwrap();
    assert!(error.contains("is there twice"), "{error}");
    assert!(rig.api.requests().iter().all(|request| !matches!(request.verb, "create" | "update" | "delete")));
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_created_anew_owns_its_slices_again() {
    let rig = Rig::published(inventory_of(H100, 1)).await;
    // The garbage collector takes the slices of a node that is gone.
    rig.api.delete::<Node>("", "worker");
    rig.api.delete_all::<ResourceSlice>();
    sleep(Duration::from_secs(60)).await;
    assert_eq!(rig.slices(), []);
    put_node(&rig.api);
    let uid = rig.api.get::<Node>("", "worker").unwrap().metadata.uid.unwrap();
    rig.until_there(complete).await;
    assert!(rig.slices().iter().all(|slice| slice.metadata.owner_references.as_ref().unwrap()[0].uid == uid));
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_replaced_unseen_adopts_its_slices() {
    let rig = Rig::published(inventory_of(H100, 1)).await;
    put_node(&rig.api);
    let uid = rig.api.get::<Node>("", "worker").unwrap().metadata.uid.unwrap();
    rig.until_there(|slices| {
        slices.iter().all(|slice| slice.metadata.owner_references.as_ref().unwrap()[0].uid == uid)
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_server_without_counters_never_sees_two_devices_that_exclude_each_other() {
    let api = api().await;
    api.set_gates(Gates { partitionable_devices: false, ..Gates::default() });
    let h100 = divvy_sim::catalogue::find(H100).unwrap().row();
    let cut = with_instance(common::gpu(h100, 1), 9, 4, Origin::Ours);
    let mut rig = Rig::start(api, node(vec![common::gpu(h100, 0), cut]));
    let seen = rig.until(|published| published.in_sync).await;
    assert!(seen.degraded.unwrap().contains("does not keep shared counters"));
    assert_eq!(rig.names(), ["gpu-1-mig-3g40gb-9-4", "gpu-0"]);
    // The gate is turned on, and the server replaced for it.
    rig.api.set_gates(Gates::default());
    rig.api.set_version("v1.37.1");
    rig.until(|published| published.degraded.is_none() && published.devices == 56).await;
}

#[tokio::test(start_paused = true)]
async fn a_server_without_consumable_capacity_gets_no_device_that_several_claims_hold() {
    let api = api().await;
    api.set_gates(Gates { consumable_capacity: false, ..Gates::default() });
    let mut rig = Rig::start(api, inventory_of(H100, 2));
    let seen = rig.until(|published| published.in_sync).await;
    assert!(
        seen.degraded
            .unwrap()
            .contains("does not keep consumable capacity (GPUs and MIG instances go to one claim")
    );
    assert_eq!(seen.devices, 52);
    assert!(rig.devices().iter().all(|device| device.consumes_counters.is_some()));
    assert!(rig.names().iter().all(|name| !name.ends_with("timeslice") && !name.ends_with("mps")));
    // The gate is turned on, and the server replaced for it.
    rig.api.set_gates(Gates::default());
    rig.api.set_version("v1.37.1");
    rig.until(|published| published.degraded.is_none() && published.devices == 56).await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_keeps_nothing_new_is_told_of_in_one_sentence() {
    let api = api().await;
    api.set_gates(Gates {
        partitionable_devices: false,
        consumable_capacity: false,
        device_taints: false,
        ..Gates::default()
    });
    let mut rig = Rig::start(api, inventory_of(H100, 2));
    let degraded = rig.until(|published| published.in_sync).await.degraded.unwrap();
    for lack in ["shared counters (", ", nor consumable capacity (", ", nor device taints ("] {
        assert!(degraded.contains(lack), "{degraded}");
    }
    assert_eq!(rig.names(), ["gpu-1", "gpu-0"]);
}

#[tokio::test(start_paused = true)]
async fn a_server_without_taints_gets_no_device_that_needs_one() {
    let api = api().await;
    api.set_gates(Gates { device_taints: false, ..Gates::default() });
    let mut inventory = inventory_of(H100, 2);
    inventory.gpus[0].presence = Presence::Missing;
    let mut rig = Rig::start(api, inventory);
    let seen = rig.until(|published| published.in_sync).await;
    assert!(seen.degraded.unwrap().contains("device taints"));
    assert!(rig.names().iter().all(|name| name.starts_with("gpu-1")));
}

#[tokio::test(start_paused = true)]
async fn fields_that_vanish_behind_the_probe_are_noticed_by_reading_back() {
    let rig = Rig::published(Inventory::default()).await;
    // No reconnect and no new version: only the answers to writes tell.
    rig.api.set_gates(Gates { partitionable_devices: false, ..Gates::default() });
    let mut published = rig.published.clone();
    rig.inventory.send(Arc::new(inventory_of(H100, 1))).unwrap();
    published.wait_for(|published| published.in_sync && published.degraded.is_some()).await.unwrap();
    assert_eq!(rig.names(), ["gpu-0"]);
    let devices =
        rig.api.requests().into_iter().filter(|request| request.verb == "create" && !request.dry_run).count();
    assert!(devices <= 3, "the instances were never sent");
}

#[tokio::test(start_paused = true)]
async fn shares_that_vanish_behind_the_probe_are_noticed_by_reading_back() {
    let rig = Rig::published(Inventory::default()).await;
    rig.api.set_gates(Gates { consumable_capacity: false, ..Gates::default() });
    let mut published = rig.published.clone();
    rig.inventory.send(Arc::new(inventory_of("L4", 1))).unwrap();
    published.wait_for(|published| published.in_sync && published.degraded.is_some()).await.unwrap();
    assert_eq!(rig.names(), ["gpu-0"]);
}

#[tokio::test(start_paused = true)]
async fn devices_stay_published_and_tainted_while_there_is_no_gpu_driver_at_start() {
    let rig = Rig::published(inventory_of(H100, 1)).await;
    let before = rig.names();
    rig.stop.cancel();
    let mut second = Rig::start(rig.api, Inventory::default());
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
async fn stopping_leaves_what_is_published() {
    let mut rig = Rig::published(inventory_of(H100, 1)).await;
    let before = rig.slices();
    rig.stop.cancel();
    rig.published.wait_for(|_| false).await.unwrap_err();
    sleep(Duration::from_secs(60)).await;
    assert_eq!(rig.slices(), before);
}
