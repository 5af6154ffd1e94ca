//! Where ranks have what they hand: memory that they may write to at any time.
//!
//! Nothing holds a rank to it that a place is of one op at a time, nor that it leaves the place
//! alone meanwhile. One that does otherwise spoils the values of its own job: no index, length or
//! branch that memory depends on is taken from them. The language promises nothing for such races,
//! so what is said of safety here is said of ranks that keep to it.

#![expect(unsafe_code, reason = "the memory is shared with other processes")]

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use racksum_net::local::SharedMemory;
use racksum_proto::descriptor::Descriptor;

use crate::blocks::{count_of, len_of};
use crate::tensor::Region;

/// Memories that all ranks may lend: a process may have 65530 mappings.
const MAX_MEMORIES: usize = 32 << 10;

/// How much memory ranks may lend.
#[derive(Debug)]
pub(in crate::sidecar) struct Budget {
    most: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    bytes: usize,
    memories: usize,
}

impl Budget {
    pub(in crate::sidecar) fn new(most: usize) -> Self {
        Self { most, taken: Mutex::default() }
    }

    /// How many bytes are lent.
    pub(in crate::sidecar) fn used(&self) -> usize {
        self.lock().bytes
    }

    /// The most that may be.
    pub(in crate::sidecar) const fn most(&self) -> usize {
        self.most
    }

    /// Takes a memory of so many bytes, if there is room.
    fn take(&self, len: usize) -> bool {
        let mut taken = self.lock();
        let fits = taken.memories < MAX_MEMORIES && len <= self.most - taken.bytes;
        if fits {
            taken.bytes += len;
            taken.memories += 1;
        }
        fits
    }

    fn give_back(&self, len: usize) {
        let mut taken = self.lock();
        taken.bytes -= len;
        taken.memories -= 1;
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory that a rank has lent. What it took of the budget is free once nothing works on it.
#[derive(Debug)]
pub(in crate::sidecar) struct Memory {
    shared: SharedMemory,
    budget: Arc<Budget>,
}

impl Memory {
    /// The memory that a descriptor is of.
    pub(in crate::sidecar) fn of(
        descriptor: &OwnedFd,
        budget: &Arc<Budget>,
    ) -> io::Result<Arc<Self>> {
        let shared = SharedMemory::of(descriptor, budget.most - budget.used())?;
        if !budget.take(shared.len()) {
            let why = "ranks have lent as much as they may, or too often";
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, why));
        }
        Ok(Arc::new(Self { shared, budget: Arc::clone(budget) }))
    }

    pub(in crate::sidecar) const fn len(&self) -> usize {
        self.shared.len()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.budget.give_back(self.shared.len());
    }
}

/// Where a rank has values.
#[derive(Debug, Clone)]
pub(in crate::sidecar) struct Place {
    memory: Arc<Memory>,
    at: usize,
    len: usize,
}

impl Place {
    /// `len` bytes of a memory from `at` on; nothing if it does not have them.
    pub(in crate::sidecar) fn new(memory: &Arc<Memory>, at: u64, len: u64) -> Option<Self> {
        let (at, len) = (usize::try_from(at).ok()?, usize::try_from(len).ok()?);
        let is_within = at.checked_add(len).is_some_and(|end| end <= memory.len());
        is_within.then(|| Self { memory: Arc::clone(memory), at, len })
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// The tensor, as an op of a client's.
    pub(in crate::sidecar) fn region(&self) -> Region {
        let start = self.memory.shared.start().as_ptr().wrapping_add(self.at);
        let start = NonNull::new(start).unwrap_or(NonNull::dangling());
        // SAFETY: within the memory, which stays where it is as long as it is kept. That the rank
        // leaves it alone, nothing but the job's sums depends on.
        unsafe { Region::new(start, self.len, Arc::clone(&self.memory)) }
    }

    /// Writes what another place has, of the same length, which nobody else has or writes to.
    pub(in crate::sidecar) fn copy_from(&self, other: &Self) {
        let len = self.len.min(other.len);
        // SAFETY: the tensors are of two ranks, and nobody in this process works on them.
        unsafe { self.bytes_mut(0, len).copy_from_slice(other.bytes(0, len)) };
    }

    /// Bytes of the tensor, to be read.
    ///
    /// # Safety
    /// Nobody in this process writes to them.
    pub(super) unsafe fn bytes(&self, from: usize, len: usize) -> &[u8] {
        assert!(from + len <= self.len, "beyond the place");
        // SAFETY: as the caller says; a rank that writes to its tensor while an op runs spoils its
        // job's sums, and nothing else depends on the values.
        unsafe { self.memory.shared.bytes(self.at + from..self.at + from + len) }
    }

    /// Bytes of the tensor, to be written.
    ///
    /// # Safety
    /// Nobody in this process has them.
    #[expect(clippy::mut_from_ref, reason = "the caller sees to it that nobody else has them")]
    pub(super) unsafe fn bytes_mut(&self, from: usize, len: usize) -> &mut [u8] {
        assert!(from + len <= self.len, "beyond the place");
        // SAFETY: as the caller says, and as above.
        unsafe { self.memory.shared.bytes_mut(self.at + from..self.at + from + len) }
    }
}

/// Where a rank has a list of blocks: which they are, and elsewhere in the memory their values.
#[derive(Debug, Clone)]
pub(in crate::sidecar) struct List {
    memory: Arc<Memory>,
    indices: usize,
    blocks: u32,
    values: u64,
}

impl List {
    /// So many blocks, whose indices begin at `at` and whose values at `values`; nothing if the
    /// memory does not have the indices.
    pub(in crate::sidecar) fn new(
        memory: &Arc<Memory>,
        at: u64,
        blocks: u32,
        values: u64,
    ) -> Option<Self> {
        let indices = usize::try_from(at).ok()?;
        let end = indices.checked_add(size_of::<u32>() * blocks as usize)?;
        let fits = indices.is_multiple_of(size_of::<u32>()) && end <= memory.len();
        fits.then(|| Self { memory: Arc::clone(memory), indices, blocks, values })
    }

    /// The indices, and where the values are; nothing of a list that cannot be: it is sorted, has
    /// no block twice, and all are the tensor's.
    pub(super) fn read(&self, descriptor: &Descriptor) -> Option<(Vec<u32>, Place)> {
        let count = count_of(descriptor);
        if u64::from(self.blocks) > count {
            return None;
        }
        // Each is read once: the rank may write to them meanwhile.
        let index = |nth| self.memory.shared.word(self.indices + size_of::<u32>() * nth);
        let indices: Vec<u32> = (0..self.blocks as usize).map(index).collect();
        let last = indices.last().copied();
        if !indices.is_sorted_by(|a, b| a < b) || last.is_some_and(|it| u64::from(it) >= count) {
            return None;
        }
        let full = descriptor.block_elements() * descriptor.dtype.size();
        let len = last.map_or(0, |last| (indices.len() - 1) * full + len_of(descriptor, last));
        let place = Place::new(&self.memory, self.values, len as u64)?;
        Some((indices, place))
    }
}
