use super::*;
use crate::names::CONFIG_API_VERSION;
use crate::quantity::Quantity;
use crate::sharing::Interval;
use proptest::prelude::*;
use serde_json::Value;

fn check(text: &str, expected: Result<DeviceConfig, &str>) {
    let found = DeviceConfig::parse(text).map_err(|error| error.to_string());
    assert_eq!(found, expected.map_err(str::to_owned), "{text}");
}

const API: &str = r#""apiVersion":"resource.divvy.dev/v1alpha1""#;

fn check_gpu(sharing: &str, expected: Result<Option<Sharing>, &str>) {
    let text = format!(r#"{{{API},"kind":"GpuConfig","sharing":{sharing}}}"#);
    check(&text, expected.map(|sharing| DeviceConfig::GpuConfig { sharing }));
}

fn check_mig(sharing: &str, expected: Result<Option<MpsSettings>, &str>) {
    let text = format!(r#"{{{API},"kind":"MigDeviceConfig","sharing":{sharing}}}"#);
    check(&text, expected.map(|sharing| DeviceConfig::MigDeviceConfig { sharing }));
}

fn check_mps(config: &str, expected: Result<MpsSettings, &str>) {
    let sharing = format!(r#"{{"strategy":"MPS","mpsConfig":{config}}}"#);
    check_gpu(&sharing, expected.clone().map(|settings| Some(Sharing::Mps(settings))));
    check_mig(&sharing, expected.map(Some));
}

#[test]
fn known_kinds_are_read() {
    check(&format!(r#"{{{API},"kind":"GpuConfig"}}"#), Ok(DeviceConfig::GpuConfig { sharing: None }));
    check(
        &format!(r#" {{"kind":"MigDeviceConfig",{API}}} "#),
        Ok(DeviceConfig::MigDeviceConfig { sharing: None }),
    );
}

#[test]
fn partial_objects_have_defaults() {
    let slicing = |interval| Ok(Some(Sharing::TimeSlicing(interval)));
    let defaults = || Ok(Some(Sharing::Mps(MpsSettings::default())));
    let no_strategy = "field sharing.strategy is missing, expected TimeSlicing or MPS";
    check_gpu("null", Ok(None));
    check_gpu("{}", Err(no_strategy));
    check_gpu(r#"{"strategy":null,"mpsConfig":{}}"#, Err(no_strategy));
    check_gpu(r#"{"strategy":"TimeSlicing"}"#, slicing(Interval::Default));
    check_gpu(r#"{"strategy":"TimeSlicing","timeSlicingConfig":null}"#, slicing(Interval::Default));
    check_gpu(r#"{"strategy":"TimeSlicing","timeSlicingConfig":{}}"#, slicing(Interval::Default));
    check_gpu(
        r#"{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":null}}"#,
        slicing(Interval::Default),
    );
    check_gpu(
        r#"{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"},"mpsConfig":null}"#,
        slicing(Interval::Long),
    );
    check_gpu(r#"{"strategy":"MPS"}"#, defaults());
    check_gpu(r#"{"strategy":"MPS","mpsConfig":{}}"#, defaults());
    check_mig("null", Ok(None));
    check_mig("{}", Err("field sharing.strategy is missing, expected MPS"));
    check_mig(r#"{"strategy":"MPS"}"#, Ok(Some(MpsSettings::default())));
}

#[test]
fn mps_settings_are_read() {
    let limit = |text: &str| -> Quantity { text.parse().expect("a quantity") };
    check_mps(
        r#"{"defaultActiveThreadPercentage":50,"defaultPinnedDeviceMemoryLimit":"10Gi","multiUser":false,
            "defaultPerDevicePinnedMemoryLimit":{"0":1048576}}"#,
        Ok(MpsSettings {
            active_thread_percentage: Some(50),
            pinned_memory: Some(limit("10Gi")),
            pinned_memory_per_device: [("0".to_owned(), limit("1Mi"))].into(),
            multi_user: Some(false),
        }),
    );
}

#[test]
fn settings_out_of_range_are_rejected() {
    let percentage = |found: &str| {
        format!(
            "field sharing.mpsConfig.defaultActiveThreadPercentage is {found}, expected a whole number from \
             1 to 100"
        )
    };
    for bad in ["0", "101", "-1", "50.5", "\"50\"", "true", "{}", "[]"] {
        let found = match bad {
            "{}" => "an object",
            "[]" => "a list",
            bad => bad,
        };
        check_mps(&format!(r#"{{"defaultActiveThreadPercentage":{bad}}}"#), Err(&percentage(found)));
    }
    for bad in ["\"1023Ki\"", "\"-1Gi\"", "\"much\"", "0", "1.5", "true"] {
        let refused = format!(
            "field sharing.mpsConfig.defaultPinnedDeviceMemoryLimit is {bad}, expected a quantity of memory \
             of at least 1Mi, such as 512Mi or 10Gi"
        );
        check_mps(&format!(r#"{{"defaultPinnedDeviceMemoryLimit":{bad}}}"#), Err(&refused));
    }
    let keyed = |key: &str| {
        format!(
            r#"{{"strategy":"MPS","mpsConfig":{{"defaultPerDevicePinnedMemoryLimit":{{{key:?}:"1Gi"}}}}}}"#
        )
    };
    for key in ["", "00", "-1", "1", "gpu-0", "GPU-", "GPU-a b", "MIG-1"] {
        let refused = format!(
            "field sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit has the key {key:?}, expected 0, \
             because a request with MPS has one device, or the UUID of a GPU"
        );
        check_gpu(&keyed(key), Err(&refused));
    }
    let refused = "field sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit has the key \"GPU-1\", \
         expected 0, because a request with MPS has one device; the UUID of a MIG instance is not known \
         before it is created";
    check_mig(&keyed("GPU-1"), Err(refused));
    assert!(
        DeviceConfig::from_value(&serde_json::json!({
            "apiVersion": CONFIG_API_VERSION, "kind": "GpuConfig",
            "sharing": serde_json::from_str::<Value>(&keyed("GPU-8d6b-1")).expect("JSON"),
        }))
        .is_ok()
    );
    check_gpu(
        r#"{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"long"}}"#,
        Err(r#"field sharing.timeSlicingConfig.interval is "long", expected Default, Short, Medium or Long"#),
    );
}

#[test]
fn strategy_accepts_only_its_own_config() {
    check_gpu(
        r#"{"strategy":"TimeSlicing","mpsConfig":{}}"#,
        Err("field sharing.mpsConfig is not allowed with strategy TimeSlicing; remove one of them"),
    );
    check_gpu(
        r#"{"strategy":"MPS","timeSlicingConfig":{}}"#,
        Err("field sharing.timeSlicingConfig is not allowed with strategy MPS; remove one of them"),
    );
    let on_mig = "field sharing.strategy is TimeSlicing, which has no effect on a MIG instance; use MPS, or \
         a GpuConfig for a whole GPU";
    check_mig(r#"{"strategy":"TimeSlicing"}"#, Err(on_mig));
    check_mig(r#"{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}"#, Err(on_mig));
}

#[test]
fn errors_name_the_field() {
    check("7", Err("configuration is not a JSON object"));
    check("{}", Err("field kind is missing, expected GpuConfig, MigDeviceConfig or ShareConfig"));
    check(r#"{"kind":1}"#, Err(r#"field kind is "1", expected GpuConfig, MigDeviceConfig or ShareConfig"#));
    let missing = r#"field apiVersion is missing, expected "resource.divvy.dev/v1alpha1""#;
    check(r#"{"kind":"GpuConfig"}"#, Err(missing));
    check(
        r#"{"apiVersion":"v1","kind":"GpuConfig"}"#,
        Err(r#"field apiVersion is "v1", expected "resource.divvy.dev/v1alpha1""#),
    );
    check(
        &format!(r#"{{{API},"kind":"Gpu"}}"#),
        Err(r#"field kind is "Gpu", expected GpuConfig, MigDeviceConfig or ShareConfig"#),
    );
    check(
        &format!(r#"{{{API},"kind":"GpuConfig","cores":{{}}}}"#),
        Err("field cores is unknown to GpuConfig"),
    );
    check_gpu("7", Err("field sharing is 7, expected an object GpuSharing"));
    check_gpu(
        r#"{"strategy":"MPS","mpsconfig":{}}"#,
        Err("field sharing.mpsconfig is unknown to GpuSharing; did you mean mpsConfig?"),
    );
    check(&format!(r#"{{{API},"kind":"GpuConfig","kind":"GpuConfig"}}"#), Err("field kind is given twice"));
    check(r#"{"a":[0,{"b":1,"c":2,"b":3}]}"#, Err("field a[1].b is given twice"));
}

#[test]
fn broken_or_deep_text_is_rejected() {
    let deep = "[".repeat(100_000);
    for text in ["", "{", "{} {}", "nul", deep.as_str()] {
        let found = DeviceConfig::parse(text);
        assert!(matches!(found, Err(ConfigError::NotJson { .. })), "{found:?}");
    }
}

#[test]
fn last_matching_config_applies_without_merging() {
    let gpu = |interval| DeviceConfig::GpuConfig { sharing: Some(Sharing::TimeSlicing(interval)) };
    let mig = || DeviceConfig::MigDeviceConfig { sharing: Some(MpsSettings::default()) };
    let check = |configs: &[(DeviceConfig, bool)], mode, expected: Result<Option<Sharing>, &str>| {
        let configs: Vec<_> = configs
            .iter()
            .map(|(config, addressed)| AppliedConfig {
                config: config.clone(),
                source: if *addressed { Source::Request } else { Source::Class },
            })
            .collect();
        let found = effective(&configs, mode).map_err(|misfit| misfit.to_string());
        assert_eq!(found, expected.map_err(str::to_owned), "{configs:?}");
    };
    let slicing = |interval| Ok(Some(Sharing::TimeSlicing(interval)));
    let nothing = DeviceConfig::GpuConfig { sharing: None };
    check(&[], Mode::Whole, Ok(None));
    check(
        &[(gpu(Interval::Short), false), (gpu(Interval::Long), false)],
        Mode::Whole,
        slicing(Interval::Long),
    );
    check(&[(gpu(Interval::Short), true), (nothing, false)], Mode::Whole, Ok(None));
    check(&[(gpu(Interval::Short), false), (mig(), false)], Mode::Whole, slicing(Interval::Short));
    check(
        &[(gpu(Interval::Short), false), (mig(), false)],
        Mode::Mig,
        Ok(Some(Sharing::Mps(MpsSettings::default()))),
    );
    check(&[(gpu(Interval::Short), false), (mig(), false)], Mode::Timeslice, Ok(None));
    check(
        &[(gpu(Interval::Short), false), (mig(), true)],
        Mode::Whole,
        Err("MigDeviceConfig is for MIG instances, but the device is a whole GPU; use GpuConfig"),
    );
    check(
        &[(gpu(Interval::Short), true)],
        Mode::Mps,
        Err("GpuConfig is for whole GPUs, but the device is an MPS share; its limits are the claim's \
             capacities, so remove the configuration"),
    );
    check(&[(mig(), true), (gpu(Interval::Long), false)], Mode::Whole, slicing(Interval::Long));
}

fn check_share(fields: &str, expected: Result<ShareConfig, &str>) {
    let text = format!(r#"{{{API},"kind":"ShareConfig"{fields}}}"#);
    check(&text, expected.map(DeviceConfig::ShareConfig));
}

#[test]
fn share_settings_are_read() {
    let share =
        ShareConfig { injection: Some(Injection::Shim), observe_only: Some(true), ..Default::default() };
    check_share("", Ok(ShareConfig::default()));
    check_share(r#","injection":null,"ceiling":null"#, Ok(ShareConfig::default()));
    check_share(r#","injection":"shim","observeOnly":true"#, Ok(share));
    let silent = ShareConfig { messages: Some(false), ..Default::default() };
    check_share(r#","messages":false"#, Ok(silent));
    check_share(r#","injection":"none""#, Err(r#"field injection is "none", expected preload or shim"#));
    check_share(r#","ceiling":0"#, Err("field ceiling is 0, expected a whole number from 1 to 100"));
    check_share(r#","memory":"1Gi""#, Err("field memory is unknown to ShareConfig"));
    let ceiling = ShareConfig { ceiling: Some(50), ..Default::default() };
    check_share(r#","ceiling":50"#, Ok(ceiling));
    let high = ShareConfig { priority: Some(Priority::High), weight: Some(1), ..Default::default() };
    check_share(r#","weight":1,"priority":"High""#, Ok(high));
    check_share(r#","overcommit":150"#, Ok(ShareConfig { overcommit: Some(150), ..Default::default() }));
    let quota = ShareConfig { encoders: Some(0), decoders: Some(8), ..Default::default() };
    check_share(r#","encoders":0,"decoders":8"#, Ok(quota));
    check_share(
        r#","overcommit":99"#,
        Err("field overcommit is 99, expected a whole number from 100 to 1000"),
    );
}

#[test]
fn last_matching_schedule_entry_applies() {
    let clock = |text: &str| Clock::parse(text).expect("a time");
    let text = format!(
        r#"{{{API},"kind":"ShareConfig","ceiling":30,"weight":5,"schedule":[
            {{"from":"20:00","to":"06:00","ceiling":100,"priority":null}},
            {{"from":"22:00","to":"22:30","weight":7,"priority":"High"}}]}}"#
    );
    let Ok(DeviceConfig::ShareConfig(config)) = DeviceConfig::parse(&text) else { panic!("{text}") };
    let check = |now: &str, expected: (u32, u32, Option<Priority>)| {
        let at = config.at(clock(now));
        assert_eq!(
            (at.ceiling, at.weight, at.priority),
            (Some(expected.0), Some(expected.1), expected.2),
            "{now}"
        );
        assert_eq!(at.schedule, [], "{now}");
    };
    check("06:00", (30, 5, None));
    check("19:59", (30, 5, None));
    check("20:00", (100, 5, None));
    check("05:59", (100, 5, None));
    check("22:15", (100, 7, Some(Priority::High)));
    let refused = |tide: &str, why: &str| check_share(&format!(r#","schedule":[{tide}]"#), Err(why));
    refused(
        r#"{"from":"10:00","to":"10:00"}"#,
        "field schedule[0].to is \"10:00\", expected a time other than from; set values for the whole day \
         outside the schedule",
    );
    refused(
        r#"{"from":"10:00"}"#,
        "field schedule[0].to is missing, expected a time of day in UTC from 00:00 to 23:59, in quotes",
    );
    for wrong in ["24:00", "1:00", "01:60", "0100", "+1:00", ""] {
        let why = format!(
            "field schedule[0].from is \"{wrong}\", expected a time of day in UTC from 00:00 to 23:59, in \
             quotes"
        );
        refused(&format!(r#"{{"from":"{wrong}","to":"10:00"}}"#), &why);
    }
    assert_eq!(Clock::at(86_400 * 20_000 + 3600 * 13 + 61), clock("13:01"));
}

#[test]
fn claim_may_only_lower_its_ceiling() {
    let class = |ceiling| {
        let weight = Some(7);
        (
            ShareConfig { injection: Some(Injection::Shim), weight, ceiling, ..Default::default() },
            Source::Class,
        )
    };
    let claim = |ceiling| (ShareConfig { ceiling: Some(ceiling), ..Default::default() }, Source::Claim);
    let check = |configs: &[(ShareConfig, Source)], expected: Result<(Injection, u32, u32), &str>| {
        let applied = |(config, source): &(ShareConfig, Source)| AppliedConfig {
            config: DeviceConfig::ShareConfig(config.clone()),
            source: *source,
        };
        let configs: Vec<_> = configs.iter().map(applied).collect();
        let found = share_settings(&configs).map(|found| (found.injection, found.weight, found.ceiling));
        assert_eq!(
            found.map_err(|misfit| misfit.to_string()),
            expected.map_err(str::to_owned),
            "{configs:?}"
        );
    };
    use Injection::{Preload, Shim};
    let bursts = |configs: &[(ShareConfig, Source)]| {
        let applied = |(config, source): &(ShareConfig, Source)| AppliedConfig {
            config: DeviceConfig::ShareConfig(config.clone()),
            source: *source,
        };
        share_settings(&configs.iter().map(applied).collect::<Vec<_>>()).map(|found| found.burst)
    };
    assert_eq!(bursts(&[class(Some(60)), claim(40)]), Ok(true));
    assert_eq!(bursts(&[class(None), claim(40)]), Ok(false), "a claim lends itself nothing");
    check(&[], Ok((Preload, 100, 100)));
    check(&[claim(40)], Ok((Preload, 100, 40)));
    check(&[class(None), claim(100)], Ok((Shim, 7, 100)));
    check(&[class(Some(60)), claim(40)], Ok((Shim, 7, 40)));
    check(&[class(Some(60))], Ok((Shim, 7, 60)));
    check(&[class(Some(60)), (ShareConfig::default(), Source::Class), claim(70)], Ok((Preload, 100, 70)));
    check(&[class(Some(60)), claim(70), claim(50)], Ok((Shim, 7, 50)));
    let more = "field ceiling of ShareConfig is 70, but its DeviceClass allows at most 60; request no more";
    check(&[class(Some(60)), claim(70)], Err(more));
    let only = |field: &str| {
        format!("field {field} of ShareConfig may only be set in a DeviceClass, not in a claim; remove it")
    };
    let observe = ShareConfig { observe_only: Some(false), ..Default::default() };
    check(&[class(None), (observe, Source::Request), claim(1)], Err(&only("observeOnly")));
    check(&[(class(None).0, Source::Claim)], Err(&only("injection")));
}

#[test]
fn share_rejects_configuration_of_other_kinds() {
    let gpu = |source| AppliedConfig { config: DeviceConfig::GpuConfig { sharing: None }, source };
    assert_eq!(share_settings(&[gpu(Source::Class), gpu(Source::Claim)]), Ok(ShareSettings::default()));
    let misfit = share_settings(&[gpu(Source::Request)]).map_err(|misfit| misfit.to_string());
    let expected = "GpuConfig is for whole GPUs, but the device is a share; remove the configuration";
    assert_eq!(misfit, Err(expected.to_owned()));
    let share =
        AppliedConfig { config: DeviceConfig::ShareConfig(ShareConfig::default()), source: Source::Request };
    let misfit = effective(&[share], Mode::Mig).map_err(|misfit| misfit.to_string());
    let expected = "ShareConfig is for shares, but the device is a MIG instance; use MigDeviceConfig";
    assert_eq!(misfit, Err(expected.to_owned()));
}

/// Documents around the tables: known names mostly, any values.
fn document() -> impl Strategy<Value = Value> {
    let key = prop_oneof![
        Just("sharing"),
        Just("strategy"),
        Just("timeSlicingConfig"),
        Just("interval"),
        Just("mpsConfig"),
        Just("defaultActiveThreadPercentage"),
        Just("defaultPinnedDeviceMemoryLimit"),
        Just("defaultPerDevicePinnedMemoryLimit"),
        Just("multiUser"),
        Just("0"),
        Just("x"),
    ];
    let scalar = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        Just(Value::from(0.5)),
        Just("MPS".into()),
        Just("TimeSlicing".into()),
        Just("Long".into()),
        Just("1Gi".into()),
        ".{0,4}".prop_map(Value::from),
    ];
    scalar.prop_recursive(5, 40, 4, move |inner| {
        prop_oneof![
            3 => prop::collection::btree_map(key.clone().prop_map(str::to_owned), inner.clone(), 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
            1 => prop::collection::vec(inner, 0..3).prop_map(Value::Array),
        ]
    })
}

proptest! {
    #[test]
    fn no_text_panics(text in ".*", json in r#"[{}\[\]",:a0 ]{0,40}"#) {
        let _ = DeviceConfig::parse(&text);
        let _ = DeviceConfig::parse(&json);
    }

    #[test]
    fn text_and_value_parse_alike(sharing in document(), gpu in any::<bool>()) {
        let kind = if gpu { "GpuConfig" } else { "MigDeviceConfig" };
        let value = serde_json::json!({"apiVersion": CONFIG_API_VERSION, "kind": kind, "sharing": sharing});
        prop_assert_eq!(DeviceConfig::parse(&value.to_string()), DeviceConfig::from_value(&value));
    }
}
