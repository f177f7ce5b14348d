//! Findings as a table: a scene, and what is wrong with it.

use super::super::look::Share;
use super::super::mounts;
use super::super::process::{Cgroups, Process};
use super::*;
use divvy_pages::account::{NodeLine, SlotReport};
use divvy_pages::{Compute, Flags, GpuUuid, Identity, Memory, Owner, Policy, Text};

pub(in super::super) const CONTEXT: u64 = 300;
const NAMESPACE: u64 = 4_026_531_836;
const DEVICE: Device = Device { gpu: GpuUuid([1; 16]), mig: None };

/// A GPU with shares and processes; memory is in MiB.
#[derive(Clone)]
pub(in super::super) struct Scene {
    look: Look,
    elsewhere: Vec<(u32, Identity)>,
    last: u32,
}

fn live(pid: u32, generation: u64) -> Owner {
    Owner(u64::from(pid) | generation << 32 | 2 << 48)
}

fn identity(pid: u32) -> Identity {
    // In its own namespace it has another number than on the host.
    Identity { pid: pid + 1000, namespace: NAMESPACE, start: u64::from(pid) * 10, image: 77 }
}

pub(in super::super) fn share(number: usize, limit: u64) -> Share {
    let (claim, id) = (format!("claim-{number}"), format!("share-{number}"));
    Share {
        claim: claim.as_str().into(),
        id: id.as_str().into(),
        policy: Policy {
            claim: Text::EMPTY,
            share: Text::EMPTY,
            gpu: DEVICE.gpu,
            mig: None,
            pci: Text::EMPTY,
            memory: Memory { limit: limit * MIB, context: CONTEXT * MIB, ..Memory::default() },
            compute: Compute::default(),
            codec: Default::default(),
            flags: Flags::default(),
        },
        page: Page { device: (0, 25), share: format!("{claim}/{id}") },
        account: Ok(Account { still: true, ..Account::default() }),
        containers: vec![("c1".to_owned(), Cgroups::parse("0::/kubepods/c1\n"))],
    }
}

/// What the container of these shares has mounted.
fn mounted(shares: &[Share]) -> String {
    let mut text = "1 0 0:50 / / rw - overlay overlay rw\n".to_owned();
    for (at, share) in shares.iter().enumerate() {
        for (file, options) in [("policy", "ro"), ("account", "rw")] {
            let (id, page) = (10 + 2 * at + usize::from(file == "account"), &share.page.share);
            text += &format!(
                "{id} 1 0:25 /divvy/shares/{page}/{file} /run/divvy/{page}/{file} {options} - tmpfs t rw\n"
            );
        }
    }
    text
}

impl Scene {
    /// One share with that limit and one container.
    pub(in super::super) fn share(limit: u64) -> Self {
        let look = Look { shares: vec![share(0, limit)], ..Look::default() };
        Self { look, elsewhere: Vec::new(), last: 0 }
    }

    /// The same container has a second one of the same GPU.
    pub(in super::super) fn second_share(&mut self, limit: u64) -> &mut Self {
        let number = self.look.shares.len();
        self.look.shares.push(share(number, limit));
        self
    }

    /// A process of the container, on the GPU.
    pub(in super::super) fn process(&mut self, pid: u32) -> &mut Self {
        let process = Process {
            pid,
            name: "python3".to_owned(),
            who: identity(pid),
            cgroups: Cgroups::parse("0::/kubepods/c1/below\n"),
            mounts: mounts::parse(&mounted(&self.look.shares)),
        };
        self.look.processes.insert(pid, process);
        self.last = pid;
        self
    }

    /// How much memory the last process has by NVML.
    pub(in super::super) fn has(&mut self, memory: u64) -> &mut Self {
        self.look.uses.push(Use { pid: self.last, device: DEVICE, bytes: Some(memory * MIB) });
        self
    }

    fn change(&mut self, change: impl FnOnce(&mut Process)) -> &mut Self {
        change(self.look.processes.get_mut(&self.last).expect("a process"));
        self
    }

    pub(in super::super) fn elsewhere_cgroup(&mut self) -> &mut Self {
        self.change(|process| process.cgroups = Cgroups::parse("0::/kubepods/c2\n"))
    }

    pub(in super::super) fn sees(&mut self, mountinfo: &str) -> &mut Self {
        let mounts = mounts::parse(mountinfo);
        self.change(|process| process.mounts = mounts)
    }

