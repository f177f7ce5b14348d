//! The program in the container: executes text commands by calling the driver through C.
#![allow(unsafe_code, reason = "the driver is called through C")]

use libloading::Library;
use std::ffi::{CString, c_char, c_void};
use std::path::Path;

/// Content of an output before the call; a failed call must leave it unchanged.
pub(super) const UNTOUCHED: u64 = 0x5555_5555_5555_5555;
pub(super) const MIB: u64 = 1 << 20;

pub(crate) struct Guest {
    lib: Library,
}

/// Calls a function by its signature: `call!(self, cuMemFree_v2, address => u64)`.
macro_rules! call {
    ($guest:expr, $name:expr, $($argument:expr => $kind:ty),* $(,)?) => {{
        type Function = extern "C" fn($($kind),*) -> i32;
        // SAFETY: the signature is the header's.
        let function: Function = unsafe { std::mem::transmute($guest.pointer($name)) };
        function($($argument),*)
    }};
}

pub(super) use call;

/// CUDA_ARRAY_DESCRIPTOR and CUDA_ARRAY3D_DESCRIPTOR of both versions. FLOAT elements with four
/// channels have 16 bytes.
#[repr(C)]
struct Array<T> {
    width: T,
    height: T,
    format: i32,
    channels: u32,
}

#[repr(C)]
pub(super) struct Array3<T> {
    pub(super) width: T,
    pub(super) height: T,
    pub(super) depth: T,
    pub(super) format: i32,
    pub(super) channels: u32,
    pub(super) flags: u32,
}

pub(super) const FLOAT: i32 = 0x20;

/// CUmemPoolProps, and the shorter CUmemAllocationProp: PINNED memory on a device. 88 bytes.
#[repr(C)]
pub(super) struct Properties {
    kind: i32,
    pub(super) handles: i32,
    location: [i32; 2],
    rest: [u64; 9],
}

impl Properties {
    pub(super) fn on(device: i32) -> Self {
        Self { kind: 1, handles: 0, location: [1, device], rest: [0; 9] }
    }

    /// Parses a location: `0` is device 0; `host`, `numa` and `numa-current` are host memory;
    /// `managed` is managed memory that prefers the host.
    pub(super) fn parse(words: &[&str]) -> Self {
        match words {
            ["host"] => Self { location: [2, 0], ..Self::on(0) },
            ["numa"] => Self { location: [3, 0], ..Self::on(0) },
            ["numa-current"] => Self { location: [4, 0], ..Self::on(0) },
            ["managed"] => Self { kind: 2, location: [2, 0], ..Self::on(0) },
            [device] => Self::on(number(device) as i32),
            other => panic!("no such place: {other:?}"),
        }
    }
}

pub(super) fn number(word: &str) -> u64 {
    word.parse().unwrap_or_else(|_| panic!("'{word}' is no number"))
}

/// CU_POINTER_ATTRIBUTE_MEMORY_TYPE, _IS_MANAGED, _HOST_POINTER.
const ATTRIBUTES: [i32; 3] = [2, 8, 4];

impl Guest {
    pub(crate) fn open(driver: &Path) -> Self {
        // SAFETY: the library runs no code when it is loaded.
        Self { lib: unsafe { Library::new(driver) }.expect("the driver's library") }
    }

