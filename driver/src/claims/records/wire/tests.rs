use super::*;
use crate::claims::holding::Access;
use crate::gpu::sharing::ShareLimits;
use divvy_api::GpuUuid;
use divvy_api::sharing::ShareSettings;
use proptest::prelude::*;

/// A record of format 1, as the first build wrote it. Never edit it: such files must stay readable
/// for as long as a node may have one.
const V1: &[u8] = include_bytes!("v1.golden.json");

fn key(start: u32, size: u32) -> InstanceKey {
    InstanceKey { gpu: "GPU-a".into(), profile_id: 9, placement: Placement { start, size } }
}

fn sample() -> ClaimRecord {
    let device = |name: &str, access, part, instance| DeviceRecord {
        request: "r".into(),
        pool: "node".into(),
        device: name.into(),
        share_id: None,
        access,
        part,
        instance,
        cdi_ids: vec![format!("gpu.divvy.dev/claim=u-1-{name}")],
    };
    let ids = InstanceIds { gpu_instance: 2, compute_instance: 0, uuid: "MIG-x".into() };
    ClaimRecord {
        claim: ClaimRef { namespace: "ns".into(), name: "claim".into(), uid: "u-1".into() },
        state: HeldState::Prepared,
        devices: vec![
            device("gpu-1", Access::Exclusive(None), Part::Whole { gpu: "GPU-b".into() }, None),
            device("gpu-0-mig-3g40gb-9-4", Access::Exclusive(None), Part::Instance(key(4, 4)), Some(ids)),
            device("gpu-0-mig-3g40gb-9-0", Access::Admin, Part::Instance(key(0, 4)), None),
        ],
        undo: vec![
            Undo::DestroyGpuInstance(key(4, 4)),
            Undo::DestroyComputeInstances(key(4, 4)),
            Undo::RemoveCdi,
        ],
        epoch: Epoch::default(),
    }
}

/// A record of format 2, as the first build with GPU sharing wrote it. Never edit it.
const V2: &[u8] = include_bytes!("v2.golden.json");

fn shared() -> ClaimRecord {
    let limits = MpsLimits { threads: Some(30), memory_mib: Some(10240), multi_user: Some(false) };
    let device = |name: &str, share: Option<&str>, access, part| DeviceRecord {
        request: "r".into(),
        pool: "node".into(),
        device: name.into(),
        share_id: share.map(Into::into),
        access,
        part,
        instance: None,
        cdi_ids: Vec::new(),
    };
    let whole = |gpu: &str| Part::Whole { gpu: gpu.into() };
    let long = Setup::Timeslice(sharing::Interval::Long);
    ClaimRecord {
        claim: ClaimRef { namespace: "ns".into(), name: "claim".into(), uid: "u-2".into() },
        state: HeldState::Intent,
        devices: vec![
            device("gpu-0-timeslice", Some("s-1"), Access::Shared(long), whole("GPU-a")),
            device("gpu-1-mps", Some("s-2"), Access::Shared(Setup::Mps(limits)), whole("GPU-b")),
            device("gpu-2", None, Access::Exclusive(Some(long)), whole("GPU-c")),
            device(
                "gpu-3-mig-3g40gb-9-4",
                None,
                Access::Exclusive(Some(Setup::Mps(MpsLimits::default()))),
                Part::Instance(key(4, 4)),
            ),
        ],
        undo: vec![
            Undo::ResetInterval { gpu: "GPU-a".into() },
            Undo::ResetComputeMode { gpu: "GPU-b".into() },
            Undo::StopMps { part: whole("GPU-b") },
            Undo::StopMps { part: Part::Instance(key(4, 4)) },
            Undo::RemoveCdi,
        ],
        epoch: Epoch::default(),
    }
}

/// A record of format 3, as the first build with shares wrote it. Never edit it.
const V3: &[u8] = include_bytes!("v3.golden.json");

fn set(memory: u64) -> ShareLimits {
    let settings = ShareSettings {
        injection: sharing::Injection::Shim,
        observe_only: true,
        priority: sharing::Priority::High,
        weight: 200,
        ceiling: 50,
        overcommit: 100,
        encoders: None,
        decoders: None,
        burst: false,
        messages: true,
    };
    ShareLimits { memory, cores: 30, settings }
}

