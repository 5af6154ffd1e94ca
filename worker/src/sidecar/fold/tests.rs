//! Tests of folds while ranks write to their memory.

use std::ops::Range;

use racksum_net::local::SharedMemory;
use racksum_proto::dtype::{DType, Reduction};

use super::*;
use crate::sidecar::message::ListAt;
use crate::tensor::shared_bytes;
use crate::tensor::tests::Scribbler;

/// Number of bytes on each side of a rank's operand. No fold may change these bytes.
const MARGIN: usize = 4096;

/// Length of a tensor in bytes: three chunks, and part of a fourth.
const LEN: usize = 3 * CHUNK + 640;

/// Memory that a rank has lent, with `used` bytes between two margins.
struct Rank {
    memory: Arc<Memory>,
    used: usize,
}

impl Rank {
    fn new(used: usize, budget: &Arc<Budget>) -> Self {
        let (_own, descriptor) = SharedMemory::new(used + 2 * MARGIN).unwrap();
        Self { memory: Memory::of(&descriptor, budget).unwrap(), used }
    }

    fn tensor(&self, rank: u16, len: usize) -> Share {
        let place = LentRange::new(&self.memory, MARGIN as u64, len as u64).unwrap();
        Share { rank, handed: Handed::Tensor(place) }
    }

    /// Returns a list whose values start right after the first margin, and whose indices start at
    /// offset `at`.
    fn list(&self, rank: u16, at: usize, blocks: u32, descriptor: &Descriptor) -> Share {
        let list = ListAt { blocks, values: MARGIN as u64 };
        let list = List::new(&self.memory, at as u64, list, descriptor).unwrap();
        Share { rank, handed: Handed::List(list) }
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        shared_bytes(self.memory.shared()).part(at..at + bytes.len()).write(bytes);
    }

    /// Keeps overwriting the bytes in `range` until the returned scribbler is dropped.
    fn scribble(&self, range: Range<usize>) -> Scribbler {
        Scribbler::start(self.memory.shared(), range)
    }

    /// Checks that the margins still hold only zeros.
    fn check_margins(&self) {
        let end = MARGIN + self.used;
        for margin in [0..MARGIN, end..end + MARGIN] {
            assert!(shared_bytes(self.memory.shared()).part(margin).equals(&[0; MARGIN]));
        }
    }
}

/// Folds with two threads, and returns the fold.
fn fold(descriptor: Descriptor, shares: &[&Share], world: u32) -> Fold {
    let fold = Fold::new(descriptor, shares.iter().copied().cloned().collect(), world);
    let ended = std::thread::scope(|scope| {
        let work = || fold.work(&mut Turn::new((), usize::MAX), &mut Vec::new(), || {});
        let helper = scope.spawn(work);
        [work(), helper.join().unwrap()]
    });
    assert!(ended[0] != ended[1], "exactly one thread must finish the fold");
    fold
}

#[test]
fn tensors_that_change_are_folded_and_nothing_else_is_written() {
    let budget = Arc::new(Budget::new(1 << 30));
    let [honest, rogue, other] = [(); 3].map(|()| Rank::new(LEN, &budget));
    let _scribbler = rogue.scribble(MARGIN..MARGIN + LEN);
    let foreign: Vec<u8> = (0..=250).cycle().take(LEN).collect();
    other.write(MARGIN, &foreign);
    for dtype in DType::ALL {
        for reduction in Reduction::ALL {
            let elements = (LEN / dtype.size()) as u64;
            let descriptor = Descriptor { reduction, ..Descriptor::sum(elements, dtype) };
            let [honest, rogue] = [honest.tensor(0, LEN), rogue.tensor(1, LEN)];
            fold(descriptor, &[&honest, &rogue], 2);
            fold(descriptor, &[&rogue], 1);
            // The job has another rank on another host, so the fold records which blocks are
            // non-zero.
            let partial = fold(descriptor, &[&honest, &rogue], 3);
            let blocks = crate::blocks::count_of(&descriptor);
            assert!(partial.held().all(|block| u64::from(block) < blocks));
        }
    }
    [honest, rogue].iter().chain([&other]).for_each(Rank::check_margins);
    assert!(shared_bytes(other.memory.shared()).part(MARGIN..MARGIN + LEN).equals(&foreign));
}

#[test]
fn lists_that_change_are_folded_or_refused_and_nothing_else_is_written() {
    let budget = Arc::new(Budget::new(1 << 30));
    let block = 32 * DType::F32.size();
    let descriptor = Descriptor::sum((LEN / 4) as u64, DType::F32).with_block(32).unwrap();
    let indices: Vec<u8> = (0..100_u32).step_by(2).flat_map(u32::to_ne_bytes).collect();
    // `values` is the length of the values of 50 blocks. `used` also includes the indices, which
    // follow the values.
    let (values, used) = (50 * block, 50 * block + indices.len());
    let [honest, rogue] = [(); 2].map(|()| Rank::new(used, &budget));
    let tensor = Rank::new(LEN, &budget);
    for rank in [&honest, &rogue] {
        rank.write(MARGIN + values, &indices);
    }
    let honest_list = honest.list(0, MARGIN + values, 50, &descriptor);
    let rogue_list = rogue.list(1, MARGIN + values, 50, &descriptor);
    let _scribblers =
        [rogue.scribble(MARGIN..MARGIN + values), tensor.scribble(MARGIN..MARGIN + LEN)];
    for _ in 0..50 {
        for (shares, world) in [
            (&[&honest_list, &rogue_list][..], 2),
            (&[&honest_list, &rogue_list, &tensor.tensor(2, LEN)], 3),
            (&[&honest_list, &tensor.tensor(2, LEN)], 4),
        ] {
            let fold = fold(descriptor, shares, world);
            let sums = fold.sums().unwrap().unwrap().read(Vec::new()).unwrap();
            assert!(sums.indices.len() >= 50 && sums.indices.is_sorted_by(|a, b| a < b));
            assert_eq!(sums.values.len(), sums.indices.len() * block);
            give(&descriptor, &fold.shares()[1..], &sums);
        }
    }
    let mut refused = 0;
    {
        let _scribbler = rogue.scribble(MARGIN + values..MARGIN + used);
        // The scribbler sets the index to 0, which is valid, or to a block beyond the tensor.
        let rogue_list = rogue.list(1, MARGIN + values, 1, &descriptor);
        for _ in 0..500 {
            let fold = fold(descriptor, &[&honest_list, &rogue_list], 2);
            match fold.sums() {
                Ok(sums) => assert_eq!(sums.unwrap().blocks(), 50),
                Err(why) => {
                    assert!(matches!(why, FoldError::By(1)), "{why:?}");
                    refused += 1;
                }
            }
        }
    }
    println!("{refused} of 500 lists were refused");
    [honest, rogue, tensor].iter().for_each(Rank::check_margins);
}
