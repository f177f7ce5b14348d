//! Builds a sequence of steps with required outcomes.

use super::Step;
use crate::common::with;
use crate::nodes::{SHARE, share_wanted};
use serde_json::{Value, json};

#[derive(Default)]
pub(crate) struct Script {
    pub(crate) steps: Vec<Step>,
}

impl Script {
    pub(crate) fn take(&mut self, name: &str, request: &Value, accepted: bool) {
        self.claim(name, json!({"requests": [request]}), accepted);
    }

    pub(crate) fn claim(&mut self, name: &str, devices: Value, accepted: bool) {
        let claim = crate::common::claim(devices);
        self.steps.push(Step::Take { name: name.to_owned(), claim, accepted: Some(accepted) });
    }

    pub(crate) fn held(&mut self, name: &str, device: &str, shares: &[&str]) {
        let shares = shares.iter().map(|memory| (*memory).to_owned()).collect();
        self.steps.push(Step::Held { name: name.to_owned(), device: device.to_owned(), shares });
    }

    pub(crate) fn refuse(&mut self, requests: &[&Value]) {
        for request in requests {
            self.take("refused", request, false);
        }
    }

    pub(crate) fn release(&mut self, names: &[&str]) {
        self.steps.extend(names.iter().map(|name| Step::Release((*name).to_owned())));
    }
}

pub(crate) fn memory(amount: &str) -> Value {
    share_wanted(SHARE, &[("memory", amount)])
}

pub(crate) fn all_of(request: Value) -> Value {
    with_field(request, json!({"allocationMode": "All"}))
}

/// The same request with additional fields.
pub(crate) fn with_field(mut request: Value, more: Value) -> Value {
    request["exactly"] = with(request["exactly"].clone(), more);
    request
}
