//! Checkers: they judge what a run shows of itself and take no part in it.
//!
//! Each holds one invariant of `ARCHITECTURE.md` and knows the protocol from outside only: its
//! datagrams, what its machines tell observers, and how ops end. What a run should come to is
//! worked out by the [`oracle`], straight from the inputs.

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
use racksum_proto::observer::{Event, Observer};
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

/// What must hold in every run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Invariant {
    /// Every contribution is folded exactly once.
    I1,
    /// Same inputs, same result bits.
    I2,
    /// No more bytes than the non-zero ones, and a little.
    I3,
    /// Memory is bounded by what was configured at start.
    I4,
    /// Every op ends in time, with a result or a typed error.
    I5,
    /// A foreign datagram changes nothing but a counter.
    I6,
}

/// What did not hold, and how.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{invariant}: {sentence}")]
pub struct Violation {
    /// The invariant.
    pub invariant: Invariant,
    /// What was seen.
    pub sentence: String,
}

/// What a checker gets to see of a machine.
#[derive(Debug)]
pub enum Sight<'a> {
    /// It told its observer.
    Event(&'a Event<'a>),
    /// It told its observer while it handled a stranger's datagram.
    Foreign(&'a Event<'a>),
    /// It sent a datagram.
    Sent(&'a [u8]),
    /// It took a datagram.
    Received(&'a [u8]),
    /// It has been driven until it had nothing more to do, and holds this many fragments.
    Driven {
        /// Fragments held.
        held: usize,
    },
    /// A rank called an op.
    Called(OpId),
    /// A rank's op ended: the reduced tensor, or why there is none.
    Ended(OpId, &'a Result<Vec<u8>, OpError>),
    /// A rank could not call an op because its session has ended.
    Refused(OpId),
}

/// Judges a run.
pub trait Checker {
    /// Takes what there is to see of `machine` at `at`.
    ///
    /// # Errors
    /// What does not hold.
    fn see(&mut self, at: Picos, machine: Machine, sight: &Sight<'_>) -> Result<(), Violation>;

    /// Judges what is missing once the run is over.
    ///
    /// # Errors
    /// What does not hold.
    fn conclude(&mut self) -> Result<(), Violation> {
        Ok(())
    }
}

/// Several checkers, and the first violation that one of them found.
#[derive(Default)]
pub struct Checkers {
    checkers: Vec<Box<dyn Checker>>,
    violation: Option<Violation>,
}

impl Checkers {
    /// All checkers that hold in every run of `plan`.
    #[must_use]
    pub fn of(plan: &Plan) -> Self {
        let oracle = Rc::new(Oracle::new(plan));
        let moves = !plan.moves.is_empty();
        let checkers = Self::default()
            .with(ExactlyOnce::new(Rc::clone(&oracle), moves))
            .with(SameBits::default())
            .with(Ends::new(plan, oracle))
            .with(Foreign::new(plan));
        // What is held is counted from the shards' beginning on.
        if moves { checkers } else { checkers.with(Bounded::new(plan)) }
    }

    /// These and `checker`.
    #[must_use]
    pub fn with(mut self, checker: impl Checker + 'static) -> Self {
        self.checkers.push(Box::new(checker));
        self
    }

    /// Shows all of them what there is to see.
    pub fn see(&mut self, at: Picos, machine: Machine, sight: &Sight<'_>) {
        for checker in &mut self.checkers {
            if let Err(violation) = checker.see(at, machine, sight) {
                self.violation.get_or_insert(violation);
            }
        }
    }

    /// The first violation, if there was one.
    ///
    /// # Errors
    /// That violation.
    pub fn verdict(&self) -> Result<(), Violation> {
        self.violation.clone().map_or(Ok(()), Err)
    }

    /// The same once the run is over.
    ///
    /// # Errors
    /// The first violation.
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
            .finish()
    }
}

/// Shows the checkers what a machine tells its observer.
#[derive(Debug)]
pub struct Watch<'a> {
    /// When.
    pub at: Picos,
    /// The machine.
    pub machine: Machine,
    /// Whether it handles a stranger's datagram.
    pub foreign: bool,
    /// The checkers.
    pub checkers: &'a mut Checkers,
}

impl Observer for Watch<'_> {
    fn on_event(&mut self, event: &Event<'_>) {
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
    /// The violation of this that `sentence` tells of.
    pub(crate) fn broken<T>(self, sentence: impl Into<String>) -> Result<T, Violation> {
        Err(Violation { invariant: self, sentence: sentence.into() })
    }
}
