//! Calls that misbehave, and time that varies, as the process's environment says when it calls `cuInit`.
//!
//! `DIVVY_SIM_CUDA` holds words, separated by commas:
//!
//! | word | meaning |
//! |---|---|
//! | `cuMemAlloc_v2=2` | each call answers that code and does nothing |
//! | `cuMemAlloc_v2#3=2` | only the third call from then on |
//! | `cuLaunchKernel@500` | each call takes 500 microseconds more; with `#n` only that one |
//! | `cuMemAlloc_v2!` | each call kills the process (SIGKILL) before it does anything; with `#n` only that one |
//! | `cuMemAlloc_v2!!` | the same, once it has done what it does |
//! | `jitter=20` | kernels run up to 20 per cent shorter or longer |
//! | `order` | kernels run in order with those of other such processes, as those of clients of MPS |
//! | `context=64` | a context takes 64 MiB |
//!
//! A name may end in `*`. Words that say nothing are refused: `cuInit` answers INVALID_VALUE. Without the variable a call
//! pays one load for all this.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::code::Code;
use crate::frame::Outcome;
use crate::symbols;

/// Name of the variable.
const VARIABLE: &str = "DIVVY_SIM_CUDA";

/// There are rules for calls.
static ANY: AtomicBool = AtomicBool::new(false);
static RULES: OnceLock<Rules> = OnceLock::new();

/// What the variable says.
#[derive(Debug, Default)]
pub(crate) struct Rules {
    calls: Vec<Rule>,
    /// Per cent.
    jitter: u64,
    pub(crate) order: bool,
    /// Bytes of a context.
    pub(crate) context: Option<u64>,
}

#[derive(Debug)]
struct Rule {
    name: String,
    /// Only the call of that number, from 1.
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
        let known = symbols::SYMBOLS.iter().any(|symbol| matches(name, symbol.name));
        known.then(|| Self { name: name.to_owned(), nth, effect, seen: AtomicU64::new(0) })
    }

    /// Counts the call: whether the rule is about it.
    fn strikes(&self) -> bool {
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

    /// How long a kernel runs this time that says so long.
    pub(crate) fn vary(&self, time: u64) -> u64 {
        if self.jitter == 0 {
            return time;
        }
        static SEED: AtomicU64 = AtomicU64::new(0x9e37_79b9_7f4a_7c15);
        let seed = SEED.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        vary(time, self.jitter, seed)
    }
}

/// Somewhere within so many per cent of it (SplitMix64 of the seed).
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
    // Another thread may have been faster, and has read the same.
    let _ = RULES.set(rules);
    Ok(())
}

/// The rules of this process; none before `cuInit`.
#[inline]
pub(crate) fn rules() -> Option<&'static Rules> {
    RULES.get()
}

/// Whether calls have to be shown to [`around`].
#[inline]
pub(crate) fn any() -> bool {
    ANY.load(Ordering::Relaxed)
}

/// Does a call under the rules.
#[cold]
pub(crate) fn around(at: usize, body: &mut dyn FnMut() -> Outcome) -> Outcome<u32> {
    let name = symbols::SYMBOLS.get(at).map_or("", |symbol| symbol.name);
    let mut dies = false;
    for rule in rules().into_iter().flat_map(|rules| &rules.calls).filter(|rule| matches(&rule.name, name)) {
        match rule.effect {
            _ if !rule.strikes() => {}
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
    fn words_are_rules() {
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
    fn the_nth_call_is_one() {
        let rule = Rule::parse("cuInit#2=2").expect("a rule");
        assert_eq!([rule.strikes(), rule.strikes(), rule.strikes()], [false, true, false]);
    }

    proptest! {
        #[test]
        fn jitter_keeps_to_its_per_cent(time in 0..10_000_000_000_u64, per_cent in 0..100_u64, seed: u64) {
            let varied = vary(time, per_cent, seed);
            let reach = u128::from(time) * u128::from(per_cent) / 100;
            prop_assert!(u128::from(varied.abs_diff(time)) <= reach);
        }
    }
}
