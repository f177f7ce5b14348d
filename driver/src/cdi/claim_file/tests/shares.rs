//! Edits of shares, which whole GPUs do not get.

use super::*;

const DATA: [&str; 6] = ["ro", "nosuid", "nodev", "noexec", "bind", "rprivate"];
const PROGRAM: [&str; 5] = ["ro", "nosuid", "nodev", "rbind", "rprivate"];

fn with_hook() -> CdiFixture {
    CdiFixture::with(|root| {
        fs::write(root.join("divvy-hook"), "hook").unwrap();
        HookMode::Own(root.join("divvy-hook"))
    })
}

fn mount(host: impl AsRef<Path>, container: &str, options: &[&str]) -> Value {
    json!({"hostPath": host.as_ref(), "containerPath": container, "options": options})
}

/// Stages and arguments of hooks.
fn hooks(edits: &Value) -> Vec<(Value, Value)> {
    let hooks = edits["hooks"].as_array().unwrap().iter();
    hooks.map(|hook| (hook["hookName"].clone(), hook["args"].clone())).collect()
}

#[test]
fn share_adds_its_pages_and_the_preloaded_library() {
    let fixture = with_hook();
    let ids = fixture.cdi.write_claim(&uid(), &[share("s-1", Injection::Preload)]).unwrap();
    assert_eq!(ids[0].as_str(), "gpu.divvy.dev/claim=1-2-gpu-0-s-1");
    let library = fixture.cdi.library().unwrap();
    let dir = fixture.path("run/shares/1-2/s-1");
    let edits = fixture.written()["devices"][0]["containerEdits"].take();
    assert_eq!(
        edits["mounts"],
        json!([
            mount(dir.join("policy"), "/run/divvy/1-2/s-1/policy", &DATA),
            mount(
                dir.join("account"),
                "/run/divvy/1-2/s-1/account",
                &["rw", "nosuid", "nodev", "noexec", "bind", "rprivate"],
            ),
            mount(&library.preloaded, "/run/divvy/lib/libdivvy.so", &PROGRAM),
            mount(&library.list, "/etc/ld.so.preload", &DATA),
        ])
    );
    let args = |option: &str, sub: &str| json!(["divvy-hook", option, dir.join(sub)]);
    assert_eq!(
        hooks(&edits),
        [
            (json!("createRuntime"), args("--cgroups", "cgroups")),
            (json!("poststop"), args("--cgroups", "cgroups")),
            (json!("createContainer"), args("--preload", "preload")),
        ]
    );
    let common = hooks(&fixture.written()["containerEdits"]);
    let stages: Vec<_> = common.iter().map(|(stage, _)| stage.clone()).collect();
    assert_eq!(stages, ["createContainer", "createRuntime", "poststop"]);
    let registered = json!(["divvy-hook", "--process", fixture.path("run/containers/1-2")]);
    assert!(common[1..].iter().all(|(_, args)| *args == registered), "{common:?}");
}

#[test]
fn shims_replace_the_libraries_of_the_gpu_driver() {
    let fixture = with_hook();
    fixture.cdi.write_claim(&uid(), &[share("s-1", Injection::Shim)]).unwrap();
    let library = fixture.cdi.library().unwrap();
    let edits = fixture.written()["devices"][0]["containerEdits"].take();
    let mut expected = Vec::new();
    for (name, shim) in library::SHIMMED_LIBRARIES.iter().zip(&library.shims) {
        let file = format!("{}.580.1", name.strip_suffix(".1").unwrap());
        let real = fixture.path("driver/usr/lib64").join(&file);
        expected.push(mount(real, &format!("/run/divvy/lib/real/{name}"), &PROGRAM));
        expected.push(mount(shim, &format!("/usr/lib64/{name}"), &PROGRAM));
        expected.push(mount(shim, &format!("/usr/lib64/{file}"), &PROGRAM));
    }
    assert_eq!(edits["mounts"].as_array().unwrap()[2..], expected, "after the pages");
    let stages: Vec<_> = edits["hooks"].as_array().unwrap().iter().map(|hook| &hook["hookName"]).collect();
    assert_eq!(stages, ["createRuntime", "poststop"]);
}

