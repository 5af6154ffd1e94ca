//! The slots of a stream: the received contributions to the windows in flight.

use alloc::boxed::Box;
use alloc::vec;

use crate::geometry::Fragmentation;
use crate::ids::Rank;
use crate::recovery::{Again, Nacked};
use crate::time::Time;
use crate::wire::Header;

/// The state of one rank's contribution to one window.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Contribution {
    /// The mask of the contributed blocks; 0 while nothing has arrived.
    pub(super) mask: u64,
    /// The mask of the fragments that have arrived.
    pub(super) have: u64,
    /// Whether all fragments have arrived.
    pub(super) complete: bool,
    /// The fragments that the rank must have sent, because later ones have arrived.
    pub(super) sent: u64,
    /// The fragments that nacks have requested from the rank.
    pub(super) nacked: Nacked,
    /// The fragments of the window's result that were sent to the rank again.
    pub(super) again: Again,
}

/// The aggregator's place for one window in flight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    /// The window's position, or [`Slot::FREE`].
    pub(super) position: u64,
    /// How many ranks have sent their whole contribution.
    pub(super) complete: u32,
    /// The rank whose contribution was complete last, and when.
    pub(super) last_complete: Option<(Rank, Time)>,
    /// The time at which the contributions of the other ranks were complete.
    pub(super) others_complete_at: Time,
    /// The mask of the result's blocks, once the window is folded.
    pub(super) union: u64,
    /// The length of the result's payload in bytes, once the window is folded.
    pub(super) result_len: usize,
    /// How the result is cut into fragments.
    pub(super) cut: Fragmentation,
    /// The index of the op's previous window with a result, or [`Header::NO_PREVIOUS`].
    pub(super) previous: u32,
    /// How many lost ranks did not take part in the result, once the window is folded.
    pub(super) absent: usize,
    /// The time at which the result was first sent to the ranks; [`Time::NEVER`] before that.
    pub(super) sent_at: Time,
}

impl Slot {
    pub(super) const FREE: u64 = u64::MAX;

    const fn new(position: u64, cut: Fragmentation) -> Self {
        Self {
            position,
            complete: 0,
            last_complete: None,
            others_complete_at: Time(0),
            union: 0,
            result_len: 0,
            cut,
            previous: 0,
            absent: 0,
            sent_at: Time::NEVER,
        }
    }

    /// Notes that a rank has sent its whole contribution.
    pub(super) fn note_complete(&mut self, rank: Rank, now: Time) {
        self.complete += 1;
        if let Some((_, at)) = self.last_complete.replace((rank, now)) {
            self.others_complete_at = at;
        }
    }

    /// Returns the length in bytes of a datagram with one fragment of the result; the last datagram
    /// may be shorter.
    pub(super) fn datagram_len(&self) -> usize {
        Header::LEN + self.result_len.min(self.cut.payload())
    }

    /// Returns the total length in bytes of all datagrams of the result.
    pub(super) fn datagrams_len(&self) -> usize {
        Header::LEN * self.cut.count(self.result_len) + self.result_len
    }
}

/// The pool of one stream, allocated once and never grown.
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

    /// Returns how many windows may be in flight.
    pub(super) fn len(&self) -> u64 {
        self.slots.len() as u64
    }

    /// Returns the slot number for `position`: the position modulo the number of slots.
    pub(super) fn number(&self, position: u64) -> u32 {
        u32::try_from(position % self.len()).unwrap_or(u32::MAX)
    }

    /// Returns the slot for `position`, if it holds the window at that position.
    pub(super) fn get(&self, position: u64) -> Option<&Slot> {
        let slot = &self.slots[self.number(position) as usize];
        (slot.position == position).then_some(slot)
    }

    /// Returns the slot of `position`. Clears the slot first if it holds another window.
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

    /// Forgets the contributions of `rank` to all windows at or after `position`.
    pub(super) fn forget(&mut self, rank: Rank, position: u64) {
        let contributions = self.contributions.chunks_exact_mut(self.world);
        for (slot, contributions) in self.slots.iter_mut().zip(contributions) {
            if slot.position >= position && slot.position != Slot::FREE {
                let forgotten = core::mem::take(&mut contributions[rank.index()]);
                slot.complete -= u32::from(forgotten.complete);
            }
        }
    }

    /// Forgets the contribution of `rank` to the window at `position`.
    pub(super) fn forget_window(&mut self, rank: Rank, position: u64) {
        if self.get(position).is_some() {
            let forgotten = core::mem::take(self.contribution_mut(position, rank));
            self.claim(position).complete -= u32::from(forgotten.complete);
        }
    }

    /// Returns the contribution of `rank` to the window at `position`, or an empty contribution if
    /// no slot holds that window.
    pub(super) fn contribution(&self, position: u64, rank: Rank) -> Contribution {
        if self.get(position).is_none() {
            return Contribution::default();
        }
        self.contributions[self.number(position) as usize * self.world + rank.index()]
    }

    /// Returns a mutable reference to the contribution of `rank` to the window at `position`. The
    /// caller has claimed the slot.
    pub(super) fn contribution_mut(&mut self, position: u64, rank: Rank) -> &mut Contribution {
        let number = self.number(position) as usize;
        &mut self.contributions[number * self.world + rank.index()]
    }

    /// Returns the contributions to the window at `position`, indexed by rank.
    pub(super) fn contributions(&self, position: u64) -> &[Contribution] {
        let first = self.number(position) as usize * self.world;
        &self.contributions[first..first + self.world]
    }
}
