//! `divvy playground`: a Kubernetes cluster with simulated GPUs on this machine, with Divvy installed.
//!
//! The scripts of the repository start and remove it: `e2e/kind/run` where docker answers, else
//! `e2e/cluster/run`, which needs neither docker nor a registry. A playground is a directory in
//! `/var/tmp` with the file `playground`, so a second process finds it.

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

const UP_HELP: &str = "\
Needs root, Go, a C compiler and a clone of the repository. The first start builds Kubernetes from
source and takes minutes; a second one takes less than a minute.

  sudo -E divvy playground up
  sudo -E divvy playground up --backend kind";
const DOWN_HELP: &str = "  sudo -E divvy playground down";
const STATUS_HELP: &str = "\
  divvy playground status
  divvy playground status -o json";

/// Directories of clusters; each script names its own by a prefix.
const CLUSTERS_DIR: &str = "/var/tmp";
/// The file that marks the cluster of a playground.
const MARKER: &str = "playground";
/// Time limit of `docker info`, which hangs where the daemon does.
const DOCKER_TIMEOUT: Duration = Duration::from_secs(10);

/// See the command's help.
#[derive(clap::Subcommand)]
pub(crate) enum PlaygroundCommand {
    /// Start a cluster with simulated GPUs, install Divvy, and print how to use it
    #[command(after_help = UP_HELP)]
    Up {
        /// How the nodes run
        #[arg(long, value_enum, default_value = "auto")]
        backend: Choice,
        #[command(flatten)]
        at: Place,
    },
    /// Remove the cluster and everything that it changed on this machine
    #[command(after_help = DOWN_HELP)]
    Down {
        #[command(flatten)]
        at: Place,
    },
    /// Show whether a cluster runs, and how to use it
    #[command(after_help = STATUS_HELP)]
    Status {
        /// Print one JSON object
        #[arg(short, long, value_enum, default_value = "text")]
        output: Output,
        #[command(flatten)]
        at: Place,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Choice {
    /// Docker if it answers, else processes
    Auto,
    /// Containers of docker, by kind
    Kind,
    /// Processes of this machine in namespaces of their own
    Plain,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Output {
    Text,
    Json,
}

/// Where the scripts are.
#[derive(clap::Args)]
pub(crate) struct Place {
    /// The clone of the repository [default: the current directory, or where divvy was built]
    #[arg(long, value_name = "DIR")]
    repository: Option<PathBuf>,
}

/// How the nodes of a cluster run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Backend {
    Kind,
    Plain,
}

impl Backend {
    const ALL: [Self; 2] = [Self::Plain, Self::Kind];

    /// The script, below the repository.
    fn script(self) -> &'static str {
        match self {
            Self::Kind => "e2e/kind/run",
            Self::Plain => "e2e/cluster/run",
        }
    }

    /// The names of its directories begin with this.
    fn prefix(self) -> &'static str {
        match self {
            Self::Kind => "dk",
            Self::Plain => "dv",
        }
    }

    /// Whether a directory is a clone with the script.
    fn is_in(self, repository: &Path) -> bool {
        repository.join(self.script()).is_file()
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Kind => "kind",
            Self::Plain => "plain",
        })
    }
}

/// A cluster that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Playground {
    backend: Backend,
    dir: PathBuf,
    /// The directory of kubectl and the other programs.
    programs: String,
}

/// Starts, removes or shows the cluster.
pub(crate) fn run(command: &PlaygroundCommand) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match command {
            PlaygroundCommand::Up { backend, at } => up(*backend, at).await,
            PlaygroundCommand::Down { at } => down(at).await,
            PlaygroundCommand::Status { output, at } => status(*output, at),
        }
    })
}

async fn up(choice: Choice, at: &Place) -> Result<ExitCode> {
    let repository = repository(at)?;
    if let Some(running) = find(Path::new(CLUSTERS_DIR))? {
        eprintln!("divvy: a playground runs already; divvy playground down removes it");
        return say(&usage(&running, &repository));
    }
    ensure!(is_root(), "the playground needs root, for namespaces and containers; run it with sudo");
    let backend = match choice {
        Choice::Kind => Backend::Kind,
        Choice::Plain => Backend::Plain,
        Choice::Auto if docker_answers().await => Backend::Kind,
        Choice::Auto => Backend::Plain,
    };
    let began = Instant::now();
    eprintln!("divvy: starting a cluster with simulated GPUs ({backend})");
    script(backend, &repository, &["--playground"]).await?;
    let running = find(Path::new(CLUSTERS_DIR))?;
    let running = running.with_context(|| format!("{} ended without a cluster", backend.script()))?;
    eprintln!("divvy: the playground is up after {} s", began.elapsed().as_secs());
    say(&usage(&running, &repository))
}

async fn down(at: &Place) -> Result<ExitCode> {
    let Some(running) = find(Path::new(CLUSTERS_DIR))? else {
        eprintln!("divvy: no playground runs");
        return Ok(ExitCode::SUCCESS);
    };
    ensure!(is_root(), "the playground was started by root; run it with sudo");
    let dir = running.dir.display().to_string();
    script(running.backend, &repository(at)?, &["--down", &dir]).await?;
    ensure!(!running.dir.exists(), "{dir} still exists; see the messages above");
    eprintln!("divvy: the playground is removed");
    Ok(ExitCode::SUCCESS)
}

