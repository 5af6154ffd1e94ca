//! What a reduction must come to: the definition of the arithmetic, block by block and rank by
//! rank, without windows, fragments, kernels or packets.

use racksum_proto::arith::{self, Fold};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction, WireType};

use crate::inputs::number;

/// What every rank must end with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Expected {
    pub(crate) tensor: Vec<u8>,
    /// A block holds what the wire type cannot carry, so the op fails.
    pub(crate) overflows: bool,
    /// The blocks that some rank holds.
    pub(crate) union: Vec<u32>,
}

/// Reduces the tensors of all ranks.
pub(crate) fn reduce(descriptor: &Descriptor, inputs: &[Vec<u8>]) -> Expected {
    let len = descriptor.block_elements() * descriptor.dtype.size();
    let mut tensor = vec![0; inputs[0].len()];
    let (mut overflows, mut union) = (false, Vec::new());
    for (index, out) in (0..).zip(tensor.chunks_mut(len)) {
        let start = index as usize * len;
        let end = start + out.len();
        let blocks = inputs.iter().map(|input| &input[start..end]);
        if let Some(folded) = reduce_block(descriptor, blocks, out) {
            overflows |= descriptor.wire == WireType::Fixed32 && arith::fixed32_overflowed(&folded);
            union.push(index);
        }
    }
    Expected { tensor, overflows, union }
}

/// Reduces one block of all ranks into `out`; returns it as it would travel, or `None` when no
/// rank holds it.
fn reduce_block<'a>(
    descriptor: &Descriptor,
    blocks: impl ExactSizeIterator<Item = &'a [u8]>,
    out: &mut [u8],
) -> Option<Vec<u8>> {
    let Descriptor { dtype, wire, reduction, .. } = *descriptor;
    let elements = out.len() / dtype.size();
    let world = u32::try_from(blocks.len()).unwrap();
    let mut contributions = Vec::new();
    for block in blocks {
        let mut block = block.to_vec();
        if arith::scan_window(dtype, descriptor.block_elements(), &mut block) == 0 {
            continue;
        }
        let mut encoded = vec![0; wire.block_len(elements)];
        if wire.is_scaled() {
            arith::encode_block(dtype, wire, world, &block, &mut encoded).unwrap();
        } else {
            arith::encode_run(dtype, wire, &block, &mut encoded).unwrap();
        }
        contributions.push(encoded);
    }
    if contributions.is_empty() {
        return None;
    }
    let fold = Fold { world, absent: contributions.len() < world as usize };
    let contributions: Vec<&[u8]> = contributions.iter().map(|bytes| &bytes[..]).collect();
    let mut folded = vec![0; wire.block_len(elements)];
    arith::fold_run(wire, reduction, fold, &contributions, &mut folded).unwrap();
    if wire.is_scaled() {
        arith::decode_block(wire, dtype, &folded, out).unwrap();
    } else {
        arith::decode_run(wire, dtype, &folded, out).unwrap();
    }
    Some(folded)
}

/// Every way in which a tensor can be reduced: dtype, wire type and reduction.
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

/// The greatest error of a floating-point result, as a share of what its type and the wire type
/// allow, against a reduction in f64. The inputs are finite.
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
        // A scaled block is as coarse as its greatest number.
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
                // A quantum of the scale at each rank, and one of the sum's.
                WireType::Int8 => 2.0 * greatest / 127.0,
                // 31 bits are shared by the world.
                WireType::Fixed32 => 2.0 * world * greatest / f64::from(1 << 30),
                _ => 0.0,
            };
            // Every addition and conversion rounds; the least f16 is 2^-24.
            let allowed = (world + 2.0) * rounding * magnitude + coarse + 1.0 / f64::from(1 << 24);
            worst = worst.max((got - exact).abs() / allowed);
        }
    }
    worst
}

/// The relative error of rounding to a wire type.
fn epsilon(wire: WireType) -> f64 {
    match wire {
        WireType::F64 => f64::EPSILON,
        WireType::F16 => f64::from(half::f16::EPSILON),
        WireType::Bf16 => f64::from(half::bf16::EPSILON),
        // Scaled types come back through f32.
        _ => f64::from(f32::EPSILON),
    }
}
