//! Memory that processes share: whoever has its descriptor maps it.

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

/// Memory that other processes may have mapped too. Its size never changes.
#[derive(Debug)]
pub struct SharedMemory {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: it is memory like any other; what it is used for is its users' to agree on.
unsafe impl Send for SharedMemory {}
// SAFETY: as above: `bytes` and `bytes_mut` are unsafe.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// New memory, of zeros, and the descriptor by which others have it too. It stays when that is
    /// closed.
    ///
    /// # Errors
    /// The kernel's, when there is not so much.
    pub fn new(len: usize) -> io::Result<(Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let descriptor = memfd_create("racksum", flags)?;
        ftruncate(&descriptor, len as u64)?;
        fcntl_add_seals(&descriptor, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Self::map(&descriptor, len)?, descriptor))
    }

    /// The memory that a descriptor from another process is of.
    ///
    /// # Errors
    /// The kernel's; `InvalidInput` when some of it could go, which
    /// would end this process as it reads what is no more.
    pub fn of(descriptor: &OwnedFd) -> io::Result<Self> {
        let sealed = fcntl_get_seals(descriptor).unwrap_or(SealFlags::empty());
        // Of huge pages there may be none when one is written to.
        let is_plain = fstatfs(descriptor)?.f_type == TMPFS;
        if !sealed.contains(SealFlags::SHRINK) || !is_plain {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "memory that is shared is a memfd of plain pages, sealed against shrinking",
            ));
        }
        let len = usize::try_from(fstat(descriptor)?.st_size).unwrap_or(usize::MAX);
        Self::map(descriptor, len)
    }

    fn map(descriptor: &OwnedFd, len: usize) -> io::Result<Self> {
        if len == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "memory has some bytes"));
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel picks the place, where nothing is; the file is sealed, so that all of
        // it stays there.
        let start =
            unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, descriptor, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// How many bytes there are.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "there are some")]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Where it lies in this process.
    #[must_use]
    pub const fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Four of the bytes as a number, from a multiple of four on. Others may write to them: what is
    /// read is one of what they were, and may be another the next time.
    #[must_use]
    pub fn word(&self, at: usize) -> u32 {
        assert!(at.is_multiple_of(4) && at < self.len && self.len - at >= 4, "beyond the memory");
        // SAFETY: within the mapping, which is there as long as `self` and begins with a page;
        // atomics may be written to by anybody.
        unsafe { AtomicU32::from_ptr(self.start.as_ptr().add(at).cast()) }.load(Relaxed)
    }

    /// Some of the bytes, to be read.
    ///
    /// # Safety
    /// Nobody writes to them meanwhile, in this process or, as far as anything but their values
    /// depends on it, in another.
    #[must_use]
    pub unsafe fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len, "beyond the memory");
        // SAFETY: within the mapping, which is there as long as `self`; the rest is the caller's.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(range.start), range.len()) }
    }

    /// Some of the bytes, to be written.
    ///
    /// # Safety
    /// As [`bytes`](Self::bytes), and nobody reads them meanwhile.
    #[must_use]
    #[expect(clippy::mut_from_ref, reason = "the caller sees to it that nobody else has them")]
    pub unsafe fn bytes_mut(&self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len, "beyond the memory");
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(range.start), range.len()) }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: this is the mapping made in `map`, and nobody has any of it without `self`.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "a mapping can be undone");
    }
}

/// The file system that memfds of plain pages are of: `TMPFS_MAGIC`.
const TMPFS: rustix::fs::FsWord = 0x0102_1994;
