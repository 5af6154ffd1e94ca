//! Sparse input: a list of blocks and their values, which is never expanded to a dense tensor.
//!
//! This is OmniReduce's key-value case (Fei et al., SIGCOMM 2021), with blocks as keys. The blocks
//! may be the rows of an embedding that a batch touched, for example. The result has the same form,
//! and covers the union of all ranks' blocks.

use std::num::NonZeroU32;
use std::ops::Range;

use racksum_kernels::codec;
use racksum_kernels::fold::fold_run;
use racksum_proto::arith::{ArithError, FoldTerms, MAX_WORLD};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction};
use racksum_proto::geometry::{Geometry, Packed};
use racksum_proto::worker::Delivery;

use crate::error::Error;
use crate::tensor::{Element, as_bytes, as_bytes_mut};

/// Blocks of a tensor: their indices and their concatenated values.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Blocks {
    /// The index of each block in the tensor.
    pub indices: Vec<u32>,
    /// The values of each block, in the order of the indices. Every block has the descriptor's
    /// block size; only the tensor's last block may be shorter.
    pub values: Vec<u8>,
}

impl Blocks {
    /// Creates a list of blocks. `values` holds their elements, block after block.
    #[must_use]
    pub fn new<T: Element>(indices: Vec<u32>, values: &[T]) -> Self {
        Self { indices, values: as_bytes(values).to_vec() }
    }

    /// Returns the elements of the blocks, block after block. Returns `None` if the bytes are not a
    /// whole number of elements of type `T`.
    ///
    /// ```
    /// # use racksum_worker::Blocks;
    /// let blocks = Blocks::new(vec![3], &[1.0_f32; 256]);
    /// assert_eq!(blocks.elements::<f32>().unwrap(), [1.0; 256]);
    /// ```
    #[must_use]
    pub fn elements<T: Element>(&self) -> Option<Vec<T>> {
        let mut elements = vec![T::default(); self.values.len() / size_of::<T>()];
        let bytes = as_bytes_mut(&mut elements);
        (bytes.len() == self.values.len()).then(|| bytes.copy_from_slice(&self.values))?;
        Some(elements)
    }
}

/// The blocks of an op in flight: its input, sorted and without duplicates, and its result.
#[derive(Debug)]
pub(crate) struct BlockSet {
    input: Blocks,
    /// Where each window's results are in `values`, in order of arrival.
    arrived: Vec<Arrived>,
    /// The index of each window in `arrived`, plus one; `None` before sums of the window arrive.
    places: Box<[Option<NonZeroU32>]>,
    /// The sums, up to `used`. The rest is left over from an earlier op.
    values: Vec<u8>,
    used: usize,
}

/// The location of one window's sums in `values`.
#[derive(Debug, Clone, Copy)]
struct Arrived {
    window: u32,
    mask: u64,
    start: usize,
}

impl BlockSet {
    /// Checks and sorts an op's block list, and creates the op's state from it.
    pub(crate) fn new(descriptor: &Descriptor, blocks: Blocks) -> Result<Self, Error> {
        let input = blocks.sorted(descriptor)?;
        let windows = Geometry::new(descriptor).windows() as usize;
        let places = vec![None; windows].into();
        Ok(Self { input, arrived: Vec::new(), places, values: Vec::new(), used: 0 })
    }

    /// Uses the memory of an earlier op for the sums, which saves allocating and clearing new
    /// memory.
    pub(crate) fn reuse(&mut self, memory: Vec<u8>) {
        self.values = memory;
        // The union holds all blocks of this rank and often only a few others, so room for twice as
        // many is usually enough.
        self.values.reserve((2 * self.input.values.len()).saturating_sub(self.values.len()));
    }

    /// Returns one mask per window, with a bit set for each listed block that is not zero.
    pub(crate) fn masks(&mut self, descriptor: &Descriptor, geometry: &Geometry) -> Vec<u64> {
        let mut masks = vec![0; geometry.windows() as usize];
        for (index, _) in self.input.nonzero(descriptor) {
            let (window, block) = place(geometry, index);
            masks[window as usize] |= 1 << block;
        }
        masks
    }

    /// Visits the values of a stretch block by block, each with its byte offset on the wire.
    pub(crate) fn each_source(
        &self,
        descriptor: &Descriptor,
        stretch: Packed,
        mut visit: impl FnMut(&[u8], usize),
    ) {
        let full = full_len(descriptor);
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

    /// Returns a mutable view of the given bytes of a window's sums. [`Self::expect_window`] must
    /// have made room for the sums.
    pub(crate) fn sums(&mut self, window: u32, bytes: Range<usize>) -> &mut [u8] {
        let nth = self.places[window as usize].expect("`expect_window` has made room for the sums");
        let start = self.arrived[nth.get() as usize - 1].start;
        &mut self.values[start + bytes.start..start + bytes.end]
    }

    /// Returns the sums, sorted by block.
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
                let len = values_len(descriptor, &indices[from..]);
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
    /// Checks a block list against its descriptor, sorts it, and combines duplicates in the order
    /// in which they are listed.
    pub(crate) fn sorted(self, descriptor: &Descriptor) -> Result<Self, Error> {
        let block = descriptor.block_elements();
        let count = count_of(descriptor);
        if let Some(beyond) = self.indices.iter().find(|index| u64::from(**index) >= count) {
            return Err(Error::Blocks(format!(
                "block {beyond} is beyond the tensor's {count} blocks of {block} elements"
            )));
        }
        let need = values_len(descriptor, &self.indices);
        if need != self.values.len() {
            let (have, blocks) = (self.values.len(), self.indices.len());
            return Err(Error::Blocks(format!(
                "the values have {have} bytes, but the listed blocks need {need} ({blocks} \
                 listed, {block} elements in a full block)"
            )));
        }
        let is_sorted = self.indices.is_sorted_by(|a, b| a < b);
        if is_sorted { Ok(self) } else { combine(descriptor, &self) }
    }

    /// Returns the non-zero blocks of a sorted list, with their values.
    pub(crate) fn nonzero<'a>(
        &'a mut self,
        descriptor: &Descriptor,
    ) -> impl Iterator<Item = (u32, &'a [u8])> {
        let (dtype, elements) = (descriptor.dtype, descriptor.block_elements());
        let blocks = self.values.chunks_mut(elements * dtype.size());
        // wire: W-48
        self.indices.iter().zip(blocks).filter_map(move |(index, block)| {
            (codec::scan_window(dtype, elements, block) != 0).then_some((*index, &*block))
        })
    }
}

