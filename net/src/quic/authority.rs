//! Certificate authority for the nodes of one cluster.

use std::path::Path;

use pem::Pem;
use racksum_proto::identity_name::check_new;
use rcgen::{
    BasicConstraints, CertificateParams, CustomExtension, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::{self as pki_pem, PemObject};
use time::{Duration, OffsetDateTime};

use super::NAME;
use super::certificate::{OPERATOR, end_of, rfc3339};
use super::pem_file::{check_key, key_of, not_pem, read_secret};
use super::{Certificate, Role};
use crate::{FileKind, NetError};

/// Certificate authority that issues the [`Identity`](super::Identity) files of nodes.
#[derive(Debug)]
pub struct Authority {
    certificate: CertificateDer<'static>,
    not_after: OffsetDateTime,
    issuer: Issuer<'static, KeyPair>,
}

/// Node to issue an identity for.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// Name of the node, which admission checks: 1 to 64 characters of a-z, A-Z, 0-9, `.`, `_` and
    /// `-`, beginning with a letter or digit.
    pub name: &'a str,
    /// Role that the certificate allows.
    pub role: Role,
    /// Days until the identity expires; the authority must be valid for as long. By default the
    /// identity expires after a year, or with its authority if that is sooner.
    pub days: Option<u32>,
}

impl Authority {
    /// Creates an authority called `name` that is valid for `days` days. Returns the contents of
    /// its PEM file: the certificate, which is public, and the key, which must stay secret.
    ///
    /// # Errors
    ///
    /// Returns [`NetError::Certificate`] if the name is invalid or the system provides no
    /// randomness.
    pub fn create(name: &str, days: u32) -> Result<String, NetError> {
        let (certificate, key) = Self::make(name, days)?;
        Ok(certificate.pem() + &key.serialize_pem())
    }

    /// Creates an authority called `name` that is valid for `days` days and has no file. Its key is
    /// lost when the authority is dropped, and nobody can issue further identities after that.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Authority::create`].
    pub fn throwaway(name: &str, days: u32) -> Result<Self, NetError> {
        let (certificate, key) = Self::make(name, days)?;
        let cannot = |reason| NetError::Certificate { reason };
        Self::of(certificate.der().clone(), key).map_err(cannot)
    }

    fn make(name: &str, days: u32) -> Result<(rcgen::Certificate, KeyPair), NetError> {
        let mut params = params(name, in_days(days))?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().map_err(|error| cannot(&error))?;
        let certificate = params.self_signed(&key).map_err(|error| cannot(&error))?;
        Ok((certificate, key))
    }

    fn of(certificate: CertificateDer<'static>, key: KeyPair) -> Result<Self, String> {
        let not_after = end_of(&certificate)?;
        let issuer = Issuer::from_ca_cert_der(&certificate, key);
        let issuer = issuer.map_err(|error| error.to_string())?;
        Ok(Self { certificate, not_after, issuer })
    }

    /// Reads the file of an authority.
    ///
    /// # Errors
    ///
    /// Returns [`NetError::IdentityFile`], which names the file and the fault, or
    /// [`NetError::NoDescriptor`].
    pub fn load(path: &Path) -> Result<Self, NetError> {
        let wrong = |why: String| FileKind::Authority.wrong(path, why);
        let pem = read_secret(FileKind::Authority, path)?;
        let certificate = CertificateDer::from_pem_slice(&pem).map_err(|error| match error {
            pki_pem::Error::NoItemsFound => wrong("the file holds no certificate".into()),
            error => wrong(not_pem(&error).into()),
        })?;
        let details = Certificate::parse_own(&certificate).map_err(wrong)?;
        if details.role != Role::Authority {
            let (name, role) = (details.name, details.role);
            return Err(wrong(format!(
                "{name:?} has role {role}, not authority; pass the file of an authority"
            )));
        }
        let key = key_of(&pem).map_err(|why| wrong(why.into()))?;
        check_key(&certificate, &key).map_err(|why| wrong(why.into()))?;
        let key =
            KeyPair::try_from(&key).map_err(|_| wrong("the private key is damaged".into()))?;
        Self::of(certificate, key).map_err(wrong)
    }

