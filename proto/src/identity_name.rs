//! The name of an identity.

use alloc::string::String;
use core::fmt;

use serde::{Deserialize, Serialize};

use crate::peer_text::{PeerText, Unshown};

/// The maximum length of a name in characters: the limit of an X.509 common name (RFC 5280,
/// `ub-common-name`).
pub const MAX_NAME: usize = 64;
/// The maximum length of a name in bytes: a character takes up to four bytes in UTF-8.
pub const MAX_NAME_BYTES: usize = 4 * MAX_NAME;

/// The name of an identity, from its certificate or from a message of another process.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "Unshown", into = "Unshown")]
pub struct IdentityName {
    name: String,
    /// The reason why the name from a peer is invalid; `None` if it is valid. An invalid name is
    /// escaped in `name`, which may then differ from the peer's name.
    unfit: Option<String>,
}

/// Checks a name for a new identity.
///
/// # Errors
/// Returns a sentence that says which names are valid.
pub fn check_new(name: &str) -> Result<(), String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let first = name.chars().next().is_some_and(|c| c.is_ascii_alphanumeric());
    if first && name.len() <= MAX_NAME && name.chars().all(plain) {
        return Ok(());
    }
    Err(alloc::format!(
        "{name:?} is not a valid name; use 1 to {MAX_NAME} letters, digits, dots, underscores and \
         dashes, with a letter or digit first"
    ))
}

/// Checks a name from a certificate or from a peer's message. Certificates that `racksum identity`
/// did not issue may have names with other characters, or no name.
///
/// # Errors
/// Returns a sentence for the user if the name is too long or not printable.
pub fn check(name: &str) -> Result<(), String> {
    let len = name.len();
    if len > MAX_NAME_BYTES {
        return Err(alloc::format!(
            "an identity's name must have at most {MAX_NAME_BYTES} bytes, not {len}"
        ));
    }
    if !PeerText::is_plain(name) {
        return Err(alloc::format!(
            "the identity name \"{}\" has unprintable characters",
            PeerText::of(name)
        ));
    }
    Ok(())
}

impl IdentityName {
    /// Checks the name as [`check`] does.
    ///
    /// # Errors
    /// Returns the error of [`check`].
    pub fn check(&self) -> Result<(), String> {
        self.unfit.clone().map_or_else(|| check(&self.name), Err)
    }
}

impl From<&str> for IdentityName {
    fn from(name: &str) -> Self {
        Self { name: name.into(), unfit: None }
    }
}

impl From<Unshown> for IdentityName {
    /// Checks the name before it is escaped. An escaped name would pass the check and could be the
    /// name of another identity.
    fn from(raw: Unshown) -> Self {
        Self { name: PeerText::of(&raw.0).into(), unfit: check(&raw.0).err() }
    }
}

impl From<IdentityName> for Unshown {
    fn from(name: IdentityName) -> Self {
        Self(name.name)
    }
}

impl fmt::Debug for IdentityName {
    /// Writes the name as a quoted string.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.name, f)
    }
}

#[cfg(test)]
mod tests {
    use std::format;

    use serde::de::IntoDeserializer;
    use serde::de::value::{Error, StrDeserializer};

    use super::*;

    fn read(name: &str) -> IdentityName {
        let name: StrDeserializer<'_, Error> = name.into_deserializer();
        IdentityName::deserialize(name).unwrap()
    }

    #[test]
    fn a_name_that_a_certificate_may_hold_may_be_said() {
        for name in ["", "node-7.rack_2", "node 7 (spare)", "nöde", &"\u{1f980}".repeat(MAX_NAME)]
        {
            assert_eq!(check(name), Ok(()), "{name}");
            assert_eq!(read(name), name.into(), "{name}");
            assert_eq!(read(name).check(), Ok(()), "{name}");
        }
    }

    #[test]
    fn what_a_peer_says_is_checked_as_it_says_it_and_is_never_another_name() {
        for name in ["a\nb", "a\u{202e}b", &"x".repeat(MAX_NAME_BYTES + 1), &"x".repeat(60_000)] {
            let held = read(name);
            let why = held.check().unwrap_err();
            assert_eq!(check(name), Err(why.clone()));
            let shown = format!("{held:?}");
            assert!(PeerText::is_plain(&shown) && PeerText::is_plain(&why), "{shown} {why}");
            assert_ne!(held, IdentityName::from(&*held.name));
        }
    }
}
