//! CDI files in a temporary directory with a driver root of two libraries, and kernel tables and
//! device nodes as on a real node.

use super::*;
use serde_json::{Value, json};
use std::fs;

mod shares;

const DEVICES: &str = "Character devices:\n195 nvidia\n237 nvidia-caps\n511 nvidia-uvm\n\nBlock devices:\n";

struct CdiFixture {
    dir: tempfile::TempDir,
    cdi: Cdi,
}

impl CdiFixture {
    fn new() -> Self {
        Self::with(|_| HookMode::None)
    }

    fn with(hook: impl FnOnce(&Path) -> HookMode) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let paths = HostPaths::below(&root);
        fs::create_dir_all(&paths.cdi_dir).unwrap();
        let library = library::tests::library(&root);
        let fixture = Self { cdi: Cdi::new(&paths, hook(&root), &library), dir };
        fixture.file("driver/usr/lib64/libcuda.so.580.1", &files::tests::library("libcuda.so.1"));
        fixture.file("driver/usr/lib64/libnvidia-ml.so.580.1", &files::tests::library("libnvidia-ml.so.1"));
        fixture.file("driver/usr/bin/nvidia-smi", b"smi");
        fixture.file("proc/devices", DEVICES.as_bytes());
        for node in ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidia1"] {
            fixture.file(&format!("driver/dev/{node}"), b"");
        }
        fixture.capability("gpu1/mig/gi2/access", 156);
        fixture.capability("gpu1/mig/gi2/ci0/access", 157);
        fixture
    }

    fn path(&self, path: &str) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join(path)
    }

    fn file(&self, path: &str, content: &[u8]) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// Writes an executable through a child process: a file that this process has open for writing
    /// while another test forks could not be executed.
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

/// The error with its causes, as it is logged.
fn error_chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

fn refused(fixture: &CdiFixture, devices: &[ClaimDevice], parts: &[&str]) {
    let text = error_chain(&fixture.cdi.write_claim(&uid(), devices).unwrap_err());
    for part in parts.iter().chain(&["claim 1-2"]) {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
    let left: Vec<_> = fs::read_dir(fixture.path("cdi")).map(|dir| dir.collect()).unwrap_or_default();
    assert!(left.is_empty(), "{left:?}");
}

fn node(path: &str, major: u32, minor: u32) -> Value {
    json!({"path": path, "type": "c", "major": major, "minor": minor, "permissions": "rw"})
}

#[test]
fn mps_clients_get_their_limits_and_the_daemon_directories() {
    let fixture = CdiFixture::new();
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
    let ids = fixture.cdi.write_claim(&uid(), &devices).unwrap();
    let ids: Vec<_> = ids.iter().map(CdiId::as_str).collect();
    assert_eq!(ids, ["gpu.divvy.dev/claim=1-2-gpu-0-mps-s-1", "gpu.divvy.dev/claim=1-2-gpu-0-mps-s-2"]);
    let file: Value =
        serde_json::from_slice(&fs::read(fixture.path("cdi/gpu.divvy.dev-claim_1-2.json")).unwrap()).unwrap();
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
    let mount = |host: &str, container: &str| -> Value {
        json!({"hostPath": host, "containerPath": container, "options": options})
    };
    let mounts = json!([
        mount("/run/divvy/mps/GPU-a/pipe", "/tmp/nvidia-mps"),
        mount("/run/divvy/mps/GPU-a/shm", "/dev/shm"),
    ]);
    assert_eq!((&edits(0)["mounts"], &edits(1)["mounts"]), (&mounts, &mounts));
    assert_eq!(edits(0)["deviceNodes"], json!([node("/dev/nvidia0", 195, 0)]));
}

#[test]
fn claim_file_has_its_devices_and_the_common_edits() {
    let fixture = CdiFixture::new();
    let ids = fixture.cdi.write_claim(&uid(), &[gpu(0), mig()]).unwrap();
    let ids: Vec<_> = ids.iter().map(CdiId::as_str).collect();
    assert_eq!(ids, ["gpu.divvy.dev/claim=1-2-gpu-0", "gpu.divvy.dev/claim=1-2-gpu-1-mig-3g40gb-9-4"]);
    let cap = |minor: u32| {
        let mut node = node(&format!("/dev/nvidia-caps/nvidia-cap{minor}"), 237, minor);
        node["fileMode"] = json!(0o444);
        node
    };
    let mount = |path: &str, container: &str| {
        json!({
            "hostPath": fixture.path("driver").join(path),
            "containerPath": container,
            "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
        })
    };
    assert_eq!(
        fixture.written(),
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
                    {
                        "hostPath": fixture.path("cdi/gpu.divvy.dev-claim_1-2.json"),
                        "containerPath": "/run/divvy-claims/1-2.json",
                        "options": ["ro", "nosuid", "nodev", "noexec", "bind", "rprivate"],
                    },
                ],
            },
        })
    );
}

