use super::*;
use crate::health::HealthEffects;
use proptest::prelude::*;

const H100: Subject<'static> = Subject { number: GpuNumber(1), product: "NVIDIA H100 80GB HBM3" };
const HEAD: &str = "apiVersion: resource.divvy.dev/v1alpha1\nkind: NodeConfig\n";

fn config(rules: &str) -> NodeConfig {
    NodeConfig::parse(&format!("{HEAD}rules:\n{rules}")).expect("a configuration")
}

fn check_refused(text: &str, message: &str) {
    let refused = NodeConfig::parse(text).expect_err(text).to_string();
    assert_eq!(refused, message, "{text}");
}

#[test]
fn error_names_the_line_and_the_key() {
    check_refused(
        &format!("{HEAD}rules:\n  - slots: 4\n  - slot: 8\n"),
        "line 5: field rules[1].slot is unknown to Rule; did you mean slots?",
    );
    check_refused(
        &format!("{HEAD}rules:\n  - match:\n      nodelabels: {{}}\n"),
        "line 5: field rules[0].match.nodelabels is unknown to Match; did you mean nodeLabels?",
    );
    check_refused(
        &format!("{HEAD}rules:\n  - modes: [whole, time-slice]\n"),
        r#"line 4: field rules[0].modes[1] is "time-slice", expected whole, mig, timeslice or mps"#,
    );
    check_refused(
        &format!("{HEAD}rules:\n  - slots: 0\n"),
        "line 4: field rules[0].slots is 0, expected a whole number from 1 to 256",
    );
    check_refused(
        &format!("{HEAD}rules:\n  - slots: 1\n    slots: 2\n"),
        "line 5: field rules[0].slots is given twice",
    );
    check_refused(
        &format!("{HEAD}rules:\n  - match: {{nodeLabels: {{gpu: true}}}}\n"),
        "line 4: field rules[0].match.nodeLabels.gpu is true, expected a text; write it in quotes",
    );
    check_refused(
        &format!("{HEAD}rules: 7\n"),
        "line 3: field rules is 7, expected a list, each item an object Rule",
    );
    check_refused(
        "kind: NodeConfig\n",
        r#"line 1: field apiVersion is missing, expected "resource.divvy.dev/v1alpha1""#,
    );
    check_refused(
        "apiVersion: v1\nkind: ConfigMap\n",
        r#"line 1: field apiVersion is "v1", expected "resource.divvy.dev/v1alpha1""#,
    );
    check_refused("", "line 1: field (all) is null, expected an object NodeConfig");
    check_refused(
        "kind: @",
        "not YAML: found character that cannot start any token at line 1 column 7, while scanning for the \
         next token",
    );
}

/// Checks the line that `divvy config explain` prints for a GPU.
fn check(config: &NodeConfig, labels: Option<&Labels>, expected: &str) {
    let found = config.explain(&GpuPolicy::default(), labels, H100);
    let modes: Vec<_> = found.policy.modes.iter().map(|mode| mode.as_str()).collect();
    let found = format!(
        "{} by {}; {} slots by {}; {} by {}; {} clients by {}; shares {} by {}; exclusive {} by {}",
        modes.join(" "),
        found.modes,
        found.policy.slots,
        found.slots,
        found.policy.interval,
        found.interval,
        found.policy.mps_clients,
        found.mps_clients,
        found.policy.shares,
        found.shares,
        found.policy.exclusive_ownership,
        found.exclusive_ownership,
    );
    assert_eq!(found, expected, "{config:?}");
}

#[test]
fn last_rule_that_sets_a_field_applies() {
    let defaults = "whole mig timeslice mps by default; 4 slots by default; Default by default; 4 clients \
         by default; shares true by default; exclusive false by default";
    check(&NodeConfig::default(), None, defaults);
    check(&NodeConfig::parse(&format!("{HEAD}rules: null\n")).expect("empty"), None, defaults);
    check(
        &config(
            "  - {slots: 8, interval: Long}\n  - {slots: 2, modes: [mps, whole], mpsClients: 10}\n  - {}\n",
        ),
        None,
        "whole mps by rules[1]; 2 slots by rules[1]; Long by rules[0]; 10 clients by rules[1]; shares true \
         by default; exclusive false by default",
    );
    check(
        &config("  - dedicated: true\n  - {modes: [mig], exclusiveOwnership: true}\n"),
        None,
        "whole by rules[0]; 4 slots by default; Default by default; 4 clients by default; shares false by \
         rules[0]; exclusive true by rules[1]",
    );
    check(
        &config("  - {dedicated: true, shares: false}\n  - {modes: [], dedicated: false, shares: true}\n"),
        None,
        " by rules[1]; 4 slots by default; Default by default; 4 clients by default; shares true by \
         rules[1]; exclusive false by default",
    );
}

