//! The division of an op: elements into blocks, blocks into windows, windows over shards, and a
//! window's packed non-zero blocks into fragments.

use core::ops::Range;

use crate::auth::DataAuth;
use crate::descriptor::Descriptor;
use crate::dtype::WireType;
use crate::ids::OpId;
use crate::wire::Header;

/// The maximum payload of a window, in bytes. With the headers of its fragments, a window fits in
/// one segmented send, of at most 65,507 bytes, at every MTU of at least 1280. A window of 64 KiB
/// would not fit.
pub const WINDOW_BYTES: usize = 60 * 1024;
/// The maximum number of blocks in a window: the mask has one bit for each.
pub const MAX_WINDOW_BLOCKS: usize = 64;
/// The maximum number of fragments of a window: one `u64` records which have arrived.
pub const MAX_FRAGMENTS: usize = 64;
/// The least payload of a fragment, in bytes. With a smaller payload, a window could have more than
/// 64 fragments.
pub const MIN_FRAGMENT_PAYLOAD: usize = WINDOW_BYTES / MAX_FRAGMENTS;
/// The maximum overhead of a datagram, in percent of its payload (invariant I3).
const MAX_OVERHEAD_PERCENT: usize = 6;

/// The blocks and windows of one op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    elements: u64,
    wire: WireType,
    block_elements: usize,
    window_blocks: usize,
    windows: u32,
}

impl Geometry {
    /// Returns the geometry of a valid descriptor. A tensor without elements has one empty window.
    #[must_use]
    pub fn new(descriptor: &Descriptor) -> Self {
        let block_elements = descriptor.block_elements();
        let block_len = descriptor.wire.block_len(block_elements);
        // wire: W-53
        let window_blocks = (WINDOW_BYTES / block_len).min(MAX_WINDOW_BLOCKS);
        let window_elements = (block_elements * window_blocks) as u64;
        let windows = descriptor.elements.div_ceil(window_elements).max(1);
        Self {
            elements: descriptor.elements,
            wire: descriptor.wire,
            block_elements,
            window_blocks,
            // A valid descriptor has at most 2^36 elements, and a window has at least 32.
            windows: u32::try_from(windows).unwrap_or(u32::MAX),
        }
    }

    /// Returns the number of windows of the op, at least one.
    #[must_use]
    pub const fn windows(&self) -> u32 {
        self.windows
    }

    /// Returns the number of blocks of a full window.
    #[must_use]
    pub const fn window_blocks(&self) -> usize {
        self.window_blocks
    }

    /// Returns the number of elements of a full block.
    #[must_use]
    pub const fn block_elements(&self) -> usize {
        self.block_elements
    }

    /// Returns the number of elements of a full window.
    #[must_use]
    pub const fn window_elements(&self) -> usize {
        self.block_elements * self.window_blocks
    }

    /// Returns the elements of window `index`, as a range of the tensor.
    #[must_use]
    pub fn elements_of(&self, index: u32) -> Range<u64> {
        let size = self.window_elements() as u64;
        let start = (u64::from(index) * size).min(self.elements);
        start..(start + size).min(self.elements)
    }

    /// Returns the number of blocks of window `index`; only the last window can have fewer.
    #[must_use]
    pub fn blocks_of(&self, index: u32) -> usize {
        let range = self.elements_of(index);
        to_usize(range.end - range.start).div_ceil(self.block_elements)
    }

    /// Returns the mask in which every block of window `index` is set.
    #[must_use]
    pub fn full_mask(&self, index: u32) -> u64 {
        let blocks = self.blocks_of(index);
        if blocks == 64 { u64::MAX } else { (1 << blocks) - 1 }
    }

    /// Returns the number of elements of block `block` of window `index`; only the tensor's last
    /// block can be short.
    #[must_use]
    pub fn block_elements_of(&self, index: u32, block: usize) -> usize {
        let range = self.elements_of(index);
        to_usize(range.end - range.start)
            .saturating_sub(block * self.block_elements)
            .min(self.block_elements)
    }

