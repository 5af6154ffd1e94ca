//! Datagrams that only a holder of a key can make, and that count only once.
//!
//! A [`Sealer`] numbers the datagrams of one sender on their way to one receiver and puts a tag
//! behind each; an [`Opener`] takes those whose tag is right and whose number is new. The tag is
//! that of AEGIS-128X2 (RFC 10032), over the datagram as associated data, or with the first header
//! as associated data and what follows it encrypted. The layout is `docs/wire.md`'s.

mod replay;

use aegis::aegis128x2::{Aegis128X2, Nonce, Tag};
use aws_lc_rs::constant_time::verify_slices_are_equal;
use racksum_proto::auth::{DataAuth, Key, Keys};
use racksum_proto::ids::{Generation, Rank};
use racksum_proto::reject::Reject;
use racksum_proto::wire::Header;
use replay::ReplayWindow;

use crate::NetError;
use crate::udp::Transmit;

/// A new key.
///
/// # Errors
///
/// [`NetError::Tls`] if the system gives no randomness.
pub fn new_key() -> Result<Key, NetError> {
    let mut key = Key([0; Key::LEN]);
    aws_lc_rs::rand::fill(&mut key.0)
        .map_err(|_| NetError::Tls { reason: "the system gives no randomness for a key".into() })?;
    Ok(key)
}

/// The cipher of one datagram, whose tag is as long as the longest that a datagram bears.
type Cipher = Aegis128X2<TAG>;
const TAG: usize = DataAuth::MAX_TRAILER;

/// A key, and whose datagrams it is for.
#[derive(Debug)]
struct Lock {
    auth: DataAuth,
    key: Key,
    sender: Rank,
    shard: u8,
}

impl Lock {
    /// None where nothing is authenticated.
    fn new(auth: DataAuth, key: &Key, sender: Rank, shard: u8) -> Option<Self> {
        if auth == DataAuth::None {
            return None;
        }
        Some(Self { auth, key: *key, sender, shard })
    }

    /// For one datagram. A nonce is never used twice with one key: its sender and shard are in it,
    /// and the number, which no sender uses twice towards a shard.
    fn cipher(&self, number: u64) -> Cipher {
        let mut nonce = Nonce::default();
        nonce[0..2].copy_from_slice(&self.sender.0.to_be_bytes());
        nonce[2] = self.shard;
        nonce[4..12].copy_from_slice(&number.to_be_bytes());
        Cipher::new(&self.key.0, &nonce)
    }

    /// What is authenticated of a datagram's messages as it is, and what is encrypted as well.
    fn parts<'a>(&self, messages: &'a mut [u8]) -> (&'a [u8], &'a mut [u8]) {
        let plain = match self.auth {
            DataAuth::Aead => Header::LEN.min(messages.len()),
            DataAuth::Mac | DataAuth::None => messages.len(),
        };
        let (plain, hidden) = messages.split_at_mut(plain);
        (plain, hidden)
    }

    /// The tag of a datagram, which is encrypted if that is wanted.
    fn seal(&self, number: u64, messages: &mut [u8]) -> Tag<TAG> {
        let (plain, hidden) = self.parts(messages);
        self.cipher(number).encrypt_in_place(hidden, plain)
    }

    /// Whether a datagram ends with its tag; one that is encrypted is decrypted.
    fn open(&self, number: u64, datagram: &mut [u8]) -> bool {
        let Some(at) = datagram.len().checked_sub(self.auth.trailer()) else { return false };
        let (messages, trailer) = datagram.split_at_mut(at);
        if let Ok(tag) = Tag::try_from(&*trailer) {
            let (plain, hidden) = self.parts(messages);
            return self.cipher(number).decrypt_in_place(hidden, &tag, plain).is_ok();
        }
        let tag = self.seal(number, messages);
        verify_slices_are_equal(&tag[..trailer.len()], trailer).is_ok()
    }
}

/// Numbers and seals the datagrams of one sender towards one shard.
#[derive(Debug)]
pub struct Sealer {
    lock: Lock,
    next: u64,
}

impl Sealer {
    /// For what a rank sends to a shard; none where nothing is authenticated.
    #[must_use]
    pub fn of_rank(auth: DataAuth, keys: &Keys, rank: Rank, shard: u8) -> Option<Self> {
        Some(Self { lock: Lock::new(auth, &keys.up, rank, shard)?, next: 0 })
    }

    /// For what a shard sends to its ranks; none where nothing is authenticated.
    #[must_use]
    pub fn of_shard(auth: DataAuth, down: &Key, shard: u8) -> Option<Self> {
        Some(Self { lock: Lock::new(auth, down, Rank::AGGREGATOR, shard)?, next: 0 })
    }

    /// How many datagrams were sealed: the number of the next.
    #[must_use]
    pub const fn sealed(&self) -> u64 {
        self.next
    }

    /// How it seals them.
    #[must_use]
    pub const fn auth(&self) -> DataAuth {
        self.lock.auth
    }

