//! Inputs for the benches, the same in every run.
//!
//! The functions in this module return tensors and blocks that look like gradients, for the benches
//! in `benches/`. `kernels` measures folds, scans and conversions, and `sealing` measures
//! authentication and encryption. [`data`] defines the tensors that `racksum bench` and its peers
//! reduce.

pub mod data;

use racksum_proto::arith;
use racksum_proto::dtype::{DType, WireType};
use racksum_sim::random::Random;

/// Returns `len` bytes of f32 values with the spread of a gradient, without zeros.
#[must_use]
pub fn gradient(len: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        bytes.extend(value(&mut random).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Returns `len` bytes of f32 in blocks of `block_len` bytes. One block in `every` is not zero. If
/// `every` is zero, all blocks are zero.
#[must_use]
pub fn sparse(len: usize, block_len: usize, every: usize) -> Vec<u8> {
    // Write the zeros, so that the buffer has pages of its own: `vec![0; len]` may map a shared
    // page.
    let mut bytes = vec![1; len];
    bytes.fill(0);
    if every > 0 {
        for (i, block) in bytes.chunks_mut(block_len).step_by(every).enumerate() {
            let values = gradient(block.len(), i as u64);
            block.copy_from_slice(&values);
        }
    }
    bytes
}

/// Returns a gradient in wire form. It has `len` bytes for an elementwise wire type, and as many
/// blocks of `block_elements` elements as fit in `len` bytes for a scaled one. Integers have
/// arbitrary bits.
///
/// # Panics
///
/// If `len` bytes are not a whole number of elements.
#[must_use]
pub fn contribution(wire: WireType, block_elements: usize, len: usize, seed: u64) -> Vec<u8> {
    let tensor = |elements: usize| gradient(elements * DType::F32.size(), seed);
    let mut out = vec![0; len];
    let made = match wire {
        WireType::F32 | WireType::I32 | WireType::I64 => return gradient(len, seed),
        WireType::F64 => arith::decode_run(WireType::F32, DType::F64, &tensor(len / 8), &mut out),
        WireType::F16 | WireType::Bf16 => {
            arith::encode_run(DType::F32, wire, &tensor(len / 2), &mut out)
        }
        WireType::Int8 | WireType::Fixed32 => {
            let block_len = wire.block_len(block_elements);
            out.truncate(len / block_len * block_len);
            let src = tensor(len / block_len * block_elements);
            let values = src.chunks(block_elements * DType::F32.size());
            values.zip(out.chunks_mut(block_len)).try_for_each(|(values, block)| {
                arith::encode_block(DType::F32, wire, WORLD, values, block)
            })
        }
    };
    made.expect("`len` is a whole number of elements, and f32 converts to the wire type");
    out
}

/// Draws a value within about ±1; small values are more frequent.
fn value(random: &mut Random) -> f32 {
    let [a, b, c, ..] = random.bits().to_le_bytes();
    (f32::from(i16::from_le_bytes([a, b])) + 0.5) / 32_768.0 / f32::from(1 + c % 16)
}

/// Number of ranks that the benches assume.
pub const WORLD: u32 = 8;
