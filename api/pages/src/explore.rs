//! Every interleaving of a few processes that use the same pages, every one of them killed at
//! every point, run on the code that ships.
//!
//! A process is a function. To let it make one more step, it is run again from its start:
//! the results of its earlier steps are told to it from its history, the next atomic operation
//! is done on the memory, and the one after that unwinds. So any state can be continued in any
//! order, and a state is known again by its memory and the histories: the search ends.
//! A word that nobody ever writes is read without a step; which words those are is found
//! by searching again whenever one of them was written after all.
//!
//! A process that waits begins its attempt again with the history that it had before ([`again`]): if
//! nothing changed, that is a state which was seen. From every state some end must be reached:
//! otherwise the protocol hangs there.

use crate::account::{self, AccountPage, Identity};
use crate::charge::Peers;
use crate::sync::{AtomicU64, Ordering::SeqCst};
use crate::word::Attempt;
use std::alloc::{Layout, alloc_zeroed};
use std::cell::RefCell;
use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;

type Memory = BTreeMap<usize, u64>;

thread_local! {
    static RUN: RefCell<Option<Run>> = const { RefCell::new(None) };
}

/// A process that is being run.
struct Run {
    memory: Memory,
    /// Words that somebody writes.
    shared: Rc<RefCell<HashSet<usize>>>,
    history: Vec<u64>,
    next: usize,
    moved: bool,
    /// Without steps, to its end.
    alone: bool,
}

struct Paused;

/// A word was written that was believed to be constant: the search begins again.
struct Surprise;

enum Step {
    Done(u64),
    Pause,
    Surprise,
}

fn step(
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
                return Some(Step::Surprise);
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
        Step::Pause => resume_unwind(Box::new(Paused)),
        Step::Surprise => resume_unwind(Box::new(Surprise)),
    }
}

fn at(word: &AtomicU64) -> usize {
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

/// Where the death of a process stands: an address that no word has.
fn grave(pid: u32) -> usize {
    pid as usize
}

/// How long the history of the running process is now.
pub(crate) fn now() -> usize {
    RUN.with(|run| run.borrow().as_ref().map_or(0, |run| run.next))
}

/// The running process waits, and then begins again where the attempt began.
pub(crate) fn again(attempt: Attempt) {
    let explored = RUN.with(|run| match run.borrow_mut().as_mut() {
        Some(run) if !run.alone => {
            run.history.truncate(attempt.history);
            true
        }
        _ => false,
    });
    if explored {
        resume_unwind(Box::new(Paused));
    }
}

pub(crate) fn change(word: &AtomicU64, next: &dyn Fn(u64) -> Option<u64>) -> Option<Result<u64, u64>> {
    // Words are told apart from refusals by a bit that no total and no slot ever has.
    const REFUSED: u64 = 1 << 63;
    let act = |value: u64| match next(value) {
        Some(new) => (value, Some(new)),
        None => (value | REFUSED, None),
    };
    let result = step(at(word), || word.load(SeqCst), act)?;
    Some(if result & REFUSED == 0 { Ok(result) } else { Err(result & !REFUSED) })
}

/// Peers in the explored world: a process is gone if it was killed.
pub(crate) struct Watchers;

impl Peers for Watchers {
    fn gone(&self, who: &Identity) -> bool {
        step(grave(who.pid), || 0, |dead| (dead, None)) == Some(1)
    }

    fn pause(&self, _round: u32) -> bool {
        true
    }

    fn now(&self) -> u64 {
        0
    }
}

/// What a process does. The result is the process's own to define.
pub(crate) type Act<'a> = Box<dyn Fn() -> u64 + 'a>;

struct Process<'a> {
    pid: u32,
    does: &'a dyn Fn() -> u64,
}

