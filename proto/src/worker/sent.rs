//! Messages that a worker has sent and that await an answer: windows and probes.

use crate::time::Time;

/// A window that was sent and that has no result yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sent {
    pub(super) position: u64,
    pub(super) len: usize,
    /// How many of its bytes may still be on the path. Data that has arrived may wait for other
    /// ranks.
    pub(super) on_path: usize,
    pub(super) at: Time,
    /// Fragments that the aggregator asked for again.
    pub(super) again: u64,
    /// Whether any fragment was ever sent again, so that the round trip is ambiguous (Karn).
    pub(super) repeated: bool,
    /// The fragments that the aggregator lacked at its last ask.
    pub(super) lacked: u64,
    /// How many repeated asks named the same fragments, so that every repetition was lost.
    pub(super) fruitless: u32,
}

impl Sent {
    /// Records the fragments that the aggregator lacks. Returns how many asks in a row repeated the
    /// same set.
    pub(super) const fn note_lacked(&mut self, fragments: u64) -> u32 {
        let is_same = self.repeated && self.lacked == fragments;
        self.lacked = fragments;
        self.fruitless = if is_same { self.fruitless.saturating_add(1) } else { 0 };
        self.fruitless
    }
}

/// Whether an ask is sent because nothing arrives (true), or because of a gap (false).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stalled(pub(super) bool);

/// A probe that was sent and has no answering wait yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Probe {
    pub(super) at: Time,
    /// The first window that had not been sent at this probe, or at an earlier unanswered one.
    pub(super) sent: u64,
}

impl Probe {
    /// Notes that an ask has arrived, which may answer the probe. Returns the position before which
    /// the windows of such an answer lie. A later ask may be about any window.
    pub(super) const fn answered(&mut self) -> u64 {
        core::mem::replace(&mut self.sent, u64::MAX)
    }
}
