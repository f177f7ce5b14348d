//! Checks that every test vector of the Go library (`e2e/oracle/quantity`) is parsed, written and
//! computed alike.

use divvy_api::Quantity;
use divvy_api::quantity::Format;
use serde::Deserialize;

const VECTORS: &str = include_str!("../../e2e/oracle/vectors/quantity.json");

#[derive(Deserialize)]
struct Vectors {
    parse: Vec<Parse>,
    arithmetic: Vec<Pair>,
}

#[derive(Deserialize)]
struct Parse {
    #[serde(rename = "in")]
    text: String,
    ok: bool,
    #[serde(default)]
    canonical: String,
    #[serde(default)]
    format: String,
    #[serde(default)]
    nano: String,
    value: Option<String>,
}

#[derive(Deserialize)]
struct Pair {
    a: String,
    b: String,
    cmp: i32,
    sum: String,
    dif: String,
}

fn vectors() -> Vectors {
    serde_json::from_str(VECTORS).expect("vectors parse")
}

fn quantity(text: &str) -> Quantity {
    text.parse().unwrap_or_else(|error| panic!("{error}"))
}

/// The library drops the suffix of amounts above the largest one, and so writes another number. Our
/// text must read back.
fn check_text(ours: Quantity, theirs: &str, of: &str) {
    let text = ours.to_string();
    match theirs.parse::<Quantity>() {
        Ok(same) if same == ours => assert_eq!(text, theirs, "{of}"),
        _ => assert_eq!(quantity(&text), ours, "{of} is written as {text}"),
    }
}

#[test]
fn text_is_read_and_written_as_in_go() {
    let mut lossy = 0;
    for vector in vectors().parse {
        let of = format!("{:?}", vector.text);
        let ours = vector.text.parse::<Quantity>();
        let Ok(nano) = vector.nano.parse::<i128>() else {
            assert!(ours.is_err(), "{of} is {ours:?}");
            assert!(!vector.ok || vector.nano.len() > 38, "{of} is refused without need");
            continue;
        };
        let ours = ours.unwrap_or_else(|error| panic!("{of}: {error}"));
        assert_eq!(ours.as_nano(), nano, "{of}");
        let format = match ours.format() {
            Format::BinarySuffix => "BinarySI",
            Format::DecimalSuffix => "DecimalSI",
            Format::DecimalExponent => "DecimalExponent",
        };
        assert_eq!(format, vector.format, "{of}");
        check_text(ours, &vector.canonical, &of);
        lossy += usize::from(ours.to_string() != vector.canonical);
        if let Some(value) = vector.value {
            assert_eq!(ours.value().map(|value| value.to_string()), Some(value), "{of}");
        }
    }
    assert!(lossy < 60, "{lossy} texts differ from the library's");
}

#[test]
fn arithmetic_and_order_are_as_in_go() {
    for pair in vectors().arithmetic {
        let (a, b) = (quantity(&pair.a), quantity(&pair.b));
        assert_eq!(a.cmp(&b) as i32, pair.cmp, "{} and {}", pair.a, pair.b);
        check_text(a.checked_add(b).expect("in range"), &pair.sum, &format!("{} + {}", pair.a, pair.b));
        check_text(a.checked_sub(b).expect("in range"), &pair.dif, &format!("{} - {}", pair.a, pair.b));
    }
}
