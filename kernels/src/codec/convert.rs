//! Elementwise wire types: conversion to the nearest element of the other type.

use std::marker::PhantomData;

use super::element::Element;
use super::prefetch::{self, AHEAD};
use crate::level::Task;
use crate::simd::Simd;

/// Task that converts the run `src` of `From` elements to as many `To` elements.
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
                prefetch::to_read(x, AHEAD);
            } else {
                prefetch::to_write(y, AHEAD);
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

/// Elements between prefetch hints: a few vectors, and at least one cache line.
const STEP: usize = 64;