    /// Appends the datagrams of a transmit to `out`, each with its number and its tag. Returns how
    /// far they are apart there.
    pub fn seal(&mut self, transmit: &Transmit<'_>, out: &mut Vec<u8>) -> usize {
        let Transmit { contents, tail, stride, .. } = *transmit;
        debug_assert!(transmit.trailer.is_empty(), "what is sealed has none yet");
        let trailer = self.lock.auth.trailer();
        for datagram in contents.chunks(stride.max(1)) {
            let start = out.len();
            append(out, datagram);
            // A transmit with a tail is a single datagram.
            append(out, tail);
            let tag = self.seal_one(&mut out[start..]);
            out.extend_from_slice(&tag[..trailer]);
        }
        stride + trailer
    }

    /// Seals datagrams `stride` apart, behind each of which there is room for its tag: in their
    /// place, or where they would be encrypted in `out`, since they may have to be sent again.
    /// Returns them.
    pub fn seal_with_room<'a>(
        &mut self,
        contents: &'a mut [u8],
        stride: usize,
        out: &'a mut Vec<u8>,
    ) -> &'a mut [u8] {
        let contents = if self.lock.auth == DataAuth::Aead {
            out.clear();
            append(out, contents);
            &mut out[..]
        } else {
            contents
        };
        let trailer = self.lock.auth.trailer();
        for datagram in contents.chunks_mut(stride.max(1)) {
            let at = datagram.len().saturating_sub(trailer);
            let (messages, place) = datagram.split_at_mut(at);
            let tag = self.seal_one(messages);
            place.copy_from_slice(&tag[..place.len()]);
        }
        contents
    }

    /// Seals one datagram where it lies, and appends what is to follow it to `trailer`.
    pub fn seal_in_place(&mut self, datagram: &mut [u8], trailer: &mut Vec<u8>) {
        let tag = self.seal_one(datagram);
        trailer.extend_from_slice(&tag[..self.lock.auth.trailer()]);
    }

    /// Numbers one datagram and returns its tag.
    fn seal_one(&mut self, datagram: &mut [u8]) -> Tag<TAG> {
        let number = self.next;
        self.next += 1;
        Header::put_number(datagram, low_half(number));
        self.lock.seal(number, datagram)
    }
}

/// Takes the datagrams that one sender sealed towards one shard.
#[derive(Debug)]
pub struct Opener {
    lock: Lock,
    generation: Generation,
    window: ReplayWindow,
}

impl Opener {
    /// For what a shard hears from a rank; none where nothing is authenticated.
    #[must_use]
    pub fn of_rank(
        auth: DataAuth,
        up: &Key,
        generation: Generation,
        rank: Rank,
        shard: u8,
    ) -> Option<Self> {
        let lock = Lock::new(auth, up, rank, shard)?;
        Some(Self { lock, generation, window: ReplayWindow::new() })
    }

    /// For what a rank hears from a shard; none where nothing is authenticated.
    #[must_use]
    pub fn of_shard(
        auth: DataAuth,
        keys: &Keys,
        generation: Generation,
        shard: u8,
    ) -> Option<Self> {
        let lock = Lock::new(auth, &keys.down, Rank::AGGREGATOR, shard)?;
        Some(Self { lock, generation, window: ReplayWindow::new() })
    }

    /// Takes nothing of the first `sealed` datagrams.
    #[must_use]
    pub fn after(mut self, sealed: u64) -> Self {
        self.window = ReplayWindow::after(sealed);
        self
    }

    /// Takes a datagram. Returns its messages, as they were before they were sealed.
    ///
    /// # Errors
    /// [`Reject::Forged`] if nobody with the key has made it, [`Reject::Replayed`] if it was taken
    /// before, or is too old to tell.
    pub fn open<'a>(&mut self, datagram: &'a mut [u8]) -> Result<&'a mut [u8], Reject> {
        // wire: W-58
        let low = Header::number(datagram).ok_or(Reject::Forged)?;
        // wire: W-59
        // Looked up first, since that costs less than the tag; but only the tag makes it true.
        let number = self.window.number(low).ok_or(Reject::Replayed)?;
        if !self.lock.open(number, datagram) {
            return Err(Reject::Forged);
        }
        self.window.take(number);
        let len = datagram.len() - self.lock.auth.trailer();
        let messages = &mut datagram[..len];
        // The key is of one generation, so its place carries the number on the way.
        Header::put_number(messages, self.generation.0);
        Ok(messages)
    }
}

/// Appends a copy, in pieces too short for glibc to use `rep movsb` (2,112 bytes with AVX-512): on
/// AMD's Zen 4 that takes up to eight times as long where a copy begins less than 32 bytes behind
/// its source, modulo a page.
fn append(out: &mut Vec<u8>, bytes: &[u8]) {
    const PIECE: usize = 2048;
    out.reserve(bytes.len());
    bytes.chunks(PIECE).for_each(|piece| out.extend_from_slice(piece));
}

/// What a datagram carries of its number.
#[expect(clippy::cast_possible_truncation, reason = "the lower half is what is wanted")]
const fn low_half(number: u64) -> u32 {
    number as u32
}

#[cfg(test)]
mod tests;
