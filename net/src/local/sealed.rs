//! Sealed files: in-memory files in which one process passes any number of bytes to others. Once a
//! file is sealed, it cannot change. Processes write and read it with system calls and never map
//! it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// In-memory file that another process receives by its descriptor.
#[derive(Debug)]
pub struct Sealed {
    file: File,
}

impl Sealed {
    /// Creates an empty file.
    ///
    /// # Errors
    /// Returns the kernel's error if too many files are open.
    pub fn new() -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        Ok(Self { file: memfd_create("racksum-sealed", flags)?.into() })
    }

    /// Wraps a descriptor from another process. The sender may not have sealed the file, so the
    /// file may change while it is read.
    #[must_use]
    pub fn of(descriptor: OwnedFd) -> Self {
        Self { file: descriptor.into() }
    }

    /// Writes bytes at an offset. Threads may write to different places at the same time.
    ///
    /// # Errors
    /// Returns the kernel's error: memory is exhausted, or the file is sealed.
    pub fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, at)
    }

    /// Seals the file, so that nobody can write to it any more.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn seal(&self) -> io::Result<()> {
        let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        Ok(fcntl_add_seals(&self.file, seals)?)
    }

    /// Returns the length in bytes.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Returns whether the file is empty.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Fills `into` with the bytes at an offset.
    ///
    /// # Errors
    /// Returns the kernel's error; `UnexpectedEof` if the file ends before `into` is full.
    pub fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.file.read_exact_at(into, at)
    }
}

impl AsFd for Sealed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
