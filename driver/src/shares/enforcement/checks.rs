//! Finds everything that is wrong in a [`Snapshot`], except compute limits ([`super::compute_limit`]).
//!
//! Trust: NVML says how much memory a process has, and the kernel says which container it is in.
//! The account page is written by the container; it can only reduce what a claim may use, never
//! extend it.

use crate::shares::snapshot::finding::{Finding, Kind, Suspect};
use crate::shares::snapshot::mounts::{self, Fault, Page};
use crate::shares::snapshot::process::Process;
use crate::shares::snapshot::{Account, ProcessMemory, Share, ShareKey, Slot, Snapshot, belongs_to};
use divvy_api::sharing::CUDA_CONTEXT_BYTES;
use std::collections::{BTreeMap, BTreeSet};

const MIB: u64 = 1 << 20;

/// The driver memory that one process may use, in context estimates: one for a context and one for modules.
const PROCESS_ALLOWANCE_CONTEXTS: u64 = 2;
/// The driver memory for modules that all processes of a share may use together, in context estimates.
const MODULE_ALLOWANCE_CONTEXTS: u64 = 4;

/// A process on a device that has shares.
struct Tenant<'a> {
    usage: &'a ProcessMemory,
    process: &'a Process,
    /// Indices of the shares of this device that the process belongs to.
    shares: BTreeSet<usize>,
    /// Its slots, each with the index of its share.
    slots: Vec<(usize, &'a Slot)>,
    /// Bytes charged to it. A slot that is changing counts with its last value.
    held: u64,
}

impl Tenant<'_> {
    fn bytes(&self) -> u64 {
        self.usage.bytes.unwrap_or(0)
    }

    fn is_registered(&self) -> bool {
        !self.slots.is_empty()
    }

    fn is_stable(&self) -> bool {
        self.slots.iter().all(|(_, slot)| slot.is_stable)
    }

    /// Bytes beyond the charge; the maximum if a slot is changing.
    fn excess(&self) -> u64 {
        if self.is_stable() { self.bytes().saturating_sub(self.held) } else { u64::MAX }
    }

    fn suspect(&self) -> Suspect {
        Suspect::of(self.process)
    }
}

/// Returns all findings. `before` are the live slots of the last audit.
///
/// Honest processes can differ from their charge without causing a finding:
/// - A process registers before its first call into the GPU driver, and the pages are read after
///   NVML. A process without a slot is therefore never a matter of timing.
/// - An allocation in progress shows as in flight. A slot that changed while NVML was queried is
///   not compared.
/// - The GPU driver uses memory that is not charged; see [`share_allowance`].
pub(crate) fn check(snapshot: &Snapshot, before: &SlotHistory) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut tenants = Vec::new();
    for usage in &snapshot.uses {
        // A process that exited meanwhile is not checked.
        let Some(process) = snapshot.processes.get(&usage.pid) else { continue };
        let all = snapshot.shares_of(process);
        let shares: BTreeSet<usize> =
            all.iter().copied().filter(|at| snapshot.shares[*at].device() == usage.device).collect();
        if shares.is_empty() {
            findings.extend(check_unmanaged(snapshot, usage, process));
            continue;
        }
        let slots: Vec<(usize, &Slot)> = shares
            .iter()
            .flat_map(|at| snapshot.shares[*at].slots_of(process).map(|slot| (*at, slot)))
            .collect();
        let held = slots.iter().map(|(_, slot)| slot.report.held).sum();
        tenants.push(Tenant { usage, process, shares, slots, held });
    }
    let on_gpu: BTreeSet<u32> = tenants.iter().map(|tenant| tenant.process.pid).collect();
    findings.extend(tenants.iter().filter_map(|tenant| check_registered(snapshot, tenant)));
    findings.extend(tenants.iter().filter_map(|tenant| check_reported(snapshot, tenant)));
    for device in snapshot.uses.iter().map(|usage| usage.device).collect::<BTreeSet<_>>() {
        let here: Vec<&Tenant<'_>> = tenants.iter().filter(|tenant| tenant.usage.device == device).collect();
        findings.extend(check_memory_limits(snapshot, &here));
    }
    for process in snapshot.processes.values() {
        findings.extend(check_pages(snapshot, process, on_gpu.contains(&process.pid)));
    }
    let accounts =
        snapshot.shares.iter().filter_map(|share| check_account(snapshot, share, before.get(&share.key())));
    findings.extend(accounts);
    findings
}

