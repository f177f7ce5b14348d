//! The command line. Each option can also be set by an environment variable; paths use the same
//! variables as the node daemon.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

const HELP: &str = "\
Keeps the MPS control daemons of a node running, across restarts and upgrades of divvy-node.

divvy-node requests a daemon by writing a file below DIR/mps, where DIR is --run-dir. The supervisor
starts the daemon and writes its state beside that file. The supervisor can be killed and replaced
at any time: daemons and their clients keep running, and the next supervisor adopts them.
It must run as root and in the host's PID namespace.

Usage: divvy-mps-supervisor [OPTIONS]

Options:
  --run-dir DIR          Directory of MPS sockets and shared memory, on a tmpfs; must be the same
                         path in divvy-node and in containers
                         [env: DIVVY_RUN_DIR] [default: /run/divvy]
  --driver-root DIR      Root of the GPU driver installation on the host: / or /run/nvidia/driver
                         [env: DIVVY_DRIVER_ROOT] [default: /]
  --host-prefix DIR      Where the host's root is mounted in this container; --driver-root is
                         relative to it [env: DIVVY_HOST_PREFIX] [default: /]
  --check-interval SECS  Time between health checks of a daemon, in seconds, 1 to 3600
                         [env: DIVVY_CHECK_INTERVAL] [default: 10]
  --answer-timeout SECS  Time a daemon may take to answer, in seconds, 1 to 3600; after it the
                         daemon is killed and restarted
                         [env: DIVVY_ANSWER_TIMEOUT] [default: 5]
  -h, --help             Print this help
  -V, --version          Print the version";

/// The settings of the supervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Args {
    /// An absolute path.
    pub(crate) run_dir: PathBuf,
    /// The driver root as this process sees it.
    pub(crate) driver_root: PathBuf,
    pub(crate) check_interval: Duration,
    pub(crate) answer_timeout: Duration,
}

/// The request of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Run(Args),
    Print(String),
}

/// Why the command line is rejected.
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

/// Option, environment variable and default value.
const OPTIONS: [(&str, &str, &str); 5] = [
    ("--run-dir", "DIVVY_RUN_DIR", "/run/divvy"),
    ("--driver-root", "DIVVY_DRIVER_ROOT", "/"),
    ("--host-prefix", "DIVVY_HOST_PREFIX", "/"),
    ("--check-interval", "DIVVY_CHECK_INTERVAL", "10"),
    ("--answer-timeout", "DIVVY_ANSWER_TIMEOUT", "5"),
];

impl Args {
    /// Parses the arguments after the program's name. An option takes precedence over its variable,
    /// and an empty variable counts as unset.
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
                    return Ok(Command::Print(format!("divvy-mps-supervisor {}", env!("CARGO_PKG_VERSION"))));
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
        let [run_dir, driver_root, host_prefix, check_interval, answer_timeout] = values;
        let root = absolute("--driver-root", driver_root)?;
        let prefix = absolute("--host-prefix", host_prefix)?;
        Ok(Command::Run(Self {
            run_dir: absolute("--run-dir", run_dir)?,
            driver_root: prefix.join(root.strip_prefix("/").unwrap_or(&root)),
            check_interval: seconds("--check-interval", check_interval)?,
            answer_timeout: seconds("--answer-timeout", answer_timeout)?,
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
            (Ok(Command::Run(args)), Ok((run_dir, driver_root, check))) => {
                assert_eq!(args.run_dir, Path::new(run_dir));
                assert_eq!(args.driver_root, Path::new(driver_root));
                assert_eq!(args.check_interval, Duration::from_secs(check));
            }
            (Err(error), Err(part)) => assert!(error.contains(part), "{error}"),
            (got, expected) => panic!("{got:?} instead of {expected:?}"),
        }
    }

    #[test]
    fn options_override_variables_and_defaults() {
        check("", &[], Ok(("/run/divvy", "/", 10)));
        check("--run-dir /a --check-interval=3", &[], Ok(("/a", "/", 3)));
        check("--run-dir /a", &[("DIVVY_RUN_DIR", "/b"), ("DIVVY_DRIVER_ROOT", "/c")], Ok(("/a", "/c", 10)));
        check("--host-prefix /host", &[], Ok(("/run/divvy", "/host/", 10)));
        check("--host-prefix /host", &[("DIVVY_DRIVER_ROOT", "/d")], Ok(("/run/divvy", "/host/d", 10)));
        check("--run-dir a", &[], Err("--run-dir needs an absolute path"));
        check("--check-interval 0", &[], Err("1 to 3600"));
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
