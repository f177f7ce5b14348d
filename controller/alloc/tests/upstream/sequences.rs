//! What is asked of which node: for each model the sequence that shows what modes
//! do to each other, and random ones. Both are the same on every run.

use crate::common::{DRIVER, NODE, one, select, with};
use crate::gpus::{self, gpu, in_mode, inventory_of, node};
use crate::nodes::{MPS, SHARE, TIMESLICE, gpus_wanted, mig_wanted, named, of, share_wanted};
use divvy_api::sharing::Mode;
use divvy_model::inventory::{Condition, MigMode, Origin, Presence};
use divvy_model::{DeviceId, GpuNumber, Inventory};
use divvy_sim::catalogue::{self, GiProfile, GpuModel, Model, Toggle};
use serde_json::{Value, json};

pub(crate) struct World {
    pub(crate) name: String,
    pub(crate) node: Inventory,
    pub(crate) sequences: Vec<Sequence>,
}

/// Steps on a node on which nothing is held at first.
pub(crate) struct Sequence {
    pub(crate) name: String,
    pub(crate) steps: Vec<Step>,
}

pub(crate) enum Step {
    Take {
        name: String,
        claim: Value,
        /// What must come of it, where the sequence is there to show that.
        accepted: Option<bool>,
    },
    /// A claim that was allocated before what is published now: of a device for
    /// itself, or of shares of it that consumed so much memory each.
    Held {
        name: String,
        device: String,
        shares: Vec<String>,
    },
    Release(String),
}

impl Step {
    /// For the allocator, with the defaults that the API server would write.
    pub(crate) fn wire(&self) -> Value {
        match self {
            Self::Take { name, claim, .. } => {
                let mut claim =
                    with(claim.clone(), json!({"metadata": {"namespace": "ns", "name": name, "uid": name}}));
                let requests = claim["spec"]["devices"]["requests"].as_array_mut();
                for request in requests.into_iter().flatten() {
                    let alternatives = match request.get_mut("exactly") {
                        Some(one) => vec![one],
                        None => request["firstAvailable"].as_array_mut().into_iter().flatten().collect(),
                    };
                    for one in alternatives {
                        *one = with(json!({"allocationMode": "ExactCount", "count": 1}), one.clone());
                    }
                }
                json!({"take": claim})
            }
            Self::Held { name, device, shares } => {
                let result = json!({"request": "r", "driver": DRIVER, "pool": NODE, "device": device});
                let share = |(number, memory)| {
                    let consumed = json!({"memory": memory, "cores": "0"});
                    let id = format!("{name}-{number}");
                    with(result.clone(), json!({"shareID": id, "consumedCapacity": consumed}))
                };
                let results: Vec<Value> = match shares.is_empty() {
                    true => vec![result],
                    false => shares.iter().enumerate().map(share).collect(),
                };
                let metadata = json!({"namespace": "ns", "name": name, "uid": name});
                let status = json!({"allocation": {"devices": {"results": results}}});
                json!({"held": {"metadata": metadata, "spec": {}, "status": status}})
            }
            Self::Release(name) => json!({"release": name}),
        }
    }

    /// For people, and complete enough to notice a change.
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Take { name, claim, .. } => format!("{name}: {}", described(&claim["spec"]["devices"])),
            Self::Held { name, device, shares } if shares.is_empty() => format!("{name} had {device}"),
            Self::Held { name, device, shares } => format!("{name} had {} of {device}", shares.join(" and ")),
            Self::Release(name) => format!("release {name}"),
        }
    }
}

fn described(devices: &Value) -> String {
    let mut parts: Vec<String> =
        devices["requests"].as_array().into_iter().flatten().map(described_request).collect();
    for constraint in devices["constraints"].as_array().into_iter().flatten() {
        let constraint = constraint.as_object().into_iter().flatten();
        parts.extend(constraint.map(|(kind, attribute)| format!("{kind} {}", bare(attribute))));
    }
    parts.join(", ")
}

fn described_request(request: &Value) -> String {
    let alternatives = request["firstAvailable"].as_array();
    let alternatives = alternatives.map_or(vec![&request["exactly"]], |list| list.iter().collect());
    let described = |one: &Value| {
        let mut text = bare(&one["deviceClassName"]).trim_end_matches(".divvy.dev").to_owned();
        let mut add = |more: String| text = format!("{text} {more}");
        for selector in one["selectors"].as_array().into_iter().flatten() {
            let expression = bare(&selector["cel"]["expression"]);
            add(format!("[{}]", expression.replace("device.", "").replace("['gpu.divvy.dev']", "")));
        }
        for (name, amount) in one["capacity"]["requests"].as_object().into_iter().flatten() {
            add(format!("{name}={}", bare(amount)));
        }
        for field in ["count", "allocationMode", "adminAccess"] {
            if !one[field].is_null() {
                add(format!("{field}={}", bare(&one[field])));
            }
        }
        if !one["tolerations"].is_null() {
            add("tolerant".to_owned());
        }
        text
    };
    let alternatives: Vec<String> = alternatives.into_iter().map(described).collect();
    format!("{}={}", bare(&request["name"]), alternatives.join(" or "))
}

