//! The API server as a process of its own, steered over its standard input:
//! `time NAMESPACE NAME` answers with the microseconds that one GET of that
//! claim takes inside the server, without transport; the end of input ends it.

use crate::program::hear;
use anyhow::{Context, Result, bail};
use divvy_fakes::apiserver::{FakeApi, FakeApiOptions};
use k8s_openapi::api::resource::v1::ResourceClaim;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;
use tokio::io::AsyncBufReadExt;

/// How many GETs one `time` is the median of.
const GETS: usize = 200;

/// Serves until standard input ends.
pub(crate) async fn serve(dir: &Path) -> Result<()> {
    let api = FakeApi::start(FakeApiOptions::default()).await?;
    println!("{}", api.kubeconfig_path(dir)?.display());
    let mut lines = tokio::io::BufReader::new(stdin()?).lines();
    while let Some(line) = lines.next_line().await? {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["time", namespace, name] = words.as_slice() else { bail!("no command {line:?}") };
        let claims: kube::Api<ResourceClaim> = kube::Api::namespaced(api.client_in_process(), namespace);
        let mut samples = Vec::with_capacity(GETS);
        for _ in 0..GETS {
            let began = Instant::now();
            claims.get(name).await?;
            samples.push(crate::stats::micros(began.elapsed()));
        }
        println!("{:.3}", crate::stats::median(&samples));
        std::io::stdout().flush()?;
    }
    Ok(())
}

/// Standard input without tokio's helper thread, which would keep the process alive.
fn stdin() -> Result<tokio::net::unix::pipe::Receiver> {
    use std::os::fd::AsFd;
    let own = std::io::stdin().as_fd().try_clone_to_owned()?;
    tokio::net::unix::pipe::Receiver::from_owned_fd(own).context("standard input is not a pipe")
}

/// The server's process, from outside.
pub(crate) struct Server {
    child: Child,
    /// Dropped first, which ends the server.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    pub(crate) kubeconfig: PathBuf,
}

impl Server {
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
        let line = hear(&mut output)?;
        Ok(Self { child, input, output, kubeconfig: PathBuf::from(line.trim()) })
    }

    /// Microseconds that the server itself needs for a GET of the claim.
    pub(crate) fn time(&mut self, namespace: &str, name: &str) -> Result<f64> {
        let input = self.input.as_mut().context("the API server is gone")?;
        writeln!(input, "time {namespace} {name}")?;
        input.flush()?;
        let line = hear(&mut self.output)?;
        line.trim().parse().with_context(|| format!("the API server answered {line:?}"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.input = None;
        // Nothing to do about a failure while the benchmark ends.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
