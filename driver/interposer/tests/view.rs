//! Values that NVML shows or denies in a container with a share, with the simulated library, and with
//! `nvidia-smi` on top of it.
//!
//! This test's program is also `nvidia-smi` in the simulated driver root, so it has its own `main`.
//! Values that `nvidia-smi` does not query are queried by this program in a container
//! ([`nvml_values`]).

#![allow(unsafe_code, reason = "NVML is called through C")]

mod common;

use common::container::{Container, Node, Share};
use common::guest::Guest;
use common::program::Program;
use divvy_pages::Policy;
use divvy_pages::policy::Compute;
use divvy_sim::state::{Process, ProcessKind};
use std::ffi::{CString, c_char};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

fn main() -> ExitCode {
    if let Some(code) = divvy_sim::command::multicall() {
        return code;
    }
    if common::container::answer() {
        return ExitCode::SUCCESS;
    }
    if let [_, word, library] = std::env::args().collect::<Vec<_>>().as_slice()
        && word == "nvml"
    {
        print_values(library);
        return ExitCode::SUCCESS;
    }
    if let [_, word, nvml, cuda, uuid] = std::env::args().collect::<Vec<_>>().as_slice()
        && word == "sessions"
    {
        print_sessions(nvml, cuda, uuid);
        return ExitCode::SUCCESS;
    }
    let tests: [(&str, fn()); 9] = [
        ("nvidia_smi_shows_the_share", nvidia_smi_shows_the_share),
        ("memory_of_other_shares_is_hidden", memory_of_other_shares_is_hidden),
        ("processes_of_other_shares_are_hidden", processes_of_other_shares_are_hidden),
        ("samples_of_other_shares_are_hidden", samples_of_other_shares_are_hidden),
        ("utilisation_covers_only_the_share", utilisation_covers_only_the_share),
        ("many_other_processes_are_hidden", many_other_processes_are_hidden),
        ("sessions_of_other_processes_are_hidden", sessions_of_other_processes_are_hidden),
        ("functions_that_change_a_device_are_denied", functions_that_change_a_device_are_denied),
        ("past_processes_are_not_reported", past_processes_are_not_reported),
    ];
    for (name, test) in tests {
        test();
        println!("test {name} ... ok");
    }
    ExitCode::SUCCESS
}

/// Runs `nvidia-smi` in a container with these shares: whether it succeeded, and its output.
fn smi(node: &Node, shares: &[common::container::Share], arguments: &str) -> (bool, String) {
    let container = node.container(shares);
    let mut command = container.command(&node.program("nvidia-smi"));
    let output = command.args(arguments.split_whitespace()).output().expect("nvidia-smi runs");
    (output.status.success(), String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}

const MEMORY: &str = "--query-gpu=memory.total,memory.used,memory.free --format=csv,noheader,nounits";

fn nvidia_smi_shows_the_share() {
    let node = Node::up("L4");
    let share = node.share("claim", "share", node.policy(0, 1000));
    let shares = [share];
    assert_eq!(smi(&node, &shares, MEMORY), (true, "1000, 0, 1000".to_owned()));
    let container = node.container(&shares);
    let mut program = container.started();
    assert!(program.ask("alloc v2 300").starts_with("ok "));
    assert_eq!(smi(&node, &shares, MEMORY), (true, "1000, 300, 700".to_owned()));
    let (shown, without) = (smi(&node, &shares, "").1, smi(&node, &[], "").1);
    assert!(shown.contains("300MiB /   1000MiB"), "{shown}");
    assert!(without.contains(" 23034MiB"), "{without}");
}

fn memory_of_other_shares_is_hidden() {
    let node = Node::up("L4");
    let one = [node.share("one", "share", node.policy(0, 1000))];
    let two = [node.share("two", "share", node.policy(0, 2000))];
    let container = node.container(&one);
    let mut program = container.started();
    assert!(program.ask("alloc v2 900").starts_with("ok "));
    assert_eq!(smi(&node, &two, MEMORY), (true, "2000, 0, 2000".to_owned()));
}

/// The pids in `nvidia-smi`'s process table: the word before the type, C.
fn pids(node: &Node, shares: &[common::container::Share]) -> Vec<String> {
    let (done, shown) = smi(node, shares, "");
    assert!(done, "{shown}");
    let rows = shown.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mut pids: Vec<String> = rows
        .filter_map(|row| row.windows(2).find(|pair| pair[1] == "C").map(|pair| pair[0].to_owned()))
        .collect();
    pids.sort_unstable();
    pids
}

fn processes_of_other_shares_are_hidden() {
    let node = Node::up("L4");
    let one = [node.share("one", "share", node.policy(0, 1000))];
    let two = [node.share("two", "share", node.policy(0, 2000))];
    let (first, second) = (node.container(&one), node.container(&two));
    let (mut first, mut second) = (first.started(), second.started());
    assert!(first.ask("alloc v2 100").starts_with("ok ") && second.ask("alloc v2 200").starts_with("ok "));
    let (first, second) = (first.pid().to_string(), second.pid().to_string());
    assert_eq!(pids(&node, &one), std::slice::from_ref(&first));
    assert_eq!(pids(&node, &two), std::slice::from_ref(&second));
    // The driver's own list has both processes.
    let mut both = [first, second];
    both.sort_unstable();
    assert_eq!(pids(&node, &[]), both);
}

fn functions_that_change_a_device_are_denied() {
    let node = Node::up("H100-SXM5-80GB");
    let share = [node.share("claim", "share", node.policy(0, 1000))];
    let (done, said) = smi(&node, &share, "-mig 1 -i 0");
    assert!(!done && said.contains("Insufficient Permissions"), "{said}");
    let (done, said) = smi(&node, &[], "-mig 1 -i 0");
    assert!(done, "without a share it is allowed: {said}");
}

/// `nvmlProcessUtilizationSample_t`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Sample {
    pid: u32,
    time: u64,
    busy: [u32; 4],
}

