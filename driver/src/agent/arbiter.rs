//! What each share of a GPU may have of its time, decided once a second: pure.
//!
//! The library in a container paces launches by what it believes they cost, and so holds a
//! share to the `rate` on its policy page, in its own nanoseconds. Two things are left to the
//! node. Who gets what nobody else uses ([`targets`]); and that the library's nanoseconds
//! are not the GPU's: a kernel that neighbours interrupt looks longer than it is, and one that
//! is long where nobody measures looks shorter. NVML knows what each process really had. So the rate is
//! the target times a *trim* of the share's own that is corrected at each look by the target over what the
//! share had since the last, all in nanoseconds a second.
//!
//! **Less is set by NVML alone; more also needs the tenant's word.** A share that has less than
//! its target may want no more, and only its processes know that they were held up: their
//! word, on a page that they write. So more comes only to who used what its rate allowed for
//! by any trim, and is a loan: who was once believed owes what it then has beyond its target, and
//! gets so much less until that is paid; what it lacked it has later, up to a tenth of what it may have in a second. What it lacks
//! until that is made good, up to half of a second's, is set off against what it has too much by that: kernels of programs that
//! have just begun look long until the library knows them, and a trim that was found for that is too large a moment later. To lie about
//! waiting gains nothing: over any time a share has its target's worth and at most a second more.
//!
//! **The start.** What a share had too little in its first second or two it does not get back, neither later nor then: nothing
//! was known of its kernels, and its part would be too large for several seconds more. What it had too much it pays all the same, or there
//! would be something to gain by a start. Of its first look a half is followed at most, as its kernels look longest then: the
//! library has measured few of them, and NVML may tell of a moment before it began.
//!
//! **What held when.** What NVML tells ends a little before a look ([`super::desk`] knows how long), so what a share had came in part of
//! the trim before the last, and is held against the mean of the two.
//!
//! **How much longer a kernel may look.** What the library measures are stretches of the clock, and in each
//! either the share's own kernels ran or those of others. So what it believes to have had is no more
//! than what it had and what others had meanwhile, and by NVML both are known: no trim is larger than that
//! explains, or twice. Of a share that has the GPU to itself, whatever it says, that is twice what it had, and only
//! where it lacks something for a second time or had too much in between: processes that begin together look slow
//! to each other until they know their kernels, which is over before a larger rate could help them.
//!
//! **Noise.** Whether one more long kernel ends just before a look is chance, and what is above the target is cut at once, while
//! what is below it is made good under conditions: noise that is followed would leave each share with less than its part. And
//! where a GPU is full, who is cut loses more than that to its neighbours, who are cut for it a second later. So
//! of what a look says only a part is followed: beside others a half at first, less when the next says the opposite, and
//! more, up to all of it, when it says the same again. What is far above is cut at once; and so is followed whatever is off
//! by more than chance of a share alone, as nobody answers it.
//!
//! **Long kernels beside others** look the longer the more of the GPU is at work, since nearly all of the time one of the
//! others is: a larger rate is charged more for each kernel, and gains little. So what such a share lacks is followed whole
//! while more than that is idle, as nobody loses by it, and where the share has used all of its rate and waited for more all
//! the time, as then its rate alone holds it; and what one step did not make good is
//! followed by steps that are two and three times as long, as far as there is room.
//!
//! **Alone and beside others** a share has a trim of its own each, as kernels look longer only where others cut in: the one that holds
//! changes the moment that the first neighbour begins to work or the last one rests, and neither is to be found anew then.
//!
//! **MIG instances.** NVML does not know what a process has of one, so trims are for a share that has an instance alone ([`super::instances`]);
//! where several have parts of it theirs follow from what they had together ([`super::joint`]).

use divvy_pages::policy::UNBOUNDED;

