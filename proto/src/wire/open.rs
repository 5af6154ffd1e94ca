//! The body of an open: a descriptor, and the occupancy of a stretch of windows.

use alloc::vec::Vec;
use core::fmt;

use bitvec::order::Lsb0;
use bitvec::slice::BitSlice;
use bitvec::view::BitView;
use zstd::bulk::{Compressor, Decompressor};

use super::{read_u32, read_u64};
use crate::descriptor::Descriptor;
use crate::ids::OpId;
use crate::reject::Reject;

/// The encoding of a stretch's occupancy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Encoding {
    /// No bit is set; no bytes follow.
    Empty = 0,
    /// Every bit is set; no bytes follow.
    Full = 1,
    /// The bits, least significant bit first.
    Raw = 2,
    /// The raw bits, compressed with zstd.
    Zstd = 3,
}

/// An open: the op's descriptor, and the occupancy of `windows` consecutive windows of the stream,
/// starting with the header's window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Open {
    /// The op's descriptor.
    pub descriptor: Descriptor,
    /// The last op before this one that the sender has opened in the stream and that, as far as the
    /// sender knows, has not failed.
    pub after: Option<OpId>,
    /// The number of windows in the stretch.
    pub windows: u32,
    occupancy: Occupancy,
    held: Occupancy,
}

/// A rank's statement about one window that it opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Opening {
    /// Whether the rank will send the window.
    pub owed: bool,
    /// Whether the rank already has the window's sum, from before the job moved.
    pub held: bool,
}

type Occupancy = [u64; Open::MAX_WINDOWS / 64];

impl Open {
    /// The size of the body before the occupancy, in bytes.
    pub const LEN: usize = Descriptor::LEN + 16;
    /// The most windows of a stretch, or half as many if the op is resumed: each then has two bits.
    /// The raw bits fit in a datagram at every MTU.
    pub const MAX_WINDOWS: usize = 8192;

    /// Returns a bit for each window of the stretch: whether the rank will send it.
    #[must_use]
    pub fn occupancy(&self) -> &BitSlice<u64, Lsb0> {
        &self.occupancy.view_bits::<Lsb0>()[..self.windows as usize]
    }

    /// Returns a bit for each window of the stretch: whether the rank already has the window's sum.
    #[must_use]
    pub fn held(&self) -> &BitSlice<u64, Lsb0> {
        &self.held.view_bits::<Lsb0>()[..self.windows as usize]
    }
}

impl Opening {
    /// Returns the statement about a window of an op that began at this aggregator. The rank holds
    /// no sum of such a window from before a move.
    #[must_use]
    pub const fn of(owed: bool) -> Self {
        Self { owed, held: false }
    }
}

/// Returns the number of bits that an open uses for each window.
const fn bits_each(resumed: bool) -> usize {
    1 + resumed as usize
}

/// A decoder of opens that reuses its memory.
#[derive(Default)]
pub struct OpenDecoder {
    zstd: Decompressor<'static>,
}

impl fmt::Debug for OpenDecoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenDecoder").finish_non_exhaustive()
    }
}

impl OpenDecoder {
    /// Creates a decoder.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads the body of an open. `resumed` says whether the header has
    /// [`Flags::RESUMED`](super::Flags).
    ///
    /// # Errors
    /// Returns the reason why the body is not a valid open.
    pub fn decode(&mut self, body: &[u8], resumed: bool) -> Result<Open, Reject> {
        let (descriptor, rest) =
            body.split_first_chunk::<{ Descriptor::LEN }>().ok_or(Reject::Body)?;
        let descriptor = Descriptor::decode(descriptor)?;
        let after = read_u32(rest, 0).ok_or(Reject::Body)?;
        let windows = read_u32(rest, 4).ok_or(Reject::Body)?;
        let encoding = read_u64(rest, 8).ok_or(Reject::Body)?;
        let packed = rest.get(16..).ok_or(Reject::Body)?;
        let count = windows as usize;
        // wire: W-14
        let bits = count.saturating_mul(bits_each(resumed));
        if count == 0 || bits > Open::MAX_WINDOWS {
            return Err(Reject::Body);
        }
        let after = (after != u32::MAX).then_some(OpId(after));
        let unpacked = self.unpack(bits, encoding, packed)?;
        let (occupancy, held) =
            if resumed { untwine(&unpacked, count) } else { (unpacked, NOTHING) };
        Ok(Open { descriptor, after, windows, occupancy, held })
    }

