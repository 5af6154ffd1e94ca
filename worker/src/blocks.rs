//! The second form of input: a list of blocks and their values, never made dense.
//!
//! This is OmniReduce's key-value case (Fei et al., SIGCOMM 2021), with a block for a key: the
//! rows that an embedding's batch touched, say. What comes back is the same form for the union.

use std::num::NonZeroU32;
use std::ops::Range;

use racksum_kernels::codec;
use racksum_kernels::fold::fold_run;
use racksum_proto::arith::{ArithError, Fold, MAX_WORLD};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction};
use racksum_proto::geometry::{Geometry, Packed};
use racksum_proto::worker::Delivery;

use crate::error::Error;
use crate::payload::bytes_of;

/// Blocks of a tensor: their places, and their values one after the other.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Blocks {
    /// Which block of the tensor each is.
    pub indices: Vec<u32>,
    /// `block` elements a block, in the order of the indices; only the tensor's last block may
    /// be shorter.
    pub values: Vec<u8>,
}

/// The blocks of an op in flight: its input, sorted and without duplicates, and its result.
#[derive(Debug)]
pub(crate) struct BlockSet {
    input: Blocks,
    /// Where each window's results are in `values`, in the order they came.
    arrived: Vec<Arrived>,
    /// By window, its place in `arrived`.
    places: Box<[Option<NonZeroU32>]>,
    /// Sums, up to `used`; what is beyond is left from an earlier op.
    values: Vec<u8>,
    used: usize,
}

/// Where the sums of one window are.
#[derive(Debug, Clone, Copy)]
struct Arrived {
    window: u32,
    mask: u64,
    start: usize,
}

impl BlockSet {
    /// Checks a block list against its descriptor; sorts it, and combines duplicates in the
    /// order in which they are listed.
    pub(crate) fn new(descriptor: &Descriptor, blocks: Blocks) -> Result<Self, Error> {
        let block = descriptor.block_elements();
        let count = descriptor.elements.div_ceil(block as u64);
        if let Some(beyond) = blocks.indices.iter().find(|index| u64::from(**index) >= count) {
            return Err(Error::Blocks(format!(
                "block {beyond} is beyond the tensor's {count} blocks of {block} elements"
            )));
        }
        let need: usize = blocks.indices.iter().map(|index| len_of(descriptor, *index)).sum();
        if need != blocks.values.len() {
            let have = blocks.values.len();
            let blocks = blocks.indices.len();
            return Err(Error::Blocks(format!(
                "{blocks} blocks of {block} elements have {need} bytes of values, not {have}"
            )));
        }
        let input = if blocks.indices.is_sorted_by(|a, b| a < b) {
            blocks
        } else {
            combine(descriptor, &blocks)?
        };
        let windows = Geometry::new(descriptor).windows() as usize;
        let places = vec![None; windows].into();
        Ok(Self { input, arrived: Vec::new(), places, values: Vec::new(), used: 0 })
    }

    /// Puts the sums into memory that is of no more use, which need be neither had nor cleared.
    pub(crate) fn reuse(&mut self, memory: Vec<u8>) {
        self.values = memory;
        // The union holds at least this rank's own blocks, and often not much more.
        self.values.reserve((2 * self.input.values.len()).saturating_sub(self.values.len()));
    }

    /// The non-zero blocks of each window: one may be listed and be zero all the same.
    pub(crate) fn masks(&mut self, descriptor: &Descriptor, geometry: &Geometry) -> Vec<u64> {
        let (dtype, elements) = (descriptor.dtype, descriptor.block_elements());
        let mut masks = vec![0; geometry.windows() as usize];
        let Blocks { indices, values } = &mut self.input;
        for (index, block) in indices.iter().zip(values.chunks_mut(elements * dtype.size())) {
            // wire: W-48
            if codec::scan_window(dtype, elements, block) != 0 {
                let (window, block) = place(geometry, *index);
                masks[window as usize] |= 1 << block;
            }
        }
        masks
    }

    /// Visits the memory of a stretch block by block.
    pub(crate) fn each_source(
        &self,
        descriptor: &Descriptor,
        stretch: Packed,
        mut visit: impl FnMut(&[u8], usize),
    ) {
        let full = descriptor.block_elements() * descriptor.dtype.size();
        each_block(descriptor, stretch, |index, range, offset| {
            if let Ok(at) = self.input.indices.binary_search(&index) {
                let start = at * full;
                visit(&self.input.values[start + range.start..start + range.end], offset);
            }
        });
    }

    /// Makes room for a window's sums when its first fragment arrives.
    pub(crate) fn expect_window(
        &mut self,
        descriptor: &Descriptor,
        geometry: &Geometry,
        delivery: &Delivery,
    ) {
        let window = delivery.window.index;
        let place = &mut self.places[window as usize];
        if place.is_some() {
            return;
        }
        *place = u32::try_from(self.arrived.len() + 1).ok().and_then(NonZeroU32::new);
        let start = self.used;
        self.arrived.push(Arrived { window, mask: delivery.mask, start });
        let blocks = geometry.packed(window, delivery.mask);
        let len: usize = blocks.map(|packed| packed.elements * descriptor.dtype.size()).sum();
        self.used += len;
        if self.values.len() < self.used {
            self.values.resize(self.used, 0);
        }
    }

    /// The memory of these bytes of a window's sums, for which [`Self::expect_window`] made room.
    pub(crate) fn sums(&mut self, window: u32, bytes: Range<usize>) -> &mut [u8] {
        let nth = self.places[window as usize].expect("a window is expected before it is written");
        let start = self.arrived[nth.get() as usize - 1].start;
        &mut self.values[start + bytes.start..start + bytes.end]
    }

