//! Charts of the tenants' GPU time under each policy, drawn from a run.
//!
//! A scenario has several shares, each with a program that uses all the GPU time that it can get,
//! and periods in which some of them are idle. The charts show the simulator's accounting, like the
//! figures of the cases.

use super::tenants::{ComputeNode, Device, Sample, Setup, Times, share};
use anyhow::{Result, anyhow};
use divvy_escape::node::Compute;
use plotters::prelude::*;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

/// A chart: the policies of several shares, and their changes over time. Times are in seconds of the chart.
struct Scenario {
    file: &'static str,
    title: &'static str,
    /// Label and policy of each share.
    tenants: &'static [(&'static str, Compute)],
    /// Shares that are idle, and when.
    idle: &'static [(usize, Range<u64>)],
    /// Shares whose policy changes, as when a class is edited: when, and the new policy.
    changes: &'static [(usize, u64, Compute)],
}

/// The policy of a share without parameters.
const DEFAULT: Compute = Compute { cores: 0, ceiling: 0, weight: 100, priority: 0, burst_us: 0 };

const SCENARIOS: &[Scenario] = &[
    Scenario {
        file: "fixed.svg",
        title: "cores: 30 beside cores: 60, which is idle from 6 to 12",
        tenants: &[
            ("cores: 30", Compute { cores: 30, ..DEFAULT }),
            ("cores: 60", Compute { cores: 60, ..DEFAULT }),
        ],
        idle: &[(1, 6..12)],
        changes: &[],
    },
    Scenario {
        file: "burst.svg",
        title: "the same, in a class with ceiling: 80",
        tenants: &[
            ("cores: 30, ceiling: 80", Compute { cores: 30, ceiling: 80, ..DEFAULT }),
            ("cores: 60", Compute { cores: 60, ..DEFAULT }),
        ],
        idle: &[(1, 6..12)],
        changes: &[],
    },
    Scenario {
        file: "weights.svg",
        title: "weights 100, 200, 300, 400 without cores; the last starts at 5, the third is idle from 10",
        tenants: &[
            ("weight: 100", Compute { weight: 100, ..DEFAULT }),
            ("weight: 200", Compute { weight: 200, ..DEFAULT }),
            ("weight: 300", Compute { weight: 300, ..DEFAULT }),
            ("weight: 400", Compute { weight: 400, ..DEFAULT }),
        ],
        idle: &[(3, 0..5), (2, 10..LENGTH_SECONDS)],
        changes: &[],
    },
    Scenario {
        file: "guarantee.svg",
        title: "cores: 40 beside two shares without; it starts at 5",
        tenants: &[
            ("cores: 40", Compute { cores: 40, ..DEFAULT }),
            ("without", DEFAULT),
            ("without, too", DEFAULT),
        ],
        idle: &[(0, 0..5)],
        changes: &[],
    },
    Scenario {
        file: "priority.svg",
        title: "priority: High runs from 4 to 8 and from 12 on",
        tenants: &[("priority: High", Compute { priority: 1, ..DEFAULT }), ("priority: Low", DEFAULT)],
        idle: &[(0, 0..4), (0, 8..12)],
        changes: &[],
    },
    Scenario {
        file: "equal.svg",
        title: "three shares with the defaults; one starts at 4, one is idle from 10",
        tenants: &[("one", DEFAULT), ("another", DEFAULT), ("the third", DEFAULT)],
        idle: &[(2, 0..4), (0, 10..LENGTH_SECONDS)],
        changes: &[],
    },
    Scenario {
        file: "tidal.svg",
        title: "ceiling: 30 by day; its night begins at 6: ceiling 100, weight 300",
        tenants: &[("tidal", Compute { ceiling: 30, ..DEFAULT }), ("without", DEFAULT)],
        idle: &[(1, 11..LENGTH_SECONDS)],
        changes: &[(0, 6, Compute { ceiling: 100, weight: 300, ..DEFAULT })],
    },
];

/// Length of a chart.
const LENGTH_SECONDS: u64 = 16;
/// Warm-up before the chart, in which the tenants start.
const WARM_UP_SECONDS: u64 = 3;
/// Each point of a chart is the share over this time.
const STEP_NS: u64 = 200_000_000;
const SECOND_NS: u64 = 1_000_000_000;
const KERNELS: &str = "1ms";
const SIZE_PIXELS: (u32, u32) = (760, 260);
/// Colours of Okabe and Ito, distinguishable with colour blindness.
const COLOURS: [RGBColor; 4] =
    [RGBColor(0, 114, 178), RGBColor(230, 159, 0), RGBColor(0, 158, 115), RGBColor(204, 121, 167)];

