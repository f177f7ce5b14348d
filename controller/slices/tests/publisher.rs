//! The publisher seen from the API server alone, so that any server can be the
//! judge: the fake one, or with `DIVVY_TEST_KUBECONFIG=FILE` a real one. What
//! passes on the fake and fails on the real one is a bug of the fake.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use common::{inventory_of, node};
use divvy_fakes::apiserver::FakeApi;
use divvy_model::Inventory;
use divvy_model::inventory::Presence;
use divvy_sim::catalogue;
use divvy_slices::{PublishOptions, Published, run};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};

const H100: &str = "H100-SXM5-80GB";
/// No promise, only an end to waiting.
const PATIENCE: Duration = Duration::from_secs(60);

/// A server and a node of our own on it.
struct World {
    client: kube::Client,
    node: String,
    _fake: Option<FakeApi>,
}

/// A publisher at work; it stops when this is dropped.
struct Publisher {
    inventory: watch::Sender<Arc<Inventory>>,
    published: watch::Receiver<Published>,
    _stop: DropGuard,
}

impl World {
    async fn new(test: &str) -> Self {
        let (client, fake) = FakeApi::or_real().await.unwrap();
        let world = Self { client, node: format!("publisher-{test}"), _fake: fake };
        world.clean().await;
        world.create_node().await;
        world
    }

    fn slices(&self) -> Api<ResourceSlice> {
        Api::all(self.client.clone())
    }

    fn nodes(&self) -> Api<Node> {
        Api::all(self.client.clone())
    }

    fn ours(&self) -> ListParams {
        ListParams::default().fields(&format!("spec.driver=gpu.divvy.dev,spec.nodeName={}", self.node))
    }

    async fn create_node(&self) {
        let node = serde_json::from_value(json!({"metadata": {"name": self.node}})).unwrap();
        self.nodes().create(&PostParams::default(), &node).await.unwrap();
    }

    async fn wipe(&self) {
        self.slices().delete_collection(&DeleteParams::default(), &self.ours()).await.unwrap();
    }

    /// Leaves nothing on a server that outlives the test.
    async fn clean(&self) {
        self.wipe().await;
        let _ = self.nodes().delete(&self.node, &DeleteParams::default()).await;
    }

    async fn there(&self) -> Vec<ResourceSlice> {
        self.slices().list(&self.ours()).await.unwrap().items
    }

    async fn until_there(&self, what: &str, holds: impl Fn(&[ResourceSlice]) -> bool) -> Vec<ResourceSlice> {
        let wait = async {
            loop {
                let there = self.there().await;
                if holds(&there) {
                    return there;
                }
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("no {what}"))
    }

    fn publish(&self, inventory: Inventory) -> Publisher {
        let (inventory, receiver) = watch::channel(Arc::new(inventory));
        let (sender, published) = watch::channel(Published::default());
        let stop = CancellationToken::new();
        let options = PublishOptions::new(&self.node);
        let stopped = stop.clone().cancelled_owned();
        tokio::spawn(run(self.client.clone(), options, receiver, sender, stopped));
        Publisher { inventory, published, _stop: stop.drop_guard() }
    }
}

impl Publisher {
    async fn until(&mut self, holds: impl FnMut(&Published) -> bool) -> Published {
        let waited =
            timeout(PATIENCE, self.published.wait_for(holds)).await.map(|seen| seen.unwrap().clone());
        waited.unwrap_or_else(|_| panic!("still {:?}", *self.published.borrow()))
    }
}

/// One generation and complete: what a scheduler believes.
fn complete(slices: &[ResourceSlice]) -> bool {
    let Some(first) = slices.first() else { return false };
    slices.iter().all(|slice| slice.spec.pool == first.spec.pool)
        && first.spec.pool.resource_slice_count == slices.len() as i64
}

fn devices(slices: &[ResourceSlice]) -> Vec<&Device> {
    slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten()).collect()
}

/// Publishes an inventory to a node that has none and shows that all of it arrived.
async fn check_accepted(test: &str, inventory: Inventory) {
    let world = World::new(test).await;
    let expected: Vec<String> = divvy_slices::pool(&inventory, &Default::default())
        .devices()
        .map(|device| device.name.clone())
        .collect();
    let mut publisher = world.publish(inventory);
    let published = publisher.until(|published| published.error.is_some() || published.in_sync).await;
    assert_eq!((published.error, published.degraded), (None, None));
    let there = world.there().await;
    assert!(complete(&there));
    let mut names: Vec<String> = devices(&there).into_iter().map(|device| device.name.clone()).collect();
    names.sort();
    let mut expected = expected;
    expected.sort();
    assert_eq!(names, expected);
    drop(publisher);
    world.clean().await;
}

#[tokio::test]
async fn sixteen_gpus_with_every_profile_are_accepted() {
    check_accepted("sixteen", inventory_of(H100, 16)).await;
}

