//! The windows that were sent and have no result: how many of their bytes may still be on the path,
//! and which fragments to send again.

use alloc::collections::VecDeque;
use core::ops::Range;

use crate::congestion::Congestion;
use crate::geometry::Fragmentation;
use crate::time::Time;
use crate::worker::Path;

/// A window that was sent and that has no result yet.
#[derive(Debug, Clone, Copy)]
struct Sent {
    position: u64,
    len: usize,
    /// How many of its bytes may still be on the path. Data that has arrived is off the path, even
    /// if its result waits for other ranks.
    on_path: usize,
    at: Time,
    /// Fragments to send again, as the aggregator requested.
    again: u64,
    /// Whether any fragment was ever sent again. The round trip is then ambiguous (Karn).
    repeated: bool,
    /// The fragments that the aggregator lacked at its last nack.
    lacked: u64,
    /// How many consecutive nacks named the same fragments again. Each of these nacks shows that
    /// the whole repetition before it was lost.
    fruitless: u32,
}

impl Sent {
    /// Records the fragments that the aggregator lacks. Returns how many consecutive nacks repeated
    /// the same set.
    const fn note_lacked(&mut self, fragments: u64) -> u32 {
        let is_same = self.repeated && self.lacked == fragments;
        self.lacked = fragments;
        self.fruitless = if is_same { self.fruitless.saturating_add(1) } else { 0 };
        self.fruitless
    }
}

/// The windows of a stream that are in flight.
#[derive(Debug)]
pub(super) struct InFlight {
    /// The windows, in order; at most one for each slot of the pool.
    windows: VecDeque<Sent>,
    /// How many windows have fragments to send again.
    repeats: usize,
}

impl InFlight {
    pub(super) fn new(slots: usize) -> Self {
        Self { windows: VecDeque::with_capacity(slots), repeats: 0 }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.windows.is_empty()
    }

    /// Returns whether one more window of `len` bytes may be in flight. `pool` is the number of
    /// slots in the pool.
    ///
    /// Each stream may always have its lowest window in flight. Otherwise two ranks could fill
    /// their paths with windows of different lanes, and each would wait for the other.
    pub(super) fn admits(&self, len: usize, pool: u64, congestion: &Congestion) -> bool {
        let windows = self.windows.len() as u64;
        windows < pool && (windows == 0 || congestion.admits(len))
    }

    /// Notes that the window at `position` is sent.
    pub(super) fn push(
        &mut self,
        now: Time,
        position: u64,
        len: usize,
        congestion: &mut Congestion,
    ) {
        let sent = Sent {
            position,
            len,
            on_path: len,
            at: now,
            again: 0,
            repeated: false,
            lacked: 0,
            fruitless: 0,
        };
        self.windows.push_back(sent);
        congestion.on_sent(len);
    }

    /// Notes that all data of windows before `position` has arrived or is lost. The results may
    /// take longer, but the path has room again.
    pub(super) fn note_off_path(&mut self, position: u64, congestion: &mut Congestion) {
        for sent in self.windows.iter_mut().take_while(|sent| sent.position < position) {
            congestion.on_delivered(core::mem::take(&mut sent.on_path));
        }
    }

    /// Notes that the aggregator lacks `fragments` of the window at `position`, and queues them to
    /// be sent again. `cut_of` returns how a payload of a given length is cut. Returns how many
    /// consecutive nacks named the same fragments again, or `None` if the window is not in flight.
    pub(super) fn note_lacked(
        &mut self,
        position: u64,
        fragments: u64,
        cut_of: impl Fn(usize) -> Fragmentation,
        congestion: &mut Congestion,
    ) -> Option<u32> {
        let i = self.find(position)?;
        let sent = &mut self.windows[i];
        let cut = cut_of(sent.len);
        let fruitless = sent.note_lacked(fragments & cut.all(sent.len));
        let wanted = sent.lacked & !sent.again;
        self.repeats += usize::from(sent.again == 0 && wanted != 0);
        sent.again |= wanted;
        let lost = cut.payload() * wanted.count_ones() as usize;
        let lost = lost.min(sent.len);
        // A lost repetition proves no more about the path than the first loss did.
        if !core::mem::replace(&mut sent.repeated, true) {
            congestion.on_lost(lost);
        }
        congestion.on_sent(lost);
        sent.on_path += lost;
        Some(fruitless)
    }

    /// Returns the next window with fragments to send again, and the fragments.
    #[inline]
    pub(super) fn poll_repeat(&mut self) -> Option<(u64, u64)> {
        if self.repeats == 0 {
            return None;
        }
        let sent = self.windows.iter_mut().find(|sent| sent.again != 0)?;
        self.repeats -= 1;
        Some((sent.position, core::mem::take(&mut sent.again)))
    }

    /// Cancels the repetitions of a window whose sum has arrived. The shard no longer lacks the
    /// window, and the tensor now holds the sum, which may have other blocks.
    pub(super) fn cancel_repeats(&mut self, position: u64) {
        if let Some(i) = self.find(position) {
            let again = core::mem::take(&mut self.windows[i].again);
            self.repeats -= usize::from(again != 0);
        }
    }

    /// Frees the windows before `done`. A window before `cursor` has a result, so its round trip is
    /// sampled unless fragments were repeated.
    pub(super) fn release(&mut self, now: Time, done: u64, cursor: u64, path: &mut Path) {
        while let Some(sent) = self.windows.pop_front_if(|sent| sent.position < done) {
            self.repeats -= usize::from(sent.again != 0);
            path.congestion.on_delivered(sent.on_path);
            if !sent.repeated && sent.position < cursor {
                path.rtt.sample(now.since(sent.at));
            }
        }
    }

    /// Forgets the windows of a failed op.
    pub(super) fn forget(&mut self, failed: &Range<u64>, congestion: &mut Congestion) {
        let Self { windows, repeats } = self;
        windows.retain(|sent| {
            let keep = !failed.contains(&sent.position);
            if !keep {
                *repeats -= usize::from(sent.again != 0);
                congestion.on_forgotten(sent.on_path);
            }
            keep
        });
    }

    fn find(&self, position: u64) -> Option<usize> {
        self.windows.binary_search_by_key(&position, |sent| sent.position).ok()
    }
}
