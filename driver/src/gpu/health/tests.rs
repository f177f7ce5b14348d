//! Each way into a state and out of it, the file, and what programs cannot do.

use super::*;
use divvy_model::RecoveryAction;
use divvy_model::inventory::{ComputeInstance, Origin};
use divvy_model::xid::XIDS;
use proptest::prelude::*;

fn gpu() -> GpuUuid {
    GpuUuid::from("GPU-0")
}

fn boot(id: &str, module: u64) -> Epoch {
    Epoch { boot: Some(id.to_owned()), module: Some(module) }
}

fn tracker() -> Tracker {
    let mut tracker = Tracker::default();
    tracker.observe_epoch(boot("a", 1));
    tracker
}

/// A reading of a GPU on which everything is fine.
fn fine() -> HealthReading {
    HealthReading {
        recovery_action: Some(RecoveryAction::None),
        remap_pending: Some(false),
        remap_failed: Some(false),
        uncorrected_ecc: Some(0),
        energy_mj: Some(1_000),
    }
}

fn call(call: &'static str, code: Code) -> NvmlError {
    NvmlError::Call { call, gpu: gpu(), code }
}

fn check(tracker: &Tracker, expected: &[&str]) {
    let found: Vec<_> = tracker.findings(&gpu()).iter().map(Finding::to_string).collect();
    assert_eq!(found, expected);
}

const FALLEN: &str = "GPU is lost: XID 79: GPU has fallen off the bus";
const DOUBLE_BIT: &str = "GPU is needs-reset: XID 48: Double Bit ECC Error";

/// A tracker with the marks of XIDs 48 and 79 after one good reading.
fn marked() -> Tracker {
    let mut tracker = tracker();
    tracker.observe_reading(&gpu(), fine());
    assert!(tracker.observe_xid(&gpu(), 48, None, 1));
    assert!(tracker.observe_xid(&gpu(), 79, None, 2));
    assert!(!tracker.observe_xid(&gpu(), 79, None, 3), "a repeated XID changes nothing");
    check(&tracker, &[FALLEN, DOUBLE_BIT]);
    tracker
}

#[test]
fn fatal_xid_stays_while_the_action_is_none() {
    let mut tracker = marked();
    for energy_mj in [1_000, 2_000, 3_000] {
        assert!(!tracker.observe_reading(&gpu(), HealthReading { energy_mj: Some(energy_mj), ..fine() }));
    }
    check(&tracker, &[FALLEN, DOUBLE_BIT]);
}

#[test]
fn marks_end_with_a_cleared_recovery_action() {
    let mut tracker = marked();
    let reset = HealthReading { recovery_action: Some(RecoveryAction::GpuReset), ..fine() };
    assert!(tracker.observe_reading(&gpu(), reset));
    check(&tracker, &[FALLEN, "GPU is needs-reset: recovery action is GPU reset", DOUBLE_BIT]);
    assert!(tracker.observe_reading(&gpu(), fine()));
    check(&tracker, &[]);
}

#[test]
fn marks_end_with_a_reset_that_a_counter_shows() {
    for after in [
        HealthReading { energy_mj: Some(10), ..fine() },
        HealthReading { energy_mj: Some(10), recovery_action: None, ..fine() },
    ] {
        let mut tracker = marked();
        assert!(tracker.observe_reading(&gpu(), after));
        check(&tracker, &[]);
    }
    let mut tracker = marked();
    tracker.observe_reading(&gpu(), HealthReading { uncorrected_ecc: Some(1), ..fine() });
    assert!(tracker.observe_reading(&gpu(), fine()));
    check(&tracker, &[]);
}

#[test]
fn marks_end_with_another_boot_or_module_load() {
    for other in [boot("b", 1), boot("a", 2), Epoch { boot: None, module: Some(2) }] {
        let mut tracker = marked();
        assert!(tracker.observe_epoch(other));
        check(&tracker, &[]);
    }
    for same in [boot("a", 1), Epoch { boot: None, module: None }, Epoch { boot: None, module: Some(1) }] {
        let mut tracker = marked();
        assert!(!tracker.observe_epoch(same));
        check(&tracker, &[FALLEN, DOUBLE_BIT]);
    }
}

#[test]
fn replaced_gpu_has_no_marks_of_its_predecessor() {
    let tracker = marked();
    assert_eq!(tracker.findings(&GpuUuid::from("GPU-1")), []);
}

