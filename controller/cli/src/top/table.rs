//! The shares of a node as a text table.

use super::snapshot::Snapshot;
use divvy_api::sharing::Priority;
use divvy_api::top::{GpuTimeAttribution, ShareTotals, ShareUsage};
use std::cmp::Reverse;
use std::fmt::Write;
use std::time::SystemTime;

/// Age above which a snapshot is marked as outdated. The daemon writes every second.
const OUTDATED_MS: u64 = 5000;
const MIB: u64 = 1 << 20;

/// The node and the current time, for the first line.
pub(super) struct NodeTime {
    pub(super) node: String,
    /// Milliseconds since the Unix epoch.
    pub(super) unix_ms: u64,
}

impl NodeTime {
    /// This machine now. The name is that of the Kubernetes node if known, else the host name.
    pub(super) fn now() -> Self {
        let host = || rustix::system::uname().nodename().to_string_lossy().into_owned();
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let node = std::env::var("DIVVY_NODE_NAME").unwrap_or_else(|_| host());
        Self { node, unix_ms: since.as_millis() as u64 }
    }
}

/// Order of the shares of a device: by claim, or the largest value first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum SortKey {
    #[default]
    Claim,
    /// Compute time used in the last second.
    Used,
    Throttled,
    /// Memory used.
    Memory,
}

impl SortKey {
    pub(super) const ALL: [Self; 4] = [Self::Claim, Self::Used, Self::Throttled, Self::Memory];

    /// Its name in the help line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Claim => "claim",
            Self::Used => "used",
            Self::Throttled => "throttled",
            Self::Memory => "memory",
        }
    }

    /// The key that selects it: the first letter of its name.
    pub(super) fn key(self) -> char {
        match self {
            Self::Claim => 'c',
            Self::Used => 'u',
            Self::Throttled => 't',
            Self::Memory => 'm',
        }
    }

    /// The value to sort by; the largest first.
    fn value(self, share: &ShareUsage, period: Period) -> Option<u64> {
        match (self, period) {
            (Self::Claim, _) => None,
            (Self::Used, Period::LastSecond) => {
                share.compute_used_nvml_percent.or(share.compute_used_percent).map(u64::from)
            }
            (Self::Used, Period::Total) => share.totals.map(|totals| totals.gpu_time_used_ms),
            (Self::Throttled, Period::LastSecond) => share.throttled_ms,
            (Self::Throttled, Period::Total) => share.totals.map(|totals| totals.throttled_ms),
            (Self::Memory, _) => share.memory_used_bytes,
        }
    }
}

/// The time that a table covers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Period {
    #[default]
    LastSecond,
    /// Since the node daemon first saw each share.
    Total,
}

/// A line with node and time, a table for each device, and the shares and files without data.
pub(super) fn render(snapshot: &Snapshot, now: &NodeTime, sort: SortKey, period: Period) -> String {
    let seconds = now.unix_ms / 1000;
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let count = snapshot.shares.len() + snapshot.not_sampled.len();
    let shares = if count == 1 { "share" } else { "shares" };
    let mut text = format!("{}, {hour:02}:{minute:02}:{second:02} UTC: {count} {shares}\n", now.node);
    for of_device in snapshot.shares.chunk_by(|one, other| (&one.gpu, &one.mig) == (&other.gpu, &other.mig)) {
        let Some(first) = of_device.first() else { continue };
        text += &format!("\n{}", first.gpu);
        if let Some(mig) = &first.mig {
            text += &format!(" {mig}");
        }
        let age_ms = now.unix_ms.saturating_sub(first.sampled_at_ms);
        if age_ms > OUTDATED_MS {
            text += &format!(" (outdated: {} s old; is divvy-node running?)", age_ms / 1000);
        }
        text.push('\n');
        let mut shares: Vec<&ShareUsage> = of_device.iter().collect();
        shares.sort_by_key(|share| Reverse(sort.value(share, period)));
        text += &match period {
            Period::LastSecond => table(COLUMNS, shares.iter().map(|share| row(share))),
            Period::Total => table(TOTAL_COLUMNS, shares.iter().map(|share| total_row(share))),
        };
    }
    let without_data = [&snapshot.not_sampled, &snapshot.unreadable];
    if without_data.iter().any(|lines| !lines.is_empty()) {
        text.push('\n');
    }
    snapshot.not_sampled.iter().for_each(|share| text += &format!("{share}: not sampled yet\n"));
    snapshot.unreadable.iter().for_each(|error| text += &format!("{error}\n"));
    text
}