#[test]
fn claim_file_is_mounted_in_every_mode() {
    let fixture = CdiFixture::new();
    let client = MpsClient { dir: "/run/divvy/mps/GPU-a".into(), limits: MpsLimits::default() };
    let mps = ClaimDevice { share: Some("s".into()), mps: Some(client), ..gpu(0) };
    let timeslice = ClaimDevice { share: Some("s".into()), ..gpu(0) };
    let shares = [Injection::Preload, Injection::Shim].map(|injection| share("s", injection));
    for device in [gpu(0), mig(), mps, timeslice].into_iter().chain(shares) {
        fixture.cdi.write_claim(&uid(), std::slice::from_ref(&device)).unwrap();
        let written = fixture.written();
        let mounts = written["containerEdits"]["mounts"].as_array().unwrap();
        let file = fixture.path("cdi/gpu.divvy.dev-claim_1-2.json");
        assert!(mounts.iter().any(|mount| mount["hostPath"] == json!(file)), "{device:?}");
    }
}

#[test]
fn only_own_claim_files_are_listed() {
    let fixture = CdiFixture::new();
    fixture.cdi.write_claim(&uid(), &[gpu(0)]).unwrap();
    for name in
        ["gpu.divvy.dev-claim_b.part", "gpu.divvy.dev-other_c.json", "k8s.gpu.nvidia.com-claim_d.json"]
    {
        fixture.file(&format!("cdi/{name}"), b"{}");
    }
    let mut claims: Vec<_> = fixture.cdi.claim_files().into_iter().map(|(claim, _)| claim).collect();
    claims.sort();
    assert_eq!(claims, [uid(), "b".into()]);
}

#[test]
fn library_named_by_a_claim_file_is_not_unused() {
    let fixture = CdiFixture::new();
    fixture.cdi.write_claim(&uid(), &[share("s", Injection::Preload)]).unwrap();
    let hashes = || fixture.cdi.unused_libraries().into_iter().map(|(hash, _)| hash).collect::<Vec<_>>();
    assert_eq!(hashes(), [""; 0]);
    let old = fixture.cdi.library().unwrap().preloaded;
    let old = old.parent().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
    // An upgrade of the library.
    fs::write(fixture.path("library/libdivvy.so"), "new").unwrap();
    let cdi = Cdi::new(fixture.cdi.paths(), HookMode::None, &fixture.path("library"));
    assert_eq!(cdi.unused_libraries(), []);
    cdi.remove_claim(&uid()).unwrap();
    let unused: Vec<_> = cdi.unused_libraries().into_iter().map(|(hash, _)| hash).collect();
    assert_eq!(unused, [old]);
}

#[test]
fn hook_gets_all_names_of_libraries() {
    let fixture = CdiFixture::with(|root| {
        fs::write(root.join("divvy-hook"), "hook").unwrap();
        HookMode::Own(root.join("divvy-hook"))
    });
    fixture.cdi.write_claim(&uid(), &[gpu(0)]).unwrap();
    let hook = fixture.written()["containerEdits"]["hooks"][0].take();
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
    assert!(path.starts_with(fixture.path("kubelet/plugins/gpu.divvy.dev/hook").to_str().unwrap()), "{path}");
    assert_eq!(fs::read(path).unwrap(), b"hook");

    fs::remove_file(path).unwrap();
    fixture.cdi.write_claim(&uid(), &[gpu(0)]).unwrap();
    assert!(Path::new(path).exists(), "a removed hook is installed again");
}

