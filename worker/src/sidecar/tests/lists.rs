//! Tests with ranks that pass lists of blocks, some together with ranks that pass tensors.

use super::*;
use crate::blocks::Blocks;

/// The descriptor of an op, and the tensor of each rank.
struct Case {
    descriptor: Descriptor,
    tensors: Vec<Vec<u8>>,
}

impl Case {
    /// Creates tensors in which about one in four blocks has random values. If the type has a -0.0,
    /// about one in eight blocks contains one.
    fn new(
        dtype: DType,
        reduction: Reduction,
        world: u16,
        elements: usize,
        random: &mut Random,
    ) -> Self {
        let descriptor = Descriptor { reduction, ..Descriptor::sum(elements as u64, dtype) };
        let descriptor = descriptor.with_block(64).unwrap();
        let mut tensor = || {
            let mut tensor = vec![0; elements * dtype.size()];
            for block in tensor.chunks_mut(64 * dtype.size()) {
                match random.next() % 8 {
                    0 | 1 => block.iter_mut().for_each(|byte| *byte = random.next()),
                    2 if dtype.is_float() => {
                        // -0.0 counts as zero.
                        block[dtype.size() - 1] = 0x80;
                    }
                    _ => {}
                }
            }
            tensor
        };
        Self { descriptor, tensors: (0..world).map(|_| tensor()).collect() }
    }

    fn blocks_of(&self, tensor: &[u8], indices: &[u32]) -> Blocks {
        let full = 64 * self.descriptor.dtype.size();
        let block = |index: &u32| tensor.chunks(full).nth(*index as usize).unwrap();
        Blocks {
            indices: indices.to_vec(),
            values: indices.iter().flat_map(block).copied().collect(),
        }
    }

    /// Returns the indices of a rank's non-zero blocks, as `proto::arith` defines them.
    fn nonzero(&self, rank: usize) -> Vec<u32> {
        let Descriptor { dtype, .. } = self.descriptor;
        let blocks = self.tensors[rank].chunks(64 * dtype.size());
        let is_some = |block: &[u8]| arith::scan_window(dtype, 64, &mut block.to_vec()) != 0;
        (0..).zip(blocks).filter(|(_, block)| is_some(block)).map(|(index, _)| index).collect()
    }

    /// Returns the expected sums of the union. Each block is the fold of the ranks that contribute
    /// it.
    fn expected(&self) -> Blocks {
        let Descriptor { dtype, reduction, .. } = self.descriptor;
        let world = self.tensors.len();
        let lists: Vec<_> = (0..world).map(|rank| self.nonzero(rank)).collect();
        let mut union = lists.concat();
        union.sort_unstable();
        union.dedup();
        let mut sums = Blocks { indices: union.clone(), values: Vec::new() };
        for index in union {
            let parts = (0..world).filter(|rank| lists[*rank].contains(&index));
            let parts: Vec<Vec<u8>> =
                parts.map(|rank| self.blocks_of(&self.tensors[rank], &[index]).values).collect();
            let inputs: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
            let mut sum = vec![0; inputs[0].len()];
            let all = u32::try_from(world).unwrap();
            let terms = arith::FoldTerms { world: all, absent: parts.len() < world };
            arith::fold_run(dtype.native_wire(), reduction, terms, &inputs, &mut sum).unwrap();
            sums.values.extend(sum);
        }
        sums
    }

    /// Returns the expected sums as a tensor.
    fn expected_tensor(&self) -> Vec<u8> {
        let (full, sums) = (64 * self.descriptor.dtype.size(), self.expected());
        let mut tensor = vec![0; self.tensors[0].len()];
        for (index, block) in sums.indices.iter().zip(sums.values.chunks(full)) {
            tensor[*index as usize * full..][..block.len()].copy_from_slice(block);
        }
        tensor
    }
}

