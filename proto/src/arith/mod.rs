//! The arithmetic of a fold: how elements are encoded, how contributions are reduced, and which
//! blocks count as zero.
//!
//! This module is the reference definition. Its code is simple and handles one element at a time.
//! The kernels of the aggregator and the worker compute the same results in vector registers, and
//! tests compare them bit by bit. From this module, the kernels use only the checks, [`ArithError`]
//! and the few decisions per block ([`int8_scale`], [`fixed32_exponent`]).
//!
//! # Rules
//!
//! - Elements are little-endian on the wire and in memory. No alignment is assumed.
//! - Contributions are folded from left to right: `((x0 + x1) + x2) + ..`. 16-bit floats are
//!   widened to f32, folded, and rounded once at the end, to nearest, ties to even. Integers wrap.
//! - [`Reduction::Avg`] divides the sum once by the number of ranks that take part, in the
//!   precision of the fold and before the rounding. Multiplication by a reciprocal would round
//!   twice. The quotient of integers is rounded toward zero.
//! - [`Reduction::Min`] and [`Reduction::Max`] are `minimum` and `maximum` of IEEE 754-2019: a
//!   NaN anywhere gives NaN, and -0 is less than +0.
//! - The share of a rank that sent nothing counts as zeros. A sum leaves it out; a minimum or
//!   maximum includes one +0 ([`FoldTerms::absent`]).
//! - Every NaN from a fold or a conversion is *the* quiet NaN of its type (positive, no payload),
//!   even if a fold has only one contribution. Payloads depend on operand order and vector width,
//!   so they would break "same inputs, same bits". A tensor that travels unchanged is copied with
//!   its NaN payloads, and the fold removes them.
//! - A scaled wire type ([`WireType::Int8`], [`WireType::Fixed32`]) is folded one whole block at a
//!   time; see [`int8_scale`] and [`fixed32_exponent`] for the encodings. A value that an encoding
//!   cannot hold turns its whole block into NaN at every rank. Values are never silently clamped or
//!   wrapped.
//!
//! These rules assume Rust's floating-point environment: round to nearest, and no flushing of
//! denormals.

mod element;
mod fixed32;
mod int8;
mod scan;
#[cfg(test)]
mod tests;

use thiserror::Error;

use self::element::{
    Accumulator, bf16_load, bf16_store, element, f16_load, f16_store, f32_load, f32_store,
    f64_load, f64_store, f64_to_f32, reduce,
};
pub use self::fixed32::{
    FIXED32_MIN_EXPONENT, FIXED32_OVERFLOW, fixed32_counting_exponent, fixed32_exponent,
    fixed32_limit, fixed32_overflowed, fixed32_rescale,
};
pub use self::int8::{INT8_MAX, int8_scale};
pub use self::scan::{WINDOW_BLOCKS, magnitude_mask, scan_window};
use crate::dtype::{DType, Reduction, SCALE_LEN, WireType};

/// The parameters of a fold, other than its contributions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FoldTerms {
    /// The number of ranks that take part, which is the divisor of an average.
    pub world: u32,
    /// Whether some rank takes part but sent nothing. Its share counts as zeros.
    pub absent: bool,
}

/// The reason why the arithmetic refused its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ArithError {
    /// The fold has no contributions.
    #[error("a fold needs at least one contribution")]
    NoInput,
    /// A buffer is shorter or longer than the other arguments require.
    #[error("a buffer has {actual} bytes, not the required {expected}")]
    Length {
        /// The required length.
        expected: usize,
        /// The actual length.
        actual: usize,
    },
    /// The bytes are not whole elements or, for a scaled wire type, not one block.
    #[error(
        "{len} bytes are not {} {}",
        if wire.is_scaled() { "one block of" } else { "a whole number of elements of" },
        wire.name()
    )]
    Ragged {
        /// The wire type of the bytes.
        wire: WireType,
        /// The number of bytes.
        len: usize,
    },
    /// The wire type cannot carry the dtype, or is scaled where the function converts runs, or is
    /// unscaled where the function converts blocks.
    #[error("this function cannot convert a tensor of {} to or from {}", dtype.name(), wire.name())]
    Conversion {
        /// The element type of the tensor.
        dtype: DType,
        /// The encoding on the wire.
        wire: WireType,
    },
    /// The number of ranks is 0, above [`MAX_WORLD`], or less than the number of contributions.
    #[error(
        "the number of ranks must be 1 to 65535, and at least the number of contributions, not \
         {world}"
    )]
    World {
        /// The number of ranks that was passed.
        world: u32,
    },
}

