//! Fold of elementwise wire types: one pass that reads every input once and keeps the sums in
//! registers.

use std::marker::PhantomData;

use super::combine::Combine;
use crate::level::Task;
use crate::number::Number;
use crate::simd::{Lanes, Simd};

/// Task that folds `inputs` to `out`, all of one length: whole elements of `W`, and at least one
/// vector of the level that runs it.
pub(super) struct Run<'a, W: Wire, C> {
    pub(super) inputs: &'a [&'a [u8]],
    pub(super) out: &'a mut [u8],
    /// The divisor for an average, applied at the end.
    pub(super) divisor: Option<W::Number>,
    /// Whether some rank is absent, so that a zero takes part in a minimum or maximum.
    pub(super) absent: bool,
    pub(super) combine: PhantomData<C>,
}

/// Wire type that is folded element by element.
pub(super) trait Wire {
    /// The number type in which elements are folded.
    type Number: Number;

    /// The numbers of one vector of elements.
    type Numbers<S: Simd>: Copy;

    /// Returns numbers that all equal `x`.
    fn splat<S: Simd>(simd: S, x: Self::Number) -> Self::Numbers<S>;

    /// Loads the numbers at the start of `bytes`, exactly.
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> Self::Numbers<S>;

    /// Writes the nearest elements, and the canonical quiet NaN for any NaN.
    fn store<S: Simd>(simd: S, x: Self::Numbers<S>, bytes: &mut [u8]);

    /// Combines two sets of numbers lane by lane.
    fn combine<S: Simd, C: Combine>(
        simd: S,
        x: Self::Numbers<S>,
        y: Self::Numbers<S>,
    ) -> Self::Numbers<S>;

    /// Divides numbers lane by lane.
    fn divide<S: Simd>(simd: S, x: Self::Numbers<S>, y: Self::Numbers<S>) -> Self::Numbers<S>;
}

impl<W: Wire, C: Combine> Task for Run<'_, W, C> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        if self.out.len() >= LONG * S::BYTES {
            self.spans::<S, LONG>(simd);
        } else {
            self.spans::<S, 1>(simd);
        }
    }
}

impl<W: Wire, C: Combine> Run<'_, W, C> {
    /// Folds `VECTORS` vectors at a time. The last span may overlap the one before it, because a
    /// result does not depend on its neighbours.
    #[inline(always)]
    fn spans<S: Simd, const VECTORS: usize>(mut self, simd: S) {
        let last = self.out.len() - VECTORS * S::BYTES;
        let mut at = 0;
        while at < last {
            self.span::<S, VECTORS>(simd, at);
            at += VECTORS * S::BYTES;
        }
        self.span::<S, VECTORS>(simd, last);
    }

    /// Folds `VECTORS` vectors from the byte `at` on.
    #[inline(always)]
    fn span<S: Simd, const VECTORS: usize>(&mut self, simd: S, at: usize) {
        // A closure would be compiled without the instructions of `simd`.
        let (first, rest) = self.inputs.split_first().expect("check_fold refuses no input");
        let first = &first[at..][..VECTORS * S::BYTES];
        let mut sums = [W::splat(simd, W::Number::ZERO); VECTORS];
        for v in 0..VECTORS {
            sums[v] = W::load(simd, &first[v * S::BYTES..]);
        }
        for input in rest {
            let input = &input[at..][..VECTORS * S::BYTES];
            for v in 0..VECTORS {
                let numbers = W::load(simd, &input[v * S::BYTES..]);
                sums[v] = W::combine::<S, C>(simd, sums[v], numbers);
            }
        }
        if let Some(divisor) = self.divisor {
            let divisor = W::splat(simd, divisor);
            for sum in &mut sums {
                *sum = W::divide(simd, *sum, divisor);
            }
        }
        if C::COUNTS_ABSENT && self.absent {
            let zero = W::splat(simd, W::Number::ZERO);
            for sum in &mut sums {
                *sum = W::combine::<S, C>(simd, *sum, zero);
            }
        }
        let out = &mut self.out[at..][..VECTORS * S::BYTES];
        for v in 0..VECTORS {
            W::store(simd, sums[v], &mut out[v * S::BYTES..]);
        }
    }
}

/// Implements [`Wire`] for elements that are folded in their own type.
macro_rules! whole {
    ($name:ident, $number:ident) => {
        /// Marker for this wire type.
        pub(super) struct $name;

        impl Wire for $name {
            type Number = $number;
            type Numbers<S: Simd> = <S as Lanes<$number>>::Vector;

            #[inline(always)]
            fn splat<S: Simd>(simd: S, x: $number) -> Self::Numbers<S> {
                simd.splat(x)
            }

            #[inline(always)]
            fn load<S: Simd>(simd: S, bytes: &[u8]) -> Self::Numbers<S> {
                Lanes::<$number>::load(simd, bytes)
            }

            #[inline(always)]
            fn store<S: Simd>(simd: S, x: Self::Numbers<S>, bytes: &mut [u8]) {
                let x = Lanes::<$number>::canonical(simd, x);
                Lanes::<$number>::store(simd, x, bytes);
            }

            #[inline(always)]
            fn combine<S: Simd, C: Combine>(
                simd: S,
                x: Self::Numbers<S>,
                y: Self::Numbers<S>,
            ) -> Self::Numbers<S> {
                C::vectors::<$number, S>(simd, x, y)
            }

            #[inline(always)]
            fn divide<S: Simd>(
                simd: S,
                x: Self::Numbers<S>,
                y: Self::Numbers<S>,
            ) -> Self::Numbers<S> {
                Lanes::<$number>::divide(simd, x, y)
            }
        }
    };
}

whole!(F32, f32);
whole!(F64, f64);
whole!(I32, i32);
whole!(I64, i64);

/// Implements [`Wire`] for 16-bit floats, which are folded in f32. One vector of them becomes two
/// vectors of f32.
macro_rules! half {
    ($name:ident, $load:ident, $store:ident) => {
        /// Marker for this wire type.
        pub(super) struct $name;

        impl Wire for $name {
            type Number = f32;
            type Numbers<S: Simd> = [<S as Lanes<f32>>::Vector; 2];

            #[inline(always)]
            fn splat<S: Simd>(simd: S, x: f32) -> Self::Numbers<S> {
                [simd.splat(x); 2]
            }

            #[inline(always)]
            fn load<S: Simd>(simd: S, bytes: &[u8]) -> Self::Numbers<S> {
                simd.$load(bytes)
            }

            #[inline(always)]
            fn store<S: Simd>(simd: S, x: Self::Numbers<S>, bytes: &mut [u8]) {
                simd.$store(x, bytes);
            }

            #[inline(always)]
            fn combine<S: Simd, C: Combine>(
                simd: S,
                x: Self::Numbers<S>,
                y: Self::Numbers<S>,
            ) -> Self::Numbers<S> {
                [C::vectors::<f32, S>(simd, x[0], y[0]), C::vectors::<f32, S>(simd, x[1], y[1])]
            }

            #[inline(always)]
            fn divide<S: Simd>(
                simd: S,
                x: Self::Numbers<S>,
                y: Self::Numbers<S>,
            ) -> Self::Numbers<S> {
                [Lanes::<f32>::divide(simd, x[0], y[0]), Lanes::<f32>::divide(simd, x[1], y[1])]
            }
        }
    };
}

half!(F16, load_f16, store_f16);
half!(Bf16, load_bf16, store_bf16);

/// Vectors folded at a time in a long run. They are enough for additions to overlap, and few enough
/// for 16 registers to hold the sums of 16-bit floats and the next operands.
const LONG: usize = 4;
