//! Work that any number of threads share, split into chunks.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};

use racksum_proto::schedule::Turn;

/// The chunks of one piece of work.
#[derive(Debug)]
pub(super) struct Chunks {
    count: usize,
    /// Index of the first chunk that no thread has taken. All chunks are taken once the index
    /// reaches `count`.
    next: AtomicUsize,
    /// Number of unfinished chunks.
    left: AtomicUsize,
}

impl Chunks {
    pub(super) const fn new(count: usize) -> Self {
        Self { count, next: AtomicUsize::new(0), left: AtomicUsize::new(count) }
    }

    pub(super) fn are_taken(&self) -> bool {
        self.next.load(Relaxed) >= self.count
    }

    /// Takes and finishes chunks until none is left or the turn is over. `work` returns the cost of
    /// a chunk. Returns true only in the thread that finishes the last chunk.
    pub(super) fn work<J>(&self, turn: &mut Turn<J>, mut work: impl FnMut(usize) -> usize) -> bool {
        while !turn.is_over() {
            let chunk = self.next.fetch_add(1, Relaxed);
            if chunk >= self.count {
                return false;
            }
            turn.spend(work(chunk));
            // `AcqRel` makes the other threads' writes visible to the thread that finishes last.
            if self.left.fetch_sub(1, AcqRel) == 1 {
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_takes_turns_until_all_is_done() {
        let chunks = Chunks::new(5);
        let mut done = Vec::new();
        for (after, ends) in [(2, false), (4, false), (5, true)] {
            assert!(!chunks.are_taken());
            let mut turn = Turn::new((), 100);
            let ended = chunks.work(&mut turn, |chunk| {
                done.push(chunk);
                60
            });
            assert_eq!(ended, ends);
            assert_eq!(done, Vec::from_iter(0..after));
        }
        assert!(chunks.are_taken());
        assert!(!chunks.work(&mut Turn::new((), 1), |_| unreachable!("all chunks are taken")));
    }
}
