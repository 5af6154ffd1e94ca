//! The bodies of nacks, waits and fails.

use super::{COUNT_LEN, read_u16, read_u32, read_u64};
use crate::descriptor::Descriptor;
use crate::ids::{OpId, Rank, WindowId};
use crate::reject::Reject;
use crate::time::Span;

/// An item that the sender of a nack lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NackEntry {
    /// The window.
    pub window: WindowId,
    /// The mask of missing fragments. In a nack to a worker, 0 requests the worker's opens,
    /// starting with this window. In a nack to the aggregator, 0 requests every result from this
    /// window up to, but excluding, the next entry's window. In the last entry of such a nack, 0
    /// asks which results exist from this window onward.
    pub fragments: u64,
}

/// The entries in the checked body of a nack.
#[derive(Debug, Clone, Copy)]
pub struct NackEntries<'a>(&'a [u8]);

impl<'a> NackEntries<'a> {
    /// The most entries in a nack; this many fit in a datagram at every MTU.
    pub const MAX: usize = 64;
    /// The size of the body of a nack without entries, in bytes.
    pub(crate) const NONE_LEN: usize = COUNT_LEN;
    const ENTRY_LEN: usize = 16;

    /// Returns how many entries fit in a nack of `len` bytes, including the header; at least one.
    pub(crate) fn room_of(len: usize) -> usize {
        (len.saturating_sub(super::Header::LEN + COUNT_LEN) / Self::ENTRY_LEN).max(1)
    }

    /// Reads the body of a nack.
    ///
    /// # Errors
    /// Returns [`Reject::Body`] if the count is missing or above [`Self::MAX`], or does not match
    /// the length.
    pub fn decode(body: &'a [u8]) -> Result<Self, Reject> {
        // wire: W-17
        let count = usize::from(read_u16(body, 0).ok_or(Reject::Body)?);
        let entries = &body[COUNT_LEN..];
        if count > Self::MAX || entries.len() != count * Self::ENTRY_LEN {
            return Err(Reject::Body);
        }
        Ok(Self(entries))
    }

    /// Returns the entries, in the order in which they were written.
    pub fn iter(&self) -> impl Iterator<Item = NackEntry> + use<'a> {
        self.0.chunks_exact(Self::ENTRY_LEN).filter_map(|entry| {
            let window = WindowId::new(OpId(read_u32(entry, 0)?), read_u32(entry, 4)?);
            Some(NackEntry { window, fragments: read_u64(entry, 8)? })
        })
    }

    /// Writes the body of a nack into `out` and returns its length. Entries that do not fit are
    /// left out.
    pub fn encode(entries: impl Iterator<Item = NackEntry>, out: &mut [u8]) -> usize {
        let Some((head, rest)) = out.split_at_mut_checked(COUNT_LEN) else { return 0 };
        let mut count = 0u16;
        for (entry, place) in entries.take(Self::MAX).zip(rest.chunks_exact_mut(Self::ENTRY_LEN)) {
            place[0..4].copy_from_slice(&entry.window.op.0.to_be_bytes());
            place[4..8].copy_from_slice(&entry.window.index.to_be_bytes());
            place[8..16].copy_from_slice(&entry.fragments.to_be_bytes());
            count += 1;
        }
        head.copy_from_slice(&count.to_be_bytes());
        COUNT_LEN + usize::from(count) * Self::ENTRY_LEN
    }
}

/// The ranks in the checked body of a wait. The next result waits for these ranks.
#[derive(Debug, Clone, Copy)]
pub struct MissingRanks<'a>(&'a [u8]);

impl<'a> MissingRanks<'a> {
    /// Returns whether the wait names no ranks.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The length of silence that marks a rank that has left and will send nothing more.
    pub const LEFT: Span = Span::from_millis(u32::MAX as u64);
    /// The most ranks that a wait names; this many fit in a datagram at every MTU.
    pub const MAX: usize = 128;
    const ENTRY_LEN: usize = 6;

    /// Returns how many ranks fit in a wait of `len` bytes, including the header; at least two.
    pub(crate) fn room_of(len: usize) -> usize {
        (len.saturating_sub(super::Header::LEN + COUNT_LEN) / Self::ENTRY_LEN).max(2)
    }

    /// Reads the body of a wait.
    ///
    /// # Errors
    /// Returns [`Reject::Body`] if the count is missing or above [`Self::MAX`], or does not match
    /// the length.
    pub fn decode(body: &'a [u8]) -> Result<Self, Reject> {
        // wire: W-18
        let count = usize::from(read_u16(body, 0).ok_or(Reject::Body)?);
        let entries = &body[COUNT_LEN..];
        if count > Self::MAX || entries.len() != count * Self::ENTRY_LEN {
            return Err(Reject::Body);
        }
        Ok(Self(entries))
    }

