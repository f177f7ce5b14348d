//! The shares as a table, for people.

use super::look::Shown;
use divvy_api::sharing::Priority;
use divvy_api::top::ShareNow;
use std::cmp::Reverse;
use std::fmt::Write;
use std::time::SystemTime;

/// What is older than this, in milliseconds, is no more what the node is doing.
const OLD_MS: u64 = 5000;
const MIB: u64 = 1 << 20;

/// Where and when somebody looks.
pub(super) struct Moment {
    pub(super) node: String,
    /// Milliseconds of the system clock.
    pub(super) ms: u64,
}

impl Moment {
    /// This machine, by the name that the cluster has for it where that is known.
    pub(super) fn now() -> Self {
        let host = || rustix::system::uname().nodename().to_string_lossy().into_owned();
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { node: std::env::var("NODE_NAME").unwrap_or_else(|_| host()), ms: since.as_millis() as u64 }
    }
}

/// Of the shares of a device: by name, or who has most first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Order {
    #[default]
    Claim,
    Got,
    HeldUp,
    Used,
}

impl Order {
    pub(super) const ALL: [Self; 4] = [Self::Claim, Self::Got, Self::HeldUp, Self::Used];

    /// The name of its column.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Claim => "claim",
            Self::Got => "got",
            Self::HeldUp => "held up",
            Self::Used => "used",
        }
    }

    /// Its name's first letter.
    pub(super) fn key(self) -> char {
        match self {
            Self::Claim => 'c',
            Self::Got => 'g',
            Self::HeldUp => 'h',
            Self::Used => 'u',
        }
    }

    fn amount(self, share: &ShareNow) -> Option<u64> {
        match self {
            Self::Claim => None,
            Self::Got => share.busy_percent.or(share.charged_percent).map(u64::from),
            Self::HeldUp => share.throttled_ms,
            Self::Used => share.memory_used_bytes,
        }
    }
}

/// The whole view: a line of where and when, then the devices.
pub(super) fn text(shown: &Shown, moment: &Moment, order: Order) -> String {
    let seconds = moment.ms / 1000;
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let count = shown.shares.len() + shown.unseen.len();
    let shares = if count == 1 { "share" } else { "shares" };
    let mut text = format!("{}, {hour:02}:{minute:02}:{second:02} UTC: {count} {shares}\n", moment.node);
    for of_device in shown.shares.chunk_by(|one, other| (&one.gpu, &one.mig) == (&other.gpu, &other.mig)) {
        let Some(first) = of_device.first() else { continue };
        text += &format!("\n{}", first.gpu);
        if let Some(mig) = &first.mig {
            text += &format!(" {mig}");
        }
        let age = moment.ms.saturating_sub(first.at_ms);
        if age > OLD_MS {
            text +=
                &format!(" (as of {} s ago: nobody looks at its shares; is divvy-node running?)", age / 1000);
        }
        text.push('\n');
        let mut shares: Vec<&ShareNow> = of_device.iter().collect();
        shares.sort_by_key(|share| Reverse(order.amount(share)));
        text += &table(&shares);
    }
    let rest = [&shown.unseen, &shown.unreadable];
    if rest.iter().any(|lines| !lines.is_empty()) {
        text.push('\n');
    }
    shown.unseen.iter().for_each(|share| text += &format!("{share}: not looked at yet\n"));
    shown.unreadable.iter().for_each(|why| text += &format!("{why}\n"));
    text
}

/// What is looked for most stands first, for narrow terminals.
const HEAD: [&str; 11] = [
    "CLAIM",
    "ASKED",
    "GOT",
    "HELD UP",
    "USED MIB",
    "LIMIT MIB",
    "BY NVML",
    "WEIGHT",
    "PRIORITY",
    "PROCESSES",
    "SHARE",
];

fn table(shares: &[&ShareNow]) -> String {
    let mut rows = vec![HEAD.map(str::to_owned)];
    rows.extend(shares.iter().map(|share| row(share)));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; HEAD.len()] = std::array::from_fn(width);
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
            // Names to the left, amounts to the right. Writing to a text cannot fail.
            let _ = match HEAD[column] {
                "CLAIM" | "SHARE" => write!(line, "{cell:<width$}  "),
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
    let priority = usize::try_from(share.priority).ok().and_then(|number| Priority::NAMES.get(number));
    [
        claim,
        match (share.guarantee_percent, share.ceiling_percent) {
            (least, most) if least == most => percent(most),
            (least, most) => format!("{least}-{most}%"),
        },
        got,
        known(share.throttled_ms.map(|ms| format!("{ms} ms"))),
        known(share.memory_used_bytes.map(mib)),
        mib(share.memory_limit_bytes),
        known(share.memory_measured_bytes.map(mib)),
        share.weight.to_string(),
        priority.map_or_else(|| share.priority.to_string(), |name| (*name).to_owned()),
        share.processes.to_string(),
        share.share.as_str().chars().take(8).collect(),
    ]
}
