//! I6: a datagram of another job, generation or sender changes nothing but a counter.

use racksum_proto::observer::Event;
use racksum_proto::reject::Reject;

use super::{Checker, Invariant, Machine, Sight, Violation};
use crate::engine::Picos;
use crate::plan::Plan;
use crate::run::Run;

/// Checks that machines reject strangers' datagrams and accept genuine ones. It also compares runs
/// with and without strangers.
#[derive(Debug)]
pub struct Foreign {
    /// For each job, whether its ranks disagree about an op. After a disagreement, they may number
    /// windows differently for a while.
    diverges: Vec<bool>,
    /// Whether jobs move. After a move, datagrams from or to dead shards may reach live machines,
    /// and ranks may send data of windows whose sums other ranks already have.
    moves: bool,
}

impl Foreign {
    /// Creates a checker for runs of `plan`.
    #[must_use]
    pub fn new(plan: &Plan) -> Self {
        let diverges = |ops: &[_]| ops.iter().any(|op: &crate::plan::OpPlan| op.odd.is_some());
        let diverges = plan.jobs.iter().map(|job| diverges(&job.ops)).collect();
        Self { diverges, moves: !plan.moves.is_empty() }
    }

    /// Compares two runs of one plan, without and with strangers.
    ///
    /// # Errors
    /// Returns a violation if the traces differ.
    pub fn compare(quiet: &Run, noisy: &Run) -> Result<(), Violation> {
        if quiet.trace != noisy.trace {
            let sentence = "datagrams of strangers changed the machines' output or its timing";
            return Invariant::I6.broken(sentence);
        }
        Ok(())
    }

    fn judge(&self, job: usize, reject: Reject) -> bool {
        match reject {
            Reject::Stale | Reject::Unopened => true,
            Reject::Unowed | Reject::BeyondPool | Reject::BeyondOps | Reject::Shape => {
                self.diverges[job] || self.moves
            }
            Reject::Job => self.moves,
            _ => false,
        }
    }
}

impl Checker for Foreign {
    fn see(&mut self, _: Picos, machine: Machine, sight: &Sight<'_>) -> Result<(), Violation> {
        match sight {
            Sight::Event(Event::Rejected(reject)) if !self.judge(machine.job(), *reject) => {
                Invariant::I6.broken(format!(
                    "{machine} rejected a datagram of its own job as {}",
                    reject.name()
                ))
            }
            Sight::Foreign(event) if !matches!(event, Event::Rejected(_)) => Invariant::I6
                .broken(format!("a stranger's datagram had an effect at {machine}: {event:?}")),
            _ => Ok(()),
        }
    }
}
