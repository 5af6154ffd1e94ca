//! Values worked out by hand for the reference arithmetic, which the kernels must match.

use std::vec;
use std::vec::Vec;

use super::*;

const SUM: Reduction = Reduction::Sum;

fn full(world: u32) -> FoldTerms {
    FoldTerms { world, absent: false }
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn f64s(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn u16s(values: &[u16]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn u32s(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn folded(wire: WireType, reduction: Reduction, fold: FoldTerms, inputs: &[Vec<u8>]) -> Vec<u8> {
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let mut out = vec![0xa5; inputs[0].len()];
    fold_run(wire, reduction, fold, &inputs, &mut out).unwrap();
    out
}

fn encoded(dtype: DType, wire: WireType, src: &[u8]) -> Vec<u8> {
    let mut out = vec![0xa5; src.len() / dtype.size() * wire.element_size()];
    encode_run(dtype, wire, src, &mut out).unwrap();
    out
}

fn block(dtype: DType, wire: WireType, world: u32, src: &[u8]) -> Vec<u8> {
    let mut out = vec![0xa5; wire.block_len(src.len() / dtype.size())];
    encode_block(dtype, wire, world, src, &mut out).unwrap();
    out
}

fn int8_block(scale: f32, q: &[i8]) -> Vec<u8> {
    scale.to_le_bytes().into_iter().chain(q.iter().flat_map(|q| q.to_le_bytes())).collect()
}

fn fixed_block(exponent: i32, q: &[i32]) -> Vec<u8> {
    exponent.to_le_bytes().into_iter().chain(q.iter().flat_map(|q| q.to_le_bytes())).collect()
}

#[test]
fn f32_sums_run_from_left_to_right() {
    let sum = |values: [f32; 3]| folded(WireType::F32, SUM, full(3), &values.map(|x| f32s(&[x])));
    assert_eq!(sum([1e8, 1.0, -1e8]), f32s(&[0.0]));
    assert_eq!(sum([1e8, -1e8, 1.0]), f32s(&[1.0]));
}

#[test]
fn averages_divide_and_do_not_multiply_by_a_reciprocal() {
    let average = folded(WireType::F32, Reduction::Avg, full(3), &[f32s(&[2.0]), f32s(&[3.0])]);
    // Multiplication by 1/3 would make the last hexadecimal digit 6.
    assert_eq!(average, u32s(&[0x3fd5_5555]));
}

#[test]
fn averages_of_integers_are_quotients_of_the_wrapped_sum_rounded_toward_zero() {
    let average = |world, inputs: &[[i32; 6]]| {
        let words = |input: &[i32; 6]| u32s(&input.map(i32::cast_unsigned));
        let inputs: Vec<_> = inputs.iter().map(words).collect();
        folded(WireType::I32, Reduction::Avg, full(world), &inputs)
    };
    let of = |values: [i32; 6]| u32s(&values.map(i32::cast_unsigned));
    let (one, other) = ([7, -7, 1, -1, i32::MAX, i32::MIN], [0, 0, 1, 0, 1, -1]);
    assert_eq!(average(2, &[one, other]), of([3, -3, 1, 0, i32::MIN / 2, i32::MAX / 2]));
    assert_eq!(average(3, &[one, other]), of([2, -2, 0, 0, i32::MIN / 3, i32::MAX / 3]));
    assert_eq!(average(1, &[one]), of(one));
    let halves = [(-3i64).to_le_bytes().to_vec(), (1i64 << 40).to_le_bytes().to_vec()];
    let average = folded(WireType::I64, Reduction::Avg, full(2), &halves);
    assert_eq!(average, (((1i64 << 40) - 3) / 2).to_le_bytes());
}

#[test]
fn bf16_sums_are_rounded_once() {
    // 256 + 1 + 1: at 256, neighbouring bf16 values are 2 apart, so adding a single 1 has no
    // effect.
    let inputs = [u16s(&[0x4380]), u16s(&[0x3f80]), u16s(&[0x3f80])];
    assert_eq!(folded(WireType::Bf16, SUM, full(3), &inputs), u16s(&[0x4381]));
    assert_eq!(folded(WireType::Bf16, SUM, full(3), &inputs[..2]), u16s(&[0x4380]));
}

#[test]
fn f16_sums_are_rounded_once_and_overflow_to_infinity() {
    // 2048 + 1 + 1 is the same case in f16; 65504 + 16 is a tie between the largest value and
    // infinity.
    let inputs = [u16s(&[0x6800, 0x7bff]), u16s(&[0x3c00, 0x4c00]), u16s(&[0x3c00, 0])];
    assert_eq!(folded(WireType::F16, SUM, full(3), &inputs), u16s(&[0x6801, 0x7c00]));
    let denormal = [u16s(&[0x0001]), u16s(&[0x0002])];
    assert_eq!(folded(WireType::F16, SUM, full(2), &denormal), u16s(&[0x0003]));
}

#[test]
fn integer_sums_wrap() {
    let inputs = [u32s(&[0x7fff_ffff]), u32s(&[1])];
    assert_eq!(folded(WireType::I32, SUM, full(2), &inputs), u32s(&[0x8000_0000]));
    let inputs = [i64::MAX.to_le_bytes().to_vec(), 1_i64.to_le_bytes().to_vec()];
    assert_eq!(folded(WireType::I64, SUM, full(2), &inputs), i64::MIN.to_le_bytes());
}

#[test]
fn least_and_greatest_order_zeros_and_propagate_nan() {
    let nan = f32::from_bits(0xffc1_2345);
    let cases = [
        // x, y, minimum, maximum
        (1.0_f32, 2.0_f32, 1.0_f32, 2.0_f32),
        (0.0, -0.0, -0.0, 0.0),
        (-0.0, 0.0, -0.0, 0.0),
        (-0.0, -0.0, -0.0, -0.0),
        (f32::NEG_INFINITY, f32::INFINITY, f32::NEG_INFINITY, f32::INFINITY),
    ];
    for (x, y, min, max) in cases {
        let inputs = [f32s(&[x]), f32s(&[y])];
        assert_eq!(folded(WireType::F32, Reduction::Min, full(2), &inputs), f32s(&[min]));
        assert_eq!(folded(WireType::F32, Reduction::Max, full(2), &inputs), f32s(&[max]));
    }
    for reduction in [Reduction::Min, Reduction::Max] {
        for inputs in [[f32s(&[nan]), f32s(&[1.0])], [f32s(&[1.0]), f32s(&[nan])]] {
            assert_eq!(folded(WireType::F32, reduction, full(2), &inputs), u32s(&[0x7fc0_0000]));
        }
    }
}

#[test]
fn an_absent_rank_holds_positive_zero() {
    let absent = FoldTerms { world: 4, absent: true };
    let inputs = [f32s(&[3.0, -3.0, -0.0]), f32s(&[5.0, -5.0, -0.0])];
    let fold = |reduction| folded(WireType::F32, reduction, absent, &inputs);
    assert_eq!(fold(Reduction::Min), f32s(&[0.0, -5.0, -0.0]));
    assert_eq!(fold(Reduction::Max), f32s(&[5.0, 0.0, 0.0]));
    assert_eq!(fold(Reduction::Sum), f32s(&[8.0, -8.0, -0.0]));
    assert_eq!(fold(Reduction::Avg), f32s(&[2.0, -2.0, -0.0]));
    let inputs = [u32s(&[7, u32::MAX])];
    assert_eq!(folded(WireType::I32, Reduction::Min, absent, &inputs), u32s(&[0, u32::MAX]));
    assert_eq!(folded(WireType::I32, Reduction::Max, absent, &inputs), u32s(&[7, 0]));
}

#[test]
fn one_contribution_still_loses_its_nan_payload() {
    for reduction in Reduction::ALL {
        let fold = |wire, input| folded(wire, reduction, full(1), &[input]);
        assert_eq!(fold(WireType::F32, u32s(&[0xff80_0001])), u32s(&[0x7fc0_0000]));
        assert_eq!(
            fold(WireType::F64, 0xfff0_0000_0000_0001_u64.to_le_bytes().to_vec()),
            0x7ff8_0000_0000_0000_u64.to_le_bytes()
        );
        assert_eq!(fold(WireType::F16, u16s(&[0xfc01])), u16s(&[0x7e00]));
        assert_eq!(fold(WireType::Bf16, u16s(&[0xff81])), u16s(&[0x7fc0]));
    }
}

#[test]
fn narrowing_rounds_ties_to_even_and_keeps_nan() {
    let src = u32s(&[
        0x3f80_8000, // 1 + half a step: down, to even
        0x3f81_8000, // 1 + one and a half steps: up, to even
        0x3f80_8001, // past the tie
        0x7f7f_ffff, // the largest f32
        0x7f80_0001, // a NaN whose upper half is infinity
        0xffff_ffff,
        0x8000_0000,
        0x0000_8000, // a denormal tie
    ]);
    let bf16 = [0x3f80, 0x3f82, 0x3f81, 0x7f80, 0x7fc0, 0x7fc0, 0x8000, 0x0000];
    assert_eq!(encoded(DType::F32, WireType::Bf16, &src), u16s(&bf16));
    let src = u32s(&[
        0x3f80_1000, // 1 + half a step of f16: down
        0x3f80_3000, // up
        0x477f_efff, // just below 65520
        0x477f_f000, // 65520
        0x3300_0000, // half the least denormal: down
        0x3300_0001,
        0x7f80_0001,
    ]);
    let f16 = [0x3c00, 0x3c02, 0x7bff, 0x7c00, 0x0000, 0x0001, 0x7e00];
    assert_eq!(encoded(DType::F32, WireType::F16, &src), u16s(&f16));
}

#[test]
fn f64_travels_as_a_16_bit_float_by_way_of_f32() {
    // 1 + half a bf16 step + a bit that f32 cannot hold: a single rounding would round up.
    let x = 1.0 + f64::powi(2.0, -8) + f64::powi(2.0, -40);
    assert_eq!(encoded(DType::F64, WireType::Bf16, &f64s(&[x, -0.0])), u16s(&[0x3f80, 0x8000]));
    assert_eq!(encoded(DType::F64, WireType::F32, &f64s(&[1e300])), f32s(&[f32::INFINITY]));
}

#[test]
fn decoding_inverts_encoding() {
    for (wire, bits, value) in [
        (WireType::Bf16, 0x4049_u16, 3.140_625_f64),
        (WireType::F16, 0x4248, 3.140_625),
        (WireType::F16, 0x8001, -5.960_464_477_539_063e-8),
        (WireType::Bf16, 0xff80, f64::NEG_INFINITY),
    ] {
        let mut dst = [0xa5; 8];
        decode_run(wire, DType::F64, &bits.to_le_bytes(), &mut dst).unwrap();
        assert_eq!(f64::from_le_bytes(dst), value);
        assert_eq!(encoded(DType::F64, wire, &dst), bits.to_le_bytes());
    }
}

#[test]
fn an_unchanged_tensor_is_copied_with_its_payloads() {
    let src = u32s(&[0xff80_0001, 0x8000_0000]);
    assert_eq!(encoded(DType::F32, WireType::F32, &src), src);
    let mut dst = [0xa5; 8];
    decode_run(WireType::F32, DType::F32, &src, &mut dst).unwrap();
    assert_eq!(dst[..], src);
}

#[test]
fn int8_rounds_ties_to_even_on_the_scale_of_the_largest() {
    let src = f32s(&[127.0, -1.0, 0.5, 1.5, 2.5, -0.5, -0.0]);
    let expected = int8_block(1.0, &[127, -1, 0, 2, 2, 0, 0]);
    assert_eq!(block(DType::F32, WireType::Int8, 1, &src), expected);
    let src = u16s(&[0xc2fe, 0x3f80]); // -127 and 1 as bf16
    assert_eq!(block(DType::Bf16, WireType::Int8, 9, &src), int8_block(1.0, &[-127, 1]));
}

#[test]
fn int8_scales_cover_every_magnitude() {
    assert_eq!(int8_scale(0.0).to_bits(), 0);
    assert!(int8_scale(f32::NAN).is_nan());
    assert!(int8_scale(f32::INFINITY).is_nan());
    assert_eq!(int8_scale(1e-45), f32::MIN_POSITIVE);
    assert_eq!(int8_scale(f32::MIN_POSITIVE * 127.0), f32::MIN_POSITIVE);
    // The largest scale decodes to a finite value, so all smaller scales do too.
    assert!((int8_scale(f32::MAX) * 127.0).is_finite());
    assert!((int8_scale(f32::MAX).next_up() * 127.0).is_infinite());
    assert_eq!(block(DType::F32, WireType::Int8, 1, &f32s(&[0.0, -0.0])), int8_block(0.0, &[0, 0]));
}

#[test]
fn int8_turns_a_block_with_a_non_finite_element_into_nan() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let out = block(DType::F32, WireType::Int8, 1, &f32s(&[1.0, bad, 2.0]));
        assert_eq!(out, int8_block(f32::from_bits(0x7fc0_0000), &[0, 0, 0]));
        let mut dst = [0; 12];
        decode_block(WireType::Int8, DType::F32, &out, &mut dst).unwrap();
        assert_eq!(dst[..], u32s(&[0x7fc0_0000; 3]));
    }
    // A finite f64 may become infinite too, since the arithmetic is in f32.
    let out = block(DType::F64, WireType::Int8, 1, &f64s(&[1e300]));
    assert_eq!(out, int8_block(f32::from_bits(0x7fc0_0000), &[0]));
}

#[test]
fn int8_folds_values_not_bytes() {
    let inputs = [int8_block(1.0, &[127, 2]), int8_block(2.0, &[0, -3])];
    // 127 and -4 need a scale of 1; half of each needs a scale of 0.5.
    assert_eq!(folded(WireType::Int8, SUM, full(2), &inputs), int8_block(1.0, &[127, -4]));
    let average = folded(WireType::Int8, Reduction::Avg, full(2), &inputs);
    assert_eq!(average, int8_block(0.5, &[127, -4]));
    let least = folded(WireType::Int8, Reduction::Min, full(2), &inputs);
    assert_eq!(least, int8_block(6.0 / 127.0, &[0, -127]));
}

#[test]
fn fixed32_leaves_headroom_for_the_world() {
    let below_two = 2.0_f32.next_down();
    let cases = [
        // world, value, exponent, integer
        (1, 1.0, -30, 1 << 30),
        (1, below_two, -30, 0x7fff_ff80),
        (2, 1.0, -29, 1 << 29),
        (2, below_two, -29, 0x3fff_ffc0),
        (3, 1.0, -29, 1 << 29),
        (3, 1.5, -28, 3 << 27),
        (64, 1.0, -24, 1 << 24),
        (64, -3.0, -23, -3 << 23),
        (65_535, 1.0, -15, 1 << 15),
    ];
    for (world, value, exponent, integer) in cases {
        let expected = fixed_block(exponent, &[integer, 0]);
        let out = block(DType::F32, WireType::Fixed32, world, &f32s(&[value, 0.0]));
        assert_eq!(out, expected, "{value} in a job of {world} ranks");
        assert!(integer.abs() <= fixed32_limit(world));
    }
}

#[test]
fn fixed32_steps_up_where_rounding_exceeds_the_limit() {
    // At exponent -29, the value just below 2 rounds to 2^30, one more than the limit for two
    // ranks.
    let out = block(DType::F64, WireType::Fixed32, 2, &f64s(&[2.0_f64.next_down(), 1.0]));
    assert_eq!(out, fixed_block(-28, &[1 << 29, 1 << 28]));
}

#[test]
fn fixed32_rounds_ties_to_even_and_reaches_the_ends_of_f64() {
    let src = f32s(&[f32::powi(2.0, 30), 0.5, 1.5, -2.5, 1e-45]);
    let out = block(DType::F32, WireType::Fixed32, 1, &src);
    assert_eq!(out, fixed_block(0, &[1 << 30, 0, 2, -2, 0]));
    let out = block(DType::F64, WireType::Fixed32, 65_535, &f64s(&[f64::MAX]));
    assert_eq!(out, fixed_block(1009, &[1 << 15]));
    let out = block(DType::F64, WireType::Fixed32, 1, &f64s(&[f64::powi(2.0, -998), 5e-324]));
    assert_eq!(out, fixed_block(FIXED32_MIN_EXPONENT, &[4, 0]));
    assert_eq!(block(DType::F32, WireType::Fixed32, 1, &f32s(&[0.0, -0.0])), [0; 12]);
}

#[test]
fn fixed32_marks_what_it_cannot_hold() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let out = block(DType::F32, WireType::Fixed32, 1, &f32s(&[1.0, bad]));
        assert_eq!(out, fixed_block(FIXED32_OVERFLOW, &[0, 0]));
        assert!(fixed32_overflowed(&out));
        let good = fixed_block(0, &[1, 1]);
        assert!(!fixed32_overflowed(&good));
        let sum = folded(WireType::Fixed32, SUM, full(2), &[good, out]);
        assert_eq!(sum, fixed_block(FIXED32_OVERFLOW, &[0, 0]));
        let mut dst = [0; 8];
        decode_block(WireType::Fixed32, DType::F32, &sum, &mut dst).unwrap();
        assert_eq!(dst[..], u32s(&[0x7fc0_0000; 2]));
    }
    assert!(!fixed32_overflowed(&[0xff, 0xff, 0xff]));
}

