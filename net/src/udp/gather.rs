//! A pause before a receive lets datagrams accumulate: waking a thread costs as much as handling
//! several datagrams. Network cards moderate their interrupts for the same reason.

use std::io;
use std::os::fd::AsFd;

use racksum_proto::time::Span;

use super::wait::{Waker, wait};

/// Pause between the receives of bulk traffic.
#[derive(Debug, Clone, Copy)]
pub struct Gather {
    pause: Option<Span>,
}

impl Gather {
    /// Creates a pause of at most `longest`. The pause is so short that data arriving at 8 GB/s
    /// fills at most half of a receive buffer of `receive_buffer` bytes. If that is too short to be
    /// useful, the receiver never pauses.
    #[must_use]
    pub fn new(receive_buffer: usize, longest: Span) -> Self {
        let pause = Span(receive_buffer as u64 / 16).min(longest);
        Self { pause: (pause >= Self::SHORTEST).then_some(pause) }
    }

    /// Returns whether to pause while `backlog` bytes are still expected. A small backlog gets no
    /// pause, so small ops are never delayed.
    #[must_use]
    pub const fn is_due(&self, backlog: u64) -> bool {
        self.pause.is_some() && backlog >= Self::BULK
    }

    /// Blocks until the pause is over or the waker is ready, and then drains the waker.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn pause(&self, waker: &Waker) -> io::Result<()> {
        if wait(&[waker.as_fd()], Some(self.pause.unwrap_or(Span::ZERO)))? != 0 {
            waker.drain();
        }
        Ok(())
    }

    /// Shortest useful pause: the kernel's timer slack may add 50 us to it.
    const SHORTEST: Span = Span::from_micros(20);
    /// Smallest backlog, in bytes, for which a pause is short compared with the rest of the op.
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
