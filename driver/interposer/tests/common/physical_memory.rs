//! Physical memory of programs in a container: sharing by IPC handle and file descriptor, and the
//! objects that hold it besides handles and mappings (sparse arrays, multicast objects).
#![allow(unsafe_code, reason = "the driver is called through C")]

use super::guest::{Array3, FLOAT, Guest, MIB, Properties, UNTOUCHED, call, format_result, number};

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

/// CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.
const DESCRIPTOR: i32 = 1;

/// CUipcMemHandle, which is passed by value.
#[repr(C)]
struct Shared([u8; 64]);

impl Guest {
    /// Creates an array without memory: CUDA_ARRAY3D_SPARSE.
    pub(super) fn sparse(&self, key: &mut u64) -> i32 {
        let shape =
            Array3::<u64> { width: 256, height: 256, depth: 0, format: FLOAT, channels: 4, flags: 0x40 };
        call!(self, "cuArray3DCreate_v2", key => &mut u64, &shape => &Array3<u64>)
    }

    /// Maps memory into an array or unmaps it: `map FUNCTION ARRAY HANDLE`, `unmap FUNCTION ARRAY`.
    pub(super) fn tile(&self, words: &[&str]) -> String {
        let (operation, way, array, handle) = match words {
            ["map", way, array, handle] => (1, way, number(array), number(handle)),
            ["unmap", way, array] => (2, way, number(array), 0),
            other => panic!("unknown command: {other:?}"),
        };
        let mut tile = Tile { what: [0, array], place: [0; 5], operation, kind: 0, handle, rest: [0; 3] };
        call!(self, way, &mut tile => &mut Tile, 1 => u32, 0 => u64).to_string()
    }

    /// Binds memory, by handle or address, to a new multicast object, and returns the object's
    /// handle.
    pub(super) fn bind(&self, words: &[&str]) -> String {
        let [way, key] = words else { panic!("unknown command: {words:?}") };
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
                call!(self, way, team => u64, 0 => i32, 0 => u64, what => u64, 0 => u64, size => u64,
                    0 => u64)
            }
            "cuMulticastBindAddr" => {
                call!(self, way, team => u64, 0 => u64, what => u64, size => u64, 0 => u64)
            }
            "cuMulticastBindAddr_v2" => {
                call!(self, way, team => u64, 0 => i32, 0 => u64, what => u64, size => u64, 0 => u64)
            }
            other => panic!("no way to bind: {other}"),
        };
        format_result(code, team)
    }

    pub(super) fn export(&self, address: u64) -> String {
        let mut name = [0u8; 64];
        let code = call!(self, "cuIpcGetMemHandle", name.as_mut_ptr() => *mut u8, address => u64);
        let text: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
        if code == 0 { text } else { format!("error {code}") }
    }

    pub(super) fn import(&self, text: &str) -> String {
        let mut name = [0u8; 64];
        for (at, byte) in name.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[at * 2..at * 2 + 2], 16).expect("hexadecimal");
        }
        let mut address = UNTOUCHED;
        let code =
            call!(self, "cuIpcOpenMemHandle_v2", &mut address => &mut u64, Shared(name) => Shared, 1 => u32);
        format_result(code, address)
    }

    /// Creates, exports or imports physical memory by file descriptor.
    pub(super) fn shareable(&self, words: &[&str]) -> String {
        let mut key = UNTOUCHED;
        let code = match words {
            ["create", mib] => {
                let mut properties = Properties::on(0);
                properties.handles = DESCRIPTOR;
                call!(self, "cuMemCreate", &mut key => &mut u64, number(mib) * MIB => u64,
                    &properties => &Properties, 0 => u64)
            }
            ["export", handle] => {
                let mut descriptor = -1;
                let code = call!(self, "cuMemExportToShareableHandle", &mut descriptor => &mut i32,
                    number(handle) => u64, DESCRIPTOR => i32, 0 => u64);
                if code == 0 {
                    key = u64::try_from(descriptor).expect("a descriptor");
                }
                code
            }
            ["import", descriptor] => call!(self, "cuMemImportFromShareableHandle", &mut key => &mut u64,
                number(descriptor) => u64, DESCRIPTOR => i32),
            other => panic!("unknown command: {other:?}"),
        };
        format_result(code, key)
    }
}
