//! The webhook's TLS certificate, as it is stored in a Secret and as it is served.
//!
//! The certificate is self-signed and is itself the CA bundle of the webhook configuration, so
//! there is no CA key to protect. A rotation first adds the new certificate to the CA bundle,
//! next to the old one, and then replaces the Secret. So no replica ever serves a certificate
//! that the API server does not trust.

use divvy_daemon::args::object_name;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::{SignedDuration, Timestamp, tz::TimeZone};
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Validity of a new certificate.
const VALIDITY: SignedDuration = SignedDuration::from_hours(90 * 24);
/// Remaining validity at which a certificate is replaced.
const RENEW_BEFORE: SignedDuration = SignedDuration::from_hours(30 * 24);
/// Annotation with the certificate's expiry, so that no X.509 parser is needed.
const EXPIRES_ANNOTATION: &str = "divvy.dev/certificate-expires";
/// Annotation with the DNS name that the certificate is for.
const HOST_ANNOTATION: &str = "divvy.dev/certificate-host";

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    #[error("cannot generate a certificate for {host}")]
    Generate {
        host: String,
        #[source]
        cause: rcgen::Error,
    },
    #[error("cannot read {path}; is the certificate's Secret mounted there?")]
    Read {
        path: PathBuf,
        #[source]
        cause: std::io::Error,
    },
    #[error("{part} of the certificate is not valid PEM: {cause}")]
    Pem { part: &'static str, cause: String },
    #[error("the certificate's private key cannot be used: {cause}")]
    Key { cause: rustls::Error },
}

/// A certificate as the Secret stores it.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredCertificate {
    pub host: String,
    pub expires: Timestamp,
    /// PEM.
    pub certificate: Vec<u8>,
    /// PEM.
    pub key: Vec<u8>,
    /// PEM; the CA bundle for the API server. After a rotation it includes the previous certificate.
    pub bundle: Vec<u8>,
}

impl StoredCertificate {
    /// Generates a certificate. `before` stays in the bundle until it expires.
    pub fn generate(host: &str, now: Timestamp, before: Option<&Self>) -> Result<Self, CertificateError> {
        let failed = |cause| CertificateError::Generate { host: host.to_owned(), cause };
        let mut params = CertificateParams::new(vec![host.to_owned()]).map_err(failed)?;
        params.distinguished_name.push(DnType::CommonName, host);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let date = |at: Timestamp| {
            let date = at.to_zoned(TimeZone::UTC).date();
            rcgen::date_time_ymd(date.year().into(), date.month().unsigned_abs(), date.day().unsigned_abs())
        };
        let expires = now + VALIDITY;
        // Whole days, starting yesterday: the clocks of nodes differ.
        params.not_before = date(now - SignedDuration::from_hours(24));
        params.not_after = date(expires);
        let key = KeyPair::generate().map_err(failed)?;
        let certificate = params.self_signed(&key).map_err(failed)?.pem().into_bytes();
        let mut bundle = certificate.clone();
        if let Some(before) = before.filter(|before| before.expires > now) {
            bundle.extend(&before.certificate);
        }
        Ok(Self {
            host: host.to_owned(),
            expires,
            certificate,
            key: key.serialize_pem().into_bytes(),
            bundle,
        })
    }

    /// Whether the certificate must be replaced.
    pub fn needs_renewal(&self, host: &str, now: Timestamp) -> bool {
        self.host != host || now + RENEW_BEFORE >= self.expires
    }

    /// Reads a Secret. Returns `None` if it is incomplete or has another origin.
    pub fn from_secret(secret: &Secret) -> Option<Self> {
        let data = |key: &str| Some(secret.data.as_ref()?.get(key)?.0.clone());
        let annotation = |key: &str| secret.metadata.annotations.as_ref()?.get(key).cloned();
        Some(Self {
            host: annotation(HOST_ANNOTATION)?,
            expires: annotation(EXPIRES_ANNOTATION)?.parse().ok()?,
            certificate: data("tls.crt")?,
            key: data("tls.key")?,
            bundle: data("ca.crt")?,
        })
    }

    /// Writes the certificate into the Secret and keeps its other fields.
    pub fn write_to(&self, mut secret: Secret) -> Secret {
        let annotations = secret.metadata.annotations.get_or_insert_default();
        annotations.insert(HOST_ANNOTATION.to_owned(), self.host.clone());
        annotations.insert(EXPIRES_ANNOTATION.to_owned(), self.expires.to_string());
        let data = [("tls.crt", &self.certificate), ("tls.key", &self.key), ("ca.crt", &self.bundle)];
        secret.data = Some(data.map(|(key, value)| (key.to_owned(), ByteString(value.clone()))).into());
        secret
    }

