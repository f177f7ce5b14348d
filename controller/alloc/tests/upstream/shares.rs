//! Interactions of shares with each other and with other modes, also for claims that were
//! allocated when the devices were published with other features.

use super::Step;
use super::script::{Script, all_of, memory, with_field};
use crate::common::with;
use crate::nodes::{MPS, SHARE, TIMESLICE, gpus_wanted, mig_wanted, named, of, share_wanted};
use divvy_catalogue::{GiProfile, GpuModel, Toggle};
use divvy_model::{DeviceId, GpuNumber};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// The smallest MIG profile, if MIG mode can be switched without a reset.
fn smallest(model: &GpuModel) -> Option<&GiProfile> {
    let mig = model.mig.as_ref().filter(|mig| mig.toggle == Toggle::Live)?;
    mig.profiles.iter().min_by_key(|profile| (profile.memory_mib, profile.id))
}

/// Requests for everything except shares of the GPU.
fn but_shares(model: &GpuModel) -> Vec<Value> {
    let instance = smallest(model).map(|profile| mig_wanted(&profile.name));
    let all = format!("{}Mi", model.memory_total_mib);
    let modes = [gpus_wanted(1), memory(&all), share_wanted(TIMESLICE, &[]), share_wanted(MPS, &[])];
    modes.into_iter().chain(instance).collect()
}

/// Interactions of shares of a GPU and of an instance with each other and with other modes.
pub(crate) fn shares(model: &GpuModel) -> Vec<Step> {
    let mut script = Script::default();
    let all = model.memory_total_mib;
    let mebibytes = |count: u64| memory(&format!("{count}Mi"));
    let others = but_shares(model);
    let refuse_others = |script: &mut Script| script.refuse(&others.iter().collect::<Vec<_>>());
    let whole = gpus_wanted(1);

    // Shares add up to the GPU's memory.
    script.take("a", &mebibytes(all / 2), true);
    script.take("b", &mebibytes(all - all / 2 - 1), true);
    script.refuse(&[&mebibytes(2)]);
    script.take("c", &memory("1"), true);
    script.refuse(&[&memory("1")]);
    refuse_others(&mut script);
    script.release(&["a", "c"]);
    refuse_others(&mut script);
    script.take("a", &mebibytes(all / 2 + 1), true);
    script.refuse(&[&mebibytes(1)]);
    script.release(&["a", "b"]);

    // A whole GPU excludes shares, with and without a memory request.
    let large = of(whole.clone(), &[("memory", &format!("{all}Mi"))]);
    for request in [&whole, &large, &mebibytes(all)] {
        script.take("first", request, true);
        refuse_others(&mut script);
        script.refuse(&[&mebibytes(1)]);
        script.release(&["first"]);
    }
    let too_large = of(whole.clone(), &[("memory", &format!("{}Mi", all + 1))]);
    script.refuse(&[&too_large, &of(whole.clone(), &[("cores", "0")])]);
    for request in &others {
        script.take("first", request, true);
        script.refuse(&[&mebibytes(1)]);
        script.release(&["first"]);
    }

    // Requests beyond the capacity are refused.
    let cores = |amount: &str| share_wanted(SHARE, &[("memory", "1Gi"), ("cores", amount)]);
    script.refuse(&[&mebibytes(all + 1), &cores("101")]);
    script.take("thirty", &cores("30"), true);
    script.take("seventy", &cores("70"), true);
    script.refuse(&[&cores("1"), &share_wanted(SHARE, &[("cores", "50")])]);
    script.take("memory alone", &cores("0"), true);
    script.release(&["thirty", "seventy", "memory alone"]);
    // Without a memory request a claim takes all memory, even with a compute limit.
    script.take("half", &share_wanted(SHARE, &[("cores", "50")]), true);
    script.refuse(&[&mebibytes(1)]);
    script.release(&["half"]);
    // Capacities are requested by their published names, without a domain.
    script.refuse(&[
        &share_wanted(SHARE, &[("slots", "1")]),
        &share_wanted(SHARE, &[("gpu.divvy.dev/memory", "1Gi")]),
    ]);
    script.take("none", &cores("0"), true);
    script.release(&["none"]);

    // The facts of a whole GPU are capacities, those of a share are attributes.
    if model.mig.is_some() {
        let asked = of(whole.clone(), &[("multiprocessors", "1")]);
        script.take("whole", &asked, true);
        refuse_others(&mut script);
        script.refuse(&[&mebibytes(1)]);
        script.release(&["whole"]);
        script.refuse(&[&of(whole.clone(), &[("multiprocessors", "1000")])]);
        script.refuse(&[&share_wanted(SHARE, &[("memory", "1Mi"), ("multiprocessors", "1")])]);
        let selected =
            json!([{"cel": {"expression": "device.attributes['gpu.divvy.dev'].multiprocessors > 1"}}]);
        script.take("selected", &with_field(mebibytes(1), json!({"selectors": selected})), true);
        script.release(&["selected"]);
    }

    // Several requests in a claim, and the remainder for another claim.
    let same = json!([{"matchAttribute": "gpu.divvy.dev/uuid"}]);
    let pair = |a: &Value, b: &Value| {
        json!({"requests": [named("a", a.clone()), named("b", b.clone())],
        "constraints": same})
    };
    script.claim("pair", pair(&mebibytes(1), &mebibytes(all - 2)), true);
    script.refuse(&[&mebibytes(2)]);
    script.take("rest", &mebibytes(1), true);
    script.release(&["pair", "rest"]);
    script.claim("mixed", pair(&mebibytes(1), &whole), false);
    script.claim("mixed", pair(&whole, &mebibytes(1)), false);
    script.claim("too much", pair(&mebibytes(all), &mebibytes(1)), false);
    // The devices of one request are distinct.
    script.refuse(&[&with_field(mebibytes(1), json!({"count": 2}))]);
    script.take("all", &all_of(mebibytes(1)), true);
    script.take("all too", &all_of(mebibytes(1)), true);
    script.refuse(&[&all_of(whole.clone())]);
    script.release(&["all", "all too"]);
    let list = |alternatives: [Value; 2]| {
        let [a, b] = alternatives.map(|one| one["exactly"].clone());
        let alternatives = [with(a, json!({"name": "a"})), with(b, json!({"name": "b"}))];
        json!({"requests": [{"name": "r", "firstAvailable": alternatives}]})
    };
    script.claim("first", list([whole.clone(), mebibytes(2)]), true);
    script.claim("second", list([whole.clone(), mebibytes(2)]), false);
    script.release(&["first"]);
    script.take("share", &mebibytes(1), true);
    script.claim("first", list([whole.clone(), mebibytes(2)]), true);
    script.release(&["first", "share"]);

    // adminAccess holds nothing and is granted while counters are left.
    let admin = |request: &Value| with_field(request.clone(), json!({"adminAccess": true}));
    script.take("admin", &admin(&whole), true);
    script.take("share", &mebibytes(1), true);
    script.refuse(&[&admin(&whole), &admin(&share_wanted(TIMESLICE, &[]))]);
    script.release(&["admin", "share"]);

    script.take("last", &whole, true);
    script.release(&["last"]);
    script.steps
}

