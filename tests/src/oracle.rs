//! Expected results of reductions. They follow the definition of the arithmetic, block by block and
//! rank by rank, without windows, fragments, kernels or packets.

use racksum_proto::arith::{self, FoldTerms};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction, WireType};

use crate::inputs::number;

/// The expected result at every rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Expected {
    pub(crate) tensor: Vec<u8>,
    /// Whether a block holds a value that the wire type cannot carry, so that the op fails.
    pub(crate) overflows: bool,
    /// The indices of the blocks that are non-zero at some rank.
    pub(crate) union: Vec<u32>,
}

/// A node in the tree in which aggregators sum the ranks' contributions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// A rank's own contribution.
    Rank(u16),
    /// An aggregator that sums these places in this order.
    Rack(Vec<Self>),
}

impl Place {
    /// Returns a tree with one aggregator for all ranks.
    pub(crate) fn flat(world: usize) -> Self {
        Self::Rack((0..u16::try_from(world).unwrap()).map(Self::Rank).collect())
    }

    /// Returns the lowest rank of the place.
    pub(crate) fn first(&self) -> u16 {
        match self {
            Self::Rank(rank) => *rank,
            Self::Rack(places) => places.iter().map(Self::first).min().unwrap(),
        }
    }
}

/// Reduces the tensors of all ranks.
pub(crate) fn reduce(descriptor: &Descriptor, inputs: &[Vec<u8>]) -> Expected {
    reduce_at(descriptor, inputs, &Place::flat(inputs.len()))
}

/// Reduces the tensors of all ranks in a tree of aggregators.
pub(crate) fn reduce_at(descriptor: &Descriptor, inputs: &[Vec<u8>], root: &Place) -> Expected {
    let flat = Place::flat(inputs.len());
    // Fixed32 sums are exact, so the shape of the tree does not matter.
    let root = if descriptor.wire == WireType::Fixed32 { &flat } else { root };
    let Descriptor { dtype, wire, .. } = *descriptor;
    let len = descriptor.block_elements() * dtype.size();
    let mut tensor = vec![0; inputs[0].len()];
    let (mut overflows, mut union) = (false, Vec::new());
    for (index, out) in (0..).zip(tensor.chunks_mut(len)) {
        let start = index as usize * len;
        let blocks = inputs.iter().map(|input| &input[start..start + out.len()]);
        let blocks: Vec<_> = blocks.map(|block| encode(descriptor, block, inputs.len())).collect();
        let elements = out.len() / dtype.size();
        let Some(folded) = fold(descriptor, elements, root, &blocks, true) else { continue };
        if wire.is_scaled() {
            arith::decode_block(wire, dtype, &folded, out).unwrap();
        } else {
            arith::decode_run(wire, dtype, &folded, out).unwrap();
        }
        overflows |= wire == WireType::Fixed32 && arith::fixed32_overflowed(&folded);
        union.push(index);
    }
    Expected { tensor, overflows, union }
}

/// Encodes a block for the wire; returns `None` if it is zero.
fn encode(descriptor: &Descriptor, block: &[u8], world: usize) -> Option<Vec<u8>> {
    let Descriptor { dtype, wire, .. } = *descriptor;
    let mut block = block.to_vec();
    if arith::scan_window(dtype, descriptor.block_elements(), &mut block) == 0 {
        return None;
    }
    let mut encoded = vec![0; wire.block_len(block.len() / dtype.size())];
    if wire.is_scaled() {
        let world = u32::try_from(world).unwrap();
        arith::encode_block(dtype, wire, world, &block, &mut encoded).unwrap();
    } else {
        arith::encode_run(dtype, wire, &block, &mut encoded).unwrap();
    }
    Some(encoded)
}

