//! How ranks agree on the exponents of fixed32 blocks, where aggregators sum in a tree.
//!
//! A fold rounds the integers of every rank to the greatest exponent, and an aggregator that folds
//! a rack does not know the greatest of all. So that the bits are those of one aggregator, the
//! ranks find the greatest exponents first, by an op of their own, and round as the fold would;
//! then a sum is exact wherever it is made. SwitchML agrees in the same way, packet by packet
//! (Sapio et al., NSDI 2021).

use racksum_proto::arith::fixed32_counting_exponent;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction, WireType};
use racksum_proto::error::OpError;

/// The op that finds the greatest exponents of the blocks of another.
pub(crate) fn agreement(of: &Descriptor) -> Descriptor {
    let blocks = of.elements.div_ceil(of.block_elements() as u64);
    let Descriptor { lane, tag, .. } = *of;
    Descriptor { reduction: Reduction::Max, lane, tag, ..Descriptor::sum(blocks, DType::I32) }
}

/// Whether the exponents of an op are to be agreed on, in a tree.
pub(crate) const fn are_due(of: &Descriptor) -> bool {
    matches!(of.wire, WireType::Fixed32)
}

/// Says a disagreement about the exponents of an op as one about the op, as far as it is this
/// rank's.
pub(crate) fn in_terms_of(of: &Descriptor, error: OpError) -> OpError {
    let agreement = agreement(of);
    let own = |(rank, descriptor)| (rank, if descriptor == agreement { *of } else { descriptor });
    match error {
        OpError::Mismatch { op, one, other } => {
            OpError::Mismatch { op, one: own(one), other: own(other) }
        }
        error => error,
    }
}

/// The exponents of an op's blocks, and then the greatest of all ranks': an i32 each, 0 for a block
/// that has none.
#[derive(Debug)]
pub(crate) struct Exponents(Vec<u8>);

impl Exponents {
    /// Of as many blocks as the agreement has elements, none of which has one.
    pub(crate) fn none(agreement: &Descriptor) -> Self {
        Self(vec![0; usize::try_from(agreement.elements).unwrap_or(usize::MAX).saturating_mul(4)])
    }

    /// Takes what the agreement has come to.
    pub(crate) const fn from_bytes(tensor: Vec<u8>) -> Self {
        Self(tensor)
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    /// Notes the exponent of an encoded block, if it counts.
    pub(crate) fn note(&mut self, index: usize, block: &[u8]) {
        let place = self.0.as_chunks_mut().0.get_mut(index);
        if let (Some(place), Some(exponent)) = (place, fixed32_counting_exponent(block)) {
            *place = (exponent + ABOVE_ZERO).to_le_bytes();
        }
    }

    /// The greatest exponent of a block, if it has one.
    pub(crate) fn get(&self, index: usize) -> Option<i32> {
        let exponent = i32::from_le_bytes(*self.0.as_chunks().0.get(index)?);
        (exponent != 0).then(|| exponent - ABOVE_ZERO)
    }
}

/// What makes every exponent positive: they are those of f64, or thereabouts.
const ABOVE_ZERO: i32 = 1 << 12;