/// A whole GPU: nanoseconds a second.
pub(super) const SECOND: u64 = 1_000_000_000;
/// NVML tells whole per cent, so a share is known to half of one.
pub(super) const QUANTUM: u64 = SECOND / 200;
pub(super) const POINT: u64 = 2 * QUANTUM;
/// A trim is no less: what a program can hide from being measured is most of what it does, but not all.
const LEAST: f64 = 1e-4;
/// And no more: that of a share that is granted half of a hundredth, while others have all the rest.
const MOST: f64 = LONGER + 200.0;
/// Where nobody cuts in, kernels look so much longer than they are at most.
const LONGER: f64 = 2.0;
/// Whose debt is more than what it may have in so many seconds is not believed.
const CREDIT: u64 = 4;
/// Beside others a trim is raised by this power of what is missing at most, if NVML can tell what is missing of so much.
const STEPS: u8 = 3;
const TOLD: u64 = SECOND / 10;
/// Of a GPU that is at work for so much of the time whoever lacks something lacks what others have too much, who are cut for it.
/// But for a [`POINT`] each, by which nobody has too much: together that may be a good part of what a small share is to have.
const FULL: u64 = SECOND / 100 * 99;
/// What a share alone is off by more than this is more than chance, in nanoseconds a second; and a third too much is, of any.
const FAR: u64 = SECOND / 50;
const THIRD: u64 = 3;
/// This part of a debt is paid in a second, by half of what is allowed at most: all at once it would be a loss that others have
/// to be cut for again. Less where much is owed would let a liar's debts add up. Of one below 0 as much is had back beside
/// others, who may have had it, but a hundredth of the GPU at most.
const PAYS: u64 = 4;
/// So much of what a look says is followed: of the first, alone and beside others, and at least.
const FOLLOWED: [f64; 2] = [1.0, 0.5];
const LEAST_FOLLOWED: f64 = 0.25;
/// What a share had too little by chance it has later: of what it is allowed. While it lacks something so much is remembered,
/// though no more is had back.
const CHANCE: u64 = 10;
const SET_OFF: u64 = 2;
/// What a share had too little while it first worked for so long it does not get back.
const START: u64 = SECOND / 10 * 15;
/// What who does not use all of its rate is left of it: kernels look longer and shorter from second to second.
const SPARE: f64 = 1.125;
/// For each time that so much of the GPU is idle one such step may be taken: more would go too far.
const ROOM: u64 = SECOND / 50;
/// What a share that worked not at all may begin with, where it may have so much: a twentieth.
const WAKING: u64 = SECOND / 20;
/// A share that was not held up is expected to want so much more than it had.
const MORE: f64 = 1.25;

/// What a share is entitled to; times in nanoseconds a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    /// Whenever it wants that.
    pub(super) guarantee: u64,
    /// While others do not; no less than the guarantee.
    pub(super) ceiling: u64,
    /// Its part of what nobody is guaranteed.
    pub(super) weight: u32,
}

/// What was seen of a share in the last second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    /// What its processes had by NVML, in nanoseconds.
    pub(super) busy: u64,
    /// What they believe to have had, and how long their launches waited for more, all threads together; by their
    /// own word, in nanoseconds.
    pub(super) charged: u64,
    pub(super) waited: u64,
}

/// What is remembered of a share from one second to the next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Memory {
    /// Alone, and beside others.
    trims: [f64; 2],
    /// How much of what a look says of each is followed, up to 1, and whether the last said less (-1) or more (1).
    follows: [f64; 2],
    sides: [i8; 2],
    /// What it was to have in the last second, and what it would have been to have without its debt; 0 before the first.
    granted: u64,
    allowed: u64,
    /// Its word was taken once.
    believed: bool,
    /// Nanoseconds that it had beyond its target since then, and has not given back; below 0: what it may have beyond it.
    debt: i64,
    /// For so many looks it has lacked what it waited for.
    lacked: u8,
    /// For so many nanoseconds it has worked, up to [`START`].
    worked: u64,
}

impl Default for Memory {
    fn default() -> Self {
        Self {
            trims: [1.0; 2],
            follows: FOLLOWED,
            sides: [0; 2],
            granted: 0,
            allowed: 0,
            believed: false,
            debt: 0,
            lacked: 0,
            worked: 0,
        }
    }
}

