//! The scan of a whole tensor for non-zero blocks.

use racksum_kernels::codec;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::geometry::MAX_WINDOW_BLOCKS;

use crate::tensor::Region;

/// Returns which blocks of a tensor are not zero: one bit for each block, lowest bit first, in
/// words of 64 bits. Like an op, the scan turns -0.0 into +0.0 in zero blocks.
#[must_use]
pub fn scan(tensor: &mut Region, descriptor: &Descriptor) -> Vec<u64> {
    let (dtype, elements) = (descriptor.dtype, descriptor.block_elements());
    // Read by address, because the tensor may lie in memory that its process has lent to a sidecar.
    let words = tensor.as_shared().chunks(MAX_WINDOW_BLOCKS * elements * dtype.size());
    words.map(|blocks| codec::scan_shared(dtype, elements, blocks)).collect()
}

#[cfg(test)]
mod tests {
    use racksum_proto::dtype::DType;

    use super::*;
    use crate::tensor::tests::region_of;

    #[test]
    fn a_tensor_has_a_bit_for_each_block_and_a_word_for_64() {
        let mut tensor = vec![0.0_f32; 32 * 70 + 5];
        (tensor[32 * 3 + 1], tensor[32 * 70 + 4], tensor[32 * 64]) = (1.0, f32::NAN, -0.0);
        let sum = Descriptor::sum(tensor.len() as u64, DType::F32).with_block(32).unwrap();
        let bytes = tensor.iter().flat_map(|element| element.to_ne_bytes()).collect();
        let mut region = region_of(bytes, ());
        assert_eq!(scan(&mut region, &sum), [1 << 3, 1 << 6]);
        assert_eq!(region.bytes(32 * 64 * 4..32 * 64 * 4 + 4).to_vec(), [0; 4]);
        assert!(scan(&mut region_of(Vec::new(), ()), &sum).is_empty());
    }
}
