//! I2: same inputs, same result bits.

use std::collections::BTreeMap;
use std::mem::discriminant;

use racksum_proto::ids::OpId;

use super::{Checker, Invariant, Machine, Sight, Violation};
use crate::engine::Picos;
use crate::run::Run;

/// Compares the results of an op across ranks, and the results of whole runs.
#[derive(Debug, Default)]
pub struct SameBits {
    /// For each op of a job, the first rank that received the result, and that result.
    first: BTreeMap<(usize, OpId), (Machine, Vec<u8>)>,
}

impl SameBits {
    /// Compares the results of two runs with the same inputs.
    ///
    /// # Errors
    /// Returns the first difference.
    pub fn compare(one: &Run, other: &Run) -> Result<(), Violation> {
        for ((machine, op), ended) in &one.ended {
            let theirs = other.ended.get(&(*machine, *op));
            let same = theirs.is_some_and(|theirs| match (&ended.result, &theirs.result) {
                (Ok(bits), Ok(their_bits)) => bits == their_bits,
                // Compare only the kinds of errors: the order of arrival may decide which ranks an
                // error names.
                (Err(error), Err(their_error)) => discriminant(error) == discriminant(their_error),
                _ => false,
            });
            if !same {
                return Invariant::I2.broken(format!(
                    "op {} at {machine} ended differently in two runs with the same inputs",
                    op.0
                ));
            }
        }
        Ok(())
    }
}

impl Checker for SameBits {
    fn see(&mut self, _: Picos, machine: Machine, sight: &Sight<'_>) -> Result<(), Violation> {
        let Sight::Ended(op, Ok(tensor)) = sight else { return Ok(()) };
        let first = self.first.entry((machine.job(), *op));
        let (rank, theirs) = first.or_insert_with(|| (machine, tensor.clone()));
        if theirs == tensor {
            return Ok(());
        }
        let byte = theirs.iter().zip(tensor).take_while(|(one, other)| one == other).count();
        Invariant::I2.broken(format!(
            "the results of op {} at {rank} and at {machine} first differ at byte {byte}",
            op.0
        ))
    }
}