impl Terms {
    /// Of what a policy says. A share without a guarantee gets by its weight, one without a ceiling may have
    /// all that others leave, unless it has a guarantee: then that is what it was asked to be.
    pub(super) fn of(compute: divvy_pages::Compute) -> Self {
        let time = |percent: u32| u64::from(percent.min(100)) * (SECOND / 100);
        let guarantee = time(compute.cores);
        let ceiling = match (compute.cores, compute.ceiling) {
            (0, 0) => SECOND,
            (_, 0) => guarantee,
            (_, ceiling) => time(ceiling).max(guarantee),
        };
        Self { guarantee, ceiling, weight: compute.weight.max(1) }
    }

    /// The most that it is expected to use, where it is held up or not.
    pub(super) fn wants(&self, seen: Seen, is_held: bool) -> u64 {
        if is_held {
            return self.ceiling;
        }
        let more = (seen.busy as f64 * MORE) as u64 + 2 * QUANTUM;
        if seen.busy < QUANTUM { 0 } else { more.min(self.ceiling) }
    }
}

impl Seen {
    /// It waited most of the time in which it did not work. Who has bursts of work waits too, but less.
    fn is_held_up(self) -> bool {
        self.waited > 0 && self.waited >= SECOND.saturating_sub(self.busy) / 2
    }
}

/// What each share is to have of the time that comes, by what it is entitled to and wants; together no more than
/// there is, as long as the guarantees are not. Who wants nothing has nothing, and its part is lent.
pub(super) fn targets(shares: &[(Terms, u64)]) -> Vec<u64> {
    let wants = |(terms, wants): &(Terms, u64)| (*wants).min(terms.ceiling);
    let mut targets: Vec<u64> = shares.iter().map(|share| share.0.guarantee.min(wants(share))).collect();
    let mut rest = SECOND.saturating_sub(targets.iter().sum());
    // By weight, until everybody has what it wants or nothing is left: each round satisfies one at least.
    loop {
        let open = shares.iter().zip(&targets).filter(|(share, target)| **target < wants(share));
        let weights: u64 = open.map(|((terms, _), _)| u64::from(terms.weight)).sum();
        if weights == 0 || rest < weights {
            return targets;
        }
        // A second at most, which is less than 2^30, times a weight of 32 bits.
        let whole = rest;
        for (share, target) in shares.iter().zip(&mut targets) {
            let part = whole * u64::from(share.0.weight) / weights;
            let part = wants(share).saturating_sub(*target).min(part);
            *target += part;
            rest -= part;
        }
    }
}

impl Memory {
    /// The rate of a share from now on, of the library's nanoseconds, and what is to be remembered.
    /// Who wants nothing yet finds its guarantee when it does, or a little. The whole GPU is that by any trim.
    pub(super) fn rate(mut self, terms: Terms, target: u64, is_beside: bool) -> (u64, Self) {
        self.allowed = target.max(terms.guarantee).max(terms.ceiling.min(WAKING));
        let back = if is_beside { POINT } else { 0 };
        // What it lacks while it begins it does not get back then either: by what it had with that its trim would be too large.
        let most = if self.worked < START { 0 } else { signed(self.allowed / CHANCE) };
        let debt = self.debt.max(-most);
        let part = (debt / signed(PAYS)).clamp(-signed(back), signed(self.allowed / 2));
        // Nobody has all of the GPU by that: it would be held to nothing.
        self.granted = self.allowed.saturating_add_signed(-part).min(self.allowed.max(FULL));
        let rate = (self.granted as f64 * self.trims[usize::from(is_beside)]) as u64;
        // 0 would be the record's.
        (if self.granted < SECOND { rate.clamp(1, UNBOUNDED - 1) } else { UNBOUNDED }, self)
    }

    /// Of a share that is not held to anything.
    pub(super) fn free(self) -> Self {
        Self { granted: SECOND, allowed: SECOND, ..self }
    }

