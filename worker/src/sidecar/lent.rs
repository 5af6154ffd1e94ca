//! Memory that a rank lends to its sidecar.

#![expect(unsafe_code, reason = "the memory is shared with another process")]

mod copier;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use racksum_net::local::{Line, SharedMemory};

pub(super) use self::copier::Copier;
use super::message::FromRank;
use crate::transport::LentMemory;

/// Memory that a rank shares with its sidecar, which reduces tensors in it without a copy. On drop,
/// the rank takes the memory back.
#[derive(Debug)]
pub(crate) struct Lent {
    memory: SharedMemory,
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
    /// Allocates `len` bytes of shared memory, at least one, and lends it to the sidecar.
    pub(super) fn lend(self: &Arc<Self>, len: usize, line: &Arc<Line>) -> io::Result<Arc<Lent>> {
        let (memory, descriptor) = SharedMemory::new(len.max(1))?;
        let id = self.next.fetch_add(1, Relaxed);
        // A sidecar that has hung up does not need the memory.
        drop(line.send(&FromRank::Lend { memory: id }, Some(descriptor.as_fd())));
        let (line, all) = (Arc::clone(line), Arc::downgrade(self));
        let lent = Arc::new(Lent { memory, id, line, all });
        self.lock().insert(lent.address(), Arc::downgrade(&lent));
        Ok(lent)
    }

    /// Returns the lent memory that contains `bytes`, and their offset in it.
    pub(super) fn find(&self, bytes: &[u8]) -> Option<(Arc<Lent>, usize)> {
        let start = bytes.as_ptr() as usize;
        let before = self.lock().range(..=start).next_back().map(|(_, lent)| Weak::clone(lent));
        let lent = before?.upgrade()?;
        let at = start - lent.address();
        (at + bytes.len() <= lent.memory.len()).then_some((lent, at))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Weak<Lent>>> {
        self.by_start.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lent {
    /// Returns the length in bytes, at least one.
    pub(super) const fn len(&self) -> usize {
        self.memory.len()
    }

    /// Returns the first `len` bytes as a tensor for an op. The tensor keeps the memory alive.
    #[cfg(test)]
    pub(super) fn region(self: &Arc<Self>, len: usize) -> crate::tensor::Region {
        assert!(len <= self.len(), "beyond the memory");
        // SAFETY: the region keeps the memory alive and in place, and the test does not touch it
        // while an op uses it.
        unsafe { crate::tensor::Region::new(self.start(), len, Arc::clone(self)) }
    }

    fn address(&self) -> usize {
        self.memory.start().as_ptr() as usize
    }

    /// Writes `bytes` at offset `at`. No op in flight may use that part of the memory.
    pub(super) fn write(&self, at: usize, bytes: &[u8]) {
        // SAFETY: only this client uses the memory, and none of its ops in flight uses this part.
        unsafe { self.memory.bytes_mut(at..at + bytes.len()) }.copy_from_slice(bytes);
    }

    /// Writes `bytes` at the start of the memory, with the help of the copier's thread. No op in
    /// flight may use that part of the memory.
    pub(super) fn fill(&self, bytes: &[u8], copier: &Copier) {
        // SAFETY: only this client uses the memory, and none of its ops in flight uses this part.
        copier.copy(bytes, unsafe { self.memory.bytes_mut(0..bytes.len()) });
    }

    /// Fills `into` from the start of the memory. No op in flight may use that part of the memory.
    pub(super) fn read(&self, into: &mut [u8]) {
        // SAFETY: only this client uses the memory, and none of its ops in flight uses this part.
        into.copy_from_slice(unsafe { self.memory.bytes(0..into.len()) });
    }

    /// Fills `into` from the start of the memory, with the help of the copier's thread. No op in
    /// flight may use that part of the memory.
    pub(super) fn read_with(&self, copier: &Copier, into: &mut [u8]) {
        // SAFETY: only this client uses the memory, and none of its ops in flight uses this part.
        copier.copy(unsafe { self.memory.bytes(0..into.len()) }, into);
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
        // A sidecar that has hung up no longer has the memory.
        drop(self.line.send(&FromRank::TakeBack { memory: self.id }, None));
    }
}
