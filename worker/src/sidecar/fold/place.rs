//! Where ranks have what they hand: memory that they may write to at any time.
//!
//! A place is of one op at a time: what overlaps one in flight is refused. That a rank leaves it
//! alone meanwhile, and lends the same pages once, nothing holds it to; one that does not spoils
//! the values of its own job, since no index, length or branch that memory depends on is taken
//! from them. The language promises nothing for such races, so what is said of safety here is said
//! of ranks that keep to it.

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

/// Memory that a rank has lent. What it took of the budget is free again when this goes.
#[derive(Debug)]
pub(in crate::sidecar) struct Memory {
    mapping: Arc<Mapping>,
    _room: Room,
}

/// The same as those have it that work on it: they may let it go a moment later than all others.
#[derive(Debug)]
struct Mapping {
    shared: SharedMemory,
    budget: Arc<Budget>,
}

impl Memory {
    /// The memory that a descriptor is of.
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

/// Where a rank has values.
#[derive(Debug, Clone)]
pub(in crate::sidecar) struct Place {
    mapping: Arc<Mapping>,
    at: usize,
    len: usize,
}

impl Place {
    /// `len` bytes of a memory from `at` on; nothing if it does not have them.
    pub(in crate::sidecar) fn new(memory: &Arc<Memory>, at: u64, len: u64) -> Option<Self> {
        let (at, len) = (usize::try_from(at).ok()?, usize::try_from(len).ok()?);
        let is_within = at.checked_add(len).is_some_and(|end| end <= memory.len());
        is_within.then(|| Self { mapping: Arc::clone(&memory.mapping), at, len })
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// What its memory is of, and room for sums of it is taken of.
    pub(super) fn budget(&self) -> &Arc<Budget> {
        &self.mapping.budget
    }

    /// Whether some bytes are another's too.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        let are_some = self.len > 0 && other.len > 0;
        let meet = self.at < other.at + other.len && other.at < self.at + self.len;
        are_some && meet && Arc::ptr_eq(&self.mapping, &other.mapping)
    }

    /// The tensor, as an op of a client's.
    pub(in crate::sidecar) fn region(&self) -> Region {
        let start = self.mapping.shared.start().as_ptr().wrapping_add(self.at);
        let start = NonNull::new(start).unwrap_or(NonNull::dangling());
        // SAFETY: within the memory, which stays where it is as long as it is kept. That the rank
        // leaves it alone, nothing but the job's sums depends on.
        unsafe { Region::new(start, self.len, Arc::clone(&self.mapping)) }
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
        unsafe { self.mapping.shared.bytes(self.at + from..self.at + from + len) }
    }

    /// Bytes of the tensor, to be written.
    ///
    /// # Safety
    /// Nobody in this process has them.
    #[expect(clippy::mut_from_ref, reason = "the caller sees to it that nobody else has them")]
    pub(super) unsafe fn bytes_mut(&self, from: usize, len: usize) -> &mut [u8] {
        assert!(from + len <= self.len, "beyond the place");
        // SAFETY: as the caller says, and as above.
        unsafe { self.mapping.shared.bytes_mut(self.at + from..self.at + from + len) }
    }
}

/// Where a rank has a list of blocks: which they are, and elsewhere in the memory their values.
#[derive(Debug, Clone)]
pub(in crate::sidecar) struct List {
    indices: Place,
    /// As many bytes as whole blocks have, if the memory goes on for so long.
    values: Place,
}

impl List {
    /// Some blocks of a tensor, whose indices begin at `at`; nothing if the memory does not have
    /// them.
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

    /// All that it has of the memory.
    pub(super) const fn places(&self) -> [&Place; 2] {
        [&self.indices, &self.values]
    }

    /// The indices, and where the values are; nothing of a list that cannot be: it is sorted, has
    /// no block twice, and all are the tensor's.
    pub(super) fn read(&self, descriptor: &Descriptor) -> Option<(Vec<u32>, Place)> {
        let Place { mapping, at, len } = &self.indices;
        let (blocks, count) = (len / size_of::<u32>(), count_of(descriptor));
        if blocks as u64 > count {
            return None;
        }
        // Each is read once: the rank may write to them meanwhile.
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
