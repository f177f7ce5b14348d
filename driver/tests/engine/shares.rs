//! Memory shares of GPUs and MIG instances: their limits and their pages.

use super::test_node::{Driver, H100, TestNode};
use divvy_api::ClaimUid;
use divvy_api::text::error_chain;
use divvy_driver::claims::uses::{self, Owner, Use, Uses};
use divvy_pages::policy::{Policy, SIZE};
use divvy_pages::{GpuUuid, account};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

const TEN_GIB: &str = "share:gpu-0-share=10Gi";
/// A memory share of all of an H100's memory.
const ALL_MEMORY: &str = "share:gpu-0-share=81559Mi";
const SLICE: &str = "share:gpu-0-mig-1g10gb-19-2=4Gi";

impl TestNode {
    fn page(&self, claim: &str, at: usize, name: &str) -> PathBuf {
        self.paths.run_dir.join(format!("shares/{claim}/{claim}-{at}/{name}"))
    }

    #[track_caller]
    fn policy(&self, claim: &str, at: usize) -> Policy {
        Policy::decode(&fs::read(self.page(claim, at, "policy")).unwrap()).unwrap().1
    }

    /// The claims that have pages.
    fn claims_with_pages(&self) -> Vec<String> {
        let dir = self.paths.run_dir.join("shares");
        if dir.exists() { Self::files(&dir) } else { Vec::new() }
    }

    fn reboot(&self) {
        self.reboot_gpus();
        fs::remove_dir_all(&self.paths.run_dir).unwrap();
    }

    fn update_sim(&self, change: impl FnOnce(&mut divvy_sim::State)) {
        let changed = self.sim.update(|state| {
            change(state);
            Ok(())
        });
        changed.unwrap();
    }

    fn mig_uuids(&self) -> Vec<GpuUuid> {
        let state = self.sim.read().unwrap();
        let cis = state.gpus[0].instances.iter().flat_map(|gi| &gi.cis);
        cis.map(|ci| GpuUuid::parse(&ci.uuid).unwrap()).collect()
    }
}

impl Driver {
    async fn expect_prepared(&self, claim: &str, devices: &str) {
        if let Err(error) = self.prepare(claim, devices).await {
            panic!("prepare of {devices} for claim {claim} failed: {}", error_chain(&error));
        }
    }

    async fn expect_released(&self, claim: &str) {
        self.unprepare(claim).await.unwrap();
    }
}

#[tokio::test]
async fn share_pages_hold_its_limits() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    let devices = driver.prepare("a", TEN_GIB).await.unwrap();
    assert_eq!(devices[0].cdi_ids, ["gpu.divvy.dev/claim=a-gpu-0-share-a-0"]);
    assert_eq!(devices[0].share_id, Some("a-0".into()));
    let policy = node.policy("a", 0);
    let uuid = node.sim.read().unwrap().gpus[0].uuid.clone();
    assert_eq!((policy.claim.as_str(), policy.share.as_str()), ("a", "a-0"));
    assert_eq!((policy.gpu, policy.mig), (GpuUuid::parse(&uuid).unwrap(), None));
    assert_eq!((policy.memory.limit, policy.memory.physical >> 20), (10 << 30, 81559));
    assert_eq!(fs::metadata(node.page("a", 0, "account")).unwrap().len(), account::SIZE as u64);
    let facts = driver.engine.facts(&"a".into());
    assert_eq!(facts[0].share_id, Some("a-0".into()));
    assert_eq!(facts[0].data.memory.as_ref().unwrap().to_string(), "10Gi");
    let held = driver.engine.shares();
    assert_eq!((held[0].share.as_str(), held[0].limit, held[0].used), ("a-0", 10 << 30, Some(0)));
    let metadata = node.paths.state_dir.join("metadata/a/r0.json");
    let metadata = fs::read_to_string(metadata).unwrap();
    for part in [r#""shareID": {"#, r#""string": "a-0""#, r#""shareMemory": {"#, r#""string": "10Gi""#] {
        assert!(metadata.contains(part), "{metadata}");
    }
    driver.expect_released("a").await;
    node.expect_no_claim_files();
    assert!(node.claims_with_pages().is_empty());
}

