//! The fake API server in its own process, controlled over standard input.
//!
//! The command `time NAMESPACE NAME` prints how long the server needs for one GET of that claim, in
//! microseconds and without transport. The server exits at the end of its input.

use crate::program::read_line;
use anyhow::{Context, Result, bail};
use divvy_fakes::apiserver::{FakeApi, FakeApiOptions};
use k8s_openapi::api::resource::v1::ResourceClaim;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;
use tokio::io::AsyncBufReadExt;

/// GETs of one `time` command, which prints their median.
const GETS_PER_MEDIAN: usize = 200;

/// Serves until the end of standard input.
pub(crate) async fn serve(dir: &Path) -> Result<()> {
    let api = FakeApi::start(FakeApiOptions::default()).await?;
    println!("{}", api.kubeconfig_path(dir)?.display());
    let mut lines = tokio::io::BufReader::new(stdin()?).lines();
    while let Some(line) = lines.next_line().await? {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["time", namespace, name] = words.as_slice() else {
            bail!("unknown command {line:?}; expected `time NAMESPACE NAME`")
        };
        let claims: kube::Api<ResourceClaim> = kube::Api::namespaced(api.client_in_process(), namespace);
        let mut samples = Vec::with_capacity(GETS_PER_MEDIAN);
        for _ in 0..GETS_PER_MEDIAN {
            let began = Instant::now();
            claims.get(name).await?;
            samples.push(crate::stats::micros(began.elapsed()));
        }
        println!("{:.3}", crate::stats::median(&samples));
        std::io::stdout().flush()?;
    }
    Ok(())
}

/// Standard input without tokio's blocking thread, which would keep the process alive.
fn stdin() -> Result<tokio::net::unix::pipe::Receiver> {
    use std::os::fd::AsFd;
    let own = std::io::stdin().as_fd().try_clone_to_owned()?;
    tokio::net::unix::pipe::Receiver::from_owned_fd(own).context("standard input is not a pipe")
}

/// A running API server process.
pub(crate) struct ApiServer {
    child: Child,
    /// The server exits when this is closed, so it is dropped first.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    pub(crate) kubeconfig: PathBuf,
}

impl ApiServer {
    pub(crate) fn start(dir: &Path) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("--serve-api")
            .arg(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the API server")?;
        let input = child.stdin.take();
        let mut output = BufReader::new(child.stdout.take().context("the API server has no output")?);
        let line = read_line(&mut output)?;
        Ok(Self { child, input, output, kubeconfig: PathBuf::from(line.trim()) })
    }

    /// Time that the server itself needs for a GET of the claim, in microseconds.
    pub(crate) fn time_get(&mut self, namespace: &str, name: &str) -> Result<f64> {
        let input = self.input.as_mut().context("the API server has exited")?;
        writeln!(input, "time {namespace} {name}")?;
        input.flush()?;
        let line = read_line(&mut self.output)?;
        line.trim().parse().with_context(|| format!("the API server answered {line:?}"))
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.input = None;
        // A failure does not matter here: the benchmark is exiting.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
