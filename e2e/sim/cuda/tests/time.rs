//! Streams, events and kernels: how long they take, in what order they run, and what waits for
//! what.
//!
//! Times are measured by events behind a first kernel, so they are device times and do not depend
//! on how fast the host submits.
#![allow(unsafe_code, reason = "the library is called through C")]

mod common;

use common::*;

#[test]
fn scenario_program() {
    common::scenario(|cuda, words| match words {
        // Submits that many kernels of that name, without waiting.
        ["load", count, name] => {
            let work = Work::load(cuda);
            (0..count.parse::<u32>().expect("a number")).for_each(|_| work.launch(name, 1000, 0));
            "done".to_owned()
        }
        // The same with a wait; returns the milliseconds on the device.
        ["run", count, name] => {
            let work = Work::load(cuda);
            let count = count.parse::<u32>().expect("a number");
            work.time(|| (0..count).for_each(|_| work.launch(name, 1000, 0))).to_string()
        }
        ["call", name] => match *name {
            "alloc" => format!("{:?}", cuda.alloc(MIB).map(drop)),
            "count" => format!("{:?}", cuda.count()),
            other => panic!("unknown call {other}"),
        },
        ["info"] => format!("{:?}", cuda.info().map(|(free, total)| (total - free) / MIB)),
        other => panic!("unknown command {other:?}"),
    });
}

/// The kernels and events of a program.
struct Work<'c> {
    cuda: &'c Cuda,
    module: usize,
}

impl<'c> Work<'c> {
    fn load(cuda: &'c Cuda) -> Self {
        let mut module = 0;
        let code = call!(cuda.cuModuleLoadData(&mut module => &mut usize, c"\x7fELF".as_ptr() => *const i8));
        Self { cuda, module: answer(code, module).expect("a module") }
    }

    fn function(&self, name: &str) -> usize {
        let (cuda, mut function) = (self.cuda, 0);
        let name = std::ffi::CString::new(name).expect("no NUL");
        let code = call!(cuda.cuModuleGetFunction(
            &mut function => &mut usize, self.module => usize, name.as_ptr() => *const i8,
        ));
        answer(code, function).expect("a function")
    }

    fn launch(&self, name: &str, blocks: u32, stream: usize) {
        self.launch_with(self.function(name), blocks, stream, std::ptr::null());
    }

    fn launch_with(&self, function: usize, blocks: u32, stream: usize, parameters: *const *const u64) {
        let cuda = self.cuda;
        let code = call!(cuda.cuLaunchKernel(
            function => usize, blocks => u32, 1 => u32, 1 => u32, 128 => u32, 1 => u32, 1 => u32, 0 => u32,
            stream => usize, parameters => *const *const u64, 0 => usize,
        ));
        assert_eq!(code, SUCCESS);
    }

    fn stream(&self, flags: u32) -> usize {
        let (cuda, mut stream) = (self.cuda, 0);
        answer(call!(cuda.cuStreamCreate(&mut stream => &mut usize, flags => u32)), stream).expect("a stream")
    }

    fn event(&self) -> usize {
        let (cuda, mut event) = (self.cuda, 0);
        answer(call!(cuda.cuEventCreate(&mut event => &mut usize, 0 => u32)), event).expect("an event")
    }

    fn record(&self, event: usize, stream: usize) {
        let cuda = self.cuda;
        assert_eq!(call!(cuda.cuEventRecord(event => usize, stream => usize)), SUCCESS);
    }

    fn elapsed(&self, begin: usize, end: usize) -> Result<f32, u32> {
        let (cuda, mut time) = (self.cuda, 0.0);
        answer(call!(cuda.cuEventElapsedTime(&mut time => &mut f32, begin => usize, end => usize)), time)
    }

    fn synchronize(&self) {
        let cuda = self.cuda;
        assert_eq!(call!(cuda.cuCtxSynchronize()), SUCCESS);
    }

    /// Milliseconds on the device from the begin of `work` to its end, over all streams.
    fn time(&self, work: impl FnOnce()) -> f32 {
        // Behind a kernel, so that no work begins before all of it is submitted, even on a busy
        // machine.
        let (begin, end) = (self.event(), self.event());
        self.launch("gate_1500ms", 1000, 0);
        self.record(begin, 0);
        work();
        // The legacy stream waits for all the others.
        self.record(end, 0);
        self.synchronize();
        self.elapsed(begin, end).expect("a time")
    }
}

fn near(time: f32, expected: f32) -> bool {
    (time - expected).abs() <= expected * 0.02 + 0.05
}

#[test]
fn kernel_time_is_given_by_name_or_parameter() {
    let node = Node::up("L4");
    let cuda = node.cuda();
    let work = Work::load(&cuda);
    let time = work.time(|| (0..10).for_each(|_| work.launch("work_2ms", 1000, 0)));
    assert!(near(time, 20.0), "{time}");
    let nanoseconds = 3_000_000_u64;
    let parameters = [&raw const nanoseconds];
    let time = work.time(|| work.launch_with(work.function("spin"), 1, 0, parameters.as_ptr()));
    assert!(near(time, 3.0), "{time}");
}

