//! How much memory a sidecar has for its ranks: what they lend, and sums on their way to them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Memories that may be there at a time: a process may have 65530 mappings.
const MAX_MEMORIES: usize = 32 << 10;

/// What all ranks may have together.
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

/// Room for a memory, which is free again when this goes.
#[derive(Debug)]
pub(super) struct Room {
    len: usize,
    budget: Arc<Budget>,
}

impl Budget {
    pub(super) fn new(most: usize) -> Self {
        Self { most, taken: Mutex::default() }
    }

    /// How many bytes are taken.
    pub(super) fn used(&self) -> usize {
        self.lock().bytes
    }

    /// The most that may be.
    pub(super) const fn most(&self) -> usize {
        self.most
    }

    /// Takes room for a memory of so many bytes; refused with a sentence.
    pub(super) fn take(self: &Arc<Self>, len: usize) -> Result<Room, String> {
        let mut taken = self.lock();
        let left = self.most - taken.bytes;
        if len > left {
            return Err(format!(
                "{len} bytes are more than the {left} that are left of the {} that ranks may have \
                 together; raise `racksum worker --memory`",
                self.most
            ));
        }
        if taken.memories == MAX_MEMORIES {
            return Err(format!("ranks have memory {MAX_MEMORIES} times, as often as they may"));
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
