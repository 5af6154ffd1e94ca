//! Lost results: finds the results that must have been sent but never arrived, and decides when to
//! request them.

use core::ops::Range;

use super::{Arrival, Results};
use crate::recovery::{self, Nacked};
use crate::rtt::Rtt;
use crate::sequence::Sequence;
use crate::time::Time;
use crate::wire::{NackEntries, NackEntry};
use crate::worker::stream::backoff::Backoff;

/// The parameters of a search for lost results.
#[derive(Debug, Clone, Copy)]
pub(in crate::worker::stream) struct Search<'a> {
    /// The position before which all results have arrived.
    cursor: u64,
    now: Time,
    /// The round trip of nacks.
    nacks: &'a Rtt,
    /// Whether nacks are delayed because several in a row were fruitless.
    held_back: bool,
}

impl<'a> Search<'a> {
    pub(in crate::worker::stream) fn new(
        cursor: u64,
        now: Time,
        nacks: &'a Rtt,
        backoff: &Backoff,
    ) -> Self {
        Self { cursor, now, nacks, held_back: backoff.holds_back(now) }
    }
}

/// A request for the missing part of an arrival and the gap before it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Lack {
    position: u64,
    /// The windows before `position` whose results have not arrived. The aggregator has a result
    /// for at least the last of them.
    gap: Range<u64>,
    fragments: u64,
}

impl Lack {
    /// Returns how many entries of a nack this request needs.
    const fn entries(&self) -> usize {
        let gap = match self.gap.end.saturating_sub(self.gap.start) {
            0 => 0,
            1 => 1,
            _ => 2,
        };
        gap + (self.fragments != 0) as usize
    }
}

/// The requested windows after the last arrival: where they end, and the nacks for them.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Tail {
    to: u64,
    nacked: Nacked,
}

impl Results {
    /// Notes that the aggregator has sent all results of windows before `end`.
    pub(in crate::worker::stream) fn note_all_sent(&mut self, end: u64) {
        self.sent = self.sent.max(end);
    }

    /// Returns whether to request lost results now (wire: W-38). This is true in three cases: the
    /// first lost result holds up all others; enough later results were sent that one nack can
    /// cover their losses too; or results after the last arrival are lost.
    pub(in crate::worker::stream) fn is_to_nack(&self, search: Search<'_>) -> bool {
        let first = self.lacking(search).enumerate().find(|(_, lack)| lack.entries() > 0);
        first.is_some_and(|(at, lack)| {
            at == 0 || self.sent >= lack.position + recovery::GATHERED_WINDOWS
        }) || self.lack_of_tail(search).entries() > 0
    }

    /// Returns whether to request now those fragments of the first arrival that later fragments
    /// have overtaken.
    pub(in crate::worker::stream) fn is_to_nack_of_first(&self, search: Search<'_>) -> bool {
        self.arrivals.front().is_some_and(|first| {
            let hole = first.sent & first.all & !first.have != 0;
            hole && self.lack(first, 0..0, search).entries() > 0
        })
    }