    /// Returns the size on the wire of the blocks in `mask` of window `index`, in bytes.
    #[must_use]
    pub fn payload_len(&self, index: u32, mask: u64) -> usize {
        let full = self.wire.block_len(self.block_elements);
        let count = mask.count_ones() as usize;
        let last = self.blocks_of(index).saturating_sub(1);
        if count == 0 || mask & (1 << last) == 0 {
            return count * full;
        }
        (count - 1) * full + self.wire.block_len(self.block_elements_of(index, last))
    }

    /// Returns how to cut a payload of `len` bytes in a job with the fragmentation `job`. A payload
    /// of at most half a window is cut between blocks, if that keeps the overhead within the limit.
    /// The datagrams of sparse windows then have the same size, and the kernel accepts many
    /// datagrams of one size in one call.
    #[must_use]
    pub const fn cut(&self, job: Fragmentation, len: usize) -> Fragmentation {
        // wire: W-55
        let block = self.wire.block_len(self.block_elements);
        let payload = job.payload / block * block;
        let spare = (job.stride() - job.payload) * 100 > payload * MAX_OVERHEAD_PERCENT;
        if len > WINDOW_BYTES / 2 || spare {
            return job;
        }
        Fragmentation { payload, ..job }
    }

    /// Returns the wire type.
    #[must_use]
    pub const fn wire(&self) -> WireType {
        self.wire
    }

    /// Returns the blocks in `mask` of window `index`, in order, with their places in the tensor
    /// and in the packed payload (wire: W-46).
    pub fn packed(&self, index: u32, mask: u64) -> impl Iterator<Item = Packed> + use<> {
        let geometry = *self;
        let first = self.elements_of(index).start;
        let mut rest = mask;
        let mut offset = 0;
        core::iter::from_fn(move || {
            if rest == 0 {
                return None;
            }
            let block = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let elements = geometry.block_elements_of(index, block);
            let element = first + (block * geometry.block_elements) as u64;
            let packed = Packed { element, elements, offset };
            offset += geometry.wire.block_len(elements);
            Some(packed)
        })
    }

    /// Returns, in order, the stretches of the tensor that lie in the bytes `range` of the packed
    /// payload of window `index`. Neighbouring blocks form one stretch. The wire type must have no
    /// scale, `range` must not split an element, and `mask` must contain only blocks of the window.
    pub fn stretches(
        &self,
        index: u32,
        mask: u64,
        range: Range<usize>,
    ) -> impl Iterator<Item = Packed> + Clone + use<> {
        debug_assert_eq!(mask & !self.full_mask(index), 0, "the window lacks these blocks");
        let size = self.wire.element_size();
        // All blocks of a payload except the last have full length, so the blocks before the range
        // are skipped without a search.
        let full = self.wire.block_len(self.block_elements);
        let skipped = range.start / full;
        let mut rest = lowest(without_lowest(mask, skipped), range.end.div_ceil(full) - skipped);
        let (from, to) = (range.start - skipped * full, range.end - skipped * full);
        let (block_elements, elements) = (self.block_elements, self.elements_of(index));
        let mut offset = 0;
        // A run lies outside the range only if the range is empty. That run is then the only one,
        // so `None` may end the iterator.
        core::iter::from_fn(move || {
            let run = take_lowest_run(&mut rest)?;
            let element = elements.start + (run.start * block_elements) as u64;
            let count = (run.len() * block_elements).min(to_usize(elements.end - element));
            let at = offset;
            offset += count * size;
            let (start, end) = (at.max(from), offset.min(to));
            (start < end).then(|| Packed {
                element: element + ((start - at) / size) as u64,
                elements: (end - start) / size,
                offset: start - from,
            })
        })
    }
}

/// A stretch of elements, with its place in the tensor and in the packed payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packed {
    /// The place of the first element in the tensor.
    pub element: u64,
    /// The number of elements.
    pub elements: usize,
    /// The number of bytes before the stretch in the packed payload.
    pub offset: usize,
}

