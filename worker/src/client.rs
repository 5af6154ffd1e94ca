//! The client: what a training process holds.

use std::borrow::Cow;
use std::marker::PhantomData;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::log_limit::LogLimit;
use racksum_proto::call::Call;
use racksum_proto::control::{Absent, Welcome};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::WireType;
use racksum_proto::error::SubmitError;
use racksum_proto::ids::{OpId, Rank};
use racksum_proto::loss::Loss;
use racksum_proto::time::Span;

use crate::blocks::Blocks;
use crate::control::{Awaited, Closed, ControlSenders, Mailbox, Message};
use crate::driver::{Driver, State};
use crate::engine::{Engine, Finished, Stats};
use crate::error::{ConnectError, Error};
use crate::exponents::{self, Exponents, agreement};
use crate::grant::{Granted, grant};
use crate::operand::Operand;
use crate::options::ConnectOptions;
use crate::payload::{Data, Payload};
use crate::span::span;
use crate::supervisor::{Supervisor, join_first};
use crate::tensor::lend;

/// A rank of a job. Ops end in any order; each rank must start the same ops in the same order.
///
/// The thread that waits for an op drives the sockets, so that a blocking call costs no hand-over
/// between threads; a thread of the client drives ops that nobody waits for. Where others may move
/// and this rank may not, it also acknowledges between ops, and each call costs two hand-overs.
#[derive(Debug)]
pub struct Client {
    shared: Arc<Driver>,
    welcome: Welcome,
    shards: usize,
    multicast: bool,
    op_timeout: Span,
    /// Whose turn it is to start an op, where starting one takes several.
    turn: Mutex<()>,
    /// What its aggregators hear.
    senders: ControlSenders,
    /// Ends the session.
    stop: Sender<Message>,
    threads: Vec<JoinHandle<()>>,
}

/// What came of an op.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reduced<T> {
    /// The reduced tensor, or nothing where it is the caller's.
    pub tensor: T,
    /// The ranks that were lost before they had contributed to all of it, in ascending order:
    /// empty but in a job with [`OnRankLoss::Continue`](racksum_proto::control::OnRankLoss). All
    /// others have contributed.
    pub absent: Vec<Rank>,
}

/// An op in flight. If it is dropped, the op goes on, since the other ranks need it, but what it
/// worked on is freed once it ends.
#[derive(Debug)]
#[must_use = "an op's result is had by waiting for it"]
pub struct Handle<T> {
    op: OpId,
    /// Whose op it is. Not kept alive by it: a client that is closed has no ops.
    client: Weak<Driver>,
    result: PhantomData<fn() -> T>,
}

impl<T> Drop for Handle<T> {
    fn drop(&mut self) {
        if let Some(shared) = self.client.upgrade() {
            shared.lock().engine.abandon(self.op);
        }
    }
}

impl Client {
    /// Joins a job; returns once all its ranks have.
    ///
    /// # Errors
    /// Why the job could not be joined, or did not become complete in time.
    pub fn connect(options: &ConnectOptions) -> Result<Self, ConnectError> {
        Connecting::new().run(options)
    }

    fn join(options: &ConnectOptions, mut mailbox: Mailbox) -> Result<Self, ConnectError> {
        if options.insecure {
            INSECURE.note(|left_out| {
                let what = "whoever answers at the aggregator's address is believed";
                tracing::warn!(left_out, "insecure: {what}");
            });
        }
        let stop = mailbox.sender();
        let (at, session) = join_first(options, &mut mailbox)?;
        let Granted { config, links, welcome, membership } = grant(options, session)?;
        let (multicast, shards) = (!links.groups.is_empty(), links.shards.len());
        let engine = Engine::new(config, options.world, links, Clock::start(), &options.faults);
        let shared = Arc::new(Driver::new(engine)?);
        let op_timeout = span(options.op_timeout);
        let (turn, threads) = (Mutex::default(), Vec::new());
        let senders = ControlSenders::default();
        senders.set(&membership.controls);
        let mut client =
            Self { shared, welcome, shards, multicast, op_timeout, turn, senders, stop, threads };
        let driver = Arc::clone(&client.shared);
        client.threads.push(spawn("racksum-drive", move || driver.drive_in_background())?);
        let (shared, options) = (Arc::clone(&client.shared), options.clone());
        let (senders, absent) = (client.senders.clone(), Vec::new());
        let supervisor = Supervisor { options, at, membership, senders, absent, mailbox, shared };
        client.threads.push(spawn("racksum-session", move || supervisor.run())?);
        Ok(client)
    }

