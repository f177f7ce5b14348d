//! Deterministic pseudo-random sequences of claims and releases.

use super::{Sequence, Step};
use crate::common::{one, select, with};
use crate::dice::Dice;
use crate::nodes::{MPS, SHARE, TIMESLICE, gpus_wanted, mig_wanted, named, of, share_wanted};
use divvy_catalogue::GpuModel;
use serde_json::{Value, json};

/// Random sequences of claims and releases.
pub(crate) fn random(model: &GpuModel, count: usize, seed: &str) -> Vec<Sequence> {
    let seed = seed.bytes().fold(0_u64, |seed, byte| seed.wrapping_mul(131).wrapping_add(byte.into()));
    let rows = model.mig.iter().flat_map(|mig| &mig.profiles);
    let profiles: Vec<String> = rows.map(|row| row.name.clone()).collect();
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
            let mut asked = match dice.roll(4) {
                0 if !profiles.is_empty() => mig_wanted(&dice.pick(profiles)),
                1 => gpus_wanted(1),
                _ => share_wanted(SHARE, &[]),
            };
            let amounts = ["1500m", "0", "4Gi", "5000000001", "15e9", "40.5Gi", "100Gi"];
            let mut named = vec![("memory", dice.pick(&amounts))];
            if dice.roll(6) == 0 {
                named.push(dice.pick(&[
                    ("cores", "0"),
                    ("cores", "1"),
                    ("cores", "60"),
                    ("cores", "101"),
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
