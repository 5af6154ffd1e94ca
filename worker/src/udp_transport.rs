//! A rank's membership in a job at aggregators, over UDP.

use std::convert::Infallible;
use std::io;
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::log_limit::LogLimit;
use racksum_proto::call::Call;
use racksum_proto::control::{LostRank, Welcome};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::WireType;
use racksum_proto::error::SubmitError;
use racksum_proto::ids::OpId;
use racksum_proto::loss::Loss;
use racksum_proto::stats::{SidecarStats, Stats};
use racksum_proto::time::Span;

use crate::aggregator_selector::join_first;
use crate::blocks::Blocks;
use crate::control::{Closed, ControlSenders, Mailbox, Message};
use crate::driver::{Driver, State};
use crate::engine::{Engine, Finished};
use crate::error::{ConnectError, Error};
use crate::exponents::{self, Exponents, agreement};
use crate::grant::{Granted, grant};
use crate::join::Session;
use crate::operand::Operand;
use crate::options::ConnectOptions;
use crate::payload::{Data, Payload};
use crate::span::span;
use crate::supervisor::Supervisor;
use crate::transport::{GONE, Grant, LentMemory, Reduced, StatsQuery, Transport};

/// The transport of a rank that exchanges datagrams with aggregators.
///
/// The thread that waits for an op drives the sockets, so that a blocking call needs no switch
/// between threads. A background thread drives ops that no thread waits for. If other ranks may
/// move but this rank may not, the background thread also acknowledges between ops, and each call
/// costs two thread switches.
#[derive(Debug)]
pub(crate) struct UdpTransport {
    driver: Arc<Driver>,
    welcome: Welcome,
    shards: usize,
    multicast: bool,
    op_timeout: Span,
    /// Held while an op starts, so that in a tree no op comes between an op and its agreement on
    /// exponents.
    turn: Mutex<()>,
    /// Reports lost ranks to the job's aggregators.
    senders: ControlSenders,
    /// Sends the message that ends the session.
    stop: Sender<Message>,
    /// Disconnects once the connections to the aggregators are closed.
    left: Mutex<Receiver<Infallible>>,
    threads: Vec<JoinHandle<()>>,
}

impl UdpTransport {
    /// Joins a job at its aggregators, and returns once all ranks have joined.
    pub(crate) fn join(
        options: &ConnectOptions,
        mut mailbox: Mailbox,
    ) -> Result<Self, ConnectError> {
        let (at, session) = join_first(options, &mut mailbox)?;
        Self::start(options, at, session, mailbox)
    }

    /// Starts the threads of a rank that has joined at the set of aggregators with index `at`.
    fn start(
        options: &ConnectOptions,
        at: usize,
        session: Session,
        mailbox: Mailbox,
    ) -> Result<Self, ConnectError> {
        if options.insecure {
            INSECURE.note(|left_out| {
                tracing::warn!(
                    left_out,
                    "insecure: the aggregator's identity is not verified; pass `identity` to \
                     verify it"
                );
            });
        }
        let stop = mailbox.sender();
        let Granted { config, links, welcome, membership } = grant(options, session)?;
        let (multicast, shards) = (!links.groups.is_empty(), links.shards.len());
        let engine = Engine::new(config, options.world, links, Clock::start(), &options.faults);
        let driver = Arc::new(Driver::new(engine)?);
        let op_timeout = span(options.op_timeout);
        let drives = Arc::clone(&driver);
        let drives = spawn("racksum-drive", move || drives.drive_in_background())?;
        let (turn, threads) = (Mutex::default(), vec![drives]);
        let (leaving, left) = channel();
        let left = Mutex::new(left);
        let senders = ControlSenders::default();
        senders.set(&membership.controls);
        let mut transport = Self {
            driver,
            welcome,
            shards,
            multicast,
            op_timeout,
            turn,
            senders,
            stop,
            left,
            threads,
        };
        let (driver, options) = (Arc::clone(&transport.driver), options.clone());
        let senders = transport.senders.clone();
        let supervisor = Supervisor::new(options, at, membership, senders, mailbox, driver);
        transport.threads.push(spawn("racksum-session", move || {
            supervisor.run();
            drop(leaving);
        })?);
        Ok(transport)
    }

