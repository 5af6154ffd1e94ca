//! PEM files: reading them, and describing their defects.

use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;

use crate::file::{self, FileError, lacks_descriptor};
use crate::log_limit::LogLimit;
use crate::{FileKind, NetError};

/// Describes why a file is not valid PEM. The library's own text would quote bytes of the file.
pub(super) const fn not_pem(error: &pem::Error) -> &'static str {
    match error {
        pem::Error::MissingSectionEnd { .. } => {
            "the file ends inside a section (no -----END line); it may be half-written, so copy it \
             again"
        }
        pem::Error::IllegalSectionStart { .. } => "a -----BEGIN line is damaged",
        pem::Error::Base64Decode(_) => "a section is damaged: it is not Base64",
        _ => "the file is not valid PEM",
    }
}

/// Checks that a key belongs to a certificate.
///
/// # Errors
/// Returns a message if the key is damaged or belongs to another certificate.
pub(super) fn check_key(
    certificate: &CertificateDer<'static>,
    key: &PrivateKeyDer<'static>,
) -> Result<(), &'static str> {
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    CertifiedKey::from_der(vec![certificate.clone()], key.clone_key(), &provider)
        .map(drop)
        .map_err(|_| "the private key is damaged, or belongs to another certificate")
}

/// Returns the private key in the text of a PEM file.
///
/// # Errors
/// Returns a message if the file has no usable key or several keys.
pub(super) fn key_of(pem: &[u8]) -> Result<PrivateKeyDer<'static>, &'static str> {
    let has = |mark: &[u8]| pem.windows(mark.len()).any(|bytes| bytes == mark);
    // Look for two marks, because PKCS #8 and older formats mark encrypted keys differently.
    if has(b"BEGIN ENCRYPTED PRIVATE KEY") || has(b"Proc-Type: 4,ENCRYPTED") {
        return Err(
            "the private key is encrypted, and racksum does not ask for a passphrase; decrypt the \
             key, for example with `openssl pkey`",
        );
    }
    let mut keys = PrivateKeyDer::pem_slice_iter(pem);
    let key = keys.next().ok_or("the file holds no private key for its certificate")?;
    if keys.next().is_some() {
        return Err(
            "the file holds several private keys; keep only the key of its first certificate, and \
             leave the authority's key where identities are issued",
        );
    }
    key.map_err(|error| not_pem(&error))
}

/// Reads a file that may hold a key, and logs a warning if other users can read that key.
pub(super) fn read_secret(what: FileKind, path: &Path) -> Result<Vec<u8>, NetError> {
    let read = || -> Result<(Vec<u8>, u32), FileError> {
        let file = file::open(path)?;
        let mode = file.metadata()?.permissions().mode();
        Ok((file::read_all(file, MAX_FILE)?, mode))
    };
    let (bytes, mode) = read().map_err(|error| {
        let error = match error {
            FileError::Io(cause) if lacks_descriptor(&cause) => {
                return NetError::NoDescriptor { what, path: path.into(), cause };
            }
            error => error,
        };
        let advice = match &error {
            FileError::NotRegular => "; pass a PEM file",
            FileError::Io(error) if error.kind() == ErrorKind::NotFound => {
                "; check the path, or see `racksum identity --help` for how to create one"
            }
            FileError::TooLarge { .. } | FileError::Io(_) => "",
        };
        what.wrong(path, format!("{error}{advice}"))
    })?;
    if mode & 0o077 != 0 && holds_key(&bytes) {
        let mode = format!("{:o}", mode & 0o777);
        READABLE.note(|left_out| {
            let path = path.display();
            tracing::warn!(
                %path,
                mode,
                left_out,
                "other users can read this private key; run chmod 600 on the file"
            );
        });
    }
    Ok(bytes)
}

/// Returns whether a PEM file holds a private key, even a damaged one.
fn holds_key(pem: &[u8]) -> bool {
    pem.windows(KEY.len()).any(|bytes| bytes == KEY)
}

/// Text that ends the first and the last line of a private key in PEM, whatever its kind.
const KEY: &[u8] = b"PRIVATE KEY-----";

/// Log limit for keys that other users can read. A sidecar reads its identity for every job, and
/// would otherwise log the warning each time.
static READABLE: LogLimit = LogLimit::new(4);

/// The largest PEM file that is read, in bytes.
const MAX_FILE: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quic::{Authority, Role, Subject};

    #[test]
    fn a_file_that_is_too_large_is_refused_and_not_cut() {
        let path = std::env::temp_dir().join(format!("racksum-large-{}", std::process::id()));
        let large = usize::try_from(MAX_FILE).unwrap() + 1;
        std::fs::write(&path, vec![b'\n'; large]).unwrap();
        let refused = read_secret(FileKind::Identity, &path).unwrap_err().to_string();
        std::fs::write(&path, vec![b'\n'; large - 1]).unwrap();
        let read = read_secret(FileKind::Identity, &path);
        std::fs::remove_file(path).unwrap();
        assert!(refused.contains("larger than 1024 KiB"), "{refused}");
        assert_eq!(read.unwrap().len(), large - 1);
    }

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
            assert!(why.starts_with("the private key is encrypted"), "{why}");
        }
        assert!(key_of(whole.as_bytes()).is_ok());
        // The key may be in the format of older tools, or truncated.
        let old = key.replace("PRIVATE KEY", "EC PRIVATE KEY");
        assert!(holds_key(old.as_bytes()) && holds_key(&old.as_bytes()[..40]));
    }
}
