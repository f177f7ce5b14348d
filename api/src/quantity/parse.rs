//! Parses quantities: a scanner over bytes, then integer arithmetic on the digits. Decimal digits
//! beyond nano-units are cut, and the result is rounded up if any was not zero. Binary fractions
//! are folded digit by digit. So the cost is linear in the length, and rounding is exact.

use super::{BINARY, Format, NANO, Quantity};

const FORMAT: &str = "write a number with a suffix such as 500m, 10Gi or 1e3";
const NUMBER: &str = "it has no digits";
const SUFFIX: &str = "unknown suffix; known are n u m k M G T P E, Ki Mi Gi Ti Pi Ei and e<number>";
const RANGE: &str = "the amount is out of range";

/// Larger binary amounts are capped at this.
pub(super) const BINARY_MAX: i128 = i64::MAX as i128 * NANO;

/// The parts of a text; `whole` has no leading zeros.
struct Parts<'a> {
    negative: bool,
    whole: &'a [u8],
    fraction: &'a [u8],
    /// Whether there is any digit, leading zeros included.
    has_digits: bool,
    suffix: &'a str,
}

pub(super) fn parse(text: &str) -> Result<Quantity, &'static str> {
    let parts = scan(text)?;
    let (nano, format) = match suffix(parts.suffix)? {
        Suffix::Binary(exponent) => {
            // The Go library reads a bare `Ki` as zero, but rejects a bare `Pi`.
            if !parts.has_digits && exponent > 40 {
                return Err(NUMBER);
            }
            let nano = binary(&parts, exponent);
            let small = 0 < nano && nano < NANO;
            (nano, if small { Format::DecimalSuffix } else { Format::BinarySuffix })
        }
        Suffix::Decimal(exponent, format) => {
            if !parts.has_digits && exponent < -9 {
                return Err(NUMBER);
            }
            (decimal(&parts, exponent)?, format)
        }
    };
    Ok(Quantity { nano: if parts.negative { -nano } else { nano }, format })
}

fn scan(text: &str) -> Result<Parts<'_>, &'static str> {
    if text.is_empty() {
        return Err(FORMAT);
    }
    let bytes = text.as_bytes();
    let run = |from: usize, keep: fn(&u8) -> bool| {
        from + bytes[from..].iter().position(|byte| !keep(byte)).unwrap_or(bytes.len() - from)
    };
    let signed = matches!(bytes[0], b'+' | b'-');
    let start = usize::from(signed);
    let nonzero = run(start, |byte| *byte == b'0');
    let whole_end = run(nonzero, u8::is_ascii_digit);
    let (fraction, end) = match bytes.get(whole_end) {
        Some(b'.') => {
            let end = run(whole_end + 1, u8::is_ascii_digit);
            (&bytes[whole_end + 1..end], end)
        }
        _ => (&bytes[..0], whole_end),
    };
    let letters = run(end, |byte| b"eEinumkKMGTP".contains(byte));
    let sign = usize::from(matches!(bytes.get(letters), Some(b'+' | b'-')));
    if run(letters + sign, u8::is_ascii_digit) != bytes.len() {
        return Err(FORMAT);
    }
    // The Go library reads a bare sign as zero.
    let bare_sign = nonzero == bytes.len();
    Ok(Parts {
        negative: bytes[0] == b'-',
        whole: &bytes[nonzero..whole_end],
        fraction,
        has_digits: whole_end > start || !fraction.is_empty() || bare_sign,
        suffix: text.get(end..).ok_or(FORMAT)?,
    })
}

enum Suffix {
    /// Exponent of 2.
    Binary(u32),
    /// Exponent of 10.
    Decimal(i64, Format),
}

fn suffix(text: &str) -> Result<Suffix, &'static str> {
    if let Some(at) = BINARY.iter().position(|name| *name == text) {
        return Ok(Suffix::Binary((at as u32 + 1) * 10));
    }
    if let Some(at) = super::DECIMAL.iter().position(|name| *name == text) {
        return Ok(Suffix::Decimal(at as i64 * 3 - 9, Format::DecimalSuffix));
    }
    let exponent = text.strip_prefix(['e', 'E']).ok_or(SUFFIX)?;
    let exponent: i64 = exponent.parse().map_err(|_| SUFFIX)?;
    i32::try_from(exponent).map_err(|_| RANGE)?;
    Ok(Suffix::Decimal(exponent, Format::DecimalExponent))
}

/// `whole.fraction * 10^exponent` in nano-units, rounded away from zero.
fn decimal(parts: &Parts<'_>, exponent: i64) -> Result<i128, &'static str> {
    let digits = || parts.whole.iter().chain(parts.fraction);
    let count = parts.whole.len() + parts.fraction.len();
    // Decimal places between the last digit and the nano-units.
    let shift = exponent + 9 - parts.fraction.len() as i64;
    let cut = usize::try_from(-shift).unwrap_or(0).min(count);
    let mut nano: i128 = 0;
    for digit in digits().take(count - cut) {
        nano =
            nano.checked_mul(10).and_then(|nano| nano.checked_add(i128::from(digit - b'0'))).ok_or(RANGE)?;
    }
    if digits().skip(count - cut).any(|digit| *digit != b'0') {
        nano = nano.checked_add(1).ok_or(RANGE)?;
    }
    if nano == 0 || shift <= 0 {
        return Ok(nano);
    }
    let power = u32::try_from(shift).ok().and_then(|shift| 10i128.checked_pow(shift)).ok_or(RANGE)?;
    nano.checked_mul(power).ok_or(RANGE)
}

/// `whole.fraction * 2^exponent` in nano-units, rounded up and capped.
fn binary(parts: &Parts<'_>, exponent: u32) -> i128 {
    // At most 2^60 * 10^9 < 2^90, so ten times that fits.
    let unit = NANO << exponent;
    let mut whole: i128 = 0;
    for digit in parts.whole {
        whole = (whole * 10 + i128::from(digit - b'0')).min(BINARY_MAX);
    }
    let mut fraction: i128 = 0;
    let mut rest = false;
    for digit in parts.fraction.iter().rev() {
        let tenfold = i128::from(digit - b'0') * unit + fraction;
        fraction = tenfold / 10;
        rest |= tenfold % 10 != 0;
    }
    let nano = whole.checked_mul(unit).and_then(|nano| nano.checked_add(fraction + i128::from(rest)));
    nano.unwrap_or(BINARY_MAX).min(BINARY_MAX)
}