/// `nvmlProcessUtilizationInfo_v1_t`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct SampleInfo {
    time: u64,
    pid: u32,
    busy: [u32; 6],
}

/// `nvmlProcessesUtilizationInfo_v1_t`.
#[repr(C)]
struct SampleInfoList {
    version: u32,
    count: u32,
    since: u64,
    list: *mut SampleInfo,
}

/// In a container: queries values that `nvidia-smi` does not, and prints them, one per line.
fn print_values(library: &str) {
    // SAFETY: the simulated library, whose functions have these signatures; the buffers have the
    // given sizes.
    unsafe {
        let library = libloading::Library::new(library).expect("NVML");
        macro_rules! call {
            ($name:literal, $($argument:expr => $kind:ty),*) => {
                library.get::<extern "C" fn($($kind),*) -> i32>($name).expect("it is there")($($argument),*)
            };
        }
        let mut device = 0usize;
        assert_eq!(call!(b"nvmlInit_v2",), 0);
        assert_eq!(call!(b"nvmlDeviceGetHandleByIndex_v2", 0 => u32, &raw mut device => *mut usize), 0);
        let (mut samples, mut count) = ([Sample::default(); 100], 100);
        let answer = call!(b"nvmlDeviceGetProcessUtilization", device => usize,
            samples.as_mut_ptr() => *mut Sample, &raw mut count => *mut u32, 0 => u64);
        println!(
            "samples {answer} {:?}",
            samples[..count as usize].iter().map(|one| one.pid).collect::<Vec<_>>()
        );
        let mut infos = [SampleInfo::default(); 100];
        let version = size_of::<SampleInfoList>() as u32 | 1 << 24;
        let mut list = SampleInfoList { version, count: 100, since: 0, list: infos.as_mut_ptr() };
        let answer = call!(b"nvmlDeviceGetProcessesUtilizationInfo", device => usize,
            &raw mut list => *mut SampleInfoList);
        let pids: Vec<_> = infos[..list.count as usize].iter().map(|one| one.pid).collect();
        println!("infos {answer} {pids:?}");
        let (mut pids, mut count) = ([0u32; 100], 100);
        let answer = call!(b"nvmlDeviceGetAccountingPids", device => usize, &raw mut count => *mut u32,
            pids.as_mut_ptr() => *mut u32);
        println!("accounting {answer}");
        let mut rates = [u32::MAX; 2];
        let answer =
            call!(b"nvmlDeviceGetUtilizationRates", device => usize, &raw mut rates => *mut [u32; 2]);
        println!("rates {answer} {rates:?}");
    }
}

