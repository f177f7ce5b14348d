//! What an administrator says of a class holds for the shares that are there.

use crate::harness::{DRIVER, H100, NODE, World, until};
use divvy_pages::{Compute, Policy};
use serde_json::{Value, json};

/// Class `batch` with that ShareConfig.
fn set_class(world: &World, config: Value) {
    let mut parameters = json!({"apiVersion": "resource.divvy.dev/v1alpha1", "kind": "ShareConfig"});
    parameters.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
    world.api.put(json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": "batch"},
        "spec": {"config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}]},
    }));
}

fn policy(world: &World) -> Option<Policy> {
    let page = std::fs::read(world.run_dir().join("shares/a/s-1/policy")).ok()?;
    Some(Policy::decode(&page).unwrap().1)
}

fn compute(world: &World) -> Option<Compute> {
    policy(world).map(|policy| policy.compute)
}

#[tokio::test]
async fn a_class_that_is_changed_changes_the_shares_that_are_there() {
    let world = World::up(H100).await;
    set_class(&world, json!({"ceiling": 60}));
    let daemon = world.start(&[]).await;
    let allocated =
        json!({"apiVersion": "resource.divvy.dev/v1alpha1", "kind": "ShareConfig", "ceiling": 40});
    world.api.put(json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": "ns", "name": "a", "uid": "a"},
        "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "batch"}}]}},
        "status": {"allocation": {"devices": {
            "results": [{
                "request": "r", "driver": DRIVER, "pool": NODE, "device": "gpu-0", "shareID": "s-1",
                "consumedCapacity": {"memory": "10Gi", "cores": "30"},
            }],
            "config": [{
                "source": "FromClass", "requests": ["r"],
                "opaque": {"driver": DRIVER, "parameters": allocated},
            }],
        }}},
    }));
    let claim = crate::harness::reference("a");
    world.prepare_until_ok(&claim).await;
    // The class is followed apart from the kubelet's call.
    until("it goes by the class", || compute(&world).is_some_and(|compute| compute.ceiling == 60)).await;

    set_class(
        &world,
        json!({"ceiling": 80, "weight": 300, "priority": "High", "overcommit": 150, "encoders": 2}),
    );
    let changed = |compute: Compute| (compute.ceiling, compute.weight, compute.priority) == (80, 300, 1);
    until("it goes by the class as it is now", || compute(&world).is_some_and(changed)).await;
    let Policy { memory, codec, .. } = policy(&world).unwrap();
    assert_eq!((codec.encoders, codec.decoders), (Some(2), None));
    assert_eq!((memory.limit, memory.soft), (15 << 30, 10 << 30));

    // What changed while nobody looked.
    drop(daemon);
    set_class(&world, json!({"ceiling": 70}));
    let _daemon = world.start(&[]).await;
    until("the next daemon sees it", || compute(&world).is_some_and(|compute| compute.ceiling == 70)).await;
    assert_eq!(policy(&world).unwrap().memory.limit, 10 << 30);

    // And by the clock: all day but for the minute before midnight, or all day but for the first one.
    let hours = [("00:00", "23:59"), ("00:01", "00:00")];
    let tides: Vec<Value> =
        hours.iter().map(|(from, to)| json!({"from": from, "to": to, "ceiling": 35})).collect();
    set_class(&world, json!({"ceiling": 70, "schedule": tides}));
    until("the hour has its own", || compute(&world).is_some_and(|compute| compute.ceiling == 35)).await;
    // The second daemon's pages come before its registration.
    world.prepare_until_ok(&claim).await;
    world.unprepare(&claim).await.unwrap();
}
