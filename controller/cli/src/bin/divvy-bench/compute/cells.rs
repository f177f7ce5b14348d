//! The cells: shapes of kernels, and who asks for how much.

/// What a tenant without a share asks for.
pub(crate) const UNLIMITED: u32 = 100;
/// The requests of the whole matrix.
const REQUESTS: [u32; 7] = [1, 5, 10, 30, 50, 70, 99];
/// So many tenants at once.
const TENANTS: [usize; 3] = [1, 2, 4];
/// So many cells are drawn.
const DRAWN: usize = 5;

/// A shape of kernels, by its name in `compute.c`.
#[derive(Debug, PartialEq)]
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    /// The longest that one launch keeps the GPU, in ms: a fifth more than it should, as the simulated GPU has it.
    pub(crate) longest_ms: f64,
    /// What two tenants get done is compared with one.
    pub(crate) aggregated: bool,
    /// Waits for each launch, so that even one without a limit leaves the GPU idle in between.
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

/// A shape, and the request of each tenant in per cent.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Cell {
    pub(crate) shape: &'static Shape,
    pub(crate) requests: Vec<u32>,
}

impl Cell {
    /// As in `1ms_30+50`.
    pub(crate) fn name(&self) -> String {
        let requests: Vec<String> = self.requests.iter().map(u32::to_string).collect();
        format!("{}_{}", self.shape.name, requests.join("+"))
    }
}

/// Requests joined by a plus.
pub(crate) fn parse(text: &str) -> Result<Vec<u32>, String> {
    let number = |word: &str| word.parse().ok().filter(|request| (1..=UNLIMITED).contains(request));
    let requests: Option<Vec<u32>> = text.split('+').map(number).collect();
    requests.ok_or_else(|| "write it as 30 or 30+50, each from 1 to 100".to_owned())
}

/// The whole matrix: sets of one, two or four requests that fit together.
pub(crate) fn every() -> Vec<Cell> {
    let sets: Vec<Vec<u32>> = TENANTS.iter().flat_map(|count| sets(&REQUESTS, *count, 100)).collect();
    let of_shape = |shape| sets.iter().map(move |requests| Cell { shape, requests: requests.clone() });
    SHAPES.iter().flat_map(of_shape).collect()
}

/// Sets, with repetition, of so many requests whose sum is at most that.
fn sets(requests: &[u32], count: usize, most: u32) -> Vec<Vec<u32>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let mut found = Vec::new();
    for (at, first) in requests.iter().enumerate().filter(|(_, first)| **first <= most) {
        for rest in sets(&requests[at..], count - 1, most - first) {
            found.push([vec![*first], rest].concat());
        }
    }
    found
}

/// Every shape at 30 and at 30 beside 50, and five of the others that the seed draws.
pub(crate) fn few(seed: u64) -> Vec<Cell> {
    let of_each = |requests: [u32; 2], count: usize| {
        SHAPES.iter().map(move |shape| Cell { shape, requests: requests[..count].to_vec() })
    };
    let mut cells: Vec<Cell> = of_each([30, 50], 1).chain(of_each([30, 50], 2)).collect();
    let mut others: Vec<Cell> = every().into_iter().filter(|cell| !cells.contains(cell)).collect();
    let mut state = seed;
    for _ in 0..DRAWN {
        cells.push(others.swap_remove(draw(&mut state) as usize % others.len()));
    }
    cells
}

/// SplitMix64.
fn draw(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_matrix_has_870_cells_that_fit() {
        let cells = every();
        assert_eq!(cells.len(), 870);
        assert!(cells.iter().all(|cell| cell.requests.iter().sum::<u32>() <= 100));
        let names: std::collections::BTreeSet<String> = cells.iter().map(Cell::name).collect();
        assert_eq!(names.len(), cells.len());
    }

    #[test]
    fn the_few_are_25_by_their_seed() {
        let cells = few(7);
        assert_eq!(cells.len(), 25);
        let names: std::collections::BTreeSet<String> = cells.iter().map(Cell::name).collect();
        assert_eq!(names.len(), 25);
        assert_eq!(few(7), cells);
        assert_ne!(few(8), cells);
    }

    #[test]
    fn requests_are_numbers_joined_by_a_plus() {
        assert_eq!(parse("30+50"), Ok(vec![30, 50]));
        assert_eq!(parse("100"), Ok(vec![100]));
        for wrong in ["", "0", "101", "30+", "a"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
