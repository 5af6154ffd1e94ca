//! The bytes that a case must move: the non-zero blocks of each rank, and the traffic that
//! invariant I3 allows each rank when it reduces these blocks.
//!
//! `benches/peers/README.md` defines the blocks. All programs of a race draw the same blocks.

use racksum_benches::data::{Overlap, Pattern};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, WireType};
use serde::Serialize;

/// Data that the ranks reduce: f32 tensors, some of whose blocks are not zero.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Data {
    /// Size of the whole tensor.
    pub(crate) bytes: u64,
    /// Probability that a block is not zero; at 1 the tensor is dense.
    pub(crate) density: f64,
    pub(crate) overlap: Overlap,
    pub(crate) seed: u64,
}

/// Size of the non-zero blocks, as f32.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Volume {
    /// Bytes of each rank.
    pub(crate) own: Vec<u64>,
    /// Bytes of the sum.
    pub(crate) union: u64,
}

impl Data {
    pub(crate) const fn is_dense(&self) -> bool {
        self.density >= 1.0
    }

    /// Returns the pattern of the blocks and elements that the ranks draw.
    fn pattern(&self, world: u16) -> Pattern {
        let Self { density, overlap, seed, .. } = *self;
        Pattern { world, block: Descriptor::DEFAULT_BLOCK, density, overlap, seed }
    }

    /// Returns the non-zero bytes of all ranks and of their sum.
    pub(crate) fn volume(&self, world: u16) -> Volume {
        let pattern = self.pattern(world);
        let mut volume = Volume { own: vec![0; usize::from(world)], union: 0 };
        for block in 0..self.bytes.div_ceil(BLOCK_BYTES) {
            let len = BLOCK_BYTES.min(self.bytes - block * BLOCK_BYTES);
            let mut any = false;
            for (rank, own) in (0..world).zip(&mut volume.own) {
                if pattern.holds(rank, block) {
                    *own += len;
                    any = true;
                }
            }
            volume.union += if any { len } else { 0 };
        }
        volume
    }
}

/// Bytes of UDP payload that the ranks sent and received in one iteration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Traffic {
    pub(crate) tx: Vec<u64>,
    pub(crate) rx: Vec<u64>,
}

/// Traffic as a share of the non-zero bytes. Invariant I3 limits this share.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Thrift {
    /// The most bytes that a rank sent in an iteration, as a share of its own non-zero bytes.
    pub(crate) tx: f64,
    /// The most bytes that a rank received in an iteration, as a share of the sum's non-zero bytes.
    pub(crate) rx: f64,
    /// Whether in every iteration each rank sent at most 106 % of its own non-zero bytes plus one
    /// datagram, and received at most 106 % of the sum's plus one datagram.
    pub(crate) holds: bool,
}

impl Volume {
    /// Returns the volume for elements of another wire type, without the scales of its blocks.
    pub(crate) fn on_the_wire(&self, wire: WireType) -> Self {
        let element_bytes = wire.element_size() as u64;
        let scaled = |bytes: u64| bytes / DType::F32.size() as u64 * element_bytes;
        Self { own: self.own.iter().map(|own| scaled(*own)).collect(), union: scaled(self.union) }
    }

    /// Judges the traffic of all iterations; returns `None` if there are none.
    pub(crate) fn judge<'a>(
        &self,
        iterations: impl IntoIterator<Item = &'a Traffic>,
    ) -> Option<Thrift> {
        let (mut tx, mut rx, mut holds) = (0f64, 0f64, true);
        let mut seen = false;
        for traffic in iterations {
            seen = true;
            for (sent, own) in traffic.tx.iter().zip(&self.own) {
                tx = tx.max(share(*sent, *own));
                holds &= is_thrifty(*sent, *own);
            }
            for received in &traffic.rx {
                rx = rx.max(share(*received, self.union));
                holds &= is_thrifty(*received, self.union);
            }
        }
        seen.then_some(Thrift { tx, rx, holds })
    }
}

fn share(moved: u64, owed: u64) -> f64 {
    moved as f64 / owed.max(1) as f64
}

/// Returns whether `moved` is at most 106 % of `owed` plus one datagram.
const fn is_thrifty(moved: u64, owed: u64) -> bool {
    moved * 100 <= owed * 106 + DATAGRAM_BYTES * 100
}

/// Bytes of a block of f32.
const BLOCK_BYTES: u64 = (Descriptor::DEFAULT_BLOCK * DType::F32.size()) as u64;

/// Payload of a datagram at an MTU of 1500. Loopback allows longer datagrams, so the limit on
/// traffic is stricter on loopback.
const DATAGRAM_BYTES: u64 = 1472;

#[cfg(test)]
mod tests {
    use super::*;

    const SPARSE: Data =
        Data { bytes: 100_000_000, density: 0.01, overlap: Overlap::Random, seed: 1 };

    #[test]
    fn volumes_are_those_of_the_contract() {
        let volume = SPARSE.volume(8);
        assert_eq!(volume.own[..2], [1023 * 1024, 1064 * 1024]);
        let union = share(volume.union, SPARSE.bytes);
        assert!((0.0775..0.0785).contains(&union), "{union}");
    }

    #[test]
    fn the_same_blocks_on_all_make_a_union_as_large_as_each() {
        let volume = Data { overlap: Overlap::All, ..SPARSE }.volume(3);
        assert_eq!(volume.own, [volume.union; 3]);
        assert_eq!(volume.union, 1023 * 1024);
    }

    #[test]
    fn a_dense_tensor_owes_all_of_it_and_half_in_half_the_width() {
        let volume = Data { bytes: 1_000_004, density: 1.0, ..SPARSE }.volume(2);
        assert_eq!(volume, Volume { own: vec![1_000_004; 2], union: 1_000_004 });
        assert_eq!(volume.on_the_wire(WireType::Bf16).own, [500_002; 2]);
    }

    #[test]
    fn six_percent_and_a_datagram_are_free_and_a_byte_more_is_not() {
        let volume = Volume { own: vec![10_000, 0], union: 10_000 };
        let traffic = |tx, rx| Traffic { tx: vec![10_000, tx], rx: vec![rx, 9_000] };
        let fine = volume.judge([&traffic(1_472, 12_072)]).unwrap();
        assert!(fine.holds, "{fine:?}");
        assert!((fine.rx - 1.2072).abs() < 1e-9, "{fine:?}");
        for bad in [traffic(1_473, 10_000), traffic(0, 12_073)] {
            assert!(!volume.judge([&traffic(0, 0), &bad]).unwrap().holds);
        }
        assert_eq!(volume.judge([]), None);
    }
}
