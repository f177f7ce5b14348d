//! Reads the allocated claim that the kubelet names: one live GET, no cache.
//!
//! The claim is read as bytes, because parsers drop duplicate keys in opaque configuration. The
//! configuration of shares comes from the current DeviceClass ([`crate::cluster::classes`]). A claim
//! of the right name with another UID has replaced ours and must not get its devices.

use crate::cluster::classes::{self, Classes};
use divvy_api::claim::ClaimError;
use divvy_api::{AllocatedClaim, ClaimRef, ClaimUid};
use divvy_kubelet::dra::v1;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use kube::api::GetParams;
use serde::Deserialize;
use std::time::Duration;

/// Why a claim could not be read. Every message names the claim.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("claim reference has no valid {field}")]
    Reference { field: &'static str },
    #[error("claim {claim} does not exist")]
    Gone { claim: ClaimRef },
    #[error("claim {claim} was replaced: it has UID {found} instead of {}", claim.uid)]
    Replaced { claim: ClaimRef, found: String },
    #[error("claim {claim} cannot be read from the API server")]
    Api {
        claim: ClaimRef,
        #[source]
        cause: Box<kube::Error>,
    },
    #[error("claim {claim} was not read from the API server within {within:?}")]
    Deadline { claim: ClaimRef, within: Duration },
    #[error("claim {claim} is not a ResourceClaim")]
    Malformed {
        claim: ClaimRef,
        #[source]
        cause: serde_json::Error,
    },
    #[error(transparent)]
    Claim(#[from] ClaimError),
}

impl ReadError {
    /// Whether the API server gave no answer about the claim.
    pub fn is_outage(&self) -> bool {
        match self {
            Self::Deadline { .. } => true,
            Self::Api { cause, .. } => !matches!(&**cause, kube::Error::Api(status) if status.code < 500),
            _ => false,
        }
    }
}

/// Checks the kubelet's reference. UIDs become file names and names become parts of URLs, so special
/// characters are refused.
pub fn reference(claim: &v1::Claim) -> Result<ClaimRef, ReadError> {
    let plain = |text: &str| {
        (1..=253).contains(&text.len())
            && !text.starts_with('.')
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
    };
    for (field, text) in [("uid", &claim.uid), ("namespace", &claim.namespace), ("name", &claim.name)] {
        if !plain(text) {
            return Err(ReadError::Reference { field });
        }
    }
    Ok(unchecked(claim))
}

/// The reference without checks, for uses where it becomes neither a file name nor a URL.
pub fn unchecked(claim: &v1::Claim) -> ClaimRef {
    ClaimRef {
        namespace: claim.namespace.clone(),
        name: claim.name.clone(),
        uid: ClaimUid::from(claim.uid.as_str()),
    }
}

/// Reads claims from the API server, each within a deadline.
#[derive(Clone)]
pub struct Claims {
    client: kube::Client,
    classes: Classes,
    within: Duration,
}

#[derive(Deserialize)]
struct Identity {
    metadata: IdentityMetadata,
}

#[derive(Deserialize)]
struct IdentityMetadata {
    uid: String,
}

impl Claims {
    /// Creates a reader; `within` is the deadline of each read.
    pub fn new(client: kube::Client, classes: Classes, within: Duration) -> Self {
        Self { client, classes, within }
    }

    /// The claim, if the UID matches, it is allocated, and its configuration is valid. The settings
    /// of its shares come from the current DeviceClass.
    pub async fn allocated(&self, claim: &ClaimRef) -> Result<AllocatedClaim, ReadError> {
        let mut allocated = self.as_allocated(claim).await?;
        classes::resolve(&mut allocated, &self.classes.borrow(), classes::now());
        Ok(allocated)
    }

    /// The same with the share settings of the time of allocation.
    pub async fn as_allocated(&self, claim: &ClaimRef) -> Result<AllocatedClaim, ReadError> {
        let body = self.body(claim).await?;
        let allocated = AllocatedClaim::from_json(body.as_bytes());
        if allocated.as_ref().is_ok_and(|found| found.claim.uid == claim.uid) {
            return Ok(allocated?);
        }
        // A different UID is a better explanation than an error in the contents.
        let identity: Identity = serde_json::from_str(&body)
            .map_err(|cause| ReadError::Malformed { claim: claim.clone(), cause })?;
        if identity.metadata.uid != claim.uid.as_str() {
            return Err(ReadError::Replaced { claim: claim.clone(), found: identity.metadata.uid });
        }
        Ok(allocated?)
    }

    /// The claim of that name with any UID; `None` if the API server says that there is none.
    pub async fn current(&self, claim: &ClaimRef) -> Result<Option<ResourceClaim>, ReadError> {
        match self.body(claim).await {
            Err(ReadError::Gone { .. }) => Ok(None),
            Err(other) => Err(other),
            Ok(body) => serde_json::from_str(&body)
                .map(Some)
                .map_err(|cause| ReadError::Malformed { claim: claim.clone(), cause }),
        }
    }

    async fn body(&self, claim: &ClaimRef) -> Result<String, ReadError> {
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &claim.namespace);
        let failed = |cause| ReadError::Api { claim: claim.clone(), cause: Box::new(cause) };
        let request = kube::core::Request::new(api.resource_url())
            .get(&claim.name, &GetParams::default())
            .map_err(|cause| failed(kube::Error::BuildRequest(cause)))?;
        match tokio::time::timeout(self.within, self.client.request_text(request)).await {
            Err(_) => Err(ReadError::Deadline { claim: claim.clone(), within: self.within }),
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => {
                Err(ReadError::Gone { claim: claim.clone() })
            }
            Ok(Err(cause)) => Err(failed(cause)),
            Ok(Ok(body)) => Ok(body),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(uid: &str, namespace: &str, name: &str, bad: Option<&str>) {
        let claim = v1::Claim { uid: uid.to_owned(), namespace: namespace.to_owned(), name: name.to_owned() };
        let found = match reference(&claim) {
            Err(ReadError::Reference { field }) => Some(field),
            _ => None,
        };
        assert_eq!(found, bad);
    }

    #[test]
    fn special_characters_in_references_are_refused() {
        check("0d5b1f0e-6c1b", "default", "a.b-c", None);
        check("", "default", "a", Some("uid"));
        check("../../etc", "default", "a", Some("uid"));
        check("..", "default", "a", Some("uid"));
        check("u", "a/b", "a", Some("namespace"));
        check("u", "default", "a?x=y", Some("name"));
        check("u", "default", &"a".repeat(254), Some("name"));
    }
}
