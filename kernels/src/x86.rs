//! Vectors of x86-64: 256 bits with AVX2, 512 bits with AVX-512.
//!
//! The methods are safe because their receiver proves that the machine has the instructions. Only
//! [`Avx2::assume`] and [`Avx512::assume`] are unsafe, because they create the proof.
#![expect(unsafe_code, reason = "vendor intrinsics")]

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::transmute;

use crate::copy::LINE;
use crate::simd::{Halves, Lanes, Simd};

/// Proof that the machine has AVX2 and F16C.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

/// Proof that the machine has the F, BW, DQ and VL parts of AVX-512.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx2 {
    /// Creates the proof.
    ///
    /// # Safety
    ///
    /// The machine must have AVX2 and F16C.
    pub(crate) unsafe fn assume() -> Self {
        Self(())
    }
}

impl Avx512 {
    /// Creates the proof.
    ///
    /// # Safety
    ///
    /// The machine must have AVX-512 F, BW, DQ and VL.
    pub(crate) unsafe fn assume() -> Self {
        Self(())
    }
}

impl Simd for Avx2 {
    const BYTES: usize = 32;

    type Span = [u8; 128];

    #[inline(always)]
    fn zero_span(self) -> Self::Span {
        [0; 128]
    }

    #[inline(always)]
    unsafe fn copy_span(self, start: *const u8, at: usize) -> Self::Span {
        // SAFETY: `self` proves that the machine has the instructions, and the caller guarantees
        // that the span can be read. Any bytes are a valid array.
        unsafe { transmute(copy_4_of_256(start, at)) }
    }

    #[inline(always)]
    unsafe fn copy_span_by_halves(self, start: *const u8, at: usize) -> Self::Span {
        // SAFETY: as for `copy_span`.
        unsafe { transmute(copy_8_of_128(start, at)) }
    }

    #[inline(always)]
    unsafe fn copy_line(self, start: *const u8, at: usize) -> [u8; LINE] {
        // SAFETY: `self` proves that the machine has the instructions, and the caller guarantees
        // that the line can be read. Any bytes are a valid array.
        unsafe { transmute(copy_2_of_256(start, at)) }
    }
}

impl Simd for Avx512 {
    const BYTES: usize = 64;

    type Span = [u8; 256];

    #[inline(always)]
    fn zero_span(self) -> Self::Span {
        [0; 256]
    }

    #[inline(always)]
    unsafe fn copy_span(self, start: *const u8, at: usize) -> Self::Span {
        // SAFETY: `self` proves that the machine has the instructions, and the caller guarantees
        // that the span can be read. Any bytes are a valid array.
        unsafe { transmute(copy_4_of_512(start, at)) }
    }

    #[inline(always)]
    unsafe fn copy_span_by_halves(self, start: *const u8, at: usize) -> Self::Span {
        // SAFETY: as for `copy_span`.
        unsafe { transmute(copy_8_of_256(start, at)) }
    }

    #[inline(always)]
    unsafe fn copy_line(self, start: *const u8, at: usize) -> [u8; LINE] {
        // SAFETY: `self` proves that the machine has the instructions, and the caller guarantees
        // that the line can be read. Any bytes are a valid array.
        unsafe { transmute(copy_1_of_512(start, at)) }
    }
}

/// Defines a function that returns a copy of consecutive vectors, at `start` plus `at`. The caller
/// of the function guarantees that the bytes can be read. Another process may write them during the
/// copy.
macro_rules! copy_vectors {
    (
        $name:ident, $feature:literal, $vector:ident, $count:literal, $class:ident,
        $($out:ident: $load:literal),+
    ) => {
        #[inline]
        #[target_feature(enable = $feature)]
        unsafe fn $name(start: *const u8, at: usize) -> [$vector; $count] {
            $(let $out: $vector;)+
            // SAFETY: the caller guarantees that the bytes of the vectors can be read, and the
            // instructions need no alignment.
            unsafe {
                asm!(
                    $($load,)+
                    $($out = out($class) $out,)+
                    start = in(reg) start,
                    at = in(reg) at,
                    options(nostack, preserves_flags, readonly),
                );
            }
            [$($out),+]
        }
    };
}