/// If the container has another claim that the runtime processes later, its common mounts must not hide
/// the shims.
#[test]
fn common_mounts_do_not_hide_the_shims() {
    let fixture = with_hook();
    fixture.cdi.write_claim(&uid(), &[gpu(0)]).unwrap();
    let written = fixture.written();
    let mounts = written["containerEdits"]["mounts"].as_array().unwrap();
    assert!(mounts.iter().any(|mount| mount["containerPath"] == "/usr/lib64/libcuda.so.580.1"));
    for name in library::SHIMMED_LIBRARIES {
        let path = format!("/usr/lib64/{name}");
        assert!(mounts.iter().all(|mount| mount["containerPath"] != path), "{path}");
    }
}

/// A program must not reach the real library under any name.
#[test]
fn shims_without_a_hook_cover_all_names_of_the_library() {
    let fixture = CdiFixture::new();
    fixture.cdi.write_claim(&uid(), &[share("s-1", Injection::Shim)]).unwrap();
    let shims = fixture.cdi.library().unwrap().shims;
    let written = fixture.written();
    let at = |edits: &Value, path: &Value| {
        let mounts = edits["mounts"].as_array().unwrap().iter();
        mounts.filter(|mount| mount["containerPath"] == *path).map(|mount| mount["hostPath"].clone()).next()
    };
    let reals =
        ["libcuda.so.580.1", "libnvidia-ml.so.580.1"].map(|name| fixture.path("driver/usr/lib64").join(name));
    let mut covered = 0;
    for mount in written["containerEdits"]["mounts"].as_array().unwrap() {
        let Some(real) = reals.iter().position(|real| mount["hostPath"] == json!(real)) else { continue };
        let found = at(&written["devices"][0]["containerEdits"], &mount["containerPath"]);
        assert_eq!(found, Some(json!(shims[real])), "{}", mount["containerPath"]);
        covered += 1;
    }
    assert_eq!(covered, 5, "file and soname of each, and libcuda.so");
}

/// The edits of the document apply to every container that has any of its devices.
#[test]
fn whole_gpu_gets_no_library_even_beside_a_share() {
    for injection in [Injection::Preload, Injection::Shim] {
        let fixture = with_hook();
        fixture.cdi.write_claim(&uid(), &[gpu(1)]).unwrap();
        let alone = fixture.written();
        fixture.cdi.write_claim(&uid(), &[gpu(1), share("s-1", injection)]).unwrap();
        let beside = fixture.written();
        assert_eq!(beside["containerEdits"], alone["containerEdits"]);
        assert_eq!(beside["devices"][0], alone["devices"][0]);
        assert!(!alone.to_string().contains("divvy/lib") && !alone.to_string().contains("preload"));
    }
}

#[test]
fn shares_of_one_claim_differ_only_in_their_pages() {
    let fixture = with_hook();
    let both = [share("s-1", Injection::Preload), share("s-2", Injection::Preload)];
    let ids = fixture.cdi.write_claim(&uid(), &both).unwrap();
    assert_ne!(ids[0], ids[1]);
    let devices = fixture.written()["devices"].take();
    let renamed = devices[0].to_string().replace("s-1", "s-2");
    assert_eq!(renamed, devices[1].to_string());
}

#[test]
fn limits_are_enforced_without_a_hook() {
    let fixture = CdiFixture::new();
    fixture.cdi.write_claim(&uid(), &[share("s-1", Injection::Preload)]).unwrap();
    let edits = fixture.written()["devices"][0]["containerEdits"].take();
    assert_eq!(edits["mounts"].as_array().unwrap().len(), 4);
    assert!(edits.get("hooks").is_none());
}

#[test]
fn missing_library_blocks_only_shares() {
    let fixture = CdiFixture::new();
    fs::remove_dir_all(fixture.path("library")).unwrap();
    refused(&fixture, &[share("s-1", Injection::Preload)], &["library/libdivvy.so", "--library-dir"]);
    fixture.cdi.write_claim(&uid(), &[gpu(0)]).unwrap();
}