#[test]
fn fixed32_reports_a_sum_out_of_range() {
    let inputs = [fixed_block(5, &[i32::MAX, 7]), fixed_block(5, &[1, 7])];
    let sum = folded(WireType::Fixed32, SUM, full(2), &inputs);
    assert_eq!(sum, fixed_block(FIXED32_OVERFLOW, &[0, 0]));
    let average = folded(WireType::Fixed32, Reduction::Avg, full(2), &inputs);
    assert_eq!(average, fixed_block(5, &[1 << 30, 7]));
}

#[test]
fn fixed32_rescales_to_the_greatest_exponent_ties_to_even() {
    let inputs = [fixed_block(3, &[10, 10, 10, 10]), fixed_block(2, &[1, 3, -1, -3])];
    let sum = folded(WireType::Fixed32, SUM, full(2), &inputs);
    assert_eq!(sum, fixed_block(3, &[10, 12, 10, 8]));
    let far = [fixed_block(31, &[0, 1]), fixed_block(-1, &[i32::MIN, i32::MAX])];
    assert_eq!(folded(WireType::Fixed32, SUM, full(2), &far), fixed_block(31, &[0, 1]));
    let apart = [fixed_block(i32::MAX - 1, &[1]), fixed_block(i32::MIN, &[i32::MIN])];
    let sum = folded(WireType::Fixed32, SUM, full(2), &apart);
    assert_eq!(sum, fixed_block(i32::MAX - 1, &[1]));
}

