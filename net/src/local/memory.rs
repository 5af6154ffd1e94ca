//! Shared memory, which every process that has its descriptor can map.

#![expect(unsafe_code, reason = "memory is mapped, and others may write to it")]

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate,
    memfd_create,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Memory of fixed size that other processes may have mapped too.
#[derive(Debug)]
pub struct SharedMemory {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to no thread; its users agree on how to use the memory.
unsafe impl Send for SharedMemory {}
// SAFETY: the methods that give access to the bytes are unsafe, except `word`, which is atomic.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates zeroed memory. Returns it with the descriptor through which other processes map it.
    /// The mapping outlives the descriptor.
    ///
    /// # Errors
    /// Returns the kernel's error if there is not enough memory.
    pub fn new(len: usize) -> io::Result<(Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let descriptor = memfd_create("racksum", flags)?;
        ftruncate(&descriptor, len as u64)?;
        fcntl_add_seals(&descriptor, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Self::map(&descriptor, len)?, descriptor))
    }

    /// Maps the memory of a descriptor from another process.
    ///
    /// # Errors
    /// Returns the kernel's error, and `InvalidInput` if another process could take part of the
    /// memory away: reading that part would then kill this process.
    pub fn of(descriptor: &OwnedFd) -> io::Result<Self> {
        let sealed = fcntl_get_seals(descriptor).unwrap_or(SealFlags::empty());
        // Huge pages are rejected because the kernel may have none left when one is written to.
        let is_plain = fstatfs(descriptor)?.f_type == TMPFS;
        if !sealed.contains(SealFlags::SHRINK) || !is_plain {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "shared memory must be a memfd of plain pages, sealed against shrinking",
            ));
        }
        let len = usize::try_from(fstat(descriptor)?.st_size).unwrap_or(usize::MAX);
        Self::map(descriptor, len)
    }

    fn map(descriptor: &OwnedFd, len: usize) -> io::Result<Self> {
        if len == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "shared memory must not be empty",
            ));
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel picks a free address. The file is sealed, so the whole mapping stays
        // backed.
        let start =
            unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, descriptor, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// Returns the size in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "there are some")]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns the address in this process.
    #[must_use]
    pub const fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Reads four bytes at `at`, a multiple of four, as a number. Other processes may write to them
    /// meanwhile, so a later call may return another value.
    #[must_use]
    pub fn word(&self, at: usize) -> u32 {
        assert!(at.is_multiple_of(4) && at < self.len && self.len - at >= 4, "beyond the memory");
        // SAFETY: the four bytes lie within the mapping, which lives as long as `self` and starts
        // at a page. Atomics tolerate concurrent writes.
        unsafe { AtomicU32::from_ptr(self.start.as_ptr().add(at).cast()) }.load(Relaxed)
    }

    /// Returns a range of the bytes for reading.
    ///
    /// # Safety
    /// Nobody in this process may write to the range while the slice lives. Another process may do
    /// so only if nothing but the values of the bytes depends on it.
    #[must_use]
    pub unsafe fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len, "beyond the memory");
        // SAFETY: the range lies within the mapping, which lives as long as `self`. The caller
        // guarantees the rest.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(range.start), range.len()) }
    }

    /// Returns a range of the bytes for writing.
    ///
    /// # Safety
    /// The rules of [`bytes`](Self::bytes) apply, and nobody may read the range while the slice
    /// lives.
    #[must_use]
    #[expect(clippy::mut_from_ref, reason = "the caller ensures exclusive access")]
    pub unsafe fn bytes_mut(&self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len, "beyond the memory");
        // SAFETY: the range lies within the mapping, and the caller guarantees exclusive access.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(range.start), range.len()) }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: `map` made this mapping, and no borrow of it outlives `self`.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "a mapping can be undone");
    }
}

/// Magic number of the file system behind memfds with plain pages: `TMPFS_MAGIC`.
const TMPFS: rustix::fs::FsWord = 0x0102_1994;
