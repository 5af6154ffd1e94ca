//! The slots of a stream: what has arrived of the windows in flight.

use alloc::boxed::Box;
use alloc::vec;

use crate::geometry::Fragmentation;
use crate::ids::Rank;
use crate::recovery::{Again, Asked};
use crate::time::Time;
use crate::wire::Header;

/// What one rank has sent of one window.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Contribution {
    /// The blocks it holds; 0 while nothing has arrived.
    pub(super) mask: u64,
    /// The fragments that have arrived.
    pub(super) have: u64,
    /// Whether all have.
    pub(super) complete: bool,
    /// The fragments that must have been sent, since later ones have arrived.
    pub(super) sent: u64,
    /// What of them was asked for.
    pub(super) asked: Asked,
    /// What of the result went to the rank again.
    pub(super) again: Again,
}

/// The aggregator's place for one window in flight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    /// The window's position, or [`Slot::FREE`].
    pub(super) position: u64,
    /// How many ranks are complete.
    pub(super) complete: u32,
    /// Blocks of the result, once folded.
    pub(super) union: u64,
    /// Bytes of the result's payload, once folded.
    pub(super) result_len: usize,
    /// How it is cut.
    pub(super) cut: Fragmentation,
    /// The op's previous window with a result.
    pub(super) previous: u32,
    /// Ranks that took no part in the result, once folded.
    pub(super) absent: usize,
    /// When the result first went to the ranks; [`Time::NEVER`] before that.
    pub(super) sent_at: Time,
}

impl Slot {
    pub(super) const FREE: u64 = u64::MAX;

    const fn new(position: u64, cut: Fragmentation) -> Self {
        Self {
            position,
            complete: 0,
            union: 0,
            result_len: 0,
            cut,
            previous: 0,
            absent: 0,
            sent_at: Time::NEVER,
        }
    }

    /// Bytes of a datagram with one fragment of the result, the last of which may be shorter.
    pub(super) fn datagram_len(&self) -> usize {
        Header::LEN + self.result_len.min(self.cut.payload())
    }

    /// Bytes of all datagrams of the result.
    pub(super) fn datagrams_len(&self) -> usize {
        Header::LEN * self.cut.count(self.result_len) + self.result_len
    }
}

/// The pool of one stream. Allocated at start, never grown.
#[derive(Debug)]
pub(super) struct Pool {
    slots: Box<[Slot]>,
    contributions: Box<[Contribution]>,
    world: usize,
}

impl Pool {
    pub(super) fn new(slots: usize, world: usize, cut: Fragmentation) -> Self {
        Self {
            slots: vec![Slot::new(Slot::FREE, cut); slots].into(),
            contributions: vec![Contribution::default(); slots * world].into(),
            world,
        }
    }

    /// How many windows may be in flight.
    pub(super) fn len(&self) -> u64 {
        self.slots.len() as u64
    }

    /// The slot's number for `position`: the position modulo the pool.
    pub(super) fn number(&self, position: u64) -> u32 {
        u32::try_from(position % self.len()).unwrap_or(u32::MAX)
    }

    /// The slot of `position`, if it holds it.
    pub(super) fn get(&self, position: u64) -> Option<&Slot> {
        let slot = &self.slots[self.number(position) as usize];
        (slot.position == position).then_some(slot)
    }

    /// The slot of `position`, taken over from whatever it held before.
    pub(super) fn claim(&mut self, position: u64) -> &mut Slot {
        let number = self.number(position) as usize;
        let slot = &mut self.slots[number];
        if slot.position != position {
            *slot = Slot::new(position, slot.cut);
            let first = number * self.world;
            self.contributions[first..first + self.world].fill(Contribution::default());
        }
        slot
    }

    /// Forgets what `rank` has sent of windows from `position` on.
    pub(super) fn forget(&mut self, rank: Rank, position: u64) {
        let contributions = self.contributions.chunks_exact_mut(self.world);
        for (slot, contributions) in self.slots.iter_mut().zip(contributions) {
            if slot.position >= position && slot.position != Slot::FREE {
                let forgotten = core::mem::take(&mut contributions[rank.index()]);
                slot.complete -= u32::from(forgotten.complete);
            }
        }
    }

    /// Forgets what `rank` has sent of the window at `position`.
    pub(super) fn forget_window(&mut self, rank: Rank, position: u64) {
        if self.get(position).is_some() {
            let forgotten = core::mem::take(self.contribution_mut(position, rank));
            self.claim(position).complete -= u32::from(forgotten.complete);
        }
    }

    /// What `rank` has sent of the window at `position`.
    pub(super) fn contribution(&self, position: u64, rank: Rank) -> Contribution {
        if self.get(position).is_none() {
            return Contribution::default();
        }
        self.contributions[self.number(position) as usize * self.world + rank.index()]
    }

    /// The same, to be changed; the slot has been claimed.
    pub(super) fn contribution_mut(&mut self, position: u64, rank: Rank) -> &mut Contribution {
        let number = self.number(position) as usize;
        &mut self.contributions[number * self.world + rank.index()]
    }

    /// What each rank has sent of the window at `position`, by rank.
    pub(super) fn contributions(&self, position: u64) -> &[Contribution] {
        let first = self.number(position) as usize * self.world;
        &self.contributions[first..first + self.world]
    }
}