#[test]
fn fixed32_ignores_the_exponent_of_an_all_zero_block() {
    let inputs = [fixed_block(100, &[0, 0]), fixed_block(-3, &[5, -5])];
    let fold = |reduction| folded(WireType::Fixed32, reduction, full(2), &inputs);
    assert_eq!(fold(Reduction::Sum), fixed_block(-3, &[5, -5]));
    assert_eq!(fold(Reduction::Min), fixed_block(-3, &[0, -5]));
    assert_eq!(fold(Reduction::Max), fixed_block(-3, &[5, 0]));
    let zeros = [fixed_block(4, &[0]), fixed_block(9, &[0])];
    assert_eq!(folded(WireType::Fixed32, SUM, full(2), &zeros), fixed_block(9, &[0]));
}

#[test]
fn fixed32_sums_of_agreed_exponents_do_not_depend_on_where_they_are_made() {
    // The blocks cover ties, different magnitudes, a block far smaller than the others, and a block
    // of zeros. No block is marked as overflowed.
    let own = [
        fixed_block(3, &[5, -7, 1 << 29, 1]),
        fixed_block(5, &[1, 3, -5, 2]),
        fixed_block(-40, &[i32::MAX / 5, 1, -1, 9]),
        fixed_block(1000, &[0; 4]),
        fixed_block(4, &[3, -3, 7, -1]),
    ];
    let greatest = own.iter().filter_map(|block| fixed32_counting_exponent(block)).max();
    assert_eq!(greatest, Some(5));
    let mut agreed = own.clone();
    agreed.iter_mut().for_each(|block| fixed32_rescale(block, 5));
    let fold = |reduction, absent, inputs: &[Vec<u8>]| {
        folded(WireType::Fixed32, reduction, FoldTerms { world: 5, absent }, inputs)
    };
    for reduction in Reduction::ALL {
        let partial = if reduction == Reduction::Avg { Reduction::Sum } else { reduction };
        let flat = fold(reduction, false, &own);
        for cut in 1..5 {
            let (one, other) = agreed.split_at(cut);
            let racks = [fold(partial, false, one), fold(partial, false, other)];
            assert_eq!(fold(reduction, false, &racks), flat, "{reduction:?} cut at {cut}");
        }
    }
    let mut greater = own[0].clone();
    fixed32_rescale(&mut greater, 2);
    assert_eq!(greater, own[0]);
    let mut marked = fixed_block(FIXED32_OVERFLOW, &[0; 4]);
    assert_eq!(fixed32_counting_exponent(&marked), None);
    fixed32_rescale(&mut marked, 5);
    assert!(fixed32_overflowed(&marked));
}

