//! The cases of the compute benchmark: a kernel shape, and the requests of one, two or four tenants.

/// The request that stands for a tenant without a share.
pub(crate) const UNLIMITED: u32 = 100;
/// The requests of the full matrix, in per cent.
const REQUESTS_PERCENT: [u32; 7] = [1, 5, 10, 30, 50, 70, 99];
/// Numbers of tenants in a case.
const TENANT_COUNTS: [usize; 3] = [1, 2, 4];
/// Cases of a CI run that the seed selects.
const RANDOM_CASES: usize = 5;

/// A kernel shape, by its name in `compute.c`.
#[derive(Debug, PartialEq)]
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    /// Longest GPU time of one launch, in ms: 20 % more than nominal, which is the jitter of the
    /// simulated GPU.
    pub(crate) longest_ms: f64,
    /// Whether the throughput of two tenants is compared with that of one.
    pub(crate) aggregated: bool,
    /// Whether the program waits for each launch. It leaves the GPU idle in between, even without a limit.
    pub(crate) waits: bool,
}

pub(crate) const SHAPES: [Shape; 10] = [
    shape("20us", 0.02),
    Shape { aggregated: true, ..shape("100us", 0.1) },
    Shape { aggregated: true, ..shape("1ms", 1.0) },
    shape("streams", 1.0),
    Shape { aggregated: true, ..shape("5ms", 5.0) },
    shape("mixed", 10.0),
    shape("jitter", 1.2),
    shape("graph", 1.0),
    shape("cooperative", 1.0),
    Shape { waits: true, ..shape("sync", 1.0) },
];

const fn shape(name: &'static str, ms: f64) -> Shape {
    Shape { name, longest_ms: ms * 1.2, aggregated: false, waits: false }
}

pub(crate) fn names() -> Vec<&'static str> {
    SHAPES.iter().map(|shape| shape.name).collect()
}

/// A kernel shape and the request of each tenant, in per cent.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Case {
    pub(crate) shape: &'static Shape,
    pub(crate) requests: Vec<u32>,
}

impl Case {
    /// For example `1ms_30+50`.
    pub(crate) fn name(&self) -> String {
        let requests: Vec<String> = self.requests.iter().map(u32::to_string).collect();
        format!("{}_{}", self.shape.name, requests.join("+"))
    }
}

/// Parses requests that are joined by a plus.
pub(crate) fn parse_requests(text: &str) -> Result<Vec<u32>, String> {
    let number = |word: &str| word.parse().ok().filter(|request| (1..=UNLIMITED).contains(request));
    let requests: Option<Vec<u32>> = text.split('+').map(number).collect();
    requests.ok_or_else(|| "expected requests like 30 or 30+50, each from 1 to 100".to_owned())
}

/// The full matrix: all sets of one, two or four requests whose sum is at most 100 %.
pub(crate) fn all_cases() -> Vec<Case> {
    let sets: Vec<Vec<u32>> =
        TENANT_COUNTS.iter().flat_map(|count| request_sets(&REQUESTS_PERCENT, *count, 100)).collect();
    let of_shape = |shape| sets.iter().map(move |requests| Case { shape, requests: requests.clone() });
    SHAPES.iter().flat_map(of_shape).collect()
}

/// All multisets of `count` requests whose sum is at most `max_sum`.
fn request_sets(requests: &[u32], count: usize, max_sum: u32) -> Vec<Vec<u32>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let mut found = Vec::new();
    for (at, first) in requests.iter().enumerate().filter(|(_, first)| **first <= max_sum) {
        for rest in request_sets(&requests[at..], count - 1, max_sum - first) {
            found.push([vec![*first], rest].concat());
        }
    }
    found
}

/// The cases of a CI run: every shape with 30 and with 30+50, and [`RANDOM_CASES`] others selected
/// by the seed.
pub(crate) fn ci_cases(seed: u64) -> Vec<Case> {
    let of_each = |requests: [u32; 2], count: usize| {
        SHAPES.iter().map(move |shape| Case { shape, requests: requests[..count].to_vec() })
    };
    let mut cases: Vec<Case> = of_each([30, 50], 1).chain(of_each([30, 50], 2)).collect();
    let mut others: Vec<Case> = all_cases().into_iter().filter(|case| !cases.contains(case)).collect();
    let mut state = seed;
    for _ in 0..RANDOM_CASES {
        cases.push(others.swap_remove(split_mix_64(&mut state) as usize % others.len()));
    }
    cases
}

/// The SplitMix64 generator.
fn split_mix_64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_matrix_has_870_cases_within_100_percent() {
        let cases = all_cases();
        assert_eq!(cases.len(), 870);
        assert!(cases.iter().all(|case| case.requests.iter().sum::<u32>() <= 100));
        let names: std::collections::BTreeSet<String> = cases.iter().map(Case::name).collect();
        assert_eq!(names.len(), cases.len());
    }

    #[test]
    fn ci_run_has_25_cases_that_depend_on_the_seed() {
        let cases = ci_cases(7);
        assert_eq!(cases.len(), 25);
        let names: std::collections::BTreeSet<String> = cases.iter().map(Case::name).collect();
        assert_eq!(names.len(), 25);
        assert_eq!(ci_cases(7), cases);
        assert_ne!(ci_cases(8), cases);
    }

    #[test]
    fn requests_are_joined_by_a_plus() {
        assert_eq!(parse_requests("30+50"), Ok(vec![30, 50]));
        assert_eq!(parse_requests("100"), Ok(vec![100]));
        for wrong in ["", "0", "101", "30+", "a"] {
            assert!(parse_requests(wrong).is_err(), "{wrong}");
        }
    }
}
