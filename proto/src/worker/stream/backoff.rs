//! Delays repetitions once several in a row have achieved nothing: the path may drop all but small
//! datagrams.

use crate::time::{Span, Time};

/// Counts consecutive fruitless repetitions: nacks that brought no fragment, or data that the
/// aggregator still lacks.
#[derive(Debug)]
pub(super) struct Backoff {
    fruitless: u32,
    /// The time at which results were last requested.
    nacked_at: Time,
    /// Whether the aggregator has reported since `nacked_at` that it has sent the results.
    is_reported: bool,
}

impl Backoff {
    pub(super) const fn new() -> Self {
        Self { fruitless: 0, nacked_at: Time(0), is_reported: false }
    }

    /// Notes that a new fragment of a result has arrived.
    #[inline]
    pub(super) const fn note_fragment(&mut self) {
        (self.fruitless, self.is_reported) = (0, false);
    }

    /// Notes that a result is complete and delivered.
    pub(super) const fn note_delivered(&mut self) {
        self.fruitless = 0;
    }

    /// Notes the aggregator's report that it has sent all requested results.
    pub(super) const fn note_reported(&mut self) {
        self.is_reported = true;
    }

    /// Notes that results are requested. The previous nack was fruitless if the aggregator has
    /// since reported that it sent the results, but no fragment has arrived.
    pub(super) fn note_nacked(&mut self, now: Time) {
        // wire: W-77
        self.fruitless += u32::from(core::mem::take(&mut self.is_reported));
        self.nacked_at = now;
    }

    /// Notes that the aggregator still lacks data that was repeated `fruitless` times.
    pub(super) const fn note_lacked(&mut self, fruitless: u32) {
        // wire: W-77
        self.fruitless = fruitless;
    }

    /// Returns the delay before the next repetition. The delay is zero until three repetitions in a
    /// row were fruitless.
    pub(super) fn pause(&self) -> Span {
        match self.fruitless.checked_sub(Self::FRUITLESS) {
            None => Span::ZERO,
            Some(more) => Span(Self::PATIENCE.0 << more.min(5)),
        }
    }

    /// Returns whether nacks are delayed because several in a row were fruitless.
    pub(super) fn holds_back(&self, now: Time) -> bool {
        now.since(self.nacked_at) < self.pause()
    }

    /// The number of fruitless repetitions after which the next is delayed. The delay doubles up to
    /// about a second.
    const FRUITLESS: u32 = 3;
    const PATIENCE: Span = Span::from_millis(32);
}