/// The live slots of an audit, by share.
pub(crate) type SlotHistory = BTreeMap<ShareKey, Vec<Slot>>;

/// The slots with which the next audit compares.
pub(crate) fn live_slots(snapshot: &Snapshot) -> SlotHistory {
    let live = |share: &Share| {
        let slots = share.account.as_ref().map(|account| account.slots.as_slice()).unwrap_or_default();
        slots.iter().filter(|slot| slot.is_live()).copied().collect()
    };
    snapshot.shares.iter().map(|share| (share.key(), live(share))).collect()
}

fn first_share<'a>(snapshot: &'a Snapshot, tenant: &Tenant<'_>) -> Option<&'a Share> {
    tenant.shares.first().and_then(|at| snapshot.shares.get(*at))
}

fn check_unmanaged(snapshot: &Snapshot, usage: &ProcessMemory, process: &Process) -> Option<Finding> {
    // An instance without shares may belong to another claim.
    let is_shared = snapshot.shares.iter().any(|share| share.device() == usage.device);
    is_shared.then(|| Finding {
        kind: Kind::UnmanagedProcess,
        claim: None,
        share: None,
        process: Some(Suspect::of(process)),
        text: format!(
            "it uses {} of {}, which is shared, but belongs to no claim with a share of it",
            amount(usage.bytes),
            usage.device
        ),
        report_only: true,
        certain: false,
    })
}

fn check_registered(snapshot: &Snapshot, tenant: &Tenant<'_>) -> Option<Finding> {
    // A process without memory takes nothing from its neighbours.
    if tenant.is_registered() || tenant.usage.bytes == Some(0) {
        return None;
    }
    let share = first_share(snapshot, tenant)?;
    // A page that the node cannot read is no evidence against a process.
    if tenant
        .shares
        .iter()
        .any(|at| snapshot.shares[*at].account.as_ref().is_err_and(|error| !error.is_tampering()))
    {
        return None;
    }
    let text = format!(
        "it uses {} of {} but is not registered on the account page: it does not use the library that \
         enforces the limit",
        amount(tenant.usage.bytes),
        tenant.usage.device
    );
    let mut finding = Finding::about(share, Kind::Unregistered, Some(tenant.suspect()), text);
    // If the driver limits the container, the process cannot exceed the limit, with or without the library.
    finding.report_only |=
        share.container(tenant.process).is_some_and(|id| snapshot.driver_limited.contains(id));
    Some(finding)
}

fn check_reported(snapshot: &Snapshot, tenant: &Tenant<'_>) -> Option<Finding> {
    let share = first_share(snapshot, tenant)?;
    let is_explained = tenant.excess() <= process_allowance(snapshot, tenant);
    if !tenant.is_registered() || !tenant.is_stable() || is_explained {
        return None;
    }
    let text = format!(
        "it uses {} of {} but is charged {}; the difference counts towards the limit",
        amount(tenant.usage.bytes),
        tenant.usage.device,
        amount(Some(tenant.held))
    );
    Some(Finding::about(share, Kind::UnderReported, Some(tenant.suspect()), text))
}

