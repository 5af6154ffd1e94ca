//! Credentials: this side's identity and the certificates it accepts.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, PeerIncompatible,
    RootCertStore, SignatureScheme,
};

use super::NAME;
use super::certificate::is_self_issued;
use super::{Certificate, Identity, Role};
use crate::aside::Aside;
use crate::log_limit::LogLimit;
use crate::{FileKind, NetError};

/// This side's identity, and the certificates it accepts.
///
/// All connections are encrypted, and both sides always show a certificate and prove that they hold
/// its key. Credentials differ in the issuers that they accept.
#[derive(Debug, Clone)]
pub struct Credentials {
    pub(super) identity: Arc<Identity>,
    trust: Trust,
}

/// Rule that decides which peer certificates are accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trust {
    /// Any certificate, but only on loopback addresses.
    Loopback,
    /// Any certificate from any address, for networks where everyone is trusted.
    Insecure,
    /// Certificates that an authority of this side's identity has issued.
    Authorities,
}

/// Log limit for identities that expire soon. A sidecar reads its identity for every job, and would
/// otherwise log the warning each time.
static ENDS_SOON: LogLimit = LogLimit::new(4);
/// Log limit for identities whose file lacks the certificate of their issuer.
static FOREIGN: LogLimit = LogLimit::new(4);

impl Credentials {
    /// Adapts a connection error to these credentials. If this side has no identity, replaces an
    /// error about its self-signed certificate with [`NetError::NoIdentity`].
    pub(super) fn explain(&self, error: NetError) -> NetError {
        match error {
            NetError::IdentityRejected { addr, .. } if self.trust != Trust::Authorities => {
                NetError::NoIdentity { addr }
            }
            error => error,
        }
    }

    /// Loads the credentials of an identity file. Without a file, creates a self-signed certificate
    /// and accepts every peer: only on loopback, or anywhere if `insecure` is true.
    ///
    /// # Errors
    ///
    /// Returns a [`NetError`] if the file holds no identity, or if `insecure` is set together with
    /// a file.
    pub fn new(identity: Option<&Path>, insecure: bool) -> Result<Self, NetError> {
        match (identity, insecure) {
            (Some(_), true) => Err(NetError::InsecureIdentity),
            (Some(path), false) => {
                Ok(Self { identity: Identity::load(path)?.into(), trust: Trust::Authorities })
            }
            (None, insecure) => {
                let trust = if insecure { Trust::Insecure } else { Trust::Loopback };
                Ok(Self { identity: Identity::ephemeral()?.into(), trust })
            }
        }
    }

    /// Loads credentials like [`Credentials::new`], without blocking the runtime if the file hangs.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Credentials::new`], or a timeout if the file cannot be read in time.
    pub async fn read(identity: Option<PathBuf>, insecure: bool) -> Result<Self, NetError> {
        match identity {
            None => Self::new(None, insecure),
            identity => {
                FILES.run(PATIENCE, move || Self::new(identity.as_deref(), insecure)).await?
            }
        }
    }

    /// Loads credentials like [`Credentials::new`], and checks that the certificate is valid now. A
    /// file that hangs blocks this thread until a timeout.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Credentials::new`], or a timeout if the file cannot be read in time.
    pub fn read_blocking(identity: Option<PathBuf>, insecure: bool) -> Result<Self, NetError> {
        match identity {
            None => Self::new(None, insecure),
            identity => FILES.wait(PATIENCE, move || {
                let credentials = Self::new(identity.as_deref(), insecure)?;
                credentials.check_certificate(identity.as_deref())?;
                Ok(credentials)
            })?,
        }
    }

