//! Decides once a second how much of a GPU's time each share may use.
//!
//! The library paces launches by what it believes they cost, in its own nanoseconds, and holds a
//! share to the `rate` on its policy page. The controller does two things: it lends time that other
//! shares do not use ([`targets`]), and it corrects the rate by the difference between the
//! library's nanoseconds and the GPU's ([`corrected`]). Times are nanoseconds per second. All
//! functions are pure.

pub(crate) use crate::shares::snapshot::entitlement::{Entitlement, NS_PER_SECOND};
use divvy_pages::policy::UNBOUNDED;

/// NVML tells whole per cent, so a share is known to half of one.
pub(crate) const QUANTUM: u64 = NS_PER_SECOND / 200;
pub(crate) const POINT: u64 = 2 * QUANTUM;
/// A trim is no less: what a program can hide from being measured is most of what it does, but not all.
const LEAST: f64 = 1e-4;
/// And no more: that of a share that is granted half of a hundredth, while others have all the rest.
const MOST: f64 = LONGER + 200.0;
/// Maximum factor by which kernels look longer than they are while no other share preempts them.
const LONGER: f64 = 2.0;
/// Credit limit, in seconds of the share's entitlement. Above it, the share's reports are ignored.
const CREDIT: u64 = 4;
/// Maximum exponent with which a trim beside others is raised to the shortfall, if NVML measures
/// the shortfall.
const STEPS: u8 = 3;
const TOLD: u64 = NS_PER_SECOND / 10;
/// Busy time of the GPU, in nanoseconds per second, above which one share's shortfall is another's
/// excess. The other share is cut for it. An error of a [`POINT`] per share is tolerated, although
/// the sum may be a good part of a small share.
const FULL: u64 = NS_PER_SECOND / 100 * 99;
/// An error of a share that works alone is no noise above this, in nanoseconds per second. For any
/// share, an excess of a third is no noise.
const FAR: u64 = NS_PER_SECOND / 50;
const THIRD: u64 = 3;
/// This part of a debt is paid per second, at most half of the allowed time. Paying all at once
/// would be a shortfall that others are cut for. Paying less would let the debts of false reports
/// add up. Beside others, the same part of a credit is refunded, at most a hundredth of the GPU.
const PAYS: u64 = 4;
/// Weight of a new measurement in the average: of the first one, alone and beside others. It is
/// also the minimum.
const FOLLOWED: [f64; 2] = [1.0, 0.5];
const LEAST_FOLLOWED: f64 = 0.25;
/// A random shortfall is returned later, up to this fraction of the allowed time. While the
/// shortfall lasts, the debt stays this large, and no more is returned.
const CHANCE: u64 = 10;
const SET_OFF: u64 = 2;
/// A shortfall in the first time of this length after a share begins is not returned.
const START: u64 = NS_PER_SECOND / 10 * 15;
/// Margin of a share that does not use all of its rate: kernel lengths vary from second to second.
const SPARE: f64 = 1.125;
/// For each part of this size of the GPU that is idle, a trim may take one step. More would
/// overshoot.
const ROOM: u64 = NS_PER_SECOND / 50;
/// Rate of a share that was idle, at most: a twentieth of the GPU.
const WAKING: u64 = NS_PER_SECOND / 20;
/// A share that was not throttled is expected to want its usage multiplied by this.
const MORE: f64 = 1.25;

/// The measurements of a share in the last second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    /// Time of its processes as NVML measures it, in nanoseconds.
    pub(crate) busy: u64,
    /// Time that its processes report as used, and as waited for more, summed over all threads, in
    /// nanoseconds.
    pub(crate) charged: u64,
    pub(crate) waited: u64,
}

/// State of a share that is kept from one second to the next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ControllerState {
    /// Alone, and beside others.
    trims: [f64; 2],
    /// How much of what a look says of each is followed, up to 1, and whether the last said less
    /// (-1) or more (1).
    follows: [f64; 2],
    sides: [i8; 2],
    /// The time granted in the last second, and the time that would have been granted without its
    /// debt; 0 before the first.
    granted: u64,
    allowed: u64,
    /// Its word was taken once.
    believed: bool,
    /// Nanoseconds that it had beyond its target since then, and has not given back; below 0: what
    /// it may have beyond it.
    debt: i64,
    /// Number of consecutive measurements in which the share had less than it waited for.
    lacked: u8,
    /// Time since the share began to work, in nanoseconds, at most [`START`].
    worked: u64,
}

