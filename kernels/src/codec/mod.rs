//! Scans and conversions of [`racksum_proto::arith`] in vector registers, at memory speed.
//!
//! [`scan_window`] finds the blocks to send. [`encode_run`] and [`decode_run`] convert elementwise
//! wire types. [`encode_block`] and [`decode_block`] convert scaled wire types, one block at a
//! time. No function allocates. At every [`Level`], the results have exactly the bits of the
//! functions of the same names in [`racksum_proto::arith`].

mod element;
mod elementwise;
mod fixed32;
mod int8;
mod prefetch;
mod scan;
#[cfg(test)]
mod tests;

use std::marker::PhantomData;

use racksum_proto::arith::{
    ArithError, WINDOW_BLOCKS, check_decode_block, check_decode_run, check_encode_block,
    check_encode_run, magnitude_mask,
};
use racksum_proto::dtype::{DType, WireType};

use self::element::{Bf16, Element, F16, F32, F64, Wide};
use self::elementwise::Convert;
use self::scan::{Scan, Window};
use crate::level::Level;
use crate::shared::SharedBytes;

/// Returns the occupancy of `window`: bit `b` is set if block `b` has an element other than zero. A
/// block has `block_elements` elements; the last block may be shorter. The scan overwrites a block
/// that has only zeros, of either sign, with +0.0.
///
/// [`racksum_proto::arith::scan_window`] defines the result. The scan of a block stops soon after
/// its first nonzero element. In a dense tensor, the scan reads only one cache line per block.
///
/// # Panics
///
/// If `block_elements` is zero, `window` has more than [`WINDOW_BLOCKS`] blocks, or `window` ends
/// within an element.
pub fn scan_window(dtype: DType, block_elements: usize, window: &mut [u8]) -> u64 {
    Level::best().scan_window(dtype, block_elements, window)
}

/// Like [`scan_window`], for a window that another process may write. Copies the elements to
/// registers and examines the copies, because the memory may change during the scan. If it does,
/// the result is arbitrary.
///
/// # Panics
///
/// The panics of [`scan_window`].
pub fn scan_shared(dtype: DType, block_elements: usize, window: SharedBytes<'_>) -> u64 {
    Level::best().scan_shared(dtype, block_elements, window)
}

/// Converts the tensor elements `src` to the elementwise wire type `wire`, like
/// [`racksum_proto::arith::encode_run`].
///
/// # Errors
///
/// The errors of [`check_encode_run`].
pub fn encode_run(
    dtype: DType,
    wire: WireType,
    src: &[u8],
    out: &mut [u8],
) -> Result<(), ArithError> {
    Level::best().encode_run(dtype, wire, src, out)
}

/// Converts the wire elements `src` to tensor elements of `dtype`, like
/// [`racksum_proto::arith::decode_run`].
///
/// # Errors
///
/// The errors of [`check_decode_run`].
pub fn decode_run(
    wire: WireType,
    dtype: DType,
    src: &[u8],
    dst: &mut [u8],
) -> Result<(), ArithError> {
    Level::best().decode_run(wire, dtype, src, dst)
}

/// Encodes the tensor elements `src` as one block of the scaled wire type `wire`, like
/// [`racksum_proto::arith::encode_block`]. A `Fixed32` block leaves room for a sum over `world`
/// ranks.
///
/// # Errors
///
/// The errors of [`check_encode_block`].
pub fn encode_block(
    dtype: DType,
    wire: WireType,
    world: u32,
    src: &[u8],
    out: &mut [u8],
) -> Result<(), ArithError> {
    Level::best().encode_block(dtype, wire, world, src, out)
}

/// Decodes the block `src` of the scaled wire type `wire` to tensor elements of `dtype`, like
/// [`racksum_proto::arith::decode_block`].
///
/// # Errors
///
/// The errors of [`check_decode_block`].
pub fn decode_block(
    wire: WireType,
    dtype: DType,
    src: &[u8],
    dst: &mut [u8],
) -> Result<(), ArithError> {
    Level::best().decode_block(wire, dtype, src, dst)
}

/// Prefetches the memory of `run`, which will be written soon and is not adjacent to the current
/// writes. Prefetches only the beginning of a long run, because the processor's own prefetcher
/// fetches the rest.
pub fn prefetch_to_write(run: &[u8]) {
    prefetch::to_write(run.as_ptr(), run.len().min(prefetch::AHEAD), 0);
}

/// Prefetches memory that another process may write, like [`prefetch_to_write`].
pub fn prefetch_shared(run: SharedBytes<'_>) {
    prefetch::to_write(run.start().as_ptr(), run.len().min(prefetch::AHEAD), 0);
}

/// The functions of this module, compiled for one level. Tests and benches use them to compare
/// levels.
impl Level {
    /// Runs [`scan_window`] at this level.
    ///
    /// # Panics
    ///
    /// The panics of [`scan_window`].
    pub fn scan_window(self, dtype: DType, block_elements: usize, window: &mut [u8]) -> u64 {
        let len = window.len();
        self.scan(dtype, block_elements, len, window)
    }

    /// Runs [`scan_shared`] at this level.
    ///
    /// # Panics
    ///
    /// The panics of [`scan_window`].
    pub fn scan_shared(self, dtype: DType, block_elements: usize, window: SharedBytes<'_>) -> u64 {
        self.scan(dtype, block_elements, window.len(), window)
    }