#[test]
fn writing_and_removing_are_idempotent() {
    let fixture = CdiFixture::new();
    let devices = [gpu(0), mig()];
    assert!(!fixture.cdi.claim_is_written(&uid(), &devices));
    let ids = fixture.cdi.write_claim(&uid(), &devices).unwrap();
    let first = fs::read(fixture.path("cdi/gpu.divvy.dev-claim_1-2.json")).unwrap();
    assert_eq!(fixture.cdi.write_claim(&uid(), &devices).unwrap(), ids);
    assert_eq!(fs::read(fixture.path("cdi/gpu.divvy.dev-claim_1-2.json")).unwrap(), first);
    assert!(fixture.cdi.claim_is_written(&uid(), &devices));
    assert!(!fixture.cdi.claim_is_written(&uid(), &devices[..1]));
    fixture.cdi.remove_claim(&uid()).unwrap();
    fixture.cdi.remove_claim(&uid()).unwrap();
    assert_eq!(fs::read_dir(fixture.path("cdi")).unwrap().count(), 0);
}

#[test]
fn temporary_file_is_removed_with_the_claim() {
    let fixture = CdiFixture::new();
    fixture.file("cdi/gpu.divvy.dev-claim_1-2.part", b"{");
    fixture.cdi.remove_claim(&uid()).unwrap();
    assert_eq!(fs::read_dir(fixture.path("cdi")).unwrap().count(), 0);
}

