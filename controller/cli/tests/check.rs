//! `divvy check` on files that people have: each has the expected findings and exit status, and no
//! other. `divvy import` turns the files of other tools into files that pass the check.

use serde_json::Value;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

fn divvy(arguments: &[&str], input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_divvy"));
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut divvy = command.spawn().expect("divvy starts");
    divvy.stdin.take().expect("its input").write_all(input.as_bytes()).expect("written");
    divvy.wait_with_output().expect("divvy exits")
}

fn file(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/check").join(name);
    path.display().to_string()
}

fn findings(out: &Output) -> Vec<Value> {
    serde_json::from_slice(&out.stdout).expect("JSON")
}

/// `severity: part of the message` for each finding.
fn compare(what: &str, out: &Output, expected: &[&str]) {
    let found = findings(out);
    let shown: Vec<_> = found
        .iter()
        .map(|finding| {
            let text = |field: &str| finding[field].as_str().unwrap_or_default().to_owned();
            let instead = finding["instead"].as_array().map_or(0, Vec::len);
            format!("{}: {}: {} [{instead}]", text("severity"), text("path"), text("message"))
        })
        .collect();
    assert_eq!(shown.len(), expected.len(), "{what}: {shown:#?}");
    for (shown, expected) in shown.iter().zip(expected) {
        let (severity, part) = expected.split_once(": ").expect("a severity");
        assert!(shown.starts_with(severity) && shown.contains(part), "{what}: {shown}, expected {expected}");
    }
    let errors = found.iter().any(|finding| finding["severity"] == "error");
    assert_eq!(out.status.code(), Some(i32::from(errors)), "{what}");
}

fn check_file(name: &str, expected: &[&str]) {
    compare(name, &divvy(&["check", "-o", "json", &file(name)], ""), expected);
}

fn check(text: &str, expected: &[&str]) {
    compare(text, &divvy(&["check", "-o", "json", "-"], text), expected);
}

/// A claim with one request of these fields, in YAML flow style.
fn claim(request: &str) -> String {
    format!(
        "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {{name: c}}\n\
         spec: {{devices: {{requests: [{request}]}}}}\n"
    )
}

/// A claim of shares with these capacities.
fn share(amounts: &str) -> String {
    claim(&format!(
        "{{name: gpu, exactly: {{deviceClassName: share.divvy.dev, capacity: {{requests: {{{amounts}}}}}}}}}"
    ))
}

fn pod(metadata: &str, spec: &str, container: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: p{metadata}}}\n\
         spec:\n  {spec}\n  containers:\n  - {{name: main, image: x{container}}}\n"
    )
}

