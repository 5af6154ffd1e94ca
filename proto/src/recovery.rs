//! What was asked for again, and whether the answer is lost too.
//!
//! Both halves send a window's fragments in order, and answer questions in the order in which
//! they come. So a fragment that others have overtaken is lost, and so is an answer that the
//! answer to a later question has overtaken. No timer has to run out to know it.

use crate::rtt::Rtt;
use crate::time::{Span, Time};

/// Fragments of one window that were asked for.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Asked {
    /// Those that have not arrived since.
    fragments: u64,
    /// When they were last asked for.
    at: Time,
    /// How often any of them was asked for again. Then its answer measures nothing (Karn), and
    /// is waited for longer.
    repeated: u32,
}

/// The latest question that was answered: when it was asked, and about which position.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Answered {
    at: Time,
    position: u64,
}

impl Answered {
    /// No question was answered yet.
    pub(crate) const NONE: Self = Self { at: Time(0), position: 0 };
}

impl Asked {
    /// Notes that `fragments` are asked for.
    pub(crate) const fn note(&mut self, fragments: u64, now: Time) {
        if fragments == 0 {
            return;
        }
        self.repeated += (self.fragments & fragments != 0) as u32;
        self.fragments |= fragments;
        self.at = now;
    }

    /// Forgets what there is not, now that the window's fragments are known to be `all`.
    pub(crate) const fn limit(&mut self, all: u64) {
        self.fragments &= all;
    }

    /// What of `lost` to ask for now: all but what is asked for and may still come.
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

    /// Takes a fragment that arrived at `now`, if it was asked for. Returns how long its answer
    /// took once all is here, since the fragments of one answer are no more than one measurement;
    /// `None` in it where it cannot be told. One that was not sent `again` was asked for too early:
    /// that measures nothing, but the question is settled, and no answer to it is to be awaited.
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

/// Fragments of a window that were sent again to one receiver, and when the last of them were.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Again {
    fragments: u64,
    at: Time,
}

impl Again {
    /// What of `wanted` may be lost again: all but what is still under way.
    pub(crate) fn may_be_lost(&self, wanted: u64, now: Time, round_trip: Span) -> u64 {
        let under_way = now.since(self.at) < round_trip;
        if under_way { wanted & !self.fragments } else { wanted }
    }

    /// Notes that `fragments` are sent again now.
    pub(crate) fn note(&mut self, fragments: u64, now: Time, round_trip: Span) {
        if now.since(self.at) >= round_trip {
            self.fragments = 0;
        }
        self.fragments |= fragments;
        self.at = now;
    }
}

/// The fragments of a window that must have been sent, now that `fragment` has arrived for the
/// first time or `again`: all but as many behind it as networks reorder were overtaken (the
/// packet threshold of RFC 9002). What is sent again is sent after all of its window.
pub(crate) const fn sent_before(fragment: u8, again: bool) -> u64 {
    match fragment.checked_sub(REORDERING - 1) {
        _ if again => u64::MAX,
        Some(sure) => (1 << sure) - 1,
        None => 0,
    }
}

/// Whether all earlier windows must have been sent, now that this fragment of a window has
/// arrived, for the first time or `again`, and has made the window `complete` or not.
pub(crate) const fn proves_earlier(fragment: u8, complete: bool, again: bool) -> bool {
    complete || again || fragment + 1 >= REORDERING
}

/// Datagrams that may overtake another before it counts as lost.
const REORDERING: u8 = 3;

/// Windows whose losses are gathered into one ask, unless the oldest of them holds all others up:
/// an ask and its answer cost a host as much as a whole window does.
pub(crate) const GATHERED_WINDOWS: u64 = 2;

#[cfg(test)]
mod tests {
    use super::{Again, Answered, Asked};
    use crate::rtt::Rtt;
    use crate::time::{Span, Time};

    const ASKED_AT: Time = Time(1_000);
    const NOW: Time = Time(5_000);

    #[test]
    fn what_comes_for_the_first_time_settles_its_question_and_measures_nothing() {
        let mut answered = Answered::NONE;
        let mut asked = Asked::default();
        asked.note(0b11, ASKED_AT);
        assert_eq!(asked.answer(0b01, false, 7, NOW, &mut answered), None);
        assert_eq!(asked.answer(0b10, false, 7, NOW, &mut answered), None);
        let mut earlier = Asked::default();
        earlier.note(1, ASKED_AT);
        let due = earlier.due(1, 6, answered, NOW, &Rtt::new(Span::from_millis(100)));
        assert_eq!(due, 1, "it was overtaken, however patient one is");
    }

    #[test]
    fn the_last_fragment_of_an_answer_measures_it() {
        let mut answered = Answered::NONE;
        let mut asked = Asked::default();
        asked.note(0b11, ASKED_AT);
        assert_eq!(asked.answer(0b01, true, 7, NOW, &mut answered), None);
        let took = asked.answer(0b10, true, 7, NOW, &mut answered);
        assert_eq!(took, Some(Some(NOW.since(ASKED_AT))));
        assert_eq!(answered, Answered { at: ASKED_AT, position: 7 });
    }

    #[test]
    fn what_was_asked_for_twice_measures_nothing() {
        let mut answered = Answered::NONE;
        let mut asked = Asked::default();
        asked.note(1, ASKED_AT);
        asked.note(1, Time(2_000));
        assert_eq!(asked.answer(1, true, 7, NOW, &mut answered), Some(None));
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
