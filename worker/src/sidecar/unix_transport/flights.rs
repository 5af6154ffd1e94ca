//! State that the threads of a rank share: the ops in flight, and the sidecar's messages.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::local::{Line, LineError, Sealed};
use racksum_proto::control::MAX_OPS;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::ids::{OpId, Rank};
use racksum_proto::loss::Loss;
use racksum_proto::stats::{SidecarStats, Stats};
use racksum_proto::time::{Span, Time};

use crate::error::{ConnectError, Error};
use crate::operand::Operand;
use crate::sidecar::lent::{AllLent, Lent};
use crate::sidecar::message::{Called, FromRank, FromSidecar, Outcome, VERSION};
use crate::sidecar::sums::Sums;
use crate::tensor::meet;

/// The interval between checks for late ops.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// State that the threads of a client share.
#[derive(Debug, Default)]
pub(super) struct Flights {
    state: Mutex<State>,
    changed: Condvar,
    pub(super) lent: Arc<AllLent>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// The ranks that had not joined at the sidecar's last report. The sidecar reports them only
    /// before the job begins.
    pub(super) waiting: Vec<u16>,
    pub(super) refused: Option<ConnectError>,
    pub(super) began: bool,
    next_op: u32,
    pub(super) flights: BTreeMap<u32, Flight>,
    /// The number of `flights` that have not ended.
    pub(super) in_flight: u16,
    /// The errors to return once no more ops can start.
    pub(super) over: Option<Over>,
    /// Whether the `Leave` message was sent, or can no longer be sent.
    left: bool,
    /// Whether the line to the sidecar is closed.
    pub(super) gone: bool,
    /// The sidecar's answers about lent memory, by memory number: `None` if accepted, otherwise the
    /// reason for the refusal.
    pub(super) answered: BTreeMap<u32, Option<String>>,
    /// The number of queries for traffic statistics. `stats_answered` counts the answers, and
    /// `network` holds the latest.
    asked: u64,
    pub(super) stats_answered: u64,
    pub(super) network: Stats,
    pub(super) stats: SidecarStats,
    /// Lent memory that held the copies of earlier operands, kept for later ops.
    pub(super) spare: Vec<Arc<Lent>>,
    /// Recycled memory for the sums of the next list.
    pub(super) recycled: Option<Vec<u8>>,
}

/// The errors after the end of the session: `ended` for ops in flight, `refused` for later ops.
#[derive(Debug, Clone)]
pub(super) struct Over {
    ended: OpError,
    pub(super) refused: Error,
}

/// An op that has not ended, or whose handle a caller still holds.
#[derive(Debug)]
pub(super) struct Flight {
    /// The operand, until a waiting caller takes it.
    operand: Option<Operand>,
    /// The operand's addresses if it is a tensor that stays in place; otherwise empty.
    extent: Range<usize>,
    /// The copy of the operand, if the operand is not in shared memory.
    copy: Option<Arc<Lent>>,
    is_copied: bool,
    /// The outcome once the op has ended, with the sums of an op on lists.
    outcome: Option<Landed>,
    /// The task that awaits the op.
    waker: Option<Waker>,
    /// Whether no caller will wait for the op.
    abandoned: bool,
    since: Time,
}

/// The outcome of an op.
type Landed = Result<Option<Sums>, OpError>;

impl Flight {
    pub(super) fn new(operand: Operand, copy: Option<Arc<Lent>>) -> Self {
        let extent = operand.extent();
        let (is_copied, since) = (copy.is_some(), Clock::start().now());
        let operand = Some(operand);
        let (outcome, waker, abandoned) = (None, None, false);
        Self { operand, extent, copy, is_copied, outcome, waker, abandoned, since }
    }

    /// Copies the sums of a successful op from shared memory to the caller's tensor, if the tensor
    /// is elsewhere. Returns the number of bytes copied.
    fn deliver(&mut self) -> u64 {
        match (&self.outcome, &self.copy, &mut self.operand) {
            (Some(Ok(_)), Some(copy), Some(operand)) if operand.region().is_some() => {
                copy.read(operand.bytes_mut());
                operand.len() as u64
            }
            _ => 0,
        }
    }