#[test]
fn each_known_mistake_has_its_answer() {
    let alone = "warning: cores without memory takes all memory of the GPU";
    check_file("07-cores-only.yaml", &[alone]);
    check_file("08-cores-percent.yaml", &["error: cores is \"30%\", which is not a number; write 30"]);
    check_file(
        "12-wrong-class.yaml",
        &["error: there is no DeviceClass shares.divvy.dev; did you mean share.divvy.dev?"],
    );
    let nvidia = "error: DeviceClass gpu.nvidia.com is of another driver, which Divvy does not serve";
    check_file("13-nvidia-class.yaml", &[nvidia]);
    let hami = "error: a share has no capacity gpumem: memory is HAMi's gpumem, with a unit, and cores is \
         gpucores; write memory: 3000Mi";
    check_file("14-unknown-cap.yaml", &[hami]);
    check_file("30-hami-pod.yaml", &["warning: of HAMi serves, not Divvy; request this claim instead [2]"]);
    check_file("32-nvidia-dra.yaml", &[nvidia]);
    let plugin = "warning: the configuration of NVIDIA's device plugin; `divvy import device-plugin FILE`";
    check_file("34-dp-timeslicing.yaml", &[plugin]);
    check_file(
        "36-spec-typo.yaml",
        &[
            "error: field deviceClasName is unknown to ExactDeviceRequest; did you mean deviceClassName?",
            "error: field request is unknown to CapacityRequirements; did you mean requests?",
        ],
    );
    check_file(
        "37-v1beta1-shape.yaml",
        &[
            "error: apiVersion resource.k8s.io/v1beta1 is not supported; use resource.k8s.io/v1 [1]",
            "error: its DeviceClass is for part of a GPU; set memory or cores",
        ],
    );
    check_file("39-bad-cel.yaml", &["error: close the quotation mark"]);
    check_file("43-empty.yaml", &["error: the file is empty, so there is nothing to check"]);
    check_file(
        "48-pod-claims-mistake.yaml",
        &["error: container main names the claim gpuu, which the pod does not declare; did you mean gpu?"],
    );
    check_file(
        "50-gpu-half.yaml",
        &["error: whole numbers, but nvidia.com/gpu is 0.5; request a share instead"],
    );
    let memory = "error: memory is a capacity; write device.capacity[\"gpu.divvy.dev\"].memory";
    check_file("B01-memory-as-string.yaml", &[memory]);
    let mig = "warning: container main gets several MIG instances, but a CUDA process sees one MIG device";
    check_file("B03-two-mig-one-container.yaml", &[mig]);
    let map = "warning: the configuration of NVIDIA's device plugin in data[any], data[mps8]; `divvy import";
    check_file("B06-timeslicing-cm.yaml", &[map]);
    check_file("B07-migparted-cm.yaml", &["warning: in data[config.yaml]; `divvy import mig-parted FILE`"]);
    let privileged = "warning: sees all GPUs of the node, so the limit of claim g does not hold";
    check_file("B11-privileged-share.yaml", &[privileged]);
    check_file("B14-at-least-40.yaml", &["warning: memory is 90Gi, and only", alone]);
    let h100 = divvy(&["check", "-o", "json", "--gpus", "H100-SXM5-80GB", &file("B14-at-least-40.yaml")], "");
    let largest = "warning: memory is 90Gi, more than any GPU that is published; request at most 81559Mi, as \
         H100-SXM5-80GB has";
    compare("B14 on H100", &h100, &[largest, alone]);
}

#[test]
fn units_are_explained() {
    check(&share("memory: 10GB"), &["error: memory is \"10GB\", which is not a quantity; write 10G or 10Gi"]);
    check(&share("memory: 10 GiB"), &["error: write 10Gi"]);
    check(&share("memory: 10gi"), &["error: write 10Gi"]);
    check(&share("memory: 10000"), &["error: expected at least 1Mi; write 10000Mi if MiB was meant"]);
    check(&share("memory: 10"), &["error: write 10Gi if GiB was meant, or 10Mi"]);
    check(&share("memory: ten"), &["error: memory: \"ten\" is not a quantity"]);
    check(&share("memory: [1]"), &["error: memory is a list, expected a quantity"]);
    check(&share("memory: 10Gi, cores: 0.3"), &["error: expected per cent of the compute time"]);
    check(&share("memory: 10Gi, cores: 30 percent"), &["error: write 30"]);
    check(&share("memory: 10Gi, cores: 300"), &["error: cores is 300, expected per cent"]);
    check(&share("gpumem: 3000"), &["error: write memory: 3000Mi"]);
    check(&share("memory: 10Gi, gpucores: 30"), &["error: write cores: 30"]);
}

