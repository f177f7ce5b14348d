//! The state of the library in one process, and the frame of every call.
//!
//! A call is checked in this order: library initialised, no argument missing, GPU reachable. Then
//! the simulator's rules (latency, holds, faults, trace) and the body run. Panics do not unwind
//! into C; they return NVML_ERROR_UNKNOWN. [`LIBRARY`] holds everything that calls share; the first
//! init creates it and the last shutdown drops it. There are no constructors and no threads.

use std::cell::OnceCell;
use std::ffi::{CStr, OsStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use divvy_sim::code::Code;
use divvy_sim::state::{Ci, Gi, Gpu, State};
use divvy_sim::usage::UsageMonitor;
use divvy_sim::visible_devices::VisibleDevices;
use divvy_sim::{Call, ModuleUser, Sim};

use crate::argument::{Outcome, TraceArgs};
use crate::device_nodes::DeviceNodeCache;
use crate::fork_lock::ForkLock;
use crate::tables::{EventSets, GpmSamples};

static LIBRARY: ForkLock<Option<Library>> = ForkLock::new(None);

/// Created by the first init.
struct Library {
    /// Number of inits minus number of shutdowns.
    users: usize,
    shared: Arc<Shared>,
}

/// Data that all calls share.
pub(crate) struct Shared {
    pub(crate) sim: Sim,
    _module: ModuleUser,
    nodes: DeviceNodeCache,
    session: ForkLock<Arc<Session>>,
    pub(crate) sets: ForkLock<EventSets>,
    pub(crate) samples: ForkLock<GpmSamples>,
    monitor: ForkLock<Option<Arc<UsageMonitor>>>,
}

/// The GPUs that the first init could open. Calls find no others until the library is shut down and
/// initialised again.
#[derive(Default)]
struct Session {
    /// Number of the boot and of the module load. No process of a real machine survives either, so
    /// the set is read again if they change.
    loaded: (u64, u64),
    /// Slots and device ids.
    gpus: Vec<(usize, u64)>,
}

impl Session {
    fn new(state: &State, visible: &VisibleDevices) -> Self {
        let openable = state.listed().filter(|(_, gpu)| visible.has_gpu(gpu));
        let gpus = openable.map(|(slot, gpu)| (slot, gpu.pdi)).collect();
        Self { loaded: (state.boot, state.module_loads), gpus }
    }
}

impl Shared {
    fn session(&self, state: &State, visible: &VisibleDevices) -> Arc<Session> {
        let known = self.session.with(|session| Arc::clone(session));
        if known.loaded == (state.boot, state.module_loads) {
            return known;
        }
        let made = Arc::new(Session::new(state, visible));
        // The replaced one is dropped outside the lock.
        drop(self.session.with(|session| std::mem::replace(session, Arc::clone(&made))));
        made
    }

    /// Reads the GPU time of CUDA processes. Created on first use; none if the usage file cannot be
    /// used.
    pub(crate) fn usage_monitor(&self) -> Option<Arc<UsageMonitor>> {
        let known = self.monitor.with(|monitor| monitor.clone()).filter(|monitor| monitor.is_own());
        known.or_else(|| {
            let made = Arc::new(UsageMonitor::new(self.sim.usage()?).ok()?);
            // Two threads may both have created one; the later one stays. The replaced one is
            // dropped outside the lock.
            drop(self.monitor.with(|monitor| monitor.replace(Arc::clone(&made))));
            Some(made)
        })
    }
}

/// Context of one call: the state at its start, and access to the simulator.
pub(crate) struct Nvml {
    pub(crate) shared: Arc<Shared>,
    /// The stored state, without CUDA processes that run now.
    pub(crate) state: Arc<State>,
    running: OnceCell<Arc<State>>,
    visible: OnceCell<Arc<VisibleDevices>>,
    session: OnceCell<Arc<Session>>,
}

impl Nvml {
    /// The state with the CUDA processes that run now, for calls that report them. It costs a
    /// system call for each process of the node.
    pub(crate) fn state_with_gpu_processes(&self) -> Outcome<&State> {
        if self.running.get().is_none() {
            // No other thread can set it: a call runs on one thread.
            let _ = self.running.set(self.shared.sim.read()?);
        }
        Ok(self.running.get().map_or(&self.state, |state| state))
    }

    /// The device nodes of this process, read on first use.
    pub(crate) fn visible(&self) -> &VisibleDevices {
        self.visible.get_or_init(|| self.shared.nodes.read(&self.shared.sim, &self.state))
    }

    /// The GPUs that this process can see, in index order.
    pub(crate) fn gpus(&self) -> impl Iterator<Item = (usize, &Gpu)> {
        let session = self.session.get_or_init(|| self.shared.session(&self.state, self.visible()));
        self.state
            .listed()
            .filter(|(slot, gpu)| self.visible().has_gpu(gpu) && session.gpus.contains(&(*slot, gpu.pdi)))
    }

    /// The MIG devices of a GPU that this process can see, in index order.
    pub(crate) fn mig_devices<'s>(&'s self, gpu: &'s Gpu) -> impl Iterator<Item = (&'s Gi, &'s Ci)> {
        let seen = |(gi, ci): &(&Gi, &Ci)| self.visible().has_ci(gpu, gi.id, ci.id);
        gpu.mig_devices().filter(seen)
    }

    /// Checks that this process may change instances: it is root or has the capability
    /// `mig/config`.
    pub(crate) fn may_configure(&self) -> Outcome {
        let allowed = self.shared.sim.privileged(&self.state) || self.visible().can_configure_mig();
        if allowed { Ok(()) } else { Err(Code::NoPermission) }
    }

    /// Checks that this process may change the GPU itself.
    pub(crate) fn may_administer(&self) -> Outcome {
        if self.shared.sim.privileged(&self.state) { Ok(()) } else { Err(Code::NoPermission) }
    }

    /// Whether this process may see processes in all instances: it is root or has the capability
    /// `mig/monitor`.
    pub(crate) fn may_monitor(&self) -> bool {
        self.shared.sim.privileged(&self.state) || self.visible().can_monitor_mig()
    }

    /// Changes the state. `change` must look up objects by handle again, because they may be gone
    /// by now.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut State) -> Outcome<T>) -> Outcome<T> {
        Ok(self.shared.sim.update(change)?)
    }
}

