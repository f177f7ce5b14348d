//! The requests of a pod as the webhook records them, and the template of each.
//!
//! The annotation holds requests and not templates. A user can write it, but the controller creates
//! only templates of [`Ported`] requests from it, under names that are hashes of these requests.

use divvy_api::foreign::Ported;
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt;

/// The label of pods whose requests were ported; the controller watches only these.
pub const PORTED_LABEL: &str = "gpu.divvy.dev/ported";
/// The annotation with the requests, by the name of their template.
pub const REQUESTS_ANNOTATION: &str = "gpu.divvy.dev/ported-requests";
/// The label of the templates.
pub(super) const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "divvy");
/// Bytes of the hash in a template's name.
const HASH_BYTES: usize = 8;
/// A pod has few containers with GPUs; this bounds what a forged annotation can create.
const REQUESTS_MAX: usize = 32;

/// A [`Ported`] request as it is stored. Its JSON has one form, because the name is a hash of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    class: String,
    count: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    memory: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cores: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    profile: Option<String>,
}

impl From<&Ported> for Stored {
    fn from(request: &Ported) -> Self {
        let Ported { class, count, memory, cores, profile } = request.clone();
        Self { class, count, memory: memory.map(|memory| memory.to_string()), cores, profile }
    }
}

impl Stored {
    fn request(&self) -> Option<Ported> {
        let Self { class, count, memory, cores, profile } = self.clone();
        let memory = memory.map(|memory| memory.parse()).transpose().ok()?;
        Some(Ported { class, count, memory, cores, profile })
    }
}

impl fmt::Display for Stored {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} x {}", self.count, self.class)?;
        self.memory.iter().try_for_each(|memory| write!(out, ", memory {memory}"))?;
        self.cores.iter().try_for_each(|cores| write!(out, ", cores {cores}"))
    }
}

/// The requests of one pod, by the name of their template.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record(BTreeMap<String, Ported>);

impl Record {
    /// The record of these requests.
    pub fn of(requests: impl IntoIterator<Item = Ported>) -> Self {
        Self(requests.into_iter().map(|request| (template_name(&request), request)).collect())
    }

    /// Reads the annotation. Entries whose name is not the hash of their request are dropped.
    pub fn parse(text: &str) -> Option<Self> {
        let stored: BTreeMap<String, Stored> = serde_json::from_str(text).ok()?;
        let requests = stored.into_iter().filter_map(|(name, stored)| Some((name, stored.request()?)));
        let requests: BTreeMap<_, _> =
            requests.filter(|(name, request)| *name == template_name(request)).collect();
        (!requests.is_empty() && requests.len() <= REQUESTS_MAX).then_some(Self(requests))
    }

    /// The value of the annotation.
    pub fn text(&self) -> String {
        let stored: BTreeMap<&String, Stored> =
            self.0.iter().map(|(name, request)| (name, request.into())).collect();
        serde_json::to_string(&stored).unwrap_or_default()
    }

    /// Names of templates and their requests.
    pub fn requests(&self) -> impl Iterator<Item = (&str, &Ported)> {
        self.0.iter().map(|(name, request)| (name.as_str(), request))
    }
}

/// The name of the template: a hash of the request.
pub fn template_name(request: &Ported) -> String {
    let text = serde_json::to_vec(&Stored::from(request)).unwrap_or_default();
    let hash = Sha256::digest(&text);
    let hex: String = hash.iter().take(HASH_BYTES).map(|byte| format!("{byte:02x}")).collect();
    format!("divvy-{hex}")
}

/// The request in words, for the log.
pub(super) fn summary(request: &Ported) -> String {
    Stored::from(request).to_string()
}

/// Whether the controller created a template.
pub fn is_managed(template: &ResourceClaimTemplate) -> bool {
    let label = template.metadata.labels.as_ref().and_then(|labels| labels.get(MANAGED_BY.0));
    label.is_some_and(|value| value == MANAGED_BY.1)
}

/// The template of a request, with our labels.
pub(super) fn template(name: &str, request: &Ported) -> ResourceClaimTemplate {
    let mut template = request.template(name);
    let labels = [MANAGED_BY, ("app.kubernetes.io/part-of", "divvy")];
    let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
    template.metadata.labels = Some(labels.into());
    template
}

/// A share of that size, for tests.
#[cfg(test)]
pub(crate) fn example(memory_mib: u64, cores: u32) -> Ported {
    Ported {
        class: "share.divvy.dev".to_owned(),
        count: 1,
        memory: Some(divvy_api::Quantity::bytes(memory_mib << 20)),
        cores: Some(cores),
        profile: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn annotation_round_trips() {
        let record = Record::of([example(1024, 30), Ported { memory: None, ..example(2048, 1) }]);
        assert_eq!(Record::parse(&record.text()), Some(record));
    }

    #[test]
    fn forged_entries_are_dropped() {
        let request = serde_json::to_value(Stored::from(&example(1024, 30))).unwrap();
        let name = template_name(&example(1024, 30));
        for (text, kept) in [
            (json!({"divvy-0000": request}), 0),
            (json!({&name: request, "other": request}), 1),
            (json!({&name: {"class": "c", "count": 1, "adminAccess": true}}), 0),
            (json!({&name: {"class": "c", "count": 1, "memory": "much"}}), 0),
            (json!([]), 0),
        ] {
            let found = Record::parse(&text.to_string()).map_or(0, |record| record.requests().count());
            assert_eq!(found, kept, "{text}");
        }
    }
}
