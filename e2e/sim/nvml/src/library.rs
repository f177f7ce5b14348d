//! The library in one process: whether it is initialised, which simulator it stands for, and the frame of every call.
//!
//! A call passes in this order: initialised, no argument missing, the GPU it names reachable, the simulator's hook
//! (latency, holds, faults, trace), the body. Nothing unwinds out of it: a panic is NVML_ERROR_UNKNOWN.
//! All that is shared between calls is in [`LIBRARY`]; it is made by init and dropped by the last shutdown. There are
//! no constructors and no threads.

use std::cell::OnceCell;
use std::ffi::{CStr, OsStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use divvy_sim::code::Code;
use divvy_sim::ledger::Watcher;
use divvy_sim::state::{Ci, Gi, Gpu, State};
use divvy_sim::visible::Visible;
use divvy_sim::{Call, Sim};

use crate::argument::{Outcome, Words};
use crate::events::Sets;
use crate::fork::ForkLock;
use crate::gpm::Samples;
use crate::nodes::Nodes;

static LIBRARY: ForkLock<Option<Library>> = ForkLock::new(None);

/// What init makes.
struct Library {
    /// Inits less shutdowns.
    users: usize,
    shared: Arc<Shared>,
}

/// What calls share.
pub(crate) struct Shared {
    pub(crate) sim: Sim,
    nodes: Nodes,
    pub(crate) sets: ForkLock<Sets>,
    pub(crate) samples: ForkLock<Samples>,
    watcher: ForkLock<Option<Arc<Watcher>>>,
}

impl Shared {
    /// Who looks at the time of CUDA processes, from the first look on; none where that cannot be seen.
    pub(crate) fn watcher(&self) -> Option<Arc<Watcher>> {
        let known = self.watcher.with(|watcher| watcher.clone()).filter(|watcher| watcher.is_own());
        known.or_else(|| {
            let made = Arc::new(Watcher::new(self.sim.ledger()?).ok()?);
            // Of two threads both may have made one; the later one stays. What it replaces is dropped outside the lock.
            drop(self.watcher.with(|watcher| watcher.replace(Arc::clone(&made))));
            Some(made)
        })
    }
}

/// What one call sees: the state at its begin, and the ways to change it.
pub(crate) struct Nvml {
    pub(crate) shared: Arc<Shared>,
    /// Without the CUDA processes that run.
    pub(crate) state: Arc<State>,
    running: OnceCell<Arc<State>>,
    visible: OnceCell<Arc<Visible>>,
}

impl Nvml {
    /// The state with the CUDA processes that run, for calls that tell of them: whether one lives is a question to the
    /// kernel for each of a node.
    pub(crate) fn running(&self) -> Outcome<&State> {
        if self.running.get().is_none() {
            // Nobody else can set it meanwhile: a call is one thread's.
            let _ = self.running.set(self.shared.sim.read()?);
        }
        Ok(self.running.get().map_or(&self.state, |state| state))
    }

    /// The nodes in this process's `/dev`, read when a call first asks.
    pub(crate) fn visible(&self) -> &Visible {
        self.visible.get_or_init(|| self.shared.nodes.read(&self.shared.sim, &self.state))
    }

    /// The GPUs that this process may see, by index.
    pub(crate) fn gpus(&self) -> impl Iterator<Item = (usize, &Gpu)> {
        self.state.listed().filter(|(_, gpu)| self.visible().gpu(gpu))
    }

    /// The MIG devices of a GPU that this process may see, by index.
    pub(crate) fn mig_devices<'s>(&'s self, gpu: &'s Gpu) -> impl Iterator<Item = (&'s Gi, &'s Ci)> {
        let seen = |(gi, ci): &(&Gi, &Ci)| self.visible().ci(gpu, gi.id, ci.id);
        gpu.mig_devices().filter(seen)
    }

    /// Whether this process may change instances: root, or whoever holds the capability `mig/config`.
    pub(crate) fn may_configure(&self) -> Outcome {
        let allowed = self.shared.sim.privileged(&self.state) || self.visible().config();
        if allowed { Ok(()) } else { Err(Code::NoPermission) }
    }

    /// Whether this process may change the GPU itself.
    pub(crate) fn may_administer(&self) -> Outcome {
        if self.shared.sim.privileged(&self.state) { Ok(()) } else { Err(Code::NoPermission) }
    }

    /// Whether this process may see what runs in all instances: root, or `mig/monitor`.
    pub(crate) fn may_monitor(&self) -> bool {
        self.shared.sim.privileged(&self.state) || self.visible().monitor()
    }

    /// Changes the state. `change` looks up by handle again: what the call saw at its begin may be gone.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut State) -> Outcome<T>) -> Outcome<T> {
        Ok(self.shared.sim.update(change)?)
    }
}

