//! Enforcement of shares on a node: a violation is reported to the claim's owner, and the process is
//! killed if the node is configured so. Neighbours are not affected, and limits hold without a daemon.

use crate::account::Page;
use crate::harness::{H100, TestNode, claim_ref, until};
use crate::observation::{address, wait_for};
use crate::tenant::{ROOT, Tenant, mount_over, mounts};
use divvy_api::top::{GpuTimeAttribution, GpuUsage, ShareTotals, ShareUsage};
use divvy_pages::account::{HEADER, SLOT};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::time::Instant;

const MIB: u64 = 1 << 20;
const LIMIT_BYTES: u64 = 5 << 30;

/// A claim with a share, and a process in its container that registers as the library does.
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
    /// Starts a process that holds `mib` MiB of GPU memory and reports 512 MiB.
    async fn start(node: &TestNode, claim: &'static str, mib: u64) -> Self {
        Self::start_with(node, claim, "gpu-0-share=5Gi", mib).await
    }

    async fn start_with(node: &TestNode, claim: &'static str, device: &str, mib: u64) -> Self {
        let (share, dir, proc_root, tenant) = start_process_with(node, claim, device, mib).await;
        let page = Page::map(&dir.join("account"), LIMIT_BYTES);
        let slot = page.register(&tenant.identity());
        assert!(page.charge(slot, 512 * MIB));
        let found = || page.report(slot).is_some_and(|slot| slot.node_line.host_pid == tenant.pid());
        until("the agent has identified the process", found).await;
        Self { claim, share, dir, proc_root, tenant, page, slot }
    }

    fn slot_offset(&self, field: usize) -> u64 {
        (HEADER + usize::from(self.slot) * SLOT + field) as u64
    }

    fn set_mounts(&self, mounts: &str) {
        self.tenant.set_mounts(&self.proc_root, mounts);
    }

    fn mounts(&self) -> String {
        mounts(&self.dir, self.claim, &self.share)
    }

    /// The mounts after `mv /run/divvy /run/mine`.
    fn moved_mounts(&self) -> String {
        self.mounts().replace(" /run/divvy/", " /run/mine/")
    }
}

/// Prepares a claim and starts a process in its container. Returns the shareID, the directory of the pages,
/// the `/proc` directory and the process.
async fn start_process(node: &TestNode, claim: &str, mib: u64) -> (String, PathBuf, PathBuf, Tenant) {
    start_process_with(node, claim, "gpu-0-share=5Gi", mib).await
}

async fn start_process_with(
    node: &TestNode,
    claim: &str,
    device: &str,
    mib: u64,
) -> (String, PathBuf, PathBuf, Tenant) {
    node.prepare(&node.claim(claim, &[device])).await.unwrap();
    let share = format!("{claim}-share-0");
    let dir = node.run_dir().join("shares").join(claim).join(&share);
    let cgroup = format!("0::/kubepods/{claim}\n");
    // As the hook reports the container.
    fs::write(dir.join("cgroups/c1"), &cgroup).unwrap();
    let proc_root = node.sim.root().join("proc");
    let tenant = Tenant::start(node.sim.root(), mib);
    tenant.set_proc(&proc_root, &cgroup, &mounts(&dir, claim, &share));
    (share, dir, proc_root, tenant)
}

/// The reason and note of each event about a claim.
fn event_notes(node: &TestNode, claim: &str) -> Vec<String> {
    let regards_claim =
        |event: &Event| event.regarding.as_ref().and_then(|about| about.name.as_deref()) == Some(claim);
    let events = node.api.list::<Event>().into_iter().filter(regards_claim);
    events.filter_map(|event| Some(format!("{}: {}", event.reason?, event.note?))).collect()
}

/// The first condition of the claim's device.
fn condition(node: &TestNode, claim: &str) -> Option<Value> {
    let devices = node.api.get::<ResourceClaim>("ns", claim)?.status?.devices?;
    let conditions = serde_json::to_value(devices.first()?.conditions.as_ref()?).unwrap();
    conditions.get(0).cloned()
}