    /// Unpacks `count` bits.
    fn unpack(&mut self, count: usize, encoding: u64, packed: &[u8]) -> Result<Occupancy, Reject> {
        let mut occupancy = NOTHING;
        let mut raw = [0u8; Open::MAX_WINDOWS / 8];
        let raw_len = count.div_ceil(8);
        // wire: W-15
        match encoding {
            e if e == Encoding::Empty as u64 && packed.is_empty() => return Ok(occupancy),
            e if e == Encoding::Full as u64 && packed.is_empty() => {
                occupancy.view_bits_mut::<Lsb0>()[..count].fill(true);
                return Ok(occupancy);
            }
            e if e == Encoding::Raw as u64 && packed.len() == raw_len => {
                raw[..raw_len].copy_from_slice(packed);
            }
            e if e == Encoding::Zstd as u64 => {
                // The buffer limits the output, so a frame that exceeds the raw length causes an
                // error instead of an allocation.
                let got = self.zstd.decompress_to_buffer(packed, &mut raw[..raw_len]);
                if got.ok() != Some(raw_len) {
                    return Err(Reject::Body);
                }
            }
            _ => return Err(Reject::Body),
        }
        for (word, bytes) in occupancy.iter_mut().zip(raw.chunks_exact(8)) {
            *word = bytes.iter().rev().fold(0, |word, byte| (word << 8) | u64::from(*byte));
        }
        // wire: W-16
        let stray = occupancy.view_bits::<Lsb0>()[count..].any();
        if stray { Err(Reject::Body) } else { Ok(occupancy) }
    }
}

/// The occupancy in which no bit is set.
const NOTHING: Occupancy = [0; Open::MAX_WINDOWS / 64];

/// Separates the alternating bits of `count` windows into owed and held windows.
fn untwine(bits: &Occupancy, count: usize) -> (Occupancy, Occupancy) {
    let (mut owed, mut held) = (NOTHING, NOTHING);
    for (at, pair) in bits.view_bits::<Lsb0>().chunks_exact(2).take(count).enumerate() {
        owed.view_bits_mut::<Lsb0>().set(at, pair[0]);
        held.view_bits_mut::<Lsb0>().set(at, pair[1]);
    }
    (owed, held)
}

/// An encoder of opens that reuses its memory.
pub struct OpenEncoder {
    raw: Vec<u8>,
    compressed: Vec<u8>,
    zstd: Compressor<'static>,
}

impl fmt::Debug for OpenEncoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenEncoder").field("raw", &self.raw).finish_non_exhaustive()
    }
}

impl Default for OpenEncoder {
    fn default() -> Self {
        Self::new()
    }
}

impl OpenEncoder {
    /// The least number of raw bytes that the encoder tries to compress.
    const WORTH_COMPRESSING: usize = 32;

    /// Creates an encoder.
    #[must_use]
    pub fn new() -> Self {
        let raw_len = Open::MAX_WINDOWS / 8;
        Self {
            raw: Vec::with_capacity(raw_len),
            compressed: alloc::vec![0; raw_len],
            zstd: Compressor::default(),
        }
    }

    /// Writes the body of an open of `windows` into `out`. Windows that do not fit are left out. If
    /// the op was `resumed`, the body also says which sums the rank holds. Returns the body's
    /// length and the number of windows in the body.
    pub fn encode(
        &mut self,
        descriptor: &Descriptor,
        after: Option<OpId>,
        windows: impl Iterator<Item = Opening>,
        resumed: bool,
        out: &mut [u8],
    ) -> (usize, u32) {
        let room = out.len().saturating_sub(Open::LEN).min(Open::MAX_WINDOWS / 8);
        self.raw.clear();
        let (mut bits, mut ones) = (0u32, 0u32);
        for Opening { owed, held } in windows.take(room * 8 / bits_each(resumed)) {
            for bit in [owed, held].into_iter().take(bits_each(resumed)) {
                if bits.is_multiple_of(8) {
                    self.raw.push(0);
                }
                if let (true, Some(byte)) = (bit, self.raw.last_mut()) {
                    *byte |= 1 << (bits % 8);
                    ones += 1;
                }
                bits += 1;
            }
        }
        let windows = bits / (1 + u32::from(resumed));
        let (encoding, packed) = self.pack(bits, ones);
        let Some((head, rest)) = out.split_first_chunk_mut::<{ Descriptor::LEN }>() else {
            return (0, 0);
        };
        descriptor.encode(head);
        rest[0..4].copy_from_slice(&after.map_or(u32::MAX, |op| op.0).to_be_bytes());
        rest[4..8].copy_from_slice(&windows.to_be_bytes());
        rest[8..16].copy_from_slice(&(encoding as u64).to_be_bytes());
        rest[16..16 + packed.len()].copy_from_slice(packed);
        (Open::LEN + packed.len(), windows)
    }

