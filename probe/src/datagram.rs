//! Datagrams of measurements: a header with a tag, then padding.
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | `RSPR` |
//! | 4 | version, 1 |
//! | 5 | kind: 1 ping, 2 echo, 3 train |
//! | 6..8 | length of the datagram |
//! | 8..16 | flow |
//! | 16..20 | number of the datagram within the flow and kind |
//! | 20..28 | random number of the flow's sender, which an echo returns |
//! | 28..32 | echo: nanoseconds between the arrival of the ping and this echo; otherwise zero |
//! | 32..48 | tag: the first 16 bytes of HMAC-SHA256 over bytes 0..32 |
//!
//! Numbers are big-endian. The key of the tag belongs to one flow, so a datagram of another flow or
//! of a stranger is never counted.

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::hmac::{HMAC_SHA256, Key as HmacKey, sign};
use racksum_proto::auth::Key;

/// Length of a ping and of an echo. An echo is never longer than its ping.
pub(crate) const PING_LEN: usize = 100;
/// Length of a train's datagrams. Each path that racksum uses carries them (`MIN_MTU`).
pub(crate) const TRAIN_LEN: usize = 1200;
/// Bytes of Ethernet, IP and UDP headers that a link carries per datagram.
pub(crate) const HEADERS: usize = 42;

const MAGIC: [u8; 4] = *b"RSPR";
const VERSION: u8 = 1;
const SIGNED: usize = 32;
const HEADER: usize = SIGNED + TAG;
const TAG: usize = 16;

/// Key of one flow, which makes and checks tags.
#[derive(Debug, Clone)]
pub(crate) struct TagKey(HmacKey);

impl TagKey {
    pub(crate) fn new(key: &Key) -> Self {
        Self(HmacKey::new(HMAC_SHA256, &key.0))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Ping = 1,
    Echo = 2,
    Train = 3,
}

/// The header of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) flow: u64,
    pub(crate) number: u32,
    /// Random number of the flow's sender. Only a host that receives its pings can return it.
    pub(crate) nonce: u64,
    /// Nanoseconds between the arrival of a ping and its echo.
    pub(crate) held_ns: u32,
}

impl Header {
    /// Returns a header without a time.
    pub(crate) const fn new(kind: Kind, flow: u64, number: u32, nonce: u64) -> Self {
        Self { kind, flow, number, nonce, held_ns: 0 }
    }

    /// Writes the header into a datagram, whose other bytes stay as they are.
    pub(crate) fn write(&self, key: &TagKey, datagram: &mut [u8]) {
        let len = u16::try_from(datagram.len()).unwrap_or(0);
        let header = &mut datagram[..HEADER];
        header[..4].copy_from_slice(&MAGIC);
        header[4] = VERSION;
        header[5] = self.kind as u8;
        header[6..8].copy_from_slice(&len.to_be_bytes());
        header[8..16].copy_from_slice(&self.flow.to_be_bytes());
        header[16..20].copy_from_slice(&self.number.to_be_bytes());
        header[20..28].copy_from_slice(&self.nonce.to_be_bytes());
        header[28..32].copy_from_slice(&self.held_ns.to_be_bytes());
        let (signed, tag) = header.split_at_mut(SIGNED);
        tag.copy_from_slice(&sign(&key.0, signed).as_ref()[..TAG]);
    }

    /// Reads a header and checks its tag with the key that `key_of` returns for its flow. Returns
    /// `None` for any other datagram.
    pub(crate) fn read(
        datagram: &[u8],
        key_of: impl FnOnce(u64) -> Option<TagKey>,
    ) -> Option<Self> {
        let (header, _) = datagram.split_first_chunk::<HEADER>()?;
        let (signed, tag) = header.split_at(SIGNED);
        let len = u16::from_be_bytes(signed[6..8].try_into().ok()?);
        let is_whole = usize::from(len) == datagram.len();
        if signed[..4] != MAGIC || signed[4] != VERSION || !is_whole {
            return None;
        }
        let kind = match signed[5] {
            1 => Kind::Ping,
            2 => Kind::Echo,
            3 => Kind::Train,
            _ => return None,
        };
        let flow = u64::from_be_bytes(signed[8..16].try_into().ok()?);
        let wanted = sign(&key_of(flow)?.0, signed);
        verify_slices_are_equal(&wanted.as_ref()[..TAG], tag).ok()?;
        let number = u32::from_be_bytes(signed[16..20].try_into().ok()?);
        let nonce = u64::from_be_bytes(signed[20..28].try_into().ok()?);
        let held_ns = u32::from_be_bytes(signed[28..32].try_into().ok()?);
        Some(Self { kind, flow, number, nonce, held_ns })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(byte: u8) -> TagKey {
        TagKey::new(&Key([byte; Key::LEN]))
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        let flow = 0x0102_0304_0506_0708;
        let header = Header { kind: Kind::Echo, flow, number: 9, nonce: 7, held_ns: 10 };
        let mut bytes = [0xff; PING_LEN];
        header.write(&key(7), &mut bytes);
        assert_eq!(bytes[..8], *b"RSPR\x01\x02\x00\x64");
        assert_eq!(bytes[8..16], [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(bytes[16..32], [0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 10]);
        // HMAC-SHA256 of bytes 0..32 under 16 bytes of 7, by Python's hmac.
        assert_eq!(bytes[32..36], [0x68, 0x98, 0xaa, 0x40]);
        assert_eq!(Header::read(&bytes, |_| Some(key(7))), Some(header));
    }

    #[test]
    fn each_changed_bit_of_the_header_is_noticed() {
        let mut bytes = [0; PING_LEN];
        Header::new(Kind::Ping, 5, 6, 7).write(&key(1), &mut bytes);
        assert_eq!(Header::read(&bytes, |_| Some(key(2))), None);
        assert_eq!(Header::read(&bytes[..PING_LEN - 1], |_| Some(key(1))), None);
        for bit in 0..8 * HEADER {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::read(&changed, |_| Some(key(1))), None, "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn random_bytes_are_no_datagram(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert_eq!(Header::read(&bytes, |_| Some(key(1))), None);
        }
    }
}
