//! Results beyond the cursor: which fragments of which windows have arrived.

mod lost;

use alloc::collections::VecDeque;
use core::ops::Range;

pub(super) use self::lost::Search;
use self::lost::Tail;
use super::progress::Progress;
use crate::geometry::Fragmentation;
use crate::ids::WindowId;
use crate::recovery::{self, Answered, Nacked};
use crate::reject::Reject;
use crate::rtt::Rtt;
use crate::time::Time;
use crate::wire::{Flags, Header};

/// A window whose result has arrived, at least in part.
#[derive(Debug, Clone, Copy)]
struct Arrival {
    position: u64,
    /// The start of the run of windows right before `position` that are known to have no result.
    start: u64,
    mask: u64,
    have: u64,
    all: u64,
    len: usize,
    /// The fragments that must have been sent, since later ones have arrived.
    sent: u64,
    /// The fragments that nacks have requested.
    nacked: Nacked,
    /// The nacks for the windows between the previous arrival and `start`.
    gap_nacked: Nacked,
}

impl Arrival {
    #[inline]
    const fn is_complete(&self) -> bool {
        self.have == self.all
    }
}

/// The results of a stream beyond its cursor.
#[derive(Debug)]
pub(super) struct Results {
    /// The windows that have arrived, in order; at most one for each slot of the pool.
    arrivals: VecDeque<Arrival>,
    /// The position before which all results must have been sent.
    sent: u64,
    /// The nacks for windows after the last arrival.
    tail: Tail,
    /// The latest nack that was answered.
    answered: Answered,
}

impl Results {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            arrivals: VecDeque::with_capacity(slots),
            sent: 0,
            tail: Tail::default(),
            answered: Answered::NONE,
        }
    }

    /// Checks the shape of a result at `position`, and finds or creates its place. `cut` is the
    /// job's fragmentation, and `pool` the number of slots.
    pub(super) fn place(
        &mut self,
        position: u64,
        header: &Header,
        cut: Fragmentation,
        pool: u64,
        progress: &Progress,
    ) -> Result<usize, Reject> {
        let entry = progress.ops().at(position).ok_or(Reject::Stale)?;
        let index = header.window.index;
        // wire: W-11
        if header.mask & !entry.geometry.full_mask(index) != 0 {
            return Err(Reject::Shape);
        }
        let len = entry.geometry.payload_len(index, header.mask);
        let cut = entry.geometry.cut(cut, len);
        let fragment = usize::from(header.fragment);
        // wire: W-21
        let length = usize::from(header.length);
        if fragment >= cut.count(len) || cut.range(len, fragment).len() != length {
            return Err(Reject::Shape);
        }
        let start = if header.previous == Header::NO_PREVIOUS {
            entry.base
        } else {
            let previous = WindowId::new(header.window.op, header.previous);
            progress.ops().position(previous).ok_or(Reject::Shape)? + 1
        };
        // wire: W-23
        if start > position {
            return Err(Reject::Shape);
        }
        match self.find(position) {
            // wire: W-29
            Ok(i) if self.arrivals[i].mask == header.mask => Ok(i),
            Ok(_) => Err(Reject::Shape),
            Err(_) if self.arrivals.len() as u64 >= pool => Err(Reject::BeyondPool),
            Err(i) => {
                let (mask, all) = (header.mask, cut.all(len));
                // A nack for a gap covers every window in the gap.
                let (mut nacked, gap_nacked) = match self.arrivals.get(i) {
                    Some(next) if position < next.start => (next.gap_nacked, Nacked::default()),
                    Some(_) => Default::default(),
                    None => self.nacked_behind(position, progress.cursor()),
                };
                nacked.limit(all);
                let arrival = Arrival {
                    position,
                    start,
                    mask,
                    have: 0,
                    all,
                    len,
                    sent: 0,
                    nacked,
                    gap_nacked,
                };
                self.arrivals.insert(i, arrival);
                Ok(i)
            }
        }
    }

    /// Takes a fragment of the window at `place`, and samples the round trip of the nack that it
    /// answers, if any. Returns whether the fragment is new.
    #[inline]
    pub(super) fn take(
        &mut self,
        place: usize,
        header: &Header,
        now: Time,
        nacks: &mut Rtt,
    ) -> bool {
        let arrival = &mut self.arrivals[place];
        let bit = 1 << header.fragment;
        let is_new = arrival.have & bit == 0;
        arrival.have |= bit;
        let again = header.flags.has(Flags::AGAIN);
        if again {
            nacks.note_again(now, is_new);
        }
        let (nacked, position) = (&mut arrival.nacked, arrival.position);
        if let Some(took) = nacked.answer(bit, again, position, now, &mut self.answered) {
            nacks.answered(took);
        }
        arrival.sent |= recovery::sent_before(header.fragment, again);
        is_new
    }

    /// Notes which earlier results must have been sent, now that a fragment has arrived. Returns
    /// whether the fragment proves that more results were sent than was known before.
    #[inline]
    pub(super) fn note_overtaken(&mut self, place: usize, header: &Header) -> bool {
        let arrival = &self.arrivals[place];
        let again = header.flags.has(Flags::AGAIN);
        let proves = recovery::proves_earlier(header.fragment, arrival.is_complete(), again);
        let proves_more = proves && arrival.position > self.sent;
        if proves_more {
            self.sent = arrival.position;
        }
        proves_more
    }

    /// Returns the length in bytes of the window at `place`, and whether all of it has arrived.
    #[inline]
    pub(super) fn arrived(&self, place: usize) -> (usize, bool) {
        let arrival = &self.arrivals[place];
        (arrival.len, arrival.is_complete())
    }

    /// Returns whether the sum of the window at `position` has arrived and the cursor has not
    /// passed it.
    pub(super) fn is_complete(&self, position: u64) -> bool {
        self.find(position).is_ok_and(|i| self.arrivals[i].is_complete())
    }

    /// Removes the first arrival, if it is complete and no window from `cursor` up to the arrival
    /// has a result. Returns its position and its length in bytes.
    pub(super) fn pop_complete(&mut self, cursor: u64) -> Option<(u64, usize)> {
        let first =
            self.arrivals.pop_front_if(|first| first.is_complete() && first.start <= cursor)?;
        Some((first.position, first.len))
    }

    /// Forgets the windows before `cursor`.
    pub(super) fn pass(&mut self, cursor: u64) {
        while self.arrivals.pop_front_if(|arrival| arrival.position < cursor).is_some() {}
    }

    /// Forgets the windows of a failed op.
    pub(super) fn forget(&mut self, failed: &Range<u64>) {
        self.arrivals.retain(|arrival| !failed.contains(&arrival.position));
    }

    /// Returns the index of the window at `position`, or the index where it belongs.
    fn find(&self, position: u64) -> Result<usize, usize> {
        self.arrivals.binary_search_by_key(&position, |arrival| arrival.position)
    }
}
