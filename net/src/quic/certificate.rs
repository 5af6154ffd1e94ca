//! Contents of a certificate, for display and for admission.

use std::fmt;
use std::path::Path;

use racksum_proto::identity_name;
use racksum_proto::peer_text::PeerText;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::x509::{X509Name, X509Version};

use super::NAME;
use super::pem_file::{not_pem, read_secret};
use crate::{FileKind, NetError};

/// Role that a certificate allows its holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The holder issues certificates.
    Authority,
    /// The holder serves jobs, and may join those of another aggregator as a rank.
    Aggregator,
    /// The holder joins jobs.
    Worker,
    /// The holder moves jobs, drains aggregators and orders measurements. It neither serves nor
    /// joins.
    Operator,
}

impl Role {
    /// Returns the role's name on the command line and in output.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Authority => "authority",
            Self::Aggregator => "aggregator",
            Self::Worker => "worker",
            Self::Operator => "operator",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Contents of a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    /// Name of the holder: the subject's common name.
    pub name: String,
    /// Role that the certificate allows.
    pub role: Role,
    /// Common name of the issuer.
    pub issuer: String,
    /// Start of the validity period, as RFC 3339 in UTC.
    pub not_before: String,
    /// End of the validity period, as RFC 3339 in UTC.
    pub not_after: String,
    /// Whether the certificate is valid now.
    pub valid: bool,
    /// Whether the certificate expires within a week and is in the last tenth of its validity
    /// period.
    pub ends_soon: bool,
    /// SHA-256 of the certificate, in hexadecimal.
    pub fingerprint: String,
}

impl Certificate {
    /// Reads all certificates of a PEM file, in order.
    ///
    /// # Errors
    ///
    /// Returns [`NetError::IdentityFile`], which names the file and the fault, or
    /// [`NetError::NoDescriptor`].
    pub fn all_of(path: &Path) -> Result<Vec<Self>, NetError> {
        let wrong = |why: String| FileKind::Certificates.wrong(path, why);
        let pem = read_secret(FileKind::Certificates, path)?;
        let mut all = Vec::new();
        for der in CertificateDer::pem_slice_iter(&pem) {
            let der = der.map_err(|error| wrong(not_pem(&error).into()))?;
            all.push(Self::parse(&der).map_err(wrong)?);
        }
        if all.is_empty() {
            return Err(wrong("the file holds no certificate".into()));
        }
        Ok(all)
    }

    /// Returns the certificate that the peer of a connection showed; `None` if it cannot be parsed,
    /// which credentials that verify certificates rule out.
    #[must_use]
    pub fn of_peer(connection: &quinn::Connection) -> Option<Self> {
        let shown = connection.peer_identity()?.downcast::<Vec<CertificateDer<'static>>>().ok()?;
        Self::parse(shown.first()?).ok()
    }

    /// Parses a certificate; the error is a sentence that states the defect.
    pub(super) fn parse(der: &CertificateDer<'_>) -> Result<Self, String> {
        Self::of(&x509(der)?, der)
    }

    /// Parses this side's own certificate, which must be of X.509 version 3, the only version that
    /// TLS accepts.
    pub(super) fn parse_own(der: &CertificateDer<'_>) -> Result<Self, String> {
        let x509 = x509(der)?;
        if x509.version() != X509Version::V3 {
            return Err(format!(
                "the certificate is X.509 version {}, without extensions, and TLS accepts only \
                 version 3; issue it again with `racksum identity issue`, or with extensions (an \
                 aggregator needs subjectAltName=DNS:{NAME})",
                x509.version().0.saturating_add(1)
            ));
        }
        Self::of(&x509, der)
    }

    fn of(x509: &X509Certificate<'_>, der: &CertificateDer<'_>) -> Result<Self, String> {
        // Names are compared, logged and displayed, so a certificate with an unprintable name is
        // rejected.
        let (name, issuer) = (name_of(x509.subject()), name_of(x509.issuer()));
        identity_name::check(&name)?;
        if !PeerText::is_plain(&issuer) {
            return Err("the name of the certificate's issuer has unprintable characters".into());
        }
        let role = role_of(x509)?;
        let validity = x509.validity();
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, der);
        Ok(Self {
            name,
            role,
            issuer,
            not_before: rfc3339(validity.not_before.timestamp()),
            not_after: rfc3339(validity.not_after.timestamp()),
            valid: validity.is_valid(),
            ends_soon: ends_soon(
                validity.not_before.timestamp(),
                validity.not_after.timestamp(),
                OffsetDateTime::now_utc().unix_timestamp(),
            ),
            fingerprint: digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect(),
        })
    }
}

