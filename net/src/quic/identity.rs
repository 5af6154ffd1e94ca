//! Who we are: a certificate, its key, and the authority that vouches for it.

use std::fmt;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rcgen::{CertificateParams, KeyPair};
use rustls::RootCertStore;
use rustls::client::verify_server_name;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::server::ParsedCertificate;
use rustls::sign::CertifiedKey;

use super::certificate::is_issued_by;
use super::{Certificate, Role};
use crate::file::{self, FileError, lacks_descriptor};
use crate::log_limit::LogLimit;
use crate::{FileKind, NetError};

/// The name in every aggregator's certificate and the one that clients ask for. Addresses say where
/// an aggregator is; the certificate says that it is one.
pub(super) const NAME: &str = "racksum";

/// A certificate, its key, and the authorities whose certificates are believed.
pub struct Identity {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
    authorities: Vec<CertificateDer<'static>>,
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
                certificate: certificate.der().clone(),
                key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
                authorities: Vec::new(),
            })
        };
        make().map_err(|error| NetError::Certificate { reason: error.to_string() })
    }

    /// Reads an identity file: in PEM, a certificate, its key, and the certificates of the
    /// authorities to believe, as [`Authority::issue`](super::Authority::issue) writes them. One
    /// that others may read is taken with a warning.
    ///
    /// # Errors
    ///
    /// [`NetError::IdentityFile`] that names the file and what is wrong with it, or
    /// [`NetError::NoDescriptor`].
    pub fn load(path: &Path) -> Result<Self, NetError> {
        let pem = read_secret(FileKind::Identity, path)?;
        let wrong = |why: &str| FileKind::Identity.wrong(path, why);
        let parsed: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
        let mut certificates = parsed.map_err(|error| wrong(not_pem(&error)))?.into_iter();
        let certificate = certificates.next().ok_or_else(|| wrong("it holds no certificate"))?;
        let key = key_of(&pem).map_err(wrong)?;
        let authorities: Vec<_> = certificates.collect();
        let is_authority = |told: Certificate| told.role == Role::Authority;
        if Certificate::parse(&certificate).is_ok_and(is_authority) {
            return Err(wrong(
                "it is an authority's own file, which stays where identities are issued; name one \
                 that `racksum identity issue` has written",
            ));
        }
        if authorities.is_empty() {
            return Err(wrong(
                "it holds no certificate of an authority behind its own; issue it anew with \
                 `racksum identity issue`",
            ));
        }
        let told = Certificate::parse_own(&certificate).map_err(|why| wrong(&why))?;
        check_key(&certificate, &key).map_err(wrong)?;
        let mut roots = RootCertStore::empty();
        if authorities.iter().any(|authority| roots.add(authority.clone()).is_err()) {
            return Err(wrong("the certificate of its authority is damaged"));
        }
        tracing::debug!(name = told.name, path = %path.display(), "identity loaded");
        Ok(Self { certificate, key, authorities })
    }

    /// The certificate, for the handshake: authorities are known to both sides.
    pub(super) fn chain(&self) -> Vec<CertificateDer<'static>> {
        vec![self.certificate.clone()]
    }

    /// What its certificate says.
    pub(super) fn certificate(&self) -> Result<Certificate, String> {
        Certificate::parse(&self.certificate)
    }

    /// Whether one of the authorities that it believes has issued its certificate.
    pub(super) fn is_of_its_authorities(&self) -> bool {
        self.authorities.iter().any(|authority| is_issued_by(&self.certificate, authority))
    }

    /// Whether its certificate is one that callers take for an aggregator's.
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
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let authorities = self.authorities.len();
        f.debug_struct("Identity").field("authorities", &authorities).finish_non_exhaustive()
    }
}

/// What is wrong with a file that should be PEM. The library's own words would show bytes of it.
pub(super) const fn not_pem(error: &pem::Error) -> &'static str {
    match error {
        pem::Error::MissingSectionEnd { .. } => {
            "it ends in the middle of a section (no -----END line); it may be half-written, so \
             copy it anew"
        }
        pem::Error::IllegalSectionStart { .. } => "a -----BEGIN line in it is damaged",
        pem::Error::Base64Decode(_) => "a section in it is damaged: it is not Base64",
        _ => "it cannot be read as PEM",
    }
}

/// Checks that a key is its certificate's.
///
/// # Errors
/// That it is not.
pub(super) fn check_key(
    certificate: &CertificateDer<'static>,
    key: &PrivateKeyDer<'static>,
) -> Result<(), &'static str> {
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    CertifiedKey::from_der(vec![certificate.clone()], key.clone_key(), &provider)
        .map(drop)
        .map_err(|_| "its private key is damaged, or of another certificate")
}

