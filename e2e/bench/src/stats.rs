//! Percentiles, and the output format: one line per figure, `name<TAB>value<TAB>unit`.
//!
//! A figure with a bound is followed by `NAME_bound<TAB>bound<TAB>unit<TAB>ok|MISSED`.

use std::time::Duration;

/// The nearest-rank percentile of the samples; `part` is from 0 to 1. Returns 0 for no samples.
pub(crate) fn percentile(samples: &[f64], part: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (part * (sorted.len().saturating_sub(1)) as f64).round() as usize;
    sorted.get(rank).copied().unwrap_or(0.0)
}

pub(crate) fn median(samples: &[f64]) -> f64 {
    percentile(samples, 0.5)
}

/// The duration in microseconds.
pub(crate) fn micros(took: Duration) -> f64 {
    took.as_secs_f64() * 1e6
}

/// Prints one line.
pub(crate) fn line(name: &str, value: f64, unit: &str) {
    println!("{name}\t{value:.3}\t{unit}");
}

/// Prints a figure over rounds: median, p10 and p90.
pub(crate) fn figure(name: &str, rounds: &[f64], unit: &str) {
    line(name, median(rounds), unit);
    line(&format!("{name}_p10"), percentile(rounds, 0.1), unit);
    line(&format!("{name}_p90"), percentile(rounds, 0.9), unit);
}

/// Prints the upper bound of a figure, and whether the figure is within it.
pub(crate) fn upper_bound(name: &str, value: f64, bound: f64, unit: &str) {
    bound_line(name, bound, unit, value <= bound);
}

/// Prints a figure over rounds and the upper bound of its median.
pub(crate) fn figure_at_most(name: &str, rounds: &[f64], bound: f64, unit: &str) {
    figure(name, rounds, unit);
    upper_bound(name, median(rounds), bound, unit);
}

/// Prints a single value and its upper bound.
pub(crate) fn at_most(name: &str, value: f64, bound: f64, unit: &str) {
    line(name, value, unit);
    upper_bound(name, value, bound, unit);
}

/// Prints a single value and its lower bound.
pub(crate) fn at_least(name: &str, value: f64, bound: f64, unit: &str) {
    line(name, value, unit);
    bound_line(name, bound, unit, value >= bound);
}

fn bound_line(name: &str, bound: f64, unit: &str, is_within: bool) {
    let verdict = if is_within { "ok" } else { "MISSED" };
    println!("{name}_bound\t{bound:.3}\t{unit}\t{verdict}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentile_is_the_nearest_rank() {
        let samples = [5.0, 1.0, 4.0, 2.0, 3.0];
        assert_eq!((median(&samples), percentile(&samples, 0.0), percentile(&samples, 1.0)), (3.0, 1.0, 5.0));
        assert_eq!(median(&[]), 0.0);
    }
}