copy_vectors!(
    copy_4_of_512, "avx512f", __m512i, 4, zmm_reg,
    a: "vmovdqu64 {a}, [{start} + {at}]",
    b: "vmovdqu64 {b}, [{start} + {at} + 64]",
    c: "vmovdqu64 {c}, [{start} + {at} + 128]",
    d: "vmovdqu64 {d}, [{start} + {at} + 192]"
);
copy_vectors!(
    copy_1_of_512, "avx512f", __m512i, 1, zmm_reg,
    a: "vmovdqu64 {a}, [{start} + {at}]"
);
copy_vectors!(
    copy_4_of_256, "avx2", __m256i, 4, ymm_reg,
    a: "vmovdqu {a}, [{start} + {at}]",
    b: "vmovdqu {b}, [{start} + {at} + 32]",
    c: "vmovdqu {c}, [{start} + {at} + 64]",
    d: "vmovdqu {d}, [{start} + {at} + 96]"
);
copy_vectors!(
    copy_2_of_256, "avx2", __m256i, 2, ymm_reg,
    a: "vmovdqu {a}, [{start} + {at}]",
    b: "vmovdqu {b}, [{start} + {at} + 32]"
);
copy_vectors!(
    copy_8_of_256, "avx2", __m256i, 8, ymm_reg,
    a: "vmovdqu {a}, [{start} + {at}]",
    b: "vmovdqu {b}, [{start} + {at} + 32]",
    c: "vmovdqu {c}, [{start} + {at} + 64]",
    d: "vmovdqu {d}, [{start} + {at} + 96]",
    e: "vmovdqu {e}, [{start} + {at} + 128]",
    f: "vmovdqu {f}, [{start} + {at} + 160]",
    g: "vmovdqu {g}, [{start} + {at} + 192]",
    h: "vmovdqu {h}, [{start} + {at} + 224]"
);
copy_vectors!(
    copy_8_of_128, "avx2", __m128i, 8, xmm_reg,
    a: "vmovdqu {a}, [{start} + {at}]",
    b: "vmovdqu {b}, [{start} + {at} + 16]",
    c: "vmovdqu {c}, [{start} + {at} + 32]",
    d: "vmovdqu {d}, [{start} + {at} + 48]",
    e: "vmovdqu {e}, [{start} + {at} + 64]",
    f: "vmovdqu {f}, [{start} + {at} + 80]",
    g: "vmovdqu {g}, [{start} + {at} + 96]",
    h: "vmovdqu {h}, [{start} + {at} + 112]"
);

/// Implements [`Lanes`]. The arguments that look like closures are not closures: a closure would be
/// compiled without AVX2 or AVX-512, and might then not be inlined.
macro_rules! lanes {
    (
        $simd:ident, $number:ident, $vector:ident,
        splat: $splat:ident,
        load: $load:ident,
        store: $store:ident,
        add: $add:ident,
        least: |$lx:ident, $ly:ident| $least:expr,
        greatest: |$gx:ident, $gy:ident| $greatest:expr,
        $(
            divide: $divide:ident,
            canonical: |$cx:ident| $canonical:expr,
        )?
    ) => {
        impl Lanes<$number> for $simd {
            type Vector = $vector;

            #[inline(always)]
            fn splat(self, x: $number) -> $vector {
                // SAFETY: `self` proves that the machine has the instructions.
                unsafe { $splat(x) }
            }

            #[inline(always)]
            fn load(self, bytes: &[u8]) -> $vector {
                let bytes = &bytes[..Self::BYTES];
                // SAFETY: `self` proves that the machine has the instructions; the slice is as long
                // as the vector, and the load needs no alignment.
                unsafe { $load(bytes.as_ptr().cast()) }
            }

            #[inline(always)]
            fn store(self, x: $vector, bytes: &mut [u8]) {
                let bytes = &mut bytes[..Self::BYTES];
                // SAFETY: `self` proves that the machine has the instructions; the slice is as long
                // as the vector, and the store needs no alignment.
                unsafe { $store(bytes.as_mut_ptr().cast(), x) }
            }

            #[inline(always)]
            fn add(self, x: $vector, y: $vector) -> $vector {
                // SAFETY: `self` proves that the machine has the instructions.
                unsafe { $add(x, y) }
            }

            #[inline(always)]
            fn least(self, $lx: $vector, $ly: $vector) -> $vector {
                // SAFETY: `self` proves that the machine has the instructions.
                unsafe { $least }
            }

            #[inline(always)]
            fn greatest(self, $gx: $vector, $gy: $vector) -> $vector {
                // SAFETY: `self` proves that the machine has the instructions.
                unsafe { $greatest }
            }

            $(
                #[inline(always)]
                fn divide(self, x: $vector, y: $vector) -> $vector {
                    // SAFETY: `self` proves that the machine has the instructions.
                    unsafe { $divide(x, y) }
                }

                #[inline(always)]
                fn canonical(self, $cx: $vector) -> $vector {
                    // SAFETY: `self` proves that the machine has the instructions.
                    unsafe { $canonical }
                }
            )?
        }
    };
}

