//! The mapped file: its layout, and what one word of it says.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::engine::{Engine, Work, slice};
use super::locks::{self, Locks};
use super::{GRANULE, PAGE, Use};
use crate::mig::memory_mib;
use crate::state::State;

/// Name of the file in the state's directory.
const FILE: &str = "cuda";
/// Changes with the layout.
const MAGIC: u64 = 0x6469_7676_7963_7506;
/// As many guests at once; the part's word has twelve bits for them.
pub(super) const ROWS: usize = 4096;
/// Parts of a GPU: the whole, and the GPU instances 0 to 14.
const PARTS_OF_A_GPU: usize = 16;
/// As many limits at most hold one process: its cgroup's and those above.
pub(super) const LIMITS: usize = 4;
const PARTS: usize = 32 * PARTS_OF_A_GPU;

/// The file's content. All zeros is a ledger without guests and without GPUs, but for the magic number.
#[repr(C)]
pub(super) struct Map {
    magic: AtomicU64,
    /// Rows below it have been used.
    high: AtomicU64,
    spare: [AtomicU64; 62],
    /// Whose each row is: [`locks::token`] of a process, or 0.
    pub(super) owners: [AtomicU64; ROWS],
    pub(super) parts: [Part; PARTS],
    pub(super) rows: [Row; ROWS],
}

/// A GPU, or a GPU instance.
#[repr(C, align(128))]
pub(super) struct Part {
    /// See [`Word`].
    pub(super) word: AtomicU64,
    /// Granules that guests may use.
    pub(super) limit: AtomicU64,
    /// Granules that the part has.
    pub(super) total: AtomicU64,
    /// Bits of [`Ledger::HERE`].
    pub(super) flags: AtomicU64,
    /// Tells this GPU or instance from another one that was in its place: changes with a reset, and with its birth.
    pub(super) epoch: AtomicU64,
    /// Generation of the state that says what cgroups may have of it; 0 where none is limited.
    pub(super) limits: AtomicU64,
    /// Pages of managed memory that are there.
    pub(super) managed: AtomicU64,
    pub(super) engine: Engine,
}

/// What one process uses of one part.
#[repr(C, align(128))]
pub(super) struct Row {
    /// Index of the part.
    pub(super) part: AtomicU32,
    /// Compute instance.
    pub(super) ci: AtomicU32,
    /// Granules.
    pub(super) used: AtomicU64,
    /// The change under way, see [`Intent`]; 0 without one.
    pub(super) intent: AtomicU64,
    /// Pages of managed memory that are on the part, besides.
    pub(super) managed: AtomicU64,
    /// Numbers of the limits that its process's cgroups have; 0 for none.
    pub(super) limits: [AtomicU64; LIMITS],
    /// Number of the last change that others have seen made.
    pub(super) made: AtomicU64,
    /// Number of the last change announced; the next guest in this row goes on counting.
    pub(super) number: AtomicU64,
    /// The part's epoch when the guest came.
    pub(super) epoch: AtomicU64,
    /// Pages of managed memory that its kernels touch, and when they last did.
    pub(super) manages: AtomicU64,
    pub(super) touched: AtomicU64,
    /// `comm` of the process.
    pub(super) name: [AtomicU64; 2],
    pub(super) work: Work,
}

/// A part's use: granules, and which row's change of which number made it so.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Word {
    pub(super) used: u32,
    pub(super) row: usize,
    pub(super) number: u32,
}

/// Changes are counted in as many bits.
pub(super) const NUMBER_BITS: u32 = 20;
const NUMBERS: u32 = (1 << NUMBER_BITS) - 1;

impl Word {
    pub(super) const fn pack(self) -> u64 {
        (self.used as u64) << 32 | (self.row as u64) << NUMBER_BITS | self.number as u64
    }

    pub(super) const fn unpack(word: u64) -> Self {
        Self {
            used: (word >> 32) as u32,
            row: (word >> NUMBER_BITS) as usize & (ROWS - 1),
            number: word as u32 & NUMBERS,
        }
    }
}

/// An announced change: its number, and what the row uses once it is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Intent {
    pub(super) used: u32,
    pub(super) number: u32,
}

impl Intent {
    pub(super) const fn pack(self) -> u64 {
        // Numbers are never 0, so an intent never is.
        (self.used as u64) << 32 | self.number as u64
    }

    pub(super) const fn unpack(word: u64) -> Option<Self> {
        if word == 0 { None } else { Some(Self { used: (word >> 32) as u32, number: word as u32 }) }
    }
}

/// The number after that one; 0 is none.
pub(super) const fn next(number: u64) -> u32 {
    let next = (number as u32 + 1) & NUMBERS;
    if next == 0 { 1 } else { next }
}

/// Whether a change came after another, as far as their numbers tell.
pub(super) const fn later(one: u32, other: u32) -> bool {
    let ahead = one.wrapping_sub(other) & NUMBERS;
    ahead != 0 && ahead <= NUMBERS / 2
}

