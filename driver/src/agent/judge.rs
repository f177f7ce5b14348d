//! What is wrong on a GPU: pure, from one [`Look`].
//!
//! **What is believed.** How much memory each process has is the GPU driver's word;
//! which container a process is in is the kernel's. The account page is the tenant's
//! word: it only ever makes a claim's room smaller, never larger.
//!
//! **Which limit.** All pages of one device that a container sees add up, and a
//! container may see pages of several claims. So the processes that see exactly some
//! pages, and those that see a part of them, must together fit into the sum of the
//! limits of these. Held for every set of pages that some process sees, and for every
//! set that is tied together by processes, this is the condition that all of it can be
//! dealt out to the pages.
//!
//! **How far honest processes are off.**
//! - A process registers before it makes its first call into the GPU driver, and pages
//!   are read after NVML is: one without a slot is not a matter of time.
//! - A process in the middle of an allocation is seen as such, by what is in flight; a
//!   slot that changed while NVML was asked is not compared.
//! - The GPU driver takes memory that nobody was charged. How much of it is let pass,
//!   and why no more, is told in [`overhead`]; whoever is beyond that has taken memory
//!   behind the library's back.

mod overhead;

use super::finding::{Finding, Kind, Suspect};
use super::look::{Account, AccountError, Device, Look, Share, Slot, Use, is_of};
use super::mounts::{self, Page, Trouble};
use super::process::Process;
use divvy_api::{ClaimUid, ShareId};
use std::collections::{BTreeMap, BTreeSet};

const MIB: u64 = 1 << 20;

/// A process on a device with shares.
struct Tenant<'a> {
    usage: &'a Use,
    process: &'a Process,
    /// Shares of that device that it belongs to, by index.
    shares: BTreeSet<usize>,
    /// Its slots, with the share of each.
    slots: Vec<(usize, &'a Slot)>,
    /// What it is charged. A slot that is being changed counts as it was last.
    held: u64,
}

impl Tenant<'_> {
    fn bytes(&self) -> u64 {
        self.usage.bytes.unwrap_or(0)
    }

    fn is_registered(&self) -> bool {
        !self.slots.is_empty()
    }

    fn is_still(&self) -> bool {
        self.slots.iter().all(|(_, slot)| slot.still)
    }

    /// What it has beyond what it was charged; all that there can be of one whose slot was being changed.
    fn beyond(&self) -> u64 {
        if self.is_still() { self.bytes().saturating_sub(self.held) } else { u64::MAX }
    }

    fn suspect(&self) -> Suspect {
        suspect(self.process)
    }
}

pub(super) fn suspect(process: &Process) -> Suspect {
    Suspect { pid: process.pid, start: process.who.start, name: process.name.clone() }
}

/// Everything that is wrong. `before` are the slots of the last look, by share.
pub(super) fn judge(look: &Look, before: &Before) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut tenants = Vec::new();
    for usage in &look.uses {
        // One that has ended meanwhile is nobody's trouble.
        let Some(process) = look.processes.get(&usage.pid) else { continue };
        let all = look.shares_of(process);
        let shares: BTreeSet<usize> =
            all.iter().copied().filter(|at| look.shares[*at].device() == usage.device).collect();
        if shares.is_empty() {
            findings.extend(stranger(look, usage, process));
            continue;
        }
        let slots: Vec<(usize, &Slot)> =
            shares.iter().flat_map(|at| look.shares[*at].slots_of(process).map(|slot| (*at, slot))).collect();
        let held = slots.iter().map(|(_, slot)| slot.report.held).sum();
        tenants.push(Tenant { usage, process, shares, slots, held });
    }
    let on: BTreeSet<u32> = tenants.iter().map(|tenant| tenant.process.pid).collect();
    findings.extend(tenants.iter().filter_map(|tenant| hidden(look, tenant)));
    findings.extend(tenants.iter().filter_map(|tenant| understated(look, tenant)));
    for device in look.uses.iter().map(|usage| usage.device).collect::<BTreeSet<_>>() {
        let here: Vec<&Tenant<'_>> = tenants.iter().filter(|tenant| tenant.usage.device == device).collect();
        findings.extend(over(look, &here));
    }
    for process in look.processes.values() {
        findings.extend(pages(look, process, on.contains(&process.pid)));
    }
    findings.extend(look.shares.iter().filter_map(|share| account(look, share, before.get(&share.key()))));
    findings
}

/// The live slots of an earlier look, by claim and share.
pub(super) type Before = BTreeMap<(ClaimUid, ShareId), Vec<Slot>>;

/// What the next look is held against.
pub(super) fn remember(look: &Look) -> Before {
    let live = |share: &Share| {
        let slots = share.account.as_ref().map(|account| account.slots.as_slice()).unwrap_or_default();
        slots.iter().filter(|slot| slot.is_live()).copied().collect()
    };
    look.shares.iter().map(|share| (share.key(), live(share))).collect()
}