fn bare(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

pub(crate) fn worlds() -> Vec<World> {
    let mut worlds: Vec<World> = catalogue::all()
        .map(Model::row)
        .map(|model| {
            let named = |name: &str, steps| Sequence { name: name.to_owned(), steps };
            let mut sequences = vec![
                named("modes", modes(model)),
                named("shares", shares(model)),
                named("shares after an upgrade", upgraded(model)),
            ];
            sequences.extend(random(model, 6, &model.key));
            World { name: format!("1x{}", model.key), node: inventory_of(&model.key, 1), sequences }
        })
        .collect();
    for model in catalogue::all().map(Model::row) {
        let mut node = inventory_of(&model.key, 1);
        node.gpus[0].policy.shares = false;
        let steps = turned_off(model);
        let sequences = vec![Sequence { name: "shares after they are turned off".to_owned(), steps }];
        worlds.push(World { name: format!("1x{} without shares", model.key), node, sequences });
    }
    for (key, count, sequences) in [
        ("H100-SXM5-80GB", 2, 60),
        ("H100-SXM5-80GB", 4, 20),
        ("B200-180GB", 2, 20),
        ("RTX-PRO-6000", 2, 30),
        ("A30-24GB", 2, 20),
        ("L4", 3, 20),
    ] {
        let (model, name) = (row(key), format!("{count}x{key}"));
        let node = inventory_of(key, count);
        worlds.push(World { sequences: random(model, sequences, &name), node, name });
    }
    worlds.push(World {
        name: "odd H100s".to_owned(),
        node: odd(),
        sequences: random(row("H100-SXM5-80GB"), 40, "odd"),
    });
    worlds
}

fn row(key: &str) -> &'static GpuModel {
    catalogue::find(key).expect(key).row()
}

/// Four GPUs of which each has something that keeps claims away from a part of it,
/// and an Ampere one that is cut.
fn odd() -> Inventory {
    let h100 = |number| gpu(row("H100-SXM5-80GB"), number);
    let mut gpus = vec![h100(0), gpus::with_instance(h100(1), 9, 4, Origin::Foreign), h100(2), h100(3)];
    gpus[0].policy.modes = [Mode::Timeslice, Mode::Mig].into();
    (gpus[0].policy.slots, gpus[2].policy.slots) = (1, 7);
    (gpus[1].policy.mps_clients, gpus[2].policy.mps_clients) = (1, 3);
    gpus[2].conditions = vec![Condition::Mps { cause: "dead".to_owned() }];
    gpus[3].presence = Presence::Missing;
    gpus.push(in_mode(gpu(row("A100-SXM4-80GB"), 4), MigMode::On));
    node(gpus)
}

/// Writes the steps of a sequence that is there to show something.
#[derive(Default)]
struct Script {
    steps: Vec<Step>,
}

impl Script {
    fn take(&mut self, name: &str, request: &Value, accepted: bool) {
        self.claim(name, json!({"requests": [request]}), accepted);
    }

    fn claim(&mut self, name: &str, devices: Value, accepted: bool) {
        let claim = crate::common::claim(devices);
        self.steps.push(Step::Take { name: name.to_owned(), claim, accepted: Some(accepted) });
    }

    fn held(&mut self, name: &str, device: &str, shares: &[&str]) {
        let shares = shares.iter().map(|memory| (*memory).to_owned()).collect();
        self.steps.push(Step::Held { name: name.to_owned(), device: device.to_owned(), shares });
    }

    fn refuse(&mut self, requests: &[&Value]) {
        for request in requests {
            self.take("refused", request, false);
        }
    }

    fn release(&mut self, names: &[&str]) {
        self.steps.extend(names.iter().map(|name| Step::Release((*name).to_owned())));
    }
}

fn memory(amount: &str) -> Value {
    share_wanted(SHARE, &[("memory", amount)])
}

fn all_of(request: Value) -> Value {
    with_field(request, json!({"allocationMode": "All"}))
}