#[test]
fn kernel_waits_for_its_peer_on_another_gpu() {
    let node = Node::up("2xL4");
    let cuda = node.cuda();
    let works = [0, 1].map(|device| {
        cuda.make_current(device);
        let work = Work::load(&cuda);
        (work.function("meet"), work)
    });
    let meet = |device: i32| {
        let (function, work) = &works[device as usize];
        let words = if device == 0 { [16_u64, 32] } else { [32, 16] };
        let arguments = [words[0], words[1], 1, 1_000_000];
        let parameters = arguments.each_ref().map(|word| word as *const u64);
        cuda.make_current(device);
        work.launch_with(*function, 1, 0, parameters.as_ptr());
    };
    meet(0);
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(call!(cuda.cuStreamQuery(0 => usize)), NOT_READY);
    meet(1);
    works[1].1.synchronize();
    cuda.make_current(0);
    works[0].1.synchronize();
}

#[test]
fn kernel_waits_for_its_managed_memory() {
    const PAGES: u64 = 50;
    let node = Node::up("L4");
    let cuda = node.cuda();
    let (work, mut address) = (Work::load(&cuda), 0_u64);
    let used = || cuda.info().map(|(free, total)| (total - free) / MIB).expect("information");
    let (size, before) = (PAGES * 2 * MIB, used());
    let code = call!(cuda.cuMemAllocManaged(&mut address => &mut u64, size => u64, 1 => u32));
    assert_eq!((code, used()), (SUCCESS, before));
    let there = || used() - before;
    let prefetch =
        |device| call!(cuda.cuMemPrefetchAsync(address => u64, size => u64, device => i32, 0 => usize));
    let advise =
        |advice, device| call!(cuda.cuMemAdvise(address => u64, size => u64, advice => u32, device => i32));
    let launch = || work.launch("work_2ms", 1000, 0);
    assert_eq!((prefetch(0), there(), prefetch(-1), there()), (SUCCESS, 2 * PAGES, SUCCESS, 0));
    // The kernel that `time` submits first moves it to the device.
    let time = work.time(launch);
    assert!(near(time, 2.0), "{time}");
    assert_eq!(there(), 2 * PAGES);
    let way = PAGES as f32 * (2 << 20) as f32 / 12e6;
    let time = work.time(|| {
        assert_eq!(prefetch(-1), SUCCESS);
        launch();
    });
    assert!(
        near(time, 2.0 + 2.0 * way + PAGES as f32 * 0.02),
        "{time}: to the host, and back by page faults"
    );
    let (one, other) = (work.stream(0), work.stream(0));
    let time = work.time(|| {
        for device in [-1, 0] {
            let code =
                call!(cuda.cuMemPrefetchAsync(address => u64, size => u64, device => i32, one => usize));
            assert_eq!(code, SUCCESS);
        }
        work.launch("work_2ms", 1000, other);
    });
    assert!(near(time, 2.0 + 2.0 * way), "{time}: to the host, and back before the kernel of another stream");
    assert_eq!((advise(3, -1), there()), (SUCCESS, 0));
    launch();
    assert_eq!((there(), advise(4, 0)), (0, SUCCESS), "accessed in place");
    launch();
    assert_eq!((there(), advise(7, 0), advise(3, 9)), (2 * PAGES, INVALID_VALUE, INVALID_DEVICE));
    work.synchronize();
    assert_eq!((cuda.free(address), there()), (SUCCESS, 0));
}

#[test]
fn small_kernels_overlap_and_large_ones_do_not() {
    let node = Node::up("L4");
    let cuda = node.cuda();
    let work = Work::load(&cuda);
    let (one, two) = (work.stream(0), work.stream(0));
    let run = |blocks| {
        work.time(|| {
            for stream in [one, two] {
                (0..4).for_each(|_| work.launch("work_2ms", blocks, stream));
            }
        })
    };
    let (small, large) = (run(4), run(1000));
    assert!(near(small, 8.0), "{small}");
    assert!(near(large, 16.0), "{large}");
}

#[test]
fn stream_waits_for_an_event_of_another() {
    let node = Node::up("L4");
    let cuda = node.cuda();
    let work = Work::load(&cuda);
    let (one, two) = (work.stream(1), work.stream(1));
    let (done, begin, end) = (work.event(), work.event(), work.event());
    work.record(begin, one);
    work.launch("work_1500ms", 1, one);
    work.record(done, one);
    assert_eq!(call!(cuda.cuEventQuery(done => usize)), NOT_READY);
    assert_eq!(call!(cuda.cuStreamQuery(one => usize)), NOT_READY);
    assert_eq!(work.elapsed(begin, done), Err(NOT_READY));
    assert_eq!(call!(cuda.cuStreamWaitEvent(two => usize, done => usize, 0 => u32)), SUCCESS);
    work.launch("work_5ms", 1, two);
    work.record(end, two);
    assert_eq!(call!(cuda.cuStreamSynchronize(two => usize)), SUCCESS);
    let time = work.elapsed(begin, end).expect("a time");
    assert!(time >= 1505.0, "{time}");
    let time = work.elapsed(done, end).expect("a time");
    assert!(near(time, 5.0), "{time}");
}

