//! Walks a path with a kill at each of its points.

use crate::harness::{DRIVER, Daemon, NODE, PATIENCE, World};
use crate::keeper::FakeKeeper;
use crate::left::Left;
use divvy_fakes::kubelet::{CallError, Outcomes};
use divvy_sim::control::{Pattern, TraceLine, When};
use k8s_openapi::api::resource::v1::ResourceClaim;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// One thing that happens to the node.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Act {
    /// A claim of that name with these devices is prepared.
    Prepare(&'static str, &'static [&'static str]),
    /// The claim is unprepared, then deleted.
    Release(&'static str),
    /// The machine boots.
    Reboot,
    /// The daemon starts on a node that it has never seen.
    Install,
}

impl Act {
    /// Whether it is the daemon's start, and not a call of the kubelet.
    fn is_start(self) -> bool {
        matches!(self, Self::Reboot | Self::Install)
    }
}

/// From rest through `before` to where `act` begins, and through `after` back to rest.
pub(crate) struct Path<'a> {
    pub(crate) gpus: &'a str,
    pub(crate) hold_off: &'a str,
    pub(crate) before: &'static [Act],
    pub(crate) act: Act,
    pub(crate) after: &'static [Act],
}

/// Where the daemon is stopped.
#[derive(Clone, Debug)]
enum Point {
    /// Around the n-th call of that name, from the act's begin.
    Nvml { call: String, nth: u64, when: When },
    /// Around the n-th file-system call that writes.
    File { nth: u64, when: When },
}

/// What the kubelet does after the restart.
#[derive(Clone, Copy, Debug)]
enum Then {
    /// It asks again until it is answered.
    Retry,
    /// The claim is deleted and unprepared.
    GiveUp,
    /// The claim is deleted and the kubelet has forgotten it.
    Forget,
}

/// What an undisturbed walk passes.
struct Known {
    rest: Left,
    began: Left,
    ended: Left,
    calls: Vec<String>,
}

struct Walker<'a> {
    path: Path<'a>,
    // Before the world, which is removed last.
    daemon: Option<Daemon>,
    /// The locks of agents that audit shares, of each GPU.
    audit: Vec<std::fs::File>,
    _keeper: FakeKeeper,
    world: World,
}

pub(crate) async fn walk(path: Path<'_>) {
    let world = World::up(path.gpus).await;
    let mut walker =
        Walker { path, daemon: None, audit: Vec::new(), _keeper: FakeKeeper::start(&world.run_dir()), world };
    walker.start();
    let known = walker.undisturbed().await;
    let mut points = 0;
    for (point, then) in walker.nvml_points(&known.calls) {
        let hit = walker.with(&known, &point, then).await;
        assert!(hit || !point.changes_hardware(), "{point:?} was not reached");
        points += usize::from(hit);
    }
    // After one call is before the next, so two sweeps make both endings meet every gap.
    for (when, then) in [(When::Before, Then::Retry), (When::After, walker.other_ending())] {
        let mut nth = 1;
        while walker.with(&known, &Point::File { nth, when }, then).await {
            nth += 1;
        }
        assert!(nth > 1, "the act writes nothing");
        points += nth as usize - 1;
    }
    println!("{:?}: killed at {points} points", walker.path.act);
}

impl Point {
    fn changes_hardware(&self) -> bool {
        let verbs = ["Create", "Destroy", "SetMigMode", "SetComputeMode", "compute-policy"];
        matches!(self, Self::Nvml { call, .. } if verbs.iter().any(|verb| call.contains(verb)))
    }
}

