//! Vectors of numbers: the operations that kernels need, and their portable implementation.
#![expect(unsafe_code, reason = "vectors are copied from memory that processes share")]

use std::array::from_fn;

use crate::copy::{self, LINE};
use crate::number::{Number, bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

/// Vector instruction set. A value of such a type proves that the machine supports the set.
pub(crate) trait Simd:
    Lanes<f32> + Lanes<f64> + Lanes<i32> + Lanes<i64> + Halves + Copy
{
    /// Length of a vector in bytes.
    const BYTES: usize;

    /// The bytes of [`SPAN`] vectors.
    type Span: AsRef<[u8]> + AsMut<[u8]>;

    /// Returns a span of zeros.
    fn zero_span(self) -> Self::Span;

    /// Returns a copy of the span at `start` plus `at`, which another process may write during the
    /// copy.
    ///
    /// # Safety
    ///
    /// The bytes of the span can be read.
    unsafe fn copy_span(self, start: *const u8, at: usize) -> Self::Span;

    /// Returns a copy like [`copy_span`](Self::copy_span), made with registers of half a vector.
    /// The 16-bit floats of such a register convert to one vector of f32, without an instruction
    /// that splits a vector first.
    ///
    /// # Safety
    ///
    /// The bytes of the span can be read.
    unsafe fn copy_span_by_halves(self, start: *const u8, at: usize) -> Self::Span;

    /// Returns a copy of the line at `start` plus `at`, like [`copy_span`](Self::copy_span).
    ///
    /// # Safety
    ///
    /// The bytes of the line can be read.
    unsafe fn copy_line(self, start: *const u8, at: usize) -> [u8; LINE];
}

/// Number of vectors in a span. A fold processes one span at a time. Four are enough for additions
/// to overlap, and few enough that 16 registers hold the sums of 16-bit floats and the next
/// operands.
pub(crate) const SPAN: usize = 4;

/// Vectors whose lanes are of type `N`.
pub(crate) trait Lanes<N>: Copy {
    /// The vector type.
    type Vector: Copy;

    /// Returns a vector whose lanes all equal `x`.
    fn splat(self, x: N) -> Self::Vector;

    /// Loads a vector from the start of `bytes`.
    fn load(self, bytes: &[u8]) -> Self::Vector;

    /// Writes a vector to the start of `bytes`.
    fn store(self, x: Self::Vector, bytes: &mut [u8]);

    /// Adds lane by lane. Integers wrap around.
    fn add(self, x: Self::Vector, y: Self::Vector) -> Self::Vector;

    /// Returns the smaller value of each lane, or a NaN if either is NaN.
    fn least(self, x: Self::Vector, y: Self::Vector) -> Self::Vector;

    /// Returns the greater value of each lane, or a NaN if either is NaN.
    fn greatest(self, x: Self::Vector, y: Self::Vector) -> Self::Vector;

    /// Divides lane by lane. Integers stay unchanged, as [`Number::divide`] explains.
    #[inline(always)]
    fn divide(self, x: Self::Vector, _y: Self::Vector) -> Self::Vector {
        x
    }

    /// Replaces every NaN with the canonical quiet NaN.
    #[inline(always)]
    fn canonical(self, x: Self::Vector) -> Self::Vector {
        x
    }
}

/// Vectors of 16-bit floats, each split into two vectors of f32.
///
/// For bf16, the two vectors hold the even and the odd lanes: a shift and a mask separate them, and
/// no lane has to move.
pub(crate) trait Halves: Lanes<f32> {
    /// Loads the f16 values at the start of `bytes`.
    fn load_f16(self, bytes: &[u8]) -> [Self::Vector; 2];

    /// Rounds the numbers to f16, replaces any NaN with the canonical quiet NaN, and writes the
    /// result to the start of `bytes`.
    fn store_f16(self, x: [Self::Vector; 2], bytes: &mut [u8]);

    /// Loads the bf16 values at the start of `bytes`.
    fn load_bf16(self, bytes: &[u8]) -> [Self::Vector; 2];

    /// Rounds the numbers to bf16, replaces any NaN with the canonical quiet NaN, and writes the
    /// result to the start of `bytes`.
    fn store_bf16(self, x: [Self::Vector; 2], bytes: &mut [u8]);
}

/// Instruction set of every machine: short arrays that the compiler turns into vectors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

impl Simd for Portable {
    const BYTES: usize = 16;

    type Span = [u8; LINE];

    #[inline(always)]
    fn zero_span(self) -> Self::Span {
        [0; LINE]
    }

    #[inline(always)]
    unsafe fn copy_span(self, start: *const u8, at: usize) -> Self::Span {
        // SAFETY: a span of this level is a line, and the caller guarantees that it can be read.
        unsafe { copy::line(start, at) }
    }

    #[inline(always)]
    unsafe fn copy_span_by_halves(self, start: *const u8, at: usize) -> Self::Span {
        // SAFETY: the caller guarantees that the span can be read.
        unsafe { self.copy_span(start, at) }
    }

    #[inline(always)]
    unsafe fn copy_line(self, start: *const u8, at: usize) -> [u8; LINE] {
        // SAFETY: the caller guarantees that the line can be read.
        unsafe { copy::line(start, at) }
    }
}

macro_rules! portable_lanes {
    ($number:ident, $count:literal) => {
        impl Lanes<$number> for Portable {
            type Vector = [$number; $count];

            #[inline(always)]
            fn splat(self, x: $number) -> Self::Vector {
                [x; $count]
            }

            #[inline(always)]
            fn load(self, bytes: &[u8]) -> Self::Vector {
                let (words, _) = bytes.as_chunks();
                from_fn(|i| $number::from_le_bytes(words[i]))
            }

            #[inline(always)]
            fn store(self, x: Self::Vector, bytes: &mut [u8]) {
                let (words, _) = bytes.as_chunks_mut();
                for i in 0..$count {
                    words[i] = x[i].to_le_bytes();
                }
            }

            #[inline(always)]
            fn add(self, x: Self::Vector, y: Self::Vector) -> Self::Vector {
                from_fn(|i| x[i].add(y[i]))
            }

            #[inline(always)]
            fn divide(self, x: Self::Vector, y: Self::Vector) -> Self::Vector {
                from_fn(|i| x[i].divide(y[i]))
            }

            #[inline(always)]
            fn least(self, x: Self::Vector, y: Self::Vector) -> Self::Vector {
                from_fn(|i| x[i].least(y[i]))
            }

            #[inline(always)]
            fn greatest(self, x: Self::Vector, y: Self::Vector) -> Self::Vector {
                from_fn(|i| x[i].greatest(y[i]))
            }

            #[inline(always)]
            fn canonical(self, x: Self::Vector) -> Self::Vector {
                x.map(Number::canonical)
            }
        }
    };
}

portable_lanes!(f32, 4);
portable_lanes!(f64, 2);
portable_lanes!(i32, 4);
portable_lanes!(i64, 2);

impl Halves for Portable {
    #[inline(always)]
    fn load_f16(self, bytes: &[u8]) -> [[f32; 4]; 2] {
        let (halves, _) = bytes.as_chunks();
        let value = |i: usize| f16_to_f32(u16::from_le_bytes(halves[i]));
        [from_fn(value), from_fn(|i| value(i + 4))]
    }

    #[inline(always)]
    fn store_f16(self, x: [[f32; 4]; 2], bytes: &mut [u8]) {
        let (halves, _) = bytes.as_chunks_mut();
        for i in 0..4 {
            halves[i] = f32_to_f16(x[0][i]).to_le_bytes();
            halves[i + 4] = f32_to_f16(x[1][i]).to_le_bytes();
        }
    }

    #[inline(always)]
    fn load_bf16(self, bytes: &[u8]) -> [[f32; 4]; 2] {
        let (halves, _) = bytes.as_chunks();
        let value = |i: usize| bf16_to_f32(u16::from_le_bytes(halves[i]));
        [from_fn(|i| value(2 * i)), from_fn(|i| value(2 * i + 1))]
    }

    #[inline(always)]
    fn store_bf16(self, x: [[f32; 4]; 2], bytes: &mut [u8]) {
        let (halves, _) = bytes.as_chunks_mut();
        for i in 0..4 {
            halves[2 * i] = f32_to_bf16(x[0][i]).to_le_bytes();
            halves[2 * i + 1] = f32_to_bf16(x[1][i]).to_le_bytes();
        }
    }
}
