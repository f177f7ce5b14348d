//! Generates the table of XID classes in the page about GPU health.
//!
//! `DIVVY_REGENERATE=1 cargo test -p divvy-model --test health_page` rewrites it.

use divvy_model::xid::{XIDS, XidClass};
use divvy_model::{HealthEffects, HealthState};
use std::path::Path;

const TABLE_HEAD: &str = "| class | state | XIDs |\n|---|---|---|\n";

/// The numbers of a class, with runs of at least three numbers as ranges.
fn numbers(class: XidClass) -> String {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for xid in XIDS.iter().filter(|xid| xid.class == class) {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == xid.number => *last = xid.number,
            _ => runs.push((xid.number, xid.number)),
        }
    }
    let text = |(first, last): &(u64, u64)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}–{last}"),
    };
    runs.iter().map(text).collect::<Vec<_>>().join(", ")
}

#[test]
fn table_of_classes_matches_the_code() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/gpu-health.md");
    let page = std::fs::read_to_string(&path).expect("page");
    let (before, rest) = page.split_once(TABLE_HEAD).expect("table");
    let (_, after) = rest.split_once("\nA number without a class").expect("text after the table");
    let row = |class: XidClass| {
        let state = class.state().map_or("unchanged", HealthState::as_str);
        format!("| `{}` | {state} | {} |\n", class.as_str(), numbers(class))
    };
    let rows: String = XidClass::ALL.into_iter().map(row).collect();
    let expected = format!("{before}{TABLE_HEAD}{rows}\nA number without a class{after}");
    if std::env::var_os("DIVVY_REGENERATE").is_some() {
        std::fs::write(&path, &expected).expect("docs/src can be written");
        return;
    }
    assert!(page == expected, "docs/src/gpu-health.md differs; run with DIVVY_REGENERATE=1 and commit");
}

#[test]
fn table_of_states_matches_the_default_effects() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/gpu-health.md");
    let page = std::fs::read_to_string(path).expect("page");
    for state in HealthState::ALL.into_iter().filter(|state| *state != HealthState::Healthy) {
        let effect = HealthEffects::default().of(state).as_str();
        let end = format!("| `gpu.divvy.dev/gpu-{state}` | `{effect}` |");
        let found =
            page.lines().any(|line| line.starts_with(&format!("| `{state}` |")) && line.ends_with(&end));
        assert!(found, "{state}");
    }
}
