//! One trick, played once: a fresh node, a container with a share, the program, and what the GPU says in the end.

use crate::cdi::Prepared;
use crate::container::{Container, Recipe};
use crate::node::{MIB, Node, Share};
use crate::programs::{self, Programs};
use crate::rows::{Gain, Must, On, Play, Row, Volume};
use crate::time;
use crate::watch::{Told, Watch};
use anyhow::{Context, Result, bail, ensure};
use divvy_api::sharing::Injection;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How long a program has to play it.
const PLAY: Duration = Duration::from_secs(60);

/// The share, and what each program tries to hold.
const LIMIT: u64 = 4096 * MIB;
const GOAL_MIB: u64 = 8192;
/// What a share that over-commits may hold: of that limit are its claim and what is won.
const IN_ALL: u64 = 12288 * MIB;

/// What passes for the GPU driver's own of processes that are charged nothing: four estimates of a context.
const OVERHEAD: u64 = 4 * 300 * MIB;

/// As they are in a cluster.
const CLAIM: &str = "2f1c7f5e-7a0b-4c57-9d3e-5a2f0c4b8e11";
const SHARE: &str = "b6a1d9c2-3f40-4e8a-8d17-0c9e5f7a2b33";

/// Of the neighbour, which is let be.
const NEIGHBOUR: &str = "77a0b3c1-52de-4f0b-9a57-3d1c8e6f4420";
const NEIGHBOUR_LIMIT: u64 = 2048 * MIB;
const NEIGHBOUR_MIB: u64 = 1024;

impl Volume {
    /// Where the pod's author has it mounted.
    fn at(self) -> &'static str {
        match self {
            Self::NoPreload => "/etc/ld.so.preload",
            Self::ForgedPage => "/run/divvy/mine",
        }
    }

    /// The pod that asks for it.
    fn pod(self) -> String {
        let at = self.at();
        format!(
            r#"{{"apiVersion": "v1", "kind": "Pod", "metadata": {{"name": "tenant"}}, "spec": {{
            "resourceClaims": [{{"name": "share", "resourceClaimName": "share"}}],
            "containers": [{{"name": "app", "resources": {{"claims": [{{"name": "share"}}]}},
                "volumeMounts": [{{"name": "mine", "mountPath": "{at}", "subPath": "file"}}]}}],
            "volumes": [{{"name": "mine", "configMap": {{"name": "mine"}}}}]}}}}"#
        )
    }

    /// Mounts it, as the root that makes the container.
    fn script(self, node: &Node) -> Result<String> {
        Ok(match self {
            // Where there is nothing to preload, nothing is to be hidden.
            Self::NoPreload => {
                "if [ -e /mnt/etc/ld.so.preload ]; then mount --bind /dev/null /mnt/etc/ld.so.preload; fi\n"
                    .to_owned()
            }
            Self::ForgedPage => {
                let (from, to) = (node.forged()?, format!("/mnt{}/share", self.at()));
                let from = from.to_str().context("a path that is no text")?;
                format!("bind {from}/account {to}/account rw\nbind {from}/policy {to}/policy ro\n")
            }
        })
    }
}

/// What keeps a limit: the library in the container, and how it is told the limit.
#[derive(Clone, Debug)]
pub struct Enforcement {
    /// The library to preload.
    pub library: PathBuf,
    /// Variables that tell another interposer the limit, where `{mib}` and `{bytes}` stand for it. None: it is Divvy's,
    /// with pages and with admission.
    pub environment: Vec<(String, String)>,
}

impl Enforcement {
    /// Whether it is Divvy's own.
    pub fn is_divvy(&self) -> bool {
        self.environment.is_empty()
    }

    /// A share that is prepared with the libraries that lie beside the one to preload.
    pub fn prepare(&self, share: &Share, injection: Injection) -> Result<Prepared> {
        let libraries = self.library.parent().context("a library without a directory")?.to_owned();
        Ok(Prepared { share: share.clone(), libraries, injection })
    }
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Never more than the share was used.
    Held,
    /// More than the share is used.
    Escaped,
    /// A program was ended while it tried.
    Ended,
    /// The trick cannot be tried on this machine, or not with this library.
    Cannot(String),
}

/// A trick that has been played; its processes live until this is dropped.
#[derive(Debug)]
pub struct Trial {
    // Before the node: it looks at its files.
    watch: Option<Watch>,
    pub node: Node,
    pub share: Option<Share>,
    pub outcome: Outcome,
    containers: Vec<Container>,
    programs: Vec<Child>,
    /// When they were under way.
    pub(crate) begun: Instant,
    /// What was used before the trick.
    others: u64,
    /// Processes that were there before it.
    pub(crate) before: BTreeSet<u32>,
    neighbour: Option<Child>,
}

