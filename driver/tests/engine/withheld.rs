//! CDI files of claims while their GPUs are missing, while NVML is closed, and after minors changed.

use super::test_node::{Driver, H100, TestNode, until};
use divvy_model::inventory::Presence;
use divvy_sim::control::{Pattern, When};
use divvy_sim::{Code, State};
use serde_json::Value;

const L4S: &str = "2xL4";
const SLICE: &str = "gpu-0-mig-1g10gb-19-2";

impl TestNode {
    fn change(&self, change: impl FnOnce(&mut State)) {
        self.sim
            .update(|state| {
                change(state);
                Ok(())
            })
            .unwrap();
    }

    /// The GPU nodes in the claim's CDI file; `None` without a file.
    fn gpu_nodes(&self, claim: &str) -> Option<Vec<String>> {
        let file: Value = serde_json::from_slice(&std::fs::read(self.cdi_file(claim)).ok()?).unwrap();
        let devices = file["devices"].as_array().unwrap().iter();
        let nodes = devices.flat_map(|it| it["containerEdits"]["deviceNodes"].as_array().unwrap());
        let paths = nodes.map(|node| node["path"].as_str().unwrap().to_owned());
        Some(paths.filter(|path| !path.contains("cap")).collect())
    }

    /// Checks the GPU node in the CDI files of claims a and b.
    #[track_caller]
    fn expect_nodes(&self, a: Option<&str>, b: Option<&str>) {
        let nodes = |node: Option<&str>| node.map(|node| vec![node.to_owned()]);
        assert_eq!((self.gpu_nodes("a"), self.gpu_nodes("b")), (nodes(a), nodes(b)));
    }

    /// Starts a driver with two claims: a on GPU 0 and b on GPU 1.
    async fn start_with_two_claims(&self) -> Driver {
        let driver = self.start_driver().await;
        driver.prepare("a", "gpu-0").await.unwrap();
        driver.prepare("b", "gpu-1").await.unwrap();
        self.expect_nodes(Some("/dev/nvidia0"), Some("/dev/nvidia1"));
        driver
    }

    async fn until_nodes(&self, a: Option<&str>, b: Option<&str>) {
        let nodes = |node: Option<&str>| node.map(|node| vec![node.to_owned()]);
        let expected = (nodes(a), nodes(b));
        until("the CDI files have the nodes", || (self.gpu_nodes("a"), self.gpu_nodes("b")) == expected)
            .await;
    }
}

/// Checks that no prepare answers for the claim.
async fn expect_withheld(driver: &Driver, claim: &str, device: &str) {
    assert!(driver.engine.prepared(&claim.into()).is_none());
    driver.expect_refused(claim, device, "is missing, or was not read since the node started").await;
}

#[tokio::test]
async fn h1_claim_of_a_dead_gpu_gets_no_node_of_its_neighbour() {
    let node = TestNode::new(L4S);
    let driver = node.start_with_two_claims().await;
    let answer = driver.prepare("a", "gpu-0").await.unwrap();
    driver.stop().await;
    node.change(|state| {
        state.lose(0, false).unwrap();
        state.reboot();
    });

    let driver = node.start_driver().await;
    assert_eq!(driver.report.failed.len(), 1, "{:?}", driver.report);
    node.expect_nodes(None, Some("/dev/nvidia0"));
    expect_withheld(&driver, "a", "gpu-0").await;
    assert!(driver.engine.prepared(&"b".into()).is_some());
    node.expect_nodes(None, Some("/dev/nvidia0"));

    // The GPU comes back, under a free minor.
    node.change(|state| {
        state.find(0).unwrap();
        state.gpus[0].missing = false;
        state.gpus[0].minor = 1;
    });
    node.until_nodes(Some("/dev/nvidia1"), Some("/dev/nvidia0")).await;
    assert_eq!(driver.prepare("a", "gpu-0").await.unwrap(), answer);
    for claim in ["a", "b"] {
        driver.unprepare(claim).await.unwrap();
    }
    node.expect_no_claim_files();
}

#[tokio::test]
async fn h1_files_are_withheld_after_a_reboot_without_nvml() {
    let node = TestNode::new(L4S);
    node.start_with_two_claims().await.stop().await;
    let (library, aside) = (node.sim.root().join("usr/lib"), node.sim.root().join("aside"));
    std::fs::rename(&library, &aside).unwrap();
    node.reboot_gpus();
    let driver = node.start_driver().await;
    node.expect_nodes(None, None);
    expect_withheld(&driver, "a", "gpu-0").await;
    std::fs::rename(&aside, &library).unwrap();
    node.until_nodes(Some("/dev/nvidia0"), Some("/dev/nvidia1")).await;
    assert!(driver.engine.prepared(&"a".into()).is_some());
}