impl Walker<'_> {
    /// What else than asking again may follow.
    fn other_ending(&self) -> Then {
        match self.path.act {
            Act::Prepare(..) => Then::GiveUp,
            Act::Release(_) => Then::Forget,
            Act::Reboot | Act::Install => Then::Retry,
        }
    }

    /// Around each call of the trace. One that only reads has no effect, so each
    /// side of it gets one ending; what a start reads is left out, it is much.
    fn nvml_points(&self, calls: &[String]) -> Vec<(Point, Then)> {
        let mut seen = BTreeMap::<&str, u64>::new();
        let mut points = Vec::new();
        let endings = [Then::Retry, self.other_ending()];
        for (at, call) in calls.iter().enumerate() {
            let nth = seen.entry(call).or_default();
            *nth += 1;
            let point = |when| Point::Nvml { call: call.clone(), nth: *nth, when };
            if point(When::Before).changes_hardware() {
                for when in [When::Before, When::After] {
                    points.extend(endings.map(|then| (point(when), then)));
                }
            } else if !self.path.act.is_start() {
                points.push((point(When::Before), endings[at % 2]));
                points.push((point(When::After), endings[(at + 1) % 2]));
            }
        }
        points
    }

    fn start(&mut self) {
        // What earlier daemons said would bury what matters.
        let _ = std::fs::remove_file(self.world.path("log"));
        let preload = std::env::current_exe().unwrap().parent().unwrap().join("libdivvy_crash.so");
        let under = [self.world.state_dir(), self.world.cdi_dir(), self.world.run_dir()];
        let under = std::env::join_paths(under).unwrap();
        let config = self.world.long_turns();
        let flags = ["--mig-hold-off", self.path.hold_off, "--config", config.to_str().unwrap()];
        // To the daemon another audits shares: when it does what is no matter of the path.
        self.audit.clear();
        std::fs::create_dir_all(self.world.run_dir()).unwrap();
        for gpu in &self.world.sim.read().unwrap().gpus {
            let path = self.world.run_dir().join(format!("agent-{}.lock", gpu.uuid));
            let lock = std::fs::File::create(path).unwrap();
            lock.lock().unwrap();
            self.audit.push(lock);
        }
        let mut command = self.world.command(&flags);
        command.env("LD_PRELOAD", preload);
        command.env("DIVVY_CRASH_CONTROL", self.control()).env("DIVVY_CRASH_UNDER", under);
        self.daemon = Some(Daemon::spawn(command, &self.world.path("log")));
    }

    fn control(&self) -> PathBuf {
        self.world.path("crash-control")
    }

    /// Walks the path three times, and learns it.
    async fn undisturbed(&mut self) -> Known {
        self.world.kubelet.wait_registered(DRIVER, 1, PATIENCE).await.unwrap();
        // Once for what is made once and stays, such as a GPU's lock file.
        for act in [self.path.before, &[self.path.act], self.path.after].concat() {
            self.until_done(act).await;
        }
        let rest = self.quiet().await;
        let began = self.all(self.path.before).await;
        let ended = self.all(&[self.path.act]).await;
        self.all(self.path.after).await;
        let mut known = Known { rest, began, ended, calls: Vec::new() };
        let at = "walking without a kill";
        self.expect(&known.rest, at).await;
        for act in self.path.before {
            self.until_done(*act).await;
        }
        self.expect(&known.began, at).await;
        self.world.change(|state| state.control.trace = true);
        self.until_done(self.path.act).await;
        self.expect(&known.ended, at).await;
        self.world.change(|state| state.control.trace = false);
        self.all(self.path.after).await;
        let text = std::fs::read_to_string(self.world.sim.trace_path()).unwrap_or_default();
        let lines = text.lines().map(|line| serde_json::from_str::<TraceLine>(line).unwrap());
        // What nvidia-smi calls for itself changes nothing, and the thread that
        // waits for events is on no path.
        let daemon = self.daemon.as_ref().unwrap().pid();
        let on_path = |line: &TraceLine| {
            let own = line.pid == daemon && !line.call.starts_with("nvmlEventSet");
            own || line.call == "compute-policy"
        };
        known.calls = lines.filter(on_path).map(|line| line.call).collect();
        known
    }

    /// Where these acts lead.
    async fn all(&mut self, acts: &[Act]) -> Left {
        for act in acts {
            self.until_done(*act).await;
        }
        self.quiet().await
    }

    /// Walks with a kill; whether the point was reached.
    async fn with(&mut self, known: &Known, point: &Point, then: Then) -> bool {
        let at = format!("{point:?}, then {then:?}");
        for act in self.path.before {
            self.until_done(*act).await;
        }
        self.expect(&known.began, &at).await;
        let hit = self.act_until(point, known).await;
        if hit {
            self.kill();
        }
        self.disarm();
        let act = self.path.act;
        if hit {
            self.start();
        }
        match (then, act) {
            (_, Act::Reboot | Act::Install) => self.expect(&known.ended, &at).await,
            (Then::Retry, _) => {
                self.until_done(act).await;
                self.expect(&known.ended, &at).await;
            }
            (Then::GiveUp, Act::Prepare(claim, _) | Act::Release(claim)) => {
                self.until_done(Act::Release(claim)).await;
            }
            (Then::Forget, Act::Prepare(claim, _) | Act::Release(claim)) => {
                self.world.api.delete::<ResourceClaim>("ns", claim);
            }
        }
        for act in self.path.after {
            self.until_done(*act).await;
        }
        self.expect(&known.rest, &at).await;
        hit
    }

    /// Begins the act and waits until the daemon is at the point, or has passed it by.
    async fn act_until(&mut self, point: &Point, known: &Known) -> bool {
        if self.path.act.is_start() {
            self.stop(self.path.act);
        }
        match point {
            Point::Nvml { call, nth, when } => {
                self.world.change(|state| state.add_hold(Pattern::new(call.as_str()), Some(*nth), *when))
            }
            Point::File { nth, when } => {
                let when = if *when == When::Before { "before" } else { "after" };
                std::fs::write(self.control(), format!("{nth} {when}\n")).unwrap();
            }
        }
        if self.path.act.is_start() {
            self.start();
        }
        let (world, act) = (&self.world, self.path.act);
        let daemon = self.daemon.as_mut().unwrap();
        let walked = async {
            // A kubelet that has no connection yet has not begun.
            let answer = loop {
                match call(world, act).await {
                    Err(Failure::Unheard(_)) => tokio::time::sleep(Duration::from_millis(5)).await,
                    answer => break answer,
                }
            };
            if let Err(Failure::Refused(error)) = answer {
                panic!("{point:?}: {error}");
            }
            while Left::on(world) != known.ended {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let reached = async {
            while !daemon.has_ended() && world.sim.read().unwrap().control.held.is_empty() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let either = async {
            tokio::select! {
                biased;
                () = reached => true,
                () = walked => false,
            }
        };
        let hit = tokio::time::timeout(PATIENCE, either).await;
        hit.unwrap_or_else(|_| {
            panic!("{point:?} is neither reached nor passed:\n{}", Left::on(world).differs(&known.ended))
        })
    }

    /// What comes before such a start.
    fn stop(&mut self, act: Act) {
        self.kill();
        match act {
            Act::Reboot => {
                self.world.change(divvy_sim::State::reboot);
                self.world.clear_run_dir();
            }
            _ => std::fs::remove_dir_all(self.world.state_dir()).unwrap(),
        }
    }

    fn kill(&mut self) {
        self.daemon.take().unwrap().kill();
    }

    fn disarm(&self) {
        // There is none where an NVML call was held.
        let _ = std::fs::remove_file(self.control());
        self.world.release();
    }

    /// Does it as the kubelet does: again and again until it is done.
    async fn until_done(&mut self, act: Act) {
        if act.is_start() {
            self.stop(act);
            self.start();
        }
        let begun = Instant::now();
        while let Err(Failure::Unheard(why) | Failure::Refused(why)) = call(&self.world, act).await {
            assert!(begun.elapsed() < PATIENCE, "{act:?}: {why}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits for what the daemon does by itself.
    async fn expect(&self, wanted: &Left, at: &str) {
        let begun = Instant::now();
        loop {
            let left = Left::on(&self.world);
            if left == *wanted {
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "{NODE}, {at}:\n{}", left.differs(wanted));
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// What is left once nothing changes any more.
    async fn quiet(&self) -> Left {
        let mut last = Left::on(&self.world);
        let mut since = Instant::now();
        while since.elapsed() < Duration::from_millis(500) {
            tokio::time::sleep(Duration::from_millis(5)).await;
            let now = Left::on(&self.world);
            if now != last {
                (last, since) = (now, Instant::now());
            }
        }
        last
    }
}

/// Why a call of the kubelet came to nothing.
enum Failure {
    /// Nobody answered.
    Unheard(String),
    Refused(String),
}

/// One call of the kubelet.
async fn call(world: &World, act: Act) -> Result<(), Failure> {
    match act {
        Act::Prepare(name, devices) => {
            let claim = world.claim(name, devices);
            one(world.kubelet.prepare(DRIVER, &[claim]).await)
        }
        Act::Release(name) => {
            let claim = crate::harness::reference(name);
            one(world.kubelet.unprepare(DRIVER, &[claim]).await)?;
            world.api.delete::<ResourceClaim>("ns", name);
            Ok(())
        }
        // The daemon listens when it has recovered.
        Act::Reboot | Act::Install => {
            one(world.kubelet.unprepare(DRIVER, &[crate::harness::reference("nobody")]).await)
        }
    }
}

fn one(outcomes: Result<Outcomes, CallError>) -> Result<(), Failure> {
    let outcomes = outcomes.map_err(|error| Failure::Unheard(error.to_string()))?;
    outcomes.into_values().try_for_each(|outcome| outcome.map(|_| ()).map_err(Failure::Refused))
}