    /// Like [`submit`](Transport::submit), for an operand that is the fold of several ranks'
    /// operands. Sends exactly these blocks: a block that is zero in the fold may be non-zero at
    /// one of those ranks. `spent` is the part of the op's timeout that has already passed.
    pub(crate) fn submit_folded(
        &self,
        operand: Operand,
        descriptor: Descriptor,
        blocks: impl Iterator<Item = u32>,
        spent: Span,
    ) -> Result<OpId, Error> {
        let send = |payload: &mut Payload| payload.send_these(blocks);
        let left = Span(self.op_timeout.0.saturating_sub(spent.0));
        let (state, op) = self.start_op(descriptor, operand, left, send)?;
        self.driver.set_off(state);
        Ok(op)
    }

    fn refuse_in_turn(&self, call: Call) -> Result<(), Error> {
        // wire: W-70
        let mut state = self.driver.lock();
        let payload = state.engine.payload(Descriptor::refused(call), Data::Owned(Vec::new()));
        let op = state.submit(|engine| engine.submit(payload, self.op_timeout))?;
        state.engine.abandon(op);
        self.driver.set_off(state);
        Ok(())
    }

    /// Locks the start of ops if aggregators sum in a tree. All ranks number their ops alike, so no
    /// op may come between an op and the one that finds its exponents.
    fn take_turn(&self) -> Option<MutexGuard<'_, ()>> {
        let turn = || self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.welcome.in_tree.then(turn)
    }

    /// Starts an op with this timeout. A call that this rank refuses gets an op number too.
    fn start_op(
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
        let mut state = self.driver.lock();
        let mut payload = state.engine.payload(descriptor, data);
        prepare(&mut payload);
        if self.must_agree(descriptor.wire) {
            let (clock, lane) = (Clock::start(), descriptor.lane);
            let began = clock.now();
            // Wait for earlier ops on the same memory, because the exponents depend on their
            // results.
            let is_free = |state: &mut State| state.engine.users_of(&payload.data).is_empty();
            drop(self.driver.await_that(state, is_free));
            let agreed = self.agree(&descriptor, payload.exponents(), timeout)?;
            payload.agree(agreed);
            timeout = Span(timeout.0.saturating_sub(clock.now().since(began).0));
            // The op for the exponents already has a number, so this op waits for room instead of
            // failing.
            let has_room = |state: &mut State| state.run(|engine| engine.has_room(lane));
            let room = |state: &mut State| has_room(state).unwrap_or(true);
            state = self.driver.await_that(self.driver.lock(), room);
        }
        let op = state.submit(|engine| engine.submit(payload, timeout))?;
        Ok((state, op))
    }

    /// Agrees with all ranks on the greatest exponent of each block.
    fn agree(&self, of: &Descriptor, own: Exponents, timeout: Span) -> Result<Exponents, Error> {
        let mut state = self.driver.lock();
        let agreement = state.engine.payload(agreement(of), Data::Owned(own.into_bytes()));
        let op = state.submit(|engine| engine.submit(agreement, timeout))?;
        let mut state = self.driver.await_that(state, |state| !state.engine.is_in_flight(op));
        let Finished { result, payload, .. } = state.engine.take(op).ok_or(GONE)?;
        result.map_err(exponents::as_meant)?;
        Ok(Exponents::from_bytes(taken_back(payload)?))
    }

    fn comes_within(&self, limit: Duration, mut done: impl FnMut(&mut State) -> bool) -> bool {
        let deadline = Clock::start().now() + span(limit);
        let mut state = self.driver.await_until(deadline, self.driver.lock(), &mut done);
        done(&mut state)
    }

    /// Reports the loss of another rank that this client represents. The job then loses that rank.
    pub(crate) fn part(&self, rank: u16, why: Loss) {
        self.senders.part(LostRank { rank, why });
    }

    /// Waits for an op to end and takes its result. The caller holds the lock of the state.
    fn finish_locked(
        &self,
        state: MutexGuard<'_, State>,
        op: OpId,
    ) -> Result<Reduced<Operand>, Error> {
        let mut state = self.driver.await_that(state, |state| !state.engine.is_in_flight(op));
        let Finished { result, absent, payload } = state.engine.take(op).ok_or(GONE)?;
        drop(state);
        result?;
        Ok(Reduced { tensor: Operand::of(payload).ok_or(GONE)?, absent })
    }
}

impl Transport for UdpTransport {
    fn grant(&self) -> Grant {
        let Welcome { max_ops, first_op, pool_slots, fragment_payload, .. } = self.welcome;
        let Self { shards, multicast, .. } = *self;
        Grant { max_ops, first_op, shards, multicast, pool_slots, fragment_payload }
    }

    fn submit(&self, operand: Operand, descriptor: Descriptor) -> Result<OpId, Error> {
        let (state, op) = self.start_op(descriptor, operand, self.op_timeout, |_| {})?;
        self.driver.set_off(state);
        Ok(op)
    }

