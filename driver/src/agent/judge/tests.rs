//! Findings as a table: a scene, and what is wrong with it.

mod memory;
mod pages;

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
            long_ns: 0,
            spared_ns: 0,
            encoders: 0,
            decoders: 0,
            idle: 0,
            line: NodeLine { about: Owner(0), dead: false, correction: 0, host_pid: 0 },
        };
        account.slots.push(Slot { report, still: true });
        account.used += held * MIB;
        self
    }

    pub(in super::super) fn slot_mut(&mut self, pid: u32) -> &mut Slot {
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