/// Each case: claim, MiB that the process holds, violation, text of the event, whether the process is killed.
#[tokio::test]
async fn share_violations_are_reported_or_killed_never_the_neighbour() {
    type Violation = (&'static str, u64, fn(&mut Container), &'static str, bool);
    let violations: [Violation; 10] = [
        ("used-nothing", 512, |on| on.page.forge(64, 0), "a total of 0 MiB", false),
        // NVML also reports 30 % usage, where the share is entitled to 20 % beside its neighbour.
        ("full-balance", 512, |on| on.page.forge(128, i64::MAX as u64), "a balance of", true),
        ("stolen-slot", 512, |on| on.page.forge(on.slot_offset(16), 4711), "is not registered", true),
        (
            "bumped",
            512,
            |on| on.page.forge(on.slot_offset(4), 0x0002_0009),
            "another owner or generation",
            false,
        ),
        ("no-slot", 512, |on| on.page.forge(on.slot_offset(0), 0), "is not registered", true),
        (
            "covered",
            512,
            |on| on.set_mounts(&(on.mounts() + &mount_over(on.claim, &on.share))),
            "something else is mounted at",
            true,
        ),
        ("moved", 512, |on| on.set_mounts(&on.moved_mounts()), "something else is mounted at", true),
        // A program that it then executes loads no library.
        (
            "moved-exec",
            512,
            |on| {
                on.set_mounts(&on.moved_mounts());
                on.page.forge(on.slot_offset(0), 0);
            },
            "is not registered",
            true,
        ),
        ("chroot", 512, |on| on.set_mounts(ROOT), "it does not see /run/divvy/chroot", false),
        ("too-much", 6000, |_| {}, "the limit is 5120 MiB", true),
    ];
    let node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&[]).await;
    let mut neighbour = Container::start_with(&node, "neighbour", "gpu-0-share=5Gi/80", 512).await;
    for (claim, mib, violate, text, killed) in violations {
        let mut container = Container::start(&node, claim, mib).await;
        let begun = Instant::now();
        violate(&mut container);
        let reported = || event_notes(&node, claim).into_iter().any(|note| note.contains(text));
        until(&format!("{claim} is reported"), reported).await;
        if killed {
            until(&format!("the process of {claim} is killed"), || {
                process_state(container.tenant.pid()) == 'Z'
            })
            .await;
        }
        // Informational; below five seconds on an idle machine.
        println!("{claim}: {:.1} s", begun.elapsed().as_secs_f64());
        assert_eq!(container.tenant.is_running(), !killed, "{claim}: {:?}", event_notes(&node, claim));
        until("the claim has a condition", || condition(&node, claim).is_some()).await;
    }
    assert!(neighbour.tenant.is_running());
    assert_eq!(event_notes(&node, "neighbour"), Vec::<String>::new());
    neighbour.page.reconcile();
    assert_eq!(neighbour.page.used(), 512 * MIB);
}

#[tokio::test]
async fn report_only_mode_sets_event_condition_and_metric() {
    let node = TestNode::new(H100).await;
    let address = address();
    let _daemon = node.start_daemon(&["--http-address", &address, "--kill-processes", "none"]).await;
    let (.., mut unregistered) = start_process(&node, "a", 512).await;
    let about = format!("ShareLimitViolated: claim ns/a, share a-share-0: process {}", unregistered.pid());
    until("the claim has an event", || event_notes(&node, "a").iter().any(|note| note.starts_with(&about)))
        .await;
    until("the claim has a condition", || condition(&node, "a").is_some()).await;
    let reported = condition(&node, "a").unwrap();
    let reported = (&reported["type"], &reported["status"], &reported["reason"]);
    assert_eq!(reported, (&json!("LimitEnforced"), &json!("False"), &json!("UnregisteredProcess")));
    // The kubelet prepares the claim again at every start of a pod.
    node.prepare(&claim_ref("a")).await.unwrap();
    let metric = "divvy_share_findings_total{finding=\"unregistered\",action=\"reported\"} 1";
    wait_for(&address, "/metrics", metric).await;
    assert!(unregistered.is_running());
    unregistered.kill();
    let is_true = || condition(&node, "a").is_some_and(|condition| condition["status"] == "True");
    until("the condition is true again", is_true).await;
}

#[tokio::test]
async fn limit_holds_while_the_daemon_is_killed() {
    let node = TestNode::new(H100).await;
    let daemon = node.start_daemon(&[]).await;
    let mut honest = Container::start(&node, "a", 512).await;
    daemon.kill();
    let policy = || fs::read(honest.dir.join("policy")).unwrap();
    let before = policy();
    assert!(!honest.page.charge(honest.slot, LIMIT_BYTES), "the limit holds without a daemon");
    let mut unregistered = Tenant::start(node.sim.root(), 512);
    unregistered.set_proc(&honest.proc_root, "0::/kubepods/a\n", &honest.mounts());
    let _daemon = node.spawn_daemon(&[]);
    until("the unregistered process is killed", || process_state(unregistered.pid()) == 'Z').await;
    assert!(!unregistered.is_running());
    assert!(honest.tenant.is_running());
    assert_eq!(policy(), before, "the restart keeps the policy page");
}

