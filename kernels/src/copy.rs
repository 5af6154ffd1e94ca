//! Functions that copy from and to memory that another process may write. [`crate::shared`]
//! explains why they use inline assembly or volatile accesses.
#![expect(unsafe_code, reason = "copies by address")]

#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(crate) use self::assembly::{copy as between, copy as read, copy as write, line};
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(crate) use self::volatile::{between, line, read, write};

/// Size of a cache line in bytes.
pub(crate) const LINE: usize = 64;

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod assembly {
    use std::arch::asm;
    use std::arch::x86_64::__m128i;

    use super::LINE;

    /// Copies `len` bytes. Both ranges may be shared.
    ///
    /// # Safety
    ///
    /// The `len` bytes at `from` are readable, and the `len` bytes at `to` are writable. If the
    /// source is private, no other thread writes to it. If the target is private, no other thread
    /// accesses it.
    #[inline]
    pub(crate) unsafe fn copy(mut from: *const u8, mut to: *mut u8, mut len: usize) {
        // SAFETY: the copies below stay within the two ranges, which the caller guarantees to be
        // readable and writable.
        unsafe {
            if len < VECTOR {
                return string(from, to, len);
            }
            if len >= LONG && !is_slow(from, to) {
                // A string instruction is faster if its target is aligned, so copy the bytes before
                // the next line separately.
                line_to(from, to);
                let head = LINE - to.addr() % LINE;
                return string(from.add(head), to.add(head), len - head);
            }
            while len >= LINE {
                line_to(from, to);
                (from, to, len) = (from.add(LINE), to.add(LINE), len - LINE);
            }
            while len >= VECTOR {
                vector(from, to);
                (from, to, len) = (from.add(VECTOR), to.add(VECTOR), len - VECTOR);
            }
            // The last vector may overlap the one before it, or the last line.
            if len > 0 {
                let back = VECTOR - len;
                vector(from.sub(back), to.sub(back));
            }
        }
    }

    /// Returns whether a string instruction may be slow. On AMD's Zen 4, it takes up to eight times
    /// as long if the target begins less than 32 bytes after the source, modulo a page. The check
    /// has a margin: it covers distances of 1 to 63 bytes.
    fn is_slow(from: *const u8, to: *mut u8) -> bool {
        (1..LINE).contains(&(to.addr().wrapping_sub(from.addr()) % PAGE))
    }

    /// Returns a copy of the line at `start` plus `at`.
    ///
    /// # Safety
    ///
    /// The bytes of the line can be read.
    #[inline]
    pub(crate) unsafe fn line(start: *const u8, at: usize) -> [u8; LINE] {
        let (a, b, c, d): (__m128i, __m128i, __m128i, __m128i);
        // SAFETY: the caller guarantees that the line can be read, and the instructions need no
        // alignment. Any bytes are a valid array.
        unsafe {
            asm!(
                "movups {a}, [{start} + {at}]",
                "movups {b}, [{start} + {at} + 16]",
                "movups {c}, [{start} + {at} + 32]",
                "movups {d}, [{start} + {at} + 48]",
                a = out(xmm_reg) a,
                b = out(xmm_reg) b,
                c = out(xmm_reg) c,
                d = lateout(xmm_reg) d,
                start = in(reg) start,
                at = in(reg) at,
                options(nostack, preserves_flags, readonly),
            );
            std::mem::transmute([a, b, c, d])
        }
    }

    /// Copies one line.
    ///
    /// # Safety
    ///
    /// The requirements of [`copy`], for [`LINE`] bytes.
    #[inline]
    unsafe fn line_to(from: *const u8, to: *mut u8) {
        // SAFETY: the caller guarantees that a line can be read at `from` and written at `to`. The
        // instructions need no alignment.
        unsafe {
            asm!(
                "movups {a}, [{from}]",
                "movups {b}, [{from} + 16]",
                "movups {c}, [{from} + 32]",
                "movups {d}, [{from} + 48]",
                "movups [{to}], {a}",
                "movups [{to} + 16], {b}",
                "movups [{to} + 32], {c}",
                "movups [{to} + 48], {d}",
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                c = out(xmm_reg) _,
                d = out(xmm_reg) _,
                from = in(reg) from,
                to = in(reg) to,
                options(nostack, preserves_flags),
            );
        }
    }

    /// Copies one vector.
    ///
    /// # Safety
    ///
    /// The requirements of [`copy`], for [`VECTOR`] bytes.
    #[inline]
    unsafe fn vector(from: *const u8, to: *mut u8) {
        // SAFETY: the caller guarantees that a vector can be read at `from` and written at `to`.
        // The instructions need no alignment.
        unsafe {
            asm!(
                "movups {vector}, [{from}]",
                "movups [{to}], {vector}",
                vector = out(xmm_reg) _,
                from = in(reg) from,
                to = in(reg) to,
                options(nostack, preserves_flags),
            );
        }
    }

    /// Copies any number of bytes with a string instruction, which makes large copies as fast as
    /// the cache or the memory allows.
    ///
    /// # Safety
    ///
    /// The requirements of [`copy`].
    #[inline]
    unsafe fn string(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: the caller guarantees that `len` bytes can be read at `from` and written at `to`.
        // The direction flag is clear on entry to assembly.
        unsafe {
            asm!(
                "rep movsb",
                inout("rsi") from => _,
                inout("rdi") to => _,
                inout("rcx") len => _,
                options(nostack, preserves_flags),
            );
        }
    }

    /// Size in bytes of the vectors that every x86-64 processor has.
    const VECTOR: usize = 16;

    /// Shortest length in bytes at which a string instruction is faster than vectors.
    const LONG: usize = 1024;

    /// Size of a page in bytes.
    const PAGE: usize = 4096;
}

