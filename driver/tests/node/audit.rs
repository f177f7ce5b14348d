//! Shares on a whole node: whoever goes round its limit is told of where its owner looks,
//! and ended where the node is set to; its neighbour is left alone; and nothing is lost
//! while there is no daemon.

use crate::account::Page;
use crate::harness::{H100, World, reference, until};
use crate::observation::{address, wait_for};
use crate::tenant::{ROOT, Tenant, mounts, over};
use divvy_api::top::{GpuNow, ShareNow};
use divvy_pages::account::{HEADER, SLOT};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::time::Instant;

const MIB: u64 = 1 << 20;
const LIMIT: u64 = 5 << 30;

/// A claim with a share and a process in its container that is registered as the library does it.
struct Container {
    claim: &'static str,
    share: String,
    dir: PathBuf,
    proc_root: PathBuf,
    tenant: Tenant,
    page: Page,
    slot: u16,
}

impl Container {
    /// The process has so much memory; it says that it has 512 MiB.
    async fn start(world: &World, claim: &'static str, mib: u64) -> Self {
        Self::start_with(world, claim, "gpu-0=5Gi", mib).await
    }

    async fn start_with(world: &World, claim: &'static str, device: &str, mib: u64) -> Self {
        let (share, dir, proc_root, tenant) = enter_with(world, claim, device, mib).await;
        let page = Page::map(&dir.join("account"), LIMIT);
        let slot = page.register(&tenant.who());
        assert!(page.charge(slot, 512 * MIB));
        let found = || page.report(slot).is_some_and(|slot| slot.line.host_pid == tenant.pid());
        until("the process is known", found).await;
        Self { claim, share, dir, proc_root, tenant, page, slot }
    }

    fn word(&self, of_slot: usize) -> u64 {
        (HEADER + usize::from(self.slot) * SLOT + of_slot) as u64
    }

    fn sees(&self, mounts: &str) {
        self.tenant.remount(&self.proc_root, mounts);
    }

    fn mounts(&self) -> String {
        mounts(&self.dir, self.claim, &self.share)
    }

    /// After `mv /run/divvy /run/mine`.
    fn moved(&self) -> String {
        self.mounts().replace(" /run/divvy/", " /run/mine/")
    }
}

/// Prepares a claim and starts a process in its container: shareID, pages, `/proc` and the process.
async fn enter(world: &World, claim: &str, mib: u64) -> (String, PathBuf, PathBuf, Tenant) {
    enter_with(world, claim, "gpu-0=5Gi", mib).await
}

async fn enter_with(
    world: &World,
    claim: &str,
    device: &str,
    mib: u64,
) -> (String, PathBuf, PathBuf, Tenant) {
    world.prepare(&world.claim(claim, &[device])).await.unwrap();
    let share = format!("{claim}-share-0");
    let dir = world.run_dir().join("shares").join(claim).join(&share);
    let cgroup = format!("0::/kubepods/{claim}\n");
    // As the hook tells of the container.
    fs::write(dir.join("cgroups/c1"), &cgroup).unwrap();
    let proc_root = world.sim.root().join("proc");
    let tenant = Tenant::start(world.sim.root(), mib);
    tenant.place(&proc_root, &cgroup, &mounts(&dir, claim, &share));
    (share, dir, proc_root, tenant)
}

/// What events about a claim say.
fn notes(world: &World, claim: &str) -> Vec<String> {
    let of = |event: &Event| event.regarding.as_ref().and_then(|about| about.name.as_deref()) == Some(claim);
    let said = world.api.list::<Event>().into_iter().filter(of);
    said.filter_map(|event| Some(format!("{}: {}", event.reason?, event.note?))).collect()
}

/// The conditions of a claim's device.
fn condition(world: &World, claim: &str) -> Option<Value> {
    let devices = world.api.get::<ResourceClaim>("ns", claim)?.status?.devices?;
    let conditions = serde_json::to_value(devices.first()?.conditions.as_ref()?).unwrap();
    conditions.get(0).cloned()
}

