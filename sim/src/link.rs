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
    /// A link that takes no time, and neither drops nor marks.
    pub const IDEAL: Self = Self::lossless(u64::MAX, Picos::ZERO);

    /// Creates a link that neither drops nor marks.
    #[must_use]
    pub const fn lossless(rate_bps: u64, delay: Picos) -> Self {
        Self { rate_bps, delay, queue_bytes: u64::MAX, mark_bytes: u64::MAX }
    }

    /// Returns the time that `bytes` take to be sent, rounded down to picoseconds.
    #[must_use]
    pub fn takes(&self, bytes: u64) -> Picos {
        // Packets are small enough for the division of 64 bits, which is much faster.
        let picos = bytes.checked_mul(8 * PICOS_PER_SECOND).map(|picos| picos / self.rate_bps);
        Picos(picos.unwrap_or_else(|| {
            let picos = u128::from(bytes) * PICOS_PER_SECOND_BITS / u128::from(self.rate_bps);
            u64::try_from(picos).unwrap_or(u64::MAX)
        }))
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
        self.free_at.since(self.config.takes(len_bytes))
    }

    /// Sends a datagram of `len_bytes`, which enters the queue at `now`.
    pub fn send(&mut self, now: Picos, len_bytes: u64) -> Passage {
        let queued = self.queued(now);
        if queued.saturating_add(len_bytes) > self.config.queue_bytes {
            return Passage::Dropped;
        }
        let takes = self.config.takes(len_bytes);
        self.busy = self.busy + takes;
        self.free_at = self.free_at.max(now) + takes;
        let marked = queued > self.config.mark_bytes;
        Passage::Arrives { at: self.free_at + self.config.delay, marked }
    }
}

const PICOS_PER_SECOND: u64 = 1_000_000_000_000;
/// Picoseconds per second times bits per byte.
const PICOS_PER_SECOND_BITS: u128 = 8 * PICOS_PER_SECOND as u128;

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
    fn sending_is_exact_to_the_picosecond() {
        let takes = |rate_bps, bytes| LinkConfig::lossless(rate_bps, Picos::ZERO).takes(bytes);
        assert_eq!(takes(100_000_000_000, 9000), Picos(720_000));
        assert_eq!(takes(400_000_000_000, 1), Picos(20));
        assert_eq!(takes(10_000_000_000, 1 << 32), Picos((1 << 32) * 800));
        assert_eq!(takes(3, 1), Picos(2_666_666_666_666));
        assert_eq!(takes(u64::MAX, 9000), Picos::ZERO);
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