    /// Returns whether a waiting thread is still copying the sums to the tensor. The flight stays
    /// registered until the thread is done.
    const fn is_landing(&self) -> bool {
        self.is_copied && self.operand.is_none()
    }

    /// Takes the operand, its copy and the outcome of an ended op.
    pub(super) fn unload(&mut self) -> Option<(Operand, Option<Arc<Lent>>, Landed)> {
        let outcome = self.outcome.replace(Ok(None))?;
        Some((self.operand.take()?, self.copy.take(), outcome))
    }
}

impl Flights {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while `is_so` returns true, but no longer than `limit`.
    pub(super) fn wait(
        &self,
        limit: Duration,
        is_so: impl FnMut(&mut State) -> bool,
    ) -> MutexGuard<'_, State> {
        let waited = self.changed.wait_timeout_while(self.lock(), limit, is_so);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Removes an op and releases the lock. The caller then drops the tensor without the lock,
    /// because the tensor may own the last reference to its memory, and freeing the memory may
    /// block.
    pub(super) fn take(mut state: MutexGuard<'_, State>, op: u32) -> Option<Flight> {
        let flight = state.flights.remove(&op);
        drop(state);
        flight
    }

    /// Abandons an op that no caller will wait for. Removes the op immediately if it has already
    /// ended.
    pub(super) fn abandon(&self, op: u32) {
        let mut state = self.lock();
        let Some(flight) = state.flights.get_mut(&op) else { return };
        flight.abandoned = true;
        if flight.outcome.is_some() {
            let copied = flight.deliver();
            state.stats.copied_bytes += copied;
            drop(Self::take(state, op));
            // A new op may be waiting for the tensor.
            self.changed.notify_all();
        }
    }

