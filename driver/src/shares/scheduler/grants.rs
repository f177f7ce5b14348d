//! Computes what the policy pages of a GPU's shares say from now on.
//!
//! An audit finds the demand of each share by NVML once a second, so a share that lies about being
//! idle is detected. Between audits its own word counts: a share without launches for a while is
//! idle, wants nothing, and must ring its doorbell with the next launch. After that it is expected
//! to want all that it may use. All functions are pure.

use super::controller::{self, Entitlement, NS_PER_SECOND};

/// Time per second for which the gate of a blocked share opens, in nanoseconds.
const OPENING: u64 = 5_000_000;
/// A gate closes for this time, in nanoseconds, once the share with precedence has worked for
/// [`LONG`].
pub(crate) const CLOSED: u64 = 200_000_000;
const LONG: u64 = 50_000_000;
/// Before that: the margin after the time at which the next check is due, in nanoseconds.
pub(crate) const SPARE: u64 = 5_000_000;
/// A share that has not launched for this time in its turn may still have a kernel in flight.
const RESTS: u64 = NS_PER_SECOND / 4;

/// The source of the measurement of a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attribution {
    /// NVML.
    PerProcess,
    /// NVML says what all shares of the instance had together, and what they say themselves
    /// explains it, or does not.
    DeviceTotal { is_explained: bool },
    /// Its own word.
    SelfReported,
}

/// The state of a share of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ShareStatus {
    pub(crate) terms: Entitlement,
    pub(crate) is_high: bool,
    /// Its record alone holds it to less than the GPU.
    pub(crate) is_limited: bool,
    /// Nanoseconds a second, by the last audit.
    pub(crate) wants: u64,
    /// It has rung and works, by its own word.
    pub(crate) is_awake: bool,
    /// It takes turns with others.
    pub(crate) turn: Option<Turn>,
    pub(crate) attribution: Attribution,
    pub(crate) memory: controller::ControllerState,
}

/// The holder of the current turn among shares that take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    Own,
    Anothers,
}

/// The next content of its page.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct GrantUpdate {
    /// Nanoseconds a second, of the library's; none: its launches go straight to the driver.
    pub(crate) rate: Option<u64>,
    /// It is to ring with its next launch.
    pub(crate) is_asked: bool,
    /// Others work besides.
    pub(crate) is_beside: bool,
    /// All counts that its launches are measured to take.
    pub(crate) is_doubted: bool,
    /// To be remembered.
    pub(crate) memory: controller::ControllerState,
}

impl ShareStatus {
    fn wants(&self) -> u64 {
        match (self.turn, self.is_awake) {
            // The GPU is another's, all of it.
            (Some(Turn::Anothers), _) => 0,
            (Some(Turn::Own), _) | (None, true) => self.terms.ceiling,
            (None, false) => self.wants,
        }
    }
}

/// Whether some shares have precedence over others.
pub(crate) fn are_mixed(shares: &[ShareStatus]) -> bool {
    shares.iter().any(|share| share.is_high) && shares.iter().any(|share| !share.is_high)
}

/// Whether the gates of the others must be closed now.
pub(crate) fn is_high_at_work(shares: &[ShareStatus]) -> bool {
    let is_at_work =
        |share: &ShareStatus| share.is_high && share.is_awake && share.turn != Some(Turn::Anothers);
    are_mixed(shares) && shares.iter().any(is_at_work)
}

/// Returns the page contents of all shares of a GPU. `parts` are the results of [`parts`].
///
/// - *Pacing.* A share with a limit is always paced. A share without one is paced while another
///   share on the GPU could use the time. Otherwise it would have a thousand launches queued when
///   the other wakes, which cannot be taken back. A share that is alone on the GPU launches
///   directly.
///
/// - *Priority.* While a share of high priority is active, the gates of all others are closed. They
///   divide what it leaves. To avoid starvation the gates open for [`OPENING`] in each second
///   ([`Gate`]).
///
/// - *Without measurements* a share's own report counts. Compensation by the device total
///   ([`super::device_totals`]) raises no rate beyond the ceiling unless the reports explain the
///   total. Equal shares of which nothing is known are left to the driver's own time slices.
///
/// - *Turns* precede priority, because evicted memory cannot be used sooner. A share of high
///   priority gets every other turn ([`crate::shares::memory_pressure`]). While it waits for its
///   turn it closes no gate.
pub(crate) fn orders(shares: &[ShareStatus], parts: &[u64]) -> Vec<GrantUpdate> {
    let is_mixed = are_mixed(shares);
    let lends = shares.iter().any(|share| share.terms.ceiling > share.terms.guarantee);
    // The GPU driver's time slices divide a device among equal shares, and the cost of throttling
    // them would be invisible.
    let free = |share: &ShareStatus| share.attribution == Attribution::SelfReported && !share.is_limited;
    let are_alike = shares.iter().all(|share| free(share) && share.terms == shares[0].terms);
    let is_shared = shares.len() > 1 && (is_mixed || lends && !are_alike);
    let targets = if is_mixed { by_class(shares) } else { targets(shares, |_| true) };
    let all_at_work = shares.iter().filter(|share| share.wants() > 0).count();
    let order = |(share, (target, part)): (&ShareStatus, (u64, &u64))| {
        let is_beside = all_at_work > usize::from(share.wants() > 0);
        let (rate, memory) = share.memory.rate(share.terms, target.max(*part), is_beside);
        let is_doubted = match share.attribution {
            Attribution::PerProcess => false,
            Attribution::DeviceTotal { is_explained } => !is_explained,
            // A share without a ceiling cannot exceed it by a correction.
            Attribution::SelfReported => share.terms.ceiling < NS_PER_SECOND,
        };
        // A share that takes turns is seen to use them.
        let is_paced = share.is_limited || is_shared || share.turn.is_some();
        let is_idle = share.turn.is_none() && share.wants == 0;
        let is_asleep = !share.is_awake && (is_idle || is_mixed && share.is_high);
        GrantUpdate {
            rate: is_paced.then_some(rate),
            // The targets of other shares, and the inflation of their kernels, depend on it.
            is_asked: shares.len() > 1 && is_asleep,
            is_beside,
            is_doubted,
            memory: if is_paced { memory } else { memory.free() },
        }
    };
    shares.iter().zip(targets.into_iter().zip(parts)).map(order).collect()
}

