//! I1: every contribution is folded exactly once.

use std::collections::BTreeSet;
use std::rc::Rc;

use racksum_proto::ids::{OpId, WindowId};
use racksum_proto::observer::Event;

use super::oracle::{Expected, Oracle};
use super::{Checker, Invariant, Machine, Sight, Violation};
use crate::engine::Picos;

/// Compares every fold's blocks and number of ranks, and every bit of every result, with the
/// oracle's expectations.
#[derive(Debug)]
pub struct ExactlyOnce {
    oracle: Rc<Oracle>,
    folded: BTreeSet<(usize, WindowId)>,
    /// Whether jobs move. After a move, shards fold a window again if some rank lacks its sum, or
    /// take the sum from a rank that has it. The checker then checks only the results.
    moves: bool,
}

impl ExactlyOnce {
    /// Creates a checker for runs of the plan that `oracle` was computed from.
    #[must_use]
    pub const fn new(oracle: Rc<Oracle>, moves: bool) -> Self {
        Self { oracle, folded: BTreeSet::new(), moves }
    }

    fn folded(
        &mut self,
        job: usize,
        window: WindowId,
        union: u64,
        contributors: u32,
    ) -> Result<(), Violation> {
        let (op, index) = (window.op.0, window.index);
        if !self.folded.insert((job, window)) && !self.moves {
            return BROKEN.broken(format!("window {index} of op {op} was folded twice"));
        }
        let Some(truth) = self.oracle.truth(job, window.op) else {
            return BROKEN.broken(format!("op {op} was folded, but is not in the plan"));
        };
        if truth.expected == Expected::Mismatch || self.moves {
            return Ok(());
        }
        let (owed, by) = (truth.union(index), truth.contributors(index));
        if (union, contributors) != (owed, by) {
            return BROKEN.broken(format!(
                "window {index} of op {op} was folded with blocks {union:#x} of {contributors} \
                 ranks, but {by} ranks contribute blocks {owed:#x}"
            ));
        }
        Ok(())
    }

    fn ended(&self, machine: Machine, op: OpId, tensor: &[u8]) -> Result<(), Violation> {
        let job = machine.job();
        let Some(truth) = self.oracle.truth(job, op) else { return Ok(()) };
        let Expected::Result(expected) = &truth.expected else { return Ok(()) };
        for index in (0..truth.windows()).filter(|index| truth.union(*index) != 0) {
            if !self.folded.contains(&(job, WindowId::new(op, index))) {
                return BROKEN.broken(format!(
                    "op {} ended at {machine}, but its window {index} was never folded",
                    op.0
                ));
            }
        }
        let differs = expected.iter().zip(tensor).position(|(one, other)| one != other);
        if differs.is_some() || expected.len() != tensor.len() {
            let byte = differs.unwrap_or_else(|| expected.len().min(tensor.len()));
            return BROKEN.broken(format!(
                "the result of op {} at {machine} is first wrong at byte {byte} of {}",
                op.0,
                expected.len()
            ));
        }
        Ok(())
    }
}

impl Checker for ExactlyOnce {
    fn see(&mut self, _: Picos, machine: Machine, sight: &Sight<'_>) -> Result<(), Violation> {
        match sight {
            Sight::Event(Event::Folded { window, union, contributors }) => {
                self.folded(machine.job(), *window, *union, *contributors)
            }
            Sight::Ended(op, Ok(tensor)) => self.ended(machine, *op, tensor),
            _ => Ok(()),
        }
    }
}

const BROKEN: Invariant = Invariant::I1;
