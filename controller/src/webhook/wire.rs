//! The subset of `admission.k8s.io/v1` that the webhook uses. The object stays raw JSON text,
//! because a duplicate key is visible only there.

use k8s_openapi::ByteString;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

/// The supported version of the API.
const API_VERSION: &str = "admission.k8s.io/v1";
const KIND: &str = "AdmissionReview";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Review<'a> {
    api_version: String,
    kind: String,
    #[serde(borrow)]
    request: Option<Request<'a>>,
}

/// The request of a review.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Request<'a> {
    pub(super) uid: String,
    pub(super) kind: GroupVersionKind,
    #[serde(default)]
    pub(super) namespace: String,
    #[serde(default)]
    pub(super) name: String,
    pub(super) operation: String,
    #[serde(default)]
    pub(super) sub_resource: Option<String>,
    #[serde(borrow, default)]
    pub(super) object: Option<&'a RawValue>,
}

#[derive(Debug, Deserialize)]
pub(super) struct GroupVersionKind {
    #[serde(default)]
    pub(super) group: String,
    pub(super) version: String,
    pub(super) kind: String,
}

/// Parses a review.
///
/// # Errors
///
/// The error describes why the body is not a valid review.
pub(super) fn read(body: &[u8]) -> Result<Request<'_>, String> {
    let review: Review<'_> =
        serde_json::from_slice(body).map_err(|cause| format!("not an {KIND}: {cause}"))?;
    if (review.api_version.as_str(), review.kind.as_str()) != (API_VERSION, KIND) {
        return Err(format!("{} {} is not {API_VERSION} {KIND}", review.api_version, review.kind));
    }
    review.request.ok_or_else(|| format!("the {KIND} has no request"))
}

/// The outcome of a review.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    /// Why the object is rejected; `None` allows it.
    pub(super) refusal: Option<String>,
    pub(super) warnings: Vec<String>,
    /// Operations of a JSON patch (RFC 6902).
    pub(super) patch: Option<Vec<Value>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer<'a> {
    api_version: &'static str,
    kind: &'static str,
    response: Response<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Response<'a> {
    uid: &'a str,
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'static str>,
    /// In base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<ByteString>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Status<'a>>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    warnings: &'a [String],
}

#[derive(Serialize)]
struct Status<'a> {
    code: u16,
    reason: &'static str,
    message: &'a str,
}

/// Encodes the answer to the request with that uid.
pub(super) fn write(uid: &str, verdict: &Verdict) -> Result<Vec<u8>, serde_json::Error> {
    let status = verdict.refusal.as_deref().map(|message| Status { code: 422, reason: "Invalid", message });
    let patch = verdict.patch.as_ref().filter(|_| status.is_none()).map(serde_json::to_vec).transpose()?;
    let (patch_type, allowed) = (patch.as_ref().map(|_| "JSONPatch"), status.is_none());
    let patch = patch.map(ByteString);
    let response = Response { uid, allowed, patch_type, patch, status, warnings: &verdict.warnings };
    serde_json::to_vec(&Answer { api_version: API_VERSION, kind: KIND, response })
}
