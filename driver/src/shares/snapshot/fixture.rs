//! Builds snapshots for tests.

use super::mounts::{self, Page};
use super::process::{Cgroups, Process};
use super::{Account, Device, ProcessMemory, Share, Slot, Snapshot};
use divvy_pages::account::{NodeLine, SlotReport};
use divvy_pages::{Compute, Flags, GpuUuid, Identity, Memory, Owner, Policy, Text};

const MIB: u64 = 1 << 20;
pub(crate) const CONTEXT: u64 = 300;
const NAMESPACE: u64 = 4_026_531_836;
const DEVICE: Device = Device { gpu: GpuUuid([1; 16]), mig: None };

/// Builds a snapshot of a GPU with shares and processes. Methods take memory in MiB.
#[derive(Clone)]
pub(crate) struct Fixture {
    pub(crate) snapshot: Snapshot,
    elsewhere: Vec<(u32, Identity)>,
    last: u32,
}

pub(crate) fn live(pid: u32, generation: u64) -> Owner {
    Owner(u64::from(pid) | generation << 32 | 2 << 48)
}

pub(crate) fn identity(pid: u32) -> Identity {
    // The pid in the container's namespace differs from that on the host.
    Identity { pid: pid + 1000, namespace: NAMESPACE, start: u64::from(pid) * 10, image: 77 }
}

pub(crate) fn share(number: usize, limit: u64) -> Share {
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
        account: Ok(Account { is_stable: true, ..Account::default() }),
        containers: vec![("c1".to_owned(), Cgroups::parse("0::/kubepods/c1\n"))],
    }
}

/// The `mountinfo` of the container of these shares.
pub(crate) fn mounted(shares: &[Share]) -> String {
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

impl Fixture {
    /// One share with this limit and one container.
    pub(crate) fn share(limit: u64) -> Self {
        let snapshot = Snapshot { shares: vec![share(0, limit)], ..Snapshot::default() };
        Self { snapshot, elsewhere: Vec::new(), last: 0 }
    }

    /// Adds a second share of the same GPU to the same container.
    pub(crate) fn second_share(&mut self, limit: u64) -> &mut Self {
        let number = self.snapshot.shares.len();
        self.snapshot.shares.push(share(number, limit));
        self
    }

    /// Adds a process of the container. The methods below change the last process.
    pub(crate) fn process(&mut self, pid: u32) -> &mut Self {
        let process = Process {
            pid,
            name: "python3".to_owned(),
            identity: identity(pid),
            cgroups: Cgroups::parse("0::/kubepods/c1/below\n"),
            mounts: mounts::parse(&mounted(&self.snapshot.shares)),
        };
        self.snapshot.processes.insert(pid, process);
        self.last = pid;
        self
    }

    /// Sets the memory that NVML reports.
    pub(crate) fn has(&mut self, memory: u64) -> &mut Self {
        self.snapshot.uses.push(ProcessMemory { pid: self.last, device: DEVICE, bytes: Some(memory * MIB) });
        self
    }

    pub(crate) fn change(&mut self, change: impl FnOnce(&mut Process)) -> &mut Self {
        change(self.snapshot.processes.get_mut(&self.last).expect("a process"));
        self
    }

    pub(crate) fn elsewhere_cgroup(&mut self) -> &mut Self {
        self.change(|process| process.cgroups = Cgroups::parse("0::/kubepods/c2\n"))
    }

    pub(crate) fn sees(&mut self, mountinfo: &str) -> &mut Self {
        let mounts = mounts::parse(mountinfo);
        self.change(|process| process.mounts = mounts)
    }

    pub(crate) fn account(&mut self, share: usize) -> &mut Account {
        self.snapshot.shares[share].account.as_mut().expect("a page")
    }

    /// Registers a process with this charge, which includes one context.
    pub(crate) fn slot(&mut self, pid: u32, held: u64) -> &mut Self {
        self.slot_on(0, pid, held)
    }

    pub(crate) fn slot_on(&mut self, share: usize, pid: u32, held: u64) -> &mut Self {
        let account = self.account(share);
        let owner = live(pid, 1);
        let report = SlotReport {
            index: account.slots.len(),
            owner,
            identity: identity(pid),
            held: held * MIB,
            in_flight: 0,
            context: held.min(CONTEXT) * MIB,
            managed: 0,
            charged_ns: 0,
            waited_ns: 0,
            measured_ns: 0,
            fastest_ns: 0,
            long_kernel_ns: 0,
            undercharged_ns: 0,
            quantum: None,
            encoders: 0,
            decoders: 0,
            idle_pool_bytes: 0,
            node_line: NodeLine { owner: Owner(0), dead: false, correction: 0, host_pid: 0 },
        };
        account.slots.push(Slot { report, is_stable: true });
        account.used += held * MIB;
        self
    }

    pub(crate) fn slot_mut(&mut self, pid: u32) -> &mut Slot {
        let found = self.account(0).slots.iter_mut().find(|slot| slot.report.identity.pid == pid + 1000);
        found.expect("a slot")
    }

    pub(crate) fn managed(&mut self, pid: u32, managed: u64) -> &mut Self {
        self.slot_mut(pid).report.managed = managed * MIB;
        self
    }

    pub(crate) fn moving(&mut self, pid: u32) -> &mut Self {
        self.slot_mut(pid).is_stable = false;
        self.account(0).is_stable = false;
        self
    }

    /// Sets the node's line of the slot.
    pub(crate) fn corrected(&mut self, pid: u32, correction: i64) -> &mut Self {
        let slot = self.slot_mut(pid);
        let correction = correction * MIB as i64;
        slot.report.node_line = NodeLine { owner: slot.report.owner, dead: false, correction, host_pid: pid };
        self
    }

    /// Moves a process from the snapshot to [`Fixture::elsewhere`].
    pub(crate) fn only_elsewhere(&mut self, pid: u32) -> &mut Self {
        self.snapshot.processes.remove(&pid);
        self.elsewhere.push((pid, identity(pid)));
        self
    }

    pub(crate) fn elsewhere(&self) -> Vec<(u32, Identity)> {
        self.elsewhere.clone()
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        self.snapshot.clone()
    }
}
