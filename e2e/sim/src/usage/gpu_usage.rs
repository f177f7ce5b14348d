//! The mapped file: opening it, publishing the state to it, and listing the processes in it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use super::layout::{
    GRANULE_BYTES, MAGIC, MANAGED_PAGE_BYTES, Map, PARTITIONS_PER_GPU, Place, ProcessUsage, ROWS, Row,
    partition_index, time_slice,
};
use super::locks::{self, Locks};
use crate::mig::memory_mib;
use crate::state::State;

/// Name of the mapped file in the state's directory.
const FILE: &str = "cuda";
/// The mapped file of one simulator.
#[derive(Debug)]
pub struct GpuUsage {
    map: NonNull<Map>,
    dir: PathBuf,
    /// Whether this process may write the file.
    pub(super) writable: bool,
}

// SAFETY: the map consists of atomics and stays mapped as long as the value exists.
unsafe impl Send for GpuUsage {}
// SAFETY: as above.
unsafe impl Sync for GpuUsage {}

impl GpuUsage {
    /// Flag of a partition that exists and works.
    pub(super) const PRESENT: u64 = 1;

    /// Creates the file of a new simulator.
    pub(crate) fn create(dir: &Path) -> io::Result<()> {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(dir.join(FILE))?;
        file.set_len(size_of::<Map>() as u64)?;
        let usage = Self::map(dir, &file, true)?;
        usage.get().magic.store(MAGIC, Ordering::Release);
        locks::create(dir)
    }

