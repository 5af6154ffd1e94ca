use std::sync::Arc;

use racksum_net::local::SharedMemory;
use racksum_proto::dtype::DType;
use racksum_proto::ids::{Generation, JobId, OpId};

use super::*;
use crate::blocks::Blocks;
use crate::tensor::shared_bytes;
use crate::tensor::tests::{Scribbler, shared_region_of};

/// The mask of a window in which every third block is present.
const MASK: u64 = 0x0249_2492_4924_9249;
const BLOCK: usize = 256;

fn descriptor(wire: WireType) -> Descriptor {
    Descriptor { wire, ..Descriptor::sum(61 * BLOCK as u64 + 7, DType::F32) }
}

fn tensor(descriptor: &Descriptor) -> Vec<u8> {
    let value = |i: u64| if MASK >> (i / 256) & 1 == 1 { i as f32 - 4000.5 } else { 0.0 };
    (0..descriptor.elements).flat_map(|i| value(i).to_le_bytes()).collect()
}

/// Returns the tensor after the reference arithmetic has encoded and decoded the blocks of `MASK`.
fn expected(descriptor: &Descriptor, geometry: &Geometry) -> Vec<u8> {
    let Descriptor { dtype, wire, .. } = *descriptor;
    let mut out = tensor(descriptor);
    for packed in geometry.packed(0, mask(geometry)) {
        let stretch = packed.element..packed.element + packed.elements as u64;
        let block = &mut out[bytes_of(descriptor, stretch)];
        let mut encoded = vec![0; wire.block_len(packed.elements)];
        if wire.is_scaled() {
            arith::encode_block(dtype, wire, 1, block, &mut encoded).unwrap();
            arith::decode_block(wire, dtype, &encoded, block).unwrap();
        } else {
            arith::encode_run(dtype, wire, block, &mut encoded).unwrap();
            arith::decode_run(wire, dtype, &encoded, block).unwrap();
        }
    }
    out
}

fn mask(geometry: &Geometry) -> u64 {
    MASK & geometry.full_mask(0)
}

/// Returns the bodies of a window's fragments.
fn bodies(payload: &Payload, cut: Fragmentation, len: usize) -> Vec<Vec<u8>> {
    let stride = Header::LEN + cut.payload();
    let mut out = vec![0xa5; cut.count(len) * stride];
    let header =
        Header { mask: mask(&payload.geometry), ..Header::ping(JobId(1), Generation(0), 0) };
    let data = DataFragments { shard: 0, len, cut, fragments: u64::MAX, header, held: false };
    let written = payload.gather(&data, &mut out);
    out[..written].chunks(stride).map(|datagram| datagram[Header::LEN..].to_vec()).collect()
}

#[test]
fn some_fragments_are_gathered_as_they_are_among_all() {
    for wire in [WireType::F32, WireType::Bf16, WireType::Int8] {
        let descriptor = descriptor(wire);
        let payload = Payload::new(descriptor, Data::Owned(tensor(&descriptor)), 1, false);
        let cut = Fragmentation::new(1000).unwrap();
        let mask = mask(&payload.geometry);
        let len = payload.geometry.payload_len(0, mask);
        let header = Header { mask, ..Header::ping(JobId(1), Generation(0), 0) };
        let gathered = |fragments| {
            let data = DataFragments { shard: 0, len, cut, fragments, header, held: false };
            let mut out = vec![0; cut.count(len) * (Header::LEN + cut.payload())];
            let written = payload.gather(&data, &mut out);
            let datagrams = out[..written].chunks(Header::LEN + cut.payload());
            datagrams.map(<[u8]>::to_vec).collect::<Vec<_>>()
        };
        let all = gathered(u64::MAX);
        assert!(all.len() > 4);
        let last = all.len() - 1;
        let some = gathered(0b1010 | 1 << last);
        assert_eq!(some, [all[1].clone(), all[3].clone(), all[last].clone()]);
    }
}

