//! The cases of the compute benchmark: the kernels and the request of each of one to four tenants.

use std::fmt;

/// The request that stands for a tenant without a share.
pub(crate) const UNLIMITED: u32 = 100;
/// The requests of the full matrix, in per cent.
const REQUESTS_PERCENT: [u32; 7] = [1, 5, 10, 30, 50, 70, 99];
/// Numbers of tenants in a case of the full matrix.
const TENANT_COUNTS: [usize; 3] = [1, 2, 4];
/// Cases of [`equal_cases`] that the seed selects.
const RANDOM_CASES: usize = 5;
/// Number of cases that are drawn by the seed.
const DRAWN_CASES: usize = 60;
/// Pairs and sets of four in a CI run.
const CI_PAIRS: usize = 14;
const CI_FOURS: usize = 6;
/// Lengths of drawn kernels in nanoseconds: from the shortest kernels that a GPU can execute without
/// gaps to those of long prefills.
const DRAWN_LENGTHS_NS: (f64, f64) = (5e3, 50e6);
/// Prefix of shapes with kernels of one length, in nanoseconds.
const LENGTH_PREFIX: &str = "spin:";

/// The name of a kernel shape in `compute.c`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ShapeName {
    Named(&'static str),
    /// Kernels of one length, in nanoseconds.
    Length(u64),
}

impl fmt::Display for ShapeName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(name) => out.write_str(name),
            Self::Length(ns) => write!(out, "{LENGTH_PREFIX}{ns}"),
        }
    }
}

/// A kernel shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Shape {
    pub(crate) name: ShapeName,
    /// Longest GPU time of one launch, in ms: 20 % more than nominal, which is the jitter of the
    /// simulated GPU.
    pub(crate) longest_ms: f64,
    /// Whether the throughput of two tenants is compared with that of one.
    pub(crate) aggregated: bool,
    /// Whether the program waits for each launch. It leaves the GPU idle in between, even without a limit.
    pub(crate) waits: bool,
    /// Whether the program demands all the GPU time that it can get.
    pub(crate) saturates: bool,
}

/// Shapes of the full matrix.
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

/// Shapes that demand little.
const PARTIAL_SHAPES: [Shape; 2] =
    [Shape { saturates: false, ..shape("idle", 0.0) }, Shape { saturates: false, ..shape("bursts", 1.0) }];

const fn shape(name: &'static str, ms: f64) -> Shape {
    let name = ShapeName::Named(name);
    Shape { name, longest_ms: ms * 1.2, aggregated: false, waits: false, saturates: true }
}

impl Shape {
    /// The shape of that name.
    pub(crate) fn find(name: &str) -> Option<Self> {
        if let Some(length) = name.strip_prefix(LENGTH_PREFIX) {
            return Some(Self::of_length(length.parse().ok()?));
        }
        SHAPES.into_iter().chain(PARTIAL_SHAPES).find(|shape| shape.name.to_string() == name)
    }

    /// Kernels of that length in nanoseconds.
    fn of_length(ns: u64) -> Self {
        Self { name: ShapeName::Length(ns), ..shape("", ns as f64 / 1e6) }
    }
}

/// The names of all shapes.
pub(crate) fn names() -> Vec<String> {
    SHAPES.into_iter().chain(PARTIAL_SHAPES).map(|shape| shape.name.to_string()).collect()
}

/// A tenant of a case.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CaseTenant {
    pub(crate) shape: Shape,
    /// In per cent, as both guarantee and ceiling; or [`UNLIMITED`].
    pub(crate) request: u32,
    /// Number of its processes, each with these kernels.
    pub(crate) processes: usize,
}

impl CaseTenant {
    const fn new(shape: Shape, request: u32) -> Self {
        Self { shape, request, processes: 1 }
    }

    /// For example `1ms`, or `1ms*4` for four processes.
    fn kernels(&self) -> String {
        match self.processes {
            1 => self.shape.name.to_string(),
            count => format!("{}*{count}", self.shape.name),
        }
    }

