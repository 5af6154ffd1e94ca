//! Authentication of datagrams: modes, keys and size overhead.
//!
//! This module has only the types that both sides share; `racksum-net` has the cryptography.

use alloc::string::String;
use core::fmt;
use core::str::FromStr;

use serde::{Deserialize, Serialize};

/// The authentication mode of a job's datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataAuth {
    /// Datagrams are not authenticated: anyone who can forge an address can forge sums.
    None,
    /// Each datagram carries an AEGIS-128X2 tag, which only a holder of the key can compute.
    Mac,
    /// Each datagram is encrypted and authenticated with AEGIS-128X2.
    Aead,
}

impl DataAuth {
    /// All modes.
    pub const ALL: [Self; 3] = [Self::None, Self::Mac, Self::Aead];

    /// The maximum number of bytes that authentication adds after the messages of a datagram.
    pub const MAX_TRAILER: usize = 16;

    /// Returns the number of bytes that authentication adds after the messages of a datagram.
    #[must_use]
    pub const fn trailer(self) -> usize {
        match self {
            Self::None => 0,
            // Together with the 48-byte header, a tag of 12 bytes adds less than 6 % to a 1 KiB
            // block (invariant I3). A forged tag passes with probability 2^-96.
            Self::Mac => 12,
            Self::Aead => Self::MAX_TRAILER,
        }
    }

    /// Returns the mode's name on the command line, in configurations and on the wire.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Mac => "mac",
            Self::Aead => "aead",
        }
    }
}

impl fmt::Display for DataAuth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An AEGIS-128X2 key. Its `Debug` output hides the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Key(pub [u8; Self::LEN]);

impl Key {
    /// The size of a key, in bytes.
    pub const LEN: usize = 16;
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// The error for a key that is not 32 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a key must have 32 hexadecimal digits")]
pub struct KeyError;

impl FromStr for Key {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        let mut key = [0; Self::LEN];
        let pairs = text.as_bytes().as_chunks::<2>();
        if pairs.0.len() != Self::LEN || !pairs.1.is_empty() {
            return Err(KeyError);
        }
        let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|it| u8::try_from(it).ok());
        for (byte, [high, low]) in key.iter_mut().zip(pairs.0) {
            *byte = digit(*high).ok_or(KeyError)? << 4 | digit(*low).ok_or(KeyError)?;
        }
        Ok(Self(key))
    }
}

impl TryFrom<String> for Key {
    type Error = KeyError;

    fn try_from(text: String) -> Result<Self, KeyError> {
        text.parse()
    }
}

impl From<Key> for String {
    fn from(key: Key) -> Self {
        let digit = |it: u8| char::from_digit(u32::from(it), 16).unwrap_or('0');
        key.0.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
    }
}

/// The keys with which a rank and its aggregator authenticate, and may encrypt, their datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keys {
    /// The key for datagrams that the rank sends; no other rank has it.
    pub up: Key,
    /// The key for datagrams that the aggregator sends; all ranks have it.
    pub down: Key,
}

#[cfg(test)]
mod tests {
    use std::format;

    use super::*;

    #[test]
    fn a_key_is_written_in_hexadecimal_and_never_shown() {
        let key = Key(core::array::from_fn(|i| u8::try_from(i * 17).unwrap()));
        let text = String::from(key);
        assert_eq!(text, "00112233445566778899aabbccddeeff");
        assert_eq!(text.parse(), Ok(key));
        assert_eq!(text.to_uppercase().parse(), Ok(key));
        assert_eq!(format!("{key:?}"), "Key(..)");
        for bad in ["", "0", &text[1..], "+0112233445566778899aabbccddeeff", "é"] {
            assert_eq!(bad.parse::<Key>(), Err(KeyError), "{bad}");
        }
        assert_eq!(format!("{text}0").parse::<Key>(), Err(KeyError));
    }
}