#[tokio::test]
async fn context_size_is_taken_from_the_last_measurement() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    driver.expect_prepared("a", TEN_GIB).await;
    let uuid = node.sim.read().unwrap().gpus[0].uuid.clone();
    let contexts = node.paths.run_dir.join("contexts");
    fs::create_dir(&contexts).unwrap();
    fs::write(contexts.join(uuid.trim_start_matches("GPU-")), (518_u64 << 20).to_string()).unwrap();
    driver.expect_prepared("b", TEN_GIB).await;
    let driver = {
        driver.stop().await;
        node.start_driver().await
    };
    assert!(driver.report.restored.is_empty(), "{:?}", driver.report);
    assert_eq!(["a", "b"].map(|claim| node.policy(claim, 0).memory.context >> 20), [300, 518]);
    driver.expect_released("a").await;
    driver.expect_released("b").await;
    // The measured size does not apply to a MIG instance.
    driver.expect_prepared("c", SLICE).await;
    assert_eq!(node.policy("c", 0).memory.context >> 20, 300);
}

#[tokio::test]
async fn share_of_the_whole_gpu_injects_nothing() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    driver.expect_prepared("a", ALL_MEMORY).await;
    let shared = fs::read_to_string(node.cdi_file("a")).unwrap().replace("gpu-0-share-a-0", "gpu-0");
    driver.expect_released("a").await;
    driver.expect_prepared("a", "gpu-0").await;
    assert_eq!(shared, fs::read_to_string(node.cdi_file("a")).unwrap());
    assert!(!shared.contains("preload") && !shared.contains("divvy/lib"), "{shared}");
    assert!(node.claims_with_pages().is_empty());
}

#[tokio::test]
async fn shares_add_up_and_exclude_a_whole_gpu_claim() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    driver.expect_prepared("a", TEN_GIB).await;
    driver.expect_prepared("b", "share:gpu-0-share=60Gi").await;
    driver.expect_refused("c", TEN_GIB, "has 9879Mi of memory left beside other shares").await;
    for other in ["gpu-0", ALL_MEMORY, "gpu-0-mig-1g10gb-19-2", SLICE] {
        driver.expect_refused("c", other, "claim ns/a").await;
    }
    driver.expect_released("b").await;
    driver.expect_prepared("c", TEN_GIB).await;
    for claim in ["a", "c"] {
        driver.expect_refused("d", ALL_MEMORY, "and claim ns").await;
        driver.expect_released(claim).await;
    }
    driver.expect_prepared("d", ALL_MEMORY).await;
    driver.expect_refused("a", TEN_GIB, "and claim ns/d holds it").await;
}

/// Earlier versions allocated shares on the device of the whole GPU.
#[tokio::test]
async fn shares_of_earlier_versions_stay_beside_new_ones() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    driver.expect_prepared("old", "share:gpu-0=10Gi").await;
    driver.expect_prepared("new", "share:gpu-0-share=60Gi").await;
    for another in ["share:gpu-0=10Gi", TEN_GIB] {
        driver.expect_refused("third", another, "has 9879Mi of memory left beside other shares").await;
    }
    driver.expect_refused("third", "gpu-0", "claim ns/").await;
    driver.stop().await;
    let driver = node.start_driver().await;
    assert!(driver.report.restored.is_empty(), "{:?}", driver.report);
    driver.stop().await;
    node.reboot();
    let driver = node.start_driver().await;
    let mut restored = driver.report.restored.clone();
    restored.sort();
    assert_eq!(restored.len(), 2, "{:?}", driver.report);
    assert_eq!(["old", "new"].map(|claim| node.policy(claim, 0).memory.limit >> 30), [10, 60]);
    driver.expect_released("old").await;
    driver.expect_refused("third", "gpu-0", "claim ns/new").await;
    driver.expect_prepared("third", TEN_GIB).await;
    for claim in ["new", "third"] {
        driver.expect_released(claim).await;
    }
    driver.expect_prepared("whole", "gpu-0").await;
    assert!(node.claims_with_pages().is_empty());
}

#[tokio::test]
async fn first_share_creates_the_instance_and_last_destroys_it() {
    for order in [["a", "b"], ["b", "a"]] {
        let node = TestNode::new(H100);
        let driver = node.start_driver().await;
        driver.expect_prepared("a", SLICE).await;
        driver.expect_prepared("b", SLICE).await;
        driver.expect_prepared("other", "gpu-0-mig-3g40gb-9-4").await;
        node.expect_hardware(&["mig 19@2+ 9@4+"]);
        driver.expect_refused("c", SLICE, "has 1792Mi of memory left").await;
        driver.expect_refused("c", "gpu-0-mig-1g10gb-19-2", "claim ns/a").await;
        let uuid = node.policy("a", 0).mig.unwrap();
        assert!(node.mig_uuids().contains(&uuid));
        assert_eq!(node.policy("b", 0).mig, Some(uuid));
        assert_eq!(node.policy("a", 0).memory.physical, 9984 << 20);
        driver.expect_released(order[0]).await;
        node.expect_hardware(&["mig 19@2+ 9@4+"]);
        driver.expect_released(order[1]).await;
        node.expect_hardware(&["mig 9@4+"]);
        driver.expect_released("other").await;
        node.expect_no_claim_files();
        assert!(node.claims_with_pages().is_empty());
    }
}

