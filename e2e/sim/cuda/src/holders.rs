//! What holds physical memory besides handles and mappings: tiles of sparse arrays, and multicast objects.

use crate::argument::{In, Out};
use crate::code::Code;
use crate::content::Content;
use crate::device::read_all;
use crate::frame::{Outcome, entry};
use crate::handle::Handle;
use crate::physical::{Allocation, Properties, Store};
use crate::pool::Location;
use crate::process::Process;
use crate::stream::Stream;

/// `CUarrayMapInfo`: where in an array, the operation, the kind of handle, the handle, and where in its memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    place: [u64; 7],
    operation: u32,
    kind: u32,
    handle: u64,
    offset: u64,
    rest: [u32; 4],
}

/// `CUmulticastObjectProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Team {
    devices: u32,
    size: u64,
    handles: u64,
    flags: u64,
}

const _: () = assert!(size_of::<Tile>() == 96 && size_of::<Team>() == 32);

/// Who holds memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Holder {
    Tile([u64; 7]),
    /// A multicast object, from that offset on.
    Team(u64, u64),
}

impl Store {
    fn hold(&mut self, holder: Holder, handle: u64) -> Outcome {
        let allocation = self.allocations.get_mut(&handle).ok_or(Code::InvalidValue)?;
        allocation.mappings += 1;
        self.let_go(holder);
        self.held.insert(holder, handle);
        Ok(())
    }

    fn let_go(&mut self, holder: Holder) -> bool {
        let Some(handle) = self.held.remove(&holder) else { return false };
        if let Some(allocation) = self.allocations.get_mut(&handle) {
            allocation.mappings -= 1;
        }
        self.end(handle);
        true
    }
}

fn bind(process: &Process, team: u64, offset: u64, handle: u64) -> Outcome {
    process.physical.store().hold(Holder::Team(team, offset), handle)
}

fn bind_at(process: &Process, team: u64, offset: u64, address: u64) -> Outcome {
    let mut store = process.physical.store();
    let handle = store.handle_at(address).ok_or(Code::InvalidValue)?;
    store.hold(Holder::Team(team, offset), handle)
}

entry! {
    fn cuMemMapArrayAsync | cuMemMapArrayAsync_ptsz(process, own; list: In<Tile>, count: u32, stream: Handle<Stream>) {
        Stream::of(stream, own)?;
        for tile in read_all(list, count as usize)? {
            let mut store = process.physical.store();
            match tile.operation {
                1 => store.hold(Holder::Tile(tile.place), tile.handle)?,
                2 => drop(store.let_go(Holder::Tile(tile.place))),
                _ => return Err(Code::InvalidValue),
            }
        }
        Ok(())
    }

    fn cuMulticastCreate(process; handle: Out<u64>, team: In<Team>) {
        handle.check()?;
        let size = team.get()?.size;
        let location = Location { kind: 0, id: 0 };
        let properties = Properties {
            kind: 1, handles: 0, location, windows: 0, compression: 0, rdma: 0, usage: 0, reserved: [0; 4],
        };
        let content = Content::NONE;
        let team = Allocation { properties, size, guest: None, references: 1, mappings: 0, content, shared: None };
        handle.set(process.physical.store().add(team))
    }

    fn cuMulticastAddDevice(process; team: u64, device: i32) {
        process.device(device)?;
        process.physical.store().allocations.get(&team).map(drop).ok_or(Code::InvalidValue)
    }

    fn cuMulticastBindMem(process; team: u64, at: u64, handle: u64, _offset: u64, _size: u64, _flags: u64) {
        bind(process, team, at, handle)
    }

    fn cuMulticastBindMem_v2(
        process; team: u64, _device: i32, at: u64, handle: u64, _offset: u64, _size: u64, _flags: u64,
    ) {
        bind(process, team, at, handle)
    }

    fn cuMulticastBindAddr(process; team: u64, at: u64, address: u64, _size: u64, _flags: u64) {
        bind_at(process, team, at, address)
    }

    fn cuMulticastBindAddr_v2(process; team: u64, _device: i32, at: u64, address: u64, _size: u64, _flags: u64) {
        bind_at(process, team, at, address)
    }

    fn cuMulticastUnbind(process; team: u64, _device: i32, at: u64, _size: u64) {
        let bound = process.physical.store().let_go(Holder::Team(team, at));
        if bound { Ok(()) } else { Err(Code::InvalidValue) }
    }
}
