//! Operations on the node's GPUs, shared by the library, the command line and tests.
//!
//! Each operation is a method of [`State`] for use inside [`Sim::update`](crate::Sim::update). It
//! checks the request, changes the state and queues events.

use crate::board;
use crate::catalogue::Model;
use crate::catalogue::list::MAX_GPUS;
use crate::code::Code;
use crate::control::{Fault, Hold, Latency, Pattern, When};
use crate::mig::{self, InstanceSeed};
use crate::state::{Ci, EventKind, Gi, Gpu, Holder, Loss, Modules, Placement, Process, State};
use std::time::{SystemTime, UNIX_EPOCH};

const DOUBLE_BIT_XID: u64 = 48;
const REMAP_XID: u64 = 63;
const REMAP_FAILURE_XID: u64 = 64;

/// New health values; none leaves a value as it is. ECC errors since the last reset also count on
/// the totals of the board.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HealthChange {
    pub ecc_corrected: Option<u64>,
    pub ecc_uncorrected: Option<u64>,
    pub rows_corrected: Option<u32>,
    pub rows_uncorrected: Option<u32>,
    pub remap_pending: Option<bool>,
    pub remap_failed: Option<bool>,
    pub sram_threshold_exceeded: Option<bool>,
    pub recovery_action: Option<u32>,
}

impl State {
    /// The GPU in a slot; an error if the driver does not list it or has lost it.
    pub fn gpu(&self, slot: usize) -> Result<&Gpu, Code> {
        let gpu = self.gpus.get(slot).filter(|gpu| !gpu.missing).ok_or(Code::NotFound)?;
        gpu.failure().map_or(Ok(gpu), Err)
    }

    /// As [`State::gpu`], for changes.
    pub fn gpu_mut(&mut self, slot: usize) -> Result<&mut Gpu, Code> {
        let gpu = self.gpus.get_mut(slot).filter(|gpu| !gpu.missing).ok_or(Code::NotFound)?;
        gpu.failure().map_or(Ok(gpu), Err)
    }

    fn birth(&self) -> InstanceSeed {
        let generation = self.generation + 1;
        InstanceSeed { generation, salt: if self.host.fresh_uuids { generation } else { 0 } }
    }

    /// See [`mig::create_gi`].
    pub fn create_gi(&mut self, slot: usize, id: u32, place: Option<Placement>) -> Result<Gi, Code> {
        let birth = self.birth();
        let gi = mig::create_gi(self.gpu_mut(slot)?, id, place, birth)?;
        self.push_event(slot, EventKind::MigConfigChange, None);
        Ok(gi)
    }

    /// See [`mig::destroy_gi`].
    pub fn destroy_gi(&mut self, slot: usize, gi: u32) -> Result<(), Code> {
        mig::destroy_gi(self.gpu_mut(slot)?, gi)?;
        self.push_event(slot, EventKind::MigConfigChange, None);
        Ok(())
    }

    /// See [`mig::create_ci`].
    pub fn create_ci(&mut self, slot: usize, gi: u32, id: u32, place: Option<Placement>) -> Result<Ci, Code> {
        let birth = self.birth();
        let ci = mig::create_ci(self.gpu_mut(slot)?, gi, id, place, birth)?;
        self.push_event(slot, EventKind::MigConfigChange, None);
        Ok(ci)
    }

    /// See [`mig::destroy_ci`].
    pub fn destroy_ci(&mut self, slot: usize, gi: u32, ci: u32) -> Result<(), Code> {
        mig::destroy_ci(self.gpu_mut(slot)?, gi, ci)?;
        self.push_event(slot, EventKind::MigConfigChange, None);
        Ok(())
    }

    /// See [`mig::set_mode`]. Returns the activation status.
    pub fn set_mig_mode(&mut self, slot: usize, on: bool) -> Result<Code, Code> {
        let host = self.host.clone();
        let gpu = self.gpu_mut(slot)?;
        let before = gpu.mig.current;
        let activation = mig::set_mode(gpu, on, &host)?;
        if gpu.mig.current != before {
            self.push_event(slot, EventKind::MigConfigChange, None);
        }
        Ok(activation)
    }

    /// Resets the GPU. Fails with IN_USE while processes or holders use it, unless forced.
    pub fn reset(&mut self, slot: usize, force: bool) -> Result<(), Code> {
        let gpu = self.gpus.get_mut(slot).filter(|gpu| !gpu.missing).ok_or(Code::NotFound)?;
        if let Some(code) = gpu.failure().filter(|_| gpu.dead) {
            return Err(code);
        }
        if !force && (!gpu.processes.is_empty() || !gpu.holders.is_empty()) {
            return Err(Code::InUse);
        }
        mig::reset(gpu);
        self.push_event(slot, EventKind::MigConfigChange, None);
        Ok(())
    }

