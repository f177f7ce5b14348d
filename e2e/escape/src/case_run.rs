//! One run of an isolation case: a fresh node, a container with a share, the attacking program, and the usage
//! that the simulated GPU reports at the end.

use crate::cdi::Prepared;
use crate::container::{Container, Recipe};
use crate::isolation_cases::{Device, Expectation, Gain, IsolationCase, Method, Volume};
use crate::node::{MIB, Node, Share};
use crate::programs::{self, Programs};
use crate::time;
use crate::watch::{ReportedFinding, Watch};
use anyhow::{Context, Result, bail, ensure};
use divvy_api::sharing::Injection;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How long a program may take to run its attack.
const ATTACK_TIMEOUT: Duration = Duration::from_secs(60);

/// The limit of the share, in bytes.
const LIMIT: u64 = 4096 * MIB;
/// The memory that each program tries to hold.
const GOAL_MIB: u64 = 8192;
/// The total that a share with over-commitment may hold: its claim, and managed memory.
const OVERCOMMIT_LIMIT: u64 = 12288 * MIB;

/// The overhead that the agent attributes to the GPU driver for processes without charges: four estimated
/// contexts, in bytes.
const DRIVER_OVERHEAD: u64 = 4 * 300 * MIB;

/// UIDs as in a cluster.
const CLAIM: &str = "2f1c7f5e-7a0b-4c57-9d3e-5a2f0c4b8e11";
const SHARE: &str = "b6a1d9c2-3f40-4e8a-8d17-0c9e5f7a2b33";

/// The claim of the neighbour, which stays within its limit.
const NEIGHBOUR: &str = "77a0b3c1-52de-4f0b-9a57-3d1c8e6f4420";
const NEIGHBOUR_LIMIT: u64 = 2048 * MIB;
const NEIGHBOUR_MIB: u64 = 1024;

impl Volume {
    /// Its mount point in the container.
    fn mount_point(self) -> &'static str {
        match self {
            Self::NoPreload => "/etc/ld.so.preload",
            Self::ForgedPage => "/run/divvy/mine",
        }
    }

    /// The manifest of the pod that mounts it.
    fn pod(self) -> String {
        let at = self.mount_point();
        format!(
            r#"{{"apiVersion": "v1", "kind": "Pod", "metadata": {{"name": "tenant"}}, "spec": {{
            "resourceClaims": [{{"name": "share", "resourceClaimName": "share"}}],
            "containers": [{{"name": "app", "resources": {{"claims": [{{"name": "share"}}]}},
                "volumeMounts": [{{"name": "mine", "mountPath": "{at}", "subPath": "file"}}]}}],
            "volumes": [{{"name": "mine", "configMap": {{"name": "mine"}}}}]}}}}"#
        )
    }

    /// The shell commands that mount it while the container is set up.
    fn script(self, node: &Node) -> Result<String> {
        Ok(match self {
            // Without a preload file there is nothing to hide.
            Self::NoPreload => {
                "if [ -e /mnt/etc/ld.so.preload ]; then mount --bind /dev/null /mnt/etc/ld.so.preload; fi\n"
                    .to_owned()
            }
            Self::ForgedPage => {
                let (from, to) = (node.forged()?, format!("/mnt{}/share", self.mount_point()));
                let from = from.to_str().context("the path is not UTF-8")?;
                format!("bind {from}/account {to}/account rw\nbind {from}/policy {to}/policy ro\n")
            }
        })
    }
}

/// The enforcement under test: the library in the container, and how it gets its limit.
#[derive(Clone, Debug)]
pub struct Enforcement {
    /// The library to preload.
    pub library: PathBuf,
    /// Environment variables that set the limit of another interposer; `{mib}` and `{bytes}` are
    /// replaced by the limit. Empty for Divvy's library, which has pages and admission.
    pub environment: Vec<(String, String)>,
}

impl Enforcement {
    /// Whether it is Divvy's own library.
    pub fn is_divvy(&self) -> bool {
        self.environment.is_empty()
    }

