//! Memory of a rank's that its sidecar has too.

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

/// Memory that the sidecar has too: tensors in it are reduced without a copy. The sidecar lets it
/// go with the last of these.
#[derive(Debug)]
pub struct Lent {
    memory: SharedMemory,
    id: u32,
    line: Arc<Line>,
    all: Weak<AllLent>,
}

/// All memory that a rank has lent, by where it begins.
#[derive(Debug, Default)]
pub(super) struct AllLent {
    by_start: Mutex<BTreeMap<usize, Weak<Lent>>>,
    next: AtomicU32,
}

impl AllLent {
    /// Lends new memory of so many bytes.
    pub(super) fn lend(self: &Arc<Self>, len: usize, line: &Arc<Line>) -> io::Result<Arc<Lent>> {
        let (memory, descriptor) = SharedMemory::new(len.max(1))?;
        let id = self.next.fetch_add(1, Relaxed);
        // A sidecar that is gone will not miss it.
        drop(line.send(&FromRank::Lend { memory: id }, Some(descriptor.as_fd())));
        let (line, all) = (Arc::clone(line), Arc::downgrade(self));
        let lent = Arc::new(Lent { memory, id, line, all });
        self.lock().insert(lent.address(), Arc::downgrade(&lent));
        Ok(lent)
    }

    /// The memory that bytes lie in, and where in it they begin.
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
    /// Where it begins, in this process.
    #[must_use]
    pub const fn start(&self) -> NonNull<u8> {
        self.memory.start()
    }

    /// How many bytes it has, one or more.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it has some")]
    pub const fn len(&self) -> usize {
        self.memory.len()
    }

    /// The first `len` bytes, as a tensor of an op. The memory is kept as long as that.
    #[cfg(test)]
    pub(super) fn region(self: &Arc<Self>, len: usize) -> crate::tensor::Region {
        assert!(len <= self.len(), "beyond the memory");
        // SAFETY: the memory, which is kept, stays where it is, and the test leaves it alone.
        unsafe { crate::tensor::Region::new(self.start(), len, Arc::clone(self)) }
    }

    /// What the sidecar calls it.
    pub(super) const fn id(&self) -> u32 {
        self.id
    }

    fn address(&self) -> usize {
        self.memory.start().as_ptr() as usize
    }

    /// Writes bytes, from `at` on. No op may be at work there.
    pub(super) fn write(&self, at: usize, bytes: &[u8]) {
        // SAFETY: the memory is of this client alone, which has no op at work there.
        unsafe { self.memory.bytes_mut(at..at + bytes.len()) }.copy_from_slice(bytes);
    }

    /// Writes its beginning. No op may be at work there.
    pub(super) fn fill(&self, bytes: &[u8], copier: &Copier) {
        // SAFETY: as above.
        copier.copy(bytes, unsafe { self.memory.bytes_mut(0..bytes.len()) });
    }

    /// Reads its beginning. No op may be at work there.
    pub(super) fn read(&self, into: &mut [u8]) {
        // SAFETY: as above.
        into.copy_from_slice(unsafe { self.memory.bytes(0..into.len()) });
    }

    /// The same with the help of another thread.
    pub(super) fn read_with(&self, copier: &Copier, into: &mut [u8]) {
        // SAFETY: as above.
        copier.copy(unsafe { self.memory.bytes(0..into.len()) }, into);
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(all) = self.all.upgrade() {
            all.lock().remove(&self.address());
        }
        // A sidecar that is gone has none of it.
        drop(self.line.send(&FromRank::TakeBack { memory: self.id }, None));
    }
}