    fn account(&mut self, share: usize) -> &mut Account {
        self.look.shares[share].account.as_mut().expect("a page")
    }

    /// The process is registered and charged so much, one context of it.
    pub(in super::super) fn slot(&mut self, pid: u32, held: u64) -> &mut Self {
        self.slot_on(0, pid, held)
    }

    pub(in super::super) fn slot_on(&mut self, share: usize, pid: u32, held: u64) -> &mut Self {
        let account = self.account(share);
        let owner = live(pid, 1);
        let report = SlotReport {
            index: account.slots.len(),
            owner,
            who: identity(pid),
            held: held * MIB,
            in_flight: 0,
            context: held.min(CONTEXT) * MIB,
            managed: 0,
            charged_ns: 0,
            waited_ns: 0,
            measured_ns: 0,
            least_ns: 0,
            encoders: 0,
            decoders: 0,
            idle: 0,
            line: NodeLine { about: Owner(0), dead: false, correction: 0, host_pid: 0 },
        };
        account.slots.push(Slot { report, still: true });
        account.used += held * MIB;
        self
    }

    fn slot_mut(&mut self, pid: u32) -> &mut Slot {
        let found = self.account(0).slots.iter_mut().find(|slot| slot.report.who.pid == pid + 1000);
        found.expect("a slot")
    }

    pub(in super::super) fn managed(&mut self, pid: u32, managed: u64) -> &mut Self {
        self.slot_mut(pid).report.managed = managed * MIB;
        self
    }

    pub(in super::super) fn moving(&mut self, pid: u32) -> &mut Self {
        self.slot_mut(pid).still = false;
        self.account(0).still = false;
        self
    }

    /// The node has said so of the slot.
    pub(in super::super) fn corrected(&mut self, pid: u32, correction: i64) -> &mut Self {
        let slot = self.slot_mut(pid);
        let correction = correction * MIB as i64;
        slot.report.line = NodeLine { about: slot.report.owner, dead: false, correction, host_pid: pid };
        self
    }

    /// The last process is not among those that were looked at.
    pub(in super::super) fn only_elsewhere(&mut self, pid: u32) -> &mut Self {
        self.look.processes.remove(&pid);
        self.elsewhere.push((pid, identity(pid)));
        self
    }

    pub(in super::super) fn elsewhere(&self) -> Vec<(u32, Identity)> {
        self.elsewhere.clone()
    }

    pub(in super::super) fn look(&self) -> Look {
        self.look.clone()
    }

    fn findings(&self) -> Vec<(Kind, Option<u32>)> {
        let findings = judge(&self.look, &Before::new()).into_iter();
        findings.map(|finding| (finding.kind, finding.process.map(|process| process.pid))).collect()
    }

    #[track_caller]
    fn expect(&self, expected: &[(Kind, Option<u32>)]) {
        assert_eq!(self.findings(), expected);
    }
}

#[test]
fn who_keeps_to_the_limit_is_left_alone() {
    let mut scene = Scene::share(10_000);
    scene.expect(&[]);
    scene.process(7).has(5000).slot(7, 5000).process(8).has(5000).slot(8, 5000);
    scene.expect(&[]);
    // Another pid namespace or a cgroup below are still the container.
    scene.change(|process| process.cgroups = Cgroups::parse("0::/kubepods/c1\n")).expect(&[]);
    // It has a handle to the GPU and no memory.
    scene.process(9).has(0).expect(&[]);
}

#[test]
fn who_has_memory_and_no_slot_hides() {
    let mut scene = Scene::share(10_000);
    scene.process(7).expect(&[]);
    scene.has(10).expect(&[(Kind::Hidden, Some(7))]);
    // Another's slot, a dead one's, or one of an earlier program is none of its own.
    scene.slot(8, 10).expect(&[(Kind::Hidden, Some(7))]);
    let mut scene = Scene::share(10_000);
    scene.process(7).has(10).slot(7, 10);
    scene.expect(&[]);
    for change in [
        |slot: &mut Slot| slot.report.who.start += 1,
        |slot: &mut Slot| slot.report.who.image += 1,
        |slot: &mut Slot| slot.report.who.namespace += 1,
        |slot: &mut Slot| slot.report.owner = Owner(slot.report.owner.0 | 1 << 48),
    ] {
        let mut scene = scene.clone();
        change(scene.slot_mut(7));
        scene.expect(&[(Kind::Hidden, Some(7))]);
    }
    // A process that has no /proc to read cannot tell more than its number.
    scene.slot_mut(7).report.who = Identity { pid: 1007, namespace: 0, start: 0, image: 0 };
    scene.expect(&[]);
}

