//! Runs a few processes on the same pages in every interleaving, and kills each at every point, on
//! the shipped code.
//!
//! A process is a function. For one more step it runs again from its start: its history supplies the
//! results of earlier steps, the next atomic operation is executed, and the one after it unwinds. A
//! state is identified by memory and histories, so the search ends. Words that no process writes are
//! read without a step. An end must be reachable from every state; otherwise the protocol can hang.

use crate::account::{self, AccountPage, Identity};
use crate::charge::Peers;
use crate::steps::{Memory, NotConstant, RUN, Run, Unwound, at, death_flag, step};
use crate::sync::{AtomicU64, Ordering::SeqCst};
use std::alloc::{Layout, alloc_zeroed};
use std::cell::RefCell;
use std::collections::hash_map::DefaultHasher;
use std::collections::{HashMap, HashSet};
use std::hash::{Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;

/// Peers for explored processes: a process is dead if it was killed.
pub(crate) struct ExploredPeers;

impl Peers for ExploredPeers {
    fn is_dead(&self, identity: &Identity) -> bool {
        step(death_flag(identity.pid), || 0, |dead| (dead, None)) == Some(1)
    }

    fn back_off(&self, _round: u32) -> bool {
        true
    }

    fn now_ns(&self) -> u64 {
        0
    }
}

/// The program of a process. The process defines its result.
pub(crate) type Act<'a> = Box<dyn Fn() -> u64 + 'a>;

struct Process<'a> {
    pid: u32,
    does: &'a dyn Fn() -> u64,
}

/// Several boolean results as one number; the first is the lowest bit.
pub(crate) fn answers(all: impl Iterator<Item = bool>) -> u64 {
    all.zip(0..).fold(0, |answers, (answer, at)| answers | u64::from(answer) << at)
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum End {
    Result(u64),
    Killed,
}

/// A final state. More code can run on its memory.
pub(crate) struct Last {
    memory: Memory,
    pub(crate) ends: Vec<End>,
}

impl Last {
    /// Runs code to its end on the final memory.
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

/// The value of a word in a state.
pub(crate) type Read<'a> = dyn Fn(&AtomicU64) -> u64 + 'a;

/// Explores programs of processes with PIDs from 1, with up to `kills` of them killed. `always`
/// must hold in every state, `last` in every final one. Prints the number of states.
pub(crate) fn explore(acts: &[Act<'_>], kills: u32, always: &dyn Fn(&Read<'_>), last: &dyn Fn(&Last)) {
    let processes: Vec<_> =
        acts.iter().zip(1..).map(|(does, pid)| Process { pid, does: does.as_ref() }).collect();
    let shared: Rc<RefCell<HashSet<usize>>> = Rc::default();
    if kills > 0 {
        shared.borrow_mut().extend(processes.iter().map(|process| death_flag(process.pid)));
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
    // Maps each state to its predecessors. At the end, the states that reach an end are found
    // backwards.
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
                next.memory.insert(death_flag(process.pid), 1);
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

/// One more step of one process; `None` if a word was assumed constant.
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
        Err(cause) if cause.is::<Unwound>() => {
            actor.history = run.history;
        }
        Err(cause) if cause.is::<NotConstant>() => return None,
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

/// A new page.
#[allow(unsafe_code)]
pub(crate) fn page() -> &'static AccountPage {
    // SAFETY: the size is not zero; the page is leaked, so it lives forever; zeros are a valid
    // page.
    unsafe {
        let memory = alloc_zeroed(Layout::new::<AccountPage>());
        memory.copy_from_nonoverlapping(account::fresh().as_ptr(), 64);
        AccountPage::at(memory, account::SIZE).expect("a fresh page is a page")
    }
}

/// A process in a common PID namespace; its start time depends on its PID.
pub(crate) fn identity(pid: u32) -> Identity {
    Identity { pid, namespace: 7, start: u64::from(pid) * 10, image: 1 }
}

/// The bytes of a page, as in its file.
#[allow(unsafe_code)]
pub(crate) fn file(page: &AccountPage) -> Vec<u8> {
    let start = core::ptr::from_ref(page).cast::<u8>();
    // SAFETY: within the page, which consists of atomics; each byte is read once while nothing
    // writes.
    (0..account::SIZE).map(|offset| unsafe { start.add(offset).read_volatile() }).collect()
}
