//! Quantities as people write them, and what they most likely mean.

use crate::quantity::Quantity;

/// Why a text is not a quantity, with the text that was meant.
pub(super) struct Misspelt {
    pub(super) message: String,
    pub(super) meant: Option<String>,
}

/// Explains a text that is not a quantity; `None` if it is one.
pub(super) fn misspelt(name: &str, text: &str) -> Option<Misspelt> {
    let cause = text.parse::<Quantity>().err()?;
    let shown: String = text.chars().take(64).collect();
    let Some(meant) = meant(text) else {
        return Some(Misspelt { message: format!("{name}: {cause}"), meant: None });
    };
    let why = match text.trim_end().ends_with('%') {
        true => "is not a number",
        false => "is not a quantity",
    };
    let message = format!("{name} is {shown:?}, which {why}; write {}", meant.join(" or "));
    Some(Misspelt { message, meant: meant.into_iter().next() })
}

/// The quantities that a text may mean.
fn meant(text: &str) -> Option<Vec<String>> {
    let text = text.trim().replace(',', ".");
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = (&text[..end], text[end..].trim().to_ascii_lowercase());
    if number.is_empty() || number.parse::<f64>().is_err() {
        return None;
    }
    let units: &[&str] = match unit.as_str() {
        "" | "%" | "percent" | "b" | "bytes" => &[""],
        "k" | "kb" => &["k", "Ki"],
        "m" | "mb" | "megabytes" => &["M", "Mi"],
        "g" | "gb" | "gigabytes" => &["G", "Gi"],
        "t" | "tb" => &["T", "Ti"],
        "ki" | "kib" => &["Ki"],
        "mi" | "mib" => &["Mi"],
        "gi" | "gib" => &["Gi"],
        "ti" | "tib" => &["Ti"],
        _ => return None,
    };
    Some(units.iter().map(|unit| format!("{number}{unit}")).collect())
}

/// The remedy for an amount of memory below 1Mi, as written.
pub(super) fn too_small(amount: Quantity, text: &str) -> String {
    match amount.value() {
        Some(1..=512) if text.bytes().all(|byte| byte.is_ascii_digit()) => {
            format!("write {text}Gi if GiB was meant, or {text}Mi")
        }
        Some(1..) if text.bytes().all(|byte| byte.is_ascii_digit()) => {
            format!("write {text}Mi if MiB was meant")
        }
        _ => "write an amount such as 10Gi".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_names_the_quantity_that_was_meant() {
        let check = |text: &str, expected: &str| {
            let message = misspelt("memory", text).map(|misspelt| misspelt.message).unwrap_or_default();
            assert!(message.ends_with(expected), "{text}: {message}");
        };
        check("10GB", "memory is \"10GB\", which is not a quantity; write 10G or 10Gi");
        check("30%", "is not a number; write 30");
        check("10 Gi", "write 10Gi");
        check("10gib", "write 10Gi");
        check("512mb", "write 512M or 512Mi");
        check("10,5Gi", "write 10.5Gi");
        check("much", "write a number with a suffix such as 500m, 10Gi or 1e3");
        assert!(misspelt("memory", "10Gi").is_none());
    }

    #[test]
    fn small_memory_gets_the_missing_unit() {
        let check = |text: &str, expected: &str| {
            assert_eq!(too_small(text.parse().unwrap(), text), expected);
        };
        check("10000", "write 10000Mi if MiB was meant");
        check("40", "write 40Gi if GiB was meant, or 40Mi");
        check("10m", "write an amount such as 10Gi");
    }
}
