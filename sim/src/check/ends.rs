//! I5: every op ends, with its result or with an error that names the cause, within its timeout.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use racksum_proto::descriptor::Descriptor;
use racksum_proto::error::OpError;
use racksum_proto::ids::{OpId, Rank};

use super::oracle::{Expected, Oracle};
use super::{Checker, Invariant, Machine, Sight, Violation};
use crate::engine::Picos;
use crate::plan::{Absence, Plan};

/// Checks that every op ends by its deadline, with an outcome that the plan justifies.
///
/// Loss never excuses a timeout: if all ranks take part, a timeout is a violation, because it
/// indicates a livelock.
#[derive(Debug)]
pub struct Ends {
    plan: Plan,
    oracle: Rc<Oracle>,
    /// Ops in flight, ordered by deadline.
    open: BTreeSet<(Picos, Machine, OpId)>,
    deadlines: BTreeMap<(Machine, OpId), Picos>,
    /// The number of ended ops, by rank.
    ended: BTreeMap<Machine, usize>,
    /// How long after its deadline an op may end, because a paused host handles no timeouts.
    slack: Picos,
}

impl Ends {
    /// Creates a checker for runs of `plan`.
    #[must_use]
    pub fn new(plan: &Plan, oracle: Rc<Oracle>) -> Self {
        Self {
            slack: plan.paused() + Picos::from_millis(1),
            plan: plan.clone(),
            oracle,
            open: BTreeSet::new(),
            deadlines: BTreeMap::new(),
            ended: BTreeMap::new(),
        }
    }

    /// Returns whether the machine belongs to a rank that dies.
    fn dies(&self, machine: Machine) -> bool {
        match machine {
            Machine::Worker { job, rank } => self.plan.jobs[job].dies(rank).is_some(),
            Machine::Shard { .. } => false,
        }
    }

    fn called(&mut self, at: Picos, machine: Machine, op: OpId) {
        let timeout = self.plan.jobs[machine.job()].ops[op.0 as usize].timeout;
        let deadline = at + Picos::from(timeout);
        if !self.dies(machine) {
            self.open.insert((deadline, machine, op));
            self.deadlines.insert((machine, op), deadline);
        }
    }

    fn ended(
        &mut self,
        machine: Machine,
        op: OpId,
        result: &Result<Vec<u8>, OpError>,
    ) -> Result<(), Violation> {
        if self.dies(machine) {
            return Ok(());
        }
        let Some(deadline) = self.deadlines.remove(&(machine, op)) else {
            return BROKEN.broken(format!("op {} ended at {machine}, but was not in flight", op.0));
        };
        self.open.remove(&(deadline, machine, op));
        *self.ended.entry(machine).or_default() += 1;
        let wrong = match result {
            Ok(_) => self.judge_result(machine, op),
            Err(error) => self.judge_error(machine, op, error),
        };
        wrong.map_or(Ok(()), |wrong| BROKEN.broken(format!("{machine}: {wrong}")))
    }

    fn judge_result(&self, machine: Machine, op: OpId) -> Option<String> {
        let truth = self.oracle.truth(machine.job(), op);
        let expected = truth.map(|truth| &truth.expected);
        let fails = !matches!(expected, Some(Expected::Result(_)));
        fails.then(|| format!("op {} has a result, although it should have failed", op.0))
    }

    /// Returns a description of the violation if the plan does not justify the error.
    fn judge_error(&self, machine: Machine, op: OpId, error: &OpError) -> Option<String> {
        let job = &self.plan.jobs[machine.job()];
        let expected = &self.oracle.truth(machine.job(), op)?.expected;
        let excused = match error {
            OpError::Mismatch { one, other, .. } => {
                let is_true = |(rank, descriptor): &(Rank, Descriptor)| {
                    job.ops[op.0 as usize].descriptor(*rank) == *descriptor
                };
                *expected == Expected::Mismatch
                    && one.1 != other.1
                    && is_true(one)
                    && is_true(other)
            }
            OpError::Dropped { .. } => {
                *expected == Expected::Mismatch && !self.plan.moves.is_empty()
            }
            OpError::Overflow { element, .. } => {
                matches!(expected, Expected::Overflow(elements) if elements.contains(element))
            }
            OpError::Timeout { missing, .. } => job.missing.is_some_and(|absent| {
                self.may_lack(machine, op) && missing.iter().any(|(rank, _)| *rank == absent.rank)
            }),
            OpError::Ended { .. } => self.may_lack(machine, op),
            // No plan has an aggregator that reports a lost rank or ends the session.
            _ => false,
        };
        (!excused).then(|| format!("the plan does not justify this error: {error}"))
    }

    /// Returns whether an op may fail because a rank is missing.
    fn may_lack(&self, machine: Machine, op: OpId) -> bool {
        self.plan.jobs[machine.job()].missing.is_some_and(|missing| match missing.absence {
            Absence::Calls(calls) => op.0 as usize >= calls,
            Absence::Dies(_) => true,
        })
    }
}

impl Checker for Ends {
    fn see(&mut self, at: Picos, machine: Machine, sight: &Sight<'_>) -> Result<(), Violation> {
        match sight {
            Sight::Called(op) => self.called(at, machine, *op),
            Sight::Ended(op, result) => self.ended(machine, *op, result)?,
            Sight::Refused(op) if self.may_lack(machine, *op) => {
                *self.ended.entry(machine).or_default() += 1;
            }
            Sight::Refused(op) => {
                let sentence = format!("{machine} refused op {} without a reason", op.0);
                return BROKEN.broken(sentence);
            }
            _ => {}
        }
        match self.open.first() {
            Some((deadline, machine, op)) if *deadline + self.slack < at => {
                BROKEN.broken(format!("op {} at {machine} is in flight past its deadline", op.0))
            }
            _ => Ok(()),
        }
    }

    fn conclude(&mut self) -> Result<(), Violation> {
        if let Some((_, machine, op)) = self.open.first() {
            return BROKEN.broken(format!("op {} never ended at {machine}", op.0));
        }
        for (job, plan) in self.plan.jobs.iter().enumerate() {
            for rank in (0..plan.world).map(Rank).filter(|rank| plan.dies(*rank).is_none()) {
                let machine = Machine::Worker { job, rank };
                let ended = self.ended.get(&machine).copied().unwrap_or(0);
                let calls = plan.calls(rank);
                if ended != calls {
                    let sentence = format!("{ended} of {calls} ops ended at {machine}");
                    return BROKEN.broken(sentence);
                }
            }
        }
        Ok(())
    }
}

const BROKEN: Invariant = Invariant::I5;
