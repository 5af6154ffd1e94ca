//! The shard's packet buffers: allocated at start, handed around by value, never copied.

use bytes::BytesMut;
use racksum_net::udp::RECV_CAPACITY;

/// A stack of free buffers. The one given back last is the next to go out, while it is still in
/// the processor's cache.
#[derive(Debug)]
pub(crate) struct Arena {
    free: Vec<BytesMut>,
    total: usize,
}

impl Arena {
    /// `total` buffers of one message each. Their pages are touched when they are first used.
    pub(crate) fn new(total: usize) -> Self {
        Self { free: (0..total).map(|_| BytesMut::with_capacity(RECV_CAPACITY)).collect(), total }
    }

    /// How many buffers are free.
    pub(crate) fn available(&self) -> usize {
        self.free.len()
    }

    /// How many buffers there are in all.
    pub(crate) const fn total(&self) -> usize {
        self.total
    }

    /// A free buffer, empty.
    pub(crate) fn take(&mut self) -> Option<BytesMut> {
        self.free.pop()
    }

    /// Gives a buffer back.
    pub(crate) fn give(&mut self, mut buffer: BytesMut) {
        debug_assert!(buffer.capacity() >= RECV_CAPACITY, "buffers go around whole");
        buffer.clear();
        self.free.push(buffer);
    }
}
