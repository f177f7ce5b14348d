//! Kubernetes quantities, exact: a count of nano-units in an `i128`, and the
//! format (binary suffix, decimal suffix, decimal exponent) in which it is written.
//!
//! Equality and order are by value, never by text: the API server rewrites
//! `1024Mi` as `1Gi`, and a publisher that compares text updates for ever.

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

impl Quantity {
    /// A count of bytes, written with binary suffixes.
    pub fn bytes(bytes: u64) -> Self {
        Self { nano: i128::from(bytes) * NANO, format: Format::BinarySuffix }
    }

    /// A plain count, written with decimal suffixes.
    pub fn count(count: u64) -> Self {
        Self { nano: i128::from(count) * NANO, format: Format::DecimalSuffix }
    }
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
        Err(QuantityError { text: text.to_owned(), cause: "not implemented yet" })
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.nano / NANO)
    }
}

impl TryFrom<&k8s_openapi::apimachinery::pkg::api::resource::Quantity> for Quantity {
    type Error = QuantityError;
    fn try_from(wire: &k8s_openapi::apimachinery::pkg::api::resource::Quantity) -> Result<Self, QuantityError> {
        wire.0.parse()
    }
}

impl From<Quantity> for k8s_openapi::apimachinery::pkg::api::resource::Quantity {
    fn from(quantity: Quantity) -> Self {
        Self(quantity.to_string())
    }
}
