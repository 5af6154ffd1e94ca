//! The survey: before the ranks reduce the tensors, they count the blocks that each rank holds.
//!
//! One small op gives every rank the same counts: the blocks and bytes that each rank holds of each
//! tensor, and the number of ranks that hold each block. The number for a block is one digit of an
//! i64, with enough bits to count all ranks. The digit is zero if no rank holds the block. For
//! sparse tensors, most blocks of the survey's own op are therefore zero and not sent.

use racksum_kernels::codec;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;

use super::file::{Digest, GradientFile, Tensor};
use crate::exit::Failure;

/// The encoding of a survey for a given list of tensors.
#[derive(Debug)]
pub(super) struct Survey {
    world: u16,
    tensors: Vec<Layout>,
    /// The number of tensors in the upper 16 bits, and below them a hash of everything that the
    /// ranks must agree on.
    tag: u64,
}

#[derive(Debug, Clone, Copy)]
struct Layout {
    descriptor: Descriptor,
    blocks: u64,
}

/// The counts of blocks and bytes that the ranks hold of one tensor.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Held {
    /// Number of blocks of the whole tensor.
    pub(super) blocks: u64,
    /// Size of all these blocks on the wire, in bytes.
    pub(super) dense_bytes: u64,
    /// Number of blocks that each rank holds, by rank.
    pub(super) rank_blocks: Vec<u64>,
    /// Size on the wire of the blocks that each rank holds, in bytes, by rank.
    pub(super) rank_bytes: Vec<u64>,
    /// Number of blocks that at least one rank holds.
    pub(super) union_blocks: u64,
    /// Size on the wire of the blocks that at least one rank holds, in bytes.
    pub(super) union_bytes: u64,
}

impl Survey {
    pub(super) fn new(descriptors: &[Descriptor], world: u16) -> Self {
        let mut digest = Digest::new();
        let mut bytes = [0; Descriptor::LEN];
        for descriptor in descriptors {
            descriptor.encode(&mut bytes);
            digest.add(&bytes);
        }
        let count = u64::from(u16::try_from(descriptors.len()).unwrap_or(u16::MAX));
        let tag = (count << COUNT_SHIFT) | (digest.value() >> (u64::BITS - COUNT_SHIFT));
        let layout = |descriptor: &Descriptor| Layout {
            descriptor: *descriptor,
            blocks: descriptor.elements.div_ceil(descriptor.block_elements() as u64),
        };
        Self { world, tensors: descriptors.iter().map(layout).collect(), tag }
    }

    /// Returns the descriptor of the survey's own op.
    pub(super) fn descriptor(&self) -> Descriptor {
        let words: u64 = self.tensors.iter().map(|layout| self.words_of(layout)).sum();
        Descriptor { tag: self.tag, ..Descriptor::sum(words, DType::I64) }
    }

    /// Returns whether a descriptor may belong to a survey. If not, it belongs to an op of another
    /// command.
    pub(super) fn may_be(descriptor: &Descriptor) -> bool {
        let Descriptor { elements, tag, .. } = *descriptor;
        tag != 0 && (Descriptor { tag, ..Descriptor::sum(elements, DType::I64) }) == *descriptor
    }

    /// Returns the number of tensors of a rank, from the tag of its survey.
    pub(super) const fn tensors_of(tag: u64) -> u64 {
        tag >> COUNT_SHIFT
    }

    /// Returns the contribution of `rank` to the survey.
    pub(super) fn encode(&self, rank: u16, file: &GradientFile) -> Result<Vec<u8>, Failure> {
        let mut words = Vec::new();
        for (layout, tensor) in self.tensors.iter().zip(&file.tensors) {
            let held = layout.scan(file, tensor)?;
            words.extend(self.words(rank, layout, &held));
        }
        Ok(words.iter().flat_map(|word| word.to_le_bytes()).collect())
    }

    /// Decodes the sum of all ranks' contributions.
    pub(super) fn decode(&self, sum: &[u8]) -> Vec<Held> {
        let mut words =
            sum.as_chunks().0.iter().map(|word| i64::from_le_bytes(*word).cast_unsigned());
        self.tensors.iter().map(|layout| self.held(layout, &mut words)).collect()
    }

    /// Returns the number of words for one tensor: two for each rank, and enough words to hold one
    /// digit for each block.
    fn words_of(&self, layout: &Layout) -> u64 {
        2 * u64::from(self.world) + layout.blocks.div_ceil(u64::from(self.digits()))
    }

    /// Returns the number of digits that fit in a word without its sign bit.
    const fn digits(&self) -> u32 {
        63 / self.bits()
    }

    /// Returns the number of bits in a digit, which counts up to `world` ranks.
    const fn bits(&self) -> u32 {
        u16::BITS - self.world.leading_zeros()
    }

    fn words(&self, rank: u16, layout: &Layout, held: &[bool]) -> Vec<i64> {
        let mut words = vec![0; 2 * usize::from(self.world)];
        let blocks = held.iter().filter(|held| **held).count() as u64;
        let at = 2 * usize::from(rank);
        words[at] = blocks.cast_signed();
        words[at + 1] = layout.bytes(held).cast_signed();
        for blocks in held.chunks(self.digits() as usize) {
            let digits = blocks.iter().rev();
            let word = digits.fold(0, |word, held| (word << self.bits()) | i64::from(*held));
            words.push(word);
        }
        words
    }

