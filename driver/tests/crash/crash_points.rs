//! Runs a scenario with a kill at each of its points.

use crate::harness::{DRIVER, Daemon, NODE, TestNode, WAIT_TIMEOUT};
use crate::node_state::NodeState;
use crate::supervisor::FakeSupervisor;
use divvy_fakes::kubelet::{CallError, Outcomes};
use divvy_sim::control::{Pattern, TraceLine, When};
use k8s_openapi::api::resource::v1::ResourceClaim;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// One step of a scenario.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    /// Prepares a claim with this name and these devices.
    Prepare(&'static str, &'static [&'static str]),
    /// Unprepares the claim, then deletes it.
    Release(&'static str),
    /// Reboots the node.
    Reboot,
    /// Starts the daemon on a node without any state of an earlier daemon.
    Install,
}

impl Step {
    /// Whether the step is a start of the daemon instead of a call of the kubelet.
    fn is_start(self) -> bool {
        matches!(self, Self::Reboot | Self::Install)
    }
}

/// A scenario starts on an idle node. `before` leads to the state in which `step` runs, and `after`
/// leads back to the idle node.
pub(crate) struct Scenario<'a> {
    pub(crate) gpus: &'a str,
    pub(crate) hold_off: &'a str,
    pub(crate) before: &'static [Step],
    pub(crate) step: Step,
    pub(crate) after: &'static [Step],
}

/// The point at which the daemon is killed.
#[derive(Clone, Debug)]
enum Point {
    /// Before or after the n-th NVML call with this name, counted from the start of the step.
    Nvml { call: String, nth: u64, when: When },
    /// Before or after the n-th file-system call that writes.
    File { nth: u64, when: When },
}

/// The kubelet's action after the restart.
#[derive(Clone, Copy, Debug)]
enum FollowUp {
    /// The kubelet retries the call until it succeeds.
    Retry,
    /// The kubelet unprepares the claim, which is then deleted.
    GiveUp,
    /// The claim is deleted and the kubelet sends no call.
    Forget,
}

/// The node states and NVML calls of an undisturbed run.
struct Baseline {
    idle: NodeState,
    before_step: NodeState,
    after_step: NodeState,
    calls: Vec<String>,
}

struct ScenarioRunner<'a> {
    scenario: Scenario<'a>,
    // Declared before `node`, so that the daemon is killed before the node is removed.
    daemon: Option<Daemon>,
    /// The agent lock of each GPU. While the test holds them, the daemon does not audit shares.
    agent_locks: Vec<std::fs::File>,
    _supervisor: FakeSupervisor,
    node: TestNode,
}

pub(crate) async fn kill_at_every_point(scenario: Scenario<'_>) {
    let node = TestNode::new(scenario.gpus).await;
    let mut runner = ScenarioRunner {
        scenario,
        daemon: None,
        agent_locks: Vec::new(),
        _supervisor: FakeSupervisor::start(&node.run_dir()),
        node,
    };
    runner.start();
    let baseline = runner.learn_baseline().await;
    let mut points = 0;
    for (point, follow_up) in runner.nvml_points(&baseline.calls) {
        let hit = runner.run_with_kill(&baseline, &point, follow_up).await;
        assert!(hit || !point.changes_hardware(), "{point:?} was not reached");
        points += usize::from(hit);
    }
    // The point after one call is the point before the next, so two sweeps try both follow-ups at
    // every point.
    for (when, follow_up) in [(When::Before, FollowUp::Retry), (When::After, runner.other_follow_up())] {
        let mut nth = 1;
        while runner.run_with_kill(&baseline, &Point::File { nth, when }, follow_up).await {
            nth += 1;
        }
        assert!(nth > 1, "the step writes no file");
        points += nth as usize - 1;
    }
    println!("{:?}: killed at {points} points", runner.scenario.step);
}

impl Point {
    fn changes_hardware(&self) -> bool {
        let verbs = ["Create", "Destroy", "SetMigMode", "SetComputeMode", "compute-policy"];
        matches!(self, Self::Nvml { call, .. } if verbs.iter().any(|verb| call.contains(verb)))
    }
}