/// The windows of an op on one shard. Window `i` of op `o` lives on shard `(i + o) mod shards`, so
/// that neighbouring windows and one-window ops spread evenly (wire: W-44).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stripe {
    first: u32,
    step: u32,
    windows: u32,
}

impl Stripe {
    /// Returns the windows that op `op`, which has `windows` windows in total, has on shard `shard`
    /// of `shards`.
    #[must_use]
    pub fn new(op: OpId, windows: u32, shard: u8, shards: u8) -> Self {
        let step = u32::from(shards.max(1));
        let first = (u32::from(shard) + step - op.0 % step) % step;
        let windows = windows.saturating_sub(first).div_ceil(step);
        Self { first, step, windows }
    }

    /// Returns the number of windows on the shard.
    #[must_use]
    pub const fn len(&self) -> u32 {
        self.windows
    }

    /// Returns whether the shard has no windows.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.windows == 0
    }

    /// Returns the index, within the tensor, of the shard's `nth` window.
    #[must_use]
    pub const fn index(&self, nth: u32) -> u32 {
        self.first + nth * self.step
    }

    /// Returns the number within the shard of the window at `index`, if that window is on the
    /// shard.
    #[must_use]
    pub fn nth(&self, index: u32) -> Option<u32> {
        let from_first = index.checked_sub(self.first)?;
        let nth = from_first / self.step;
        (from_first % self.step == 0 && nth < self.windows).then_some(nth)
    }

    /// Returns how many of the shard's windows are before `index`.
    #[must_use]
    pub fn before(&self, index: u32) -> u32 {
        index.saturating_sub(self.first).div_ceil(self.step).min(self.windows)
    }
}

/// The division of a packed payload into fragments of `payload` bytes; the last may be shorter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fragmentation {
    payload: usize,
    /// The number of bytes that authentication adds after the payload of each datagram.
    trailer: usize,
}

impl Fragmentation {
    /// Creates a fragmentation with at most `payload` bytes per fragment, rounded down to a
    /// multiple of 8 so that no element is split. Returns `None` if a window would need more than
    /// 64 fragments.
    #[must_use]
    pub const fn new(payload: usize) -> Option<Self> {
        // wire: W-52
        let payload = payload / 8 * 8;
        if payload < MIN_FRAGMENT_PAYLOAD { None } else { Some(Self { payload, trailer: 0 }) }
    }

    /// Returns this fragmentation for datagrams that are authenticated with `auth`.
    #[must_use]
    pub const fn with_trailer(self, auth: DataAuth) -> Self {
        Self { trailer: auth.trailer(), ..self }
    }

    /// Returns the size in bytes of every datagram but the last: header, payload and authentication
    /// trailer.
    #[must_use]
    pub const fn stride(&self) -> usize {
        Header::LEN + self.payload + self.trailer
    }

    /// Returns the number of bytes that authentication adds after the messages of a datagram.
    #[must_use]
    pub const fn trailer(&self) -> usize {
        self.trailer
    }

    /// Returns the size in bytes of every datagram but the last, without the authentication
    /// trailer.
    #[must_use]
    pub const fn unsealed(&self) -> usize {
        Header::LEN + self.payload
    }

    /// Returns the payload bytes of every fragment but the last.
    #[must_use]
    pub const fn payload(&self) -> usize {
        self.payload
    }

    /// Returns the number of fragments of a payload of `len` bytes; an empty payload takes one
    /// datagram.
    #[must_use]
    pub const fn count(&self, len: usize) -> usize {
        let count = len.div_ceil(self.payload);
        if count == 0 { 1 } else { count }
    }

    /// Returns the mask in which every fragment of a payload of `len` bytes is set.
    #[must_use]
    pub const fn all(&self, len: usize) -> u64 {
        let count = self.count(len);
        if count >= 64 { u64::MAX } else { (1 << count) - 1 }
    }

    /// Returns the range of bytes that fragment `fragment` carries, in a payload of `len` bytes.
    #[must_use]
    pub fn range(&self, len: usize, fragment: usize) -> Range<usize> {
        let start = (fragment * self.payload).min(len);
        start..(start + self.payload).min(len)
    }
}

