//! What the policy pages of a GPU's shares say from this moment on: pure.
//!
//! Once a second the audit finds out by NVML who wants what, which is how time is lent: who lies about
//! being idle has it seen. In between a share's own word is taken, by which it gains nothing that it would not have by
//! working or resting: what launches nothing for a while *rests*, wants nothing, and is
//! *asked* to ring with its next launch; when it rings, it is taken to want all that it may have.
//!
//! **Who is paced.** A share that its record limits always is. One without a limit is wherever another share is
//! on the GPU that could have what it takes, even while it may have all: else it has a thousand launches queued when the
//! other wakes, which nobody can take back, and which may be seconds of both their time. One
//! that has the GPU for itself goes straight to the driver.
//!
//! **Priority.** While a share of high priority works, the gates of the others are closed, whatever they are
//! guaranteed. They divide what it leaves as if it were not there. Lest it starve them they are
//! let through for [`OPENING`] in each second ([`Gate`]).
//!
//! **Where NVML does not say what each had**, a share is taken at its word. What is made up for by what they had
//! together ([`super::joint`]) raises no rate beyond the share's ceiling where their words do not explain that. Shares
//! that are alike, of which nothing is known at all, are left to the driver's own time slices: kernels that these cut
//! look longer than they are, and by pacing them an instance would idle that now is full.
//!
//! **Turns go before priority.** Memory that is not there cannot be used sooner, so a share of high priority that takes turns
//! has the GPU when its turn comes, which is every other one ([`super::pressure`]); then it precedes whoever
//! takes none. While it waits for its turn it keeps nobody out: else it would wait for a share that waits for it.

use super::arbiter::{self, SECOND, Terms};

/// Who is kept out has so much of each second.
const OPENING: u64 = 5_000_000;
/// For so long a gate stays closed by itself, once who has precedence has worked for [`LONG`].
pub(super) const CLOSED: u64 = 200_000_000;
const LONG: u64 = 50_000_000;
/// Before that: so long after it is known whether that goes on.
pub(super) const SPARE: u64 = 5_000_000;
/// Who has launched nothing for so long in its turn may still have a kernel under way.
const RESTS: u64 = SECOND / 4;

/// Who says what a share had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sight {
    /// NVML.
    Own,
    /// NVML says what all shares of the instance had together, and what they say themselves explains it, or does not.
    Together { is_explained: bool },
    /// Its own word.
    Word,
}

/// What is known of a share of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Standing {
    pub(super) terms: Terms,
    pub(super) is_high: bool,
    /// Its record alone holds it to less than the GPU.
    pub(super) is_limited: bool,
    /// Nanoseconds a second, by the last audit.
    pub(super) wants: u64,
    /// It has rung and works, by its own word.
    pub(super) is_awake: bool,
    /// It takes turns with others.
    pub(super) turn: Option<Turn>,
    pub(super) sight: Sight,
    pub(super) memory: arbiter::Memory,
}

/// Whose turn it is of those who take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Own,
    Anothers,
}

/// What its page is to say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Order {
    /// Nanoseconds a second, of the library's; none: its launches go straight to the driver.
    pub(super) rate: Option<u64>,
    /// It is to ring with its next launch.
    pub(super) is_asked: bool,
    /// Others work besides.
    pub(super) is_beside: bool,
    /// All counts that its launches are measured to take.
    pub(super) is_doubted: bool,
    /// To be remembered.
    pub(super) memory: arbiter::Memory,
}

impl Standing {
    fn wants(&self) -> u64 {
        match (self.turn, self.is_awake) {
            // The GPU is another's, all of it.
            (Some(Turn::Anothers), _) => 0,
            (Some(Turn::Own), _) | (None, true) => self.terms.ceiling,
            (None, false) => self.wants,
        }
    }
}

/// Whether some are to have precedence over others.
pub(super) fn are_mixed(shares: &[Standing]) -> bool {
    shares.iter().any(|share| share.is_high) && shares.iter().any(|share| !share.is_high)
}

