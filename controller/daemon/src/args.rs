//! Flags that all daemons share, and parsers for the values of flags.

use clap::{Args, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Format and level of the log.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Observation")]
pub struct LogArgs {
    /// Format of log lines: text or JSON
    #[arg(long, env = "DIVVY_LOG_FORMAT", value_enum, default_value = "text")]
    pub log_format: LogFormat,
    /// Log level: error, warn, info, debug or trace; per module as in "info,hyper=debug"
    #[arg(long, env = "DIVVY_LOG_LEVEL", value_name = "LEVEL", default_value = "info")]
    pub log_level: String,
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

/// The address of a server, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listen {
    Off,
    On(SocketAddr),
}

/// Parses `IP:PORT` or `off`.
pub fn listen(text: &str) -> Result<Listen, String> {
    match text {
        "off" => Ok(Listen::Off),
        _ => text.parse().map(Listen::On).map_err(|_| "must be IP:PORT or off".to_owned()),
    }
}

/// Parses an absolute path, which does not depend on the working directory.
pub fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let plain = path.is_absolute() && !path.components().any(|part| part == std::path::Component::ParentDir);
    if plain { Ok(path) } else { Err("must be an absolute path without ..".to_owned()) }
}

/// Parses a duration such as `90s`, `1500ms` or `2m`. More than an hour is refused as a mistake.
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

/// Parses a DNS subdomain name, which is safe in a URL of the API.
pub fn object_name(text: &str) -> Result<String, String> {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let label = |label: &str| {
        !label.is_empty() && label.chars().all(inner) && !label.starts_with('-') && !label.ends_with('-')
    };
    match text.len() <= 253 && text.split('.').all(label) {
        true => Ok(text.to_owned()),
        false => Err("must be a DNS subdomain: lower-case letters, digits, - and .".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_time(text: &str, milliseconds: Option<u64>) {
        assert_eq!(time(text).ok(), milliseconds.map(Duration::from_millis), "{text}");
    }

    #[test]
    fn durations_need_a_unit_and_are_bounded() {
        check_time("1500ms", Some(1500));
        check_time("30s", Some(30_000));
        check_time("2m", Some(120_000));
        for bad in ["", "s", "30", "30 s", "-1s", "61m", "99999999999999999999m", "1h", "s1"] {
            check_time(bad, None);
        }
    }

    #[test]
    fn object_names_are_safe_in_urls() {
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
        fn value_parsers_do_not_panic(text in "\\PC{0,12}") {
            let _ = (time(&text), listen(&text), absolute(&text), object_name(&text));
        }
    }
}