/// Interactions of shares of an instance, where the node configuration turns them on.
pub(crate) fn mig_shares(model: &GpuModel) -> Vec<Step> {
    let mut script = Script::default();
    let Some(profile) = smallest(model) else { return script.steps };
    let (whole, share) = (gpus_wanted(1), memory("1Mi"));
    let instance = mig_wanted(&profile.name);
    let part = |count: u64| of(instance.clone(), &[("memory", &format!("{count}Mi"))]);
    let within = profile.memory_mib;
    script.take("a", &part(within / 2), true);
    script.take("b", &part(within - within / 2), true);
    script.take("beside", &instance, profile.instances > 1);
    script.refuse(&[&whole, &share, &share_wanted(TIMESLICE, &[]), &part(within + 1)]);
    script.refuse(&[&of(instance.clone(), &[("memory", "1Mi"), ("cores", "101")])]);
    script.release(&["a", "beside"]);
    script.refuse(&[&whole, &share]);
    script.take("a", &part(within / 2), true);
    script.release(&["a", "b"]);
    for first in [&instance, &part(within)] {
        script.take("first", first, true);
        script.refuse(&[&whole, &share]);
        script.take("second", &part(1), profile.instances > 1);
        script.release(&["first", "second"]);
    }
    // A claim from before shares were turned on has no share ID.
    script.held("old", &instance_name(profile, 0), &[]);
    script.refuse(&[&whole, &share]);
    fill(&mut script, profile, &part(within));
    script.release(&["old"]);
    script.take("last", &whole, true);
    script.steps
}

/// The first instance of a profile on a GPU.
fn instance_name(profile: &GiProfile, gpu: u32) -> String {
    DeviceId::mig(GpuNumber(gpu), &profile.name, profile.id, profile.starts[0]).to_string()
}

