//! What the agent finds, does and writes.

use super::account::Page;
use super::world::{CONTEXT, MIB, World};
use divvy_driver::agent::{Done, Kind};
use divvy_pages::Compute;
use divvy_pages::account::HEADER;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

const OLD: &str = "580.95.05";
const WITH_LIMITS: &str = "615.10.01";
const DEFAULT: &str = "hidden,over-limit,over-time,pages";

async fn until(what: &str, done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < Duration::from_secs(60), "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn honest_processes_are_measured_and_left_alone() {
    let world = World::up(OLD);
    let page = world.share("a", 4000);
    let mut tenant = world.tenant("a", 1500);
    let slot = page.register(&tenant.who());
    assert!(page.charge(slot, (CONTEXT + 1000) * MIB));
    page.note(slot, CONTEXT * MIB);
    let mut agent = world.agent(DEFAULT).await;
    agent.finds_nothing(3).await;
    let line = page.report(slot).unwrap().line;
    assert_eq!((line.host_pid, line.dead), (tenant.pid(), false));
    assert_eq!(line.correction, 200 * MIB as i64, "what the GPU driver takes beyond the charge");
    assert!(page.attention() > 0);
    assert!(tenant.lives());
    assert_eq!(world.context_mib(), Some(500), "what is not of its allocations");
    // The next charge goes by it: 1500 of 4000 are taken.
    page.tidy();
    assert!(!page.charge(slot, 2501 * MIB));
    assert!(page.charge(slot, 2500 * MIB));
}

#[tokio::test]
async fn a_process_that_hides_is_ended_and_its_neighbours_are_not() {
    let world = World::up(OLD);
    let (page, neighbours) = (world.share("a", 4000), world.share("b", 4000));
    let (mut honest, mut hidden) = (world.tenant("a", 1000), world.tenant("a", 100));
    let mut neighbour = world.tenant("b", 500);
    page.charge(page.register(&honest.who()), 1000 * MIB);
    neighbours.charge(neighbours.register(&neighbour.who()), 500 * MIB);
    let mut agent = world.agent(DEFAULT).await;
    let told = agent.until(Kind::Hidden).await;
    assert_eq!(told, [(Kind::Hidden, Some(hidden.pid()), Done::Ended)]);
    agent.well().await;
    assert!(!hidden.lives());
    assert!(honest.lives() && neighbour.lives());
}

#[tokio::test]
async fn who_takes_more_time_than_its_ceiling_is_ended_and_its_neighbour_is_not() {
    let world = World::up(OLD);
    // Both work as much as they can, and no library holds them up.
    let held = Compute { cores: 10, ceiling: 10, ..Compute::default() };
    let page = Page::map(&world.pages_with("a", 4000, held).join("account"), 4000 * MIB);
    let neighbours = world.share("b", 4000);
    let (mut greedy, mut neighbour) = (world.tenant("a", 500), world.tenant("b", 500));
    page.charge(page.register(&greedy.who()), 500 * MIB);
    neighbours.charge(neighbours.register(&neighbour.who()), 500 * MIB);
    let mut agent = world.agent(DEFAULT).await;
    let told = agent.until(Kind::OverTime).await;
    assert_eq!(told, [(Kind::OverTime, Some(greedy.pid()), Done::Ended)]);
    agent.well().await;
    assert!(!greedy.lives());
    assert!(neighbour.lives());
}

#[tokio::test]
async fn what_is_only_to_be_reported_lives_on() {
    let world = World::up(OLD);
    let _page = world.share("a", 4000);
    let mut hidden = world.tenant("a", 100);
    let mut agent = world.agent("none").await;
    assert_eq!(agent.until(Kind::Hidden).await, [(Kind::Hidden, Some(hidden.pid()), Done::Reported)]);
    assert!(hidden.lives());
}

