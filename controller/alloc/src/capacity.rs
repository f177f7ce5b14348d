//! Consumable capacity: the amount of each capacity that an allocation takes.

use crate::allocations::Amounts;
use crate::names::canonical;
use crate::release::Release;
use divvy_api::Quantity;
use divvy_api::quantity::QuantityError;
use k8s_openapi::api::resource::v1::DeviceCapacity;
use std::collections::BTreeMap;

/// Nano-units in a thousandth.
const MILLI_NANO: i128 = 1_000_000;

/// A capacity of a device, with its request policy.
#[derive(Clone, Debug)]
pub(crate) struct Capacity<'a> {
    /// The name as published.
    pub(crate) name: &'a str,
    value: Quantity,
    /// The amount for a request that does not name the capacity; all of it if `None`.
    default: Option<Quantity>,
    rule: Rule,
}

/// The capacities of a device, by canonical name.
pub(crate) type Capacities<'a> = BTreeMap<&'a str, Capacity<'a>>;

#[derive(Clone, Debug)]
enum Rule {
    /// The requested amount is taken as it is.
    AsRequested,
    /// The next larger value is taken. Ascending.
    OneOf(Vec<Quantity>),
    Range(Range),
}

#[derive(Clone, Debug)]
struct Range {
    min: Quantity,
    max: Option<Quantity>,
    step: Option<Quantity>,
}

/// Reads the capacities of a driver's device. If one is there twice, with and without the driver's
/// domain, the name with the domain counts.
pub(crate) fn read<'a>(
    release: Release,
    driver: &str,
    wire: &'a BTreeMap<String, DeviceCapacity>,
) -> Result<Capacities<'a>, String> {
    let mut capacities = Capacities::new();
    for (name, capacity) in wire {
        let key = canonical(release, driver, name);
        if key == name && capacities.contains_key(key) {
            continue;
        }
        let capacity = Capacity::read(name, capacity).map_err(|cause| format!("capacity {name}: {cause}"))?;
        capacities.insert(key, capacity);
    }
    Ok(capacities)
}

impl<'a> Capacity<'a> {
    fn read(name: &'a str, wire: &DeviceCapacity) -> Result<Self, QuantityError> {
        let policy = wire.request_policy.as_ref();
        let range = policy.and_then(|policy| policy.valid_range.as_ref());
        let values =
            policy.and_then(|policy| policy.valid_values.as_ref()).filter(|values| !values.is_empty());
        let rule = match (range, values) {
            (Some(range), _) => Rule::Range(Range {
                min: Quantity::try_from(&range.min)?,
                max: range.max.as_ref().map(Quantity::try_from).transpose()?,
                step: range.step.as_ref().map(Quantity::try_from).transpose()?,
            }),
            (None, Some(values)) => {
                Rule::OneOf(values.iter().map(Quantity::try_from).collect::<Result<_, _>>()?)
            }
            (None, None) => Rule::AsRequested,
        };
        let default =
            policy.and_then(|policy| policy.default.as_ref()).map(Quantity::try_from).transpose()?;
        Ok(Self { name, value: Quantity::try_from(&wire.value)?, default, rule })
    }

    /// In nano-units.
    pub(crate) fn value(&self) -> i128 {
        self.value.as_nano()
    }

    /// The amount that a request takes.
    ///
    /// # Errors
    ///
    /// Fails if the scheduler would stop: on amounts that are negative or beyond its integers.
    fn consumed(&self, release: Release, requested: Option<Quantity>) -> Result<Quantity, String> {
        if let Some(requested) = requested
            && requested < Quantity::ZERO
            && release.refuses_negative_requests()
        {
            return Err(format!("the request {requested} is negative"));
        }
        let taken = match (requested, &self.rule) {
            (None, _) => self.default.unwrap_or(self.value),
            (Some(requested), Rule::AsRequested) => requested,
            (Some(requested), Rule::OneOf(values)) => {
                *values.iter().find(|value| requested <= **value).unwrap_or(&requested)
            }
            (Some(requested), Rule::Range(range)) => range.round_up(release, requested)?,
        };
        if taken < Quantity::ZERO { Err(format!("the amount {taken} is negative")) } else { Ok(taken) }
    }

    /// Whether the policy allows an amount.
    fn allows(&self, release: Release, taken: Quantity) -> bool {
        if Some(taken) == self.default {
            return true;
        }
        match &self.rule {
            Rule::AsRequested => true,
            Rule::OneOf(values) => values.contains(&taken),
            Rule::Range(range) => range.contains(release, taken),
        }
    }
}