    /// Reduces `tensor` in place with the same tensors of all other ranks, and waits for it.
    ///
    /// # Errors
    /// Why there is no result; the tensor then holds sums in some places and not in others.
    pub fn allreduce(
        &self,
        tensor: &mut [u8],
        descriptor: Descriptor,
    ) -> Result<Reduced<()>, Error> {
        let (loan, region) = lend(tensor);
        let (state, op) = self.start(descriptor, region.into(), self.op_timeout, |_| {})?;
        let mut state = self.shared.await_that(state, |state| !state.engine.is_in_flight(op));
        let Finished { result, absent, payload } = state.engine.take(op).ok_or(GONE)?;
        drop(state);
        drop((payload, loan));
        Ok(result.map(|()| Reduced { tensor: (), absent })?)
    }

    /// Starts reducing a tensor, or some blocks of one as if all others, and those of them that are
    /// zero, were zero in it. The op owns what is given until `wait` returns it. Ops on the same
    /// memory take turns in the order of the calls: each begins when those before it have ended.
    ///
    /// A call that this rank refuses has its number all the same, and the ranks that did not refuse
    /// it hear of a mismatch.
    ///
    /// Where aggregators sum in a tree, an op with [`WireType::Fixed32`] starts once all ranks have
    /// called it, since they must agree on its exponents first: until then this waits, and what
    /// becomes of that is an error of this call.
    ///
    /// [`WireType::Fixed32`]: racksum_proto::dtype::WireType::Fixed32
    ///
    /// # Errors
    /// Why the op was not taken: [`SubmitError::TooManyOps`] until
    /// [`has_room_within`](Self::has_room_within) says otherwise.
    pub fn submit<T: Into<Operand>>(
        &self,
        operand: T,
        descriptor: Descriptor,
    ) -> Result<Handle<T>, Error> {
        let (state, op) = self.start(descriptor, operand.into(), self.op_timeout, |_| {})?;
        self.shared.set_off(state);
        Ok(self.handle(op))
    }

    /// The same of what several ranks have come to, which sends these blocks and no others: a block
    /// that is zero now may have been other than zero at some of them. So much of the op's time is
    /// spent already.
    pub(crate) fn submit_folded<T: Into<Operand>>(
        &self,
        operand: T,
        descriptor: Descriptor,
        blocks: impl Iterator<Item = u32>,
        spent: Span,
    ) -> Result<Handle<T>, Error> {
        let send = |payload: &mut Payload| payload.send_these(blocks);
        let left = Span(self.op_timeout.0.saturating_sub(spent.0));
        let (state, op) = self.start(descriptor, operand.into(), left, send)?;
        self.shared.set_off(state);
        Ok(self.handle(op))
    }

    /// Opens an op of nothing in the place of a call that the caller refuses, so that the ops of
    /// all ranks stay in step: ranks that made the call hear [`OpError::Mismatch`] of it.
    ///
    /// [`OpError::Mismatch`]: racksum_proto::error::OpError::Mismatch
    ///
    /// # Errors
    /// Why the op was not taken, as [`submit`](Self::submit).
    pub fn refuse(&self, call: Call) -> Result<(), Error> {
        let _turn = self.take_turn();
        self.refuse_in_turn(call)
    }

    fn refuse_in_turn(&self, call: Call) -> Result<(), Error> {
        // wire: W-70
        let mut state = self.shared.lock();
        let payload = state.engine.payload(Descriptor::refused(call), Data::Owned(Vec::new()));
        let op = state.submit(|engine| engine.submit(payload, self.op_timeout))?;
        state.engine.abandon(op);
        self.shared.set_off(state);
        Ok(())
    }