    /// Parses `1ms_30` or `1ms*4_30`. Without kernels, those of the tenant before it are meant.
    fn parse(text: &str, before: Option<&Self>) -> Option<Self> {
        let (kernels, request) = match text.rsplit_once('_') {
            Some((kernels, request)) => (kernels.to_owned(), request),
            None => (before?.kernels(), text),
        };
        let (name, processes) = kernels.split_once('*').unwrap_or((&kernels, "1"));
        let processes = processes.parse().ok().filter(|count| (1..=8).contains(count))?;
        let request = request.parse().ok().filter(|request| (1..=UNLIMITED).contains(request))?;
        Some(Self { shape: Shape::find(name)?, request, processes })
    }
}

/// The tenants of one run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Case {
    pub(crate) tenants: Vec<CaseTenant>,
}

impl Case {
    /// Tenants with the same kernels.
    pub(crate) fn equal(shape: &Shape, requests: &[u32]) -> Self {
        Self { tenants: requests.iter().map(|request| CaseTenant::new(*shape, *request)).collect() }
    }

    /// For example `1ms_30+50`, or `1ms_30+5ms_50` for different kernels.
    pub(crate) fn name(&self) -> String {
        let mut name = String::new();
        for (at, tenant) in self.tenants.iter().enumerate() {
            let before = at.checked_sub(1).and_then(|before| self.tenants.get(before));
            let kernels = Some(tenant.kernels())
                .filter(|kernels| before.map(CaseTenant::kernels).as_ref() != Some(kernels));
            if at > 0 {
                name.push('+');
            }
            if let Some(kernels) = kernels {
                name.push_str(&format!("{kernels}_"));
            }
            name.push_str(&tenant.request.to_string());
        }
        name
    }

    /// Sum of the requests, in per cent.
    pub(crate) fn total_percent(&self) -> u32 {
        self.tenants.iter().map(|tenant| tenant.request).sum()
    }

    /// Whether its tenants demand all the time of the GPU.
    pub(crate) fn is_full(&self) -> bool {
        self.total_percent() >= 100 && self.tenants.iter().all(|tenant| tenant.shape.saturates)
    }

    /// Whether one of its programs waits for each launch.
    pub(crate) fn waits(&self) -> bool {
        self.tenants.iter().any(|tenant| tenant.shape.waits)
    }
}

/// Parses the name of a case.
pub(crate) fn parse_case(text: &str) -> Result<Case, String> {
    let mut tenants: Vec<CaseTenant> = Vec::new();
    for word in text.split('+') {
        let tenant = CaseTenant::parse(word, tenants.last());
        tenants.push(
            tenant.ok_or_else(|| format!("{word:?} is no tenant like 1ms_30, 1ms*4_30 or spin:700000_30"))?,
        );
    }
    Ok(Case { tenants })
}

/// Parses requests that are joined by a plus.
pub(crate) fn parse_requests(text: &str) -> Result<Vec<u32>, String> {
    let number = |word: &str| word.parse().ok().filter(|request| (1..=UNLIMITED).contains(request));
    let requests: Option<Vec<u32>> = text.split('+').map(number).collect();
    requests.ok_or_else(|| "expected requests like 30 or 30+50, each from 1 to 100".to_owned())
}

