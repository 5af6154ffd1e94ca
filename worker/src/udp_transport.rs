//! The client that a training process uses to take part in a job.

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

/// A rank of a job. Ops end in any order, but each rank must start the same ops in the same order.
///
/// The thread that waits for an op drives the sockets, so that a blocking call needs no switch
/// between threads. A background thread of the client drives ops that no thread waits for. If other
/// ranks may move but this rank may not, the background thread also acknowledges between ops, and
/// each call costs two thread switches.
#[derive(Debug)]
pub struct Client {
    shared: Arc<Driver>,
    welcome: Welcome,
    shards: usize,
    multicast: bool,
    op_timeout: Span,
    /// Lock for the start of an op, which in a tree may take several ops.
    turn: Mutex<()>,
    /// Sends messages to the job's aggregators.
    senders: ControlSenders,
    /// Sends the message that ends the session.
    stop: Sender<Message>,
    threads: Vec<JoinHandle<()>>,
}

/// The outcome of an op.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reduced<T> {
    /// The reduced tensor, or `()` if the tensor is the caller's.
    pub tensor: T,
    /// The ranks that were lost before they had contributed to the whole tensor, in ascending
    /// order. All other ranks have contributed. The list is empty unless the job has
    /// [`OnRankLoss::Continue`](racksum_proto::control::OnRankLoss).
    pub absent: Vec<Rank>,
}

/// An op in flight. If the handle is dropped, the op goes on, since the other ranks need it. Its
/// operand is then freed once the op ends.
#[derive(Debug)]
#[must_use = "an op's result is had by waiting for it"]
pub struct Handle<T> {
    op: OpId,
    /// The driver of the client that started the op. The reference is weak: a closed client has no
    /// ops.
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
    /// Joins a job and returns once all its ranks have joined.
    ///
    /// # Errors
    /// Returns an error if the job cannot be joined, or is not complete in time.
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

    /// Reduces `tensor` in place with the tensors of all other ranks, and waits for the result.
    ///
    /// # Errors
    /// Returns an error if there is no result. The tensor then holds sums in some places only.
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

    /// Starts the reduction of a tensor or of a list of its blocks. Blocks that are not listed
    /// count as zero, and so do listed blocks that are zero. The op owns the operand until `wait`
    /// returns it. Ops on the same memory run in call order: each begins when the earlier ones have
    /// ended.
    ///
    /// A call that this rank refuses gets an op number too. Ranks that made the same call get a
    /// mismatch error.
    ///
    /// If aggregators sum in a tree, an op with [`WireType::Fixed32`] starts once all ranks have
    /// called it, because they must first agree on its exponents. This method waits for that, and
    /// returns an error if it fails.
    ///
    /// [`WireType::Fixed32`]: racksum_proto::dtype::WireType::Fixed32
    ///
    /// # Errors
    /// Returns an error if the op does not start: for example [`SubmitError::TooManyOps`], until
    /// [`has_room_within`](Self::has_room_within) returns true.
    pub fn submit<T: Into<Operand>>(
        &self,
        operand: T,
        descriptor: Descriptor,
    ) -> Result<Handle<T>, Error> {
        let (state, op) = self.start(descriptor, operand.into(), self.op_timeout, |_| {})?;
        self.shared.set_off(state);
        Ok(self.handle(op))
    }

    /// Like [`submit`](Self::submit), for an operand that several ranks have already folded. Sends
    /// exactly these blocks: a block that is zero now may be non-zero at one of those ranks.
    /// `spent` is the part of the op's timeout that has already passed.
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

    /// Opens an empty op in place of a call that the caller refuses, so that the ops of all ranks
    /// stay in step. Ranks that made the call get [`OpError::Mismatch`].
    ///
    /// [`OpError::Mismatch`]: racksum_proto::error::OpError::Mismatch
    ///
    /// # Errors
    /// Returns an error if the op does not start, like [`submit`](Self::submit).
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