#[test]
fn fields_have_their_names_and_types() {
    let request =
        |fields: &str| claim(&format!("{{name: gpu, exactly: {{deviceClassName: gpu.divvy.dev{fields}}}}}"));
    check(&request(", count: \"2\""), &["error: expected a whole number; write 2 without quotes"]);
    check(&request(", adminAcess: false"), &["error: did you mean adminAccess?"]);
    check(&request(", allocationMode: all"), &["error: expected ExactCount or All; did you mean All?"]);
    check(&request(", count: 0"), &["error: count is 0, expected at least 1"]);
    check(
        &request(", memory: 40Gi"),
        &["error: unknown to ExactDeviceRequest; put it under capacity.requests"],
    );
    check(&claim("{name: gpu}"), &["error: request gpu has neither exactly nor firstAvailable"]);
    check(
        &claim("{name: GPU_1, exactly: {deviceClassName: gpu.divvy.dev}}"),
        &["error: is not a valid name; use lowercase letters"],
    );
    check(&claim("{name: gpu, exactly: {}}"), &["error: the request names no DeviceClass"]);
    let old = claim("{name: gpu, deviceClassName: gpu.divvy.dev, count: 2}");
    check(&old, &["error: these fields of a request are of v1beta1; in v1 they are under exactly [1]"]);
    check(
        &old.replace("io/v1", "io/v1alpha3"),
        &["error: v1alpha3 is not supported; use resource.k8s.io/v1"],
    );
    check(
        &old.replace("kind: ResourceClaim", "kind: ResourceClaims"),
        &[
            "error: there is no kind ResourceClaims in resource.k8s.io/v1; did you mean ResourceClaim?",
            "error: these fields of a request are of v1beta1",
        ],
    );
    check(&pod("", "restartPolcy: Never", ""), &["error: unknown to PodSpec; did you mean restartPolicy?"]);
    check(&pod("", "hostPID: \"yes\"", ""), &["error: expected true or false; write true without quotes"]);
    check(
        &pod("", "restartPolicy: Never", ", env: [{name: A, value: 1}]"),
        &["error: expected a text; write \"1\" in quotes"],
    );
    let deployment = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d}\nspec:\n  replica: 2\n  \
         template: {spec: {containers: [{name: main, image: x, limits: {nvidia.com/gpu: 1}}]}}\n";
    check(
        deployment,
        &[
            "error: field replica is unknown to DeploymentSpec; did you mean replicas?",
            "error: field limits is unknown to Container; put it under resources",
        ],
    );
    check(
        &deployment.replace("apps/v1", "v1"),
        &[
            "error: kind Deployment has no apiVersion v1; write apiVersion: apps/v1",
            "error: field replica is unknown to DeploymentSpec",
            "error: field limits is unknown to Container",
        ],
    );
}

#[test]
fn unknown_names_have_a_suggestion() {
    let class = |name: &str| claim(&format!("{{name: gpu, exactly: {{deviceClassName: {name}}}}}"));
    check(&class("gpus.divvy.dev"), &["error: did you mean gpu.divvy.dev?"]);
    check(&class("mig.divy.dev"), &["error: did you mean mig.divvy.dev?"]);
    check(
        &class("mig-1g.10g.divvy.dev"),
        &["error: the MIG profile 1g.10g; did you mean mig-1g.10gb.divvy.dev?"],
    );
    check(&class("gpu.divvy.io"), &["error: did you mean gpu.divvy.dev?"]);
    check(&class("gpu"), &["warning: did you mean gpu.divvy.dev?"]);
    check(&class("team-a.example.com"), &[]);
    check(&class("vfio.gpu.nvidia.com"), &["error: of NVIDIA's driver has no counterpart"]);
    let selected = |expression: &str| {
        let selectors = format!("[{{cel: {{expression: '{expression}'}}}}]");
        claim(&format!("{{name: g, exactly: {{deviceClassName: mig.divvy.dev, selectors: {selectors}}}}}"))
    };
    let profile = "device.attributes[\"gpu.divvy.dev\"].profile == ";
    check(&selected(&format!("{profile}\"1g.10gb\"")), &[]);
    check(&selected(&format!("{profile}\"1g.10g\"")), &["warning: did you mean 1g.10gb?"]);
    check(
        &selected("device.attributes[\"gpu.divvy.dev\"].profil == \"1g.10gb\""),
        &["error: did you mean profile?"],
    );
    check(
        &selected("device.capacity[\"gpu.divvy.dev\"].memory >= quantity(\"16Gi\")"),
        &["error: operators cannot order quantities"],
    );
    let resource =
        |name: &str| pod("", "restartPolicy: Never", &format!(", resources: {{limits: {{{name}: 1}}}}"));
    check(&resource("nvidia.com/gpu"), &[]);
    check(&resource("nvidia.com/mig-1g.10gb"), &[]);
    check(&resource("nvidia.com/mig-1g.11gb"), &["error: the MIG profile 1g.11gb; did you mean"]);
    check(
        &resource("nvidia.com/gpus"),
        &["warning: serves the resource nvidia.com/gpus; did you mean nvidia.com/gpu?"],
    );
}

