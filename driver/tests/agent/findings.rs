//! Findings of the agent, its actions, and what it writes to the pages.

use super::account::Page;
use super::test_node::{CONTEXT, MIB, RunningAgent, TestNode};
use divvy_driver::shares::agent::{Action, Kind};
use divvy_pages::Compute;
use divvy_pages::account::HEADER;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

const DRIVER_WITHOUT_LIMITS: &str = "580.95.05";
const DRIVER_WITH_LIMITS: &str = "615.10.01";
const DEFAULT_KINDS: &str = "unregistered,over-memory-limit,over-compute-limit,pages-masked";

async fn until(what: &str, done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < Duration::from_secs(60), "timeout while waiting until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn honest_processes_are_measured_and_not_killed() {
    let node = TestNode::new(DRIVER_WITHOUT_LIMITS);
    let page = node.share("a", 4000);
    let mut tenant = node.tenant("a", 1500);
    let slot = page.register(&tenant.identity());
    assert!(page.charge(slot, (CONTEXT + 1000) * MIB));
    page.set_context(slot, CONTEXT * MIB);
    let mut agent = node.agent(DEFAULT_KINDS).await;
    agent.audits_without_findings(3).await;
    let line = page.report(slot).unwrap().node_line;
    assert_eq!((line.host_pid, line.dead), (tenant.pid(), false));
    assert_eq!(line.correction, 200 * MIB as i64, "memory of the GPU driver beyond the charge");
    assert!(page.attention() > 0);
    assert!(tenant.is_running());
    assert_eq!(node.context_mib(), Some(500), "memory that is not allocations");
    // The next charge includes it: 1500 of 4000 MiB are used.
    page.reconcile();
    assert!(!page.charge(slot, 2501 * MIB));
    assert!(page.charge(slot, 2500 * MIB));
}

#[tokio::test]
async fn unregistered_process_is_killed_and_neighbours_are_not() {
    let node = TestNode::new(DRIVER_WITHOUT_LIMITS);
    let (page, neighbours) = (node.share("a", 4000), node.share("b", 4000));
    let (mut honest, mut unregistered) = (node.tenant("a", 1000), node.tenant("a", 100));
    let mut neighbour = node.tenant("b", 500);
    page.charge(page.register(&honest.identity()), 1000 * MIB);
    neighbours.charge(neighbours.register(&neighbour.identity()), 500 * MIB);
    let mut agent = node.agent(DEFAULT_KINDS).await;
    let findings = agent.until(Kind::Unregistered).await;
    assert_eq!(findings, [(Kind::Unregistered, Some(unregistered.pid()), Action::Killed)]);
    agent.resolved().await;
    assert!(!unregistered.is_running());
    assert!(honest.is_running() && neighbour.is_running());
}

#[tokio::test]
async fn process_over_its_ceiling_is_killed() {
    let node = TestNode::new(DRIVER_WITHOUT_LIMITS);
    // Both are busy all the time, and no library throttles them.
    let held = Compute { cores: 10, ceiling: 10, ..Compute::default() };
    let page = Page::map(&node.pages_with("a", 4000, held).join("account"), 4000 * MIB);
    let neighbours = node.share("b", 4000);
    let (mut greedy, mut neighbour) = (node.tenant("a", 500), node.tenant("b", 500));
    page.charge(page.register(&greedy.identity()), 500 * MIB);
    neighbours.charge(neighbours.register(&neighbour.identity()), 500 * MIB);
    let mut agent = node.agent(DEFAULT_KINDS).await;
    let findings = agent.until(Kind::OverComputeLimit).await;
    assert_eq!(findings, [(Kind::OverComputeLimit, Some(greedy.pid()), Action::Killed)]);
    agent.resolved().await;
    assert!(!greedy.is_running());
    assert!(neighbour.is_running());
}

#[tokio::test]
async fn report_only_findings_kill_no_process() {
    let node = TestNode::new(DRIVER_WITHOUT_LIMITS);
    let _page = node.share("a", 4000);
    let mut unregistered = node.tenant("a", 100);
    let mut agent = node.agent("none").await;
    assert_eq!(
        agent.until(Kind::Unregistered).await,
        [(Kind::Unregistered, Some(unregistered.pid()), Action::Reported)]
    );
    assert!(unregistered.is_running());
}