#[test]
fn fixed32_averages_round_ties_to_even() {
    let inputs = [fixed_block(0, &[1, 0, -1, -3, 5]), fixed_block(0, &[2, 1, 0, 0, 0])];
    let average = folded(WireType::Fixed32, Reduction::Avg, full(2), &inputs);
    assert_eq!(average, fixed_block(0, &[2, 0, 0, -2, 2]));
    let absent = FoldTerms { world: 4, absent: true };
    let least = folded(WireType::Fixed32, Reduction::Min, absent, &inputs);
    assert_eq!(least, fixed_block(0, &[0, 0, -1, -3, 0]));
}

#[test]
fn fixed32_decodes_any_exponent() {
    let decoded = |exponent, q| {
        let mut dst = [0xa5; 8];
        let src = fixed_block(exponent, &[q]);
        decode_block(WireType::Fixed32, DType::F64, &src, &mut dst).unwrap();
        f64::from_le_bytes(dst)
    };
    assert_eq!(decoded(-30, 1 << 30), 1.0);
    assert_eq!(decoded(-1074, 1), 5e-324);
    assert_eq!(decoded(-1104, 3 << 29), 1e-323); // a tie at 1.5 units, rounded to 2
    assert_eq!(decoded(1010, 1 << 13), f64::powi(2.0, 1023));
    assert_eq!(decoded(i32::MAX - 1, -1), f64::NEG_INFINITY);
    assert_eq!(decoded(i32::MAX - 1, 0).to_bits(), 0);
    assert_eq!(decoded(i32::MIN, i32::MIN).abs(), 0.0);
}

