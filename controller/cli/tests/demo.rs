//! `divvy demo` with claims that fit, claims that do not, and failing hardware. The exit code is
//! right, the GPUs are in their initial state at the end, and nothing is left on the machine.

use divvy_sim::Sim;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Limit for anything that a demo does.
const TIMEOUT: Duration = Duration::from_secs(60);

fn demo(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_divvy")).arg("demo").args(arguments).output().expect("divvy starts")
}

/// The words of a text with one space between them: lines are broken to fit a terminal.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn claim(name: &str, class: &str, expression: &str) -> String {
    format!(
        "apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: {name}}}
spec:
  devices:
    requests:
    - name: gpu
      exactly:
        deviceClassName: {class}
        selectors: [{{cel: {{expression: '{expression}'}}}}]
---
"
    )
}

fn profile(name: &str, profile: &str) -> String {
    claim(name, "mig.divvy.dev", &format!("device.attributes[\"gpu.divvy.dev\"].profile == \"{profile}\""))
}

fn check(gpus: &str, claims: &str, more: &[&str], succeeds: bool, expected: &[&str]) {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("claims.yaml");
    std::fs::write(&file, claims).expect("claims");
    let out = demo(&[&["--gpus", gpus, "--claims", &file.display().to_string()], more].concat());
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.success(), succeeds, "{text}");
    let text = words(&text);
    assert!(text.contains("the GPUs are in their initial state"), "{text}");
    for part in expected {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
    assert!(!text.contains('\x1b'), "colours without a terminal:\n{text}");
}

#[test]
fn built_in_tour_serves_all_modes() {
    let out = demo(&["--verbose"]);
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{text}\n{}", String::from_utf8_lossy(&out.stderr));
    let text = words(&text);
    let mut rest: &str = &text;
    for part in [
        "all-of-it is refused",
        "chat: nvidia-smi shows NVIDIA H100 80GB HBM3, 10240 MiB, 0 MiB",
        "CUDA_ERROR_OUT_OF_MEMORY. train goes on",
        "GPU time: chat asked for 30 %",
        "shares: chat 10 GiB 30 %, train 30 GiB 60 %",
        "the GPUs are in their initial state",
        "a-slot-of-it is refused",
        "is GPU instance",
        "the GPUs are in their initial state",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30",
        "/tmp/nvidia-mps is run/mps/GPU-",
        "30 % of the threads, at most 8192 MiB",
        "50 % of the threads, at most 10240 MiB",
        "more-threads-than-are-left is refused",
        "a-slice-of-it is refused",
        "exclusive process",
        "MPS: chat 8 GiB 30 % of the threads, search 10 GiB 50 % of the threads",
        "the GPUs are in their initial state",
        "two-slots-more is refused: no device: claim default/two-slots-more does not fit",
        "1 without enough capacity",
        "all-of-it is refused",
        "1 overlapping devices in use",
        "time slice Long",
        "time-slice: notebook 1 slot, video 2 slots, the-last-slot 1 slot",
        "the GPUs are in their initial state",
        "a-client-of-it is refused",
        "whole: training",
        "the GPUs are in their initial state",
    ] {
        let at = rest.find(part).unwrap_or_else(|| panic!("no {part:?} where it should be in\n{text}"));
        rest = &rest[at + part.len()..];
    }
}

#[test]
fn tour_fits_every_model_and_80_columns() {
    let models: Vec<&str> = divvy_catalogue::keys().collect();
    // One with all scenes, one without MIG and with little memory, one whose MIG needs a reset.
    let run = |model: &str| {
        let out = demo(&["--gpus", &format!("2x{model}")]);
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(out.status.success(), "{model}\n{text}\n{}", String::from_utf8_lossy(&out.stderr));
        assert!(words(&text).contains("GPU time: chat asked for 30 %"), "{model}\n{text}");
        let wide = text.lines().find(|line| line.chars().count() > 80);
        assert_eq!(wide, None, "{model}\n{text}");
    };
    for models in models.chunks(8) {
        std::thread::scope(|scope| models.iter().for_each(|model| drop(scope.spawn(|| run(model)))));
    }
}