/// Answers one after the other, as a result: the first is the lowest bit.
pub(crate) fn answers(all: impl Iterator<Item = bool>) -> u64 {
    all.zip(0..).fold(0, |answers, (answer, at)| answers | u64::from(answer) << at)
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum End {
    Result(u64),
    Killed,
}

/// Where everything has ended: its memory can be looked at by running more in it.
pub(crate) struct Last {
    memory: Memory,
    pub(crate) ends: Vec<End>,
}

impl Last {
    /// Runs to its end in the memory as it was left.
    pub(crate) fn run<R>(&self, run: impl FnOnce() -> R) -> R {
        let shared = Rc::default();
        let alone =
            Run { memory: self.memory.clone(), shared, history: vec![], next: 0, moved: false, alone: true };
        RUN.with(|place| *place.borrow_mut() = Some(alone));
        let result = run();
        RUN.with(|place| *place.borrow_mut() = None);
        result
    }
}

#[derive(Clone)]
struct State {
    memory: Memory,
    actors: Vec<Actor>,
    kills: u32,
}

#[derive(Clone, Hash)]
struct Actor {
    history: Vec<u64>,
    end: Option<End>,
}

/// What a word is in a state.
pub(crate) type Read<'a> = dyn Fn(&AtomicU64) -> u64 + 'a;

/// Explores what processes do, whose pids are their numbers from 1, with up to `kills` of them killed; `always` holds in
/// every state, `last` in every final one. Prints the number of states.
pub(crate) fn explore(acts: &[Act<'_>], kills: u32, always: &dyn Fn(&Read<'_>), last: &dyn Fn(&Last)) {
    let processes: Vec<_> =
        acts.iter().zip(1..).map(|(does, pid)| Process { pid, does: does.as_ref() }).collect();
    let shared: Rc<RefCell<HashSet<usize>>> = Rc::default();
    if kills > 0 {
        shared.borrow_mut().extend(processes.iter().map(|process| grave(process.pid)));
    }
    loop {
        if let Some(states) = search(&processes, kills, &shared, always, last) {
            println!("{states} states");
            return;
        }
    }
}

fn search(
    processes: &[Process<'_>],
    kills: u32,
    shared: &Rc<RefCell<HashSet<usize>>>,
    always: &dyn Fn(&Read<'_>),
    last: &dyn Fn(&Last),
) -> Option<usize> {
    let actor = Actor { history: vec![], end: None };
    let first = State { memory: Memory::new(), actors: vec![actor; processes.len()], kills };
    // From a state to the states that lead there: where an end is reached from is found backwards.
    let mut before: HashMap<Print, Vec<Print>> = HashMap::new();
    let mut ends = vec![];
    let mut open = vec![(first, None)];
    while let Some((state, from)) = open.pop() {
        let print = fingerprint(&state);
        let known = before.contains_key(&print);
        before.entry(print).or_default().extend(from);
        if known {
            continue;
        }
        always(&|word| state.memory.get(&at(word)).copied().unwrap_or_else(|| word.load(SeqCst)));
        if state.actors.iter().all(|actor| actor.end.is_some()) {
            ends.push(print);
            last(&Last {
                memory: state.memory,
                ends: state.actors.iter().filter_map(|actor| actor.end).collect(),
            });
            continue;
        }
        for (index, process) in
            processes.iter().enumerate().filter(|(index, _)| state.actors[*index].end.is_none())
        {
            if state.kills > 0 {
                let mut next = state.clone();
                next.kills -= 1;
                next.actors[index] = Actor { history: vec![], end: Some(End::Killed) };
                next.memory.insert(grave(process.pid), 1);
                open.push((next, Some(print)));
            }
            open.push((advance(state.clone(), index, process, shared)?, Some(print)));
        }
    }
    let states = before.len();
    while let Some(print) = ends.pop() {
        ends.extend(before.remove(&print).into_iter().flatten());
    }
    assert!(before.is_empty(), "{} of {states} states have no way to an end", before.len());
    Some(states)
}

/// One more step of one process. `None`: a word had been believed constant.
fn advance(
    mut state: State,
    index: usize,
    process: &Process<'_>,
    shared: &Rc<RefCell<HashSet<usize>>>,
) -> Option<State> {
    let run = Run {
        memory: std::mem::take(&mut state.memory),
        shared: Rc::clone(shared),
        history: std::mem::take(&mut state.actors[index].history),
        next: 0,
        moved: false,
        alone: false,
    };
    RUN.with(|place| *place.borrow_mut() = Some(run));
    let outcome = catch_unwind(AssertUnwindSafe(process.does));
    let run = RUN.with(|place| place.borrow_mut().take()).expect("it was put there");
    let actor = &mut state.actors[index];
    match outcome {
        Ok(result) => {
            (actor.end, actor.history) = (Some(End::Result(result)), vec![]);
        }
        Err(cause) if cause.is::<Paused>() => {
            actor.history = run.history;
        }
        Err(cause) if cause.is::<Surprise>() => return None,
        Err(cause) => resume_unwind(cause),
    }
    state.memory = run.memory;
    Some(state)
}

type Print = (u64, u64);

fn fingerprint(state: &State) -> Print {
    let hash = |seed: u64| {
        let mut hasher = DefaultHasher::new();
        (seed, &state.memory, &state.actors, state.kills).hash(&mut hasher);
        hasher.finish()
    };
    (hash(0), hash(1))
}

/// A fresh page.
#[allow(unsafe_code)]
pub(crate) fn page() -> &'static AccountPage {
    // SAFETY: not of size zero; leaked, so it is there for ever; zeros are a valid page.
    unsafe {
        let memory = alloc_zeroed(Layout::new::<AccountPage>());
        memory.copy_from_nonoverlapping(account::fresh().as_ptr(), 64);
        AccountPage::at(memory, account::SIZE).expect("a fresh page is a page")
    }
}

/// A process of one pid namespace that started when its pid says.
pub(crate) fn who(pid: u32) -> Identity {
    Identity { pid, namespace: 7, start: u64::from(pid) * 10, image: 1 }
}

/// The page's bytes, as a file would have them.
#[allow(unsafe_code)]
pub(crate) fn file(page: &AccountPage) -> Vec<u8> {
    let start = core::ptr::from_ref(page).cast::<u8>();
    // SAFETY: within the page, which is atomics: one read of each byte while nobody writes.
    (0..account::SIZE).map(|offset| unsafe { start.add(offset).read_volatile() }).collect()
}
