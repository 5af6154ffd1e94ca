//! Tests that every level computes exactly the bits of the definition.

use proptest::prelude::*;
use racksum_proto::arith::{self, FIXED32_OVERFLOW, MAX_WORLD};

use super::*;
use crate::shared::tests::shared_of;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn every_level_scans_as_defined(
        dtype in prop::sample::select(&DType::ALL),
        block_elements in prop_oneof![1..40_usize, Just(64), Just(256), Just(1024)],
        blocks in 1..=6_usize,
        cut in any::<prop::sample::Index>(),
        offset in 0..4_usize,
        seed in any::<u64>(),
    ) {
        let elements = block_elements * blocks - cut.index(block_elements);
        let mut random = Random(seed);
        let mut window = random.sparse(dtype, block_elements, elements);
        let original = window.clone();
        let expected = arith::scan_window(dtype, block_elements, &mut window);
        for level in Level::available() {
            let mut buffer = vec![0xa5; offset];
            buffer.extend(&original);
            let found = level.scan_window(dtype, block_elements, &mut buffer[offset..]);
            prop_assert_eq!(found, expected, "{}", level.name());
            prop_assert_eq!(&buffer[offset..], &window, "{}", level.name());
            buffer[offset..].copy_from_slice(&original);
            let shared = shared_of(&mut buffer[offset..]);
            let found = level.scan_shared(dtype, block_elements, shared);
            prop_assert_eq!(found, expected, "{} of shared bytes", level.name());
            prop_assert_eq!(&buffer[offset..], &window, "{} of shared bytes", level.name());
        }
    }

    #[test]
    fn every_level_converts_runs_as_defined(
        (dtype, wire) in pairs(false),
        elements in prop_oneof![0..80_usize, 0..1500_usize],
        offset in 0..4_usize,
        seed in any::<u64>(),
    ) {
        let mut random = Random(seed);
        let src = random.elements(dtype, elements);
        let encoded = check(&src, elements * wire.element_size(), offset, |level, src, out| {
            match level {
                None => arith::encode_run(dtype, wire, src, out),
                Some(level) => level.encode_run(dtype, wire, src, out),
            }
        })?;
        let any = random.elements(bits_of(wire), elements);
        for src in [encoded, any] {
            check(&src, elements * dtype.size(), offset, |level, src, out| match level {
                None => arith::decode_run(wire, dtype, src, out),
                Some(level) => level.decode_run(wire, dtype, src, out),
            })?;
        }
    }

    #[test]
    fn every_level_converts_blocks_as_defined(
        (dtype, wire) in pairs(true),
        elements in prop_oneof![0..80_usize, 0..=1024_usize],
        world in prop_oneof![1..100_u32, Just(MAX_WORLD)],
        offset in 0..4_usize,
        seed in any::<u64>(),
    ) {
        let mut random = Random(seed);
        // Special values turn most blocks into NaN, so most cases leave them out.
        let src = match seed % 4 {
            0 => random.elements(dtype, elements),
            _ => random.ordinary_elements(dtype, elements),
        };
        let encoded = check(&src, wire.block_len(elements), offset, |level, src, out| {
            match level {
                None => arith::encode_block(dtype, wire, world, src, out),
                Some(level) => level.encode_block(dtype, wire, world, src, out),
            }
        })?;
        let any = random.bytes(wire.block_len(elements));
        for src in [encoded, any] {
            check(&src, elements * dtype.size(), offset, |level, src, out| match level {
                None => arith::decode_block(wire, dtype, src, out),
                Some(level) => level.decode_block(wire, dtype, src, out),
            })?;
        }
    }
}

#[test]
fn every_16_bit_float_converts_as_defined() {
    let halves: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for wire in [WireType::F16, WireType::Bf16] {
        for dtype in [DType::F32, DType::F64] {
            check(&halves, (halves.len() / 2) * dtype.size(), 0, |level, src, out| match level {
                None => arith::decode_run(wire, dtype, src, out),
                Some(level) => level.decode_run(wire, dtype, src, out),
            })
            .unwrap();
        }
    }
}