impl Trial {
    /// Plays a row; without enforcement there is no library, no page and no admission, and with `watched` the node's
    /// agent is at work.
    pub fn play(
        row: &Row,
        programs: &Programs,
        enforcement: Option<&Enforcement>,
        watched: bool,
    ) -> Result<Self> {
        let node = Node::of(row.on)?;
        programs.install(&node)?;
        if row.play == Play::Versioned {
            programs.give_versions(&node)?;
        }
        let watch = if watched { Some(Watch::start(&node)?) } else { None };
        let mut trial = Self {
            watch,
            node,
            share: None,
            outcome: Outcome::Held,
            containers: Vec::new(),
            programs: Vec::new(),
            begun: Instant::now(),
            others: 0,
            before: BTreeSet::new(),
            neighbour: None,
        };
        if let Some(enforcement) = enforcement.filter(|_| watched && !row.alone) {
            trial.neighbour(row, enforcement)?;
        }
        let mut recipe = Recipe { cgroup: row.on == On::Limiting, ..Recipe::default() };
        if row.injection == Injection::Shim && enforcement.is_some_and(|by| !by.is_divvy()) {
            trial.outcome = Outcome::Cannot("it is not made to stand in the driver's place".to_owned());
            return Ok(trial);
        }
        if let Some(enforcement) = enforcement {
            if enforcement.is_divvy() {
                let [compute, _] = time::compute(row);
                let share = match row.over_commits {
                    true => trial.node.over_committed(CLAIM, SHARE, LIMIT, IN_ALL)?,
                    false => trial.node.share_of(0, CLAIM, SHARE, LIMIT, compute)?,
                };
                match row.injection {
                    Injection::Preload => recipe.shares.push(share.clone()),
                    Injection::Shim => recipe.prepared.push(enforcement.prepare(&share, row.injection)?),
                }
                trial.share = Some(share);
            }
            if row.injection == Injection::Preload {
                recipe.library = Some(enforcement.library.clone());
            }
            let told = |text: &str| {
                text.replace("{mib}", &(LIMIT / MIB).to_string()).replace("{bytes}", &LIMIT.to_string())
            };
            recipe.environment =
                enforcement.environment.iter().map(|(name, value)| (name.clone(), told(value))).collect();
        }
        if let Play::Volumes(volume) | Play::Unadmitted(volume) = row.play {
            recipe.volumes = volume.script(&trial.node)?;
            let is_asked =
                enforcement.is_some_and(Enforcement::is_divvy) && row.play == Play::Volumes(volume);
            if is_asked && !admitted(&volume.pod())? {
                return Ok(trial);
            }
        }
        let count = if row.play == Play::TwoContainers { 2 } else { 1 };
        let containers: Vec<Container> =
            (0..count).map(|_| Container::start(&trial.node, &recipe)).collect::<Result<_>>()?;
        let commands: Vec<Command> =
            containers.iter().map(|container| trial.command(row, container)).collect();
        trial.containers.extend(containers);
        trial.wait_for_limits()?;
        let mut all = Vec::new();
        for command in commands {
            let (child, said) = trial.start(command)?;
            trial.programs.push(child);
            all.push(said);
        }
        for said in all {
            let line = line(&said, row.name)?;
            match line.trim_end().split_once(' ') {
                Some(("held", _)) => {}
                Some(("cannot", why)) => trial.outcome = Outcome::Cannot(why.to_owned()),
                None if line.is_empty() && watched => trial.outcome = Outcome::Ended,
                _ => bail!("{} said {line:?}; {}", row.name, trial.refusals()),
            }
        }
        trial.begun = Instant::now();
        let gained = match row.gain {
            Gain::Time => trial.takes_time(row)?,
            _ => trial.gained(row)?,
        };
        if gained {
            trial.outcome = Outcome::Escaped;
        }
        Ok(trial)
    }

    /// Whether the trick has won, at this moment.
    pub fn gained(&self, row: &Row) -> Result<bool> {
        match row.gain {
            Gain::Memory => Ok(self.node.used() > LIMIT + self.others),
            Gain::Overhead => Ok(self.node.used() > LIMIT + OVERHEAD + self.others),
            // Held is what it was on average: in an instant a kernel may be all.
            Gain::Time => Ok(self.outcome != Outcome::Held && self.has_lately()? > time::TOO_MUCH),
            Gain::Balance => match &self.share {
                Some(share) => Ok(share.balance()? == i64::MAX),
                // Without a page nothing is counted at all.
                None => Ok(true),
            },
        }
    }

    /// Whether what was won is, or comes to be, no more than the bound of the row.
    pub fn is_bounded(&self, row: &Row) -> Result<bool> {
        match row.gain {
            Gain::Time => self.comes_to_its_turns(row),
            _ => Ok(self.node.used() <= IN_ALL + self.others),
        }
    }

    /// What the agent finds, until it is what it should be and nothing is won any more, or the time has passed.
    pub fn found(&self, row: &Row, within: Duration) -> Vec<Told> {
        let Some(watch) = &self.watch else { return Vec::new() };
        let expected = |told: &Told| match row.must {
            Must::BeDetected(what) | Must::BeHeld(what) => told.kind == what,
            Must::BePrevented | Must::BeNamed(_) => true,
        };
        // What is about memory is won when the programs have said so.
        let since = if row.gain == Gain::Time { self.begun } else { Instant::now() };
        watch.until(since + within, |told| {
            told.iter().any(expected) && self.gained(row).is_ok_and(|gained| !gained)
        })
    }

