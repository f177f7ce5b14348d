//! Attacks on compute time: the policies of the share and its neighbour, and how the gain is measured.
//!
//! Measured is the time of all processes that the attack started, read from the simulated GPU's
//! state once they run. The agent throttles or kills an attacker soon, so the gain is measured in
//! short intervals.

use crate::case_run::CaseRun;
use crate::isolation_cases::{ComputeSetup, Expectation, Gain, IsolationCase};
use crate::node::Compute;
use anyhow::Result;
use std::time::{Duration, Instant};

/// The share's ceiling, in per cent of the GPU.
const CEILING_PERCENT: u32 = 30;
/// The ceiling of a busy neighbour, in per cent of the GPU.
const NEIGHBOUR_CEILING_PERCENT: u32 = 2 * CEILING_PERCENT;
/// The tolerance of the node's agent, as a part of the GPU: five points, or a fifth of the ceiling.
const TOLERANCE: f64 = 0.06;
/// A part of the GPU above this is a gain. It is also more than the share is granted in the setups
/// without a ceiling.
pub(crate) const GAIN_THRESHOLD: f64 = CEILING_PERCENT as f64 / 100.0 + TOLERANCE;
/// The part that each of two busy processes gets by the GPU driver's time slices.
const TIME_SLICE_BOUND: f64 = 0.5 + TOLERANCE;
/// The bound beside a busy neighbour that has a ceiling. Its kernels look up to twice as long as they are,
/// because the GPU's time slices alternate, and the agent cannot see the time that it loses. So it gets at
/// least half of its ceiling.
const BUSY_NEIGHBOUR_BOUND: f64 = 1.0 - NEIGHBOUR_CEILING_PERCENT as f64 / 200.0 + TOLERANCE;
/// The agent reads the usage once a second, and corrects a share's shortfall within this time.
const CORRECTION_TIMEOUT: Duration = Duration::from_secs(20);
/// How long the programs run before the measurement starts.
const WARM_UP: Duration = Duration::from_secs(2);
const MEASUREMENT: Duration = Duration::from_secs(3);
/// The agent kills detected attackers soon, so their gain is measured in intervals of this length.
const DETECTION_INTERVAL: Duration = Duration::from_millis(500);

/// Whether the neighbour demands all the time that it can get.
pub(crate) fn neighbour_is_busy(case: &IsolationCase) -> bool {
    case.gain == Gain::Time && case.setup != ComputeSetup::Ceiling
}

/// The compute policies of the share and of its neighbour.
pub(crate) fn compute(case: &IsolationCase) -> [Compute; 2] {
    let unlimited = Compute::default();
    match case.setup {
        _ if case.gain != Gain::Time => [unlimited; 2],
        ComputeSetup::Ceiling => {
            [Compute { cores: CEILING_PERCENT, ceiling: CEILING_PERCENT, ..unlimited }, unlimited]
        }
        ComputeSetup::Weight => [Compute { weight: 1, ..unlimited }, Compute { weight: 3, ..unlimited }],
        ComputeSetup::LowPriority => [unlimited, Compute { priority: 1, ..unlimited }],
        ComputeSetup::BusyNeighbour => [CEILING_PERCENT, NEIGHBOUR_CEILING_PERCENT].map(|part| Compute {
            cores: part,
            ceiling: part,
            ..unlimited
        }),
    }
}

impl CaseRun {
    /// Whether the programs exceed the gain threshold once they run.
    pub(crate) fn gains_time(&self, case: &IsolationCase) -> Result<bool> {
        // The agent may end an attack that it must report before a longer measurement is over.
        let is_reported = matches!(case.expected, Expectation::Detected(_)) || case.reports.is_some();
        if !is_reported {
            std::thread::sleep(WARM_UP);
            return Ok(self.measure_part(MEASUREMENT)? > GAIN_THRESHOLD);
        }
        while self.begun.elapsed() < WARM_UP + MEASUREMENT {
            if self.measure_part(DETECTION_INTERVAL)? > GAIN_THRESHOLD {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The part of the GPU's time that the programs use from now on, measured over the interval.
    fn measure_part(&self, interval: Duration) -> Result<f64> {
        let (begin, busy_before) = self.node.busy(&self.processes_before)?;
        std::thread::sleep(interval);
        let (end, busy_after) = self.node.busy(&self.processes_before)?;
        Ok(busy_after.saturating_sub(busy_before) as f64 / (end - begin) as f64)
    }

    /// The part that they used in the last sampling period (a sixth of a second).
    pub(crate) fn recent_part(&self) -> Result<f64> {
        self.node.recently_busy(&self.processes_before)
    }

    /// Whether the part comes down to the bound of the case within `CORRECTION_TIMEOUT`.
    pub(crate) fn converges_to_bound(&self, case: &IsolationCase) -> Result<bool> {
        let bound =
            if case.setup == ComputeSetup::BusyNeighbour { BUSY_NEIGHBOUR_BOUND } else { TIME_SLICE_BOUND };
        let (begun, mut parts) = (Instant::now(), Vec::new());
        while begun.elapsed() < CORRECTION_TIMEOUT {
            let part = self.measure_part(MEASUREMENT)?;
            if part <= bound {
                return Ok(true);
            }
            parts.push(part);
        }
        eprintln!("{}: the bound is {bound:.3}, the measured parts are {parts:.3?}", case.name);
        Ok(false)
    }
}