/// The columns, the most important ones first: narrow terminals cut off the rest.
const COLUMNS: [&str; 11] = [
    "CLAIM",
    "REQUEST/LIMIT",
    "USED",
    "THROTTLED",
    "USED MIB",
    "LIMIT MIB",
    "USED (NVML)",
    "WEIGHT",
    "PRIORITY",
    "PROCESSES",
    "SHARE",
];

/// The columns of running totals. They fit in 100 characters.
const TOTAL_COLUMNS: [&str; 9] =
    ["CLAIM", "GPU TIME", "THROTTLED", "GRANTED", "HAND-OVERS", "LATE", "ATTRIBUTION", "USED MIB", "SHARE"];

fn table<const N: usize>(columns: [&str; N], shares: impl Iterator<Item = [String; N]>) -> String {
    let mut rows = vec![columns.map(str::to_owned)];
    rows.extend(shares);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
            // Names are left-aligned, numbers right-aligned. Writing to a String cannot fail.
            let _ = match columns[column] {
                "CLAIM" | "ATTRIBUTION" | "SHARE" => write!(line, "{cell:<width$}  "),
                _ => write!(line, "{cell:>width$}  "),
            };
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

fn claim_name(share: &ShareUsage) -> String {
    match (&share.namespace, &share.claim) {
        (Some(namespace), Some(claim)) => format!("{namespace}/{claim}"),
        _ => share.claim_uid.to_string(),
    }
}

fn mib(bytes: u64) -> String {
    bytes.div_ceil(MIB).to_string()
}

fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

/// The first characters of the share's id.
fn short_id(share: &ShareUsage) -> String {
    share.share.as_str().chars().take(8).collect()
}

fn total_row(share: &ShareUsage) -> [String; TOTAL_COLUMNS.len()] {
    let seconds = |ms: u64| format!("{}.{} s", ms / 1000, ms % 1000 / 100);
    let time = |of: fn(ShareTotals) -> Option<u64>| or_dash(share.totals.and_then(of).map(seconds));
    let count = |of: fn(ShareTotals) -> Option<u64>| {
        or_dash(share.totals.and_then(of).map(|count| count.to_string()))
    };
    [
        claim_name(share),
        time(|totals| Some(totals.gpu_time_used_ms)),
        time(|totals| Some(totals.throttled_ms)),
        time(|totals| totals.granted_ms),
        count(|totals| totals.hand_overs),
        count(|totals| totals.late_hand_overs),
        or_dash(share.gpu_time_attribution.map(GpuTimeAttribution::name).map(str::to_owned)),
        or_dash(share.memory_used_bytes.map(mib)),
        short_id(share),
    ]
}

fn row(share: &ShareUsage) -> [String; COLUMNS.len()] {
    let percent = |percent: u32| format!("{percent}%");
    // As measured by NVML; if NVML does not report it, `~` and the value that the processes report.
    let used = match (share.compute_used_nvml_percent, share.compute_used_percent) {
        (Some(measured), _) => percent(measured),
        (None, reported) => or_dash(reported.map(|reported| format!("~{reported}%"))),
    };
    let priority = usize::try_from(share.priority).ok().and_then(|number| Priority::NAMES.get(number));
    [
        claim_name(share),
        match (share.compute_request_percent, share.compute_limit_percent) {
            (request, limit) if request == limit => percent(limit),
            (request, limit) => format!("{request}/{limit}%"),
        },
        used,
        or_dash(share.throttled_ms.map(|ms| format!("{ms} ms"))),
        or_dash(share.memory_used_bytes.map(mib)),
        mib(share.memory_limit_bytes),
        or_dash(share.memory_used_nvml_bytes.map(mib)),
        share.weight.to_string(),
        priority.map_or_else(|| share.priority.to_string(), |name| (*name).to_owned()),
        share.processes.to_string(),
        short_id(share),
    ]
}
