//! Mutual exclusion of the modes of a GPU.

use super::Step;
use super::script::Script;
use crate::nodes::{MPS, TIMESLICE, gpus_wanted, mig_wanted, named, share_wanted};
use divvy_catalogue::{GpuModel, Toggle};
use serde_json::{Value, json};

/// Tries every mode of a GPU against every other.
pub(crate) fn modes(model: &GpuModel) -> Vec<Step> {
    let mut script = Script::default();
    let slots_of = |slots: &str| share_wanted(TIMESLICE, &[("slots", slots)]);
    let client = |capacities: &[(&str, &str)]| share_wanted(MPS, capacities);
    let (slot, part, whole) = (share_wanted(TIMESLICE, &[]), client(&[]), gpus_wanted(1));
    // MIG mode of an Ampere GPU cannot be switched on with a claim.
    let profile = model.mig.as_ref().filter(|mig| mig.toggle == Toggle::Live).map(|mig| &mig.profiles[0]);
    let instance = profile.map(|profile| mig_wanted(&profile.name));
    let but = |mine: &Value| -> Vec<Value> {
        let all = [&slot, &part, &whole].into_iter().chain(&instance);
        all.filter(|request| *request != mine).cloned().collect()
    };
    let refuse_others =
        |script: &mut Script, mine: &Value| script.refuse(&but(mine).iter().collect::<Vec<_>>());

    // Slots add up to the limit.
    script.take("a", &slot, true);
    script.take("b", &slots_of("2"), true);
    script.refuse(&[&slots_of("2")]);
    script.take("c", &slots_of("1"), true);
    script.refuse(&[&slot]);
    refuse_others(&mut script, &slot);
    script.release(&["a", "b"]);
    refuse_others(&mut script, &slot);
    script.release(&["c"]);

    // The parts of an MPS device add up to the limit too.
    for name in ["a", "b", "c", "d"] {
        script.take(name, &part, true);
    }
    script.refuse(&[&part]);
    refuse_others(&mut script, &part);
    script.release(&["a", "c", "d"]);
    refuse_others(&mut script, &part);
    script.release(&["b"]);
    let all_but_one = format!("{}Mi", model.memory_total_mib - 1);
    script.take("most", &client(&[("memory", &all_but_one), ("threads", "1")]), true);
    script.refuse(&[&part, &client(&[("memory", "2Mi")])]);
    script.take("rest", &client(&[("memory", "1"), ("threads", "99")]), true);
    script.refuse(&[&client(&[("memory", "1Mi"), ("threads", "1")])]);
    script.release(&["most", "rest"]);
    script.take("a", &client(&[("threads", "60")]), true);
    script.refuse(&[&client(&[("threads", "41")])]);
    script.take("b", &client(&[("threads", "40")]), true);
    script.release(&["a", "b"]);
    script.refuse(&[&client(&[("clients", "49")])]);
    script.take("all", &client(&[("clients", "48")]), true);
    script.refuse(&[&part]);
    script.release(&["all"]);

    // After a release, any mode is accepted and excludes the others.
    for request in instance.iter().chain([&whole]) {
        script.take("held", request, true);
        refuse_others(&mut script, request);
        script.release(&["held"]);
    }

    // Requests beyond a capacity, or for a descriptive capacity, are refused.
    script.refuse(&[&slots_of("5"), &client(&[("threads", "101")]), &client(&[("slots", "1")])]);
    script.refuse(&[
        &share_wanted(TIMESLICE, &[("memory", "1Gi")]),
        &client(&[("multiprocessors", "1")]),
        &share_wanted("gpu.divvy.dev", &[("slots", "1")]),
    ]);

    // Two requests of a claim may share a device, but cannot use two modes of one GPU.
    let same = json!([{"matchAttribute": "gpu.divvy.dev/uuid"}]);
    let claim = |requests: [Value; 2]| json!({"requests": requests, "constraints": same});
    script.claim("pair", claim([named("a", slots_of("2")), named("b", slot.clone())]), true);
    script.claim("mixed", claim([named("a", slot.clone()), named("b", part.clone())]), false);
    script.take("last", &slot, true);
    script.release(&["pair", "last"]);
    script.claim("mixed", claim([named("a", slot), named("b", part)]), false);
    script.steps
}
