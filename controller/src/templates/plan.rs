//! Decides which templates to create and which to delete. Pure.

use super::record::Record;
use divvy_api::foreign::Ported;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Namespace and name of a template.
pub type TemplateKey = (String, String);

/// The existing templates with our label, and when each was last used.
#[derive(Clone, Debug, Default)]
pub struct Holder {
    unused_since: BTreeMap<TemplateKey, Instant>,
}

/// The writes to make.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    pub create: BTreeMap<TemplateKey, Ported>,
    pub delete: BTreeSet<TemplateKey>,
    /// When the next deletion is due.
    pub next: Option<Instant>,
}

/// Plans the writes. `pods` are the records of all pods that have not finished, by namespace. A
/// template outlives its last pod by `hold_off`, so that the next pod of a workload finds it.
pub fn plan<'a>(
    pods: impl IntoIterator<Item = (&'a str, &'a Record)>,
    templates: &BTreeSet<TemplateKey>,
    holder: &mut Holder,
    now: Instant,
    hold_off: Duration,
) -> Plan {
    let mut wanted: BTreeMap<TemplateKey, Ported> = BTreeMap::new();
    for (namespace, record) in pods {
        for (name, request) in record.requests() {
            wanted.insert((namespace.to_owned(), name.to_owned()), request.clone());
        }
    }
    let unused: BTreeSet<&TemplateKey> = templates.iter().filter(|key| !wanted.contains_key(*key)).collect();
    holder.unused_since.retain(|key, _| unused.contains(key));
    let mut plan = Plan::default();
    for key in unused {
        let due = *holder.unused_since.entry(key.clone()).or_insert(now) + hold_off;
        if due <= now {
            plan.delete.insert(key.clone());
        } else {
            plan.next = Some(plan.next.map_or(due, |next| next.min(due)));
        }
    }
    wanted.retain(|key, _| !templates.contains(key));
    plan.create = wanted;
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::templates::record::example;

    /// Templates that exist, pods that use `share`, and the expected writes, at a second.
    #[test]
    fn template_lives_from_first_pod_until_hold_off() {
        let record = Record::of([example(10240, 30)]);
        let name = record.requests().next().unwrap().0.to_owned();
        let key: TemplateKey = ("a".to_owned(), name);
        let (mut holder, start) = (Holder::default(), Instant::now());
        let mut check = |second: u64, pods: &[&str], exists: bool, created: bool, deleted: bool| {
            let templates = exists.then(|| key.clone()).into_iter().collect();
            let pods = pods.iter().map(|namespace| (*namespace, &record));
            let now = start + Duration::from_secs(second);
            let plan = plan(pods, &templates, &mut holder, now, Duration::from_secs(60));
            assert_eq!(plan.create.contains_key(&key), created, "at {second}");
            assert_eq!(plan.delete.contains(&key), deleted, "at {second}");
            plan.next.map(|next| (next - start).as_secs())
        };
        assert_eq!(check(0, &["a", "a"], false, true, false), None);
        assert_eq!(check(1, &["a"], true, false, false), None);
        assert_eq!(check(2, &["b"], true, false, false), Some(62));
        assert_eq!(check(50, &["a"], true, false, false), None);
        assert_eq!(check(51, &[], true, false, false), Some(111));
        assert_eq!(check(111, &[], true, false, true), None);
        assert_eq!(check(112, &[], false, false, false), None);
    }
}
