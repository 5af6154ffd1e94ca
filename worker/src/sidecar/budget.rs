//! The memory budget of a sidecar. It covers the memory that ranks lend, and the sums of lists
//! until the ranks receive them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum number of reservations at a time. Each may need a mapping, and Linux allows a process
/// 65530 mappings by default.
const MAX_MEMORIES: usize = 32 << 10;

/// Memory budget that all ranks of a sidecar share.
#[derive(Debug)]
pub(super) struct Budget {
    most: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    bytes: usize,
    memories: usize,
}

/// A reservation in the budget, released on drop.
#[derive(Debug)]
pub(super) struct Room {
    len: usize,
    budget: Arc<Budget>,
}

impl Budget {
    pub(super) fn new(most: usize) -> Self {
        Self { most, taken: Mutex::default() }
    }

    /// Returns the number of reserved bytes.
    pub(super) fn used(&self) -> usize {
        self.lock().bytes
    }

    /// Returns the size of the budget in bytes.
    pub(super) const fn most(&self) -> usize {
        self.most
    }

    /// Reserves `len` bytes. Returns an error message if too few bytes or reservations are left.
    pub(super) fn take(self: &Arc<Self>, len: usize) -> Result<Room, String> {
        let mut taken = self.lock();
        let left = self.most - taken.bytes;
        if len > left {
            return Err(format!(
                "{len} bytes exceed the {left} bytes left of the {} bytes for lent memory and \
                 sums; raise `racksum worker --memory`",
                self.most
            ));
        }
        if taken.memories == MAX_MEMORIES {
            return Err(format!(
                "the sidecar already holds its limit of {MAX_MEMORIES} pieces of lent memory and \
                 sums; lend fewer, larger pieces"
            ));
        }
        taken.bytes += len;
        taken.memories += 1;
        Ok(Room { len, budget: Arc::clone(self) })
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut taken = self.budget.lock();
        taken.bytes -= self.len;
        taken.memories -= 1;
    }
}
