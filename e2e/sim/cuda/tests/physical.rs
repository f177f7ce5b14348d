//! Physical memory by handle: its lifetime, and the content of its mappings.
#![allow(unsafe_code, reason = "the library is called through C")]

mod common;

use std::collections::BTreeMap;

use common::*;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Properties {
    kind: u32,
    handles: u32,
    location: Location,
    windows: u64,
    flags: [u8; 8],
}

const PINNED: Properties = Properties { kind: 1, handles: 1, location: DEVICE, windows: 0, flags: [0; 8] };

impl Started {
    fn create(&self, size: u64) -> Result<u64, u32> {
        let (cuda, mut handle) = (&self.cuda, 0);
        let code =
            call!(cuda.cuMemCreate(&mut handle => &mut u64, size => u64, &PINNED => &Properties, 0 => u64));
        answer(code, handle)
    }

    fn reserve(&self, size: u64) -> u64 {
        let (cuda, mut address) = (&self.cuda, 0);
        let code = call!(cuda.cuMemAddressReserve(
            &mut address => &mut u64, size => u64, 0 => u64, 0 => u64, 0 => u64,
        ));
        answer(code, address).expect("addresses")
    }

    fn map(&self, address: u64, size: u64, handle: u64) -> u32 {
        let cuda = &self.cuda;
        call!(cuda.cuMemMap(address => u64, size => u64, 0 => u64, handle => u64, 0 => u64))
    }

    fn unmap(&self, address: u64, size: u64) -> u32 {
        let cuda = &self.cuda;
        call!(cuda.cuMemUnmap(address => u64, size => u64))
    }

    fn release(&self, handle: u64) -> u32 {
        let cuda = &self.cuda;
        call!(cuda.cuMemRelease(handle => u64))
    }
}

#[test]
fn virtual_memory_moves_bytes() {
    let it = start("L4");
    let cuda = &it.cuda;
    let handle = it.create(4 * MIB).expect("memory");
    let address = it.reserve(8 * MIB);
    assert_eq!(it.map(address, 4 * MIB, handle), SUCCESS);
    let fill = || call!(cuda.cuMemsetD32_v2(address + 4096 => u64, 0x0102_0304 => u32, 256 => u64));
    assert_eq!(fill(), INVALID_VALUE, "access is not set yet");
    let access = (DEVICE, 3_u32);
    assert_eq!(
        call!(cuda.cuMemSetAccess(address => u64, 4 * MIB => u64, &access => &(Location, u32), 1 => u64)),
        SUCCESS
    );
    assert_eq!(fill(), SUCCESS);
    let mut read = [0_u8; 8];
    let get = |read: &mut [u8; 8]| {
        call!(cuda.cuMemcpyDtoH_v2(
            read.as_mut_ptr() => *mut u8, address + 4096 => u64, 8 => u64
        ))
    };
    assert_eq!((get(&mut read), read), (SUCCESS, [4, 3, 2, 1, 4, 3, 2, 1]));
    // Exported and mapped a second time, it is the same memory.
    let mut descriptor = -1;
    let code = call!(cuda.cuMemExportToShareableHandle(
        &mut descriptor => &mut i32, handle => u64, 1 => u32, 0 => u64,
    ));
    assert_eq!(code, SUCCESS);
    let mut other = 0_u64;
    let code = call!(cuda.cuMemImportFromShareableHandle(
        &mut other => &mut u64, descriptor as usize => usize, 1 => u32,
    ));
    assert_eq!((code, it.used()), (SUCCESS, 4 * MIB));
    let second = it.reserve(4 * MIB);
    assert_eq!(it.map(second, 4 * MIB, other), SUCCESS);
    assert_eq!(
        call!(cuda.cuMemSetAccess(second => u64, 4 * MIB => u64, &access => &(Location, u32), 1 => u64)),
        SUCCESS
    );
    let mut read = [0_u8; 4];
    let code = call!(cuda.cuMemcpyDtoH_v2(read.as_mut_ptr() => *mut u8, second + 4096 => u64, 4 => u64));
    assert_eq!((code, read), (SUCCESS, [4, 3, 2, 1]));
    // The importer keeps the memory when the exporter has released it.
    assert_eq!((it.unmap(address, 4 * MIB), it.release(handle)), (SUCCESS, SUCCESS));
    assert_eq!(it.used(), 4 * MIB);
    assert_eq!((it.unmap(second, 4 * MIB), it.release(other)), (SUCCESS, SUCCESS));
    it.create(2 * MIB).expect("memory");
    assert_eq!(it.used(), 2 * MIB);
}