    /// Prepares a share with the libraries in the directory of the library to preload.
    pub fn prepare(&self, share: &Share, injection: Injection) -> Result<Prepared> {
        let libraries = self.library.parent().context("the library's path has no directory")?.to_owned();
        Ok(Prepared { share: share.clone(), libraries, injection })
    }
}

/// The outcome of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Usage stayed within the limit.
    LimitHeld,
    /// Usage is above the limit.
    Escaped,
    /// A program was killed during the attack.
    Killed,
    /// The attack cannot run on this machine, or not with this library; with the reason.
    Skipped(String),
}

/// A case that was run. Its processes live until it is dropped.
#[derive(Debug)]
pub struct CaseRun {
    // Declared before the node: the agent reads the node's files, so it must be dropped first.
    watch: Option<Watch>,
    pub node: Node,
    pub share: Option<Share>,
    pub outcome: Outcome,
    containers: Vec<Container>,
    programs: Vec<Child>,
    /// When all programs had started their attack.
    pub(crate) begun: Instant,
    /// Bytes of GPU memory that were used before the attack.
    used_before: u64,
    /// Processes that used the GPU before the attack.
    pub(crate) processes_before: BTreeSet<u32>,
    neighbour: Option<Child>,
}

impl CaseRun {
    /// Runs a case. Without `enforcement` there is no library, no page and no admission. With `watched` the
    /// node's agent runs.
    pub fn start(
        case: &IsolationCase,
        programs: &Programs,
        enforcement: Option<&Enforcement>,
        watched: bool,
    ) -> Result<Self> {
        let node = Node::for_device(case.device)?;
        programs.install(&node)?;
        if case.method == Method::VersionedDriver {
            programs.install_versioned_driver(&node)?;
        }
        let watch = if watched { Some(Watch::start(&node)?) } else { None };
        let mut run = Self {
            watch,
            node,
            share: None,
            outcome: Outcome::LimitHeld,
            containers: Vec::new(),
            programs: Vec::new(),
            begun: Instant::now(),
            used_before: 0,
            processes_before: BTreeSet::new(),
            neighbour: None,
        };
        if let Some(enforcement) = enforcement.filter(|_| watched && !case.alone) {
            run.start_neighbour(case, enforcement)?;
        }
        let mut recipe = Recipe { cgroup: case.device == Device::CgroupLimits, ..Recipe::default() };
        if case.injection == Injection::Shim && enforcement.is_some_and(|enforcement| !enforcement.is_divvy())
        {
            run.outcome = Outcome::Skipped("this library cannot replace the driver's".to_owned());
            return Ok(run);
        }
        if let Some(enforcement) = enforcement {
            if enforcement.is_divvy() {
                let [compute, _] = time::compute(case);
                let share = match case.over_commits {
                    true => run.node.over_committed_share(CLAIM, SHARE, LIMIT, OVERCOMMIT_LIMIT)?,
                    false => run.node.share_of(0, CLAIM, SHARE, LIMIT, compute)?,
                };
                match case.injection {
                    Injection::Preload => recipe.shares.push(share.clone()),
                    Injection::Shim => recipe.prepared.push(enforcement.prepare(&share, case.injection)?),
                }
                run.share = Some(share);
            }
            if case.injection == Injection::Preload {
                recipe.library = Some(enforcement.library.clone());
            }
            let expand = |text: &str| {
                text.replace("{mib}", &(LIMIT / MIB).to_string()).replace("{bytes}", &LIMIT.to_string())
            };
            recipe.environment =
                enforcement.environment.iter().map(|(name, value)| (name.clone(), expand(value))).collect();
        }
        if let Method::Volumes(volume) | Method::Unadmitted(volume) = case.method {
            recipe.volumes = volume.script(&run.node)?;
            let has_admission =
                enforcement.is_some_and(Enforcement::is_divvy) && case.method == Method::Volumes(volume);
            if has_admission && !admitted(&volume.pod())? {
                return Ok(run);
            }
        }
        let count = if case.method == Method::TwoContainers { 2 } else { 1 };
        let containers: Vec<Container> =
            (0..count).map(|_| Container::start(&run.node, &recipe)).collect::<Result<_>>()?;
        let commands: Vec<Command> =
            containers.iter().map(|container| run.command(case, container)).collect();
        run.containers.extend(containers);
        run.wait_for_limits()?;
        let mut first_lines = Vec::new();
        for command in commands {
            let (child, first_line) = run.spawn(command)?;
            run.programs.push(child);
            first_lines.push(first_line);
        }
        for first_line in first_lines {
            let line = receive(&first_line, case.name)?;
            match line.trim_end().split_once(' ') {
                Some(("held", _)) => {}
                Some(("skip", why)) => run.outcome = Outcome::Skipped(why.to_owned()),
                None if line.is_empty() && watched => run.outcome = Outcome::Killed,
                _ => bail!("{} printed {line:?}; {}", case.name, run.refusals()),
            }
        }
        run.begun = Instant::now();
        let gained = match case.gain {
            Gain::Time => run.gains_time(case)?,
            _ => run.gained(case)?,
        };
        if gained {
            run.outcome = Outcome::Escaped;
        }
        Ok(run)
    }

