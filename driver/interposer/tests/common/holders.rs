//! What a program in a container has hold physical memory, besides handles and mappings: sparse arrays, multicast objects.
#![allow(unsafe_code, reason = "the driver is called through C")]

use super::guest::{Array3, FLOAT, Guest, MIB, UNTOUCHED, call, number, said};

/// CUarrayMapInfo.
#[repr(C)]
struct Tile {
    what: [u64; 2],
    place: [u64; 5],
    operation: u32,
    kind: u32,
    handle: u64,
    rest: [u64; 3],
}

/// CUmulticastObjectProp.
#[repr(C)]
struct Team {
    devices: u32,
    size: u64,
    handles: u64,
    flags: u64,
}

impl Guest {
    /// An array without memory: CUDA_ARRAY3D_SPARSE.
    pub(super) fn sparse(&self, key: &mut u64) -> i32 {
        let shape =
            Array3::<u64> { width: 256, height: 256, depth: 0, format: FLOAT, channels: 4, flags: 0x40 };
        call!(self, "cuArray3DCreate_v2", key => &mut u64, &shape => &Array3<u64>)
    }

    /// Maps memory into an array, or takes it out: `map WAY ARRAY HANDLE`, `unmap WAY ARRAY`.
    pub(super) fn tile(&self, words: &[&str]) -> String {
        let (operation, way, array, handle) = match words {
            ["map", way, array, handle] => (1, way, number(array), number(handle)),
            ["unmap", way, array] => (2, way, number(array), 0),
            other => panic!("no such word: {other:?}"),
        };
        let mut tile = Tile { what: [0, array], place: [0; 5], operation, kind: 0, handle, rest: [0; 3] };
        call!(self, way, &mut tile => &mut Tile, 1 => u32, 0 => u64).to_string()
    }

    /// Binds memory, by its handle or where it is mapped, to a new multicast object: its handle.
    pub(super) fn bind(&self, words: &[&str]) -> String {
        let [way, key] = words else { panic!("no such word: {words:?}") };
        let (mut team, what) = (UNTOUCHED, number(key));
        let wish = Team { devices: 1, size: 2 * MIB, handles: 1, flags: 0 };
        let made = [
            call!(self, "cuMulticastCreate", &mut team => &mut u64, &wish => &Team),
            call!(self, "cuMulticastAddDevice", team => u64, 0 => i32),
        ];
        assert_eq!(made, [0; 2]);
        let size = 2 * MIB;
        let code = match *way {
            "cuMulticastBindMem" => {
                call!(self, way, team => u64, 0 => u64, what => u64, 0 => u64, size => u64, 0 => u64)
            }
            "cuMulticastBindMem_v2" => {
                call!(self, way, team => u64, 0 => i32, 0 => u64, what => u64, 0 => u64, size => u64, 0 => u64)
            }
            "cuMulticastBindAddr" => {
                call!(self, way, team => u64, 0 => u64, what => u64, size => u64, 0 => u64)
            }
            "cuMulticastBindAddr_v2" => {
                call!(self, way, team => u64, 0 => i32, 0 => u64, what => u64, size => u64, 0 => u64)
            }
            other => panic!("no way to bind: {other}"),
        };
        said(code, team)
    }
}