/// An operation on physical memory; numbers select one of the existing objects.
#[derive(Clone, Copy, Debug)]
enum Operation {
    Create(u64),
    Retain(usize),
    Release(usize),
    Map(usize),
    Unmap(usize),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        (1..4_u64).prop_map(Operation::Create),
        any::<usize>().prop_map(Operation::Retain),
        any::<usize>().prop_map(Operation::Release),
        any::<usize>().prop_map(Operation::Map),
        any::<usize>().prop_map(Operation::Unmap),
    ]
}

/// The reference model: size, references and mappings of each handle, and the handle mapped at each
/// address.
#[derive(Default)]
struct Model {
    allocations: BTreeMap<u64, (u64, u32, u32)>,
    mapped: BTreeMap<u64, u64>,
}

impl Model {
    fn end(&mut self) {
        self.allocations.retain(|_, (_, references, mappings)| *references + *mappings > 0);
    }

    fn used(&self) -> u64 {
        self.allocations.values().map(|(size, ..)| size).sum()
    }
}

#[test]
fn physical_memory_lives_while_it_has_references() {
    let it = start("L4");
    let cuda = &it.cuda;
    let place = it.reserve(512 * MIB);
    let mut runner = TestRunner::new(Config { cases: 64, failure_persistence: None, ..Config::default() });
    let run = runner.run(&proptest::collection::vec(operation(), 0..120), |operations| {
        let mut model = Model::default();
        for operation in operations {
            let nth = |at: usize| {
                let count = model.allocations.len();
                model.allocations.keys().nth(at % count.max(1)).copied()
            };
            match operation {
                Operation::Create(pages) => {
                    let handle =
                        it.create(pages * 2 * MIB).map_err(|code| TestCaseError::fail(code.to_string()))?;
                    model.allocations.insert(handle, (pages * 2 * MIB, 1, 0));
                }
                Operation::Retain(at) => {
                    let Some((address, handle)) = model.mapped.iter().nth(at % model.mapped.len().max(1))
                    else {
                        continue;
                    };
                    let mut found = 0_u64;
                    let inside = address + 4096;
                    let code = call!(cuda.cuMemRetainAllocationHandle(&mut found => &mut u64, inside => u64));
                    prop_assert_eq!((code, found), (SUCCESS, *handle));
                    model.allocations.entry(*handle).and_modify(|(_, references, _)| *references += 1);
                }
                Operation::Release(at) => {
                    let Some(handle) = nth(at) else { continue };
                    let references = model.allocations[&handle].1;
                    let expected = if references == 0 { INVALID_VALUE } else { SUCCESS };
                    prop_assert_eq!(it.release(handle), expected);
                    model
                        .allocations
                        .entry(handle)
                        .and_modify(|(_, count, _)| *count = count.saturating_sub(1));
                }
                Operation::Map(at) => {
                    let Some(handle) = nth(at) else { continue };
                    let (size, references, _) = model.allocations[&handle];
                    let slots = (0..64).map(|slot| place + slot * 8 * MIB);
                    let Some(address) = slots.into_iter().find(|slot| !model.mapped.contains_key(slot))
                    else {
                        continue;
                    };
                    let expected = if references == 0 { INVALID_VALUE } else { SUCCESS };
                    prop_assert_eq!(it.map(address, size, handle), expected);
                    if expected == SUCCESS {
                        prop_assert_eq!(it.map(address, size, handle), INVALID_VALUE, "mapped already");
                        model.mapped.insert(address, handle);
                        model.allocations.entry(handle).and_modify(|(_, _, mappings)| *mappings += 1);
                    }
                }
                Operation::Unmap(at) => {
                    let nth = model.mapped.keys().nth(at % model.mapped.len().max(1)).copied();
                    let Some(address) = nth else { continue };
                    let handle = model.mapped[&address];
                    let size = model.allocations[&handle].0;
                    prop_assert_eq!(it.unmap(address, size + 2 * MIB), INVALID_VALUE);
                    prop_assert_eq!(it.unmap(address, size), SUCCESS);
                    model.mapped.remove(&address);
                    model.allocations.entry(handle).and_modify(|(_, _, mappings)| *mappings -= 1);
                }
            }
            model.end();
            prop_assert_eq!(it.used(), model.used());
        }
        for (address, handle) in std::mem::take(&mut model.mapped) {
            prop_assert_eq!(it.unmap(address, model.allocations[&handle].0), SUCCESS);
        }
        for (handle, (_, references, _)) in std::mem::take(&mut model.allocations) {
            (0..references).for_each(|_| assert_eq!(it.release(handle), SUCCESS));
        }
        prop_assert_eq!(it.used(), 0);
        Ok(())
    });
    run.expect("as the model");
    assert_eq!(call!(cuda.cuMemAddressFree(place => u64, 512 * MIB => u64)), SUCCESS);
}
