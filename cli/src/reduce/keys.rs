//! Checks for duplicate keys in a JSON header. The format forbids them, and a parser would silently
//! keep only one of the two values.

use std::collections::HashSet;
use std::fmt;

use racksum_proto::peer_text::PeerText;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::quoted::Quoted;

/// Checks that no object of a header has a duplicate key. Accepts malformed JSON, because the
/// header's parser reports it.
///
/// # Errors
/// A clause that names the key, for use in an error message.
pub(super) fn check_unique(header: &[u8]) -> Result<(), String> {
    match serde_json::from_slice::<Unique>(header) {
        Err(error) if error.is_data() => Err(PeerText::of(error).into()),
        Ok(Unique) | Err(_) => Ok(()),
    }
}

/// Any JSON value whose objects have no duplicate keys.
struct Unique;

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for Unique {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        let mut keys = HashSet::new();
        while let Some((key, Self)) = map.next_entry::<String, _>()? {
            if let Some(key) = keys.replace(key) {
                return Err(A::Error::custom(format_args!(
                    "its header has the key {} twice",
                    Quoted(&key)
                )));
            }
        }
        Ok(Self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self, A::Error> {
        while let Some(Self) = list.next_element()? {}
        Ok(Self)
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_unit<E: Error>(self) -> Result<Self, E> {
        Ok(self)
    }
}
