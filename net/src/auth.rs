//! Authentication of datagrams: only a holder of the key can produce them, and each is accepted at
//! most once.
//!
//! A [`Sealer`] numbers the datagrams of one sender and appends a tag to each. An [`Opener`]
//! accepts datagrams with a correct tag and a new number. The tags are computed with AEGIS-128X2
//! (RFC 10032). With [`DataAuth::Mac`] the whole datagram is associated data. With
//! [`DataAuth::Aead`] the first header is associated data, and the rest is encrypted.
//! `docs/wire.md` defines the layout.

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

/// Generates a random key.
///
/// # Errors
///
/// [`NetError::Tls`] if the system provides no randomness.
pub fn new_key() -> Result<Key, NetError> {
    let mut key = Key([0; Key::LEN]);
    aws_lc_rs::rand::fill(&mut key.0).map_err(|_| NetError::Tls {
        reason: "the system provides no randomness for a key".into(),
    })?;
    Ok(key)
}

/// Cipher for one datagram. Its tag is as long as the longest trailer.
type Cipher = Aegis128X2<TAG>;
const TAG: usize = DataAuth::MAX_TRAILER;

/// Key, with the sender and the shard of the datagrams that it authenticates.
#[derive(Debug)]
struct Lock {
    auth: DataAuth,
    key: Key,
    sender: Rank,
    shard: u8,
}

impl Lock {
    /// Creates a lock; `None` if datagrams are not authenticated.
    fn new(auth: DataAuth, key: &Key, sender: Rank, shard: u8) -> Option<Self> {
        if auth == DataAuth::None {
            return None;
        }
        Some(Self { auth, key: *key, sender, shard })
    }

    /// Returns the cipher for one datagram. No nonce repeats under one key, because the nonce
    /// contains the sender, the shard and the number, and no number is used twice for the same
    /// sender and shard.
    fn cipher(&self, number: u64) -> Cipher {
        let mut nonce = Nonce::default();
        nonce[0..2].copy_from_slice(&self.sender.0.to_be_bytes());
        nonce[2] = self.shard;
        nonce[4..12].copy_from_slice(&number.to_be_bytes());
        Cipher::new(&self.key.0, &nonce)
    }

    /// Splits a datagram's messages into the part that is only authenticated and the part that is
    /// also encrypted.
    fn parts<'a>(&self, messages: &'a mut [u8]) -> (&'a [u8], &'a mut [u8]) {
        let plain = match self.auth {
            DataAuth::Aead => Header::LEN.min(messages.len()),
            DataAuth::Mac | DataAuth::None => messages.len(),
        };
        let (plain, hidden) = messages.split_at_mut(plain);
        (plain, hidden)
    }

    /// Computes the tag of a datagram and, with [`DataAuth::Aead`], encrypts the datagram.
    fn seal(&self, number: u64, messages: &mut [u8]) -> Tag<TAG> {
        let (plain, hidden) = self.parts(messages);
        self.cipher(number).encrypt_in_place(hidden, plain)
    }

    /// Verifies the tag at the end of a datagram and, with [`DataAuth::Aead`], decrypts the
    /// datagram. Returns false if the tag is wrong or missing.
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

/// State for sealing datagrams from a rank to a shard, or from a shard to its ranks.
#[derive(Debug)]
pub struct Sealer {
    lock: Lock,
    next: u64,
}

impl Sealer {
    /// Creates a sealer for datagrams from a rank to a shard; `None` if they are not authenticated.
    #[must_use]
    pub fn of_rank(auth: DataAuth, keys: &Keys, rank: Rank, shard: u8) -> Option<Self> {
        Some(Self { lock: Lock::new(auth, &keys.up, rank, shard)?, next: 0 })
    }

    /// Creates a sealer for datagrams from a shard to its ranks; `None` if they are not
    /// authenticated.
    #[must_use]
    pub fn of_shard(auth: DataAuth, down: &Key, shard: u8) -> Option<Self> {
        Some(Self { lock: Lock::new(auth, down, Rank::AGGREGATOR, shard)?, next: 0 })
    }

    /// Returns how many datagrams have been sealed, which is also the number of the next datagram.
    #[must_use]
    pub const fn sealed(&self) -> u64 {
        self.next
    }

    /// Returns the authentication mode.
    #[must_use]
    pub const fn auth(&self) -> DataAuth {
        self.lock.auth
    }

