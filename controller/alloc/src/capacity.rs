//! Consumable capacity: the amount of each capacity that an allocation takes.

use crate::allocations::Amounts;
use divvy_api::Quantity;
use divvy_api::quantity::QuantityError;
use k8s_openapi::api::resource::v1::DeviceCapacity;
use std::collections::BTreeMap;

/// A capacity of a device, with its request policy.
#[derive(Clone, Debug)]
pub(crate) struct Capacity {
    value: Quantity,
    /// The amount for a request that does not name the capacity; all of it if `None`.
    default: Option<Quantity>,
    rule: Rule,
}

#[derive(Clone, Debug)]
enum Rule {
    /// The requested amount is taken as it is.
    AsRequested,
    /// The next larger value is taken. Ascending.
    OneOf(Vec<Quantity>),
    Range {
        min: Quantity,
        max: Option<Quantity>,
        step: Option<Quantity>,
    },
}

impl Capacity {
    pub(crate) fn read(wire: &DeviceCapacity) -> Result<Self, QuantityError> {
        let policy = wire.request_policy.as_ref();
        let range = policy.and_then(|policy| policy.valid_range.as_ref());
        let values =
            policy.and_then(|policy| policy.valid_values.as_ref()).filter(|values| !values.is_empty());
        let rule = match (range, values) {
            (Some(range), _) => Rule::Range {
                min: Quantity::try_from(&range.min)?,
                max: range.max.as_ref().map(Quantity::try_from).transpose()?,
                step: range.step.as_ref().map(Quantity::try_from).transpose()?,
            },
            (None, Some(values)) => {
                Rule::OneOf(values.iter().map(Quantity::try_from).collect::<Result<_, _>>()?)
            }
            (None, None) => Rule::AsRequested,
        };
        let default =
            policy.and_then(|policy| policy.default.as_ref()).map(Quantity::try_from).transpose()?;
        Ok(Self { value: Quantity::try_from(&wire.value)?, default, rule })
    }

    /// The amount that a request takes, or `None` if the policy forbids it.
    fn consumed(&self, requested: Option<Quantity>) -> Option<Quantity> {
        let taken = match (requested, &self.rule) {
            (None, _) => self.default.unwrap_or(self.value),
            (Some(requested), Rule::AsRequested) => requested,
            (Some(requested), Rule::OneOf(values)) => *values.iter().find(|value| requested <= **value)?,
            (Some(requested), Rule::Range { min, step, .. }) => round_up(requested, *min, *step)?,
        };
        (taken >= Quantity::ZERO && (Some(taken) == self.default || self.allows(taken))).then_some(taken)
    }

    fn allows(&self, taken: Quantity) -> bool {
        match &self.rule {
            Rule::AsRequested => true,
            Rule::OneOf(values) => values.contains(&taken),
            Rule::Range { min, max, step } => {
                max.is_none_or(|max| taken <= max) && round_up(taken, *min, *step) == Some(taken)
            }
        }
    }
}

/// The smallest `min + n * step` that is at least `requested`.
fn round_up(requested: Quantity, min: Quantity, step: Option<Quantity>) -> Option<Quantity> {
    let Some(step) = step else {
        return Some(requested.max(min));
    };
    let above = requested.as_nano().checked_sub(min.as_nano())?;
    if above <= 0 {
        return Some(min);
    }
    let step_nano = Some(step.as_nano()).filter(|step| *step > 0)?;
    let steps = above / step_nano + i128::from(above % step_nano != 0);
    let nano = steps.checked_mul(step_nano)?.checked_add(min.as_nano())?;
    Some(Quantity::from_nano(nano, step.format()))
}

/// The amounts that a request takes of all capacities of a device. `None` if it names a capacity
/// that the device does not have, or an amount that a policy forbids.
pub(crate) fn consumed<'a>(
    capacities: &BTreeMap<&'a str, Capacity>,
    requested: &Amounts<'_>,
) -> Option<Amounts<'a>> {
    if requested.keys().any(|name| !capacities.contains_key(name)) {
        return None;
    }
    let take = |(name, capacity): (&&'a str, &Capacity)| {
        Some((*name, capacity.consumed(requested.get(*name).copied())?))
    };
    capacities.iter().map(take).collect()
}

/// Whether the total amounts fit into the capacities.
pub(crate) fn fits(capacities: &BTreeMap<&str, Capacity>, all: &Amounts<'_>) -> bool {
    capacities.iter().all(|(name, capacity)| all.get(name).is_none_or(|sum| *sum <= capacity.value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn check(capacity: Value, requested: Option<&str>, taken: Option<&str>) {
        let wire: DeviceCapacity = serde_json::from_value(capacity.clone()).expect("a capacity");
        let capacities = BTreeMap::from([("memory", Capacity::read(&wire).expect("quantities"))]);
        let requested =
            requested.map(|amount| ("memory", amount.parse().expect("a quantity"))).into_iter().collect();
        let found = consumed(&capacities, &requested).map(|taken| taken["memory"].to_string());
        assert_eq!(found.as_deref(), taken, "{requested:?} of {capacity}");
    }

    #[test]
    fn without_policy_a_request_without_amount_takes_all() {
        let plain = json!({"value": "80Gi"});
        check(plain.clone(), None, Some("80Gi"));
        check(plain.clone(), Some("1"), Some("1"));
        check(plain, Some("-1"), None);
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
        check(range("0"), Some("2Gi"), None);
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
        let requested = BTreeMap::from([("tokens", Quantity::count(1))]);
        assert!(consumed(&BTreeMap::new(), &requested).is_none());
    }
}
