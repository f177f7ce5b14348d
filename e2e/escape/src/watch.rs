//! The node daemon's agent, alone, over the simulated node: it sees the pages, NVML and `/proc`, and nothing of the
//! suite. What it does, it does by its defaults.

use crate::node::{Node, Share};
use anyhow::{Context, Result};
use divvy_api::top::ShareNow;
use divvy_driver::agent::{Agent, Done, Report, Response};
use divvy_driver::gpus::{Gpus, GpusOptions};
use divvy_driver::paths::HostPaths;
use divvy_driver::shares::Shares;
use divvy_pages::{Compute, Policy};
use std::io::Write;
use std::path::Path;
use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Between two looks at whether it is still wanted.
const PAUSE: Duration = Duration::from_millis(200);

/// What the lines of an audit are called.
const AUDITED: &str = "audited";

/// A running agent; it ends when this is dropped.
#[derive(Debug)]
pub struct Watch {
    told: Receiver<Told>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// A finding of the agent's.
#[derive(Clone, Debug)]
pub struct Told {
    /// Its sort.
    pub kind: &'static str,
    /// In words.
    pub text: String,
    /// It ended the process.
    pub ended: bool,
}

impl Watch {
    pub fn start(node: &Node) -> Result<Self> {
        Self::start_at(node.sim.root(), node.path(), false)
    }

    /// The same over a node of another process, by the root of its driver and its directory; `audits` are told too, in
    /// a line for each share.
    pub fn start_at(root: &Path, directory: &Path, audits: bool) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (send, told) = mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let (ready, up) = mpsc::channel();
        let paths = paths(root, directory);
        let thread = std::thread::spawn(move || {
            runtime.block_on(async {
                let gpus = Gpus::start(GpusOptions::new(&paths)).await;
                let (agent, mut reports) = Agent::new(gpus.clone(), &paths, Response::default());
                // Whoever waits for it may have given up.
                let _ = ready.send(());
                let tell = async {
                    while let Some(report) = reports.recv().await {
                        match report {
                            Report::Found { finding, done } => {
                                let (kind, ended) = (finding.kind.name(), done == Done::Ended);
                                let _ = send.send(Told { kind, text: finding.to_string(), ended });
                            }
                            Report::Audited { shares, .. } if audits => {
                                for share in &shares {
                                    let _ =
                                        send.send(Told { kind: AUDITED, text: audited(share), ended: false });
                                }
                            }
                            _ => {}
                        }
                    }
                };
                tokio::select! {
                    () = agent.run() => {}
                    () = tell => {}
                    _ = stopped => {}
                }
                gpus.shutdown().await;
            });
        });
        up.recv_timeout(Duration::from_secs(60)).context("the agent does not start")?;
        Ok(Self { told, stop: Some(stop), thread: Some(thread) })
    }

    /// Is that agent until standard input ends: says `up`, and then what it finds.
    pub fn serve(root: &Path, directory: &Path, audits: bool) -> Result<()> {
        let watch = Self::start_at(root, directory, audits)?;
        let mut out = std::io::stdout();
        writeln!(out, "up")?;
        let input = std::thread::spawn(|| std::io::stdin().lines().for_each(drop));
        while !input.is_finished() {
            for told in watch.until(Instant::now() + PAUSE, |_| false) {
                // Whoever started it may have heard enough.
                let _ = writeln!(out, "{}{}", told.text, if told.ended { " (ended)" } else { "" });
            }
        }
        Ok(())
    }

    /// Findings until `enough`, or until the time has passed.
    pub fn until(&self, deadline: Instant, mut enough: impl FnMut(&[Told]) -> bool) -> Vec<Told> {
        let mut all = Vec::new();
        loop {
            while let Ok(told) = self.told.try_recv() {
                all.push(told);
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
        // It has ended already if nobody listens.
        let _ = self.stop.take().map(|stop| stop.send(()));
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// What an audit says of a share, in per cent of the GPU's time since the one before.
fn audited(share: &ShareNow) -> String {
    let percent = |percent: Option<u32>| percent.map_or("-".to_owned(), |percent| percent.to_string());
    format!(
        "{AUDITED} {} {}: guarantee {}, had {}, charged {}, waited {} ms",
        share.at_ms,
        share.claim_uid,
        share.guarantee_percent,
        percent(share.busy_percent),
        percent(share.charged_percent),
        share.throttled_ms.unwrap_or(0)
    )
}

/// Has the policy of a share say that of compute time, as the node daemon does when a class changes.
pub fn change(node: &Node, share: &Share, compute: Compute) -> Result<()> {
    let (_, policy) = Policy::decode(&std::fs::read(share.directory.join("policy"))?)?;
    let shares = Shares::new(&paths(node.sim.root(), node.path()));
    shares.write(&share.claim.clone().into(), &share.id.clone().into(), &Policy { compute, ..policy })?;
    Ok(())
}

/// A node's paths, of which `/proc` is the machine's: there its processes are. A real GPU driver's root may have no
/// device nodes, and neither a `sys` with anything in it.
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
