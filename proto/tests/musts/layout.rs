//! How tensors are cut into fragments, and how elements are encoded.

use racksum_proto::arith::{
    self, FIXED32_OVERFLOW, FoldTerms, decode_block, encode_block, encode_run, fold_run,
    scan_window,
};
use racksum_proto::auth::DataAuth;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction, WireType};
use racksum_proto::geometry::{Fragmentation, Geometry, MAX_FRAGMENTS, WINDOW_BYTES};

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn folded(wire: WireType, reduction: Reduction, inputs: &[&[u8]]) -> Vec<u8> {
    let fold = FoldTerms {
        world: u32::try_from(inputs.len()).expect("the number of inputs fits a u32"),
        absent: false,
    };
    let mut out = vec![0xa5; inputs[0].len()];
    fold_run(wire, reduction, fold, inputs, &mut out).expect("the inputs have equal lengths");
    out
}

#[test]
fn a_window_is_the_blocks_that_fit_61_440_bytes() {
    // wire: W-53
    for dtype in DType::ALL {
        for wire in WireType::ALL.into_iter().filter(|wire| wire.carries(dtype)) {
            for block in [32, 64, 128, 256, 512, 1024] {
                let descriptor = Descriptor { wire, ..Descriptor::sum(1 << 30, dtype) };
                let geometry = Geometry::new(&descriptor.with_block(block).unwrap());
                let fit = (61_440 / wire.block_len(block)).min(64);
                assert_eq!(geometry.window_blocks(), fit);
                assert_eq!(geometry.blocks_of(0), fit);
            }
        }
    }
}

#[test]
fn fragments_split_no_element_and_are_at_most_64() {
    // wire: W-52
    for payload in 0..9000 {
        let cut = Fragmentation::new(payload);
        assert_eq!(cut.is_some(), payload >= 960, "{payload}");
        let Some(cut) = cut else { continue };
        assert!(cut.payload().is_multiple_of(8) && cut.payload() <= payload);
        assert!(cut.count(WINDOW_BYTES) <= MAX_FRAGMENTS);
    }
}

#[test]
fn sparse_windows_are_cut_between_blocks() {
    // wire: W-55
    let job = Fragmentation::new(1408).unwrap();
    let payload = |wire, block, len| {
        let descriptor = Descriptor { wire, ..Descriptor::sum(1 << 20, DType::F32) };
        let geometry = Geometry::new(&descriptor.with_block(block).unwrap());
        geometry.cut(job, len).payload()
    };
    assert_eq!(payload(WireType::F32, 256, 1024), 1024);
    assert_eq!(payload(WireType::F32, 256, 30 * 1024), 1024);
    assert_eq!(payload(WireType::F32, 256, 31 * 1024), 1408);
    assert_eq!(payload(WireType::F32, 64, 256), 5 * 256);
    assert_eq!(payload(WireType::Int8, 256, 260), 5 * 260);
    // A block that does not fit into one datagram is split.
    assert_eq!(payload(WireType::F32, 1024, 4096), 1408);
    // A block is also split if its header and trailer would add more than 6 %.
    let geometry = Geometry::new(&Descriptor::sum(1 << 20, DType::F32));
    for (auth, payload, stride) in
        [(DataAuth::None, 1024, 1072), (DataAuth::Mac, 1024, 1084), (DataAuth::Aead, 1408, 1472)]
    {
        let cut = geometry.cut(job.with_trailer(auth), 1024);
        assert_eq!((cut.payload(), cut.stride()), (payload, stride), "{auth}");
        assert_eq!(cut.stride() - cut.unsealed(), auth.trailer());
    }
}

#[test]
fn packed_blocks_are_in_order_and_only_the_last_is_short() {
    // wire: W-46
    let elements = 60 * 256 + 3 * 256 + 10;
    for (wire, block_len, last_len) in [(WireType::F32, 1024, 40), (WireType::Int8, 260, 14)] {
        let descriptor = Descriptor { wire, ..Descriptor::sum(elements, DType::F32) };
        let geometry = Geometry::new(&descriptor);
        let last = geometry.windows() - 1;
        let blocks = u32::try_from(geometry.blocks_of(last)).unwrap();
        let mask = 1 << (blocks - 1) | 0b101;
        let packed: Vec<_> = geometry.packed(last, mask).map(|packed| packed.offset).collect();
        assert_eq!(packed, [0, block_len, 2 * block_len]);
        assert_eq!(geometry.payload_len(last, mask), 2 * block_len + last_len);
        let ends: Vec<_> =
            geometry.packed(last, mask).map(|p| p.element + p.elements as u64).collect();
        assert!(ends.is_sorted());
        assert_eq!(ends[2], elements);
    }
}

