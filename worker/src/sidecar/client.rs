//! A rank's end of a sidecar.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use racksum_net::local::Line;
use racksum_proto::control::{Loss, MAX_OPS};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::ids::{OpId, Rank};
use racksum_proto::time::Span;

use super::lent::{AllLent, Lent};
use super::message::{Called, FromRank, FromSidecar, Join, Outcome, VERSION};
use crate::error::{ConnectError, Error};
use crate::operand::check_len;
use crate::options::ConnectOptions;
use crate::tensor::Region;

/// How long a sidecar may take to let a rank go.
const PARTING: Duration = Duration::from_secs(1);

/// A rank of a job whose ranks have a sidecar. Ops end in any order; each rank must start the same
/// ops in the same order.
#[derive(Debug)]
pub struct Client {
    pub(super) line: Arc<Line>,
    lanes: u8,
    shared: Arc<Shared>,
    /// Hears the sidecar.
    ear: Option<JoinHandle<()>>,
}

/// What the client's threads share.
#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    lent: Arc<AllLent>,
}

#[derive(Debug, Default)]
struct State {
    /// What the sidecar has said about the job, until it begins.
    waiting: Vec<u16>,
    refused: Option<ConnectError>,
    began: bool,
    next_op: u32,
    flights: HashMap<u32, Flight>,
    /// How many of these have not ended.
    in_flight: u16,
    /// Why there are no more ops.
    over: Option<Over>,
    /// The sidecar has hung up.
    gone: bool,
    /// Memory that tensors were copied to, for those of later ops.
    spare: Vec<Arc<Lent>>,
}

/// Why there are no more ops: what ended those in flight, and what is said of later ones.
#[derive(Debug, Clone)]
struct Over {
    ended: OpError,
    refused: Error,
}

/// An op that was not waited for yet.
#[derive(Debug)]
struct Flight {
    region: Region,
    /// Where its tensor was copied to, if it does not lie in shared memory.
    copy: Option<Arc<Lent>>,
    outcome: Option<Result<(), OpError>>,
    /// Nobody will wait for it.
    abandoned: bool,
}

/// An op in flight. If it is dropped, the op goes on, since the other ranks need it.
#[derive(Debug)]
#[must_use = "an op's result is had by waiting for it"]
pub struct Handle {
    op: u32,
    client: Weak<Shared>,
}

impl Client {
    /// Calls the sidecar at a path, and asks to be a rank.
    ///
    /// # Errors
    /// [`ConnectError::NoSidecar`].
    pub fn call(
        path: &Path,
        options: &ConnectOptions,
        local_world: u16,
    ) -> Result<Self, ConnectError> {
        let none = |why: &dyn std::fmt::Display| ConnectError::NoSidecar {
            path: path.to_owned(),
            why: why.to_string(),
        };
        let line = Arc::new(Line::connect(path).map_err(|error| none(&error))?);
        let join = Join {
            version: VERSION,
            job: options.job.clone(),
            generation: options.generation,
            rank: options.rank,
            world: options.world,
            local_world,
            lanes: options.lanes,
            op_timeout: u64::try_from(options.op_timeout.as_millis()).unwrap_or(u64::MAX),
        };
        line.send(&FromRank::Join(join), None).map_err(|error| none(&error))?;
        let shared = Arc::new(Shared::default());
        let mut client = Self {
            line: Arc::clone(&line),
            lanes: options.lanes,
            shared: Arc::clone(&shared),
            ear: None,
        };
        let path = path.to_owned();
        let hear = move || shared.hear(&line, &path);
        client.ear = Some(std::thread::Builder::new().name("racksum-ear".into()).spawn(hear)?);
        Ok(client)
    }

    /// Waits until all ranks have joined, but not longer than this. Returns whether they have.
    ///
    /// # Errors
    /// Why the job cannot be joined.
    pub fn is_ready_within(&self, limit: Duration) -> Result<bool, ConnectError> {
        let waits = |state: &mut State| !state.began && state.refused.is_none();
        let mut state = self.shared.wait(limit, waits);
        match state.refused.take() {
            Some(refused) => Err(refused),
            None => Ok(state.began),
        }
    }

    /// The ranks that had not joined when the sidecar said so last.
    #[must_use]
    pub fn missing(&self) -> Vec<u16> {
        self.shared.lock().waiting.clone()
    }

    /// Memory that the sidecar has too.
    ///
    /// # Errors
    /// The kernel's, when there is not so much.
    pub fn lend(&self, len: usize) -> io::Result<Arc<Lent>> {
        self.shared.lent.lend(len, &self.line)
    }

