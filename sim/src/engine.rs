//! The event queue. It orders events by time and then by sequence number, so that a run depends
//! only on its seed.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::ops::Add;

use racksum_proto::time::{Span, Time};

/// An instant or a duration of simulated time, in picoseconds. One byte at 400 Gbit/s takes 20 ps,
/// so integers are precise enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Hash)]
pub struct Picos(pub u64);

impl Picos {
    /// The start of every run.
    pub const ZERO: Self = Self(0);
    /// An instant later than every event.
    pub const NEVER: Self = Self(u64::MAX);

    /// Creates a duration of whole microseconds.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros * 1_000_000)
    }

    /// Creates a duration of whole milliseconds.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self::from_micros(millis * 1_000)
    }

    /// Converts to the protocol's nanoseconds, rounded down.
    #[must_use]
    pub const fn time(self) -> Time {
        Time(self.0 / 1_000)
    }

    /// Returns the time since `earlier`, or zero if `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }

    /// Returns whole microseconds, rounded down.
    #[must_use]
    pub const fn as_micros(self) -> u64 {
        self.0 / 1_000_000
    }
}

impl From<Time> for Picos {
    fn from(time: Time) -> Self {
        Self(time.0.saturating_mul(1_000))
    }
}

impl From<Span> for Picos {
    fn from(span: Span) -> Self {
        Self(span.0.saturating_mul(1_000))
    }
}

impl Add for Picos {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

/// A queue of events, and the time of the last event that was taken.
#[derive(Debug)]
pub struct Engine<E> {
    now: Picos,
    scheduled: u64,
    /// Events that were scheduled for the past.
    late: u64,
    queue: BinaryHeap<Reverse<Entry<E>>>,
}

impl<E> Default for Engine<E> {
    fn default() -> Self {
        Self { now: Picos::ZERO, scheduled: 0, late: 0, queue: BinaryHeap::new() }
    }
}

impl<E> Engine<E> {
    /// Returns the current simulated time.
    #[must_use]
    pub const fn now(&self) -> Picos {
        self.now
    }

    /// Returns how many events have been scheduled so far.
    #[must_use]
    pub const fn scheduled(&self) -> u64 {
        self.scheduled
    }

    /// Returns how many events were scheduled for the past.
    #[must_use]
    pub const fn late(&self) -> u64 {
        self.late
    }

    /// Schedules `event` for `at`, or for now if `at` is in the past.
    pub fn schedule(&mut self, at: Picos, event: E) {
        self.late += u64::from(at < self.now);
        let at = at.max(self.now);
        self.queue.push(Reverse(Entry { at, seq: self.scheduled, event }));
        self.scheduled += 1;
    }

    /// Takes the next event and advances the time to it.
    pub fn next_event(&mut self) -> Option<E> {
        let Reverse(entry) = self.queue.pop()?;
        self.now = entry.at;
        Some(entry.event)
    }
}

#[derive(Debug)]
struct Entry<E> {
    at: Picos,
    seq: u64,
    event: E,
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.seq).cmp(&(other.at, other.seq))
    }
}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<E> Eq for Entry<E> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_happen_in_order_of_time_and_then_of_sequence() {
        let mut engine = Engine::default();
        for (at, event) in [(5, 'c'), (1, 'a'), (5, 'd'), (2, 'b')] {
            engine.schedule(Picos(at), event);
        }
        let happened: Vec<_> =
            std::iter::from_fn(|| engine.next_event().map(|event| (engine.now().0, event)))
                .collect();
        assert_eq!(happened, [(1, 'a'), (2, 'b'), (5, 'c'), (5, 'd')]);
    }

    #[test]
    fn the_past_is_now() {
        let mut engine = Engine::default();
        engine.schedule(Picos(9), 'a');
        engine.next_event();
        engine.schedule(Picos(3), 'b');
        assert_eq!(engine.next_event(), Some('b'));
        assert_eq!((engine.now(), engine.late()), (Picos(9), 1));
    }
}
