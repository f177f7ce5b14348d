//! The webhook's certificate: made here, shared by the replicas in a Secret,
//! rotated long before it ends; or somebody else's, from a directory.
//!
//! It signs itself and the API server is given it as the authority, so there is no
//! authority's key to guard. At a rotation the API server is given the new and
//! the old one first and the Secret comes second, so that neither replica ever
//! shows a certificate that the API server does not know.

pub mod keeper;

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

/// How long a certificate of ours is good for.
const LIFE: SignedDuration = SignedDuration::from_hours(90 * 24);
/// With so much left it is made anew.
const RENEW: SignedDuration = SignedDuration::from_hours(30 * 24);
/// When a certificate in a Secret ends; an X.509 reader only for that would be too much.
const EXPIRES: &str = "divvy.dev/certificate-expires";
/// For which service it was made.
const HOST: &str = "divvy.dev/certificate-host";

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    #[error("a certificate for {host} cannot be made")]
    Make {
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
    #[error("{part} of the certificate is not PEM: {cause}")]
    Pem { part: &'static str, cause: String },
    #[error("the certificate's key cannot be used: {cause}")]
    Key { cause: rustls::Error },
}

/// A certificate of ours as the Secret holds it.
#[derive(Clone, Debug, PartialEq)]
pub struct Held {
    pub host: String,
    pub expires: Timestamp,
    /// PEM.
    pub certificate: Vec<u8>,
    /// PEM.
    pub key: Vec<u8>,
    /// PEM: what the API server is to trust.
    pub bundle: Vec<u8>,
}

impl Held {
    /// A new one; `before` stays trusted until it ends.
    pub fn make(host: &str, now: Timestamp, before: Option<&Self>) -> Result<Self, CertificateError> {
        let failed = |cause| CertificateError::Make { host: host.to_owned(), cause };
        let mut params = CertificateParams::new(vec![host.to_owned()]).map_err(failed)?;
        params.distinguished_name.push(DnType::CommonName, host);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let date = |at: Timestamp| {
            let date = at.to_zoned(TimeZone::UTC).date();
            rcgen::date_time_ymd(date.year().into(), date.month().unsigned_abs(), date.day().unsigned_abs())
        };
        let expires = now + LIFE;
        // Days, and one before today: clocks of nodes differ.
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

    /// Whether it is to be made anew.
    pub fn is_due(&self, host: &str, now: Timestamp) -> bool {
        self.host != host || now + RENEW >= self.expires
    }

    /// What a Secret holds, if it is one of ours and complete.
    pub fn of(secret: &Secret) -> Option<Self> {
        let data = |key: &str| Some(secret.data.as_ref()?.get(key)?.0.clone());
        let annotation = |key: &str| secret.metadata.annotations.as_ref()?.get(key).cloned();
        Some(Self {
            host: annotation(HOST)?,
            expires: annotation(EXPIRES)?.parse().ok()?,
            certificate: data("tls.crt")?,
            key: data("tls.key")?,
            bundle: data("ca.crt")?,
        })
    }

    /// Into the Secret, whatever else it has.
    pub fn put(&self, mut secret: Secret) -> Secret {
        let annotations = secret.metadata.annotations.get_or_insert_default();
        annotations.insert(HOST.to_owned(), self.host.clone());
        annotations.insert(EXPIRES.to_owned(), self.expires.to_string());
        let data = [("tls.crt", &self.certificate), ("tls.key", &self.key), ("ca.crt", &self.bundle)];
        secret.data = Some(data.map(|(key, value)| (key.to_owned(), ByteString(value.clone()))).into());
        secret
    }

    /// A Secret that is not there yet.
    pub fn secret(name: &str) -> Secret {
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

/// The name under which the API server calls a service.
pub fn host(service: &str, namespace: &str) -> String {
    debug_assert!(object_name(service).is_ok());
    format!("{service}.{namespace}.svc")
}

/// The certificate that handshakes get now; changed while serving.
#[derive(Debug, Default)]
pub struct Current(Mutex<Option<Arc<CertifiedKey>>>);

impl Current {
    /// Shows this one from now on.
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

    /// Shows what a directory holds, as a mounted Secret of type `kubernetes.io/tls` does.
    pub fn read(&self, dir: &Path) -> Result<(), CertificateError> {
        let read = |name: &str| {
            let path = dir.join(name);
            std::fs::read(&path).map_err(|cause| CertificateError::Read { path, cause })
        };
        self.set(&read("tls.crt")?, &read("tls.key")?)
    }
}

impl ResolvesServerCert for Current {
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
    fn a_certificate_survives_its_secret_and_can_be_shown() {
        let held = Held::make(HOST, Timestamp::now(), None).unwrap();
        assert_eq!(Held::of(&held.put(Held::secret("s"))), Some(held.clone()));
        Current::default().set(&held.certificate, &held.key).unwrap();
    }

    #[test]
    fn it_is_made_anew_in_time_and_the_old_one_stays_trusted_until_it_ends() {
        let start = Timestamp::now();
        let first = Held::make(HOST, start, None).unwrap();
        assert!(!first.is_due(HOST, start + days(59)));
        assert!(first.is_due(HOST, start + days(60)));
        assert!(first.is_due("elsewhere.svc", start));
        let second = Held::make(HOST, start + days(60), Some(&first)).unwrap();
        assert!(
            second.bundle.starts_with(&second.certificate) && second.bundle.ends_with(&first.certificate)
        );
        let late = Held::make(HOST, start + days(91), Some(&first)).unwrap();
        assert_eq!(late.bundle, late.certificate);
    }

    #[test]
    fn what_is_not_a_pair_is_never_shown() {
        let (one, other) = (
            Held::make(HOST, Timestamp::now(), None).unwrap(),
            Held::make(HOST, Timestamp::now(), None).unwrap(),
        );
        let current = Current::default();
        for (certificate, key) in
            [(&one.certificate, &other.key), (&one.certificate, &b"x".to_vec()), (&one.key, &one.key)]
        {
            assert!(current.set(certificate, key).is_err());
        }
    }

    #[test]
    fn a_secret_that_is_not_whole_is_none_of_ours() {
        let held = Held::make(HOST, Timestamp::now(), None).unwrap();
        let whole = held.put(Held::secret("s"));
        let mut without = whole.clone();
        without.metadata.annotations = None;
        assert_eq!(Held::of(&without), None);
        let mut without = whole;
        without.data.as_mut().unwrap().remove("ca.crt");
        assert_eq!(Held::of(&without), None);
        assert_eq!(Held::of(&Held::secret("s")), None);
    }
}
