//! Errors in the form of the real server: a `Status` object with a reason that clients evaluate.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// An error response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) code: u16,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into() }
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    pub(crate) fn not_found(plural: &str, name: &str) -> Self {
        Self::new(404, "NotFound", format!("{plural} {name:?} not found"))
    }

    pub(crate) fn conflict(plural: &str, name: &str, why: &str) -> Self {
        Self::new(409, "Conflict", format!("Operation cannot be fulfilled on {plural} {name:?}: {why}"))
    }

    pub(crate) fn invalid(kind: &str, name: &str, why: &[String]) -> Self {
        Self::new(422, "Invalid", format!("{kind} {name:?} is invalid: {}", why.join(", ")))
    }

    pub(crate) fn gone() -> Self {
        Self::new(410, "Expired", "too old resource version")
    }

    pub(crate) fn unavailable() -> Self {
        Self::new(503, "ServiceUnavailable", "the server is currently unable to handle the request")
    }

    /// The `Status` object.
    pub(crate) fn object(&self) -> Value {
        json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code,
        })
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let code = StatusCode::from_u16(self.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (code, axum::Json(self.object())).into_response()
    }
}
