//! Allocations: their addresses, who pays for them, and the host memory behind those that were written.
//!
//! Device addresses lie in one range that nothing else uses, in rooms of a power of two: the room's size and number are
//! read off an address, so that finding an allocation by any address in it, making one and freeing one cost the same
//! at any count. A freed room is the next to be used, as with the real driver, where addresses come back at once.
//! Memory that the host may touch as well (managed and pinned) is mapped where the kernel likes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use divvy_sim::Guest;
use divvy_sim::ledger::GRANULE;

use crate::code::Code;
use crate::content::Content;
use crate::context::Context;
use crate::frame::Outcome;
use crate::handle::Handle;
use crate::ipc;
use crate::pool::Pool;

/// Device addresses begin here: above what programs are linked to, below where the kernel maps files.
const BASE: u64 = 1 << 44;
/// Rooms of one size have so many addresses, as a power of two.
const REGION_BITS: u32 = 41;
/// The smallest room is a granule.
const SMALLEST_BITS: u32 = GRANULE.trailing_zeros();
const REGIONS: usize = 32;
/// Above all of these: reserved addresses, see [`crate::physical`].
pub(crate) const END: u64 = BASE + ((REGIONS as u64) << REGION_BITS);

/// Who pays for an allocation, and so what it is.
#[derive(Clone)]
pub(crate) enum Payer {
    /// This process, on one device.
    Guest(Arc<Guest>),
    /// A pool that has reserved it.
    Pool(Handle<Pool>),
    /// A device's pool for graphs, while the allocation of a graph's node is there; its address stays the node's, and
    /// that of the executable graph which may be launched with it.
    Graph { pool: Handle<Pool>, live: bool, node: bool, runnable: bool },
    /// Another process: memory that it shares.
    Stranger,
    /// Another library, as one for graphics: memory that it shares.
    External,
    /// Nobody but the host: pinned or managed memory.
    Host(Host),
}

/// Memory of the host that devices may use.
#[derive(Clone)]
pub(crate) struct Host {
    pub(crate) managed: bool,
    /// Given by the program, not made here.
    pub(crate) registered: bool,
    pub(crate) flags: u32,
    /// On whose device kernels touch it, managed memory only; none where they reach it in the host's memory.
    pub(crate) home: Option<Arc<Guest>>,
}

/// An allocation.
pub(crate) struct Block {
    pub(crate) address: u64,
    /// As asked for.
    pub(crate) size: u64,
    pub(crate) payer: Payer,
    /// The context it was made in.
    pub(crate) context: &'static Context,
    /// Tells it from others that had its address.
    pub(crate) id: u64,
    /// Its content, once there is some.
    pub(crate) content: Content,
}

/// All allocations of the process.
#[derive(Default)]
pub(crate) struct Memory {
    space: Mutex<Space>,
}

struct Space {
    regions: [Region; REGIONS],
    /// Managed and pinned memory, by address.
    hosts: BTreeMap<u64, Block>,
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
        Self { regions: std::array::from_fn(|_| Region::default()), hosts: BTreeMap::new(), made: 0 }
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
        self.made += 1;
        block.id = self.made;
        if matches!(block.payer, Payer::Host(_)) {
            let address = block.address;
            self.hosts.insert(address, block);
            return Ok(address);
        }
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
        let address = BASE + ((index as u64) << REGION_BITS) + ((room as u64) << room_bits(index));
        block.address = address;
        region.rooms[room] = Some(block);
        Ok(address)
    }

    fn find(&mut self, address: u64) -> Option<&mut Block> {
        let block = match room_of(address) {
            Some((region, room)) => self.regions.get_mut(region)?.rooms.get_mut(room)?.as_mut()?,
            None => self.hosts.range_mut(..=address).next_back()?.1,
        };
        (address - block.address < block.size).then_some(block)
    }

    fn remove(&mut self, address: u64) -> Option<Block> {
        let Some((region, room)) = room_of(address) else { return self.hosts.remove(&address) };
        let region = self.regions.get_mut(region)?;
        let block = region.rooms.get_mut(room)?.take_if(|block| block.address == address)?;
        region.empty.push(room as u32);
        Some(block)
    }

    fn blocks(&self) -> impl Iterator<Item = &Block> {
        self.regions.iter().flat_map(|region| region.rooms.iter().flatten()).chain(self.hosts.values())
    }
}

impl Block {
    /// Whoever has paid gets back what it paid.
    fn give_back(self) {
        match self.payer {
            Payer::Guest(guest) => {
                guest.refund(self.size);
                ipc::withdraw(self.id);
            }
            Payer::Pool(pool) | Payer::Graph { pool, live: true, .. } => {
                pool.get().into_iter().for_each(|pool| pool.give(self.size))
            }
            Payer::Host(Host { home: Some(guest), .. }) => guest.unmanage(self.size),
            Payer::Stranger | Payer::External | Payer::Host(_) | Payer::Graph { live: false, .. } => {}
        }
        self.content.unmap();
    }

    pub(crate) const fn host(&self) -> Option<&Host> {
        match &self.payer {
            Payer::Host(host) => Some(host),
            _ => None,
        }
    }
}