#[tokio::test]
async fn h1_containers_restart_while_the_gpu_driver_is_upgraded() {
    let node = TestNode::new(&format!("2x{H100}"));
    let driver = node.start_driver().await;
    let answers = [driver.prepare("a", SLICE).await.unwrap(), driver.prepare("b", "gpu-1").await.unwrap()];
    let files = || ["a", "b"].map(|claim| std::fs::read(node.cdi_file(claim)).unwrap());
    let before = files();
    let check = async |driver: &Driver| {
        for (claim, device, answer) in [("a", SLICE, &answers[0]), ("b", "gpu-1", &answers[1])] {
            assert_eq!(driver.prepare(claim, device).await.unwrap(), *answer);
        }
        assert_eq!(files(), before);
        driver.expect_refused("c", "gpu-0-mig-1g10gb-19-3", "the GPU driver is not loaded").await;
    };
    driver.gpus.drain().await;
    check(&driver).await;
    node.change(|state| state.modules.nvidia = false);
    check(&driver).await;
    driver.stop().await;

    // A driver that starts now has never opened NVML.
    let driver = node.start_driver().await;
    assert!(driver.report.failed.is_empty(), "{:?}", driver.report);
    check(&driver).await;
    node.change(|state| state.modules.nvidia = true);
    until("NVML is open", || {
        let inventory = driver.gpus.inventory().borrow().clone();
        inventory.gpus.iter().all(|gpu| gpu.presence == Presence::Present)
    })
    .await;
    assert_eq!(files(), before);
    for (claim, device, answer) in [("a", SLICE, &answers[0]), ("b", "gpu-1", &answers[1])] {
        assert_eq!(driver.prepare(claim, device).await.unwrap(), *answer);
    }
}

#[tokio::test]
async fn h1_files_follow_gpus_that_leave_and_return() {
    let node = TestNode::new(L4S);
    let driver = node.start_with_two_claims().await;
    node.change(|state| state.gpus[0].missing = true);
    node.until_nodes(None, Some("/dev/nvidia1")).await;
    until("the claim waits for its GPU", || driver.engine.prepared(&"a".into()).is_none()).await;
    expect_withheld(&driver, "a", "gpu-0").await;
    node.change(|state| state.gpus[0].missing = false);
    node.until_nodes(Some("/dev/nvidia0"), Some("/dev/nvidia1")).await;
}

#[tokio::test]
async fn h1_changed_minors_are_written_at_once() {
    let node = TestNode::new(L4S);
    let driver = node.start_with_two_claims().await;
    driver.gpus.drain().await;
    node.change(|state| state.modules.nvidia = false);
    node.expect_nodes(Some("/dev/nvidia0"), Some("/dev/nvidia1"));
    // The new driver numbers the GPUs in another order.
    node.change(|state| {
        state.modules.nvidia = true;
        (state.gpus[0].minor, state.gpus[1].minor) = (1, 0);
    });
    node.until_nodes(None, None).await;
    expect_withheld(&driver, "a", "gpu-0").await;
    driver.gpus.resume();
    node.until_nodes(Some("/dev/nvidia1"), Some("/dev/nvidia0")).await;
}

/// Checks that the file of a MIG claim is withheld while its restoration fails.
async fn check_unrestored(change: impl FnOnce(&mut State)) {
    let node = TestNode::new(&format!("2x{H100}"));
    let driver = node.start_driver().await;
    driver.prepare("a", "gpu-1-mig-1g10gb-19-2").await.unwrap();
    driver.stop().await;
    node.change(|state| {
        change(state);
        for call in ["nvmlDeviceSetMigMode", "nvmlDeviceCreateGpuInstanceWithPlacement"] {
            state.add_fault(Pattern::new(call), None, When::Before, Code::Unknown);
        }
    });
    let driver = node.start_driver().await;
    node.expect_nodes(None, None);
    node.change(|state| state.clear_faults(None));
    driver.prepare("a", "gpu-1-mig-1g10gb-19-2").await.unwrap();
    let minor = node.sim.read().unwrap().gpus[1].minor;
    node.expect_nodes(Some(&format!("/dev/nvidia{minor}")), None);
}

#[tokio::test]
async fn h1_file_is_withheld_while_a_reboot_is_not_restored() {
    check_unrestored(|state| {
        state.lose(0, false).unwrap();
        state.reboot();
    })
    .await;
}

#[tokio::test]
async fn h1_file_is_withheld_while_its_instance_is_gone() {
    check_unrestored(|state| state.reset(1, true).unwrap()).await;
}
