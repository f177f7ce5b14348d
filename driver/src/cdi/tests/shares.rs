//! What a share brings into a container, and a whole GPU does not.

use super::*;

const DATA: [&str; 6] = ["ro", "nosuid", "nodev", "noexec", "bind", "rprivate"];
const PROGRAM: [&str; 5] = ["ro", "nosuid", "nodev", "rbind", "rprivate"];

fn hooked() -> World {
    World::with(|root| {
        fs::write(root.join("divvy-hook"), "hook").unwrap();
        HookMode::Own(root.join("divvy-hook"))
    })
}

fn mount(host: impl AsRef<Path>, container: &str, options: &[&str]) -> Value {
    json!({"hostPath": host.as_ref(), "containerPath": container, "options": options})
}

#[test]
fn a_share_brings_its_pages_and_the_library_that_goes_by_them() {
    let world = hooked();
    let ids = world.cdi.write_claim(&uid(), &[share("s-1", Injection::Preload)]).unwrap();
    assert_eq!(ids[0].as_str(), "gpu.divvy.dev/claim=1-2-gpu-0-s-1");
    let library = world.cdi.library().unwrap();
    let dir = world.path("run/shares/1-2/s-1");
    let edits = world.written()["devices"][0]["containerEdits"].take();
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
    let hooks = edits["hooks"].as_array().unwrap();
    let hooks: Vec<_> = hooks.iter().map(|hook| (hook["hookName"].clone(), hook["args"].clone())).collect();
    let args = |option: &str, sub: &str| json!(["divvy-hook", option, dir.join(sub)]);
    assert_eq!(
        hooks,
        [
            (json!("createRuntime"), args("--cgroups", "cgroups")),
            (json!("poststop"), args("--cgroups", "cgroups")),
            (json!("createContainer"), args("--preload", "preload")),
        ]
    );
    let common = world.written()["containerEdits"].take();
    assert_eq!(common["hooks"].as_array().unwrap().len(), 1, "what all claims have is as ever");
}

#[test]
fn a_shim_stands_in_the_place_of_the_gpu_drivers_libraries() {
    let world = hooked();
    world.cdi.write_claim(&uid(), &[share("s-1", Injection::Shim)]).unwrap();
    let library = world.cdi.library().unwrap();
    let edits = world.written()["devices"][0]["containerEdits"].take();
    let mut expected = Vec::new();
    for (name, shim) in library::STOOD_IN.iter().zip(&library.stand_ins) {
        let file = format!("{}.580.1", name.strip_suffix(".1").unwrap());
        let real = world.path("driver/usr/lib64").join(&file);
        expected.push(mount(real, &format!("/run/divvy/lib/real/{name}"), &PROGRAM));
        expected.push(mount(shim, &format!("/usr/lib64/{name}"), &PROGRAM));
        expected.push(mount(shim, &format!("/usr/lib64/{file}"), &PROGRAM));
    }
    assert_eq!(edits["mounts"].as_array().unwrap()[2..], expected, "behind the pages");
    let stages: Vec<_> = edits["hooks"].as_array().unwrap().iter().map(|hook| &hook["hookName"]).collect();
    assert_eq!(stages, ["createRuntime", "poststop"]);
}

/// What another claim of the container brings comes over it where the runtime is told of that one later.
#[test]
fn what_every_claim_brings_is_not_where_programs_ask_for_what_a_shim_stands_in() {
    let world = hooked();
    world.cdi.write_claim(&uid(), &[gpu(0)]).unwrap();
    let written = world.written();
    let mounts = written["containerEdits"]["mounts"].as_array().unwrap();
    assert!(mounts.iter().any(|mount| mount["containerPath"] == "/usr/lib64/libcuda.so.580.1"));
    for name in library::STOOD_IN {
        let path = format!("/usr/lib64/{name}");
        assert!(mounts.iter().all(|mount| mount["containerPath"] != path), "{path}");
    }
}

/// No name of the real one is left that a program may ask for.
#[test]
fn without_a_hook_a_shim_has_the_names_that_the_hook_would_make_too() {
    let world = World::new();
    world.cdi.write_claim(&uid(), &[share("s-1", Injection::Shim)]).unwrap();
    let shims = world.cdi.library().unwrap().stand_ins;
    let written = world.written();
    let at = |edits: &Value, path: &Value| {
        let mounts = edits["mounts"].as_array().unwrap().iter();
        mounts.filter(|mount| mount["containerPath"] == *path).map(|mount| mount["hostPath"].clone()).next()
    };
    let reals =
        ["libcuda.so.580.1", "libnvidia-ml.so.580.1"].map(|name| world.path("driver/usr/lib64").join(name));
    let mut covered = 0;
    for mount in written["containerEdits"]["mounts"].as_array().unwrap() {
        let Some(real) = reals.iter().position(|real| mount["hostPath"] == json!(real)) else { continue };
        let found = at(&written["devices"][0]["containerEdits"], &mount["containerPath"]);
        assert_eq!(found, Some(json!(shims[real])), "{}", mount["containerPath"]);
        covered += 1;
    }
    assert_eq!(covered, 5, "file and soname of each, and libcuda.so");
}

/// Edits of the document reach every container that has any of its devices.
#[test]
fn a_whole_gpu_has_nothing_injected_whatever_its_claim_has_beside_it() {
    for injection in [Injection::Preload, Injection::Shim] {
        let world = hooked();
        world.cdi.write_claim(&uid(), &[gpu(1)]).unwrap();
        let alone = world.written();
        world.cdi.write_claim(&uid(), &[gpu(1), share("s-1", injection)]).unwrap();
        let beside = world.written();
        assert_eq!(beside["containerEdits"], alone["containerEdits"]);
        assert_eq!(beside["devices"][0], alone["devices"][0]);
        assert!(!alone.to_string().contains("divvy/lib") && !alone.to_string().contains("preload"));
    }
}

#[test]
fn two_shares_of_a_claim_differ_in_their_pages_alone() {
    let world = hooked();
    let both = [share("s-1", Injection::Preload), share("s-2", Injection::Preload)];
    let ids = world.cdi.write_claim(&uid(), &both).unwrap();
    assert_ne!(ids[0], ids[1]);
    let devices = world.written()["devices"].take();
    let renamed = devices[0].to_string().replace("s-1", "s-2");
    assert_eq!(renamed, devices[1].to_string());
}

#[test]
fn without_a_hook_the_limits_are_kept_all_the_same() {
    let world = World::new();
    world.cdi.write_claim(&uid(), &[share("s-1", Injection::Preload)]).unwrap();
    let edits = world.written()["devices"][0]["containerEdits"].take();
    assert_eq!(edits["mounts"].as_array().unwrap().len(), 4);
    assert!(edits.get("hooks").is_none());
}

#[test]
fn a_missing_library_keeps_shares_away_and_nothing_else() {
    let world = World::new();
    fs::remove_dir_all(world.path("library")).unwrap();
    refused(&world, &[share("s-1", Injection::Preload)], &["library/libdivvy.so", "--library-dir"]);
    world.cdi.write_claim(&uid(), &[gpu(0)]).unwrap();
}