fn status(output: Output, at: &Place) -> Result<ExitCode> {
    let running = find(Path::new(CLUSTERS_DIR))?;
    if output == Output::Json {
        let state = running.as_ref().map(|Playground { backend, dir, programs }| {
            json!({
                "backend": backend.to_string(), "directory": dir, "programs": programs,
                "kubeconfig": dir.join("admin.kubeconfig"),
            })
        });
        return say(&(serde_json::to_string_pretty(&json!({"running": state}))? + "\n"));
    }
    match running {
        Some(running) => say(&usage(&running, &repository(at)?)),
        None => say("no playground runs; divvy playground up starts one\n"),
    }
}

fn say(text: &str) -> Result<ExitCode> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(error).context("cannot write to standard output")
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// How to use the cluster: the environment, and three commands.
fn usage(running: &Playground, repository: &Path) -> String {
    let Playground { dir, programs, .. } = running;
    let (dir, example) = (dir.display(), repository.join("manifests/examples/share.yaml"));
    format!(
        "export KUBECONFIG={dir}/admin.kubeconfig\n\
         export PATH={programs}:$PATH\n\
         \n\
         # Try: two pods get shares of 10 GiB, and nvidia-smi in them shows the share.\n\
         kubectl apply -f {}\n\
         kubectl wait --for=condition=Available deployment/share --timeout=120s\n\
         kubectl exec deployment/share -- nvidia-smi\n",
        example.display()
    )
}

/// The playground below a directory; there is at most one.
fn find(below: &Path) -> Result<Option<Playground>> {
    let entries = match std::fs::read_dir(below) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", below.display())),
    };
    for entry in entries {
        let dir = entry.with_context(|| format!("cannot read {}", below.display()))?.path();
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let backend = Backend::ALL.into_iter().find(|backend| name.starts_with(backend.prefix()));
        if let Some(backend) = backend.filter(|_| dir.join(MARKER).exists()) {
            let programs = dir.join("bin");
            let programs = std::fs::read_to_string(&programs)
                .with_context(|| format!("cannot read {}", programs.display()))?;
            return Ok(Some(Playground { backend, dir, programs: programs.trim().to_owned() }));
        }
    }
    Ok(None)
}

/// The clone with the scripts: the given one, one above the current directory, or where this program
/// was built.
fn repository(at: &Place) -> Result<PathBuf> {
    let has_scripts = |dir: &Path| Backend::ALL.iter().all(|backend| backend.is_in(dir));
    if let Some(given) = &at.repository {
        ensure!(has_scripts(given), "{} is no clone of Divvy: it has no e2e/cluster/run", given.display());
        return Ok(std::path::absolute(given)?);
    }
    let here = std::env::current_dir().context("cannot read the current directory")?;
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let built = built.canonicalize().ok();
    let found = here.ancestors().map(Path::to_owned).chain(built).find(|dir| has_scripts(dir));
    let Some(found) = found else {
        bail!("the playground is built from a clone of Divvy; clone it, or give --repository");
    };
    Ok(found)
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

async fn docker_answers() -> bool {
    let mut command = Command::new("docker");
    command.arg("info").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let status = tokio::time::timeout(DOCKER_TIMEOUT, command.status()).await;
    matches!(status, Ok(Ok(status)) if status.success())
}

/// Runs a script and shows its messages, with the seconds since its start. On Ctrl-C the script reverts
/// what it did, so this waits for its end.
async fn script(backend: Backend, repository: &Path, arguments: &[&str]) -> Result<()> {
    let path = repository.join(backend.script());
    let began = Instant::now();
    let mut child = Command::new(&path)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", path.display()))?;
    let messages = child.stderr.take().context("the script has no standard error")?;
    let mut lines = BufReader::new(messages).lines();
    let mut interrupted = false;
    // The cluster's processes may inherit the pipe, so the end of the script ends the loop.
    let status = loop {
        tokio::select! {
            line = lines.next_line() => match line {
                Ok(Some(line)) => eprintln!("{:>5} s  {line}", began.elapsed().as_secs()),
                _ => break child.wait().await?,
            },
            status = child.wait() => break status?,
            signal = tokio::signal::ctrl_c() => {
                signal.context("cannot wait for Ctrl-C")?;
                interrupted = true;
            }
        }
    };
    ensure!(!interrupted, "interrupted; {} has reverted its changes", backend.script());
    ensure!(status.success(), "{} failed ({status}); see its messages above", backend.script());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn playground_is_found_by_its_marker() {
        let below = tempfile::tempdir().unwrap();
        let check = |expected: Option<&str>| {
            let found = find(below.path()).unwrap();
            assert_eq!(found.map(|one| format!("{} {}", one.backend, one.programs)).as_deref(), expected);
        };
        let make = |name: &str, files: &[&str]| {
            std::fs::create_dir(below.path().join(name)).unwrap();
            for file in files {
                std::fs::write(below.path().join(name).join(file), "/programs\n").unwrap();
            }
        };
        check(None);
        make("other", &["bin", MARKER]);
        make("dv1", &["bin"]);
        check(None);
        make("dk1", &["bin", MARKER]);
        check(Some("kind /programs"));
        assert_eq!(find(&below.path().join("absent")).unwrap(), None);
    }

    #[test]
    fn usage_prints_three_commands() {
        let dir = PathBuf::from("/var/tmp/dv1");
        let running = Playground { backend: Backend::Plain, dir, programs: "/bin".to_owned() };
        let text = usage(&running, Path::new("/clone"));
        assert!(text.contains("KUBECONFIG=/var/tmp/dv1/admin.kubeconfig"), "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with("kubectl ")).count(), 3);
    }
}
