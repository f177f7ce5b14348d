//! Every claim is answered within a bounded number of steps, on nodes of eight GPUs.

mod common;
#[path = "common/dice.rs"]
mod dice;
#[path = "../../slices/tests/common/mod.rs"]
mod gpus;
#[path = "common/nodes.rs"]
mod nodes;

use common::{Cluster, claim, select, with};
use dice::Dice;
use divvy_alloc::AllocationError;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// In a release build. A debug build is about ten times slower and is not timed.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// A claim with up to 32 requests of up to 8 alternatives, and up to 8 constraints.
fn random_claim(dice: &mut Dice) -> Value {
    let constraints = (0..dice.roll(9)).map(|_| constraint(dice)).collect::<Vec<_>>();
    let requests = (0..1 + dice.roll(32)).map(|number| {
        let name = format!("r{number}");
        let alternatives = 1 + dice.roll(8);
        match dice.roll(3) {
            0 => {
                let of = |sub| with(wanted(dice), json!({"name": format!("s{sub}")}));
                json!({"name": name, "firstAvailable": (0..alternatives).map(of).collect::<Vec<_>>()})
            }
            _ => json!({"name": name, "exactly": wanted(dice)}),
        }
    });
    let requests: Vec<_> = requests.collect();
    claim(json!({"requests": requests, "constraints": constraints}))
}

fn wanted(dice: &mut Dice) -> Value {
    let classes = ["gpu.divvy.dev", "mig.divvy.dev", "share.divvy.dev", "any", "any"];
    let counts = [1, 1, 1, 1, 2, 3, 8, 32];
    let mut wanted = json!({"deviceClassName": classes[dice.roll(5)], "count": counts[dice.roll(8)]});
    if dice.roll(8) == 0 {
        wanted = with(wanted, json!({"allocationMode": "All", "count": null}));
    }
    if dice.roll(3) == 0 {
        // Every number makes another expression, which is evaluated anew.
        let least = format!("{}Gi", dice.roll(200));
        let memory = "device.capacity['gpu.divvy.dev'].memory";
        wanted = with(wanted, select(&format!("{memory}.isGreaterThan(quantity('{least}'))")));
    }
    wanted
}

fn constraint(dice: &mut Dice) -> Value {
    let kind = ["matchAttribute", "distinctAttribute"][dice.roll(2)];
    let attributes = ["resource.kubernetes.io/pcieRoot", "gpu.divvy.dev/uuid", "gpu.divvy.dev/type"];
    let requests: Vec<_> = (0..dice.roll(4)).map(|_| format!("r{}", dice.roll(32))).collect();
    json!({kind: attributes[dice.roll(3)], "requests": requests})
}

/// The longest time of an answer, and how many claims were given up.
fn play(cluster: &Cluster, claims: impl Iterator<Item = Value>) -> (Duration, usize) {
    let (mut longest, mut gave_up) = (Duration::ZERO, 0);
    for claim in claims {
        let began = Instant::now();
        let answer = cluster.allocate(&claim);
        let took = began.elapsed();
        longest = longest.max(took);
        gave_up += usize::from(matches!(answer, Err(AllocationError::GaveUp { .. })));
        assert!(cfg!(debug_assertions) || took < ANSWER_TIMEOUT, "{took:?}: {claim}");
    }
    (longest, gave_up)
}

#[test]
fn any_claim_is_answered_in_bounded_steps() {
    let count = if cfg!(debug_assertions) { 20 } else { 1000 };
    for (model, seed) in [("H100-SXM5-80GB", 1), ("B200-180GB", 2), ("L4", 3)] {
        let cluster = nodes::published(&gpus::inventory_of(model, 8));
        let mut dice = Dice(seed);
        let (longest, gave_up) = play(&cluster, (0..count).map(|_| random_claim(&mut dice)));
        println!("8x{model}: {count} claims, {gave_up} given up, at most {longest:?}");
    }
}

/// Claims whose search space is exponential, on a node with a free and with a full GPU each.
#[test]
fn exponential_search_is_given_up() {
    let cluster = nodes::published(&gpus::inventory_of("H100-SXM5-80GB", 8));
    let one = |number: usize, more: Value| {
        let of = with(json!({"deviceClassName": "mig.divvy.dev"}), more);
        json!({"name": format!("r{number}"), "exactly": of})
    };
    let many = |requests: Vec<Value>, constraints: Value| {
        claim(json!({"requests": requests, "constraints": constraints}))
    };
    let all = json!({"allocationMode": "All"});
    let apart = json!([{"distinctAttribute": "resource.kubernetes.io/pcieRoot"}]);
    let several: Vec<_> = (0..31).map(|number| one(number, json!({}))).collect();
    let claims = [
        many(several.clone(), apart.clone()),
        many(vec![one(0, json!({"count": 9}))], apart.clone()),
        many([several[..12].to_vec(), vec![one(31, all)]].concat(), json!([])),
        many(several, json!(vec![apart[0].clone(); 32])),
    ];
    let (longest, gave_up) = play(&cluster, claims.into_iter());
    println!("{gave_up} given up, at most {longest:?}");
    assert!(gave_up > 0);
}