impl Default for ControllerState {
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

impl Entitlement {
    /// The most that it is expected to use, where it is held up or not.
    pub(crate) fn wants(&self, seen: Seen, is_held: bool) -> u64 {
        if is_held {
            return self.ceiling;
        }
        let more = (seen.busy as f64 * MORE) as u64 + 2 * QUANTUM;
        if seen.busy < QUANTUM { 0 } else { more.min(self.ceiling) }
    }
}

impl Seen {
    /// It waited most of the time in which it did not work. A share with bursts of work waits too,
    /// but less.
    fn is_held_up(self) -> bool {
        self.waited > 0 && self.waited >= NS_PER_SECOND.saturating_sub(self.busy) / 2
    }
}

/// The target of each share for the next second, by its entitlement and demand. The sum is at most
/// the whole GPU unless the guarantees exceed it. A share without demand gets nothing, and its part
/// is lent.
pub(crate) fn targets(shares: &[(Entitlement, u64)]) -> Vec<u64> {
    let wants = |(terms, wants): &(Entitlement, u64)| (*wants).min(terms.ceiling);
    let mut targets: Vec<u64> = shares.iter().map(|share| share.0.guarantee.min(wants(share))).collect();
    let mut rest = NS_PER_SECOND.saturating_sub(targets.iter().sum());
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

impl ControllerState {
    /// The next rate of a share, in nanoseconds of the library, and the state to keep. A share
    /// without demand gets its guarantee when it begins to work, or a little. The whole GPU stays
    /// the whole GPU with any trim.
    pub(crate) fn rate(mut self, terms: Entitlement, target: u64, is_beside: bool) -> (u64, Self) {
        self.allowed = target.max(terms.guarantee).max(terms.ceiling.min(WAKING));
        let back = if is_beside { POINT } else { 0 };
        // A shortfall at the start is not returned either, because its trim would become too large.
        let most = if self.worked < START { 0 } else { signed(self.allowed / CHANCE) };
        let debt = self.debt.max(-most);
        let part = (debt / signed(PAYS)).clamp(-signed(back), signed(self.allowed / 2));
        // No share is granted the whole GPU by this, because it would not be throttled.
        self.granted = self.allowed.saturating_add_signed(-part).min(self.allowed.max(FULL));
        let rate = (self.granted as f64 * self.trims[usize::from(is_beside)]) as u64;
        // 0 would be the record's.
        (if self.granted < NS_PER_SECOND { rate.clamp(1, UNBOUNDED - 1) } else { UNBOUNDED }, self)
    }

    /// The state of a share that is not throttled.
    pub(crate) fn free(self) -> Self {
        Self { granted: NS_PER_SECOND, allowed: NS_PER_SECOND, ..self }
    }

    pub(crate) fn trim(&self, is_beside: bool) -> f64 {
        self.trims[usize::from(is_beside)]
    }

    /// The granted time, and the time that would have been granted without its debt, in nanoseconds
    /// per second.
    pub(crate) fn granted(&self) -> (u64, u64) {
        (self.granted, self.allowed)
    }

    /// The same where that changed in the course of the second: by the mean.
    pub(crate) fn with_granted(self, granted: u64, allowed: u64) -> Self {
        Self { granted, allowed, ..self }
    }

    /// The state of a share that NVML does not measure: with this trim beside others, and without
    /// debt. An undercharge from the time when it was alone is not carried over.
    pub(crate) fn by_word(self, trim: f64) -> Self {
        Self { trims: [self.trims[0].min(1.0), trim], debt: 0, lacked: 0, ..self }
    }

    /// Whether a larger rate would have given it more time. A share that waits for each launch
    /// waits little for the next one, although it has used all of its rate and the GPU idles.
    pub(crate) fn is_held(&self, seen: Seen, company: CoRunners) -> bool {
        let rate = self.granted as f64 * self.trims[usize::from(company.is_beside)];
        let has_used_all = seen.waited >= POINT && seen.charged.saturating_add(QUANTUM) as f64 >= rate;
        seen.is_held_up() || has_used_all && seen.busy + company.between < FULL
    }

    /// The state to keep for the next agent: the trims, which take longest to find.
    pub(crate) fn kept(&self) -> [u64; 2] {
        self.trims.map(f64::to_bits)
    }

    /// The state that an earlier agent has kept.
    pub(crate) fn inherited(kept: [u64; 2]) -> Self {
        let trim = |bits| Some(f64::from_bits(bits)).filter(|trim| (LEAST..=MOST).contains(trim));
        Self { trims: kept.map(|bits| trim(bits).unwrap_or(1.0)), worked: START, ..Self::default() }
    }
}

/// The other shares that were active in the measured second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct CoRunners {
    /// Others worked for most of it.
    pub(crate) is_beside: bool,
    /// Just then the first of them began, or the last one rested.
    pub(crate) has_changed: bool,
    /// The share itself did.
    pub(crate) has_moved: bool,
    /// Time of the others, in nanoseconds per second.
    pub(crate) between: u64,
    /// How long that was, in nanoseconds.
    pub(crate) lasted: u64,
    /// The trim that held meanwhile, by the mean; none: the last.
    pub(crate) held: Option<f64>,
}

/// Returns the correction factor and the debt after a snapshot.
///
/// The rate of a share is its target times a correction factor (`trim`), one for each share. After
/// each snapshot the factor is multiplied by the target over what the share used. The library's
/// nanoseconds differ from the GPU's because a kernel that neighbours interrupt looks longer than
/// it is, and an unmeasured long kernel looks shorter.
///
/// *Less follows from NVML alone; more also needs the share's word.* A share that used less than
/// its target may not want more, and only its own page says that it waited. So it gets more only if
/// it used all that its rate allowed. That is a loan: time that it then uses beyond its target is a
/// debt, which is deducted until it is paid. A shortfall is refunded later, up to a tenth of the
/// share's time per second. While a shortfall lasts, up to half a second of it offsets later
/// excess. False waiting reports gain nothing: over any time a share gets its target and at most
/// one second more.
///
/// *Start.* A shortfall in the first 1.5 seconds is not refunded, because nothing is known of the
/// kernels yet. Excess is paid as usual. At most half of the first result is followed.
///
/// *Timing.* NVML's samples end before the snapshot, so usage is compared with the mean of the
/// factors that were in force.
///
/// *Upper bound.* The library measures stretches of time in which either the share's kernels ran or
/// those of others. So the factor is at most what the share used and others used meanwhile, or
/// twice that if the share is alone. The doubled bound applies only to a second shortfall or after
/// excess, because programs that start together look slow to each other.
///
/// *Noise.* Whether one more long kernel ends just before a snapshot is chance. Excess is cut at
/// once and a shortfall is refunded under conditions, so following noise would leave every share
/// below its target. Beside others only half of a result is followed at first, less if the next one
/// says the opposite, and more, up to all of it, if it says the same. Large excess is followed at
/// once, and so is any large deviation of a share that runs alone.
///
/// *Long kernels beside others* look longer the busier the GPU is. A larger rate is charged more
/// for each kernel and gains little. Their shortfall is followed completely if more than that is
/// idle, or if the share used all of its rate and waited the whole time. Steps that were too small
/// are followed by steps of two and three times the size, if there is room.
///
/// *Alone and beside others* a share has separate factors, because kernels look longer only beside others.
///
/// *MIG instances.* NVML reports no time per process there, so factors apply to a share that has an
/// instance alone ([`crate::shares::snapshot::mig_totals`]). Otherwise they follow from the total
/// ([`super::device_totals`]).
pub(crate) fn corrected(memory: ControllerState, seen: Seen, company: CoRunners) -> ControllerState {
    let ControllerState {
        mut trims,
        mut follows,
        mut sides,
        granted,
        allowed,
        mut believed,
        debt,
        lacked,
        worked,
    } = memory;
    let CoRunners { is_beside, has_changed, has_moved, between, lasted, held } = company;
    let at = usize::from(is_beside);
    let (mut trim, mut follow) = (trims[at], follows[at]);
    // The measurement is a result of this trim.
    let held = held.unwrap_or(trim);
    if granted == 0 {
        return memory;
    }
    let is_granted = seen.busy.abs_diff(granted) <= QUANTUM;
    // A share whose earlier shortfall was not returned yet lacks nothing now.
    let is_exact = is_granted || (allowed..granted).contains(&(seen.busy + QUANTUM));
    let all = seen.busy + between;
    let is_held = memory.is_held(seen, company);
    // A share that worked for a part of the second lacks nothing by that.
    let lacks = !is_exact && seen.busy < granted && is_held && !has_moved;
    let longer = if lacked > 0 || follow < 1.0 { LONGER } else { 1.0 };
    let most = |had: u64| longer * had as f64 + between as f64;
    let limit = CREDIT * allowed;
    // Deep in debt it is not believed again, so that what it had beyond its target never adds up.
    let is_sound = debt <= signed(limit);
    // An honest share that is held up has used all of its rate, and that is no more than such kernels look.
    let is_honest = most(seen.busy + QUANTUM) >= granted as f64 * held;
    let had = if is_granted { granted } else { seen.busy };
    let more = i128::from(signed(had) - signed(allowed)) * i128::from(lasted) / i128::from(NS_PER_SECOND);
    let least = match (lacks && is_honest, believed) {
        (true, _) => allowed / SET_OFF,
        (false, true) => allowed / CHANCE,
        (false, false) => 0,
    };
    let most_owed = if believed { NS_PER_SECOND + limit } else { 0 };
    let more = i64::try_from(more).unwrap_or(i64::MAX);
    let debt = debt.saturating_add(more).clamp(-signed(least), signed(most_owed));
    let before = worked;
    let worked = if seen.busy > 0 { worked.saturating_add(lasted).min(START) } else { worked };
    let debt = if worked == START && before < START { debt.max(0) } else { debt };
    let lacked = if lacks { lacked.saturating_add(1) } else { 0 };
    // The trim by this measurement alone.
    let seen_trim = if has_changed {
        // The times of grant and use are not known exactly enough to conclude anything.
        None
    } else if is_exact {
        is_held.then_some(held)
    } else if seen.busy > granted {
        let less = held * granted as f64 / seen.busy as f64;
        // A share that does not use its rate is not cut by a slightly lower rate, and more than the
        // whole GPU cannot be measured. An undercharge only lowers the value. A share with nearly
        // all of the GPU gains little from all of it.
        let is_known = seen.charged > 0 && allowed < FULL;
        let spare = if seen.busy + QUANTUM >= NS_PER_SECOND { 1.0 } else { SPARE };
        Some(if is_known { less.min(spare * seen.charged as f64 / seen.busy as f64) } else { less })
    } else if lacks && is_honest && is_sound && (all < FULL || granted > seen.busy + POINT) {
        believed = true;
        // It may have had a little more than NVML says. Where a step was too short the next is
        // longer, once steps are followed whole; the first look at which it lacks something comes
        // before any step.
        let steps = if granted < TOLD || between < granted / 2 || follow < 1.0 {
            1
        } else {
            let room = u8::try_from((NS_PER_SECOND.saturating_sub(all)) / ROOM).unwrap_or(STEPS);
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
        // Kernels look half as long again as they are, and no other share loses the shortfall.
        let is_left = lacks && all + off < NS_PER_SECOND && seen.charged / 3 > seen.busy / 2;
        // Its rate alone holds it: it has used all of that, and waited whenever it did not work.
        let used_all = seen.charged.saturating_add(POINT) as f64 >= granted as f64 * trims[at];
        let is_short = lacks
            && off > 2 * FAR
            && used_all
            && seen.waited >= NS_PER_SECOND.saturating_sub(seen.busy) / 10 * 9;
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
    // A value that was confirmed is kept when the share lacks nothing, and at the first
    // measurement.
    let explained = LONGER * granted as f64 + between as f64;
    let most = if lacks { most(granted).max((trims[at] * granted as f64).min(explained)) } else { explained };
    (trims[at], follows[at]) = (trim.clamp(LEAST, most / granted as f64), follow);
    ControllerState { trims, follows, sides, granted, allowed, believed, debt, lacked, worked }
}

fn signed(nanoseconds: u64) -> i64 {
    i64::try_from(nanoseconds).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