    /// Maps the file, read-only if this process may not write it.
    ///
    /// # Errors
    ///
    /// Fails if the file does not exist or was made by another build of the simulator.
    pub fn open(dir: &Path) -> io::Result<Self> {
        let path = dir.join(FILE);
        let (file, writable) = match File::options().read(true).write(true).open(&path) {
            Ok(file) => (file, true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(error),
            Err(_) => (File::open(&path)?, false),
        };
        let other = || io::Error::other("the usage file is of another build of the simulator");
        if file.metadata()?.len() != size_of::<Map>() as u64 {
            return Err(other());
        }
        let usage = Self::map(dir, &file, writable)?;
        if usage.get().magic.load(Ordering::Acquire) != MAGIC { Err(other()) } else { Ok(usage) }
    }

    fn map(dir: &Path, file: &File, writable: bool) -> io::Result<Self> {
        let protection = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let (length, fd) = (size_of::<Map>(), file.as_raw_fd());
        // SAFETY: a new shared mapping of a file of that length, at an address that the kernel
        // chooses.
        let place = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, libc::MAP_SHARED, fd, 0) };
        if place == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let map = NonNull::new(place.cast()).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { map, dir: dir.to_owned(), writable })
    }

    pub(super) const fn get(&self) -> &Map {
        // SAFETY: `map` points to a mapped `Map` until drop. Its fields are atomics, valid for any
        // bytes.
        unsafe { self.map.as_ref() }
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The locks of the rows.
    pub(super) fn locks(&self) -> io::Result<Locks> {
        Locks::open(&self.dir)
    }

    /// Updates the partitions from the state. The caller holds the state's lock.
    pub(crate) fn publish(&self, state: &State) {
        if !self.writable {
            return;
        }
        let granules = |mib: u64| (mib << 20) / GRANULE_BYTES;
        for (slot, gpu) in state.gpus.iter().enumerate() {
            let works = !gpu.missing && !gpu.lost && state.modules.nvidia;
            for gi in std::iter::once(None).chain((0..PARTITIONS_PER_GPU as u32 - 1).map(Some)) {
                let Some(partition) = partition_index(slot, gi).and_then(|at| self.get().partitions.get(at))
                else {
                    continue;
                };
                let (here, epoch) = match gi {
                    None => (works && !gpu.mig.current, gpu.epoch),
                    Some(id) => (works && gpu.gi(id).is_some(), gpu.gi(id).map_or(0, |gi| gi.born)),
                };
                let total = if here { memory_mib(gpu, gi) } else { 0 };
                partition.total.store(granules(total), Ordering::Relaxed);
                partition.limit.store(granules(total.saturating_sub(gpu.used_mib(gi))), Ordering::Relaxed);
                partition.epoch.store(epoch, Ordering::Relaxed);
                let slicing = &gpu.model().time_slicing;
                let slice = time_slice(gpu.timeslice, slicing).as_nanos() as u64;
                partition.engine.time_slice.store(slice, Ordering::Relaxed);
                let switch = state.host.switch_us.unwrap_or(slicing.switch_us);
                partition.engine.switch_cost.store(u64::from(switch) * 1000, Ordering::Relaxed);
                let limited = gi.is_none() && here && !gpu.limits.is_empty();
                partition.limits.store(if limited { state.generation } else { 0 }, Ordering::Release);
                partition.flags.store(if here { Self::PRESENT } else { 0 }, Ordering::Release);
            }
            self.record_members(gpu, slot);
        }
    }

    /// The living GPU processes. Reclaims the rows of dead ones if this process may write.
    pub fn processes(&self) -> Vec<ProcessUsage> {
        self.processes_by_row(|_| true).into_iter().map(|(_, found)| found).collect()
    }

    /// The living GPU processes on one GPU and its instances. Checking whether a process lives
    /// costs a system call, so this does not check the others.
    pub fn processes_on_gpu(&self, slot: usize) -> Vec<ProcessUsage> {
        let uses = self.processes_by_row(|partition| partition / PARTITIONS_PER_GPU == slot);
        uses.into_iter().map(|(_, found)| found).collect()
    }

    /// The living GPU processes on the wanted partitions, with their rows.
    pub(super) fn processes_by_row(&self, is_wanted: impl Fn(usize) -> bool) -> Vec<(usize, ProcessUsage)> {
        let mut uses = Vec::new();
        let owned = |row: &usize| {
            let partition = self.get().rows[*row].partition.load(Ordering::Relaxed) as usize;
            self.get().owners[*row].load(Ordering::Acquire) != 0 && is_wanted(partition)
        };
        let mut rows = (0..self.high_water()).filter(owned).peekable();
        if rows.peek().is_none() {
            return uses;
        }
        let Ok(locks) = self.locks() else { return uses };
        let mine = locks::token();
        for row in rows {
            match locks.holder(row, self.get().owners[row].load(Ordering::Acquire), mine) {
                Some(pid) => uses.extend(self.process_at(row, pid).map(|found| (row, found))),
                None if self.writable => drop(self.remove_dead(locks, row)),
                None => {}
            }
        }
        uses
    }

    /// Whether the process with that token ([`GpuProcess::token`](super::GpuProcess::token)) is
    /// attached and alive.
    pub fn is_alive(&self, owner: u64) -> bool {
        let Ok(locks) = self.locks() else { return false };
        let is = |row: &usize| self.get().owners[*row].load(Ordering::Acquire) == owner;
        (0..self.high_water()).filter(is).any(|row| locks.holder(row, owner, locks::token()).is_some())
    }

    /// Rows from this one on were never used.
    pub(super) fn high_water(&self) -> usize {
        (self.get().high_water.load(Ordering::Acquire) as usize).min(ROWS)
    }

    pub(super) fn raise_high_water(&self, row: usize) {
        self.get().high_water.fetch_max(row as u64 + 1, Ordering::AcqRel);
    }

    /// Rows of living processes on a partition, with their process ids.
    pub(super) fn rows_on(&self, partition: usize) -> impl Iterator<Item = (&Row, u32)> {
        let (locks, mine) = (self.locks().ok(), locks::token());
        (0..self.high_water()).filter_map(move |at| {
            let (owner, row) = (self.get().owners[at].load(Ordering::Acquire), &self.get().rows[at]);
            if owner == 0 || row.partition.load(Ordering::Relaxed) as usize != partition {
                return None;
            }
            Some((row, locks?.holder(at, owner, mine)?))
        })
    }

    fn process_at(&self, at: usize, pid: u32) -> Option<ProcessUsage> {
        let row = &self.get().rows[at];
        let index = row.partition.load(Ordering::Relaxed) as usize;
        let partition = self.get().partitions.get(index)?;
        // The partition was reset or recreated since the process attached.
        if partition.epoch.load(Ordering::Relaxed) != row.epoch.load(Ordering::Relaxed) {
            return None;
        }
        let (slot, within) = (index / PARTITIONS_PER_GPU, (index % PARTITIONS_PER_GPU) as u32);
        let ci = row.ci.load(Ordering::Relaxed);
        let name: Vec<u8> = row
            .name
            .iter()
            .flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes())
            .take_while(|byte| *byte != 0)
            .collect();
        Some(ProcessUsage {
            place: Place { slot, instance: within.checked_sub(1).map(|gi| (gi, ci)) },
            pid,
            name: String::from_utf8_lossy(&name).into_owned(),
            bytes: row.used.load(Ordering::Relaxed) * GRANULE_BYTES
                + row.managed_resident.load(Ordering::Relaxed) * MANAGED_PAGE_BYTES,
        })
    }
}

impl Drop for GpuUsage {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with that length, and no reference to it remains.
        unsafe { libc::munmap(self.map.as_ptr().cast(), size_of::<Map>()) };
    }
}
