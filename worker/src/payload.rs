//! The bytes of an op in flight. The worker gathers them from the tensor as it sends, and scatters
//! results into the tensor as they arrive.

use std::collections::BTreeMap;
use std::ops::Range;

use racksum_proto::arith;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::WireType;
use racksum_proto::geometry::{Fragmentation, Geometry, Packed};
use racksum_proto::ids::WindowId;
use racksum_proto::wire::Header;
use racksum_proto::worker::{DataFragments, Delivery};

use crate::blocks::{BlockSet, place};
use crate::exponents::{Exponents, agreement};
use crate::tensor::{Region, TensorBytes, TensorBytesMut};

/// The data that an op reads and writes.
#[derive(Debug)]
pub(crate) enum Data {
    /// A tensor that the caller lent, reduced in place.
    InPlace(Region),
    /// A tensor that the caller handed over, reduced in place.
    Owned(Vec<u8>),
    /// Some blocks of a tensor.
    Blocks(BlockSet),
    /// The caller has the data back; the payload keeps some sums for other ranks.
    Returned,
}

impl Data {
    /// Returns the tensor, if the caller lent it.
    pub(crate) const fn region(&self) -> Option<&Region> {
        match self {
            Self::InPlace(region) => Some(region),
            Self::Owned(_) | Self::Blocks(_) | Self::Returned => None,
        }
    }

    /// Returns a range of the tensor; no bytes if the data is not a tensor.
    pub(crate) fn bytes(&self, range: Range<usize>) -> TensorBytes<'_> {
        match self {
            Self::InPlace(region) => region.bytes(range),
            Self::Owned(tensor) => TensorBytes::Own(&tensor[range]),
            Self::Blocks(_) | Self::Returned => TensorBytes::Own(&[]),
        }
    }

    /// Returns a mutable range of the tensor; no bytes if the data is not a tensor.
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> TensorBytesMut<'_> {
        match self {
            Self::InPlace(region) => region.bytes_mut(range),
            Self::Owned(tensor) => TensorBytesMut::Own(&mut tensor[range]),
            Self::Blocks(_) | Self::Returned => TensorBytesMut::Own(&mut []),
        }
    }

    /// Calls `to` with `head` and a range of the tensor as one slice. During the call, `head` takes
    /// the place of the bytes before the range. Returns false without calling `to` if there are too
    /// few bytes before the range, if other processes may write to the tensor, or if the data is
    /// not a tensor.
    pub(crate) fn show_behind(
        &mut self,
        head: &mut [u8],
        range: Range<usize>,
        to: impl FnOnce(&mut [u8]),
    ) -> bool {
        let Some(start) = range.start.checked_sub(head.len()) else { return false };
        let TensorBytesMut::Own(whole) = self.bytes_mut(start..range.end) else { return false };
        let Some(before) = whole.get_mut(..head.len()) else { return false };
        before.swap_with_slice(head);
        to(&mut *whole);
        whole[..head.len()].swap_with_slice(head);
        true
    }
}

/// The data of an op, and packed results that are kept apart from the data.
#[derive(Debug)]
pub(crate) struct Payload {
    pub(crate) descriptor: Descriptor,
    pub(crate) geometry: Geometry,
    pub(crate) data: Data,
    world: u32,
    /// Whether the job may move to another aggregator. If so, this rank's share of a window stays
    /// intact until the window's sum is complete, because a new aggregator may need the share.
    /// After that, a new aggregator may request the sum.
    may_move: bool,
    /// The blocks to send from each window, if the caller chose them. Otherwise the op sends the
    /// non-zero blocks.
    sent: Option<Vec<u64>>,
    /// The exponents that the ranks agreed on, if any.
    agreed: Option<Exponents>,
    /// The packed sums of incomplete windows, unless fragments go straight to the tensor.
    partial: BTreeMap<u32, Vec<u8>>,
    /// The packed sums that other ranks may lack and that the tensor cannot reproduce.
    kept: BTreeMap<u32, Vec<u8>>,
}

