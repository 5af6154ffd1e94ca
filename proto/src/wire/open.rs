//! The body of an open: a descriptor, and which windows of a stretch are non-zero.

use alloc::vec::Vec;

use bitvec::order::Lsb0;
use bitvec::slice::BitSlice;
use bitvec::view::BitView;

use super::{read_u32, read_u64};
use crate::descriptor::Descriptor;
use crate::error::Reject;
use crate::ids::OpId;

/// How the occupancy of a stretch is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Encoding {
    /// No window is non-zero; nothing follows.
    Empty = 0,
    /// Every window is non-zero; nothing follows.
    Full = 1,
    /// One bit a window, least significant bit first.
    Raw = 2,
    /// The raw bits, compressed with zstd.
    Zstd = 3,
}

/// An open: the op's descriptor, and the occupancy of `windows` consecutive windows of the stream
/// from the header's window on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Open {
    /// What the op is.
    pub descriptor: Descriptor,
    /// The op before this one in the sender's stream.
    pub after: Option<OpId>,
    /// Windows the stretch covers.
    pub windows: u32,
    occupancy: [u64; Self::MAX_WINDOWS / 64],
}

impl Open {
    /// Bytes of the body before the occupancy.
    pub const LEN: usize = Descriptor::LEN + 16;
    /// Most windows of a stretch: their raw bits fit a datagram at every MTU.
    pub const MAX_WINDOWS: usize = 8192;

    /// Reads the body of an open.
    ///
    /// # Errors
    /// The reason why it is none.
    pub fn decode(body: &[u8]) -> Result<Self, Reject> {
        let (descriptor, rest) =
            body.split_first_chunk::<{ Descriptor::LEN }>().ok_or(Reject::Body)?;
        let descriptor = Descriptor::decode(descriptor)?;
        let after = read_u32(rest, 0).ok_or(Reject::Body)?;
        let windows = read_u32(rest, 4).ok_or(Reject::Body)?;
        let encoding = read_u64(rest, 8).ok_or(Reject::Body)?;
        let packed = rest.get(16..).ok_or(Reject::Body)?;
        let count = windows as usize;
        // wire: W-14
        if count == 0 || count > Self::MAX_WINDOWS {
            return Err(Reject::Body);
        }
        let mut open = Self {
            descriptor,
            after: (after != u32::MAX).then_some(OpId(after)),
            windows,
            occupancy: [0; Self::MAX_WINDOWS / 64],
        };
        open.unpack(encoding, packed)?;
        Ok(open)
    }

    /// Fills in the occupancy from its packed form.
    fn unpack(&mut self, encoding: u64, packed: &[u8]) -> Result<(), Reject> {
        let count = self.windows as usize;
        let raw_len = count.div_ceil(8);
        let mut raw = [0u8; Self::MAX_WINDOWS / 8];
        // wire: W-15
        match encoding {
            e if e == Encoding::Empty as u64 && packed.is_empty() => return Ok(()),
            e if e == Encoding::Full as u64 && packed.is_empty() => {
                self.occupancy.view_bits_mut::<Lsb0>()[..count].fill(true);
                return Ok(());
            }
            e if e == Encoding::Raw as u64 && packed.len() == raw_len => {
                raw[..raw_len].copy_from_slice(packed);
            }
            e if e == Encoding::Zstd as u64 => {
                let got = zstd::bulk::decompress_to_buffer(packed, &mut raw[..raw_len]);
                if got.ok() != Some(raw_len) {
                    return Err(Reject::Body);
                }
            }
            _ => return Err(Reject::Body),
        }
        for (word, bytes) in self.occupancy.iter_mut().zip(raw.chunks_exact(8)) {
            *word = bytes.iter().rev().fold(0, |word, byte| (word << 8) | u64::from(*byte));
        }
        // wire: W-16
        let stray = self.occupancy.view_bits::<Lsb0>()[count..].any();
        if stray { Err(Reject::Body) } else { Ok(()) }
    }

    /// Which windows of the stretch are non-zero.
    #[must_use]
    pub fn occupancy(&self) -> &BitSlice<u64, Lsb0> {
        &self.occupancy.view_bits::<Lsb0>()[..self.windows as usize]
    }
}

