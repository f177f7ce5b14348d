//! Kubernetes quantities, exact: nano-units in an `i128`, and the format in which they were
//! written.
//!
//! Equality and order are by value, not by text: the API server rewrites `1024Mi` as `1Gi`, and
//! comparing text would cause endless updates. Parsing, rounding, limits and formatting are those
//! of `k8s.io/apimachinery/pkg/api/resource`, checked by test vectors from that library. Three
//! differences concern absurd amounts: above 1.7e29, and exponents above 32 bits, are errors;
//! amounts above the largest suffix are written readable, as `1000E` (the library writes `1`).

mod parse;

use std::fmt;

/// The format of a quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `Ki`, `Mi`, ... (Go: `BinarySI`).
    BinarySuffix,
    /// `k`, `M`, `m`, ... (Go: `DecimalSI`).
    DecimalSuffix,
    /// `1e3` (Go: `DecimalExponent`).
    DecimalExponent,
}

/// An exact amount. `Ord`, `Eq` and `Hash` use the value only.
#[derive(Clone, Copy, Debug)]
pub struct Quantity {
    nano: i128,
    format: Format,
}

/// Why a text is not a quantity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a quantity: {cause}")]
pub struct QuantityError {
    text: String,
    cause: &'static str,
}

const NANO: i128 = 1_000_000_000;

/// Suffixes by exponent: powers of 1024 from `Ki`, powers of 1000 from `n`.
const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
const DECIMAL: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];

impl Quantity {
    /// Zero.
    pub const ZERO: Self = Self { nano: 0, format: Format::DecimalSuffix };

    /// A count of bytes, written with binary suffixes.
    pub fn bytes(bytes: u64) -> Self {
        Self { nano: i128::from(bytes) * NANO, format: Format::BinarySuffix }
    }

    /// A plain count, written with decimal suffixes.
    pub fn count(count: u64) -> Self {
        Self { nano: i128::from(count) * NANO, format: Format::DecimalSuffix }
    }

    /// A count of nano-units.
    pub fn from_nano(nano: i128, format: Format) -> Self {
        Self { nano, format }
    }

    /// The exact amount in nano-units.
    pub fn as_nano(self) -> i128 {
        self.nano
    }

    /// The format in which the quantity was written.
    pub fn format(self) -> Format {
        self.format
    }

    /// The whole number, with fractions rounded away from zero; `None` beyond an `i64`.
    pub fn value(self) -> Option<i64> {
        let whole = self.nano / NANO;
        let away = if self.nano % NANO == 0 { 0 } else { self.nano.signum() };
        i64::try_from(whole + away).ok()
    }

    /// The number of bytes, rounded up; `None` if negative or beyond a `u64`.
    pub fn as_bytes(self) -> Option<u64> {
        let whole = self.nano / NANO + i128::from(self.nano % NANO > 0);
        if self.nano < 0 { None } else { u64::try_from(whole).ok() }
    }

    /// Whether the amount has no fraction, so [`Quantity::value`] is exact.
    pub fn is_whole(self) -> bool {
        self.nano % NANO == 0
    }

    /// The sum, in the format of the first operand that is not zero; `None` on overflow.
    pub fn checked_add(self, other: Self) -> Option<Self> {
        Some(Self { nano: self.nano.checked_add(other.nano)?, format: self.format_with(other) })
    }

    /// The difference, in the format of the first operand that is not zero; `None` on overflow.
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        Some(Self { nano: self.nano.checked_sub(other.nano)?, format: self.format_with(other) })
    }

    fn format_with(self, other: Self) -> Format {
        if self.nano == 0 { other.format } else { self.format }
    }

    /// The output format. Small, fractional and very large amounts are decimal, because a binary
    /// suffix cannot express them exactly.
    fn canonical_format(self) -> Format {
        let readable = 1024 * NANO.unsigned_abs()..=parse::BINARY_MAX.unsigned_abs();
        match self.format {
            Format::BinarySuffix if !self.is_whole() || !readable.contains(&self.nano.unsigned_abs()) => {
                Format::DecimalSuffix
            }
            format => format,
        }
    }
}

/// Divides while there is no remainder, at most `max` times.
fn strip_factor(mut amount: i128, factor: i128, most: usize) -> (i128, usize) {
    let mut times = 0;
    while times < most && amount % factor == 0 {
        amount /= factor;
        times += 1;
    }
    (amount, times)
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nano == other.nano
    }
}
impl Eq for Quantity {}
impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.nano.cmp(&other.nano)
    }
}
impl std::hash::Hash for Quantity {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.nano.hash(state);
    }
}

impl std::str::FromStr for Quantity {
    type Err = QuantityError;
    fn from_str(text: &str) -> Result<Self, QuantityError> {
        parse::parse(text).map_err(|cause| QuantityError { text: text.chars().take(64).collect(), cause })
    }
}

/// The canonical form: no fraction, and the largest exact suffix.
impl fmt::Display for Quantity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nano == 0 {
            return out.write_str("0");
        }
        match self.canonical_format() {
            Format::BinarySuffix => {
                let (amount, times) = strip_factor(self.nano / NANO, 1024, BINARY.len());
                let suffix = if times == 0 { "" } else { BINARY[times - 1] };
                write!(out, "{amount}{suffix}")
            }
            Format::DecimalSuffix => {
                let (amount, times) = strip_factor(self.nano, 1000, DECIMAL.len() - 1);
                write!(out, "{amount}{}", DECIMAL[times])
            }
            Format::DecimalExponent => {
                let (amount, times) = strip_factor(self.nano, 1000, usize::MAX);
                match times as i64 * 3 - 9 {
                    0 => write!(out, "{amount}"),
                    exponent => write!(out, "{amount}e{exponent}"),
                }
            }
        }
    }
}

impl TryFrom<&k8s_openapi::apimachinery::pkg::api::resource::Quantity> for Quantity {
    type Error = QuantityError;
    fn try_from(
        wire: &k8s_openapi::apimachinery::pkg::api::resource::Quantity,
    ) -> Result<Self, QuantityError> {
        wire.0.parse()
    }
}

impl From<Quantity> for k8s_openapi::apimachinery::pkg::api::resource::Quantity {
    fn from(quantity: Quantity) -> Self {
        Self(quantity.to_string())
    }
}