    pub(super) fn trim(&self, is_beside: bool) -> f64 {
        self.trims[usize::from(is_beside)]
    }

    /// What it was granted, and what it would have been without its debt; nanoseconds a second.
    pub(super) fn granted(&self) -> (u64, u64) {
        (self.granted, self.allowed)
    }

    /// The same where that changed in the course of the second: by the mean.
    pub(super) fn with_granted(self, granted: u64, allowed: u64) -> Self {
        Self { granted, allowed, ..self }
    }

    /// Of a share of which NVML does not say what it had: by that trim beside others, and it owes nothing. Who looked too cheap
    /// when it was alone is not given that back.
    pub(super) fn by_word(self, trim: f64) -> Self {
        Self { trims: [self.trims[0].min(1.0), trim], debt: 0, lacked: 0, ..self }
    }

    /// Whether it would have had more with a larger rate. Who waits for each of its launches waits little for the next,
    /// though it has used all of its rate and the GPU idles.
    pub(super) fn is_held(&self, seen: Seen, company: Company) -> bool {
        let rate = self.granted as f64 * self.trims[usize::from(company.is_beside)];
        let has_used_all = seen.waited >= POINT && seen.charged.saturating_add(QUANTUM) as f64 >= rate;
        seen.is_held_up() || has_used_all && seen.busy + company.between < FULL
    }

    /// What the agent after this one is to know: the trims, which took longest to find.
    pub(super) fn kept(&self) -> [u64; 2] {
        self.trims.map(f64::to_bits)
    }

    /// Of a share of which an agent before this one has kept that.
    pub(super) fn inherited(kept: [u64; 2]) -> Self {
        let trim = |bits| Some(f64::from_bits(bits)).filter(|trim| (LEAST..=MOST).contains(trim));
        Self { trims: kept.map(|bits| trim(bits).unwrap_or(1.0)), worked: START, ..Self::default() }
    }
}

/// Beside whom a share was in the second that was seen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Company {
    /// Others worked for most of it.
    pub(super) is_beside: bool,
    /// Just then the first of them began, or the last one rested.
    pub(super) has_changed: bool,
    /// The share itself did.
    pub(super) has_moved: bool,
    /// What others had of it, in nanoseconds a second.
    pub(super) between: u64,
    /// How long that was, in nanoseconds.
    pub(super) lasted: u64,
    /// The trim that held meanwhile, by the mean; none: the last.
    pub(super) held: Option<f64>,
}