    /// A new Secret without a certificate.
    pub fn empty_secret(name: &str) -> Secret {
        let labels = [crate::classes::MANAGED_BY, ("app.kubernetes.io/part-of", "divvy")];
        let text = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
        let metadata = ObjectMeta {
            name: Some(name.to_owned()),
            labels: Some(labels.map(text).into()),
            ..ObjectMeta::default()
        };
        Secret { metadata, type_: Some("kubernetes.io/tls".to_owned()), ..Secret::default() }
    }
}

/// The DNS name that the API server uses for a Service.
pub fn host(service: &str, namespace: &str) -> String {
    debug_assert!(object_name(service).is_ok());
    format!("{service}.{namespace}.svc")
}

/// The certificate that new TLS handshakes get. It can be replaced while the server runs.
#[derive(Debug, Default)]
pub struct ServingCertificate(Mutex<Option<Arc<CertifiedKey>>>);

impl ServingCertificate {
    /// Serves this certificate from now on. The key must match it.
    pub fn set(&self, certificate: &[u8], key: &[u8]) -> Result<(), CertificateError> {
        let bad = |part| {
            move |cause: rustls::pki_types::pem::Error| CertificateError::Pem {
                part,
                cause: cause.to_string(),
            }
        };
        let chain = CertificateDer::pem_slice_iter(certificate)
            .collect::<Result<Vec<_>, _>>()
            .map_err(bad("tls.crt"))?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(bad("tls.key"))?;
        let key = rustls::crypto::ring::sign::any_supported_type(&key)
            .map_err(|cause| CertificateError::Key { cause })?;
        let certified = CertifiedKey::new(chain, key);
        certified.keys_match().map_err(|cause| CertificateError::Key { cause })?;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(certified));
        Ok(())
    }

    /// Loads `tls.crt` and `tls.key` from a directory, such as a mounted `kubernetes.io/tls` Secret.
    pub fn load(&self, dir: &Path) -> Result<(), CertificateError> {
        let read = |name: &str| {
            let path = dir.join(name);
            std::fs::read(&path).map_err(|cause| CertificateError::Read { path, cause })
        };
        self.set(&read("tls.crt")?, &read("tls.key")?)
    }
}

impl ResolvesServerCert for ServingCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: &str = "divvy-webhook.divvy.svc";

    fn days(days: i64) -> SignedDuration {
        SignedDuration::from_hours(24 * days)
    }

    #[test]
    fn certificate_round_trips_through_its_secret() {
        let stored = StoredCertificate::generate(HOST, Timestamp::now(), None).unwrap();
        assert_eq!(
            StoredCertificate::from_secret(&stored.write_to(StoredCertificate::empty_secret("s"))),
            Some(stored.clone())
        );
        ServingCertificate::default().set(&stored.certificate, &stored.key).unwrap();
    }

    #[test]
    fn renewal_keeps_the_unexpired_certificate_trusted() {
        let start = Timestamp::now();
        let first = StoredCertificate::generate(HOST, start, None).unwrap();
        assert!(!first.needs_renewal(HOST, start + days(59)));
        assert!(first.needs_renewal(HOST, start + days(60)));
        assert!(first.needs_renewal("elsewhere.svc", start));
        let second = StoredCertificate::generate(HOST, start + days(60), Some(&first)).unwrap();
        assert!(
            second.bundle.starts_with(&second.certificate) && second.bundle.ends_with(&first.certificate)
        );
        let late = StoredCertificate::generate(HOST, start + days(91), Some(&first)).unwrap();
        assert_eq!(late.bundle, late.certificate);
    }

    #[test]
    fn mismatched_key_pairs_are_rejected() {
        let (one, other) = (
            StoredCertificate::generate(HOST, Timestamp::now(), None).unwrap(),
            StoredCertificate::generate(HOST, Timestamp::now(), None).unwrap(),
        );
        let current = ServingCertificate::default();
        for (certificate, key) in
            [(&one.certificate, &other.key), (&one.certificate, &b"x".to_vec()), (&one.key, &one.key)]
        {
            assert!(current.set(certificate, key).is_err());
        }
    }

    #[test]
    fn incomplete_secrets_are_ignored() {
        let stored = StoredCertificate::generate(HOST, Timestamp::now(), None).unwrap();
        let whole = stored.write_to(StoredCertificate::empty_secret("s"));
        let mut without = whole.clone();
        without.metadata.annotations = None;
        assert_eq!(StoredCertificate::from_secret(&without), None);
        let mut without = whole;
        without.data.as_mut().unwrap().remove("ca.crt");
        assert_eq!(StoredCertificate::from_secret(&without), None);
        assert_eq!(StoredCertificate::from_secret(&StoredCertificate::empty_secret("s")), None);
    }
}
