//! Connection identifiers (RFC 9000, section 5.1): 64 random bits, and a tag that lets an endpoint
//! recognize its own identifiers.
//!
//! quinn's own identifiers have only 24 random bits. quinn chooses the identifier of a Retry
//! without checking those in use, and looks up each datagram among the connections first. If a new
//! identifier collides with that of an existing connection, the caller's datagrams go to that
//! connection, and the caller never gets an answer. 64 random bits without a tag would prevent
//! collisions, but the endpoint would then answer noise as if it belonged to a forgotten
//! connection.

use std::time::Duration;

use aws_lc_rs::hmac;
use quinn::{ConnectionId, ConnectionIdGenerator};
use quinn_proto::{InvalidCid, RandomConnectionIdGenerator};

use crate::NetError;
use crate::auth::new_key;

const RANDOM: usize = 8;
const TAG: usize = 8;
/// Length of an identifier in bytes; QUIC allows at most 20 (RFC 9000, section 17.2).
pub(super) const LEN: usize = RANDOM + TAG;

/// Generator of the identifiers of one endpoint's connections.
#[derive(Debug, Clone)]
pub(super) struct ConnectionIds {
    random: RandomConnectionIdGenerator,
    key: hmac::Key,
}

impl ConnectionIds {
    /// Creates a generator with a random key of its own.
    ///
    /// # Errors
    ///
    /// Returns [`NetError`] if the host provides no randomness.
    pub(super) fn new() -> Result<Self, NetError> {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &new_key()?.0);
        Ok(Self { random: RandomConnectionIdGenerator::new(RANDOM), key })
    }

    fn tag(&self, random: &[u8]) -> [u8; TAG] {
        let tag = hmac::sign(&self.key, random);
        *tag.as_ref().first_chunk().expect("SHA-256 has 32 bytes")
    }
}

impl ConnectionIdGenerator for ConnectionIds {
    fn generate_cid(&mut self) -> ConnectionId {
        let random = self.random.generate_cid();
        ConnectionId::new(&[&random[..], &self.tag(&random)].concat())
    }

    fn validate(&self, id: &ConnectionId) -> Result<(), InvalidCid> {
        let (random, tag) = id.split_at_checked(RANDOM).ok_or(InvalidCid)?;
        if tag == self.tag(random) { Ok(()) } else { Err(InvalidCid) }
    }

    fn cid_len(&self) -> usize {
        LEN
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_of_many_connections_have_the_same_identifier() {
        let mut ids = ConnectionIds::new().unwrap();
        let distinct: std::collections::HashSet<_> =
            (0..20_000).map(|_| ids.generate_cid()).collect();
        assert_eq!(distinct.len(), 20_000);
    }

    #[test]
    fn an_endpoint_knows_its_own_identifiers_and_no_others() {
        let (mut ids, others) = (ConnectionIds::new().unwrap(), ConnectionIds::new().unwrap());
        let own = ids.generate_cid();
        assert!(ids.validate(&own).is_ok());
        assert!(others.validate(&own).is_err());
        for bit in 0..8 * LEN {
            let mut bytes: Vec<u8> = own.to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(ids.validate(&ConnectionId::new(&bytes)).is_err(), "bit {bit}");
        }
        assert!(ids.validate(&ConnectionId::new(&own[..RANDOM - 1])).is_err());
    }
}