#[tokio::test]
async fn forged_total_is_detected() {
    let node = TestNode::new(DRIVER_WITHOUT_LIMITS);
    let page = node.share("a", 2000);
    let mut tenant = node.tenant("a", 4000);
    let slot = page.register(&tenant.identity());
    // Set the total to 0 after each charge.
    for _ in 0..2 {
        assert!(page.charge(slot, 2000 * MIB));
        page.forge(64, 0);
    }
    let mut agent = node.agent(DEFAULT_KINDS).await;
    let findings = agent.until(Kind::OverMemoryLimit).await;
    assert!(findings.contains(&(Kind::AccountMismatch, None, Action::Reported)), "{findings:?}");
    assert!(findings.contains(&(Kind::OverMemoryLimit, Some(tenant.pid()), Action::Killed)), "{findings:?}");
    agent.resolved().await;
    assert!(!tenant.is_running());
}

#[tokio::test]
async fn impossible_page_values_are_reported_and_repaired() {
    type Forge = fn(&Page, u16);
    let forgeries: [Forge; 5] = [
        |page, _| page.forge(64, 0),
        |page, _| page.forge(128, i64::MAX as u64),
        |page, _| page.forge(HEADER as u64 + 4, 0x0002_0009),
        |page, _| page.resize(0),
        |page, _| page.resize(1 << 20),
    ];
    let node = TestNode::new(DRIVER_WITHOUT_LIMITS);
    for (at, forge) in forgeries.iter().enumerate() {
        let claim = format!("claim-{at}");
        let page = node.share(&claim, 2000);
        let tenant = node.tenant(&claim, 1000);
        let slot = page.register(&tenant.identity());
        page.charge(slot, 1000 * MIB);
        let mut agent = node.agent("none").await;
        agent.audits_without_findings(2).await;
        forge(&page, slot);
        let findings = agent.until(Kind::AccountMismatch).await;
        assert!(findings.contains(&(Kind::AccountMismatch, None, Action::Reported)), "{at}: {findings:?}");
        until("the page is repaired", || page.is_intact()).await;
        agent.kill().await;
        let shares = divvy_driver::shares::Shares::new(&node.paths);
        shares.remove(&claim.as_str().into()).unwrap();
    }
}

#[tokio::test]
async fn masked_policy_page_kills_the_process() {
    let node = TestNode::new(DRIVER_WITHOUT_LIMITS);
    let page = node.share("a", 4000);
    let tenant = node.tenant("a", 1000);
    let slot = page.register(&tenant.identity());
    page.charge(slot, 1000 * MIB);
    node.mask_policy("a", &tenant);
    let mut agent = node.agent(DEFAULT_KINDS).await;
    assert_eq!(
        agent.until(Kind::PagesMasked).await,
        [(Kind::PagesMasked, Some(tenant.pid()), Action::Killed)]
    );
}

/// Takes a write lease on a file (`fcntl(2)`). This fails if another process has the file open;
/// later opens block.
fn lease(path: &Path) -> io::Result<File> {
    unsafe extern "C" {
        fn fcntl(file: i32, command: i32, ...) -> i32;
        fn signal(number: i32, handler: usize) -> usize;
    }
    let (setlease, write_lock, sigio, ignore) = (1024, 1, 29, 1);
    let file = File::open(path)?;
    // SAFETY: plain system calls. The signal that revokes the lease is ignored, so there is no handler.
    let set = unsafe {
        signal(sigio, ignore);
        fcntl(file.as_raw_fd(), setlease, write_lock)
    };
    if set == 0 { Ok(file) } else { Err(io::Error::last_os_error()) }
}