/// One more user; the first one opens the simulator.
pub(crate) fn init(name: &str, needs_gpus: bool) -> Outcome {
    let shared = match shared() {
        Ok(shared) => shared,
        Err(_) => Arc::new(open()?),
    };
    shared.sim.call(Call { name, gpu: None, args: &[] }, || {
        let state = shared.sim.written()?;
        let visible = shared.nodes.read(&shared.sim, &state);
        if !state.modules.nvidia || !visible.ctl {
            return Err(Code::DriverNotLoaded);
        }
        if needs_gpus && state.listed().next().is_none() {
            return Err(Code::GpuNotFound);
        }
        Ok(())
    })?;
    LIBRARY.with(|library| {
        // Another thread may have been faster: then its simulator stays.
        library.get_or_insert_with(|| Library { users: 0, shared: Arc::clone(&shared) }).users += 1;
    });
    Ok(())
}

/// One user less; the last one closes the simulator.
pub(crate) fn shutdown() -> Outcome {
    // Dropped outside the lock.
    let closed = LIBRARY.with(|library| {
        let Some(open) = library else { return Err(Code::Uninitialized) };
        open.users -= 1;
        Ok(if open.users == 0 { library.take() } else { None })
    })?;
    drop(closed);
    Ok(())
}

fn shared() -> Outcome<Arc<Shared>> {
    LIBRARY.with(|library| library.as_ref().map(|open| Arc::clone(&open.shared))).ok_or(Code::Uninitialized)
}

fn open() -> Outcome<Shared> {
    let file = own_file().ok_or(Code::LibraryNotFound)?;
    let sim = Sim::from_library_path(&file)?;
    Ok(Shared {
        sim,
        nodes: Nodes::default(),
        sets: ForkLock::new(Sets::default()),
        samples: ForkLock::new(Samples::default()),
        watcher: ForkLock::new(None),
    })
}

/// The file that this code was loaded from.
fn own_file() -> Option<PathBuf> {
    // SAFETY: all-zero bytes are a Dl_info.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let inside: *const c_void = (own_file as *const ()).cast();
    // SAFETY: the address is of this very function, and `info` is a place for the answer.
    let known = unsafe { libc::dladdr(inside, &mut info) };
    if known == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr succeeded, so the name is a string that lives as long as this code is loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

/// Runs what must not unwind into C.
pub(crate) fn guarded(body: impl FnOnce() -> Outcome) -> u32 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => Code::Success.into(),
        Ok(Err(code)) => code.into(),
        Err(_) => Code::Unknown.into(),
    }
}

/// What the frame asks of the arguments of a call.
pub(crate) struct Arguments<C> {
    pub(crate) missing: bool,
    pub(crate) gpu: Option<usize>,
    pub(crate) words: Words,
    pub(crate) check: C,
}

/// The frame of every call but init and shutdown.
pub(crate) fn call<C, B>(name: &'static str, arguments: Arguments<C>, body: B) -> u32
where
    C: FnOnce(&State) -> Outcome,
    B: FnOnce(&Nvml) -> Outcome,
{
    guarded(|| {
        let shared = shared()?;
        if arguments.missing {
            return Err(Code::InvalidArgument);
        }
        let call = Call { name, gpu: arguments.gpu, args: arguments.words.as_slice() };
        shared.sim.call(call, || {
            let state = shared.sim.written()?;
            if !state.modules.nvidia {
                return Err(Code::DriverNotLoaded);
            }
            (arguments.check)(&state)?;
            let (running, visible) = (OnceCell::new(), OnceCell::new());
            body(&Nvml { shared: Arc::clone(&shared), state, running, visible })
        })
    })
}

/// Entry points: the C signature, and a body that ends in an `Outcome`.
macro_rules! entry {
    ($($(#[$doc:meta])* fn $name:ident($nvml:ident $(, $argument:ident: $kind:ty)* $(,)?) $body:block)*) => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $kind),*) -> u32 {
            let mut words = $crate::argument::Words::default();
            let mut missing = false;
            let mut gpu = None;
            $(
                missing |= $crate::argument::Argument::missing(&$argument);
                gpu = gpu.or_else(|| $crate::argument::Argument::gpu(&$argument));
                $crate::argument::Argument::words(&$argument, &mut words);
            )*
            let check = |_state: &divvy_sim::State| {
                $($crate::argument::Argument::check(&$argument, _state)?;)*
                Ok(())
            };
            let arguments = $crate::library::Arguments { missing, gpu, words, check };
            $crate::library::call(stringify!($name), arguments, |$nvml: &$crate::library::Nvml| $body)
        }
    )*};
}
pub(crate) use entry;