/// The output of this program in a container with these shares.
fn nvml_values(node: &Node, shares: &[Share]) -> Vec<String> {
    let library = node.sim.library("libnvidia-ml.so.1");
    let container = node.container(shares);
    let mut command = container.command(&std::env::current_exe().expect("this test"));
    let output = command.arg("nvml").arg(library).output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

/// Two shares of one GPU, each with a program that has memory. The first program has launched
/// kernels of `milliseconds` in total.
fn with_two_shares(milliseconds: u32, test: impl FnOnce(&Node, [&Share; 2], [u32; 2])) {
    let node = Node::up("L4");
    let half = || Policy { compute: Compute { cores: 50, ..Compute::default() }, ..node.policy(0, 1000) };
    let shares = [node.share("one", "share", node.policy(0, 1000)), node.share("two", "share", half())];
    let containers: Vec<Container<'_>> =
        shares.iter().map(|share| node.container(std::slice::from_ref(share))).collect();
    let mut programs: Vec<Program> = containers.iter().map(Container::started).collect();
    for program in &mut programs {
        assert!(program.ask("alloc v2 100").starts_with("ok "));
    }
    let kernels = format!("kernels cuLaunchKernel kernel_5ms {}", milliseconds / 5);
    assert_eq!(programs[0].ask(&kernels), "ok");
    test(&node, [&shares[0], &shares[1]], [programs[0].pid(), programs[1].pid()]);
}

fn samples_of_other_shares_are_hidden() {
    with_two_shares(1000, |node, [one, two], [pid, _]| {
        let until = Instant::now() + Duration::from_secs(10);
        let own = [format!("samples 0 [{pid}]"), format!("infos 0 [{pid}]")];
        while nvml_values(node, std::slice::from_ref(one))[..2] != own {
            assert!(Instant::now() < until, "{:?}", nvml_values(node, std::slice::from_ref(one)));
        }
        assert_eq!(nvml_values(node, std::slice::from_ref(two))[..2], ["samples 0 []", "infos 0 []"]);
        assert_eq!(nvml_values(node, &[])[..2], own);
    });
}

/// The line with the utilisation rates.
const RATES_LINE: usize = 3;

fn utilisation_covers_only_the_share() {
    with_two_shares(3000, |node, [one, two], _| {
        let shown = |share: &Share| nvml_values(node, std::slice::from_ref(share)).remove(RATES_LINE);
        const IDLE: &str = "rates 0 [0, 0]";
        // While the first share works, the other is idle; when it has finished, both are.
        let until = Instant::now() + Duration::from_secs(15);
        let mut worked = false;
        loop {
            let (first, second) = (shown(one), shown(two));
            assert_eq!(second, IDLE, "beside {first}");
            worked |= first != IDLE;
            if worked && first == IDLE {
                break;
            }
            assert!(Instant::now() < until, "{first}");
        }
    });
}

fn many_other_processes_are_hidden() {
    let node = Node::up("L4");
    let share = node.share("one", "share", node.policy(0, 1000));
    let other = |pid| Process {
        pid,
        name: "other".into(),
        kind: ProcessKind::Compute,
        instance: None,
        memory_mib: 10,
    };
    let all = node.sim.update(|state| {
        state.gpus[0].processes.extend((100_000..100_070).map(other));
        Ok(())
    });
    all.expect("they run");
    assert_eq!(nvml_values(&node, &[])[RATES_LINE], "rates 0 [60, 30]");
    assert_eq!(nvml_values(&node, &[share])[RATES_LINE], "rates 0 [0, 0]");
}

fn past_processes_are_not_reported() {
    const NO_PERMISSION: &str = "accounting 4";
    let node = Node::up("L4");
    let share = node.share("one", "share", node.policy(0, 1000));
    assert_eq!(nvml_values(&node, &[share])[2], NO_PERMISSION);
    assert_ne!(nvml_values(&node, &[])[2], NO_PERMISSION);
}

/// In a container: allocates, queries the library's sessions, and prints the fields.
fn print_sessions(nvml: &str, cuda: &str, uuid: &str) {
    let guest = Guest::open(Path::new(cuda));
    assert_eq!(guest.run(&["start", "0"]), "ok");
    assert!(guest.run(&["alloc", "v2", "100"]).starts_with("ok "));
    let device = CString::new(uuid).expect("no NUL");
    for (name, words) in [("nvmlDeviceGetEncoderSessions", 8), ("nvmlDeviceGetFBCSessions", 12)] {
        let (mut list, mut count) = ([0u32; 100], 3);
        // SAFETY: this test's library, whose functions have this signature; the buffer is large
        // enough.
        let answer = unsafe {
            let library = libloading::Library::new(nvml).expect("NVML");
            type List = extern "C" fn(*const c_char, *mut u32, *mut u32) -> i32;
            let function = library.get::<List>(name.as_bytes()).expect("it is there");
            let answer = function(device.as_ptr(), &raw mut count, list.as_mut_ptr());
            // Stays loaded until the program exits, as in real programs.
            std::mem::forget(library);
            answer
        };
        let printed: Vec<_> =
            list.chunks(words).take(count as usize).map(|entry| (entry[0], entry[2])).collect();
        println!("{answer} {printed:x?}");
    }
}

fn sessions_of_other_processes_are_hidden() {
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libnvidia-ml.so.1");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/view/sessions.c");
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o"]);
    assert!(cc.arg(&library).arg(source).status().expect("a C compiler").success());
    let node = Node::up("L4");
    let uuid = node.sim.read().expect("a state").gpus[0].uuid.clone();
    let printed = |shares: &[Share]| {
        let container = node.container(shares);
        let mut command = container.command(&std::env::current_exe().expect("this test"));
        command.arg("sessions").arg(&library).arg(container.driver()).arg(&uuid);
        let output = command.output().expect("it runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let share = node.share("one", "share", node.policy(0, 1000));
    assert_eq!(printed(&[share]), "0 [(47, 5a5a5a5a)]\n".repeat(2));
    let all = "0 [(46, 5a5a5a5a), (47, 5a5a5a5a), (48, 5a5a5a5a)]\n";
    assert_eq!(printed(&[]), all.repeat(2));
}
