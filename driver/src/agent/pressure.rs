//! What is to be done where shares hold more memory than their GPU has: pure, from one look after the other.
//!
//! A share that over-commits holds what does not fit as managed memory, which the GPU driver moves to the device when
//! it is used and away when others need the room. As long as those who work fit together nobody notices. Where they do not,
//! each pushes the others' memory out and waits for its own, launch by launch, and nothing gets done.
//!
//! **Thrashing** is seen by how long launches take against the fastest of their kernel, which libraries tell: more than
//! [`SLOW`] times as long for [`LONG`], by all that was measured in that time, while all that is held is more than the GPU has.
//! Kernels of several tenants that share its time are slower too, but no more than there are tenants. Then the
//! shares that hold managed memory take turns, of ten times what it takes to bring back what the others have pushed
//! out, until they fit or only one of them works.
//!
//! **Trials.** A kernel whose every launch had to wait has no faster one to be held against. So where more is held than there is
//! and two shares work, one of them soon has the GPU for itself for a moment, and then another one: until launches of
//! it have ended at [`LOOKS`] looks, by when what had pushed it out is over. What it launches then is as fast as
//! it can be. Side by side again it is thrashing sooner than otherwise, after [`SHORT`]: how much faster it was without the
//! others was seen a moment ago. Only where that does not show within [`SHOWN`] has another one a trial; then two shares
//! whose launches wait for memory once more have shown that they push each other out, and need not go on with it. Where
//! they do not, trials were for
//! nothing, and cost the others those moments: the next are a minute later, or sooner where more is held by then, but never
//! more than a twentieth of the time is for trials.
//!
//! A tenant that lies about any of this can have a GPU that is held by more than it has go by turns, in which it
//! has no more than before.
//!
//! **Pools** that keep what they do not use are asked to give it back where that is missing: where a share was
//! refused memory that cannot move, or little of the GPU is left. Asked are those that do not work, and whoever
//! was refused itself. It costs a share the growth of its pools when it goes on.

use super::bell::Key;
use std::collections::BTreeMap;

const SECOND: u64 = 1_000_000_000;
/// Launches take so many times as long.
const SLOW: u64 = 5;
/// For so long, in nanoseconds; and for so long where a trial has just shown how fast they can be.
const LONG: u64 = 2 * SECOND;
const SHORT: u64 = 2 * SECOND / 5;
/// A turn is so many times what the change to it costs.
const TIMES: u64 = 10;
/// The bounds of a turn, in nanoseconds.
const QUANTUM: (u64, u64) = (SECOND / 2, 30 * SECOND);
/// Shares have worked beside each other for so long when one has a trial, in nanoseconds.
const BESIDE: u64 = 3 * SECOND / 4;
/// A trial is over when launches have ended at so many looks: one that had begun before, one that waited for what was
/// pushed out, and some that did not.
const LOOKS: u32 = 4;
/// So long after it there is another, in nanoseconds; or after so many times its length, where a share of the GPU more is held.
const AGAIN: u64 = 60 * SECOND;
const PAUSE: u64 = 20;
/// So many shares have one, one after the other; the next if what the last one was for has not shown by then, in
/// nanoseconds.
const TRIALS: u32 = 2;
const SHOWN: u64 = SECOND;
/// Who waits for memory so long after them shows that it was pushed out, and for so long at least; in nanoseconds.
const SHOWS: u64 = 5 * SECOND;
const WAITS: u64 = SECOND / 20;
/// The bounds of its longest, in nanoseconds.
const TRIAL: (u64, u64) = (2 * SECOND, 10 * SECOND);
const MORE: u64 = 20;
/// Who does nothing for so long rests, in nanoseconds.
const RESTS: u64 = SECOND / 4;
/// Bytes a second at which memory comes back, before it was measured: a page of 2 MiB by a fault and over a bus of 12 GB/s.
const COMES: u64 = 10_000_000_000;
/// Nobody is asked more often while little is left, in nanoseconds.
const ASKED: u64 = 10 * SECOND;
/// Little is left of a GPU.
const PER_CENT: u64 = 5;