#[tokio::test]
async fn one_gpu_of_every_model_is_accepted() {
    let models = catalogue::all().map(catalogue::Model::row).zip(0..);
    check_accepted("models", node(models.map(|(model, number)| common::gpu(model, number)).collect())).await;
}

#[tokio::test]
async fn a_second_publisher_finds_nothing_to_do() {
    let world = World::new("second").await;
    let mut inventory = node(vec![]);
    inventory.gpus = [H100, "A30-24GB", "L4"]
        .iter()
        .zip(0..)
        .map(|(key, n)| common::gpu(catalogue::find(key).unwrap().row(), n))
        .collect();
    world.publish(inventory.clone()).until(|published| published.in_sync).await;
    let before = world.there().await;
    let seen = world.publish(inventory).until(|published| published.in_sync).await;
    assert_eq!((seen.writes, seen.generation), (0, 1));
    assert_eq!(world.there().await, before);
    world.clean().await;
}

#[tokio::test]
async fn wiped_slices_come_back_with_the_same_devices() {
    let world = World::new("wiped").await;
    let mut publisher = world.publish(inventory_of(H100, 4));
    publisher.until(|published| published.in_sync).await;
    let before = world.there().await;
    world.wipe().await;
    let again = world
        .until_there("new pool", |there| complete(there) && there[0].metadata.uid != before[0].metadata.uid)
        .await;
    assert_eq!(devices(&again), devices(&before));
    assert!(again[0].spec.pool.generation > before[0].spec.pool.generation);
    drop(publisher);
    world.clean().await;
}

#[tokio::test]
async fn a_foreign_edit_is_repaired_in_place() {
    let world = World::new("edited").await;
    let mut publisher = world.publish(inventory_of(H100, 1));
    publisher.until(|published| published.in_sync).await;
    let before = world.there().await;
    let mut edited = before.iter().find(|slice| slice.spec.devices.is_some()).unwrap().clone();
    edited.spec.devices.as_mut().unwrap().truncate(1);
    let name = edited.metadata.name.clone().unwrap();
    world.slices().replace(&name, &PostParams::default(), &edited).await.unwrap();
    let after = world.until_there("repair", |there| devices(there) == devices(&before)).await;
    assert_eq!(after[0].spec.pool.generation, before[0].spec.pool.generation);
    drop(publisher);
    world.clean().await;
}

#[tokio::test]
async fn a_gpu_that_goes_is_tainted_once_and_one_that_comes_back_is_clean() {
    let world = World::new("tainted").await;
    let mut publisher = world.publish(inventory_of(H100, 2));
    publisher.until(|published| published.in_sync).await;
    let tainted =
        |there: &[ResourceSlice]| devices(there).iter().filter(|device| device.taints.is_some()).count();
    let mut inventory = inventory_of(H100, 2);
    inventory.gpus[1].presence = Presence::Missing;
    publisher.inventory.send(Arc::new(inventory.clone())).unwrap();
    let first = world.until_there("taints", |there| complete(there) && tainted(there) == 28).await;
    // Something else changes: the time of a taint that stays is that of its birth.
    sleep(Duration::from_millis(1100)).await;
    inventory.gpus[0].product.push_str(" (renamed)");
    publisher.inventory.send(Arc::new(inventory)).unwrap();
    let generation = first[0].spec.pool.generation;
    let second = world
        .until_there("rename", |there| complete(there) && there[0].spec.pool.generation > generation)
        .await;
    let taints =
        |there: &[ResourceSlice]| devices(there).into_iter().map(|d| d.taints.clone()).collect::<Vec<_>>();
    assert_eq!(taints(&first), taints(&second));
    publisher.inventory.send(Arc::new(inventory_of(H100, 2))).unwrap();
    world.until_there("clean devices", |there| complete(there) && tainted(there) == 0).await;
    drop(publisher);
    world.clean().await;
}

#[tokio::test]
async fn a_node_that_is_created_anew_owns_the_slices() {
    let world = World::new("renewed").await;
    let mut publisher = world.publish(inventory_of(H100, 1));
    publisher.until(|published| published.in_sync).await;
    world.nodes().delete(&world.node, &DeleteParams::default()).await.unwrap();
    world.create_node().await;
    let uid = world.nodes().get(&world.node).await.unwrap().metadata.uid.unwrap();
    // As the garbage collector does with what a node leaves behind; a real one may be faster.
    if let Some(orphan) = world.there().await.first().and_then(|slice| slice.metadata.name.clone()) {
        match world.slices().delete(&orphan, &DeleteParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            deleted => drop(deleted.unwrap()),
        }
    }
    let owned =
        |slice: &ResourceSlice| slice.metadata.owner_references.as_ref().is_some_and(|o| o[0].uid == uid);
    world.until_there("adoption", |there| complete(there) && there.iter().all(owned)).await;
    drop(publisher);
    world.clean().await;
}