    /// All ranks number their ops alike: in a tree none comes between an op and the one before it
    /// that finds its exponents.
    fn take_turn(&self) -> Option<MutexGuard<'_, ()>> {
        let turn = || self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.welcome.in_tree.then(turn)
    }

    /// Starts an op that may take so long. One that this rank refuses is numbered all the same.
    fn start(
        &self,
        descriptor: Descriptor,
        operand: Operand,
        timeout: Span,
        prepare: impl FnOnce(&mut Payload),
    ) -> Result<(MutexGuard<'_, State>, OpId), Error> {
        let _turn = self.take_turn();
        match self.start_in_turn(descriptor, operand, timeout, prepare) {
            Err(error) if error.is_refusal() => {
                self.refuse_in_turn(descriptor.call)?;
                Err(error)
            }
            started => started,
        }
    }

    fn start_in_turn(
        &self,
        descriptor: Descriptor,
        operand: Operand,
        mut timeout: Span,
        prepare: impl FnOnce(&mut Payload),
    ) -> Result<(MutexGuard<'_, State>, OpId), Error> {
        descriptor.validate().map_err(SubmitError::from)?;
        let data = operand.into_data(&descriptor)?;
        let mut state = self.shared.lock();
        let mut payload = state.engine.payload(descriptor, data);
        prepare(&mut payload);
        if self.must_agree(descriptor.wire) {
            let (clock, lane) = (Clock::start(), descriptor.lane);
            let began = clock.now();
            // The exponents are those of what earlier ops leave in the tensor.
            let is_free = |state: &mut State| state.engine.users_of(&payload.data).is_empty();
            drop(self.shared.await_that(state, is_free));
            let agreed = self.agree(&descriptor, payload.exponents(), timeout)?;
            payload.agree(agreed);
            timeout = Span(timeout.0.saturating_sub(clock.now().since(began).0));
            // The exponents have a number already, so the op is not refused for want of room.
            let has_room = |state: &mut State| state.run(|engine| engine.has_room(lane));
            let room = |state: &mut State| has_room(state).unwrap_or(true);
            state = self.shared.await_that(self.shared.lock(), room);
        }
        let op = state.submit(|engine| engine.submit(payload, timeout))?;
        Ok((state, op))
    }

    /// Finds the greatest exponents of all ranks.
    fn agree(&self, of: &Descriptor, own: Exponents, timeout: Span) -> Result<Exponents, Error> {
        let mut state = self.shared.lock();
        let agreement = state.engine.payload(agreement(of), Data::Owned(own.into_bytes()));
        let op = state.submit(|engine| engine.submit(agreement, timeout))?;
        let mut state = self.shared.await_that(state, |state| !state.engine.is_in_flight(op));
        let Finished { result, payload, .. } = state.engine.take(op).ok_or(GONE)?;
        result.map_err(exponents::as_meant)?;
        Ok(Exponents::from_bytes(taken_back(payload)?))
    }

    fn handle<T>(&self, op: OpId) -> Handle<T> {
        Handle { op, client: Arc::downgrade(&self.shared), result: PhantomData }
    }

    /// Waits for an op to end: its tensor is reduced then, and of blocks those of the union are
    /// there, sorted.
    ///
    /// # Errors
    /// Why there is no result; [`Error::OtherClient`] at once when another client started the op,
    /// which goes on there without its handle, and whose result is dropped.
    pub fn wait<T: TryFrom<Operand>>(&self, handle: Handle<T>) -> Result<Reduced<T>, Error> {
        self.check_own(&handle)?;
        let op = handle.op;
        let ended = |state: &mut State| !state.engine.is_in_flight(op);
        let mut state = self.shared.await_that(self.shared.lock(), ended);
        let Finished { result, absent, payload } = state.engine.take(op).ok_or(GONE)?;
        drop(state);
        result?;
        Ok(Reduced { tensor: taken_back(payload)?, absent })
    }

    /// Waits for an op to end, but not longer than this. Returns whether it has:
    /// [`wait`](Self::wait) then returns at once.
    ///
    /// # Errors
    /// [`Error::OtherClient`] when another client started the op.
    pub fn ends_within<T>(&self, handle: &Handle<T>, limit: Duration) -> Result<bool, Error> {
        self.check_own(handle)?;
        let ended = |state: &mut State| !state.engine.is_in_flight(handle.op);
        Ok(self.comes_within(limit, ended))
    }

    /// Waits until one more op of a lane may be in flight, but not longer than this. Returns
    /// whether it may, unless another thread starts one first.
    #[must_use]
    pub fn has_room_within(&self, lane: u8, limit: Duration) -> bool {
        let has_room = |engine: &mut Engine| engine.has_room(lane);
        self.comes_within(limit, |state| state.run(has_room).unwrap_or(true))
    }

    /// Returns at once whether so many more ops of a lane may be in flight, unless another thread
    /// starts some first. It is true of a client that takes no more ops: it refuses them at once.
    #[must_use]
    pub fn has_room_for(&self, lane: u8, ops: usize) -> bool {
        self.shared.lock().run(|engine| engine.has_room_for(lane, ops)).unwrap_or(true)
    }

    /// Whether an op of this wire type starts once all ranks have called it, as
    /// [`submit`](Self::submit) says.
    #[must_use]
    pub const fn must_agree(&self, wire: WireType) -> bool {
        self.welcome.in_tree && exponents::are_due(wire)
    }

    fn comes_within(&self, limit: Duration, mut done: impl FnMut(&mut State) -> bool) -> bool {
        let deadline = Clock::start().now() + span(limit);
        let mut state = self.shared.await_until(deadline, self.shared.lock(), &mut done);
        done(&mut state)
    }

    fn check_own<T>(&self, handle: &Handle<T>) -> Result<(), Error> {
        match std::ptr::eq(handle.client.as_ptr(), Arc::as_ptr(&self.shared)) {
            true => Ok(()),
            false => Err(Error::OtherClient),
        }
    }

    /// Hands back sums that are of no more use, so that those of later ops take their memory:
    /// fresh memory costs more than the sums.
    pub fn recycle(&self, blocks: Blocks) {
        self.shared.lock().run(|engine| engine.recycle(blocks.values));
    }

    /// Says that a rank is gone which this client speaks for besides its own: the job loses it.
    pub(crate) fn part(&self, rank: u16, why: Loss) {
        self.senders.part(Absent { rank, why });
    }

    /// How long a client that closes is there for ranks that may lack its sums: longer than it
    /// takes to miss an aggregator, and to move. Not longer: another rank may be stopped, or have
    /// left as the job moves, since it knew already that nobody lacks anything.
    pub const LINGER: Duration = Duration::from_secs(5);

    /// Leaves the job, as the client does when it is dropped: ops in flight end with an error, and
    /// so does what is started from now on. A rank whose sums others may lack stays for that,
    /// [`Self::LINGER`] at most.
    pub fn close(&self) {
        self.may_leave_within(Self::LINGER);
        self.leave();
    }

    /// Waits until no other rank can lack a sum that this one has, but not longer than this.
    /// Returns whether none can.
    pub fn may_leave_within(&self, limit: Duration) -> bool {
        self.shared.is_unneeded_within(limit)
    }

    /// Leaves the job at once, though others may lack its sums.
    pub fn leave(&self) {
        let mut state = self.shared.lock();
        if std::mem::replace(&mut state.closed, true) {
            return;
        }
        tracing::debug!(stats = ?state.engine.stats(), "client closes");
        let next_op = state.run(|engine| engine.rests_at()).flatten();
        state.run(|engine| engine.end("the client was closed"));
        self.shared.wake_waiting(&mut state);
        drop(state);
        self.shared.work.notify_all();
        self.shared.waker.wake();
        // A session that has ended needs no word.
        drop(self.stop.send(Message::Stop(Closed { next_op })));
    }

    /// Whether there are no more ops: the client was closed, or the session has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        let mut state = self.shared.lock();
        state.closed || state.run(|engine| engine.has_ended()).unwrap_or(true)
    }

    /// What has been sent and received so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.shared.lock().engine.stats()
    }

    /// What the first aggregator granted when the job began; one that the job moves to may grant
    /// something else.
    #[must_use]
    pub const fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// How many shards the job's windows were spread over when it began.
    #[must_use]
    pub const fn shards(&self) -> usize {
        self.shards
    }

    /// Whether results came by multicast when the job began.
    #[must_use]
    pub const fn multicast(&self) -> bool {
        self.multicast
    }
}