    /// Receives the sidecar's messages until the line fails, or until an op has been in flight for
    /// longer than `limit`. A working sidecar ends every op earlier, so the sidecar is then
    /// suspended or stuck.
    pub(super) fn receive(&self, line: &Line, path: &Path, limit: Duration) {
        let mut checked_at = Clock::start().now();
        let why = loop {
            match line.recv() {
                Ok(Some((message, descriptor))) => self.take_in(message, descriptor, path),
                Ok(None) => break "it closed the connection".to_owned(),
                // No message arrived within the receive timeout of the line.
                Err(LineError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => break error.to_string(),
            }
            let now = Clock::start().now();
            if Duration::from_nanos(now.since(checked_at).0) >= CHECK_INTERVAL {
                checked_at = now;
                if self.lock().has_late(now, limit) {
                    let limit = limit.as_millis();
                    break format!(
                        "it has left an op unfinished for {limit} ms; its process may be suspended"
                    );
                }
            }
        };
        line.hang_up();
        self.lock().gone = true;
        self.end(Over::gone(path, &why));
    }

    fn take_in(&self, message: FromSidecar, descriptor: Option<OwnedFd>, path: &Path) {
        let mut state = self.lock();
        match message {
            FromSidecar::WrongVersion { speaks } => {
                state.refused = Some(ConnectError::SidecarVersion { theirs: speaks, own: VERSION });
            }
            FromSidecar::Refused { reason } => {
                state.refused = Some(ConnectError::SidecarRefused(reason));
            }
            FromSidecar::NotJoined(why) => state.refused = Some(why.into()),
            FromSidecar::Waiting { missing } => state.waiting = missing,
            FromSidecar::Ready => state.began = true,
            FromSidecar::Lent { memory, refused } => {
                state.answered.insert(memory, refused);
            }
            FromSidecar::Stats(stats) => {
                state.stats_answered += 1;
                state.network = stats;
            }
            // A rank never asks for the status.
            FromSidecar::Status { .. } => {}
            FromSidecar::Ended { op, outcome } => {
                let abandoned = state.land(op, outcome.of(op, descriptor));
                drop(state);
                drop(abandoned);
                return self.changed.notify_all();
            }
            FromSidecar::Lost { ranks, why } => {
                drop(state);
                return self.end(Over::lost(ranks, why));
            }
            FromSidecar::CutOff { why } => {
                drop(state);
                return self.end(Over::gone(path, &why));
            }
            FromSidecar::TimedOut => {
                drop(state);
                return self.end(Over::because("an op timed out"));
            }
            FromSidecar::Superseded { why } => {
                drop(state);
                return self.end(Over::because(why));
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Asks the sidecar for traffic statistics. Returns the query's number, or `None` if the
    /// sidecar's queue is full.
    pub(super) fn ask_stats(&self, line: &Line) -> Option<u64> {
        let mut state = self.lock();
        // Send under the lock, so that queries are sent in the order of their numbers. Ignore an
        // error: the receiving thread handles a failed line.
        line.offer(&FromRank::AskStats).unwrap_or(true).then(|| {
            state.asked += 1;
            state.asked
        })
    }

    /// Stops accepting ops, and informs the sidecar that the rank is leaving. Ops in flight
    /// continue. Returns false if the message was not sent because the sidecar's queue is full.
    pub(super) fn take_leave(&self, line: &Line) -> bool {
        let mut state = self.lock();
        state.over.get_or_insert_with(|| Over::because("the client was closed"));
        // The receiving thread handles a failed line.
        state.left = state.left || line.offer(&FromRank::Leave).unwrap_or(true);
        state.left
    }

    /// Ends the session and every op in flight.
    pub(super) fn end(&self, over: Over) {
        let mut state = self.lock();
        let over = state.over.get_or_insert(over).clone();
        if !state.began && state.refused.is_none() {
            state.refused = Some(match &over.ended {
                OpError::NoAggregator { tried } => ConnectError::NoAggregator(tried.clone()),
                ended => ConnectError::SidecarRefused(ended.to_string()),
            });
        }
        let ops: Vec<u32> = state.flights.keys().copied().collect();
        let landed: Vec<_> =
            ops.into_iter().map(|op| state.land(op, Err(over.ended.clone()))).collect();
        drop(state);
        drop(landed);
        self.changed.notify_all();
    }
}

impl State {
    pub(super) fn has_ended(&self, op: u32) -> bool {
        self.flights.get(&op).is_none_or(|flight| flight.outcome.is_some())
    }

    /// Returns whether an op has ended. If not, wakes `waker` when it ends.
    pub(super) fn poll_ended(&mut self, op: u32, waker: &Waker) -> bool {
        let running = self.flights.get_mut(&op).filter(|flight| flight.outcome.is_none());
        let Some(running) = running else { return true };
        running.waker = Some(waker.clone());
        false
    }

    /// Returns whether an op has been in flight for longer than `limit`.
    fn has_late(&self, now: Time, limit: Duration) -> bool {
        let oldest = self.flights.values().find(|flight| flight.outcome.is_none());
        oldest.is_some_and(|oldest| Duration::from_nanos(now.since(oldest.since).0) > limit)
    }

    /// Checks that the session is not over and that there is room for one more op.
    pub(super) fn check(&self) -> Result<(), Error> {
        if let Some(over) = &self.over {
            return Err(over.refused.clone());
        }
        if self.in_flight >= MAX_OPS {
            return Err(SubmitError::TooManyOps { max: MAX_OPS as usize }.into());
        }
        Ok(())
    }

    /// Returns whether there is room for `ops` more ops in flight. Also returns true after the
    /// session has ended, because it then refuses every op immediately.
    pub(super) fn has_room_for(&self, ops: usize) -> bool {
        let max = usize::from(MAX_OPS);
        self.over.is_some() || ops <= max.saturating_sub(usize::from(self.in_flight))
    }

    /// Returns whether an op in flight uses some of this memory, or a waiting thread is still
    /// copying sums to it.
    pub(super) fn is_working_on(&self, extent: &Range<usize>) -> bool {
        let works = |flight: &Flight| flight.outcome.is_none() || flight.is_landing();
        self.flights.values().any(|flight| works(flight) && meet(&flight.extent, extent))
    }

    /// Copies the sums of ended ops to their tensors in this memory, if no caller has taken the
    /// sums.
    pub(super) fn deliver_to(&mut self, extent: &Range<usize>) {
        let meets = |flight: &&mut Flight| meet(&flight.extent, extent);
        for flight in self.flights.values_mut().filter(meets) {
            self.stats.copied_bytes += flight.deliver();
            if flight.outcome.is_some() {
                self.spare.extend(flight.copy.take());
            }
        }
    }

    /// Registers a new op on `len` bytes, and returns its number.
    ///
    /// # Errors
    /// Returns an error of [`check`](Self::check): another thread may have started an op since the
    /// caller's own check.
    pub(super) fn take_off(&mut self, flight: Flight, len: usize) -> Result<u32, Error> {
        self.check()?;
        let moved = match flight.is_copied {
            true => &mut self.stats.copied_bytes,
            false => &mut self.stats.shared_bytes,
        };
        *moved += len as u64;
        self.stats.ops += 1;
        let op = self.next_op;
        self.next_op += 1;
        self.in_flight += 1;
        self.flights.insert(op, flight);
        Ok(op)
    }

    /// Records the outcome of an op. Removes and returns the flight if no caller will wait for the
    /// op.
    fn land(&mut self, op: u32, outcome: Result<Option<Sums>, OpError>) -> Option<Flight> {
        let flight = self.flights.get_mut(&op).filter(|flight| flight.outcome.is_none())?;
        flight.outcome = Some(outcome);
        flight.waker.take().into_iter().for_each(Waker::wake);
        self.in_flight -= 1;
        if !flight.abandoned {
            return None;
        }
        // No other op may use the tensor before the sums are in it.
        self.stats.copied_bytes += flight.deliver();
        self.flights.remove(&op)
    }

    /// Takes the smallest spare memory of at least `len` bytes.
    pub(super) fn take_spare(&mut self, len: usize) -> Option<Arc<Lent>> {
        let fits = self.spare.iter().enumerate().filter(|(_, spare)| spare.len() >= len);
        let (found, _) = fits.min_by_key(|(_, spare)| spare.len())?;
        Some(self.spare.swap_remove(found))
    }
}

impl Over {
    pub(super) fn because(why: impl Into<Cow<'static, str>>) -> Self {
        let why = why.into();
        let refused = SubmitError::Ended { why: why.clone() }.into();
        Self { ended: OpError::Ended { why }, refused }
    }

    fn lost(ranks: Vec<u16>, why: Loss) -> Self {
        let ranks: Vec<Rank> = ranks.into_iter().map(Rank).collect();
        Self {
            ended: OpError::PeerLost { ranks: ranks.clone(), why },
            refused: SubmitError::PeerLost { ranks, why }.into(),
        }
    }

    fn gone(path: &Path, why: &str) -> Self {
        let tried = format!("the sidecar at {}: {why}", path.display());
        let ended = OpError::NoAggregator { tried };
        Self { refused: ended.clone().into(), ended }
    }
}

impl Outcome {
    /// Converts a received outcome to the op's result. `descriptor` is the file with the op's sums,
    /// if any.
    fn of(self, op: u32, descriptor: Option<OwnedFd>) -> Result<Option<Sums>, OpError> {
        let op = OpId(op);
        let called = |called: Called| {
            let descriptor = Descriptor::decode(&called.descriptor).map_err(|_| strange())?;
            Ok((Rank(called.rank), descriptor))
        };
        match self {
            Self::Reduced => Ok(None),
            Self::Union { blocks } => match descriptor {
                Some(descriptor) => Ok(Some(Sums::received(Sealed::of(descriptor), blocks))),
                None => Err(OpError::Ended {
                    why: "the sums of an op did not arrive: too many files are open or in flight; \
                          raise the limit on open files (ulimit -n)"
                        .into(),
                }),
            },
            Self::Mismatch { one, other } => {
                Err(OpError::Mismatch { op, one: called(one)?, other: called(other)? })
            }
            Self::Dropped => Err(OpError::Dropped { op }),
            Self::Overflow { element } => Err(OpError::Overflow { op, element }),
            Self::Timeout { after, missing } => {
                let after = Span::from_millis(after);
                let missing = missing.into_iter().map(|rank| (Rank(rank), after)).collect();
                Err(OpError::Timeout { op, after, missing, idle: after })
            }
        }
    }
}

/// Returns the error of an op after the sidecar has violated the protocol.
pub(super) const fn strange() -> OpError {
    OpError::Ended { why: Cow::Borrowed("the sidecar violated the protocol") }
}