    /// The sums, sorted by block.
    pub(crate) fn into_result(mut self, geometry: &Geometry, descriptor: &Descriptor) -> Blocks {
        let in_order = self.arrived.is_sorted_by_key(|arrived| arrived.window);
        if !in_order {
            self.arrived.sort_unstable_by_key(|arrived| arrived.window);
        }
        let per_window = u32::try_from(geometry.window_blocks()).unwrap_or(u32::MAX);
        let mut indices = Vec::with_capacity(self.arrived.len());
        let mut values = Vec::with_capacity(if in_order { 0 } else { self.used });
        for arrived in &self.arrived {
            let first = arrived.window * per_window;
            let from = indices.len();
            let mut rest = arrived.mask;
            while rest != 0 {
                indices.push(first + rest.trailing_zeros());
                rest &= rest - 1;
            }
            if !in_order {
                let len: usize = indices[from..].iter().map(|i| len_of(descriptor, *i)).sum();
                values.extend_from_slice(&self.values[arrived.start..arrived.start + len]);
            }
        }
        if in_order {
            self.values.truncate(self.used);
            values = self.values;
        }
        Blocks { indices, values }
    }
}

impl Blocks {
    /// The whole tensor, in which what is not listed is zero.
    ///
    /// # Errors
    /// [`Error::Blocks`], of a list that cannot be.
    pub fn spread(self, descriptor: &Descriptor) -> Result<Vec<u8>, Error> {
        let Self { indices, values } = BlockSet::new(descriptor, self)?.input;
        let full = descriptor.block_elements() * descriptor.dtype.size();
        let mut tensor = vec![0; bytes_of(descriptor, 0..descriptor.elements).len()];
        for (index, block) in indices.iter().zip(values.chunks(full)) {
            let start = *index as usize * full;
            tensor[start..start + block.len()].copy_from_slice(block);
        }
        Ok(tensor)
    }

    /// The blocks of a tensor that are not zero.
    #[must_use]
    pub fn gather(tensor: &mut [u8], descriptor: &Descriptor) -> Self {
        let (dtype, elements) = (descriptor.dtype, descriptor.block_elements());
        let mut blocks = Self::default();
        for (index, block) in (0..).zip(tensor.chunks_mut(elements * dtype.size())) {
            if codec::scan_window(dtype, elements, block) != 0 {
                blocks.indices.push(index);
                blocks.values.extend_from_slice(block);
            }
        }
        blocks
    }
}

/// The window of a block, and which of its blocks it is.
fn place(geometry: &Geometry, index: u32) -> (u32, u32) {
    let per_window = u32::try_from(geometry.window_blocks()).unwrap_or(u32::MAX);
    (index / per_window, index % per_window)
}

/// Bytes of a block's values.
fn len_of(descriptor: &Descriptor, index: u32) -> usize {
    let block = descriptor.block_elements() as u64;
    let left = descriptor.elements - (u64::from(index) * block).min(descriptor.elements);
    usize::try_from(left.min(block)).unwrap_or(usize::MAX) * descriptor.dtype.size()
}

/// Visits a stretch block by block: the block, the bytes of it, and the bytes on the wire before.
fn each_block(
    descriptor: &Descriptor,
    stretch: Packed,
    mut visit: impl FnMut(u32, Range<usize>, usize),
) {
    let block = descriptor.block_elements() as u64;
    let (dtype, wire) = (descriptor.dtype.size(), descriptor.wire.element_size());
    let mut done = 0;
    while done < stretch.elements {
        let element = stretch.element + done as u64;
        let within = usize::try_from(element % block).unwrap_or(usize::MAX);
        let count = (descriptor.block_elements() - within).min(stretch.elements - done);
        let index = u32::try_from(element / block).unwrap_or(u32::MAX);
        visit(index, within * dtype..(within + count) * dtype, stretch.offset + done * wire);
        done += count;
    }
}

/// Sorts a block list and combines blocks that are listed more than once.
fn combine(descriptor: &Descriptor, blocks: &Blocks) -> Result<Blocks, Error> {
    let mut starts = Vec::with_capacity(blocks.indices.len());
    let mut start = 0;
    for index in &blocks.indices {
        starts.push((*index, start));
        start += len_of(descriptor, *index);
    }
    // Stable, so that duplicates keep the order in which they are listed.
    starts.sort_by_key(|(index, _)| *index);
    let mut combined = Blocks::default();
    for same in starts.chunk_by(|one, other| one.0 == other.0) {
        let index = same[0].0;
        let len = len_of(descriptor, index);
        let parts: Vec<&[u8]> =
            same.iter().map(|(_, start)| &blocks.values[*start..*start + len]).collect();
        combined.indices.push(index);
        let at = combined.values.len();
        combined.values.extend_from_slice(parts[0]);
        if parts.len() > 1 {
            let out = &mut combined.values[at..];
            sum(descriptor.dtype, descriptor.reduction, &parts, out).map_err(|_| {
                Error::Blocks(format!(
                    "block {index} is listed {} times, and {MAX_WORLD} is the most",
                    parts.len()
                ))
            })?;
        }
    }
    Ok(combined)
}

/// Combines the values of one block. An average takes their sum, as of one rank. Fails only when
/// there are more parts than a fold may have.
fn sum(
    dtype: DType,
    reduction: Reduction,
    parts: &[&[u8]],
    out: &mut [u8],
) -> Result<(), ArithError> {
    let reduction = if reduction == Reduction::Avg { Reduction::Sum } else { reduction };
    let fold = Fold { world: u32::try_from(parts.len()).unwrap_or(u32::MAX), absent: false };
    fold_run(dtype.native_wire(), reduction, fold, parts, out)
}