#[tokio::test]
async fn failed_second_share_keeps_the_instance_for_the_first() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    driver.expect_prepared("a", SLICE).await;
    let cdi = node.paths.cdi_dir.with_extension("moved");
    fs::rename(&node.paths.cdi_dir, &cdi).unwrap();
    driver.expect_refused("b", SLICE, "cannot be written").await;
    fs::rename(&cdi, &node.paths.cdi_dir).unwrap();
    node.expect_hardware(&["mig 19@2+"]);
    assert_eq!(node.claims_with_pages(), ["a"]);
    driver.expect_released("a").await;
    node.expect_hardware(&["mig"]);
}

#[tokio::test]
async fn each_share_of_a_claim_has_its_own_pages() {
    let node = TestNode::new(&format!("2x{H100}"));
    let driver = node.start_driver().await;
    let devices =
        driver.prepare("a", &format!("{TEN_GIB} share:gpu-0-share=5Gi share:gpu-1-share=3Gi")).await.unwrap();
    let limits = [0, 1, 2].map(|at| node.policy("a", at).memory.limit >> 30);
    assert_eq!(limits, [10, 5, 3]);
    assert_eq!(node.policy("a", 0).gpu, node.policy("a", 1).gpu);
    assert_ne!(node.policy("a", 0).gpu, node.policy("a", 2).gpu);
    let mut ids: Vec<_> = devices.iter().flat_map(|device| &device.cdi_ids).collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 3);
    driver.expect_refused("b", "share:gpu-0-share=70Gi", "of memory left").await;
    driver.expect_released("a").await;
    assert!(node.claims_with_pages().is_empty());
}

/// Each share is counted once, although both claims use both GPUs.
#[tokio::test]
async fn shares_on_several_gpus_are_counted_per_gpu() {
    let node = TestNode::new(&format!("2x{H100}"));
    let driver = node.start_driver().await;
    driver.expect_prepared("a", "share:gpu-0-share=40Gi share:gpu-1-share=60Gi").await;
    driver.expect_prepared("b", "share:gpu-0-share=39Gi share:gpu-1-share=19Gi").await;
    driver
        .expect_refused(
            "c",
            "share:gpu-0-share=1Gi share:gpu-1-share=1Gi",
            "device gpu-0-share has 663Mi of memory left",
        )
        .await;
}

#[tokio::test]
async fn restart_does_not_touch_pages_in_use() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    driver.expect_prepared("a", TEN_GIB).await;
    driver.stop().await;
    let account = node.page("a", 0, "account");
    let mut bytes = fs::read(&account).unwrap();
    bytes[5000] = 7;
    fs::write(&account, &bytes).unwrap();
    let inodes = || ["policy", "account"].map(|name| fs::metadata(node.page("a", 0, name)).unwrap().ino());
    let before = inodes();
    let driver = node.start_driver().await;
    assert!(driver.report.restored.is_empty(), "{:?}", driver.report);
    assert_eq!((inodes(), fs::read(&account).unwrap()), (before, bytes));
    driver.expect_prepared("a", TEN_GIB).await;
    assert_eq!(inodes(), before);
}

#[tokio::test]
async fn shares_are_restored_after_a_reboot() {
    let node = TestNode::new(&format!("2x{H100}"));
    let driver = node.start_driver().await;
    driver.expect_prepared("a", &format!("{SLICE} share:gpu-1-share=10Gi")).await;
    driver.expect_prepared("b", SLICE).await;
    let before = [node.policy("a", 0), node.policy("a", 1), node.policy("b", 0)];
    driver.stop().await;
    node.reboot();
    node.expect_hardware(&["off", "off"]);
    let driver = node.start_driver().await;
    assert_eq!(driver.report.restored.len(), 2, "{:?}", driver.report);
    node.expect_hardware(&["mig 19@2+", "off"]);
    let uuid = node.mig_uuids().first().copied();
    let expected = |policy: Policy| Policy { mig: policy.mig.and(uuid), ..policy };
    assert_eq!([node.policy("a", 0), node.policy("a", 1), node.policy("b", 0)], before.map(expected));
    assert_eq!(fs::metadata(node.page("b", 0, "account")).unwrap().len(), account::SIZE as u64);
    assert!(driver.engine.prepared(&"a".into()).is_some());
    for claim in ["a", "b"] {
        driver.expect_released(claim).await;
    }
    node.expect_hardware(&["mig", "off"]);
    assert!(node.claims_with_pages().is_empty());
}

