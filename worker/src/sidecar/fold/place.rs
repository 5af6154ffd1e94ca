//! Places in memory that ranks lend. A rank can write to its memory at any time.
//!
//! Each place belongs to one op at a time: the sidecar rejects a place that overlaps an operand in
//! flight. Nothing forces a rank to leave a place alone while an op uses it, or to lend the same
//! pages only once. A rank that breaks these rules harms only its own job. The sidecar computes
//! with private copies, as [`racksum_kernels::shared`] explains. Where memory safety depends on an
//! index, a length or a branch, the sidecar uses a private copy that it has checked.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use racksum_kernels::shared::SharedBytes;
use racksum_net::local::SharedMemory;
use racksum_proto::descriptor::Descriptor;

use crate::blocks::{count_of, full_len, values_len};
use crate::sidecar::budget::{Budget, Room};
use crate::sidecar::message::ListAt;
use crate::tensor::{Region, shared_bytes};

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
    shared: Arc<SharedMemory>,
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
        let mapping = Arc::new(Mapping { shared: Arc::new(shared), budget: Arc::clone(budget) });
        Ok(Arc::new(Self { mapping, _room: room }))
    }

    pub(in crate::sidecar) fn len(&self) -> usize {
        self.mapping.shared.len()
    }

    #[cfg(test)]
    pub(super) fn shared(&self) -> &Arc<SharedMemory> {
        &self.mapping.shared
    }
}

/// A byte range of lent memory.
#[derive(Debug, Clone)]
pub(in crate::sidecar) struct LentRange {
    mapping: Arc<Mapping>,
    at: usize,
    len: usize,
}

impl LentRange {
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

    /// Returns the budget to which the place's memory is charged. The sums are charged to the same
    /// budget.
    pub(super) fn budget(&self) -> &Arc<Budget> {
        &self.mapping.budget
    }

    /// Returns whether two places share bytes of the same lent memory.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        let are_some = self.len > 0 && other.len > 0;
        let meet = self.at < other.at + other.len && other.at < self.at + self.len;
        are_some && meet && Arc::ptr_eq(&self.mapping, &other.mapping)
    }

    /// Returns the place as the tensor of an op that the sidecar starts at the aggregator.
    pub(in crate::sidecar) fn region(&self) -> Region {
        Region::of_shared(&self.mapping.shared, self.at..self.at + self.len, ())
    }

    /// Copies the bytes of `other`, which has the same length, into this place.
    pub(in crate::sidecar) fn copy_from(&self, other: &Self) {
        let len = self.len.min(other.len);
        self.part(0, len).copy_from(other.part(0, len));
    }

    /// Returns `len` bytes of the place, from offset `from` on.
    pub(super) fn part(&self, from: usize, len: usize) -> SharedBytes<'_> {
        let place = shared_bytes(&self.mapping.shared).part(self.at..self.at + self.len);
        place.part(from..from + len)
    }
}

/// A rank's list of blocks in lent memory: a place for the indices and another for the values.
#[derive(Debug, Clone)]
pub(in crate::sidecar) struct List {
    indices: LentRange,
    /// The place of the values. It has room for full blocks, unless the memory ends earlier.
    values: LentRange,
}

impl List {
    /// Returns the list whose indices start at offset `at`. Returns `None` if the indices or values
    /// start outside the memory, or if the indices do not fit in the memory or are misaligned.
    pub(in crate::sidecar) fn new(
        memory: &Arc<Memory>,
        at: u64,
        list: ListAt,
        descriptor: &Descriptor,
    ) -> Option<Self> {
        let ListAt { blocks, values } = list;
        let whole = u64::from(blocks) * full_len(descriptor) as u64;
        let left = (memory.len() as u64).checked_sub(values)?;
        let values = LentRange::new(memory, values, whole.min(left))?;
        let indices = LentRange::new(memory, at, size_of::<u32>() as u64 * u64::from(blocks))?;
        indices.at.is_multiple_of(size_of::<u32>()).then_some(Self { indices, values })
    }

    /// Returns the places of the indices and of the values.
    pub(super) const fn places(&self) -> [&LentRange; 2] {
        [&self.indices, &self.values]
    }

    /// Reads the indices, and returns them with the place of the values. Returns `None` for an
    /// invalid list: the indices must ascend, without duplicates and within the tensor, and the
    /// memory must hold all values.
    pub(super) fn read(&self, descriptor: &Descriptor) -> Option<(Vec<u32>, LentRange)> {
        let (len, count) = (self.indices.len, count_of(descriptor));
        if (len / size_of::<u32>()) as u64 > count {
            return None;
        }
        // Check a copy, because the rank may change the indices at any time.
        let mut copy = Vec::new();
        self.indices.part(0, len).append_to(&mut copy);
        let (words, _) = copy.as_chunks();
        let indices: Vec<u32> = words.iter().copied().map(u32::from_ne_bytes).collect();
        let last = indices.last().copied();
        if !indices.is_sorted_by(|a, b| a < b) || last.is_some_and(|it| u64::from(it) >= count) {
            return None;
        }
        let len = values_len(descriptor, &indices);
        let values = LentRange { len, ..self.values.clone() };
        (len <= self.values.len).then_some((indices, values))
    }
}
