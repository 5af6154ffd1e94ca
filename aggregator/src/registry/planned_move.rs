//! A move of a job, from an operator's request until its members have left.

use std::collections::BTreeSet;

use racksum_proto::move_target::MoveTarget;
use tokio::sync::oneshot;

/// A move in progress. If the job ends, both channels close without a message.
#[derive(Debug)]
pub(super) struct PlannedMove {
    pub(super) to: MoveTarget,
    /// The places of the members that are not prepared yet.
    unprepared: BTreeSet<u16>,
    /// Signals that all members are prepared, or why one of them is not; `None` once it has.
    prepared: Option<oneshot::Sender<Result<(), String>>>,
    /// Signals that all members have left for the new aggregators; `None` until they are told to.
    departed: Option<oneshot::Sender<()>>,
}

impl PlannedMove {
    /// Creates a move that the members at these places must prepare. The channel reports that all
    /// of them are ready, or why one of them is not.
    pub(super) fn new(
        to: MoveTarget,
        unprepared: BTreeSet<u16>,
    ) -> (Self, oneshot::Receiver<Result<(), String>>) {
        let (sender, receiver) = oneshot::channel();
        (Self { to, unprepared, prepared: Some(sender), departed: None }, receiver)
    }

    /// Begins the move, unless it has begun or a member is not prepared. The channel reports that
    /// all members have left.
    pub(super) fn begin(&mut self) -> Option<oneshot::Receiver<()>> {
        // wire: W-79
        if !self.unprepared.is_empty() || self.departed.is_some() {
            return None;
        }
        let (sender, receiver) = oneshot::channel();
        self.departed = Some(sender);
        Some(receiver)
    }

    /// Returns whether the members have been told to leave.
    pub(super) const fn has_begun(&self) -> bool {
        self.departed.is_some()
    }

    /// Reports why the move cannot begin, unless it has begun.
    pub(super) fn stop(&mut self, why: String) {
        if self.departed.is_none() {
            // The move cannot begin even if all members have already reported that they are ready.
            self.unprepared.insert(u16::MAX);
            self.report(Err(why));
        }
    }

    /// Signals that all members have left. Returns the target, or `None` if the members left for
    /// another reason.
    pub(super) fn finish(self) -> Option<MoveTarget> {
        // A failed send means that nobody waits for the move any more.
        self.departed?.send(()).ok();
        Some(self.to)
    }

    fn report(&mut self, result: Result<(), String>) {
        if let Some(prepared) = self.prepared.take() {
            // A failed send means that nobody waits for the move any more.
            prepared.send(result).ok();
        }
    }

    pub(super) fn note_prepared(&mut self, place: u16) {
        if self.unprepared.remove(&place) && self.unprepared.is_empty() {
            self.report(Ok(()));
        }
    }
}
