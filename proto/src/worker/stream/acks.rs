//! Acknowledgements: which results this rank has not acknowledged, and when it must acknowledge
//! them.

use crate::geometry::WINDOW_BYTES;
use crate::time::{Span, Time};

/// The results of a stream since the last acknowledgement.
#[derive(Debug)]
pub(super) struct Acks {
    /// The first unacknowledged window, whether or not it has a result.
    from: u64,
    bytes: usize,
    /// The time at which the first unacknowledged result arrived.
    since: Option<Time>,
    is_due: bool,
    /// Whether results are acknowledged even while no result is awaited.
    at_rest: bool,
    /// The number of unacknowledged windows that triggers an immediate acknowledgement.
    max_windows: u64,
}

impl Acks {
    pub(super) fn new(pool: u64, at_rest: bool) -> Self {
        let max_windows = (pool / 4).max(1);
        Self { from: 0, bytes: 0, since: None, is_due: false, at_rest, max_windows }
    }

    /// Sets whether results are acknowledged even while no result is awaited.
    pub(super) const fn set_at_rest(&mut self, at_rest: bool) {
        self.at_rest = at_rest;
    }

    /// Notes that a result of `len` bytes has moved the cursor to `cursor`.
    pub(super) fn note_result(&mut self, now: Time, len: usize, cursor: u64) {
        self.bytes += len;
        self.since.get_or_insert(now);
        // Windows of zeros take up the pool as well.
        self.is_due |=
            cursor - self.from >= self.max_windows || self.bytes >= Self::MAX_UNACKED_BYTES;
    }

    /// Notes that this rank has no data in flight and cannot send until earlier windows are
    /// acknowledged.
    pub(super) const fn note_stopped(&mut self, cursor: u64) {
        self.is_due |= self.from < cursor;
    }

    #[inline]
    pub(super) const fn is_due(&self) -> bool {
        self.is_due
    }

    /// Notes that an acknowledgement of all windows before `cursor` is sent.
    #[inline]
    pub(super) const fn note_sent(&mut self, cursor: u64) {
        (self.from, self.bytes, self.since) = (cursor, 0, None);
        self.is_due = false;
    }

    /// Returns the time at which [`Self::handle_timeout`] makes an acknowledgement due. `awaits`
    /// says whether results are awaited.
    pub(super) fn timeout(&self, awaits: bool) -> Time {
        match self.delayed(awaits) {
            Some(since) if !self.is_due => since + Self::MAX_DELAY,
            _ => Time::NEVER,
        }
    }

    /// Makes an acknowledgement due once its delay has passed, even if few results have arrived.
    pub(super) fn handle_timeout(&mut self, now: Time, awaits: bool) {
        let delayed = self.delayed(awaits);
        self.is_due |= delayed.is_some_and(|since| since + Self::MAX_DELAY <= now);
    }

    /// Returns the time at which the first unacknowledged result arrived, if it is to be
    /// acknowledged after a delay.
    fn delayed(&self, awaits: bool) -> Option<Time> {
        self.since.filter(|_| awaits || self.at_rest)
    }

    /// The maximum delay before a result is acknowledged.
    const MAX_DELAY: Span = Span::from_millis(1);
    /// The number of unacknowledged bytes of results that triggers an immediate acknowledgement.
    const MAX_UNACKED_BYTES: usize = 4 * WINDOW_BYTES;
}
