//! Conformance of the publisher, checked only through the API: on the fake API server, or on a
//! real one with `DIVVY_TEST_KUBECONFIG=FILE`. A test that fails only on the real server shows a
//! bug of the fake.
#![allow(clippy::unwrap_used, reason = "test helpers")]

mod common;

use common::{inventory_of, is_observer};
use divvy_catalogue as catalogue;
use divvy_fakes::apiserver::FakeApi;
use divvy_model::Inventory;
use divvy_model::inventory::Presence;
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
/// Time limit of every wait.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// An API server with a Node object for the test.
struct TestNode {
    client: kube::Client,
    node: String,
    _fake: Option<FakeApi>,
}

/// A running publisher. It stops when it is dropped.
struct Publisher {
    inventory: watch::Sender<Arc<Inventory>>,
    published: watch::Receiver<Published>,
    _stop: DropGuard,
}

impl TestNode {
    async fn new(test: &str) -> Self {
        let (client, fake) = FakeApi::or_real().await.unwrap();
        let node = Self { client, node: format!("publisher-{test}"), _fake: fake };
        node.clean().await;
        node.create_node().await;
        node
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

    /// Deletes all objects of the test, for servers that outlive it.
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
        timeout(WAIT_TIMEOUT, wait).await.unwrap_or_else(|_| panic!("no {what}"))
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
            timeout(WAIT_TIMEOUT, self.published.wait_for(holds)).await.map(|seen| seen.unwrap().clone());
        waited.unwrap_or_else(|_| panic!("still {:?}", *self.published.borrow()))
    }
}

/// Whether the slices form one complete generation, which a scheduler requires.
fn complete(slices: &[ResourceSlice]) -> bool {
    let Some(first) = slices.first() else { return false };
    slices.iter().all(|slice| slice.spec.pool == first.spec.pool)
        && first.spec.pool.resource_slice_count == slices.len() as i64
}

fn devices(slices: &[ResourceSlice]) -> Vec<&Device> {
    let devices = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
    devices.filter(|device| !is_observer(&device.name)).collect()
}

/// Publishes an inventory on a new node and checks that every device arrived.
async fn check_accepted(test: &str, inventory: Inventory) {
    let node = TestNode::new(test).await;
    let expected: Vec<String> = divvy_slices::pool(&inventory, &Default::default())
        .devices()
        .map(|device| device.name.clone())
        .filter(|device| !is_observer(device))
        .collect();
    let mut publisher = node.publish(inventory);
    let published = publisher.until(|published| published.error.is_some() || published.in_sync).await;
    assert_eq!((published.error, published.degraded), (None, None));
    let there = node.there().await;
    assert!(complete(&there));
    let mut names: Vec<String> = devices(&there).into_iter().map(|device| device.name.clone()).collect();
    names.sort();
    let mut expected = expected;
    expected.sort();
    assert_eq!(names, expected);
    drop(publisher);
    node.clean().await;
}

#[tokio::test]
async fn sixteen_gpus_with_every_profile_are_accepted() {
    check_accepted("sixteen", inventory_of(H100, 16)).await;
}

#[tokio::test]
async fn one_gpu_of_every_model_is_accepted() {
    let models = catalogue::all().map(catalogue::Model::row).zip(0..);
    check_accepted(
        "models",
        common::node(models.map(|(model, number)| common::gpu(model, number)).collect()),
    )
    .await;
}

#[tokio::test]
async fn second_publisher_has_nothing_to_write() {
    let node = TestNode::new("second").await;
    let mut inventory = common::node(vec![]);
    inventory.gpus = [H100, "A30-24GB", "L4"]
        .iter()
        .zip(0..)
        .map(|(key, n)| common::gpu(catalogue::find(key).unwrap().row(), n))
        .collect();
    node.publish(inventory.clone()).until(|published| published.in_sync).await;
    let before = node.there().await;
    let seen = node.publish(inventory).until(|published| published.in_sync).await;
    assert_eq!((seen.writes, seen.generation), (0, 1));
    assert_eq!(node.there().await, before);
    node.clean().await;
}

