//! Elementwise wire types: the nearest element of the other type.

use std::marker::PhantomData;

use super::element::Element;
use super::level::Task;

/// A conversion of the run `src` of elements of `From` to as many of `To`.
pub(super) struct Convert<'a, From, To> {
    pub(super) src: &'a [u8],
    pub(super) dst: &'a mut [u8],
    pub(super) types: PhantomData<(From, To)>,
}

impl<From: Element, To: Element> Task for Convert<'_, From, To> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (x, y) in From::elements(self.src).iter().zip(To::elements_mut(self.dst)) {
            *y = To::store(From::load(*x));
        }
    }
}
