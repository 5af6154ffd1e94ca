//! Tests that every level computes exactly the bits of the definition.

use proptest::prelude::*;
use racksum_proto::arith::{
    FIXED32_OVERFLOW, MAX_BLOCK_ELEMENTS, MAX_WORLD, encode_block, fixed32_overflowed,
};
use racksum_proto::dtype::DType;

use super::*;
use crate::shared::tests::shared_of;

/// Fold that proptest generates. `seed` determines the bytes.
#[derive(Debug, Clone)]
struct Case {
    wire: WireType,
    reduction: Reduction,
    fold: FoldTerms,
    inputs: usize,
    elements: usize,
    /// Offset in bytes at which the data starts in its buffers.
    offset: usize,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    let elements = prop_oneof![0..80_usize, 0..=MAX_BLOCK_ELEMENTS];
    let wire = prop::sample::select(&WireType::ALL);
    let reduction = prop::sample::select(&Reduction::ALL);
    let world = prop_oneof![Just(0), 0..64_u32, Just(MAX_WORLD)];
    (wire, reduction, world, any::<bool>(), 1..=9_usize, elements, 0..4_usize, any::<u64>())
        .prop_map(|(wire, reduction, world, absent, inputs, elements, offset, seed)| {
            let world = world.max(u32::try_from(inputs).unwrap());
            let fold = FoldTerms { world, absent };
            Case { wire, reduction, fold, inputs, elements, offset, seed }
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn every_level_folds_as_defined(case in cases()) {
        check(&case)?;
    }
}

#[test]
fn every_level_folds_each_type_and_reduction() {
    let mut seed = 0;
    for wire in WireType::ALL {
        for reduction in Reduction::ALL {
            for (absent, inputs, elements) in [(false, 1, 700), (true, 3, 33), (true, 8, 257)] {
                let fold = FoldTerms { world: 11, absent };
                seed += 1;
                let case = Case { wire, reduction, fold, inputs, elements, offset: 1, seed };
                check(&case).unwrap();
            }
        }
    }
}

#[test]
fn every_16_bit_float_folds_as_defined() {
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let one_up: Vec<u8> = (0..=u16::MAX).flat_map(|x| x.wrapping_add(1).to_le_bytes()).collect();
    let fold = FoldTerms { world: 3, absent: false };
    for wire in [WireType::F16, WireType::Bf16] {
        for reduction in Reduction::ALL {
            compare(wire, reduction, fold, &[&all]);
            compare(wire, reduction, fold, &[&all, &one_up]);
        }
    }
}

#[test]
fn fixed32_marks_at_every_level() {
    let block = |exponent: i32, q: i32| {
        [exponent.to_le_bytes().to_vec(), q.to_le_bytes().repeat(600)].concat()
    };
    let fold = FoldTerms { world: 2, absent: false };
    for inputs in [
        [block(3, i32::MAX), block(3, 1)],
        [block(FIXED32_OVERFLOW, 0), block(3, 1)],
        [block(3, i32::MIN), block(2, i32::MIN)],
    ] {
        let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        let out = compare(WireType::Fixed32, Reduction::Sum, fold, &inputs);
        assert!(fixed32_overflowed(&out));
    }
}

#[test]
fn fixed32_averages_round_ties_at_every_world() {
    for world in (1..=260).chain([MAX_WORLD]) {
        let near_ties = [-1000, -3, -1, 0, 1, 2, 1000].into_iter().flat_map(|quotient| {
            let tie = quotient * i64::from(world) + i64::from(world / 2);
            [tie - 1, tie, tie + 1]
        });
        let mut block = 0_i32.to_le_bytes().to_vec();
        for x in near_ties {
            block.extend(i32::try_from(x).unwrap().to_le_bytes());
        }
        let fold = FoldTerms { world, absent: true };
        compare(WireType::Fixed32, Reduction::Avg, fold, &[&block]);
    }
}

#[test]
fn folds_are_refused_as_defined() {
    let fold = FoldTerms { world: 1, absent: false };
    let mut out = [0xa5; 4];
    for (wire, reduction, inputs) in [
        (WireType::F32, Reduction::Sum, &[][..]),
        (WireType::F32, Reduction::Sum, &[&[0; 8][..]][..]),
        (WireType::F32, Reduction::Sum, &[&[0; 4][..], &[0; 4][..]][..]),
        (WireType::F64, Reduction::Sum, &[&[0; 4][..]][..]),
    ] {
        let expected = arith::fold_run(wire, reduction, fold, inputs, &mut out);
        assert!(expected.is_err());
        assert_eq!(fold_run(wire, reduction, fold, inputs, &mut out), expected);
        assert_eq!(out, [0xa5; 4]);
    }
}

#[test]
fn levels_start_at_the_baseline_and_end_at_the_best() {
    let names: Vec<&str> = Level::available().map(Level::name).collect();
    assert_eq!(names[0], "baseline");
    assert_eq!(Level::available().last(), Some(Level::best()));
}

fn check(case: &Case) -> Result<(), TestCaseError> {
    let mut random = Random(case.seed);
    let style = random.next();
    let mut buffers: Vec<Vec<u8>> = (0..case.inputs)
        .map(|_| {
            let mut buffer = vec![0xa5; case.offset];
            buffer.extend(contribution(&mut random, style, case));
            buffer
        })
        .collect();
    let inputs: Vec<&[u8]> = buffers.iter().map(|buffer| &buffer[case.offset..]).collect();
    let mut expected = vec![0xa5; inputs[0].len()];
    let result = arith::fold_run(case.wire, case.reduction, case.fold, &inputs, &mut expected);
    for level in Level::available() {
        let mut out = vec![0xa5; case.offset + expected.len()];
        let run = &mut out[case.offset..];
        let found = level.fold_run(case.wire, case.reduction, case.fold, &inputs, run);
        prop_assert_eq!(found, result, "{}", level.name());
        prop_assert_eq!(&*run, &expected, "{}", level.name());
    }
    let dtype = DType::ALL.into_iter().find(|dtype| dtype.native_wire() == case.wire);
    let Some(dtype) = dtype else { return Ok(()) };
    let shared = buffers.iter_mut().map(|buffer| shared_of(&mut buffer[case.offset..]));
    let shared: Vec<SharedBytes<'_>> = shared.collect();
    for level in Level::available() {
        let mut out = vec![0xa5; case.offset + expected.len()];
        let run = &mut out[case.offset..];
        let found = level.fold_shared(dtype, case.reduction, case.fold, &shared, run);
        prop_assert_eq!(found, result, "{} of shared bytes", level.name());
        prop_assert_eq!(&*run, &expected, "{} of shared bytes", level.name());
    }
    Ok(())
}

/// Checks every level against the definition, and returns the definition's result.
fn compare(wire: WireType, reduction: Reduction, fold: FoldTerms, inputs: &[&[u8]]) -> Vec<u8> {
    let mut expected = vec![0xa5; inputs[0].len()];
    arith::fold_run(wire, reduction, fold, inputs, &mut expected).unwrap();
    for level in Level::available() {
        let mut out = vec![0xa5; expected.len()];
        level.fold_run(wire, reduction, fold, inputs, &mut out).unwrap();
        assert!(out == expected, "{wire:?} {reduction:?} at {}", level.name());
    }
    expected
}

/// Returns the contribution of one rank.
fn contribution(random: &mut Random, style: u64, case: &Case) -> Vec<u8> {
    match case.wire {
        WireType::Int8 | WireType::Fixed32 => block(random, style, case),
        wire => (0..case.elements).flat_map(|_| random.element(wire, style)).collect(),
    }
}

/// Returns a block of a scaled wire type: mostly an encoded block, sometimes arbitrary bytes.
fn block(random: &mut Random, style: u64, case: &Case) -> Vec<u8> {
    let mut out = vec![0; case.wire.block_len(case.elements)];
    match (style + random.below(4)) % 16 {
        0 => out.iter_mut().for_each(|byte| *byte = random.next().to_le_bytes()[0]),
        // Full-range integers with similar exponents make sums overflow and quotients tie.
        1 | 2 => {
            out.iter_mut().for_each(|byte| *byte = random.next().to_le_bytes()[0]);
            let exponent = i32::try_from(random.below(40)).unwrap();
            out[..4].copy_from_slice(&exponent.to_le_bytes());
        }
        3 => {}
        _ => {
            let scale = f32::powi(2.0, i32::try_from(random.below(12)).unwrap());
            let src: Vec<u8> = (0..case.elements)
                .flat_map(|_| (random.ordinary() * scale).to_le_bytes())
                .collect();
            encode_block(DType::F32, case.wire, case.fold.world, &src, &mut out).unwrap();
        }
    }
    out
}

/// SplitMix64 generator, which makes bytes from a seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Returns a float of about the size of a gradient.
    fn ordinary(&mut self) -> f32 {
        let [a, b, c, ..] = self.next().to_le_bytes();
        f32::from(i16::from_le_bytes([a, b])) / 256.0 * f32::powi(2.0, i32::from(c % 16) - 8)
    }

    /// Returns an element: random bits, an ordinary number, or a special value.
    fn element(&mut self, wire: WireType, style: u64) -> Vec<u8> {
        let size = wire.element_size();
        let bits = match (style + self.below(6)) % 8 {
            0 => self.next(),
            1 => {
                let special = SPECIAL[usize::try_from(self.below(8)).unwrap()];
                // Cut the value to the size of the type, and sometimes flip its last bit.
                (special >> (64 - 8 * size)) ^ self.below(2)
            }
            _ => match wire {
                WireType::F64 => f64::from(self.ordinary()).to_bits(),
                WireType::F32 => u64::from(self.ordinary().to_bits()),
                WireType::Bf16 => u64::from(self.ordinary().to_bits() >> 16),
                _ => self.next(),
            },
        };
        bits.to_le_bytes()[..size].to_vec()
    }
}

/// Zeros, infinities, NaNs and largest numbers of several float types, in the upper bits. A value
/// that is special for one type may be ordinary for another.
const SPECIAL: [u64; 8] = [
    0,
    0x8000_0000_0000_0000,
    0x7ff0_0000_0000_0000,
    0xff80_0000_0000_0000,
    0x7fc1_2345_0000_0000,
    0xfff0_0000_0000_0001,
    0x7f7f_ffff_ffff_ffff,
    0xfbff_ffff_ffff_ffff,
];
