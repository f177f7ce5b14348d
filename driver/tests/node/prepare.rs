//! NodePrepareResources.

use crate::harness::{DRIVER, H100, NODE, World, until};
use serde_json::{Value, json};

const SLICE: &str = "gpu-0-mig-1g10gb-19-2";

#[tokio::test]
async fn a_claim_gets_its_devices_and_the_same_answer_each_time() {
    let world = World::up("2xH100-SXM5-80GB").await;
    let _daemon = world.start(&[]).await;
    let claim = world.claim("a", &[SLICE, "gpu-1"]);
    let devices = world.prepare(&claim).await.unwrap();
    let found: Vec<_> = devices
        .iter()
        .map(|it| {
            (
                it.request_names.join(","),
                it.pool_name.as_str(),
                it.device_name.as_str(),
                it.cdi_device_ids.join(","),
            )
        })
        .collect();
    assert_eq!(
        found,
        [
            ("r0".to_owned(), "node-1", SLICE, format!("gpu.divvy.dev/claim=a-{SLICE}")),
            ("r1".to_owned(), "node-1", "gpu-1", "gpu.divvy.dev/claim=a-gpu-1".to_owned()),
        ]
    );
    world.expect_hardware(&["mig 19@2", "off"]);
    assert_eq!(world.prepare(&claim).await.unwrap(), devices);
    assert!(world.cdi_dir().join("gpu.divvy.dev-claim_a.json").exists());
}

#[tokio::test]
async fn claims_of_one_call_are_answered_each_for_itself() {
    let world = World::up(H100).await;
    let _daemon = world.start(&[]).await;
    let good = world.claim("good", &[SLICE]);
    let claims = [
        good.clone(),
        good,
        world.claim("unknown", &["gpu-7"]),
        crate::harness::reference("gone"),
        world.claim("other", &["gpu-0-mig-1g10gb-19-3"]),
    ];
    let outcomes = world.kubelet.prepare(DRIVER, &claims).await.unwrap();
    let ok: Vec<_> = outcomes.iter().map(|(uid, outcome)| (uid.as_str(), outcome.is_ok())).collect();
    assert_eq!(ok, [("gone", false), ("good", true), ("other", true), ("unknown", false)]);
    world.expect_hardware(&["mig 19@2 19@3"]);
}

#[tokio::test]
async fn a_prepare_that_failed_succeeds_when_the_cause_is_gone() {
    let world = World::up(H100).await;
    let _daemon = world.start(&[]).await;
    let claim = world.claim("a", &[SLICE]);
    world.fault("nvmlDeviceCreateGpuInstanceWithPlacement", Some(1));
    let error = world.prepare(&claim).await.unwrap_err();
    assert!(error.contains("claim ns/a"), "{error}");
    world.expect_hardware(&["off"]);
    world.prepare_until_ok(&claim).await;
    world.expect_hardware(&["mig 19@2"]);
}

#[tokio::test]
async fn a_call_that_hangs_is_answered_in_time_and_delays_no_other_gpu() {
    let world = World::up("2xH100-SXM5-80GB").await;
    let _daemon = world.start(&["--nvml-create-within", "500ms"]).await;
    let (stuck, other) = (world.claim("a", &[SLICE]), world.claim("b", &["gpu-1"]));
    world.hold("nvmlDeviceCreateGpuInstanceWithPlacement");
    let (stuck_answer, other_answer) = tokio::join!(world.prepare(&stuck), async {
        world.wait_held().await;
        world.prepare(&other).await
    });
    let error = stuck_answer.unwrap_err();
    assert!(error.contains("claim ns/a"), "{error}");
    other_answer.unwrap();
    // While the call hangs, a retry is refused at once and changes nothing.
    world.prepare(&stuck).await.unwrap_err();
    world.release();
    world.prepare_until_ok(&stuck).await;
    world.expect_hardware(&["mig 19@2", "off"]);
}

#[tokio::test]
async fn with_default_deadlines_a_hanging_call_is_answered_before_the_kubelet_gives_up() {
    let world = World::up(H100).await;
    let _daemon = world.start(&[]).await;
    let claim = world.claim("a", &[SLICE]);
    world.hold("nvmlDeviceCreateGpuInstanceWithPlacement");
    // The fake kubelet cancels the call after 45 s, as the real one does.
    world.prepare(&claim).await.unwrap_err();
    world.release();
    world.prepare_until_ok(&claim).await;
}

#[tokio::test]
async fn a_kubelet_that_hangs_up_does_not_stop_a_prepare_half_way() {
    let mut world = World::up(H100).await;
    let _daemon = world.start(&[]).await;
    let claim = world.claim("a", &[SLICE]);
    world.hold("nvmlDeviceCreateGpuInstanceWithPlacement");
    {
        let call = world.prepare(&claim);
        tokio::select! {
            _ = call => panic!("the call was held"),
            () = world.wait_held() => {}
        }
    }
    world.kubelet.restart();
    world.release();
    until("the claim is prepared", || world.traces().len() == 2).await;
    world.expect_hardware(&["mig 19@2"]);
    world.kubelet.wait_registered(DRIVER, 1, crate::harness::PATIENCE).await.unwrap();
    world.prepare(&claim).await.unwrap();
    world.expect_hardware(&["mig 19@2"]);
}