/// A GPU, or a compute instance with its GPU instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub slot: usize,
    /// GPU and compute instance.
    pub instance: Option<(u32, u32)>,
}

impl Place {
    /// Index of its part, if there can be one.
    pub(super) fn part(self) -> Option<usize> {
        part_of(self.slot, self.instance.map(|(gi, _)| gi))
    }
}

fn part_of(slot: usize, gi: Option<u32>) -> Option<usize> {
    let within = gi.map_or(Some(0), |gi| usize::try_from(gi).ok().map(|gi| gi + 1))?;
    (within < PARTS_OF_A_GPU && slot < PARTS / PARTS_OF_A_GPU).then_some(slot * PARTS_OF_A_GPU + within)
}

/// The ledger of one simulator.
#[derive(Debug)]
pub struct Ledger {
    map: NonNull<Map>,
    dir: PathBuf,
    /// It may be changed by this process.
    pub(super) writable: bool,
}

// SAFETY: the map is atomics, and stays mapped as long as the ledger is.
unsafe impl Send for Ledger {}
// SAFETY: the same.
unsafe impl Sync for Ledger {}

impl Ledger {
    /// The part exists and works.
    pub(super) const HERE: u64 = 1;

    /// Makes the file of a new simulator.
    pub(crate) fn create(dir: &Path) -> io::Result<()> {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(dir.join(FILE))?;
        file.set_len(size_of::<Map>() as u64)?;
        let ledger = Self::map(dir, &file, true)?;
        ledger.get().magic.store(MAGIC, Ordering::Release);
        locks::create(dir)
    }

