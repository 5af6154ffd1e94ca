//! What one process tells others, of any length: a file in memory that nobody can change once it is
//! sealed. It is written and read by system calls and never mapped.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// Bytes for others, to whom it goes with its descriptor.
#[derive(Debug)]
pub struct Sealed {
    file: File,
}

impl Sealed {
    /// One without any bytes yet.
    ///
    /// # Errors
    /// The kernel's, when there are too many open files.
    pub fn new() -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        Ok(Self { file: memfd_create("racksum-sealed", flags)?.into() })
    }

    /// The one that a descriptor from another process is of. Whoever has sent it may not have
    /// sealed it: it may change while it is read.
    #[must_use]
    pub fn of(descriptor: OwnedFd) -> Self {
        Self { file: descriptor.into() }
    }

    /// Writes some of the bytes. Threads may write to different places at once.
    ///
    /// # Errors
    /// The kernel's: there is no memory, or it is sealed.
    pub fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, at)
    }

    /// Seals it: nobody can write to it any more.
    ///
    /// # Errors
    /// The kernel's.
    pub fn seal(&self) -> io::Result<()> {
        let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        Ok(fcntl_add_seals(&self.file, seals)?)
    }

    /// How many bytes there are.
    ///
    /// # Errors
    /// The kernel's.
    pub fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Whether there are none.
    ///
    /// # Errors
    /// The kernel's.
    pub fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Reads as many bytes as there is room for.
    ///
    /// # Errors
    /// The kernel's; `UnexpectedEof` when there are less.
    pub fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.file.read_exact_at(into, at)
    }
}

impl AsFd for Sealed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