    /// Starts reducing a tensor in place with the same tensors of all other ranks. What does not
    /// lie in memory that was [lent](Self::lend) is copied.
    ///
    /// # Errors
    /// Why the op was not taken: [`SubmitError::TooManyOps`] until
    /// [`has_room_within`](Self::has_room_within) says otherwise.
    pub fn submit(&self, region: Region, descriptor: Descriptor) -> Result<Handle, Error> {
        descriptor.validate().map_err(SubmitError::from)?;
        if descriptor.lane >= self.lanes {
            let (lane, lanes) = (descriptor.lane, self.lanes);
            return Err(SubmitError::NoSuchLane { lane, lanes }.into());
        }
        check_len(region.len(), &descriptor)?;
        self.check_room()?;
        let (copy, id, at) = self.place(&region)?;
        let mut state = self.shared.lock();
        if let Some(over) = &state.over {
            return Err(over.refused.clone());
        }
        let Called { descriptor, .. } = Called::new(0, &descriptor);
        // The ear hears of a line that fails.
        drop(self.line.send(&FromRank::Submit { descriptor, memory: id, at }, None));
        let op = state.next_op;
        state.next_op += 1;
        state.in_flight += 1;
        state.flights.insert(op, Flight { region, copy, outcome: None, abandoned: false });
        Ok(Handle { op, client: Arc::downgrade(&self.shared) })
    }

    fn check_room(&self) -> Result<(), SubmitError> {
        match self.shared.lock().in_flight < MAX_OPS {
            true => Ok(()),
            false => Err(SubmitError::TooManyOps { max: MAX_OPS.into() }),
        }
    }

    /// Finds where a tensor lies in memory that was lent, or copies it there.
    fn place(&self, region: &Region) -> Result<(Option<Arc<Lent>>, u32, u64), Error> {
        let bytes = region.bytes(0..region.len());
        if let Some((lent, at)) = self.shared.lent.find(bytes) {
            return Ok((None, lent.id(), at as u64));
        }
        let copy = match self.shared.lock().take_spare(bytes.len()) {
            Some(spare) => spare,
            None => self.lend(bytes.len()).map_err(|error| Error::Memory(error.to_string()))?,
        };
        copy.write(bytes);
        let id = copy.id();
        Ok((Some(copy), id, 0))
    }

    /// Waits for an op to end: its tensor is reduced then.
    ///
    /// # Errors
    /// Why it is not; it then holds sums in some places and not in others.
    pub fn wait(&self, handle: Handle) -> Result<Region, Error> {
        self.check_own(&handle)?;
        let op = handle.op;
        let state = self.shared.wait(Duration::MAX, |state| !state.has_ended(op));
        let Some(mut flight) = Shared::take(state, op) else { return Err(Error::OtherClient) };
        flight.outcome.take().unwrap_or(Ok(()))?;
        if let Some(copy) = flight.copy.take() {
            let len = flight.region.len();
            copy.read(flight.region.bytes_mut(0..len));
            self.shared.lock().spare.push(copy);
        }
        Ok(flight.region)
    }

    /// Waits for an op to end, but not longer than this. Returns whether it has.
    ///
    /// # Errors
    /// [`Error::OtherClient`] when another client started the op.
    pub fn ends_within(&self, handle: &Handle, limit: Duration) -> Result<bool, Error> {
        self.check_own(handle)?;
        let state = self.shared.wait(limit, |state| !state.has_ended(handle.op));
        Ok(state.has_ended(handle.op))
    }

    /// Waits until one more op may be in flight, but not longer than this. Returns whether it may.
    #[must_use]
    pub fn has_room_within(&self, limit: Duration) -> bool {
        self.shared.wait(limit, |state| state.in_flight >= MAX_OPS).in_flight < MAX_OPS
    }

    fn check_own(&self, handle: &Handle) -> Result<(), Error> {
        match std::ptr::eq(handle.client.as_ptr(), Arc::as_ptr(&self.shared)) {
            true => Ok(()),
            false => Err(Error::OtherClient),
        }
    }