    /// Seals the datagrams of a transmit, whose bytes must be contiguous, and appends them to `out`
    /// with their tags. Returns their stride in `out`.
    pub fn seal(&mut self, transmit: &Transmit<'_>, out: &mut Vec<u8>) -> usize {
        let Transmit { contents, stride, .. } = *transmit;
        debug_assert!(transmit.is_in_one(), "the transmit must be contiguous");
        debug_assert!(transmit.trailer.is_empty(), "only sealing may add a trailer");
        for datagram in contents.chunks(stride.max(1)) {
            let start = out.len();
            append(out, datagram);
            self.seal_last(out, start);
        }
        stride + self.lock.auth.trailer()
    }

    /// Seals the last datagram of `out`, which starts at `start`, and appends its tag.
    pub fn seal_last(&mut self, out: &mut Vec<u8>, start: usize) {
        let tag = self.seal_one(&mut out[start..]);
        out.extend_from_slice(&tag[..self.lock.auth.trailer()]);
    }

    /// Seals datagrams that lie `stride` bytes apart, each with space for its tag at the end, and
    /// returns them. [`DataAuth::Aead`] encrypts a copy in `out`, because the originals may have to
    /// be sent again. [`DataAuth::Mac`] seals them in place.
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

    /// Seals one datagram in place and appends its tag to `trailer`.
    pub fn seal_in_place(&mut self, datagram: &mut [u8], trailer: &mut Vec<u8>) {
        let tag = self.seal_one(datagram);
        trailer.extend_from_slice(&tag[..self.lock.auth.trailer()]);
    }

    /// Gives one datagram the next number, seals the datagram in place and returns its tag.
    fn seal_one(&mut self, datagram: &mut [u8]) -> Tag<TAG> {
        let number = self.next;
        self.next += 1;
        Header::put_number(datagram, low_half(number));
        self.lock.seal(number, datagram)
    }
}

/// State for opening datagrams from a rank at a shard, or from a shard at a rank.
#[derive(Debug)]
pub struct Opener {
    lock: Lock,
    generation: Generation,
    window: ReplayWindow,
}

impl Opener {
    /// Creates an opener for datagrams from a rank to a shard; `None` if they are not
    /// authenticated.
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

    /// Creates an opener for datagrams from a shard to a rank; `None` if they are not
    /// authenticated.
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

    /// Makes the opener reject the first `sealed` datagrams.
    #[must_use]
    pub fn after(mut self, sealed: u64) -> Self {
        self.window = ReplayWindow::after(sealed);
        self
    }

    /// Verifies a datagram and returns its messages as they were before sealing.
    ///
    /// # Errors
    ///
    /// [`Reject::Forged`] if the datagram is too short or its tag is wrong, and
    /// [`Reject::Replayed`] if it was accepted before or is too old to check.
    pub fn open<'a>(&mut self, datagram: &'a mut [u8]) -> Result<&'a mut [u8], Reject> {
        // wire: W-58
        let low = Header::number(datagram).ok_or(Reject::Forged)?;
        // wire: W-59
        // The replay check comes first because it costs less. Only the tag proves the number, so
        // the number counts as accepted only after the tag is verified.
        let number = self.window.number(low).ok_or(Reject::Replayed)?;
        if !self.lock.open(number, datagram) {
            return Err(Reject::Forged);
        }
        self.window.take(number);
        let len = datagram.len() - self.lock.auth.trailer();
        let messages = &mut datagram[..len];
        // Restore the generation. On the wire, the number takes its place, because the key already
        // identifies the generation.
        Header::put_number(messages, self.generation.0);
        Ok(messages)
    }
}

/// Appends a copy of `bytes` in short pieces, because glibc makes copies of 2,112 bytes or more
/// with `rep movsb` if the processor has AVX-512. On AMD's Zen 4, `rep movsb` takes up to eight
/// times as long if the target begins less than 32 bytes after the source, modulo a page.
pub fn append(out: &mut Vec<u8>, bytes: &[u8]) {
    const PIECE: usize = 2048;
    out.reserve(bytes.len());
    bytes.chunks(PIECE).for_each(|piece| out.extend_from_slice(piece));
}

/// Returns the lower half of a number, which is the part that a datagram carries.
#[expect(clippy::cast_possible_truncation, reason = "only the lower half is wanted")]
const fn low_half(number: u64) -> u32 {
    number as u32
}

#[cfg(test)]
mod tests;
