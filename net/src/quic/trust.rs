//! Whom we believe.

use std::net::SocketAddr;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, PeerIncompatible, SignatureScheme};

use crate::NetError;

/// Which certificates of the other side are accepted.
///
/// The connection is encrypted whichever is chosen, and both sides always show a certificate and
/// prove that they hold its key; what differs is who may have issued it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Trust {
    /// Any certificate, and therefore loopback addresses only.
    Loopback,
    /// Any certificate, from anywhere: for networks where everyone is trusted. This is what
    /// `--insecure` asks for.
    Insecure,
}

impl Trust {
    /// Whether `addr` may be served or called at all.
    pub(super) fn check(&self, addr: SocketAddr) -> Result<(), NetError> {
        match self {
            Self::Loopback if !addr.ip().is_loopback() => Err(NetError::Unprotected { addr }),
            Self::Loopback | Self::Insecure => Ok(()),
        }
    }

    /// Judges servers for a client.
    pub(super) fn of_servers(&self, provider: Arc<CryptoProvider>) -> Arc<dyn ServerCertVerifier> {
        match self {
            Self::Loopback | Self::Insecure => Arc::new(Anyone { provider }),
        }
    }

    /// Judges clients for a server.
    pub(super) fn of_clients(&self, provider: Arc<CryptoProvider>) -> Arc<dyn ClientCertVerifier> {
        match self {
            Self::Loopback | Self::Insecure => Arc::new(Anyone { provider }),
        }
    }
}

/// Accepts every certificate, but not a handshake that its key did not sign.
#[derive(Debug)]
struct Anyone {
    provider: Arc<CryptoProvider>,
}

impl Anyone {
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

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
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

impl ClientCertVerifier for Anyone {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        Ok(ClientCertVerified::assertion())
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

/// QUIC is TLS 1.3 or nothing; the traits ask all the same.
const NO_TLS12: Error = Error::PeerIncompatible(PeerIncompatible::Tls12NotOfferedOrEnabled);