#[cfg(any(test, not(all(target_arch = "x86_64", not(miri)))))]
pub(crate) mod volatile {
    use super::LINE;

    /// Copies `len` bytes of shared memory to private memory.
    ///
    /// # Safety
    ///
    /// The `len` bytes at `from` are readable, and the `len` bytes at `to` are writable. The target
    /// is private: no other thread accesses it.
    pub(crate) unsafe fn read(from: *const u8, to: *mut u8, len: usize) {
        let head = from.align_offset(WORD).min(len);
        let end = head + (len - head) / WORD * WORD;
        // SAFETY: the caller guarantees that `len` bytes can be read at `from` and written at `to`.
        // All accesses stay within these bytes, and the words are aligned in the source.
        unsafe {
            for at in (0..head).chain(end..len) {
                to.add(at).write(from.add(at).read_volatile());
            }
            for at in (head..end).step_by(WORD) {
                let word = from.add(at).cast::<usize>().read_volatile();
                to.add(at).cast::<usize>().write_unaligned(word);
            }
        }
    }

    /// Copies `len` bytes of private memory to shared memory.
    ///
    /// # Safety
    ///
    /// The `len` bytes at `from` are readable, and the `len` bytes at `to` are writable. The source
    /// is private: no other thread writes to it.
    pub(crate) unsafe fn write(from: *const u8, to: *mut u8, len: usize) {
        let head = to.align_offset(WORD).min(len);
        let end = head + (len - head) / WORD * WORD;
        // SAFETY: the caller guarantees that `len` bytes can be read at `from` and written at `to`.
        // All accesses stay within these bytes, and the words are aligned in the target.
        unsafe {
            for at in (0..head).chain(end..len) {
                to.add(at).write_volatile(from.add(at).read());
            }
            for at in (head..end).step_by(WORD) {
                let word = from.add(at).cast::<usize>().read_unaligned();
                to.add(at).cast::<usize>().write_volatile(word);
            }
        }
    }

    /// Copies `len` bytes of shared memory to shared memory.
    ///
    /// # Safety
    ///
    /// The `len` bytes at `from` are readable, and the `len` bytes at `to` are writable.
    pub(crate) unsafe fn between(from: *const u8, to: *mut u8, len: usize) {
        let mut buffer = [0; BUFFER];
        for at in (0..len).step_by(BUFFER) {
            let part = BUFFER.min(len - at);
            // SAFETY: the caller guarantees that the source can be read and the target written. The
            // part lies within both, and the buffer is private.
            unsafe {
                read(from.add(at), buffer.as_mut_ptr(), part);
                write(buffer.as_ptr(), to.add(at), part);
            }
        }
    }

    /// Returns a copy of the line at `start` plus `at`.
    ///
    /// # Safety
    ///
    /// The bytes of the line can be read.
    pub(crate) unsafe fn line(start: *const u8, at: usize) -> [u8; LINE] {
        let mut line = [0; LINE];
        // SAFETY: the caller guarantees that the bytes can be read. The copy is private.
        unsafe { read(start.add(at), line.as_mut_ptr(), LINE) };
        line
    }

    /// Size in bytes of a word, the most that one access reads or writes.
    const WORD: usize = size_of::<usize>();

    /// Size in bytes of the private buffer for a copy between two ranges of shared memory.
    const BUFFER: usize = 4 << 10;
}