#[test]
fn scans_ignore_the_sign_of_zero_and_nothing_else() {
    let mut window = u32s(&[0, 0x8000_0000, 1, 0, 0x8000_0001, 0, 0x7fc0_0000, 0, 0x8000_0000]);
    let clean = u32s(&[0, 0, 1, 0, 0x8000_0001, 0, 0x7fc0_0000, 0, 0]);
    assert_eq!(scan_window(DType::F32, 2, &mut window), 0b0_1110);
    assert_eq!(window, clean);
    // A block that is sent keeps its negative zeros.
    let mut window = u32s(&[0x8000_0000, 1]);
    assert_eq!(scan_window(DType::F32, 2, &mut window), 1);
    assert_eq!(window, u32s(&[0x8000_0000, 1]));
}

#[test]
fn scans_know_each_element_type() {
    let bits = |dtype, bytes: &[u8]| scan_window(dtype, 1, &mut bytes.to_vec());
    assert_eq!(bits(DType::F16, &u16s(&[0, 0x8000, 0x0001])), 0b100);
    assert_eq!(bits(DType::Bf16, &u16s(&[0x8000, 0xff80])), 0b10);
    assert_eq!(bits(DType::F64, &f64s(&[-0.0, 5e-324, f64::NAN])), 0b110);
    assert_eq!(bits(DType::F64, &u32s(&[0x8000_0000, 0])), 1);
    assert_eq!(bits(DType::I32, &u32s(&[0, 0x8000_0000])), 0b10);
    assert_eq!(bits(DType::I64, &i64::MIN.to_le_bytes()), 1);
    assert_eq!(bits(DType::F32, &[]), 0);
    assert_eq!(scan_window(DType::F32, 1, &mut f32s(&[1.0; 64])), u64::MAX);
}