/// Reduces the contributions `inputs`, in rank order, and writes the result to `out`.
///
/// Each input and `out` hold the same run of elements in wire form. With a scaled wire type, the
/// run is exactly one block.
///
/// # Errors
///
/// Returns the errors of [`check_fold`]; `out` is then unchanged.
pub fn fold_run(
    wire: WireType,
    reduction: Reduction,
    fold: FoldTerms,
    inputs: &[&[u8]],
    out: &mut [u8],
) -> Result<(), ArithError> {
    check_fold(wire, fold, inputs.iter().map(|input| input.len()), out.len())?;
    // wire: W-47, W-49
    match wire {
        WireType::F32 => fold_elements(reduction, fold, inputs, out, f32_load, f32_store),
        WireType::F64 => fold_elements(reduction, fold, inputs, out, f64_load, f64_store),
        WireType::F16 => fold_elements(reduction, fold, inputs, out, f16_load, f16_store),
        WireType::Bf16 => fold_elements(reduction, fold, inputs, out, bf16_load, bf16_store),
        WireType::I32 => {
            fold_elements(reduction, fold, inputs, out, i32::from_le_bytes, i32::to_le_bytes);
        }
        WireType::I64 => {
            fold_elements(reduction, fold, inputs, out, i64::from_le_bytes, i64::to_le_bytes);
        }
        WireType::Int8 => int8::fold_block(reduction, fold, inputs, out),
        WireType::Fixed32 => fixed32::fold_block(reduction, fold, inputs, out),
    }
    Ok(())
}

/// Writes the tensor elements `src` in wire form.
///
/// An f64 that travels as a 16-bit float is rounded to f32 first, so it is rounded twice. The
/// result differs from a single rounding only for a value so close to a tie of the 16-bit type that
/// f32 rounds it onto the tie. In return, every machine can quickly compute the same bits.
///
/// # Errors
///
/// Returns the errors of [`check_encode_run`].
pub fn encode_run(
    dtype: DType,
    wire: WireType,
    src: &[u8],
    out: &mut [u8],
) -> Result<(), ArithError> {
    check_encode_run(dtype, wire, src.len(), out.len())?;
    convert_run(dtype, wire, src, out);
    Ok(())
}

/// Writes the wire elements `src` as elements of a tensor of `dtype`. The conversion is exact
/// except for NaN payloads.
///
/// # Errors
///
/// Returns the errors of [`check_decode_run`].
pub fn decode_run(
    wire: WireType,
    dtype: DType,
    src: &[u8],
    dst: &mut [u8],
) -> Result<(), ArithError> {
    check_decode_run(wire, dtype, src.len(), dst.len())?;
    if dtype.native_wire() == wire {
        dst.copy_from_slice(src);
        return Ok(());
    }
    let (from, to) = (wire.element_size(), dtype.size());
    for (x, y) in src.chunks_exact(from).zip(dst.chunks_exact_mut(to)) {
        let value = match wire {
            WireType::F32 => f32_load(element(x)),
            WireType::F16 => f16_load(element(x)),
            WireType::Bf16 => bf16_load(element(x)),
            _ => {
                unreachable!("no other unscaled wire type is narrower than the tensors it carries")
            }
        };
        store_float(dtype, f64::from(value), y);
    }
    Ok(())
}

/// Writes the tensor elements `src` as one block of the scaled wire type `wire`, for a sum over at
/// most `world` ranks.
///
/// # Errors
///
/// Returns the errors of [`check_encode_block`].
pub fn encode_block(
    dtype: DType,
    wire: WireType,
    world: u32,
    src: &[u8],
    out: &mut [u8],
) -> Result<(), ArithError> {
    check_encode_block(dtype, wire, world, src.len(), out.len())?;
    let values = src.chunks_exact(dtype.size()).map(|x| load_float(dtype, x));
    match wire {
        WireType::Int8 => int8::encode(values.map(f64_to_f32), out),
        _ => fixed32::encode(values, world, out),
    }
    Ok(())
}

