//! `NodePrepareResources` calls.

use crate::harness::{DRIVER, H100, NODE, TestNode, until};
use serde_json::{Value, json};

const SLICE: &str = "gpu-0-mig-1g10gb-19-2";

#[tokio::test]
async fn prepare_returns_the_devices_and_is_idempotent() {
    let node = TestNode::new("2xH100-SXM5-80GB").await;
    let _daemon = node.start_daemon(&[]).await;
    let claim = node.claim("a", &[SLICE, "gpu-1"]);
    let devices = node.prepare(&claim).await.unwrap();
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
    node.expect_hardware(&["mig 19@2", "off"]);
    assert_eq!(node.prepare(&claim).await.unwrap(), devices);
    assert!(node.cdi_dir().join("gpu.divvy.dev-claim_a.json").exists());
}

#[tokio::test]
async fn claims_of_one_call_succeed_or_fail_independently() {
    let node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&[]).await;
    let good = node.claim("good", &[SLICE]);
    let claims = [
        good.clone(),
        good,
        node.claim("unknown", &["gpu-7"]),
        crate::harness::claim_ref("gone"),
        node.claim("other", &["gpu-0-mig-1g10gb-19-3"]),
    ];
    let outcomes = node.kubelet.prepare(DRIVER, &claims).await.unwrap();
    let ok: Vec<_> = outcomes.iter().map(|(uid, outcome)| (uid.as_str(), outcome.is_ok())).collect();
    assert_eq!(ok, [("gone", false), ("good", true), ("other", true), ("unknown", false)]);
    node.expect_hardware(&["mig 19@2 19@3"]);
}

#[tokio::test]
async fn failed_prepare_succeeds_once_the_cause_is_gone() {
    let node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&[]).await;
    let claim = node.claim("a", &[SLICE]);
    node.fail_call("nvmlDeviceCreateGpuInstanceWithPlacement", Some(1));
    let error = node.prepare(&claim).await.unwrap_err();
    assert!(error.contains("claim ns/a"), "{error}");
    node.expect_hardware(&["off"]);
    node.prepare_until_ok(&claim).await;
    node.expect_hardware(&["mig 19@2"]);
}

#[tokio::test]
async fn hung_call_is_answered_in_time_and_delays_no_other_gpu() {
    let node = TestNode::new("2xH100-SXM5-80GB").await;
    let _daemon = node.start_daemon(&["--nvml-create-timeout", "500ms"]).await;
    let (stuck, other) = (node.claim("a", &[SLICE]), node.claim("b", &["gpu-1"]));
    node.hold_call("nvmlDeviceCreateGpuInstanceWithPlacement");
    let (stuck_answer, other_answer) = tokio::join!(node.prepare(&stuck), async {
        node.wait_call_held().await;
        node.prepare(&other).await
    });
    let error = stuck_answer.unwrap_err();
    assert!(error.contains("claim ns/a"), "{error}");
    other_answer.unwrap();
    // While the call hangs, a retry is refused at once and changes nothing.
    node.prepare(&stuck).await.unwrap_err();
    node.clear_faults();
    node.prepare_until_ok(&stuck).await;
    node.expect_hardware(&["mig 19@2", "off"]);
}

#[tokio::test]
async fn hung_call_is_answered_before_the_kubelet_timeout() {
    let node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&[]).await;
    let claim = node.claim("a", &[SLICE]);
    node.hold_call("nvmlDeviceCreateGpuInstanceWithPlacement");
    // The fake kubelet cancels the call after 45 s, as the real one does.
    node.prepare(&claim).await.unwrap_err();
    node.clear_faults();
    node.prepare_until_ok(&claim).await;
}

#[tokio::test]
async fn cancelled_kubelet_call_does_not_interrupt_prepare() {
    let mut node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&[]).await;
    let claim = node.claim("a", &[SLICE]);
    node.hold_call("nvmlDeviceCreateGpuInstanceWithPlacement");
    {
        let call = node.prepare(&claim);
        tokio::select! {
            _ = call => panic!("the call was held"),
            () = node.wait_call_held() => {}
        }
    }
    node.kubelet.restart();
    node.clear_faults();
    until("the claim is prepared", || node.claim_files().len() == 2).await;
    node.expect_hardware(&["mig 19@2"]);
    node.kubelet.wait_registered(DRIVER, 1, crate::harness::WAIT_TIMEOUT).await.unwrap();
    node.prepare(&claim).await.unwrap();
    node.expect_hardware(&["mig 19@2"]);
}