/// Writes opens. Its buffers are allocated once.
#[derive(Debug)]
pub struct OpenEncoder {
    raw: Vec<u8>,
    compressed: Vec<u8>,
}

impl Default for OpenEncoder {
    fn default() -> Self {
        Self::new()
    }
}

impl OpenEncoder {
    /// From this many bytes on, compression is tried.
    const WORTH_COMPRESSING: usize = 32;

    /// An encoder.
    #[must_use]
    pub fn new() -> Self {
        let raw_len = Open::MAX_WINDOWS / 8;
        Self { raw: Vec::with_capacity(raw_len), compressed: alloc::vec![0; raw_len] }
    }

    /// Writes the body of an open into `out`, with `occupied` as the occupancy, and returns its
    /// length. Windows that do not fit are left off; the second value says how many are in.
    pub fn encode(
        &mut self,
        descriptor: &Descriptor,
        after: Option<OpId>,
        occupied: impl Iterator<Item = bool>,
        out: &mut [u8],
    ) -> (usize, u32) {
        let room = out.len().saturating_sub(Open::LEN).min(Open::MAX_WINDOWS / 8);
        self.raw.clear();
        let (mut windows, mut ones) = (0u32, 0u32);
        for bit in occupied.take(room * 8) {
            if windows.is_multiple_of(8) {
                self.raw.push(0);
            }
            if let (true, Some(byte)) = (bit, self.raw.last_mut()) {
                *byte |= 1 << (windows % 8);
                ones += 1;
            }
            windows += 1;
        }
        let (encoding, packed) = self.pack(windows, ones);
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

    /// The shortest form of the raw bits.
    fn pack(&mut self, windows: u32, ones: u32) -> (Encoding, &[u8]) {
        if ones == 0 {
            return (Encoding::Empty, &[]);
        }
        if ones == windows {
            return (Encoding::Full, &[]);
        }
        if self.raw.len() >= Self::WORTH_COMPRESSING {
            let room = &mut self.compressed[..self.raw.len() - 1];
            // Not shorter than the raw bits: an error here only says that it did not fit.
            if let Ok(len) = zstd::bulk::compress_to_buffer(&self.raw, room, 1) {
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

    fn round_trip(bits: &[bool]) -> (usize, Open) {
        let mut out = vec![0xa5; 1200];
        let descriptor = Descriptor::sum(123_456, DType::F32);
        let (len, windows) =
            OpenEncoder::new().encode(&descriptor, Some(OpId(7)), bits.iter().copied(), &mut out);
        assert_eq!(windows as usize, bits.len());
        let open = Open::decode(&out[..len]).unwrap();
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
    fn malformed_bodies_are_rejected() {
        // wire: W-12, W-13, W-14, W-15, W-16
        let mut out = vec![0; 1200];
        let bits = [true, false, true];
        let descriptor = Descriptor::sum(1 << 20, DType::F32);
        let (len, _) = OpenEncoder::new().encode(&descriptor, None, bits.into_iter(), &mut out);
        let good = &out[..len];
        for len in 0..good.len() {
            assert!(Open::decode(&good[..len]).is_err(), "{len}");
        }
        let broken = |at: usize, value: u8| {
            let mut bytes = good.to_vec();
            bytes[at] = value;
            Open::decode(&bytes)
        };
        assert_eq!(broken(16, 99), Err(Reject::Descriptor), "dtype");
        assert_eq!(broken(17, 99), Err(Reject::Descriptor), "wire");
        assert_eq!(broken(18, 0), Err(Reject::Descriptor), "reduction");
        assert_eq!(broken(19, 11), Err(Reject::Descriptor), "block");
        assert_eq!(broken(21, 1), Err(Reject::Reserved), "reserved");
        assert_eq!(broken(31, 0), Err(Reject::Body), "no windows");
        assert_eq!(broken(30, 0xff), Err(Reject::Body), "too many windows");
        assert_eq!(broken(39, 9), Err(Reject::Body), "encoding");
        assert_eq!(broken(39, 3), Err(Reject::Body), "not zstd");
        assert_eq!(broken(40, 0xff), Err(Reject::Body), "stray bits");
    }
}
