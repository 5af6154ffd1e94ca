//! What a worker has sent and awaits an answer to: windows, and questions.

use crate::time::Time;

/// A window that was sent and has no result yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sent {
    pub(super) position: u64,
    pub(super) len: usize,
    /// How much of it may be on its way; what has arrived may still wait for other ranks.
    pub(super) on_path: usize,
    pub(super) at: Time,
    /// Fragments that the aggregator asked for again.
    pub(super) again: u64,
    /// Whether any was ever sent again, so that its round trip says nothing (Karn).
    pub(super) repeated: bool,
    /// What the aggregator lacked when it asked last.
    pub(super) lacked: u64,
    /// How often it has lacked just the same since, so that all that was sent again was lost.
    pub(super) fruitless: u32,
}

impl Sent {
    /// Notes what the aggregator lacks; returns how often that has been so.
    pub(super) const fn note_lacked(&mut self, fragments: u64) -> u32 {
        let is_same = self.repeated && self.lacked == fragments;
        self.lacked = fragments;
        self.fruitless = if is_same { self.fruitless.saturating_add(1) } else { 0 };
        self.fruitless
    }
}

/// Whether an ask is sent because nothing is heard, or because of a gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stalled(pub(super) bool);

/// A probe that was sent, and no wait has come since.
#[derive(Debug, Clone, Copy)]
pub(super) struct Probe {
    pub(super) at: Time,
    /// The first window that had not been sent then, nor at an earlier one without an answer.
    pub(super) sent: u64,
}

impl Probe {
    /// Notes that an ask has come, which may be the answer. Returns where the windows end that it
    /// can be about; a later ask is about any.
    pub(super) const fn answered(&mut self) -> u64 {
        core::mem::replace(&mut self.sent, u64::MAX)
    }
}
