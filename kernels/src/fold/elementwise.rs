//! Fold of elementwise wire types: one pass over all inputs, with the sums in registers.
#![expect(unsafe_code, reason = "spans of inputs are checked once for a whole fold")]

use std::marker::PhantomData;

use super::combine::Combine;
use super::input::Input;
use crate::level::Task;
use crate::number::Number;
use crate::simd::{Lanes, SPAN, Simd};

/// Task that folds `inputs` into `out`. All of them have the same length, a whole number of
/// elements of `W`. Private inputs are at least as long as one vector of the level that runs the
/// task.
pub(super) struct Run<'a, I, W: Wire, C> {
    pub(super) inputs: &'a [I],
    pub(super) out: &'a mut [u8],
    /// The divisor for an average, applied at the end.
    pub(super) divisor: Option<W::Number>,
    /// Whether some rank is absent. If so, a zero takes part in a minimum or maximum.
    pub(super) absent: bool,
    pub(super) combine: PhantomData<C>,
}

/// Wire type that is folded element by element.
pub(super) trait Wire {
    /// The number type in which elements are folded.
    type Number: Number;

    /// Whether `load` converts each half of a vector separately.
    const BY_HALVES: bool = false;

    /// The numbers of one vector of elements.
    type Numbers<S: Simd>: Copy;

    /// Returns numbers that all equal `x`.
    fn splat<S: Simd>(simd: S, x: Self::Number) -> Self::Numbers<S>;

    /// Converts the elements at the start of `bytes` to numbers, exactly.
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> Self::Numbers<S>;

    /// Converts numbers to the nearest elements, replaces any NaN with the canonical quiet NaN, and
    /// writes the result to the start of `bytes`.
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

impl<I: Input, W: Wire, C: Combine> Task for Run<'_, I, W, C> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        if self.out.len() >= SPAN * S::BYTES {
            self.spans::<S, SPAN>(simd);
        } else if I::IS_PADDED {
            self.padded_span(simd);
        } else {
            self.spans::<S, 1>(simd);
        }
    }
}

impl<I: Input, W: Wire, C: Combine> Run<'_, I, W, C> {
    /// Folds `VECTORS` vectors at a time. The last span may overlap the span before it: an element
    /// that is folded twice gets the same result.
    #[inline(always)]
    fn spans<S: Simd, const VECTORS: usize>(mut self, simd: S) {
        for input in self.inputs {
            assert_eq!(input.len(), self.out.len(), "check_fold refuses other lengths");
        }
        let last = self.out.len() - VECTORS * S::BYTES;
        let mut at = 0;
        while at < last {
            // SAFETY: the inputs are as long as `out`, whose last span begins at `last`.
            unsafe { self.span::<S, VECTORS, false>(simd, at) };
            at += VECTORS * S::BYTES;
        }
        // SAFETY: the inputs are as long as `out`, whose last span begins at `last`.
        unsafe { self.span::<S, VECTORS, false>(simd, last) };
    }

    /// Pads fewer than [`SPAN`] vectors to a whole span, folds the span, and drops the sums of the
    /// padding.
    #[inline(always)]
    fn padded_span<S: Simd>(self, simd: S) {
        let Self { inputs, out, divisor, absent, combine } = self;
        let mut sums = simd.zero_span();
        let mut whole = Run::<I, W, C> { inputs, out: sums.as_mut(), divisor, absent, combine };
        // SAFETY: `PADDED` is true, so the inputs may be shorter than the span.
        unsafe { whole.span::<S, SPAN, true>(simd, 0) };
        out.copy_from_slice(&sums.as_ref()[..out.len()]);
    }

    /// Folds the `VECTORS` vectors that begin at byte `at`.
    ///
    /// # Safety
    ///
    /// Each input has these bytes, unless `PADDED` is true.
    #[inline(always)]
    unsafe fn span<S: Simd, const VECTORS: usize, const PADDED: bool>(
        &mut self,
        simd: S,
        at: usize,
    ) {
        // Use no closures here: a closure would be compiled without the instructions of `simd`.
        let (first, rest) = self.inputs.split_first().expect("check_fold refuses an empty fold");
        // SAFETY: the caller guarantees that the input has the bytes.
        let first = unsafe { first.span::<S, VECTORS, PADDED>(simd, at, W::BY_HALVES) };
        let mut sums = [W::splat(simd, W::Number::ZERO); VECTORS];
        for (v, sum) in sums.iter_mut().enumerate() {
            *sum = W::load(simd, &first.as_ref()[v * S::BYTES..]);
        }
        for input in rest {
            // SAFETY: the caller guarantees that the input has the bytes.
            let input = unsafe { input.span::<S, VECTORS, PADDED>(simd, at, W::BY_HALVES) };
            for (v, sum) in sums.iter_mut().enumerate() {
                let numbers = W::load(simd, &input.as_ref()[v * S::BYTES..]);
                *sum = W::combine::<S, C>(simd, *sum, numbers);
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
    ($name:ident, $load:ident, $store:ident, $by_halves:literal) => {
        /// Marker for this wire type.
        pub(super) struct $name;

        impl Wire for $name {
            type Number = f32;
            type Numbers<S: Simd> = [<S as Lanes<f32>>::Vector; 2];

            const BY_HALVES: bool = $by_halves;

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

half!(F16, load_f16, store_f16, true);
half!(Bf16, load_bf16, store_bf16, false);
