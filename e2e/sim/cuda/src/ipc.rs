//! Memory of another process by its handle: `cuIpcGetMemHandle` and its like.
//!
//! An allocation that is exported gets a file beside the simulator's state, which is its content from then on. The handle
//! says which. The file goes with the allocation; one that a
//! killed process leaves cannot be opened.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Mutex;

use divvy_sim::ledger::Place;

use crate::argument::Out;
use crate::code::Code;
use crate::content::Content;
use crate::context;
use crate::frame::{Outcome, entry};
use crate::memory::{Block, Payer};
use crate::process::Process;

const MAGIC: u64 = 0x6469_7676_795f_6970;
/// Directory of the files in the state's.
const DIR: &str = "cuda-ipc";

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IpcHandle([u64; 8]);

/// Files of this process, with the address and the number of the allocation.
static EXPORTED: Mutex<Vec<(u64, u64, PathBuf)>> = Mutex::new(Vec::new());

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

/// Makes the allocation's content a file, once.
fn export(process: &Process, block: &mut Block) -> Outcome<IpcHandle> {
    let Payer::Guest(guest) = &block.payer else { return Err(Code::InvalidValue) };
    let (owner, number) = (guest.owner(), block.id);
    let [slot, gi, ci] = place_words(block.context.device.place);
    let handle = IpcHandle([MAGIC, owner, number, block.size, slot, gi, ci, 0]);
    let mut exported = EXPORTED.lock().map_err(|_| Code::Unknown)?;
    if exported.iter().any(|(_, known, _)| *known == number) {
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
    exported.push((block.address, number, path));
    Ok(handle)
}

/// An allocation is freed: nobody can open it any more.
pub(crate) fn withdraw(number: u64) {
    let Ok(mut exported) = EXPORTED.lock() else { return };
    exported.retain(|(_, known, path)| {
        let gone = *known == number;
        if gone {
            // Nobody else takes it away.
            drop(std::fs::remove_file(path));
        }
        !gone
    });
}

fn open(process: &'static Process, handle: IpcHandle) -> Outcome<u64> {
    let context = context::current()?;
    let [_, owner, _, size, words @ .., _] = handle.0;
    if owner == context.guest.owner() {
        // A process does not open its own.
        return Err(Code::InvalidContext);
    }
    let path = handle.file(process)?;
    if words != place_words(context.device.place) {
        return Err(Code::InvalidDevice);
    }
    if !process.sim.ledger().is_some_and(|ledger| ledger.has(owner)) {
        return Err(Code::MapFailed);
    }
    let file = File::options().read(true).write(true).open(path).map_err(|_| Code::MapFailed)?;
    let content = Content::of(&file, size)?;
    process.memory.add(context, size, Payer::Stranger, 0, content)
}

entry! {
    fn cuIpcGetMemHandle(process; handle: Out<IpcHandle>, address: u64) {
        handle.check()?;
        context::current()?;
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
        context::current()?;
        process.memory.free(address, |block| matches!(block.payer, Payer::Stranger))
    }
}
