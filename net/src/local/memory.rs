//! Shared memory, which every process that has its descriptor can map.

#![expect(unsafe_code, reason = "mmap and munmap take raw addresses")]

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate,
    memfd_create,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Memory of fixed size that other processes may have mapped too. They may write to it at any time,
/// so this type has no method that returns a reference to its bytes. Users access the bytes by
/// address.
#[derive(Debug)]
pub struct SharedMemory {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to no thread.
unsafe impl Send for SharedMemory {}
// SAFETY: no method accesses the bytes.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates zeroed memory. Returns it with the descriptor through which other processes map it.
    /// The mapping outlives the descriptor.
    ///
    /// # Errors
    /// Returns `InvalidInput` if `len` is 0, and otherwise the kernel's error, for example if too
    /// many files are open.
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
    /// Returns `InvalidInput` if the memory is empty, can shrink or has huge pages. An access to
    /// shrunk memory, or to a huge page that the kernel cannot provide, would kill this process.
    /// Otherwise returns the kernel's error.
    pub fn of(descriptor: &OwnedFd) -> io::Result<Self> {
        let sealed = fcntl_get_seals(descriptor).unwrap_or(SealFlags::empty());
        // Reject huge pages, because the kernel may have none left when this process first writes
        // to one.
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
        // SAFETY: the kernel picks a free address. The file is sealed against shrinking, so the
        // whole mapping stays backed by memory.
        let start =
            unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, descriptor, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// Returns the size in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "shared memory is never empty")]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns the address in this process, which is valid until `self` is dropped.
    #[must_use]
    pub const fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: `map` made this mapping, and its users keep `self` while they use its address.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "a mapping can be unmapped");
    }
}

/// Magic number of the file system behind memfds with plain pages: `TMPFS_MAGIC`.
const TMPFS: rustix::fs::FsWord = 0x0102_1994;