/// Checks sets of pages against the sum of their limits.
///
/// A container may see pages of several claims, and their limits add up. The processes that see
/// only pages of a set must fit into the sum of the set's limits. Checked for every set that a
/// process sees and for every set of pages that processes connect, this holds exactly if all memory
/// can be distributed over the pages.
fn check_memory_limits(snapshot: &Snapshot, tenants: &[&Tenant<'_>]) -> Vec<Finding> {
    let mut findings: BTreeMap<u32, Finding> = BTreeMap::new();
    let mut overheads = Vec::new();
    for set in page_sets(tenants) {
        let limit: u64 =
            set.iter().map(|at| snapshot.shares[*at].policy.memory.limit).fold(0, u64::saturating_add);
        let mut here: Vec<&Tenant<'_>> =
            tenants.iter().copied().filter(|tenant| tenant.shares.is_subset(&set)).collect();
        let sum =
            |of: &[&Tenant<'_>]| of.iter().fold(0_u64, |sum, tenant| sum.saturating_add(tenant.bytes()));
        let total = sum(&here);
        if total <= limit {
            continue;
        }
        let allowed = |of: &[&Tenant<'_>]| limit.saturating_add(share_allowance(snapshot, of, limit));
        let facts = format!("{} together, and the limit is {}", amount(Some(total)), amount(Some(limit)));
        // Unregistered processes come first, then the largest. Name as few as bring the rest within
        // the limit.
        here.sort_by_key(|tenant| (!tenant.is_registered(), tenant.bytes()));
        if sum(&here) <= allowed(&here) {
            let Some(share) = set.first().and_then(|at| snapshot.shares.get(*at)) else { continue };
            let text = format!("its processes use {facts}; the difference is the GPU driver's own memory");
            overheads.push(Finding::about(share, Kind::DriverOverhead, None, text));
            continue;
        }
        while sum(&here) > allowed(&here)
            && let Some(worst) = here.pop()
        {
            let Some(share) = first_share(snapshot, worst) else { continue };
            let text = format!("it uses {}; the claim's processes use {facts}", amount(worst.usage.bytes));
            let finding = Finding::about(share, Kind::OverMemoryLimit, Some(worst.suspect()), text);
            findings.entry(worst.process.pid).or_insert(finding);
        }
    }
    findings.into_values().chain(overheads).collect()
}

/// The sets of pages that some process sees, and the unions of sets that overlap; smallest first.
fn page_sets(tenants: &[&Tenant<'_>]) -> Vec<BTreeSet<usize>> {
    let seen: BTreeSet<BTreeSet<usize>> = tenants.iter().map(|tenant| tenant.shares.clone()).collect();
    let mut connected: Vec<BTreeSet<usize>> = Vec::new();
    for set in &seen {
        let (joined, apart): (Vec<_>, Vec<_>) =
            connected.into_iter().partition(|other| !other.is_disjoint(set));
        connected = apart;
        connected.push(joined.into_iter().flatten().chain(set.iter().copied()).collect());
    }
    let mut all: Vec<_> = seen.into_iter().chain(connected).collect();
    all.sort_by_key(|set| (set.len(), set.clone()));
    all.dedup();
    all
}

/// Checks the pages that a process of a claim's container sees.
fn check_pages(snapshot: &Snapshot, process: &Process, is_on_gpu: bool) -> Vec<Finding> {
    let shares = snapshot.shares_of(process);
    let Some(first) = shares.first().and_then(|at| snapshot.shares.get(*at)) else { return Vec::new() };
    let known: Vec<&Page> =
        snapshot.shares.iter().map(|share| &share.page).chain(&*snapshot.node_pages).collect();
    let mut all: Vec<(&Share, Fault)> = shares
        .iter()
        .filter_map(|at| snapshot.shares.get(*at))
        .flat_map(|share| mounts::check(&process.mounts, &share.page).into_iter().map(move |it| (share, it)))
        .collect();
    all.extend(mounts::forged(&process.mounts, &known).into_iter().map(|it| (first, it)));
    // One finding of each kind per process is enough.
    let mut findings: BTreeMap<Kind, Finding> = BTreeMap::new();
    for (share, fault) in all {
        let (kind, text) = match &fault {
            Fault::Missing(path) => (Kind::PagesMissing, format!("it does not see {path}")),
            Fault::Masked(path) => (Kind::PagesMasked, format!("something else is mounted at {path}")),
            Fault::Writable(path) => (Kind::PagesMasked, format!("{path} is mounted writable")),
            Fault::TooManyMounts => (Kind::PagesMasked, "it has more mounts than the agent reads".to_owned()),
            Fault::Forged(path) => (Kind::PagesMasked, format!("{path} is not a page of this node")),
        };
        let mut finding = Finding::about(share, kind, Some(Suspect::of(process)), text);
        // A process that does not use the GPU takes nothing from its neighbours.
        finding.report_only |= !is_on_gpu;
        findings.entry(kind).or_insert(finding);
    }
    findings.into_values().collect()
}

/// Checks for values that an honest process never writes.
fn check_account(snapshot: &Snapshot, share: &Share, before: Option<&Vec<Slot>>) -> Option<Finding> {
    let account = match &share.account {
        Ok(account) => account,
        // Certain, because a corrupt page is repaired at once and cannot be found a second time.
        Err(error) => {
            let certain = error.is_tampering();
            return Some(Finding {
                certain,
                ..Finding::about(share, Kind::AccountMismatch, None, error.to_string())
            });
        }
    };
    let before = before.map(Vec::as_slice).unwrap_or_default();
    let text = account_mismatch(snapshot, account, before)?;
    Some(Finding { certain: true, ..Finding::about(share, Kind::AccountMismatch, None, text) })
}

/// The first impossible value of an account page, as a sentence.
fn account_mismatch(snapshot: &Snapshot, account: &Account, before: &[Slot]) -> Option<String> {
    let Account { used, balance, slots, .. } = account;
    if account.is_oversized {
        return Some("the file of the account page is larger than a page".to_owned());
    }
    if account.has_forged_balance() {
        return Some(format!(
            "the account page has a balance of {balance} ns of GPU time, more than the node ever grants"
        ));
    }
    let live: Vec<&Slot> = slots.iter().filter(|slot| slot.is_live()).collect();
    // A slot belongs to one process in one generation for the whole life of that process. A process
    // may have several slots, one for each copy of the library that it loaded.
    let stolen = before.iter().find(|last| {
        let now = live.iter().find(|slot| slot.report.index == last.report.index);
        let is_identified = last.report.identity.start != 0 && last.report.identity.image != 0;
        let id = |slot: &Slot| (slot.report.owner, slot.report.identity);
        is_identified
            && now.is_some_and(|now| id(now) != id(last))
            && snapshot.processes.values().any(|process| belongs_to(&last.report, &process.identity))
    });
    if let Some(slot) = stolen {
        let pid = slot.report.identity.pid;
        return Some(format!(
            "the slot of process {pid} on the account page has another owner or generation"
        ));
    }
    account.is_below_its_slots().then(|| {
        let (used, min) = (amount(Some(*used)), amount(Some(account.min_used())));
        format!("the account page states a total of {used}, but its slots hold {min}")
    })
}

/// The estimate of a context, in bytes.
fn context_estimate(snapshot: &Snapshot, tenant: &Tenant<'_>) -> u64 {
    let estimates = tenant.shares.iter().map(|at| snapshot.shares[*at].policy.memory.context);
    // A measured context that is larger is charged, so it does not extend the allowance.
    estimates.max().unwrap_or_default().min(CUDA_CONTEXT_BYTES)
}

/// The GPU driver's own memory that one process may have beyond its charge, in bytes.
fn process_allowance(snapshot: &Snapshot, tenant: &Tenant<'_>) -> u64 {
    context_estimate(snapshot, tenant).saturating_mul(PROCESS_ALLOWANCE_CONTEXTS)
}

/// The GPU driver's own memory that processes with a common limit may have beyond that limit, in
/// bytes. Unregistered processes get no allowance.
///
/// A context is charged its estimate before it is created. The driver's real usage (contexts,
/// modules, local memory) is measured and written to the slot within two audits, and counts towards
/// the limit from then on. Charges never exceed the limit. Honest processes are therefore above it
/// only by driver memory since their last charge:
///
/// - *Contexts.* Any number of processes may start at once and all be charged before one is
///   measured. The estimate is 300 MiB, and current data centre GPUs use 300 to 600 MiB for a
///   context with its libraries. This allows one more estimate for each process, at most its
///   charge. The sum of all charges is within the limit, so this is at most the limit.
///
/// - *Modules*, kernel stacks and the like, if they are loaded when the limit is already reached.
///   Programs load most of them with their contexts. This allows [`MODULE_ALLOWANCE_CONTEXTS`]
///   estimates for all processes together, and with the context at most
///   [`PROCESS_ALLOWANCE_CONTEXTS`] for each.
///
/// A process that allocates behind the library gets the same allowance, and amounts alone cannot
/// tell the two apart. But the context allowance requires a charged context, which itself takes
/// about an estimate. So beside contexts a share never has more than its limit and
/// [`MODULE_ALLOWANCE_CONTEXTS`] estimates.
fn share_allowance(snapshot: &Snapshot, tenants: &[&Tenant<'_>], limit: u64) -> u64 {
    let registered = || tenants.iter().filter(|tenant| tenant.is_registered());
    let (mut contexts, mut modules) = (0_u64, 0_u64);
    for tenant in registered() {
        let excess = tenant.excess().min(process_allowance(snapshot, tenant));
        let of_context = excess.min(context_estimate(snapshot, tenant)).min(tenant.held);
        contexts = contexts.saturating_add(of_context);
        modules = modules.saturating_add(excess - of_context);
    }
    let estimate = registered().map(|tenant| context_estimate(snapshot, tenant)).max().unwrap_or_default();
    // Containers write the charges, so their sum may exceed the limit.
    contexts.min(limit).saturating_add(modules.min(estimate.saturating_mul(MODULE_ALLOWANCE_CONTEXTS)))
}

/// Formats bytes as MiB, rounded up.
fn amount(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "memory".to_owned(), |bytes| format!("{} MiB", bytes.div_ceil(MIB)))
}

#[cfg(test)]
mod tests;
