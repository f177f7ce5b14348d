//! The parameters of configurations as they were written.

use serde_json::value::RawValue;
use std::collections::BTreeMap;

/// The text of `opaque.parameters` of each configuration in the list at `path`, in order; empty if
/// there is no such list.
pub(super) fn parameters<'a>(json: &'a [u8], path: &[&str]) -> Vec<Option<&'a str>> {
    let list = serde_json::from_slice(json).ok().and_then(|root| below(root, path));
    let list: Vec<&RawValue> =
        list.and_then(|list| serde_json::from_str(list.get()).ok()).unwrap_or_default();
    list.into_iter().map(|config| Some(below(config, &["opaque", "parameters"])?.get())).collect()
}

fn below<'a>(value: &'a RawValue, path: &[&str]) -> Option<&'a RawValue> {
    let Some((first, rest)) = path.split_first() else { return Some(value) };
    let fields: BTreeMap<String, &RawValue> = serde_json::from_str(value.get()).ok()?;
    below(fields.get(*first)?, rest)
}