    /// Locks the start of ops if aggregators sum in a tree. All ranks number their ops alike, so no
    /// op may come between an op and the one that finds its exponents.
    fn take_turn(&self) -> Option<MutexGuard<'_, ()>> {
        let turn = || self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.welcome.in_tree.then(turn)
    }

    /// Starts an op with this timeout. A call that this rank refuses gets an op number too.
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
            // The exponents depend on the results of earlier ops on the same memory.
            let is_free = |state: &mut State| state.engine.users_of(&payload.data).is_empty();
            drop(self.shared.await_that(state, is_free));
            let agreed = self.agree(&descriptor, payload.exponents(), timeout)?;
            payload.agree(agreed);
            timeout = Span(timeout.0.saturating_sub(clock.now().since(began).0));
            // The op for the exponents already has a number, so this op waits for room instead of
            // failing.
            let has_room = |state: &mut State| state.run(|engine| engine.has_room(lane));
            let room = |state: &mut State| has_room(state).unwrap_or(true);
            state = self.shared.await_that(self.shared.lock(), room);
        }
        let op = state.submit(|engine| engine.submit(payload, timeout))?;
        Ok((state, op))
    }

    /// Agrees with all ranks on the greatest exponent of each block.
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

    /// Waits for an op to end and returns the reduced operand. A block list then holds the blocks
    /// of the union, sorted.
    ///
    /// # Errors
    /// Returns an error if there is no result. Returns [`Error::OtherClient`] at once if another
    /// client started the op. That op goes on without its handle, and its result is dropped.
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

    /// Waits for an op to end, for at most `limit`. Returns whether it has ended; if so,
    /// [`wait`](Self::wait) returns at once.
    ///
    /// # Errors
    /// Returns [`Error::OtherClient`] if another client started the op.
    pub fn ends_within<T>(&self, handle: &Handle<T>, limit: Duration) -> Result<bool, Error> {
        self.check_own(handle)?;
        let ended = |state: &mut State| !state.engine.is_in_flight(handle.op);
        Ok(self.comes_within(limit, ended))
    }

    /// Waits until one more op of a lane may be in flight, for at most `limit`. Returns whether it
    /// may. Another thread may still use that room first.
    #[must_use]
    pub fn has_room_within(&self, lane: u8, limit: Duration) -> bool {
        let has_room = |engine: &mut Engine| engine.has_room(lane);
        self.comes_within(limit, |state| state.run(has_room).unwrap_or(true))
    }

    /// Returns at once whether `ops` more ops of a lane may be in flight. Another thread may still
    /// use that room first. Returns true for a client that takes no more ops, since it refuses them
    /// at once.
    #[must_use]
    pub fn has_room_for(&self, lane: u8, ops: usize) -> bool {
        self.shared.lock().run(|engine| engine.has_room_for(lane, ops)).unwrap_or(true)
    }

    /// Returns whether an op of this wire type starts only once all ranks have called it, as
    /// described at [`submit`](Self::submit).
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

    /// Takes back the memory of sums that the caller no longer needs, for the sums of later ops.
    /// Fresh memory costs more than the sums themselves.
    pub fn recycle(&self, blocks: Blocks) {
        self.shared.lock().run(|engine| engine.recycle(blocks.values));
    }

    /// Reports the loss of another rank that this client represents. The job then loses that rank.
    pub(crate) fn part(&self, rank: u16, why: Loss) {
        self.senders.part(Absent { rank, why });
    }

    /// How long a closing client stays for ranks that may lack its sums. This is longer than it
    /// takes to detect that an aggregator is gone, and to move. The time is limited because another
    /// rank may be stopped, or may have left during the move, when no rank lacked a sum.
    pub const LINGER: Duration = Duration::from_secs(5);

    /// Leaves the job, as dropping the client does. Ops in flight end with an error, and so do
    /// later ops. If other ranks may lack this rank's sums, the client first stays for at most
    /// [`Self::LINGER`].
    pub fn close(&self) {
        self.may_leave_within(Self::LINGER);
        self.leave();
    }

    /// Waits until no other rank can lack a sum that this one has, for at most `limit`. Returns
    /// whether none can.
    pub fn may_leave_within(&self, limit: Duration) -> bool {
        self.shared.is_unneeded_within(limit)
    }

    /// Leaves the job at once, even if other ranks may lack its sums.
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
        // The send fails only if the session has already ended.
        drop(self.stop.send(Message::Stop(Closed { next_op })));
    }

    /// Returns whether no more ops can start: the client was closed, or the session has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        let mut state = self.shared.lock();
        state.closed || state.run(|engine| engine.has_ended()).unwrap_or(true)
    }

    /// Returns counters of the traffic so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.shared.lock().engine.stats()
    }

    /// Returns the grant of the first aggregator when the job began. An aggregator that the job
    /// moves to may grant something else.
    #[must_use]
    pub const fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// Returns the number of shards that served the job's windows when it began.
    #[must_use]
    pub const fn shards(&self) -> usize {
        self.shards
    }

    /// Returns whether results came by multicast when the job began.
    #[must_use]
    pub const fn multicast(&self) -> bool {
        self.multicast
    }
}

/// An attempt to connect that another thread can cancel.
#[derive(Debug)]
pub struct Connecting {
    mailbox: Mailbox,
}

/// A handle that cancels an attempt to connect.
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
    /// Creates an attempt to connect, which [`run`](Self::run) makes.
    #[must_use]
    pub fn new() -> Self {
        Self { mailbox: Mailbox::new() }
    }

    /// Returns a handle with which another thread can cancel the attempt.
    #[must_use]
    pub fn cancel_handle(&self) -> CancelHandle {
        CancelHandle { tell: self.mailbox.sender() }
    }

    /// Returns a shared text that names what the attempt currently waits for.
    #[must_use]
    pub fn awaited(&self) -> Awaited {
        self.mailbox.awaited.clone()
    }

    /// Joins a job and returns once all its ranks have joined.
    ///
    /// # Errors
    /// Returns the errors of [`Client::connect`], and [`ConnectError::GivenUp`] if the attempt is
    /// cancelled.
    pub fn run(self, options: &ConnectOptions) -> Result<Client, ConnectError> {
        Client::join(options, self.mailbox)
    }
}

impl CancelHandle {
    /// Cancels the attempt. It ends with [`ConnectError::GivenUp`], unless it has already ended.
    pub fn cancel(&self) {
        // The send fails only if the attempt has already ended.
        drop(self.tell.send(Message::Stop(Closed { next_op: None })));
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.close();
        for thread in self.threads.drain(..) {
            // The thread has already printed its panic.
            drop(thread.join());
        }
    }
}

/// Returns the operand that an op was started with.
fn taken_back<T: TryFrom<Operand>>(payload: Payload) -> Result<T, Error> {
    Operand::of(payload).and_then(|operand| operand.try_into().ok()).ok_or_else(|| GONE.into())
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(run)
}

/// Rate limit for the warning about unverified aggregators: a sidecar logs it for every job.
static INSECURE: LogLimit = LogLimit::new(4);

/// The error for an op that was waited for and no longer exists.
const GONE: SubmitError = SubmitError::Ended { why: Cow::Borrowed("the op is gone") };

#[cfg(test)]
mod tests;
