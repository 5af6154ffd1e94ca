//! Recovery of lost datagrams: which fragments were requested, and whether the answers are lost
//! too.
//!
//! Both sides send a window's fragments in order, and answer nacks in order of arrival. So a
//! fragment is lost if later fragments have overtaken it, and an answer is lost if the answer to a
//! later nack has overtaken it. Neither conclusion needs a timer. A timer is needed only for an
//! answer that no later answer overtakes.

use crate::rtt::Rtt;
use crate::time::{Span, Time};

/// The fragments of one window that nacks have requested.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Nacked {
    /// Nacked fragments that have not arrived yet.
    fragments: u64,
    /// The time of the last nack.
    at: Time,
    /// The number of repeated nacks. The answer to a repeated nack is not measured (Karn), and the
    /// next timeout is longer.
    repeated: u32,
}

/// The latest nack that was answered: its time and position.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Answered {
    at: Time,
    position: u64,
}

impl Answered {
    /// The value before any nack is answered.
    pub(crate) const NONE: Self = Self { at: Time(0), position: 0 };
}

impl Nacked {
    /// Records that `fragments` are requested.
    pub(crate) const fn note(&mut self, fragments: u64, now: Time) {
        if fragments == 0 {
            return;
        }
        self.repeated += (self.fragments & fragments != 0) as u32;
        self.fragments |= fragments;
        self.at = now;
    }

    /// Forgets all fragments outside `all`, now that the number of the window's fragments is known.
    pub(crate) const fn limit(&mut self, all: u64) {
        self.fragments &= all;
    }

    /// Returns which of the `lost` fragments to request now: all except those that were requested
    /// and may still arrive.
    pub(crate) fn due(
        &self,
        lost: u64,
        position: u64,
        answered: Answered,
        now: Time,
        rtt: &Rtt,
    ) -> u64 {
        let fresh = lost & !self.fragments;
        if fresh == lost {
            return lost;
        }
        let overtaken = Answered { at: self.at, position } < answered;
        let late = now.since(self.at) >= rtt.backed_off(self.repeated / 2);
        if overtaken || late { lost } else { fresh }
    }

    /// Notes the arrival of a fragment at `now`, if it was requested. Once all nacked fragments
    /// have arrived, returns how long the answer took: all fragments of one answer count as one
    /// measurement. The inner value is `None` if a nack was repeated. A fragment without `again` is
    /// the original, so it was requested too early. It settles the nack, so no answer is awaited,
    /// but yields no measurement.
    pub(crate) fn answer(
        &mut self,
        fragment: u64,
        again: bool,
        position: u64,
        now: Time,
        answered: &mut Answered,
    ) -> Option<Option<Span>> {
        if self.fragments & fragment == 0 {
            return None;
        }
        self.fragments &= !fragment;
        *answered = (*answered).max(Answered { at: self.at, position });
        if self.fragments != 0 {
            return None;
        }
        let repeated = core::mem::take(&mut self.repeated);
        again.then(|| (repeated == 0).then(|| now.since(self.at)))
    }
}

/// The fragments of a window that were sent again to one receiver, and when the last of them was
/// sent.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Again {
    fragments: u64,
    at: Time,
}

impl Again {
    /// Returns which of the `wanted` fragments may be lost: all except those that were sent again
    /// and may still be in flight.
    pub(crate) fn may_be_lost(&self, wanted: u64, now: Time, round_trip: Span) -> u64 {
        let under_way = now.since(self.at) < round_trip;
        if under_way { wanted & !self.fragments } else { wanted }
    }

    /// Records that `fragments` are sent again now.
    pub(crate) fn note(&mut self, fragments: u64, now: Time, round_trip: Span) {
        if now.since(self.at) >= round_trip {
            self.fragments = 0;
        }
        self.fragments |= fragments;
        self.at = now;
    }
}

/// Returns the fragments of a window that must have been overtaken when `fragment` arrives. Leaves
/// out the fragments just before it, because networks reorder datagrams (RFC 9002's packet
/// threshold). If `fragment` was sent `again`, all fragments count, because no fragment is sent
/// again before the whole window has been sent.
pub(crate) const fn sent_before(fragment: u8, again: bool) -> u64 {
    match fragment.checked_sub(REORDERING - 1) {
        _ if again => u64::MAX,
        Some(sure) => (1 << sure) - 1,
        None => 0,
    }
}

/// Returns whether all earlier windows must have been overtaken when `fragment` arrives. `complete`
/// is set if the fragment completes its window, and `again` if it was sent again.
pub(crate) const fn proves_earlier(fragment: u8, complete: bool, again: bool) -> bool {
    complete || again || fragment + 1 >= REORDERING
}

/// The number of later datagrams that must arrive before a datagram counts as lost.
const REORDERING: u8 = 3;

/// The number of windows whose losses are gathered into one nack. A nack and its answer cost a host
/// as much as a whole window. A window that holds up all others is requested immediately.
pub(crate) const GATHERED_WINDOWS: u64 = 2;

#[cfg(test)]
mod tests {
    use super::{Again, Answered, Nacked};
    use crate::rtt::Rtt;
    use crate::time::{Span, Time};

    const NACKED_AT: Time = Time(1_000);
    const NOW: Time = Time(5_000);

    #[test]
    fn what_comes_for_the_first_time_settles_its_question_and_measures_nothing() {
        let mut answered = Answered::NONE;
        let mut nacked = Nacked::default();
        nacked.note(0b11, NACKED_AT);
        assert_eq!(nacked.answer(0b01, false, 7, NOW, &mut answered), None);
        assert_eq!(nacked.answer(0b10, false, 7, NOW, &mut answered), None);
        let mut earlier = Nacked::default();
        earlier.note(1, NACKED_AT);
        let due = earlier.due(1, 6, answered, NOW, &Rtt::new(Span::from_millis(100)));
        assert_eq!(due, 1, "the answer was overtaken, however long the timeout is");
    }

    #[test]
    fn the_last_fragment_of_an_answer_measures_it() {
        let mut answered = Answered::NONE;
        let mut nacked = Nacked::default();
        nacked.note(0b11, NACKED_AT);
        assert_eq!(nacked.answer(0b01, true, 7, NOW, &mut answered), None);
        let took = nacked.answer(0b10, true, 7, NOW, &mut answered);
        assert_eq!(took, Some(Some(NOW.since(NACKED_AT))));
        assert_eq!(answered, Answered { at: NACKED_AT, position: 7 });
    }

    #[test]
    fn what_was_asked_for_twice_measures_nothing() {
        let mut answered = Answered::NONE;
        let mut nacked = Nacked::default();
        nacked.note(1, NACKED_AT);
        nacked.note(1, Time(2_000));
        assert_eq!(nacked.answer(1, true, 7, NOW, &mut answered), Some(None));
    }

    #[test]
    fn what_was_sent_again_is_lost_again_no_sooner_than_a_round_trip_later() {
        let round_trip = Span(1_000);
        let mut again = Again::default();
        again.note(0b011, Time(5_000), round_trip);
        assert_eq!(again.may_be_lost(0b111, Time(5_999), round_trip), 0b100);
        again.note(0b100, Time(5_999), round_trip);
        assert_eq!(again.may_be_lost(0b111, Time(6_998), round_trip), 0);
        assert_eq!(again.may_be_lost(0b111, Time(6_999), round_trip), 0b111);
        again.note(0b001, Time(6_999), round_trip);
        assert_eq!(again.may_be_lost(0b111, Time(7_000), round_trip), 0b110);
    }
}