#[tokio::test]
async fn a_forged_total_gains_nothing_for_long() {
    let world = World::up(OLD);
    let page = world.share("a", 2000);
    let mut tenant = world.tenant("a", 4000);
    let slot = page.register(&tenant.who());
    // used := 0 after each charge.
    for _ in 0..2 {
        assert!(page.charge(slot, 2000 * MIB));
        page.forge(64, 0);
    }
    let mut agent = world.agent(DEFAULT).await;
    let told = agent.until(Kind::OverLimit).await;
    assert!(told.contains(&(Kind::Account, None, Done::Reported)), "{told:?}");
    assert!(told.contains(&(Kind::OverLimit, Some(tenant.pid()), Done::Ended)), "{told:?}");
    agent.well().await;
    assert!(!tenant.lives());
}

#[tokio::test]
async fn a_page_that_says_what_nobody_writes_is_told_of() {
    type Lie = fn(&Page, u16);
    let lies: [Lie; 5] = [
        |page, _| page.forge(64, 0),
        |page, _| page.forge(128, i64::MAX as u64),
        |page, _| page.forge(HEADER as u64 + 4, 0x0002_0009),
        |page, _| page.resize(0),
        |page, _| page.resize(1 << 20),
    ];
    let world = World::up(OLD);
    for (at, lie) in lies.iter().enumerate() {
        let claim = format!("claim-{at}");
        let page = world.share(&claim, 2000);
        let tenant = world.tenant(&claim, 1000);
        let slot = page.register(&tenant.who());
        page.charge(slot, 1000 * MIB);
        let mut agent = world.agent("none").await;
        agent.finds_nothing(2).await;
        lie(&page, slot);
        let told = agent.until(Kind::Account).await;
        assert!(told.contains(&(Kind::Account, None, Done::Reported)), "{at}: {told:?}");
        until("it is put right", || page.is_right()).await;
        agent.kill().await;
        let shares = divvy_driver::shares::Shares::new(&world.paths);
        shares.remove(&claim.as_str().into()).unwrap();
    }
}

#[tokio::test]
async fn a_policy_page_that_is_covered_ends_who_uses_the_gpu_behind_it() {
    let world = World::up(OLD);
    let page = world.share("a", 4000);
    let tenant = world.tenant("a", 1000);
    let slot = page.register(&tenant.who());
    page.charge(slot, 1000 * MIB);
    world.cover("a", &tenant);
    let mut agent = world.agent(DEFAULT).await;
    assert_eq!(agent.until(Kind::Pages).await, [(Kind::Pages, Some(tenant.pid()), Done::Ended)]);
}

/// `fcntl(2)`: nobody else may have the file open, and whoever opens it has to wait.
fn lease(path: &Path) -> io::Result<File> {
    unsafe extern "C" {
        fn fcntl(file: i32, command: i32, ...) -> i32;
        fn signal(number: i32, handler: usize) -> usize;
    }
    let (setlease, write_lock, sigio, ignore) = (1024, 1, 29, 1);
    let file = File::open(path)?;
    // SAFETY: plain system calls; ignoring the signal that asks for the lease back is no handler.
    let set = unsafe {
        signal(sigio, ignore);
        fcntl(file.as_raw_fd(), setlease, write_lock)
    };
    if set == 0 { Ok(file) } else { Err(io::Error::last_os_error()) }
}