/// The trim and the debt after what was seen since the last look, for which so much was granted.
pub(super) fn corrected(memory: Memory, seen: Seen, company: Company) -> Memory {
    let Memory { mut trims, mut follows, mut sides, granted, allowed, mut believed, debt, lacked, worked } =
        memory;
    let Company { is_beside, has_changed, has_moved, between, lasted, held } = company;
    let at = usize::from(is_beside);
    let (mut trim, mut follow) = (trims[at], follows[at]);
    // What was seen came of this one.
    let held = held.unwrap_or(trim);
    if granted == 0 {
        return memory;
    }
    let is_granted = seen.busy.abs_diff(granted) <= QUANTUM;
    // Nor does who has not got back what it lacked before lack anything now.
    let is_exact = is_granted || (allowed..granted).contains(&(seen.busy + QUANTUM));
    let all = seen.busy + between;
    let is_held = memory.is_held(seen, company);
    // Who worked for a part of it lacks nothing by that.
    let lacks = !is_exact && seen.busy < granted && is_held && !has_moved;
    let longer = if lacked > 0 || follow < 1.0 { LONGER } else { 1.0 };
    let most = |had: u64| longer * had as f64 + between as f64;
    let limit = CREDIT * allowed;
    // Deep in debt it is not believed again, so that what it had beyond its target never adds up.
    let is_sound = debt <= signed(limit);
    // An honest share that is held up has used all of its rate, and that is no more than such kernels look.
    let is_honest = most(seen.busy + QUANTUM) >= granted as f64 * held;
    let had = if is_granted { granted } else { seen.busy };
    let more = i128::from(signed(had) - signed(allowed)) * i128::from(lasted) / i128::from(SECOND);
    let least = match (lacks && is_honest, believed) {
        (true, _) => allowed / SET_OFF,
        (false, true) => allowed / CHANCE,
        (false, false) => 0,
    };
    let most_owed = if believed { SECOND + limit } else { 0 };
    let more = i64::try_from(more).unwrap_or(i64::MAX);
    let debt = debt.saturating_add(more).clamp(-signed(least), signed(most_owed));
    let before = worked;
    let worked = if seen.busy > 0 { worked.saturating_add(lasted).min(START) } else { worked };
    let debt = if worked == START && before < START { debt.max(0) } else { debt };
    let lacked = if lacks { lacked.saturating_add(1) } else { 0 };
    // What the trim would be by this look alone.
    let seen_trim = if has_changed {
        // What was granted when and what was had when are not known so well that anything follows.
        None
    } else if is_exact {
        is_held.then_some(held)
    } else if seen.busy > granted {
        let less = held * granted as f64 / seen.busy as f64;
        // Who does not use what its rate allows for is not cut by a rate that is a little less, and more than the whole cannot
        // be seen. To have been charged less than it was only makes it less. Who is to have nearly all of it has not much more
        // by having all.
        let is_known = seen.charged > 0 && allowed < FULL;
        let spare = if seen.busy + QUANTUM >= SECOND { 1.0 } else { SPARE };
        Some(if is_known { less.min(spare * seen.charged as f64 / seen.busy as f64) } else { less })
    } else if lacks && is_honest && is_sound && (all < FULL || granted > seen.busy + POINT) {
        believed = true;
        // It may have had a little more than NVML says. Where a step was too short the next is longer, once steps
        // are followed whole; the first look at which it lacks something comes before any step.
        let steps = if granted < TOLD || between < granted / 2 || follow < 1.0 {
            1
        } else {
            let room = u8::try_from((SECOND.saturating_sub(all)) / ROOM).unwrap_or(STEPS);
            lacked.saturating_sub(1).min(room).clamp(1, STEPS)
        };
        Some(held * (granted as f64 / (seen.busy + QUANTUM) as f64).powi(steps.into()))
    } else {
        None
    };
    if let Some(seen_trim) = seen_trim {
        let off = seen.busy.abs_diff(granted);
        let side = if is_exact {
            0
        } else if seen.busy < granted {
            -1
        } else {
            1
        };
        let is_far = seen.busy > granted + granted / THIRD || seen.busy > granted + FAR && !is_held;
        // Kernels look half as long again as they are, and nobody loses what it lacks.
        let is_left = lacks && all + off < SECOND && seen.charged / 3 > seen.busy / 2;
        // Its rate alone holds it: it has used all of that, and waited whenever it did not work.
        let used_all = seen.charged.saturating_add(POINT) as f64 >= granted as f64 * trims[at];
        let is_short =
            lacks && off > 2 * FAR && used_all && seen.waited >= SECOND.saturating_sub(seen.busy) / 10 * 9;
        follow = if is_far || off > FAR && (!is_beside || before > 0 && (is_left || is_short)) {
            1.0
        } else if side * sides[at] < 0 {
            (follow / 2.0).max(LEAST_FOLLOWED)
        } else if side * sides[at] > 0 {
            (follow * 2.0).min(1.0)
        } else {
            follow
        };
        trim += (seen_trim - trim) * follow;
        if side != 0 {
            sides[at] = side;
        }
    }
    // What was found to hold is not forgotten when it lacks nothing, or for the first time.
    let explained = LONGER * granted as f64 + between as f64;
    let most = if lacks { most(granted).max((trims[at] * granted as f64).min(explained)) } else { explained };
    (trims[at], follows[at]) = (trim.clamp(LEAST, most / granted as f64), follow);
    Memory { trims, follows, sides, granted, allowed, believed, debt, lacked, worked }
}

fn signed(nanoseconds: u64) -> i64 {
    i64::try_from(nanoseconds).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