/// Returns the mask without its `count` lowest set bits.
fn without_lowest(mask: u64, count: usize) -> u64 {
    if count >= mask.count_ones() as usize {
        return 0;
    }
    (0..count).fold(mask, |rest, _| rest & (rest - 1))
}

/// Returns only the `count` lowest set bits of the mask.
fn lowest(mask: u64, count: usize) -> u64 {
    mask & !without_lowest(mask, count)
}

/// Removes the lowest run of consecutive set bits from the mask and returns its range. Returns
/// `None` if no bit is set.
const fn take_lowest_run(mask: &mut u64) -> Option<Range<usize>> {
    if *mask == 0 {
        return None;
    }
    let start = mask.trailing_zeros();
    let end = start + (*mask >> start).trailing_ones();
    // The carry of the addition clears the run; a carry out of bit 63 is dropped.
    *mask &= mask.wrapping_add(1 << start);
    Some(start as usize..end as usize)
}

/// Converts a count to `usize`. A window or the machine's memory limits the count, so the count
/// fits.
fn to_usize(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use super::*;
    use crate::dtype::DType;

    fn f32s(elements: u64) -> Geometry {
        Geometry::new(&Descriptor::sum(elements, DType::F32))
    }

    #[test]
    fn a_window_is_as_many_blocks_as_fit_its_bytes() {
        assert_eq!(f32s(1).window_blocks(), 60);
        let of = |dtype, block| {
            let descriptor = Descriptor::sum(1, dtype).with_block(block).unwrap();
            Geometry::new(&descriptor).window_blocks()
        };
        assert_eq!(of(DType::F32, 1024), 15);
        assert_eq!(of(DType::F64, 1024), 7);
        assert_eq!(of(DType::Bf16, 256), 64);
        assert_eq!(of(DType::F32, 32), 64);
    }

    #[test]
    fn tails_shorten_only_the_last_block() {
        let geometry = f32s(60 * 256 + 257);
        assert_eq!(geometry.windows(), 2);
        assert_eq!(geometry.blocks_of(0), 60);
        assert_eq!(geometry.blocks_of(1), 2);
        assert_eq!(geometry.full_mask(1), 0b11);
        assert_eq!(geometry.payload_len(1, 0b01), 1024);
        assert_eq!(geometry.payload_len(1, 0b10), 4);
        assert_eq!(geometry.payload_len(1, 0b11), 1028);
        assert_eq!(geometry.payload_len(0, 0), 0);
    }

    #[test]
    fn an_empty_tensor_has_one_empty_window() {
        let geometry = f32s(0);
        assert_eq!((geometry.windows(), geometry.blocks_of(0)), (1, 0));
        assert_eq!(geometry.full_mask(0), 0);
    }

    #[test]
    fn packed_blocks_lie_one_after_the_other() {
        let geometry = f32s(60 * 256 + 256 * 3 + 10);
        let packed: Vec<_> = geometry.packed(1, 0b1101).collect();
        let base = 60 * 256u64;
        let at = |element, elements, offset| Packed { element: base + element, elements, offset };
        assert_eq!(packed, [at(0, 256, 0), at(512, 256, 1024), at(768, 10, 2048)]);
        let stretches: Vec<_> = geometry.stretches(1, 0b1101, 1000..2052).collect();
        assert_eq!(stretches, [at(250, 6, 0), at(512, 257, 24)]);
    }

    /// Checks each byte of a payload, for many masks and cuts.
    #[test]
    fn stretches_are_the_packed_blocks_cut_anywhere() {
        let short = f32s(60 * 256 + 256 * 3 + 10);
        // The tensor has two windows of 64 blocks; the last block of the second is short.
        let blocks_of_32 = Descriptor::sum(2 * 64 * 32 - 5, DType::F32).with_block(32).unwrap();
        let full = Geometry::new(&blocks_of_32);
        let mut cases = vec![];
        cases.extend([0, u64::MAX >> 4, 0x0f0f_0000_8421_0001].map(|mask| (short, 0, mask)));
        cases.extend([0b1101, 8].map(|mask| (short, 1, mask)));
        for index in [0, 1] {
            let masks = [0, u64::MAX, 1 << 63, 1 << 63 | 1, 0b11 << 62, !(1 << 63)];
            cases.extend(masks.map(|mask| (full, index, mask)));
        }
        for (geometry, index, mask) in cases {
            assert_eq!(geometry.stretches(index, mask, 0..0).count(), 0);
            let places = |stretch: Packed| {
                let element = move |i| (stretch.element + i as u64, stretch.offset + 4 * i);
                (0..stretch.elements).map(element)
            };
            let all: Vec<_> = geometry.packed(index, mask).flat_map(places).collect();
            let len = geometry.payload_len(index, mask);
            for step in [4, 40, 1024, 1408, 4096, len.max(4)] {
                for start in (0..len).step_by(step) {
                    let end = (start + step).min(len);
                    let got: Vec<_> =
                        geometry.stretches(index, mask, start..end).flat_map(places).collect();
                    let due = all[start / 4..end / 4].iter().map(|(e, at)| (*e, at - start));
                    assert!(got.iter().copied().eq(due), "{mask:x} {start}..{end}");
                }
            }
        }
    }

    #[test]
    fn no_window_has_more_fragments_than_one_word_counts() {
        for payload in (MIN_FRAGMENT_PAYLOAD..9000).step_by(8) {
            let job = Fragmentation::new(payload).unwrap();
            for block in [32, 64, 128, 256, 512, 1024] {
                for wire in [WireType::F32, WireType::Bf16, WireType::Int8, WireType::Fixed32] {
                    let descriptor = Descriptor { wire, ..Descriptor::sum(1 << 20, DType::F32) };
                    let geometry = Geometry::new(&descriptor.with_block(block).unwrap());
                    let full = geometry.full_mask(0);
                    for mask in [full, full >> 1, full >> 32, full >> 40, 1] {
                        let len = geometry.payload_len(0, mask);
                        let cut = geometry.cut(job, len);
                        assert!(cut.count(len) <= MAX_FRAGMENTS, "{payload} {block} {wire:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn stripes_partition_the_windows() {
        for (op, windows, shards) in [(0, 1, 1), (5, 7, 3), (9, 100, 4), (2, 2, 4)] {
            let mut seen = Vec::new();
            for shard in 0..shards {
                let stripe = Stripe::new(OpId(op), windows, shard, shards);
                for nth in 0..stripe.len() {
                    let index = stripe.index(nth);
                    assert_eq!(stripe.nth(index), Some(nth));
                    assert_eq!(stripe.before(index), nth);
                    seen.push(index);
                }
                assert_eq!(stripe.before(u32::MAX), stripe.len());
            }
            seen.sort_unstable();
            assert_eq!(seen, (0..windows).collect::<Vec<_>>());
        }
    }

    #[test]
    fn fragments_partition_the_payload() {
        assert_eq!(Fragmentation::new(959), None);
        let cut = Fragmentation::new(1424).unwrap();
        assert_eq!(cut.count(0), 1);
        assert_eq!(cut.count(WINDOW_BYTES), 44);
        let mut at = 0;
        for fragment in 0..cut.count(5000) {
            let range = cut.range(5000, fragment);
            assert_eq!(range.start, at);
            at = range.end;
        }
        assert_eq!(at, 5000);
        assert_eq!(cut.all(5000), 0b1111);
    }

    #[test]
    fn a_window_with_its_headers_is_one_segmented_send_at_every_mtu() {
        for mtu in 1280..=9000 {
            for overhead in [28, 48] {
                let room = mtu - overhead;
                let cut = Fragmentation::new(room - Header::LEN).unwrap();
                let fragments = cut.count(WINDOW_BYTES);
                assert!(fragments <= MAX_FRAGMENTS);
                let bytes = WINDOW_BYTES + fragments * Header::LEN;
                assert!(bytes <= 65_507, "mtu {mtu}: {bytes}");
            }
        }
    }
}