fn in_shares() -> ClaimRecord {
    let plain = ShareLimits { memory: 10 << 30, cores: 0, settings: ShareSettings::default() };
    let device = |name: &str, share: &str, access, part, instance| DeviceRecord {
        request: "r".into(),
        pool: "node".into(),
        device: name.into(),
        share_id: Some(share.into()),
        access,
        part,
        instance,
        cdi_ids: vec![format!("gpu.divvy.dev/claim=u-3-{name}-{share}")],
    };
    let whole = |gpu: &str| Part::Whole { gpu: gpu.into() };
    let ids = InstanceIds { gpu_instance: 2, compute_instance: 0, uuid: "MIG-x".into() };
    let slice = Part::Instance(key(4, 4));
    ClaimRecord {
        claim: ClaimRef { namespace: "ns".into(), name: "claim".into(), uid: "u-3".into() },
        state: HeldState::Prepared,
        devices: vec![
            device("gpu-1", "s-1", Access::Share(plain), whole("GPU-b"), None),
            device("gpu-0-mig-3g40gb-9-4", "s-2", Access::Share(set(5 << 30)), slice, Some(ids)),
            device("gpu-2", "s-3", Access::Exclusive(None), whole("GPU-c"), None),
        ],
        undo: vec![
            Undo::DestroyGpuInstance(key(4, 4)),
            Undo::DestroyComputeInstances(key(4, 4)),
            Undo::RemovePages,
            Undo::RemoveCdi,
        ],
        epoch: Epoch::default(),
    }
}

#[test]
fn bytes_of_format_3_do_not_change() {
    assert_eq!(String::from_utf8(encode(&in_shares()).unwrap()).unwrap(), String::from_utf8_lossy(V3));
}

#[test]
fn this_build_reads_format_3() {
    assert_eq!(decode(V3).unwrap(), in_shares());
}

#[test]
fn bytes_of_format_2_do_not_change() {
    assert_eq!(String::from_utf8(encode(&shared()).unwrap()).unwrap(), String::from_utf8_lossy(V2));
}

#[test]
fn this_build_reads_format_2() {
    assert_eq!(decode(V2).unwrap(), shared());
}