    /// Leaves the job: what is in flight fails. The sidecar has let the rank go when this returns,
    /// unless it is stuck, so that the rank may join again.
    pub fn close(&self) {
        self.shared.end(Over::because("the client was closed"));
        // A sidecar that is gone needs no word.
        if self.line.send(&FromRank::Leave, None).is_ok() {
            drop(self.shared.wait(PARTING, |state| !state.gone));
        }
        self.line.hang_up();
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.close();
        if let Some(ear) = self.ear.take() {
            // A panic was printed where it happened.
            drop(ear.join());
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let Some(shared) = self.client.upgrade() else { return };
        let mut state = shared.lock();
        let flight = state.flights.get_mut(&self.op);
        if flight.is_some_and(|flight| {
            flight.abandoned = true;
            flight.outcome.is_some()
        }) {
            drop(Shared::take(state, self.op));
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while something is so, but not longer than this.
    fn wait(
        &self,
        limit: Duration,
        is_so: impl FnMut(&mut State) -> bool,
    ) -> MutexGuard<'_, State> {
        let waited = self.changed.wait_timeout_while(self.lock(), limit, is_so);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Takes what is left of an op. The lock is free when its tensor goes, which may be last to
    /// have some memory.
    fn take(mut state: MutexGuard<'_, State>, op: u32) -> Option<Flight> {
        let flight = state.flights.remove(&op);
        drop(state);
        flight
    }

    /// Hears the sidecar until it is gone.
    fn hear(&self, line: &Line, path: &Path) {
        let why = loop {
            match line.recv() {
                Ok(Some((message, _))) => self.take_in(message, path),
                Ok(None) => break "it has hung up".to_owned(),
                Err(error) => break error.to_string(),
            }
        };
        self.lock().gone = true;
        self.end(Over::gone(path, &why));
    }

    fn take_in(&self, message: FromSidecar, path: &Path) {
        let mut state = self.lock();
        match message {
            FromSidecar::WrongVersion { speaks } => {
                state.refused = Some(ConnectError::SidecarVersion { speaks, own: VERSION });
            }
            FromSidecar::Refused { reason } => {
                state.refused = Some(ConnectError::SidecarRefused(reason));
            }
            FromSidecar::Waiting { missing } => state.waiting = missing,
            FromSidecar::Ready => state.began = true,
            FromSidecar::Ended { op, outcome } => {
                let abandoned = state.land(op, outcome.of(op));
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
            FromSidecar::Superseded => {
                drop(state);
                return self.end(Over::because("a greater generation of the job has begun"));
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Ends the session, and what is in flight.
    fn end(&self, over: Over) {
        let mut state = self.lock();
        if !state.began && state.refused.is_none() {
            state.refused = Some(ConnectError::SidecarRefused(over.ended.to_string()));
        }
        let ops: Vec<u32> = state.flights.keys().copied().collect();
        let landed: Vec<_> =
            ops.into_iter().map(|op| state.land(op, Err(over.ended.clone()))).collect();
        state.over.get_or_insert(over);
        drop(state);
        drop(landed);
        self.changed.notify_all();
    }
}

impl State {
    fn has_ended(&self, op: u32) -> bool {
        self.flights.get(&op).is_none_or(|flight| flight.outcome.is_some())
    }

    /// Notes what came of an op. Returns it if nobody waits for it.
    fn land(&mut self, op: u32, outcome: Result<(), OpError>) -> Option<Flight> {
        let flight = self.flights.get_mut(&op).filter(|flight| flight.outcome.is_none())?;
        flight.outcome = Some(outcome);
        self.in_flight -= 1;
        if flight.abandoned { self.flights.remove(&op) } else { None }
    }

    /// The smallest of the spare memory that has so many bytes.
    fn take_spare(&mut self, len: usize) -> Option<Arc<Lent>> {
        let fits = self.spare.iter().enumerate().filter(|(_, spare)| spare.len() >= len);
        let (found, _) = fits.min_by_key(|(_, spare)| spare.len())?;
        Some(self.spare.swap_remove(found))
    }
}

impl Over {
    fn because(why: &'static str) -> Self {
        Self { ended: OpError::Ended { why }, refused: SubmitError::Ended { why }.into() }
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
    /// The same, of an op.
    fn of(self, op: u32) -> Result<(), OpError> {
        let op = OpId(op);
        let called = |called: Called| {
            let descriptor = Descriptor::decode(&called.descriptor).ok()?;
            Some((Rank(called.rank), descriptor))
        };
        match self {
            Self::Reduced => Ok(()),
            Self::Mismatch { one, other } => match (called(one), called(other)) {
                (Some(one), Some(other)) => Err(OpError::Mismatch { op, one, other }),
                _ => Err(OpError::Ended { why: "the sidecar does not keep to the protocol" }),
            },
            Self::Overflow { element } => Err(OpError::Overflow { op, element }),
            Self::Timeout { after, missing } => Err(OpError::Timeout {
                op,
                after: Span::from_millis(after),
                missing: missing
                    .into_iter()
                    .map(|rank| (Rank(rank), Span::from_millis(after)))
                    .collect(),
                idle: Span::from_millis(after),
            }),
        }
    }
}