    /// Whether the attack holds its gain at this moment.
    pub fn gained(&self, case: &IsolationCase) -> Result<bool> {
        match case.gain {
            Gain::Memory => Ok(self.node.used() > LIMIT + self.used_before),
            Gain::Overhead => Ok(self.node.used() > LIMIT + DRIVER_OVERHEAD + self.used_before),
            // `LimitHeld` is about the average: at one instant a kernel may use the whole GPU.
            Gain::Time => {
                Ok(self.outcome != Outcome::LimitHeld && self.recent_part()? > time::GAIN_THRESHOLD)
            }
            Gain::Balance => match &self.share {
                Some(share) => Ok(share.balance()? == i64::MAX),
                // Without a page no time is counted.
                None => Ok(true),
            },
        }
    }

    /// Whether the gain is, or becomes, at most the bound of the case.
    pub fn is_bounded(&self, case: &IsolationCase) -> Result<bool> {
        match case.gain {
            Gain::Time => self.converges_to_bound(case),
            _ => Ok(self.node.used() <= OVERCOMMIT_LIMIT + self.used_before),
        }
    }

    /// Collects the findings of the agent until the expected one is there and the gain is gone, or until the
    /// timeout.
    pub fn findings(&self, case: &IsolationCase, timeout: Duration) -> Vec<ReportedFinding> {
        let Some(watch) = &self.watch else { return Vec::new() };
        let is_expected = |finding: &ReportedFinding| match case.expected {
            Expectation::Detected(kind) | Expectation::HeldByDriver(kind) => finding.kind == kind,
            Expectation::Prevented | Expectation::Bounded(_) => true,
        };
        // Memory is gained by the time the programs print their first line, time only afterwards.
        let since = if case.gain == Gain::Time { self.begun } else { Instant::now() };
        watch.until(since + timeout, |findings| {
            findings.iter().any(is_expected) && self.gained(case).is_ok_and(|gained| !gained)
        })
    }

    /// Whether the neighbour still runs.
    pub fn neighbour_lives(&mut self) -> Result<bool> {
        self.neighbour.as_mut().map_or(Ok(true), |neighbour| Ok(neighbour.try_wait()?.is_none()))
    }

    /// Starts a program with another share of the same GPU that stays within its limit.
    fn start_neighbour(&mut self, case: &IsolationCase, enforcement: &Enforcement) -> Result<()> {
        let [_, compute] = time::compute(case);
        let share = self.node.share_of(0, NEIGHBOUR, SHARE, NEIGHBOUR_LIMIT, compute)?;
        let (attack, held_mib) =
            if time::neighbour_is_busy(case) { ("time-work", 0) } else { ("plain", NEIGHBOUR_MIB) };
        let library = Some(enforcement.library.clone());
        let cgroup = case.device == Device::CgroupLimits;
        let recipe = Recipe { shares: vec![share], library, cgroup, ..Recipe::default() };
        let container = Container::start(&self.node, &recipe)?;
        let mut command = container.command(&self.node.programs().join("escape"));
        self.add_arguments(&mut command, attack, NEIGHBOUR_MIB);
        self.containers.push(container);
        let (child, first_line) = self.spawn(command)?;
        self.neighbour = Some(child);
        let line = receive(&first_line, "the neighbour")?;
        ensure!(
            line.trim_end() == format!("held {held_mib}"),
            "the neighbour printed {line:?}; {}",
            self.refusals()
        );
        self.used_before = self.node.used();
        self.processes_before = self.node.processes();
        Ok(())
    }

