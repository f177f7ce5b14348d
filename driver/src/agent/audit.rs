//! One look at a GPU's shares: what NVML said held against everything else, and what follows from it.
//!
//! Each look corrects what shares may have of the time. Findings are looked for once in [`EVERY`](super::EVERY), and
//! what is told is told then: two looks that see one of them are to be that far apart.

use super::ask::{Asked, Timed};
use super::gather::Found;
use super::look::{Look, Share};
use super::orders::Standing;
use super::{ACCOUNT, Finding, Memory, POLICY, Planned, Report, Sources};
use super::{arbitrate, balance, bell, context, gather, joint, judge, meter, names, overtime};
use divvy_api::top::ShareNow;
use divvy_pages::GpuUuid;
use std::time::{Instant, SystemTime};

impl Sources {
    /// The look at one GPU; none is told of that only corrects.
    pub(super) fn audit(
        &self,
        gpu: GpuUuid,
        found: Vec<Found>,
        Asked { uses, kept, timed }: Asked,
        mut memory: Memory,
    ) -> (Memory, Vec<Report>, Option<Vec<ShareNow>>) {
        let (process_root, cgroup_root) = (&self.process_root, &self.cgroup_root);
        let now = Instant::now();
        let is_due = memory.is_due(now);
        let known = &mut memory.processes;
        let look = gather::look(found, &self.files, uses, known, !is_due, process_root, cgroup_root);
        let mut look = Look { kept, ..look };
        let (mut memory, metered, over) = match timed {
            Some(timed) => self.timed(gpu, &mut look, timed, memory, now),
            // Of the time the next look tells, with what was before this one.
            None => (memory, Vec::new(), Vec::new()),
        };
        let (mut reports, mut told) = (Vec::new(), None);
        if is_due {
            let findings = judge::judge(&look, &memory.before).into_iter().chain(over).collect();
            // Who is to be ended has no time to go on while slots are written.
            (memory, reports) = self.respond(findings, memory);
            self.learn(gpu, &look, &mut memory);
            gather::repair(&look, &self.shares, &self.files, &self.process_root);
            (memory.before, memory.judged) = (judge::remember(&look), Some(now));
            memory.over_time.values_mut().for_each(overtime::Past::judged);
            let at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            told = Some(meter::told(&look, &metered, at.as_millis() as u64));
            memory.processes = memory.processes.after(look.processes);
        }
        (memory, reports, told)
    }

    /// What each share had, who had more than it may have, and who is to have what from now on.
    fn timed(
        &self,
        gpu: GpuUuid,
        look: &mut Look,
        Timed { times, divides, busy, active, until }: Timed,
        mut memory: Memory,
        now: Instant,
    ) -> (Memory, Vec<meter::Metered>, Vec<Finding>) {
        (look.busy, look.active) = (busy, active);
        let times = &times;
        let (mut metered, since, of_meter) = meter::meter(look, times, until, memory.meter.clone(), now);
        look.whole = names::together(look, times, divides, &mut metered, &mut memory.names, now);
        let look = &*look;
        let had = self.bell.since(gpu, until.map(meter::Until::ago).unwrap_or_default());
        let due = |share: &Share, metered: &_| arbitrate::due(had.get(&share.key()), metered);
        let joint = joint::join(look, &metered, due, since, &memory.joint, now);
        let standings = arbitrate::standings(look, times, &metered, &had, |share| {
            let joint = joint.get(&share.device())?;
            Some((joint.trim(&share.key()), !joint.is_doubted(now)))
        });
        for (share, metered) in
            look.shares.iter().zip(&mut metered).filter(|(_, metered)| metered.named.is_some())
        {
            let trim = joint.get(&share.device()).map_or(1.0, |joint| joint.trim(&share.key()));
            metered.likely = metered.said.map(|(charged, _)| (charged as f64 / trim) as u64);
        }
        self.divide(gpu, look, standings);
        let (forged, balances) = balance::beyond(look, &metered, &had, &memory.balances, since, bell::now());
        let granted = |at: usize| Some(had.get(&look.shares.get(at)?.key())?.memory.granted().0);
        let forged =
            forged.into_iter().filter_map(|(at, beyond)| Some((at, (beyond, granted(at)?)))).collect();
        let (mut over, past) = overtime::over_time(look, &metered, times, since, &forged, &memory.over_time);
        over.extend(joint::over_time(look, &joint));
        (Memory { meter: of_meter, balances, joint, over_time: past, ..memory }, metered, over)
    }

    /// Remembers what a context takes, for the pages of shares to come.
    fn learn(&self, gpu: GpuUuid, look: &Look, memory: &mut Memory) {
        let least = context::least(look).filter(|bytes| memory.context.is_none_or(|known| *bytes < known));
        let Some(bytes) = least else { return };
        match self.contexts.saw(gpu, bytes) {
            Ok(is_new) => {
                memory.context = Some(bytes);
                if is_new {
                    tracing::info!(%gpu, mib = bytes >> 20, "a context takes so much; the next shares are charged that");
                }
            }
            // Tried again at the next audit.
            Err(cause) => tracing::debug!(%gpu, %cause, "what a context takes is not remembered"),
        }
    }

    /// Who is to have what of the GPU's time, or its instance's, from now on.
    fn divide(&self, gpu: GpuUuid, look: &Look, standings: Vec<Standing>) {
        let planned = look.shares.iter().zip(standings).filter_map(|(share, standing)| {
            let dir = self.shares.of(&share.claim, &share.id);
            // Of this look. Else it was just removed, or somebody has a lease on it.
            let account = self.files.known(&dir.join(ACCOUNT))?;
            Some(Planned {
                key: share.key(),
                mig: share.policy.mig,
                policy: dir.join(POLICY),
                account,
                standing,
            })
        });
        self.bell.plan(gpu, planned.collect());
    }
}