#[test]
fn a_served_claim_that_must_be_refused_is_an_error() {
    let claims = profile("welcome", "1g.10gb")
        .replace("{name: welcome}", "{name: welcome, annotations: {demo.divvy.dev/expect: refused}}");
    check("1xH100-SXM5-80GB", &claims, &[], false, &["welcome: it was served, but must be refused"]);
}

#[test]
fn a_refused_mps_client_is_an_error() {
    let claims = claim("unlucky", "mps.divvy.dev", "true");
    let fault = ["--fault", "mps-server-start=UNKNOWN"];
    check(
        "1xH100-SXM5-80GB",
        &claims,
        &fault,
        false,
        &["unlucky: its MPS client was refused", "the MPS server did not start"],
    );
}

/// A demo with `--keep` whose files are all below `dir`.
struct Kept {
    child: Child,
    output: BufReader<ChildStdout>,
    dir: tempfile::TempDir,
    kubeconfig: PathBuf,
}

impl Kept {
    fn start(gpus: &str) -> Self {
        let dir = tempfile::Builder::new().prefix("d-").tempdir().expect("a directory");
        let claims = dir.path().join("claims.yaml");
        let share = "apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: first}
spec:
  devices:
    requests:
    - {name: gpu, exactly: {deviceClassName: share.divvy.dev, capacity: {requests: {memory: 2Gi}}}}
";
        std::fs::write(&claims, share).expect("claims");
        let mut child = Command::new(env!("CARGO_BIN_EXE_divvy"))
            .args(["demo", "--keep", "--gpus", gpus, "--claims"])
            .arg(&claims)
            .env("TMPDIR", dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .expect("divvy starts");
        let output = BufReader::new(child.stdout.take().expect("output"));
        let mut kept = Self { child, output, dir, kubeconfig: PathBuf::new() };
        loop {
            let mut line = String::new();
            assert_ne!(kept.output.read_line(&mut line).expect("a line"), 0, "the demo has ended");
            if let Some((_, path)) = line.trim().split_once("KUBECONFIG=") {
                kept.kubeconfig = path.into();
            }
            if line.contains("Ctrl-C releases everything") {
                return kept;
            }
        }
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).expect("a process");
        kill_process(pid, signal).expect("it runs");
    }

    /// Processes whose command line names the directory, except the demo itself.
    fn processes(&self) -> Vec<String> {
        let entries = std::fs::read_dir("/proc").expect("/proc").flatten();
        let named = |entry: std::fs::DirEntry| {
            let line = std::fs::read(entry.path().join("cmdline")).ok()?;
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            let is_demo = entry.file_name().to_str() == Some(&self.child.id().to_string());
            (line.contains(self.dir.path().to_str()?) && !is_demo).then_some(line)
        };
        entries.filter_map(named).collect()
    }

    /// Waits for the exit and returns the exit code and the rest of the output.
    fn wait(&mut self) -> (Option<i32>, String) {
        let deadline = Instant::now() + TIMEOUT;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("a status") {
                break status;
            }
            assert!(Instant::now() < deadline, "the demo does not end");
            std::thread::sleep(Duration::from_millis(20));
        };
        let mut text = String::new();
        self.output.read_to_string(&mut text).expect("output");
        (status.code(), words(&text))
    }

    /// Checks that the demo has left nothing.
    fn assert_nothing_is_left(&self) {
        assert_eq!(self.processes(), [""; 0]);
        let mounts = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
        assert!(!mounts.contains(self.dir.path().to_str().expect("UTF-8")), "{mounts}");
        let left = std::fs::read_dir(self.dir.path()).expect("the directory").flatten();
        let left: Vec<_> = left.map(|entry| entry.file_name()).collect();
        assert_eq!(left, ["claims.yaml"]);
    }
}