    pub(crate) fn pointer(&self, name: &str) -> *const c_void {
        // SAFETY: only the address is taken.
        let found = unsafe { self.lib.get::<*const c_void>(name.as_bytes()) };
        *found.unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Executes a command.
    pub(crate) fn run(&self, words: &[&str]) -> String {
        match words {
            ["init"] => call!(self, "cuInit", 0 => u32).to_string(),
            ["start", device] => self.start(number(device) as i32),
            ["info", rest @ ..] => {
                self.info(if rest.is_empty() { "cuMemGetInfo_v2" } else { "cuMemGetInfo" })
            }
            ["total", device] => self.total(number(device) as i32),
            ["alloc", way, mib] => self.alloc(way, number(mib)),
            ["alloc", way, mib, from] => self.alloc_from(way, number(mib), number(from)),
            ["free", way, key] => self.free(way, number(key)).to_string(),
            ["pool", rest @ ..] => {
                let (mut pool, properties) = (UNTOUCHED, Properties::parse(rest));
                format_result(
                    call!(self, "cuMemPoolCreate", &mut pool => &mut u64, &properties => &Properties),
                    pool,
                )
            }
            ["context", way, device] => self.context(way, number(device) as i32),
            ["reserve", mib] => {
                let mut address = UNTOUCHED;
                let code = call!(self, "cuMemAddressReserve", &mut address => &mut u64,
                    number(mib) * MIB => u64, 0 => u64, 0 => u64, 0 => u64);
                format_result(code, address)
            }
            ["map", address, mib, handle] => call!(self, "cuMemMap", number(address) => u64,
                number(mib) * MIB => u64, 0 => u64, number(handle) => u64, 0 => u64)
            .to_string(),
            ["unmap", address, mib] => {
                call!(self, "cuMemUnmap", number(address) => u64, number(mib) * MIB => u64).to_string()
            }
            ["create-at", mib, place] => self.create_at(mib, place),
            ["padded", mib] => self.padded(number(mib)),
            ["external", mib] => self.external(number(mib)),
            ["attach"] => self.attach(),
            ["current-pool", rest @ ..] => self.current_pool(rest),
            ["tile", rest @ ..] => self.tile(rest),
            ["bind", rest @ ..] => self.bind(rest),
            ["retain", address] => {
                let mut handle = UNTOUCHED;
                format_result(
                    call!(self, "cuMemRetainAllocationHandle", &mut handle => &mut u64,
                        number(address) => u64),
                    handle,
                )
            }
            ["export", address] => self.export(number(address)),
            ["import", text] => self.import(text),
            ["shareable", rest @ ..] => self.shareable(rest),
            ["trim", pool] => call!(self, "cuMemPoolTrimTo", number(pool) => u64, 0 => u64).to_string(),
            ["graph", rest @ ..] => self.graph(rest),
            ["update", way, graph, rest @ ..] => self.update(way, number(graph), rest),
            ["nested", mib] => self.nested(number(mib)),
            ["replace-child", way, graph, node, mib] => {
                self.replace_child(way, number(graph), number(node), number(mib))
            }
            ["launch", graph] => call!(self, "cuGraphLaunch", number(graph) => u64, 0 => u64).to_string(),
            ["destroy-graph", graph] => call!(self, "cuGraphExecDestroy", number(graph) => u64).to_string(),
            ["trim-graphs", device] => {
                call!(self, "cuDeviceGraphMemTrim", number(device) as i32 => i32).to_string()
            }
            ["kernels", way, name, count] => self.launches(way, name, number(count)),
            ["capture", way, name, count] => self.captured(way, name, number(count)),
            ["graphs", way, graph, count] => self.graphs(way, number(graph), number(count)),
            ["attributes", address] => self.attributes(number(address)),
            ["threads"] => threads(),
            ["sweep"] => self.sweep(),
            ["wait", way] => self.waits(way).to_string(),
            ["synchronize"] => call!(self, "cuCtxSynchronize",).to_string(),
            ["fork", rest @ ..] => self.fork(rest),
            ["block-syscall", "openat2"] => block_syscall(libc::SYS_openat2),
            ["during", rest @ ..] => self.during(rest),
            ["sleep", milliseconds] => {
                std::thread::sleep(std::time::Duration::from_millis(number(milliseconds)));
                "ok".into()
            }
            other => panic!("unknown command: {other:?}"),
        }
    }

    fn start(&self, device: i32) -> String {
        let mut context = UNTOUCHED;
        let codes = [
            call!(self, "cuInit", 0 => u32),
            call!(self, "cuDevicePrimaryCtxRetain", &mut context => &mut u64, device => i32),
            call!(self, "cuCtxSetCurrent", context => u64),
        ];
        if codes == [0; 3] { "ok".into() } else { format!("errors {codes:?}") }
    }

    /// Free and total, in MiB.
    fn info(&self, name: &str) -> String {
        let (mut free, mut total) = (0u64, 0u64);
        match call!(self, name, &mut free => &mut u64, &mut total => &mut u64) {
            0 => format!("{} {}", free / MIB, total / MIB),
            code => format!("error {code}"),
        }
    }

    /// The total of both versions of the function, in MiB; the first has 32 bits.
    fn total(&self, device: i32) -> String {
        let (mut first, mut second) = (0u32, 0u64);
        let codes = [
            call!(self, "cuDeviceTotalMem", &mut first => &mut u32, device => i32),
            call!(self, "cuDeviceTotalMem_v2", &mut second => &mut u64, device => i32),
        ];
        if codes == [0; 2] {
            format!("{} {}", u64::from(first) / MIB, second / MIB)
        } else {
            format!("errors {codes:?}")
        }
    }

    fn alloc(&self, way: &str, mib: u64) -> String {
        let bytes = mib * MIB;
        let mut key = UNTOUCHED;
        let mut short = UNTOUCHED as u32;
        let (mut pitch, mut short_pitch) = (0u64, 0u32);
        let code = match way {
            "v1" => call!(self, "cuMemAlloc", &mut short => &mut u32, bytes as u32 => u32),
            "v2" => call!(self, "cuMemAlloc_v2", &mut key => &mut u64, bytes => u64),
            "pitch" => {
                call!(self, "cuMemAllocPitch_v2", &mut key => &mut u64, &mut pitch => &mut u64, 4096 => u64,
                bytes / 4096 => u64, 16 => u32)
            }
            "pitch-v1" => {
                call!(self, "cuMemAllocPitch", &mut short => &mut u32, &mut short_pitch => &mut u32,
                4096 => u32, (bytes / 4096) as u32 => u32, 16 => u32)
            }
            "managed" => call!(self, "cuMemAllocManaged", &mut key => &mut u64, bytes => u64, 1 => u32),
            "async" => call!(self, "cuMemAllocAsync", &mut key => &mut u64, bytes => u64, 0 => u64),
            "async-ptsz" => call!(self, "cuMemAllocAsync_ptsz", &mut key => &mut u64, bytes => u64, 0 => u64),
            "create" => {
                let properties = Properties::on(0);
                call!(self, "cuMemCreate", &mut key => &mut u64, bytes => u64,
                    &properties => &Properties, 0 => u64)
            }
            "array" => {
                // Rows of 1024 elements of 16 bytes.
                let shape = Array::<u64> { width: 1024, height: bytes / 16384, format: FLOAT, channels: 4 };
                call!(self, "cuArrayCreate_v2", &mut key => &mut u64, &shape => &Array<u64>)
            }
            "array-v1" => {
                let shape =
                    Array::<u32> { width: 1024, height: (bytes / 16384) as u32, format: FLOAT, channels: 4 };
                call!(self, "cuArrayCreate", &mut key => &mut u64, &shape => &Array<u32>)
            }
            "array3d" | "mipmap" => {
                let shape = Array3::<u64> {
                    width: 256,
                    height: 256,
                    depth: bytes / (256 * 256 * 16),
                    format: FLOAT,
                    channels: 4,
                    flags: 0,
                };
                match way {
                    "mipmap" => call!(self, "cuMipmappedArrayCreate", &mut key => &mut u64,
                        &shape => &Array3<u64>, 1 => u32),
                    _ => call!(self, "cuArray3DCreate_v2", &mut key => &mut u64, &shape => &Array3<u64>),
                }
            }
            "array3d-v1" => {
                let shape = Array3::<u32> {
                    width: 256,
                    height: 256,
                    depth: (bytes / (256 * 256 * 16)) as u32,
                    format: FLOAT,
                    channels: 4,
                    flags: 0,
                };
                call!(self, "cuArray3DCreate", &mut key => &mut u64, &shape => &Array3<u32>)
            }
            "sparse" => self.sparse(&mut key),
            "host" => call!(self, "cuMemHostAlloc", &mut key => &mut u64, bytes => u64, 0 => u32),
            "proc" => {
                let function = self.proc("cuMemAlloc", 12000, 0);
                // SAFETY: the signature of the variant of CUDA 3.2 and later.
                let function: extern "C" fn(&mut u64, u64) -> i32 = unsafe { std::mem::transmute(function) };
                function(&mut key, bytes)
            }
            "dlmopen" => self.alloc_via_dlmopen(bytes, &mut key),
            other => panic!("no way to allocate: {other}"),
        };
        if way.ends_with("v1") && short != UNTOUCHED as u32 && code == 0 && !way.starts_with("array") {
            key = u64::from(short);
        } else if code != 0 && short != UNTOUCHED as u32 {
            return format!("error {code} touched");
        }
        format_result(code, key)
    }

    /// Allocates through a copy of the driver's library in its own namespace.
    fn alloc_via_dlmopen(&self, bytes: u64, key: &mut u64) -> i32 {
        let path =
            super::program::driver().expect("set in a container").into_os_string().into_encoded_bytes();
        let path = CString::new(path).expect("no NUL");
        // SAFETY: C strings, and the signatures of the header.
        unsafe {
            let handle = libc::dlmopen(libc::LM_ID_NEWLM, path.as_ptr(), libc::RTLD_NOW);
            assert!(!handle.is_null(), "dlmopen");
            let function = libc::dlsym(handle, c"cuMemAlloc_v2".as_ptr());
            let function: extern "C" fn(&mut u64, u64) -> i32 = std::mem::transmute(function);
            function(key, bytes)
        }
    }

    pub(crate) fn proc(&self, name: &str, version: i32, flags: u64) -> *const c_void {
        let name = CString::new(name).expect("no NUL");
        let (mut out, mut status) = (std::ptr::null(), 0);
        call!(self, "cuGetProcAddress_v2", name.as_ptr() => *const c_char, &mut out => &mut *const c_void,
            version => i32, flags => u64, &mut status => &mut i32);
        out
    }

    /// Asks for every variant of every name. Prints for each which export the result is and which
    /// file it is in.
    fn sweep(&self) -> String {
        let exports = super::listed("cuda.txt");
        let lines: Vec<Vec<&str>> = exports.iter().map(|line| line.split(' ').collect()).collect();
        let mut by_address = std::collections::BTreeMap::new();
        for line in &lines {
            // SAFETY: only the address is taken.
            if let Ok(found) = unsafe { self.lib.get::<*const c_void>(line[3].as_bytes()) } {
                by_address.insert(*found as usize, line[3]);
            }
        }
        let mut format_result = Vec::new();
        for line in &lines {
            let least: i32 = line[1].parse().expect("a version");
            for version in [least - 10, least, least + 10, 12090, 13050] {
                for flags in 0..3 {
                    let found = self.proc(line[0], version, flags);
                    let export = by_address.get(&(found as usize)).copied().unwrap_or("none");
                    format_result.push(format!("{}@{version}/{flags}={export}@{}", line[0], file_of(found)));
                }
            }
        }
        format_result.join(" ")
    }

    /// Allocates from a pool.
    fn alloc_from(&self, way: &str, mib: u64, from: u64) -> String {
        let mut key = UNTOUCHED;
        let name = match way {
            "pool" => "cuMemAllocFromPoolAsync",
            "pool-ptsz" => "cuMemAllocFromPoolAsync_ptsz",
            other => panic!("no way to allocate from: {other}"),
        };
        format_result(call!(self, name, &mut key => &mut u64, mib * MIB => u64, from => u64, 0 => u64), key)
    }

    fn free(&self, way: &str, key: u64) -> i32 {
        match way {
            "v1" => call!(self, "cuMemFree", key as u32 => u32),
            "v2" => call!(self, "cuMemFree_v2", key => u64),
            "async" => call!(self, "cuMemFreeAsync", key => u64, 0 => u64),
            "async-ptsz" => call!(self, "cuMemFreeAsync_ptsz", key => u64, 0 => u64),
            "release" => call!(self, "cuMemRelease", key => u64),
            "array" => call!(self, "cuArrayDestroy", key => u64),
            "mipmap" => call!(self, "cuMipmappedArrayDestroy", key => u64),
            "pool" => call!(self, "cuMemPoolDestroy", key => u64),
            "context" => call!(self, "cuCtxDestroy_v2", key => u64),
            "context-v1" => call!(self, "cuCtxDestroy", key => u64),
            "green" => call!(self, "cuGreenCtxDestroy", key => u64),
            "detach" => call!(self, "cuCtxDetach", key => u64),
            "primary" => call!(self, "cuDevicePrimaryCtxRelease_v2", key as i32 => i32),
            "primary-v1" => call!(self, "cuDevicePrimaryCtxRelease", key as i32 => i32),
            "reset" => call!(self, "cuDevicePrimaryCtxReset_v2", key as i32 => i32),
            "reset-v1" => call!(self, "cuDevicePrimaryCtxReset", key as i32 => i32),
            "import" => call!(self, "cuIpcCloseMemHandle", key => u64),
            "host" => call!(self, "cuMemFreeHost", key => u64),
            other => panic!("no way to free: {other}"),
        }
    }

    fn context(&self, way: &str, device: i32) -> String {
        let mut context = UNTOUCHED;
        let none = std::ptr::null::<c_void>();
        let code = match way {
            "v1" => call!(self, "cuCtxCreate", &mut context => &mut u64, 0 => u32, device => i32),
            "v2" => call!(self, "cuCtxCreate_v2", &mut context => &mut u64, 0 => u32, device => i32),
            "v3" => call!(self, "cuCtxCreate_v3", &mut context => &mut u64, none => *const c_void, 0 => i32,
                0 => u32, device => i32),
            "v4" => call!(self, "cuCtxCreate_v4", &mut context => &mut u64, none => *const c_void, 0 => u32,
                device => i32),
            "gl" => call!(self, "cuGLCtxCreate_v2", &mut context => &mut u64, 0 => u32, device => i32),
            "gl-v1" => call!(self, "cuGLCtxCreate", &mut context => &mut u64, 0 => u32, device => i32),
            "vdpau" => call!(self, "cuVDPAUCtxCreate_v2", &mut context => &mut u64, 0 => u32, device => i32,
                1 => u32, 0 => usize),
            "vdpau-v1" => call!(self, "cuVDPAUCtxCreate", &mut context => &mut u64, 0 => u32, device => i32,
                1 => u32, 0 => usize),
            "green" => call!(self, "cuGreenCtxCreate", &mut context => &mut u64, 0 => usize, device => i32,
                1 => u32),
            "primary" => call!(self, "cuDevicePrimaryCtxRetain", &mut context => &mut u64, device => i32),
            other => panic!("no way to make a context: {other}"),
        };
        format_result(code, context)
    }

    /// Executes the command before the comma in a thread, and the one after it 300 ms later.
    fn during(&self, rest: &[&str]) -> String {
        let (first, second) = rest.split_at(rest.iter().position(|word| *word == ",").expect("a comma"));
        std::thread::scope(|scope| {
            let first = scope.spawn(|| self.run(first));
            std::thread::sleep(std::time::Duration::from_millis(300));
            let second = self.run(&second[1..]);
            format!("{}, {second}", first.join().expect("no panic"))
        })
    }

    /// Executes the commands in a forked child and returns its answers.
    fn fork(&self, rest: &[&str]) -> String {
        let mut ends = [0; 2];
        // SAFETY: a pipe of this process; the child has only this thread and exits without
        // destructors.
        unsafe {
            assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
            if libc::fork() == 0 {
                let answers: Vec<String> =
                    rest.split(|word| *word == ",").map(|words| self.run(words)).collect();
                let text = answers.join(", ");
                libc::write(ends[1], text.as_ptr().cast(), text.len());
                libc::_exit(0);
            }
            libc::close(ends[1]);
            let mut text = [0u8; 4096];
            let mut filled = 0;
            loop {
                match libc::read(ends[0], text[filled..].as_mut_ptr().cast(), text.len() - filled) {
                    0 => break,
                    read => filled += usize::try_from(read).expect("the pipe is open"),
                }
            }
            libc::close(ends[0]);
            libc::wait(std::ptr::null_mut());
            String::from_utf8_lossy(&text[..filled]).into_owned()
        }
    }

    /// The memory type, whether it is managed, and the host address: queried one by one, and all at
    /// once.
    pub(crate) fn attributes(&self, address: u64) -> String {
        let one = ATTRIBUTES.map(|which| {
            let mut out = 0u64;
            let code =
                call!(self, "cuPointerGetAttribute", &mut out => &mut u64, which => i32, address => u64);
            if code == 0 { format_address(out, address) } else { format!("error {code}") }
        });
        let mut all = [0u64; 3];
        let [first, second, third] = &mut all;
        let places: [*mut u64; 3] = [first, second, third];
        let code = call!(self, "cuPointerGetAttributes", 3 => u32, ATTRIBUTES.as_ptr() => *const i32,
            places.as_ptr() => *const *mut u64, address => u64);
        let all = all.map(|out| format_address(out, address));
        format!("{} | {code} {}", one.join(" "), all.join(" "))
    }
}

/// The file that contains an address.
fn file_of(address: *const c_void) -> String {
    // SAFETY: the loader writes the structure, and its names live as long as their objects.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if address.is_null() || libc::dladdr(address, &mut info) == 0 || info.dli_fname.is_null() {
            return "none".into();
        }
        let path = std::ffi::CStr::from_ptr(info.dli_fname).to_string_lossy().into_owned();
        path.rsplit('/').next().unwrap_or_default().to_owned()
    }
}

