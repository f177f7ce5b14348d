//! The face on a small world of its own: a driver root with two libraries, the
//! kernel's tables and nodes as the simulator and a real node have them.

use super::*;
use serde_json::{Value, json};
use std::fs;

mod shares;

const DEVICES: &str = "Character devices:\n195 nvidia\n237 nvidia-caps\n511 nvidia-uvm\n\nBlock devices:\n";

struct World {
    dir: tempfile::TempDir,
    cdi: Cdi,
}

impl World {
    fn new() -> Self {
        Self::with(|_| HookMode::None)
    }

    fn with(hook: impl FnOnce(&Path) -> HookMode) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let paths = HostPaths::below(&root);
        fs::create_dir_all(&paths.cdi_dir).unwrap();
        let library = library::tests::library(&root);
        let world = Self { cdi: Cdi::new(&paths, hook(&root), &library), dir };
        world.file("driver/usr/lib64/libcuda.so.580.1", &files::tests::library("libcuda.so.1"));
        world.file("driver/usr/lib64/libnvidia-ml.so.580.1", &files::tests::library("libnvidia-ml.so.1"));
        world.file("driver/usr/bin/nvidia-smi", b"smi");
        world.file("proc/devices", DEVICES.as_bytes());
        for node in ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidia1"] {
            world.file(&format!("driver/dev/{node}"), b"");
        }
        world.capability("gpu1/mig/gi2/access", 156);
        world.capability("gpu1/mig/gi2/ci0/access", 157);
        world
    }

    fn path(&self, path: &str) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join(path)
    }

    fn file(&self, path: &str, content: &[u8]) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// Written by a child: a file that this process has open for writing, when
    /// another test forks, could not be executed.
    fn program(&self, path: &str, script: &str) {
        let path = self.path(path);
        let write = "printf '#!/bin/sh\\n%s\\n' \"$1\" > \"$0\" && chmod 755 \"$0\"";
        let status = std::process::Command::new("/bin/sh").args(["-c", write]).arg(path).arg(script).status();
        assert!(status.unwrap().success());
    }

    fn capability(&self, file: &str, minor: u32) {
        let text = format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
        self.file(&format!("proc/driver/nvidia/capabilities/{file}"), text.as_bytes());
    }

    fn remove(&self, path: &str) {
        fs::remove_file(self.path(path)).unwrap();
    }

    fn written(&self) -> Value {
        serde_json::from_slice(&fs::read(self.path("cdi/gpu.divvy.dev-claim_1-2.json")).unwrap()).unwrap()
    }
}

fn uid() -> ClaimUid {
    ClaimUid::from("1-2")
}

fn gpu(minor: u32) -> ClaimDevice {
    plain(format!("gpu-{minor}"), DeviceNodes::Gpu { minor })
}

fn mig() -> ClaimDevice {
    let nodes = DeviceNodes::Mig { minor: 1, gpu_instance: 2, compute_instance: 0 };
    plain("gpu-1-mig-3g40gb-9-4", nodes)
}

fn plain(device: impl Into<String>, nodes: DeviceNodes) -> ClaimDevice {
    ClaimDevice {
        request: "r".into(),
        device: DeviceName::from(device.into()),
        share: None,
        nodes,
        mps: None,
        injection: None,
    }
}

fn share(id: &str, injection: Injection) -> ClaimDevice {
    ClaimDevice { share: Some(id.into()), injection: Some(injection), ..gpu(0) }
}