#[test]
fn failed_call_ends_with_the_next_good_reading() {
    for (error, expected) in [
        (NvmlError::Lost { call: "c", gpu: gpu() }, "GPU is lost: c found no GPU"),
        (call("c", Code::ResetRequired), "GPU is needs-reset: c asks for a reset"),
        (call("c", Code::GpuNotFound), "GPU is lost: c found no GPU"),
        (call("c", Code::IrqIssue), "GPU is lost: c reports an interrupt problem"),
        (
            call("nvmlDeviceGetHandleByUUID", Code::NotFound),
            "GPU is lost: nvmlDeviceGetHandleByUUID found no GPU",
        ),
    ] {
        let mut tracker = tracker();
        assert!(tracker.observe_error(&gpu(), &error, false), "{error}");
        assert!(!tracker.observe_error(&gpu(), &error, true), "{error}");
        check(&tracker, &[expected]);
        assert!(tracker.has_failure(&gpu()) && tracker.observe_reading(&gpu(), fine()));
        check(&tracker, &[]);
    }
}

#[test]
fn unknown_error_counts_when_it_repeats() {
    let unknown = call("c", Code::Unknown);
    let mut tracker = tracker();
    assert!(!tracker.observe_error(&gpu(), &unknown, false), "not an error of a health reading");
    assert!(!tracker.observe_error(&gpu(), &unknown, true));
    tracker.observe_reading(&gpu(), fine());
    assert!(!tracker.observe_error(&gpu(), &unknown, true));
    assert!(tracker.observe_error(&gpu(), &unknown, true));
    check(&tracker, &["GPU is lost: c fails with an unknown error"]);
}

#[test]
fn error_without_information_changes_nothing() {
    let mut tracker = marked();
    let after = std::time::Duration::ZERO;
    for error in [
        NvmlError::Busy { call: "c", gpu: gpu(), after },
        NvmlError::Closed { gpu: gpu() },
        NvmlError::Deadline { call: "c", gpu: gpu(), after },
        call("c", Code::InUse),
        call("c", Code::NoPermission),
        call("c", Code::NotFound),
    ] {
        assert!(!tracker.observe_error(&gpu(), &error, true), "{error}");
    }
    check(&tracker, &[FALLEN, DOUBLE_BIT]);
}

fn instance(id: u32, start: u32, uuid: &str) -> GpuInstance {
    GpuInstance {
        id,
        profile_id: 19,
        placement: Placement { start, size: 1 },
        compute_instances: vec![ComputeInstance { id: 0, profile_id: 0, uuid: uuid.to_owned() }],
        origin: Origin::Ours,
    }
}

fn raw(instance: &GpuInstance) -> RawInstance {
    RawInstance {
        id: instance.id,
        profile_id: instance.profile_id,
        placement: instance.placement,
        compute_instances: instance.compute_instances.clone(),
    }
}

#[test]
fn instance_error_ends_with_that_generation_of_the_instance() {
    let (own, other) = (instance(7, 0, "MIG-a"), instance(8, 1, "MIG-b"));
    let begin = || {
        let mut tracker = tracker();
        assert!(tracker.observe_xid(&gpu(), 95, Some(&own), 1));
        check(&tracker, &["GPU instance at 0 is needs-reset: XID 95: Uncontained memory error"]);
        tracker
    };
    let mut same = begin();
    assert!(!same.observe_instances(&gpu(), &[raw(&own), raw(&other)]));
    let without_compute = RawInstance { compute_instances: Vec::new(), ..raw(&own) };
    assert!(!same.observe_instances(&gpu(), &[without_compute]));
    assert!(!same.observe_destruction(&gpu(), 8));
    for now in [
        vec![raw(&other)],
        vec![raw(&instance(7, 2, "MIG-a"))],
        vec![raw(&instance(7, 0, "MIG-c"))],
        vec![RawInstance { profile_id: 14, ..raw(&own) }],
    ] {
        let mut tracker = begin();
        assert!(tracker.observe_instances(&gpu(), &now), "{now:?}");
        check(&tracker, &[]);
    }
    // Destroyed and created again with the same ids between two readings.
    let mut again = begin();
    assert!(again.observe_destruction(&gpu(), 7));
    assert!(!again.observe_instances(&gpu(), &[raw(&own)]));
    check(&again, &[]);
}

#[test]
fn lost_gpu_and_recovery_action_concern_the_whole_gpu() {
    let mut tracker = tracker();
    let own = instance(7, 0, "MIG-a");
    assert!(tracker.observe_xid(&gpu(), 79, Some(&own), 1));
    assert!(tracker.observe_xid(&gpu(), 154, Some(&own), 1));
    check(&tracker, &[FALLEN, "GPU is needs-reset: XID 154: GPU Recovery Action Changed"]);
    assert!(!tracker.observe_instances(&gpu(), &[]));
}