impl Payload {
    pub(crate) fn new(descriptor: Descriptor, data: Data, world: u16, may_move: bool) -> Self {
        let (geometry, world) = (Geometry::new(&descriptor), u32::from(world));
        let (sent, agreed, partial, kept) = Default::default();
        Self { descriptor, geometry, data, world, may_move, sent, agreed, partial, kept }
    }

    /// Sets whether the job may move. No part of the op may have been sent yet.
    pub(crate) const fn note_may_move(&mut self, may_move: bool) {
        self.may_move = may_move;
    }

    /// Returns a payload that keeps the sums of `windows`, given by index and block mask. Other
    /// ranks may lack these sums after the op has ended and the caller has the tensor back.
    pub(crate) fn keep(&mut self, windows: Vec<(u32, u64)>) -> Self {
        let mut kept = BTreeMap::new();
        for (index, mask) in windows {
            let packed = self.kept.remove(&index).unwrap_or_else(|| {
                let len = self.geometry.payload_len(index, mask);
                let mut packed = vec![0; len];
                self.gather_run(index, mask, 0..len, &mut packed);
                packed
            });
            kept.insert(index, packed);
        }
        let (descriptor, geometry, world) = (self.descriptor, self.geometry, self.world);
        let (data, may_move, partial) = (Data::Returned, true, BTreeMap::new());
        let (sent, agreed) = (None, None);
        Self { descriptor, geometry, data, world, may_move, sent, agreed, partial, kept }
    }

    /// Drops sums that every rank is known to have, if the payload keeps more than `most`.
    pub(crate) fn drop_kept(&mut self, most: usize, may_lack: impl Fn(u32) -> bool) {
        if self.kept.len() > most {
            self.kept.retain(|index, _| may_lack(*index));
        }
    }

    /// Drops the sums of incomplete windows: another aggregator will send them again.
    pub(crate) fn forget_partial(&mut self) {
        self.partial.clear();
    }

    /// Returns the blocks to send from a window: those that the caller chose, or else the non-zero
    /// blocks. The search for non-zero blocks turns -0.0 into +0.0 in zero blocks: no result
    /// overwrites them, and all ranks must end with the same bits.
    pub(crate) fn scan(&mut self, index: u32) -> u64 {
        if let Some(sent) = &self.sent {
            return sent[index as usize];
        }
        let Descriptor { dtype, .. } = self.descriptor;
        let range = self.bytes_of(self.geometry.elements_of(index));
        let block_elements = self.geometry.block_elements();
        // A list of blocks is scanned as a whole before its op starts.
        self.data.bytes_mut(range).scan_window(dtype, block_elements)
    }

    /// Makes the op send exactly these blocks, whether they are zero or not.
    pub(crate) fn send_these(&mut self, blocks: impl Iterator<Item = u32>) {
        let mut masks = vec![0; self.geometry.windows() as usize];
        for index in blocks {
            let (window, block) = place(&self.geometry, index);
            masks[window as usize] |= 1 << block;
        }
        self.sent = Some(masks);
    }

    /// Returns the blocks to send from each window, if they are known in advance: the chosen
    /// blocks, or the non-zero blocks of a list. Otherwise returns `None`, because a tensor is
    /// scanned as it is sent.
    pub(crate) fn masks(&mut self) -> Option<Vec<u64>> {
        if let Some(sent) = &self.sent {
            return Some(sent.clone());
        }
        match &mut self.data {
            Data::Blocks(blocks) => Some(blocks.masks(&self.descriptor, &self.geometry)),
            Data::InPlace(_) | Data::Owned(_) | Data::Returned => None,
        }
    }

    /// Returns the exponents of this rank's blocks, for the ranks to agree on.
    pub(crate) fn exponents(&mut self) -> Exponents {
        let mut exponents = Exponents::none(&agreement(&self.descriptor));
        let masks = self.masks();
        let mut whole = [0; MAX_SCALED];
        for index in 0..self.geometry.windows() {
            let mask = match &masks {
                Some(masks) => masks[index as usize],
                None => self.scan(index),
            };
            for packed in self.geometry.packed(index, mask) {
                let block = self.encode_block(packed, &mut whole);
                exponents.note(self.block_of(packed), block);
            }
        }
        exponents
    }