    /// Whether the neighbour goes on undisturbed.
    pub fn neighbour_lives(&mut self) -> Result<bool> {
        self.neighbour.as_mut().map_or(Ok(true), |neighbour| Ok(neighbour.try_wait()?.is_none()))
    }

    /// Somebody else with a share of the same GPU, who keeps within it.
    fn neighbour(&mut self, row: &Row, enforcement: &Enforcement) -> Result<()> {
        let [_, compute] = time::compute(row);
        let share = self.node.share_of(0, NEIGHBOUR, SHARE, NEIGHBOUR_LIMIT, compute)?;
        let (plays, holds) =
            if time::works_beside(row) { ("time-work", 0) } else { ("plain", NEIGHBOUR_MIB) };
        let library = Some(enforcement.library.clone());
        let cgroup = row.on == On::Limiting;
        let recipe = Recipe { shares: vec![share], library, cgroup, ..Recipe::default() };
        let container = Container::start(&self.node, &recipe)?;
        let mut command = container.command(&self.node.programs().join("escape"));
        self.tell(&mut command, plays, NEIGHBOUR_MIB);
        self.containers.push(container);
        let (child, said) = self.start(command)?;
        self.neighbour = Some(child);
        let line = line(&said, "the neighbour")?;
        ensure!(
            line.trim_end() == format!("held {holds}"),
            "the neighbour said {line:?}; {}",
            self.refusals()
        );
        self.others = self.node.used();
        self.before = self.node.processes();
        Ok(())
    }

    /// Until the agent has had the GPU driver keep the limits of the containers' cgroups: what they have before, they keep.
    fn wait_for_limits(&self) -> Result<()> {
        let begun = Instant::now();
        let cgroups = self.containers.iter().filter_map(|container| container.cgroup.as_ref());
        for cgroup in cgroups.filter(|_| self.watch.is_some()) {
            while !self.node.limits(cgroup.directory())? {
                ensure!(begun.elapsed() < PLAY, "the agent has {} not limited", cgroup.name());
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(())
    }

    /// What the programs say was refused to them.
    pub fn refusals(&self) -> String {
        std::fs::read_to_string(self.node.path().join("refusals")).unwrap_or_default()
    }

    fn command(&self, row: &Row, container: &Container) -> Command {
        let programs = self.node.programs();
        let mut command = match row.play {
            Play::Static => container.command(&self.node.libraries().join("static")),
            Play::Raw => container.command(&programs.join("raw")),
            _ => container.command(&programs.join("escape")),
        };
        match row.play {
            Play::Static => command.arg(GOAL_MIB.to_string()),
            Play::Raw => command.args(["raw", &GOAL_MIB.to_string()]).arg(self.node.sim.root()),
            Play::Escape | Play::Versioned => self.tell(&mut command, row.word(), GOAL_MIB),
            Play::TwoContainers | Play::Volumes(_) | Play::Unadmitted(_) => {
                self.tell(&mut command, "plain", GOAL_MIB)
            }
        };
        command
    }

    fn tell<'a>(&self, command: &'a mut Command, row: &str, goal: u64) -> &'a mut Command {
        command.args([row, &goal.to_string()]).arg(self.node.libcuda()).arg(programs::copy(&self.node))
    }

    /// Starts a program, whose first line comes when it is said.
    fn start(&self, mut command: Command) -> Result<(Child, Receiver<String>)> {
        let refusals = File::options().create(true).append(true).open(self.node.path().join("refusals"))?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(refusals);
        let mut child = command.spawn().context("cannot start nsenter")?;
        let stdout = child.stdout.take().context("no standard output")?;
        let (send, said) = mpsc::channel();
        // It ends with the program, at the latest when the trial is dropped.
        std::thread::spawn(move || {
            let mut line = String::new();
            // Whoever waits may have given up.
            let _ = BufReader::new(stdout).read_line(&mut line).map(|_| send.send(line));
        });
        Ok((child, said))
    }
}

/// The line; nothing of a program that has ended without one.
fn line(said: &Receiver<String>, who: &str) -> Result<String> {
    match said.recv_timeout(PLAY) {
        Ok(line) => Ok(line),
        Err(RecvTimeoutError::Timeout) => bail!("{who} does not end"),
        Err(RecvTimeoutError::Disconnected) => Ok(String::new()),
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        self.containers.clear();
        for program in self.programs.iter_mut().chain(&mut self.neighbour) {
            // They died with their containers.
            let _ = program.kill();
            let _ = program.wait();
        }
    }
}

/// Whether admission lets a pod in.
fn admitted(pod: &str) -> Result<bool> {
    let world = divvy_api::check::Objects::default();
    let findings = divvy_api::check::object(pod.as_bytes(), &world)?;
    Ok(!findings.iter().any(|finding| finding.severity == divvy_api::check::Severity::Error))
}