#[test]
fn what_lies_in_the_tensor_as_it_travels_is_sent_from_there() {
    let whole = Fragmentation::new(60_000).unwrap();
    let full = descriptor(WireType::F32);
    let in_place = |descriptor: Descriptor, mask: u64, cut| {
        let payload = Payload::new(descriptor, Data::Owned(tensor(&descriptor)), 1, false);
        let len = payload.geometry.payload_len(0, mask);
        let header = Header { mask, ..Header::ping(JobId(1), Generation(0), 0) };
        let data = DataFragments { shard: 0, len, cut, fragments: u64::MAX, header, held: false };
        let range = payload.in_place(&data.header, data.len, data.cut)?;
        let mut out = vec![0; len + Header::LEN];
        assert_eq!(payload.gather(&data, &mut out), out.len());
        assert!(payload.data.bytes(range.clone()).to_vec() == out[Header::LEN..]);
        Some(range)
    };
    let all = Geometry::new(&full).full_mask(0);
    let len = all.count_ones() as usize * 1024;
    // A block has 1,024 bytes.
    assert_eq!(in_place(full, all, whole), None, "the payload exceeds a datagram");
    assert_eq!(in_place(full, all, Fragmentation::new(65_000).unwrap()), Some(0..len));
    assert_eq!(in_place(full, all & !0xff, whole), Some(8 * 1024..len));
    assert_eq!(in_place(full, 0xffff << 3, whole), Some(3 * 1024..19 * 1024));
    assert_eq!(in_place(full, 0x7fff << 3, whole), None, "the payload is too small");
    assert_eq!(in_place(full, all & !0xff & !(1 << 30), whole), None, "the blocks lie apart");
    assert_eq!(in_place(descriptor(WireType::Bf16), all & !0xff, whole), None, "bf16 is converted");
    assert_eq!(in_place(descriptor(WireType::Int8), all & !0xff, whole), None, "int8 is converted");
    let list = BlockSet::new(&full, Blocks::default()).unwrap();
    let payload = Payload::new(full, Data::Blocks(list), 1, false);
    let header = Header { mask: all & !0xff, ..Header::ping(JobId(1), Generation(0), 0) };
    let len = payload.geometry.payload_len(0, header.mask);
    let data =
        DataFragments { shard: 0, len, cut: whole, fragments: u64::MAX, header, held: false };
    assert_eq!(payload.in_place(&data.header, data.len, data.cut), None, "the data is a list");
}

/// Delivers the fragments of a window in `order` into `data`, and returns the payload.
fn scatter(
    descriptor: Descriptor,
    data: Data,
    bodies: &[Vec<u8>],
    cut: Fragmentation,
    order: &[usize],
) -> Payload {
    let mut payload = Payload::new(descriptor, data, 1, false);
    let geometry = payload.geometry;
    let mask = mask(&geometry);
    for (nth, fragment) in order.iter().enumerate() {
        let delivery = Delivery {
            shard: 0,
            window: WindowId::new(OpId(0), 0),
            descriptor,
            geometry,
            mask,
            cut,
            len: geometry.payload_len(0, mask),
            fragment: u8::try_from(*fragment).unwrap(),
            complete: nth + 1 == order.len(),
        };
        assert_eq!(
            payload.scatter(&delivery, &bodies[*fragment]),
            None,
            "the sums must not overflow"
        );
    }
    assert!(payload.partial.is_empty(), "a complete window leaves no partial sums");
    payload
}

#[test]
fn the_fragments_of_a_window_may_come_in_any_order() {
    let cut = Fragmentation::new(1408).unwrap();
    for wire in [WireType::F32, WireType::Bf16, WireType::F16, WireType::Int8, WireType::Fixed32] {
        let descriptor = descriptor(wire);
        let own = Payload::new(descriptor, Data::Owned(tensor(&descriptor)), 1, false);
        let (geometry, expected) = (own.geometry, expected(&descriptor, &own.geometry));
        let bodies = bodies(&own, cut, geometry.payload_len(0, mask(&geometry)));
        assert!(bodies.len() > 3, "{wire:?}: fragments must cut blocks");
        let shared = Data::InPlace(shared_region_of(&tensor(&descriptor)));
        let shared = Payload::new(descriptor, shared, 1, false);
        let len = geometry.payload_len(0, mask(&geometry));
        assert!(
            self::bodies(&shared, cut, len) == bodies,
            "{wire:?}: a tensor in shared memory must have the same bodies"
        );
        let forth: Vec<_> = (0..bodies.len()).collect();
        let mut first_last = forth.clone();
        first_last.rotate_left(1);
        let back: Vec<_> = forth.iter().rev().copied().collect();
        for order in [forth, back, first_last] {
            // Overwrite the blocks that get sums, so that a missing sum is detected. Blocks that no
            // rank holds stay as they are.
            let mut start = tensor(&descriptor);
            for packed in geometry.packed(0, mask(&geometry)) {
                let stretch = packed.element..packed.element + packed.elements as u64;
                start[bytes_of(&descriptor, stretch)].fill(0xa5);
            }
            let done = scatter(descriptor, Data::Owned(start.clone()), &bodies, cut, &order);
            let Data::Owned(got) = done.data else { panic!("the data is of another kind") };
            assert!(got == expected, "{wire:?}: wrong sums, order {order:?}");

            let shared = Data::InPlace(shared_region_of(&start));
            let done = scatter(descriptor, shared, &bodies, cut, &order);
            let got = done.data.bytes(0..expected.len()).to_vec();
            assert!(got == expected, "{wire:?}: wrong sums in shared memory, order {order:?}");

            let list = BlockSet::new(&descriptor, Blocks::default()).unwrap();
            let done = scatter(descriptor, Data::Blocks(list), &bodies, cut, &order);
            let Data::Blocks(got) = done.data else { panic!("the data is of another kind") };
            let got = got.into_result(&geometry, &descriptor);
            let sums: Vec<u8> = geometry
                .packed(0, mask(&geometry))
                .flat_map(|packed| packed.element..packed.element + packed.elements as u64)
                .flat_map(|i| expected[bytes_of(&descriptor, i..i + 1)].to_vec())
                .collect();
            assert!(got.values == sums, "{wire:?}: wrong sums in a list, order {order:?}");
        }
    }
}