#[test]
fn rule_matches_if_all_conditions_match() {
    let labels = Labels::from([("pool".to_owned(), "a".to_owned())]);
    let check = |matches: &str, expected: Option<bool>| {
        let config = config(&format!("  - match: {matches}\n"));
        let found = config.rules[0].matches.of(Some(&labels), H100);
        assert_eq!(found, expected, "{matches}");
    };
    for all in ["{}", "null", "{indices: []}", "{nodeLabels: {}, products: []}"] {
        check(all, Some(true));
    }
    check("{indices: [0, 1]}", Some(true));
    check("{indices: [2]}", Some(false));
    check("{products: [A100, '*h100*']}", Some(true));
    check("{products: [H100]}", Some(false));
    check("{products: [NVIDIA-H100-80GB-HBM?]}", Some(true));
    check("{nodeLabels: {pool: a}, indices: [1]}", Some(true));
    check("{nodeLabels: {pool: a}, indices: [2]}", Some(false));
    check("{nodeLabels: {pool: b}}", Some(false));
    check("{nodeLabels: {pool: a, zone: z}}", Some(false));
}

#[test]
fn unknown_labels_disable_possibly_matching_gpus() {
    let config = config("  - {match: {nodeLabels: {pool: a}}, dedicated: true, slots: 9}\n");
    assert!(config.needs_labels());
    check(
        &config,
        None,
        " by rules[0] needs the labels of the node; 4 slots by default; Default by default; 4 clients by \
         default; shares true by default; exclusive false by default",
    );
    check(
        &config,
        Some(&Labels::new()),
        "whole mig timeslice mps by default; 4 slots by default; Default by default; 4 clients by default; \
         shares true by default; exclusive false by default",
    );
    let elsewhere = NodeConfig::parse(&format!(
        "{HEAD}rules:\n  - {{match: {{nodeLabels: {{pool: a}}, indices: [7]}}, modes: []}}\n"
    ));
    let found = elsewhere.expect("a configuration").explain(&GpuPolicy::default(), None, H100);
    assert_eq!(found.modes, ValueOrigin::Default);
}

/// Matching by definition, without optimisation.
fn matches_by_definition(pattern: &[u8], text: &[u8]) -> bool {
    match pattern.split_first() {
        None => text.is_empty(),
        Some((b'*', rest)) => (0..=text.len()).any(|taken| matches_by_definition(rest, &text[taken..])),
        Some((c, rest)) => text
            .split_first()
            .is_some_and(|(d, text)| (*c == b'?' || c == d) && matches_by_definition(rest, text)),
    }
}

proptest! {
    #[test]
    fn globs_match_their_definition(pattern in "[ab*?]{0,7}", text in "[ab]{0,8}") {
        let expected = matches_by_definition(pattern.as_bytes(), text.as_bytes());
        prop_assert_eq!(glob_matches(&pattern, &text), expected);
    }

    #[test]
    fn no_text_panics(text in ".*", yaml in r"[-{}\[\]:&*!|>'# \nabrules0]{0,60}") {
        let _ = NodeConfig::parse(&text);
        let _ = NodeConfig::parse(&format!("{HEAD}{yaml}"));
    }
}

#[test]
fn effects_of_health_states_are_separate_fields() {
    let found = config(
        "  - health: {degraded: NoSchedule, lost: NoExecute}\n  - health: {lost: None}\n  \
         - {match: {indices: [7]}, health: {stuck: None}}\n",
    )
    .explain(&GpuPolicy::default(), None, H100);
    let effects =
        HealthEffects { degraded: TaintEffect::NoSchedule, lost: TaintEffect::None, ..Default::default() };
    assert_eq!(found.policy.health, effects);
    let origins = HealthOrigins {
        degraded: ValueOrigin::Rule(0),
        lost: ValueOrigin::Rule(1),
        ..HealthOrigins::default()
    };
    assert_eq!(found.health, origins);
    check_refused(
        &format!("{HEAD}rules:\n  - health: {{lost: NoSchedul}}\n"),
        r#"line 4: field rules[0].health.lost is "NoSchedul", expected None, NoSchedule or NoExecute"#,
    );
    check_refused(
        &format!("{HEAD}rules:\n  - health: {{needs-reset: None}}\n"),
        "line 4: field rules[0].health.needs-reset is unknown to Health; did you mean needsReset?",
    );
}
