//! Injected faults and delays, from the environment at `cuInit`.
//!
//! `DIVVY_SIM_CUDA` is a comma-separated list of words, see [`Rules`]. An invalid word makes
//! `cuInit` return INVALID_VALUE. Without the variable, a call pays one load for all this.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::code::{Code, Outcome};

use crate::call_index;

/// The name of the variable.
const VARIABLE: &str = "DIVVY_SIM_CUDA";

/// Whether there are rules for calls.
static ANY: AtomicBool = AtomicBool::new(false);
static RULES: OnceLock<Rules> = OnceLock::new();

/// The content of the variable:
///
/// | word | meaning |
/// |---|---|
/// | `cuMemAlloc_v2=2` | each call returns that code and does nothing |
/// | `cuMemAlloc_v2#3=2` | only the third call from then on |
/// | `cuLaunchKernel@500` | each call takes 500 microseconds longer; with `#n` only that one |
/// | `cuMemAlloc_v2!` | each call first kills the process (SIGKILL); with `#n` only that one |
/// | `cuMemAlloc_v2!!` | the same, after the call is done |
/// | `jitter=20` | kernels run up to 20 per cent shorter or longer |
/// | `order` | kernels run in order with those of other such processes, like those of MPS clients |
/// | `context=64` | a context takes 64 MiB |
///
/// A name may end in `*`.
#[derive(Debug, Default)]
pub(crate) struct Rules {
    calls: Vec<Rule>,
    /// In per cent.
    jitter: u64,
    pub(crate) order: bool,
    /// Memory of a context, in bytes.
    pub(crate) context: Option<u64>,
}

#[derive(Debug)]
struct Rule {
    name: String,
    /// Only the call of that number, counted from 1.
    nth: Option<u64>,
    effect: Effect,
    seen: AtomicU64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Effect {
    Fail(u32),
    Wait(Duration),
    DieBefore,
    DieAfter,
}

impl Rule {
    /// `cuName#3=2`, `cuName@500`, `cuName!`, `cuName!!`.
    fn parse(word: &str) -> Option<Self> {
        let at = word.find(['=', '@', '!'])?;
        let (call, effect) = word.split_at(at);
        let effect = match effect.split_at(1) {
            ("=", code) => Effect::Fail(code.parse().ok().filter(|code| Code::texts(*code).is_some())?),
            ("@", microseconds) => Effect::Wait(Duration::from_micros(microseconds.parse().ok()?)),
            (_, "") => Effect::DieBefore,
            (_, "!") => Effect::DieAfter,
            _ => return None,
        };
        let (name, nth) = match call.split_once('#') {
            Some((name, nth)) => (name, Some(nth.parse().ok().filter(|nth| *nth > 0)?)),
            None => (call, None),
        };
        let known = call_index::NAMES.iter().any(|known| matches(name, known));
        known.then(|| Self { name: name.to_owned(), nth, effect, seen: AtomicU64::new(0) })
    }

    /// Counts the call. Returns whether the rule applies to it.
    fn applies_to_next(&self) -> bool {
        let seen = self.seen.fetch_add(1, Ordering::Relaxed) + 1;
        self.nth.is_none_or(|nth| nth == seen)
    }
}

fn matches(pattern: &str, name: &str) -> bool {
    pattern.strip_suffix('*').map_or(pattern == name, |begin| name.starts_with(begin))
}

impl Rules {
    fn parse(text: &str) -> Option<Self> {
        let mut rules = Self::default();
        for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            match word.split_once('=') {
                Some(("jitter", per_cent)) => {
                    rules.jitter = per_cent.parse().ok().filter(|part| *part < 100)?
                }
                Some(("context", mib)) => {
                    rules.context = Some(mib.parse::<u64>().ok()?.checked_mul(1 << 20)?)
                }
                _ if word == "order" => rules.order = true,
                _ => rules.calls.push(Rule::parse(word)?),
            }
        }
        Some(rules)
    }