    /// Reboots the node: removes instances, processes and driver settings, hides dead GPUs, and
    /// assigns new minors.
    pub fn reboot(&mut self) {
        self.boot += 1;
        self.modules = Modules::at_boot(self.host.bare || self.unmounted);
        let migrates = std::mem::take(&mut self.migrates);
        for gpu in &mut self.gpus {
            if migrates {
                board::replace(gpu, board::device_id(gpu.pdi, self.boot));
            }
            mig::boot(gpu);
            gpu.missing = gpu.dead;
        }
        self.events.queue.clear();
        self.kernel_log.restart();
        self.assign_minors();
        self.remove_nodes();
        if self.modules.nvidia {
            self.log_module_load();
            self.start_nodes();
        }
    }

    /// Makes the GPU fall off the bus. Unless it comes back, the next boot does not find it.
    pub fn lose(&mut self, slot: usize, comes_back: bool) -> Result<(), Code> {
        self.lose_as(slot, comes_back, Loss::default())
    }

    /// As [`State::lose`], in a given way. A GPU whose calls return RESET_REQUIRED always comes
    /// back, and a reset restores it.
    pub fn lose_as(&mut self, slot: usize, comes_back: bool, loss: Loss) -> Result<(), Code> {
        let gpu = self.gpus.get_mut(slot).ok_or(Code::NotFound)?;
        gpu.lost = !gpu.missing;
        gpu.loss = loss;
        gpu.dead = !comes_back && loss.code != Some(Code::ResetRequired);
        if !loss.silent {
            self.push_event(slot, EventKind::GpuUnavailable, None);
        }
        Ok(())
    }

    /// Adds a GPU to the running node, after all others on the bus. Returns its slot.
    pub fn plug(&mut self, model: Model) -> Result<usize, Code> {
        let slot = self.gpus.len();
        if slot >= MAX_GPUS {
            return Err(Code::InsufficientResources);
        }
        let numa = self.gpus.last().and_then(|gpu| gpu.numa);
        let pdi = board::device_id(self.gpus.first().map_or(0, |gpu| gpu.pdi), self.generation);
        let mut gpu = board::board(model, slot, pdi, numa);
        gpu.missing = true;
        self.gpus.push(gpu);
        self.attach(slot);
        Ok(slot)
    }

    /// Takes the GPU out of the running node, even if processes use it. It is found again when it
    /// is replaced, or at a boot after [`State::find`].
    pub fn unplug(&mut self, slot: usize) -> Result<(), Code> {
        let gpu = self.gpus.get_mut(slot).filter(|gpu| !gpu.missing).ok_or(Code::NotFound)?;
        mig::boot(gpu);
        (gpu.missing, gpu.dead, gpu.node, gpu.node_due_ms) = (true, true, false, None);
        self.push_event(slot, EventKind::GpuUnavailable, None);
        Ok(())
    }

    /// Replaces the board at the GPU's bus address by a new one of the same model.
    pub fn replace_gpu(&mut self, slot: usize) -> Result<(), Code> {
        let generation = self.generation;
        let gpu = self.gpus.get_mut(slot).ok_or(Code::NotFound)?;
        board::replace(gpu, board::device_id(gpu.pdi, generation));
        if gpu.missing {
            self.attach(slot);
        }
        Ok(())
    }

    /// Makes the next boot one on another host, which has other boards of the same models.
    pub fn migrate(&mut self) {
        self.migrates = true;
    }

    /// Lists a GPU that was missing, under the first free minor.
    fn attach(&mut self, slot: usize) {
        let minor = (0..).find(|minor| !self.listed().any(|(_, gpu)| gpu.minor == *minor)).unwrap_or(0);
        let due = unix_ms() + self.host.node_delay_ms;
        let has_node = self.modules.nvidia && !self.host.bare;
        if let Some(gpu) = self.gpus.get_mut(slot) {
            (gpu.missing, gpu.minor) = (false, minor);
            gpu.node = has_node && self.host.node_delay_ms == 0;
            gpu.node_due_ms = Some(due).filter(|_| has_node && !gpu.node);
        }
    }

    /// Loads the module `nvidia`. Returns false if it was loaded already.
    pub(crate) fn load_module(&mut self) -> bool {
        let loads = !self.modules.nvidia;
        self.module_loads += u64::from(loads);
        self.modules.nvidia = true;
        if loads {
            self.log_module_load();
        }
        loads
    }