    fn finish(&self, op: OpId) -> Result<Reduced<Operand>, Error> {
        self.finish_locked(self.driver.lock(), op)
    }

    /// Starts an op and drives it on this thread, without waking another one.
    fn reduce(&self, operand: Operand, descriptor: Descriptor) -> Result<Reduced<Operand>, Error> {
        let (state, op) = self.start_op(descriptor, operand, self.op_timeout, |_| {})?;
        self.finish_locked(state, op)
    }

    fn abandon(&self, op: OpId) {
        self.driver.lock().abandon(op);
    }

    fn refuse(&self, call: Call) -> Result<(), Error> {
        let _turn = self.take_turn();
        self.refuse_in_turn(call)
    }

    fn ends_within(&self, op: OpId, limit: Duration) -> bool {
        self.comes_within(limit, |state| !state.engine.is_in_flight(op))
    }

    fn poll_ended(&self, op: OpId, waker: &Waker) -> bool {
        self.driver.lock().poll_ended(op, waker)
    }

    /// Returns true, because `submit` does not wait for the memory; the op itself waits once it has
    /// started.
    fn is_free_within(&self, _memory: &Range<usize>, _limit: Duration) -> bool {
        true
    }

    fn has_room_within(&self, lane: u8, limit: Duration) -> bool {
        let has_room = |engine: &mut Engine| engine.has_room(lane);
        self.comes_within(limit, |state| state.run(has_room).unwrap_or(true))
    }

    fn has_room_for(&self, lane: u8, ops: usize) -> bool {
        self.driver.lock().run(|engine| engine.has_room_for(lane, ops)).unwrap_or(true)
    }

    fn must_agree(&self, wire: WireType) -> bool {
        self.welcome.in_tree && exponents::are_due(wire)
    }

    fn recycle(&self, blocks: Blocks) {
        self.driver.lock().run(|engine| engine.recycle(blocks.values));
    }

    fn offer(&self, _len: usize) -> io::Result<Option<Arc<dyn LentMemory>>> {
        Ok(None)
    }

    /// Returns `Ok`, because nothing was offered.
    fn is_taken_within(&self, _lent: &dyn LentMemory, _limit: Duration) -> Option<io::Result<()>> {
        Some(Ok(()))
    }

    fn stats(&self) -> Stats {
        self.driver.lock().engine.stats()
    }

    fn refreshes_stats_within(&self, _query: &mut StatsQuery, _limit: Duration) -> bool {
        true
    }

    fn sidecar_stats(&self) -> SidecarStats {
        SidecarStats::default()
    }

    fn is_over(&self) -> bool {
        let mut state = self.driver.lock();
        state.closed || state.run(|engine| engine.has_ended()).unwrap_or(true)
    }

    fn linger(&self) -> Duration {
        LINGER
    }

    fn may_leave_within(&self, limit: Duration) -> bool {
        self.driver.is_done_within(limit)
    }

    fn leave(&self) {
        let mut state = self.driver.lock();
        if std::mem::replace(&mut state.closed, true) {
            return;
        }
        tracing::debug!(stats = ?state.engine.stats(), "client closes");
        let next_op = state.run(|engine| engine.rests_at()).flatten();
        state.run(|engine| engine.end("the client was closed"));
        self.driver.wake_waiting(&mut state);
        drop(state);
        self.driver.work.notify_all();
        self.driver.waker.wake();
        // The send fails only if the session has already ended.
        drop(self.stop.send(Message::Stop(Closed { next_op })));
    }

    fn has_left_within(&self, limit: Duration) -> bool {
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(left.recv_timeout(limit), Err(RecvTimeoutError::Disconnected))
    }
}

impl Drop for UdpTransport {
    fn drop(&mut self) {
        self.close();
        for thread in self.threads.drain(..) {
            // If the thread panicked, the panic hook has already printed the message.
            drop(thread.join());
        }
    }
}

/// Returns the operand that an op was started with.
fn taken_back<T: TryFrom<Operand>>(payload: Payload) -> Result<T, Error> {
    Operand::of(payload).and_then(|operand| operand.try_into().ok()).ok_or_else(|| GONE.into())
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(run)
}

/// How long a closing rank stays for ranks that may lack its sums.
const LINGER: Duration = Duration::from_secs(5);

/// Rate limit for the warning about unverified aggregators: a sidecar logs it for every job.
static INSECURE: LogLimit = LogLimit::new(4);

#[cfg(test)]
mod tests;