// If either operand is a NaN or both are zeros, the minimum and maximum instructions return their
// second operand. So the code executes the instruction with the operands in both orders. For the
// minimum, the OR of both results keeps a NaN, or the sign of a negative zero. For the maximum, the
// AND keeps a positive zero, and a NaN is inserted separately.

lanes!(
    Avx512, f32, __m512,
    splat: _mm512_set1_ps,
    load: _mm512_loadu_ps,
    store: _mm512_storeu_ps,
    add: _mm512_add_ps,
    least: |x, y| _mm512_or_ps(_mm512_min_ps(x, y), _mm512_min_ps(y, x)),
    greatest: |x, y| {
        let greater = _mm512_and_ps(_mm512_max_ps(x, y), _mm512_max_ps(y, x));
        let unordered = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, y);
        _mm512_mask_mov_ps(greater, unordered, _mm512_set1_ps(f32::NAN))
    },
    divide: _mm512_div_ps,
    canonical: |x| {
        let nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc0_0000));
        _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), nan)
    },
);
lanes!(
    Avx512, f64, __m512d,
    splat: _mm512_set1_pd,
    load: _mm512_loadu_pd,
    store: _mm512_storeu_pd,
    add: _mm512_add_pd,
    least: |x, y| _mm512_or_pd(_mm512_min_pd(x, y), _mm512_min_pd(y, x)),
    greatest: |x, y| {
        let greater = _mm512_and_pd(_mm512_max_pd(x, y), _mm512_max_pd(y, x));
        let unordered = _mm512_cmp_pd_mask::<_CMP_UNORD_Q>(x, y);
        _mm512_mask_mov_pd(greater, unordered, _mm512_set1_pd(f64::NAN))
    },
    divide: _mm512_div_pd,
    canonical: |x| {
        let nan = _mm512_castsi512_pd(_mm512_set1_epi64(0x7ff8_0000_0000_0000));
        _mm512_mask_mov_pd(x, _mm512_cmp_pd_mask::<_CMP_UNORD_Q>(x, x), nan)
    },
);
lanes!(
    Avx512, i32, __m512i,
    splat: _mm512_set1_epi32,
    load: _mm512_loadu_epi32,
    store: _mm512_storeu_epi32,
    add: _mm512_add_epi32,
    least: |x, y| _mm512_min_epi32(x, y),
    greatest: |x, y| _mm512_max_epi32(x, y),
);
lanes!(
    Avx512, i64, __m512i,
    splat: _mm512_set1_epi64,
    load: _mm512_loadu_epi64,
    store: _mm512_storeu_epi64,
    add: _mm512_add_epi64,
    least: |x, y| _mm512_min_epi64(x, y),
    greatest: |x, y| _mm512_max_epi64(x, y),
);
lanes!(
    Avx2, f32, __m256,
    splat: _mm256_set1_ps,
    load: _mm256_loadu_ps,
    store: _mm256_storeu_ps,
    add: _mm256_add_ps,
    least: |x, y| _mm256_or_ps(_mm256_min_ps(x, y), _mm256_min_ps(y, x)),
    greatest: |x, y| {
        let greater = _mm256_and_ps(_mm256_max_ps(x, y), _mm256_max_ps(y, x));
        // A value with all bits set is also a NaN.
        _mm256_or_ps(greater, _mm256_cmp_ps::<_CMP_UNORD_Q>(x, y))
    },
    divide: _mm256_div_ps,
    canonical: |x| {
        let nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc0_0000));
        _mm256_blendv_ps(x, nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x))
    },
);
lanes!(
    Avx2, f64, __m256d,
    splat: _mm256_set1_pd,
    load: _mm256_loadu_pd,
    store: _mm256_storeu_pd,
    add: _mm256_add_pd,
    least: |x, y| _mm256_or_pd(_mm256_min_pd(x, y), _mm256_min_pd(y, x)),
    greatest: |x, y| {
        let greater = _mm256_and_pd(_mm256_max_pd(x, y), _mm256_max_pd(y, x));
        // A value with all bits set is also a NaN.
        _mm256_or_pd(greater, _mm256_cmp_pd::<_CMP_UNORD_Q>(x, y))
    },
    divide: _mm256_div_pd,
    canonical: |x| {
        let nan = _mm256_castsi256_pd(_mm256_set1_epi64x(0x7ff8_0000_0000_0000));
        _mm256_blendv_pd(x, nan, _mm256_cmp_pd::<_CMP_UNORD_Q>(x, x))
    },
);
lanes!(
    Avx2, i32, __m256i,
    splat: _mm256_set1_epi32,
    load: _mm256_loadu_si256,
    store: _mm256_storeu_si256,
    add: _mm256_add_epi32,
    least: |x, y| _mm256_min_epi32(x, y),
    greatest: |x, y| _mm256_max_epi32(x, y),
);
lanes!(
    Avx2, i64, __m256i,
    splat: _mm256_set1_epi64x,
    load: _mm256_loadu_si256,
    store: _mm256_storeu_si256,
    add: _mm256_add_epi64,
    least: |x, y| _mm256_blendv_epi8(x, y, _mm256_cmpgt_epi64(x, y)),
    greatest: |x, y| _mm256_blendv_epi8(y, x, _mm256_cmpgt_epi64(x, y)),
);

