//! Shares of GPUs and of MIG instances: who has which part of the memory, and the
//! pages that say so.

use super::world::{H100, Node, World, chain};
use divvy_api::ClaimUid;
use divvy_pages::policy::{Policy, SIZE};
use divvy_pages::{GpuUuid, account};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

const TEN: &str = "share:gpu-0=10Gi";
const WHOLE: &str = "share:gpu-0=81559Mi";
const SLICE: &str = "share:gpu-0-mig-1g10gb-19-2=4Gi";

impl World {
    fn page(&self, claim: &str, at: usize, name: &str) -> PathBuf {
        self.paths.run_dir.join(format!("shares/{claim}/{claim}-{at}/{name}"))
    }

    #[track_caller]
    fn policy(&self, claim: &str, at: usize) -> Policy {
        Policy::decode(&fs::read(self.page(claim, at, "policy")).unwrap()).unwrap().1
    }

    /// Claims that have pages.
    fn paged(&self) -> Vec<String> {
        let dir = self.paths.run_dir.join("shares");
        if dir.exists() { Self::files(&dir) } else { Vec::new() }
    }

    fn reboot(&self) {
        self.reboot_gpus();
        fs::remove_dir_all(&self.paths.run_dir).unwrap();
    }

    fn change(&self, change: impl FnOnce(&mut divvy_sim::State)) {
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

impl Node {
    async fn holds(&self, claim: &str, devices: &str) {
        if let Err(error) = self.prepare(claim, devices).await {
            panic!("{claim} is refused {devices}: {}", chain(&error));
        }
    }

    async fn ends(&self, claim: &str) {
        self.unprepare(claim).await.unwrap();
    }
}

#[tokio::test]
async fn a_share_has_pages_that_say_what_it_may_have() {
    let world = World::up(H100);
    let node = world.start().await;
    let devices = node.prepare("a", TEN).await.unwrap();
    assert_eq!(devices[0].cdi_ids, ["gpu.divvy.dev/claim=a-gpu-0-a-0"]);
    assert_eq!(devices[0].share_id, Some("a-0".into()));
    let policy = world.policy("a", 0);
    let uuid = world.sim.read().unwrap().gpus[0].uuid.clone();
    assert_eq!((policy.claim.as_str(), policy.share.as_str()), ("a", "a-0"));
    assert_eq!((policy.gpu, policy.mig), (GpuUuid::parse(&uuid).unwrap(), None));
    assert_eq!((policy.memory.limit, policy.memory.physical >> 20), (10 << 30, 81559));
    assert_eq!(fs::metadata(world.page("a", 0, "account")).unwrap().len(), account::SIZE as u64);
    let facts = node.engine.facts(&"a".into());
    assert_eq!(facts[0].share_id, Some("a-0".into()));
    assert_eq!(facts[0].data.memory.as_ref().unwrap().to_string(), "10Gi");
    let held = node.engine.shares();
    assert_eq!((held[0].share.as_str(), held[0].limit, held[0].used), ("a-0", 10 << 30, Some(0)));
    let metadata = world.paths.state_dir.join("metadata/a/resourceclaims/a/r0/metadata.json");
    let metadata = fs::read_to_string(metadata).unwrap();
    for part in [r#""shareID": {"#, r#""string": "a-0""#, r#""shareMemory": {"#, r#""string": "10Gi""#] {
        assert!(metadata.contains(part), "{metadata}");
    }
    node.ends("a").await;
    world.expect_no_trace();
    assert!(world.paged().is_empty());
}

#[tokio::test]
async fn a_context_is_charged_what_one_was_seen_to_take_when_the_share_came() {
    let world = World::up(H100);
    let node = world.start().await;
    node.holds("a", TEN).await;
    let uuid = world.sim.read().unwrap().gpus[0].uuid.clone();
    let contexts = world.paths.run_dir.join("contexts");
    fs::create_dir(&contexts).unwrap();
    fs::write(contexts.join(uuid.trim_start_matches("GPU-")), (518_u64 << 20).to_string()).unwrap();
    node.holds("b", TEN).await;
    let node = {
        node.stop().await;
        world.start().await
    };
    assert!(node.report.restored.is_empty(), "{:?}", node.report);
    assert_eq!(["a", "b"].map(|claim| world.policy(claim, 0).memory.context >> 20), [300, 518]);
    node.ends("a").await;
    node.ends("b").await;
    // Of an instance nothing is known by that.
    node.holds("c", SLICE).await;
    assert_eq!(world.policy("c", 0).memory.context >> 20, 300);
}

#[tokio::test]
async fn the_whole_has_nothing_injected() {
    let world = World::up(H100);
    let node = world.start().await;
    node.holds("a", WHOLE).await;
    let shared = fs::read_to_string(world.cdi_file("a")).unwrap().replace("gpu-0-a-0", "gpu-0");
    node.ends("a").await;
    node.holds("a", "gpu-0").await;
    assert_eq!(shared, fs::read_to_string(world.cdi_file("a")).unwrap());
    assert!(!shared.contains("preload") && !shared.contains("divvy/lib"), "{shared}");
    assert!(world.paged().is_empty());
}

#[tokio::test]
async fn shares_of_a_gpu_add_up_and_keep_the_whole_away() {
    let world = World::up(H100);
    let node = world.start().await;
    node.holds("a", TEN).await;
    node.holds("b", "share:gpu-0=60Gi").await;
    node.refused("c", TEN, "has 9879Mi of memory left beside other shares").await;
    for other in ["gpu-0", WHOLE, "gpu-0-mig-1g10gb-19-2", SLICE] {
        node.refused("c", other, "claim ns/a").await;
    }
    node.ends("b").await;
    node.holds("c", TEN).await;
    for claim in ["a", "c"] {
        node.refused("d", WHOLE, "overlaps what claim ns").await;
        node.ends(claim).await;
    }
    node.holds("d", WHOLE).await;
    node.refused("a", TEN, "overlaps what claim ns/d").await;
}

#[tokio::test]
async fn the_first_share_of_an_instance_makes_it_and_the_last_destroys_it() {
    for order in [["a", "b"], ["b", "a"]] {
        let world = World::up(H100);
        let node = world.start().await;
        node.holds("a", SLICE).await;
        node.holds("b", SLICE).await;
        node.holds("other", "gpu-0-mig-3g40gb-9-4").await;
        world.expect_hardware(&["mig 19@2+ 9@4+"]);
        node.refused("c", SLICE, "has 1792Mi of memory left").await;
        node.refused("c", "gpu-0-mig-1g10gb-19-2", "claim ns/a").await;
        let uuid = world.policy("a", 0).mig.unwrap();
        assert!(world.mig_uuids().contains(&uuid));
        assert_eq!(world.policy("b", 0).mig, Some(uuid));
        assert_eq!(world.policy("a", 0).memory.physical, 9984 << 20);
        node.ends(order[0]).await;
        world.expect_hardware(&["mig 19@2+ 9@4+"]);
        node.ends(order[1]).await;
        world.expect_hardware(&["mig 9@4+"]);
        node.ends("other").await;
        world.expect_no_trace();
        assert!(world.paged().is_empty());
    }
}

#[tokio::test]
async fn a_share_that_joins_and_fails_leaves_the_instance_to_the_others() {
    let world = World::up(H100);
    let node = world.start().await;
    node.holds("a", SLICE).await;
    let cdi = world.paths.cdi_dir.with_extension("away");
    fs::rename(&world.paths.cdi_dir, &cdi).unwrap();
    node.refused("b", SLICE, "cannot be written").await;
    fs::rename(&cdi, &world.paths.cdi_dir).unwrap();
    world.expect_hardware(&["mig 19@2+"]);
    assert_eq!(world.paged(), ["a"]);
    node.ends("a").await;
    world.expect_hardware(&["mig"]);
}

#[tokio::test]
async fn two_shares_of_one_claim_have_pages_of_their_own() {
    let world = World::up(&format!("2x{H100}"));
    let node = world.start().await;
    let devices = node.prepare("a", &format!("{TEN} share:gpu-0=5Gi share:gpu-1=3Gi")).await.unwrap();
    let limits = [0, 1, 2].map(|at| world.policy("a", at).memory.limit >> 30);
    assert_eq!(limits, [10, 5, 3]);
    assert_eq!(world.policy("a", 0).gpu, world.policy("a", 1).gpu);
    assert_ne!(world.policy("a", 0).gpu, world.policy("a", 2).gpu);
    let mut ids: Vec<_> = devices.iter().flat_map(|device| &device.cdi_ids).collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 3);
    node.refused("b", "share:gpu-0=70Gi", "of memory left").await;
    node.ends("a").await;
    assert!(world.paged().is_empty());
}

/// Counted once, though both claims touch both GPUs.
#[tokio::test]
async fn shares_on_several_gpus_are_counted_on_each() {
    let world = World::up(&format!("2x{H100}"));
    let node = world.start().await;
    node.holds("a", "share:gpu-0=40Gi share:gpu-1=60Gi").await;
    node.holds("b", "share:gpu-0=39Gi share:gpu-1=19Gi").await;
    node.refused("c", "share:gpu-0=1Gi share:gpu-1=1Gi", "device gpu-0 has 663Mi of memory left").await;
}

#[tokio::test]
async fn a_restart_does_not_touch_pages_in_use() {
    let world = World::up(H100);
    let node = world.start().await;
    node.holds("a", TEN).await;
    node.stop().await;
    let account = world.page("a", 0, "account");
    let mut bytes = fs::read(&account).unwrap();
    bytes[5000] = 7;
    fs::write(&account, &bytes).unwrap();
    let inodes = || ["policy", "account"].map(|name| fs::metadata(world.page("a", 0, name)).unwrap().ino());
    let before = inodes();
    let node = world.start().await;
    assert!(node.report.restored.is_empty(), "{:?}", node.report);
    assert_eq!((inodes(), fs::read(&account).unwrap()), (before, bytes));
    node.holds("a", TEN).await;
    assert_eq!(inodes(), before);
}

#[tokio::test]
async fn what_a_reboot_took_of_shares_is_made_again() {
    let world = World::up(&format!("2x{H100}"));
    let node = world.start().await;
    node.holds("a", &format!("{SLICE} share:gpu-1=10Gi")).await;
    node.holds("b", SLICE).await;
    let before = [world.policy("a", 0), world.policy("a", 1), world.policy("b", 0)];
    node.stop().await;
    world.reboot();
    world.expect_hardware(&["off", "off"]);
    let node = world.start().await;
    assert_eq!(node.report.restored.len(), 2, "{:?}", node.report);
    world.expect_hardware(&["mig 19@2+", "off"]);
    let uuid = world.mig_uuids().first().copied();
    let again = |policy: Policy| Policy { mig: policy.mig.and(uuid), ..policy };
    assert_eq!([world.policy("a", 0), world.policy("a", 1), world.policy("b", 0)], before.map(again));
    assert_eq!(fs::metadata(world.page("b", 0, "account")).unwrap().len(), account::SIZE as u64);
    assert!(node.engine.prepared(&"a".into()).is_some());
    for claim in ["a", "b"] {
        node.ends(claim).await;
    }
    world.expect_hardware(&["mig", "off"]);
    assert!(world.paged().is_empty());
}

/// And the file that containers have mounted stays.
#[tokio::test]
async fn an_instance_that_was_made_again_serves_all_its_shares() {
    let world = World::up(H100);
    let node = world.start().await;
    node.holds("a", SLICE).await;
    node.holds("b", SLICE).await;
    node.stop().await;
    let inode = fs::metadata(world.page("b", 0, "policy")).unwrap().ino();
    world.change(|state| state.reset(0, true).unwrap());
    let node = world.start().await;
    assert!(node.report.unsettled.is_empty(), "{:?}", node.report);
    world.expect_hardware(&["mig 19@2+"]);
    for claim in ["a", "b"] {
        assert!(node.engine.prepared(&claim.into()).is_some());
    }
    let uuid = world.mig_uuids()[0];
    assert_eq!((world.policy("a", 0).mig, world.policy("b", 0).mig), (Some(uuid), Some(uuid)));
    assert_eq!(fs::metadata(world.page("b", 0, "policy")).unwrap().ino(), inode);
}

#[tokio::test]
async fn a_lost_page_is_made_again_when_the_claim_is_asked_for() {
    let world = World::up(H100);
    let node = world.start().await;
    node.holds("a", TEN).await;
    assert!(node.engine.prepared(&"a".into()).is_some());
    fs::remove_file(world.page("a", 0, "policy")).unwrap();
    assert!(node.engine.prepared(&"a".into()).is_none());
    node.holds("a", TEN).await;
    assert_eq!(fs::metadata(world.page("a", 0, "policy")).unwrap().len(), SIZE as u64);
}

#[tokio::test]
async fn pages_that_no_record_explains_go_unless_they_are_in_use() {
    let world = World::up(H100);
    let shares = world.paths.run_dir.join("shares");
    for claim in ["left", "used"] {
        fs::create_dir_all(shares.join(claim).join("s")).unwrap();
    }
    let process = world.paths.proc_root.join("4242");
    fs::create_dir_all(&process).unwrap();
    let mount = "63 43 0:25 /divvy/shares/used/s/policy /run/divvy/used/s/policy ro - tmpfs tmpfs rw\n";
    fs::write(process.join("mountinfo"), mount).unwrap();
    let node = world.start().await;
    assert_eq!(world.paged(), ["used"]);
    node.stop().await;
    fs::remove_dir_all(process).unwrap();
    world.start().await;
    assert!(world.paged().is_empty());
}

#[tokio::test]
async fn a_share_of_a_foreign_instance_leaves_it_as_it_was() {
    let world = World::up(H100);
    let placement = divvy_sim::state::Placement { start: 2, size: 1 };
    world.sim.update(|state| state.set_mig_mode(0, true)).unwrap();
    world.sim.update(|state| state.create_gi(0, 19, Some(placement))).unwrap();
    let node = world.start().await;
    node.holds("a", SLICE).await;
    node.holds("b", SLICE).await;
    world.expect_hardware(&["mig 19@2+"]);
    node.ends("a").await;
    world.expect_hardware(&["mig 19@2+"]);
    node.ends("b").await;
    world.expect_hardware(&["mig 19@2"]);
}

#[tokio::test]
async fn names_that_are_no_file_names_are_refused() {
    let world = World::up(H100);
    let node = world.start().await;
    let mut claim = super::world::allocated("a", TEN);
    if let divvy_api::Hold::Share { id, .. } = &mut claim.devices[0].hold {
        *id = "../../b".into();
    }
    let error = chain(&node.engine.prepare(&claim).await.unwrap_err());
    assert!(error.contains("ns/a") && error.contains("cannot name a directory"), "{error}");
    assert_eq!(node.engine.held().len(), 0);
    node.engine.unprepare(&ClaimUid::from("a")).await.unwrap();
}
