//! The CEL variable `device`, whose fields are resolved on access.

use super::quantity::QuantityVal;
use super::semver::SemverVal;
use ::cel::ExecutionError;
use ::cel::common::traits::{Container, Indexer};
use ::cel::common::types::{CelBool, CelInt, CelList, CelMap, CelMapKey, CelString, MAP_TYPE, Type};
use ::cel::common::value::{CowVal, Val};
use divvy_api::Quantity;
use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, DeviceCapacity};
use std::collections::{BTreeMap, HashMap};

static DEVICE: Type = Type::new_unspecified_type("kubernetes.DRADevice");

/// A device and its driver.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceVal<'w> {
    driver: &'w str,
    wire: &'w Device,
}

impl<'w> DeviceVal<'w> {
    pub(super) fn new(driver: &'w str, wire: &'w Device) -> Self {
        Self { driver, wire }
    }

    fn field(&self, name: &str) -> Result<Box<dyn Val + 'w>, ExecutionError> {
        let domains = |field| Box::new(Domains { driver: self.driver, field });
        match name {
            "driver" => Ok(Box::new(CelString::from(self.driver))),
            "allowMultipleAllocations" => {
                Ok(Box::new(CelBool::from(self.wire.allow_multiple_allocations == Some(true))))
            }
            "attributes" => Ok(domains(Field::Attributes(self.wire.attributes.as_ref()))),
            "capacity" => Ok(domains(Field::Capacity(self.wire.capacity.as_ref()))),
            _ => Err(ExecutionError::no_such_key(name)),
        }
    }
}

/// `device.attributes` and `device.capacity`: a map from domains to names. A domain without
/// entries is an empty map.
#[derive(Clone, Copy, Debug)]
struct Domains<'w> {
    driver: &'w str,
    field: Field<'w>,
}

#[derive(Clone, Copy, Debug)]
enum Field<'w> {
    Attributes(Option<&'w BTreeMap<String, DeviceAttribute>>),
    Capacity(Option<&'w BTreeMap<String, DeviceCapacity>>),
}

impl<'w> Domains<'w> {
    /// The domain and the bare name of a name. Without a domain it belongs to the driver's.
    fn split(&self, name: &'w str) -> (&'w str, &'w str) {
        name.split_once('/').unwrap_or((self.driver, name))
    }

    fn domain(&self, domain: &str) -> Result<CelMap<'w>, ExecutionError> {
        let mut names: HashMap<CelMapKey<'w>, Box<dyn Val + 'w>> = HashMap::new();
        match self.field {
            Field::Attributes(attributes) => {
                for (name, value) in attributes.into_iter().flatten() {
                    if let (found, name) = self.split(name)
                        && found == domain
                    {
                        names.insert(name.into(), attribute(name, value)?);
                    }
                }
            }
            Field::Capacity(capacities) => {
                for (name, capacity) in capacities.into_iter().flatten() {
                    if let (found, name) = self.split(name)
                        && found == domain
                    {
                        let amount = Quantity::try_from(&capacity.value);
                        let amount =
                            amount.map_err(|cause| ExecutionError::function_error("capacity", cause))?;
                        names.insert(name.into(), Box::new(QuantityVal(amount)));
                    }
                }
            }
        }
        Ok(names.into())
    }

    fn has(&self, domain: &str) -> bool {
        let is = |name: &'w String| self.split(name).0 == domain;
        match self.field {
            Field::Attributes(attributes) => attributes.into_iter().flatten().any(|(name, _)| is(name)),
            Field::Capacity(capacities) => capacities.into_iter().flatten().any(|(name, _)| is(name)),
        }
    }
}