    /// Sets the exponents that the ranks agreed on.
    pub(crate) fn agree(&mut self, exponents: Exponents) {
        self.agreed = Some(exponents);
    }

    /// Returns the index of the tensor's block that a packed block comes from.
    fn block_of(&self, packed: Packed) -> usize {
        let block = packed.element / self.geometry.block_elements() as u64;
        usize::try_from(block).unwrap_or(usize::MAX)
    }

    /// Encodes a scaled block.
    fn encode_block<'a>(&self, packed: Packed, whole: &'a mut [u8; MAX_SCALED]) -> &'a mut [u8] {
        let Descriptor { dtype, wire, .. } = self.descriptor;
        let block = &mut whole[..wire.block_len(packed.elements)];
        self.each_source(packed, |src, _| {
            src.encode_block(dtype, wire, self.world, block)
                .expect("a block of a valid descriptor can be encoded");
        });
        block
    }

    /// Writes the chosen fragments of a window's packed blocks as consecutive datagrams, and
    /// returns their total length. `out` must have room for the whole window.
    pub(crate) fn gather(&self, data: &DataFragments, out: &mut [u8]) -> usize {
        let DataFragments { len, cut, fragments, ref header, .. } = *data;
        let stride = cut.unsealed();
        let index = header.window.index;
        let kept = self.kept.get(&index).filter(|packed| data.held && packed.len() == len);
        let scaled = self.descriptor.wire.is_scaled() && kept.is_none();
        if scaled {
            self.gather_blocks(index, header.mask, cut, out);
        }
        let mut used = 0;
        for fragment in (0..cut.count(len)).filter(|i| fragments >> i & 1 == 1) {
            let range = cut.range(len, fragment);
            let body = used + Header::LEN;
            let end = body + range.len();
            if let Some(packed) = kept {
                out[body..end].copy_from_slice(&packed[range.clone()]);
            } else if scaled {
                let from = fragment * stride + Header::LEN;
                if from != body {
                    out.copy_within(from..from + range.len(), body);
                }
            } else {
                self.gather_run(index, header.mask, range.clone(), &mut out[body..end]);
            }
            if let Some(head) = out[used..].first_chunk_mut() {
                header.of_fragment(fragment, range.len()).encode(head);
            }
            used = end;
        }
        used
    }

    /// Returns the byte range of the tensor that can be sent as a window's payload without a copy,
    /// if there is one. The payload must be one contiguous piece of the tensor in one datagram, at
    /// least [`MIN_IN_PLACE`] bytes long, with the tensor's own type as wire type. The header names
    /// the window and its blocks; `len` is the payload's length in bytes.
    pub(crate) fn in_place(
        &self,
        header: &Header,
        len: usize,
        cut: Fragmentation,
    ) -> Option<Range<usize>> {
        let Descriptor { dtype, wire, .. } = self.descriptor;
        let elsewhere = matches!(self.data, Data::Blocks(_) | Data::Returned);
        if elsewhere || wire != dtype.native_wire() || cut.count(len) != 1 || len < MIN_IN_PLACE {
            return None;
        }
        let stretch = self.geometry.stretches(header.window.index, header.mask, 0..len).next()?;
        let range = self.bytes_of(stretch.element..stretch.element + stretch.elements as u64);
        (range.len() == len).then_some(range)
    }

    /// Returns the byte range of the tensor that a result's payload can be received into, under the
    /// conditions of [`Self::in_place`]. Checks the header first, because the network may have sent
    /// any values. `cut` is the job's fragmentation.
    pub(crate) fn result_in_place(
        &self,
        header: &Header,
        cut: Fragmentation,
    ) -> Option<Range<usize>> {
        let (index, mask) = (header.window.index, header.mask);
        if index >= self.geometry.windows() || mask & !self.geometry.full_mask(index) != 0 {
            return None;
        }
        let len = self.geometry.payload_len(index, mask);
        self.in_place(header, len, self.geometry.cut(cut, len))
    }

    /// Encodes the elements that fill bytes `range` of the packed payload.
    fn gather_run(&self, index: u32, mask: u64, range: Range<usize>, body: &mut [u8]) {
        let Descriptor { dtype, wire, .. } = self.descriptor;
        for stretch in self.geometry.stretches(index, mask, range) {
            self.each_source(stretch, |src, offset| {
                let len = src.len() / dtype.size() * wire.element_size();
                let out = &mut body[offset..offset + len];
                src.encode_run(dtype, wire, out)
                    .expect("elements of a valid descriptor can be encoded");
            });
        }
    }

    /// Encodes scaled blocks one by one, because a block may cross the end of a fragment.
    fn gather_blocks(&self, index: u32, mask: u64, cut: Fragmentation, out: &mut [u8]) {
        let mut whole = [0; MAX_SCALED];
        for packed in self.geometry.packed(index, mask) {
            let block = self.encode_block(packed, &mut whole);
            let agreed = self.agreed.as_ref().and_then(|agreed| agreed.get(self.block_of(packed)));
            if let Some(exponent) = agreed {
                arith::fixed32_rescale(block, exponent);
            }
            let mut done = 0;
            while done < block.len() {
                let (at, piece) = locate(cut, packed.offset + done);
                let piece = piece.min(block.len() - done);
                out[at..at + piece].copy_from_slice(&block[done..done + piece]);
                done += piece;
            }
        }
    }

    /// Visits the memory of a stretch: all at once for a tensor, block by block for a list of
    /// blocks.
    fn each_source(&self, stretch: Packed, mut visit: impl FnMut(TensorBytes<'_>, usize)) {
        let range = self.bytes_of(stretch.element..stretch.element + stretch.elements as u64);
        match &self.data {
            Data::Blocks(blocks) => {
                let visit = |src: &[u8], offset| visit(TensorBytes::Own(src), offset);
                blocks.each_source(&self.descriptor, stretch, visit);
            }
            Data::InPlace(_) | Data::Owned(_) => visit(self.data.bytes(range), stretch.offset),
            Data::Returned => {}
        }
    }

    /// Writes a fragment of a window's sums to the data, or stores it until the window is complete.
    /// Returns the first element of a block that overflowed, if any.
    pub(crate) fn scatter(&mut self, delivery: &Delivery, body: &[u8]) -> Option<u64> {
        let range = delivery.cut.range(delivery.len, usize::from(delivery.fragment));
        let index = delivery.window.index;
        if body.len() == delivery.len {
            return self.scatter_whole(delivery, body);
        }
        if !self.descriptor.wire.is_scaled() && !self.may_move {
            self.expect(delivery);
            self.scatter_run(delivery, range, body);
            return None;
        }
        let payload = self.partial.entry(index).or_insert_with(|| vec![0; delivery.len]);
        payload[range].copy_from_slice(body);
        if !delivery.complete {
            return None;
        }
        let payload = self.partial.remove(&index)?;
        self.scatter_whole(delivery, &payload)
    }

    /// Makes room for a window's sums in a list of blocks. If the job may move, the caller must
    /// first have all of the window's sums, because after a move they may cover other blocks.
    fn expect(&mut self, delivery: &Delivery) {
        if let Data::Blocks(blocks) = &mut self.data {
            blocks.expect_window(&self.descriptor, &self.geometry, delivery);
        }
    }

    /// Writes all of a window's sums.
    fn scatter_whole(&mut self, delivery: &Delivery, payload: &[u8]) -> Option<u64> {
        self.expect(delivery);
        let scaled = self.descriptor.wire.is_scaled();
        if self.may_move && (scaled || matches!(self.data, Data::Blocks(_))) {
            // Keep the packed sums: encoding the decoded sums again may yield other bits, and
            // `gather` reads a list's input, not its sums.
            self.kept.insert(delivery.window.index, payload.to_vec());
        }
        if scaled {
            return self.scatter_blocks(delivery.window, delivery.mask, payload);
        }
        self.scatter_run(delivery, 0..delivery.len, payload);
        None
    }

    fn scatter_run(&mut self, delivery: &Delivery, range: Range<usize>, body: &[u8]) {
        let Descriptor { dtype, wire, .. } = self.descriptor;
        let size = wire.element_size();
        let decode = |src: &[u8], dst: TensorBytesMut<'_>| {
            dst.decode_run(wire, dtype, src)
                .expect("elements of a valid descriptor can be decoded");
        };
        if let Data::Blocks(blocks) = &mut self.data {
            // A list stores a window's sums in the order of the payload.
            let [from, to] = [range.start, range.end].map(|at| at / size * dtype.size());
            return decode(body, TensorBytesMut::Own(blocks.sums(delivery.window.index, from..to)));
        }
        let stretches = self.geometry.stretches(delivery.window.index, delivery.mask, range);
        // The stretches of a sparse window lie apart, so prefetch some while one is written.
        let mut ahead = stretches.clone().skip(1);
        for next in ahead.by_ref().take(STRETCHES_AHEAD) {
            self.target(delivery.window, next, 0).prefetch();
        }
        for stretch in stretches {
            if let Some(next) = ahead.next() {
                self.target(delivery.window, next, 0).prefetch();
            }
            let src = &body[stretch.offset..][..stretch.elements * size];
            decode(src, self.target(delivery.window, stretch, 0));
        }
    }

    fn scatter_blocks(&mut self, window: WindowId, mask: u64, payload: &[u8]) -> Option<u64> {
        let Descriptor { dtype, wire, .. } = self.descriptor;
        let (mut overflow, mut before) = (None, 0);
        for packed in self.geometry.packed(window.index, mask) {
            let src = &payload[packed.offset..][..wire.block_len(packed.elements)];
            if wire == WireType::Fixed32 && arith::fixed32_overflowed(src) {
                overflow.get_or_insert(packed.element);
            }
            let dst = self.target(window, packed, before);
            before += dst.len();
            dst.decode_block(wire, dtype, src)
                .expect("a block of a valid descriptor can be decoded");
        }
        overflow
    }

    /// Returns the memory for a stretch of a window's sums. In a list of blocks, it starts `before`
    /// bytes into the window's sums.
    fn target(&mut self, window: WindowId, stretch: Packed, before: usize) -> TensorBytesMut<'_> {
        let range = self.bytes_of(stretch.element..stretch.element + stretch.elements as u64);
        match &mut self.data {
            Data::Blocks(blocks) => {
                TensorBytesMut::Own(blocks.sums(window.index, before..before + range.len()))
            }
            tensor => tensor.bytes_mut(range),
        }
    }

    fn bytes_of(&self, elements: Range<u64>) -> Range<usize> {
        bytes_of(&self.descriptor, elements)
    }
}