    fn held(&self, layout: &Layout, words: &mut impl Iterator<Item = u64>) -> Held {
        let (mut rank_blocks, mut rank_bytes) = (Vec::new(), Vec::new());
        for _ in 0..self.world {
            rank_blocks.push(words.next().unwrap_or(0));
            rank_bytes.push(words.next().unwrap_or(0));
        }
        let (bits, digits) = (self.bits(), u64::from(self.digits()));
        let mut union = Vec::new();
        let mut left = layout.blocks;
        while left > 0 {
            let word = words.next().unwrap_or(0);
            for digit in 0..left.min(digits) {
                union.push((word >> (digit * u64::from(bits))) & ((1 << bits) - 1) != 0);
            }
            left -= left.min(digits);
        }
        Held {
            blocks: layout.blocks,
            dense_bytes: layout.bytes(&vec![true; union.len()]),
            rank_blocks,
            rank_bytes,
            union_blocks: union.iter().filter(|held| **held).count() as u64,
            union_bytes: layout.bytes(&union),
        }
    }
}

impl Layout {
    /// Returns for each block of a tensor whether it contains an element that is not zero.
    fn scan(&self, file: &GradientFile, tensor: &Tensor) -> Result<Vec<bool>, Failure> {
        let block = self.descriptor.block_elements();
        let step = block * self.descriptor.dtype.size() * WINDOW;
        let mut window = vec![0; step.min(tensor.len)];
        let mut held = Vec::new();
        for from in (0..tensor.len).step_by(step) {
            let window = &mut window[..step.min(tensor.len - from)];
            file.read(tensor, from, window)?;
            let blocks = window.len().div_ceil(block * self.descriptor.dtype.size());
            let mask = codec::scan_window(self.descriptor.dtype, block, window);
            held.extend((0..blocks).map(|block| mask >> block & 1 == 1));
        }
        Ok(held)
    }

    /// Returns the size of the held blocks on the wire, in bytes.
    fn bytes(&self, held: &[bool]) -> u64 {
        let block = self.descriptor.block_elements() as u64;
        let len = |index: u64| {
            let elements = (self.descriptor.elements - index * block).min(block);
            // A block has at most 1024 elements, so the conversion cannot fail.
            self.descriptor.wire.block_len(usize::try_from(elements).unwrap_or(0)) as u64
        };
        (0..).zip(held).filter(|(_, held)| **held).map(|(index, _)| len(index)).sum()
    }
}

/// Number of blocks to scan at a time.
const WINDOW: usize = 64;
/// Bit position of the number of tensors in a survey's tag.
const COUNT_SHIFT: u32 = 48;

#[cfg(test)]
mod tests {
    use super::*;

    fn survey(world: u16) -> Survey {
        let descriptors =
            [1, 0, 256 * 40, 300].map(|elements| Descriptor::sum(elements, DType::F32));
        Survey::new(&descriptors, world)
    }

    /// Returns the sum of all ranks' contributions.
    fn summed(survey: &Survey, holds: impl Fn(u16, u64) -> bool) -> Vec<u8> {
        let mut sum = vec![0i64; usize::try_from(survey.descriptor().elements).unwrap()];
        for rank in 0..survey.world {
            let mut words = Vec::new();
            for layout in &survey.tensors {
                let held: Vec<_> = (0..layout.blocks).map(|block| holds(rank, block)).collect();
                words.extend(survey.words(rank, layout, &held));
            }
            assert_eq!(words.len(), sum.len());
            sum.iter_mut().zip(words).for_each(|(sum, word)| *sum += word);
        }
        sum.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn every_rank_hears_what_all_hold() {
        for world in [1, 2, 3, 7, 8, 16, 255, 256] {
            let survey = survey(world);
            let sum =
                summed(&survey, |rank, block| block % 5 == 0 && (block + u64::from(rank)) % 2 == 0);
            let decoded = survey.decode(&sum);
            assert_eq!(decoded.iter().map(|held| held.blocks).collect::<Vec<_>>(), [1, 0, 40, 2]);
            let dense: Vec<_> = decoded.iter().map(|held| held.dense_bytes).collect();
            assert_eq!(dense, [4, 0, 40 * 1024, 1200]);
            assert_eq!(decoded[2].rank_blocks[0], 4, "blocks 0, 10, 20, 30");
            assert_eq!(decoded[2].rank_bytes[0], 4 * 1024);
            let union = if world == 1 { 4 } else { 8 };
            assert_eq!((decoded[2].union_blocks, decoded[2].union_bytes), (union, union * 1024));
        }
    }

    #[test]
    fn a_block_that_all_hold_fills_its_digit_and_no_other() {
        for world in [1, 3, 4, 63, 64, 256] {
            let survey = survey(world);
            let decoded = survey.decode(&summed(&survey, |_, block| block % 3 == 1));
            assert_eq!(decoded[2].union_blocks, 13, "{world}");
            assert_eq!((decoded[3].union_blocks, decoded[3].union_bytes), (1, 44 * 4), "{world}");
        }
    }

    #[test]
    fn surveys_of_other_tensors_are_tagged_otherwise() {
        let descriptor = Descriptor::sum(5, DType::F32);
        let tag = |descriptors: &[Descriptor]| Survey::new(descriptors, 2).descriptor().tag;
        let one = tag(&[descriptor]);
        assert_ne!(one, tag(&[Descriptor { tag: 1, ..descriptor }]));
        assert_eq!(Survey::tensors_of(one), 1);
        assert_eq!(Survey::tensors_of(tag(&[descriptor; 7])), 7);
        assert_eq!(Survey::tensors_of(tag(&[])), 0);
    }

    #[test]
    fn an_op_of_another_command_is_no_survey() {
        assert!(Survey::may_be(&survey(2).descriptor()));
        assert!(Survey::may_be(&Survey::new(&[], 2).descriptor()));
        for other in [Descriptor::sum(1, DType::I32), Descriptor::sum(49, DType::I64)] {
            assert!(!Survey::may_be(&other), "{other}");
        }
    }
}