/// Allocates all instances of a profile but one, which is held, and releases them.
fn fill(script: &mut Script, profile: &GiProfile, request: &Value) {
    let names: Vec<String> = (1..profile.instances).map(|number| format!("fill {number}")).collect();
    for name in &names {
        script.take(name, request, true);
    }
    script.refuse(&[request]);
    script.release(&names.iter().map(String::as_str).collect::<Vec<_>>());
}

/// Claims of earlier versions on `gpu-0` and on an instance: exclusive ones without a share ID, and shares.
/// They exclude all other claims, also new shares, until the last one is released.
pub(crate) fn upgraded(model: &GpuModel) -> Vec<Step> {
    let mut script = Script::default();
    let (whole, share) = (gpus_wanted(1), memory("1Mi"));
    let others = but_shares(model);
    let all = format!("{}Mi", model.memory_total_mib);
    let refuse_all = |script: &mut Script| {
        script.refuse(&others.iter().collect::<Vec<_>>());
        script.refuse(&[&share, &all_of(share.clone()), &of(whole.clone(), &[("memory", "1Mi")])]);
        script.refuse(&[&with_field(share.clone(), json!({"adminAccess": true}))]);
    };
    let one_after_another: [&[(&str, &[&str])]; 3] =
        [&[("old", &[])], &[("old", &[&all])], &[("one", &["1Gi"]), ("two", &["1Gi", "2Gi"])]];
    for claims in one_after_another {
        for (name, shares) in claims {
            script.held(name, "gpu-0", shares);
        }
        for (name, _) in claims {
            refuse_all(&mut script);
            script.release(&[*name]);
        }
        script.take("new", &share, true);
        script.refuse(&[&whole]);
        script.release(&["new"]);
    }
    if let Some(profile) = smallest(model) {
        let instance = mig_wanted(&profile.name);
        for shares in [&[][..], &["1Mi"], &["1Mi", "2Mi"]] {
            script.held("old", &instance_name(profile, 0), shares);
            script.refuse(&[&whole, &share, &share_wanted(TIMESLICE, &[])]);
            fill(&mut script, profile, &instance);
            script.release(&["old"]);
        }
    }
    script.take("last", &whole, true);
    script.steps
}

/// Shares that were allocated on `gpu-0-share` exclude all other claims after the node configuration turned
/// shares off.
pub(crate) fn turned_off(model: &GpuModel) -> Vec<Step> {
    let mut script = Script::default();
    let all = format!("{}Mi", model.memory_total_mib);
    let others: Vec<Value> =
        but_shares(model).into_iter().filter(|request| *request != memory(&all)).collect();
    let refuse_all = |script: &mut Script| {
        script.refuse(&others.iter().collect::<Vec<_>>());
        script.refuse(&[&memory("1Mi"), &memory(&all)]);
    };
    script.held("one", "gpu-0-share", &["1Gi"]);
    script.held("two", "gpu-0-share", &["1Gi", "2Gi"]);
    refuse_all(&mut script);
    script.release(&["one"]);
    refuse_all(&mut script);
    script.release(&["two"]);
    script.held("whole", "gpu-0-share", &[&all]);
    refuse_all(&mut script);
    script.release(&["whole"]);
    for request in &others {
        script.take("first", request, true);
        script.refuse(&[&memory("1Mi")]);
        script.release(&["first"]);
    }
    script.steps
}

/// Shares and exclusive claims on a server without counters, on devices that are exclusive now. The
/// devices that the slices must treat as held come first.
pub(crate) fn without_counters(model: &GpuModel) -> (BTreeSet<String>, Vec<Step>) {
    let mut script = Script::default();
    let whole = gpus_wanted(1);
    let profile = smallest(model).expect("a model with MIG");
    let (instance, name) = (mig_wanted(&profile.name), instance_name(profile, 1));
    let refuse_all = |script: &mut Script| {
        let part = of(instance.clone(), &[("memory", "1Mi")]);
        let whole_part = of(whole.clone(), &[("memory", "1Mi")]);
        script.refuse(&[&whole, &whole_part, &memory("1Mi"), &instance, &part]);
    };
    for shares in [&[][..], &["1Gi"], &["1Gi", "2Gi"]] {
        script.held("gpu", "gpu-0", shares);
        script.held("instance", &name, shares);
        refuse_all(&mut script);
        script.release(&["gpu"]);
        // The slices still treat the device as held, and a new claim takes all of it.
        script.take("new", &of(whole.clone(), &[("memory", "1Mi")]), true);
        refuse_all(&mut script);
        script.release(&["new", "instance"]);
    }
    (["gpu-0".to_owned(), name].into(), script.steps)
}