fn attribute<'w>(name: &str, value: &'w DeviceAttribute) -> Result<Box<dyn Val + 'w>, ExecutionError> {
    let version =
        |text: &str| SemverVal::parse(text).map_err(|cause| ExecutionError::function_error(name, cause));
    let list = |items: Vec<Box<dyn Val + 'w>>| -> Box<dyn Val + 'w> { Box::new(CelList::from(items)) };
    if let Some(value) = value.bool {
        Ok(Box::new(CelBool::from(value)))
    } else if let Some(value) = value.int {
        Ok(Box::new(CelInt::from(value)))
    } else if let Some(value) = &value.string {
        Ok(Box::new(CelString::from(value.as_str())))
    } else if let Some(value) = &value.version {
        Ok(Box::new(version(value)?))
    } else if let Some(values) = &value.bools {
        Ok(list(values.iter().map(|value| Box::new(CelBool::from(*value)) as Box<dyn Val>).collect()))
    } else if let Some(values) = &value.ints {
        Ok(list(values.iter().map(|value| Box::new(CelInt::from(*value)) as Box<dyn Val>).collect()))
    } else if let Some(values) = &value.strings {
        let text = |value: &'w String| Box::new(CelString::from(value.as_str())) as Box<dyn Val + 'w>;
        Ok(list(values.iter().map(text).collect()))
    } else if let Some(values) = &value.versions {
        let versions = values.iter().map(|value| Ok(Box::new(version(value)?) as Box<dyn Val>));
        Ok(list(versions.collect::<Result<_, ExecutionError>>()?))
    } else {
        Err(ExecutionError::function_error(name, "the attribute has no value of a known type"))
    }
}

fn key(index: &dyn Val) -> Result<&str, ExecutionError> {
    match index.downcast_ref::<CelString<'_>>() {
        Some(text) => Ok(text.inner()),
        None => Err(ExecutionError::UnexpectedType {
            got: index.get_type().name().to_owned(),
            want: "string".to_owned(),
        }),
    }
}

impl<'w> Indexer for DeviceVal<'w> {
    fn get<'b, 'v>(&'b self, index: &dyn Val) -> Result<CowVal<'b, 'v>, ExecutionError>
    where
        Self: 'v,
    {
        Ok(CowVal::Owned(self.field(key(index)?)?))
    }

    fn steal<'v>(self: Box<Self>, index: &dyn Val) -> Result<Box<dyn Val + 'v>, ExecutionError>
    where
        Self: 'v,
    {
        self.field(key(index)?)
    }
}

impl<'w> Indexer for Domains<'w> {
    fn get<'b, 'v>(&'b self, index: &dyn Val) -> Result<CowVal<'b, 'v>, ExecutionError>
    where
        Self: 'v,
    {
        Ok(CowVal::owned(self.domain(key(index)?)?))
    }

    fn steal<'v>(self: Box<Self>, index: &dyn Val) -> Result<Box<dyn Val + 'v>, ExecutionError>
    where
        Self: 'v,
    {
        Ok(Box::new(self.domain(key(index)?)?))
    }
}

impl Container for Domains<'_> {
    fn contains(&self, value: &dyn Val) -> Result<bool, ExecutionError> {
        Ok(self.has(key(value)?))
    }
}

impl Val for DeviceVal<'_> {
    fn get_type(&self) -> &Type {
        &DEVICE
    }

    fn cel_type() -> &'static Type {
        &DEVICE
    }

    fn as_indexer<'b, 'v>(&'b self) -> Option<&'b (dyn Indexer + 'v)>
    where
        Self: 'v,
    {
        Some(self)
    }

    fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v>
    where
        Self: 'v,
    {
        Box::new(*self)
    }
}

impl Val for Domains<'_> {
    fn get_type(&self) -> &Type {
        &MAP_TYPE
    }

    fn cel_type() -> &'static Type {
        &MAP_TYPE
    }

    fn as_indexer<'b, 'v>(&'b self) -> Option<&'b (dyn Indexer + 'v)>
    where
        Self: 'v,
    {
        Some(self)
    }

    fn as_container(&self) -> Option<&dyn Container> {
        Some(self)
    }

    fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v>
    where
        Self: 'v,
    {
        Box::new(*self)
    }
}
