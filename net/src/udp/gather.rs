//! Letting datagrams gather before they are received, as a network card's interrupt moderation
//! does: each time a thread is woken costs as much as several datagrams.

use std::io;
use std::os::fd::AsFd;

use racksum_proto::time::Span;

use super::wait::{Waker, wait};

/// How long a receiver of bulk traffic leaves its socket alone.
#[derive(Debug, Clone, Copy)]
pub struct Gather {
    pause: Option<Span>,
}

impl Gather {
    /// Pauses of at most `longest`, and such that a receive buffer of this many bytes, which
    /// bounds what is in flight, still allows 8 GB/s.
    #[must_use]
    pub fn new(receive_buffer: usize, longest: Span) -> Self {
        let pause = Span(receive_buffer as u64 / 16).min(longest);
        Self { pause: (pause >= Self::SHORTEST).then_some(pause) }
    }

    /// Whether to pause, when so many bytes are still to come: a small op never waits.
    #[must_use]
    pub const fn is_due(&self, backlog: u64) -> bool {
        self.pause.is_some() && backlog >= Self::BULK
    }

    /// Pauses, unless the waker is ready or becomes so.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn pause(&self, waker: &Waker) -> io::Result<()> {
        if wait(&[waker.as_fd()], Some(self.pause.unwrap_or(Span::ZERO)))? != 0 {
            waker.drain();
        }
        Ok(())
    }

    /// What is shorter is lost in the kernel's timer slack, 50 us.
    const SHORTEST: Span = Span::from_micros(20);
    /// Bytes from which on a pause is short beside the rest of the op.
    const BULK: u64 = 4 << 20;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_are_bounded_by_the_buffer_and_only_for_bulk() {
        let longest = Span::from_micros(200);
        let roomy = Gather::new(8 << 20, longest);
        assert_eq!(roomy.pause, Some(longest));
        assert!(roomy.is_due(4 << 20) && !roomy.is_due((4 << 20) - 1));
        assert_eq!(Gather::new(1 << 20, longest).pause, Some(Span(65_536)));
        assert!(!Gather::new(212_992, longest).is_due(1 << 30));
    }

    #[test]
    fn a_waker_ends_a_pause() {
        let gather = Gather::new(usize::MAX, Span::from_secs(3600));
        let waker = Waker::new().unwrap();
        waker.wake();
        gather.pause(&waker).unwrap();
        assert!(!waker.drain());
    }
}
