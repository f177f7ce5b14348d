//! The program `nvidia-cuda-mps-control`: its options, and the client that sends commands from
//! stdin to the daemon.

use super::daemon;
use super::protocol::{Answer, ConnectRequest, JsonLines, SOCKET, pipe_directory};
use std::io::BufRead;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

const USAGE: &str = "\
usage: nvidia-cuda-mps-control [-d | -f] [-M | -multiuser-server]
    -d                       start the daemon in the background
    -f                       start the daemon in the foreground
    -M, -multiuser-server    one server for the clients of all users
without options: read commands on stdin";

/// Major version of the first driver whose program accepts `-M`. The manual of 525 does not have
/// the option, that of 570 does; the exact release is not documented.
const MULTI_USER_SINCE: u32 = 550;

/// How long `-d` waits for its daemon to start.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// Main of the program.
pub(crate) fn main() -> ExitCode {
    let (mut start, mut multi_user) = (None, false);
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "-d" => start = Some(true),
            "-f" => start = Some(false),
            "-M" | "-multiuser-server" if knows_multi_user() => multi_user = true,
            _ => {
                eprintln!("Unknown option: {argument}\n{USAGE}");
                return ExitCode::FAILURE;
            }
        }
    }
    match start {
        None => commands(),
        Some(true) => background(multi_user),
        Some(false) => daemon::run(multi_user),
    }
}

fn knows_multi_user() -> bool {
    let driver = super::protocol::own_sim().and_then(|sim| sim.read().ok()).map(|state| state.driver.clone());
    let major = driver.and_then(|driver| driver.split('.').next()?.parse::<u32>().ok());
    major.is_some_and(|major| major >= MULTI_USER_SINCE)
}

/// Sends each line to the daemon and prints the answer.
fn commands() -> ExitCode {
    let Ok(mut daemon) = JsonLines::connect(&pipe_directory().join(SOCKET)) else {
        println!("Cannot find MPS control daemon process");
        return ExitCode::FAILURE;
    };
    let mut run = || -> std::io::Result<()> {
        daemon.send(&ConnectRequest::Commands)?;
        for line in std::io::stdin().lock().lines() {
            let Answer { text } = daemon.request(&line?)?;
            print!("{text}");
        }
        Ok(())
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => {
            println!("Lost the connection to the MPS control daemon");
            ExitCode::FAILURE
        }
    }
}

/// Starts the daemon as another process and waits until it is ready.
fn background(multi_user: bool) -> ExitCode {
    let mut command = Command::new(std::env::args_os().next().unwrap_or_default());
    command.arg("-f").args(multi_user.then_some("-M")).process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit());
    let mut daemon = match command.spawn() {
        Ok(daemon) => daemon,
        Err(error) => {
            eprintln!("cannot start the daemon: {error}");
            return ExitCode::FAILURE;
        }
    };
    let begin = Instant::now();
    while begin.elapsed() < START_TIMEOUT {
        if matches!(daemon.try_wait(), Ok(Some(_))) {
            return ExitCode::FAILURE;
        }
        let pid =
            std::fs::read_to_string(pipe_directory().join(super::protocol::PID_FILE)).unwrap_or_default();
        if pid.trim() == daemon.id().to_string() {
            return ExitCode::SUCCESS;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    ExitCode::FAILURE
}
