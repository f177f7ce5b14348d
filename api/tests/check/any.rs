//! Any object is checked without a panic, with the same result by text and by type.

use crate::pods::pod;
use crate::{asking, claim, config, mps, share_config, sharing, view};
use divvy_api::check::{self, Finding};
use k8s_openapi::api::resource::v1::ResourceClaim;
use proptest::prelude::*;
use serde_json::{Value, json};

/// Claims with matching and other names.
fn any_claim() -> impl Strategy<Value = Value> {
    let name = || prop_oneof![Just("r"), Just("r/a"), Just("a"), Just(""), Just("/")];
    let class = || {
        prop_oneof![
            Just("gpu.divvy.dev"),
            Just("mig.divvy.dev"),
            Just("mps.divvy.dev"),
            Just("timeslice.divvy.dev"),
            Just("any.example.com"),
            Just("mps-gpu.example.com"),
            Just("share.divvy.dev"),
            Just("broken.example.com"),
            Just("?"),
        ]
    };
    let amount = prop_oneof![Just("1"), Just("-1"), Just("1Gi"), Just("x"), Just("9e18"), Just("1n")];
    let capacity = prop_oneof![
        Just("slots"),
        Just("memory"),
        Just("cores"),
        Just("gpu.divvy.dev/threads"),
        Just("/"),
        Just("")
    ];
    let exactly = (name(), class(), any::<Option<i64>>(), any::<Option<bool>>(), capacity, amount).prop_map(
        |(name, class, count, admin, capacity, amount)| {
            let capacity = json!({"requests": {capacity: amount}});
            asking(name, class, json!({"count": count, "adminAccess": admin, "capacity": capacity}))
        },
    );
    let first = (name(), name(), class()).prop_map(|(name, sub, class)| {
        json!({"name": name, "firstAvailable": [{"name": sub, "deviceClassName": class}]})
    });
    let requests = prop::collection::vec(prop_oneof![exactly, first], 0..4);
    let parameters = prop_oneof![
        Just(mps("GpuConfig")),
        Just(mps("MigDeviceConfig")),
        Just(share_config(json!({}))),
        Just(share_config(json!({"injection": "preload"}))),
        Just(json!({})),
        Just(json!(null)),
        Just(sharing("GpuConfig", json!({"strategy": "TimeSlicing"}))),
    ];
    let config = (parameters, prop::collection::vec(name(), 0..3))
        .prop_map(|(parameters, requests)| config(parameters, &requests));
    (requests, prop::collection::vec(config, 0..3))
        .prop_map(|(requests, configs)| claim(json!({"requests": requests, "config": configs})))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn claims_are_checked_alike_by_text_and_type(claim in any_claim()) {
        let typed: ResourceClaim = serde_json::from_value(claim.clone()).expect("a claim");
        let by_text = check::object(claim.to_string().as_bytes(), &view()).expect("a claim");
        prop_assert_eq!(&by_text, &check::claim(&typed, &view()));
        let paths = |finding: &Finding| {
            finding.path.starts_with("spec.devices.") && !finding.message.is_empty()
        };
        prop_assert!(by_text.iter().all(paths), "{:?}", by_text);
    }

    #[test]
    fn any_pod_is_checked(
        claims in prop::collection::vec(any_claim(), 0..3),
        path in "(/|dev|shm|run|var|divvy|etc|ld.so.preload|[.]|é){0,6}",
    ) {
        let names = ["a", "b", "c"];
        let templates: Vec<_> =
            names.iter().zip(&claims)
                .map(|(name, claim)| (*name, claim["spec"]["devices"].clone()))
                .collect();
        let uses = templates.iter().map(|(name, _)| json!({"name": name})).collect();
        let (pod, view) = pod(&templates, uses, json!({"volumeMounts": [{"name": "v", "mountPath": path}]}));
        let found = check::object(pod.to_string().as_bytes(), &view).expect("a pod");
        prop_assert!(found.iter().all(|finding| finding.path.starts_with("spec.")));
    }

    #[test]
    fn no_bytes_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        claim in any_claim(),
        cut in 0usize..400,
    ) {
        let _ = check::object(&bytes, &view());
        let text = claim.to_string();
        let _ = check::object(&text.as_bytes()[..cut.min(text.len())], &view());
    }
}