impl Memory {
    fn lock(&self) -> MutexGuard<'_, Space> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory of the context's device.
    pub(crate) fn allocate(&self, context: &'static Context, size: u64) -> Outcome<u64> {
        if size == 0 {
            return Err(Code::InvalidValue);
        }
        if !context.guest.charge(size) {
            return Err(Code::OutOfMemory);
        }
        self.add(context, size, Payer::Guest(Arc::clone(&context.guest)), 0, Content::NONE)
    }

    /// Enters an allocation that is paid for, at that address if it is the host's. Not entered, it is given back.
    pub(crate) fn add(
        &self,
        context: &'static Context,
        size: u64,
        payer: Payer,
        address: u64,
        content: Content,
    ) -> Outcome<u64> {
        let block = Block { address, size, payer: payer.clone(), context, id: 0, content };
        let added = self.lock().insert(block);
        if added.is_err() {
            Block { address, size, payer, context, id: 0, content: Content::NONE }.give_back();
        }
        added
    }

    /// Frees what begins at that address and is of that sort; INVALID_VALUE if nothing is.
    pub(crate) fn free(&self, address: u64, sort: impl FnOnce(&Block) -> bool) -> Outcome {
        let block = {
            let mut space = self.lock();
            let found = space.find(address).filter(|block| block.address == address && sort(block));
            match &mut found.ok_or(Code::InvalidValue)?.payer {
                Payer::Graph { pool, live, .. } if *live => {
                    *live = false;
                    let (pool, size) = (*pool, space.find(address).map_or(0, |block| block.size));
                    drop(space);
                    pool.get()?.give(size);
                    return Ok(());
                }
                Payer::Graph { .. } => return Err(Code::InvalidValue),
                _ => space.remove(address),
            }
        };
        block.ok_or(Code::InvalidValue)?.give_back();
        Ok(())
    }

    /// One more executable graph wants to have a graph's allocation: whether it is the only one.
    pub(crate) fn claim(&self, address: u64) -> bool {
        let claimed = self.with(address, |block| match &mut block.payer {
            Payer::Graph { runnable, .. } => !std::mem::replace(runnable, true),
            _ => false,
        });
        claimed.unwrap_or(false)
    }

    /// The executable graph that had it has another one, or has ended.
    pub(crate) fn unclaim(&self, address: u64) {
        self.leave(address, |_, runnable| *runnable = false);
    }

    /// The node of a graph's allocation is gone.
    pub(crate) fn forget(&self, address: u64) {
        self.leave(address, |node, _| *node = false);
    }

    /// Takes out a graph's allocation that is not there, with its address, once neither its node nor an executable graph
    /// has it.
    fn leave(&self, address: u64, who: impl FnOnce(&mut bool, &mut bool)) {
        let mut space = self.lock();
        let is_left = space.find(address).is_some_and(|block| match &mut block.payer {
            Payer::Graph { live, node, runnable, .. } => {
                who(node, runnable);
                !*live && !*node && !*runnable
            }
            _ => false,
        });
        if is_left {
            drop(space.remove(address));
        }
    }

    /// Host memory that stands for so many bytes at an address: what a copy reads or writes.
    pub(crate) fn place(&self, address: u64, length: u64) -> Outcome<*mut u8> {
        let found = self.with(address, |block| {
            let offset = address - block.address;
            if length > block.size - offset {
                return Err(Code::InvalidValue);
            }
            if block.host().is_some() {
                return Ok(address as *mut u8);
            }
            let size = block.size;
            let place = block.content.place(size)?;
            Ok(place.wrapping_add(usize::try_from(offset).map_err(|_| Code::InvalidValue)?))
        });
        match found {
            Some(place) => place,
            None if (BASE..END).contains(&address) => Err(Code::InvalidValue),
            None => Ok(address as *mut u8),
        }
    }

    /// Looks at the allocation that an address is in, and may change it.
    pub(crate) fn with<T>(&self, address: u64, look: impl FnOnce(&mut Block) -> T) -> Option<T> {
        self.lock().find(address).map(look)
    }

    /// Frees all that is of that sort.
    pub(crate) fn free_all(&self, sort: impl Fn(&Block) -> bool) {
        let gone: Vec<Block> = {
            let mut space = self.lock();
            let addresses: Vec<u64> =
                space.blocks().filter(|block| sort(block)).map(|block| block.address).collect();
            addresses.into_iter().filter_map(|address| space.remove(address)).collect()
        };
        gone.into_iter().for_each(Block::give_back);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_address_of_a_room_names_it(size in 1..=1_u64 << 40, room in 0..1000_u64, within: u64) {
            let region = region_for(size).expect("a region");
            prop_assert!(size <= 1 << room_bits(region));
            prop_assert!(region == 0 || size > 1 << (room_bits(region) - 1));
            let rooms = 1 << (REGION_BITS - room_bits(region));
            let room = room % rooms;
            let address = BASE + ((region as u64) << REGION_BITS) + (room << room_bits(region)) + within % size;
            prop_assert_eq!(room_of(address), Some((region, room as usize)));
        }
    }

    #[test]
    fn other_addresses_name_none() {
        assert_eq!(room_of(BASE - 1), None);
        assert_eq!(room_of(END), None);
        assert_eq!(region_for(u64::MAX), None);
        assert_eq!(region_for((1 << 40) + 1), None);
    }
}
