//! Links. A link has a rate, a delay and a finite queue. It drops datagrams when the queue is full
//! and marks them when the queue is long.
//!
//! A link stores no datagrams. It knows only when it will next be free; the queue is the data that
//! it sends until then.

use crate::engine::Picos;

/// One direction of a cable and the queue in front of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkConfig {
    /// Rate in bits per second.
    pub rate_bps: u64,
    /// Time from the last bit sent to the last bit received.
    pub delay: Picos,
    /// Capacity of the queue in bytes.
    pub queue_bytes: u64,
    /// Queue length in bytes above which a new datagram is marked.
    pub mark_bytes: u64,
}

impl LinkConfig {
    /// Creates a link that neither drops nor marks.
    #[must_use]
    pub const fn lossless(rate_bps: u64, delay: Picos) -> Self {
        Self { rate_bps, delay, queue_bytes: u64::MAX, mark_bytes: u64::MAX }
    }
}

/// The outcome of sending a datagram on a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passage {
    /// The datagram arrives.
    Arrives {
        /// The time at which it arrives.
        at: Picos,
        /// Whether it carries a congestion mark.
        marked: bool,
    },
    /// The link dropped the datagram because the queue was full.
    Dropped,
}

/// The state of a link.
#[derive(Debug)]
pub struct Link {
    config: LinkConfig,
    free_at: Picos,
    busy: Picos,
}

impl Link {
    /// Creates an idle link.
    #[must_use]
    pub const fn new(config: LinkConfig) -> Self {
        Self { config, free_at: Picos::ZERO, busy: Picos::ZERO }
    }

    /// Returns how long the link has been sending in total.
    #[must_use]
    pub const fn busy(&self) -> Picos {
        self.busy
    }

    /// Returns the bytes in the queue at `now`, including the unsent rest of the current datagram.
    #[must_use]
    pub fn queued(&self, now: Picos) -> u64 {
        let left = u128::from(self.free_at.since(now).0);
        let bytes = left * u128::from(self.config.rate_bps) / PICOS_PER_SECOND_BITS;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    /// Returns the time at which the queue falls to `len_bytes`, if nothing is added.
    #[must_use]
    pub fn falls_to(&self, len_bytes: u64) -> Picos {
        let takes =
            u128::from(len_bytes) * PICOS_PER_SECOND_BITS / u128::from(self.config.rate_bps);
        self.free_at.since(Picos(u64::try_from(takes).unwrap_or(u64::MAX)))
    }

    /// Sends a datagram of `len_bytes`, which enters the queue at `now`.
    pub fn send(&mut self, now: Picos, len_bytes: u64) -> Passage {
        let queued = self.queued(now);
        if queued.saturating_add(len_bytes) > self.config.queue_bytes {
            return Passage::Dropped;
        }
        let takes = Picos(len_bytes * 8 * 1_000_000_000_000 / self.config.rate_bps);
        self.busy = self.busy + takes;
        self.free_at = self.free_at.max(now) + takes;
        let marked = queued > self.config.mark_bytes;
        Passage::Arrives { at: self.free_at + self.config.delay, marked }
    }
}

/// Picoseconds per second times bits per byte.
const PICOS_PER_SECOND_BITS: u128 = 8 * 1_000_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn link(queue_bytes: u64, mark_bytes: u64) -> Link {
        let delay = Picos::from_micros(10);
        Link::new(LinkConfig { rate_bps: 1_000_000_000, delay, queue_bytes, mark_bytes })
    }

    fn micros(at: u64, marked: bool) -> Passage {
        Passage::Arrives { at: Picos::from_micros(at), marked }
    }

    #[test]
    fn datagrams_leave_one_after_the_other_at_the_links_rate() {
        let mut link = link(u64::MAX, u64::MAX);
        // 1250 bytes at 1 Gbit/s take 10 µs.
        assert_eq!(link.send(Picos::ZERO, 1250), micros(20, false));
        assert_eq!(link.send(Picos::ZERO, 1250), micros(30, false));
        assert_eq!(link.send(Picos::from_micros(50), 1250), micros(70, false));
        assert_eq!(link.busy(), Picos::from_micros(30));
    }

    #[test]
    fn a_full_queue_drops_and_a_long_one_marks() {
        let mut link = link(3000, 1000);
        assert_eq!(link.send(Picos::ZERO, 1250), micros(20, false));
        assert_eq!(link.send(Picos::ZERO, 1250), micros(30, true));
        assert_eq!(link.send(Picos::ZERO, 1250), Passage::Dropped);
        assert_eq!(link.queued(Picos::from_micros(10)), 1250);
        assert_eq!(link.send(Picos::from_micros(10), 1250), micros(40, true));
    }
}
