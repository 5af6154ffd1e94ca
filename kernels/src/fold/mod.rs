//! Folds of [`racksum_proto::arith`] in vector registers, at memory speed.
//!
//! [`fold_run`] takes the received contributions of a run of elements and writes their reduction.
//! [`fold_shared`] does the same for tensors that other processes may write. Neither allocates
//! memory. The result has exactly the bits of [`racksum_proto::arith::fold_run`], at every
//! [`Level`] and however a window is divided into runs.

mod combine;
mod elementwise;
mod fixed32;
mod input;
mod int8;
#[cfg(test)]
mod tests;

use std::marker::PhantomData;

use racksum_proto::arith::{self, ArithError, FoldTerms, check_fold};
use racksum_proto::dtype::{DType, Reduction, WireType};

use self::combine::{Add, Combine, Greatest, Least};
use self::elementwise::{Bf16, F16, F32, F64, I32, I64, Wire};
use self::input::Input;
use crate::level::{self, Level};
use crate::number::Number;
use crate::shared::SharedBytes;
use crate::simd::SPAN;

/// Reduces the contributions `inputs`, in rank order, to `out`.
///
/// [`racksum_proto::arith::fold_run`] defines the result. Each input and `out` hold the same run of
/// elements in wire form. For a scaled wire type, the run is exactly one block.
///
/// # Errors
///
/// The errors of [`check_fold`]. `out` is then unchanged.
pub fn fold_run(
    wire: WireType,
    reduction: Reduction,
    fold: FoldTerms,
    inputs: &[&[u8]],
    out: &mut [u8],
) -> Result<(), ArithError> {
    Level::best().fold_run(wire, reduction, fold, inputs, out)
}

/// Reduces tensor elements of `dtype`, in rank order, to `out`, like [`fold_run`] for the dtype's
/// own wire type. The fold works on private copies of the inputs' bytes, and may copy the bytes at
/// the end of a run twice. If another process changes an element during the fold, the result for
/// this element is arbitrary.
///
/// # Errors
///
/// The errors of [`check_fold`]. `out` is then unchanged.
pub fn fold_shared(
    dtype: DType,
    reduction: Reduction,
    fold: FoldTerms,
    inputs: &[SharedBytes<'_>],
    out: &mut [u8],
) -> Result<(), ArithError> {
    Level::best().fold_shared(dtype, reduction, fold, inputs, out)
}

impl Level {
    /// Runs [`fold_run`] with the instructions of this level, for tests and benches.
    ///
    /// # Errors
    ///
    /// The errors of [`check_fold`]. `out` is then unchanged.
    pub fn fold_run(
        self,
        wire: WireType,
        reduction: Reduction,
        fold: FoldTerms,
        inputs: &[&[u8]],
        out: &mut [u8],
    ) -> Result<(), ArithError> {
        check_fold(wire, fold, inputs.iter().map(|input| input.len()), out.len())?;
        if !wire.is_scaled() && out.len() < level::MIN_LEN {
            // The run is shorter than any vector: a few elements at the end of a fragment.
            return arith::fold_run(wire, reduction, fold, inputs, out);
        }
        if wire.is_scaled() {
            CheckedFold { level: self, wire, fold, inputs, out }.scaled(reduction);
        } else {
            let level = self.within(out.len());
            CheckedFold { level, wire, fold, inputs, out }.elementwise(reduction);
        }
        Ok(())
    }

    /// Runs [`fold_shared`] with the instructions of this level, for tests and benches.
    ///
    /// # Errors
    ///
    /// The errors of [`check_fold`]. `out` is then unchanged.
    pub fn fold_shared(
        self,
        dtype: DType,
        reduction: Reduction,
        fold: FoldTerms,
        inputs: &[SharedBytes<'_>],
        out: &mut [u8],
    ) -> Result<(), ArithError> {
        let wire = dtype.native_wire();
        check_fold(wire, fold, inputs.iter().map(|input| input.len()), out.len())?;
        let level = self.within((out.len() / SPAN).max(level::MIN_LEN));
        CheckedFold { level, wire, fold, inputs, out }.elementwise(reduction);
        Ok(())
    }
}

/// Divides sums of integers by the number of ranks after the fold, because no vector instruction
/// divides integers. Other sums are divided during the fold.
fn divide_integers(wire: WireType, sums: &mut [u8], world: u32) {
    match wire {
        WireType::I32 => {
            each(sums, |sum| (i32::from_le_bytes(sum) / i32::of_world(world)).to_le_bytes());
        }
        WireType::I64 => {
            each(sums, |sum| (i64::from_le_bytes(sum) / i64::of_world(world)).to_le_bytes());
        }
        _ => {}
    }
}

/// Replaces each element of `SIZE` bytes with the result of `change`.
fn each<const SIZE: usize>(bytes: &mut [u8], change: impl Fn([u8; SIZE]) -> [u8; SIZE]) {
    for element in bytes.as_chunks_mut().0 {
        *element = change(*element);
    }
}

/// The checked arguments of a fold.
struct CheckedFold<'a, I> {
    level: Level,
    wire: WireType,
    fold: FoldTerms,
    inputs: &'a [I],
    out: &'a mut [u8],
}

impl CheckedFold<'_, &[u8]> {
    /// Folds a block of a scaled wire type.
    fn scaled(self, reduction: Reduction) {
        match reduction {
            Reduction::Sum => self.scaled_by::<Add>(false),
            Reduction::Avg => self.scaled_by::<Add>(true),
            Reduction::Min => self.scaled_by::<Least>(false),
            Reduction::Max => self.scaled_by::<Greatest>(false),
        }
    }

    fn scaled_by<C: Combine>(self, average: bool) {
        if self.wire == WireType::Int8 {
            self.level.run(int8::Run::<C> {
                inputs: self.inputs,
                out: self.out,
                divisor: average.then(|| f32::of_world(self.fold.world)),
                absent: self.fold.absent,
                combine: PhantomData,
            });
        } else {
            self.level.run(fixed32::Run::<C> {
                inputs: self.inputs,
                out: self.out,
                divisor: average.then(|| f64::of_world(self.fold.world)),
                absent: self.fold.absent,
                combine: PhantomData,
            });
        }
    }
}

impl<I: Input> CheckedFold<'_, I> {
    /// Folds a run of an elementwise wire type.
    fn elementwise(self, reduction: Reduction) {
        match reduction {
            Reduction::Sum => self.elementwise_by::<Add>(false),
            Reduction::Avg => self.elementwise_by::<Add>(true),
            Reduction::Min => self.elementwise_by::<Least>(false),
            Reduction::Max => self.elementwise_by::<Greatest>(false),
        }
    }

    fn elementwise_by<C: Combine>(self, average: bool) {
        match self.wire {
            WireType::F32 => self.elements::<F32, C>(average),
            WireType::F64 => self.elements::<F64, C>(average),
            WireType::F16 => self.elements::<F16, C>(average),
            WireType::Bf16 => self.elements::<Bf16, C>(average),
            WireType::I32 => self.elements::<I32, C>(average),
            WireType::I64 => self.elements::<I64, C>(average),
            WireType::Int8 | WireType::Fixed32 => unreachable!("scaled types are folded in blocks"),
        }
    }

    fn elements<W: Wire, C: Combine>(self, average: bool) {
        self.level.run(elementwise::Run::<I, W, C> {
            inputs: self.inputs,
            out: &mut *self.out,
            divisor: average.then(|| W::Number::of_world(self.fold.world)),
            absent: self.fold.absent,
            combine: PhantomData,
        });
        if average {
            divide_integers(self.wire, self.out, self.fold.world);
        }
    }
}
