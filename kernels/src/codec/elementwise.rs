//! Conversion between a tensor's elements and an elementwise wire type: each element becomes the
//! nearest element of the other type.

use std::marker::PhantomData;

use super::element::Element;
use super::prefetch::{self, AHEAD};
use crate::level::Task;
use crate::simd::Simd;

/// Task that converts the `From` elements in `src` to the same number of `To` elements in `dst`.
pub(super) struct Convert<'a, From, To> {
    pub(super) src: &'a [u8],
    pub(super) dst: &'a mut [u8],
    pub(super) types: PhantomData<(From, To)>,
}

impl<From: Element, To: Element> Task for Convert<'_, From, To> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (src, src_rest) = From::elements(self.src).as_chunks::<STEP>();
        let (dst, dst_rest) = To::elements_mut(self.dst).as_chunks_mut::<STEP>();
        for (x, y) in src.iter().zip(dst) {
            // The wider side is the tensor. The wire side needs no hint, because it is in the
            // cache.
            if size_of::<From::Bytes>() > size_of::<To::Bytes>() {
                prefetch::to_read(x.as_ptr().cast(), size_of_val(x), AHEAD);
            } else {
                prefetch::to_write(y.as_ptr().cast(), size_of_val(y), AHEAD);
            }
            convert::<From, To>(x, y);
        }
        convert::<From, To>(src_rest, dst_rest);
    }
}

#[inline(always)]
fn convert<From: Element, To: Element>(src: &[From::Bytes], dst: &mut [To::Bytes]) {
    for (x, y) in src.iter().zip(dst) {
        *y = To::store(From::load(*x));
    }
}

/// Number of elements that one round of prefetch hints covers: several vectors, and several cache
/// lines of the tensor.
const STEP: usize = 64;
