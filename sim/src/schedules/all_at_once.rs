//! Every job begins as soon as it asks.

use std::collections::{BTreeSet, VecDeque};

use racksum_proto::schedule::{Schedule, Turn};

/// A schedule without an order among jobs: ReadyAndGo with whole tensors, ByteScheduler with
/// chunks.
///
/// Source of the latter: Peng et al., *A Generic Communication Scheduler for Distributed DNN
/// Training Acceleration*, SOSP 2019.
#[derive(Debug)]
pub struct AllAtOnce<J> {
    chunk_bytes: usize,
    jobs: BTreeSet<J>,
    waiting: VecDeque<J>,
}

impl<J> AllAtOnce<J> {
    /// Creates a schedule without jobs whose turns are chunks of `chunk_bytes` bytes.
    #[must_use]
    pub const fn new(chunk_bytes: usize) -> Self {
        Self { chunk_bytes, jobs: BTreeSet::new(), waiting: VecDeque::new() }
    }
}

impl<J: Ord + Copy> Schedule<J> for AllAtOnce<J> {
    fn add(&mut self, job: J, _share: f64) {
        self.remove(job);
        self.jobs.insert(job);
    }

    fn remove(&mut self, job: J) {
        self.jobs.remove(&job);
        self.waiting.retain(|other| *other != job);
    }

    fn enqueue(&mut self, job: J) {
        if self.jobs.contains(&job) && !self.waiting.contains(&job) {
            self.waiting.push_back(job);
        }
    }

    fn waiting(&self) -> usize {
        self.waiting.len()
    }

    fn next(&mut self) -> Option<Turn<J>> {
        self.waiting.pop_front().map(|job| Turn::new(job, self.chunk_bytes))
    }

    fn finish(&mut self, _turn: Turn<J>) {}

    fn charge(&mut self, _job: J, _bytes: usize) {}

    fn debt(&self, _job: J) -> usize {
        0
    }
}
