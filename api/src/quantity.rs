//! Kubernetes quantities, exact: a count of nano-units in an `i128`, and the
//! format (binary suffix, decimal suffix, decimal exponent) in which it is written.
//!
//! Equality and order are by value, never by text: the API server rewrites
//! `1024Mi` as `1Gi`, and a publisher that compares text updates for ever.
//!
//! What is read, how it is rounded and capped, and how it is written are those of
//! `k8s.io/apimachinery/pkg/api/resource`, held by vectors which that library wrote.
//! Three deliberate differences, all far from anything a device has:
//! - an amount of more than 1.7e29 is an error (the library keeps any size);
//! - an exponent beyond 32 bits is an error (the library lets it wrap);
//! - an amount above the largest suffix is written so that it reads back, as
//!   `1000E` (the library writes `1`).

mod parse;

use std::fmt;

/// How a quantity is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `Ki`, `Mi`, ... (Go: `BinarySI`).
    BinarySuffix,
    /// `k`, `M`, `m`, ... (Go: `DecimalSI`).
    DecimalSuffix,
    /// `1e3` (Go: `DecimalExponent`).
    DecimalExponent,
}

/// An exact amount. `Ord`, `Eq` and `Hash` are by value.
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

/// Suffixes by exponent: of 1024 from `Ki`, of 1000 from `n`.
const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
const DECIMAL: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];

impl Quantity {
    /// Nothing.
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

    /// The format in which it was written.
    pub fn format(self) -> Format {
        self.format
    }

    /// The whole number, fractions rounded away from zero; `None` beyond an `i64`.
    pub fn value(self) -> Option<i64> {
        let whole = self.nano / NANO;
        let away = if self.nano % NANO == 0 { 0 } else { self.nano.signum() };
        i64::try_from(whole + away).ok()
    }

    /// The number of bytes, a part of one counted as one; `None` when negative or beyond a `u64`.
    pub fn as_bytes(self) -> Option<u64> {
        let whole = self.nano / NANO + i128::from(self.nano % NANO > 0);
        if self.nano < 0 { None } else { u64::try_from(whole).ok() }
    }

    /// Whether nothing is lost by taking [`Quantity::value`].
    pub fn is_whole(self) -> bool {
        self.nano % NANO == 0
    }

    /// The sum, in the format of the first that is not zero; `None` when out of range.
    pub fn checked_add(self, other: Self) -> Option<Self> {
        Some(Self { nano: self.nano.checked_add(other.nano)?, format: self.format_with(other) })
    }

    /// The difference, in the format of the first that is not zero; `None` when out of range.
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        Some(Self { nano: self.nano.checked_sub(other.nano)?, format: self.format_with(other) })
    }

    fn format_with(self, other: Self) -> Format {
        if self.nano == 0 { other.format } else { self.format }
    }

    /// The format it is written in: an amount that is small, broken or beyond
    /// what a binary suffix may say is decimal, so that nothing is lost.
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

/// Divides as long as it goes without a rest, at most `most` times.
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

/// The canonical form: no fraction, the largest suffix that loses nothing.
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