/// The part of each share if all wanted everything. A share that wants less on average, because it
/// works in bursts, is not held to that. Time that was lent is its own the moment that it asks for
/// it, like a guarantee. The result depends on nothing that a share does.
pub(crate) fn parts(shares: &[ShareStatus]) -> Vec<u64> {
    let asks = |share: &ShareStatus| ShareStatus { is_awake: true, turn: None, ..*share };
    let all: Vec<_> = shares.iter().map(asks).collect();
    if !are_mixed(shares) {
        return targets(&all, |_| true);
    }
    let of_class = |is_high: bool| targets(&all, |share| share.is_high == is_high);
    of_class(true).into_iter().zip(of_class(false)).map(|(one, other)| one.max(other)).collect()
}

/// The targets of some, as if there were no others; 0 for these.
fn targets(shares: &[ShareStatus], are: impl Fn(&ShareStatus) -> bool) -> Vec<u64> {
    let wants = |share: &ShareStatus| if are(share) { share.wants() } else { 0 };
    let all: Vec<_> = shares.iter().map(|share| (share.terms, wants(share))).collect();
    controller::targets(&all)
}

/// Those of high priority that work divide the GPU, and so do the others when none does. One that
/// is asleep is not held to the little that it wanted on the mean of a second: it may have all when
/// it wakes.
fn by_class(shares: &[ShareStatus]) -> Vec<u64> {
    let high = targets(shares, |share| share.is_high && share.is_awake);
    let low = targets(shares, |share| !share.is_high);
    let target = |(share, (high, low)): (&ShareStatus, (u64, u64))| match (share.is_high, share.is_awake) {
        (true, true) => high,
        (true, false) => share.terms.ceiling,
        (false, _) => low,
    };
    shares.iter().zip(high.into_iter().zip(low)).map(target).collect()
}

/// The gate of those that others precede, in nanoseconds of any one clock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gate {
    /// Since when they are kept out, but for their openings.
    since: Option<u64>,
    /// The time since when no share blocks them.
    free_since: Option<u64>,
}

impl Gate {
    /// Whether it is closed, and until when if the share with precedence continues.
    pub(crate) fn is_closed(&mut self, keeps_out: bool, now: u64) -> (bool, u64) {
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
        let (begin, at) =
            (now - now.saturating_sub(since) % NS_PER_SECOND, now.saturating_sub(since) % NS_PER_SECOND);
        let opens = NS_PER_SECOND - OPENING;
        if at < opens { (true, begin + opens) } else { (false, begin + NS_PER_SECOND) }
    }

    /// Until when the gate is closed, and when that must be written again. `woke` is when the share
    /// with precedence became active, `known` when it will be known whether it stays active. A
    /// share at a gate sleeps as long as the gate is closed, so after short work, which is
    /// frequent, all shares wake by themselves. A gate that is closed for longer does not depend on
    /// a node that is never late.
    pub(crate) fn lasts(woke: u64, known: u64, now: u64) -> (u64, u64) {
        match now.saturating_sub(woke) >= LONG {
            true => (now + CLOSED, now + CLOSED / 2),
            false => (known + SPARE, known),
        }
    }
}

/// Exclusive quanta: one share after the other has the GPU for itself, for as long as shares together
/// have more memory than there is. In nanoseconds.
#[derive(Clone, Debug)]
pub(crate) struct Turns<K> {
    order: Vec<K>,
    quantum: u64,
    at: usize,
    since: u64,
}

impl<K: PartialEq> Turns<K> {
    /// The shares that take turns, and the length of a turn. The current turn continues.
    pub(crate) fn new(order: Vec<K>, quantum: u64, before: Option<Self>, now: u64) -> Self {
        let going = before.and_then(|before| {
            if before.order == order {
                // A share may be in the list twice.
                return Some((before.at, before.since));
            }
            let holder = before.order.get(before.at)?;
            Some((order.iter().position(|key| key == holder)?, before.since))
        });
        let (at, since) = going.unwrap_or((0, now));
        Self { order, quantum: quantum.max(8), at, since }
    }

    /// Passes the turn on if it has ended, and returns when it ends if its share continues. `last`
    /// is the time of a share's last launch: a share that is idle for an eighth of its turn, and at
    /// least for [`RESTS`], gives it up. But not in the first third of the turn: its first launch
    /// waits for the kernel of the previous share, and for evicted memory.
    pub(crate) fn go_on(&mut self, last: impl Fn(&K) -> u64, now: u64) -> u64 {
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
    pub(crate) fn of(&self, key: &K) -> Option<Turn> {
        let is_own = self.order.get(self.at).is_some_and(|holder| holder == key);
        self.order.contains(key).then_some(if is_own { Turn::Own } else { Turn::Anothers })
    }
}

#[cfg(test)]
pub(crate) mod tests;