/// Whether the others are to be kept out now.
pub(super) fn is_high_at_work(shares: &[Standing]) -> bool {
    let is_at_work = |share: &Standing| share.is_high && share.is_awake && share.turn != Some(Turn::Anothers);
    are_mixed(shares) && shares.iter().any(is_at_work)
}

/// What the pages of all shares of a GPU are to say; `parts` are theirs, of [`parts`].
pub(super) fn orders(shares: &[Standing], parts: &[u64]) -> Vec<Order> {
    let is_mixed = are_mixed(shares);
    let lends = shares.iter().any(|share| share.terms.ceiling > share.terms.guarantee);
    // The driver's own turns divide a device among shares that are alike, and nobody would see what pacing costs them.
    let free = |share: &Standing| share.sight == Sight::Word && !share.is_limited;
    let are_alike = shares.iter().all(|share| free(share) && share.terms == shares[0].terms);
    let is_shared = shares.len() > 1 && (is_mixed || lends && !are_alike);
    let targets = if is_mixed { by_class(shares) } else { targets(shares, |_| true) };
    let all_at_work = shares.iter().filter(|share| share.wants() > 0).count();
    let order = |(share, (target, part)): (&Standing, (u64, &u64))| {
        let is_beside = all_at_work > usize::from(share.wants() > 0);
        let (rate, memory) = share.memory.rate(share.terms, target.max(*part), is_beside);
        let is_doubted = match share.sight {
            Sight::Own => false,
            Sight::Together { is_explained } => !is_explained,
            // What is left out takes nobody beyond a ceiling that is not there.
            Sight::Word => share.terms.ceiling < SECOND,
        };
        // Who takes turns is seen to use them.
        let is_paced = share.is_limited || is_shared || share.turn.is_some();
        let is_idle = share.turn.is_none() && share.wants == 0;
        let is_asleep = !share.is_awake && (is_idle || is_mixed && share.is_high);
        Order {
            rate: is_paced.then_some(rate),
            // What others are to have depends on it, and what kernels look like beside it.
            is_asked: shares.len() > 1 && is_asleep,
            is_beside,
            is_doubted,
            memory: if is_paced { memory } else { memory.free() },
        }
    };
    shares.iter().zip(targets.into_iter().zip(parts)).map(order).collect()
}

/// What each would have if all wanted all. Who wants less on the mean of a second, as one that works in bursts, is not held to that: what
/// others were lent is its own the moment that it asks for it, as a guarantee is. It depends on nothing that a share does.
pub(super) fn parts(shares: &[Standing]) -> Vec<u64> {
    let asks = |share: &Standing| Standing { is_awake: true, turn: None, ..*share };
    let all: Vec<_> = shares.iter().map(asks).collect();
    if !are_mixed(shares) {
        return targets(&all, |_| true);
    }
    let of_class = |is_high: bool| targets(&all, |share| share.is_high == is_high);
    of_class(true).into_iter().zip(of_class(false)).map(|(one, other)| one.max(other)).collect()
}

/// The targets of some, as if there were no others; 0 for these.
fn targets(shares: &[Standing], are: impl Fn(&Standing) -> bool) -> Vec<u64> {
    let wants = |share: &Standing| if are(share) { share.wants() } else { 0 };
    let all: Vec<_> = shares.iter().map(|share| (share.terms, wants(share))).collect();
    arbiter::targets(&all)
}

/// Those of high priority that work divide the GPU, and so do the others when none does. One that is asleep is
/// not held to the little that it wanted on the mean of a second: it may have all when it wakes.
fn by_class(shares: &[Standing]) -> Vec<u64> {
    let high = targets(shares, |share| share.is_high && share.is_awake);
    let low = targets(shares, |share| !share.is_high);
    let target = |(share, (high, low)): (&Standing, (u64, u64))| match (share.is_high, share.is_awake) {
        (true, true) => high,
        (true, false) => share.terms.ceiling,
        (false, _) => low,
    };
    shares.iter().zip(high.into_iter().zip(low)).map(target).collect()
}