#[tokio::test]
async fn lease_on_a_page_does_not_block_the_audit() {
    let node = TestNode::new(DRIVER_WITHOUT_LIMITS);
    let account = node.pages("a", 4000).join("account");
    let policy = node.pages("b", 4000).join("policy");
    let _lease = lease(&account).unwrap();
    let unregistered = node.tenant("a", 100);
    let mut agent = node.agent(DEFAULT_KINDS).await;
    let findings = agent.until(Kind::Unregistered).await;
    // An agent that waited for the lease would not report it.
    assert!(findings.contains(&(Kind::AccountMismatch, None, Action::Reported)), "{findings:?}");
    assert!(
        findings.contains(&(Kind::Unregistered, Some(unregistered.pid()), Action::Killed)),
        "{findings:?}"
    );
    // The agent keeps the policy page open, so it cannot be leased.
    assert_eq!(lease(&policy).unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

#[tokio::test]
async fn removed_pages_are_closed() {
    let node = TestNode::new(DRIVER_WITHOUT_LIMITS);
    let account = node.pages("a", 4000).join("account");
    let is_open = || {
        let mut files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        files.any(|file| {
            let path = std::fs::read_link(file.path()).unwrap_or_default();
            path.to_string_lossy().starts_with(account.to_str().unwrap())
        })
    };
    let mut agent = node.agent(DEFAULT_KINDS).await;
    agent.audits_without_findings(1).await;
    assert!(is_open());
    divvy_driver::shares::Shares::new(&node.paths).remove(&"a".into()).unwrap();
    until("the page is closed", || !is_open()).await;
}

#[tokio::test]
async fn memory_of_a_dead_process_is_released() {
    check_memory_of_a_dead_process(async |_| {}).await;
}

#[tokio::test]
async fn memory_of_a_dead_process_is_released_while_nvml_is_closed() {
    check_memory_of_a_dead_process(async |agent| agent.drain().await).await;
}

async fn check_memory_of_a_dead_process(before_death: impl AsyncFnOnce(&RunningAgent)) {
    let node = TestNode::new(DRIVER_WITHOUT_LIMITS);
    let page = node.share("a", 2000);
    let (mut dying, living) = (node.tenant("a", 1500), node.tenant("a", CONTEXT));
    let (first, second) = (page.register(&dying.identity()), page.register(&living.identity()));
    assert!(page.charge(first, 1500 * MIB) && page.charge(second, CONTEXT * MIB));
    let mut agent = node.agent(DEFAULT_KINDS).await;
    agent.audits_without_findings(2).await;
    assert!(!page.charge(second, 1700 * MIB));
    before_death(&agent).await;
    dying.kill();
    // The other process cannot tell: the dead one might be in another pid namespace.
    until("the slot is dead", || page.report(first).is_none_or(|slot| slot.node_line.dead)).await;
    page.reconcile();
    assert!(page.charge(second, 1700 * MIB));
}

#[tokio::test]
async fn next_agent_takes_over() {
    let node = TestNode::new(DRIVER_WITHOUT_LIMITS);
    let page = node.share("a", 4000);
    let mut tenant = node.tenant("a", 1000);
    let slot = page.register(&tenant.identity());
    page.charge(slot, 900 * MIB);
    let mut first = node.agent(DEFAULT_KINDS).await;
    first.audits_without_findings(2).await;
    let line = page.report(slot).unwrap().node_line;
    assert_eq!(line.correction, 100 * MIB as i64);
    // Only one of two agents audits.
    let second = node.agent(DEFAULT_KINDS).await;
    first.kill().await;
    let attention = page.attention();
    assert_eq!(page.report(slot).unwrap().node_line, line, "limits stay without an agent");
    let mut second = second;
    second.audits_without_findings(2).await;
    assert_eq!(
        (page.report(slot).unwrap().node_line, page.attention()),
        (line, attention),
        "nothing is written twice"
    );
    let unregistered = node.tenant("a", 50);
    assert_eq!(
        second.until(Kind::Unregistered).await,
        [(Kind::Unregistered, Some(unregistered.pid()), Action::Killed)]
    );
    assert!(tenant.is_running());
}

#[tokio::test]
async fn limits_are_set_in_the_gpu_driver() {
    let node = TestNode::new(DRIVER_WITH_LIMITS);
    let _page = node.share("a", 4000);
    let mut tenant = node.tenant("a", 1000);
    let cgroup = node.unified_cgroup("a", tenant.pid());
    let mut agent = node.agent(DEFAULT_KINDS).await;
    // The driver enforces the limit, so the process is only reported.
    assert_eq!(
        agent.until(Kind::Unregistered).await,
        [(Kind::Unregistered, Some(tenant.pid()), Action::Reported)]
    );
    assert!(tenant.is_running());
    let state = node.sim.read().unwrap();
    let limit = state.gpus[0].cgroup_limit(cgroup.to_str().unwrap()).unwrap();
    assert_eq!((limit.soft, limit.hard), (4000 * MIB, 4000 * MIB));
}

/// The clock is paused, so there are no audits: the limit is set because of the hook's file.
#[tokio::test]
async fn driver_limit_is_set_when_the_hook_reports_a_container() {
    let node = TestNode::new(DRIVER_WITH_LIMITS);
    let _page = node.share("a", 4000);
    let cgroup = node.unified_cgroup("late", 1);
    let mut agent = node.agent(DEFAULT_KINDS).await;
    agent.audits_without_findings(1).await;
    tokio::time::pause();
    let dir = node.paths.run_dir.join("shares/a/s/cgroups");
    // Tokio does not advance a paused clock while a blocking thread runs.
    let limit = tokio::task::spawn_blocking(move || {
        std::fs::write(dir.join(".late"), "0::/kubepods/late\n").unwrap();
        std::fs::rename(dir.join(".late"), dir.join("late")).unwrap();
        let begun = Instant::now();
        let limit = || {
            node.sim.read().unwrap().gpus[0].cgroup_limit(cgroup.to_str().unwrap()).map(|limit| limit.hard)
        };
        while limit().is_err() && begun.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(5));
        }
        limit().unwrap()
    });
    assert_eq!(limit.await.unwrap(), 4000 * MIB);
}