#[tokio::test]
async fn prepared_claim_is_answered_without_the_api_server() {
    let node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&["--read-timeout", "300ms"]).await;
    let (prepared, fresh) = (node.claim("a", &[SLICE]), node.claim("b", &["gpu-0-mig-1g10gb-19-3"]));
    let devices = node.prepare_until_ok(&prepared).await;
    node.api.set_unavailable(true);
    assert_eq!(node.prepare(&prepared).await.unwrap(), devices);
    let error = node.prepare(&fresh).await.unwrap_err();
    assert!(error.contains("claim ns/b"), "{error}");
    node.api.set_unavailable(false);
    node.prepare_until_ok(&fresh).await;
}

#[tokio::test]
async fn claims_survive_a_kill_and_a_reboot() {
    let node = TestNode::new(H100).await;
    let daemon = node.start_daemon(&[]).await;
    let claim = node.claim("a", &[SLICE]);
    let devices = node.prepare(&claim).await.unwrap();
    daemon.kill();
    // A reboot removes the CDI file from /run. The kubelet does not prepare the claim again.
    std::fs::remove_file(node.cdi_dir().join("gpu.divvy.dev-claim_a.json")).unwrap();
    node.update_sim(divvy_sim::State::reboot);
    node.expect_hardware(&["off"]);
    let _daemon = node.spawn_daemon(&[]);
    until("the claim's instance is restored", || node.hardware() == ["mig 19@2"]).await;
    until("its CDI file is restored", || node.claim_files().len() == 2).await;
    assert_eq!(node.prepare_until_ok(&claim).await, devices);
}

/// As in a pod, the daemon sees the GPU driver's root at another path than the container runtime.
#[tokio::test]
async fn cdi_file_holds_host_paths_without_the_prefix() {
    let node = TestNode::new(H100).await;
    let prefix = node.sim.root().parent().unwrap().to_str().unwrap().to_owned();
    let root = format!("/{}", node.sim.root().file_name().unwrap().to_str().unwrap());
    let flags = ["--host-prefix", &prefix, "--driver-root", &root, "--dev-root", &root];
    let _daemon = node.start_daemon(&flags).await;
    node.prepare(&node.claim("a", &[SLICE])).await.unwrap();
    let file = node.cdi_dir().join("gpu.divvy.dev-claim_a.json");
    let file: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let mounts = file["containerEdits"]["mounts"].as_array().unwrap();
    let paths = mounts.iter().map(|mount| mount["hostPath"].as_str().unwrap());
    let outside: Vec<_> = paths.filter(|path| !path.starts_with(&root)).collect();
    let own = node.cdi_dir().join("gpu.divvy.dev-claim_a.json");
    assert!(mounts.len() > 1 && outside == [own.to_str().unwrap()], "{outside:?}");
}

#[tokio::test]
async fn container_can_read_its_device_metadata() {
    let node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&[]).await;
    let result = |request: &str, device: &str| {
        let (driver, pool) = (DRIVER, NODE);
        json!({"request": request, "driver": driver, "pool": pool, "device": device})
    };
    let results = vec![result("a/small", "gpu-0-mig-1g10gb-19-0"), result("b", "gpu-0-mig-1g10gb-19-1")];
    let claim = node.claim_with("c", results, json!([]));
    node.prepare(&claim).await.unwrap();
    let cdi = node.cdi_dir().join("gpu.divvy.dev-claim_c.json");
    let document: Value = serde_json::from_slice(&std::fs::read(&cdi).unwrap()).unwrap();
    let mounts: Vec<&Value> =
        document["devices"].as_array().unwrap().iter().map(|d| &d["containerEdits"]["mounts"][0]).collect();
    let container = |request| {
        format!(
            "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/c/{request}/\
             gpu.divvy.dev-metadata.json"
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
    node.unprepare(&claim).await.unwrap();
    assert!(std::fs::read_dir(node.state_dir().join("metadata")).unwrap().next().is_none());
}