impl Halves for Avx512 {
    #[inline(always)]
    fn load_f16(self, bytes: &[u8]) -> [__m512; 2] {
        let (low, high) = bytes[..Self::BYTES].split_at(Self::BYTES / 2);
        // SAFETY: `self` proves that the machine has the instructions; each half is as long as
        // the load, which needs no alignment.
        unsafe {
            let low = _mm512_cvtph_ps(_mm256_loadu_si256(low.as_ptr().cast()));
            let high = _mm512_cvtph_ps(_mm256_loadu_si256(high.as_ptr().cast()));
            [low, high]
        }
    }

    #[inline(always)]
    fn store_f16(self, [low, high]: [__m512; 2], bytes: &mut [u8]) {
        // The conversion turns the quiet NaN of f32 into the quiet NaN of f16.
        let low = Lanes::<f32>::canonical(self, low);
        let high = Lanes::<f32>::canonical(self, high);
        let (low_bytes, high_bytes) = bytes[..Self::BYTES].split_at_mut(Self::BYTES / 2);
        // SAFETY: `self` proves that the machine has the instructions; each half is as long as the
        // store, which needs no alignment.
        unsafe {
            let low = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low);
            let high = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high);
            _mm256_storeu_si256(low_bytes.as_mut_ptr().cast(), low);
            _mm256_storeu_si256(high_bytes.as_mut_ptr().cast(), high);
        }
    }

    #[inline(always)]
    fn load_bf16(self, bytes: &[u8]) -> [__m512; 2] {
        let words = Lanes::<i32>::load(self, bytes);
        // SAFETY: `self` proves that the machine has the instructions.
        unsafe {
            let even = _mm512_slli_epi32::<16>(words);
            let odd = _mm512_and_si512(words, _mm512_set1_epi32(HIGH));
            [_mm512_castsi512_ps(even), _mm512_castsi512_ps(odd)]
        }
    }

    #[inline(always)]
    fn store_bf16(self, [even, odd]: [__m512; 2], bytes: &mut [u8]) {
        let even = self.round_bf16(even);
        let odd = self.round_bf16(odd);
        // SAFETY: `self` proves that the machine has the instructions.
        let words = unsafe {
            let odd = _mm512_and_si512(odd, _mm512_set1_epi32(HIGH));
            _mm512_or_si512(_mm512_srli_epi32::<16>(even), odd)
        };
        Lanes::<i32>::store(self, words, bytes);
    }
}