    /// Maps the file; to read it only, where this process may not write it.
    pub fn open(dir: &Path) -> io::Result<Self> {
        let path = dir.join(FILE);
        let (file, writable) = match File::options().read(true).write(true).open(&path) {
            Ok(file) => (file, true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(error),
            Err(_) => (File::open(&path)?, false),
        };
        let other = || io::Error::other("not a ledger of this simulator's build");
        if file.metadata()?.len() != size_of::<Map>() as u64 {
            return Err(other());
        }
        let ledger = Self::map(dir, &file, writable)?;
        if ledger.get().magic.load(Ordering::Acquire) != MAGIC { Err(other()) } else { Ok(ledger) }
    }

    fn map(dir: &Path, file: &File, writable: bool) -> io::Result<Self> {
        let protection = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let (length, fd) = (size_of::<Map>(), file.as_raw_fd());
        // SAFETY: a new shared mapping of a file of that length; the kernel chooses where.
        let place = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, libc::MAP_SHARED, fd, 0) };
        if place == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let map = NonNull::new(place.cast()).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { map, dir: dir.to_owned(), writable })
    }

    pub(super) const fn get(&self) -> &Map {
        // SAFETY: `map` is a mapping of a whole `Map` of atomics, for which any bytes are values, until drop.
        unsafe { self.map.as_ref() }
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The locks of this ledger's rows.
    pub(super) fn locks(&self) -> io::Result<Locks> {
        Locks::open(&self.dir)
    }

    /// Tells guests what the parts are like now. The state's lock is held.
    pub(crate) fn publish(&self, state: &State) {
        if !self.writable {
            return;
        }
        let granules = |mib: u64| (mib << 20) / GRANULE;
        for (slot, gpu) in state.gpus.iter().enumerate() {
            let works = !gpu.missing && !gpu.lost && state.modules.nvidia;
            for gi in std::iter::once(None).chain((0..PARTS_OF_A_GPU as u32 - 1).map(Some)) {
                let Some(part) = part_of(slot, gi).and_then(|at| self.get().parts.get(at)) else { continue };
                let (here, epoch) = match gi {
                    None => (works && !gpu.mig.current, gpu.epoch),
                    Some(id) => (works && gpu.gi(id).is_some(), gpu.gi(id).map_or(0, |gi| gi.born)),
                };
                let total = if here { memory_mib(gpu, gi) } else { 0 };
                part.total.store(granules(total), Ordering::Relaxed);
                part.limit.store(granules(total.saturating_sub(gpu.used_mib(gi))), Ordering::Relaxed);
                part.epoch.store(epoch, Ordering::Relaxed);
                let slice = slice(gpu.timeslice).as_nanos() as u64;
                part.engine.slice.store(slice, Ordering::Relaxed);
                let limited = gi.is_none() && here && !gpu.limits.is_empty();
                part.limits.store(if limited { state.generation } else { 0 }, Ordering::Release);
                part.flags.store(if here { Self::HERE } else { 0 }, Ordering::Release);
            }
            self.find_members(gpu, slot);
        }
    }

    /// The guests that live. Those that have died are taken out on the way, by whoever may.
    pub fn uses(&self) -> Vec<Use> {
        self.uses_by_row(|_| true).into_iter().map(|(_, found)| found).collect()
    }

    /// Those on a GPU and its instances. Whether one lives is a question to the kernel, and not asked of all others.
    pub fn uses_of(&self, slot: usize) -> Vec<Use> {
        let uses = self.uses_by_row(|part| part / PARTS_OF_A_GPU == slot);
        uses.into_iter().map(|(_, found)| found).collect()
    }

    /// Those on some parts, with their rows.
    pub(super) fn uses_by_row(&self, is_wanted: impl Fn(usize) -> bool) -> Vec<(usize, Use)> {
        let mut uses = Vec::new();
        let owned = |row: &usize| {
            let part = self.get().rows[*row].part.load(Ordering::Relaxed) as usize;
            self.get().owners[*row].load(Ordering::Acquire) != 0 && is_wanted(part)
        };
        let mut rows = (0..self.high()).filter(owned).peekable();
        if rows.peek().is_none() {
            return uses;
        }
        let Ok(locks) = self.locks() else { return uses };
        let mine = locks::token();
        for row in rows {
            match locks.holder(row, self.get().owners[row].load(Ordering::Acquire), mine) {
                Some(pid) => uses.extend(self.shown(row, pid).map(|found| (row, found))),
                None if self.writable => drop(self.bury(locks, row)),
                None => {}
            }
        }
        uses
    }

    /// Whether the process of that number ([`Guest::owner`](super::Guest::owner)) is a guest and lives.
    pub fn has(&self, owner: u64) -> bool {
        let Ok(locks) = self.locks() else { return false };
        let is = |row: &usize| self.get().owners[*row].load(Ordering::Acquire) == owner;
        (0..self.high()).filter(is).any(|row| locks.holder(row, owner, locks::token()).is_some())
    }

    /// Rows below it are worth a look.
    pub(super) fn high(&self) -> usize {
        (self.get().high.load(Ordering::Acquire) as usize).min(ROWS)
    }

    pub(super) fn raise(&self, row: usize) {
        self.get().high.fetch_max(row as u64 + 1, Ordering::AcqRel);
    }

    /// Rows of living processes on a part, with the process's number.
    pub(super) fn rows_on(&self, part: usize) -> impl Iterator<Item = (&Row, u32)> {
        let (locks, mine) = (self.locks().ok(), locks::token());
        (0..self.high()).filter_map(move |at| {
            let (owner, row) = (self.get().owners[at].load(Ordering::Acquire), &self.get().rows[at]);
            if owner == 0 || row.part.load(Ordering::Relaxed) as usize != part {
                return None;
            }
            Some((row, locks?.holder(at, owner, mine)?))
        })
    }

    fn shown(&self, at: usize, pid: u32) -> Option<Use> {
        let row = &self.get().rows[at];
        let index = row.part.load(Ordering::Relaxed) as usize;
        let part = self.get().parts.get(index)?;
        // What has been reset meanwhile has forgotten its guests.
        if part.epoch.load(Ordering::Relaxed) != row.epoch.load(Ordering::Relaxed) {
            return None;
        }
        let (slot, within) = (index / PARTS_OF_A_GPU, (index % PARTS_OF_A_GPU) as u32);
        let ci = row.ci.load(Ordering::Relaxed);
        let name: Vec<u8> = row
            .name
            .iter()
            .flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes())
            .take_while(|byte| *byte != 0)
            .collect();
        Some(Use {
            place: Place { slot, instance: within.checked_sub(1).map(|gi| (gi, ci)) },
            pid,
            name: String::from_utf8_lossy(&name).into_owned(),
            bytes: row.used.load(Ordering::Relaxed) * GRANULE + row.managed.load(Ordering::Relaxed) * PAGE,
        })
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with that length, and nothing refers to it any more.
        unsafe { libc::munmap(self.map.as_ptr().cast(), size_of::<Map>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_word_says_what_was_packed(used: u32, row in 0..ROWS, number in 0..=NUMBERS) {
            let word = Word { used, row, number };
            prop_assert_eq!(Word::unpack(word.pack()), word);
        }

        #[test]
        fn the_next_change_is_later(number in 0..=NUMBERS) {
            let next = next(number.into());
            prop_assert!(next != 0);
            prop_assert!(later(next, number));
            prop_assert!(!later(number, next) && !later(number, number));
            let announced = Intent { used: 0, number: next };
            prop_assert_eq!(Intent::unpack(announced.pack()), Some(announced));
        }
    }

    #[test]
    fn each_instance_has_a_part_of_its_own() {
        assert_eq!(
            (part_of(0, None), part_of(0, Some(0)), part_of(0, Some(14))),
            (Some(0), Some(1), Some(15))
        );
        assert_eq!((part_of(1, None), part_of(31, Some(14))), (Some(16), Some(511)));
        assert_eq!((part_of(0, Some(15)), part_of(32, None)), (None, None));
    }
}