/// The gate of those that others precede, in nanoseconds of any one clock.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Gate {
    /// Since when they are kept out, but for their openings.
    since: Option<u64>,
    /// Since when nobody keeps them out.
    free_since: Option<u64>,
}

impl Gate {
    /// Whether it is closed, and until when that holds if who has precedence goes on.
    pub(super) fn is_closed(&mut self, keeps_out: bool, now: u64) -> (bool, u64) {
        if !keeps_out {
            let free_since = *self.free_since.get_or_insert(now);
            // A pause that is too short to count gives them no more to wait.
            if now.saturating_sub(free_since) >= OPENING {
                self.since = None;
            }
            return (false, u64::MAX);
        }
        if self.free_since.take().is_some_and(|free| now.saturating_sub(free) >= OPENING) {
            self.since = None;
        }
        let since = *self.since.get_or_insert(now);
        let (begin, at) = (now - now.saturating_sub(since) % SECOND, now.saturating_sub(since) % SECOND);
        let opens = SECOND - OPENING;
        if at < opens { (true, begin + opens) } else { (false, begin + SECOND) }
    }

    /// Until when it is to be closed, and when that is to be said anew. `woke` is since when who has precedence works,
    /// `known` when it is known whether that goes on. Who waits at a gate sleeps for as long as it is closed, so that after
    /// short work, which comes often, everybody wakes by itself; a gate that is closed for longer does not depend on a node that is
    /// never late by a little.
    pub(super) fn lasts(woke: u64, known: u64, now: u64) -> (u64, u64) {
        match now.saturating_sub(woke) >= LONG {
            true => (now + CLOSED, now + CLOSED / 2),
            false => (known + SPARE, known),
        }
    }
}

/// Exclusive quanta: one share after the other has the GPU for itself, for as long as shares together
/// have more memory than there is. In nanoseconds.
#[derive(Clone, Debug)]
pub(super) struct Turns<K> {
    order: Vec<K>,
    quantum: u64,
    at: usize,
    since: u64,
}

impl<K: PartialEq> Turns<K> {
    /// Who takes turns, and for how long each. The turn that is under way goes on.
    pub(super) fn new(order: Vec<K>, quantum: u64, before: Option<Self>, now: u64) -> Self {
        let going = before.and_then(|before| {
            if before.order == order {
                // Somebody may be in it twice.
                return Some((before.at, before.since));
            }
            let holder = before.order.get(before.at)?;
            Some((order.iter().position(|key| key == holder)?, before.since))
        });
        let (at, since) = going.unwrap_or((0, now));
        Self { order, quantum: quantum.max(8), at, since }
    }

    /// Gives the turn on if it has ended; says when it ends if who has it goes on. `last` is when a share was last
    /// seen to launch: whoever has nothing to do for an eighth of its turn, and no less than [`RESTS`], gives it up. Not
    /// in its first third: its first launch waits for the kernel of the one before, and for the memory that was pushed out.
    pub(super) fn go_on(&mut self, last: impl Fn(&K) -> u64, now: u64) -> u64 {
        let holder = self.order.get(self.at);
        let idle_since = holder.map_or(0, &last).clamp(self.since, now.max(self.since));
        let gives_up =
            idle_since.saturating_add((self.quantum / 8).max(RESTS)).max(self.since + self.at_first());
        let ends = self.since.saturating_add(self.quantum).min(gives_up);
        if now < ends {
            return ends;
        }
        self.at = (self.at + 1) % self.order.len().max(1);
        self.since = now;
        now.saturating_add(self.at_first().max(RESTS).min(self.quantum))
    }

    fn at_first(&self) -> u64 {
        self.quantum / 3
    }

    /// None of who takes no turns.
    pub(super) fn of(&self, key: &K) -> Option<Turn> {
        let is_own = self.order.get(self.at).is_some_and(|holder| holder == key);
        self.order.contains(key).then_some(if is_own { Turn::Own } else { Turn::Anothers })
    }
}

#[cfg(test)]
pub(super) mod tests;
