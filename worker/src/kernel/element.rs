//! Single elements without branches, so that loops over them become vectors.

/// An element of a floating-point tensor, and as such of an elementwise wire type.
pub(super) trait Element {
    /// Its bytes.
    type Bytes: Copy;

    /// The elements of a run.
    fn elements(run: &[u8]) -> &[Self::Bytes];

    /// The elements of a run to be written.
    fn elements_mut(run: &mut [u8]) -> &mut [Self::Bytes];

    /// The nearest f32: but for f64, exact.
    fn load(bytes: Self::Bytes) -> f32;

    /// The value; exact.
    fn load_wide(bytes: Self::Bytes) -> f64;

    /// The nearest element, and *the* quiet NaN for any NaN.
    fn store(x: f32) -> Self::Bytes;

    /// The nearest element, to a 16-bit one by way of f32, and *the* quiet NaN for any NaN.
    fn store_wide(x: f64) -> Self::Bytes;
}

/// Elements of f32.
pub(super) struct F32;
/// Elements of f64.
pub(super) struct F64;
/// Elements of f16.
pub(super) struct F16;
/// Elements of bf16.
pub(super) struct Bf16;

macro_rules! element {
    ($name:ident, $size:literal, $load:ident, $load_wide:ident, $store:ident, $store_wide:ident) => {
        impl Element for $name {
            type Bytes = [u8; $size];

            #[inline(always)]
            fn elements(run: &[u8]) -> &[[u8; $size]] {
                run.as_chunks().0
            }

            #[inline(always)]
            fn elements_mut(run: &mut [u8]) -> &mut [[u8; $size]] {
                run.as_chunks_mut().0
            }

            #[inline(always)]
            fn load(bytes: [u8; $size]) -> f32 {
                $load(bytes)
            }

            #[inline(always)]
            fn load_wide(bytes: [u8; $size]) -> f64 {
                $load_wide(bytes)
            }

            #[inline(always)]
            fn store(x: f32) -> [u8; $size] {
                $store(x)
            }

            #[inline(always)]
            fn store_wide(x: f64) -> [u8; $size] {
                $store_wide(x)
            }
        }
    };
}