/// Writes the block `src` of the scaled wire type `wire` as elements of a tensor of `dtype`.
///
/// # Errors
///
/// Returns the errors of [`check_decode_block`].
pub fn decode_block(
    wire: WireType,
    dtype: DType,
    src: &[u8],
    dst: &mut [u8],
) -> Result<(), ArithError> {
    check_decode_block(wire, dtype, src.len(), dst.len())?;
    for (i, y) in dst.chunks_exact_mut(dtype.size()).enumerate() {
        let value = match wire {
            WireType::Int8 => f64::from(int8::decode(src, i)),
            _ => fixed32::decode(src, i),
        };
        store_float(dtype, value, y);
    }
    Ok(())
}

/// Checks whether [`fold_run`] accepts these arguments.
///
/// # Errors
///
/// Returns an error if there is no input, or if an input and the output differ in length. Returns
/// an error if the output is not a whole number of elements or, for a scaled wire type, one block.
/// Returns an error if `fold.world` is out of range or less than the number of inputs.
pub fn check_fold(
    wire: WireType,
    fold: FoldTerms,
    mut input_lens: impl ExactSizeIterator<Item = usize>,
    out_len: usize,
) -> Result<(), ArithError> {
    let inputs = input_lens.len();
    if inputs == 0 {
        return Err(ArithError::NoInput);
    }
    if let Some(actual) = input_lens.find(|len| *len != out_len) {
        return Err(ArithError::Length { expected: out_len, actual });
    }
    elements_of(wire, out_len)?;
    check_world(fold.world)?;
    if inputs > fold.world as usize {
        return Err(ArithError::World { world: fold.world });
    }
    Ok(())
}

/// Checks whether [`encode_run`] accepts these types and lengths.
///
/// # Errors
///
/// Returns an error if the wire type is scaled or does not carry the dtype, or if the lengths do
/// not match the same number of whole elements.
pub fn check_encode_run(
    dtype: DType,
    wire: WireType,
    src_len: usize,
    out_len: usize,
) -> Result<(), ArithError> {
    if wire.is_scaled() || !wire.carries(dtype) {
        return Err(ArithError::Conversion { dtype, wire });
    }
    let elements = elements_of(dtype.native_wire(), src_len)?;
    expect_len(wire.block_len(elements), out_len)
}

/// Checks whether [`decode_run`] accepts these types and lengths.
///
/// # Errors
///
/// Returns the same errors as [`check_encode_run`].
pub fn check_decode_run(
    wire: WireType,
    dtype: DType,
    src_len: usize,
    dst_len: usize,
) -> Result<(), ArithError> {
    if wire.is_scaled() || !wire.carries(dtype) {
        return Err(ArithError::Conversion { dtype, wire });
    }
    let elements = elements_of(wire, src_len)?;
    expect_len(elements * dtype.size(), dst_len)
}

/// Checks whether [`encode_block`] accepts these types and lengths and this world.
///
/// # Errors
///
/// Returns an error if the wire type is not scaled or does not carry the dtype, if the world is out
/// of range, or if the lengths are not those of one block.
pub fn check_encode_block(
    dtype: DType,
    wire: WireType,
    world: u32,
    src_len: usize,
    out_len: usize,
) -> Result<(), ArithError> {
    if !wire.is_scaled() || !wire.carries(dtype) {
        return Err(ArithError::Conversion { dtype, wire });
    }
    check_world(world)?;
    let elements = elements_of(wire, out_len)?;
    expect_len(elements * dtype.size(), src_len)
}

/// Checks whether [`decode_block`] accepts these types and lengths.
///
/// # Errors
///
/// Returns the same errors as [`check_encode_block`], except those about the world.
pub fn check_decode_block(
    wire: WireType,
    dtype: DType,
    src_len: usize,
    dst_len: usize,
) -> Result<(), ArithError> {
    if !wire.is_scaled() || !wire.carries(dtype) {
        return Err(ArithError::Conversion { dtype, wire });
    }
    let elements = elements_of(wire, src_len)?;
    expect_len(elements * dtype.size(), dst_len)
}

