//! Memory of another process by its handle: `cuIpcGetMemHandle` and related functions.
//!
//! The content of an exported allocation becomes a file beside the simulator's state, which the
//! handle names. The file is removed with the allocation. The file of a killed process cannot be
//! opened.

use std::fs::File;
use std::path::PathBuf;

use divvy_sim::usage::Place;

use crate::argument::Out;
use crate::code::{Code, Outcome};
use crate::content::Content;
use crate::frame::entry;
use crate::objects::{Block, Payer, Process, current_context};

const MAGIC: u64 = 0x6469_7676_795f_6970;
/// The directory of the files, in the state directory.
const DIR: &str = "cuda-ipc";

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IpcHandle([u64; 8]);

impl IpcHandle {
    fn file(self, process: &Process) -> Outcome<PathBuf> {
        let [magic, owner, number, ..] = self.0;
        if magic != MAGIC { Err(Code::InvalidValue) } else { Ok(path(process, owner, number)) }
    }
}

fn path(process: &Process, owner: u64, number: u64) -> PathBuf {
    process.sim.dir().join(DIR).join(format!("{owner:x}-{number:x}"))
}

fn place_words(place: Place) -> [u64; 3] {
    let (gi, ci) = place.instance.unwrap_or((u32::MAX, u32::MAX));
    [place.slot as u64, gi.into(), ci.into()]
}

/// Moves the allocation's content to a file, once.
fn export(process: &Process, block: &mut Block) -> Outcome<IpcHandle> {
    let Payer::GpuProcess(gpu_process) = &block.payer else { return Err(Code::InvalidValue) };
    let (owner, number) = (gpu_process.token(), block.id);
    let [slot, gi, ci] = place_words(block.context.device.place);
    let handle = IpcHandle([MAGIC, owner, number, block.size, slot, gi, ci, 0]);
    if block.exported.is_some() {
        return Ok(handle);
    }
    let path = path(process, owner, number);
    let make = || {
        std::fs::create_dir_all(process.sim.dir().join(DIR))?;
        let file = File::options().read(true).write(true).create_new(true).open(&path)?;
        file.set_len(block.size)?;
        std::io::Result::Ok(file)
    };
    let file = make().map_err(|_| Code::OperatingSystem)?;
    let mut content = Content::of(&file, block.size)?;
    let before = std::mem::replace(&mut block.content, Content::NONE);
    if before.address() != 0 {
        // SAFETY: both are mappings of the allocation's size.
        unsafe {
            std::ptr::copy_nonoverlapping(
                before.address() as *const u8,
                content.place(0)?,
                block.size as usize,
            );
        }
    }
    before.unmap();
    block.content = content;
    block.exported = Some(path);
    Ok(handle)
}

fn open(process: &'static Process, handle: IpcHandle) -> Outcome<u64> {
    let context = current_context()?;
    let [_, owner, _, size, words @ .., _] = handle.0;
    if owner == context.gpu_process.token() {
        // A process cannot open its own memory.
        return Err(Code::InvalidContext);
    }
    let path = handle.file(process)?;
    if words != place_words(context.device.place) {
        return Err(Code::InvalidDevice);
    }
    if !process.sim.usage().is_some_and(|usage| usage.is_alive(owner)) {
        return Err(Code::MapFailed);
    }
    let file = File::options().read(true).write(true).open(path).map_err(|_| Code::MapFailed)?;
    let content = Content::of(&file, size)?;
    process.memory.add(context, size, Payer::OtherProcess, 0, content)
}

entry! {
    fn cuIpcGetMemHandle(process; handle: Out<IpcHandle>, address: u64) {
        handle.check()?;
        current_context()?;
        let made = process.memory.with(address, |block| export(process, block));
        handle.set(made.unwrap_or(Err(Code::InvalidValue))?)
    }

    fn cuIpcOpenMemHandle(process; address: Out<u64>, handle: IpcHandle, _flags: u32) {
        address.check()?;
        address.set(open(process, handle)?)
    }

    fn cuIpcOpenMemHandle_v2(process; address: Out<u64>, handle: IpcHandle, _flags: u32) {
        address.check()?;
        address.set(open(process, handle)?)
    }

    fn cuIpcCloseMemHandle(process; address: u64) {
        current_context()?;
        process.memory.free(address, |block| matches!(block.payer, Payer::OtherProcess))
    }
}