#[test]
fn rounding_to_16_bits_is_as_defined_around_every_tie() {
    // Combine each upper half with lower halves at and next to the ties of bf16 and f16.
    let lower = [0, 1, 0x0fff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff];
    for low in lower {
        let src: Vec<u8> =
            (0..=u16::MAX).flat_map(|high| (u32::from(high) << 16 | low).to_le_bytes()).collect();
        for wire in [WireType::F16, WireType::Bf16] {
            check(&src, src.len() / 2, 0, |level, src, out| match level {
                None => arith::encode_run(DType::F32, wire, src, out),
                Some(level) => level.encode_run(DType::F32, wire, src, out),
            })
            .unwrap();
        }
    }
}

#[test]
fn fixed32_decodes_every_exponent_as_defined() {
    for exponent in (-2100..2100).chain([i32::MIN, i32::MAX - 1, FIXED32_OVERFLOW]) {
        let words = [1, -1, 0, i32::MIN, i32::MAX, 3].map(i32::to_le_bytes);
        let block = [&exponent.to_le_bytes(), words.as_flattened()].concat();
        for dtype in [DType::F32, DType::F64] {
            check(&block, 6 * dtype.size(), 0, |level, src, out| match level {
                None => arith::decode_block(WireType::Fixed32, dtype, src, out),
                Some(level) => level.decode_block(WireType::Fixed32, dtype, src, out),
            })
            .unwrap();
        }
    }
}

#[test]
fn scaled_blocks_reach_the_ends_of_the_range() {
    let magnitudes = [1e-45, 1e-38, 1e-30, 1.0, 3e38, f32::MAX];
    for magnitude in magnitudes {
        let src: Vec<u8> = (-130..=130_i16)
            .flat_map(|i| (magnitude * (f32::from(i) / 130.0)).to_le_bytes())
            .collect();
        for wire in [WireType::Int8, WireType::Fixed32] {
            check(&src, wire.block_len(261), 0, |level, src, out| match level {
                None => arith::encode_block(DType::F32, wire, 3, src, out),
                Some(level) => level.encode_block(DType::F32, wire, 3, src, out),
            })
            .unwrap();
        }
    }
}

#[test]
fn conversions_are_refused_as_defined() {
    let conversion = |dtype, wire| Err(ArithError::Conversion { dtype, wire });
    let mut out = [0xa5; 8];
    let refused = conversion(DType::I32, WireType::F32);
    assert_eq!(encode_run(DType::I32, WireType::F32, &[0; 8], &mut out), refused);
    let refused = conversion(DType::F32, WireType::Int8);
    assert_eq!(decode_run(WireType::Int8, DType::F32, &[0; 8], &mut out), refused);
    let refused = conversion(DType::F16, WireType::Fixed32);
    assert_eq!(encode_block(DType::F16, WireType::Fixed32, 1, &[0; 2], &mut out), refused);
    assert_eq!(decode_block(WireType::Fixed32, DType::F16, &[0; 8], &mut out[..2]), refused);
    let length = Err(ArithError::Length { expected: 4, actual: 8 });
    assert_eq!(encode_run(DType::F32, WireType::Bf16, &[0; 8], &mut out), length);
    let world = Err(ArithError::World { world: 0 });
    assert_eq!(encode_block(DType::F32, WireType::Int8, 0, &[0; 4], &mut out[..5]), world);
    assert_eq!(out, [0xa5; 8]);
}

#[test]
fn levels_start_at_the_baseline_and_end_at_the_best() {
    let names: Vec<&str> = Level::available().map(Level::name).collect();
    assert_eq!(names[0], "baseline");
    assert_eq!(Level::available().last(), Some(Level::best()));
}

/// Returns a strategy for pairs of a dtype and a wire type that carries it.
fn pairs(scaled: bool) -> impl Strategy<Value = (DType, WireType)> {
    let pairs: Vec<_> = WireType::ALL
        .into_iter()
        .filter(|wire| wire.is_scaled() == scaled)
        .flat_map(|wire| DType::ALL.map(|dtype| (dtype, wire)))
        .filter(|(dtype, wire)| wire.carries(*dtype))
        .collect();
    prop::sample::select(pairs)
}