#[test]
fn a_block_is_sent_if_an_element_is_not_zero() {
    // wire: W-48
    let denormal = f32::from_bits(1);
    for (value, sent) in
        [(0.0, 0), (-0.0, 0), (denormal, 1), (f32::NAN, 1), (f32::INFINITY, 1), (-1.0, 1)]
    {
        let mut block = [-0.0f32; 32];
        block[31] = value;
        let mut window = floats(&block);
        assert_eq!(scan_window(DType::F32, 32, &mut window), sent, "{value}");
        let after = if sent == 0 { floats(&[0.0; 32]) } else { floats(&block) };
        assert_eq!(window, after);
    }
}

#[test]
fn elements_are_little_endian() {
    // wire: W-47
    let mut out = [0; 2];
    encode_run(DType::F32, WireType::Bf16, &1.5f32.to_le_bytes(), &mut out).unwrap();
    assert_eq!(out, [0xc0, 0x3f]);
    let sum = folded(WireType::I32, Reduction::Sum, &[&[0xff, 0xff, 0, 0], &[1, 0, 0, 0]]);
    assert_eq!(sum, [0, 0, 1, 0]);
}

#[test]
fn folds_go_from_rank_to_rank_and_have_one_nan() {
    // wire: W-49
    let one = |value: f32| floats(&[value]);
    let [big, small, back] = [one(1e8), one(1.0), one(-1e8)];
    // The sum loses the small value if it is added second, but not if it is added last.
    let sum = folded(WireType::F32, Reduction::Sum, &[&big, &small, &back]);
    assert_eq!(sum, one(0.0));
    let sum = folded(WireType::F32, Reduction::Sum, &[&big, &back, &small]);
    assert_eq!(sum, one(1.0));
    let odd_nan = one(f32::from_bits(0xffc1_2345));
    for reduction in Reduction::ALL {
        let nan = folded(WireType::F32, reduction, &[&odd_nan, &small]);
        assert_eq!(nan, 0x7fc0_0000u32.to_le_bytes());
    }
    let fold = FoldTerms { world: 3, absent: true };
    let mut least = [0; 4];
    fold_run(WireType::F32, Reduction::Min, fold, &[&small], &mut least).unwrap();
    assert_eq!(least, [0; 4], "a rank that sent nothing contributes zeros");
    let wrapped =
        folded(WireType::I32, Reduction::Sum, &[&[0xff, 0xff, 0xff, 0x7f], &[1, 0, 0, 0]]);
    assert_eq!(wrapped, i32::MIN.to_le_bytes());
}

fn block(wire: WireType, world: u32, values: &[f32]) -> Vec<u8> {
    let mut out = vec![0xa5; wire.block_len(values.len())];
    encode_block(DType::F32, wire, world, &floats(values), &mut out)
        .expect("the wire type carries f32");
    out
}

fn decoded(wire: WireType, block: &[u8], elements: usize) -> Vec<f32> {
    let mut out = vec![0xa5; 4 * elements];
    decode_block(wire, DType::F32, block, &mut out).expect("the wire type carries f32");
    out.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[test]
fn int8_blocks_have_a_scale_and_bytes() {
    // wire: W-50
    let wire = WireType::Int8;
    let encoded = block(wire, 2, &[127.0, -127.0, 0.6, 0.0]);
    assert_eq!(encoded, [0, 0, 0x80, 0x3f, 127, 0x81, 1, 0]);
    assert_eq!(block(wire, 2, &[0.0; 4]), [0; 8]);
    for bad in [f32::NAN, f32::INFINITY] {
        let encoded = block(wire, 2, &[1.0, bad]);
        assert!(decoded(wire, &encoded, 2).iter().all(|value| value.is_nan()));
    }
    let sum = folded(wire, Reduction::Sum, &[&encoded, &encoded]);
    assert_eq!(decoded(wire, &sum, 4), [254.0, -254.0, 2.0, 0.0]);
}

#[test]
fn fixed32_blocks_have_an_exponent_and_integers_and_never_wrap() {
    // wire: W-51
    let wire = WireType::Fixed32;
    let encoded = block(wire, 2, &[1.0, -0.5]);
    let exponent = i32::from_le_bytes(*encoded.first_chunk().unwrap());
    assert_eq!(exponent, -29, "2^29 is the greatest power of two within (2^31 - 1) / 2");
    assert_eq!(decoded(wire, &encoded, 2), [1.0, -0.5]);
    let coarse = block(wire, 2, &[1024.0, 0.0]);
    let sum = folded(wire, Reduction::Sum, &[&encoded, &coarse]);
    assert_eq!(decoded(wire, &sum, 2), [1025.0, -0.5]);

    let marked = [&FIXED32_OVERFLOW.to_le_bytes()[..], &[0; 8]].concat();
    assert_eq!(block(wire, 2, &[1.0, f32::INFINITY]), marked);
    assert_eq!(folded(wire, Reduction::Sum, &[&encoded, &marked]), marked);
    // The block is encoded for a sum over one rank, but three are summed.
    let greedy = block(wire, 1, &[1.0, 0.0]);
    let sum = folded(wire, Reduction::Sum, &[&greedy, &greedy, &greedy]);
    assert_eq!(sum, marked);
    assert!(arith::fixed32_overflowed(&sum));
}
