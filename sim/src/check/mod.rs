//! Checkers: they observe a run and verify it without taking part.
//!
//! Each checker verifies one invariant of `ARCHITECTURE.md`. It sees the protocol only from
//! outside: datagrams, observer events and the outcomes of ops. The [`oracle`] computes the
//! expected results from the inputs alone.

mod bits;
mod bounds;
mod bytes;
mod ends;
mod exactly_once;
mod foreign;
pub mod oracle;
#[cfg(test)]
mod tests;
mod trace;

use std::fmt;
use std::rc::Rc;

use racksum_proto::error::OpError;
use racksum_proto::ids::OpId;
use racksum_proto::observer::{Event, EventCounts, Observer};
use serde::Serialize;

pub use self::bits::SameBits;
pub use self::bounds::Bounded;
pub use self::bytes::FewBytes;
pub use self::ends::Ends;
pub use self::exactly_once::ExactlyOnce;
pub use self::foreign::Foreign;
use self::oracle::Oracle;
pub use self::trace::Trace;
use crate::engine::Picos;
use crate::plan::Plan;
use crate::run::Machine;

/// An invariant that must hold in every run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Invariant {
    /// Every contribution is folded exactly once.
    I1,
    /// Same inputs, same result bits.
    I2,
    /// A rank sends and receives no more bytes than the non-zero blocks need, plus a small
    /// overhead.
    I3,
    /// Memory is bounded by what was configured at start.
    I4,
    /// Every op ends in time, with a result or a typed error.
    I5,
    /// A foreign datagram changes nothing but a counter.
    I6,
}

/// A violated invariant and a description.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{invariant}: {sentence}")]
pub struct Violation {
    /// The invariant that the run broke.
    pub invariant: Invariant,
    /// A sentence that describes the violation.
    pub sentence: String,
}

/// An observation of a machine.
#[derive(Debug)]
pub enum Sight<'a> {
    /// The machine reported an event to its observer.
    Event(&'a Event<'a>),
    /// The machine reported an event while it handled a stranger's datagram.
    Foreign(&'a Event<'a>),
    /// The machine sent a datagram.
    Sent(&'a [u8]),
    /// The machine received a datagram.
    Received(&'a [u8]),
    /// A job's turn at a shard has ended, and the job's slots there hold this many fragments.
    Driven {
        /// The number of fragments held.
        held: usize,
    },
    /// A rank called an op.
    Called(OpId),
    /// An op ended at a rank, with the reduced tensor or an error.
    Ended(OpId, &'a Result<Vec<u8>, OpError>),
    /// A rank could not call an op because its session had ended.
    Refused(OpId),
}

/// Verifies a run.
pub trait Checker {
    /// Handles an observation of `machine` at time `at`.
    ///
    /// # Errors
    /// Returns the violation that the observation shows.
    fn see(&mut self, at: Picos, machine: Machine, sight: &Sight<'_>) -> Result<(), Violation>;

    /// Makes the checks that need the complete run, such as whether every op has ended.
    ///
    /// # Errors
    /// Returns the violation that the complete run shows.
    fn conclude(&mut self) -> Result<(), Violation> {
        Ok(())
    }
}

/// A set of checkers, the first violation that one of them found, and the counts of all events.
#[derive(Default)]
pub struct Checkers {
    checkers: Vec<Box<dyn Checker>>,
    violation: Option<Violation>,
    counts: EventCounts,
}

impl Checkers {
    /// Creates the checkers of the invariants that hold in every run of `plan`.
    #[must_use]
    pub fn of(plan: &Plan) -> Self {
        let oracle = Rc::new(Oracle::new(plan));
        let moves = !plan.moves.is_empty();
        let checkers = Self::default()
            .with(ExactlyOnce::new(Rc::clone(&oracle), moves))
            .with(SameBits::default())
            .with(Ends::new(plan, oracle))
            .with(Foreign::new(plan));
        // `Bounded` counts from the start of the shards, so new shards would invalidate its counts.
        if moves { checkers } else { checkers.with(Bounded::new(plan)) }
    }

    /// Adds `checker`.
    #[must_use]
    pub fn with(mut self, checker: impl Checker + 'static) -> Self {
        self.checkers.push(Box::new(checker));
        self
    }

    /// Passes an observation to all checkers.
    pub fn see(&mut self, at: Picos, machine: Machine, sight: &Sight<'_>) {
        for checker in &mut self.checkers {
            if let Err(violation) = checker.see(at, machine, sight) {
                self.violation.get_or_insert(violation);
            }
        }
    }

    /// Returns the event counts of all machines, including the shards' earlier lives.
    #[must_use]
    pub const fn counts(&self) -> &EventCounts {
        &self.counts
    }

    /// Checks whether any checker has found a violation.
    ///
    /// # Errors
    /// Returns the first violation.
    pub fn verdict(&self) -> Result<(), Violation> {
        self.violation.clone().map_or(Ok(()), Err)
    }

    /// Concludes all checkers at the end of the run.
    ///
    /// # Errors
    /// Returns the first violation.
    pub fn conclude(&mut self) -> Result<(), Violation> {
        self.verdict()?;
        self.checkers.iter_mut().try_for_each(|checker| checker.conclude())
    }
}

impl fmt::Debug for Checkers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkers")
            .field("checkers", &self.checkers.len())
            .field("violation", &self.violation)
            .field("counts", &self.counts)
            .finish()
    }
}

/// An observer that counts a machine's events and passes them to the checkers.
#[derive(Debug)]
pub struct Watch<'a> {
    /// The time of the events.
    pub at: Picos,
    /// The machine that reports the events.
    pub machine: Machine,
    /// Whether the machine is handling a stranger's datagram.
    pub foreign: bool,
    /// The checkers that receive the events.
    pub checkers: &'a mut Checkers,
}

impl Observer for Watch<'_> {
    fn on_event(&mut self, event: &Event<'_>) {
        self.checkers.counts.on_event(event);
        let sight = if self.foreign { Sight::Foreign(event) } else { Sight::Event(event) };
        self.checkers.see(self.at, self.machine, &sight);
    }
}

impl fmt::Display for Invariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl Invariant {
    /// Returns an error that reports this invariant as violated, with `sentence` as the
    /// description.
    pub(crate) fn broken<T>(self, sentence: impl Into<String>) -> Result<T, Violation> {
        Err(Violation { invariant: self, sentence: sentence.into() })
    }
}
