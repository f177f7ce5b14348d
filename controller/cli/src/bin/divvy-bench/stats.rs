//! Percentiles, and the form in which a figure is printed.

use std::time::Duration;

/// The value below which `part` (0 to 1) of the samples lie; nearest rank. 0 of nothing.
pub(crate) fn percentile(samples: &[f64], part: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (part * (sorted.len().saturating_sub(1)) as f64).round() as usize;
    sorted.get(rank).copied().unwrap_or(0.0)
}

pub(crate) fn median(samples: &[f64]) -> f64 {
    percentile(samples, 0.5)
}

pub(crate) fn micros(took: Duration) -> f64 {
    took.as_secs_f64() * 1e6
}

/// One line.
pub(crate) fn line(name: &str, value: f64, unit: &str) {
    println!("{name}\t{value:.3}\t{unit}");
}

/// A figure over rounds: median, p10, p90.
pub(crate) fn figure(name: &str, rounds: &[f64], unit: &str) {
    line(name, median(rounds), unit);
    line(&format!("{name}_p10"), percentile(rounds, 0.1), unit);
    line(&format!("{name}_p90"), percentile(rounds, 0.9), unit);
}

/// The most that a figure may be, and whether it is.
pub(crate) fn bar(name: &str, value: f64, most: f64, unit: &str) {
    let verdict = if value <= most { "held" } else { "MISSED" };
    println!("{name}_bar\t{most:.3}\t{unit}\t{verdict}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_ranks_of_the_samples() {
        let samples = [5.0, 1.0, 4.0, 2.0, 3.0];
        assert_eq!((median(&samples), percentile(&samples, 0.0), percentile(&samples, 1.0)), (3.0, 1.0, 5.0));
        assert_eq!(median(&[]), 0.0);
    }
}