/// The key in a file that has a certificate.
///
/// # Errors
/// Why there is none.
pub(super) fn key_of(pem: &[u8]) -> Result<PrivateKeyDer<'static>, &'static str> {
    let has = |mark: &[u8]| pem.windows(mark.len()).any(|bytes| bytes == mark);
    // As PKCS #8 has it, and older tools.
    if has(b"BEGIN ENCRYPTED PRIVATE KEY") || has(b"Proc-Type: 4,ENCRYPTED") {
        return Err(
            "its private key is encrypted, and nobody is asked for the passphrase; write the key \
             without one, as `openssl pkey` does",
        );
    }
    let mut keys = PrivateKeyDer::pem_slice_iter(pem);
    let key = keys.next().ok_or("it holds no private key beside its certificate")?;
    if keys.next().is_some() {
        return Err(
            "it holds more than one private key; leave its own alone in it: an authority's stays \
             where identities are issued",
        );
    }
    key.map_err(|error| not_pem(&error))
}

/// Reads a file that may hold a key.
pub(super) fn read_secret(what: FileKind, path: &Path) -> Result<Vec<u8>, NetError> {
    let read = || -> Result<(Vec<u8>, u32), FileError> {
        let file = file::open(path)?;
        let mode = file.metadata()?.permissions().mode();
        let mut bytes = Vec::new();
        file.take(MAX_FILE).read_to_end(&mut bytes)?;
        Ok((bytes, mode))
    };
    let (bytes, mode) = read().map_err(|error| {
        let error = match error {
            FileError::Io(cause) if lacks_descriptor(&cause) => {
                return NetError::NoDescriptor { what, path: path.into(), cause };
            }
            error => error,
        };
        let advice = match &error {
            FileError::NotRegular => "; name one in PEM",
            FileError::Io(error) if error.kind() == ErrorKind::NotFound => {
                "; check the path, or see `racksum identity --help` for how to make one"
            }
            FileError::TooLarge { .. } | FileError::Io(_) => "",
        };
        what.wrong(path, format!("{error}{advice}"))
    })?;
    if mode & 0o077 != 0 && holds_key(&bytes) {
        let mode = format!("{:o}", mode & 0o777);
        READABLE.note(|left_out| {
            let path = path.display();
            tracing::warn!(%path, mode, left_out, "others may read this key: make it 0600");
        });
    }
    Ok(bytes)
}

/// Whether a file in PEM holds a private key, be it damaged.
fn holds_key(pem: &[u8]) -> bool {
    pem.windows(KEY.len()).any(|bytes| bytes == KEY)
}

/// Ends the first line of a private key in PEM, whatever its kind, and the last.
const KEY: &[u8] = b"PRIVATE KEY-----";

/// Keys that others may read: a sidecar reads its own for every job.
static READABLE: LogLimit = LogLimit::new(4);

/// Bytes that are read of a file that should hold an identity.
const MAX_FILE: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quic::{Authority, Role, Subject};

    #[test]
    fn only_a_file_that_holds_a_key_gives_one_away() {
        let path = std::env::temp_dir().join(format!("racksum-key-{}", std::process::id()));
        std::fs::write(&path, Authority::create("rack", 1).unwrap()).unwrap();
        let authority = Authority::load(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        let subject = Subject { name: "node", role: Role::Worker, days: None };
        let whole = authority.issue(&subject).unwrap().0;
        let (certificate, key) = whole.split_at(whole.find("-----BEGIN PRIVATE").unwrap());
        assert!(holds_key(whole.as_bytes()) && !holds_key(certificate.as_bytes()));
        for (from, to) in [
            ("BEGIN PRIVATE", "BEGIN ENCRYPTED PRIVATE"),
            ("KEY-----\n", "KEY-----\nProc-Type: 4,ENCRYPTED\n"),
        ] {
            let encrypted = whole.replacen(from, to, 1);
            let why = key_of(encrypted.as_bytes()).unwrap_err();
            assert!(why.starts_with("its private key is encrypted"), "{why}");
        }
        assert!(key_of(whole.as_bytes()).is_ok());
        // As older tools write it, and cut off.
        let old = key.replace("PRIVATE KEY", "EC PRIVATE KEY");
        assert!(holds_key(old.as_bytes()) && holds_key(&old.as_bytes()[..40]));
    }
}