/// A finding about a share.
pub(super) fn about(share: &Share, kind: Kind, process: Option<Suspect>, text: String) -> Finding {
    Finding {
        kind,
        claim: Some(share.claim.clone()),
        share: Some(share.id.clone()),
        process,
        text,
        report_only: share.observes_only(),
        certain: false,
    }
}

fn first<'a>(look: &'a Look, tenant: &Tenant<'_>) -> Option<&'a Share> {
    tenant.shares.first().and_then(|at| look.shares.get(*at))
}

fn stranger(look: &Look, usage: &Use, process: &Process) -> Option<Finding> {
    // Other instances of the GPU are other claims' business.
    let is_shared = look.shares.iter().any(|share| share.device() == usage.device);
    is_shared.then(|| Finding {
        kind: Kind::Stranger,
        claim: None,
        share: None,
        process: Some(suspect(process)),
        text: format!(
            "it has {} of {}, of which shares are dealt out, and belongs to no claim with a share of it",
            amount(usage.bytes),
            usage.device
        ),
        report_only: true,
        certain: false,
    })
}

fn hidden(look: &Look, tenant: &Tenant<'_>) -> Option<Finding> {
    // One that has nothing takes nothing from anybody.
    if tenant.is_registered() || tenant.usage.bytes == Some(0) {
        return None;
    }
    let share = first(look, tenant)?;
    // A page that the node cannot read says nothing against anybody.
    if tenant
        .shares
        .iter()
        .any(|at| look.shares[*at].account.as_ref().is_err_and(|error| !error.is_spoiled()))
    {
        return None;
    }
    let text = format!(
        "it has {} of {} and is not registered on the account page: it does not use the library that keeps the limit",
        amount(tenant.usage.bytes),
        tenant.usage.device
    );
    let mut finding = about(share, Kind::Hidden, Some(tenant.suspect()), text);
    // It cannot have more than its limit, whatever it is linked with.
    finding.report_only |= share.container(tenant.process).is_some_and(|id| look.kept.contains(id));
    Some(finding)
}

fn understated(look: &Look, tenant: &Tenant<'_>) -> Option<Finding> {
    let share = first(look, tenant)?;
    if !tenant.is_registered() || !tenant.is_still() || tenant.beyond() <= overhead::of_one(look, tenant) {
        return None;
    }
    let text = format!(
        "it has {} of {} and is charged {}; the difference counts against the limit all the same",
        amount(tenant.usage.bytes),
        tenant.usage.device,
        amount(Some(tenant.held))
    );
    Some(about(share, Kind::Understated, Some(tenant.suspect()), text))
}

