//! Who we are: a certificate chain and its key.

use std::fmt;

use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::NetError;

/// The name in every racksum certificate and the one that clients ask for. Addresses say where
/// an aggregator is; the certificate says that it is one.
pub(super) const NAME: &str = "racksum";

/// A certificate chain and the key of its first certificate.
pub struct Identity {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl Identity {
    /// A new identity that nobody vouches for: enough where everyone is trusted.
    ///
    /// # Errors
    ///
    /// [`NetError::Certificate`] if the system gives no randomness.
    pub fn ephemeral() -> Result<Self, NetError> {
        let make = || -> Result<Self, rcgen::Error> {
            let key = KeyPair::generate()?;
            let certificate = CertificateParams::new([NAME.to_owned()])?.self_signed(&key)?;
            Ok(Self {
                chain: vec![certificate.der().clone()],
                key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
            })
        };
        make().map_err(|error| NetError::Certificate { reason: error.to_string() })
    }

    /// The certificates, our own first.
    pub(super) fn chain(&self) -> Vec<CertificateDer<'static>> {
        self.chain.clone()
    }

    pub(super) fn key(&self) -> PrivateKeyDer<'static> {
        self.key.clone_key()
    }
}

impl fmt::Debug for Identity {
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("certificates", &self.chain.len()).finish_non_exhaustive()
    }
}
