//! What a rank's threads share: the ops in flight, and what the sidecar has said.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::local::{Line, LineError, Sealed};
use racksum_proto::control::MAX_OPS;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::ids::{OpId, Rank};
use racksum_proto::loss::Loss;
use racksum_proto::time::{Span, Time};

use super::{Asked, Traffic};
use crate::engine::Stats;
use crate::error::{ConnectError, Error};
use crate::operand::Operand;
use crate::sidecar::lent::{AllLent, Lent};
use crate::sidecar::message::{Called, FromRank, FromSidecar, Outcome, VERSION};
use crate::sidecar::sums::Sums;
use crate::tensor::meet;

/// How often ops are looked for that the sidecar has not ended.
pub(super) const LOOK: Duration = Duration::from_millis(500);

/// What the client's threads share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    pub(super) lent: Arc<AllLent>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// What the sidecar has said about the job, until it begins.
    pub(super) waiting: Vec<u16>,
    pub(super) refused: Option<ConnectError>,
    pub(super) began: bool,
    next_op: u32,
    pub(super) flights: BTreeMap<u32, Flight>,
    /// How many of these have not ended.
    pub(super) in_flight: u16,
    /// Why there are no more ops.
    pub(super) over: Option<Over>,
    /// The sidecar was told that the rank leaves.
    left: bool,
    /// The sidecar has hung up.
    pub(super) gone: bool,
    /// What it has said of memory that was lent: why not, if it has not taken it.
    pub(super) answered: BTreeMap<u32, Option<String>>,
    /// How often it was asked what leaves the host, and has answered; and what it has said last.
    asked: u64,
    pub(super) told: u64,
    pub(super) stats: Stats,
    pub(super) traffic: Traffic,
    /// Memory that tensors were copied to, for those of later ops.
    pub(super) spare: Vec<Arc<Lent>>,
    /// Memory for the sums of a list.
    pub(super) recycled: Option<Vec<u8>>,
}

/// Why there are no more ops: what ended those in flight, and what is said of later ones.
#[derive(Debug, Clone)]
pub(super) struct Over {
    ended: OpError,
    pub(super) refused: Error,
}

/// An op that was not waited for yet.
#[derive(Debug)]
pub(super) struct Flight {
    /// Until it is waited for.
    operand: Option<Operand>,
    /// Where that is, if it is a tensor that stays where it is.
    extent: Range<usize>,
    /// Where it was copied to, if it does not lie in shared memory.
    copy: Option<Arc<Lent>>,
    is_copied: bool,
    /// What came of it: of lists, the sums.
    outcome: Option<Landed>,
    /// Nobody will wait for it.
    abandoned: bool,
    since: Time,
}

/// What came of an op.
type Landed = Result<Option<Sums>, OpError>;

impl Flight {
    pub(super) fn new(operand: Operand, copy: Option<Arc<Lent>>) -> Self {
        let extent = operand.extent();
        let (is_copied, since) = (copy.is_some(), Clock::start().now());
        let operand = Some(operand);
        Self { operand, extent, copy, is_copied, outcome: None, abandoned: false, since }
    }

    /// Writes the sums to the tensor of an op that nobody waits for, if they do not lie there.
    /// Returns how many bytes these are.
    fn deliver(&mut self) -> u64 {
        match (&self.outcome, &self.copy, &mut self.operand) {
            (Some(Ok(_)), Some(copy), Some(operand)) if operand.region().is_some() => {
                copy.read(operand.bytes_mut());
                operand.bytes().len() as u64
            }
            _ => 0,
        }
    }

    /// Whether somebody writes the sums to the tensor, for whom this is kept until they are there.
    const fn is_landing(&self) -> bool {
        self.is_copied && self.operand.is_none()
    }

    /// Takes what an op that has ended was started on, what that was copied to, and what came of
    /// it.
    pub(super) fn unload(&mut self) -> Option<(Operand, Option<Arc<Lent>>, Landed)> {
        let outcome = self.outcome.replace(Ok(None))?;
        Some((self.operand.take()?, self.copy.take(), outcome))
    }
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while something is so, but not longer than this.
    pub(super) fn wait(
        &self,
        limit: Duration,
        is_so: impl FnMut(&mut State) -> bool,
    ) -> MutexGuard<'_, State> {
        let waited = self.changed.wait_timeout_while(self.lock(), limit, is_so);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Takes what is left of an op. The lock is free when its tensor goes, which may be last to
    /// have some memory.
    pub(super) fn take(mut state: MutexGuard<'_, State>, op: u32) -> Option<Flight> {
        let flight = state.flights.remove(&op);
        drop(state);
        flight
    }

    /// Lets go of an op that nobody waits for, once it has ended.
    pub(super) fn abandon(&self, op: u32) {
        let mut state = self.lock();
        let Some(flight) = state.flights.get_mut(&op) else { return };
        flight.abandoned = true;
        if flight.outcome.is_some() {
            let copied = flight.deliver();
            state.traffic.copied_bytes += copied;
            drop(Self::take(state, op));
            // Another op may wait for the tensor.
            self.changed.notify_all();
        }
    }

