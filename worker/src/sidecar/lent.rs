//! Memory that a rank lends to its sidecar. The sidecar may write to the memory at any time.

mod copier;

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use racksum_kernels::shared::SharedBytes;
use racksum_net::local::{Line, LineError, SharedMemory};

pub(super) use self::copier::Copier;
use super::message::FromRank;
use crate::tensor::{TensorBytes, TensorBytesMut, shared_bytes};
use crate::transport::LentMemory;

/// Memory that a rank shares with its sidecar, which reduces tensors in it without a copy. On drop,
/// the rank takes the memory back.
#[derive(Debug)]
pub(crate) struct Lent {
    memory: Arc<SharedMemory>,
    id: u32,
    line: Arc<Line>,
    all: Weak<AllLent>,
}

/// All memory that a rank has lent, by start address.
#[derive(Debug, Default)]
pub(super) struct AllLent {
    by_start: Mutex<BTreeMap<usize, Weak<Lent>>>,
    next: AtomicU32,
}

impl AllLent {
    /// Allocates `len` bytes of shared memory, but at least one, and lends them to the sidecar.
    pub(super) fn lend(self: &Arc<Self>, len: usize, line: &Arc<Line>) -> io::Result<Arc<Lent>> {
        let (memory, descriptor) = SharedMemory::new(len.max(1))?;
        let id = self.next.fetch_add(1, Relaxed);
        let sent = line.send(&FromRank::Lend { memory: id }, Some(descriptor.as_fd()));
        // Ignore other errors: a sidecar that closed the line does not need the memory.
        if let Err(error @ LineError::TooManyOnTheWay) = sent {
            return Err(io::Error::other(error));
        }
        let (line, all) = (Arc::clone(line), Arc::downgrade(self));
        let lent = Arc::new(Lent { memory: Arc::new(memory), id, line, all });
        self.lock().insert(lent.address(), Arc::downgrade(&lent));
        Ok(lent)
    }

    /// Returns the lent memory that contains `extent`, and the offset at which `extent` starts.
    pub(super) fn find(&self, extent: &Range<usize>) -> Option<(Arc<Lent>, usize)> {
        let start = extent.start;
        let before = self.lock().range(..=start).next_back().map(|(_, lent)| Weak::clone(lent));
        let lent = before?.upgrade()?;
        let at = start - lent.address();
        (at + extent.len() <= lent.memory.len()).then_some((lent, at))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Weak<Lent>>> {
        self.by_start.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lent {
    /// Returns the length in bytes, at least one.
    pub(super) fn len(&self) -> usize {
        self.memory.len()
    }

    /// Returns the first `len` bytes as a tensor for an op. The tensor keeps the memory alive.
    #[cfg(test)]
    pub(super) fn region(self: &Arc<Self>, len: usize) -> crate::tensor::Region {
        crate::tensor::Region::of_shared(&self.memory, 0..len, Arc::clone(self))
    }

    fn address(&self) -> usize {
        self.memory.start().as_ptr() as usize
    }

    /// Writes `bytes` at offset `at`. No op in flight may use that part of the memory.
    pub(super) fn write(&self, at: usize, bytes: &[u8]) {
        self.part(at, bytes.len()).write(bytes);
    }

    /// Writes `bytes` at the start of the memory, with the help of the copier's thread. No op in
    /// flight may use that part of the memory.
    pub(super) fn fill(&self, bytes: TensorBytes<'_>, copier: &Copier) {
        let part = self.part(0, bytes.len());
        match bytes {
            TensorBytes::Own(bytes) => copier.write(bytes, part),
            TensorBytes::Shared(bytes) => part.copy_from(bytes),
        }
    }

    /// Fills `into` from the start of the memory. No op in flight may use that part of the memory.
    pub(super) fn read(&self, into: TensorBytesMut<'_>) {
        let part = self.part(0, into.len());
        match into {
            TensorBytesMut::Own(into) => part.read(into),
            TensorBytesMut::Shared(into) => into.copy_from(part),
        }
    }

    /// Fills `into` from the start of the memory, with the help of the copier's thread. No op in
    /// flight may use that part of the memory.
    pub(super) fn read_with(&self, copier: &Copier, into: TensorBytesMut<'_>) {
        match into {
            TensorBytesMut::Own(into) => copier.read(self.part(0, into.len()), into),
            into @ TensorBytesMut::Shared(_) => self.read(into),
        }
    }

    fn part(&self, at: usize, len: usize) -> SharedBytes<'_> {
        shared_bytes(&self.memory).part(at..at + len)
    }
}

impl LentMemory for Lent {
    fn start(&self) -> NonNull<u8> {
        self.memory.start()
    }

    fn id(&self) -> u32 {
        self.id
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(all) = self.all.upgrade() {
            all.lock().remove(&self.address());
        }
        // Ignore a failed send: a sidecar that closed the line no longer maps the memory.
        drop(self.line.send(&FromRank::TakeBack { memory: self.id }, None));
    }
}