#[tokio::test]
async fn a_lease_on_a_page_keeps_nobody_from_looking() {
    let world = World::up(OLD);
    let account = world.pages("a", 4000).join("account");
    let policy = world.pages("b", 4000).join("policy");
    let _lease = lease(&account).unwrap();
    let hidden = world.tenant("a", 100);
    let mut agent = world.agent(DEFAULT).await;
    let told = agent.until(Kind::Hidden).await;
    // Where it waited it would know no more of the lease.
    assert!(told.contains(&(Kind::Account, None, Done::Reported)), "{told:?}");
    assert!(told.contains(&(Kind::Hidden, Some(hidden.pid()), Done::Ended)), "{told:?}");
    // What it looks at is open, and not to be leased.
    assert_eq!(lease(&policy).unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

#[tokio::test]
async fn pages_that_were_removed_are_not_kept_open() {
    let world = World::up(OLD);
    let account = world.pages("a", 4000).join("account");
    let is_open = || {
        let mut files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        files.any(|file| {
            let path = std::fs::read_link(file.path()).unwrap_or_default();
            path.to_string_lossy().starts_with(account.to_str().unwrap())
        })
    };
    let mut agent = world.agent(DEFAULT).await;
    agent.finds_nothing(1).await;
    assert!(is_open());
    divvy_driver::shares::Shares::new(&world.paths).remove(&"a".into()).unwrap();
    until("it is closed", || !is_open()).await;
}

#[tokio::test]
async fn what_the_dead_held_is_free_again() {
    let world = World::up(OLD);
    let page = world.share("a", 2000);
    let (mut dying, living) = (world.tenant("a", 1500), world.tenant("a", CONTEXT));
    let (first, second) = (page.register(&dying.who()), page.register(&living.who()));
    assert!(page.charge(first, 1500 * MIB) && page.charge(second, CONTEXT * MIB));
    let mut agent = world.agent(DEFAULT).await;
    agent.finds_nothing(2).await;
    assert!(!page.charge(second, 1700 * MIB));
    dying.kill();
    // The survivor cannot tell: to it the other may be in another pid namespace.
    until("the slot is dead", || page.report(first).is_none_or(|slot| slot.line.dead)).await;
    page.tidy();
    assert!(page.charge(second, 1700 * MIB));
}

#[tokio::test]
async fn the_next_agent_takes_over_what_the_last_one_left() {
    let world = World::up(OLD);
    let page = world.share("a", 4000);
    let mut tenant = world.tenant("a", 1000);
    let slot = page.register(&tenant.who());
    page.charge(slot, 900 * MIB);
    let mut first = world.agent(DEFAULT).await;
    first.finds_nothing(2).await;
    let line = page.report(slot).unwrap().line;
    assert_eq!(line.correction, 100 * MIB as i64);
    // Two at once: one audits.
    let second = world.agent(DEFAULT).await;
    first.kill().await;
    let attention = page.attention();
    assert_eq!(page.report(slot).unwrap().line, line, "limits stay with the agent gone");
    let mut second = second;
    second.finds_nothing(2).await;
    assert_eq!(
        (page.report(slot).unwrap().line, page.attention()),
        (line, attention),
        "nothing is done again"
    );
    let hidden = world.tenant("a", 50);
    assert_eq!(second.until(Kind::Hidden).await, [(Kind::Hidden, Some(hidden.pid()), Done::Ended)]);
    assert!(tenant.lives());
}

#[tokio::test]
async fn where_the_gpu_driver_keeps_limits_it_is_told_them() {
    let world = World::up(WITH_LIMITS);
    let _page = world.share("a", 4000);
    let mut tenant = world.tenant("a", 1000);
    let cgroup = world.unified("a", tenant.pid());
    let mut agent = world.agent(DEFAULT).await;
    // Whatever it is linked with, it cannot have more.
    assert_eq!(agent.until(Kind::Hidden).await, [(Kind::Hidden, Some(tenant.pid()), Done::Reported)]);
    assert!(tenant.lives());
    let state = world.sim.read().unwrap();
    let limit = state.gpus[0].cgroup_limit(cgroup.to_str().unwrap()).unwrap();
    assert_eq!((limit.soft, limit.hard), (4000 * MIB, 4000 * MIB));
}

/// The clock stands, so that no audit comes: what is set is set because of the hook's file.
#[tokio::test]
async fn the_limit_of_a_container_is_set_when_the_hook_tells_of_it() {
    let world = World::up(WITH_LIMITS);
    let _page = world.share("a", 4000);
    let cgroup = world.unified("late", 1);
    let mut agent = world.agent(DEFAULT).await;
    agent.finds_nothing(1).await;
    tokio::time::pause();
    let dir = world.paths.run_dir.join("shares/a/s/cgroups");
    // While a thread is at work a clock that stands is not put forward.
    let told = tokio::task::spawn_blocking(move || {
        std::fs::write(dir.join(".late"), "0::/kubepods/late\n").unwrap();
        std::fs::rename(dir.join(".late"), dir.join("late")).unwrap();
        let begun = Instant::now();
        let limit = || {
            world.sim.read().unwrap().gpus[0].cgroup_limit(cgroup.to_str().unwrap()).map(|limit| limit.hard)
        };
        while limit().is_err() && begun.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(5));
        }
        limit().unwrap()
    });
    assert_eq!(told.await.unwrap(), 4000 * MIB);
}
