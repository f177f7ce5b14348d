//! Memory of every kind: the device memory that it takes, and when that is returned.
#![allow(unsafe_code, reason = "the library is called through C")]

mod common;

use std::ffi::c_void;

use common::*;

#[test]
fn scenario_program() {
    common::scenario(|cuda, words| match words {
        ["open", handle] => {
            let words: Vec<u64> = handle.split(',').map(|word| word.parse().expect("a number")).collect();
            let mut address = 0_u64;
            let handle: [u64; 8] = words.try_into().expect("eight words");
            let code =
                call!(cuda.cuIpcOpenMemHandle_v2(&mut address => &mut u64, Ipc(handle) => Ipc, 1 => u32));
            if code != SUCCESS {
                return format!("error {code}");
            }
            let mut read = [0_u8; 4];
            assert_eq!(
                call!(cuda.cuMemcpyDtoH_v2(read.as_mut_ptr() => *mut u8, address + 100 => u64, 4 => u64)),
                SUCCESS
            );
            assert_eq!(call!(cuda.cuMemsetD8_v2(address => u64, 7 => u8, 100 => u64)), SUCCESS);
            assert_eq!(call!(cuda.cuIpcCloseMemHandle(address => u64)), SUCCESS);
            format!("{read:?}")
        }
        other => panic!("unknown command {other:?}"),
    });
}

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Ipc([u64; 8]);

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PoolProperties {
    kind: u32,
    handles: u32,
    location: Location,
    security: usize,
    most: u64,
    rest: [u8; 56],
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Shape {
    width: u64,
    height: u64,
    depth: u64,
    format: u32,
    channels: u32,
    flags: u32,
}

impl Started {
    fn alloc_async(&self, size: u64) -> Result<u64, u32> {
        let (cuda, mut address) = (&self.cuda, 0);
        answer(call!(cuda.cuMemAllocAsync(&mut address => &mut u64, size => u64, 0 => usize)), address)
    }

    fn free_async(&self, address: u64) -> u32 {
        let cuda = &self.cuda;
        call!(cuda.cuMemFreeAsync(address => u64, 0 => usize))
    }

    fn pool_attribute(&self, pool: usize, attribute: u32) -> u64 {
        let (cuda, mut value) = (&self.cuda, 0);
        let code = call!(cuda.cuMemPoolGetAttribute(pool => usize, attribute => u32, &mut value => &mut u64));
        answer(code, value).expect("an attribute")
    }
}

#[test]
fn pitched_memory_is_counted_by_its_pitch() {
    let it = start("L4");
    let cuda = &it.cuda;
    let (mut address, mut pitch) = (0_u64, 0_u64);
    let code = call!(cuda.cuMemAllocPitch_v2(
        &mut address => &mut u64, &mut pitch => &mut u64, 1000 => u64, 100 => u64, 4 => u32,
    ));
    assert_eq!((code, pitch, it.used()), (SUCCESS, 1024, 102_400));
    assert_eq!(cuda.free(address), SUCCESS);
    assert_eq!(it.used(), 0);
    let code = call!(cuda.cuMemAllocPitch_v2(
        &mut address => &mut u64, &mut pitch => &mut u64, 1000 => u64, 100 => u64, 3 => u32,
    ));
    assert_eq!(code, INVALID_VALUE);
}

#[test]
fn managed_memory_counts_while_on_the_device() {
    let it = start("L4");
    let (cuda, mut address) = (&it.cuda, 0_u64);
    let code = call!(cuda.cuMemAllocManaged(&mut address => &mut u64, 64 * MIB => u64, 1 => u32));
    assert_eq!((code, it.used()), (SUCCESS, 0));
    // The host may access it.
    let first = address as *mut u8;
    // SAFETY: managed memory of that size.
    unsafe { first.write(3) };
    let move_to =
        |device| call!(cuda.cuMemPrefetchAsync(address => u64, 64 * MIB => u64, device => i32, 0 => usize));
    assert_eq!((move_to(0), it.used()), (SUCCESS, 64 * MIB));
    assert_eq!((move_to(0), it.used()), (SUCCESS, 64 * MIB));
    assert_eq!((move_to(-1), it.used()), (SUCCESS, 0));
    assert_eq!(move_to(0), SUCCESS);
    let mut managed = 0_u32;
    let code = call!(cuda.cuPointerGetAttribute(&mut managed => &mut u32, 8 => u32, address + 5 => u64));
    assert_eq!((code, managed), (SUCCESS, 1));
    assert_eq!((cuda.free(address), it.used()), (SUCCESS, 0));
}

#[test]
fn pinned_memory_takes_no_device_memory() {
    let it = start("L4");
    let (cuda, mut address) = (&it.cuda, 0_u64);
    assert_eq!(call!(cuda.cuMemHostAlloc(&mut address => &mut u64, 64 * MIB => u64, 2 => u32)), SUCCESS);
    assert_eq!((it.used(), cuda.free(address)), (0, INVALID_VALUE));
    assert_eq!(call!(cuda.cuMemFreeHost(address => u64)), SUCCESS);
    assert_eq!(call!(cuda.cuMemFreeHost(address => u64)), INVALID_VALUE);
}

#[test]
fn arrays_count_elements_and_mipmaps_count_levels() {
    let it = start("L4");
    let (cuda, mut array) = (&it.cuda, 0_usize);
    let shape = Shape { width: 1024, height: 512, depth: 0, format: 0x20, channels: 4, flags: 0 };
    let create = |array: &mut usize, shape: &Shape| {
        call!(cuda.cuArray3DCreate_v2(
            array => &mut usize, shape => &Shape
        ))
    };
    assert_eq!((create(&mut array, &shape), it.used()), (SUCCESS, 1024 * 512 * 16));
    assert_eq!(call!(cuda.cuArrayDestroy(array => usize)), SUCCESS);
    assert_eq!(call!(cuda.cuArrayDestroy(array => usize)), INVALID_HANDLE);
    assert_eq!(it.used(), 0);
    // Memory is mapped later.
    let sparse = Shape { flags: 0x40, ..shape };
    assert_eq!((create(&mut array, &sparse), it.used()), (SUCCESS, 0));
    assert_eq!(create(&mut array, &Shape { width: 1 << 40, ..shape }), OUT_OF_MEMORY);
    let mut mipmap = 0_usize;
    let code = call!(cuda.cuMipmappedArrayCreate(&mut mipmap => &mut usize, &shape => &Shape, 3 => u32));
    assert_eq!((code, it.used()), (SUCCESS, (1024 * 512 + 512 * 256 + 256 * 128) * 16));
    assert_eq!(call!(cuda.cuMipmappedArrayDestroy(mipmap => usize)), SUCCESS);
    assert_eq!(it.used(), 0);
}

#[test]
fn pool_keeps_reserved_memory_until_a_synchronisation() {
    let it = start("L4");
    let (cuda, mut pool) = (&it.cuda, 0_usize);
    assert_eq!(call!(cuda.cuDeviceGetDefaultMemPool(&mut pool => &mut usize, 0 => i32)), SUCCESS);
    let one = it.alloc_async(MIB).expect("memory");
    assert_eq!(
        (it.used(), it.pool_attribute(pool, 5), it.pool_attribute(pool, 7)),
        (32 * MIB, 32 * MIB, MIB)
    );
    let two = it.alloc_async(40 * MIB).expect("memory");
    assert_eq!((it.used(), it.pool_attribute(pool, 7)), (64 * MIB, 41 * MIB));
    // Both functions may free it.
    assert_eq!((it.free_async(one), cuda.free(two)), (SUCCESS, SUCCESS));
    assert_eq!((it.used(), it.pool_attribute(pool, 7), it.pool_attribute(pool, 8)), (64 * MIB, 0, 41 * MIB));
    assert_eq!(call!(cuda.cuStreamSynchronize(0 => usize)), SUCCESS);
    assert_eq!((it.used(), it.pool_attribute(pool, 6)), (0, 64 * MIB));
    // A release threshold keeps it.
    let threshold = 48 * MIB;
    assert_eq!(call!(cuda.cuMemPoolSetAttribute(pool => usize, 4 => u32, &threshold => &u64)), SUCCESS);
    let one = it.alloc_async(60 * MIB).expect("memory");
    assert_eq!(it.free_async(one), SUCCESS);
    assert_eq!(call!(cuda.cuCtxSynchronize()), SUCCESS);
    assert_eq!(it.used(), 48 * MIB);
    assert_eq!(call!(cuda.cuMemPoolTrimTo(pool => usize, 10 * MIB => u64)), SUCCESS);
    assert_eq!(it.used(), 10 * MIB);
    // Memory of other allocations may be freed in stream order.
    let plain = cuda.alloc(MIB).expect("memory");
    assert_eq!((it.free_async(plain), it.used()), (SUCCESS, 10 * MIB));
}

#[test]
fn created_pool_has_a_limit_and_outlives_its_destruction() {
    let it = start("L4");
    let (cuda, mut pool) = (&it.cuda, 0_usize);
    let properties =
        PoolProperties { kind: 1, handles: 0, location: DEVICE, security: 0, most: 64 * MIB, rest: [0; 56] };
    assert_eq!(call!(cuda.cuMemPoolCreate(&mut pool => &mut usize, &properties => &PoolProperties)), SUCCESS);
    let from_pool = |size: u64| {
        let mut address = 0_u64;
        let code = call!(cuda.cuMemAllocFromPoolAsync(
            &mut address => &mut u64, size => u64, pool => usize, 0 => usize,
        ));
        answer(code, address)
    };
    let one = from_pool(60 * MIB).expect("memory");
    assert_eq!(from_pool(5 * MIB), Err(OUT_OF_MEMORY));
    assert_eq!(call!(cuda.cuMemPoolDestroy(pool => usize)), SUCCESS);
    assert_eq!((it.used(), from_pool(1)), (60 * MIB, Err(INVALID_VALUE)));
    assert_eq!((cuda.free(one), it.used()), (SUCCESS, 0));
}

#[test]
fn memory_of_another_process_is_shared_and_paid_once() {
    let it = start("L4");
    let cuda = &it.cuda;
    let address = cuda.alloc(MIB).expect("memory");
    assert_eq!(call!(cuda.cuMemsetD8_v2(address + 100 => u64, 9 => u8, 4 => u64)), SUCCESS);
    let mut handle = Ipc([0; 8]);
    assert_eq!(call!(cuda.cuIpcGetMemHandle(&mut handle => &mut Ipc, address => u64)), SUCCESS);
    let mut other = it.node.program();
    other.ask("start");
    let used = common::used(cuda);
    let words: Vec<String> = handle.0.iter().map(u64::to_string).collect();
    let open = format!("open {}", words.join(","));
    assert_eq!(other.ask(&open), "[9, 9, 9, 9]");
    assert_eq!(common::used(cuda), used);
    let mut read = [0_u8; 1];
    let first: *mut c_void = read.as_mut_ptr().cast();
    assert_eq!(call!(cuda.cuMemcpyDtoH_v2(first => *mut c_void, address => u64, 1 => u64)), SUCCESS);
    assert_eq!(read, [7]);
    assert_eq!(cuda.free(address), SUCCESS);
    assert_eq!(other.ask(&open), "error 205");
}

#[test]
fn graph_memory_lives_from_launch_until_freed() {
    let it = start("L4");
    let cuda = &it.cuda;
    let attribute = |which: u32| {
        let mut value = 0_u64;
        let code = call!(cuda.cuDeviceGetGraphMemAttribute(0 => i32, which => u32, &mut value => &mut u64));
        answer(code, value).expect("an attribute")
    };
    // By capture: an allocation that stays, and one that the graph frees.
    let (mut stream, mut graph, mut executable) = (0_usize, 0_usize, 0_usize);
    assert_eq!(call!(cuda.cuStreamCreate(&mut stream => &mut usize, 1 => u32)), SUCCESS);
    assert_eq!(call!(cuda.cuStreamBeginCapture_v2(stream => usize, 0 => u32)), SUCCESS);
    let (mut stays, mut goes) = (0_u64, 0_u64);
    for (address, size) in [(&mut stays, 40 * MIB), (&mut goes, 20 * MIB)] {
        assert_eq!(call!(cuda.cuMemAllocAsync(address => &mut u64, size => u64, stream => usize)), SUCCESS);
    }
    assert_eq!(call!(cuda.cuMemFreeAsync(goes => u64, stream => usize)), SUCCESS);
    assert_eq!(call!(cuda.cuStreamEndCapture(stream => usize, &mut graph => &mut usize)), SUCCESS);
    assert_eq!((it.used(), cuda.free(stays)), (0, INVALID_VALUE));
    let instantiate = |executable: &mut usize, flags: u64| {
        call!(cuda.cuGraphInstantiateWithFlags(
            executable => &mut usize, graph => usize, flags => u64
        ))
    };
    assert_eq!(instantiate(&mut executable, 0), SUCCESS);
    let launch = |executable: usize| call!(cuda.cuGraphLaunch(executable => usize, stream => usize));
    assert_eq!((launch(executable), it.used()), (SUCCESS, 64 * MIB));
    assert_eq!((attribute(0), attribute(1), attribute(2)), (40 * MIB, 60 * MIB, 64 * MIB));
    assert_eq!(launch(executable), INVALID_VALUE, "what it allocates is still there");
    assert_eq!((cuda.free(stays), attribute(0), it.used()), (SUCCESS, 0, 64 * MIB));
    assert_eq!(launch(executable), SUCCESS);
    // Freed by its own launch, if that is requested.
    let mut by_itself = 0_usize;
    assert_eq!(instantiate(&mut by_itself, 1), NOT_SUPPORTED, "one of a graph at a time");
    assert_eq!(call!(cuda.cuGraphExecDestroy(executable => usize)), SUCCESS);
    assert_eq!(instantiate(&mut by_itself, 1), SUCCESS);
    assert_eq!((launch(by_itself), launch(by_itself)), (SUCCESS, SUCCESS));
    assert_eq!(call!(cuda.cuMemFreeAsync(stays => u64, 0 => usize)), SUCCESS);
    assert_eq!(call!(cuda.cuDeviceGraphMemTrim(0 => i32)), SUCCESS);
    assert_eq!(it.used(), 0);
}

#[test]
fn module_takes_memory_for_code_and_variables() {
    let it = start("L4");
    let (cuda, mut module) = (&it.cuda, 0_usize);
    let image =
        c".version 7.0\n.target sm_50\n.address_size 64\n.visible .global .align 4 .b8 table[1048576];\n\
                  .visible .entry spin(.param .u64 time)\n{ ret; }\n";
    assert_eq!(call!(cuda.cuModuleLoadData(&mut module => &mut usize, image.as_ptr() => *const i8)), SUCCESS);
    assert_eq!(it.used(), 3 * MIB);
    let (mut address, mut size) = (0_u64, 0_u64);
    let code = call!(cuda.cuModuleGetGlobal_v2(
        &mut address => &mut u64, &mut size => &mut u64, module => usize, c"table".as_ptr() => *const i8,
    ));
    assert_eq!((code, size), (SUCCESS, MIB));
    let mut function = 0_usize;
    let mut get = |name: *const i8| {
        call!(cuda.cuModuleGetFunction(
            &mut function => &mut usize, module => usize, name => *const i8
        ))
    };
    assert_eq!((get(c"spin".as_ptr()), get(c"other".as_ptr())), (SUCCESS, NOT_FOUND));
    assert_eq!(call!(cuda.cuModuleUnload(module => usize)), SUCCESS);
    assert_eq!(it.used(), 0);
}