fn reload(dir: &Path) -> (HealthFile, Tracker) {
    HealthFile::load(dir)
}

#[test]
fn marks_end_when_an_operator_takes_the_gpu_back() {
    let mut tracker = marked();
    tracker.observe_take_back(&gpu());
    check(&tracker, &[]);
    let mut tracker = marked();
    let action = Some(RecoveryAction::GpuReset);
    tracker.observe_reading(&gpu(), HealthReading { recovery_action: action, ..fine() });
    tracker.observe_take_back(&gpu());
    check(&tracker, &["GPU is needs-reset: recovery action is GPU reset"]);
}

#[test]
fn marks_survive_a_restart_but_not_a_reboot() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let mut stored = marked();
    let own = instance(7, 0, "MIG-a");
    stored.observe_xid(&gpu(), 94, Some(&own), 4);
    let contained = "GPU instance at 0 is degraded: XID 94: Contained memory error";
    reload(dir.path()).0.store(&stored);
    let (_, mut same) = reload(dir.path());
    assert!(!same.observe_epoch(boot("a", 1)));
    check(&same, &[FALLEN, DOUBLE_BIT, contained]);
    // The energy is stored too, so that a reset while the daemon is down is noticed.
    assert!(same.observe_reading(&gpu(), HealthReading { energy_mj: Some(1), ..fine() }));
    check(&same, &[]);
    let (_, mut other) = reload(dir.path());
    assert!(other.observe_epoch(boot("b", 1)));
    check(&other, &[]);
}

#[test]
fn file_is_written_only_when_more_than_the_energy_changes() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let (mut file, mut tracker) = reload(dir.path());
    let mut stored = |tracker: &Tracker| {
        let path = dir.path().join(FILE);
        let _absent_at_first = std::fs::remove_file(&path);
        file.store(tracker);
        path.exists()
    };
    tracker.observe_reading(&gpu(), fine());
    assert!(stored(&tracker));
    tracker.observe_reading(&gpu(), HealthReading { energy_mj: Some(5_000), ..fine() });
    assert!(!stored(&tracker));
    tracker.observe_xid(&gpu(), 48, None, 1);
    assert!(stored(&tracker));
    assert!(!stored(&tracker));
}

#[test]
fn damaged_file_is_renamed_and_unknown_fields_are_ignored() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let path = dir.path().join(FILE);
    for damaged in ["{", "[]", r#"{"version":2,"epoch":{},"gpus":{}}"#] {
        std::fs::write(&path, damaged).expect("file");
        assert_eq!(reload(dir.path()).1, Tracker::default(), "{damaged}");
        assert!(dir.path().join("health.json.damaged").exists() && !path.exists(), "{damaged}");
    }
    std::fs::write(&path, "").expect("file");
    assert_eq!(reload(dir.path()).1, Tracker::default());
    let newer = r#"{"version":1,"more":1,"epoch":{"boot":"a","load":2},"gpus":{"GPU-0":{"cause":"x",
        "marks":[{"xid":48,"since":1,"pid":7},{"xid":9999,"since":1}],
        "reading":{"recoveryAction":0,"heat":1}}}}"#;
    std::fs::write(&path, newer).expect("file");
    check(&reload(dir.path()).1, &[DOUBLE_BIT]);
}

fn harmless() -> impl Strategy<Value = u64> {
    let known = XIDS.iter().filter(|xid| xid.class.state().is_none()).map(|xid| xid.number);
    let unknown = (0..2_000_u64).prop_filter("documented", |number| xid::find(*number).is_none());
    prop_oneof![proptest::sample::select(known.collect::<Vec<_>>()), unknown]
}

proptest! {
    /// A program chooses the XIDs and their order, and the instance is its own.
    #[test]
    fn no_xids_of_programs_change_a_state(
        xids in proptest::collection::vec((harmless(), any::<bool>()), 0..200),
        marked_before in any::<bool>(),
    ) {
        let mut tracker = if marked_before { marked() } else { tracker() };
        let (before, own) = (tracker.clone(), instance(7, 0, "MIG-a"));
        for (number, is_of_instance) in xids {
            let changed = tracker.observe_xid(&gpu(), number, is_of_instance.then_some(&own), 9);
            prop_assert!(!changed, "XID {number}");
        }
        prop_assert_eq!(tracker, before);
    }
}