#[test]
fn requests_of_other_tools_are_ported() {
    let limits =
        |limits: &str| pod("", "restartPolicy: Never", &format!(", resources: {{limits: {{{limits}}}}}"));
    check(
        &limits("volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 1024"),
        &["warning: of Volcano serves, not Divvy; request this claim"],
    );
    check(
        &limits("nvidia.com/gpu: 1, nvidia.com/gpumem-percentage: 50"),
        &["warning: 50 of a GPU), which HAMi serves, not Divvy"],
    );
    check(
        &limits("nvidia.com/gpu: 1, nvidia.com/gpumem: 10Gi"),
        &["error: expected a number of MiB without a unit"],
    );
    let annotated =
        |annotations: &str| pod(&format!(", annotations: {{{annotations}}}"), "restartPolicy: Never", "");
    check(&annotated("gpu-memory: \"4096\""), &["warning: of KAI serves, not Divvy; request this claim"]);
    check(&annotated("gpu-fraction: \"0.5\""), &["warning: such as this one of a GPU with 80Gi [2]"]);
    let class = "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: gpu.nvidia.com}\n\
         spec: {selectors: [{cel: {expression: \"device.driver == 'gpu.nvidia.com'\"}}]}\n";
    check(class, &["warning: the class is for another driver; use the class for Divvy instead [1]"]);
}

#[test]
fn claims_and_containers_fit_together() {
    let template = "---\napiVersion: resource.k8s.io/v1\nkind: ResourceClaimTemplate\nmetadata: {name: t}\n\
         spec: {spec: {devices: {requests: [{name: g, exactly: {deviceClassName: share.divvy.dev, capacity: \
         {requests: {memory: 4Gi, cores: 30}}}}], config: [{opaque: {driver: gpu.divvy.dev, parameters: \
         {apiVersion: resource.divvy.dev/v1alpha1, kind: ShareConfig, ceiling: 20}}}]}}}\n";
    let claims = "resourceClaims: [{name: g, resourceClaimTemplateName: t}]";
    let ceiling = "warning: the ceiling 20 is below cores 30";
    let uses = |claims: &str| format!(", resources: {{claims: [{claims}]}}");
    check(&(pod("", claims, &uses("{name: g}")) + template), &[ceiling]);
    check(&(pod("", claims, "") + template), &["warning: no container uses the claim g", ceiling]);
    check(
        &(pod("", claims, &uses("{name: g, request: gg}")) + template),
        &["error: claim g has no request gg; did you mean g?", ceiling],
    );
    check(
        &pod("", "resourceClaims: [{name: g}]", &uses("{name: g}")),
        &["error: claim g has neither resourceClaimName nor resourceClaimTemplateName"],
    );
    check(
        &pod("", "restartPolicy: Never", ", resources: {requests: {nvidia.com/gpu: 1}}"),
        &["error: needs an equal limit; set nvidia.com/gpu: 1 in limits"],
    );
    let driver = template.replace("driver: gpu.divvy.dev", "driver: gpu.divy.dev");
    check(
        &(driver + "---\n" + &share("memory: 1Gi")),
        &["error: so Divvy ignores it; did you mean gpu.divvy.dev?"],
    );
    let workload = "apiVersion: ray.io/v1\nkind: RayCluster\nmetadata: {name: r}\n\
         spec: {headGroupSpec: {template: {spec: {containers: [{name: head, image: x, resources: \
         {claims: [{name: gpu}]}}]}}}}\n";
    check(workload, &["error: container head names the claim gpu, which the pod does not declare"]);
}