    fn scan(self, dtype: DType, block_elements: usize, len: usize, window: impl Window) -> u64 {
        assert!(len.is_multiple_of(dtype.size()), "a window is a whole number of elements");
        assert!(block_elements > 0, "a block has at least one element");
        let block_len = block_elements * dtype.size();
        assert!(len.div_ceil(block_len) <= WINDOW_BLOCKS, "a window has at most 64 blocks");
        self.run(Scan { window, block_len, mask: magnitude_mask(dtype) })
    }

    /// Runs [`encode_run`] at this level.
    ///
    /// # Errors
    ///
    /// The errors of [`check_encode_run`].
    pub fn encode_run(
        self,
        dtype: DType,
        wire: WireType,
        src: &[u8],
        out: &mut [u8],
    ) -> Result<(), ArithError> {
        check_encode_run(dtype, wire, src.len(), out.len())?;
        match (dtype, wire) {
            (DType::F32, WireType::F16) => self.convert::<F32, F16>(src, out),
            (DType::F32, WireType::Bf16) => self.convert::<F32, Bf16>(src, out),
            (DType::F64, WireType::F32) => self.convert::<F64, F32>(src, out),
            (DType::F64, WireType::F16) => self.convert::<F64, F16>(src, out),
            (DType::F64, WireType::Bf16) => self.convert::<F64, Bf16>(src, out),
            // In all other pairs, the wire type is the dtype itself.
            _ => out.copy_from_slice(src),
        }
        Ok(())
    }

    /// Runs [`decode_run`] at this level.
    ///
    /// # Errors
    ///
    /// The errors of [`check_decode_run`].
    pub fn decode_run(
        self,
        wire: WireType,
        dtype: DType,
        src: &[u8],
        dst: &mut [u8],
    ) -> Result<(), ArithError> {
        check_decode_run(wire, dtype, src.len(), dst.len())?;
        match (wire, dtype) {
            (WireType::F16, DType::F32) => self.convert::<F16, F32>(src, dst),
            (WireType::Bf16, DType::F32) => self.convert::<Bf16, F32>(src, dst),
            (WireType::F32, DType::F64) => self.convert::<F32, F64>(src, dst),
            (WireType::F16, DType::F64) => self.convert::<F16, F64>(src, dst),
            (WireType::Bf16, DType::F64) => self.convert::<Bf16, F64>(src, dst),
            // In all other pairs, the wire type is the dtype itself.
            _ => dst.copy_from_slice(src),
        }
        Ok(())
    }

    /// Runs [`encode_block`] at this level.
    ///
    /// # Errors
    ///
    /// The errors of [`check_encode_block`].
    pub fn encode_block(
        self,
        dtype: DType,
        wire: WireType,
        world: u32,
        src: &[u8],
        out: &mut [u8],
    ) -> Result<(), ArithError> {
        check_encode_block(dtype, wire, world, src.len(), out.len())?;
        match (wire, dtype) {
            (WireType::Int8, DType::F32) => self.encode_int8::<F32>(src, out),
            (WireType::Int8, DType::F64) => self.encode_int8::<F64>(src, out),
            (WireType::Int8, DType::F16) => self.encode_int8::<F16>(src, out),
            (WireType::Int8, DType::Bf16) => self.encode_int8::<Bf16>(src, out),
            (WireType::Fixed32, DType::F32) => self.encode_fixed32::<F32>(src, world, out),
            (WireType::Fixed32, DType::F64) => self.encode_fixed32::<F64>(src, world, out),
            _ => return Err(ArithError::Conversion { dtype, wire }),
        }
        Ok(())
    }

    /// Runs [`decode_block`] at this level.
    ///
    /// # Errors
    ///
    /// The errors of [`check_decode_block`].
    pub fn decode_block(
        self,
        wire: WireType,
        dtype: DType,
        src: &[u8],
        dst: &mut [u8],
    ) -> Result<(), ArithError> {
        check_decode_block(wire, dtype, src.len(), dst.len())?;
        match (wire, dtype) {
            (WireType::Int8, DType::F32) => self.decode_int8::<F32>(src, dst),
            (WireType::Int8, DType::F64) => self.decode_int8::<F64>(src, dst),
            (WireType::Int8, DType::F16) => self.decode_int8::<F16>(src, dst),
            (WireType::Int8, DType::Bf16) => self.decode_int8::<Bf16>(src, dst),
            (WireType::Fixed32, DType::F32) => self.decode_fixed32::<F32>(src, dst),
            (WireType::Fixed32, DType::F64) => self.decode_fixed32::<F64>(src, dst),
            _ => return Err(ArithError::Conversion { dtype, wire }),
        }
        Ok(())
    }

    fn convert<From: Element, To: Element>(self, src: &[u8], dst: &mut [u8]) {
        self.run(Convert::<From, To> { src, dst, types: PhantomData });
    }

    fn encode_int8<E: Element>(self, src: &[u8], block: &mut [u8]) {
        self.run(int8::Encode::<E> { src, block, element: PhantomData });
    }

    fn decode_int8<E: Element>(self, block: &[u8], dst: &mut [u8]) {
        self.run(int8::Decode::<E> { block, dst, element: PhantomData });
    }

    fn encode_fixed32<E: Wide>(self, src: &[u8], world: u32, block: &mut [u8]) {
        self.run(fixed32::Encode::<E> { src, block, world, element: PhantomData });
    }

    fn decode_fixed32<E: Wide>(self, block: &[u8], dst: &mut [u8]) {
        self.run(fixed32::Decode::<E> { block, dst, element: PhantomData });
    }
}
