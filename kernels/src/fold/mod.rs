//! Folds of [`racksum_proto::arith`] in vector registers, at memory speed.
//!
//! [`fold_run`] takes the received contributions of a run of elements and writes their reduction.
//! It reads every byte once and allocates nothing. The result has exactly the bits of
//! [`racksum_proto::arith::fold_run`], at every [`Level`] and for every division of a window into
//! runs.

mod combine;
mod elementwise;
mod fixed32;
mod int8;
#[cfg(test)]
mod tests;

use std::marker::PhantomData;

use racksum_proto::arith::{self, ArithError, Fold, check_fold};
use racksum_proto::dtype::{Reduction, WireType};

use self::combine::{Add, Combine, Greatest, Least};
use self::elementwise::{Bf16, F16, F32, F64, I32, I64, Wire};
use crate::level::{self, Level};
use crate::number::Number;

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
    fold: Fold,
    inputs: &[&[u8]],
    out: &mut [u8],
) -> Result<(), ArithError> {
    Level::best().fold_run(wire, reduction, fold, inputs, out)
}

impl Level {
    /// Runs [`fold_run`] with the instructions of this level, to compare levels.
    ///
    /// # Errors
    ///
    /// The errors of [`check_fold`]. `out` is then unchanged.
    pub fn fold_run(
        self,
        wire: WireType,
        reduction: Reduction,
        fold: Fold,
        inputs: &[&[u8]],
        out: &mut [u8],
    ) -> Result<(), ArithError> {
        check_fold(wire, fold, inputs, out.len())?;
        if !wire.is_scaled() && out.len() < level::MIN_LEN {
            // The run is shorter than any vector: a few elements at the end of a fragment.
            return arith::fold_run(wire, reduction, fold, inputs, out);
        }
        let job = Job { level: self, wire, fold, inputs, out: &mut *out };
        match reduction {
            Reduction::Sum => job.run::<Add>(false),
            Reduction::Avg => job.run::<Add>(true),
            Reduction::Min => job.run::<Least>(false),
            Reduction::Max => job.run::<Greatest>(false),
        }
        if reduction == Reduction::Avg {
            divide_integers(wire, out, fold.world);
        }
        Ok(())
    }
}

/// Turns sums of integers into averages, because vectors cannot divide integers. Other sums are
/// divided during the fold.
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

/// Changes each element of `SIZE` bytes.
fn each<const SIZE: usize>(bytes: &mut [u8], change: impl Fn([u8; SIZE]) -> [u8; SIZE]) {
    for element in bytes.as_chunks_mut().0 {
        *element = change(*element);
    }
}

/// The checked arguments of a fold.
struct Job<'a> {
    level: Level,
    wire: WireType,
    fold: Fold,
    inputs: &'a [&'a [u8]],
    out: &'a mut [u8],
}

impl Job<'_> {
    fn run<C: Combine>(self, average: bool) {
        match self.wire {
            WireType::F32 => self.elementwise::<F32, C>(average),
            WireType::F64 => self.elementwise::<F64, C>(average),
            WireType::F16 => self.elementwise::<F16, C>(average),
            WireType::Bf16 => self.elementwise::<Bf16, C>(average),
            WireType::I32 => self.elementwise::<I32, C>(average),
            WireType::I64 => self.elementwise::<I64, C>(average),
            WireType::Int8 => self.level.run(int8::Run::<C> {
                inputs: self.inputs,
                out: self.out,
                divisor: average.then(|| f32::of_world(self.fold.world)),
                absent: self.fold.absent,
                combine: PhantomData,
            }),
            WireType::Fixed32 => self.level.run(fixed32::Run::<C> {
                inputs: self.inputs,
                out: self.out,
                divisor: average.then(|| f64::of_world(self.fold.world)),
                absent: self.fold.absent,
                combine: PhantomData,
            }),
        }
    }

    fn elementwise<W: Wire, C: Combine>(self, average: bool) {
        self.level.within(self.out.len()).run(elementwise::Run::<W, C> {
            inputs: self.inputs,
            out: self.out,
            divisor: average.then(|| W::Number::of_world(self.fold.world)),
            absent: self.fold.absent,
            combine: PhantomData,
        });
    }
}