/// Returns the dtype whose elements have the same bits as an elementwise wire type.
fn bits_of(wire: WireType) -> DType {
    DType::ALL.into_iter().find(|dtype| dtype.native_wire() == wire).unwrap()
}

/// Converts `src` by the definition (level `None`), checks every level against it, and returns the
/// result.
fn check(
    src: &[u8],
    out_len: usize,
    offset: usize,
    convert: impl Fn(Option<Level>, &[u8], &mut [u8]) -> Result<(), ArithError>,
) -> Result<Vec<u8>, TestCaseError> {
    let mut expected = vec![0xa5; out_len];
    prop_assert_eq!(convert(None, src, &mut expected), Ok(()));
    let mut shifted = vec![0xa5; offset];
    shifted.extend(src);
    for level in Level::available() {
        let mut out = vec![0xa5; offset + out_len];
        prop_assert_eq!(convert(Some(level), &shifted[offset..], &mut out[offset..]), Ok(()));
        prop_assert!(out[offset..] == expected, "{}", level.name());
    }
    Ok(expected)
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

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next().to_le_bytes()[0]).collect()
    }

    /// Returns a float of about the size of a gradient.
    fn ordinary(&mut self) -> f32 {
        let [a, b, c, ..] = self.next().to_le_bytes();
        f32::from(i16::from_le_bytes([a, b])) / 256.0 * f32::powi(2.0, i32::from(c % 16) - 8)
    }

    fn ordinary_element(&mut self, dtype: DType) -> Vec<u8> {
        let x = self.ordinary();
        let bits = match dtype {
            DType::F64 => (f64::from(x) * 1.000_000_000_1).to_bits(),
            DType::F32 => u64::from(x.to_bits()),
            DType::Bf16 => u64::from(x.to_bits() >> 16),
            // The mask excludes the exponent of infinity.
            DType::F16 => self.next() & 0xbbff,
            DType::I32 | DType::I64 => self.next(),
        };
        bits.to_le_bytes()[..dtype.size()].to_vec()
    }

    fn ordinary_elements(&mut self, dtype: DType, elements: usize) -> Vec<u8> {
        (0..elements).flat_map(|_| self.ordinary_element(dtype)).collect()
    }

    /// Returns a mix of random bits, ordinary elements, zeros, infinities, NaNs and denormals.
    fn elements(&mut self, dtype: DType, elements: usize) -> Vec<u8> {
        (0..elements).flat_map(|_| self.element(dtype)).collect()
    }

    fn element(&mut self, dtype: DType) -> Vec<u8> {
        let size = dtype.size();
        let bits = match self.next() % 8 {
            0 | 1 => self.next(),
            2 => {
                let exponent = self.next() & 0xfff8_0000_0000_0000;
                (exponent >> (64 - 8 * size)) ^ (self.next() % 3)
            }
            3 => (self.next() & 1) << (8 * size - 1),
            4 => 0x7ff0_0000_0000_0000 >> (64 - 8 * size),
            _ => return self.ordinary_element(dtype),
        };
        bits.to_le_bytes()[..size].to_vec()
    }

    /// Returns elements in blocks. Most blocks have only zeros, of either sign, or a single nonzero
    /// element.
    fn sparse(&mut self, dtype: DType, block_elements: usize, elements: usize) -> Vec<u8> {
        let size = dtype.size();
        let mut bytes = vec![0; elements * size];
        for block in bytes.chunks_mut(block_elements * size) {
            let last = block.len() / size - 1;
            let at = usize::try_from(self.next()).unwrap() % (last + 1) * size;
            match self.next() % 6 {
                0 => {}
                // Only the sign bit is set.
                1 => block[at + size - 1] = 0x80,
                2 => block[at] = 1,
                3 => block[last * size..].copy_from_slice(&self.element(dtype)),
                4 => {
                    block.fill(0);
                    block.chunks_exact_mut(size).for_each(|x| x[size - 1] = 0x80);
                }
                _ => {
                    let any = self.elements(dtype, last + 1);
                    block.copy_from_slice(&any);
                }
            }
        }
        bytes
    }
}
