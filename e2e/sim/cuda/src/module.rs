//! Modules, libraries and their functions. The name of a kernel gives its run time.
//!
//! A module's image can be anything. For PTX, its entries are the functions, and its global
//! variables take device memory; otherwise functions of any name exist. `work_20us` runs for 20
//! microseconds (`ns` and `ms` work too). `spin...` runs for the nanoseconds in its first
//! parameter, a 64-bit number, so that PTX which watches the clock behaves the same on a real GPU.
//! `meet...` waits for a kernel of the same process on another GPU, see [`Meeting`]. Other names run
//! for [`DEFAULT_TIME_NS`].

use std::ffi::{CStr, CString, c_char};
use std::sync::{Arc, Mutex, PoisonError};

use divvy_sim::GpuProcess;
use divvy_sim::usage::Meeting;

use crate::argument::{In, Out, Text};
use crate::code::{Code, Outcome};
use crate::frame::entry;
use crate::handle::Handle as AnyHandle;
use crate::handle::Object;
use crate::objects::{Child, Payer, Process, current_context};

/// Run time of kernels whose name gives none, in ns.
const DEFAULT_TIME_NS: u64 = 10_000;
/// Device memory of a module's code, in bytes, without its variables.
pub(crate) const MODULE_BYTES: u64 = 2 << 20;

/// `CUmodule` and `CUlibrary`.
pub(crate) type Handle = AnyHandle<Module>;

/// A module. A library is a module that is in no context until it is used.
pub(crate) struct Module {
    gpu_process: Arc<GpuProcess>,
    /// The names of its functions, if they are known.
    entries: Option<Vec<String>>,
    /// Names, addresses and sizes of its variables.
    globals: Vec<(String, u64, u64)>,
    /// The functions that were looked up.
    functions: Mutex<Vec<AnyHandle<Function>>>,
    kernels: Mutex<Vec<AnyHandle<Function>>>,
}

impl Object for Module {
    const MAGIC: u64 = 0x6d6f_6475_5f6c_6976;
}

/// A function of a module, or a kernel of a library: both can be launched.
pub(crate) struct Function {
    name: CString,
    time: Time,
    module: Handle,
}

impl Object for Function {
    const MAGIC: u64 = 0x6675_6e63_5f6c_6976;
}

/// The run time of a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Time {
    /// Nanoseconds.
    Fixed(u64),
    FirstParameter,
    /// The parameters are the addresses of its own and of the peer's word, the number of the round,
    /// and the nanoseconds that it runs after the meeting.
    Meeting,
}

impl Time {
    /// The time that the name gives.
    fn of(name: &str) -> Self {
        if name.starts_with("spin") {
            return Self::FirstParameter;
        }
        if name.starts_with("meet") {
            return Self::Meeting;
        }
        let word = name.rsplit('_').next().unwrap_or(name);
        let digits = word.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = word.split_at(digits);
        let unit = match unit {
            "ns" => 1,
            "us" => 1_000,
            "ms" => 1_000_000,
            _ => return Self::Fixed(DEFAULT_TIME_NS),
        };
        Self::Fixed(
            number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit)).unwrap_or(DEFAULT_TIME_NS),
        )
    }
}

impl Function {
    /// The nanoseconds that a launch with these parameters runs.
    #[inline]
    pub(crate) fn time(&self, parameters: In<In<u64>>) -> Outcome<u64> {
        match self.time {
            Time::Fixed(time) => Ok(time),
            Time::FirstParameter => parameters.get()?.get(),
            Time::Meeting => parameters.at(3)?.get(),
        }
    }

    /// The kernel that a launch with these parameters waits for.
    #[inline]
    pub(crate) fn meeting(&self, parameters: In<In<u64>>) -> Outcome<Option<Meeting>> {
        if self.time != Time::Meeting {
            return Ok(None);
        }
        let at = |index| parameters.at(index)?.get();
        Ok(Some(Meeting { own: at(0)?, peer: at(1)?, round: at(2)? }))
    }
}