#[test]
fn folds_refuse_what_they_cannot_fold() {
    let fold = |wire, reduction, world, inputs: &[&[u8]], len: usize| {
        let mut out = vec![0xa5; len];
        let result = fold_run(wire, reduction, full(world), inputs, &mut out);
        assert!(result.is_ok() || out.iter().all(|byte| *byte == 0xa5));
        result
    };
    let four: &[u8] = &[0; 4];
    let f32 = WireType::F32;
    assert_eq!(fold(f32, SUM, 1, &[], 4), Err(ArithError::NoInput));
    let length = ArithError::Length { expected: 8, actual: 4 };
    assert_eq!(fold(f32, SUM, 1, &[four], 8), Err(length));
    let ragged = ArithError::Ragged { wire: WireType::F64, len: 4 };
    assert_eq!(fold(WireType::F64, SUM, 1, &[four], 4), Err(ragged));
    let ragged = ArithError::Ragged { wire: WireType::Int8, len: 3 };
    assert_eq!(fold(WireType::Int8, SUM, 1, &[&[0; 3]], 3), Err(ragged));
    let ragged = ArithError::Ragged { wire: WireType::Int8, len: 1029 };
    assert_eq!(fold(WireType::Int8, SUM, 1, &[&[0; 1029]], 1029), Err(ragged));
    for world in [0, 1, MAX_WORLD + 1] {
        assert_eq!(fold(f32, SUM, world, &[four, four], 4), Err(ArithError::World { world }));
    }
    assert_eq!(fold(f32, SUM, 1, &[&[]], 0), Ok(()));
    assert_eq!(fold(WireType::Fixed32, SUM, 1, &[four], 4), Ok(()));
}

