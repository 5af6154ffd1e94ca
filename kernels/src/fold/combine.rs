//! Operations that combine two numbers: sum, minimum and maximum.

use crate::number::Number;
use crate::simd::Lanes;

/// Operation that combines two numbers.
pub(super) trait Combine {
    /// Whether an absent rank contributes a zero, which may change a minimum or maximum but not a
    /// sum.
    const COUNTS_ABSENT: bool;

    /// Combines two vectors.
    fn vectors<N, S: Lanes<N>>(simd: S, x: S::Vector, y: S::Vector) -> S::Vector;

    /// Combines two numbers.
    fn numbers<N: Number>(x: N, y: N) -> N;
}

/// Sum, which averages use too.
pub(super) struct Add;
/// Minimum.
pub(super) struct Least;
/// Maximum.
pub(super) struct Greatest;

macro_rules! combine {
    ($name:ident, $counts_absent:literal, $method:ident) => {
        impl Combine for $name {
            const COUNTS_ABSENT: bool = $counts_absent;

            #[inline(always)]
            fn vectors<N, S: Lanes<N>>(simd: S, x: S::Vector, y: S::Vector) -> S::Vector {
                simd.$method(x, y)
            }

            #[inline(always)]
            fn numbers<N: Number>(x: N, y: N) -> N {
                x.$method(y)
            }
        }
    };
}

combine!(Add, false, add);
combine!(Least, true, least);
combine!(Greatest, true, greatest);
