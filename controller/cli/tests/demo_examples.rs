//! Every file of `manifests/examples` in the demo, on every GPU model that can serve it. While the
//! claims are held, this process compares the printed holders with the simulator's state and with
//! the policy pages of shares.

use divvy_catalogue::{Model, find, keys};
use divvy_pages::Policy;
use divvy_sim::Sim;
use divvy_sim::state::State;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

/// GPUs of each node. MIG is on in every second one where it needs a reset.
const GPUS: usize = 6;
/// Demos at the same time: each mostly waits.
const PARALLEL: usize = 6;
const GIB: u64 = 1 << 30;

/// The requirement of a file on the GPU model.
#[derive(Clone, Copy)]
enum Needs {
    AnyGpu,
    /// A GPU with more than this memory, in GiB.
    Memory(u64),
    /// One of these MIG profiles.
    Profile(&'static [&'static str]),
    NvLink,
}

const FILES: [(&str, Needs); 16] = [
    ("first-available.yaml", Needs::Profile(&["3g.40gb", "1g.10gb"])),
    ("inference.yaml", Needs::Profile(&["2g.20gb", "3g.40gb"])),
    ("mig.yaml", Needs::Profile(&["1g.10gb"])),
    ("mps.yaml", Needs::AnyGpu),
    ("nvlink-pair.yaml", Needs::NvLink),
    ("share-mig.yaml", Needs::Profile(&["1g.10gb"])),
    ("share-priority.yaml", Needs::Memory(40)),
    ("share-tidal.yaml", Needs::Memory(20)),
    ("share-two.yaml", Needs::AnyGpu),
    ("share.yaml", Needs::AnyGpu),
    ("shared-claim.yaml", Needs::Memory(40)),
    ("timeslice.yaml", Needs::AnyGpu),
    ("unchanged-gpu.yaml", Needs::AnyGpu),
    ("unchanged-mig.yaml", Needs::Profile(&["1g.10gb"])),
    ("unchanged-shared.yaml", Needs::AnyGpu),
    ("whole.yaml", Needs::AnyGpu),
];

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../manifests/examples")
}

impl Needs {
    fn are_met(self, model: Model) -> bool {
        let row = model.row();
        match self {
            Self::AnyGpu => true,
            Self::Memory(gib) => row.memory_total_mib << 20 > gib * GIB,
            Self::Profile(names) => {
                let profiles = row.mig.iter().flat_map(|mig| &mig.profiles);
                profiles.into_iter().any(|profile| names.contains(&profile.name.as_str()))
            }
            Self::NvLink => row.nvlink_links > 0 && row.memory_total_mib << 20 >= 40 * GIB,
        }
    }
}

#[test]
fn every_example_is_listed() {
    let entries = std::fs::read_dir(examples()).expect("examples").flatten();
    let names = entries.map(|entry| entry.file_name().into_string().expect("UTF-8"));
    let mut names: Vec<String> = names.filter(|name| name.ends_with(".yaml")).collect();
    names.sort();
    assert_eq!(names, FILES.map(|(name, _)| name));
}

#[test]
fn every_example_is_served_on_every_fitting_model() {
    let models: Vec<Model> = keys().map(|key| find(key).expect("a model")).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..PARALLEL {
            scope.spawn(|| {
                while let Some(model) = models.get(next.fetch_add(1, Ordering::Relaxed)) {
                    check_model(*model);
                }
            });
        }
    });
}

fn check_model(model: Model) {
    let files: Vec<_> =
        FILES.iter().filter(|(_, needs)| needs.are_met(model)).map(|(name, _)| *name).collect();
    let key = &model.row().key;
    let mut command = Command::new(env!("CARGO_BIN_EXE_divvy"));
    command.args(["demo", "--output", "json", "--step", "--gpus", &format!("{GPUS}x{key}")]);
    for file in &files {
        command.arg("--claims").arg(examples().join(file));
    }
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("divvy starts");
    let mut input = child.stdin.take().expect("input");
    let output = BufReader::new(child.stdout.take().expect("output"));
    let mut uids = BTreeMap::new();
    let mut held_files = 0;
    let mut log = String::new();
    for line in output.lines() {
        let line = line.expect("a line");
        log = log + &line + "\n";
        let event: Value = serde_json::from_str(&line).expect("JSON");
        let text = |field: &str| event[field].as_str().unwrap_or_default().to_owned();
        match text("event").as_str() {
            "prepared" => {
                uids.insert(text("claim"), text("uid"));
            }
            "held" => {
                check_held(&event, &uids, &format!("{key}\n{log}"));
                held_files += 1;
                writeln!(input).expect("the demo waits");
            }
            _ => {}
        }
    }
    assert!(child.wait().expect("an exit status").success(), "{key}\n{log}");
    assert_eq!(held_files, files.len(), "{key}\n{log}");
}

/// Compares printed holders with the state of the GPUs.
fn check_held(event: &Value, uids: &BTreeMap<String, String>, log: &str) {
    let directory = Path::new(event["directory"].as_str().expect("a directory"));
    let state = Sim::open(directory.join("gpu")).expect("a simulator").read().expect("its state");
    let holders = event["holders"].as_array().expect("holders");
    assert!(!holders.is_empty(), "nothing is held\n{log}");
    for holder in holders {
        let is_true = match holder["mode"].as_str().expect("a mode") {
            "share" => share_is_true(directory, holder, uids),
            mode => mode_is_true(&state, mode, holder),
        };
        assert!(is_true, "{holder} is not so\n{log}");
    }
}

fn mode_is_true(state: &State, mode: &str, holder: &Value) -> bool {
    let mut gpus = state.gpus.iter();
    let gpu = gpus.find(|gpu| holder["gpu"] == gpu.uuid.as_str()).expect("a GPU");
    match mode {
        "mig" => {
            let mut starts = gpu.instances.iter().map(|gi| u64::from(gi.placement.start));
            gpu.mig.current && starts.any(|start| holder["start"] == start)
        }
        "whole" => !gpu.mig.current && gpu.timeslice == 0 && gpu.compute_mode == 0,
        "time-slice" => gpu.timeslice == 3,
        "mps" => gpu.compute_mode == 3,
        other => panic!("unknown mode {other}"),
    }
}

/// Whether a policy page of the claim has the printed limits.
fn share_is_true(directory: &Path, holder: &Value, uids: &BTreeMap<String, String>) -> bool {
    let uid = &uids[holder["claim"].as_str().expect("a claim")];
    let pages = std::fs::read_dir(directory.join("run/shares").join(uid)).expect("pages");
    pages.flatten().any(|share| {
        let page = std::fs::read(share.path().join("policy")).expect("a policy page");
        let (_, policy) = Policy::decode(&page).expect("a policy");
        holder["memoryMiB"] == policy.memory.limit >> 20
    })
}
