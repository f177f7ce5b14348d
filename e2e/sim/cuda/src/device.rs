//! The GPUs that this process sees, by ordinal, and what CUDA tells of them.
//!
//! As the real driver does, a process that sees a MIG device sees nothing else: the first one, or the one that
//! `CUDA_VISIBLE_DEVICES` names. A GPU in MIG mode is not seen as a whole.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use divvy_sim::catalogue::GpuModel;
use divvy_sim::ledger::{EnterError, Place};
use divvy_sim::mig;
use divvy_sim::state::{Ci, Gi, Gpu, State};
use divvy_sim::visible::Visible;
use divvy_sim::{Guest, Sim};

use crate::argument::{In, Out, Text, write_text};
use crate::code::Code;
use crate::context::Primary;
use crate::frame::{Outcome, entry};
use crate::handle::Handle;
use crate::pool::Pool;
use crate::process::Process;
use crate::rules::rules;

/// `CUuuid`.
pub(crate) type Uuid = [u8; 16];

/// A GPU or a compute instance as this process uses it.
pub(crate) struct Device {
    pub(crate) ordinal: i32,
    pub(crate) place: Place,
    pub(crate) model: &'static GpuModel,
    /// `GPU-...` or `MIG-...`.
    uuid: String,
    gpu_uuid: String,
    /// PCI address in sysfs spelling.
    bdf: String,
    name: String,
    pub(crate) multiprocessors: u32,
    /// Bytes.
    pub(crate) memory: u64,
    /// Made with the first context or memory.
    guest: Mutex<Option<Arc<Guest>>>,
    pub(crate) primary: Mutex<Primary>,
    pools: Mutex<Pools>,
}

/// A device's pools, made when they are first asked for.
#[derive(Default)]
struct Pools {
    default: Option<Handle<Pool>>,
    /// Where `cuMemAllocAsync` allocates, if not there.
    current: Option<Handle<Pool>>,
    graph: Option<Handle<Pool>>,
}

impl Device {
    /// What a process sees of the node's GPUs.
    pub(crate) fn all(state: &State, visible: &Visible, wanted: Option<&str>) -> Vec<Self> {
        let mut gpus = Vec::new();
        let mut instances = Vec::new();
        for (slot, gpu) in
            visible.slots(state).into_iter().filter_map(|slot| Some((slot, state.gpus.get(slot)?)))
        {
            if gpu.lost {
                continue;
            }
            if !gpu.mig.current {
                gpus.push(Self::new(slot, gpu, None));
            }
            let seen = gpu.mig_devices().filter(|(gi, ci)| visible.ci(gpu, gi.id, ci.id));
            instances.extend(seen.map(|instance| Self::new(slot, gpu, Some(instance))));
        }
        let mut devices = match wanted {
            None if instances.is_empty() => gpus,
            None => instances,
            Some(list) => pick(gpus, instances, list),
        };
        if devices.first().is_some_and(|device| device.place.instance.is_some()) {
            devices.truncate(1);
        }
        for (device, ordinal) in devices.iter_mut().zip(0..) {
            device.ordinal = ordinal;
        }
        devices
    }

    fn new(slot: usize, gpu: &Gpu, instance: Option<(&Gi, &Ci)>) -> Self {
        let model = gpu.model();
        let (uuid, name, multiprocessors) = match instance {
            None => (gpu.uuid.clone(), model.product.clone(), model.multiprocessors),
            Some((gi, ci)) => {
                let profile = model.profile(gi.profile).map_or("", |profile| &profile.name);
                let part = mig::ci_profile(gpu, gi, ci.profile).map_or(0, |part| part.sm);
                (ci.uuid.clone(), format!("{} MIG {profile}", model.product), part)
            }
        };
        Self {
            ordinal: 0,
            place: Place { slot, instance: instance.map(|(gi, ci)| (gi.id, ci.id)) },
            model,
            uuid,
            gpu_uuid: gpu.uuid.clone(),
            bdf: gpu.bdf.clone(),
            name,
            multiprocessors,
            memory: mig::memory_mib(gpu, instance.map(|(gi, _)| gi.id)) << 20,
            guest: Mutex::new(None),
            primary: Mutex::default(),
            pools: Mutex::default(),
        }
    }