/// An entry of one of several block lists: the block's index, the list, and the offset of its
/// values in that list.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Listed {
    pub(crate) index: u32,
    pub(crate) list: u32,
    pub(crate) at: usize,
}

/// The union of the blocks of several lists.
#[derive(Debug)]
pub(crate) struct Union {
    /// The entries, sorted by index, then by list.
    listed: Vec<Listed>,
    /// The indices in `listed` at which the entries of each block begin, followed by the length of
    /// `listed`.
    begins: Vec<usize>,
}

impl Union {
    /// Creates the union of these entries, which must be in the order of their lists.
    pub(crate) fn new(mut listed: Vec<Listed>) -> Self {
        // A stable sort keeps duplicates in the order in which they are listed, and is cheap for
        // lists that are already sorted.
        listed.sort_by_key(|block| block.index);
        let begins = (0..listed.len())
            .filter(|at| *at == 0 || listed[at - 1].index != listed[*at].index)
            .chain([listed.len()])
            .collect();
        Self { listed, begins }
    }

    /// Returns the number of distinct blocks.
    pub(crate) const fn len(&self) -> usize {
        self.begins.len() - 1
    }

    /// Returns the entries of the union's `nth` block; there is at least one.
    pub(crate) fn of(&self, nth: usize) -> &[Listed] {
        &self.listed[self.begins[nth]..self.begins[nth + 1]]
    }

    /// Returns the indices of the blocks, in ascending order.
    pub(crate) fn indices(&self) -> impl Iterator<Item = u32> {
        (0..self.len()).map(|nth| self.of(nth)[0].index)
    }
}

/// Returns the window of a block, and the block's index within that window.
pub(crate) fn place(geometry: &Geometry, index: u32) -> (u32, u32) {
    let per_window = u32::try_from(geometry.window_blocks()).unwrap_or(u32::MAX);
    (index / per_window, index % per_window)
}

/// Returns the number of blocks of a tensor.
pub(crate) const fn count_of(descriptor: &Descriptor) -> u64 {
    descriptor.elements.div_ceil(descriptor.block_elements() as u64)
}

/// Returns the length of a full block in bytes. Only a tensor's last block may be shorter.
pub(crate) const fn full_len(descriptor: &Descriptor) -> usize {
    descriptor.block_elements() * descriptor.dtype.size()
}

/// Returns the total length of several blocks' values in bytes.
pub(crate) fn values_len(descriptor: &Descriptor, indices: &[u32]) -> usize {
    indices.iter().map(|index| len_of(descriptor, *index)).sum()
}

/// Returns the length of a block's values in bytes.
pub(crate) fn len_of(descriptor: &Descriptor, index: u32) -> usize {
    let block = descriptor.block_elements() as u64;
    let left = descriptor.elements - (u64::from(index) * block).min(descriptor.elements);
    usize::try_from(left.min(block)).unwrap_or(usize::MAX) * descriptor.dtype.size()
}

/// Visits a stretch block by block, with the index of each block, the byte range within it, and the
/// byte offset on the wire.
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
    let mut at = 0;
    let listed = blocks.indices.iter().map(|index| {
        let block = Listed { index: *index, list: 0, at };
        at += len_of(descriptor, *index);
        block
    });
    let union = Union::new(listed.collect());
    let mut combined = Blocks { indices: union.indices().collect(), values: Vec::new() };
    for (nth, index) in combined.indices.iter().enumerate() {
        let len = len_of(descriptor, *index);
        let parts: Vec<&[u8]> =
            union.of(nth).iter().map(|block| &blocks.values[block.at..block.at + len]).collect();
        let at = combined.values.len();
        combined.values.extend_from_slice(parts[0]);
        if parts.len() > 1 {
            let out = &mut combined.values[at..];
            sum(descriptor.dtype, descriptor.reduction, &parts, out).map_err(|_| {
                Error::Blocks(format!(
                    "block {index} is listed {} times; the limit is {MAX_WORLD}",
                    parts.len()
                ))
            })?;
        }
    }
    Ok(combined)
}

/// Combines the values of one block that is listed several times. Adds them even for an average,
/// because they all come from the same rank. Fails only if there are too many parts for one fold.
fn sum(
    dtype: DType,
    reduction: Reduction,
    parts: &[&[u8]],
    out: &mut [u8],
) -> Result<(), ArithError> {
    let reduction = if reduction == Reduction::Avg { Reduction::Sum } else { reduction };
    let fold = FoldTerms { world: u32::try_from(parts.len()).unwrap_or(u32::MAX), absent: false };
    fold_run(dtype.native_wire(), reduction, fold, parts, out)
}