#[test]
fn a_page_that_cannot_be_read_accuses_nobody_and_a_spoiled_one_protects_nobody() {
    let mut scene = Scene::share(10_000);
    scene.process(7).has(10);
    scene.look.shares[0].account = Err(AccountError::Unreadable("too many open files".to_owned()));
    scene.expect(&[(Kind::Account, None)]);
    for spoiled in [AccountError::Spoiled(divvy_pages::PageError::Foreign), AccountError::Leased] {
        scene.look.shares[0].account = Err(spoiled);
        scene.expect(&[(Kind::Hidden, Some(7)), (Kind::Account, None)]);
    }
}

#[test]
fn a_limit_that_the_gpu_driver_keeps_needs_no_library() {
    let mut scene = Scene::share(10_000);
    scene.process(7).has(10);
    assert!(!judge(&scene.look, &Before::new())[0].report_only);
    scene.look.kept.insert("c1".to_owned());
    assert!(judge(&scene.look, &Before::new())[0].report_only);
}

#[test]
fn a_share_that_is_only_observed_is_only_reported() {
    let mut scene = Scene::share(100);
    scene.process(7).has(5000);
    scene.look.shares[0].policy.flags = Flags::OBSERVE_ONLY;
    let findings = judge(&scene.look, &Before::new());
    assert_eq!(findings.len(), 2);
    assert!(findings.iter().all(|finding| finding.report_only));
}

#[test]
fn who_passes_the_limit_is_named_and_the_neighbour_is_not() {
    let mut scene = Scene::share(10_000);
    // The second one's own page says little: it allocates behind the library's back.
    scene.process(7).has(4000).slot(7, 4000).process(8).has(9000).slot(8, 500);
    scene.expect(&[(Kind::Understated, Some(8)), (Kind::OverLimit, Some(8))]);
    // A total set to nothing lets honest calls go too far: the largest has to go.
    let mut scene = Scene::share(10_000);
    scene.process(7).has(4000).slot(7, 4000).process(8).has(9000).slot(8, 9000);
    scene.expect(&[(Kind::OverLimit, Some(8))]);
    // One that hides goes first though it has less.
    let mut scene = Scene::share(10_000);
    scene.process(7).has(9000).slot(7, 9000).process(8).has(4000);
    scene.expect(&[(Kind::Hidden, Some(8)), (Kind::OverLimit, Some(8))]);
    // As many as it takes.
    let mut scene = Scene::share(1000);
    scene.process(7).has(3000).process(8).has(2000).process(9).has(400).slot(9, 400);
    let over: Vec<_> = scene.findings().into_iter().filter(|(kind, _)| *kind == Kind::OverLimit).collect();
    assert_eq!(over, [(Kind::OverLimit, Some(7)), (Kind::OverLimit, Some(8))]);
}

#[test]
fn what_the_gpu_driver_takes_for_itself_ends_nobody() {
    let check = |beyond: u64, expected: &[(Kind, Option<u32>)]| {
        let mut scene = Scene::share(10_000);
        scene.process(7).has(10_000 + beyond).slot(7, 10_000).expect(expected);
    };
    check(0, &[]);
    check(1, &[(Kind::Overhead, None)]);
    check(2 * CONTEXT, &[(Kind::Overhead, None)]);
    check(2 * CONTEXT + 1, &[(Kind::Understated, Some(7)), (Kind::OverLimit, Some(7))]);
    // Each process has its own.
    let mut scene = Scene::share(10_000);
    for pid in [7, 8, 9] {
        scene.process(pid).has(3333 + 600).slot(pid, 3333);
    }
    scene.expect(&[(Kind::Overhead, None)]);
    // Not one that is not registered.
    scene.process(10).has(200);
    let kinds: Vec<Kind> = scene.findings().into_iter().map(|(kind, _)| kind).collect();
    assert_eq!(kinds, [Kind::Hidden, Kind::OverLimit]);
}

