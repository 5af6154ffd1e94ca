//! Scans and conversions at the speed of memory: what [`racksum_proto::arith`] defines, in wide
//! registers.
//!
//! [`scan_window`] finds the blocks to send. [`encode_run`] and [`decode_run`] convert elementwise
//! wire types, [`encode_block`] and [`decode_block`] the scaled ones, a block at a time. Nothing
//! allocates, and the bits are those of the functions of the same names in
//! [`racksum_proto::arith`] at every [`Level`].

mod convert;
mod element;
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

use self::convert::Convert;
use self::element::{Bf16, Element, F16, F32, F64, Wide};
use self::scan::Scan;
use crate::level::Level;

/// The occupancy of `window`: bit `b` is set if block `b`, of `block_elements` elements, has an
/// element other than zero. The last block may be short. A zero block is rewritten to +0.0.
///
/// As [`racksum_proto::arith::scan_window`], which defines the result. A block is read up to
/// where it is found not to be zero: of a dense tensor, a cache line a block.
///
/// # Panics
///
/// If `block_elements` is zero, or `window` has more than [`WINDOW_BLOCKS`] blocks or ends
/// within an element.
pub fn scan_window(dtype: DType, block_elements: usize, window: &mut [u8]) -> u64 {
    Level::best().scan_window(dtype, block_elements, window)
}

/// Writes the tensor elements `src` in wire form, as [`racksum_proto::arith::encode_run`] does.
///
/// # Errors
///
/// As [`check_encode_run`].
pub fn encode_run(
    dtype: DType,
    wire: WireType,
    src: &[u8],
    out: &mut [u8],
) -> Result<(), ArithError> {
    Level::best().encode_run(dtype, wire, src, out)
}

/// Writes the wire elements `src` as elements of a tensor of `dtype`, as
/// [`racksum_proto::arith::decode_run`] does.
///
/// # Errors
///
/// As [`check_decode_run`].
pub fn decode_run(
    wire: WireType,
    dtype: DType,
    src: &[u8],
    dst: &mut [u8],
) -> Result<(), ArithError> {
    Level::best().decode_run(wire, dtype, src, dst)
}

/// Writes the tensor elements `src` as one block of the scaled wire type `wire`, to be summed
/// over at most `world` ranks, as [`racksum_proto::arith::encode_block`] does.
///
/// # Errors
///
/// As [`check_encode_block`].
pub fn encode_block(
    dtype: DType,
    wire: WireType,
    world: u32,
    src: &[u8],
    out: &mut [u8],
) -> Result<(), ArithError> {
    Level::best().encode_block(dtype, wire, world, src, out)
}

/// Writes one block `src` of the scaled wire type `wire` as elements of a tensor of `dtype`, as
/// [`racksum_proto::arith::decode_block`] does.
///
/// # Errors
///
/// As [`check_decode_block`].
pub fn decode_block(
    wire: WireType,
    dtype: DType,
    src: &[u8],
    dst: &mut [u8],
) -> Result<(), ArithError> {
    Level::best().decode_block(wire, dtype, src, dst)
}

/// Asks for the memory of `run`, which is written soon, and is not next to what is written now.
/// Of a long one the beginning is asked for, and the processor goes on by itself.
pub fn prefetch_to_write(run: &[u8]) {
    prefetch::to_write(&run[..run.len().min(prefetch::AHEAD)], 0);
}

/// The functions of this module with the instructions of one level: to compare levels.
impl Level {
    /// See [`scan_window`].
    ///
    /// # Panics
    ///
    /// As [`scan_window`].
    pub fn scan_window(self, dtype: DType, block_elements: usize, window: &mut [u8]) -> u64 {
        assert!(window.len().is_multiple_of(dtype.size()), "a window has whole elements");
        assert!(block_elements > 0, "a block has elements");
        let block_len = block_elements * dtype.size();
        assert!(window.len().div_ceil(block_len) <= WINDOW_BLOCKS, "a window has few blocks");
        self.run(Scan { window, block_len, mask: magnitude_mask(dtype) })
    }

    /// See [`encode_run`].
    ///
    /// # Errors
    ///
    /// As [`check_encode_run`].
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
            // The rest are the dtypes themselves.
            _ => out.copy_from_slice(src),
        }
        Ok(())
    }

    /// See [`decode_run`].
    ///
    /// # Errors
    ///
    /// As [`check_decode_run`].
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
            // The rest are the dtypes themselves.
            _ => dst.copy_from_slice(src),
        }
        Ok(())
    }

    /// See [`encode_block`].
    ///
    /// # Errors
    ///
    /// As [`check_encode_block`].
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

    /// See [`decode_block`].
    ///
    /// # Errors
    ///
    /// As [`check_decode_block`].
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