#[tokio::test]
async fn deleted_slices_return_with_the_same_devices() {
    let node = TestNode::new("wiped").await;
    let mut publisher = node.publish(inventory_of(H100, 4));
    publisher.until(|published| published.in_sync).await;
    let before = node.there().await;
    node.wipe().await;
    let again = node
        .until_there("new pool", |there| complete(there) && there[0].metadata.uid != before[0].metadata.uid)
        .await;
    assert_eq!(devices(&again), devices(&before));
    assert!(again[0].spec.pool.generation > before[0].spec.pool.generation);
    drop(publisher);
    node.clean().await;
}

#[tokio::test]
async fn foreign_edit_is_repaired_in_place() {
    let node = TestNode::new("edited").await;
    let mut publisher = node.publish(inventory_of(H100, 1));
    publisher.until(|published| published.in_sync).await;
    let before = node.there().await;
    let mut edited = before.iter().find(|slice| slice.spec.devices.is_some()).unwrap().clone();
    edited.spec.devices.as_mut().unwrap().truncate(1);
    let name = edited.metadata.name.clone().unwrap();
    node.slices().replace(&name, &PostParams::default(), &edited).await.unwrap();
    let after = node.until_there("repair", |there| devices(there) == devices(&before)).await;
    assert_eq!(after[0].spec.pool.generation, before[0].spec.pool.generation);
    drop(publisher);
    node.clean().await;
}

#[tokio::test]
async fn missing_gpu_is_tainted_until_it_returns() {
    let node = TestNode::new("tainted").await;
    let mut publisher = node.publish(inventory_of(H100, 2));
    publisher.until(|published| published.in_sync).await;
    let tainted =
        |there: &[ResourceSlice]| devices(there).iter().filter(|device| device.taints.is_some()).count();
    let mut inventory = inventory_of(H100, 2);
    inventory.gpus[1].presence = Presence::Missing;
    publisher.inventory.send(Arc::new(inventory.clone())).unwrap();
    let first = node.until_there("taints", |there| complete(there) && tainted(there) == 29).await;
    // Another change: the persisting taints must keep their times.
    sleep(Duration::from_millis(1100)).await;
    inventory.gpus[0].product.push_str(" (renamed)");
    publisher.inventory.send(Arc::new(inventory)).unwrap();
    let generation = first[0].spec.pool.generation;
    let second = node
        .until_there("rename", |there| complete(there) && there[0].spec.pool.generation > generation)
        .await;
    let taints =
        |there: &[ResourceSlice]| devices(there).into_iter().map(|d| d.taints.clone()).collect::<Vec<_>>();
    assert_eq!(taints(&first), taints(&second));
    publisher.inventory.send(Arc::new(inventory_of(H100, 2))).unwrap();
    node.until_there("clean devices", |there| complete(there) && tainted(there) == 0).await;
    drop(publisher);
    node.clean().await;
}

#[tokio::test]
async fn recreated_node_owns_the_slices() {
    let node = TestNode::new("renewed").await;
    let mut publisher = node.publish(inventory_of(H100, 1));
    publisher.until(|published| published.in_sync).await;
    node.nodes().delete(&node.node, &DeleteParams::default()).await.unwrap();
    node.create_node().await;
    let uid = node.nodes().get(&node.node).await.unwrap().metadata.uid.unwrap();
    // Acts as the garbage collector, because the fake has none. A real one may be faster.
    if let Some(orphan) = node.there().await.first().and_then(|slice| slice.metadata.name.clone()) {
        match node.slices().delete(&orphan, &DeleteParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            deleted => drop(deleted.unwrap()),
        }
    }
    let owned =
        |slice: &ResourceSlice| slice.metadata.owner_references.as_ref().is_some_and(|o| o[0].uid == uid);
    node.until_there("adoption", |there| complete(there) && there.iter().all(owned)).await;
    drop(publisher);
    node.clean().await;
}
