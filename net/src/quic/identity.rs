//! Identities: a certificate, its key, and the authorities to trust.

use std::fmt;
use std::path::Path;

use rcgen::{CertificateParams, KeyPair};
use rustls::RootCertStore;
use rustls::client::verify_server_name;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::server::ParsedCertificate;

use super::certificate::is_issued_by;
use super::pem_file::{check_key, key_of, not_pem, read_secret};
use super::{Certificate, NAME, Role};
use crate::{FileKind, NetError};

/// A certificate, its key, and the certificates of the authorities to trust.
pub struct Identity {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
    authorities: Vec<CertificateDer<'static>>,
}

impl Identity {
    /// Creates an identity with a self-signed certificate, for loopback and for networks where
    /// everyone is trusted.
    ///
    /// # Errors
    ///
    /// Returns [`NetError::Certificate`] if the system provides no randomness.
    pub fn ephemeral() -> Result<Self, NetError> {
        let make = || -> Result<Self, rcgen::Error> {
            let key = KeyPair::generate()?;
            let certificate = CertificateParams::new([NAME.to_owned()])?.self_signed(&key)?;
            Ok(Self {
                certificate: certificate.der().clone(),
                key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
                authorities: Vec::new(),
            })
        };
        make().map_err(|error| NetError::Certificate { reason: error.to_string() })
    }

    /// Reads an identity file in PEM: a certificate, its key, and the certificates of the
    /// authorities to trust, as [`Authority::issue`](super::Authority::issue) writes them. Logs a
    /// warning if other users may read the file.
    ///
    /// # Errors
    ///
    /// Returns [`NetError::IdentityFile`], which names the file and the fault, or
    /// [`NetError::NoDescriptor`].
    pub fn load(path: &Path) -> Result<Self, NetError> {
        let pem = read_secret(FileKind::Identity, path)?;
        let wrong = |why: &str| FileKind::Identity.wrong(path, why);
        let parsed: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
        let mut certificates = parsed.map_err(|error| wrong(not_pem(&error)))?.into_iter();
        let certificate =
            certificates.next().ok_or_else(|| wrong("the file holds no certificate"))?;
        let key = key_of(&pem).map_err(wrong)?;
        let authorities: Vec<_> = certificates.collect();
        let is_authority = |details: Certificate| details.role == Role::Authority;
        if Certificate::parse(&certificate).is_ok_and(is_authority) {
            return Err(wrong(
                "the file belongs to an authority and must stay where identities are issued; pass \
                 a file that `racksum identity issue` wrote",
            ));
        }
        if authorities.is_empty() {
            return Err(wrong(
                "the file lacks the authority's certificate, which must follow the identity's own; \
                 issue the identity again with `racksum identity issue`",
            ));
        }
        let details = Certificate::parse_own(&certificate).map_err(|why| wrong(&why))?;
        check_key(&certificate, &key).map_err(wrong)?;
        let mut roots = RootCertStore::empty();
        if authorities.iter().any(|authority| roots.add(authority.clone()).is_err()) {
            return Err(wrong("the certificate of an authority in the file is damaged"));
        }
        tracing::debug!(name = details.name, path = %path.display(), "identity loaded");
        Ok(Self { certificate, key, authorities })
    }

    /// Returns the certificate chain for the handshake, without the authorities, which both sides
    /// already have.
    pub(super) fn chain(&self) -> Vec<CertificateDer<'static>> {
        vec![self.certificate.clone()]
    }

    /// Parses the identity's certificate.
    pub(super) fn certificate(&self) -> Result<Certificate, String> {
        Certificate::parse(&self.certificate)
    }

    /// Returns whether one of the identity's own authorities issued its certificate.
    pub(super) fn is_of_its_authorities(&self) -> bool {
        self.authorities.iter().any(|authority| is_issued_by(&self.certificate, authority))
    }

    /// Returns whether the certificate bears the name that callers require of an aggregator.
    pub(super) fn bears_name(&self) -> bool {
        let parsed = ParsedCertificate::try_from(&self.certificate);
        let name = ServerName::try_from(NAME);
        parsed.is_ok_and(|it| name.is_ok_and(|name| verify_server_name(&it, &name).is_ok()))
    }

    pub(super) fn key(&self) -> PrivateKeyDer<'static> {
        self.key.clone_key()
    }

    pub(super) fn authorities(&self) -> &[CertificateDer<'static>] {
        &self.authorities
    }
}

impl fmt::Debug for Identity {
    /// Omits the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let authorities = self.authorities.len();
        f.debug_struct("Identity").field("authorities", &authorities).finish_non_exhaustive()
    }
}