impl Avx512 {
    /// Rounds each lane to bf16 like `f32_to_bf16`, and leaves the result in the upper half of the
    /// lane. The lower half is arbitrary.
    #[inline(always)]
    fn round_bf16(self, x: __m512) -> __m512i {
        // SAFETY: `self` proves that the machine has the instructions.
        unsafe {
            let bits = _mm512_castps_si512(x);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_add_epi32(bits, half);
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0_0000))
        }
    }
}

impl Halves for Avx2 {
    #[inline(always)]
    fn load_f16(self, bytes: &[u8]) -> [__m256; 2] {
        let (low, high) = bytes[..Self::BYTES].split_at(Self::BYTES / 2);
        // SAFETY: `self` proves that the machine has the instructions; each half is as long as
        // the load, which needs no alignment.
        unsafe {
            let low = _mm256_cvtph_ps(_mm_loadu_si128(low.as_ptr().cast()));
            let high = _mm256_cvtph_ps(_mm_loadu_si128(high.as_ptr().cast()));
            [low, high]
        }
    }

    #[inline(always)]
    fn store_f16(self, [low, high]: [__m256; 2], bytes: &mut [u8]) {
        // The conversion turns the quiet NaN of f32 into the quiet NaN of f16.
        let low = Lanes::<f32>::canonical(self, low);
        let high = Lanes::<f32>::canonical(self, high);
        let (low_bytes, high_bytes) = bytes[..Self::BYTES].split_at_mut(Self::BYTES / 2);
        // SAFETY: `self` proves that the machine has the instructions; each half is as long as the
        // store, which needs no alignment.
        unsafe {
            let low = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low);
            let high = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high);
            _mm_storeu_si128(low_bytes.as_mut_ptr().cast(), low);
            _mm_storeu_si128(high_bytes.as_mut_ptr().cast(), high);
        }
    }

    #[inline(always)]
    fn load_bf16(self, bytes: &[u8]) -> [__m256; 2] {
        let words = Lanes::<i32>::load(self, bytes);
        // SAFETY: `self` proves that the machine has the instructions.
        unsafe {
            let even = _mm256_slli_epi32::<16>(words);
            let odd = _mm256_and_si256(words, _mm256_set1_epi32(HIGH));
            [_mm256_castsi256_ps(even), _mm256_castsi256_ps(odd)]
        }
    }

    #[inline(always)]
    fn store_bf16(self, [even, odd]: [__m256; 2], bytes: &mut [u8]) {
        let even = self.round_bf16(even);
        let odd = self.round_bf16(odd);
        // SAFETY: `self` proves that the machine has the instructions.
        let words = unsafe {
            let odd = _mm256_and_si256(odd, _mm256_set1_epi32(HIGH));
            _mm256_or_si256(_mm256_srli_epi32::<16>(even), odd)
        };
        Lanes::<i32>::store(self, words, bytes);
    }
}

impl Avx2 {
    /// Rounds each lane to bf16 like `f32_to_bf16`, and leaves the result in the upper half of the
    /// lane. The lower half is arbitrary.
    #[inline(always)]
    fn round_bf16(self, x: __m256) -> __m256i {
        // SAFETY: `self` proves that the machine has the instructions.
        unsafe {
            let bits = _mm256_castps_si256(x);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
            let rounded = _mm256_add_epi32(bits, half);
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
            _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0_0000), nan)
        }
    }
}

/// Mask of the upper half of a 32-bit lane.
const HIGH: i32 = -0x1_0000;
