//! Properties of all quantities.

use divvy_api::Quantity;
use divvy_api::quantity::Format;
use proptest::prelude::*;

fn format() -> impl Strategy<Value = Format> {
    prop_oneof![Just(Format::BinarySuffix), Just(Format::DecimalSuffix), Just(Format::DecimalExponent)]
}

fn amount() -> impl Strategy<Value = i128> {
    // Round amounts too, because they use large suffixes.
    let round = (any::<i32>(), 0u32..30).prop_map(|(n, e)| i128::from(n).saturating_mul(10i128.pow(e)));
    let binary = (any::<i32>(), 0u32..60).prop_map(|(n, e)| (i128::from(n) << e) * 1_000_000_000);
    prop_oneof![any::<i64>().prop_map(i128::from), round, binary]
        .prop_filter("binary amounts end at 2^63", |nano| {
            nano.unsigned_abs() <= i64::MAX as u128 * 1_000_000_000
        })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn written_quantity_reads_back(nano in amount(), format in format()) {
        let quantity = Quantity::from_nano(nano, format);
        let text = quantity.to_string();
        let back: Quantity = text.parse().expect(&text);
        prop_assert_eq!(back, quantity);
    }

    #[test]
    fn order_is_by_value(a in amount(), b in amount(), fa in format(), fb in format()) {
        let (x, y) = (Quantity::from_nano(a, fa), Quantity::from_nano(b, fb));
        prop_assert_eq!(x.cmp(&y), a.cmp(&b));
        prop_assert_eq!(x == y, a == b);
    }

    #[test]
    fn subtraction_reverses_addition(a in amount(), b in amount(), f in format()) {
        let (x, y) = (Quantity::from_nano(a, f), Quantity::from_nano(b, f));
        let sum = x.checked_add(y).expect("in range");
        prop_assert_eq!(sum.checked_sub(y), Some(x));
    }

    #[test]
    fn no_text_panics(
        text in ".*",
        shape in "[-+]?[0-9]{0,60}[.]?[0-9]{0,60}[eEinumkKMGTP]{0,3}[-+]?[0-9]{0,20}",
    ) {
        for text in [text, shape] {
            if let Ok(quantity) = text.parse::<Quantity>() {
                prop_assert_eq!(quantity.to_string().parse::<Quantity>(), Ok(quantity));
            }
        }
    }
}

#[test]
fn bytes_are_rounded_up_and_never_negative() {
    let check = |text: &str, bytes: Option<u64>| {
        assert_eq!(text.parse::<Quantity>().expect(text).as_bytes(), bytes, "{text}");
    };
    check("0", Some(0));
    check("1Gi", Some(1 << 30));
    check("1500m", Some(2));
    check("-1", None);
    check("-1n", None);
    check("18446744073709551615", Some(u64::MAX));
    check("18446744073709551616", None);
}

#[test]
fn error_names_the_text() {
    let error = "12 apples".parse::<Quantity>().expect_err("not a quantity");
    assert!(error.to_string().starts_with("\"12 apples\" is not a quantity: "), "{error}");
}
