//! The tensors that ranks contribute: drawn from a seed, with some blocks zero.

use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::ids::Rank;

use crate::random::Random;

/// A recipe for the tensors of one op, one tensor per rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inputs {
    /// The seed of all tensors of the op.
    pub seed: u64,
    /// The chance that a block is non-zero, in parts per million.
    pub density_ppm: u32,
    /// Whether the same blocks are non-zero at every rank.
    pub aligned: bool,
    /// The distribution of the elements.
    pub values: Values,
}

/// A distribution of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// Numbers of many magnitudes, so that the order of summation shows in the bits of a sum.
    Wide,
    /// [`Self::Wide`] mixed with NaNs, infinities, denormals and zeros of either sign.
    Wild,
}

impl Inputs {
    /// Creates inputs in which every block is non-zero.
    #[must_use]
    pub const fn dense(seed: u64) -> Self {
        Self { seed, density_ppm: 1_000_000, aligned: false, values: Values::Wide }
    }

    /// Returns the tensor of `rank`, in little-endian bytes.
    #[must_use]
    pub fn tensor(&self, descriptor: &Descriptor, rank: Rank) -> Vec<u8> {
        let size = descriptor.dtype.size();
        let elements =
            usize::try_from(descriptor.elements).expect("a plan's tensors fit in memory");
        let mut tensor = vec![0; elements * size];
        let of_rank = Random::new(self.seed).nth(u64::from(rank.0));
        let mut values = of_rank.child("values");
        let mut blocks =
            if self.aligned { Random::new(self.seed) } else { of_rank }.child("blocks");
        for block in tensor.chunks_mut(descriptor.block_elements() * size) {
            let draw = blocks.bits();
            if draw % 1_000_000 < u64::from(self.density_ppm) {
                self.fill(descriptor.dtype, block, &mut values);
            } else if self.values == Values::Wild && descriptor.dtype.is_float() {
                negate(descriptor.dtype, block, values.bits());
            }
        }
        tensor
    }

    fn fill(&self, dtype: DType, block: &mut [u8], values: &mut Random) {
        for element in block.chunks_exact_mut(dtype.size()) {
            let bits = values.bits();
            let wild = self.values == Values::Wild && bits.is_multiple_of(WILD_ONCE_IN);
            let bits = if wild { special(dtype, bits) } else { ordinary(dtype, bits) };
            element.copy_from_slice(&bits.to_le_bytes()[..dtype.size()]);
        }
    }
}

/// Sets one element of a zero block to negative zero.
fn negate(dtype: DType, block: &mut [u8], draw: u64) {
    let elements = block.len() / dtype.size();
    let at = usize::try_from(draw % elements as u64).expect("the remainder is below a length");
    block[(at + 1) * dtype.size() - 1] = 0x80;
}

/// Returns a float that has the sign and fraction of `bits`, and an exponent within [`SPREAD`] of
/// that of 1.0. For an integer type, returns `bits`.
fn ordinary(dtype: DType, bits: u64) -> u64 {
    let Some((exponent_bits, fraction_bits)) = layout(dtype) else { return bits };
    let one = (1 << (exponent_bits - 1)) - 1;
    let spread = SPREAD.min(one / 2);
    let exponent = one - spread + (bits >> 40) % (2 * spread + 1);
    let fraction = bits & ((1 << fraction_bits) - 1);
    let sign = bits >> 63;
    (sign << (exponent_bits + fraction_bits)) | (exponent << fraction_bits) | fraction
}

/// Returns a NaN, an infinity, a denormal or a zero. For an integer type, returns zero, the least
/// or the greatest value.
fn special(dtype: DType, bits: u64) -> u64 {
    let choice = bits >> 60;
    let Some((exponent_bits, fraction_bits)) = layout(dtype) else {
        let least = 1 << (8 * dtype.size() - 1);
        return match choice % 3 {
            0 => 0,
            1 => least,
            _ => least - 1,
        };
    };
    let sign = (bits >> 59 & 1) << (exponent_bits + fraction_bits);
    let infinity = ((1 << exponent_bits) - 1) << fraction_bits;
    let fraction = bits & ((1 << fraction_bits) - 1);
    match choice % 4 {
        0 => sign,
        1 => sign | infinity,
        2 => sign | infinity | fraction | 1,
        _ => sign | fraction,
    }
}

/// Returns the numbers of exponent bits and of fraction bits, or `None` for an integer type.
const fn layout(dtype: DType) -> Option<(u32, u32)> {
    match dtype {
        DType::F32 => Some((8, 23)),
        DType::F64 => Some((11, 52)),
        DType::F16 => Some((5, 10)),
        DType::Bf16 => Some((8, 7)),
        DType::I32 | DType::I64 => None,
    }
}

/// The maximum difference between the exponent of an ordinary float and that of 1.0.
const SPREAD: u64 = 20;
/// With wild values, one in this many elements is special on average.
const WILD_ONCE_IN: u64 = 5_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_depend_on_seed_and_rank_alone() {
        let descriptor = Descriptor::sum(5_000, DType::F32);
        let inputs = Inputs { density_ppm: 500_000, ..Inputs::dense(3) };
        let tensor = inputs.tensor(&descriptor, Rank(1));
        assert_eq!(tensor.len(), 20_000);
        assert!(tensor == inputs.tensor(&descriptor, Rank(1)));
        assert!(tensor != inputs.tensor(&descriptor, Rank(2)));
    }

    #[test]
    fn aligned_ranks_have_the_same_non_zero_blocks() {
        let descriptor = Descriptor::sum(10_000, DType::F32);
        let inputs = Inputs { density_ppm: 300_000, aligned: true, ..Inputs::dense(3) };
        let blocks = |rank| -> Vec<bool> {
            let tensor = inputs.tensor(&descriptor, Rank(rank));
            tensor.chunks(1024).map(|block| block.iter().any(|byte| *byte != 0)).collect()
        };
        assert_eq!(blocks(0), blocks(1));
        assert!(blocks(0).contains(&true) && blocks(0).contains(&false));
    }

    #[test]
    fn ordinary_floats_are_finite_and_wild_ones_are_not_all() {
        let floats = |values| -> Vec<f32> {
            let inputs = Inputs { values, ..Inputs::dense(5) };
            let tensor = inputs.tensor(&Descriptor::sum(50_000, DType::F32), Rank(0));
            tensor.chunks(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect()
        };
        assert!(floats(Values::Wide).iter().all(|x| x.is_normal()));
        assert!(floats(Values::Wild).iter().any(|x| x.is_nan()));
    }
}