#[test]
fn all_findings_of_all_files_are_reported() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::create_dir(dir.path().join("below")).expect("a directory");
    std::fs::write(dir.path().join("a.yaml"), share("memory: 10GB")).expect("a file");
    std::fs::write(dir.path().join("below/b.yml"), share("memory: 10Gi, cores: 30%")).expect("a file");
    std::fs::write(dir.path().join("c.yaml"), "kind: Service\napiVersion: v1\n").expect("a file");
    std::fs::write(dir.path().join("notes.txt"), "not: [yaml").expect("a file");
    let path = dir.path().display().to_string();
    let out = divvy(&["check", "-o", "json", &path], "");
    compare("a directory", &out, &["error: write 10G or 10Gi", "error: write 30"]);
    let two = "a: 1\na: 2\n---\n".to_owned() + &share("memory: 10GB");
    check(&two, &["error: field a is given twice", "error: write 10G or 10Gi"]);
    check("kind: Service\napiVersion: v1\n", &["error: nothing to check"]);
    check("# nothing\n", &["error: the file is empty"]);
    let strict = divvy(&["check", "--strict", &file("07-cores-only.yaml")], "");
    assert_eq!(strict.status.code(), Some(1));
    assert_eq!(divvy(&["check"], "").status.code(), Some(2));
    assert_eq!(divvy(&["check", "/nonexistent"], "").status.code(), Some(1));
}

#[test]
fn ported_claims_are_printed_and_pass() {
    for name in [
        "13-nvidia-class.yaml",
        "30-hami-pod.yaml",
        "32-nvidia-dra.yaml",
        "37-v1beta1-shape.yaml",
        "50-gpu-half.yaml",
    ] {
        let text = divvy(&["check", &file(name)], "");
        let text = String::from_utf8_lossy(&text.stdout).into_owned();
        assert!(text.contains("\n    "), "{name}: {text}");
        let found = findings(&divvy(&["check", "-o", "json", &file(name)], ""));
        let instead = found[0]["instead"].as_array().expect(name);
        let complete = instead.iter().filter(|object| object["kind"].is_string());
        for object in complete.filter(|_| name != "37-v1beta1-shape.yaml") {
            compare(name, &divvy(&["check", "-o", "json", "-"], &object.to_string()), &[]);
        }
    }
}

#[test]
fn imported_files_pass_the_check() {
    for (command, name) in [
        ("device-plugin", "34-dp-timeslicing.yaml"),
        ("device-plugin", "B06-timeslicing-cm.yaml"),
        ("mig-parted", "B07-migparted-cm.yaml"),
        ("manifest", "13-nvidia-class.yaml"),
        ("manifest", "30-hami-pod.yaml"),
        ("manifest", "32-nvidia-dra.yaml"),
    ] {
        for format in ["yaml", "json"] {
            let out = divvy(&["import", command, "-o", format, &file(name)], "");
            assert!(out.status.success(), "{name}: {}", String::from_utf8_lossy(&out.stderr));
            let imported = String::from_utf8_lossy(&out.stdout).into_owned();
            compare(name, &divvy(&["check", "-o", "json", "-"], &imported), &[]);
        }
    }
    let half = divvy(&["import", "manifest", "--gpu-memory", "80Gi", &file("50-gpu-half.yaml")], "");
    let text = String::from_utf8_lossy(&half.stdout).into_owned();
    assert!(half.status.success() && text.contains("memory: 40Gi"), "{text}");
    compare("half", &divvy(&["check", "-o", "json", "-"], &text), &[]);
    assert_eq!(divvy(&["import", "manifest", &file("50-gpu-half.yaml")], "").status.code(), Some(1));
    let wrong = divvy(&["import", "mig-parted", &file("B06-timeslicing-cm.yaml")], "");
    let why = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(why.contains("use `divvy import device-plugin`"), "{why}");
}

#[test]
fn commands_about_the_program_work() {
    let text = |arguments: &[&str]| {
        let out = divvy(arguments, "");
        assert!(out.status.success(), "{arguments:?}");
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    assert!(text(&["completions", "bash"]).contains("_divvy"));
    assert!(text(&["man"]).contains(".TH divvy"));
    assert!(text(&["version"]).starts_with("divvy "));
    let version: Value = serde_json::from_str(&text(&["version", "-o", "json"])).expect("JSON");
    assert!(version["commit"].is_string() && version["target"].is_string());
    let applied = text(&["run", "--memory", "10Gi", "--cores", "30", "--", "cuda", "nvidia-smi"]);
    compare("run", &divvy(&["check", "-o", "json", "-"], &applied), &[]);
}
