//! Interactions of shares with each other and with other modes, also for claims that were
//! allocated when the devices were published with other features.

use super::Step;
use super::script::{Script, all_of, memory, with_field};
use crate::common::with;
use crate::nodes::{MPS, SHARE, TIMESLICE, gpus_wanted, mig_wanted, named, of, share_wanted};
use divvy_model::{DeviceId, GpuNumber};
use divvy_sim::catalogue::{GiProfile, GpuModel, Toggle};
use serde_json::{Value, json};

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
    let of_gpu = of(whole.clone(), &[("memory", "1Mi"), ("cores", "0")]);
    for (request, room) in [(&whole, false), (&mebibytes(all), false), (&of_gpu, true)] {
        script.take("first", request, true);
        refuse_others(&mut script);
        script.take("second", &mebibytes(all - 1), room);
        script.release(&["first", "second"]);
    }
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

    // A request for a descriptive capacity selects a device that has it and takes nothing.
    if model.mig.is_some() {
        let asked = of(whole.clone(), &[("multiprocessors", "1")]);
        script.take("whole", &asked, true);
        refuse_others(&mut script);
        script.refuse(&[&mebibytes(1)]);
        script.release(&["whole"]);
        script.refuse(&[&of(whole.clone(), &[("multiprocessors", "1000")])]);
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

    if let Some(profile) = smallest(model) {
        let instance = mig_wanted(&profile.name);
        let part = |count: u64| of(instance.clone(), &[("memory", &format!("{count}Mi"))]);
        let within = profile.memory_mib;
        script.take("a", &part(within / 2), true);
        script.take("b", &part(within - within / 2), true);
        script.take("beside", &instance, profile.instances > 1);
        script.refuse(&[&whole, &mebibytes(1), &share_wanted(TIMESLICE, &[]), &part(within + 1)]);
        script.refuse(&[&of(instance.clone(), &[("memory", "1Mi"), ("cores", "101")])]);
        script.release(&["a", "beside"]);
        script.refuse(&[&whole, &mebibytes(1)]);
        script.take("a", &part(within / 2), true);
        script.release(&["a", "b"]);
        for first in [&instance, &part(within)] {
            script.take("first", first, true);
            script.refuse(&[&whole, &mebibytes(1)]);
            script.take("second", &part(1), profile.instances > 1);
            script.release(&["first", "second"]);
        }
    }
    script.take("last", &whole, true);
    script.release(&["last"]);
    script.steps
}

/// Claims from before shares existed have no share ID. They exclude all other claims until they
/// are released.
pub(crate) fn upgraded(model: &GpuModel) -> Vec<Step> {
    let mut script = Script::default();
    let (whole, share) = (gpus_wanted(1), memory("1Mi"));
    let others = but_shares(model);
    let refuse_all = |script: &mut Script| {
        script.refuse(&others.iter().collect::<Vec<_>>());
        script.refuse(&[&share, &all_of(share.clone())]);
        script.refuse(&[&with_field(share.clone(), json!({"adminAccess": true}))]);
    };
    script.held("old", "gpu-0", &[]);
    refuse_all(&mut script);
    script.release(&["old"]);
    script.take("new", &share, true);
    script.release(&["new"]);
    if let Some(profile) = smallest(model) {
        let start = profile.starts[0];
        let name = DeviceId::mig(GpuNumber(0), &profile.name, profile.id, start).to_string();
        let here = |request: Value| {
            let place = format!("'memorySlice{start}' in device.capacity['gpu.divvy.dev']");
            let profile = request["exactly"]["selectors"][0].clone();
            with_field(request, json!({"selectors": [profile, {"cel": {"expression": place}}]}))
        };
        let part = of(mig_wanted(&profile.name), &[("memory", "1Mi")]);
        script.held("old", &name, &[]);
        script.refuse(&[&whole, &share, &here(part.clone()), &here(mig_wanted(&profile.name))]);
        script.take("beside", &part, profile.instances > 1);
        script.release(&["beside", "old"]);
        script.take("new", &here(part), true);
        script.refuse(&[&whole, &share]);
        script.release(&["new"]);
    }
    script.take("last", &whole, true);
    script.steps
}

/// Claims from the time with shares have share IDs. On devices that became exclusive they exclude
/// all other claims until the last one is released.
pub(crate) fn turned_off(model: &GpuModel) -> Vec<Step> {
    let mut script = Script::default();
    let whole = gpus_wanted(1);
    let others = but_shares(model);
    let refuse_others = |script: &mut Script| script.refuse(&others.iter().collect::<Vec<_>>());
    let all = format!("{}Mi", model.memory_total_mib);
    script.held("one", "gpu-0", &["1Gi"]);
    script.held("two", "gpu-0", &["1Gi", "2Gi"]);
    refuse_others(&mut script);
    script.release(&["one"]);
    refuse_others(&mut script);
    script.release(&["two"]);
    script.held("whole", "gpu-0", &[&all]);
    refuse_others(&mut script);
    script.release(&["whole"]);
    if let Some(profile) = smallest(model) {
        let name = DeviceId::mig(GpuNumber(0), &profile.name, profile.id, profile.starts[0]).to_string();
        script.held("part", &name, &["1Mi"]);
        script.refuse(&[&whole, &share_wanted(TIMESLICE, &[])]);
        let fill: Vec<String> = (1..profile.instances).map(|number| format!("fill {number}")).collect();
        for name in &fill {
            script.take(name, &mig_wanted(&profile.name), true);
        }
        script.refuse(&[&mig_wanted(&profile.name)]);
        script.release(&fill.iter().map(String::as_str).collect::<Vec<_>>());
        script.release(&["part"]);
    }
    for request in &others {
        script.take("first", request, true);
        script.release(&["first"]);
    }
    script.steps
}