/// What a share says at this moment; its processes write it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Said {
    pub(super) key: Key,
    /// It goes before others.
    pub(super) is_high: bool,
    /// Bytes, in all and what of it is managed memory.
    pub(super) used: u64,
    pub(super) managed: u64,
    /// Since its processes began, in nanoseconds: what measured launches took, and at the fastest.
    pub(super) took: u64,
    pub(super) least: u64,
    /// Grows while it works.
    pub(super) works: u64,
    /// How often it was refused memory.
    pub(super) refused: u64,
}

/// What of so many bytes is managed memory of a share that says `said` of it, and has `claimed` of the GPU: whatever it holds
/// beyond that cannot be anything else, so that to say less spares nobody a turn.
pub(super) fn managed(said: u64, used: u64, claimed: u64) -> u64 {
    said.max(used.saturating_sub(claimed)).min(used)
}

/// What is remembered of a GPU.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    shares: BTreeMap<Key, Known>,
    turns: Option<Turns>,
    /// Since when too much is held by several that work.
    beside: Option<u64>,
    tried: Option<Tried>,
    /// Trials so far.
    trials: usize,
    asked: Option<u64>,
}

impl Memory {
    /// Shares take turns, or one of them has a trial.
    pub(super) fn turns(&self) -> Option<Why> {
        self.turns.as_ref().map(|turns| turns.why)
    }
}

#[derive(Clone, Debug)]
struct Known {
    said: Said,
    /// When it was last seen to work, or was first seen; and whether it ever was seen to.
    worked: u64,
    is_active: bool,
    /// Since when launches are slow, and what they took and would have taken since.
    slow: Option<(u64, u64, u64)>,
    /// What it waited for memory since it last began to.
    waited: u64,
    /// When most of what launches took was seen to be a wait for memory.
    pushed: Option<u64>,
    /// At so many looks since turns began launches had ended.
    looks: u32,
}

/// What turns are taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// To see how fast launches can be.
    Trial,
    /// Shares push each other's memory out.
    Thrash,
}

#[derive(Clone, Debug)]
struct Turns {
    why: Why,
    since: u64,
    /// What it costs to change, in nanoseconds.
    swap: u64,
}

/// The last trials, one after the other: when they ended, how long they were together, how many, and what was held.
#[derive(Clone, Copy, Debug)]
struct Tried {
    at: u64,
    took: u64,
    count: u32,
    used: u64,
}

/// What is to be done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Decided {
    /// Who takes turns, what for, and of how many nanoseconds; nobody: all work side by side.
    pub(super) why: Option<Why>,
    pub(super) turns: Vec<Key>,
    pub(super) quantum: u64,
    /// Who is asked to give back what its pools keep for nothing.
    pub(super) trims: Vec<Key>,
}

/// After a look at the shares of a GPU with so many bytes; times are of the monotonic clock.
pub(super) fn decide(physical: u64, all: &[Said], memory: Memory, now: u64) -> (Decided, Memory) {
    let Memory { shares: mut before, mut asked, .. } = memory;
    let mut shares = BTreeMap::new();
    let (mut refused, mut idle) = (Vec::new(), Vec::new());
    for said in all {
        let known = before.remove(&said.key);
        if known.as_ref().is_some_and(|known| said.refused > known.said.refused) {
            refused.push(said.key.clone());
        }
        let known = Known::after(known, said, now);
        if now.saturating_sub(known.worked) >= SECOND {
            idle.push(said.key.clone());
        }
        shares.insert(said.key.clone(), known);
    }
    let mut memory = Memory { shares, ..memory };
    memory.take_turns(physical, all, now);
    let mut decided = Decided::default();
    if let Some(turns) = &memory.turns {
        decided.why = Some(turns.why);
        (decided.turns, decided.quantum) = match turns.why {
            Why::Trial => (trial(all, memory.trials), turns.longest()),
            Why::Thrash => (order(all), turns.quantum().min(QUANTUM.1)),
        };
    }
    let stays = all.iter().map(|said| said.used.saturating_sub(said.managed)).fold(0, u64::saturating_add);
    let is_little = stays > physical - physical / 100 * PER_CENT;
    let is_time = asked.is_none_or(|asked| now.saturating_sub(asked) >= ASKED);
    let is_asked = !refused.is_empty() || is_little && is_time;
    if is_asked {
        idle.retain(|key| !refused.contains(key));
        decided.trims = refused.into_iter().chain(idle).collect();
        asked = Some(now);
    }
    (decided, Memory { asked, ..memory })
}

