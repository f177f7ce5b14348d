//! The resources that are served: one table for routing, storage, discovery and selectors.

use k8s_openapi::api::{
    admissionregistration::v1 as admission, apps::v1 as apps, coordination::v1 as coordination,
    core::v1 as core, events::v1 as events, resource::v1 as resource,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

/// One resource of the API.
#[derive(Debug)]
pub(crate) struct Kind {
    pub(crate) group: &'static str,
    pub(crate) version: &'static str,
    pub(crate) plural: &'static str,
    pub(crate) singular: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) short_names: &'static [&'static str],
    pub(crate) namespaced: bool,
    pub(crate) has_status: bool,
    /// Field selectors that the real server supports in addition to `metadata.*`.
    pub(crate) fields: &'static [&'static str],
    /// Decodes into the typed object and back: unknown fields are dropped, and wrong types are an error.
    pub(crate) decode: fn(Value) -> Result<Value, serde_json::Error>,
}

fn typed<T: DeserializeOwned + Serialize>(value: Value) -> Result<Value, serde_json::Error> {
    serde_json::to_value(serde_json::from_value::<T>(value)?)
}

/// `involvedObject.*`, which `kubectl describe` uses to find events.
const EVENT_FIELDS: &[&str] = &[
    "involvedObject.kind",
    "involvedObject.namespace",
    "involvedObject.name",
    "involvedObject.uid",
    "involvedObject.apiVersion",
    "regarding.name",
    "reason",
    "type",
];

pub(crate) static KINDS: &[Kind] = &[
    Kind {
        group: "resource.k8s.io",
        version: "v1",
        plural: "resourceslices",
        singular: "resourceslice",
        kind: "ResourceSlice",
        short_names: &[],
        namespaced: false,
        has_status: false,
        fields: &["spec.driver", "spec.nodeName", "spec.pool.name"],
        decode: typed::<resource::ResourceSlice>,
    },
    Kind {
        group: "resource.k8s.io",
        version: "v1",
        plural: "resourceclaims",
        singular: "resourceclaim",
        kind: "ResourceClaim",
        short_names: &[],
        namespaced: true,
        has_status: true,
        fields: &[],
        decode: typed::<resource::ResourceClaim>,
    },
    Kind {
        group: "resource.k8s.io",
        version: "v1",
        plural: "resourceclaimtemplates",
        singular: "resourceclaimtemplate",
        kind: "ResourceClaimTemplate",
        short_names: &[],
        namespaced: true,
        has_status: false,
        fields: &[],
        decode: typed::<resource::ResourceClaimTemplate>,
    },
    Kind {
        group: "resource.k8s.io",
        version: "v1",
        plural: "deviceclasses",
        singular: "deviceclass",
        kind: "DeviceClass",
        short_names: &[],
        namespaced: false,
        has_status: false,
        fields: &[],
        decode: typed::<resource::DeviceClass>,
    },
    Kind {
        group: "resource.k8s.io",
        version: "v1",
        plural: "devicetaintrules",
        singular: "devicetaintrule",
        kind: "DeviceTaintRule",
        short_names: &[],
        namespaced: false,
        has_status: true,
        fields: &[],
        decode: typed::<resource::DeviceTaintRule>,
    },
    Kind {
        group: "",
        version: "v1",
        plural: "nodes",
        singular: "node",
        kind: "Node",
        short_names: &["no"],
        namespaced: false,
        has_status: true,
        fields: &["spec.unschedulable"],
        decode: typed::<core::Node>,
    },
    Kind {
        group: "",
        version: "v1",
        plural: "pods",
        singular: "pod",
        kind: "Pod",
        short_names: &["po"],
        namespaced: true,
        has_status: true,
        fields: &["spec.nodeName", "status.phase", "spec.schedulerName"],
        decode: typed::<core::Pod>,
    },
    Kind {
        group: "",
        version: "v1",
        plural: "namespaces",
        singular: "namespace",
        kind: "Namespace",
        short_names: &["ns"],
        namespaced: false,
        has_status: true,
        fields: &["status.phase"],
        decode: typed::<core::Namespace>,
    },
    Kind {
        group: "",
        version: "v1",
        plural: "events",
        singular: "event",
        kind: "Event",
        short_names: &["ev"],
        namespaced: true,
        has_status: false,
        fields: EVENT_FIELDS,
        decode: typed::<core::Event>,
    },
    Kind {
        group: "",
        version: "v1",
        plural: "secrets",
        singular: "secret",
        kind: "Secret",
        short_names: &[],
        namespaced: true,
        has_status: false,
        fields: &[],
        decode: typed::<core::Secret>,
    },
    Kind {
        group: "events.k8s.io",
        version: "v1",
        plural: "events",
        singular: "event",
        kind: "Event",
        short_names: &["ev"],
        namespaced: true,
        has_status: false,
        fields: EVENT_FIELDS,
        decode: typed::<events::Event>,
    },
    Kind {
        group: "apps",
        version: "v1",
        plural: "daemonsets",
        singular: "daemonset",
        kind: "DaemonSet",
        short_names: &["ds"],
        namespaced: true,
        has_status: true,
        fields: &[],
        decode: typed::<apps::DaemonSet>,
    },
    Kind {
        group: "apps",
        version: "v1",
        plural: "deployments",
        singular: "deployment",
        kind: "Deployment",
        short_names: &["deploy"],
        namespaced: true,
        has_status: true,
        fields: &[],
        decode: typed::<apps::Deployment>,
    },
    Kind {
        group: "coordination.k8s.io",
        version: "v1",
        plural: "leases",
        singular: "lease",
        kind: "Lease",
        short_names: &[],
        namespaced: true,
        has_status: false,
        fields: &[],
        decode: typed::<coordination::Lease>,
    },
    Kind {
        group: "admissionregistration.k8s.io",
        version: "v1",
        plural: "validatingwebhookconfigurations",
        singular: "validatingwebhookconfiguration",
        kind: "ValidatingWebhookConfiguration",
        short_names: &[],
        namespaced: false,
        has_status: false,
        fields: &[],
        decode: typed::<admission::ValidatingWebhookConfiguration>,
    },
    Kind {
        group: "admissionregistration.k8s.io",
        version: "v1",
        plural: "mutatingwebhookconfigurations",
        singular: "mutatingwebhookconfiguration",
        kind: "MutatingWebhookConfiguration",
        short_names: &[],
        namespaced: false,
        has_status: false,
        fields: &[],
        decode: typed::<admission::MutatingWebhookConfiguration>,
    },
];

impl Kind {
    /// The resource of that group and plural name.
    pub(crate) fn find(group: &str, version: &str, plural: &str) -> Option<&'static Self> {
        KINDS.iter().find(|kind| kind.group == group && kind.version == version && kind.plural == plural)
    }

    /// The resource of a typed object.
    pub(crate) fn of<K: k8s_openapi::Resource>() -> Option<&'static Self> {
        KINDS.iter().find(|kind| kind.group == K::GROUP && kind.version == K::VERSION && kind.kind == K::KIND)
    }

    /// The resource of an object, by its `apiVersion` and `kind`.
    pub(crate) fn of_object(object: &Value) -> Option<&'static Self> {
        let (api_version, name) = (object["apiVersion"].as_str()?, object["kind"].as_str()?);
        KINDS.iter().find(|kind| kind.api_version() == api_version && kind.kind == name)
    }

    /// `v1` or `resource.k8s.io/v1`.
    pub(crate) fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.to_owned()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }
}