impl Module {
    fn load(process: &Process, image: &[u8]) -> Outcome<Handle> {
        let context = current_context()?;
        let text = std::str::from_utf8(image).ok().filter(|text| text.contains(".version"));
        let gpu_process = Arc::clone(&context.gpu_process);
        if !gpu_process.charge(MODULE_BYTES) {
            return Err(Code::OutOfMemory);
        }
        let mut globals = Vec::new();
        for (name, size) in text.map(globals_of).unwrap_or_default() {
            match process.memory.allocate(context, size) {
                Ok(address) => globals.push((name, address, size)),
                Err(code) => {
                    gpu_process.refund(MODULE_BYTES);
                    free(process, &globals);
                    return Err(code);
                }
            }
        }
        let entries = text.map(entries_of);
        let (functions, kernels) = (Mutex::default(), Mutex::default());
        let module = Handle::new(Self { gpu_process, entries, globals, functions, kernels });
        context.modules().push(Child::new(module, |process, module| {
            // The program may have unloaded it already.
            let _ = unload(process, module);
        }));
        Ok(module)
    }

    fn function(handle: Handle, name: &str, kernel: bool) -> Outcome<AnyHandle<Function>> {
        let module = handle.get()?;
        if module.entries.as_ref().is_some_and(|entries| !entries.iter().any(|entry| entry == name)) {
            return Err(Code::NotFound);
        }
        let known = if kernel { &module.kernels } else { &module.functions };
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |function: &&AnyHandle<Function>| {
            function.get().is_ok_and(|function| function.name.to_str() == Ok(name))
        };
        if let Some(function) = known.iter().find(same) {
            return Ok(*function);
        }
        let c_name = CString::new(name).map_err(|_| Code::InvalidValue)?;
        let function = AnyHandle::new(Function { name: c_name, time: Time::of(name), module: handle });
        known.push(function);
        Ok(function)
    }

    fn global(&self, name: &str) -> Outcome<(u64, u64)> {
        let found = self.globals.iter().find(|(known, ..)| known == name);
        found.map(|(_, address, size)| (*address, *size)).ok_or(Code::NotFound)
    }
}

/// Unloads a module, unless its context has already destroyed it.
pub(crate) fn unload(process: &Process, module: Handle) -> Outcome {
    let module = module.end()?;
    for list in [&module.functions, &module.kernels] {
        for function in list.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // Only its module destroys it.
            let _ = function.end();
        }
    }
    free(process, &module.globals);
    module.gpu_process.refund(MODULE_BYTES);
    Ok(())
}

fn free(process: &Process, globals: &[(String, u64, u64)]) {
    for (_, address, _) in globals {
        // A faulty program may have freed them.
        let _ = process.memory.free(*address, |block| matches!(block.payer, Payer::GpuProcess(_)));
    }
}

/// The names behind `.entry` in PTX.
fn entries_of(text: &str) -> Vec<String> {
    let name = |rest: &str| {
        let end = rest
            .find(|letter: char| !(letter.is_alphanumeric() || matches!(letter, '_' | '$')))
            .unwrap_or(rest.len());
        rest[..end].to_owned()
    };
    text.split(".entry").skip(1).map(|rest| name(rest.trim_start())).collect()
}

/// Names and sizes of variables such as `.global .align 4 .b8 table[4096];` in PTX.
fn globals_of(text: &str) -> Vec<(String, u64)> {
    let declared = text.lines().filter_map(|line| {
        let line = line.split("//").next()?.trim();
        let begin =
            line.find(".global ").filter(|_| line.starts_with(".visible") || line.starts_with(".global"))?;
        let declaration = line[begin..].split([';', '=']).next()?;
        let unit = declaration.split_whitespace().find_map(|word| {
            let bits = word.strip_prefix(['.']).filter(|word| word.starts_with(['b', 'u', 's', 'f']))?;
            bits.get(1..)?.parse::<u64>().ok()
        })? / 8;
        let variable = declaration.split_whitespace().last()?;
        let (name, length) = variable.split_once('[').unwrap_or((variable, "1]"));
        let length = length.trim_end_matches(']').parse::<u64>().ok()?;
        Some((name.to_owned(), unit.checked_mul(length)?))
    });
    declared.filter(|(_, size)| *size > 0).collect()
}