fn managing(all: &[Said]) -> impl Iterator<Item = &Said> {
    all.iter().filter(|said| said.managed > 0)
}

/// Whose trial it is after so many, and those who wait meanwhile.
fn trial(all: &[Said], trials: usize) -> Vec<Key> {
    let mut order: Vec<Key> = managing(all).map(|said| said.key.clone()).collect();
    let first = trials % order.len().max(1);
    order.rotate_left(first);
    order
}

/// Who takes turns. Where some have high priority every other turn is one of theirs.
fn order(all: &[Said]) -> Vec<Key> {
    let (high, low): (Vec<&Said>, Vec<&Said>) = managing(all).partition(|said| said.is_high);
    let rounds = if high.is_empty() || low.is_empty() { 0 } else { high.len().max(low.len()) };
    let pairs = (0..rounds).flat_map(|at| [high[at % high.len()], low[at % low.len()]]);
    let one_sort = high.iter().chain(&low).copied().filter(|_| rounds == 0);
    pairs.chain(one_sort).map(|said| said.key.clone()).collect()
}

impl Memory {
    /// Whether those who hold managed memory take turns from now on.
    fn take_turns(&mut self, physical: u64, all: &[Said], now: u64) {
        let used = all.iter().map(|said| said.used).fold(0, u64::saturating_add);
        let over = used.saturating_sub(physical);
        let count = managing(all).count() as u64;
        let measured = self.shares.values_mut().filter_map(|known| known.waited_for(now)).max();
        let is_pressed = over > 0 && count > 1;
        let working = self.shares.values().filter(|known| known.has_worked(LONG, now)).count();
        if !is_pressed || working < 2 {
            self.beside = None;
        }
        let Some(turns) = self.turns.take() else {
            if !is_pressed {
                return;
            }
            let long = if self.has_just_tried(SHOWS, now) { SHORT } else { LONG };
            let is_slow = self.shares.values().any(|known| known.is_slow(count, long, now));
            let why = if is_slow || self.has_shown(now) {
                Why::Thrash
            } else if working >= 2 && self.is_time_for_trial(used, physical, now) {
                Why::Trial
            } else {
                return;
            };
            let swap = (u128::from(over) * u128::from(SECOND) / u128::from(COMES)) as u64;
            self.turns = Some(Turns { why, since: now, swap });
            for known in self.shares.values_mut() {
                (known.waited, known.looks) = (0, 0);
            }
            return;
        };
        let passed = now.saturating_sub(turns.since);
        match turns.why {
            Why::Trial => {
                let is_known = self.shares.values().any(|known| known.looks >= LOOKS);
                if is_pressed && !is_known && passed < turns.longest() {
                    self.turns = Some(turns);
                    return;
                }
                let before = self.tried.filter(|before| before.count < TRIALS);
                let (took, count) = before.map_or((0, 0), |before| (before.took, before.count));
                self.tried = Some(Tried { at: now, took: took + passed, count: count + 1, used });
                self.trials = self.trials.wrapping_add(1);
                // What was slow in it is no sign: it had to wait for what was under way.
                for known in self.shares.values_mut() {
                    (known.slow, known.waited) = (None, 0);
                }
            }
            Why::Thrash if is_pressed => {
                // What was waited after others' turns; in the first turn also for what had begun before.
                let measured = measured.filter(|_| passed > turns.quantum());
                let swap = measured.map_or(turns.swap, |measured| u64::midpoint(turns.swap, measured));
                let turns = Turns { swap, ..turns };
                // Everybody has had a turn, and only one of them had anything to do.
                let round = turns.quantum().saturating_mul(order(all).len() as u64 + 1);
                let working = self.shares.values().filter(|known| known.has_worked(round, now)).count();
                self.turns = (passed <= round || working > 1).then_some(turns);
            }
            Why::Thrash => {}
        }
    }

    /// Whether one may have the GPU for a moment, to see whether that makes a difference.
    fn is_time_for_trial(&mut self, used: u64, physical: u64, now: u64) -> bool {
        let beside = *self.beside.get_or_insert(now);
        // Whether it does is being seen.
        let is_known = self.shares.values().any(|known| known.slow.is_some());
        let is_next =
            self.tried.is_some_and(|tried| tried.count < TRIALS) && !self.has_just_tried(SHOWN, now);
        let is_new = self.tried.is_none_or(|tried| {
            let since = now.saturating_sub(tried.at);
            let has_more = used > tried.used.saturating_add(physical / MORE);
            since >= tried.took.saturating_mul(PAUSE) && (has_more || since >= AGAIN)
        });
        !is_known && (is_next || is_new && now.saturating_sub(beside) >= BESIDE)
    }