/// The whole chain of causes, as it is logged.
fn told(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

fn refused(world: &World, devices: &[ClaimDevice], parts: &[&str]) {
    let text = told(&world.cdi.write_claim(&uid(), devices).unwrap_err());
    for part in parts.iter().chain(&["claim 1-2"]) {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
    let left: Vec<_> = fs::read_dir(world.path("cdi")).map(|dir| dir.collect()).unwrap_or_default();
    assert!(left.is_empty(), "{left:?}");
}

fn node(path: &str, major: u32, minor: u32) -> Value {
    json!({"path": path, "type": "c", "major": major, "minor": minor, "permissions": "rw"})
}

#[test]
fn clients_of_an_mps_daemon_are_told_their_limits_and_share_its_directories() {
    let world = World::new();
    let client = |share: &str, limits| ClaimDevice {
        request: "r".into(),
        device: DeviceName::from("gpu-0-mps"),
        share: Some(share.into()),
        nodes: DeviceNodes::Gpu { minor: 0 },
        mps: Some(MpsClient { dir: "/run/divvy/mps/GPU-a".into(), limits }),
        injection: None,
    };
    let limits = MpsLimits { threads: Some(30), memory_mib: Some(10240), multi_user: None };
    let devices = [client("s-1", limits), client("s-2", MpsLimits::default())];
    let ids = world.cdi.write_claim(&uid(), &devices).unwrap();
    let ids: Vec<_> = ids.iter().map(CdiId::as_str).collect();
    assert_eq!(ids, ["gpu.divvy.dev/claim=1-2-gpu-0-mps-s-1", "gpu.divvy.dev/claim=1-2-gpu-0-mps-s-2"]);
    let file: Value =
        serde_json::from_slice(&fs::read(world.path("cdi/gpu.divvy.dev-claim_1-2.json")).unwrap()).unwrap();
    let edits = |at: usize| &file["devices"][at]["containerEdits"];
    assert_eq!(
        edits(0)["env"],
        json!([
            "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=10240M",
        ])
    );
    assert_eq!(edits(1)["env"], json!(["CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"]));
    let options = json!(["rw", "nosuid", "nodev", "noexec", "rbind", "rprivate"]);
    let mount = |host: &str, container: &str| json!({"hostPath": host, "containerPath": container, "options": options});
    let mounts = json!([
        mount("/run/divvy/mps/GPU-a/pipe", "/tmp/nvidia-mps"),
        mount("/run/divvy/mps/GPU-a/shm", "/dev/shm"),
    ]);
    assert_eq!((&edits(0)["mounts"], &edits(1)["mounts"]), (&mounts, &mounts));
    assert_eq!(edits(0)["deviceNodes"], json!([node("/dev/nvidia0", 195, 0)]));
}

#[test]
fn a_claim_is_one_file_with_its_devices_and_what_all_claims_share() {
    let world = World::new();
    let ids = world.cdi.write_claim(&uid(), &[gpu(0), mig()]).unwrap();
    let ids: Vec<_> = ids.iter().map(CdiId::as_str).collect();
    assert_eq!(ids, ["gpu.divvy.dev/claim=1-2-gpu-0", "gpu.divvy.dev/claim=1-2-gpu-1-mig-3g40gb-9-4"]);
    let cap = |minor: u32| {
        let mut node = node(&format!("/dev/nvidia-caps/nvidia-cap{minor}"), 237, minor);
        node["fileMode"] = json!(0o444);
        node
    };
    let mount = |path: &str, container: &str| {
        json!({
            "hostPath": world.path("driver").join(path),
            "containerPath": container,
            "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
        })
    };
    assert_eq!(
        world.written(),
        json!({
            "cdiVersion": "0.5.0",
            "kind": "gpu.divvy.dev/claim",
            "devices": [
                {"name": "1-2-gpu-0", "containerEdits": {"deviceNodes": [node("/dev/nvidia0", 195, 0)]}},
                {"name": "1-2-gpu-1-mig-3g40gb-9-4", "containerEdits": {"deviceNodes": [
                    node("/dev/nvidia1", 195, 1), cap(156), cap(157),
                ]}},
            ],
            "containerEdits": {
                "env": ["NVIDIA_VISIBLE_DEVICES=void"],
                "deviceNodes": [
                    node("/dev/nvidiactl", 195, 255),
                    node("/dev/nvidia-uvm", 511, 0),
                    node("/dev/nvidia-uvm-tools", 511, 1),
                ],
                "mounts": [
                    mount("usr/lib64/libcuda.so.580.1", "/usr/lib64/libcuda.so.580.1"),
                    mount("usr/lib64/libnvidia-ml.so.580.1", "/usr/lib64/libnvidia-ml.so.580.1"),
                    mount("usr/bin/nvidia-smi", "/usr/bin/nvidia-smi"),
                    mount("usr/lib64/libcuda.so.580.1", "/usr/lib64/libcuda.so.1"),
                    mount("usr/lib64/libnvidia-ml.so.580.1", "/usr/lib64/libnvidia-ml.so.1"),
                    mount("usr/lib64/libcuda.so.580.1", "/usr/lib64/libcuda.so"),
                ],
            },
        })
    );
}

#[test]
fn the_hook_is_told_every_name() {
    let world = World::with(|root| {
        fs::write(root.join("divvy-hook"), "hook").unwrap();
        HookMode::Own(root.join("divvy-hook"))
    });
    world.cdi.write_claim(&uid(), &[gpu(0)]).unwrap();
    let hook = world.written()["containerEdits"]["hooks"][0].take();
    assert_eq!(hook["hookName"], "createContainer");
    assert_eq!(
        hook["args"],
        json!([
            "divvy-hook",
            "--library",
            "/usr/lib64/libcuda.so.580.1=libcuda.so.1",
            "--library",
            "/usr/lib64/libnvidia-ml.so.580.1=libnvidia-ml.so.1",
            "--link",
            "/usr/lib64/libcuda.so=libcuda.so.1",
        ])
    );
    let path = hook["path"].as_str().unwrap();
    assert!(path.starts_with(world.path("kubelet/plugins/gpu.divvy.dev/hook").to_str().unwrap()), "{path}");
    assert_eq!(fs::read(path).unwrap(), b"hook");

    fs::remove_file(path).unwrap();
    world.cdi.write_claim(&uid(), &[gpu(0)]).unwrap();
    assert!(Path::new(path).exists(), "a hook that somebody removed is put back");
}

#[test]
fn writing_again_gives_the_same_bytes_and_removing_again_is_fine() {
    let world = World::new();
    let devices = [gpu(0), mig()];
    assert!(!world.cdi.claim_is_written(&uid(), &devices));
    let ids = world.cdi.write_claim(&uid(), &devices).unwrap();
    let first = fs::read(world.path("cdi/gpu.divvy.dev-claim_1-2.json")).unwrap();
    assert_eq!(world.cdi.write_claim(&uid(), &devices).unwrap(), ids);
    assert_eq!(fs::read(world.path("cdi/gpu.divvy.dev-claim_1-2.json")).unwrap(), first);
    assert!(world.cdi.claim_is_written(&uid(), &devices));
    assert!(!world.cdi.claim_is_written(&uid(), &devices[..1]));
    world.cdi.remove_claim(&uid()).unwrap();
    world.cdi.remove_claim(&uid()).unwrap();
    assert_eq!(fs::read_dir(world.path("cdi")).unwrap().count(), 0);
}

#[test]
fn what_a_killed_write_left_goes_with_the_claim() {
    let world = World::new();
    world.file("cdi/gpu.divvy.dev-claim_1-2.part", b"{");
    world.cdi.remove_claim(&uid()).unwrap();
    assert_eq!(fs::read_dir(world.path("cdi")).unwrap().count(), 0);
}

#[test]
fn admin_access_shows_what_is_live_and_joins_the_same_device() {
    let world = World::new();
    let admin = DeviceNodes::Admin { minor: 1, instances: vec![(2, vec![0])] };
    let admin = plain("gpu-1", admin);
    let ids = world.cdi.write_claim(&uid(), &[gpu(1), admin]).unwrap();
    assert_eq!(ids[0], ids[1]);
    let devices = world.written()["devices"].take();
    let paths: Vec<_> = devices[0]["containerEdits"]["deviceNodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|n| n["path"].clone())
        .collect();
    assert_eq!(paths, ["/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap156", "/dev/nvidia-caps/nvidia-cap157"]);
    assert_eq!(devices.as_array().unwrap().len(), 1);
}

#[test]
fn admin_access_takes_nothing_from_a_client_of_the_same_device() {
    let world = World::new();
    let limits = MpsLimits { threads: Some(30), ..MpsLimits::default() };
    let client =
        ClaimDevice { mps: Some(MpsClient { dir: "/run/divvy/mps/GPU-a".into(), limits }), ..gpu(1) };
    let admin = plain("gpu-1", DeviceNodes::Admin { minor: 1, instances: vec![] });
    for devices in [[client.clone(), admin.clone()], [admin, client]] {
        world.cdi.write_claim(&uid(), &devices).unwrap();
        let devices = world.written()["devices"].take();
        let edits = &devices[0]["containerEdits"];
        assert_eq!(edits["mounts"][0]["containerPath"], "/tmp/nvidia-mps");
        assert_eq!(edits["env"].as_array().map(Vec::len), Some(2));
        assert_eq!(devices.as_array().unwrap().len(), 1);
    }
}

#[test]
fn a_driver_that_was_updated_is_seen_at_once() {
    let world = World::new();
    world.cdi.write_claim(&uid(), &[gpu(0)]).unwrap();
    for library in ["libcuda", "libnvidia-ml"] {
        let to = world.path(&format!("driver/usr/lib64/{library}.so.590.2"));
        fs::rename(world.path(&format!("driver/usr/lib64/{library}.so.580.1")), to).unwrap();
    }
    assert!(!world.cdi.claim_is_written(&uid(), &[gpu(0)]));
    world.cdi.write_claim(&uid(), &[gpu(0)]).unwrap();
    assert_eq!(
        world.written()["containerEdits"]["mounts"][0]["containerPath"],
        "/usr/lib64/libcuda.so.590.2"
    );
}

#[test]
fn missing_nodes_and_modules_are_made_by_the_drivers_helper() {
    let world = World::new();
    for node in ["nvidia0", "nvidia-uvm", "nvidiactl"] {
        world.remove(&format!("driver/dev/{node}"));
    }
    world.file("proc/devices", b"Character devices:\n  1 mem\n");
    let (dev, devices) = (world.path("driver/dev"), world.path("proc/devices"));
    let script = format!(
        "case \"$*\" in\n\
         '-c 255') : > {dev}/nvidiactl; echo '195 nvidia' >> {devices};;\n\
         '-c 0') : > {dev}/nvidia0;;\n\
         '-u') : > {dev}/nvidia-uvm; echo '511 nvidia-uvm' >> {devices};;\n\
         *) exit 9;;\nesac\n",
        dev = dev.display(),
        devices = devices.display(),
    );
    world.program("driver/usr/bin/nvidia-modprobe", &script);
    world.cdi.check().unwrap();
    world.cdi.write_claim(&uid(), &[gpu(0)]).unwrap();
}

#[test]
fn a_look_at_once_asks_no_helper() {
    let world = World::new();
    world.cdi.write_claim(&uid(), &[gpu(0)]).unwrap();
    assert_eq!(world.cdi.claim_is_written_at_once(&uid(), &[gpu(0)]), Some(true));
    assert_eq!(world.cdi.claim_is_written_at_once(&uid(), &[gpu(1)]), Some(false));
    let asked = world.path("asked");
    let node = world.path("driver/dev/nvidia0");
    let script = format!(": > {}; : > {}", asked.display(), node.display());
    world.program("driver/usr/bin/nvidia-modprobe", &script);
    world.remove("driver/dev/nvidia0");
    assert_eq!(world.cdi.claim_is_written_at_once(&uid(), &[gpu(0)]), None);
    assert!(!asked.exists());
    assert!(world.cdi.claim_is_written(&uid(), &[gpu(0)]));
    assert!(asked.exists());
}

#[test]
fn a_helper_that_does_not_help_is_one_clear_error() {
    let world = World::new();
    world.remove("driver/dev/nvidia-uvm");
    let text = told(&world.cdi.check().unwrap_err());
    assert!(text.contains("nvidia-uvm is missing") && text.contains("nvidia-modprobe"), "{text}");
    world.program("driver/usr/bin/nvidia-modprobe", "echo no such module >&2; exit 1");
    refused(&world, &[gpu(0)], &["nvidia-uvm is missing", "no such module"]);
    world.program("driver/usr/bin/nvidia-modprobe", "exit 0");
    refused(&world, &[gpu(0)], &["nvidia-uvm is missing"]);
}

#[test]
fn an_instance_without_its_files_names_claim_device_and_path() {
    let world = World::new();
    let device = mig();
    world.remove("proc/driver/nvidia/capabilities/gpu1/mig/gi2/ci0/access");
    refused(
        &world,
        std::slice::from_ref(&device),
        &["gpu-1-mig-3g40gb-9-4", "gi2/ci0/access", "No such file"],
    );
    world.file("proc/driver/nvidia/capabilities/gpu1/mig/gi2/ci0/access", b"DeviceFileMode: 292\n");
    refused(&world, &[device], &["gi2/ci0/access", "DeviceFileMinor"]);
}

#[test]
fn a_directory_that_is_missing_is_refused_before_and_at_the_claim() {
    let world = World::new();
    world.cdi.check().unwrap();
    fs::remove_dir(world.path("cdi")).unwrap();
    let text = told(&world.cdi.check().unwrap_err());
    assert!(text.contains("--cdi-dir") && text.contains("No such file"), "{text}");
    refused(&world, &[gpu(0)], &["gpu.divvy.dev-claim_1-2.json", "No such file"]);
}