/// Formats a result: `ok KEY` or `error CODE`, and whether a failed call has changed its output.
pub(super) fn format_result(code: i32, key: u64) -> String {
    match (code, key) {
        (0, key) => format!("ok {key}"),
        (code, UNTOUCHED) => format!("error {code}"),
        (code, _) => format!("error {code} touched"),
    }
}

/// Makes a system call fail with ENOSYS from now on.
fn block_syscall(call: libc::c_long) -> String {
    let [load, equal, answer] =
        [libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, libc::BPF_JMP | libc::BPF_JEQ, libc::BPF_RET];
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut steps = [
        step(load, 0, 0, 0),
        step(equal, 0, 1, call as u32),
        step(answer, 0, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
        step(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: the kernel reads the program and validates it.
    let failed = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
            || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) != 0
    };
    if failed { std::io::Error::last_os_error().to_string() } else { "ok".into() }
}

fn format_address(out: u64, address: u64) -> String {
    if out == address { "itself".to_owned() } else { out.to_string() }
}

/// The number of threads of the process, and of those with all signals blocked.
fn threads() -> String {
    let tasks = std::fs::read_dir("/proc/self/task").expect("a process");
    let (mut all, mut deaf) = (0, 0);
    for task in tasks {
        let status =
            std::fs::read_to_string(task.expect("a thread").path().join("status")).unwrap_or_default();
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap_or_default().trim();
        let mask = u64::from_str_radix(blocked, 16).unwrap_or(0);
        all += 1;
        // KILL and STOP cannot be blocked, and libc reserves two signals.
        let kept = 1 << 8 | 1 << 18 | 3 << 31;
        deaf += u32::from(mask | kept == u64::MAX);
    }
    format!("{all} {deaf}")
}