impl Range {
    /// The smallest `min + n * step` that is at least `requested`, in thousandths if the range needs
    /// them, otherwise in whole numbers. Both have 64 bits, as in the scheduler.
    fn round_up(&self, release: Release, requested: Quantity) -> Result<Quantity, String> {
        if requested < self.min {
            return Ok(self.min);
        }
        let Some(step) = self.step else {
            return Ok(requested);
        };
        let beyond = || format!("the amount {requested} cannot be rounded up to the next step");
        let unit = self.unit(release);
        let count = |amount| unit.count(amount).ok_or_else(beyond);
        let (from, step_count) = (count(self.min)?, count(step)?);
        let above = count(requested)? - from;
        let steps = above.checked_div(step_count).ok_or_else(beyond)? + i128::from(above % step_count != 0);
        let rounded = from + steps * step_count;
        i64::try_from(rounded).map_err(|_| beyond())?;
        Ok(Quantity::from_nano(rounded * unit.nano(), step.format()))
    }

    fn contains(&self, release: Release, taken: Quantity) -> bool {
        let on_step = |step| {
            let unit = self.unit(release);
            let above = unit.count(taken)?.checked_sub(unit.count(self.min)?)?;
            Some(above.checked_rem(unit.count(step)?)? == 0)
        };
        self.max.is_none_or(|max| taken <= max) && self.step.is_none_or(|step| on_step(step) == Some(true))
    }

    fn unit(&self, release: Release) -> Unit {
        let ends = [Some(self.min), self.max, self.step];
        let exact = ends.iter().flatten().all(|amount| Unit::Milli.count(*amount).is_some());
        let divisible = self.step.is_none_or(|step| step.as_nano() >= MILLI_NANO);
        match release.has_fractional_ranges() && exact && divisible {
            true => Unit::Milli,
            false => Unit::Whole,
        }
    }
}

/// The unit of the scheduler's arithmetic.
#[derive(Clone, Copy)]
enum Unit {
    Milli,
    Whole,
}

impl Unit {
    fn nano(self) -> i128 {
        match self {
            Self::Milli => MILLI_NANO,
            Self::Whole => 1000 * MILLI_NANO,
        }
    }

    /// The amount in this unit; `None` beyond 64 bits. Whole numbers are rounded away from zero,
    /// thousandths must be exact.
    fn count(self, amount: Quantity) -> Option<i128> {
        match self {
            Self::Whole => amount.value().map(i128::from),
            Self::Milli => {
                let exact = amount.as_nano() % MILLI_NANO == 0;
                let milli = i64::try_from(amount.as_nano() / MILLI_NANO).ok();
                milli.filter(|_| exact).map(i128::from)
            }
        }
    }
}