#[test]
fn pages_of_one_gpu_in_one_container_add_up() {
    let check = |first: u64, second: u64, expected: &[(Kind, Option<u32>)]| {
        let mut scene = Scene::share(1000);
        scene.second_share(2000);
        // The second container has the first share only.
        let other = ("c2".to_owned(), Cgroups::parse("0::/kubepods/c2\n"));
        scene.look.shares[0].containers.push(other);
        scene.process(7).has(first).slot(7, first);
        scene.process(8).has(second).slot(8, second).elsewhere_cgroup();
        let page = mounted(&scene.look.shares[..1]);
        scene.sees(&page).expect(expected);
    };
    check(3000, 0, &[]);
    check(2000, 1000, &[]);
    check(2500, 1000, &[(Kind::OverLimit, Some(7))]);
    // It has not got the second share.
    check(1000, 1500, &[(Kind::OverLimit, Some(8))]);
}

#[test]
fn a_process_without_a_share_is_told_of_only_where_shares_are() {
    let mut scene = Scene::share(10_000);
    scene.process(7).has(500).elsewhere_cgroup().sees("");
    scene.expect(&[(Kind::Stranger, Some(7))]);
    assert!(judge(&scene.look, &Before::new())[0].report_only);
    // The shares are of one instance, it is on another.
    scene.look.shares[0].policy.mig = Some(GpuUuid([2; 16]));
    scene.look.uses[0].device.mig = Some(GpuUuid([3; 16]));
    scene.expect(&[]);
}

#[test]
fn without_a_hook_the_mounted_page_tells_whose_a_process_is() {
    let mut scene = Scene::share(10_000);
    scene.process(7).has(10);
    scene.look.shares[0].containers.clear();
    scene.expect(&[(Kind::Hidden, Some(7))]);
    scene.sees("1 0 0:50 / / rw - overlay overlay rw\n").expect(&[(Kind::Stranger, Some(7))]);
}

#[test]
fn a_page_that_is_covered_is_found_and_a_process_beside_the_gpu_is_not_ended_for_it() {
    let mut scene = Scene::share(10_000);
    let cover = "90 10 0:77 /x /run/divvy/claim-0/share-0/policy rw - tmpfs t rw\n";
    let seen = mounted(&scene.look.shares) + cover;
    scene.process(7).has(10).slot(7, 10).sees(&seen).expect(&[(Kind::Pages, Some(7))]);
    assert!(!judge(&scene.look, &Before::new())[0].report_only);
    scene.look.uses.clear();
    scene.expect(&[(Kind::Pages, Some(7))]);
    assert!(judge(&scene.look, &Before::new())[0].report_only);
    scene.sees("1 0 0:50 / / rw - overlay overlay rw\n").expect(&[(Kind::NoPages, Some(7))]);
}

#[test]
fn what_no_honest_process_writes_on_the_account_page_is_found() {
    let check = |lie: fn(&mut Scene), text: &str| {
        let mut scene = Scene::share(10_000);
        scene.process(7).has(2000).slot(7, 2000).process(8).has(100).slot(8, 100);
        let before = remember(&scene.look);
        assert!(judge(&scene.look, &before).is_empty());
        lie(&mut scene);
        let findings = judge(&scene.look, &before);
        let found = findings.iter().find(|finding| finding.kind == Kind::Account);
        let told = found.map(|finding| finding.text.as_str()).unwrap_or_default();
        assert!(told.contains(text), "{text}: {findings:?}");
        assert_eq!(told.is_empty(), text.is_empty(), "{findings:?}");
    };
    check(|scene| scene.account(0).used = 0, "0 MiB are used");
    check(|scene| scene.account(0).balance = i64::MAX, "balance");
    check(|scene| scene.account(0).is_long = true, "larger");
    check(|scene| scene.slot_mut(7).report.owner = live(7, 9), "generation");
    check(|scene| scene.slot_mut(8).report.who = identity(7), "slot of process 1008");
    // A drift upwards, a change under way, a new process in an old slot.
    check(|scene| scene.account(0).used = 9000 * MIB, "");
    check(
        |scene| {
            scene.moving(7);
            scene.account(0).used = 0;
        },
        "",
    );
    check(
        |scene| {
            scene.only_elsewhere(8);
            scene.look.uses.retain(|usage| usage.pid != 8);
            let slot = scene.slot_mut(8);
            (slot.report.who.start, slot.report.owner) = (4711, live(8, 2));
        },
        "",
    );
    // What the node took off a context need not be charged again yet.
    check(|scene| scene.account(0).used = 1700 * MIB, "");
}
