//! Batches of messages that go out with one segmented send.

use racksum_proto::auth::DataAuth;

use super::{MAX_DATAGRAM, MAX_SEGMENTS};

/// Messages that lie one after the other in a buffer and go out in one send. Small messages share a
/// datagram, and datagrams of one size share the send.
///
/// The cost of a datagram hardly depends on its size, and most of the cost of a send does not
/// depend on the number of its datagrams.
#[derive(Debug, Clone, Copy, Default)]
pub struct GsoBatch {
    len: usize,
    datagrams: usize,
    /// Length in bytes of every datagram but the last.
    stride: usize,
    /// Length in bytes of the last datagram.
    last: usize,
}

impl GsoBatch {
    /// Returns the total length of the messages, in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the batch has no message.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the distance from one datagram to the next, in bytes.
    #[must_use]
    pub const fn stride(&self) -> usize {
        self.stride
    }

    /// Adds a message of `len` bytes, which is cut into datagrams of `stride` bytes; the last may
    /// be shorter. No datagram may exceed `max_datagram` bytes. Returns false if the message does
    /// not fit this batch.
    #[must_use]
    pub fn try_append(&mut self, len: usize, stride: usize, max_datagram: usize) -> bool {
        let datagrams = len.div_ceil(stride);
        let room = if self.datagrams == 1 { max_datagram } else { self.stride };
        if self.is_empty() {
            self.stride = if datagrams == 1 { len } else { stride };
        } else if self.len + len > MAX_LEN {
            return false;
        } else if datagrams == 1 && self.last + len <= room {
            self.len += len;
            self.last += len;
            self.stride = self.stride.max(self.last);
            return true;
        } else if self.last != self.stride
            || self.datagrams + datagrams > MAX_SEGMENTS
            || if datagrams == 1 { len > self.stride } else { stride != self.stride }
        {
            return false;
        }
        self.len += len;
        self.datagrams += datagrams;
        self.last = len - (datagrams - 1) * stride;
        true
    }
}

/// Size limit of a batch in bytes. The limit leaves room for authentication, which may lengthen
/// each datagram.
const MAX_LEN: usize = MAX_DATAGRAM - MAX_SEGMENTS * DataAuth::MAX_TRAILER;

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds messages of one datagram each. Returns how many messages the batch took, its length and
    /// its stride.
    fn singles(lens: &[usize]) -> (usize, usize, usize) {
        let mut gso_batch = GsoBatch::default();
        let taken = lens.iter().take_while(|len| gso_batch.try_append(**len, 1472, 1472)).count();
        (taken, gso_batch.len(), gso_batch.stride())
    }

    #[test]
    fn small_messages_share_a_datagram() {
        assert_eq!(singles(&[300, 48, 1000]), (3, 1348, 1348));
        assert_eq!(singles(&[300, 48, 1000, 124]), (4, 1472, 1472));
    }

    #[test]
    fn datagrams_of_one_size_share_a_send_and_a_shorter_one_ends_it() {
        assert_eq!(singles(&[1072, 1072, 1072]), (3, 3216, 1072));
        assert_eq!(singles(&[1072, 1072, 600, 1072]), (3, 2744, 1072));
        assert_eq!(singles(&[1072, 1072, 600, 472, 1072]), (5, 4288, 1072));
        assert_eq!(singles(&[1072, 1100]), (1, 1072, 1072));
        assert_eq!(singles(&[560, 560, 560, 560, 560]), (5, 2800, 1120));
    }

    #[test]
    fn windows_of_several_datagrams_follow_each_other_if_they_are_cut_alike() {
        let mut gso_batch = GsoBatch::default();
        assert!(gso_batch.try_append(3 * 1072, 1072, 1472));
        assert!(gso_batch.try_append(1072, 1072, 1472));
        assert!(gso_batch.try_append(2 * 1072, 1072, 1472));
        assert!(!gso_batch.try_append(2 * 1472, 1472, 1472));
        assert!(gso_batch.try_append(1072 + 100, 1072, 1472));
        assert!(!gso_batch.try_append(1073, 1072, 1472));
        assert_eq!((gso_batch.len(), gso_batch.stride()), (7 * 1072 + 100, 1072));
        // A short last datagram still takes a message that fits.
        assert!(gso_batch.try_append(972, 1072, 1472));
    }

    #[test]
    fn a_train_is_no_longer_than_the_kernel_takes() {
        let mut gso_batch = GsoBatch::default();
        let taken = (0..100).take_while(|_| gso_batch.try_append(1000, 1000, 1000)).count();
        assert_eq!(taken, MAX_SEGMENTS);
        let mut gso_batch = GsoBatch::default();
        let taken = (0..100).take_while(|_| gso_batch.try_append(9000, 9000, 9000)).count();
        assert_eq!(taken, MAX_LEN / 9000);
    }

    /// Checks that every message lies within one datagram or begins one, and that only the last
    /// datagram may be short.
    #[test]
    fn receivers_find_whole_messages() {
        for seed in 0..2000_u64 {
            let mut gso_batch = GsoBatch::default();
            let mut rest = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
            let mut messages = Vec::new();
            loop {
                rest ^= rest << 13;
                rest ^= rest >> 7;
                rest ^= rest << 17;
                let size = [48, 200, 560, 1072, 1472][(rest % 5) as usize];
                let count = [1, 1, 1, 2, 7][(rest / 5 % 5) as usize];
                let len = size * count - if count > 1 { (rest / 25 % 2) as usize } else { 0 };
                let start = gso_batch.len();
                if !gso_batch.try_append(len, size, 1472) {
                    break;
                }
                messages.push((start, len, size));
            }
            for (start, len, size) in messages {
                if len <= size {
                    let [first, last] = [start, start + len - 1].map(|at| at / gso_batch.stride());
                    assert_eq!(first, last, "seed {seed}");
                } else {
                    assert_eq!(start % gso_batch.stride(), 0, "seed {seed}");
                    assert_eq!(size, gso_batch.stride(), "seed {seed}");
                }
            }
            assert!(
                gso_batch.stride() <= 1472
                    && gso_batch.len().div_ceil(gso_batch.stride()) <= MAX_SEGMENTS
            );
        }
    }
}