/// Returns the range of bytes that holds `elements` in a tensor.
pub(crate) fn bytes_of(descriptor: &Descriptor, elements: Range<u64>) -> Range<usize> {
    // A tensor lies in memory, so a usize can count its bytes.
    let at = |element: u64| {
        usize::try_from(element).unwrap_or(usize::MAX).saturating_mul(descriptor.dtype.size())
    };
    at(elements.start)..at(elements.end)
}

/// Returns the index, in a buffer of consecutive datagrams, of byte `offset` of a packed payload.
/// Also returns the number of bytes from there to the end of that datagram's body.
fn locate(cut: Fragmentation, offset: usize) -> (usize, usize) {
    let (fragment, within) = (offset / cut.payload(), offset % cut.payload());
    let at = fragment * cut.unsealed() + Header::LEN + within;
    (at, cut.payload() - within)
}

/// The size in bytes of the smallest payload that is sent from the tensor or received into it.
/// Smaller payloads are copied, so that the kernel can handle several as one batch.
const MIN_IN_PLACE: usize = 16 << 10;
/// The number of stretches to prefetch before the first is written.
const STRETCHES_AHEAD: usize = 4;
/// The size of the largest scaled block, in bytes.
const MAX_SCALED: usize = WireType::Fixed32.block_len(1024);

#[cfg(test)]
mod tests;