#[test]
fn admin_access_adds_live_instances_to_the_same_device() {
    let fixture = CdiFixture::new();
    let admin = DeviceNodes::Admin { minor: 1, instances: vec![(2, vec![0])] };
    let admin = plain("gpu-1", admin);
    let ids = fixture.cdi.write_claim(&uid(), &[gpu(1), admin]).unwrap();
    assert_eq!(ids[0], ids[1]);
    let devices = fixture.written()["devices"].take();
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
fn admin_access_keeps_the_edits_of_an_mps_client() {
    let fixture = CdiFixture::new();
    let limits = MpsLimits { threads: Some(30), ..MpsLimits::default() };
    let client =
        ClaimDevice { mps: Some(MpsClient { dir: "/run/divvy/mps/GPU-a".into(), limits }), ..gpu(1) };
    let admin = plain("gpu-1", DeviceNodes::Admin { minor: 1, instances: vec![] });
    for devices in [[client.clone(), admin.clone()], [admin, client]] {
        fixture.cdi.write_claim(&uid(), &devices).unwrap();
        let devices = fixture.written()["devices"].take();
        let edits = &devices[0]["containerEdits"];
        assert_eq!(edits["mounts"][0]["containerPath"], "/tmp/nvidia-mps");
        assert_eq!(edits["env"].as_array().map(Vec::len), Some(2));
        assert_eq!(devices.as_array().unwrap().len(), 1);
    }
}

#[test]
fn driver_update_is_detected() {
    let fixture = CdiFixture::new();
    fixture.cdi.write_claim(&uid(), &[gpu(0)]).unwrap();
    for library in ["libcuda", "libnvidia-ml"] {
        let to = fixture.path(&format!("driver/usr/lib64/{library}.so.590.2"));
        fs::rename(fixture.path(&format!("driver/usr/lib64/{library}.so.580.1")), to).unwrap();
    }
    assert!(!fixture.cdi.claim_is_written(&uid(), &[gpu(0)]));
    fixture.cdi.write_claim(&uid(), &[gpu(0)]).unwrap();
    assert_eq!(
        fixture.written()["containerEdits"]["mounts"][0]["containerPath"],
        "/usr/lib64/libcuda.so.590.2"
    );
}

#[test]
fn missing_nodes_and_modules_are_created_by_modprobe() {
    let fixture = CdiFixture::new();
    for node in ["nvidia0", "nvidia-uvm", "nvidiactl"] {
        fixture.remove(&format!("driver/dev/{node}"));
    }
    fixture.file("proc/devices", b"Character devices:\n  1 mem\n");
    let (dev, devices) = (fixture.path("driver/dev"), fixture.path("proc/devices"));
    let script = format!(
        "case \"$*\" in\n\
         '-c 255') : > {dev}/nvidiactl; echo '195 nvidia' >> {devices};;\n\
         '-c 0') : > {dev}/nvidia0;;\n\
         '-u') : > {dev}/nvidia-uvm; echo '511 nvidia-uvm' >> {devices};;\n\
         *) exit 9;;\nesac\n",
        dev = dev.display(),
        devices = devices.display(),
    );
    fixture.program("driver/usr/bin/nvidia-modprobe", &script);
    fixture.cdi.check().unwrap();
    fixture.cdi.write_claim(&uid(), &[gpu(0)]).unwrap();
}

#[test]
fn nonblocking_check_runs_no_modprobe() {
    let fixture = CdiFixture::new();
    fixture.cdi.write_claim(&uid(), &[gpu(0)]).unwrap();
    assert_eq!(fixture.cdi.claim_is_written_nonblocking(&uid(), &[gpu(0)]), Some(true));
    assert_eq!(fixture.cdi.claim_is_written_nonblocking(&uid(), &[gpu(1)]), Some(false));
    let marker = fixture.path("marker");
    let node = fixture.path("driver/dev/nvidia0");
    let script = format!(": > {}; : > {}", marker.display(), node.display());
    fixture.program("driver/usr/bin/nvidia-modprobe", &script);
    fixture.remove("driver/dev/nvidia0");
    assert_eq!(fixture.cdi.claim_is_written_nonblocking(&uid(), &[gpu(0)]), None);
    assert!(!marker.exists());
    assert!(fixture.cdi.claim_is_written(&uid(), &[gpu(0)]));
    assert!(marker.exists());
}

#[test]
fn failed_modprobe_is_reported_with_its_output() {
    let fixture = CdiFixture::new();
    fixture.remove("driver/dev/nvidia-uvm");
    let text = error_chain(&fixture.cdi.check().unwrap_err());
    assert!(text.contains("nvidia-uvm is missing") && text.contains("nvidia-modprobe"), "{text}");
    fixture.program("driver/usr/bin/nvidia-modprobe", "echo no such module >&2; exit 1");
    refused(&fixture, &[gpu(0)], &["nvidia-uvm is missing", "no such module"]);
    fixture.program("driver/usr/bin/nvidia-modprobe", "exit 0");
    refused(&fixture, &[gpu(0)], &["nvidia-uvm is missing"]);
}

#[test]
fn missing_capability_file_names_claim_device_and_path() {
    let fixture = CdiFixture::new();
    let device = mig();
    fixture.remove("proc/driver/nvidia/capabilities/gpu1/mig/gi2/ci0/access");
    refused(
        &fixture,
        std::slice::from_ref(&device),
        &["gpu-1-mig-3g40gb-9-4", "gi2/ci0/access", "No such file"],
    );
    fixture.file("proc/driver/nvidia/capabilities/gpu1/mig/gi2/ci0/access", b"DeviceFileMode: 292\n");
    refused(&fixture, &[device], &["gi2/ci0/access", "DeviceFileMinor"]);
}

#[test]
fn missing_cdi_directory_fails_readiness_and_prepare() {
    let fixture = CdiFixture::new();
    fixture.cdi.check().unwrap();
    fs::remove_dir(fixture.path("cdi")).unwrap();
    let text = error_chain(&fixture.cdi.check().unwrap_err());
    assert!(text.contains("--cdi-dir") && text.contains("No such file"), "{text}");
    refused(&fixture, &[gpu(0)], &["gpu.divvy.dev-claim_1-2.json", "No such file"]);
}

#[test]
fn metadata_of_an_earlier_version_is_still_mounted() {
    let fixture = CdiFixture::new();
    let object = |owner: &str| {
        format!(r#"{{"metadata": {{"name": "n", "namespace": "ns", "uid": "1-2"}}, {owner} "requests": []}}"#)
    };
    let check = |file: &str, content: &str, expected: &str| {
        fixture.file(&format!("state/metadata/1-2/{file}"), content.as_bytes());
        fixture.cdi.write_claim(&uid(), &[gpu(0)]).unwrap();
        let mounts = &fixture.written()["devices"][0]["containerEdits"]["mounts"];
        assert_eq!(mounts[0]["hostPath"], json!(fixture.path(&format!("state/metadata/1-2/{file}"))));
        let path =
            format!("/var/run/kubernetes.io/dra-device-attributes/{expected}/gpu.divvy.dev-metadata.json");
        assert_eq!(mounts[0]["containerPath"], json!(path));
        assert_eq!(fixture.cdi.described_claim(&uid()).unwrap().to_string(), "ns/n");
        fixture.cdi.remove_claim(&uid()).unwrap();
        assert!(!fixture.path("state/metadata/1-2").exists());
    };
    let request = gpu(0).request;
    let template = object(r#""podClaimName": "p","#);
    check(&format!("{request}.json"), &object(""), &format!("resourceclaims/n/{request}"));
    check(&format!("{request}.json"), &template, &format!("resourceclaimtemplates/p/{request}"));
    let nested = format!("resourceclaims/n/{request}/metadata.json");
    check(&nested, &object(""), &format!("resourceclaims/n/{request}"));
}
