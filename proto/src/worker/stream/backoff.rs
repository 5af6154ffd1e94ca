//! Delays repetitions after several that brought nothing: the path may drop all but small
//! datagrams.

use crate::time::{Span, Time};

/// The repetitions of data or nacks in a row that brought nothing.
#[derive(Debug)]
pub(super) struct Backoff {
    fruitless: u32,
    /// When results were last asked for.
    nacked_at: Time,
    /// Whether the aggregator has reported since then that it has sent them.
    is_told: bool,
}

impl Backoff {
    pub(super) const fn new() -> Self {
        Self { fruitless: 0, nacked_at: Time(0), is_told: false }
    }

    /// Notes that a new fragment of a result has arrived.
    #[inline]
    pub(super) const fn note_fragment(&mut self) {
        (self.fruitless, self.is_told) = (0, false);
    }

    /// Notes that a result is complete and delivered.
    pub(super) const fn note_delivered(&mut self) {
        self.fruitless = 0;
    }

    /// Notes that the aggregator has sent all results that it was asked for.
    pub(super) const fn note_told(&mut self) {
        self.is_told = true;
    }

    /// Notes that results are asked for. The last nack was fruitless if its answer never arrived.
    pub(super) fn note_nacked(&mut self, now: Time) {
        // wire: W-77
        self.fruitless += u32::from(core::mem::take(&mut self.is_told));
        self.nacked_at = now;
    }

    /// Notes that the aggregator lacks data again, after `fruitless` repetitions of it.
    pub(super) const fn note_lacked(&mut self, fruitless: u32) {
        // wire: W-77
        self.fruitless = fruitless;
    }

    /// Returns the delay before the next repetition, after several that brought nothing.
    pub(super) fn pause(&self) -> Span {
        match self.fruitless.checked_sub(Self::FRUITLESS) {
            None => Span::ZERO,
            Some(more) => Span(Self::PATIENCE.0 << more.min(5)),
        }
    }

    /// Returns whether nacks are delayed because several in a row brought nothing.
    pub(super) fn holds_back(&self, now: Time) -> bool {
        now.since(self.nacked_at) < self.pause()
    }

    /// Fruitless repetitions after which the next is delayed; the delay doubles up to a second.
    const FRUITLESS: u32 = 3;
    const PATIENCE: Span = Span::from_millis(32);
}
