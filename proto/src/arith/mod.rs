//! The arithmetic of a fold: how elements travel, how contributions are reduced, and when a
//! block counts as zero.
//!
//! This is the definition. It is written to be read, one element at a time; the kernels of the
//! aggregator and of the worker compute the same in wide registers and are tested bit-equal to
//! it. They share only its checks, its [`ArithError`] and the few decisions taken once a block
//! ([`int8_scale`], [`fixed32_exponent`]).
//!
//! # Rules
//!
//! - Elements on the wire, and in tensors in memory, are little-endian. No alignment is assumed.
//! - Contributions are folded from left to right: `((x0 + x1) + x2) + ..`. 16-bit floats are
//!   widened to f32, folded there and rounded once at the end, to nearest, ties to even.
//!   Integers wrap.
//! - [`Reduction::Avg`] divides the sum once by the world, in the precision of the fold and
//!   before the rounding. It does not multiply by a reciprocal, which would round twice. The
//!   quotient of integers is rounded toward zero.
//! - [`Reduction::Min`] and [`Reduction::Max`] are `minimum` and `maximum` of IEEE 754-2019: a
//!   NaN anywhere gives NaN, and -0 is less than +0.
//! - A rank that sent nothing holds zeros. Sums leave it out; for a least or greatest value one
//!   +0 takes part ([`Fold::absent`]).
//! - Every NaN that a fold or a conversion produces is *the* quiet NaN of its type (positive, no
//!   payload), also when a fold has one contribution only. Payloads depend on operand order and
//!   vector width, so they would break "same inputs, same bits". A tensor that travels unchanged
//!   is copied, payloads and all, and loses them in the fold.
//! - A scaled wire type ([`WireType::Int8`], [`WireType::Fixed32`]) is folded a whole block at a
//!   time; see [`int8_scale`] and [`fixed32_exponent`] for the encodings. A value that an
//!   encoding cannot hold turns its whole block into NaN at every rank; it is never clamped
//!   or wrapped in silence.
//!
//! All of it assumes the floating-point environment that Rust assumes: round to nearest, no
//! flushing of denormals.

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

/// What a fold has to know besides its contributions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fold {
    /// How many ranks the job has: the divisor of an average.
    pub world: u32,
    /// Whether some rank did not contribute, and so holds zeros.
    pub absent: bool,
}

/// Why the arithmetic refused its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ArithError {
    /// A fold of nothing.
    #[error("a fold needs at least one contribution")]
    NoInput,
    /// A buffer is shorter or longer than the others make it.
    #[error("a buffer of {actual} bytes where {expected} are due")]
    Length {
        /// The length that fits.
        expected: usize,
        /// The length found.
        actual: usize,
    },
    /// The bytes are not a number of whole elements, or not one whole block.
    #[error("{len} bytes are not whole elements, or not one block, of {}", wire.name())]
    Ragged {
        /// What the bytes should hold.
        wire: WireType,
        /// How many there are.
        len: usize,
    },
    /// The dtype cannot travel as the wire type, or not in this form.
    #[error("{} does not travel as {} here", dtype.name(), wire.name())]
    Conversion {
        /// Elements of the tensor.
        dtype: DType,
        /// Elements on the wire.
        wire: WireType,
    },
    /// The world is empty, past [`MAX_WORLD`], or smaller than the number of contributions.
    #[error("a world of {world} ranks")]
    World {
        /// The world given.
        world: u32,
    },
}

/// Reduces the contributions `inputs`, in rank order, to `out`.
///
/// Each input and `out` hold the same run of elements in wire form; of a scaled wire type,
/// exactly one block.
///
/// # Errors
///
/// As [`check_fold`]; `out` is then untouched.
pub fn fold_run(
    wire: WireType,
    reduction: Reduction,
    fold: Fold,
    inputs: &[&[u8]],
    out: &mut [u8],
) -> Result<(), ArithError> {
    check_fold(wire, fold, inputs, out.len())?;
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
/// An f64 that travels as a 16-bit float is rounded to f32 first, so twice in all. That differs
/// from a single rounding only for a value so near a tie of the 16-bit type that f32 rounds it
/// onto the tie; in return every machine has a fast way to the same bits.
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
    check_encode_run(dtype, wire, src.len(), out.len())?;
    convert_run(dtype, wire, src, out);
    Ok(())
}

