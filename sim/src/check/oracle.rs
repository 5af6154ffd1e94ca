//! The oracle: the expected results of a run, computed from its inputs alone. It reduces whole
//! tensors block by block in rank order, one element at a time. The reduction involves no windows,
//! slots or fragments.

use std::collections::BTreeSet;

use racksum_proto::arith::{self, FoldTerms};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction, WireType};
use racksum_proto::geometry::Geometry;
use racksum_proto::ids::{OpId, Rank};

use crate::plan::{JobPlan, OpPlan, Plan};

/// The expected outcome of every op of a plan.
#[derive(Debug)]
pub struct Oracle {
    jobs: Vec<Vec<Truth>>,
}

/// The expectations for one op: its outcome, and the blocks that each rank contributes.
#[derive(Debug)]
pub struct Truth {
    /// How the op should end.
    pub expected: Expected,
    geometry: Geometry,
    /// The masks of non-zero blocks, by rank and window.
    masks: Vec<Vec<u64>>,
}

/// The expected outcome of an op.
#[derive(Debug, PartialEq, Eq)]
pub enum Expected {
    /// The op ends with this tensor.
    Result(Vec<u8>),
    /// The op fails with an overflow in one of the blocks that start at these elements.
    Overflow(BTreeSet<u64>),
    /// The op fails because the ranks disagree.
    Mismatch,
}

impl Oracle {
    /// Computes the outcomes of all ops of `plan`.
    #[must_use]
    pub fn new(plan: &Plan) -> Self {
        let of_job = |job: &JobPlan| {
            let ops = job.ops.iter();
            ops.map(|op| Truth::new(op, job.world)).collect()
        };
        Self { jobs: plan.jobs.iter().map(of_job).collect() }
    }

    /// Returns the expectations for an op, or `None` if the plan has no such op.
    #[must_use]
    pub fn truth(&self, job: usize, op: OpId) -> Option<&Truth> {
        self.jobs.get(job)?.get(op.0 as usize)
    }

    /// Returns how many ops a job has.
    #[must_use]
    pub fn ops(&self, job: usize) -> usize {
        self.jobs[job].len()
    }
}

impl Truth {
    fn new(op: &OpPlan, world: u16) -> Self {
        let geometry = Geometry::new(&op.descriptor);
        if op.odd.is_some() {
            return Self { expected: Expected::Mismatch, geometry, masks: Vec::new() };
        }
        let tensors: Vec<_> = (0..world).map(|rank| op.tensor(Rank(rank))).collect();
        let masks = tensors.iter().map(|tensor| masks(&op.descriptor, &geometry, tensor)).collect();
        let expected = reduce(&op.descriptor, &tensors);
        Self { expected, geometry, masks }
    }

    /// Returns how many windows the op has.
    #[must_use]
    pub const fn windows(&self) -> u32 {
        self.geometry.windows()
    }

    /// Returns the mask of the blocks that `rank` contributes to a window.
    #[must_use]
    pub fn mask(&self, rank: Rank, window: u32) -> u64 {
        let windows = self.masks.get(rank.index());
        windows.and_then(|windows| windows.get(window as usize)).copied().unwrap_or(0)
    }

    /// Returns the mask of the blocks that at least one rank contributes to a window.
    #[must_use]
    pub fn union(&self, window: u32) -> u64 {
        self.masks.iter().fold(0, |union, windows| union | windows[window as usize])
    }

    /// Returns how many ranks contribute to a window.
    #[must_use]
    pub fn contributors(&self, window: u32) -> u32 {
        self.masks.iter().map(|windows| u32::from(windows[window as usize] != 0)).sum()
    }

    /// Returns how many bytes the blocks in `mask` take on the wire.
    #[must_use]
    pub fn payload_len(&self, window: u32, mask: u64) -> usize {
        self.geometry.payload_len(window, mask)
    }
}

/// Returns each window's mask of non-zero blocks.
fn masks(descriptor: &Descriptor, geometry: &Geometry, tensor: &[u8]) -> Vec<u64> {
    let size = descriptor.dtype.size();
    let blocks = tensor.chunks(descriptor.block_elements() * size);
    let mut masks = vec![0; geometry.windows() as usize];
    for (at, block) in blocks.enumerate() {
        let (window, bit) = (at / geometry.window_blocks(), at % geometry.window_blocks());
        masks[window] |= u64::from(!is_zero(descriptor.dtype, block)) << bit;
    }
    masks
}

