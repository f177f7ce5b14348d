//! The reference of configuration is made of the tables that the readers go by.
//!
//! `DIVVY_REGENERATE=1 cargo test -p divvy-model --test reference` writes it anew.

use divvy_api::config;
use divvy_api::schema::{Field, Object, Shape};
use divvy_model::nodeconfig::NODE_CONFIG;
use std::path::Path;

const HEAD: &str = "# Configuration

<!-- Made by the test `reference` of divvy-model from the types; do not edit. -->

Two kinds of documents are read: **device configuration**, in a claim or a DeviceClass, and the **node configuration**, a file
of the administrator. Both are read strictly: a field that is not listed here, a field given twice and a value of another
shape are errors that name the field. `null` is the same as leaving a field out. `divvy check FILE` says the same before anything
is applied.

";

const DEVICE: &str = "## Device configuration

It stands under `opaque.parameters` of an entry of `spec.devices.config` in a ResourceClaim, or of `spec.config` in a DeviceClass,
with `driver: gpu.divvy.dev`. Where several could hold for a device, one does and nothing is merged: that of a claim comes before that
of a class, the later before the earlier. One that names requests is for those requests, and `gpu` is for each alternative `gpu/...` of a
`firstAvailable` list as well; one that names none is for all devices of its kind. One that names a very request whose device is of another
kind is an error, all others are passed over.

A share (a claim that names a part of a device's memory) takes a ShareConfig and no other, and how its limits are kept is for the class to
say: of its class the last one holds, and the last one of the claim may lower the `ceiling`. One of a claim that says anything else is
an error.

Time-slices and shares of MPS (`timeslice.divvy.dev`, `mps.divvy.dev`) have no device configuration: the interval is set by the node
configuration, and limits are the capacities that a claim asks for.

";

const NVIDIA: &str = "### Coming from NVIDIA's driver

The documents are those of `resource.nvidia.com/v1beta1`: write `resource.divvy.dev/v1alpha1` and driver `gpu.divvy.dev`. What is different:

| document | here | there |
|---|---|---|
| `strategy: TimeSlicing` on a MIG instance | refused: its interval does nothing there | taken |
| a strategy with the other one's config | refused | refused in prepare only |
| `timeSlicingConfig: {}` | interval Default | an error in its webhook |
| `multiUser` left out | on where the GPU driver has it | off |
| `defaultActiveThreadPercentage: 0` | refused: it would leave no multiprocessor | taken |
| a memory limit below 1Mi | refused | refused in prepare only |
| MPS on a request with several devices | refused: each GPU has an MPS control daemon, and a container reaches one | one daemon for all |
| `defaultPerDevicePinnedMemoryLimit` by index | 0 only, for the reason above | any device of the claim |
| the same by the UUID of a MIG instance | refused: it is not known before the instance is made | taken |

";

const NODE: &str = "## Node configuration

`divvy-node --config FILE`, in the chart a ConfigMap. It is followed: a change takes effect without a restart. A file with an error
changes nothing and is told by a warning, an event of the Node and the metric `divvy_node_config_refused`; a daemon that starts with such a
file offers no GPU until it is right. `divvy config explain` prints what each GPU gets, and by which rule.

```yaml
apiVersion: resource.divvy.dev/v1alpha1
kind: NodeConfig
rules:
  - slots: 8                                          # every GPU
  - match: {products: [\"*A100*\"]}
    modes: [whole, mig]
  - match: {nodeLabels: {pool: training}, indices: [0, 1]}
    dedicated: true
```

";

fn object(text: &mut String, object: &Object, level: &str) {
    text.push_str(&format!("{level} {}\n\n", object.name));
    if !object.about.is_empty() {
        text.push_str(&format!("{}\n\n", object.about));
    }
    text.push_str("| field | value | left out | |\n|---|---|---|---|\n");
    for field in object.fields {
        text.push_str(&row(field));
    }
    text.push('\n');
}

fn row(field: &Field) -> String {
    let absent = if field.required { "required" } else { field.absent };
    format!("| `{}` | {} | {absent} | {} |\n", field.name, shape(field.shape), field.about)
}

fn shape(shape: Shape) -> String {
    match shape {
        Shape::Literally(text) => format!("`{text}`"),
        Shape::OneOf(texts) => texts.iter().map(|text| format!("`{text}`")).collect::<Vec<_>>().join(", "),
        Shape::Object(object) => object.name.to_owned(),
        Shape::List(item) => format!("list of: {}", self::shape(*item)),
        Shape::Map(value) => format!("map to: {}", self::shape(*value)),
        Shape::Label => "a text".to_owned(),
        other => other.expected(),
    }
}

/// The object and what it is made of, each once, in the order in which they are met.
fn parts(of: &'static Object, seen: &mut Vec<&'static Object>) {
    if seen.iter().any(|known| known.name == of.name) {
        return;
    }
    seen.push(of);
    for field in of.fields {
        let mut shape = field.shape;
        while let Shape::List(inner) | Shape::Map(inner) = shape {
            shape = *inner;
        }
        if let Shape::Object(inner) = shape {
            parts(inner, seen);
        }
    }
}

fn page() -> String {
    let mut text = format!("{HEAD}{DEVICE}");
    let mut devices = Vec::new();
    for kind in config::KINDS {
        parts(kind, &mut devices);
    }
    devices.into_iter().for_each(|part| object(&mut text, part, "###"));
    text.push_str(NVIDIA);
    text.push_str(NODE);
    let mut node = Vec::new();
    parts(&NODE_CONFIG, &mut node);
    node.into_iter().for_each(|part| object(&mut text, part, "###"));
    text.trim_end().to_owned() + "\n"
}

#[test]
fn the_reference_is_what_the_readers_go_by() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/reference-config.md");
    let page = page();
    if std::env::var_os("DIVVY_REGENERATE").is_some() {
        std::fs::write(&path, &page).expect("docs/src can be written");
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(written == page, "docs/src/reference-config.md differs; run with DIVVY_REGENERATE=1 and commit");
}