fn check_signal(signal: Signal) {
    let mut kept = Kept::start("1xL4");
    assert!(kept.processes().len() >= 2, "{:?}", kept.processes());
    kept.signal(signal);
    let (code, text) = kept.wait();
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("first released, the GPUs are in their initial state"), "{text}");
    kept.assert_nothing_is_left();
}

#[test]
fn kept_node_is_removed_at_each_signal() {
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        check_signal(signal);
    }
}

#[test]
fn kept_node_is_removed_when_its_output_is_closed() {
    let mut kept = Kept::start("1xL4");
    // The reader of the pipe goes away.
    kept.output = BufReader::new(closed_pipe());
    let (code, _) = kept.wait();
    assert_eq!(code, Some(141));
    kept.assert_nothing_is_left();
}

/// The output of a program that has exited.
fn closed_pipe() -> ChildStdout {
    let mut child = Command::new("true").stdout(Stdio::piped()).spawn().expect("true starts");
    child.wait().expect("it exits");
    child.stdout.take().expect("its output")
}

#[test]
fn interrupted_tour_leaves_nothing() {
    let dir = tempfile::Builder::new().prefix("d-").tempdir().expect("a directory");
    let mut child = Command::new(env!("CARGO_BIN_EXE_divvy"))
        .args(["demo", "--gpus", "1xL4"])
        .env("TMPDIR", dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .expect("divvy starts");
    let mut output = BufReader::new(child.stdout.take().expect("output"));
    let mut line = String::new();
    // The programs in the shares run.
    while !line.contains("nvidia-smi shows") {
        line.clear();
        assert_ne!(output.read_line(&mut line).expect("a line"), 0, "the demo has ended");
    }
    let mut kept = Kept { child, output, dir, kubeconfig: PathBuf::new() };
    kept.signal(Signal::TERM);
    let (code, text) = kept.wait();
    assert_eq!(code, Some(1), "{text}");
    assert_eq!(kept.processes(), [""; 0]);
    assert_eq!(std::fs::read_dir(kept.dir.path()).expect("the directory").count(), 0);
}

#[test]
fn every_command_ends_quietly_at_a_closed_pipe() {
    for command in ["demo --gpus 1xL4", "template --gpus 8xB300-269GB", "--help", "demo --help"] {
        let script = format!("{} {command} | head -n 1", env!("CARGO_BIN_EXE_divvy"));
        let out = Command::new("bash").args(["-c", &script]).output().expect("bash starts");
        let errors = String::from_utf8_lossy(&out.stderr);
        assert!(!errors.contains("panicked") && out.status.success(), "{command}: {errors}");
    }
}

/// Reads objects until a condition holds.
async fn eventually(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !is_so().await {
        assert!(Instant::now() < deadline, "not so within {TIMEOUT:?}: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn yaml<T: serde::de::DeserializeOwned>(text: &str) -> T {
    serde_norway::from_str(text).expect("an object")
}

fn is_in_use(directory: &Path) -> bool {
    let state = Sim::open(directory.join("gpu")).expect("a simulator").read().expect("its state");
    state.gpus.iter().any(|gpu| gpu.timeslice != 0)
}

#[test]
fn kept_node_serves_pods_as_they_come_and_go() {
    let mut kept = Kept::start("1xL4,1xT4");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let file = kube::config::Kubeconfig::read_from(&kept.kubeconfig).expect("a kubeconfig");
        let config = kube::Config::from_custom_kubeconfig(file, &Default::default()).await.expect("a config");
        let client = kube::Client::try_from(config).expect("a client");
        let template: ResourceClaimTemplate = yaml(
            "metadata: {name: slot}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: timeslice.divvy.dev}}]}}}",
        );
        let pod = |name: &str, template: &str| -> Pod {
            yaml(&format!(
                "metadata: {{name: {name}}}
spec: {{containers: [{{name: c}}], resourceClaims: [{{name: g, resourceClaimTemplateName: {template}}}]}}"
            ))
        };
        let templates: Api<ResourceClaimTemplate> = Api::default_namespaced(client.clone());
        let pods: Api<Pod> = Api::default_namespaced(client.clone());
        let claims: Api<ResourceClaim> = Api::default_namespaced(client.clone());
        templates.create(&PostParams::default(), &template).await.expect("created");
        let phase = async |name: &str| {
            let status = pods.get(name).await.expect("a pod").status.unwrap_or_default();
            (status.phase.unwrap_or_default(), status.message.unwrap_or_default())
        };
        pods.create(&PostParams::default(), &pod("one", "slot")).await.expect("created");
        eventually("pod one runs", async || phase("one").await.0 == "Running").await;
        let root = kept.kubeconfig.parent().expect("a directory").to_owned();
        assert!(is_in_use(&root));
        pods.create(&PostParams::default(), &pod("two", "absent")).await.expect("created");
        eventually("pod two waits", async || {
            let (phase, message) = phase("two").await;
            phase == "Pending" && message.contains("uses the template absent, which does not exist")
        })
        .await;
        pods.delete("one", &DeleteParams::default()).await.expect("deleted");
        eventually("the claim of pod one has gone", async || {
            let claims = claims.list(&ListParams::default()).await.expect("claims").items;
            claims.iter().all(|claim| claim.metadata.name.as_deref() == Some("first")) && !is_in_use(&root)
        })
        .await;
    });
    kept.signal(Signal::TERM);
    let (code, text) = kept.wait();
    assert_eq!(code, Some(0), "{text}");
    kept.assert_nothing_is_left();
}

#[test]
fn shares_that_cannot_be_offered_are_explained() {
    let claim = claim("mine", "share.divvy.dev", "true");
    let claim = claim.replace("selectors:", "capacity: {requests: {memory: 1Gi}}\n        selectors:");
    let no_library = ["--library-dir", "/nonexistent"];
    let cause = "mine: no device: no shares are offered: library /nonexistent/libdivvy.so cannot be read; \
                 set its directory with --library-dir";
    check("1xL4", &claim, &no_library, false, &[cause]);
    check("1xL4", &claim, &[], true, &["mine: prepared", "shares: mine 1 GiB"]);
}

#[test]
fn json_output_is_one_object_per_line() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("claims.yaml");
    std::fs::write(&file, claim("mine", "gpu.divvy.dev", "true")).expect("claims");
    let out = demo(&["-o", "json", "--gpus", "1xL4", "--claims", &file.display().to_string()]);
    let text = String::from_utf8_lossy(&out.stdout);
    let events = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
    let names: Vec<String> =
        events.map(|event| event["event"].as_str().expect("a name").to_owned()).collect();
    for name in ["started", "published", "allocated", "prepared", "held", "released", "summary"] {
        assert!(names.iter().any(|found| found == name), "no {name} in {text}");
    }
}

#[test]
fn seven_slices_fill_one_gpu() {
    let claims: String = (0..7).map(|i| profile(&format!("slice-{i}"), "1g.10gb")).collect();
    check("1xH100-SXM5-80GB", &claims, &[], true, &["slice-6: prepared"]);
}

#[test]
fn an_impossible_claim_does_not_affect_others() {
    let claims = profile("possible", "1g.10gb") + &profile("impossible", "9g.999gb");
    check("1xH100-SXM5-80GB", &claims, &[], false, &["possible: prepared", "impossible: no device"]);
}

#[test]
fn a_failing_call_names_claim_device_and_cause() {
    let claims = profile("unlucky", "1g.10gb");
    let fault = ["--fault", "nvmlGpuInstanceCreateComputeInstance=INSUFFICIENT_RESOURCES"];
    check(
        "1xH100-SXM5-80GB",
        &claims,
        &fault,
        false,
        &["unlucky", "gpu-0-mig-1g10gb", "nvmlGpuInstanceCreateComputeInstance"],
    );
}
