//! Health as events and as polled values.
#![allow(unsafe_code, reason = "the library is called through C")]

mod common;

use common::*;
use divvy_sim::operations::HealthChange;
use divvy_sim::state::{Process, ProcessKind, State};
use nvml_wrapper_sys::bindings::*;

const RECOVERY_ACTION: u32 = 230;

type Outcome = Result<(), divvy_sim::Code>;

fn field(client: &Client, device: Device, id: u32) -> u64 {
    let mut value = nvmlFieldValue_t { fieldId: id, ..zeroed() };
    // SAFETY: the signature is the header's, and there is one value.
    let code = unsafe { client.lib.nvmlDeviceGetFieldValues(device.0, 1, &mut value) };
    assert_eq!((code, value.nvmlReturn), (SUCCESS, SUCCESS), "field {id}");
    // SAFETY: any bytes are valid, and the library clears those that it does not use.
    unsafe { value.value.ullVal }
}

#[test]
fn health_values_are_polled() {
    let node = Node::up("H100-SXM5-80GB");
    let client = node.client();
    let gpu = client.device(0).expect("a GPU");
    let change = HealthChange {
        ecc_corrected: Some(7),
        ecc_uncorrected: Some(5),
        rows_corrected: Some(3),
        rows_uncorrected: Some(2),
        remap_pending: Some(true),
        remap_failed: Some(true),
        recovery_action: Some(1),
        ..HealthChange::default()
    };
    node.sim.update(|state| state.set_health(0, change, false)).expect("a GPU");
    let fields = [3, 4, 5, 6, 142, 143, 144, 145, RECOVERY_ACTION].map(|id| field(&client, gpu, id));
    assert_eq!(fields, [7, 5, 7, 5, 3, 2, 1, 1, 1]);
    let mut rows = [0; 4];
    let [corrected, uncorrected, pending, failed] = &mut rows;
    // SAFETY: the signature is the header's, and the pointers are valid.
    let code =
        unsafe { client.lib.nvmlDeviceGetRemappedRows(gpu.0, corrected, uncorrected, pending, failed) };
    assert_eq!((code, rows), (SUCCESS, [3, 2, 1, 1]));
    for (error, counter, expected) in [(0, 0, 7), (1, 0, 5), (1, 1, 5)] {
        let (mut total, mut memory) = (0, 0);
        // SAFETY: the signature is the header's, and the pointers are valid.
        let code = unsafe { client.lib.nvmlDeviceGetTotalEccErrors(gpu.0, error, counter, &mut total) };
        assert_eq!((code, total), (SUCCESS, expected));
        // SAFETY: the signature is the header's, and the pointers are valid.
        let code =
            unsafe { client.lib.nvmlDeviceGetMemoryErrorCounter(gpu.0, error, counter, 2, &mut memory) };
        assert_eq!((code, memory), (SUCCESS, expected));
    }
    node.sim.update(|state| state.reset(0, false)).expect("idle");
    let fields = [3, 4, 5, 6, 142, 143, 144, 145, RECOVERY_ACTION].map(|id| field(&client, gpu, id));
    assert_eq!(fields, [0, 0, 7, 5, 3, 3, 0, 1, 0]);
}

#[test]
fn health_events_are_delivered() {
    let node = Node::up("H100-SXM5-80GB");
    let client = node.client();
    let gpu = client.device(0).expect("a GPU");
    let mut kinds = 0;
    // SAFETY: the signature is the header's, and the pointer is valid.
    let code = unsafe { client.lib.nvmlDeviceGetSupportedEventTypes(gpu.0, &mut kinds) };
    assert_eq!((code, kinds & 0xc00b), (SUCCESS, 0xc00b));
    let set = client.event_set();
    assert_eq!(client.register(gpu, kinds, set), SUCCESS);
    let change = HealthChange {
        ecc_uncorrected: Some(1),
        remap_pending: Some(true),
        recovery_action: Some(4),
        ..HealthChange::default()
    };
    node.sim.update(|state| state.set_health(0, change, true)).expect("a GPU");
    for expected in [(0x2, 0), (0x8, 48), (0x8, 63), (0x8000, 4)] {
        let event = client.wait(set, 1000).expect("an event");
        assert_eq!((event.eventType, event.eventData), expected);
    }
    assert_eq!(client.wait(set, 0).err(), Some(TIMEOUT));
}

#[test]
fn energy_rises_until_a_reset() {
    let node = Node::up("H100-SXM5-80GB");
    let client = node.client();
    let gpu = client.device(0).expect("a GPU");
    let energy = || {
        let mut mj = 0;
        // SAFETY: the signature is the header's, and the pointer is valid.
        let code = unsafe { client.lib.nvmlDeviceGetTotalEnergyConsumption(gpu.0, &mut mj) };
        assert_eq!(code, SUCCESS);
        assert!(field(&client, gpu, 83) >= mj);
        mj
    };
    let name = "train".to_owned();
    let process = Process { pid: 7, name, kind: ProcessKind::Compute, instance: None, memory_mib: 1 };
    let changes: [&dyn Fn(&mut State) -> Outcome; 3] =
        [&|state| state.add_process(0, process.clone()), &|state| state.remove_process(None, 7), &|state| {
            state.xid(0, 13, None)
        }];
    let (begin, mut last) = (std::time::Instant::now(), energy());
    for change in changes {
        // An idle H100 uses 70 mJ each millisecond.
        std::thread::sleep(std::time::Duration::from_millis(5));
        node.sim.update(change).expect("a GPU");
        let now = energy();
        assert!(now > last, "{now} mJ after {last} mJ");
        last = now;
    }
    assert!(u128::from(last) <= 500 * (begin.elapsed().as_millis() + 60_000));
    node.sim.update(|state| state.reset(0, false)).expect("idle");
    let before = node.sim.read().expect("a state").gpus[0].energy;
    assert_eq!(before.mj, 0);
}