fn check_world(world: u32) -> Result<(), ArithError> {
    if (1..=MAX_WORLD).contains(&world) { Ok(()) } else { Err(ArithError::World { world }) }
}

fn expect_len(expected: usize, actual: usize) -> Result<(), ArithError> {
    if expected == actual { Ok(()) } else { Err(ArithError::Length { expected, actual }) }
}

/// Returns the number of elements in `len` bytes in wire form.
fn elements_of(wire: WireType, len: usize) -> Result<usize, ArithError> {
    let ragged = ArithError::Ragged { wire, len };
    let scale_len = if wire.is_scaled() { SCALE_LEN } else { 0 };
    let data_len = len.checked_sub(scale_len).ok_or(ragged)?;
    let elements = data_len / wire.element_size();
    let whole = data_len.is_multiple_of(wire.element_size());
    let one_block = !wire.is_scaled() || elements <= MAX_BLOCK_ELEMENTS;
    if whole && one_block { Ok(elements) } else { Err(ragged) }
}

fn fold_elements<A: Accumulator, const SIZE: usize>(
    reduction: Reduction,
    fold: FoldTerms,
    inputs: &[&[u8]],
    out: &mut [u8],
    load: impl Fn([u8; SIZE]) -> A,
    store: impl Fn(A) -> [u8; SIZE],
) {
    for (i, y) in out.chunks_exact_mut(SIZE).enumerate() {
        let values = inputs.iter().map(|input| load(element(&input[i * SIZE..][..SIZE])));
        y.copy_from_slice(&store(reduce(reduction, fold, values)));
    }
}

/// Writes tensor elements as an unscaled wire type: copies them if the types are equal, and
/// otherwise narrows them.
fn convert_run(dtype: DType, wire: WireType, src: &[u8], out: &mut [u8]) {
    if dtype.native_wire() == wire {
        out.copy_from_slice(src);
        return;
    }
    let (from, to) = (dtype.size(), wire.element_size());
    for (x, y) in src.chunks_exact(from).zip(out.chunks_exact_mut(to)) {
        let value = f64_to_f32(load_float(dtype, x));
        match wire {
            WireType::F32 => y.copy_from_slice(&f32_store(value)),
            WireType::F16 => y.copy_from_slice(&f16_store(value)),
            WireType::Bf16 => y.copy_from_slice(&bf16_store(value)),
            _ => {
                unreachable!("no other unscaled wire type is narrower than the tensors it carries")
            }
        }
    }
}

/// Returns the exact value of one element of a floating-point tensor.
fn load_float(dtype: DType, x: &[u8]) -> f64 {
    match dtype {
        DType::F32 => f64::from(f32_load(element(x))),
        DType::F64 => f64_load(element(x)),
        DType::F16 => f64::from(f16_load(element(x))),
        DType::Bf16 => f64::from(bf16_load(element(x))),
        DType::I32 | DType::I64 => unreachable!("integers only travel unchanged"),
    }
}

/// Rounds a value to an element of a floating-point tensor, by way of f32 for a 16-bit element.
fn store_float(dtype: DType, value: f64, y: &mut [u8]) {
    match dtype {
        DType::F32 => y.copy_from_slice(&f32_store(f64_to_f32(value))),
        DType::F64 => y.copy_from_slice(&f64_store(value)),
        DType::F16 => y.copy_from_slice(&f16_store(f64_to_f32(value))),
        DType::Bf16 => y.copy_from_slice(&bf16_store(f64_to_f32(value))),
        DType::I32 | DType::I64 => unreachable!("integers only travel unchanged"),
    }
}

/// The maximum number of ranks in a job: a rank's number has 16 bits, and one value stands for the
/// aggregator.
pub const MAX_WORLD: u32 = u16::MAX as u32;

/// The maximum number of elements in a block. A kernel can hold a block of this size in a stack
/// buffer.
pub const MAX_BLOCK_ELEMENTS: usize = 1024;
