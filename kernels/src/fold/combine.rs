//! The three ways in which two numbers become one.

use crate::number::Number;
use crate::simd::Lanes;

/// How two numbers become one.
pub(super) trait Combine {
    /// Whether an absent rank's zero takes part.
    const COUNTS_ABSENT: bool;

    /// Combines two vectors.
    fn vectors<N, S: Lanes<N>>(simd: S, x: S::Vector, y: S::Vector) -> S::Vector;

    /// Combines two numbers.
    fn numbers<N: Number>(x: N, y: N) -> N;
}

/// Sums, also those to be averaged.
pub(super) struct Add;
/// Least values.
pub(super) struct Least;
/// Greatest values.
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
