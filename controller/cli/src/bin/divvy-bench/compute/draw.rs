//! Pictures of what tenants get over time: one for each policy, drawn from a run.
//!
//! A scene is shares, each with a program that wants all that it can get, and times in which some of them rest. What is
//! drawn is what the simulator's ledger says that each had, as the figures of the cells are.

use super::tenants::{On, Point, Stage, share};
use anyhow::{Result, anyhow};
use divvy_escape::node::Compute;
use plotters::prelude::*;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

/// Shares as policies have them, who of them rests when, in seconds of the picture.
struct Scene {
    file: &'static str,
    title: &'static str,
    tenants: &'static [(&'static str, Compute)],
    rests: &'static [(usize, Range<u64>)],
    /// From a second on one of the shares is another, as its class was changed.
    changes: &'static [(usize, u64, Compute)],
}

const NONE: Compute = Compute { cores: 0, ceiling: 0, weight: 100, priority: 0, burst_us: 0 };

const SCENES: &[Scene] = &[
    Scene {
        file: "fixed.svg",
        title: "cores: 30 beside cores: 60, which rests from 6 to 12",
        tenants: &[
            ("cores: 30", Compute { cores: 30, ..NONE }),
            ("cores: 60", Compute { cores: 60, ..NONE }),
        ],
        rests: &[(1, 6..12)],
        changes: &[],
    },
    Scene {
        file: "burst.svg",
        title: "the same, in a class with ceiling: 80",
        tenants: &[
            ("cores: 30, ceiling: 80", Compute { cores: 30, ceiling: 80, ..NONE }),
            ("cores: 60", Compute { cores: 60, ..NONE }),
        ],
        rests: &[(1, 6..12)],
        changes: &[],
    },
    Scene {
        file: "weights.svg",
        title: "weights 100, 200, 300, 400 without cores; the last comes at 5, the third rests from 10",
        tenants: &[
            ("weight: 100", Compute { weight: 100, ..NONE }),
            ("weight: 200", Compute { weight: 200, ..NONE }),
            ("weight: 300", Compute { weight: 300, ..NONE }),
            ("weight: 400", Compute { weight: 400, ..NONE }),
        ],
        rests: &[(3, 0..5), (2, 10..LENGTH)],
        changes: &[],
    },
    Scene {
        file: "guarantee.svg",
        title: "cores: 40 beside two shares without; it comes at 5",
        tenants: &[("cores: 40", Compute { cores: 40, ..NONE }), ("without", NONE), ("without, too", NONE)],
        rests: &[(0, 0..5)],
        changes: &[],
    },
    Scene {
        file: "priority.svg",
        title: "priority: High works from 4 to 8 and from 12 on",
        tenants: &[("priority: High", Compute { priority: 1, ..NONE }), ("priority: Low", NONE)],
        rests: &[(0, 0..4), (0, 8..12)],
        changes: &[],
    },
    Scene {
        file: "equal.svg",
        title: "three shares that say nothing; one comes at 4, one rests from 10",
        tenants: &[("one", NONE), ("another", NONE), ("the third", NONE)],
        rests: &[(2, 0..4), (0, 10..LENGTH)],
        changes: &[],
    },
    Scene {
        file: "tidal.svg",
        title: "ceiling: 30 by day; at 6 its night begins: ceiling 100, weight 300",
        tenants: &[("tidal", Compute { ceiling: 30, ..NONE }), ("without", NONE)],
        rests: &[(1, 11..LENGTH)],
        changes: &[(0, 6, Compute { ceiling: 100, weight: 300, ..NONE })],
    },
];

/// Seconds of a picture, and those before it, in which the tenants start.
const LENGTH: u64 = 16;
const BEFORE: u64 = 3;
/// Shares are those of so long, in nanoseconds.
const STEP: u64 = 200_000_000;
const SECOND: u64 = 1_000_000_000;
const SHAPE: &str = "1ms";
const SIZE: (u32, u32) = (760, 260);
/// Okabe and Ito's, which everybody tells apart.
const COLOURS: [RGBColor; 4] =
    [RGBColor(0, 114, 178), RGBColor(230, 159, 0), RGBColor(0, 158, 115), RGBColor(204, 121, 167)];

/// Plays and draws all scenes.
pub(super) fn all(library: &Path, dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir)?;
    for scene in SCENES {
        let drawn = scene.draw(&scene.play(library)?, &dir.join(scene.file));
        drawn.map_err(|error| anyhow!("{}: {error}", scene.file))?;
        println!("{}", dir.join(scene.file).display());
    }
    Ok(())
}

impl Scene {
    fn play(&self, library: &Path) -> Result<Vec<Vec<Point>>> {
        let seconds = Duration::from_secs;
        let stage =
            Stage::up(On::Gpu, library.to_owned(), seconds(BEFORE), seconds(LENGTH), Duration::ZERO, true)?;
        let mut tenants = Vec::new();
        for (at, (_, compute)) in self.tenants.iter().enumerate() {
            tenants.push(stage.tenant(at, Some(*compute), SHAPE)?);
        }
        let mut resting = vec![false; tenants.len()];
        let mut changes = self.changes.iter().peekable();
        let served = stage.watch(&mut tenants, |tenants, since| {
            let now = since.as_secs();
            while let Some((at, _, compute)) = changes.next_if(|(_, when, _)| when + BEFORE <= now) {
                tenants[*at].change(&stage, *compute)?;
            }
            for (at, tenant) in tenants.iter().enumerate() {
                let rests = self.rests.iter().any(|(who, when)| {
                    // Who rests at first has shown itself to the GPU and no more.
                    let from = if when.start == 0 { 1 } else { when.start + BEFORE };
                    *who == at && (from..when.end + BEFORE).contains(&now)
                });
                if rests != resting[at] {
                    tenant.rest(&stage, rests)?;
                    resting[at] = rests;
                }
            }
            Ok(())
        })?;
        for (at, tenant) in tenants.into_iter().enumerate() {
            if resting[at] {
                tenant.rest(&stage, false)?;
            }
            tenant.end()?;
        }
        Ok(served)
    }

    /// One band for each tenant, one upon the other.
    fn draw(&self, served: &[Vec<Point>], file: &Path) -> Result<(), Box<dyn std::error::Error>> {
        let root = SVGBackend::new(file, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption(self.title, ("sans-serif", 15))
            .margin(8)
            .x_label_area_size(34)
            .y_label_area_size(44)
            .build_cartesian_2d(0.0..LENGTH as f64, 0.0..100.0)?;
        chart.configure_mesh().x_desc("seconds").y_desc("% of the GPU's time").disable_x_mesh().draw()?;
        let begin =
            served.first().and_then(|points| points.first()).map_or(0, |(at, _)| *at) + BEFORE * SECOND;
        let times: Vec<u64> = (0..LENGTH * SECOND).step_by(STEP as usize).collect();
        let mut below = vec![0.0; times.len()];
        let mut bands = Vec::new();
        for points in served {
            for (sum, at) in below.iter_mut().zip(&times) {
                *sum += share(points, begin + at, begin + at + STEP);
            }
            bands.push(below.clone());
        }
        // The highest first: each covers the lower part of the one before.
        for (at, band) in bands.iter().enumerate().rev() {
            let colour = COLOURS[at % COLOURS.len()];
            let middle = |time: &u64| (time + STEP / 2) as f64 / SECOND as f64;
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