    /// Waits until the agent has set the limits of the containers' cgroups in the GPU driver. Memory that a
    /// container allocates before that stays allocated.
    fn wait_for_limits(&self) -> Result<()> {
        let begun = Instant::now();
        let cgroups = self.containers.iter().filter_map(|container| container.cgroup.as_ref());
        for cgroup in cgroups.filter(|_| self.watch.is_some()) {
            while !self.node.has_cgroup_limit(cgroup.directory())? {
                ensure!(begun.elapsed() < ATTACK_TIMEOUT, "the agent has set no limit for {}", cgroup.name());
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(())
    }

    /// The operations that were refused to the programs, as they printed them.
    pub fn refusals(&self) -> String {
        std::fs::read_to_string(self.node.path().join("refusals")).unwrap_or_default()
    }

    fn command(&self, case: &IsolationCase, container: &Container) -> Command {
        let programs = self.node.programs();
        let mut command = match case.method {
            Method::Static => container.command(&self.node.libraries().join("static")),
            Method::Raw => container.command(&programs.join("raw")),
            _ => container.command(&programs.join("escape")),
        };
        match case.method {
            Method::Static => command.arg(GOAL_MIB.to_string()),
            Method::Raw => command.args(["raw", &GOAL_MIB.to_string()]).arg(self.node.sim.root()),
            Method::Escape | Method::VersionedDriver => {
                self.add_arguments(&mut command, case.attack_name(), GOAL_MIB)
            }
            Method::TwoContainers | Method::Volumes(_) | Method::Unadmitted(_) => {
                self.add_arguments(&mut command, "plain", GOAL_MIB)
            }
        };
        command
    }

    fn add_arguments<'a>(&self, command: &'a mut Command, attack: &str, goal_mib: u64) -> &'a mut Command {
        command
            .args([attack, &goal_mib.to_string()])
            .arg(self.node.libcuda())
            .arg(programs::driver_copy(&self.node))
    }

    /// Starts a program; the receiver gets its first line of output.
    fn spawn(&self, mut command: Command) -> Result<(Child, Receiver<String>)> {
        let refusals = File::options().create(true).append(true).open(self.node.path().join("refusals"))?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(refusals);
        let mut child = command.spawn().context("cannot start nsenter")?;
        let stdout = child.stdout.take().context("no standard output")?;
        let (send, first_line) = mpsc::channel();
        // The thread ends with the program, at the latest when this run is dropped.
        std::thread::spawn(move || {
            let mut line = String::new();
            // The receiver may be gone after a timeout.
            let _ = BufReader::new(stdout).read_line(&mut line).map(|_| send.send(line));
        });
        Ok((child, first_line))
    }
}

/// The first line of a program's output; empty if it ended without one.
fn receive(first_line: &Receiver<String>, program: &str) -> Result<String> {
    match first_line.recv_timeout(ATTACK_TIMEOUT) {
        Ok(line) => Ok(line),
        Err(RecvTimeoutError::Timeout) => bail!("{program} printed nothing within {ATTACK_TIMEOUT:?}"),
        Err(RecvTimeoutError::Disconnected) => Ok(String::new()),
    }
}

impl Drop for CaseRun {
    fn drop(&mut self) {
        self.containers.clear();
        for program in self.programs.iter_mut().chain(&mut self.neighbour) {
            // They were killed with their containers.
            let _ = program.kill();
            let _ = program.wait();
        }
    }
}

/// Whether admission accepts a pod.
fn admitted(pod: &str) -> Result<bool> {
    let objects = divvy_api::check::Objects::default();
    let findings = divvy_api::check::object(pod.as_bytes(), &objects)?;
    Ok(!findings.iter().any(|finding| finding.severity == divvy_api::check::Severity::Error))
}