/// A build that knows only format 1 must not take a share for a whole GPU. A whole GPU with a shareID
/// is fine in format 1.
#[test]
fn newer_contents_need_a_newer_format() {
    let format = |record: &ClaimRecord| {
        let text = String::from_utf8(encode(record).unwrap()).unwrap();
        text.split_once(',').unwrap().0.to_owned()
    };
    assert_eq!(format(&sample()), r#"{"format":1"#);
    for device in shared().devices {
        assert_eq!(format(&ClaimRecord { devices: vec![device], ..sample() }), r#"{"format":2"#);
    }
    for (device, expected) in in_shares().devices.into_iter().zip([3, 3, 1]) {
        let found = format(&ClaimRecord { devices: vec![device], ..sample() });
        assert_eq!(found, format!(r#"{{"format":{expected}"#));
    }
}

/// The encoded sample with its body changed and the checksum corrected.
fn with_body(change: impl Fn(String) -> String) -> Vec<u8> {
    let text = String::from_utf8(encode(&sample()).unwrap()).unwrap();
    let body = text.split_once("\"record\":").unwrap().1.trim_end().strip_suffix('}').unwrap();
    let body = change(body.to_owned());
    format!("{{\"format\":1,\"crc32\":\"{:08x}\",\"record\":{body}}}", crc32fast::hash(body.as_bytes()))
        .into_bytes()
}

#[test]
fn bytes_of_format_1_do_not_change() {
    assert_eq!(String::from_utf8(encode(&sample()).unwrap()).unwrap(), String::from_utf8_lossy(V1));
}

/// The oldest format that a node may have.
#[test]
fn this_build_reads_format_1() {
    assert_eq!(decode(V1).unwrap(), sample());
}

#[test]
fn newer_format_is_refused_by_this_build() {
    let newer = String::from_utf8_lossy(V1).replace("\"format\":1", "\"format\":4");
    let error = decode(newer.as_bytes()).unwrap_err();
    assert_eq!(error.to_string(), "written in format 4; this build reads up to 3");
}

#[test]
fn unknown_fields_are_tolerated() {
    let added = with_body(|body| {
        body.replacen("{\"claim\":{", "{\"later\":[{}],\"claim\":{\"later\":1,", 1)
            .replace("{\"request\"", "{\"later\":{\"x\":null},\"request\"")
            .replace("{\"do\"", "{\"later\":true,\"do\"")
    });
    assert_eq!(decode(&added).unwrap(), sample());
}

#[test]
fn unknown_undo_step_makes_a_record_unreadable() {
    let unknown = with_body(|body| body.replace("\"removeCdi\"", "\"stopSomething\""));
    assert!(matches!(decode(&unknown), Err(DecodeError::Body { format: 1, .. })));
}

#[test]
fn truncated_record_is_detected_at_any_length() {
    // Only the last byte, the newline, may be missing.
    for length in 0..V1.len() - 1 {
        assert!(decode(&V1[..length]).is_err(), "cut at {length}");
    }
}

#[test]
fn flipped_bit_is_detected_or_harmless() {
    for at in 0..V1.len() {
        for bit in 0..8 {
            let mut bytes = V1.to_vec();
            bytes[at] ^= 1 << bit;
            if let Ok(record) = decode(&bytes) {
                assert_eq!(record, sample(), "byte {at}, bit {bit}");
            }
        }
    }
}

fn any_key() -> impl Strategy<Value = InstanceKey> {
    ("GPU-[a-c]", 0..30u32, 0..12u32, 1..12u32).prop_map(|(gpu, profile_id, start, size)| InstanceKey {
        gpu: gpu.into(),
        profile_id,
        placement: Placement { start, size },
    })
}

fn any_device() -> impl Strategy<Value = DeviceRecord> {
    let part = prop_oneof![
        "GPU-[a-c]".prop_map(|gpu| Part::Whole { gpu: gpu.into() }),
        any_key().prop_map(Part::Instance)
    ];
    (".{0,9}", part, any_access(), proptest::option::of("[a-f0-9-]{1,9}"), any::<Option<(u32, u32)>>())
        .prop_map(|(name, part, access, share, ids)| DeviceRecord {
            request: name.as_str().into(),
            pool: "node".into(),
            device: name.as_str().into(),
            share_id: share.map(Into::into),
            access,
            instance: ids.filter(|_| matches!(part, Part::Instance(_))).map(
                |(gpu_instance, compute_instance)| InstanceIds {
                    gpu_instance,
                    compute_instance,
                    uuid: format!("MIG-{name}"),
                },
            ),
            part,
            cdi_ids: vec![name],
        })
}

fn any_access() -> impl Strategy<Value = Access> {
    use sharing::Interval::{Default, Long, Medium, Short};
    let interval = prop_oneof![Just(Default), Just(Short), Just(Medium), Just(Long)];
    let limits = any::<(Option<u32>, Option<u64>, Option<bool>)>()
        .prop_map(|(threads, memory_mib, multi_user)| MpsLimits { threads, memory_mib, multi_user });
    let setup = prop_oneof![interval.prop_map(Setup::Timeslice), limits.prop_map(Setup::Mps)];
    prop_oneof![
        proptest::option::of(setup.clone()).prop_map(Access::Exclusive),
        setup.prop_map(Access::Shared),
        any::<u64>().prop_map(|memory| Access::Share(set(memory))),
        Just(Access::Admin)
    ]
}

fn any_record() -> impl Strategy<Value = ClaimRecord> {
    let state = prop_oneof![Just(HeldState::Intent), Just(HeldState::Prepared), Just(HeldState::Releasing)];
    let undo = prop_oneof![
        any_key().prop_map(Undo::DestroyGpuInstance),
        any_key().prop_map(Undo::DestroyComputeInstances),
        "GPU-[a-c]".prop_map(|gpu| Undo::ResetInterval { gpu: gpu.into() }),
        "GPU-[a-c]".prop_map(|gpu| Undo::ResetComputeMode { gpu: gpu.into() }),
        "GPU-[a-c]".prop_map(|gpu| Undo::StopMps { part: Part::Whole { gpu: gpu.into() } }),
        any_key().prop_map(|key| Undo::StopMps { part: Part::Instance(key) }),
        Just(Undo::RemovePages),
        Just(Undo::RemoveCdi)
    ];
    let many = proptest::collection::vec(any_device(), 0..4);
    let undo = proptest::collection::vec(undo, 0..4);
    (".{0,9}", state, many, undo, any_epoch()).prop_map(|(name, state, devices, undo, epoch)| {
        let claim = ClaimRef { namespace: name.clone(), name: name.clone(), uid: name.into() };
        ClaimRecord { claim, state, devices, undo, epoch }
    })
}

fn any_epoch() -> impl Strategy<Value = Epoch> {
    any::<(Option<String>, Option<u64>)>().prop_map(|(boot, module)| Epoch { boot, module })
}

/// A record as a later build might write it: a newer format, unknown fields, devices and steps.
fn newer(record: &ClaimRecord) -> Vec<u8> {
    let mut body = serde_json::to_value(Record::from(record)).unwrap();
    body["more"] = 1.into();
    for (list, unknown) in [("devices", "quantum"), ("undo", "fold")] {
        body[list].as_array_mut().unwrap().push(serde_json::json!({"do": unknown, "kind": unknown}));
    }
    enclose(FORMAT + 1, &body).unwrap()
}

#[test]
fn record_of_a_newer_format_still_tells_its_debts() {
    let record = ClaimRecord { epoch: Epoch { boot: Some("b".into()), module: Some(7) }, ..sample() };
    assert!(matches!(decode(&newer(&record)), Err(DecodeError::Format { .. })));
    let (claim, held, undo, epoch) = decode_newer(&newer(&record)).unwrap();
    assert_eq!((claim, undo, epoch), (record.claim, record.undo, record.epoch));
    assert_eq!(held, [Part::Whole { gpu: "GPU-b".into() }, Part::Instance(key(4, 4))], "no admin access");
    assert!(decode_newer(V3).is_none(), "a record that this build reads is no newer one");
    let damaged = String::from_utf8(newer(&sample())).unwrap().replace("u-1", "u-9");
    assert!(decode_newer(damaged.as_bytes()).is_none());
}

fn any_debt() -> impl Strategy<Value = Debt> {
    let instances = proptest::collection::vec((any_key(), ".{0,5}"), 0..3);
    (any_record(), instances, ".{0,9}").prop_map(|(record, instances, cause)| {
        let gpu = GpuUuid::from("GPU-a");
        let own = |key: InstanceKey| InstanceKey { gpu: gpu.clone(), ..key };
        let ids = |uuid| InstanceIds { gpu_instance: 1, compute_instance: 0, uuid };
        let held = [Part::Whole { gpu: gpu.clone() }].into_iter();
        Debt {
            claim: record.claim,
            epoch: record.epoch,
            held: held.chain(instances.iter().map(|(key, _)| Part::Instance(own(key.clone())))).collect(),
            undo: record.undo,
            instances: instances.into_iter().map(|(key, uuid)| (own(key), ids(uuid))).collect(),
            reading: Some(divvy_model::HealthReading { energy_mj: Some(7), ..Default::default() }),
            cause,
            gpu,
        }
    })
}

proptest! {
    #[test]
    fn debts_round_trip(debt in any_debt()) {
        prop_assert_eq!(decode_debt(&encode_debt(&debt).unwrap()).unwrap(), debt);
    }

    #[test]
    fn damaged_debt_is_an_error(debt in any_debt(), at in any::<prop::sample::Index>()) {
        let mut bytes = encode_debt(&debt).unwrap();
        bytes.truncate(at.index(bytes.len() - 1));
        prop_assert!(decode_debt(&bytes).is_err());
    }
}

proptest! {
    #[test]
    fn encoded_record_decodes_to_the_same(record in any_record()) {
        prop_assert_eq!(decode(&encode(&record).unwrap()).unwrap(), record);
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode(&bytes);
    }

    #[test]
    fn arbitrary_bodies_do_not_panic(body in "[\\[\\]{}:,\"a-z0-9-]{0,80}") {
        let checksum = crc32fast::hash(body.as_bytes());
        let _ = decode(format!("{{\"format\":1,\"crc32\":\"{checksum:08x}\",\"record\":{body}}}").as_bytes());
    }
}
