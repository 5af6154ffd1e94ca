//! The data that `racksum bench` reduces, and the expected results. Every peer that racksum is
//! compared with reduces the same data, as `benches/peers/README.md` defines it.

use clap::ValueEnum;
use half::{bf16, f16};
use racksum_proto::dtype::{DType, Reduction, WireType};
use racksum_sim::random::{mix, output};
use serde::Serialize;

/// Form of an op's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Input {
    /// A whole tensor.
    Dense,
    /// A list of the tensor's non-zero blocks.
    Blocks,
}

impl Input {
    /// Returns the name that users write on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dense => "dense",
            Self::Blocks => "blocks",
        }
    }
}

/// How the non-zero blocks of the ranks overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Overlap {
    /// Each rank has random blocks of its own.
    Random,
    /// All ranks have the same blocks.
    All,
    /// No two ranks have the same block.
    None,
}

impl Overlap {
    /// Returns the name that users and the commands to the peers use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::All => "all",
            Self::None => "none",
        }
    }
}

/// The contents of the ranks' tensors.
#[derive(Debug, Clone, Copy)]
pub struct Pattern {
    /// Number of ranks.
    pub world: u16,
    /// Number of elements in a block.
    pub block: usize,
    /// Share of each rank's blocks that are not zero; at 1 the tensors are dense.
    pub density: f64,
    /// How the non-zero blocks of the ranks overlap.
    pub overlap: Overlap,
    /// Seed of the blocks and elements.
    pub seed: u64,
}

impl Pattern {
    /// Returns a hash of the pattern. The hash is part of the descriptor, so that different
    /// patterns cause a mismatch between ranks instead of wrong sums.
    #[must_use]
    pub fn tag(&self) -> u64 {
        let Self { density, overlap, seed, .. } = *self;
        let parts = [seed, density.to_bits(), overlap as u64];
        parts.into_iter().fold(0, |tag, part| output(tag ^ part, 0))
    }

    /// Returns whether a block of a rank is non-zero.
    #[must_use]
    pub fn holds(&self, rank: u16, block: u64) -> bool {
        if self.density >= 1.0 {
            return true;
        }
        let world = u64::from(self.world);
        let (stream, density) = match self.overlap {
            Overlap::Random => (u64::from(rank), self.density),
            Overlap::All => (0, self.density),
            Overlap::None if block % world != u64::from(rank) => return false,
            Overlap::None => (0, (self.density * world as f64).min(1.0)),
        };
        let start = mix((self.seed << 32) | stream);
        let draw = output(start, block) >> 11;
        (draw as f64) < (density * (1u64 << 53) as f64).floor()
    }

    /// Returns element `i` of a rank. It is a small integer, so that sums are exact in most types.
    fn element(&self, rank: u16, i: u64) -> i16 {
        if !self.holds(rank, i / self.block as u64) {
            return 0;
        }
        let value = (i + 3 * u64::from(rank) + self.seed) % 7;
        i16::try_from(value).unwrap_or(0) + 1
    }

    /// Fills a rank's tensor.
    pub fn fill(&self, rank: u16, dtype: DType, tensor: &mut [u8]) {
        let size = dtype.size();
        for (block, bytes) in (0..).zip(tensor.chunks_mut(self.block * size)) {
            if !self.holds(rank, block) {
                bytes.fill(0);
                continue;
            }
            for (i, element) in (block * self.block as u64..).zip(bytes.chunks_exact_mut(size)) {
                write(dtype, self.element(rank, i), element);
            }
        }
    }

    /// Returns the expected reduction of element `i`.
    fn expected(&self, op: Reduction, i: u64) -> f64 {
        let elements = (0..self.world).map(|rank| f64::from(self.element(rank, i)));
        match op {
            Reduction::Sum => elements.sum(),
            Reduction::Avg => elements.sum::<f64>() / f64::from(self.world),
            Reduction::Min => elements.fold(f64::INFINITY, f64::min),
            Reduction::Max => elements.fold(f64::NEG_INFINITY, f64::max),
        }
    }

    /// Counts the wrong elements of a result.
    #[must_use]
    pub fn wrong(&self, dtype: DType, wire: WireType, op: Reduction, tensor: &[u8]) -> u64 {
        let size = dtype.size();
        let tolerance = self.tolerance(wire);
        let mut wrong = 0;
        for (block, bytes) in (0..).zip(tensor.chunks(self.block * size)) {
            let first = block * self.block as u64;
            if !(0..self.world).any(|rank| self.holds(rank, block)) {
                // No rank holds this block, so its bytes must be zero.
                wrong += bytes.chunks_exact(size).filter(|e| e.iter().any(|b| *b != 0)).count();
                continue;
            }
            let elements = (first..).zip(bytes.chunks_exact(size));
            let off = elements.filter(|(i, element)| {
                let expected = self.expected(op, *i);
                // The average of integers is rounded toward zero.
                let expected = if dtype.is_float() { expected } else { expected.trunc() };
                let error = (read(dtype, element) - expected).abs();
                error.is_nan() || error > tolerance * expected.abs().max(1.0)
            });
            wrong += off.count();
        }
        wrong as u64
    }