/// Writes the wire elements `src` as elements of a tensor of `dtype`: the inverse of
/// [`encode_run`], exact but for NaN payloads.
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
            _ => unreachable!("no other wire type is narrower than the tensors it carries"),
        };
        store_float(dtype, f64::from(value), y);
    }
    Ok(())
}

/// Writes the tensor elements `src` as one block of the scaled wire type `wire`, to be summed
/// over at most `world` ranks.
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
    check_encode_block(dtype, wire, world, src.len(), out.len())?;
    let values = src.chunks_exact(dtype.size()).map(|x| load_float(dtype, x));
    match wire {
        WireType::Int8 => int8::encode(values.map(f64_to_f32), out),
        _ => fixed32::encode(values, world, out),
    }
    Ok(())
}

/// Writes one block `src` of the scaled wire type `wire` as elements of a tensor of `dtype`.
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

/// Whether [`fold_run`] accepts these arguments.
///
/// # Errors
///
/// If there is no input, an input is not as long as the output, the length is not that of whole
/// elements (of one block, for a scaled wire type), or the world is out of range or smaller than
/// the number of inputs.
pub fn check_fold(
    wire: WireType,
    fold: Fold,
    inputs: &[&[u8]],
    out_len: usize,
) -> Result<(), ArithError> {
    if inputs.is_empty() {
        return Err(ArithError::NoInput);
    }
    if let Some(input) = inputs.iter().find(|input| input.len() != out_len) {
        return Err(ArithError::Length { expected: out_len, actual: input.len() });
    }
    elements_of(wire, out_len)?;
    check_world(fold.world)?;
    if inputs.len() > fold.world as usize {
        return Err(ArithError::World { world: fold.world });
    }
    Ok(())
}

/// Whether [`encode_run`] accepts these types and lengths.
///
/// # Errors
///
/// If the wire type is scaled or does not carry the dtype, or the lengths are not those of the
/// same number of whole elements.
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

/// Whether [`decode_run`] accepts these types and lengths.
///
/// # Errors
///
/// As [`check_encode_run`].
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

/// Whether [`encode_block`] accepts these types, world and lengths.
///
/// # Errors
///
/// If the wire type is not scaled or does not carry the dtype, the world is out of range, or the
/// lengths are not those of one block.
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

/// Whether [`decode_block`] accepts these types and lengths.
///
/// # Errors
///
/// As [`check_encode_block`].
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

/// How many elements `len` bytes in wire form are.
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
    fold: Fold,
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

/// Converts between elementwise types; a type to itself is a copy.
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
            _ => unreachable!("no other wire type is narrower than the tensors it carries"),
        }
    }
}

/// The value of one element of a floating-point tensor; exact.
fn load_float(dtype: DType, x: &[u8]) -> f64 {
    match dtype {
        DType::F32 => f64::from(f32_load(element(x))),
        DType::F64 => f64_load(element(x)),
        DType::F16 => f64::from(f16_load(element(x))),
        DType::Bf16 => f64::from(bf16_load(element(x))),
        DType::I32 | DType::I64 => unreachable!("integers travel unchanged only"),
    }
}

/// Rounds a value to an element of a floating-point tensor; to a 16-bit one by way of f32.
fn store_float(dtype: DType, value: f64, y: &mut [u8]) {
    match dtype {
        DType::F32 => y.copy_from_slice(&f32_store(f64_to_f32(value))),
        DType::F64 => y.copy_from_slice(&f64_store(value)),
        DType::F16 => y.copy_from_slice(&f16_store(f64_to_f32(value))),
        DType::Bf16 => y.copy_from_slice(&bf16_store(f64_to_f32(value))),
        DType::I32 | DType::I64 => unreachable!("integers travel unchanged only"),
    }
}

/// The most ranks of a job: a rank is 16 bits, and one value stands for the aggregator.
pub const MAX_WORLD: u32 = u16::MAX as u32;

/// The most elements of a block, so that a kernel can hold one in a stack buffer.
pub const MAX_BLOCK_ELEMENTS: usize = 1024;
