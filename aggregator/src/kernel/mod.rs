//! Folds at the speed of memory, bit-equal to [`racksum_proto::arith`].

mod elementwise;
mod level;
mod number;
mod simd;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::marker::PhantomData;

use racksum_proto::arith::{self, ArithError, Fold, check_fold};
use racksum_proto::dtype::{Reduction, WireType};

use self::elementwise::{Add, Bf16, Combine, F16, F32, F64, I32, I64, Maximum, Minimum, Run, Wire};
pub use self::level::Level;
use self::number::Number;

pub fn fold_run(
    wire: WireType,
    reduction: Reduction,
    fold: Fold,
    inputs: &[&[u8]],
    out: &mut [u8],
) -> Result<(), ArithError> {
    fold_run_at(Level::best(), wire, reduction, fold, inputs, out)
}

pub fn fold_run_at(
    level: Level,
    wire: WireType,
    reduction: Reduction,
    fold: Fold,
    inputs: &[&[u8]],
    out: &mut [u8],
) -> Result<(), ArithError> {
    check_fold(wire, reduction, fold, inputs, out.len())?;
    if out.len() < 16 {
        return arith::fold_run(wire, reduction, fold, inputs, out);
    }
    let level = level.within(out.len());
    match wire {
        WireType::F32 => fold_elements::<F32>(level, reduction, fold, inputs, out),
        WireType::F64 => fold_elements::<F64>(level, reduction, fold, inputs, out),
        WireType::F16 => fold_elements::<F16>(level, reduction, fold, inputs, out),
        WireType::Bf16 => fold_elements::<Bf16>(level, reduction, fold, inputs, out),
        WireType::I32 => fold_elements::<I32>(level, reduction, fold, inputs, out),
        WireType::I64 => fold_elements::<I64>(level, reduction, fold, inputs, out),
        WireType::Int8 => todo!(),
        WireType::Fixed32 => todo!(),
    }
    Ok(())
}

fn fold_elements<W: Wire>(
    level: Level,
    reduction: Reduction,
    fold: Fold,
    inputs: &[&[u8]],
    out: &mut [u8],
) {
    let divisor = (reduction == Reduction::Avg).then(|| W::Number::of_world(fold.world));
    match reduction {
        Reduction::Sum | Reduction::Avg => {
            run::<W, Add>(level, inputs, out, divisor, false);
        }
        Reduction::Min => run::<W, Minimum>(level, inputs, out, None, fold.absent),
        Reduction::Max => run::<W, Maximum>(level, inputs, out, None, fold.absent),
    }
}

fn run<W: Wire, C: Combine>(
    level: Level,
    inputs: &[&[u8]],
    out: &mut [u8],
    divisor: Option<W::Number>,
    absent: bool,
) {
    level.run(Run::<W, C> { inputs, out, divisor, absent, combine: PhantomData });
}