impl ScenarioRunner<'_> {
    /// The follow-up other than a retry.
    fn other_follow_up(&self) -> FollowUp {
        match self.scenario.step {
            Step::Prepare(..) => FollowUp::GiveUp,
            Step::Release(_) => FollowUp::Forget,
            Step::Reboot | Step::Install => FollowUp::Retry,
        }
    }

    /// The points before and after each call of the trace. A call that only reads has no effect, so
    /// each side of it gets one follow-up. The reads of a daemon start are left out because there
    /// are many.
    fn nvml_points(&self, calls: &[String]) -> Vec<(Point, FollowUp)> {
        let mut seen = BTreeMap::<&str, u64>::new();
        let mut points = Vec::new();
        let follow_ups = [FollowUp::Retry, self.other_follow_up()];
        for (at, call) in calls.iter().enumerate() {
            let nth = seen.entry(call).or_default();
            *nth += 1;
            let point = |when| Point::Nvml { call: call.clone(), nth: *nth, when };
            if point(When::Before).changes_hardware() {
                for when in [When::Before, When::After] {
                    points.extend(follow_ups.map(|follow_up| (point(when), follow_up)));
                }
            } else if !self.scenario.step.is_start() {
                points.push((point(When::Before), follow_ups[at % 2]));
                points.push((point(When::After), follow_ups[(at + 1) % 2]));
            }
        }
        points
    }

    fn start(&mut self) {
        // The logs of earlier daemons would hide the relevant one.
        let _ = std::fs::remove_file(self.node.path("log"));
        let preload = std::env::current_exe().unwrap().parent().unwrap().join("libdivvy_crash.so");
        let watched_dirs = [self.node.state_dir(), self.node.cdi_dir(), self.node.run_dir()];
        let watched_dirs = std::env::join_paths(watched_dirs).unwrap();
        let config = self.node.write_long_timeslice_config();
        let flags = ["--mig-hold-off", self.scenario.hold_off, "--config", config.to_str().unwrap()];
        // Hold the agents' locks, so that the daemon does not audit shares at unpredictable times.
        self.agent_locks.clear();
        std::fs::create_dir_all(self.node.run_dir()).unwrap();
        for gpu in &self.node.sim.read().unwrap().gpus {
            let path = self.node.run_dir().join(format!("agent-{}.lock", gpu.uuid));
            let lock = std::fs::File::create(path).unwrap();
            lock.lock().unwrap();
            self.agent_locks.push(lock);
        }
        let mut command = self.node.command(&flags);
        command.env("LD_PRELOAD", preload);
        command.env("DIVVY_CRASH_CONTROL", self.control()).env("DIVVY_CRASH_UNDER", watched_dirs);
        self.daemon = Some(Daemon::spawn(command, &self.node.path("log")));
    }

    fn control(&self) -> PathBuf {
        self.node.path("crash-control")
    }

    /// Runs the scenario three times without a kill and records its states and NVML calls.
    async fn learn_baseline(&mut self) -> Baseline {
        self.node.kubelet.wait_registered(DRIVER, 1, WAIT_TIMEOUT).await.unwrap();
        // The first run creates files that stay, such as a GPU's lock file.
        for step in [self.scenario.before, &[self.scenario.step], self.scenario.after].concat() {
            self.run_until_done(step).await;
        }
        let idle = self.wait_until_stable().await;
        let before_step = self.run_steps(self.scenario.before).await;
        let after_step = self.run_steps(&[self.scenario.step]).await;
        self.run_steps(self.scenario.after).await;
        let mut baseline = Baseline { idle, before_step, after_step, calls: Vec::new() };
        let at = "without a kill";
        self.expect(&baseline.idle, at).await;
        for step in self.scenario.before {
            self.run_until_done(*step).await;
        }
        self.expect(&baseline.before_step, at).await;
        self.node.update_sim(|state| state.control.trace = true);
        self.run_until_done(self.scenario.step).await;
        self.expect(&baseline.after_step, at).await;
        self.node.update_sim(|state| state.control.trace = false);
        self.run_steps(self.scenario.after).await;
        let text = std::fs::read_to_string(self.node.sim.trace_path()).unwrap_or_default();
        let lines = text.lines().map(|line| serde_json::from_str::<TraceLine>(line).unwrap());
        // The other calls of nvidia-smi change nothing. The event thread is not part of the scenario.
        let daemon = self.daemon.as_ref().unwrap().pid();
        let is_relevant = |line: &TraceLine| {
            let of_daemon = line.pid == daemon && !line.call.starts_with("nvmlEventSet");
            of_daemon || line.call == "compute-policy"
        };
        baseline.calls = lines.filter(is_relevant).map(|line| line.call).collect();
        baseline
    }

    /// Runs these steps and returns the resulting state.
    async fn run_steps(&mut self, acts: &[Step]) -> NodeState {
        for step in acts {
            self.run_until_done(*step).await;
        }
        self.wait_until_stable().await
    }

    /// Runs the scenario with a kill at the point. Returns whether the point was reached.
    async fn run_with_kill(&mut self, baseline: &Baseline, point: &Point, follow_up: FollowUp) -> bool {
        let at = format!("{point:?}, then {follow_up:?}");
        for step in self.scenario.before {
            self.run_until_done(*step).await;
        }
        self.expect(&baseline.before_step, &at).await;
        let hit = self.run_until_point(point, baseline).await;
        if hit {
            self.kill();
        }
        self.disarm();
        let step = self.scenario.step;
        if hit {
            self.start();
        }
        match (follow_up, step) {
            (_, Step::Reboot | Step::Install) => self.expect(&baseline.after_step, &at).await,
            (FollowUp::Retry, _) => {
                self.run_until_done(step).await;
                self.expect(&baseline.after_step, &at).await;
            }
            (FollowUp::GiveUp, Step::Prepare(claim, _) | Step::Release(claim)) => {
                self.run_until_done(Step::Release(claim)).await;
            }
            (FollowUp::Forget, Step::Prepare(claim, _) | Step::Release(claim)) => {
                self.node.delete_by_force(&crate::harness::claim_ref(claim));
            }
        }
        for step in self.scenario.after {
            self.run_until_done(*step).await;
        }
        self.expect(&baseline.idle, &at).await;
        hit
    }

    /// Starts the step and waits until the daemon is at the point, or has completed the step.
    async fn run_until_point(&mut self, point: &Point, baseline: &Baseline) -> bool {
        if self.scenario.step.is_start() {
            self.stop(self.scenario.step);
        }
        match point {
            Point::Nvml { call, nth, when } => {
                self.node.update_sim(|state| state.add_hold(Pattern::new(call.as_str()), Some(*nth), *when))
            }
            Point::File { nth, when } => {
                let when = if *when == When::Before { "before" } else { "after" };
                std::fs::write(self.control(), format!("{nth} {when}\n")).unwrap();
            }
        }
        if self.scenario.step.is_start() {
            self.start();
        }
        let (node, step) = (&self.node, self.scenario.step);
        let daemon = self.daemon.as_mut().unwrap();
        let completed = async {
            // Without a connection, the kubelet has not started the call.
            let answer = loop {
                match call(node, step).await {
                    Err(Failure::NoAnswer(_)) => tokio::time::sleep(Duration::from_millis(5)).await,
                    answer => break answer,
                }
            };
            if let Err(Failure::Refused(error)) = answer {
                panic!("{point:?}: {error}");
            }
            while NodeState::read(node) != baseline.after_step {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let reached = async {
            while !daemon.has_exited() && node.sim.read().unwrap().control.held.is_empty() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let either = async {
            tokio::select! {
                biased;
                () = reached => true,
                () = completed => false,
            }
        };
        let hit = tokio::time::timeout(WAIT_TIMEOUT, either).await;
        hit.unwrap_or_else(|_| {
            panic!(
                "{point:?} was neither reached nor passed:\n{}",
                NodeState::read(node).diff(&baseline.after_step)
            )
        })
    }

    /// Kills the daemon and prepares the node for the start.
    fn stop(&mut self, step: Step) {
        self.kill();
        match step {
            Step::Reboot => {
                self.node.update_sim(divvy_sim::State::reboot);
                self.node.clear_run_dir();
            }
            _ => std::fs::remove_dir_all(self.node.state_dir()).unwrap(),
        }
    }

    fn kill(&mut self) {
        self.daemon.take().unwrap().kill();
    }

    fn disarm(&self) {
        // The file does not exist if an NVML call was held.
        let _ = std::fs::remove_file(self.control());
        self.node.clear_faults();
    }

    /// Runs the step as the kubelet does, with retries until it succeeds.
    async fn run_until_done(&mut self, step: Step) {
        if step.is_start() {
            self.stop(step);
            self.start();
        }
        let begun = Instant::now();
        while let Err(Failure::NoAnswer(error) | Failure::Refused(error)) = call(&self.node, step).await {
            assert!(begun.elapsed() < WAIT_TIMEOUT, "{step:?}: {error}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until the node has the wanted state.
    async fn expect(&self, wanted: &NodeState, at: &str) {
        let begun = Instant::now();
        loop {
            let node_state = NodeState::read(&self.node);
            if node_state == *wanted {
                return;
            }
            assert!(begun.elapsed() < WAIT_TIMEOUT, "{NODE}, {at}:\n{}", node_state.diff(wanted));
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Waits until the state has not changed for 500 ms, and returns it.
    async fn wait_until_stable(&self) -> NodeState {
        let mut last = NodeState::read(&self.node);
        let mut since = Instant::now();
        while since.elapsed() < Duration::from_millis(500) {
            tokio::time::sleep(Duration::from_millis(5)).await;
            let now = NodeState::read(&self.node);
            if now != last {
                (last, since) = (now, Instant::now());
            }
        }
        last
    }
}

/// A failed call of the kubelet.
enum Failure {
    /// The daemon has not answered.
    NoAnswer(String),
    Refused(String),
}

/// Sends one call of the kubelet.
async fn call(node: &TestNode, step: Step) -> Result<(), Failure> {
    match step {
        Step::Prepare(name, devices) => {
            let claim = node.claim(name, devices);
            first_error(node.kubelet.prepare(DRIVER, &[claim]).await)
        }
        Step::Release(name) => {
            let claim = crate::harness::claim_ref(name);
            first_error(node.kubelet.unprepare(DRIVER, &[claim]).await)?;
            node.api.delete::<ResourceClaim>("ns", name);
            Ok(())
        }
        // The daemon answers only after recovery, so any answer will do.
        Step::Reboot | Step::Install => {
            first_error(node.kubelet.unprepare(DRIVER, &[crate::harness::claim_ref("unknown")]).await)
        }
    }
}

fn first_error(outcomes: Result<Outcomes, CallError>) -> Result<(), Failure> {
    let outcomes = outcomes.map_err(|error| Failure::NoAnswer(error.to_string()))?;
    outcomes.into_values().try_for_each(|outcome| outcome.map(|_| ()).map_err(Failure::Refused))
}
