//! Memory that a program in a container shares: addresses by name, and handles as files.
#![allow(unsafe_code, reason = "the driver is called through C")]

use super::guest::{Guest, MIB, Properties, UNTOUCHED, call, number, said};

/// CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.
const DESCRIPTOR: i32 = 1;

/// CUipcMemHandle, which is passed by value.
#[repr(C)]
struct Shared([u8; 64]);

impl Guest {
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
        said(code, address)
    }

    /// Physical memory that can be exported, by handle: its descriptor, and what is imported by one.
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
            other => panic!("no such word: {other:?}"),
        };
        said(code, key)
    }
}