    fn pools(&self) -> MutexGuard<'_, Pools> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn default_pool(&'static self, process: &'static Process) -> Handle<Pool> {
        *self.pools().default.get_or_insert_with(|| Pool::of_device(process, self))
    }

    pub(crate) fn graph_pool(&'static self, process: &'static Process) -> Handle<Pool> {
        *self.pools().graph.get_or_insert_with(|| Pool::of_device(process, self))
    }

    /// The pool that stream-ordered allocations come from.
    pub(crate) fn pool(&'static self, process: &'static Process) -> Handle<Pool> {
        let current = self.pools().current;
        current.unwrap_or_else(|| self.default_pool(process))
    }

    pub(crate) fn set_pool(&self, pool: Handle<Pool>) {
        self.pools().current = Some(pool);
    }

    /// The pool is destroyed: the default one takes its place.
    pub(crate) fn forget_pool(&self, pool: Handle<Pool>) {
        self.pools().current.take_if(|current| *current == pool);
    }

    /// What a synchronisation does to pools.
    pub(crate) fn settle_pools(&self) {
        let (default, current) = {
            let pools = self.pools();
            (pools.default, pools.current)
        };
        for pool in default.into_iter().chain(current) {
            pool.get().into_iter().for_each(Pool::settle);
        }
    }

    /// The device is reset: its pools let go of all.
    pub(crate) fn empty_pools(&self) {
        let pools = self.pools();
        for pool in [pools.default, pools.current, pools.graph].into_iter().flatten() {
            pool.get().into_iter().for_each(|pool| pool.trim(0));
        }
    }

    /// This process as a user of the device.
    pub(crate) fn guest(&self, sim: &Sim) -> Outcome<Arc<Guest>> {
        let mut guest = self.guest.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(guest) = &*guest {
            return if guest.works() { Ok(Arc::clone(guest)) } else { Err(Code::DeviceUnavailable) };
        }
        if !self.lets_in(sim)? {
            return Err(Code::DeviceUnavailable);
        }
        let ledger = sim.ledger().ok_or(Code::OperatingSystem)?;
        let entered = Guest::enter(ledger, self.place).map(Arc::new).map_err(|error| match error {
            EnterError::Absent | EnterError::Full => Code::DeviceUnavailable,
            EnterError::Denied => Code::NotPermitted,
            EnterError::Io(_) => Code::OperatingSystem,
        })?;
        if rules().is_some_and(|rules| rules.order) {
            entered.run_in_order();
        }
        *guest = Some(Arc::clone(&entered));
        Ok(entered)
    }

    /// Whether the compute mode lets this process in.
    fn lets_in(&self, sim: &Sim) -> Outcome<bool> {
        let state = sim.read().map_err(|_| Code::OperatingSystem)?;
        let gpu = state.gpu(self.place.slot).map_err(|_| Code::DeviceUnavailable)?;
        let process = divvy_sim::state::Process {
            pid: std::process::id(),
            name: String::new(),
            kind: divvy_sim::state::ProcessKind::Compute,
            instance: self.place.instance,
            memory_mib: 0,
        };
        Ok(mig::lets_in(gpu, &process))
    }

    /// The process has nothing left on the device: it is no user of it any more.
    pub(crate) fn leave(&self) {
        let mut guest = self.guest.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = guest.take_if(|guest| guest.used() == 0) {
            last.leave();
        }
    }

    /// `CUdevice_attribute`, those that programs ask for; 0 for the others, as for features that are not there.
    fn attribute(&self, attribute: i32) -> i32 {
        let (major, minor) = self.model.compute_capability;
        match attribute {
            1..=3 => 1024,
            4 => 64,
            5 => i32::MAX,
            6 | 7 => 65535,
            8 => 49152,
            9 => 65536,
            10 => 32,
            11 => i32::MAX,
            12 | 82 => 65536,
            13 => 1_980_000,
            14 => 512,
            16 => self.multiprocessors.cast_signed(),
            19 | 31 | 41 | 78 | 79 | 80 | 83 | 89 | 90 | 91 | 95 | 99 => 1,
            33 => self.pci().1,
            34 => self.pci().2,
            50 => self.pci().0,
            36 => 2_619_000,
            37 => 5120,
            38 => 50 << 20,
            39 => {
                if major == 7 {
                    1024
                } else if (major, minor) == (8, 0) || major >= 9 {
                    2048
                } else {
                    1536
                }
            }
            40 => 3,
            75 => major.cast_signed(),
            76 => minor.cast_signed(),
            81 | 97 => 227 << 10,
            // Virtual memory, exports as file descriptors, pools and their exports.
            102 | 103 | 115 | 119 | 124 | 125 => 1,
            106 => 32,
            _ => 0,
        }
    }

    /// Domain, bus and device.
    fn pci(&self) -> (i32, i32, i32) {
        let mut parts = self.bdf.split([':', '.']).map(|part| i32::from_str_radix(part, 16).unwrap_or(0));
        let mut next = || parts.next().unwrap_or(0);
        (next(), next(), next())
    }
}

impl Process {
    pub(crate) fn device(&self, ordinal: i32) -> Outcome<&Device> {
        usize::try_from(ordinal).ok().and_then(|at| self.devices.get(at)).ok_or(Code::InvalidDevice)
    }
}

/// The devices of a list such as `1,GPU-8f`: in its order, up to the first that is no device.
fn pick(gpus: Vec<Device>, instances: Vec<Device>, list: &str) -> Vec<Device> {
    let mut left: Vec<Option<Device>> = gpus.into_iter().map(Some).collect();
    let whole = left.len();
    left.extend(instances.into_iter().map(Some));
    let mut picked = Vec::new();
    for word in list.split(',').map(str::trim) {
        let at = match word.parse::<usize>() {
            Ok(index) => (index < whole).then_some(index),
            Err(_) if word.is_empty() => None,
            Err(_) => left
                .iter()
                .position(|device| device.as_ref().is_some_and(|device| device.uuid.starts_with(word))),
        };
        match at.and_then(|at| left.get_mut(at)?.take()) {
            Some(device) => picked.push(device),
            None => break,
        }
    }
    picked
}