/// The amounts that a request takes of all capacities of a driver's device, in their order. `None`
/// if it names a capacity that the device does not have, or an amount that a policy forbids.
///
/// # Errors
///
/// Fails if the scheduler would stop, see [`Capacity::consumed`].
pub(crate) fn consumed(
    release: Release,
    driver: &str,
    capacities: &Capacities<'_>,
    requested: &Amounts<'_>,
) -> Result<Option<Vec<Quantity>>, String> {
    let mut resolved = Amounts::new();
    for (name, amount) in requested {
        let key = canonical(release, driver, name);
        if !capacities.contains_key(key) {
            return Ok(None);
        }
        if resolved.insert(key, *amount).is_some() {
            return Err(format!("capacity {key} is requested twice, with and without the driver's name"));
        }
    }
    let mut taken = Vec::with_capacity(capacities.len());
    for (key, capacity) in capacities {
        let amount = capacity.consumed(release, resolved.get(key).copied());
        taken.push(amount.map_err(|cause| format!("capacity {key}: {cause}"))?);
    }
    let allowed = capacities.values().zip(&taken).all(|(capacity, amount)| capacity.allows(release, *amount));
    Ok(allowed.then_some(taken))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const DRIVER: &str = "gpu.divvy.dev";

    fn taken(
        release: Release,
        published: (&str, Value),
        requested: &[(&str, &str)],
    ) -> Result<Option<String>, String> {
        let (name, capacity) = published;
        let wire = BTreeMap::from([(name.to_owned(), serde_json::from_value(capacity).expect("a capacity"))]);
        let capacities = read(release, DRIVER, &wire).expect("quantities");
        let amount = |text: &str| text.parse().expect("a quantity");
        let requested = requested.iter().map(|(name, text)| (*name, amount(text))).collect();
        let found = consumed(release, DRIVER, &capacities, &requested)?;
        Ok(found.map(|taken| taken[0].to_string()))
    }

    fn check(capacity: Value, requested: Option<&str>, expected: Option<&str>) {
        let requested: Vec<_> = requested.map(|amount| ("memory", amount)).into_iter().collect();
        let found = taken(Release::V1_37, ("memory", capacity.clone()), &requested);
        assert_eq!(found, Ok(expected.map(str::to_owned)), "{requested:?} of {capacity}");
    }

    fn check_error(release: Release, capacity: Value, requested: &str) {
        let found = taken(release, ("memory", capacity.clone()), &[("memory", requested)]);
        assert!(found.is_err(), "{requested} of {capacity}: {found:?}");
    }

    #[test]
    fn without_policy_a_request_without_amount_takes_all() {
        let plain = json!({"value": "80Gi"});
        check(plain.clone(), None, Some("80Gi"));
        check(plain.clone(), Some("1"), Some("1"));
        check_error(Release::V1_37, plain, "-1");
    }

    #[test]
    fn default_applies_to_requests_without_amount() {
        let zero = json!({"value": "132", "requestPolicy": {"default": "0", "validValues": ["0"]}});
        check(zero.clone(), None, Some("0"));
        check(zero, Some("1"), None);
    }

    #[test]
    fn range_rounds_up_to_its_step() {
        let range = |step: &str| {
            json!({"value": "80Gi", "requestPolicy": {
                "default": "80Gi", "validRange": {"min": "1Gi", "max": "79Gi", "step": step},
            }})
        };
        check(range("1Gi"), None, Some("80Gi"));
        check(range("1Gi"), Some("0"), Some("1Gi"));
        check(range("1Gi"), Some("1Gi"), Some("1Gi"));
        check(range("1Gi"), Some("1025Mi"), Some("2Gi"));
        check(range("1Gi"), Some("1500m"), Some("1Gi"));
        check(range("1Gi"), Some("79Gi"), Some("79Gi"));
        check(range("1Gi"), Some("80Gi"), Some("80Gi"));
        check(range("1Gi"), Some("81Gi"), None);
        check_error(Release::V1_37, range("0"), "2Gi");
    }

    #[test]
    fn next_larger_valid_value_is_taken() {
        let values = json!({"value": "8", "requestPolicy": {"default": "1", "validValues": ["1", "2", "4"]}});
        check(values.clone(), Some("3"), Some("4"));
        check(values.clone(), Some("2"), Some("2"));
        check(values, Some("5"), None);
    }

    #[test]
    fn unknown_capacity_is_refused() {
        let plain = ("memory", json!({"value": "80Gi"}));
        assert_eq!(taken(Release::V1_37, plain, &[("tokens", "1")]), Ok(None));
    }

    #[test]
    fn range_has_thousandths_since_1_37() {
        let cores = json!({"value": "2", "requestPolicy": {
            "default": "1", "validRange": {"min": "100m", "step": "100m"},
        }});
        let of = |release| taken(release, ("cores", cores.clone()), &[("cores", "250m")]);
        assert_eq!(of(Release::V1_37), Ok(Some("300m".to_owned())));
        assert_eq!(of(Release::V1_36), Ok(Some("1".to_owned())));
    }

    #[test]
    fn amounts_beyond_64_bits_are_errors() {
        let range = json!({"value": "80Gi", "requestPolicy": {
            "default": "1Gi", "validRange": {"min": "1Gi", "step": "1Gi"},
        }});
        for amount in ["8Ei", "9223372036854775807", "1e20"] {
            check_error(Release::V1_37, range.clone(), amount);
        }
        check(json!({"value": "1e21"}), Some("1e20"), Some("100e18"));
    }

    #[test]
    fn negative_request_is_an_error_since_1_38() {
        let range = json!({"value": "8", "requestPolicy": {"default": "1", "validRange": {"min": "1"}}});
        check(range.clone(), Some("-1"), Some("1"));
        check_error(Release::V1_38, range, "-1");
    }

    #[test]
    fn driver_domain_is_optional_since_1_38() {
        let (bare, full) = ("memory", "gpu.divvy.dev/memory");
        for (published, requested) in [(bare, full), (full, bare), (full, full)] {
            let of = |release| taken(release, (published, json!({"value": "80Gi"})), &[(requested, "1Gi")]);
            assert_eq!(of(Release::V1_38), Ok(Some("1Gi".to_owned())));
            assert_eq!(of(Release::V1_37).map(|taken| taken.is_some()), Ok(published == requested));
        }
        let twice = [(bare, "1Gi"), (full, "2Gi")];
        assert!(taken(Release::V1_38, (bare, json!({"value": "80Gi"})), &twice).is_err());
    }
}
