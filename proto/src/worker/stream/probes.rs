//! Decides when a stream that receives nothing sends a probe: a nack that also asks which results
//! exist.

use crate::time::{Span, Time};
use crate::worker::Path;

/// A probe that no wait has answered yet.
#[derive(Debug, Clone, Copy)]
struct Probe {
    at: Time,
    /// The first window that had not been sent yet at the time of the oldest unanswered probe;
    /// `u64::MAX` after a nack, which may have answered that probe.
    sent: u64,
}

/// How long a stream has been silent, and which probes it has sent.
#[derive(Debug)]
pub(super) struct Probes {
    /// The time at which the stream last made progress, sent a probe, or received a wait or a nack
    /// for data.
    quiet_since: Time,
    /// The number of probes since the last progress. A wait that shows no lost result raises it to
    /// the next multiple of [`Self::A_STEP`].
    count: u32,
    /// The last probe, until it is answered.
    unanswered: Option<Probe>,
}

impl Probes {
    pub(super) const fn new(now: Time) -> Self {
        Self { quiet_since: now, count: 0, unanswered: None }
    }

    /// Notes progress: something new has arrived, or the aggregator lacks data.
    #[inline]
    pub(super) const fn note_progress(&mut self, now: Time) {
        (self.quiet_since, self.count) = (now, 0);
    }

    /// Returns the time at which the next probe is due. Results may queue behind those of other
    /// streams, so the last result of any stream, at `last_received`, puts the probe off by up to
    /// twice the patience. `awaits` says whether results are awaited, and `pause` is the least
    /// patience.
    pub(super) fn due(&self, path: &Path, last_received: Time, awaits: bool, pause: Span) -> Time {
        let patience = path.patience(self.count / Self::A_STEP);
        let patience = match self.count {
            count if awaits || count == 0 => patience,
            // No result is awaited, so the probe is not urgent.
            count => {
                let longer = Self::REST_PATIENCE.0 << count.min(Self::REST_STEPS);
                Span(patience.0.max(longer))
            }
        };
        let patience = patience.max(pause);
        let most = self.quiet_since + patience + patience;
        self.quiet_since.max(last_received.min(most)) + patience
    }

    /// Counts a probe that has become due.
    pub(super) const fn note_due(&mut self, now: Time) {
        self.quiet_since = now;
        self.count += 1;
    }

    /// Notes that a probe is sent. `sent` is the first window that has not been sent.
    pub(super) fn note_sent(&mut self, now: Time, sent: u64) {
        // An earlier probe may still be answered.
        let unanswered = self.unanswered.map_or(u64::MAX, |probe| probe.sent);
        self.unanswered = Some(Probe { at: now, sent: sent.min(unanswered) });
    }

    /// Notes that a nack has arrived, which may answer the last probe. Returns the position from
    /// which the nack's entries must be ignored: a nack that answers a probe says nothing about
    /// windows sent after that probe. Any other nack may name any window.
    pub(super) fn note_nack(&mut self) -> u64 {
        let probe = self.unanswered.as_mut();
        probe.map_or(u64::MAX, |probe| core::mem::replace(&mut probe.sent, u64::MAX))
    }

    /// Notes that a wait has arrived, which answers the last probe. Returns how long the answer
    /// took, unless it may be the late answer to an earlier probe (Karn).
    pub(super) fn note_answer(&mut self, now: Time) -> Option<Span> {
        let is_first = self.count == 1;
        self.unanswered.take().filter(|_| is_first).map(|probe| now.since(probe.at))
    }

    /// Notes that no result is lost: the stream waits for other ranks. Its patience grows more
    /// than after an unanswered probe, which may simply have been lost.
    pub(super) const fn note_wait(&mut self, now: Time) {
        self.quiet_since = now;
        self.count = (self.count / Self::A_STEP + 1) * Self::A_STEP;
    }

    /// Notes that results are lost. The next probe is then urgent.
    pub(super) const fn note_lack(&mut self, now: Time) {
        // The count is 1, not 0: an answer to another probe may still arrive, so the next probe
        // must not count as the first.
        (self.quiet_since, self.count) = (now, 1);
    }

    /// The number of unanswered probes after which the patience doubles.
    const A_STEP: u32 = 4;
    /// The base probe interval at rest; doubles with each probe, up to `REST_STEPS` times.
    const REST_PATIENCE: Span = Span::from_millis(8);
    const REST_STEPS: u32 = 7;
}