    /// Checks that the certificate of an identity file is valid now, because peers would reject it
    /// otherwise. Warns if the certificate expires soon, or if the file lacks the certificate of
    /// the authority that issued it.
    fn check_certificate(&self, path: Option<&Path>) -> Result<(), NetError> {
        let Some(path) = path else { return Ok(()) };
        let wrong = |why: String| FileKind::Identity.wrong(path, why);
        let certificate = self.identity.certificate().map_err(wrong)?;
        if !certificate.valid {
            return Err(wrong(format!(
                "the certificate is valid from {} to {}, not now; issue another with `racksum \
                 identity issue`, or correct this host's clock",
                certificate.not_before, certificate.not_after
            )));
        }
        if !self.identity.is_of_its_authorities() {
            FOREIGN.note(|left_out| {
                let (path, issuer) = (path.display(), &certificate.issuer);
                tracing::warn!(
                    %path,
                    issuer,
                    left_out,
                    "the identity file lacks the certificate of the authority that issued the \
                     identity, so this process rejects peers of that authority; add that \
                     certificate to the file"
                );
            });
        }
        if certificate.ends_soon {
            ENDS_SOON.note(|left_out| {
                let (path, until) = (path.display(), &certificate.not_after);
                tracing::warn!(
                    %path,
                    until,
                    left_out,
                    "the identity expires soon; issue another with `racksum identity issue`"
                );
            });
        }
        Ok(())
    }

    /// Loads credentials for serving, or for joining jobs on behalf of several ranks. An identity
    /// must have the role aggregator.
    ///
    /// # Errors
    ///
    /// Returns a [`NetError`] if the file holds no identity or an identity that callers would
    /// reject.
    pub fn of_aggregator(identity: Option<&Path>, insecure: bool) -> Result<Self, NetError> {
        let credentials = Self::new(identity, insecure)?;
        let Some(path) = identity else { return Ok(credentials) };
        let wrong = |why: String| FileKind::Identity.wrong(path, why);
        let certificate = credentials.identity.certificate().map_err(wrong)?;
        if certificate.role != Role::Aggregator {
            return Err(wrong(format!(
                "the identity has role {}, but role aggregator is needed; issue one with `racksum \
                 identity issue NAME --role aggregator`",
                certificate.role
            )));
        }
        if !credentials.identity.bears_name() {
            return Err(wrong(format!(
                "the certificate lacks subjectAltName=DNS:{NAME}, which callers require of an \
                 aggregator; issue one that has it, as `racksum identity issue NAME --role \
                 aggregator` does"
            )));
        }
        credentials.check_certificate(identity)?;
        Ok(credentials)
    }

    /// Returns the certificate of this side's identity.
    ///
    /// # Errors
    ///
    /// Returns a sentence that states the defect if racksum cannot parse the certificate.
    pub fn certificate(&self) -> Result<Certificate, String> {
        self.identity.certificate()
    }

    /// Returns whether this side verifies peer certificates. Only a verified certificate proves the
    /// peer's identity.
    #[must_use]
    pub fn are_verified(&self) -> bool {
        self.trust == Trust::Authorities
    }

    /// Returns whether these credentials accept every peer that the `other` credentials accept.
    /// Returns false if the two differ in their kind of trust, because each kind judges different
    /// properties of a peer.
    #[must_use]
    pub fn accept_all_of(&self, other: &Self) -> bool {
        let authorities = self.identity.authorities();
        let known = other.identity.authorities().iter().all(|it| authorities.contains(it));
        self.trust == other.trust && (known || !self.are_verified())
    }

    /// Checks that these credentials allow serving at `addr` or calling it.
    ///
    /// # Errors
    ///
    /// Returns [`NetError::Unprotected`] for an address beyond loopback if there is no identity.
    pub fn check(&self, addr: SocketAddr) -> Result<(), NetError> {
        match self.trust {
            Trust::Loopback if !addr.ip().is_loopback() => Err(NetError::Unprotected { addr }),
            Trust::Loopback | Trust::Insecure | Trust::Authorities => Ok(()),
        }
    }

    /// Returns the verifier that a client uses for server certificates.
    pub(super) fn judge_of_servers(
        &self,
        provider: Arc<CryptoProvider>,
    ) -> Result<Arc<dyn ServerCertVerifier>, NetError> {
        let authorities = match self.trust {
            Trust::Loopback | Trust::Insecure => None,
            Trust::Authorities => Some(
                WebPkiServerVerifier::builder_with_provider(self.roots()?, Arc::clone(&provider))
                    .build()
                    .map_err(|error| NetError::Tls { reason: error.to_string() })?,
            ),
        };
        Ok(Arc::new(CertificateVerifier { authorities, provider }))
    }