/// Counts one more user. The first one opens the simulator.
pub(crate) fn init(name: &str, needs_gpus: bool) -> Outcome {
    let shared = match shared() {
        Ok(shared) => shared,
        Err(_) => Arc::new(open()?),
    };
    shared.sim.call(Call { name, gpu: None, args: &[] }, || {
        let state = shared.sim.read_stored()?;
        let visible = shared.nodes.read(&shared.sim, &state);
        if !state.modules.nvidia || !visible.has_ctl {
            return Err(Code::DriverNotLoaded);
        }
        if needs_gpus && state.listed().next().is_none() {
            return Err(Code::GpuNotFound);
        }
        shared.session(&state, &visible);
        Ok(())
    })?;
    LIBRARY.with(|library| {
        // If another thread was faster, its simulator stays.
        library.get_or_insert_with(|| Library { users: 0, shared: Arc::clone(&shared) }).users += 1;
    });
    Ok(())
}

/// Counts one user less. The last one closes the simulator.
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
        _module: sim.use_module()?,
        sim,
        nodes: DeviceNodeCache::default(),
        session: ForkLock::new(Arc::default()),
        sets: ForkLock::new(EventSets::default()),
        samples: ForkLock::new(GpmSamples::default()),
        monitor: ForkLock::new(None),
    })
}

/// The file that this code was loaded from.
fn own_file() -> Option<PathBuf> {
    // SAFETY: all-zero bytes are a valid Dl_info.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let inside: *const c_void = (own_file as *const ()).cast();
    // SAFETY: the address is that of this function, and `info` is writable for the answer.
    let known = unsafe { libc::dladdr(inside, &mut info) };
    if known == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr succeeded, so the name is a string that lives as long as this code is loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

/// Runs `body` without unwinding into C.
pub(crate) fn guarded(body: impl FnOnce() -> Outcome) -> u32 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => Code::Success.into(),
        Ok(Err(code)) => code.into(),
        Err(_) => Code::Unknown.into(),
    }
}

/// Properties of a call's arguments that the frame uses.
pub(crate) struct Arguments<C> {
    pub(crate) missing: bool,
    pub(crate) gpu: Option<usize>,
    pub(crate) args: TraceArgs,
    pub(crate) check: C,
}

/// The frame of every call except init and shutdown.
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
        let call = Call { name, gpu: arguments.gpu, args: arguments.args.as_slice() };
        shared.sim.call(call, || {
            let state = shared.sim.read_stored()?;
            if !state.modules.nvidia {
                return Err(Code::DriverNotLoaded);
            }
            (arguments.check)(&state)?;
            let (running, visible, session) = (OnceCell::new(), OnceCell::new(), OnceCell::new());
            body(&Nvml { shared: Arc::clone(&shared), state, running, visible, session })
        })
    })
}

/// Entry points: the C signature, and a body that returns an `Outcome`.
macro_rules! entry {
    ($(
        $(#[$doc:meta])*
        fn $name:ident($nvml:ident $(, $argument:ident: $kind:ty)* $(,)?) $body:block
    )*) => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $kind),*) -> u32 {
            let mut args = $crate::argument::TraceArgs::default();
            let mut missing = false;
            let mut gpu = None;
            $(
                missing |= $crate::argument::Argument::is_missing(&$argument);
                gpu = gpu.or_else(|| $crate::argument::Argument::gpu(&$argument));
                $crate::argument::Argument::trace_args(&$argument, &mut args);
            )*
            let check = |_state: &divvy_sim::State| {
                $($crate::argument::Argument::check(&$argument, _state)?;)*
                Ok(())
            };
            let arguments = $crate::library::Arguments { missing, gpu, args, check };
            $crate::library::call(stringify!($name), arguments, |$nvml: &$crate::library::Nvml| $body)
        }
    )*};
}
pub(crate) use entry;