    /// The run time of this launch of a kernel, with jitter applied to `time`.
    pub(crate) fn vary(&self, time: u64) -> u64 {
        if self.jitter == 0 {
            return time;
        }
        static SEED: AtomicU64 = AtomicU64::new(0x9e37_79b9_7f4a_7c15);
        let seed = SEED.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        vary(time, self.jitter, seed)
    }
}

/// A time within `per_cent` of the given one (SplitMix64 of the seed).
fn vary(time: u64, per_cent: u64, seed: u64) -> u64 {
    let mut mixed = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^= mixed >> 31;
    let reach = time / 100 * per_cent + time % 100 * per_cent / 100;
    time - reach + mixed % (2 * reach + 1)
}

/// Reads the variable, once.
pub(crate) fn read() -> Outcome {
    let rules = Rules::parse(&std::env::var(VARIABLE).unwrap_or_default()).ok_or(Code::InvalidValue)?;
    ANY.store(!rules.calls.is_empty(), Ordering::Relaxed);
    // Another thread may have been faster; it read the same value.
    let _ = RULES.set(rules);
    Ok(())
}

/// The rules of this process; `None` before `cuInit`.
#[inline]
pub(crate) fn rules() -> Option<&'static Rules> {
    RULES.get()
}

/// Whether calls must go through [`apply`].
#[inline]
pub(crate) fn has_call_rules() -> bool {
    ANY.load(Ordering::Relaxed)
}

/// Executes a call with the rules applied.
#[cold]
pub(crate) fn apply(at: usize, body: &mut dyn FnMut() -> Outcome) -> Outcome<u32> {
    let name = call_index::NAMES.get(at).copied().unwrap_or_default();
    let mut dies = false;
    for rule in rules().into_iter().flat_map(|rules| &rules.calls).filter(|rule| matches(&rule.name, name)) {
        match rule.effect {
            _ if !rule.applies_to_next() => {}
            Effect::Fail(code) => return Ok(code),
            Effect::Wait(time) => std::thread::sleep(time),
            Effect::DieBefore => die(),
            Effect::DieAfter => dies = true,
        }
    }
    let result = body();
    if dies {
        die();
    }
    result.map(|()| 0)
}

fn die() {
    // SAFETY: a signal to this process.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn words_parse_to_rules() {
        let rules = Rules::parse(
            "cuMemAlloc_v2#3=2, cuLaunch*@500,cuInit!,cuMemFree_v2!!,jitter=20,order,context=64",
        );
        let rules = rules.expect("rules");
        let effects: Vec<_> =
            rules.calls.iter().map(|rule| (rule.name.as_str(), rule.nth, rule.effect)).collect();
        assert_eq!(
            effects,
            [
                ("cuMemAlloc_v2", Some(3), Effect::Fail(2)),
                ("cuLaunch*", None, Effect::Wait(Duration::from_micros(500))),
                ("cuInit", None, Effect::DieBefore),
                ("cuMemFree_v2", None, Effect::DieAfter),
            ]
        );
        assert_eq!((rules.jitter, rules.order, rules.context), (20, true, Some(64 << 20)));
        for word in
            ["cuNonsense=2", "cuInit", "cuInit=12345", "cuInit#0=2", "cuInit@soon", "jitter=100", "nonsense"]
        {
            assert!(Rules::parse(word).is_none(), "{word}");
        }
    }

    #[test]
    fn rule_for_nth_call_applies_once() {
        let rule = Rule::parse("cuInit#2=2").expect("a rule");
        assert_eq!(
            [rule.applies_to_next(), rule.applies_to_next(), rule.applies_to_next()],
            [false, true, false]
        );
    }

    proptest! {
        #[test]
        fn jitter_stays_within_its_per_cent(
            time in 0..10_000_000_000_u64, per_cent in 0..100_u64, seed: u64,
        ) {
            let varied = vary(time, per_cent, seed);
            let reach = u128::from(time) * u128::from(per_cent) / 100;
            prop_assert!(u128::from(varied.abs_diff(time)) <= reach);
        }
    }
}
