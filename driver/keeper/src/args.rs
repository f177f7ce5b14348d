//! The command line: a few paths and times, each also an environment variable of
//! the same name as the node daemon's.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

const HELP: &str = "\
Keeps the MPS control daemons of a node running, across restarts and upgrades of divvy-node.

Wanted daemons are files below RUN_DIR/mps, which divvy-node writes; what runs is written beside
them. It can be killed and replaced at any time: daemons and their clients run on, and the next
keeper takes them over. Runs as root, with the host's process ids.

Usage: divvy-keeper [OPTIONS]

Options:
  --run-dir DIR        Sockets and shared memory of MPS; in memory, the same path for all
                       [env: RUN_DIR] [default: /run/divvy]
  --driver-root DIR    Root of the GPU driver's libraries and programs, / or /run/nvidia/driver
                       [env: DRIVER_ROOT] [default: /]
  --host-prefix DIR    Where this process sees the host's root, with the driver root below it
                       [env: HOST_PREFIX] [default: /]
  --check-every SECS   How often a daemon is asked how it is [env: CHECK_EVERY] [default: 10]
  --answer-within SECS How long it may take to answer before it is killed and started again
                       [env: ANSWER_WITHIN] [default: 5]
  -h, --help           Print this
  -V, --version        Print the version";

/// What the keeper is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Args {
    /// Absolute.
    pub(crate) run_dir: PathBuf,
    /// The driver root as this process sees it.
    pub(crate) driver_root: PathBuf,
    pub(crate) check_every: Duration,
    pub(crate) answer_within: Duration,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Keep(Args),
    Print(String),
}

/// Why the command line is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ArgsError {
    #[error("unknown option {0:?}; see --help")]
    Unknown(String),
    #[error("{0} needs a value")]
    NoValue(String),
    #[error("{option} needs an absolute path, not {value:?}")]
    Path { option: &'static str, value: String },
    #[error("{option} needs a number of seconds from 1 to 3600, not {value:?}")]
    Seconds { option: &'static str, value: String },
}

/// Option, environment variable, default.
const OPTIONS: [(&str, &str, &str); 5] = [
    ("--run-dir", "RUN_DIR", "/run/divvy"),
    ("--driver-root", "DRIVER_ROOT", "/"),
    ("--host-prefix", "HOST_PREFIX", "/"),
    ("--check-every", "CHECK_EVERY", "10"),
    ("--answer-within", "ANSWER_WITHIN", "5"),
];

impl Args {
    /// Reads the options behind the program's name; what they do not say, the environment does.
    pub(crate) fn parse(
        args: impl Iterator<Item = OsString>,
        environment: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Command, ArgsError> {
        let mut values = OPTIONS.map(|(_, variable, default)| {
            environment(variable).filter(|value| !value.is_empty()).unwrap_or_else(|| default.into())
        });
        let mut args = args.map(|arg| arg.to_string_lossy().into_owned());
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "-h" | "--help" => return Ok(Command::Print(HELP.to_owned())),
                "-V" | "--version" => {
                    return Ok(Command::Print(format!("divvy-keeper {}", env!("CARGO_PKG_VERSION"))));
                }
                _ => {}
            }
            let (name, inline) = match arg.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (arg.as_str(), None),
            };
            let option = OPTIONS.iter().zip(&mut values).find(|((option, ..), _)| *option == name);
            let (_, value) = option.ok_or_else(|| ArgsError::Unknown(arg.clone()))?;
            *value =
                inline.or_else(|| args.next()).ok_or_else(|| ArgsError::NoValue(name.to_owned()))?.into();
        }
        let [run_dir, driver_root, host_prefix, check_every, answer_within] = values;
        let root = absolute("--driver-root", driver_root)?;
        let prefix = absolute("--host-prefix", host_prefix)?;
        Ok(Command::Keep(Self {
            run_dir: absolute("--run-dir", run_dir)?,
            driver_root: prefix.join(root.strip_prefix("/").unwrap_or(&root)),
            check_every: seconds("--check-every", check_every)?,
            answer_within: seconds("--answer-within", answer_within)?,
        }))
    }
}

fn absolute(option: &'static str, value: OsString) -> Result<PathBuf, ArgsError> {
    let path = Path::new(&value);
    if path.is_absolute() {
        return Ok(path.to_owned());
    }
    Err(ArgsError::Path { option, value: value.to_string_lossy().into_owned() })
}

fn seconds(option: &'static str, value: OsString) -> Result<Duration, ArgsError> {
    let number =
        value.to_str().and_then(|text| text.parse().ok()).filter(|number| (1..=3600).contains(number));
    number
        .map(Duration::from_secs)
        .ok_or_else(|| ArgsError::Seconds { option, value: value.to_string_lossy().into_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str, variables: &[(&str, &str)]) -> Result<Command, String> {
        let environment = |name: &str| {
            variables.iter().find(|(variable, _)| *variable == name).map(|(_, value)| OsString::from(value))
        };
        let args = line.split_whitespace().map(OsString::from);
        Args::parse(args, environment).map_err(|error| error.to_string())
    }

    fn check(line: &str, variables: &[(&str, &str)], expected: Result<(&str, &str, u64), &str>) {
        match (parse(line, variables), expected) {
            (Ok(Command::Keep(args)), Ok((run_dir, driver_root, check))) => {
                assert_eq!(args.run_dir, Path::new(run_dir));
                assert_eq!(args.driver_root, Path::new(driver_root));
                assert_eq!(args.check_every, Duration::from_secs(check));
            }
            (Err(error), Err(part)) => assert!(error.contains(part), "{error}"),
            (got, expected) => panic!("{got:?} instead of {expected:?}"),
        }
    }

    #[test]
    fn options_stand_over_the_environment_and_that_over_defaults() {
        check("", &[], Ok(("/run/divvy", "/", 10)));
        check("--run-dir /a --check-every=3", &[], Ok(("/a", "/", 3)));
        check("--run-dir /a", &[("RUN_DIR", "/b"), ("DRIVER_ROOT", "/c")], Ok(("/a", "/c", 10)));
        check("--host-prefix /host", &[], Ok(("/run/divvy", "/host/", 10)));
        check("--host-prefix /host", &[("DRIVER_ROOT", "/d")], Ok(("/run/divvy", "/host/d", 10)));
        check("--run-dir a", &[], Err("--run-dir needs an absolute path"));
        check("--check-every 0", &[], Err("1 to 3600"));
        check("--run-dir", &[], Err("--run-dir needs a value"));
        check("--port 1", &[], Err("unknown option \"--port\""));
    }

    #[test]
    fn help_names_every_option_and_variable() {
        for (option, variable, default) in OPTIONS {
            for part in [option, &format!("[env: {variable}]"), &format!("[default: {default}]")] {
                assert!(HELP.contains(part), "{part}");
            }
        }
        assert_eq!(parse("--run-dir a --help", &[]), Ok(Command::Print(HELP.to_owned())));
    }
}