    /// Unloads the driver's modules, whose files are then unmounted. Fails with IN_USE if a GPU has
    /// processes or holders.
    pub(crate) fn unload_driver(&mut self) -> Result<(), Code> {
        if self.gpus.iter().any(|gpu| !gpu.processes.is_empty() || !gpu.holders.is_empty()) {
            return Err(Code::InUse);
        }
        self.modules = Modules::at_boot(true);
        self.unmounted = true;
        self.gpus.iter_mut().for_each(mig::boot);
        self.remove_nodes();
        Ok(())
    }

    /// Loads the modules of a driver version, and creates the device nodes.
    pub(crate) fn load_driver(&mut self, version: &str) {
        self.driver = version.to_owned();
        self.unmounted = false;
        self.load_module();
        self.modules = Modules::at_boot(false);
        self.assign_minors();
        self.start_nodes();
    }

    /// Removes the device nodes of all GPUs.
    pub(crate) fn remove_nodes(&mut self) {
        for gpu in &mut self.gpus {
            (gpu.node, gpu.node_due_ms) = (false, None);
        }
    }

    /// Creates the device nodes of all GPUs after a module load: at once, or in the order of their
    /// minors with the host's delay before each.
    pub(crate) fn start_nodes(&mut self) {
        let (delay, mut due) = (self.host.node_delay_ms, unix_ms());
        for gpu in &mut self.gpus {
            gpu.node = delay == 0;
            gpu.node_due_ms = None;
            if delay > 0 && !gpu.missing {
                due += delay;
                gpu.node_due_ms = Some(due);
            }
        }
    }

    /// Creates the device nodes that are due.
    pub(crate) fn create_due_nodes(&mut self) {
        let now = unix_ms();
        for gpu in self.gpus.iter_mut().filter(|gpu| gpu.node_due_ms.is_some_and(|due| due <= now)) {
            (gpu.node, gpu.node_due_ms) = (true, None);
        }
    }

    /// Restores a lost GPU: at once if it was lost in this boot, else at the next boot.
    pub fn find(&mut self, slot: usize) -> Result<(), Code> {
        let gpu = self.gpus.get_mut(slot).ok_or(Code::NotFound)?;
        gpu.lost = false;
        gpu.loss = Loss::default();
        gpu.dead = false;
        Ok(())
    }

    /// Queues an XID event of the GPU or of one of its instances, and logs it in the kernel log.
    pub fn xid(&mut self, slot: usize, xid: u64, instance: Option<(u32, u32)>) -> Result<(), Code> {
        self.gpus.get(slot).filter(|gpu| !gpu.missing).ok_or(Code::NotFound)?;
        self.log_xid(slot, xid, instance);
        self.push_event(slot, EventKind::Xid(xid), instance);
        Ok(())
    }

    /// Sets the recovery action that NVML reports, queues its event, and logs XID 154.
    pub fn set_recovery_action(&mut self, slot: usize, action: u32) -> Result<(), Code> {
        let before = std::mem::replace(&mut self.gpu_mut(slot)?.health.recovery_action, action);
        self.push_event(slot, EventKind::RecoveryAction(action.into()), None);
        if before != action {
            self.log_recovery_action(slot, before, action);
        }
        Ok(())
    }

    /// Sets health values, also of a lost GPU. With `events`, it also queues the events of the
    /// values that got worse.
    pub fn set_health(&mut self, slot: usize, change: HealthChange, events: bool) -> Result<(), Code> {
        let gpu = self.gpus.get_mut(slot).filter(|gpu| !gpu.missing).ok_or(Code::NotFound)?;
        let before = gpu.health;
        let health = &mut gpu.health;
        for (now, total, wanted) in [
            (&mut health.ecc_corrected, &mut health.ecc_corrected_total, change.ecc_corrected),
            (&mut health.ecc_uncorrected, &mut health.ecc_uncorrected_total, change.ecc_uncorrected),
        ] {
            if let Some(wanted) = wanted {
                *total += wanted.saturating_sub(*now);
                *now = wanted;
            }
        }
        health.rows_remapped_corrected = change.rows_corrected.unwrap_or(before.rows_remapped_corrected);
        health.rows_remapped_uncorrected =
            change.rows_uncorrected.unwrap_or(before.rows_remapped_uncorrected);
        health.remap_pending = change.remap_pending.unwrap_or(before.remap_pending);
        health.remap_failed = change.remap_failed.unwrap_or(before.remap_failed);
        health.sram_threshold_exceeded =
            change.sram_threshold_exceeded.unwrap_or(before.sram_threshold_exceeded);
        let after = *health;
        let action = change.recovery_action.filter(|action| *action != before.recovery_action);
        if !events {
            gpu.health.recovery_action = action.unwrap_or(before.recovery_action);
            return Ok(());
        }
        if after.ecc_corrected > before.ecc_corrected {
            self.push_event(slot, EventKind::SingleBitEcc, None);
        }
        if after.ecc_uncorrected > before.ecc_uncorrected {
            self.push_event(slot, EventKind::DoubleBitEcc, None);
            self.xid(slot, DOUBLE_BIT_XID, None)?;
        }
        if after.remap_pending && !before.remap_pending {
            self.xid(slot, REMAP_XID, None)?;
        }
        if after.remap_failed && !before.remap_failed {
            self.xid(slot, REMAP_FAILURE_XID, None)?;
        }
        action.map_or(Ok(()), |action| self.set_recovery_action(slot, action))
    }

