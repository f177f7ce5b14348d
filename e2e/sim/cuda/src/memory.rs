//! Allocations: their addresses, who pays for them, and the host memory behind those that were written.
//!
//! Device addresses lie in one range that nothing else uses, in rooms of a power of two: the room's size and number are
//! read off an address, so that finding an allocation by any address in it, making one and freeing one cost the same
//! at any count. A freed room is the next to be used, as with the real driver, where addresses come back at once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use divvy_sim::Guest;
use divvy_sim::ledger::GRANULE;

use crate::argument::Out;
use crate::code::Code;
use crate::context::{self, Context};
use crate::frame::{Outcome, entry};

/// Device addresses begin here: above what programs are linked to, below where the kernel maps files.
const BASE: u64 = 1 << 44;
/// Rooms of one size have so many addresses, as a power of two.
const REGION_BITS: u32 = 41;
/// The smallest room is a granule.
const SMALLEST_BITS: u32 = GRANULE.trailing_zeros();
const REGIONS: usize = 32;

/// What an allocation is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// By `cuMemAlloc` and its like.
    Linear,
}

/// An allocation.
pub(crate) struct Block {
    pub(crate) address: u64,
    /// As asked for.
    pub(crate) size: u64,
    pub(crate) kind: Kind,
    /// Id of the context it was made in.
    pub(crate) context: u64,
    /// Who pays for it, on which device.
    pub(crate) guest: Arc<Guest>,
    pub(crate) ordinal: i32,
    /// Tells it from others that had its address.
    pub(crate) id: u64,
    /// Its content, once there is some.
    content: Content,
}

/// Host memory that stands for an allocation's content.
struct Content(*mut u8, usize);

// SAFETY: only an address; who copies through it answers for that.
unsafe impl Send for Content {}

/// All allocations of the process.
#[derive(Default)]
pub(crate) struct Memory {
    space: Mutex<Space>,
}

struct Space {
    regions: [Region; REGIONS],
    made: u64,
}

#[derive(Default)]
struct Region {
    rooms: Vec<Option<Block>>,
    /// Numbers of empty rooms, the last emptied last.
    empty: Vec<u32>,
}

impl Default for Space {
    fn default() -> Self {
        Self { regions: std::array::from_fn(|_| Region::default()), made: 0 }
    }
}

/// Region and room of an address.
fn room_of(address: u64) -> Option<(usize, usize)> {
    let offset = address.checked_sub(BASE)?;
    let region = usize::try_from(offset >> REGION_BITS).ok().filter(|region| *region < REGIONS)?;
    let within = offset & ((1 << REGION_BITS) - 1);
    Some((region, (within >> room_bits(region)) as usize))
}

const fn room_bits(region: usize) -> u32 {
    SMALLEST_BITS + region as u32
}

/// The region whose rooms are just large enough.
fn region_for(size: u64) -> Option<usize> {
    let bits = size.checked_next_power_of_two()?.trailing_zeros().max(SMALLEST_BITS);
    let region = (bits - SMALLEST_BITS) as usize;
    (region < REGIONS).then_some(region)
}

impl Space {
    fn insert(&mut self, mut block: Block) -> Outcome<u64> {
        let index = region_for(block.size).ok_or(Code::OutOfMemory)?;
        let region = &mut self.regions[index];
        let room = match region.empty.pop() {
            Some(room) => room as usize,
            None if (region.rooms.len() as u64) < 1 << (REGION_BITS - room_bits(index)) => {
                region.rooms.push(None);
                region.rooms.len() - 1
            }
            None => return Err(Code::OutOfMemory),
        };
        self.made += 1;
        block.id = self.made;
        block.address = BASE + ((index as u64) << REGION_BITS) + ((room as u64) << room_bits(index));
        let address = block.address;
        region.rooms[room] = Some(block);
        Ok(address)
    }

    fn find(&mut self, address: u64) -> Option<&mut Block> {
        let (region, room) = room_of(address)?;
        let block = self.regions.get_mut(region)?.rooms.get_mut(room)?.as_mut()?;
        (address - block.address < block.size).then_some(block)
    }

    fn remove(&mut self, address: u64) -> Option<Block> {
        let (region, room) = room_of(address)?;
        let region = self.regions.get_mut(region)?;
        let block = region.rooms.get_mut(room)?.take_if(|block| block.address == address)?;
        region.empty.push(room as u32);
        Some(block)
    }
}

impl Block {
    fn give_back(self) {
        self.guest.refund(self.size);
        self.content.unmap();
    }
}

impl Content {
    const NONE: Self = Self(std::ptr::null_mut(), 0);

    fn unmap(self) {
        if !self.0.is_null() {
            // SAFETY: mapped by `content_at` with that length, and its allocation is gone.
            unsafe { libc::munmap(self.0.cast(), self.1) };
        }
    }
}

impl Memory {
    fn lock(&self) -> MutexGuard<'_, Space> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory of the context's device.
    pub(crate) fn allocate(&self, context: &Context, size: u64, kind: Kind) -> Outcome<u64> {
        if size == 0 {
            return Err(Code::InvalidValue);
        }
        if !context.guest.charge(size) {
            return Err(Code::OutOfMemory);
        }
        let block = Block {
            address: 0,
            size,
            kind,
            context: context.id,
            guest: Arc::clone(&context.guest),
            ordinal: context.device.ordinal,
            id: 0,
            content: Content::NONE,
        };
        let made = self.lock().insert(block);
        if made.is_err() {
            context.guest.refund(size);
        }
        made
    }

    /// Frees what begins at that address; INVALID_VALUE if nothing does.
    pub(crate) fn free(&self, address: u64) -> Outcome {
        let block = self.lock().remove(address).ok_or(Code::InvalidValue)?;
        block.give_back();
        Ok(())
    }

    /// Looks at the allocation that an address is in.
    pub(crate) fn look<T>(&self, address: u64, look: impl FnOnce(&Block) -> T) -> Option<T> {
        self.lock().find(address).map(|block| look(block))
    }

    /// Frees all that was made in a context.
    pub(crate) fn free_all_of(&self, context: &Context) {
        let mut space = self.lock();
        let mine = |block: &Block| block.context == context.id;
        let addresses: Vec<u64> = space
            .regions
            .iter()
            .flat_map(|region| {
                region.rooms.iter().flatten().filter(|block| mine(block)).map(|block| block.address)
            })
            .collect();
        for address in addresses {
            if let Some(block) = space.remove(address) {
                block.give_back();
            }
        }
    }
}

fn allocate(process: &crate::process::Process, address: Out<u64>, size: u64) -> Outcome {
    address.check()?;
    let context = context::current()?;
    address.set(process.memory.allocate(context, size, Kind::Linear)?)
}

entry! {
    fn cuMemAlloc_v2(process; address: Out<u64>, size: u64) {
        allocate(process, address, size)
    }

    fn cuMemFree_v2(process; address: u64) {
        context::current()?;
        if address == 0 { Ok(()) } else { process.memory.free(address) }
    }
}
