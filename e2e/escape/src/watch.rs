//! Runs the node daemon's agent alone over the simulated node, with its defaults. It sees only the
//! pages, NVML and `/proc`.

use crate::node::{Node, Share};
use anyhow::{Context, Result, anyhow};
use divvy_api::top::ShareUsage;
use divvy_driver::gpu::{Gpus, GpusOptions};
use divvy_driver::paths::HostPaths;
use divvy_driver::shares::Shares;
use divvy_driver::shares::agent::{Action, Agent, KillPolicy, Report, TimeLaw};
use divvy_pages::{Compute, Policy};
use std::io::Write;
use std::path::Path;
use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// How often `serve` checks whether standard input has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The law of GPU time of the agent, as `divvy-node --gpu-time-law` takes it.
const LAW: &str = "DIVVY_GPU_TIME_LAW";

/// The prefix of the lines that report an audit.
const AUDITED: &str = "audited";

/// A running agent. It stops when this is dropped.
#[derive(Debug)]
pub struct Watch {
    findings: Receiver<ReportedFinding>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// A finding that the agent reported.
#[derive(Clone, Debug)]
pub struct ReportedFinding {
    pub kind: &'static str,
    /// The message for the log.
    pub text: String,
    /// The agent killed the process.
    pub killed: bool,
}

impl Watch {
    pub fn start(node: &Node) -> Result<Self> {
        Self::start_at(node.sim.root(), node.path(), false)
    }

    /// The same for a node of another process, given the root of its driver and its directory. With
    /// `audits`, each audit is reported too, one line per share.
    pub fn start_at(root: &Path, directory: &Path, audits: bool) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (send, findings) = mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let (ready, up) = mpsc::channel();
        let paths = paths(root, directory);
        let law = match std::env::var(LAW) {
            Ok(law) => <TimeLaw as clap::ValueEnum>::from_str(&law, true)
                .map_err(|cause| anyhow!("{LAW}: {cause}"))?,
            Err(_) => TimeLaw::default(),
        };
        let thread = std::thread::spawn(move || {
            runtime.block_on(async {
                let gpus = Gpus::start(GpusOptions::new(&paths)).await;
                let (agent, mut reports) = Agent::new(gpus.clone(), &paths, KillPolicy::default(), law);
                // The receiver is gone if the start timed out.
                let _ = ready.send(());
                let forward = async {
                    while let Some(report) = reports.recv().await {
                        match report {
                            Report::Found { finding, action } => {
                                let (kind, killed) = (finding.kind.name(), action == Action::Killed);
                                let _ =
                                    send.send(ReportedFinding { kind, text: finding.to_string(), killed });
                            }
                            Report::Audited { shares, .. } if audits => {
                                for share in &shares {
                                    let (kind, text) = (AUDITED, audit_line(share));
                                    let _ = send.send(ReportedFinding { kind, text, killed: false });
                                }
                            }
                            _ => {}
                        }
                    }
                };
                tokio::select! {
                    () = agent.run() => {}
                    () = forward => {}
                    _ = stopped => {}
                }
                gpus.shutdown().await;
            });
        });
        up.recv_timeout(Duration::from_secs(60)).context("the agent did not start within 60 seconds")?;
        Ok(Self { findings, stop: Some(stop), thread: Some(thread) })
    }

    /// Runs the agent until standard input ends: prints `up` when it has started, then its
    /// findings.
    pub fn serve(root: &Path, directory: &Path, audits: bool) -> Result<()> {
        let watch = Self::start_at(root, directory, audits)?;
        let mut out = std::io::stdout();
        writeln!(out, "up")?;
        let input = std::thread::spawn(|| std::io::stdin().lines().for_each(drop));
        while !input.is_finished() {
            for finding in watch.until(Instant::now() + POLL_INTERVAL, |_| false) {
                // The reader may have closed the pipe.
                let _ = writeln!(out, "{}{}", finding.text, if finding.killed { " (killed)" } else { "" });
            }
        }
        Ok(())
    }

    /// Collects findings until `enough` returns true for them, or until the deadline.
    pub fn until(
        &self,
        deadline: Instant,
        mut enough: impl FnMut(&[ReportedFinding]) -> bool,
    ) -> Vec<ReportedFinding> {
        let mut all = Vec::new();
        loop {
            while let Ok(finding) = self.findings.try_recv() {
                all.push(finding);
            }
            if enough(&all) || Instant::now() >= deadline {
                return all;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // The send fails if the agent has already ended.
        let _ = self.stop.take().map(|stop| stop.send(()));
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// One line about a share from an audit; figures in per cent of the GPU's time since the previous audit.
fn audit_line(share: &ShareUsage) -> String {
    let percent = |percent: Option<u32>| percent.map_or("-".to_owned(), |percent| percent.to_string());
    format!(
        "{AUDITED} {} {}: request {}, used {}, charged {}, throttled {} ms",
        share.sampled_at_ms,
        share.claim_uid,
        share.compute_request_percent,
        percent(share.compute_used_nvml_percent),
        percent(share.compute_used_percent),
        share.throttled_ms.unwrap_or(0)
    )
}

/// Changes the compute policy of a share, as the node daemon does when its class changes.
pub fn change(node: &Node, share: &Share, compute: Compute) -> Result<()> {
    let (_, policy) = Policy::decode(&std::fs::read(share.directory.join("policy"))?)?;
    let shares = Shares::new(&paths(node.sim.root(), node.path()));
    shares.write(&share.claim.clone().into(), &share.id.clone().into(), &Policy { compute, ..policy })?;
    Ok(())
}

/// The paths of a node. `/proc` is the machine's, because its processes run there. Without device
/// nodes or a populated `sys` below the driver's root (a real GPU driver), `/dev` and `/sys` are
/// the machine's too.
pub(crate) fn paths(root: &Path, directory: &Path) -> HostPaths {
    let within = |file: &str| if root.join(file).exists() { root } else { Path::new("/") };
    HostPaths {
        kubelet_root: directory.join("kubelet"),
        cdi_dir: directory.join("cdi"),
        dev_root: within("dev/nvidiactl").to_owned(),
        sys_root: within("sys/bus").join("sys"),
        driver_root: root.to_owned(),
        host_prefix: "/".into(),
        proc_root: "/proc".into(),
        process_root: "/proc".into(),
        state_dir: directory.join("state"),
        run_dir: directory.to_owned(),
    }
}
