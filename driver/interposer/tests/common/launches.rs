//! Launches by programs in a container, with each launch function.
#![allow(unsafe_code, reason = "the driver is called through C")]

use super::guest::{Guest, call};
use std::ffi::{CString, c_char};

/// CUlaunchConfig.
#[repr(C)]
struct Configuration {
    shape: [u32; 6],
    shared: u32,
    stream: u64,
    attributes: usize,
    count: u32,
}

impl Guest {
    /// Loads the kernel of that name; the name contains its duration.
    fn kernel(&self, name: &str) -> u64 {
        let text =
            CString::new(format!(".version 6.0\n.target sm_50\n.visible .entry {name}()\n{{\n ret;\n}}\n"));
        let (text, name) = (text.expect("no NUL"), CString::new(name).expect("no NUL"));
        let (mut module, mut function) = (0u64, 0u64);
        let codes = [
            call!(self, "cuModuleLoadData", &mut module => &mut u64, text.as_ptr() => *const c_char),
            call!(self, "cuModuleGetFunction", &mut function => &mut u64, module => u64,
                name.as_ptr() => *const c_char),
        ];
        assert_eq!(codes, [0; 2]);
        function
    }

    /// Launches `count` times with that function on that stream. Returns the codes that are not
    /// success.
    fn launch(&self, way: &str, function: u64, stream: u64, count: u64) -> String {
        let one = || match way {
            "cuLaunchKernel" | "cuLaunchKernel_ptsz" => {
                call!(self, way, function => u64, 200 => u32, 1 => u32, 1 => u32,
                32 => u32, 1 => u32, 1 => u32, 0 => u32, stream => u64, 0 => usize, 0 => usize)
            }
            "cuLaunchKernelEx" | "cuLaunchKernelEx_ptsz" => {
                let shape = [200, 1, 1, 32, 1, 1];
                let configuration = Configuration { shape, shared: 0, stream, attributes: 0, count: 0 };
                call!(self, way, &configuration => &Configuration, function => u64, 0 => usize, 0 => usize)
            }
            "cuLaunchCooperativeKernel" | "cuLaunchCooperativeKernel_ptsz" => {
                call!(self, way, function => u64,
                200 => u32, 1 => u32, 1 => u32, 32 => u32, 1 => u32, 1 => u32, 0 => u32,
                stream => u64, 0 => usize)
            }
            "cuLaunch" => call!(self, way, function => u64),
            "cuLaunchGrid" => call!(self, way, function => u64, 200 => i32, 1 => i32),
            "cuLaunchGridAsync" => call!(self, way, function => u64, 200 => i32, 1 => i32, stream => u64),
            "cuGraphLaunch" | "cuGraphLaunch_ptsz" => call!(self, way, function => u64, stream => u64),
            other => panic!("no way to launch: {other}"),
        };
        let wrong: Vec<String> =
            (0..count).map(|_| one()).filter(|code| *code != 0).map(|code| code.to_string()).collect();
        if wrong.is_empty() { "ok".into() } else { wrong.join(" ") }
    }

    /// Launches kernels with that function.
    pub(crate) fn launches(&self, way: &str, name: &str, count: u64) -> String {
        self.launch(way, self.kernel(name), 0, count)
    }

    /// Captures launches. Returns the executable graph and its number of nodes.
    pub(crate) fn captured(&self, way: &str, name: &str, count: u64) -> String {
        let function = self.kernel(name);
        let (mut stream, mut graph, mut nodes, mut executable) = (0u64, 0u64, 0u64, 0u64);
        let begun = [
            call!(self, "cuStreamCreate", &mut stream => &mut u64, 1 => u32),
            call!(self, "cuStreamBeginCapture_v2", stream => u64, 0 => i32),
        ];
        let outcome = self.launch(way, function, stream, count);
        let ended = [
            call!(self, "cuStreamEndCapture", stream => u64, &mut graph => &mut u64),
            call!(self, "cuGraphGetNodes", graph => u64, 0 => usize, &mut nodes => &mut u64),
            call!(self, "cuGraphInstantiateWithFlags", &mut executable => &mut u64, graph => u64, 0 => u64),
        ];
        match (begun, outcome.as_str(), ended) {
            ([0, 0], "ok", [0, 0, 0]) => format!("{executable} {nodes}"),
            wrong => format!("{wrong:?}"),
        }
    }

    /// Synchronises or polls with that function.
    pub(crate) fn waits(&self, way: &str) -> i32 {
        let (mut event, mut place, mut byte) = (0u64, 0u64, 0u8);
        match way {
            "cuCtxSynchronize" => call!(self, way,),
            "cuCtxSynchronize_v2" => {
                let mut context = 0u64;
                assert_eq!(call!(self, "cuCtxGetCurrent", &mut context => &mut u64), 0);
                call!(self, way, context => u64)
            }
            "cuEventSynchronize" | "cuEventQuery" => {
                let made = [
                    call!(self, "cuEventCreate", &mut event => &mut u64, 0 => u32),
                    call!(self, "cuEventRecord", event => u64, 0 => u64),
                ];
                assert_eq!(made, [0; 2]);
                call!(self, way, event => u64)
            }
            copy if copy.starts_with("cuMemcpy") => {
                assert_eq!(call!(self, "cuMemAlloc_v2", &mut place => &mut u64, 1 => usize), 0);
                call!(self, way, &raw mut byte => *mut u8, place => u64, 1 => usize)
            }
            _ => call!(self, way, 0 => u64),
        }
    }

    /// Launches an executable graph.
    pub(crate) fn graphs(&self, way: &str, graph: u64, count: u64) -> String {
        self.launch(way, graph, 0, count)
    }
}