#[test]
fn conversions_refuse_what_does_not_travel_so() {
    let conversion = |dtype, wire| Err(ArithError::Conversion { dtype, wire });
    let (f32, i32, bf16) = (DType::F32, DType::I32, DType::Bf16);
    assert_eq!(check_encode_run(f32, WireType::Int8, 4, 5), conversion(f32, WireType::Int8));
    assert_eq!(check_decode_run(WireType::F16, i32, 2, 4), conversion(i32, WireType::F16));
    let refused = conversion(f32, WireType::Bf16);
    assert_eq!(check_encode_block(f32, WireType::Bf16, 1, 4, 2), refused);
    let refused = conversion(bf16, WireType::Fixed32);
    assert_eq!(check_decode_block(WireType::Fixed32, bf16, 8, 2), refused);
    let length = Err(ArithError::Length { expected: 4, actual: 5 });
    assert_eq!(check_encode_run(f32, WireType::Bf16, 8, 5), length);
    assert_eq!(check_decode_run(WireType::Bf16, DType::F32, 2, 5), length);
    let world = Err(ArithError::World { world: 0 });
    assert_eq!(check_encode_block(f32, WireType::Int8, 0, 4, 5), world);
    assert_eq!(check_encode_block(f32, WireType::Int8, 1, 4, 5), Ok(()));
    assert_eq!(check_decode_block(WireType::Int8, DType::F32, 5, 4), Ok(()));
}