    fn has_just_tried(&self, within: u64, now: u64) -> bool {
        self.tried.is_some_and(|tried| now.saturating_sub(tried.at) <= within)
    }

    /// Whether the next look should be soon: one is about to have a trial, has one, or is about to show what it was for.
    pub(super) fn is_urgent(&self, now: u64) -> bool {
        let is_new = self.beside.is_some_and(|beside| now.saturating_sub(beside) <= BESIDE);
        self.turns() == Some(Why::Trial)
            || self.turns().is_none() && (is_new || self.has_just_tried(SHOWN, now))
    }

    /// Whether shares push each other's memory out, now that it is known how fast they are without that.
    fn has_shown(&self, now: u64) -> bool {
        let Some(tried) = self.tried.filter(|_| self.has_just_tried(SHOWS, now)) else { return false };
        let are_pushed = self.shares.values().filter(|known| known.pushed > Some(tried.at)).count();
        tried.count >= TRIALS && are_pushed > 1
    }
}

impl Turns {
    fn quantum(&self) -> u64 {
        self.swap.saturating_mul(TIMES).clamp(QUANTUM.0, QUANTUM.1)
    }

    /// Of a trial in which no launch ends.
    fn longest(&self) -> u64 {
        self.quantum().clamp(TRIAL.0, TRIAL.1)
    }
}

impl Known {
    fn after(before: Option<Self>, said: &Said, now: u64) -> Self {
        let Some(before) = before else {
            return Self {
                said: said.clone(),
                worked: now,
                is_active: false,
                slow: None,
                waited: 0,
                pushed: None,
                looks: 0,
            };
        };
        // A process that has ended takes its sums along.
        let (took, least) =
            match (said.took.checked_sub(before.said.took), said.least.checked_sub(before.said.least)) {
                (Some(took), Some(least)) => (took, least),
                _ => (0, 0),
            };
        let worked = if said.works == before.said.works { before.worked } else { now };
        let slow = match before.slow {
            _ if took == 0 => before.slow,
            // It has been slow for as long as that took.
            None => Some((now.saturating_sub(took.min(LONG)), took, least)),
            Some((since, all, fastest)) => {
                Some((since, all.saturating_add(took), fastest.saturating_add(least)))
            }
        };
        // Who does not work any more thrashes no more.
        let is_fresh = now.saturating_sub(worked) < LONG;
        let slow = slow.filter(|(_, took, least)| is_fresh && *took > least.saturating_mul(SLOW));
        // A little slower than the fastest they always are.
        let waits = if took > least.saturating_mul(2) { took.saturating_sub(least) } else { 0 };
        let waited = before.waited.saturating_add(waits);
        let is_pushed = took.saturating_sub(least) >= WAITS && took > least.saturating_mul(SLOW);
        let pushed = if is_pushed { Some(now) } else { before.pushed };
        let looks = before.looks.saturating_add(u32::from(took > 0));
        let is_active = before.is_active || said.works != before.said.works;
        Self { said: said.clone(), worked, is_active, slow, waited, pushed, looks }
    }

    /// It has been slower for so long than the time of so many shares explains.
    fn is_slow(&self, count: u64, long: u64, now: u64) -> bool {
        let is_far = |(since, took, least): (u64, u64, u64)| {
            now.saturating_sub(since) >= long && took > least.saturating_mul(SLOW.max(2 * count))
        };
        self.slow.is_some_and(is_far)
    }

    /// It holds managed memory, and worked in so much of the time before.
    fn has_worked(&self, within: u64, now: u64) -> bool {
        self.said.managed > 0 && self.is_active && now.saturating_sub(self.worked) <= within
    }

    /// What it waited for memory when it last worked, once it does so no more.
    fn waited_for(&mut self, now: u64) -> Option<u64> {
        let rests = now.saturating_sub(self.worked) >= RESTS;
        (rests && self.waited > 0).then(|| std::mem::take(&mut self.waited))
    }
}

#[cfg(test)]
mod tests;
