//! Random input tensors, including special and extreme values.

use half::{bf16, f16};
use racksum_proto::dtype::DType;

/// Random numbers from a seed: SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `end`.
    pub(crate) const fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Returns a number from -1 to 1.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// Returns and prints the seed of a test: the environment variable `SEED`, or `own` if it is not
/// set.
pub(crate) fn seed(own: u64) -> u64 {
    let seed = std::env::var("SEED").map_or(own, |seed| seed.parse().unwrap());
    println!("SEED={seed}");
    seed
}

/// Kinds of values in a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Values {
    /// Numbers of ordinary size.
    Ordinary,
    /// Numbers of many magnitudes, whose sum depends on the order.
    Wide,
    /// Wide numbers, with NaN, infinities, zeroes of both signs, denormals and the largest numbers.
    Special,
}

/// Returns a rank's tensor. Some of its blocks are zero, some are -0.0 throughout, and a rank may
/// have only zeroes.
pub(crate) fn tensor(
    dtype: DType,
    elements: u64,
    block: usize,
    values: Values,
    rank: u16,
    seed: u64,
) -> Vec<u8> {
    let mut tensor = Vec::new();
    let own = seed ^ (u64::from(rank) + 1).wrapping_mul(0x5851_f42d_4c95_7f2d);
    let mut random = Random::new(own);
    // All ranks use the same seed to choose the blocks that no rank holds.
    let mut common = Random::new(seed);
    // A few tensors are zero at one rank.
    let silent = common.below(4) == 0 && common.below(3) == u64::from(rank);
    for start in (0..elements).step_by(block) {
        let everywhere = common.below(8);
        let here = random.below(8);
        let len = (elements - start).min(block as u64);
        for _ in 0..len {
            let zero = silent || everywhere == 0 || (everywhere > 1 && here == 0);
            let minus_zero = everywhere == 1 || here == 1;
            let element = if zero {
                0.0
            } else if minus_zero {
                -0.0
            } else {
                value(values, &mut random)
            };
            push(dtype, element, &mut random, &mut tensor);
        }
    }
    tensor
}

/// Returns a value, before it is rounded to a dtype.
fn value(values: Values, random: &mut Random) -> f64 {
    let unit = random.unit();
    match values {
        Values::Ordinary => unit,
        Values::Wide => wide(unit, random),
        Values::Special => match random.below(64) {
            0 => f64::NAN,
            1 => -f64::NAN,
            2 => f64::INFINITY,
            3 => f64::NEG_INFINITY,
            4 => -0.0,
            5 => 0.0,
            6 => f64::MAX,
            7 => f64::from(f32::MAX),
            8 => unit * f64::from(f32::MIN_POSITIVE),
            9 => unit * f64::MIN_POSITIVE,
            10 => unit * 6e-8, // A denormal f16.
            _ => wide(unit, random),
        },
    }
}

fn wide(unit: f64, random: &mut Random) -> f64 {
    let exponent = i32::try_from(random.below(24)).unwrap() - 12;
    unit * 2f64.powi(exponent)
}

/// Appends an element. An integer is zero if `value` is zero, and otherwise random.
fn push(dtype: DType, value: f64, random: &mut Random, tensor: &mut Vec<u8>) {
    let integer = |random: &mut Random| if value == 0.0 { 0 } else { random.next() };
    match dtype {
        DType::F32 => tensor.extend(to_f32(value).to_le_bytes()),
        DType::F64 => tensor.extend(value.to_le_bytes()),
        DType::F16 => tensor.extend(f16::from_f64(value).to_le_bytes()),
        DType::Bf16 => tensor.extend(bf16::from_f64(value).to_le_bytes()),
        DType::I32 => tensor.extend(&integer(random).to_le_bytes()[..4]),
        DType::I64 => tensor.extend(integer(random).to_le_bytes()),
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the purpose is to round")]
pub(crate) const fn to_f32(value: f64) -> f32 {
    value as f32
}

/// Returns the bytes of f32 values.
pub(crate) fn floats(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

/// Returns an element of a floating-point tensor as f64.
pub(crate) fn number(dtype: DType, element: &[u8]) -> f64 {
    match dtype {
        DType::F32 => f32::from_le_bytes(element.try_into().unwrap()).into(),
        DType::F64 => f64::from_le_bytes(element.try_into().unwrap()),
        DType::F16 => f16::from_le_bytes(element.try_into().unwrap()).to_f64(),
        DType::Bf16 => bf16::from_le_bytes(element.try_into().unwrap()).to_f64(),
        DType::I32 | DType::I64 => unreachable!("integers are compared as they are"),
    }
}
