//! The order of turns among the jobs that share a thread.
//!
//! A driver puts jobs with work into a [`Schedule`], asks it for the next [`Turn`], works for the
//! job of that turn until the turn is over or the job has no work left, and hands the turn back.
//! The schedule decides the order of the jobs and the size of each turn. Shards of an aggregator,
//! fold threads of a sidecar and the simulator drive the same code.
//!
//! All work is measured in bytes, at the prices of [`cost`].
//!
//! ```
//! use racksum_proto::schedule::{DeficitRoundRobin, Schedule};
//!
//! let mut schedule = DeficitRoundRobin::new(1000);
//! for job in ["a", "b"] {
//!     schedule.add(job, 0.5);
//!     schedule.enqueue(job);
//! }
//! let mut order = Vec::new();
//! for _ in 0..4 {
//!     let mut turn = schedule.next().expect("two jobs wait");
//!     while !turn.is_over() {
//!         turn.spend(250); // for some work of the job
//!     }
//!     order.push((turn.job, turn.spent()));
//!     schedule.enqueue(turn.job); // the job has more work
//!     schedule.finish(turn);
//! }
//! assert_eq!(order, [("a", 500), ("b", 500), ("a", 500), ("b", 500)]);
//! ```

use alloc::vec::Vec;

use crate::time::Span;

pub mod cost;
mod deficit_round_robin;

pub use deficit_round_robin::DeficitRoundRobin;

/// A schedule for the jobs that share a thread. A `J` identifies a job.
///
/// A job that was never added, or was removed, has no turns: calls for that job do nothing.
pub trait Schedule<J> {
    /// Adds a job that may use `share` of the thread's time, from 0 to 1. If the schedule already
    /// has the job, the job begins afresh.
    fn add(&mut self, job: J, share: f64);

    /// Removes a job. If one of its turns is handed back later, that turn is ignored.
    fn remove(&mut self, job: J);

    /// Notes what a job asks for. A schedule that weighs demands uses the latest one.
    fn demand(&mut self, job: J, demand: Demand) {
        _ = (job, demand);
    }

    /// Notes that a job has work. A job that is already waiting for its turn keeps its place.
    fn enqueue(&mut self, job: J);

    /// Returns the number of jobs that are waiting for their turn.
    fn waiting(&self) -> usize;

    /// Begins the next turn, or returns `None` if no job is waiting.
    ///
    /// The job of the turn leaves the queue. If it has work left after the turn, the driver must
    /// enqueue it again. A turn that only pays the job's debt is over immediately.
    fn next(&mut self) -> Option<Turn<J>>;

    /// Ends a turn, and charges the job for the bytes that it spent beyond the turn's budget.
    fn finish(&mut self, turn: Turn<J>);

    /// Charges a job for `bytes` bytes of work outside its turns, such as receiving a message.
    fn charge(&mut self, job: J, bytes: usize);

    /// Returns the job's debt: the bytes that it was charged and that its turns have not paid off
    /// yet.
    fn debt(&self, job: J) -> usize;

    /// Returns the priority with which the job's data goes now: smaller numbers first. It may
    /// change whenever another method was called.
    fn priority(&self, job: J) -> u32 {
        _ = job;
        0
    }
}

/// The demand of a job: its next op, and properties that a schedule may weigh.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Demand {
    /// The bytes of the op that are not done.
    pub left: u64,
    /// All bytes of the op.
    pub bytes: u64,
    /// The op's place in the next forward pass, from zero.
    pub layer: u32,
    /// The number of ops in a forward pass.
    pub layers: u32,
    /// The time that the job's ranks have waited for ops so far, summed over the ranks.
    pub waited: Span,
    /// The ports that the op uses, in ascending order.
    pub ports: Vec<u32>,
}

/// The turn of a job: the bytes that the job may spend before the next job has its turn.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "hand the turn back with `Schedule::finish`"]
pub struct Turn<J> {
    /// The job whose turn it is.
    pub job: J,
    budget: usize,
    spent: usize,
}

impl<J> Turn<J> {
    /// Creates a turn with a budget of `budget` bytes.
    pub const fn new(job: J, budget: usize) -> Self {
        Self { job, budget, spent: 0 }
    }

    /// Spends bytes. The last piece of work may exceed the budget.
    pub const fn spend(&mut self, bytes: usize) {
        self.spent = self.spent.saturating_add(bytes);
    }

    /// Returns the bytes spent so far.
    pub const fn spent(&self) -> usize {
        self.spent
    }

    /// Returns whether the budget is spent.
    pub const fn is_over(&self) -> bool {
        self.spent >= self.budget
    }

    /// Returns the bytes spent beyond the budget.
    pub const fn overdraft(&self) -> usize {
        self.spent.saturating_sub(self.budget)
    }
}
