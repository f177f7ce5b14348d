//! Flags that all programs share, and the values that flags have.

use clap::{Args, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// How log lines are written, and which.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Observation")]
pub struct LogArgs {
    /// One line per state change, as text or as JSON
    #[arg(long, env = "LOG_FORMAT", value_enum, default_value = "text")]
    pub log_format: LogFormat,
    /// error, warn, info, debug, trace, or per module as in "info,hyper=debug"
    #[arg(long, env = "LOG_LEVEL", value_name = "LEVEL", default_value = "info")]
    pub log_level: String,
}

/// How log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

/// An address to listen on, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listen {
    Off,
    On(SocketAddr),
}

/// `IP:PORT`, or `off`.
pub fn listen(text: &str) -> Result<Listen, String> {
    match text {
        "off" => Ok(Listen::Off),
        _ => text.parse().map(Listen::On).map_err(|_| "must be IP:PORT or off".to_owned()),
    }
}

/// A path that means the same wherever the program was started.
pub fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let plain = path.is_absolute() && !path.components().any(|part| part == std::path::Component::ParentDir);
    if plain { Ok(path) } else { Err("must be an absolute path without ..".to_owned()) }
}

/// `90s`, `1500ms`, `2m`; a time of more than an hour is a slip.
pub fn time(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (count, unit) = text.split_at(digits);
    let milliseconds = match unit {
        "ms" => Some(1),
        "s" => Some(1_000),
        "m" => Some(60_000),
        _ => None,
    };
    let count: Option<u64> = count.parse().ok();
    match milliseconds.zip(count).and_then(|(unit, count)| count.checked_mul(unit)) {
        Some(total @ 0..=3_600_000) => Ok(Duration::from_millis(total)),
        _ => Err("must be a time of at most 60m, such as 1500ms, 30s or 2m".to_owned()),
    }
}

/// A name that can stand in a URL of the API: a DNS subdomain.
pub fn object_name(text: &str) -> Result<String, String> {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let label = |label: &str| {
        !label.is_empty() && label.chars().all(inner) && !label.starts_with('-') && !label.ends_with('-')
    };
    match text.len() <= 253 && text.split('.').all(label) {
        true => Ok(text.to_owned()),
        false => Err("must be a name of lower-case letters, digits, - and .".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_time(text: &str, milliseconds: Option<u64>) {
        assert_eq!(time(text).ok(), milliseconds.map(Duration::from_millis), "{text}");
    }

    #[test]
    fn times_have_a_unit_and_a_bound() {
        check_time("1500ms", Some(1500));
        check_time("30s", Some(30_000));
        check_time("2m", Some(120_000));
        for bad in ["", "s", "30", "30 s", "-1s", "61m", "99999999999999999999m", "1h", "s1"] {
            check_time(bad, None);
        }
    }

    #[test]
    fn a_name_is_safe_in_a_url() {
        assert!(object_name("ip-10-0-0-1.ec2.internal").is_ok());
        for bad in ["", "a/b", "A", "a,b", "-a", "a.", "a b"] {
            assert!(object_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn relative_paths_are_refused() {
        for bad in ["", "x", "../x", "/a/../b"] {
            assert!(absolute(bad).is_err(), "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_value_makes_the_command_line_panic(text in "\\PC{0,12}") {
            let _ = (time(&text), listen(&text), absolute(&text), object_name(&text));
        }
    }
}
