//! The shares as a table, for people.

use super::Shown;
use divvy_api::top::ShareNow;
use std::fmt::Write;

/// What is older than this, in milliseconds, is no more what the node is doing.
const OLD_MS: u64 = 5000;
const MIB: u64 = 1 << 20;

/// The whole view at a time, in milliseconds of the system clock.
pub(super) fn text(shown: &Shown, now_ms: u64) -> String {
    let mut text = String::new();
    let mut device = None;
    for of_device in shown.shares.chunk_by(|one, other| (&one.gpu, &one.mig) == (&other.gpu, &other.mig)) {
        let Some(first) = of_device.first() else { continue };
        if device.replace((&first.gpu, &first.mig)).is_some() {
            text.push('\n');
        }
        text += &first.gpu;
        if let Some(mig) = &first.mig {
            text += &format!(" {mig}");
        }
        let age = now_ms.saturating_sub(first.at_ms);
        if age > OLD_MS {
            text +=
                &format!(" (as of {} s ago: nobody looks at its shares; is divvy-node running?)", age / 1000);
        }
        text.push('\n');
        text += &table(of_device);
    }
    for share in &shown.unseen {
        text += &format!("{share}: not looked at yet\n");
    }
    if text.is_empty() { "no shares on this node\n".to_owned() } else { text }
}

const HEAD: [&str; 11] = [
    "CLAIM",
    "SHARE",
    "USED MIB",
    "LIMIT MIB",
    "BY NVML",
    "ASKED",
    "WEIGHT",
    "PRIO",
    "GOT",
    "HELD UP",
    "PROCS",
];

fn table(shares: &[ShareNow]) -> String {
    let mut rows = vec![HEAD.map(str::to_owned)];
    rows.extend(shares.iter().map(row));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; HEAD.len()] = std::array::from_fn(width);
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
            // Names to the left, amounts to the right. Writing to a text cannot fail.
            let _ = match column {
                0 | 1 => write!(line, "{cell:<width$}  "),
                _ => write!(line, "{cell:>width$}  "),
            };
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

fn row(share: &ShareNow) -> [String; HEAD.len()] {
    let claim = match (&share.namespace, &share.claim) {
        (Some(namespace), Some(claim)) => format!("{namespace}/{claim}"),
        _ => share.claim_uid.to_string(),
    };
    let mib = |bytes: u64| bytes.div_ceil(MIB).to_string();
    let known = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let percent = |percent: u32| format!("{percent}%");
    // By NVML; where that does not say, by the word of the processes.
    let got = match (share.busy_percent, share.charged_percent) {
        (Some(busy), _) => percent(busy),
        (None, charged) => known(charged.map(|charged| format!("~{charged}%"))),
    };
    [
        claim,
        share.share.as_str().chars().take(8).collect(),
        known(share.memory_used_bytes.map(mib)),
        mib(share.memory_limit_bytes),
        known(share.memory_measured_bytes.map(mib)),
        match (share.guarantee_percent, share.ceiling_percent) {
            (least, most) if least == most => percent(most),
            (least, most) => format!("{least}-{most}%"),
        },
        share.weight.to_string(),
        share.priority.to_string(),
        got,
        known(share.throttled_ms.map(|ms| format!("{ms} ms"))),
        share.processes.to_string(),
    ]
}