/// A generator of bytes that depend only on the seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u8 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 56) as u8
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn lists_and_tensors_are_folded_to_the_bits_of_the_definition(
        dtype in prop::sample::select(&DType::ALL),
        reduction in prop::sample::select(&Reduction::ALL),
        lists in prop::collection::vec(any::<bool>(), 1..5),
        elements in prop_oneof![0..500_usize, 0..40_000_usize],
        seed in any::<u64>(),
    ) {
        let (rig, mut random) = (Rig::start(), Random(seed));
        let world = u16::try_from(lists.len()).unwrap();
        let ranks = rig.job("job", world);
        for round in 0..2 {
            let case = Case::new(dtype, reduction, world, elements, &mut random);
            let start = |rank: usize| {
                // The first round lists every block, unsorted; the second lists only the non-zero
                // blocks.
                let mut indices: Vec<u32> = (0..).zip(case.tensors[rank].chunks(64 * dtype.size()))
                    .map(|(index, _)| index)
                    .collect();
                indices.sort_by_key(|index| index % 3);
                if round == 1 {
                    indices = case.nonzero(rank);
                }
                let tensor = case.tensors[rank].clone();
                let operand: Operand = match lists[rank] {
                    true => case.blocks_of(&tensor, &indices).into(),
                    false => own(tensor).into(),
                };
                ranks[rank].submit(operand, case.descriptor).unwrap()
            };
            let handles: Vec<_> = (0..lists.len()).map(start).collect();
            for handle in handles {
                match sums_of(handle).unwrap() {
                    Operand::Blocks(sums) => prop_assert_eq!(sums, case.expected()),
                    tensor => prop_assert_eq!(tensor.bytes().to_vec(), case.expected_tensor()),
                }
            }
        }
    }
}

/// Returns a list of one block that is filled with ones.
fn one_block(index: u32) -> Blocks {
    Blocks { indices: vec![index], values: floats(1.0, 256) }
}

#[test]
fn a_list_costs_its_blocks_and_not_its_tensor() {
    let rig = Rig::start();
    let ranks = rig.job("job", 2);
    // A whole tensor of this size would not fit into memory.
    let descriptor = sum_of(1 << 34);
    let handles = [3, 60_000_000].map(one_block).into_iter().zip(&ranks);
    let handles: Vec<_> =
        handles.map(|(list, rank)| rank.submit(list, descriptor).unwrap()).collect();
    for (rank, handle) in ranks.iter().zip(handles) {
        let sums: Blocks = sums_of(handle).unwrap();
        assert_eq!(sums.indices, [3, 60_000_000]);
        assert_eq!(sums.values, floats(1.0, 512));
        rank.recycle(sums);
        let SidecarStats { ops, copied_bytes, shared_bytes } = rank.sidecar_stats();
        assert_eq!((ops, copied_bytes, shared_bytes), (1, 1024 + 4 + 2048, 0));
    }
}

#[test]
fn a_list_that_cannot_be_is_an_error_of_its_rank() {
    let rig = Rig::start();
    let ranks = rig.job("job", 1);
    let error = ranks[0].submit(one_block(4), sum_of(1024)).unwrap_err().to_string();
    assert!(error.contains("block 4 is beyond the tensor's 4 blocks"), "{error}");
    let handle = ranks[0].submit(one_block(3), sum_of(1024)).unwrap();
    assert_eq!(sums_of(handle).unwrap(), one_block(3));
    let nothing = ranks[0].submit(Blocks::default(), sum_of(0)).unwrap();
    assert_eq!(sums_of(nothing).unwrap(), Blocks::default());
}

#[test]
fn blocks_whose_sum_is_zero_are_listed_as_they_are_without_a_sidecar() {
    let rig = Rig::start();
    let ranks = rig.job("job", 2);
    let start = |(rank, value): (&Rank, f32)| {
        let list = Blocks { indices: vec![1], values: floats(value, 256) };
        rank.submit(list, sum_of(1024)).unwrap()
    };
    let handles: Vec<_> = ranks.iter().zip([1.0, -1.0]).map(start).collect();
    for handle in handles {
        let sums = sums_of(handle).unwrap();
        assert_eq!(sums, Blocks { indices: vec![1], values: floats(0.0, 256) });
    }
}

#[test]
fn sums_of_lists_are_of_the_memory_that_ranks_may_have() {
    // Each rank lends 2048 bytes for its list, and the sums of both lists consist of two blocks.
    let all = 2 * 2048 + 2 * (4 + 1024);
    for (memory, is_enough) in [(all, true), (all - 1, false)] {
        let rig = Rig::with(Limits { jobs: 8, ranks: 64, memory });
        let ranks = rig.job("job", 2);
        let handles: Vec<_> = (0..)
            .zip(&ranks)
            .map(|(rank, client)| client.submit(one_block(rank), sum_of(1024)).unwrap())
            .collect();
        for handle in handles {
            match sums_of(handle) {
                Ok(sums) => assert!(is_enough && sums.indices == [0, 1]),
                Err(error) => {
                    let error = error.to_string();
                    assert!(!is_enough && error.contains("2056 bytes exceed"), "{error}");
                    assert!(error.contains("`racksum worker --memory`"), "{error}");
                }
            }
        }
        drop(ranks);
        rig.await_peace();
    }
}