    /// Returns the raw bits in a compact encoding. Compresses them if they are long enough and
    /// compression makes them shorter.
    fn pack(&mut self, bits: u32, ones: u32) -> (Encoding, &[u8]) {
        if ones == 0 {
            return (Encoding::Empty, &[]);
        }
        if ones == bits {
            return (Encoding::Full, &[]);
        }
        if self.raw.len() >= Self::WORTH_COMPRESSING {
            let room = &mut self.compressed[..self.raw.len() - 1];
            // An error only means that the compressed form is not shorter than the raw bits.
            if let Ok(len) = self.zstd.compress_to_buffer(&self.raw, room) {
                return (Encoding::Zstd, &self.compressed[..len]);
            }
        }
        (Encoding::Raw, &self.raw)
    }
}

#[cfg(test)]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use super::*;
    use crate::dtype::DType;

    fn opening(owed: &[bool]) -> impl Iterator<Item = Opening> + '_ {
        owed.iter().map(|owed| Opening::of(*owed))
    }

    fn round_trip(bits: &[bool]) -> (usize, Open) {
        let mut out = vec![0xa5; 1200];
        let descriptor = Descriptor::sum(123_456, DType::F32);
        let (len, windows) =
            OpenEncoder::new().encode(&descriptor, Some(OpId(7)), opening(bits), false, &mut out);
        assert_eq!(windows as usize, bits.len());
        let open = OpenDecoder::new().decode(&out[..len], false).unwrap();
        assert_eq!(open.descriptor, descriptor);
        assert_eq!(open.after, Some(OpId(7)));
        assert_eq!(open.occupancy().iter().by_vals().collect::<Vec<_>>(), bits);
        (len, open)
    }

    #[test]
    fn an_empty_or_full_stretch_takes_no_occupancy_bytes() {
        // wire: W-15
        assert_eq!(round_trip(&[false; 8192]).0, Open::LEN);
        assert_eq!(round_trip(&[true; 8192]).0, Open::LEN);
    }

    #[test]
    fn bits_travel_raw_or_compressed_whichever_is_shorter() {
        // wire: W-15
        assert_eq!(round_trip(&[true, false, true]).0, Open::LEN + 1);
        let sparse: Vec<bool> = (0..8192).map(|i| i % 977 == 0).collect();
        assert!(round_trip(&sparse).0 < Open::LEN + 200);
        let mut state = 1u32;
        let noise: Vec<bool> = (0..8192)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                state >> 31 == 1
            })
            .collect();
        assert_eq!(round_trip(&noise).0, Open::LEN + 1024);
    }

    #[test]
    fn an_op_that_is_resumed_says_what_is_held() {
        // wire: W-63
        let windows: Vec<Opening> =
            (0..4096).map(|i| Opening { owed: i % 3 == 0, held: i % 5 == 0 }).collect();
        for count in [1, 3, 4, 31, 4096] {
            let windows = &windows[..count];
            let mut out = vec![0xa5; 1200];
            let descriptor = Descriptor::sum(1 << 30, DType::F32);
            let mut encoder = OpenEncoder::new();
            let (len, taken) =
                encoder.encode(&descriptor, None, windows.iter().copied(), true, &mut out);
            assert_eq!(taken as usize, count);
            let open = OpenDecoder::new().decode(&out[..len], true).unwrap();
            let bits = open.occupancy().iter().by_vals().zip(open.held().iter().by_vals());
            assert!(bits.eq(windows.iter().map(|window| (window.owed, window.held))));
        }
        let all = [Opening { owed: true, held: true }; 8192];
        let mut out = vec![0; 1200];
        let descriptor = Descriptor::sum(1 << 30, DType::F32);
        let (_, taken) =
            OpenEncoder::new().encode(&descriptor, None, all.into_iter(), true, &mut out);
        assert_eq!(taken, 4096, "the encoder must take as many windows as fit");
    }

    #[test]
    fn malformed_bodies_are_rejected() {
        // wire: W-12, W-13, W-14, W-15, W-16
        let mut out = vec![0; 1200];
        let bits = [true, false, true];
        let descriptor = Descriptor::sum(1 << 20, DType::F32);
        let (len, _) =
            OpenEncoder::new().encode(&descriptor, None, opening(&bits), false, &mut out);
        let good = &out[..len];
        for len in 0..good.len() {
            assert!(OpenDecoder::new().decode(&good[..len], false).is_err(), "{len}");
        }
        let broken = |at: usize, value: u8| {
            let mut bytes = good.to_vec();
            bytes[at] = value;
            OpenDecoder::new().decode(&bytes, false)
        };
        assert_eq!(broken(16, 99), Err(Reject::Descriptor), "dtype");
        assert_eq!(broken(17, 99), Err(Reject::Descriptor), "wire");
        assert_eq!(broken(18, 0), Err(Reject::Descriptor), "reduction");
        assert_eq!(broken(19, 11), Err(Reject::Descriptor), "block");
        assert_eq!(broken(21, 99), Err(Reject::Descriptor), "collective");
        assert_eq!(broken(21, 1), Err(Reject::Descriptor), "a refused call with elements");
        assert_eq!(broken(23, 1), Err(Reject::Descriptor), "the root of an op");
        assert_eq!(broken(35, 0), Err(Reject::Body), "no windows");
        assert_eq!(broken(34, 0xff), Err(Reject::Body), "too many windows");
        assert_eq!(broken(43, 9), Err(Reject::Body), "encoding");
        assert_eq!(broken(43, 3), Err(Reject::Body), "not zstd");
        assert_eq!(broken(44, 0xff), Err(Reject::Body), "stray bits");
    }

    /// Builds the body of an open of `windows` windows with `frame` as its occupancy.
    fn compressed(windows: u32, frame: &[u8]) -> Vec<u8> {
        let mut head = [0; Open::LEN];
        OpenEncoder::new().encode(
            &Descriptor::sum(1, DType::F32),
            None,
            opening(&[true]),
            false,
            &mut head,
        );
        head[32..36].copy_from_slice(&windows.to_be_bytes());
        head[36..44].copy_from_slice(&(Encoding::Zstd as u64).to_be_bytes());
        [&head[..], frame].concat()
    }

    #[test]
    fn a_frame_that_holds_more_than_the_stretch_is_rejected_and_spoils_nothing() {
        // wire: W-15
        let mut decoder = OpenDecoder::new();
        let good = compressed(8192, &zstd::bulk::compress(&[1; 1024], 1).unwrap());
        let long = compressed(8192, &zstd::bulk::compress(&[1; 1025], 1).unwrap());
        let bomb = compressed(8192, &zstd::bulk::compress(&vec![0; 64 << 20], 1).unwrap());
        assert!(decoder.decode(&good, false).is_ok());
        for bad in [&long, &bomb[..Open::LEN + 1024.min(bomb.len() - Open::LEN)], &good[..50]] {
            assert_eq!(decoder.decode(bad, false), Err(Reject::Body));
            assert_eq!(
                decoder.decode(&good, false).map(|open| open.occupancy().count_ones()),
                Ok(1024)
            );
        }
    }

    #[test]
    fn an_encoder_writes_the_same_whatever_it_wrote_before() {
        let bits = |step: usize| (0..8192).map(move |i| Opening::of(i % step == 0));
        let descriptor = Descriptor::sum(1 << 30, DType::F32);
        let mut used = OpenEncoder::new();
        for step in [977, 3, 64, 977] {
            let [mut one, mut other] = [[0xa5; 1200]; 2];
            used.encode(&descriptor, None, bits(step), false, &mut one);
            OpenEncoder::new().encode(&descriptor, None, bits(step), false, &mut other);
            assert_eq!(one, other, "{step}");
        }
    }
}