/// Sets of pages whose limits are passed by those who see no other pages.
fn over(look: &Look, tenants: &[&Tenant<'_>]) -> Vec<Finding> {
    let mut findings: BTreeMap<u32, Finding> = BTreeMap::new();
    let mut mild = Vec::new();
    for set in sets(tenants) {
        let limit: u64 =
            set.iter().map(|at| look.shares[*at].policy.memory.limit).fold(0, u64::saturating_add);
        let mut here: Vec<&Tenant<'_>> =
            tenants.iter().copied().filter(|tenant| tenant.shares.is_subset(&set)).collect();
        let sum =
            |of: &[&Tenant<'_>]| of.iter().fold(0_u64, |sum, tenant| sum.saturating_add(tenant.bytes()));
        let total = sum(&here);
        if total <= limit {
            continue;
        }
        let allowed = |of: &[&Tenant<'_>]| limit.saturating_add(overhead::of_all(look, of, limit));
        let facts = format!("together {} where the limit is {}", amount(Some(total)), amount(Some(limit)));
        // Who hides goes first, then who has most: as few as bring the rest within the limit.
        here.sort_by_key(|tenant| (!tenant.is_registered(), tenant.bytes()));
        if sum(&here) <= allowed(&here) {
            let Some(share) = set.first().and_then(|at| look.shares.get(*at)) else { continue };
            let text = format!("its processes have {facts}; the difference is the GPU driver's own");
            mild.push(about(share, Kind::Overhead, None, text));
            continue;
        }
        while sum(&here) > allowed(&here)
            && let Some(worst) = here.pop()
        {
            let Some(share) = first(look, worst) else { continue };
            let text = format!("it has {}, the claim's processes {facts}", amount(worst.usage.bytes));
            let finding = about(share, Kind::OverLimit, Some(worst.suspect()), text);
            findings.entry(worst.process.pid).or_insert(finding);
        }
    }
    findings.into_values().chain(mild).collect()
}

/// The sets of pages that some process sees, smallest first, and those that they are tied together to.
fn sets(tenants: &[&Tenant<'_>]) -> Vec<BTreeSet<usize>> {
    let seen: BTreeSet<BTreeSet<usize>> = tenants.iter().map(|tenant| tenant.shares.clone()).collect();
    let mut tied: Vec<BTreeSet<usize>> = Vec::new();
    for set in &seen {
        let (joined, apart): (Vec<_>, Vec<_>) = tied.into_iter().partition(|other| !other.is_disjoint(set));
        tied = apart;
        tied.push(joined.into_iter().flatten().chain(set.iter().copied()).collect());
    }
    let mut all: Vec<_> = seen.into_iter().chain(tied).collect();
    all.sort_by_key(|set| (set.len(), set.clone()));
    all.dedup();
    all
}

/// What a process of a claim's containers sees of the pages.
fn pages(look: &Look, process: &Process, on_the_gpu: bool) -> Vec<Finding> {
    let shares = look.shares_of(process);
    let Some(first) = shares.first().and_then(|at| look.shares.get(*at)) else { return Vec::new() };
    let own: Vec<&Page> = look.shares.iter().map(|share| &share.page).collect();
    let mut all: Vec<(&Share, Trouble)> = shares
        .iter()
        .filter_map(|at| look.shares.get(*at))
        .flat_map(|share| mounts::check(&process.mounts, &share.page).into_iter().map(move |it| (share, it)))
        .collect();
    all.extend(mounts::forged(&process.mounts, &own).into_iter().map(|it| (first, it)));
    // One finding for each sort is enough of one process.
    let mut findings: BTreeMap<Kind, Finding> = BTreeMap::new();
    for (share, trouble) in all {
        let (kind, text) = match &trouble {
            Trouble::Missing(path) => (Kind::NoPages, format!("it does not see {path}")),
            Trouble::Covered(path) => (Kind::Pages, format!("{path} leads to something else")),
            Trouble::Writable(path) => (Kind::Pages, format!("{path} is mounted writable")),
            Trouble::Crowded => (Kind::Pages, "it has more mounts than can be looked through".to_owned()),
            Trouble::Forged(path) => (Kind::Pages, format!("{path} is no page of this node")),
        };
        let mut finding = about(share, kind, Some(suspect(process)), text);
        // One that does not use the GPU takes nothing from anybody.
        finding.report_only |= !on_the_gpu;
        findings.entry(kind).or_insert(finding);
    }
    findings.into_values().collect()
}

/// What no honest process writes.
fn account(look: &Look, share: &Share, before: Option<&Vec<Slot>>) -> Option<Finding> {
    let account = match &share.account {
        Ok(account) => account,
        // A spoiled one is made a page again at once.
        Err(error) => {
            let certain = error.is_spoiled();
            return Some(Finding { certain, ..about(share, Kind::Account, None, error.to_string()) });
        }
    };
    let before = before.map(Vec::as_slice).unwrap_or_default();
    let text = lie(look, account, before)?;
    Some(Finding { certain: true, ..about(share, Kind::Account, None, text) })
}

fn lie(look: &Look, account: &Account, before: &[Slot]) -> Option<String> {
    let Account { used, balance, slots, .. } = account;
    if account.is_long {
        return Some("the file of the account page was made larger than the page".to_owned());
    }
    if account.is_rich() {
        return Some(format!(
            "the account page has a balance of {balance} ns of GPU time, which nobody grants"
        ));
    }
    let live: Vec<&Slot> = slots.iter().filter(|slot| slot.is_live()).collect();
    // A slot is one process's for as long as that lives, in one generation. (A process
    // may have several, one for each copy of the library in it.)
    let taken = before.iter().find(|last| {
        let now = live.iter().find(|slot| slot.report.index == last.report.index);
        let is_told = last.report.who.start != 0 && last.report.who.image != 0;
        is_told
            && now
                .is_some_and(|now| (now.report.owner, now.report.who) != (last.report.owner, last.report.who))
            && look.processes.values().any(|process| is_of(&last.report, &process.who))
    });
    if let Some(slot) = taken {
        let pid = slot.report.who.pid;
        return Some(format!(
            "the slot of process {pid} on the account page has another owner or generation"
        ));
    }
    account.is_below_its_slots().then(|| {
        let (used, least) = (amount(Some(*used)), amount(Some(account.least())));
        format!("the account page says that {used} are used, its own slots {least}")
    })
}

/// In MiB, for people.
fn amount(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "memory".to_owned(), |bytes| format!("{} MiB", bytes.div_ceil(MIB)))
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.mig {
            Some(mig) => write!(f, "MIG-{mig}"),
            None => write!(f, "GPU-{}", self.gpu),
        }
    }
}

impl AccountError {
    /// By processes of the share.
    fn is_spoiled(&self) -> bool {
        matches!(self, Self::Spoiled(_) | Self::Leased)
    }
}

impl std::fmt::Display for AccountError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Spoiled(why) => write!(f, "the account page is spoiled: {why}"),
            Self::Leased => {
                f.write_str("a process has a lease on the account page, for the node not to open it")
            }
            Self::Unreadable(why) => write!(f, "the account page cannot be read: {why}"),
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
