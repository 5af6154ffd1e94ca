//! A move of a job, from an operator's request until its members have left.

use std::collections::BTreeSet;

use racksum_proto::move_target::MoveTarget;
use tokio::sync::oneshot;

/// A channel that reports that all members are prepared for a move, or why one of them is not.
pub(super) type Prepared = oneshot::Receiver<Result<(), String>>;

/// A move in progress. If the job ends, both channels close without a message.
#[derive(Debug)]
pub(super) struct PlannedMove {
    /// The number of the move, which no earlier move of this aggregator had.
    pub(super) number: u32,
    pub(super) to: MoveTarget,
    /// The places of the members that are not prepared yet.
    unprepared: BTreeSet<u16>,
    /// The reason why the move can no longer begin.
    stopped: Option<String>,
    /// Signals that all members are prepared, or why one of them is not; `None` once it has.
    prepared: Option<oneshot::Sender<Result<(), String>>>,
    /// Signals that all members have left for the new aggregators; `None` until they are told to.
    departed: Option<oneshot::Sender<()>>,
}

impl PlannedMove {
    /// Creates a move that the members at these places must prepare. The channel reports that all
    /// of them are ready, or why one of them is not.
    pub(super) fn new(number: u32, to: MoveTarget, unprepared: BTreeSet<u16>) -> (Self, Prepared) {
        let (sender, receiver) = oneshot::channel();
        let (stopped, prepared, departed) = (None, Some(sender), None);
        (Self { number, to, unprepared, stopped, prepared, departed }, receiver)
    }

    /// Checks that the move can begin: all members are prepared, nothing has stopped it, and it has
    /// not begun.
    pub(super) fn check_can_begin(&self) -> Result<(), String> {
        // wire: W-79
        match &self.stopped {
            Some(why) => Err(why.clone()),
            None if self.has_begun() => Err("it is moving already".into()),
            None if !self.unprepared.is_empty() => Err("its ranks are not prepared".into()),
            None => Ok(()),
        }
    }

    /// Begins the move. The channel reports that all members have left.
    pub(super) fn begin(&mut self) -> oneshot::Receiver<()> {
        let (sender, receiver) = oneshot::channel();
        self.departed = Some(sender);
        receiver
    }

    /// Returns the places of the members that are not prepared.
    pub(super) const fn unprepared(&self) -> &BTreeSet<u16> {
        &self.unprepared
    }

    /// Returns whether the members have been told to leave.
    pub(super) const fn has_begun(&self) -> bool {
        self.departed.is_some()
    }

    /// Reports why the move cannot begin, unless it has begun.
    pub(super) fn stop(&mut self, why: String) {
        if !self.has_begun() {
            // The move cannot begin even if all members have already reported that they are ready.
            self.stopped.get_or_insert_with(|| why.clone());
            self.report(Err(why));
        }
    }

    /// Signals that all members have left, if they were told to.
    pub(super) fn finish(self) {
        if let Some(departed) = self.departed {
            // A failed send means that nobody waits for the move any more.
            departed.send(()).ok();
        }
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
