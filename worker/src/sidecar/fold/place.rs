//! Places in memory that ranks lend. A rank can write to its memory at any time.
//!
//! Each place belongs to one op at a time: the sidecar rejects a place that overlaps one in flight.
//! Nothing forces a rank to leave a place alone during its op, or to lend the same pages only once.
//! A rank that breaks these rules corrupts only the values of its own job, because memory safety
//! depends on no index, length or branch taken from those values. Rust defines no behavior for such
//! races, so the safety comments here hold only for ranks that follow the rules.

#![expect(unsafe_code, reason = "the memory is shared with other processes")]

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use racksum_net::local::SharedMemory;
use racksum_proto::descriptor::Descriptor;

use crate::blocks::{count_of, full_len, values_len};
use crate::sidecar::budget::{Budget, Room};
use crate::sidecar::message::ListAt;
use crate::tensor::Region;

/// Memory that a rank has lent. Dropping it returns its bytes to the budget.
#[derive(Debug)]
pub(in crate::sidecar) struct Memory {
    mapping: Arc<Mapping>,
    _room: Room,
}

/// The mapping of lent memory. Threads that work on the memory may keep the mapping briefly after
/// [`Memory`] is dropped.
#[derive(Debug)]
struct Mapping {
    shared: SharedMemory,
    budget: Arc<Budget>,
}

impl Memory {
    /// Maps the memory of a file descriptor, and charges its size to the budget.
    pub(in crate::sidecar) fn of(
        descriptor: &OwnedFd,
        budget: &Arc<Budget>,
    ) -> io::Result<Arc<Self>> {
        let shared = SharedMemory::of(descriptor)?;
        let full = |why| io::Error::new(io::ErrorKind::OutOfMemory, why);
        let room = budget.take(shared.len()).map_err(full)?;
        let mapping = Arc::new(Mapping { shared, budget: Arc::clone(budget) });
        Ok(Arc::new(Self { mapping, _room: room }))
    }

    pub(in crate::sidecar) fn len(&self) -> usize {
        self.mapping.shared.len()
    }
}

/// A byte range of lent memory.
#[derive(Debug, Clone)]
pub(in crate::sidecar) struct Place {
    mapping: Arc<Mapping>,
    at: usize,
    len: usize,
}

impl Place {
    /// Returns the place of `len` bytes at offset `at`, or `None` if they are not all within the
    /// memory.
    pub(in crate::sidecar) fn new(memory: &Arc<Memory>, at: u64, len: u64) -> Option<Self> {
        let (at, len) = (usize::try_from(at).ok()?, usize::try_from(len).ok()?);
        let is_within = at.checked_add(len).is_some_and(|end| end <= memory.len());
        is_within.then(|| Self { mapping: Arc::clone(&memory.mapping), at, len })
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// Returns the budget that pays for the place's memory. The same budget pays for the sums.
    pub(super) fn budget(&self) -> &Arc<Budget> {
        &self.mapping.budget
    }

    /// Returns whether two places of the same lent memory share bytes.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        let are_some = self.len > 0 && other.len > 0;
        let meet = self.at < other.at + other.len && other.at < self.at + self.len;
        are_some && meet && Arc::ptr_eq(&self.mapping, &other.mapping)
    }

    /// Returns the place as the tensor of a client's op.
    pub(in crate::sidecar) fn region(&self) -> Region {
        let start = self.mapping.shared.start().as_ptr().wrapping_add(self.at);
        let start = NonNull::new(start).unwrap_or(NonNull::dangling());
        // SAFETY: the range is within the memory, which stays mapped at its address while the
        // region keeps it. Only the job's sums depend on the rank not writing to it.
        unsafe { Region::new(start, self.len, Arc::clone(&self.mapping)) }
    }

    /// Copies the bytes of another place of the same length into this one. No other thread of this
    /// process may access either place.
    pub(in crate::sidecar) fn copy_from(&self, other: &Self) {
        let len = self.len.min(other.len);
        // SAFETY: the tensors belong to two ranks, and no other thread of this process accesses
        // them.
        unsafe { self.bytes_mut(0, len).copy_from_slice(other.bytes(0, len)) };
    }

    /// Returns bytes of the place for reading.
    ///
    /// # Safety
    /// No thread of this process may write to these bytes while the slice exists.
    pub(super) unsafe fn bytes(&self, from: usize, len: usize) -> &[u8] {
        assert!(from + len <= self.len, "beyond the place");
        // SAFETY: the caller guarantees that no thread of this process writes to the bytes. A rank
        // that writes to its tensor during an op corrupts only its job's sums.
        unsafe { self.mapping.shared.bytes(self.at + from..self.at + from + len) }
    }

    /// Returns bytes of the place for writing.
    ///
    /// # Safety
    /// No other reference to these bytes may exist in this process.
    #[expect(clippy::mut_from_ref, reason = "the caller ensures exclusive access")]
    pub(super) unsafe fn bytes_mut(&self, from: usize, len: usize) -> &mut [u8] {
        assert!(from + len <= self.len, "beyond the place");
        // SAFETY: the caller guarantees that this process has no other reference to the bytes. A
        // rank that writes to them corrupts only its job's sums.
        unsafe { self.mapping.shared.bytes_mut(self.at + from..self.at + from + len) }
    }
}

/// A rank's list of blocks in lent memory: a place for the indices and another for the values.
#[derive(Debug, Clone)]
pub(in crate::sidecar) struct List {
    indices: Place,
    /// The place of the values. Its length counts every block as whole, but ends with the memory.
    values: Place,
}

impl List {
    /// Returns the list with indices at offset `at`. Returns `None` if the indices or values start
    /// outside the memory, if the indices do not fit in it, or if they are not aligned.
    pub(in crate::sidecar) fn new(
        memory: &Arc<Memory>,
        at: u64,
        list: ListAt,
        descriptor: &Descriptor,
    ) -> Option<Self> {
        let ListAt { blocks, values } = list;
        let whole = u64::from(blocks) * full_len(descriptor) as u64;
        let left = (memory.len() as u64).checked_sub(values)?;
        let values = Place::new(memory, values, whole.min(left))?;
        let indices = Place::new(memory, at, size_of::<u32>() as u64 * u64::from(blocks))?;
        indices.at.is_multiple_of(size_of::<u32>()).then_some(Self { indices, values })
    }

    /// Returns the places of the indices and of the values.
    pub(super) const fn places(&self) -> [&Place; 2] {
        [&self.indices, &self.values]
    }

    /// Reads the indices, and returns them with the place of the values. Returns `None` for an
    /// invalid list: the indices must ascend, without duplicates and within the tensor, and the
    /// memory must hold all values.
    pub(super) fn read(&self, descriptor: &Descriptor) -> Option<(Vec<u32>, Place)> {
        let Place { mapping, at, len } = &self.indices;
        let (blocks, count) = (len / size_of::<u32>(), count_of(descriptor));
        if blocks as u64 > count {
            return None;
        }
        // Each index is read only once, because the rank may change it at any time.
        let index = |nth| mapping.shared.word(at + size_of::<u32>() * nth);
        let indices: Vec<u32> = (0..blocks).map(index).collect();
        let last = indices.last().copied();
        if !indices.is_sorted_by(|a, b| a < b) || last.is_some_and(|it| u64::from(it) >= count) {
            return None;
        }
        let len = values_len(descriptor, &indices);
        let values = Place { len, ..self.values.clone() };
        (len <= self.values.len).then_some((indices, values))
    }
}