/// Runs and draws all scenarios.
pub(super) fn draw_all(library: &Path, dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir)?;
    for scenario in SCENARIOS {
        let file = dir.join(scenario.file);
        let drawn = scenario.draw(&scenario.run(library)?, &file);
        drawn.map_err(|error| anyhow!("{}: {error}", file.display()))?;
        println!("{}", file.display());
    }
    Ok(())
}

impl Scenario {
    fn run(&self, library: &Path) -> Result<Vec<Vec<Sample>>> {
        let times = Times {
            warm_up: Duration::from_secs(WARM_UP_SECONDS),
            window: Duration::from_secs(LENGTH_SECONDS),
            burst: Duration::ZERO,
        };
        let setup =
            Setup { device: Device::Gpu, library: library.to_owned(), times, switch_us: None, gpus: 1 };
        let node = ComputeNode::start(&setup, true)?;
        let mut tenants = Vec::new();
        for (at, (_, compute)) in self.tenants.iter().enumerate() {
            tenants.push(node.start_tenant(at, Some(*compute), KERNELS)?);
        }
        let mut paused = vec![false; tenants.len()];
        let mut changes = self.changes.iter().peekable();
        let samples = node.sample(&mut tenants, |tenants, since| {
            let now = since.as_secs();
            while let Some((at, _, compute)) = changes.next_if(|(_, when, _)| when + WARM_UP_SECONDS <= now) {
                tenants[*at].change_policy(&node, *compute)?;
            }
            for (at, tenant) in tenants.iter().enumerate() {
                let is_idle = self.idle.iter().any(|(tenant, when)| {
                    // A tenant that starts idle runs for one second, so that the GPU knows it.
                    let from = if when.start == 0 { 1 } else { when.start + WARM_UP_SECONDS };
                    *tenant == at && (from..when.end + WARM_UP_SECONDS).contains(&now)
                });
                if is_idle != paused[at] {
                    tenant.set_paused(&node, is_idle)?;
                    paused[at] = is_idle;
                }
            }
            Ok(())
        })?;
        for (at, tenant) in tenants.into_iter().enumerate() {
            if paused[at] {
                tenant.set_paused(&node, false)?;
            }
            tenant.finish()?;
        }
        Ok(samples)
    }

    /// Draws one band for each tenant, stacked.
    fn draw(&self, samples: &[Vec<Sample>], file: &Path) -> Result<(), Box<dyn std::error::Error>> {
        let root = SVGBackend::new(file, SIZE_PIXELS).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption(self.title, ("sans-serif", 15))
            .margin(8)
            .x_label_area_size(34)
            .y_label_area_size(44)
            .build_cartesian_2d(0.0..LENGTH_SECONDS as f64, 0.0..100.0)?;
        chart.configure_mesh().x_desc("seconds").y_desc("% of the GPU's time").disable_x_mesh().draw()?;
        let begin = samples.first().and_then(|samples| samples.first()).map_or(0, |(at, _)| *at)
            + WARM_UP_SECONDS * SECOND_NS;
        let times: Vec<u64> = (0..LENGTH_SECONDS * SECOND_NS).step_by(STEP_NS as usize).collect();
        let mut below = vec![0.0; times.len()];
        let mut bands = Vec::new();
        for samples in samples {
            for (sum, at) in below.iter_mut().zip(&times) {
                *sum += share(samples, begin + at, begin + at + STEP_NS);
            }
            bands.push(below.clone());
        }
        // The topmost band first: each band covers the lower part of the one before.
        for (at, band) in bands.iter().enumerate().rev() {
            let colour = COLOURS[at % COLOURS.len()];
            let middle = |time: &u64| (time + STEP_NS / 2) as f64 / SECOND_NS as f64;
            let line = times.iter().zip(band).map(|(time, sum)| (middle(time), *sum));
            let area = AreaSeries::new(line, 0.0, colour.mix(1.0)).border_style(WHITE.stroke_width(1));
            let (label, _) = self.tenants[at];
            chart
                .draw_series(area)?
                .label(label)
                .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 10, y + 5)], colour.filled()));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .background_style(WHITE.mix(0.85))
            .draw()?;
        root.present()?;
        Ok(())
    }
}