/// Folds the ranks' blocks of `elements` elements at a place; returns `None` if no rank of the
/// place holds the block.
fn fold(
    descriptor: &Descriptor,
    elements: usize,
    place: &Place,
    blocks: &[Option<Vec<u8>>],
    is_root: bool,
) -> Option<Vec<u8>> {
    let places = match place {
        Place::Rank(rank) => return blocks[usize::from(*rank)].clone(),
        Place::Rack(places) => places,
    };
    let parts = places.iter().filter_map(|place| fold(descriptor, elements, place, blocks, false));
    let parts: Vec<_> = parts.collect();
    let parts: Vec<&[u8]> = parts.iter().map(|bytes| &bytes[..]).collect();
    if parts.is_empty() {
        return None;
    }
    let world = u32::try_from(blocks.len()).unwrap();
    let fold = FoldTerms { world, absent: parts.len() < places.len() };
    let Descriptor { wire, reduction, .. } =
        if is_root { *descriptor } else { descriptor.of_partial_sum() };
    let mut folded = vec![0; wire.block_len(elements)];
    arith::fold_run(wire, reduction, fold, &parts, &mut folded).unwrap();
    Some(folded)
}

/// Returns every valid combination of dtype, wire type and reduction.
pub(crate) fn kinds() -> Vec<Descriptor> {
    let mut kinds = Vec::new();
    for dtype in DType::ALL {
        for wire in WireType::ALL {
            for reduction in Reduction::ALL {
                let kind = Descriptor { wire, reduction, ..Descriptor::sum(0, dtype) };
                if kind.validate().is_ok() {
                    kinds.push(kind);
                }
            }
        }
    }
    kinds
}

/// Returns the largest error of a floating-point result against a reduction in f64, as a multiple
/// of the error that the dtype and the wire type allow. The inputs must be finite.
pub(crate) fn error(descriptor: &Descriptor, inputs: &[Vec<u8>], result: &[u8]) -> f64 {
    let Descriptor { dtype, wire, reduction, .. } = *descriptor;
    let world = inputs.len() as f64;
    let block = descriptor.block_elements() * dtype.size();
    let numbers = |bytes: &[u8]| -> Vec<f64> {
        bytes.chunks(dtype.size()).map(|element| number(dtype, element)).collect()
    };
    let mut worst = 0f64;
    for (at, result) in result.chunks(block).enumerate() {
        let of_rank = |input: &Vec<u8>| numbers(&input[at * block..][..result.len()]);
        let ranks: Vec<Vec<f64>> = inputs.iter().map(of_rank).collect();
        // The largest number of a scaled block sets its precision.
        let greatest = |of: &Vec<f64>| of.iter().fold(0f64, |most, x| most.max(x.abs()));
        let greatest: f64 = ranks.iter().map(greatest).sum();
        for (i, got) in numbers(result).into_iter().enumerate() {
            let column = || ranks.iter().map(|rank| rank[i]);
            let magnitude: f64 = column().map(f64::abs).sum();
            let exact = match reduction {
                Reduction::Sum => column().sum(),
                Reduction::Avg => column().sum::<f64>() / world,
                Reduction::Min => column().fold(f64::INFINITY, f64::min),
                Reduction::Max => column().fold(f64::NEG_INFINITY, f64::max),
            };
            let rounding = epsilon(dtype.native_wire()).max(epsilon(wire));
            let coarse = match wire {
                // The error is one quantum of the scale at each rank, and one for the sum.
                WireType::Int8 => 2.0 * greatest / 127.0,
                // The sum of all ranks must fit in 31 bits, which limits the precision of each.
                WireType::Fixed32 => 2.0 * world * greatest / f64::from(1 << 30),
                _ => 0.0,
            };
            // Every addition and conversion rounds; the smallest f16 is 2^-24.
            let allowed = (world + 2.0) * rounding * magnitude + coarse + 1.0 / f64::from(1 << 24);
            worst = worst.max((got - exact).abs() / allowed);
        }
    }
    worst
}

/// Returns the relative error of rounding to a wire type.
fn epsilon(wire: WireType) -> f64 {
    match wire {
        WireType::F64 => f64::EPSILON,
        WireType::F16 => f64::from(half::f16::EPSILON),
        WireType::Bf16 => f64::from(half::bf16::EPSILON),
        // Scaled types are decoded through f32.
        _ => f64::from(f32::EPSILON),
    }
}