fn x509<'a>(der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, String> {
    let (_, x509) =
        X509Certificate::from_der(der).map_err(|_| "a certificate in the file is damaged")?;
    Ok(x509)
}

/// Returns the role that a certificate's extended key usages allow.
fn role_of(x509: &X509Certificate<'_>) -> Result<Role, String> {
    if x509.is_ca() {
        return Ok(Role::Authority);
    }
    let usage = x509.extended_key_usage();
    let usage = usage.map_err(|_| "the certificate has two lists of extended key usages")?;
    let Some(usage) = usage.map(|usage| usage.value) else { return Ok(Role::Worker) };
    let operates = usage.other.iter().any(|purpose| purpose.as_bytes() == OPERATOR);
    match (usage.server_auth, operates) {
        (true, true) => Err("the certificate has the roles aggregator and operator, and may have \
                             only one; issue an identity for each with `racksum identity issue`"
            .into()),
        (true, false) => Ok(Role::Aggregator),
        (false, true) => Ok(Role::Operator),
        (false, false) => Ok(Role::Worker),
    }
}

/// Object identifier of the extended key usage that makes the holder an operator, in DER:
/// 2.25.140299129769709810397704343116892583697. The arc 2.25 takes UUIDs, so the identifier is
/// unique without a registration.
pub(super) const OPERATOR: &[u8] = &[
    0x69, 0x81, 0xd3, 0x8c, 0xd0, 0xca, 0x86, 0x88, 0xea, 0xa0, 0xa7, 0xac, 0xc6, 0x9d, 0xd1, 0xe4,
    0xdd, 0xce, 0xee, 0x11,
];

/// Returns whether a certificate valid between `from` and `to`, in seconds, expires soon. A
/// short-lived certificate counts as expiring soon only in the last tenth of its life.
const fn ends_soon(from: i64, to: i64, now: i64) -> bool {
    const WEEK: i64 = 7 * 24 * 3600;
    let (left, tenth) = (to.saturating_sub(now), to.saturating_sub(from) / 10);
    left < WEEK && left < tenth
}

/// Returns the time at which a certificate expires.
pub(super) fn end_of(der: &CertificateDer<'_>) -> Result<OffsetDateTime, String> {
    Ok(x509(der)?.validity().not_after.to_datetime())
}

/// Returns whether a certificate names its own subject as the issuer, as a self-signed one does.
pub(super) fn is_self_issued(der: &CertificateDer<'_>) -> bool {
    x509(der).is_ok_and(|x509| x509.subject().as_raw() == x509.issuer().as_raw())
}

/// Returns whether a certificate names the subject of the certificate `issuer` as its issuer.
pub(super) fn is_issued_by(der: &CertificateDer<'_>, issuer: &CertificateDer<'_>) -> bool {
    let (Ok(own), Ok(issuer)) = (x509(der), x509(issuer)) else { return false };
    own.issuer().as_raw() == issuer.subject().as_raw()
}

/// Returns the common name, or an empty string if there is none.
fn name_of(name: &X509Name<'_>) -> String {
    let common = name.iter_common_name().next().and_then(|name| name.as_str().ok());
    common.unwrap_or_default().to_owned()
}

/// Formats a time in seconds since 1970 as RFC 3339.
pub(super) fn rfc3339(timestamp: i64) -> String {
    let at = OffsetDateTime::from_unix_timestamp(timestamp).ok();
    at.and_then(|at| at.format(&Rfc3339).ok()).unwrap_or_else(|| timestamp.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_ends_soon_in_its_last_week_or_the_last_tenth_of_a_short_life() {
        let day = 24 * 3600;
        for (life, left, soon) in
            [(365, 8, false), (365, 6, true), (10, 6, false), (10, 2, false), (30, 2, true)]
        {
            assert_eq!(
                ends_soon(0, life * day, (life - left) * day),
                soon,
                "{left} of {life} days"
            );
        }
    }
}