    /// Returns the verifier that a server uses for client certificates.
    pub(super) fn judge_of_clients(
        &self,
        provider: Arc<CryptoProvider>,
    ) -> Result<Arc<dyn ClientCertVerifier>, NetError> {
        let authorities = match self.trust {
            Trust::Loopback | Trust::Insecure => None,
            Trust::Authorities => Some(
                WebPkiClientVerifier::builder_with_provider(self.roots()?, Arc::clone(&provider))
                    .build()
                    .map_err(|error| NetError::Tls { reason: error.to_string() })?,
            ),
        };
        Ok(Arc::new(CertificateVerifier { authorities, provider }))
    }

    fn roots(&self) -> Result<Arc<RootCertStore>, NetError> {
        let mut roots = RootCertStore::empty();
        for authority in self.identity.authorities() {
            roots
                .add(authority.clone())
                .map_err(|error| NetError::Tls { reason: error.to_string() })?;
        }
        Ok(Arc::new(roots))
    }
}

/// Verifier that accepts certificates of the given authorities, or every certificate if there are
/// none. It always requires that the certificate's key signed the handshake.
#[derive(Debug)]
struct CertificateVerifier<V: ?Sized> {
    authorities: Option<Arc<V>>,
    provider: Arc<CryptoProvider>,
}

/// Returns the error for a rejected certificate. A self-signed certificate, which a peer without an
/// identity shows, gets an error of its own, because the advice differs from that for a certificate
/// of another authority. TLS sends that error as the alert
/// [`AlertDescription::AccessDenied`](rustls::AlertDescription).
fn refusal(error: Error, shown: &CertificateDer<'_>) -> Error {
    match error {
        Error::InvalidCertificate(CertificateError::UnknownIssuer) if is_self_issued(shown) => {
            CertificateError::ApplicationVerificationFailure.into()
        }
        error => error,
    }
}

/// Returns the role of a certificate that an authority issued. Its holder must not pass for a
/// caller without a name or role because racksum cannot read them.
fn role_of(shown: &CertificateDer<'_>) -> Result<Role, Error> {
    let read = Certificate::parse(shown).map(|certificate| certificate.role);
    read.map_err(|_why| CertificateError::BadEncoding.into())
}

impl<V: ?Sized> CertificateVerifier<V> {
    fn tls13(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

impl ServerCertVerifier for CertificateVerifier<WebPkiServerVerifier> {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let Some(authorities) = &self.authorities else {
            return Ok(ServerCertVerified::assertion());
        };
        let judged = authorities.verify_server_cert(shown, between, name, ocsp, now);
        judged.map_err(|error| refusal(error, shown))?;
        // A certificate without extended key usages passes for all of them.
        match role_of(shown)? {
            Role::Aggregator => Ok(ServerCertVerified::assertion()),
            _ => Err(CertificateError::InvalidPurpose.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(NO_TLS12)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.tls13(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

impl ClientCertVerifier for CertificateVerifier<dyn ClientCertVerifier> {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        shown: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let Some(authorities) = &self.authorities else {
            return Ok(ClientCertVerified::assertion());
        };
        let judged = authorities.verify_client_cert(shown, between, now);
        judged.map_err(|error| refusal(error, shown))?;
        role_of(shown).map(|_| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(NO_TLS12)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.tls13(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

/// Timeout for reading an identity.
const PATIENCE: Duration = Duration::from_secs(5);

static FILES: LazyLock<Aside> = LazyLock::new(|| Aside::new("reading the identity"));

/// Error for TLS 1.2 signatures. QUIC never uses them, but the rustls traits require methods that
/// verify them.
const NO_TLS12: Error = Error::PeerIncompatible(PeerIncompatible::Tls12NotOfferedOrEnabled);