/// Each row: what the process does, what is said of it, whether it is ended.
#[tokio::test]
async fn whoever_goes_round_its_share_is_told_of_or_ended_and_its_neighbour_never() {
    type Offence = (&'static str, u64, fn(&mut Container), &'static str, bool);
    let offences: [Offence; 10] = [
        ("used-nothing", 512, |on| on.page.forge(64, 0), "0 MiB are used", false),
        // It has 30 % of the GPU by NVML's word, too, where its part beside the neighbour's is 20.
        ("full-balance", 512, |on| on.page.forge(128, i64::MAX as u64), "a balance of", true),
        ("stolen-slot", 512, |on| on.page.forge(on.word(16), 4711), "is not registered", true),
        ("bumped", 512, |on| on.page.forge(on.word(4), 0x0002_0009), "another owner or generation", false),
        ("no-slot", 512, |on| on.page.forge(on.word(0), 0), "is not registered", true),
        (
            "covered",
            512,
            |on| on.sees(&(on.mounts() + &over(on.claim, &on.share))),
            "policy leads to something else",
            true,
        ),
        ("moved", 512, |on| on.sees(&on.moved()), "policy leads to something else", true),
        // What it starts then loads no library.
        (
            "moved-exec",
            512,
            |on| {
                on.sees(&on.moved());
                on.page.forge(on.word(0), 0);
            },
            "is not registered",
            true,
        ),
        ("chroot", 512, |on| on.sees(ROOT), "it does not see /run/divvy/chroot", false),
        ("too-much", 6000, |_| {}, "where the limit is 5120 MiB", true),
    ];
    let world = World::up(H100).await;
    let _daemon = world.start(&[]).await;
    let mut neighbour = Container::start_with(&world, "neighbour", "gpu-0=5Gi/80", 512).await;
    for (claim, mib, offence, text, ended) in offences {
        let mut container = Container::start(&world, claim, mib).await;
        let begun = Instant::now();
        offence(&mut container);
        let told = || notes(&world, claim).into_iter().any(|note| note.contains(text));
        until(&format!("{claim} is told of"), told).await;
        if ended {
            until(&format!("{claim} is ended"), || state(container.tenant.pid()) == 'Z').await;
        }
        // Within five seconds, on a machine with nothing else to do.
        println!("{claim}: {:.1} s", begun.elapsed().as_secs_f64());
        assert_eq!(container.tenant.lives(), !ended, "{claim}: {:?}", notes(&world, claim));
        until("there is a condition", || condition(&world, claim).is_some()).await;
    }
    assert!(neighbour.tenant.lives());
    assert_eq!(notes(&world, "neighbour"), Vec::<String>::new());
    neighbour.page.tidy();
    assert_eq!(neighbour.page.used(), 512 * MIB);
}

#[tokio::test]
async fn what_is_only_to_be_told_is_told_where_its_owner_looks_until_it_is_over() {
    let world = World::up(H100).await;
    let address = address();
    let _daemon = world.start(&["--http-address", &address, "--end-processes", "none"]).await;
    let (.., mut hidden) = enter(&world, "a", 512).await;
    let about = format!("ShareBroken: claim ns/a, share a-share-0: process {}", hidden.pid());
    until("there is an event", || notes(&world, "a").iter().any(|note| note.starts_with(&about))).await;
    until("there is a condition", || condition(&world, "a").is_some()).await;
    let told = condition(&world, "a").unwrap();
    let told = (&told["type"], &told["status"], &told["reason"]);
    assert_eq!(told, (&json!("LimitKept"), &json!("False"), &json!("HiddenProcess")));
    // The kubelet asks again at every start of a pod.
    world.prepare(&reference("a")).await.unwrap();
    let metric = "divvy_share_findings_total{finding=\"hidden\",done=\"reported\"} 1";
    wait_for(&address, "/metrics", metric).await;
    assert!(hidden.lives());
    hidden.kill();
    let is_true = || condition(&world, "a").is_some_and(|told| told["status"] == "True");
    until("the condition is true again", is_true).await;
}

#[tokio::test]
async fn a_daemon_that_was_killed_is_no_way_round_the_limit() {
    let world = World::up(H100).await;
    let daemon = world.start(&[]).await;
    let mut honest = Container::start(&world, "a", 512).await;
    daemon.kill();
    let policy = || fs::read(honest.dir.join("policy")).unwrap();
    let before = policy();
    assert!(!honest.page.charge(honest.slot, LIMIT), "the limit stays with the daemon gone");
    let mut hidden = Tenant::start(world.sim.root(), 512);
    hidden.place(&honest.proc_root, "0::/kubepods/a\n", &honest.mounts());
    let _daemon = world.spawn(&[]);
    until("it is ended", || state(hidden.pid()) == 'Z').await;
    assert!(!hidden.lives());
    assert!(honest.tenant.lives());
    assert_eq!(policy(), before, "the limit is as it was");
}

/// As `/proc` has it.
fn state(pid: u32) -> char {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).unwrap_or('Z')
}

#[tokio::test]
async fn how_it_stands_with_a_share_is_left_for_whoever_looks_on() {
    let world = World::up(H100).await;
    let _daemon = world.start(&[]).await;
    let container = Container::start(&world, "shown", 512).await;
    let shown = || -> Option<ShareNow> {
        let gpu = format!("{}.json", world.sim.read().unwrap().gpus[0].uuid);
        let text = fs::read(world.run_dir().join("top").join(gpu)).ok()?;
        let now: GpuNow = serde_json::from_slice(&text).ok()?;
        now.shares.into_iter().find(|share| share.processes == 1 && share.throttled_ms.is_some())
    };
    until("the share is shown", || shown().is_some()).await;
    let now = shown().unwrap();
    assert_eq!((now.namespace.as_deref(), now.claim.as_deref()), (Some("ns"), Some("shown")));
    assert_eq!(now.share.as_str(), container.share);
    assert_eq!((now.memory_limit_bytes, now.memory_measured_bytes), (LIMIT, Some(512 * MIB)));
    assert_eq!((now.guarantee_percent, now.ceiling_percent), (0, 100));
    assert!(now.busy_percent.is_some_and(|busy| busy > 0), "{now:?}");
}
