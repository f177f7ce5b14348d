//! What the modes of a GPU do to each other.

use super::Step;
use super::script::Script;
use crate::nodes::{MPS, TIMESLICE, gpus_wanted, mig_wanted, named, share_wanted};
use divvy_sim::catalogue::{GpuModel, Toggle};
use serde_json::{Value, json};

/// What every mode of a GPU does to every other.
pub(crate) fn modes(model: &GpuModel) -> Vec<Step> {
    let mut script = Script::default();
    let turns = |slots: &str| share_wanted(TIMESLICE, &[("slots", slots)]);
    let client = |capacities: &[(&str, &str)]| share_wanted(MPS, capacities);
    let (turn, part, whole) = (share_wanted(TIMESLICE, &[]), client(&[]), gpus_wanted(1));
    // Ampere is not cut while its MIG mode is off.
    let profile = model.mig.as_ref().filter(|mig| mig.toggle == Toggle::Live).map(|mig| &mig.profiles[0]);
    let instance = profile.map(|profile| mig_wanted(&profile.name));
    let but = |mine: &Value| -> Vec<Value> {
        let all = [&turn, &part, &whole].into_iter().chain(&instance);
        all.filter(|request| *request != mine).cloned().collect()
    };
    let refuse_others =
        |script: &mut Script, mine: &Value| script.refuse(&but(mine).iter().collect::<Vec<_>>());

    // Slots add up until they run out.
    script.take("a", &turn, true);
    script.take("b", &turns("2"), true);
    script.refuse(&[&turns("2")]);
    script.take("c", &turns("1"), true);
    script.refuse(&[&turn]);
    refuse_others(&mut script, &turn);
    script.release(&["a", "b"]);
    refuse_others(&mut script, &turn);
    script.release(&["c"]);

    // So do the parts of an MPS device.
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

    // Then any mode is accepted, and keeps the others out.
    for request in instance.iter().chain([&whole]) {
        script.take("held", request, true);
        refuse_others(&mut script, request);
        script.release(&["held"]);
    }

    // Nobody is promised what is not there, or is there for show.
    script.refuse(&[&turns("5"), &client(&[("threads", "101")]), &client(&[("slots", "1")])]);
    script.refuse(&[
        &share_wanted(TIMESLICE, &[("memory", "1Gi")]),
        &client(&[("multiprocessors", "1")]),
        &share_wanted("gpu.divvy.dev", &[("slots", "1")]),
    ]);

    // Two requests of a claim may share a device, and never ask two modes of one GPU.
    let same = json!([{"matchAttribute": "gpu.divvy.dev/uuid"}]);
    let claim = |requests: [Value; 2]| json!({"requests": requests, "constraints": same});
    script.claim("pair", claim([named("a", turns("2")), named("b", turn.clone())]), true);
    script.claim("mixed", claim([named("a", turn.clone()), named("b", part.clone())]), false);
    script.take("last", &turn, true);
    script.release(&["pair", "last"]);
    script.claim("mixed", claim([named("a", turn), named("b", part)]), false);
    script.steps
}