    /// Returns the relative error that a wire type may cause. It is zero for integers.
    fn tolerance(&self, wire: WireType) -> f64 {
        let world = f64::from(self.world);
        match wire {
            WireType::I32 | WireType::I64 => 0.0,
            WireType::F64 => 1e-15,
            WireType::F32 => 1e-6,
            // The sum is rounded to 11 significant bits in f16, and to 8 in bf16.
            WireType::F16 => 1.0 / 1024.0,
            WireType::Bf16 => 1.0 / 128.0,
            // One quantum of each rank's scale, and one of the sum's.
            WireType::Int8 => (world + 1.0) * 7.0 / 127.0,
            WireType::Fixed32 => 1e-6 * world,
        }
    }
}

/// Writes a number as an element.
fn write(dtype: DType, value: i16, out: &mut [u8]) {
    match dtype {
        DType::F32 => out.copy_from_slice(&f32::from(value).to_le_bytes()),
        DType::F64 => out.copy_from_slice(&f64::from(value).to_le_bytes()),
        DType::F16 => out.copy_from_slice(&f16::from_f32(value.into()).to_le_bytes()),
        DType::Bf16 => out.copy_from_slice(&bf16::from_f32(value.into()).to_le_bytes()),
        DType::I32 => out.copy_from_slice(&i32::from(value).to_le_bytes()),
        DType::I64 => out.copy_from_slice(&i64::from(value).to_le_bytes()),
    }
}

/// Reads an element as a number. Returns NaN if its size is not that of the dtype.
fn read(dtype: DType, element: &[u8]) -> f64 {
    let number = match dtype {
        DType::F32 => element.try_into().ok().map(|b| f64::from(f32::from_le_bytes(b))),
        DType::F64 => element.try_into().ok().map(f64::from_le_bytes),
        DType::F16 => element.try_into().ok().map(|b| f16::from_le_bytes(b).to_f64()),
        DType::Bf16 => element.try_into().ok().map(|b| bf16::from_le_bytes(b).to_f64()),
        DType::I32 => element.try_into().ok().map(|b| f64::from(i32::from_le_bytes(b))),
        DType::I64 => element.try_into().ok().map(|b| i64::from_le_bytes(b) as f64),
    };
    number.unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(overlap: Overlap) -> Pattern {
        Pattern { world: 8, block: 256, density: 0.01, overlap, seed: 1 }
    }

    #[test]
    fn patterns_that_differ_have_tags_that_differ() {
        let one = pattern(Overlap::Random);
        let others = [
            Pattern { seed: 2, ..one },
            Pattern { density: 0.02, ..one },
            Pattern { overlap: Overlap::All, ..one },
        ];
        assert!(others.iter().all(|other| other.tag() != one.tag()));
        assert_eq!(pattern(Overlap::Random).tag(), one.tag());
    }

    #[test]
    fn blocks_are_those_that_the_peers_draw() {
        let random = pattern(Overlap::Random);
        let of = |rank| (0..97_657).filter(move |block| random.holds(rank, *block));
        assert_eq!((of(0).count(), of(1).count()), (1023, 1064));
        assert_eq!(of(0).take(5).collect::<Vec<_>>(), [150, 227, 379, 417, 844]);
        assert_eq!(of(1).take(5).collect::<Vec<_>>(), [22, 76, 84, 218, 352]);
    }

    #[test]
    fn overlaps_are_as_named() {
        let owners =
            |overlap, block| (0..8).filter(|rank| pattern(overlap).holds(*rank, block)).count();
        assert!((0..5000).all(|block| [0, 8].contains(&owners(Overlap::All, block))));
        assert!((0..5000).all(|block| owners(Overlap::None, block) <= 1));
        assert!((0..5000).any(|block| owners(Overlap::None, block) == 1));
    }

    #[test]
    fn a_wrong_element_is_counted() {
        let pattern = Pattern { world: 1, density: 0.5, ..pattern(Overlap::Random) };
        for dtype in DType::ALL {
            let mut tensor = vec![0xff; 5000 * dtype.size()];
            pattern.fill(0, dtype, &mut tensor);
            let wire = dtype.native_wire();
            assert_eq!(pattern.wrong(dtype, wire, Reduction::Sum, &tensor), 0);
            tensor[300 * dtype.size()] ^= 0xff;
            tensor[0] ^= 0xff;
            let wrong = pattern.wrong(dtype, wire, Reduction::Sum, &tensor);
            assert!(wrong >= 1, "{dtype:?}");
        }
    }
}
