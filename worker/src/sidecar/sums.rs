//! Sums of lists of blocks. Ranks receive the sums in sealed files, because the size of the union
//! is not known in advance.

use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};

use racksum_net::local::Sealed;
use racksum_proto::descriptor::Descriptor;

use super::budget::{Budget, Room};
use super::fold_error::FoldError;
use crate::blocks::{Blocks, values_len};

/// The sums of a union of lists: the indices of its blocks, followed by their values.
#[derive(Debug)]
pub(super) struct Sums {
    sealed: Sealed,
    blocks: u32,
    /// The reservation in the sidecar's budget, until just before the ranks receive the sums.
    /// Always `None` at a rank.
    room: Mutex<Option<Room>>,
}

impl Sums {
    /// Creates the sums of the blocks with these indices. Writes the indices, but no values yet.
    pub(super) fn begin(
        descriptor: &Descriptor,
        indices: &[u32],
        budget: &Arc<Budget>,
    ) -> Result<Self, FoldError> {
        let blocks = u32::try_from(indices.len()).unwrap_or(u32::MAX);
        let bytes: Vec<u8> = indices.iter().flat_map(|index| index.to_ne_bytes()).collect();
        let room = budget.take(bytes.len() + values_len(descriptor, indices)).map_err(no_memory)?;
        let begin = || {
            let sealed = Sealed::new()?;
            sealed.write_at(&bytes, 0)?;
            Ok(Self { sealed, blocks, room: Mutex::new(Some(room)) })
        };
        begin().map_err(|error: io::Error| no_memory(error))
    }

    /// Creates sealed sums with the indices and values of `blocks`.
    pub(super) fn of(
        descriptor: &Descriptor,
        blocks: &Blocks,
        budget: &Arc<Budget>,
    ) -> Result<Self, FoldError> {
        let sums = Self::begin(descriptor, &blocks.indices, budget)?;
        sums.write(0, &blocks.values)?;
        sums.seal()?;
        Ok(sums)
    }

    /// Wraps sums that a rank received from its sidecar.
    pub(super) fn received(sealed: Sealed, blocks: u32) -> Self {
        Self { sealed, blocks, room: Mutex::default() }
    }

    /// Writes `values` at byte offset `at`, counted from the end of the indices.
    pub(super) fn write(&self, at: u64, values: &[u8]) -> Result<(), FoldError> {
        self.sealed.write_at(values, self.indices_len() + at).map_err(no_memory)
    }

    /// Seals the sums, so that no process can write to them.
    pub(super) fn seal(&self) -> Result<(), FoldError> {
        self.sealed.seal().map_err(no_memory)
    }

    /// Releases the bytes that the sums reserve in the budget. Call this just before the ranks
    /// receive the sums: a rank may need these bytes for its next op before all threads have
    /// dropped the sums.
    pub(super) fn free(&self) {
        self.room.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Returns the number of blocks.
    pub(super) const fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Reads all blocks. Reuses the memory of `values` for their values, and overwrites its
    /// content.
    pub(super) fn read(&self, mut values: Vec<u8>) -> io::Result<Blocks> {
        let len = self.sealed.len()?.checked_sub(self.indices_len());
        let len =
            len.and_then(|len| usize::try_from(len).ok()).ok_or(io::ErrorKind::InvalidData)?;
        let mut indices = vec![0; self.blocks as usize * size_of::<u32>()];
        self.sealed.read_at(&mut indices, 0)?;
        values.resize(len, 0);
        self.sealed.read_at(&mut values, self.indices_len())?;
        let (indices, _) = indices.as_chunks();
        Ok(Blocks { indices: indices.iter().copied().map(u32::from_ne_bytes).collect(), values })
    }

    const fn indices_len(&self) -> u64 {
        self.blocks as u64 * size_of::<u32>() as u64
    }
}

impl AsFd for Sums {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.sealed.as_fd()
    }
}

fn no_memory(error: impl Display) -> FoldError {
    FoldError::NoMemory(format!("cannot allocate memory for the sums of an op: {error}"))
}

#[cfg(test)]
mod tests {
    use racksum_proto::dtype::DType;

    use super::*;

    #[test]
    fn what_ranks_are_about_to_have_takes_no_room_though_it_is_there() {
        let budget = Arc::new(Budget::new(1 << 10));
        let descriptor = Descriptor::sum(128, DType::F32).with_block(64).unwrap();
        let begin = || Sums::begin(&descriptor, &[1], &budget).unwrap();
        let (sums, others) = (begin(), begin());
        assert_eq!(budget.used(), 2 * (4 + 64 * 4));
        sums.free();
        sums.free();
        assert_eq!(budget.used(), 4 + 64 * 4);
        drop(sums);
        drop(others);
        assert_eq!(budget.used(), 0);
    }
}
