//! A shard's packet buffers: allocated at start, then moved rather than copied.

use std::collections::TryReserveError;

use bytes::{Bytes, BytesMut};
use racksum_net::udp::RECV_CAPACITY;

/// Allocates an empty buffer. Unlike `BytesMut::with_capacity`, this function returns an error
/// instead of aborting when memory runs out.
fn buffer() -> Result<BytesMut, TryReserveError> {
    let mut bytes = Vec::<u8>::new();
    bytes.try_reserve_exact(RECV_CAPACITY)?;
    Ok(Bytes::from(bytes).try_into_mut().expect("the new buffer has no other owner"))
}

/// A stack of free buffers. The buffer returned last is handed out first, while it is still in the
/// processor's cache.
#[derive(Debug)]
pub(crate) struct Arena {
    free: Vec<BytesMut>,
    total: usize,
}

impl Arena {
    /// Allocates `total` buffers, each for one received message. The kernel provides their pages on
    /// first use.
    ///
    /// # Errors
    /// The system refuses to give this process more memory.
    pub(crate) fn new(total: usize) -> Result<Self, TryReserveError> {
        let mut free = Vec::new();
        free.try_reserve_exact(total)?;
        for _ in 0..total {
            free.push(buffer()?);
        }
        Ok(Self { free, total })
    }

    /// Returns the number of free buffers.
    pub(crate) fn available(&self) -> usize {
        self.free.len()
    }

    /// Returns the total number of buffers.
    pub(crate) const fn total(&self) -> usize {
        self.total
    }

    /// Takes an empty buffer, or returns `None` if no buffer is free.
    pub(crate) fn take(&mut self) -> Option<BytesMut> {
        self.free.pop()
    }

    /// Returns a buffer to the arena.
    pub(crate) fn give(&mut self, mut buffer: BytesMut) {
        debug_assert!(
            buffer.capacity() >= RECV_CAPACITY,
            "a returned buffer has its full capacity"
        );
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
