//! Prefetch hints for the processor's cache.
//!
//! A tensor is larger than the cache, and the processor's own prefetcher stops at the end of each
//! page. So a kernel that walks a tensor prefetches the memory ahead of its own position.
#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "prefetch instructions have no safe form; they touch no memory")
)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T0, _mm_prefetch};

use crate::copy::LINE;

/// Distance in bytes from a kernel's position to the memory that it prefetches. At 10 GB/s a kernel
/// covers this distance in 200 ns, which is about the time to load a cache line from memory.
pub(super) const AHEAD: usize = 2048;

/// Prefetches, for reading, the `len` bytes that begin `ahead` bytes after `start`.
#[inline(always)]
pub(super) fn to_read(start: *const u8, len: usize, ahead: usize) {
    for offset in (0..len).step_by(LINE) {
        line(start, ahead + offset);
    }
}

/// Prefetches, for writing, the `len` bytes that begin `ahead` bytes after `start`.
#[inline(always)]
pub(super) fn to_write(start: *const u8, len: usize, ahead: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..len).step_by(LINE) {
        let at = start.cast::<i8>().wrapping_add(ahead + offset);
        // SAFETY: a prefetch is only a hint, and no address makes it fault.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(at) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, len, ahead);
}

/// Prefetches, for reading, the line `offset` bytes after `start`. The line may lie outside of any
/// allocation.
#[inline(always)]
pub(super) fn line(start: *const u8, offset: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is only a hint, and no address makes it fault.
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(start.cast::<i8>().wrapping_add(offset));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, offset);
}
