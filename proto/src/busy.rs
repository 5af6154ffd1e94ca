//! The time that a rank spends with windows open, over all periods.

use crate::time::{Span, Time};

/// The time that a rank had windows open without their results.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Busy {
    /// The length of the periods that have ended.
    ended: Span,
    /// The start of the present period.
    since: Option<Time>,
}

impl Busy {
    pub(crate) const NEW: Self = Self { ended: Span::ZERO, since: None };

    /// Notes that the rank has opened windows.
    #[inline]
    pub(crate) fn begin(&mut self, now: Time) {
        self.since.get_or_insert(now);
    }

    /// Notes that the rank has the results of all windows that it opened.
    #[inline]
    pub(crate) fn end(&mut self, now: Time) {
        if let Some(since) = self.since.take() {
            self.ended = Span(self.ended.0 + now.since(since).0);
        }
    }

    /// Forgets the present period, for a rank that was away.
    pub(crate) const fn forget(&mut self) {
        self.since = None;
    }

    /// Returns the start of the present period, if there is one.
    pub(crate) const fn since(&self) -> Option<Time> {
        self.since
    }

    /// Returns the length of all periods, the present one included.
    pub(crate) fn total(&self, now: Time) -> Span {
        let present = self.since.map_or(Span::ZERO, |since| now.since(since));
        Span(self.ended.0 + present.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_add_up_and_a_second_start_does_not_restart_one() {
        let at = |millis| Time(0) + Span::from_millis(millis);
        let mut busy = Busy::NEW;
        busy.end(at(1));
        busy.begin(at(10));
        busy.begin(at(20));
        assert_eq!((busy.since(), busy.total(at(25))), (Some(at(10)), Span::from_millis(15)));
        busy.end(at(30));
        busy.begin(at(100));
        assert_eq!(busy.total(at(101)), Span::from_millis(21));
        busy.forget();
        assert_eq!((busy.since(), busy.total(at(200))), (None, Span::from_millis(20)));
    }
}