#[test]
fn graph_takes_as_long_as_its_longest_chain() {
    let node = Node::up("L4");
    let cuda = node.cuda();
    let work = Work::load(&cuda);
    let (stream, mut graph, mut executable) = (work.stream(1), 0_usize, 0_usize);
    assert_eq!(call!(cuda.cuStreamBeginCapture_v2(stream => usize, 0 => u32)), SUCCESS);
    work.launch("work_3ms", 1, stream);
    work.launch("work_4ms", 1, stream);
    assert_eq!(call!(cuda.cuStreamSynchronize(stream => usize)), 900);
    assert_eq!(call!(cuda.cuStreamEndCapture(stream => usize, &mut graph => &mut usize)), SUCCESS);
    let mut nodes = 0_u64;
    assert_eq!(call!(cuda.cuGraphGetNodes(graph => usize, 0 => usize, &mut nodes => &mut u64)), SUCCESS);
    assert_eq!(nodes, 2);
    // Beside the chain of 7 ms, a kernel of 5 ms without dependencies.
    #[repr(C)]
    struct Kernel {
        function: usize,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        rest: [usize; 4],
    }
    let function = work.function("work_5ms");
    let kernel = Kernel { function, grid: [1; 3], block: [1; 3], shared: 0, rest: [0; 4] };
    let mut added = 0_usize;
    let code = call!(cuda.cuGraphAddKernelNode_v2(
        &mut added => &mut usize, graph => usize, 0 => usize, 0 => u64, &kernel => &Kernel,
    ));
    assert_eq!(code, SUCCESS);
    let code =
        call!(cuda.cuGraphInstantiateWithFlags(&mut executable => &mut usize, graph => usize, 0 => u64));
    assert_eq!(code, SUCCESS);
    let launch = || assert_eq!(call!(cuda.cuGraphLaunch(executable => usize, 0 => usize)), SUCCESS);
    let time = work.time(|| (0..3).for_each(|_| launch()));
    assert!(near(time, 21.0), "{time}");
}

/// The time of 100 ms of work in one process while another process has work for hours.
fn beside_another(environment: &[(&str, &str)], kernel: &str) -> (Node, Program, Program, f32) {
    // The expected times are without the cost of changes between processes.
    let node = Node::with("L4", |options| options.host.switch_us = Some(0));
    let mut busy = node.program_with(environment);
    busy.ask("start");
    busy.ask(&format!("load 500 {kernel}"));
    let mut other = node.program_with(environment);
    other.ask("start");
    let time = other.ask("run 50 work_2ms").parse().expect("a time");
    (node, busy, other, time)
}

#[test]
fn processes_share_the_gpu_until_one_is_killed() {
    let (node, mut busy, mut other, time) = beside_another(&[], "work_60000ms");
    assert!(near(time, 200.0), "{time}");
    busy.kill();
    assert_eq!(node.processes(0).len(), 1);
    let time: f32 = other.ask("run 50 work_2ms").parse().expect("a time");
    assert!(near(time, 100.0), "{time}");
}

#[test]
fn mps_clients_run_in_order_of_submission() {
    let (.., time) = beside_another(&[("DIVVY_SIM_CUDA", "order")], "work_2ms");
    assert!(near(time, 100.0), "{time}");
}

#[test]
fn injected_faults_fail_calls_and_kill_the_process() {
    let node = Node::up("L4");
    let told = |rules: &str| node.program_with(&[("DIVVY_SIM_CUDA", rules)]);
    let mut program = told("cuMemAlloc_v2#2=2,context=64");
    program.ask("start");
    assert_eq!(program.ask("info"), "Ok(64)");
    let answers = [program.ask("call alloc"), program.ask("call alloc"), program.ask("call alloc")];
    assert_eq!(answers, ["Ok(())".to_owned(), format!("Err({OUT_OF_MEMORY})"), "Ok(())".to_owned()]);
    assert_eq!(program.ask("info"), "Ok(66)");
    drop(program);
    let mut program = told("cuMemAlloc_v2#2!!");
    program.ask("start");
    program.ask("call alloc");
    program.tell("call alloc");
    let status = program.child.wait().expect("the process exits");
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGKILL));
    assert_eq!(node.processes(0), []);
    assert_eq!(told("cuMemAlloc_v3=2").ask("init"), INVALID_VALUE.to_string());
}