/// The bytes of `GPU-xxxxxxxx-...`.
fn uuid_bytes(text: &str) -> Uuid {
    let digits: Vec<u8> = text
        .split_once('-')
        .map_or("", |(_, digits)| digits)
        .chars()
        .filter_map(|digit| u8::try_from(digit.to_digit(16)?).ok())
        .collect();
    let mut bytes = [0; 16];
    bytes
        .iter_mut()
        .zip(digits.chunks(2))
        .for_each(|(byte, pair)| *byte = pair.iter().fold(0, |sum, half| sum << 4 | half));
    bytes
}

/// `CUdevprop`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Properties {
    threads_per_block: i32,
    threads: [i32; 3],
    grid: [i32; 3],
    shared_memory: i32,
    constant_memory: i32,
    warp: i32,
    pitch: i32,
    registers: i32,
    clock: i32,
    alignment: i32,
}

entry! {
    fn cuDeviceGet(process; device: Out<i32>, ordinal: i32) {
        device.check()?;
        process.device(ordinal)?;
        device.set(ordinal)
    }

    fn cuDeviceGetCount(process; count: Out<i32>) {
        count.set(process.devices.len() as i32)
    }

    fn cuDeviceGetName(process; name: Out<u8>, length: i32, device: i32) {
        write_text(name, length, &process.device(device)?.name)
    }

    /// The GPU's, of a MIG device as well.
    fn cuDeviceGetUuid(process; uuid: Out<Uuid>, device: i32) {
        uuid.set(uuid_bytes(&process.device(device)?.gpu_uuid))
    }

    fn cuDeviceGetUuid_v2(process; uuid: Out<Uuid>, device: i32) {
        uuid.set(uuid_bytes(&process.device(device)?.uuid))
    }

    fn cuDeviceTotalMem(process; bytes: Out<u32>, device: i32) {
        bytes.set(u32::try_from(process.device(device)?.memory).unwrap_or(u32::MAX))
    }

    fn cuDeviceTotalMem_v2(process; bytes: Out<u64>, device: i32) {
        bytes.set(process.device(device)?.memory)
    }

    fn cuDeviceGetAttribute(process; value: Out<i32>, attribute: i32, device: i32) {
        if !(1..=200).contains(&attribute) {
            return Err(Code::InvalidValue);
        }
        value.set(process.device(device)?.attribute(attribute))
    }

    fn cuDeviceGetProperties(process; properties: Out<Properties>, device: i32) {
        let device = process.device(device)?;
        let of = |attribute| device.attribute(attribute);
        properties.set(Properties {
            threads_per_block: of(1),
            threads: [of(2), of(3), of(4)],
            grid: [of(5), of(6), of(7)],
            shared_memory: of(8),
            constant_memory: of(9),
            warp: of(10),
            pitch: of(11),
            registers: of(12),
            clock: of(13),
            alignment: of(14),
        })
    }

    fn cuDeviceComputeCapability(process; major: Out<i32>, minor: Out<i32>, device: i32) {
        let device = process.device(device)?;
        minor.check()?;
        major.set(device.attribute(75))?;
        minor.set(device.attribute(76))
    }

    fn cuDeviceGetPCIBusId(process; text: Out<u8>, length: i32, device: i32) {
        write_text(text, length, &process.device(device)?.bdf.to_uppercase())
    }

    fn cuDeviceGetByPCIBusId(process; device: Out<i32>, text: Text) {
        let wanted = text.get()?.to_lowercase();
        device.check()?;
        // With or without the domain's leading zeros, or without a domain.
        let is = |known: &&Device| known.bdf.ends_with(wanted.trim_start_matches('0')) && !wanted.is_empty();
        device.set(process.devices.iter().find(is).ok_or(Code::InvalidDevice)?.ordinal)
    }

    fn cuDeviceCanAccessPeer(process; can: Out<i32>, device: i32, peer: i32) {
        let (one, other) = (process.device(device)?, process.device(peer)?);
        can.set(i32::from(device != peer && one.place.instance.is_none() && other.place.instance.is_none()))
    }

    fn cuDeviceGetExecAffinitySupport(process; supported: Out<i32>, _kind: i32, device: i32) {
        process.device(device)?;
        supported.set(0)
    }

    fn cuDeviceGetP2PAttribute(process; value: Out<i32>, attribute: i32, device: i32, peer: i32) {
        let (one, other) = (process.device(device)?, process.device(peer)?);
        let reach = device != peer && one.place.instance.is_none() && other.place.instance.is_none();
        value.set(i32::from(reach && attribute != 1))
    }
}

/// A list that a call reads, kept where it is used.
pub(crate) fn read_all<T: Copy>(list: In<T>, count: usize) -> Outcome<Vec<T>> {
    (0..count).map(|at| list.at(at)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_its_digits() {
        let bytes = uuid_bytes("GPU-00010203-0405-0607-0809-0a0b0c0d0eff");
        assert_eq!(bytes, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255]);
    }
}