/// Returns whether every element of a block is zero, of either sign.
fn is_zero(dtype: DType, block: &[u8]) -> bool {
    block.chunks_exact(dtype.size()).all(|element| {
        let (top, rest) = element.split_last().expect("an element has bytes");
        let top = if dtype.is_float() { top & 0x7f } else { *top };
        top == 0 && rest.iter().all(|byte| *byte == 0)
    })
}

/// Reduces the ranks' whole tensors, block by block in rank order.
fn reduce(descriptor: &Descriptor, tensors: &[Vec<u8>]) -> Expected {
    let Descriptor { dtype, wire, .. } = *descriptor;
    let world = u32::try_from(tensors.len()).expect("the number of ranks is a u16");
    let block_len = descriptor.block_elements() * dtype.size();
    let mut reduced = vec![0; tensors[0].len()];
    let mut overflows = BTreeSet::new();
    for (at, out) in reduced.chunks_mut(block_len).enumerate() {
        let range = at * block_len..at * block_len + out.len();
        let inputs: Vec<&[u8]> = tensors
            .iter()
            .map(|tensor| &tensor[range.clone()])
            .filter(|block| !is_zero(dtype, block))
            .collect();
        if inputs.is_empty() {
            continue;
        }
        if plain_sum(descriptor, &inputs, out) {
            continue;
        }
        let elements = out.len() / dtype.size();
        let encoded: Vec<_> =
            inputs.iter().map(|block| encode(dtype, wire, world, elements, block)).collect();
        let encoded: Vec<&[u8]> = encoded.iter().map(Vec::as_slice).collect();
        let fold = FoldTerms { world, absent: encoded.len() < tensors.len() };
        let mut folded = vec![0xa5; wire.block_len(elements)];
        arith::fold_run(wire, descriptor.reduction, fold, &encoded, &mut folded)
            .expect("the blocks of a valid plan can be folded");
        if wire == WireType::Fixed32 && arith::fixed32_overflowed(&folded) {
            overflows.insert((at * descriptor.block_elements()) as u64);
        }
        let decoded = if wire.is_scaled() {
            arith::decode_block(wire, dtype, &folded, out)
        } else {
            arith::decode_run(wire, dtype, &folded, out)
        };
        decoded.expect("the blocks of a valid plan can be decoded");
    }
    if overflows.is_empty() { Expected::Result(reduced) } else { Expected::Overflow(overflows) }
}

fn encode(dtype: DType, wire: WireType, world: u32, elements: usize, block: &[u8]) -> Vec<u8> {
    let mut out = vec![0xa5; wire.block_len(elements)];
    let encoded = if wire.is_scaled() {
        arith::encode_block(dtype, wire, world, block, &mut out)
    } else {
        arith::encode_run(dtype, wire, block, &mut out)
    };
    encoded.expect("the blocks of a valid plan can be encoded");
    out
}

/// Sums tensors of the most common types without the protocol's arithmetic. Returns false for any
/// other op.
fn plain_sum(descriptor: &Descriptor, inputs: &[&[u8]], out: &mut [u8]) -> bool {
    let Descriptor { dtype, wire, reduction, .. } = *descriptor;
    if reduction != Reduction::Sum || wire != dtype.native_wire() {
        return false;
    }
    match dtype {
        DType::F32 => add(inputs, out, |x, y: [u8; 4]| {
            let sum = f32::from_le_bytes(x) + f32::from_le_bytes(y);
            sum.to_le_bytes()
        }),
        DType::I32 => add(inputs, out, |x, y: [u8; 4]| {
            i32::from_le_bytes(x).wrapping_add(i32::from_le_bytes(y)).to_le_bytes()
        }),
        DType::I64 => add(inputs, out, |x, y: [u8; 8]| {
            i64::from_le_bytes(x).wrapping_add(i64::from_le_bytes(y)).to_le_bytes()
        }),
        DType::F64 | DType::F16 | DType::Bf16 => return false,
    }
    if dtype == DType::F32 {
        // A fold turns every NaN into this quiet NaN.
        for element in out.as_chunks_mut::<4>().0 {
            if f32::from_le_bytes(*element).is_nan() {
                *element = 0x7fc0_0000_u32.to_le_bytes();
            }
        }
    }
    true
}

fn add<const SIZE: usize>(
    inputs: &[&[u8]],
    out: &mut [u8],
    sum: impl Fn([u8; SIZE], [u8; SIZE]) -> [u8; SIZE],
) {
    out.copy_from_slice(inputs[0]);
    for input in &inputs[1..] {
        let elements = input.as_chunks().0.iter();
        for (x, y) in out.as_chunks_mut().0.iter_mut().zip(elements) {
            *x = sum(*x, *y);
        }
    }
}
