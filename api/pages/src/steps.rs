//! The steps of an explored process: every atomic operation of [`crate::word::Word`] goes through
//! here in tests.

use crate::sync::{AtomicU64, Ordering::SeqCst};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::panic::resume_unwind;
use std::rc::Rc;

pub(crate) type Memory = BTreeMap<usize, u64>;

thread_local! {
    pub(crate) static RUN: RefCell<Option<Run>> = const { RefCell::new(None) };
}

/// A process that is being run.
pub(crate) struct Run {
    pub(crate) memory: Memory,
    /// Words that some process writes.
    pub(crate) shared: Rc<RefCell<HashSet<usize>>>,
    pub(crate) history: Vec<u64>,
    pub(crate) next: usize,
    pub(crate) moved: bool,
    /// Runs to its end, without steps.
    pub(crate) alone: bool,
}

pub(crate) struct Unwound;

/// A word was written that was assumed constant, so the search restarts.
pub(crate) struct NotConstant;

enum Step {
    Done(u64),
    Pause,
    NotConstant,
}

pub(crate) fn step(
    address: usize,
    initial: impl FnOnce() -> u64,
    act: impl FnOnce(u64) -> (u64, Option<u64>),
) -> Option<u64> {
    let step = RUN.with(|run| {
        let mut run = run.borrow_mut();
        let run = run.as_mut()?;
        let steps = !run.alone && run.shared.borrow().contains(&address);
        if steps {
            if let Some(result) = run.history.get(run.next) {
                run.next += 1;
                return Some(Step::Done(*result));
            }
            if run.moved {
                return Some(Step::Pause);
            }
            run.moved = true;
        }
        let value = run.memory.get(&address).copied().unwrap_or_else(initial);
        let (result, written) = act(value);
        if let Some(written) = written {
            if !steps && !run.alone {
                run.shared.borrow_mut().insert(address);
                return Some(Step::NotConstant);
            }
            run.memory.insert(address, written);
        }
        if steps {
            run.next += 1;
            run.history.push(result);
        }
        Some(Step::Done(result))
    })?;
    match step {
        Step::Done(result) => Some(result),
        Step::Pause => resume_unwind(Box::new(Unwound)),
        Step::NotConstant => resume_unwind(Box::new(NotConstant)),
    }
}

pub(crate) fn at(word: &AtomicU64) -> usize {
    core::ptr::from_ref(word) as usize
}

pub(crate) fn load(word: &AtomicU64) -> Option<u64> {
    step(at(word), || word.load(SeqCst), |value| (value, None))
}

pub(crate) fn store(word: &AtomicU64, new: u64) -> bool {
    step(at(word), || word.load(SeqCst), |_| (0, Some(new))).is_some()
}

pub(crate) fn swap_if(word: &AtomicU64, old: u64, new: u64) -> Option<bool> {
    let swap = |value| if value == old { (1, Some(new)) } else { (0, None) };
    step(at(word), || word.load(SeqCst), swap).map(|done| done == 1)
}

/// The address of the death flag of a process; no word has it.
pub(crate) fn death_flag(pid: u32) -> usize {
    pid as usize
}

/// The length of the history of the running process.
pub(crate) fn history_len() -> usize {
    RUN.with(|run| run.borrow().as_ref().map_or(0, |run| run.next))
}

/// The running process waits, then repeats its attempt with its earlier history. If nothing changed,
/// that is a state which was seen before.
pub(crate) fn repeat_from(history: usize) {
    let explored = RUN.with(|run| match run.borrow_mut().as_mut() {
        Some(run) if !run.alone => {
            run.history.truncate(history);
            true
        }
        _ => false,
    });
    if explored {
        resume_unwind(Box::new(Unwound));
    }
}

pub(crate) fn change(word: &AtomicU64, next: &dyn Fn(u64) -> Option<u64>) -> Option<Result<u64, u64>> {
    // Refusals are marked by a bit that no total and no slot ever has.
    const REFUSED: u64 = 1 << 63;
    let act = |value: u64| match next(value) {
        Some(new) => (value, Some(new)),
        None => (value | REFUSED, None),
    };
    let result = step(at(word), || word.load(SeqCst), act)?;
    Some(if result & REFUSED == 0 { Ok(result) } else { Err(result & !REFUSED) })
}
