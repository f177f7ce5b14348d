//! A small CUDA program, and its handle in the demo. It uses the driver's API and knows nothing of
//! shares, as applications.
//!
//! The program reads a command per line and answers with a line. `alloc MIB` allocates memory.
//! `work` starts kernels on a thread, and `count` prints the number of launched kernels.
#![allow(unsafe_code, reason = "the CUDA driver is called through C")]

use anyhow::{Context, Result, bail};
use libloading::Library;
use std::ffi::{CStr, c_char, c_uint, c_void};
use std::process::{ExitCode, Stdio};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// Names of the program: its links begin so. The simulator shows the name of the link.
pub(crate) const PREFIX: &str = "cuda-";
/// Variable with the path of the driver's library.
pub(crate) const LIBRARY: &str = "DIVVY_DEMO_LIBCUDA";
/// A kernel's name is its run time on the simulated GPU.
const KERNEL: &CStr = c"work_5ms";
const PTX: &CStr =
    c".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry work_5ms()\n{\n ret;\n}\n";
/// Kernels that are queued before the program waits for them.
const QUEUE: usize = 8;

type Status = c_uint;

/// The driver's functions, by their C signatures.
struct Driver {
    library: Library,
}

/// Calls a function of the driver and turns its status into a result.
macro_rules! call {
    ($driver:expr, $name:literal, $($argument:expr => $kind:ty),* $(,)?) => {{
        // SAFETY: the signature is that of the CUDA driver API, and pointers live for the call.
        let status = unsafe {
            let function = $driver.library.get::<unsafe extern "C" fn($($kind),*) -> Status>($name);
            function.map(|function| function($($argument),*))
        };
        match status {
            Ok(0) => Ok(()),
            Ok(status) => Err($driver.name(status)),
            Err(missing) => Err(missing.to_string()),
        }
    }};
}

impl Driver {
    fn open() -> Result<Self, String> {
        let path = std::env::var_os(LIBRARY).unwrap_or_else(|| "libcuda.so.1".into());
        // SAFETY: the driver's library runs no code when it is loaded.
        let library = unsafe { Library::new(path) }.map_err(|cause| cause.to_string())?;
        Ok(Self { library })
    }

    fn name(&self, status: Status) -> String {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: as in `call!`. The driver returns a static string.
        unsafe {
            type Names = unsafe extern "C" fn(Status, *mut *const c_char) -> Status;
            match self.library.get::<Names>(b"cuGetErrorName\0") {
                Ok(names) if names(status, &raw mut name) == 0 && !name.is_null() => {
                    CStr::from_ptr(name).to_string_lossy().into_owned()
                }
                _ => format!("CUDA error {status}"),
            }
        }
    }

    /// Makes the primary context of the first GPU current in this thread.
    fn start(&self) -> Result<(), String> {
        let mut context: *mut c_void = null_mut();
        call!(self, b"cuInit\0", 0 => c_uint)?;
        call!(self, b"cuDevicePrimaryCtxRetain\0", &raw mut context => *mut *mut c_void, 0 => i32)?;
        call!(self, b"cuCtxSetCurrent\0", context => *mut c_void)
    }

    fn allocate(&self, mib: usize) -> Result<(), String> {
        let mut address = 0_u64;
        call!(self, b"cuMemAlloc_v2\0", &raw mut address => *mut u64, mib << 20 => usize)
    }

    /// Launches kernels until one fails.
    fn work(&self, count: &AtomicU64) -> Result<(), String> {
        self.start()?;
        let (mut module, mut function): (*mut c_void, *mut c_void) = (null_mut(), null_mut());
        call!(self, b"cuModuleLoadData\0", &raw mut module => *mut *mut c_void,
            PTX.as_ptr().cast() => *const c_void)?;
        call!(self, b"cuModuleGetFunction\0", &raw mut function => *mut *mut c_void,
            module => *mut c_void, KERNEL.as_ptr() => *const c_char)?;
        loop {
            for _ in 0..QUEUE {
                call!(self, b"cuLaunchKernel\0", function => *mut c_void,
                    1000 => c_uint, 1 => c_uint, 1 => c_uint, 128 => c_uint, 1 => c_uint, 1 => c_uint,
                    0 => c_uint, null_mut() => *mut c_void, null_mut() => *mut *mut c_void,
                    null_mut() => *mut *mut c_void)?;
                count.fetch_add(1, Ordering::Relaxed);
            }
            call!(self, b"cuCtxSynchronize\0",)?;
        }
    }
}

/// The program.
pub(crate) fn main() -> ExitCode {
    let driver = match Driver::open().and_then(|driver| driver.start().map(|()| driver)) {
        Ok(driver) => Arc::new(driver),
        Err(cause) => {
            eprintln!("{cause}");
            return ExitCode::FAILURE;
        }
    };
    println!("ready");
    let count = Arc::new(AtomicU64::new(0));
    for line in std::io::stdin().lines() {
        let Ok(line) = line else { break };
        let answer = match line.split_once(' ').unwrap_or((&line, "")) {
            ("alloc", mib) => match mib.parse().map_err(|_| "no number".to_owned()) {
                Ok(mib) => driver.allocate(mib).map_or_else(|cause| cause, |()| "ok".to_owned()),
                Err(cause) => cause,
            },
            ("work", _) => {
                let (driver, count) = (Arc::clone(&driver), Arc::clone(&count));
                std::thread::spawn(move || {
                    if let Err(cause) = driver.work(&count) {
                        eprintln!("{cause}");
                        std::process::exit(1);
                    }
                });
                "ok".to_owned()
            }
            ("count", _) => count.load(Ordering::Relaxed).to_string(),
            (other, _) => format!("unknown command {other}"),
        };
        println!("{answer}");
    }
    ExitCode::SUCCESS
}

/// Limit for the start and for an answer. A throttled program answers at once, since its kernels run
/// on another thread.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// A running program. It is killed when dropped.
pub(crate) struct CudaProgram {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl CudaProgram {
    /// Starts the program by a command that executes it in a container.
    pub(crate) async fn start(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().context("cannot start a CUDA program")?;
        let input = child.stdin.take().context("a CUDA program without input")?;
        let output = BufReader::new(child.stdout.take().context("a CUDA program without output")?);
        let mut program = Self { child, input, output };
        match program.answer().await {
            Ok(ready) if ready == "ready" => Ok(program),
            Ok(other) => bail!("a CUDA program printed {other:?} at its start"),
            Err(error) => Err(error),
        }
    }

    /// Its process, as the GPU driver knows it.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Sends a command and returns the answer.
    pub(crate) async fn ask(&mut self, command: &str) -> Result<String> {
        self.input.write_all(format!("{command}\n").as_bytes()).await.context("a CUDA program has exited")?;
        self.answer().await
    }

    async fn answer(&mut self) -> Result<String> {
        let mut line = String::new();
        let read = tokio::time::timeout(ANSWER_TIMEOUT, self.output.read_line(&mut line)).await;
        let read =
            read.with_context(|| format!("a CUDA program gave no answer within {ANSWER_TIMEOUT:?}"))??;
        if read > 0 {
            return Ok(line.trim_end().to_owned());
        }
        let mut cause = String::new();
        if let Some(mut errors) = self.child.stderr.take() {
            errors.read_to_string(&mut cause).await?;
        }
        bail!("{}", cause.trim())
    }

    /// Kills the program and waits for its exit.
    pub(crate) async fn kill(mut self) -> Result<()> {
        Ok(self.child.kill().await?)
    }
}