/// The same request, with these fields.
fn with_field(mut request: Value, more: Value) -> Value {
    request["exactly"] = with(request["exactly"].clone(), more);
    request
}

/// The smallest profile of a GPU that is cut with the first claim on an instance.
fn smallest(model: &GpuModel) -> Option<&GiProfile> {
    let mig = model.mig.as_ref().filter(|mig| mig.toggle == Toggle::Live)?;
    mig.profiles.iter().min_by_key(|profile| (profile.memory_mib, profile.id))
}

/// Whatever is not a share of the GPU.
fn but_shares(model: &GpuModel) -> Vec<Value> {
    let instance = smallest(model).map(|profile| mig_wanted(&profile.name));
    let all = format!("{}Mi", model.memory_total_mib);
    let modes = [gpus_wanted(1), memory(&all), share_wanted(TIMESLICE, &[]), share_wanted(MPS, &[])];
    modes.into_iter().chain(instance).collect()
}

/// What shares of a GPU and of an instance do to each other and to everything else.
fn shares(model: &GpuModel) -> Vec<Step> {
    let mut script = Script::default();
    let all = model.memory_total_mib;
    let mebibytes = |count: u64| memory(&format!("{count}Mi"));
    let others = but_shares(model);
    let refuse_others = |script: &mut Script| script.refuse(&others.iter().collect::<Vec<_>>());
    let whole = gpus_wanted(1);

    // Memory adds up until it runs out.
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

    // The whole keeps shares out, whether its memory is named or not.
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

    // Nobody is promised what is not there, nor compute time.
    let cores = |amount: &str| share_wanted(SHARE, &[("memory", "1Gi"), ("cores", amount)]);
    script.refuse(&[
        &mebibytes(all + 1),
        &cores("1"),
        &cores("100"),
        &share_wanted(SHARE, &[("cores", "50")]),
    ]);
    // A capacity is asked for as it is published: without a domain.
    script.refuse(&[
        &share_wanted(SHARE, &[("slots", "1")]),
        &share_wanted(SHARE, &[("gpu.divvy.dev/memory", "1Gi")]),
    ]);
    script.take("none", &cores("0"), true);
    script.release(&["none"]);

    // An amount of what is only told is for a device with so much, and takes nothing.
    if model.mig.is_some() {
        let asked = of(whole.clone(), &[("multiprocessors", "1")]);
        script.take("whole", &asked, true);
        refuse_others(&mut script);
        script.refuse(&[&mebibytes(1)]);
        script.release(&["whole"]);
        script.refuse(&[&of(whole.clone(), &[("multiprocessors", "1000")])]);
    }

    // Several of a claim, and what is left of a list.
    let same = json!([{"matchAttribute": "gpu.divvy.dev/uuid"}]);
    let pair = |a: &Value, b: &Value| json!({"requests": [named("a", a.clone()), named("b", b.clone())], "constraints": same});
    script.claim("pair", pair(&mebibytes(1), &mebibytes(all - 2)), true);
    script.refuse(&[&mebibytes(2)]);
    script.take("rest", &mebibytes(1), true);
    script.release(&["pair", "rest"]);
    script.claim("mixed", pair(&mebibytes(1), &whole), false);
    script.claim("mixed", pair(&whole, &mebibytes(1)), false);
    script.claim("too much", pair(&mebibytes(all), &mebibytes(1)), false);
    // One request has different devices.
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

    // Who looks on holds nothing, and is let in where there is room.
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
        script.refuse(&[&of(instance.clone(), &[("memory", "1Mi"), ("cores", "10")])]);
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

/// What was allocated before there were shares has no share id. It keeps everybody
/// out until it is released.
fn upgraded(model: &GpuModel) -> Vec<Step> {
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

/// What was allocated while there were shares has share ids. On devices that are
/// for one claim at a time again it keeps everybody out until the last is released.
fn turned_off(model: &GpuModel) -> Vec<Step> {
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

/// What every mode of a GPU does to every other.
fn modes(model: &GpuModel) -> Vec<Step> {
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

/// SplitMix64: the same sequences for ever, on every machine.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % sides as u64) as usize
    }

    fn pick<T: Clone>(&mut self, list: &[T]) -> T {
        list[self.roll(list.len())].clone()
    }
}

/// Random sequences of claims and releases.
fn random(model: &GpuModel, count: usize, seed: &str) -> Vec<Sequence> {
    let seed = seed.bytes().fold(0_u64, |seed, byte| seed.wrapping_mul(131).wrapping_add(byte.into()));
    let profiles: Vec<String> = gpus::profiles(model).into_iter().map(|profile| profile.name).collect();
    let sequence = |number: usize| {
        let mut dice = Dice(seed ^ (number as u64) << 32);
        let mut names: Vec<String> = Vec::new();
        let steps = (0..12)
            .map(|step| {
                if !names.is_empty() && dice.roll(3) == 0 {
                    return Step::Release(names.remove(dice.roll(names.len())));
                }
                let (name, claim) = (format!("c{step}"), crate::common::claim(claim(&mut dice, &profiles)));
                names.push(name.clone());
                Step::Take { name, claim, accepted: None }
            })
            .collect();
        Sequence { name: format!("random {number}"), steps }
    };
    (0..count).map(sequence).collect()
}

fn claim(dice: &mut Dice, profiles: &[String]) -> Value {
    let several = |dice: &mut Dice, most: usize| -> Vec<Value> {
        let count = 2 + dice.roll(most - 1);
        (0..count).map(|n| named(["a", "b", "c", "d"][n], request(dice, profiles))).collect()
    };
    match dice.roll(14) {
        0 => {
            let alternatives: Vec<Value> = several(dice, 3)
                .iter()
                .map(|one| with(one["exactly"].clone(), json!({"name": one["name"]})))
                .collect();
            json!({"requests": [{"name": "r", "firstAvailable": alternatives}]})
        }
        1 => json!({"requests": several(dice, 4)}),
        2 | 3 => {
            let attributes =
                ["resource.kubernetes.io/pcieRoot", "resource.kubernetes.io/numaNode", "gpu.divvy.dev/uuid"];
            json!({"requests": several(dice, 3), "constraints": [{"matchAttribute": dice.pick(&attributes)}]})
        }
        4 => {
            let apart = json!([{"distinctAttribute": "resource.kubernetes.io/pcieRoot"}]);
            json!({"requests": several(dice, 3), "constraints": apart})
        }
        5 => {
            let expressions = [
                "device.capacity['gpu.divvy.dev'].memory.isGreaterThan(quantity('30Gi'))",
                "device.allowMultipleAllocations",
                "device.attributes['gpu.divvy.dev'].mode == 'share'",
            ];
            json!({"requests": [one("r", select(dice.pick(&expressions)))]})
        }
        6 => {
            let tolerate = json!({"tolerations": [{"operator": "Exists"}]});
            let more = [tolerate, json!({"adminAccess": true}), json!({"count": 2})];
            let mut asked = request(dice, profiles);
            asked["exactly"] = with(asked["exactly"].clone(), dice.pick(&more));
            json!({"requests": [asked]})
        }
        _ => json!({"requests": [request(dice, profiles)]}),
    }
}

fn request(dice: &mut Dice, profiles: &[String]) -> Value {
    match dice.roll(8) {
        0 => gpus_wanted(1),
        1 | 2 => {
            let mut asked = match dice.roll(2) {
                0 if !profiles.is_empty() => mig_wanted(&dice.pick(profiles)),
                _ => gpus_wanted(1),
            };
            let amounts = ["1500m", "0", "4Gi", "5000000001", "15e9", "40.5Gi", "100Gi"];
            let mut named = vec![("memory", dice.pick(&amounts))];
            if dice.roll(6) == 0 {
                named.push(dice.pick(&[
                    ("cores", "0"),
                    ("cores", "1"),
                    ("multiprocessors", "9"),
                    ("decoders", "2"),
                ]));
            }
            asked = of(asked, &named);
            asked
        }
        3 if !profiles.is_empty() => mig_wanted(&dice.pick(profiles)),
        3 | 4 => {
            let slots = ["1", "2", "3", "4", "8"];
            match dice.roll(2) {
                0 => share_wanted(TIMESLICE, &[]),
                _ => share_wanted(TIMESLICE, &[("slots", dice.pick(&slots))]),
            }
        }
        _ => {
            let amounts: [(&str, &[&str]); 3] = [
                ("memory", &["1500m", "0", "4Gi", "10000000001", "15e9", "40.5Gi", "100Gi"]),
                ("threads", &["0", "10", "33", "50", "100", "101"]),
                ("clients", &["1", "5", "20", "48"]),
            ];
            let mut asked: Vec<(&str, &str)> = Vec::new();
            for (name, amounts) in amounts {
                if dice.roll(3) == 0 {
                    asked.push((name, dice.pick(amounts)));
                }
            }
            if dice.roll(12) == 0 {
                asked.push(dice.pick(&[("multiprocessors", "0"), ("decoders", "1"), ("tokens", "1")]));
            }
            share_wanted(MPS, &asked)
        }
    }
}
