//! What an op finds out about a tensor before it sends any of it.

use racksum_kernels::codec;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::geometry::MAX_WINDOW_BLOCKS;

/// Which blocks of a tensor are not zero: a bit for each, the lowest of a word first. As an op
/// does, it makes +0.0 of the -0.0 in blocks that are zero.
#[must_use]
pub fn scan(tensor: &mut [u8], descriptor: &Descriptor) -> Vec<u64> {
    let (dtype, elements) = (descriptor.dtype, descriptor.block_elements());
    let words = tensor.chunks_mut(MAX_WINDOW_BLOCKS * elements * dtype.size());
    words.map(|blocks| codec::scan_window(dtype, elements, blocks)).collect()
}

#[cfg(test)]
mod tests {
    use racksum_proto::dtype::DType;

    use super::*;
    use crate::tensor::as_bytes_mut;

    #[test]
    fn a_tensor_has_a_bit_for_each_block_and_a_word_for_64() {
        let mut tensor = vec![0.0_f32; 32 * 70 + 5];
        (tensor[32 * 3 + 1], tensor[32 * 70 + 4], tensor[32 * 64]) = (1.0, f32::NAN, -0.0);
        let sum = Descriptor::sum(tensor.len() as u64, DType::F32).with_block(32).unwrap();
        assert_eq!(scan(as_bytes_mut(&mut tensor), &sum), [1 << 3, 1 << 6]);
        assert!(tensor[32 * 64].is_sign_positive());
        assert!(scan(&mut [], &sum).is_empty());
    }
}