/// The image as text, which must be PTX. The content of other images is not read.
fn image_at(image: In<u8>) -> Outcome<&'static [u8]> {
    // ELF and fat binaries have zeros near the beginning.
    let first = image.get()?;
    if matches!(first, 0x7f | 0x50 | 0xb1) {
        return Ok(&[]);
    }
    image.c_bytes()
}

fn load_file(process: &Process, path: Text) -> Outcome<Handle> {
    let image = std::fs::read(path.get()?).map_err(|_| Code::FileNotFound)?;
    Module::load(process, &image)
}

/// The `CU_FUNC_ATTRIBUTE_*` of a kernel with small requirements.
const fn attribute(which: u32) -> Option<i32> {
    match which {
        0 => Some(1024),
        1..=3 | 7 => Some(0),
        4 => Some(32),
        5 | 6 => Some(90),
        8 => Some(48 << 10),
        9 => Some(-1),
        10..=15 => Some(0),
        _ => None,
    }
}

entry! {
    fn cuModuleLoad(process; module: Out<Handle>, path: Text) {
        module.check()?;
        module.set(load_file(process, path)?)
    }

    fn cuModuleLoadData(process; module: Out<Handle>, image: In<u8>) {
        module.check()?;
        module.set(Module::load(process, image_at(image)?)?)
    }

    fn cuModuleLoadDataEx(
        process; module: Out<Handle>, image: In<u8>, _count: u32, _options: In<u32>, _values: In<usize>,
    ) {
        module.check()?;
        module.set(Module::load(process, image_at(image)?)?)
    }

    fn cuModuleLoadFatBinary(process; module: Out<Handle>, _image: In<u8>) {
        module.check()?;
        module.set(Module::load(process, &[])?)
    }

    fn cuModuleUnload(process; module: Handle) {
        unload(process, module)
    }

    fn cuModuleGetFunction(_process; function: Out<AnyHandle<Function>>, module: Handle, name: Text) {
        function.check()?;
        function.set(Module::function(module, name.get()?, false)?)
    }

    fn cuModuleGetGlobal_v2(_process; address: Out<u64>, size: Out<u64>, module: Handle, name: Text) {
        let (found, bytes) = module.get()?.global(name.get()?)?;
        address.offer(found);
        size.offer(bytes);
        Ok(())
    }

    /// Lazy, the default since CUDA 12.2.
    fn cuModuleGetLoadingMode(_process; mode: Out<u32>) {
        mode.set(2)
    }

    fn cuLibraryLoadData(
        process; library: Out<Handle>, image: In<u8>, _options: In<u32>, _values: In<usize>, _count: u32,
        _library_options: In<u32>, _library_values: In<usize>, _library_count: u32,
    ) {
        library.check()?;
        library.set(Module::load(process, image_at(image)?)?)
    }

    fn cuLibraryLoadFromFile(
        process; library: Out<Handle>, path: Text, _options: In<u32>, _values: In<usize>, _count: u32,
        _library_options: In<u32>, _library_values: In<usize>, _library_count: u32,
    ) {
        library.check()?;
        library.set(load_file(process, path)?)
    }

    fn cuLibraryUnload(process; library: Handle) {
        unload(process, library)
    }

    fn cuLibraryGetKernel(_process; kernel: Out<AnyHandle<Function>>, library: Handle, name: Text) {
        kernel.check()?;
        kernel.set(Module::function(library, name.get()?, true)?)
    }

    fn cuLibraryGetModule(_process; module: Out<Handle>, library: Handle) {
        library.get()?;
        module.set(library)
    }

    fn cuLibraryGetGlobal(_process; address: Out<u64>, size: Out<u64>, library: Handle, name: Text) {
        let (found, bytes) = library.get()?.global(name.get()?)?;
        address.offer(found);
        size.offer(bytes);
        Ok(())
    }

    fn cuKernelGetFunction(_process; function: Out<AnyHandle<Function>>, kernel: AnyHandle<Function>) {
        function.check()?;
        let kernel = kernel.get()?;
        let name = kernel.name.to_str().map_err(|_| Code::InvalidValue)?;
        function.set(Module::function(kernel.module, name, false)?)
    }

    fn cuKernelGetLibrary(_process; library: Out<Handle>, kernel: AnyHandle<Function>) {
        library.set(kernel.get()?.module)
    }

    fn cuKernelGetName(_process; name: Out<*const c_char>, kernel: AnyHandle<Function>) {
        name.set(CStr::as_ptr(&kernel.get()?.name))
    }

    fn cuKernelGetAttribute(
        _process; value: Out<i32>, which: u32, kernel: AnyHandle<Function>, _device: i32,
    ) {
        kernel.get()?;
        value.set(attribute(which).ok_or(Code::InvalidValue)?)
    }

    fn cuKernelSetAttribute(_process; _which: u32, _value: i32, kernel: AnyHandle<Function>, _device: i32) {
        kernel.get().map(drop)
    }

    fn cuFuncGetModule(_process; module: Out<Handle>, function: AnyHandle<Function>) {
        module.set(function.get()?.module)
    }

    fn cuFuncGetName(_process; name: Out<*const c_char>, function: AnyHandle<Function>) {
        name.set(CStr::as_ptr(&function.get()?.name))
    }

    fn cuFuncGetAttribute(_process; value: Out<i32>, which: u32, function: AnyHandle<Function>) {
        function.get()?;
        value.set(attribute(which).ok_or(Code::InvalidValue)?)
    }

    fn cuFuncSetAttribute(_process; function: AnyHandle<Function>, _which: u32, _value: i32) {
        function.get().map(drop)
    }

    fn cuFuncSetCacheConfig(_process; function: AnyHandle<Function>, _config: u32) {
        function.get().map(drop)
    }

    fn cuFuncIsLoaded(_process; state: Out<u32>, function: AnyHandle<Function>) {
        function.get()?;
        state.set(1)
    }

    fn cuFuncLoad(_process; function: AnyHandle<Function>) {
        function.get().map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_name_gives_run_time() {
        for (name, time) in [
            ("work_20us", Time::Fixed(20_000)),
            ("a_b_7ns", Time::Fixed(7)),
            ("5ms", Time::Fixed(5_000_000)),
            ("spin", Time::FirstParameter),
            ("spin_until", Time::FirstParameter),
            ("meet", Time::Meeting),
            ("sgemm", Time::Fixed(DEFAULT_TIME_NS)),
            ("work_us", Time::Fixed(DEFAULT_TIME_NS)),
            ("_99999999999999999999ms", Time::Fixed(DEFAULT_TIME_NS)),
        ] {
            assert_eq!(Time::of(name), time, "{name}");
        }
    }

    #[test]
    fn ptx_entries_and_globals_are_found() {
        let text = ".version 7.0\n.target sm_50\n.visible .global .align 4 .b8 table[4096];\n\
                    .global .u64 count = 3;\n\
                    .visible .entry spin(.param .u64 t)\n{ ld.global.u64 %r1, [count]; }\n\
                    .entry\n\tother (\n)";
        assert_eq!(entries_of(text), ["spin", "other"]);
        assert_eq!(globals_of(text), [("table".to_owned(), 4096), ("count".to_owned(), 8)]);
    }
}
