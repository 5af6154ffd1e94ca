//! The shard's packet buffers: allocated at start, handed around by value, never copied.

use std::collections::TryReserveError;

use bytes::{Bytes, BytesMut};
use racksum_net::udp::RECV_CAPACITY;

/// An empty buffer. `BytesMut` itself would end the process where there is no memory.
fn buffer() -> Result<BytesMut, TryReserveError> {
    let mut bytes = Vec::<u8>::new();
    bytes.try_reserve_exact(RECV_CAPACITY)?;
    Ok(Bytes::from(bytes).try_into_mut().expect("nobody else has it"))
}

/// A stack of free buffers. The one given back last is the next to go out, while it is still in
/// the processor's cache.
#[derive(Debug)]
pub(crate) struct Arena {
    free: Vec<BytesMut>,
    total: usize,
}

impl Arena {
    /// `total` buffers of one message each. Their pages are touched when they are first used.
    ///
    /// # Errors
    /// The system gives this process no more memory.
    pub(crate) fn new(total: usize) -> Result<Self, TryReserveError> {
        let mut free = Vec::new();
        free.try_reserve_exact(total)?;
        for _ in 0..total {
            free.push(buffer()?);
        }
        Ok(Self { free, total })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_to_be_had_is_an_error() {
        assert!(Arena::new(usize::MAX / 64).is_err());
        let mut arena = Arena::new(3).unwrap();
        assert_eq!((arena.total(), arena.available()), (3, 3));
        let taken = arena.take().unwrap();
        assert!(taken.is_empty() && taken.capacity() >= RECV_CAPACITY);
        arena.give(taken);
        assert_eq!(arena.available(), 3);
    }
}
