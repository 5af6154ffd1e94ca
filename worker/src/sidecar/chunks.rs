//! Work in chunks, which any number of threads take one after the other.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};

/// The chunks of some work.
#[derive(Debug)]
pub(super) struct Chunks {
    count: usize,
    /// Those from here on nobody has taken.
    next: AtomicUsize,
    /// How many are not done.
    left: AtomicUsize,
}

impl Chunks {
    pub(super) const fn new(count: usize) -> Self {
        Self { count, next: AtomicUsize::new(0), left: AtomicUsize::new(count) }
    }

    pub(super) fn are_taken(&self) -> bool {
        self.next.load(Relaxed) >= self.count
    }

    /// Does chunks until all have been taken. Returns true to the one thread that ends the last.
    pub(super) fn work(&self, mut work: impl FnMut(usize)) -> bool {
        loop {
            let chunk = self.next.fetch_add(1, Relaxed);
            if chunk >= self.count {
                return false;
            }
            work(chunk);
            // What the others have written is there once this thread sees that they are done.
            if self.left.fetch_sub(1, AcqRel) == 1 {
                return true;
            }
        }
    }
}
