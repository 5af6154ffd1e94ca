//! Who we are, and whom we believe.

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

/// Who we are, and whom we believe.
///
/// Connections are encrypted whichever it is, and both sides always show a certificate and prove
/// that they hold its key; what differs is who may have issued it.
#[derive(Debug, Clone)]
pub struct Credentials {
    pub(super) identity: Arc<Identity>,
    trust: Trust,
}

/// Which certificates of the other side are accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trust {
    /// Any certificate, and therefore loopback addresses only.
    Loopback,
    /// Any certificate, from anywhere: for networks where everyone is trusted.
    Insecure,
    /// Those that the authorities of our identity have issued.
    Authorities,
}

/// Identities that expire soon: a sidecar reads its own for every job.
static ENDS_SOON: LogLimit = LogLimit::new(4);
/// Likewise identities of an authority that they do not hold.
static FOREIGN: LogLimit = LogLimit::new(4);

impl Credentials {
    /// Why a connection could not be had, for who calls with these: one without an identity is not
    /// told what is wrong with the certificate that it has made up.
    pub(super) fn explain(&self, error: NetError) -> NetError {
        match error {
            NetError::NotBelieved { addr, .. } if self.trust != Trust::Authorities => {
                NetError::NoIdentity { addr }
            }
            error => error,
        }
    }

    /// Those of an identity file; without one, those of somebody whom nobody vouches for and who
    /// believes everyone on loopback, or with `insecure` everyone.
    ///
    /// # Errors
    ///
    /// [`NetError`] if the file holds no identity.
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

    /// Like [`Credentials::new`], without blocking the runtime by a file that hangs.
    ///
    /// # Errors
    ///
    /// Those of [`Credentials::new`], or that the file cannot be read in time.
    pub async fn read(identity: Option<PathBuf>, insecure: bool) -> Result<Self, NetError> {
        match identity {
            None => Self::new(None, insecure),
            identity => {
                FILES.run(PATIENCE, move || Self::new(identity.as_deref(), insecure)).await?
            }
        }
    }

    /// Like [`Credentials::new`]; a file that hangs blocks this thread for a while only.
    ///
    /// # Errors
    ///
    /// Those of [`Credentials::new`], or that the file cannot be read in time.
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

    /// Checks that the certificate of an identity file is valid now, which the other side would
    /// refuse otherwise. Warns if it is not for long, or of an authority that is not in the file.
    fn check_certificate(&self, path: Option<&Path>) -> Result<(), NetError> {
        let Some(path) = path else { return Ok(()) };
        let wrong = |why: String| FileKind::Identity.wrong(path, why);
        let told = self.identity.certificate().map_err(wrong)?;
        if !told.valid {
            return Err(wrong(format!(
                "it is valid from {} to {}, and not now; have a new one issued with `racksum \
                 identity issue`, or set this host's clock",
                told.not_before, told.not_after
            )));
        }
        if !self.identity.is_of_its_authorities() {
            FOREIGN.note(|left_out| {
                let (path, issuer) = (path.display(), &told.issuer);
                tracing::warn!(
                    %path,
                    issuer,
                    left_out,
                    "the certificate of the authority that issued this identity is not in its \
                     file: peers of that authority are not believed"
                );
            });
        }
        if told.ends_soon {
            ENDS_SOON.note(|left_out| {
                let (path, until) = (path.display(), &told.not_after);
                tracing::warn!(%path, until, left_out, "identity expires soon; issue another");
            });
        }
        Ok(())
    }

    /// Credentials to serve with, or to join for several ranks: an identity must be an
    /// aggregator's.
    ///
    /// # Errors
    ///
    /// [`NetError`] if the file holds no identity, or one that nobody would believe.
    pub fn of_aggregator(identity: Option<&Path>, insecure: bool) -> Result<Self, NetError> {
        let credentials = Self::new(identity, insecure)?;
        let Some(path) = identity else { return Ok(credentials) };
        let wrong = |why: String| FileKind::Identity.wrong(path, why);
        let told = credentials.identity.certificate().map_err(wrong)?;
        if told.role != Role::Aggregator {
            return Err(wrong(format!(
                "it is of a {}, and an aggregator's is needed; have one issued with `racksum \
                 identity issue NAME --role aggregator`",
                told.role
            )));
        }
        if !credentials.identity.bears_name() {
            return Err(wrong(format!(
                "its certificate lacks the name that callers of an aggregator ask for, \
                 subjectAltName=DNS:{NAME}; have one issued with that, or with `racksum identity \
                 issue NAME --role aggregator`"
            )));
        }
        credentials.check_certificate(identity)?;
        Ok(credentials)
    }

    /// Returns the certificate of our own identity.
    ///
    /// # Errors
    ///
    /// A sentence, if it is no certificate that racksum can read.
    pub fn certificate(&self) -> Result<Certificate, String> {
        self.identity.certificate()
    }

    /// Whether the certificates of the other side say who it is.
    #[must_use]
    pub fn are_vouched_for(&self) -> bool {
        self.trust == Trust::Authorities
    }

    /// Whether those who are believed by the `other` credentials are believed by these.
    #[must_use]
    pub fn believe_like(&self, other: &Self) -> bool {
        let authorities = self.identity.authorities();
        let known = other.identity.authorities().iter().all(|it| authorities.contains(it));
        self.trust == other.trust && (known || !self.are_vouched_for())
    }

    /// Checks that `addr` may be served or called at all.
    ///
    /// # Errors
    ///
    /// [`NetError::Unprotected`] beyond loopback without an identity.
    pub fn check(&self, addr: SocketAddr) -> Result<(), NetError> {
        match self.trust {
            Trust::Loopback if !addr.ip().is_loopback() => Err(NetError::Unprotected { addr }),
            Trust::Loopback | Trust::Insecure | Trust::Authorities => Ok(()),
        }
    }

    /// Judges servers for a client.
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
        Ok(Arc::new(Judge { authorities, provider }))
    }

    /// Judges clients for a server.
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
        Ok(Arc::new(Judge { authorities, provider }))
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

/// Accepts the certificates of authorities, or without any every certificate; in no case a
/// handshake that its key did not sign.
#[derive(Debug)]
struct Judge<V: ?Sized> {
    authorities: Option<Arc<V>>,
    provider: Arc<CryptoProvider>,
}

/// Tells a certificate that its own side has made from one of another authority: whoever shows it
/// has no identity. The alert for it is
/// [`AlertDescription::AccessDenied`](rustls::AlertDescription).
fn refusal(error: Error, shown: &CertificateDer<'_>) -> Error {
    match error {
        Error::InvalidCertificate(CertificateError::UnknownIssuer) if is_self_issued(shown) => {
            CertificateError::ApplicationVerificationFailure.into()
        }
        error => error,
    }
}

impl<V: ?Sized> Judge<V> {
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

impl ServerCertVerifier for Judge<WebPkiServerVerifier> {
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
        judged.map_err(|error| refusal(error, shown))
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

impl ClientCertVerifier for Judge<dyn ClientCertVerifier> {
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
        judged.map_err(|error| refusal(error, shown))
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

/// How long reading an identity may take.
const PATIENCE: Duration = Duration::from_secs(5);

static FILES: LazyLock<Aside> = LazyLock::new(|| Aside::new("reading the identity"));

/// QUIC is TLS 1.3 or nothing; the traits ask all the same.
const NO_TLS12: Error = Error::PeerIncompatible(PeerIncompatible::Tls12NotOfferedOrEnabled);
