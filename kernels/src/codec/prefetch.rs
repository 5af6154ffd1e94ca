//! Hints to the processor's cache.
//!
//! A tensor is larger than the cache, and the processor's own prefetcher stops at the end of each
//! page. A kernel that walks a tensor asks for what lies ahead of its place.
#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "prefetch instructions have no safe form; they touch no memory")
)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T0, _mm_prefetch};

/// Bytes of a line of cache.
pub(super) const LINE: usize = 64;

/// How far ahead of its place a kernel asks for memory, in bytes: at 10 GB/s it gets there in
/// 200 ns, which is about what a line takes to come.
pub(super) const AHEAD: usize = 2048;

/// Asks for as many lines as `run` has, `ahead` bytes behind it, which will be read.
#[inline(always)]
pub(super) fn to_read<T>(run: &[T], ahead: usize) {
    for offset in (0..size_of_val(run)).step_by(LINE) {
        line(run, ahead + offset);
    }
}

/// As [`to_read`], of lines that will be written.
#[inline(always)]
pub(super) fn to_write<T>(run: &[T], ahead: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..size_of_val(run)).step_by(LINE) {
        let at = run.as_ptr().cast::<i8>().wrapping_add(ahead + offset);
        // SAFETY: a prefetch is a hint: no address makes it fault.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(at) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (run, ahead);
}

/// Asks for the line `offset` bytes behind the start of `run`, which may lie outside of any
/// allocation.
#[inline(always)]
pub(super) fn line<T>(run: &[T], offset: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above.
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(run.as_ptr().cast::<i8>().wrapping_add(offset));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (run, offset);
}