#[tokio::test]
async fn a_prepared_claim_is_answered_while_the_api_server_is_away() {
    let world = World::up(H100).await;
    let _daemon = world.start(&["--read-within", "300ms"]).await;
    let (prepared, fresh) = (world.claim("a", &[SLICE]), world.claim("b", &["gpu-0-mig-1g10gb-19-3"]));
    let devices = world.prepare_until_ok(&prepared).await;
    world.api.set_unavailable(true);
    assert_eq!(world.prepare(&prepared).await.unwrap(), devices);
    let error = world.prepare(&fresh).await.unwrap_err();
    assert!(error.contains("claim ns/b"), "{error}");
    world.api.set_unavailable(false);
    world.prepare_until_ok(&fresh).await;
}

#[tokio::test]
async fn a_killed_driver_knows_its_claims_after_the_restart() {
    let world = World::up(H100).await;
    let daemon = world.start(&[]).await;
    let claim = world.claim("a", &[SLICE]);
    let devices = world.prepare(&claim).await.unwrap();
    daemon.kill();
    // Files of a rebooted node's /run are gone; the claim is not prepared again by the kubelet.
    std::fs::remove_file(world.cdi_dir().join("gpu.divvy.dev-claim_a.json")).unwrap();
    world.change(divvy_sim::State::reboot);
    world.expect_hardware(&["off"]);
    let _daemon = world.spawn(&[]);
    until("the claim's instance is there again", || world.hardware() == ["mig 19@2"]).await;
    until("its CDI file is there again", || world.traces().len() == 2).await;
    assert_eq!(world.prepare_until_ok(&claim).await, devices);
}

/// As in a pod: the GPU driver's root is seen elsewhere than the runtime finds it.
#[tokio::test]
async fn what_is_seen_below_a_prefix_is_told_to_the_runtime_as_the_hosts() {
    let world = World::up(H100).await;
    let prefix = world.sim.root().parent().unwrap().to_str().unwrap().to_owned();
    let root = format!("/{}", world.sim.root().file_name().unwrap().to_str().unwrap());
    let flags = ["--host-prefix", &prefix, "--driver-root", &root, "--dev-root", &root];
    let _daemon = world.start(&flags).await;
    world.prepare(&world.claim("a", &[SLICE])).await.unwrap();
    let file = world.cdi_dir().join("gpu.divvy.dev-claim_a.json");
    let file: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let mounts = file["containerEdits"]["mounts"].as_array().unwrap();
    let outside: Vec<_> =
        mounts.iter().filter(|it| !it["hostPath"].as_str().unwrap().starts_with(&root)).collect();
    assert!(!mounts.is_empty() && outside.is_empty(), "{outside:?}");
}

#[tokio::test]
async fn a_container_can_read_what_its_devices_are() {
    let world = World::up(H100).await;
    let _daemon = world.start(&[]).await;
    let result = |request: &str, device: &str| json!({"request": request, "driver": DRIVER, "pool": NODE, "device": device});
    let results = vec![result("a/small", "gpu-0-mig-1g10gb-19-0"), result("b", "gpu-0-mig-1g10gb-19-1")];
    let claim = world.claim_with("c", results, json!([]));
    world.prepare(&claim).await.unwrap();
    let cdi = world.cdi_dir().join("gpu.divvy.dev-claim_c.json");
    let document: Value = serde_json::from_slice(&std::fs::read(&cdi).unwrap()).unwrap();
    let mounts: Vec<&Value> =
        document["devices"].as_array().unwrap().iter().map(|d| &d["containerEdits"]["mounts"][0]).collect();
    let container = |request| {
        format!(
            "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/c/{request}/gpu.divvy.dev-metadata.json"
        )
    };
    assert_eq!(mounts[0]["containerPath"], container("a"));
    assert_eq!(mounts[1]["containerPath"], container("b"));
    let text = std::fs::read_to_string(mounts[0]["hostPath"].as_str().unwrap()).unwrap();
    let versions: Vec<Value> =
        serde_json::Deserializer::from_str(&text).into_iter().collect::<Result<_, _>>().unwrap();
    assert_eq!(versions.len(), 2);
    for (object, version) in versions.iter().zip(["v1beta1", "v1alpha1"]) {
        assert_eq!(object["apiVersion"], format!("metadata.resource.k8s.io/{version}"));
        assert_eq!(
            (&object["metadata"]["uid"], &object["requests"][0]["name"]),
            (&json!("c"), &json!("a/small"))
        );
        let device = &object["requests"][0]["devices"][0];
        assert_eq!(device["name"], "gpu-0-mig-1g10gb-19-0");
        assert_eq!(device["attributes"]["profile"], json!({"string": "1g.10gb"}));
    }
    world.unprepare(&claim).await.unwrap();
    assert!(std::fs::read_dir(world.state_dir().join("metadata")).unwrap().next().is_none());
}