    /// Issues an identity file in PEM: the node's certificate, its key, and this authority's
    /// certificate, with which the node verifies other nodes of the cluster. Returns the contents
    /// of the file and the identity's expiry time, as RFC 3339 in UTC.
    ///
    /// # Errors
    ///
    /// Returns [`NetError::Certificate`] if the name is invalid, the role is [`Role::Authority`],
    /// the identity would outlive this authority, or the system provides no randomness.
    pub fn issue(&self, subject: &Subject<'_>) -> Result<(String, String), NetError> {
        let left = self.not_after - OffsetDateTime::now_utc();
        let until = rfc3339(self.not_after.unix_timestamp());
        if !left.is_positive() {
            let reason = format!(
                "the authority expired at {until}; create another with `racksum identity init`"
            );
            return Err(NetError::Certificate { reason });
        }
        // Count a partial day as a whole one, so that `days` may equal the number of days for which
        // the authority was created.
        if let Some(days) = subject.days.filter(|days| Duration::days((*days).into()) > left + DAY)
        {
            let reason = format!(
                "{days} days exceed the life of the authority, which expires at {until}; pass \
                 fewer to `racksum identity issue --days`, or create another authority with \
                 `racksum identity init`"
            );
            return Err(NetError::Certificate { reason });
        }
        let not_after = in_days(subject.days.unwrap_or(USUAL_DAYS)).min(self.not_after);
        let pem = self.issue_until(subject, not_after)?;
        Ok((pem, rfc3339(not_after.unix_timestamp())))
    }

    fn issue_until(
        &self,
        subject: &Subject<'_>,
        not_after: OffsetDateTime,
    ) -> Result<String, NetError> {
        let mut params = params(subject.name, not_after)?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        match subject.role {
            Role::Worker => {}
            Role::Aggregator => {
                let name = NAME.try_into().map_err(|error: rcgen::Error| cannot(&error))?;
                params.subject_alt_names = vec![rcgen::SanType::DnsName(name)];
                params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
            }
            Role::Operator => {
                params.extended_key_usages.clear();
                params.custom_extensions = vec![operator_usages()];
            }
            Role::Authority => {
                return Err(NetError::Certificate {
                    reason: "an authority cannot issue authorities; create one with `racksum \
                             identity init`"
                        .into(),
                });
            }
        }
        let key = KeyPair::generate().map_err(|error| cannot(&error))?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(|error| cannot(&error))?;
        let authority = pem::encode(&Pem::new("CERTIFICATE", self.certificate.to_vec()));
        Ok(certificate.pem() + &key.serialize_pem() + &authority)
    }
}

/// Returns the certificate parameters that authorities and identities share.
fn params(name: &str, not_after: OffsetDateTime) -> Result<CertificateParams, NetError> {
    check_name(name)?;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = OffsetDateTime::now_utc().min(not_after) - CLOCK_SKEW;
    params.not_after = not_after;
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

/// Returns the extended key usages of an operator: TLS client and [`OPERATOR`]. rcgen cannot encode
/// the latter, because the number of a UUID exceeds 64 bits.
fn operator_usages() -> CustomExtension {
    const EXTENDED_KEY_USAGE: &[u64] = &[2, 5, 29, 37];
    const CLIENT_AUTH: &[u8] = &[0x2b, 6, 1, 5, 5, 7, 3, 2];
    let purposes: Vec<u8> = [CLIENT_AUTH, OPERATOR].iter().flat_map(|it| der(0x06, it)).collect();
    CustomExtension::from_oid_content(EXTENDED_KEY_USAGE, der(0x30, &purposes))
}

/// Encodes a value in DER with the given tag.
fn der(tag: u8, content: &[u8]) -> Vec<u8> {
    let short = u8::try_from(content.len()).ok().filter(|len| *len < 0x80);
    [&[tag, short.expect("the contents are constant and short")], content].concat()
}

fn in_days(days: u32) -> OffsetDateTime {
    OffsetDateTime::now_utc() + Duration::days(days.into())
}

fn check_name(name: &str) -> Result<(), NetError> {
    check_new(name).map_err(|reason| NetError::Certificate { reason })
}

fn cannot(error: &rcgen::Error) -> NetError {
    NetError::Certificate { reason: error.to_string() }
}

/// Default lifetime of an identity, in days.
const USUAL_DAYS: u32 = 365;
const DAY: Duration = Duration::days(1);
/// Time by which another host's clock may lag behind the clock of the authority's host.
const CLOCK_SKEW: Duration = Duration::minutes(10);

#[cfg(test)]
mod tests;