    /// Returns the ranks and how long each had been silent when the wait was written.
    pub fn iter(&self) -> impl Iterator<Item = (Rank, Span)> + use<'a> {
        self.0.chunks_exact(Self::ENTRY_LEN).filter_map(|entry| {
            let silent = Span::from_millis(u64::from(read_u32(entry, 2)?));
            Some((Rank(read_u16(entry, 0)?), silent))
        })
    }

    /// Writes the body of a wait into `out` and returns its length. Ranks that do not fit are left
    /// out.
    pub fn encode(ranks: impl Iterator<Item = (Rank, Span)>, out: &mut [u8]) -> usize {
        let Some((head, rest)) = out.split_at_mut_checked(COUNT_LEN) else { return 0 };
        let mut count = 0u16;
        for ((rank, silent), place) in
            ranks.take(Self::MAX).zip(rest.chunks_exact_mut(Self::ENTRY_LEN))
        {
            let millis = u32::try_from(silent.as_millis()).unwrap_or(u32::MAX);
            place[0..2].copy_from_slice(&rank.0.to_be_bytes());
            place[2..6].copy_from_slice(&millis.to_be_bytes());
            count += 1;
        }
        head.copy_from_slice(&count.to_be_bytes());
        COUNT_LEN + usize::from(count) * Self::ENTRY_LEN
    }
}

/// The body of a fail: two ranks whose descriptors differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Disagreement {
    /// One rank and its descriptor.
    pub one: (Rank, Descriptor),
    /// Another rank and its descriptor.
    pub other: (Rank, Descriptor),
}

impl Disagreement {
    /// The size of the body, in bytes.
    pub const LEN: usize = 2 * (2 + Descriptor::LEN);

    /// Writes the body of a fail.
    pub fn encode(&self, out: &mut [u8; Self::LEN]) {
        for ((rank, descriptor), half) in
            [self.one, self.other].iter().zip(out.chunks_exact_mut(Self::LEN / 2))
        {
            half[..2].copy_from_slice(&rank.0.to_be_bytes());
            if let Some(place) = half[2..].first_chunk_mut() {
                descriptor.encode(place);
            }
        }
    }

    /// Reads the body of a fail.
    ///
    /// # Errors
    /// Returns the reason why the body is not a valid fail.
    pub fn decode(body: &[u8]) -> Result<Self, Reject> {
        // wire: W-19
        let body: &[u8; Self::LEN] = body.try_into().map_err(|_| Reject::Body)?;
        let half = |at: usize| {
            let rank = Rank(read_u16(body, at).ok_or(Reject::Body)?);
            let descriptor = body[at + 2..].first_chunk().ok_or(Reject::Body)?;
            Ok((rank, Descriptor::decode(descriptor)?))
        };
        Ok(Self { one: half(0)?, other: half(Self::LEN / 2)? })
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;
    use crate::dtype::DType;

    #[test]
    fn asks_round_trip_and_truncations_are_rejected() {
        // wire: W-17
        let entries = [(1, 2, 3), (4, 5, u64::MAX), (6, 7, 0)].map(|(op, index, fragments)| {
            NackEntry { window: WindowId::new(OpId(op), index), fragments }
        });
        let mut out = [0xa5; 128];
        let len = NackEntries::encode(entries.into_iter(), &mut out);
        assert_eq!(len, 2 + 3 * 16);
        let read = NackEntries::decode(&out[..len]).unwrap();
        assert_eq!(read.iter().collect::<Vec<_>>(), entries);
        for short in 0..len {
            assert!(NackEntries::decode(&out[..short]).is_err());
        }
        let many = core::iter::repeat_n(entries[0], 100);
        assert_eq!(NackEntries::encode(many, &mut [0; 4096]), 2 + 64 * 16);
    }

    #[test]
    fn waits_round_trip_and_truncations_are_rejected() {
        // wire: W-18
        let ranks = [(Rank(3), Span::from_millis(250)), (Rank(9), Span::ZERO)];
        let mut out = [0xa5; 64];
        let len = MissingRanks::encode(ranks.into_iter(), &mut out);
        let read = MissingRanks::decode(&out[..len]).unwrap();
        assert_eq!(read.iter().collect::<Vec<_>>(), ranks);
        for short in 0..len {
            assert!(MissingRanks::decode(&out[..short]).is_err());
        }
    }

    #[test]
    fn disagreements_round_trip_and_truncations_are_rejected() {
        // wire: W-19
        let disagreement = Disagreement {
            one: (Rank(0), Descriptor::sum(10, DType::F32)),
            other: (Rank(3), Descriptor::sum(11, DType::Bf16)),
        };
        let mut out = [0xa5; Disagreement::LEN];
        disagreement.encode(&mut out);
        assert_eq!(Disagreement::decode(&out), Ok(disagreement));
        for short in 0..out.len() {
            assert_eq!(Disagreement::decode(&out[..short]), Err(Reject::Body));
        }
    }
}