/// The state letter in `/proc/PID/stat`; `Z` for a zombie, and for a process that is gone.
fn process_state(pid: u32) -> char {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).unwrap_or('Z')
}

#[tokio::test]
async fn share_usage_is_written_for_divvy_top() {
    let node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&["--gpu-time-law", "rates"]).await;
    let container = Container::start(&node, "shown", 512).await;
    let is_measured = |share: &ShareUsage| share.totals.is_some_and(|totals| totals.gpu_time_used_ms > 0);
    until("the usage file lists the share", || usage(&node).as_ref().is_some_and(is_measured)).await;
    let now = usage(&node).unwrap();
    assert_eq!((now.namespace.as_deref(), now.claim.as_deref()), (Some("ns"), Some("shown")));
    assert_eq!(now.share.as_str(), container.share);
    assert_eq!((now.memory_limit_bytes, now.memory_used_nvml_bytes), (LIMIT_BYTES, Some(512 * MIB)));
    assert_eq!((now.compute_request_percent, now.compute_limit_percent), (0, 100));
    assert!(now.compute_used_nvml_percent.is_some_and(|busy| busy > 0), "{now:?}");
    assert_eq!(now.gpu_time_attribution, Some(GpuTimeAttribution::Nvml));
    assert_eq!(now.totals.and_then(|totals| totals.hand_overs), None, "this law has none");
}

/// The usage file's entry for the only share, once its process is registered and was sampled twice.
fn usage(node: &TestNode) -> Option<ShareUsage> {
    let gpu = format!("{}.json", node.sim.read().unwrap().gpus[0].uuid);
    let text = fs::read(node.run_dir().join("top").join(gpu)).ok()?;
    let now: GpuUsage = serde_json::from_slice(&text).ok()?;
    now.shares.into_iter().find(|share| share.processes == 1 && share.throttled_ms.is_some())
}

#[tokio::test]
async fn share_totals_are_published_until_the_share_ends() {
    let node = TestNode::new(H100).await;
    let address = address();
    let flags = ["--http-address", &address, "--gpu-time-law", "quanta"];
    let daemon = node.start_daemon(&flags).await;
    let mut container = Container::start_with(&node, "shown", "gpu-0-share=5Gi/80", 512).await;
    let totals = || usage(&node)?.totals;
    until("the share has totals", || totals().is_some()).await;
    container.page.charge_time(container.slot, 20_000_000, 400_000_000);
    container.page.wait_for_quantum(container.slot);
    // The process never takes its quantum, so it gets another one after each.
    let is_counted = |totals: ShareTotals| {
        (totals.gpu_time_used_ms, totals.throttled_ms) == (20, 400) && totals.hand_overs > Some(0)
    };
    until("its time and its quantum are counted", || totals().is_some_and(is_counted)).await;
    let now = usage(&node).unwrap();
    assert_eq!(now.gpu_time_attribution, Some(GpuTimeAttribution::Events), "{now:?}");
    let labels = r#"namespace="ns",claim="shown",device="gpu-0-share",share="shown-share-0""#;
    let metrics = wait_for(&address, "/metrics", &format!("divvy_share_hand_overs_total{{{labels}}} ")).await;
    for line in [
        format!("divvy_share_gpu_seconds_total{{{labels}}} 0.02\n"),
        format!("divvy_share_throttled_seconds_total{{{labels}}} 0.4\n"),
        format!("divvy_share_late_hand_overs_total{{{labels}}} 0\n"),
        format!("divvy_share_gpu_time_attribution{{{labels},attribution=\"events\"}} 1\n"),
    ] {
        assert!(metrics.contains(&line), "{line:?} is not in {metrics}");
    }

    daemon.kill();
    let _daemon = node.start_daemon(&flags).await;
    let begins_again = |totals: ShareTotals| (totals.gpu_time_used_ms, totals.throttled_ms) == (0, 0);
    until("the totals begin at 0 again", || totals().is_some_and(begins_again)).await;

    container.tenant.kill();
    node.unprepare(&claim_ref("shown")).await.unwrap();
    let metrics = wait_for(&address, "/metrics", "divvy_share_audit_seconds_count").await;
    assert!(!metrics.contains(labels), "{metrics}");
}
