//! XIDs, the kernel log, recovery actions and health values.

mod common;

use common::Node;
use divvy_sim::State;
use divvy_sim::code::Code;
use divvy_sim::operations::HealthChange;
use divvy_sim::state::{EventKind, Process, ProcessKind};
use std::io::{Read, Seek};

fn update(node: &Node, change: impl FnOnce(&mut State) -> Result<(), Code>) {
    node.sim.update(change).expect("a change");
}

/// Texts of the kernel log's records, whose numbers must be consecutive.
fn kernel_log(node: &Node) -> Vec<String> {
    let text = node.text("dev/kmsg");
    let records = text.lines().enumerate().map(|(number, line)| {
        let (head, text) = line.split_once(";").expect("a record");
        let fields: Vec<&str> = head.split(',').collect();
        assert_eq!((fields[0], fields[1], fields[3]), ("4", number.to_string().as_str(), "-"), "{line}");
        assert!(fields[2].parse::<u64>().is_ok(), "{line}");
        text.to_owned()
    });
    records.collect()
}

fn events(node: &Node) -> Vec<EventKind> {
    node.sim.read().expect("a state").events.queue.iter().map(|event| event.kind).collect()
}

#[test]
fn xids_are_logged_as_the_driver_does() {
    let node = Node::create("2xL4");
    let name = "python3".to_owned();
    let process = Process { pid: 42, name, kind: ProcessKind::Compute, instance: None, memory_mib: 1 };
    update(&node, |state| {
        state.xid(0, 79, None)?;
        state.xid(1, 94, Some((5, 0)))?;
        state.xid(1, 154, None)?;
        state.add_process(1, process)?;
        state.xid(1, 43, None)
    });
    let unknown = "pid='<unknown>', name=<unknown>";
    assert_eq!(
        kernel_log(&node)[1..],
        [
            format!("NVRM: Xid (PCI:0000:0a:00): 79, {unknown}, GPU has fallen off the bus."),
            format!(
                "NVRM: Xid (PCI:0000:0b:00 GPU-I:05 GPU-CI:00): 94, {unknown}, Contained: SM (0x1). RST: No, \
                 D-RST: No"
            ),
            "NVRM: Xid (PCI:0000:0b:00): 154, GPU recovery action changed from 0x0 (None) to 0x0 (None)"
                .to_owned(),
            "NVRM: Xid (PCI:0000:0b:00): 43, pid=42, name=python3, Ch 00000008".to_owned(),
        ]
    );
}

#[test]
fn recovery_action_changes_are_logged_as_xid_154() {
    let node = Node::create("L4");
    for action in [1, 2, 2, 0] {
        update(&node, |state| state.set_recovery_action(0, action));
    }
    let changes = [
        "0x0 (None) to 0x1 (GPU Reset Required)",
        "0x1 (GPU Reset Required) to 0x2 (Node Reboot Required)",
        "0x2 (Node Reboot Required) to 0x0 (None)",
    ];
    let line = |change| format!("NVRM: Xid (PCI:0000:0a:00): 154, GPU recovery action changed from {change}");
    assert_eq!(kernel_log(&node)[1..], changes.map(line));
}

#[test]
fn boot_starts_a_new_kernel_log() {
    let node = Node::create("L4");
    let mut reader = std::fs::File::open(node.sim.kernel_log_path()).expect("a log");
    reader.seek(std::io::SeekFrom::End(0)).expect("the end");
    update(&node, |state| state.xid(0, 79, None));
    let mut text = String::new();
    reader.read_to_string(&mut text).expect("a record");
    assert!(text.starts_with("4,1,") && text.ends_with("GPU has fallen off the bus.\n"), "{text}");
    update(&node, |state| {
        state.reboot();
        Ok(())
    });
    let log = kernel_log(&node);
    assert!(log.len() == 1 && log[0].starts_with("NVRM: loading NVIDIA UNIX"), "{log:?}");
    let refused = node.sim.update(|state| state.xid(0, 79, None).and(Err::<(), _>(Code::InUse)));
    assert!(refused.is_err() && kernel_log(&node).len() == 1);
}

#[test]
fn health_values_are_set_with_or_without_events() {
    let worse = HealthChange {
        ecc_corrected: Some(3),
        ecc_uncorrected: Some(2),
        rows_corrected: Some(1),
        remap_pending: Some(true),
        remap_failed: Some(true),
        recovery_action: Some(4),
        ..HealthChange::default()
    };
    let reported = [
        EventKind::SingleBitEcc,
        EventKind::DoubleBitEcc,
        EventKind::Xid(48),
        EventKind::Xid(63),
        EventKind::Xid(64),
        EventKind::RecoveryAction(4),
    ];
    for (with_events, expected) in [(false, [].as_slice()), (true, reported.as_slice())] {
        let node = Node::create("L4");
        update(&node, |state| state.set_health(0, worse, with_events));
        assert_eq!((events(&node).as_slice(), kernel_log(&node).len() > 1), (expected, with_events));
        let health = node.sim.read().expect("a state").gpus[0].health;
        assert_eq!((health.ecc_uncorrected, health.ecc_uncorrected_total), (2, 2));
        assert!(health.remap_pending && health.remap_failed && health.recovery_action == 4);
        let better = HealthChange { remap_pending: Some(false), ..HealthChange::default() };
        update(&node, |state| state.set_health(0, better, true));
        let health = node.sim.read().expect("a state").gpus[0].health;
        assert!(!health.remap_pending && health.remap_failed && events(&node).len() == expected.len());
    }
}