    /// Hears the sidecar until it is gone, or has not ended an op for so long, although it has
    /// ended all before that have timed out: it does not run, or not all of it.
    pub(super) fn hear(&self, line: &Line, path: &Path, limit: Duration) {
        let mut looked = Clock::start().now();
        let why = loop {
            match line.recv() {
                Ok(Some((message, descriptor))) => self.take_in(message, descriptor, path),
                Ok(None) => break "it has hung up".to_owned(),
                // Nothing was said for a moment.
                Err(LineError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => break error.to_string(),
            }
            let now = Clock::start().now();
            if Duration::from_nanos(now.since(looked).0) >= LOOK {
                looked = now;
                if self.lock().has_late(now, limit) {
                    let limit = limit.as_millis();
                    break format!("it has not ended an op for {limit} ms; is it stopped?");
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
                state.refused = Some(ConnectError::SidecarVersion { speaks, own: VERSION });
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
                state.told += 1;
                state.stats = stats;
            }
            // It was not asked.
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

    /// Asks the sidecar what has left the host, unless it has to read other things first.
    pub(super) fn ask_stats(&self, line: &Line) -> Option<Asked> {
        let mut state = self.lock();
        // In the order of their numbers. The ear hears of a line that fails.
        line.offer(&FromRank::AskStats).unwrap_or(true).then(|| {
            state.asked += 1;
            Asked(state.asked)
        })
    }

    /// Ends the session but for what is in flight, and tells the sidecar so, unless it has to read
    /// other things first. Returns whether it was told.
    pub(super) fn take_leave(&self, line: &Line) -> bool {
        let mut state = self.lock();
        state.over.get_or_insert_with(|| Over::because("the client was closed"));
        // The ear hears of a line that fails.
        state.left = state.left || line.offer(&FromRank::Leave).unwrap_or(true);
        state.left
    }

    /// Ends the session, and what is in flight.
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

    /// Whether an op is in flight for longer than this.
    fn has_late(&self, now: Time, limit: Duration) -> bool {
        let oldest = self.flights.values().find(|flight| flight.outcome.is_none());
        oldest.is_some_and(|oldest| Duration::from_nanos(now.since(oldest.since).0) > limit)
    }

    /// Checks that one more op may be in flight.
    pub(super) fn check(&self) -> Result<(), Error> {
        if let Some(over) = &self.over {
            return Err(over.refused.clone());
        }
        if self.in_flight >= MAX_OPS {
            return Err(SubmitError::TooManyOps { max: MAX_OPS as usize }.into());
        }
        Ok(())
    }

    /// Whether so many more ops may be in flight, or none is taken any more.
    pub(super) fn has_room_for(&self, ops: usize) -> bool {
        let max = usize::from(MAX_OPS);
        self.over.is_some() || ops <= max.saturating_sub(usize::from(self.in_flight))
    }

    /// Whether an op in flight has some of this memory.
    pub(super) fn is_working_on(&self, extent: &Range<usize>) -> bool {
        let works = |flight: &Flight| flight.outcome.is_none() || flight.is_landing();
        self.flights.values().any(|flight| works(flight) && meet(&flight.extent, extent))
    }

    /// Writes the sums of ops that have ended, and were not waited for, to tensors in this memory.
    pub(super) fn deliver_to(&mut self, extent: &Range<usize>) {
        let meets = |flight: &&mut Flight| meet(&flight.extent, extent);
        for flight in self.flights.values_mut().filter(meets) {
            self.traffic.copied_bytes += flight.deliver();
            if flight.outcome.is_some() {
                self.spare.extend(flight.copy.take());
            }
        }
    }

    /// Notes an op that is started with so many bytes, and numbers it.
    ///
    /// # Errors
    /// As [`check`](Self::check): another thread may have taken the last place.
    pub(super) fn take_off(&mut self, flight: Flight, len: usize) -> Result<u32, Error> {
        self.check()?;
        let moved = match flight.is_copied {
            true => &mut self.traffic.copied_bytes,
            false => &mut self.traffic.shared_bytes,
        };
        *moved += len as u64;
        self.traffic.ops += 1;
        let op = self.next_op;
        self.next_op += 1;
        self.in_flight += 1;
        self.flights.insert(op, flight);
        Ok(op)
    }

    /// Notes what came of an op. Returns it if nobody waits for it.
    fn land(&mut self, op: u32, outcome: Result<Option<Sums>, OpError>) -> Option<Flight> {
        let flight = self.flights.get_mut(&op).filter(|flight| flight.outcome.is_none())?;
        flight.outcome = Some(outcome);
        self.in_flight -= 1;
        if !flight.abandoned {
            return None;
        }
        // No other op has the tensor until it is there.
        self.traffic.copied_bytes += flight.deliver();
        self.flights.remove(&op)
    }

    /// The smallest of the spare memory that has so many bytes.
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
    /// The same, of an op, with what came with it.
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
                None => {
                    Err(OpError::Ended { why: "its sums did not come: too many open files".into() })
                }
            },
            Self::Mismatch { one, other } => {
                Err(OpError::Mismatch { op, one: called(one)?, other: called(other)? })
            }
            Self::Overflow { element } => Err(OpError::Overflow { op, element }),
            Self::Timeout { after, missing } => {
                let after = Span::from_millis(after);
                let missing = missing.into_iter().map(|rank| (Rank(rank), after)).collect();
                Err(OpError::Timeout { op, after, missing, idle: after })
            }
        }
    }
}

/// What comes of an op when the sidecar says what it should not.
pub(super) const fn strange() -> OpError {
    OpError::Ended { why: Cow::Borrowed("the sidecar does not keep to the protocol") }
}