/// The policy file that containers have mounted is kept.
#[tokio::test]
async fn recreated_instance_serves_all_its_shares() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    driver.expect_prepared("a", SLICE).await;
    driver.expect_prepared("b", SLICE).await;
    driver.stop().await;
    let inode = fs::metadata(node.page("b", 0, "policy")).unwrap().ino();
    node.update_sim(|state| state.reset(0, true).unwrap());
    let driver = node.start_driver().await;
    assert!(driver.report.failed.is_empty(), "{:?}", driver.report);
    node.expect_hardware(&["mig 19@2+"]);
    for claim in ["a", "b"] {
        assert!(driver.engine.prepared(&claim.into()).is_some());
    }
    let uuid = node.mig_uuids()[0];
    assert_eq!((node.policy("a", 0).mig, node.policy("b", 0).mig), (Some(uuid), Some(uuid)));
    assert_eq!(fs::metadata(node.page("b", 0, "policy")).unwrap().ino(), inode);
}

#[tokio::test]
async fn lost_page_is_recreated_at_the_next_prepare() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    driver.expect_prepared("a", TEN_GIB).await;
    assert!(driver.engine.prepared(&"a".into()).is_some());
    fs::remove_file(node.page("a", 0, "policy")).unwrap();
    assert!(driver.engine.prepared(&"a".into()).is_none());
    driver.expect_prepared("a", TEN_GIB).await;
    assert_eq!(fs::metadata(node.page("a", 0, "policy")).unwrap().len(), SIZE as u64);
}

#[tokio::test]
async fn orphaned_pages_are_removed_unless_mounted() {
    let node = TestNode::new(H100);
    let shares = node.paths.run_dir.join("shares");
    for claim in ["left", "used"] {
        fs::create_dir_all(shares.join(claim).join("s")).unwrap();
    }
    let process = node.paths.proc_root.join("4242");
    fs::create_dir_all(&process).unwrap();
    let mount = "63 43 0:25 /divvy/shares/used/s/policy /run/divvy/used/s/policy ro - tmpfs tmpfs rw\n";
    fs::write(process.join("mountinfo"), mount).unwrap();
    let driver = node.start_driver().await;
    let sweep = async || {
        let leftovers = driver.engine.leftovers();
        let wanted = leftovers.iter().map(|leftover| leftover.owner.clone()).collect();
        let mounted = uses::mounted(&node.paths.process_root, &wanted).unwrap();
        driver.engine.remove_leftovers(&leftovers, &Uses { mounted, ..Uses::default() }).await
    };
    let kept = sweep().await;
    assert_eq!(kept, [(Owner::Claim("used".into()), Use::Mounted { pid: 4242 })]);
    assert_eq!(node.claims_with_pages(), ["used"]);
    fs::remove_dir_all(process).unwrap();
    assert_eq!(sweep().await, []);
    assert!(node.claims_with_pages().is_empty());
}

#[tokio::test]
async fn share_of_a_foreign_instance_leaves_it_unchanged() {
    let node = TestNode::new(H100);
    let placement = divvy_sim::state::Placement { start: 2, size: 1 };
    node.sim.update(|state| state.set_mig_mode(0, true)).unwrap();
    node.sim.update(|state| state.create_gi(0, 19, Some(placement))).unwrap();
    let driver = node.start_driver().await;
    driver.expect_prepared("a", SLICE).await;
    driver.expect_prepared("b", SLICE).await;
    node.expect_hardware(&["mig 19@2+"]);
    driver.expect_released("a").await;
    node.expect_hardware(&["mig 19@2+"]);
    driver.expect_released("b").await;
    node.expect_hardware(&["mig 19@2"]);
}

#[tokio::test]
async fn share_id_that_is_no_file_name_is_refused() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    let mut claim = super::test_node::allocated("a", TEN_GIB);
    if let divvy_api::Hold::Share { id, .. } = &mut claim.devices[0].hold {
        *id = "../../b".into();
    }
    let error = error_chain(&driver.engine.prepare(&claim).await.unwrap_err());
    assert!(error.contains("ns/a") && error.contains("cannot name a directory"), "{error}");
    assert_eq!(driver.engine.held().unwrap().len(), 0);
    driver.engine.unprepare(&ClaimUid::from("a")).await.unwrap();
}