#[test]
fn a_list_makes_room_for_the_blocks_that_come_after_a_move() {
    let descriptor = descriptor(WireType::F32);
    let blocks = Blocks { indices: vec![3], values: vec![0; BLOCK * 4] };
    let set = BlockSet::new(&descriptor, blocks).unwrap();
    let mut payload = Payload::new(descriptor, Data::Blocks(set), 2, true);
    let geometry = payload.geometry;
    let cut = Fragmentation::new(1424).unwrap();
    let delivery = |mask: u64, fragment: u8| {
        let len = geometry.payload_len(0, mask);
        let complete = usize::from(fragment) + 1 == cut.count(len);
        let window = WindowId::new(OpId(0), 0);
        Delivery { shard: 0, window, descriptor, geometry, mask, len, cut, fragment, complete }
    };
    // Part of a sum of three blocks arrives. Then the job moves, and loses the rank that
    // contributed two of them.
    let mut whole = delivery(0b1_0000_1100, 0);
    payload.scatter(&whole, &[0xa5; 1424]);
    payload.forget_partial();
    whole = delivery(0b1000, 0);
    let sums: Vec<u8> = (0..BLOCK).flat_map(|i| (i as f32).to_le_bytes()).collect();
    payload.scatter(&whole, &sums);
    let Data::Blocks(blocks) = payload.data else { panic!("the data is of another kind") };
    let Blocks { indices, values } = blocks.into_result(&geometry, &descriptor);
    assert_eq!(indices, [3]);
    assert!(values == sums);
}

#[test]
fn a_tensor_that_changes_is_sent_and_received_and_nothing_around_it() {
    let cut = Fragmentation::new(1408).unwrap();
    for wire in [WireType::F32, WireType::Bf16, WireType::F16, WireType::Int8, WireType::Fixed32] {
        let descriptor = descriptor(wire);
        let (sent, margin) = (tensor(&descriptor), 4096);
        let range = margin..margin + sent.len();
        let memory = Arc::new(SharedMemory::new(range.end + margin).unwrap().0);
        let region = Region::of_shared(&memory, range.clone(), ());
        let own = Payload::new(descriptor, Data::Owned(sent), 1, false);
        let (geometry, len) = (own.geometry, own.geometry.payload_len(0, mask(&own.geometry)));
        let bodies = bodies(&own, cut, len);
        let order: Vec<_> = (0..bodies.len()).collect();
        let scribbler = Scribbler::start(&memory, range.start..range.end / 8 * 8);
        let mut data = Data::InPlace(region);
        for _ in 0..20 {
            let mut payload = scatter(descriptor, data, &bodies, cut, &order);
            payload.scan(0);
            if wire == WireType::Fixed32 {
                payload.exponents();
            }
            assert_eq!(self::bodies(&payload, cut, len).len(), bodies.len());
            if !wire.is_scaled() {
                payload.keep(vec![(0, mask(&geometry))]);
            }
            data = payload.data;
        }
        drop(scribbler);
        for around in [0..margin, range.end..range.end + margin] {
            assert!(shared_bytes(&memory).part(around).equals(&vec![0; margin]), "{wire:?}");
        }
    }
}