    /// Returns the entries of a nack: results that must have been lost, except those that were
    /// requested and may still arrive.
    pub(in crate::worker::stream) fn missing<'a>(
        &'a self,
        ops: &'a Sequence,
        search: Search<'a>,
    ) -> impl Iterator<Item = NackEntry> + 'a {
        let entry =
            |position: u64, fragments: u64| NackEntry { window: ops.window(position), fragments };
        self.lacking(search).chain([self.lack_of_tail(search)]).flat_map(
            move |Lack { position, gap, fragments }| {
                // Only the last window of a gap is known to have a result; earlier ones may have
                // results too.
                let last = (!gap.is_empty()).then(|| gap.end - 1);
                let more = last.filter(|last| *last > gap.start).map(|_| entry(gap.start, 0));
                let last = last.map(|last| entry(last, u64::MAX));
                let rest = (fragments != 0).then(|| entry(position, fragments));
                [more, last, rest].into_iter().flatten()
            },
        )
    }

    /// Notes that the entries of [`Self::missing`] were requested, as many as fit in a nack.
    pub(in crate::worker::stream) fn note_nacked(
        &mut self,
        search: Search<'_>,
        backoff: &mut Backoff,
    ) {
        let mut room = NackEntries::MAX;
        let mut expected = search.cursor;
        let tail = self.lack_of_tail(search);
        if tail.entries() > 0 || self.lacking(search).any(|lack| lack.entries() > 0) {
            backoff.note_nacked(search.now);
        }
        // While nacks are held back, the pause alone decides when results are requested again.
        let Search { cursor, now, nacks, .. } = search;
        let search = Search::new(cursor, now, nacks, backoff);
        for at in 0..self.arrivals.len() {
            let arrival = self.arrivals[at];
            let lack = self.lack(&arrival, expected..arrival.start, search);
            let Some(left) = room.checked_sub(lack.entries()) else { return };
            room = left;
            expected = arrival.position + 1;
            let arrival = &mut self.arrivals[at];
            arrival.nacked.note(lack.fragments, now);
            if !lack.gap.is_empty() {
                arrival.gap_nacked.note(u64::MAX, now);
            }
        }
        if !tail.gap.is_empty() && room >= tail.entries() {
            if self.tail.to <= expected {
                self.tail.nacked = Nacked::default();
            }
            self.tail.to = tail.gap.end;
            self.tail.nacked.note(u64::MAX, now);
        }
    }

    /// Returns the nacks for the window at `position`, which is about to become the last arrival,
    /// and the nacks for the gap before it.
    pub(super) fn nacked_behind(&self, position: u64, cursor: u64) -> (Nacked, Nacked) {
        match self.tail {
            Tail { to, nacked } if position < to => (nacked, Nacked::default()),
            Tail { to, nacked } if self.tail_start(cursor) < to => (Nacked::default(), nacked),
            _ => Default::default(),
        }
    }

    /// Returns the first window after the last arrival.
    fn tail_start(&self, cursor: u64) -> u64 {
        self.arrivals.back().map_or(cursor, |last| last.position + 1)
    }

    fn lacking<'a>(&'a self, search: Search<'a>) -> impl Iterator<Item = Lack> + 'a {
        let mut expected = search.cursor;
        self.arrivals.iter().map(move |arrival| {
            let gap = expected..arrival.start;
            expected = arrival.position + 1;
            self.lack(arrival, gap, search)
        })
    }

    /// Returns the request for results after the last arrival that were sent but never arrived.
    fn lack_of_tail(&self, search: Search<'_>) -> Lack {
        let Search { cursor, now, nacks, held_back } = search;
        let start = self.tail_start(cursor);
        let Tail { to, nacked } = self.tail;
        let again = !held_back && nacked.due(u64::MAX, start, self.answered, now, nacks) != 0;
        let start = if again { start } else { start.max(to) };
        Lack { position: start, gap: start..self.sent.max(start), fragments: 0 }
    }

    /// Returns the request for the lost fragments of an arrival and for the gap before it.
    fn lack(&self, arrival: &Arrival, gap: Range<u64>, search: Search<'_>) -> Lack {
        let Arrival { position, all, have, sent, nacked, gap_nacked, .. } = *arrival;
        let Search { now, nacks, held_back, .. } = search;
        if held_back {
            return Lack { position, gap: 0..0, fragments: 0 };
        }
        let missing = all & !have;
        let lost = if position < self.sent { missing } else { missing & sent };
        let fragments = nacked.due(lost, position, self.answered, now, nacks);
        let lost = if position <= self.sent { u64::MAX } else { 0 };
        let due = gap_nacked.due(lost, gap.start, self.answered, now, nacks) != 0;
        Lack { position, gap: if due { gap } else { 0..0 }, fragments }
    }
}
