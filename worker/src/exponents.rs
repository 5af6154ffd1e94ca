//! Agreement of the ranks on the exponents of fixed32 blocks, if aggregators sum in a tree.
//!
//! A fold rounds the integers of all ranks to the greatest exponent, but an aggregator that folds a
//! rack does not know the greatest exponent of all ranks. The result must have the same bits as
//! with one aggregator. The ranks therefore first find the greatest exponents in a separate op, and
//! round as the fold would. A sum is then exact at every level of the tree. In SwitchML, workers
//! agree in the same way, packet by packet (Sapio et al., NSDI 2021).

use racksum_proto::arith::fixed32_counting_exponent;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction, WireType};
use racksum_proto::error::OpError;

/// Returns the op that finds the greatest exponents of the blocks of another op. The tag of the
/// returned op encodes the other op, so that a mismatch error can name the op that each rank
/// called.
pub(crate) fn agreement(of: &Descriptor) -> Descriptor {
    let blocks = of.elements.div_ceil(of.block_elements() as u64);
    let Descriptor { lane, dtype, reduction, block_log2, elements, call, .. } = *of;
    let dtype = DType::ALL.iter().position(|other| *other == dtype).unwrap_or(0) as u64;
    let reductions = Reduction::ALL;
    let reduction = reductions.iter().position(|other| *other == reduction).unwrap_or(0) as u64;
    let kind = u64::from(block_log2) << 8 | dtype << 4 | reduction;
    let tag = MARK << 56 | kind << 40 | elements & ELEMENTS;
    let of_blocks = Descriptor::sum(blocks, DType::I32);
    Descriptor { reduction: Reduction::Max, lane, tag, call, ..of_blocks }
}

/// Returns the op whose exponents `agreement` finds, without that op's tag. Returns `agreement`
/// itself if it is not an agreement.
fn meant_by(agreement: Descriptor) -> Descriptor {
    let Descriptor { lane, tag, call, .. } = agreement;
    let nibble = |at: u32| usize::try_from(tag >> at & 0xf).unwrap_or(0);
    let (dtype, reduction) = (DType::ALL.get(nibble(44)), Reduction::ALL.get(nibble(40)));
    let (Some(dtype), Some(reduction)) = (dtype, reduction) else { return agreement };
    let block_log2 = u8::try_from(tag >> 48 & 0xff).unwrap_or(0);
    let of = Descriptor::sum(tag & ELEMENTS, *dtype);
    let (reduction, wire) = (*reduction, WireType::Fixed32);
    let of = Descriptor { reduction, wire, lane, block_log2, call, ..of };
    let is_one = of.validate().is_ok() && self::agreement(&of) == agreement;
    if is_one { of } else { agreement }
}

/// Returns whether, in a tree, ranks must agree on the exponents of ops of this wire type.
pub(crate) const fn are_due(wire: WireType) -> bool {
    matches!(wire, WireType::Fixed32)
}

/// Converts a mismatch of agreements into a mismatch of the ops that they belong to.
pub(crate) fn as_meant(error: OpError) -> OpError {
    let meant = |(rank, descriptor)| (rank, meant_by(descriptor));
    match error {
        OpError::Mismatch { op, one, other } => {
            OpError::Mismatch { op, one: meant(one), other: meant(other) }
        }
        error => error,
    }
}

/// The exponents of an op's blocks at this rank or, after the agreement, the greatest exponents at
/// any rank: one i32 for each block, which is 0 if the block has no exponent.
#[derive(Debug)]
pub(crate) struct Exponents(Vec<u8>);

impl Exponents {
    /// Creates one absent exponent for each element of the agreement.
    pub(crate) fn none(agreement: &Descriptor) -> Self {
        Self(vec![0; usize::try_from(agreement.elements).unwrap_or(usize::MAX).saturating_mul(4)])
    }

    /// Wraps the result of an agreement.
    pub(crate) const fn from_bytes(tensor: Vec<u8>) -> Self {
        Self(tensor)
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    /// Records the exponent of an encoded block, unless the block overflowed or is zero.
    pub(crate) fn note(&mut self, index: usize, block: &[u8]) {
        let place = self.0.as_chunks_mut().0.get_mut(index);
        if let (Some(place), Some(exponent)) = (place, fixed32_counting_exponent(block)) {
            *place = (exponent + ABOVE_ZERO).to_le_bytes();
        }
    }

    /// Returns the greatest exponent of a block, if it has one.
    pub(crate) fn get(&self, index: usize) -> Option<i32> {
        let exponent = i32::from_le_bytes(*self.0.as_chunks().0.get(index)?);
        // Values from the network are arbitrary, so the subtraction must not overflow.
        (exponent != 0).then(|| exponent.saturating_sub(ABOVE_ZERO))
    }
}

/// The offset that makes every exponent positive. Exponents span about the same range as those of
/// f64.
const ABOVE_ZERO: i32 = 1 << 12;
/// The first byte of an agreement's tag.
const MARK: u64 = 0xe5;
/// The bits of the tag that hold the number of elements of the op.
const ELEMENTS: u64 = (1 << 40) - 1;

#[cfg(test)]
mod tests {
    use racksum_proto::call::{Call, Collective};

    use super::*;

    #[test]
    fn an_agreement_tells_which_op_it_is_for_and_other_ops_are_none() {
        for dtype in [DType::F32, DType::F64] {
            for reduction in Reduction::ALL {
                let wire = WireType::Fixed32;
                let call = Call { number: 7, collective: Collective::AllReduce, root: 0 };
                let of = Descriptor::sum(1_000_001, dtype);
                let of = Descriptor { wire, reduction, lane: 3, call, ..of };
                let of = of.with_block(64).unwrap();
                assert_eq!(meant_by(agreement(&of)), of);
                let blocks = usize::try_from(agreement(&of).elements).unwrap();
                assert_eq!(blocks, 15_626);
                assert_eq!(Exponents::none(&agreement(&of)).into_bytes().len(), 4 * blocks);
            }
        }
        for tag in [0, 7, MARK << 56, u64::MAX] {
            let other =
                Descriptor { tag, reduction: Reduction::Max, ..Descriptor::sum(9, DType::I32) };
            assert_eq!(meant_by(other), other);
        }
    }

    #[test]
    fn any_number_from_the_network_is_an_exponent() {
        let all = [i32::MIN, -1, 0, 1, i32::MAX].map(i32::to_le_bytes).concat();
        let exponents = Exponents::from_bytes(all);
        assert!((0..5).all(|i| exponents.get(i).is_some() == (i != 2)));
        assert_eq!(exponents.get(5), None);
    }
}