/// The full matrix: all sets of one, two or four requests whose sum is at most 100 %, each with all
/// shapes.
pub(crate) fn all_cases() -> Vec<Case> {
    let sets: Vec<Vec<u32>> =
        TENANT_COUNTS.iter().flat_map(|count| request_sets(&REQUESTS_PERCENT, *count, 100)).collect();
    SHAPES.iter().flat_map(|shape| sets.iter().map(|requests| Case::equal(shape, requests))).collect()
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

/// Every shape with 30 and with 30+50, and [`RANDOM_CASES`] others of the full matrix that the seed
/// selects.
pub(crate) fn equal_cases(seed: u64) -> Vec<Case> {
    let of_each = |requests: &'static [u32]| SHAPES.iter().map(move |shape| Case::equal(shape, requests));
    let mut cases: Vec<Case> = of_each(&[30]).chain(of_each(&[30, 50])).collect();
    let mut others: Vec<Case> = all_cases().into_iter().filter(|case| !cases.contains(case)).collect();
    cases.extend(Draw(seed).take(&mut others, RANDOM_CASES));
    cases
}

/// Kernels and requests: each set of kernels is run with each set of requests.
type Table = (&'static [&'static [&'static str]], &'static [&'static [u32]]);

/// The cases that a scheduler must get right: those of the second review, `facts/review-2.md`.
const LISTED: [Table; 3] = [
    (
        &[&["20us"; 2], &["100us"; 2], &["1ms"; 2], &["5ms"; 2], &["mixed"; 2], &["sync"; 2]],
        &[&[30, 50], &[50, 50], &[10, 70]],
    ),
    (
        &[
            &["20us", "1ms"],
            &["20us", "5ms"],
            &["100us", "5ms"],
            &["1ms", "5ms"],
            &["20us", "mixed"],
            &["1ms", "mixed"],
            &["5ms", "mixed"],
            &["sync", "20us"],
            &["sync", "1ms"],
            &["sync", "5ms"],
        ],
        &[&[30, 50], &[50, 30], &[50, 50], &[10, 70], &[70, 10]],
    ),
    (
        &[
            &["20us"; 4],
            &["1ms"; 4],
            &["5ms"; 4],
            &["20us", "1ms", "5ms", "mixed"],
            &["sync", "100us", "1ms", "5ms"],
        ],
        &[&[10, 10, 30, 50], &[50, 30, 10, 10]],
    ),
];

/// The 78 listed cases.
pub(crate) fn listed_cases() -> Vec<Case> {
    let of_table = |(kernels, requests): &Table| {
        let cases = kernels.iter().flat_map(|names| requests.iter().map(|requests| case_of(names, requests)));
        cases.collect::<Vec<Case>>()
    };
    LISTED.iter().flat_map(of_table).collect()
}

fn case_of(names: &[&str], requests: &[u32]) -> Case {
    let tenant = |(name, request): (&&str, &u32)| Some(CaseTenant::new(Shape::find(name)?, *request));
    Case { tenants: names.iter().zip(requests).filter_map(tenant).collect() }
}

/// Cases with tenants that demand little, and with several processes in a share.
const KINDS: [&str; 12] = [
    "idle_50+1ms_50",
    "idle_30+5ms_50",
    "bursts_30+1ms_50",
    "bursts_30+5ms_70",
    "bursts_30+1ms_30+1ms_30",
    "1ms*2_30+1ms_50",
    "1ms*4_30+1ms_50",
    "1ms*4_50+1ms_50",
    "20us*2_50+5ms_50",
    "5ms*4_30+20us_50",
    "1ms*2_50+5ms*4_50",
    "sync*2_30+1ms_50",
];

pub(crate) fn kind_cases() -> Vec<Case> {
    KINDS.iter().filter_map(|name| parse_case(name).ok()).collect()
}

/// Cases with kernel lengths and requests that the seed selects. Every third has four tenants.
pub(crate) fn drawn_cases(seed: u64) -> Vec<Case> {
    let mut draw = Draw(seed);
    let case = |at: usize| {
        let count = if at % 3 == 2 { 4 } else { 2 };
        let requests = draw.requests(count);
        let tenant = |request: &u32| CaseTenant::new(Shape::of_length(draw.length_ns()), *request);
        Case { tenants: requests.iter().map(tenant).collect() }
    };
    (0..DRAWN_CASES).map(case).collect()
}

/// The cases of a CI run: pairs and sets of four that the seed selects from the listed and the drawn
/// cases.
pub(crate) fn ci_cases(seed: u64) -> Vec<Case> {
    let all = [listed_cases(), drawn_cases(seed)].concat();
    let (mut pairs, mut fours): (Vec<Case>, Vec<Case>) =
        all.into_iter().partition(|case| case.tenants.len() == 2);
    let mut draw = Draw(!seed);
    [draw.take(&mut pairs, CI_PAIRS), draw.take(&mut fours, CI_FOURS)].concat()
}

/// Random numbers: the SplitMix64 generator.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Removes that many elements.
    fn take<T>(&mut self, from: &mut Vec<T>, count: usize) -> Vec<T> {
        (0..count.min(from.len())).map(|_| from.swap_remove(self.next() as usize % from.len())).collect()
    }

    /// A kernel length in [`DRAWN_LENGTHS_NS`], uniform on a logarithmic scale.
    fn length_ns(&mut self) -> u64 {
        let part = (self.next() >> 11) as f64 / (1_u64 << 53) as f64;
        let (shortest, longest) = DRAWN_LENGTHS_NS;
        (shortest * (longest / shortest).powf(part)) as u64
    }

    /// Requests that are multiples of 10 and have a sum of 60, 80 or 100 per cent.
    fn requests(&mut self, count: usize) -> Vec<u32> {
        let sum = [6, 8, 10][self.next() as usize % 3];
        let mut requests = vec![1; count];
        for _ in count..sum {
            requests[self.next() as usize % count] += 1;
        }
        requests.into_iter().map(|tenths: u32| tenths * 10).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn names_of(cases: &[Case]) -> BTreeSet<String> {
        cases.iter().map(Case::name).collect()
    }

    #[test]
    fn full_matrix_has_870_cases_within_100_percent() {
        let cases = all_cases();
        assert_eq!(cases.len(), 870);
        assert!(cases.iter().all(|case| case.total_percent() <= 100));
        assert_eq!(names_of(&cases).len(), cases.len());
    }

    #[test]
    fn equal_set_has_25_cases_that_depend_on_the_seed() {
        let cases = equal_cases(7);
        assert_eq!((cases.len(), names_of(&cases).len()), (25, 25));
        assert_eq!(equal_cases(7), cases);
        assert_ne!(equal_cases(8), cases);
    }

    #[test]
    fn listed_set_has_24_cases_of_equal_and_54_of_different_kernels() {
        let cases = listed_cases();
        assert_eq!(names_of(&cases).len(), 78);
        let is_equal = |case: &&Case| case.tenants.iter().all(|one| one.shape == case.tenants[0].shape);
        assert_eq!(cases.iter().filter(is_equal).count(), 24);
        assert!(cases.iter().all(|case| [2, 4].contains(&case.tenants.len()) && case.total_percent() <= 100));
    }

    #[test]
    fn drawn_cases_depend_on_the_seed_alone() {
        let cases = drawn_cases(7);
        assert_eq!((cases.len(), names_of(&cases).len()), (60, 60));
        assert_eq!(drawn_cases(7), cases);
        assert_ne!(drawn_cases(8), cases);
        for tenant in cases.iter().flat_map(|case| &case.tenants) {
            assert!((0.005..=50.0).contains(&(tenant.shape.longest_ms / 1.2)), "{tenant:?}");
        }
        assert!(cases.iter().all(|case| [60, 80, 100].contains(&case.total_percent())));
    }

    #[test]
    fn ci_run_has_20_cases_with_pairs_and_sets_of_four() {
        let cases = ci_cases(7);
        assert_eq!((cases.len(), names_of(&cases).len()), (20, 20));
        assert_eq!(cases.iter().filter(|case| case.tenants.len() == 4).count(), 6);
        assert_eq!(ci_cases(7), cases);
        assert_ne!(ci_cases(8), cases);
    }

    #[test]
    fn name_of_a_case_parses_to_the_case() {
        let all = [all_cases(), listed_cases(), kind_cases(), drawn_cases(1)].concat();
        for case in all {
            assert_eq!(parse_case(&case.name()), Ok(case));
        }
        assert_eq!(kind_cases().len(), KINDS.len());
        assert_eq!(kind_cases()[4].name(), "bursts_30+1ms_30+30");
        for wrong in ["", "30", "1ms", "1ms_0", "1ms_30+", "2ms_30", "spin:x_30", "1ms*9_30", "1ms_101"] {
            assert!(parse_case(wrong).is_err(), "{wrong}");
        }
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