    /// Adds a process to the GPU, in an instance if MIG is enabled. Fails with IN_USE if the
    /// compute mode forbids it.
    pub fn add_process(&mut self, slot: usize, process: Process) -> Result<(), Code> {
        let gpu = self.gpu_mut(slot)?;
        match process.instance {
            None if gpu.mig.current => return Err(Code::InvalidArgument),
            Some((gi, ci)) => {
                gpu.gi(gi).and_then(|gi| gi.ci(ci)).ok_or(Code::NotFound)?;
            }
            None => {}
        }
        if !mig::allows_process(gpu, &process) {
            return Err(Code::InUse);
        }
        gpu.processes.retain(|other| other.pid != process.pid);
        gpu.processes.push(process);
        Ok(())
    }

    /// Removes a process or holder, from one GPU or from all.
    pub fn remove_process(&mut self, slot: Option<usize>, pid: u32) -> Result<(), Code> {
        let mut found = false;
        for (_, gpu) in self.gpus.iter_mut().enumerate().filter(|(at, _)| slot.is_none_or(|slot| slot == *at))
        {
            let before = gpu.processes.len() + gpu.holders.len();
            gpu.processes.retain(|process| process.pid != pid);
            gpu.holders.retain(|holder| holder.pid != pid);
            found |= before != gpu.processes.len() + gpu.holders.len();
        }
        if found { Ok(()) } else { Err(Code::NotFound) }
    }

    /// Adds a client that holds the GPU or a GPU instance without running on it.
    pub fn add_holder(&mut self, slot: usize, holder: Holder) -> Result<(), Code> {
        let gpu = self.gpu_mut(slot)?;
        if holder.gi.is_some_and(|gi| gpu.gi(gi).is_none()) {
            return Err(Code::NotFound);
        }
        gpu.holders.push(holder);
        Ok(())
    }

    /// Delays matching calls; 0 ms without the global lock removes the rule.
    pub fn set_latency(&mut self, latency: Latency) {
        self.control.latencies.retain(|other| other.pattern != latency.pattern);
        if latency.ms > 0 || latency.global_lock {
            self.control.latencies.push(latency);
        }
    }

    /// Makes matching calls fail: all of them, or the n-th.
    pub fn add_fault(&mut self, pattern: Pattern, nth: Option<u64>, when: When, code: Code) {
        self.control.faults.push(Fault { pattern, nth, when, code, seen: 0 });
    }

    /// Removes the faults with that call pattern, or all.
    pub fn clear_faults(&mut self, call: Option<&str>) {
        self.control.faults.retain(|fault| call.is_some_and(|call| fault.pattern.call != call));
    }

    /// Blocks matching calls: all of them, or the n-th.
    pub fn add_hold(&mut self, pattern: Pattern, nth: Option<u64>, when: When) {
        let id = self.generation + 1 + self.control.holds.len() as u64;
        self.control.holds.push(Hold { pattern, nth, when, seen: 0, id });
    }

    /// Releases the holds with that call pattern, or all.
    pub fn release(&mut self, call: Option<&str>) {
        self.control.holds.retain(|hold| call.is_some_and(|call| hold.pattern.call != call));
        self.control.held.retain(crate::control::is_alive);
    }
}

/// Milliseconds since the Unix epoch.
pub(crate) fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl Modules {
    /// The modules that are loaded at boot: all, or none if `nvidia-modprobe` has to load them.
    pub const fn at_boot(bare: bool) -> Self {
        Self { nvidia: !bare, uvm: !bare, modeset: !bare }
    }
}