/// An attempt to connect that can be given up.
#[derive(Debug)]
pub struct Connecting {
    mailbox: Mailbox,
}

/// Gives up an attempt to connect.
#[derive(Debug, Clone)]
pub struct CancelHandle {
    tell: Sender<Message>,
}

impl Default for Connecting {
    fn default() -> Self {
        Self::new()
    }
}

impl Connecting {
    /// An attempt that is about to be made.
    #[must_use]
    pub fn new() -> Self {
        Self { mailbox: Mailbox::new() }
    }

    /// How another thread gives it up.
    #[must_use]
    pub fn cancel_handle(&self) -> CancelHandle {
        CancelHandle { tell: self.mailbox.sender() }
    }

    /// What it waits for while it is made.
    #[must_use]
    pub fn awaited(&self) -> Awaited {
        self.mailbox.awaited.clone()
    }

    /// Makes it: joins a job, and returns once all its ranks have.
    ///
    /// # Errors
    /// As [`Client::connect`], and [`ConnectError::GivenUp`].
    pub fn run(self, options: &ConnectOptions) -> Result<Client, ConnectError> {
        Client::join(options, self.mailbox)
    }
}

impl CancelHandle {
    /// Gives it up: it ends with [`ConnectError::GivenUp`], unless it has ended.
    pub fn cancel(&self) {
        // An attempt that has ended needs no word.
        drop(self.tell.send(Message::Stop(Closed { next_op: None })));
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.close();
        for thread in self.threads.drain(..) {
            // A panic was printed where it happened.
            drop(thread.join());
        }
    }
}

/// What an op was started on.
fn taken_back<T: TryFrom<Operand>>(payload: Payload) -> Result<T, Error> {
    Operand::of(payload).and_then(|operand| operand.try_into().ok()).ok_or_else(|| GONE.into())
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(run)
}

/// That nobody is asked who it is: a sidecar says so for every job.
static INSECURE: LogLimit = LogLimit::new(4);

/// An op that was waited for, and is not there.
const GONE: SubmitError = SubmitError::Ended { why: Cow::Borrowed("the op is gone") };

#[cfg(test)]
mod tests;
