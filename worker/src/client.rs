//! The client: what a training process holds.

use std::marker::PhantomData;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::udp::{self, Gather, Waker};
use racksum_proto::control::Welcome;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::error::SubmitError;
use racksum_proto::ids::{OpId, Rank};
use racksum_proto::time::Span;

use crate::blocks::{BlockSet, Blocks};
use crate::control::{Closed, Mailbox, Word};
use crate::engine::{Engine, Finished, Next, Stats};
use crate::error::{ConnectError, Error};
use crate::exponents::{self, Exponents, agreement};
use crate::grant::{Granted, grant};
use crate::options::ConnectOptions;
use crate::payload::{Data, Payload, bytes_of};
use crate::supervisor::{Supervisor, join_first};
use crate::tensor::lend;

/// A rank of a job. Ops end in any order; each rank must start the same ops in the same order.
///
/// The thread that waits for an op drives the sockets, so that a blocking call costs no hand-over
/// between threads; a thread of the client drives ops that nobody waits for. Where others may move
/// and this rank may not, it also acknowledges between ops, and each call costs two hand-overs.
#[derive(Debug)]
pub struct Client {
    shared: Arc<Shared>,
    welcome: Welcome,
    shards: usize,
    multicast: bool,
    op_timeout: Span,
    /// Whose turn it is to start an op, where starting one takes several.
    turn: Mutex<()>,
    /// Ends the session.
    stop: Sender<Word>,
    threads: Vec<JoinHandle<()>>,
}

/// What the client's threads share.
#[derive(Debug)]
pub(crate) struct Shared {
    state: Mutex<State>,
    /// Threads that want the state while another one drives.
    wanted: AtomicUsize,
    /// An op ended, or nobody drives any more.
    changed: Condvar,
    /// There is something to drive in the background.
    work: Condvar,
    waker: Waker,
    gather: Gather,
}

#[derive(Debug)]
struct State {
    engine: Engine,
    /// Some thread drives the sockets.
    driving: bool,
    /// Threads that wait for an op: one of them drives, and not the client's own thread.
    waiting: usize,
    /// Those of them that sleep, since another drives.
    asleep: usize,
    /// Those of the sleeping that were woken and have yet to look: the driver lets them.
    woken: usize,
    closed: bool,
    /// The engine panicked: every op has ended, and it is not to be used again.
    broken: bool,
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
    client: Weak<Shared>,
    result: PhantomData<T>,
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
        if options.insecure {
            tracing::warn!("insecure: whoever answers at the aggregator's address is believed");
        }
        let mut mailbox = Mailbox::new();
        let stop = mailbox.sender();
        let (at, session) = join_first(options, &mut mailbox)?;
        let Granted { config, links, welcome, membership } = grant(options, session)?;
        let (multicast, shards) = (!links.groups.is_empty(), links.shards.len());
        let engine = Engine::new(config, options.world, links, Clock::start(), &options.faults);
        let shared = Arc::new(Shared::new(engine)?);
        let op_timeout = span(options.op_timeout);
        let (turn, threads) = (Mutex::default(), Vec::new());
        let mut client =
            Self { shared, welcome, shards, multicast, op_timeout, turn, stop, threads };
        let driver = Arc::clone(&client.shared);
        client.threads.push(spawn("racksum-drive", move || driver.drive_in_background())?);
        let (shared, options) = (Arc::clone(&client.shared), options.clone());
        let supervisor =
            Supervisor { options, at, membership, absent: Vec::new(), mailbox, shared };
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
        check_len(tensor.len(), &descriptor)?;
        let (loan, region) = lend(tensor);
        let (state, op) = self.start(descriptor, Data::Borrowed(region))?;
        let mut state = self.shared.await_that(state, |state| !state.engine.is_in_flight(op));
        let Finished { result, absent, payload } = state.engine.take(op).ok_or(GONE)?;
        drop(state);
        drop((payload, loan));
        Ok(result.map(|()| Reduced { tensor: (), absent })?)
    }

    /// Starts reducing a tensor, which is handed over until the op is waited for.
    ///
    /// Where aggregators sum in a tree, an op with [`WireType::Fixed32`] starts once all ranks have
    /// called it, since they must agree on its exponents first: until then this waits, and what
    /// becomes of that is an error of this call.
    ///
    /// [`WireType::Fixed32`]: racksum_proto::dtype::WireType::Fixed32
    ///
    /// # Errors
    /// Why the op was not taken.
    pub fn submit(
        &self,
        tensor: Vec<u8>,
        descriptor: Descriptor,
    ) -> Result<Handle<Vec<u8>>, Error> {
        check_len(tensor.len(), &descriptor)?;
        let (state, op) = self.start(descriptor, Data::Owned(tensor))?;
        self.shared.set_off(state);
        Ok(self.handle(op))
    }

    /// Starts reducing some blocks of a tensor, as if all others, and those of them that are zero,
    /// were zero in it.
    ///
    /// # Errors
    /// Why the op was not taken.
    pub fn submit_blocks(
        &self,
        blocks: Blocks,
        descriptor: Descriptor,
    ) -> Result<Handle<Blocks>, Error> {
        descriptor.validate().map_err(SubmitError::from)?;
        let blocks = BlockSet::new(&descriptor, blocks)?;
        let (state, op) = self.start(descriptor, Data::Blocks(blocks))?;
        self.shared.set_off(state);
        Ok(self.handle(op))
    }

    /// Starts an op.
    fn start(
        &self,
        descriptor: Descriptor,
        data: Data,
    ) -> Result<(MutexGuard<'_, State>, OpId), Error> {
        descriptor.validate().map_err(SubmitError::from)?;
        let mut state = self.shared.lock();
        let mut payload = state.engine.payload(descriptor, data);
        if !self.welcome.in_tree {
            let op = state.submit(|engine| engine.submit(payload, self.op_timeout))?;
            return Ok((state, op));
        }
        drop(state);
        // All ranks number their ops alike: none comes between an op and the one before it that
        // finds its exponents.
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let (clock, mut timeout) = (Clock::start(), self.op_timeout);
        let began = clock.now();
        if exponents::are_due(&descriptor) {
            let agreed = self.agree(&descriptor, payload.exponents())?;
            payload.agree(agreed);
            timeout = Span(timeout.0.saturating_sub(clock.now().since(began).0));
        }
        let mut state = self.shared.lock();
        let op = state.submit(|engine| engine.submit(payload, timeout))?;
        Ok((state, op))
    }

    /// Finds the greatest exponents of all ranks.
    fn agree(&self, of: &Descriptor, own: Exponents) -> Result<Exponents, Error> {
        let mut state = self.shared.lock();
        let agreement = state.engine.payload(agreement(of), Data::Owned(own.into_bytes()));
        let op = state.submit(|engine| engine.submit(agreement, self.op_timeout))?;
        let mut state = self.shared.await_that(state, |state| !state.engine.is_in_flight(op));
        let Finished { result, payload, .. } = state.engine.take(op).ok_or(GONE)?;
        result.map_err(exponents::as_meant)?;
        match payload.data {
            Data::Owned(greatest) => Ok(Exponents::from_bytes(greatest)),
            Data::Borrowed(_) | Data::Blocks(_) | Data::Returned => Err(GONE.into()),
        }
    }

    fn handle<T>(&self, op: OpId) -> Handle<T> {
        Handle { op, client: Arc::downgrade(&self.shared), result: PhantomData }
    }

    /// Waits for a tensor to be reduced.
    ///
    /// # Errors
    /// Why there is no result; [`Error::OtherClient`] at once when another client started the op,
    /// which goes on there without its handle, and whose result is dropped.
    pub fn wait(&self, handle: Handle<Vec<u8>>) -> Result<Reduced<Vec<u8>>, Error> {
        let Reduced { tensor, absent } = self.await_op(&handle)?;
        match tensor.data {
            Data::Owned(tensor) => Ok(Reduced { tensor, absent }),
            Data::Borrowed(_) | Data::Blocks(_) | Data::Returned => Err(GONE.into()),
        }
    }

    /// Waits for blocks to be reduced: those of the union, sorted.
    ///
    /// # Errors
    /// As [`Self::wait`].
    pub fn wait_blocks(&self, handle: Handle<Blocks>) -> Result<Reduced<Blocks>, Error> {
        let Reduced { tensor, absent } = self.await_op(&handle)?;
        let Payload { data, geometry, descriptor, .. } = tensor;
        match data {
            Data::Blocks(blocks) => {
                Ok(Reduced { tensor: blocks.into_result(&geometry, &descriptor), absent })
            }
            Data::Borrowed(_) | Data::Owned(_) | Data::Returned => Err(GONE.into()),
        }
    }

    /// Hands back sums that are of no more use, so that those of later ops take their memory:
    /// fresh memory costs more than the sums.
    pub fn recycle(&self, blocks: Blocks) {
        self.shared.lock().run(|engine| engine.recycle(blocks.values));
    }

    /// Waits for an op to end, and takes what it worked on.
    fn await_op<T>(&self, handle: &Handle<T>) -> Result<Reduced<Payload>, Error> {
        if !std::ptr::eq(handle.client.as_ptr(), Arc::as_ptr(&self.shared)) {
            return Err(Error::OtherClient);
        }
        let op = handle.op;
        let ended = |state: &State| !state.engine.is_in_flight(op);
        let mut state = self.shared.await_that(self.shared.lock(), ended);
        let Finished { result, absent, payload } = state.engine.take(op).ok_or(GONE)?;
        drop(state);
        result?;
        Ok(Reduced { tensor: payload, absent })
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

impl Drop for Client {
    fn drop(&mut self) {
        let mut state = self.shared.linger();
        state.closed = true;
        tracing::debug!(stats = ?state.engine.stats(), "client closes");
        let next_op = state.run(|engine| engine.rests_at()).flatten();
        state.run(|engine| engine.end("the client was closed"));
        self.shared.wake_waiting(&mut state);
        drop(state);
        self.shared.work.notify_all();
        self.shared.waker.wake();
        // A session that has ended needs no word.
        drop(self.stop.send(Word::Stop(Closed { next_op })));
        for thread in self.threads.drain(..) {
            // A panic was printed where it happened.
            drop(thread.join());
        }
    }
}

impl State {
    /// Lets the engine work. If it panics it is never used again, and every op ends with an error:
    /// a thread that unwound while it drove would leave the others waiting for ever.
    fn run<T>(&mut self, work: impl FnOnce(&mut Engine) -> T) -> Option<T> {
        if self.broken {
            return None;
        }
        // The engine may be in any state after a panic, and `broken` keeps everyone away from it.
        let worked = catch_unwind(AssertUnwindSafe(|| work(&mut self.engine)));
        if worked.is_err() {
            self.broken = true;
            self.engine.give_up(PANICKED);
        }
        worked.ok()
    }

    /// Starts an op.
    fn submit(
        &mut self,
        start: impl FnOnce(&mut Engine) -> Result<OpId, SubmitError>,
    ) -> Result<OpId, SubmitError> {
        self.run(start).unwrap_or(Err(SubmitError::Ended { why: PANICKED }))
    }

    fn is_idle(&self) -> bool {
        self.broken || self.engine.is_idle()
    }

    fn is_at_rest(&self) -> bool {
        self.broken || self.engine.is_at_rest()
    }
}

impl Shared {
    fn new(engine: Engine) -> std::io::Result<Self> {
        let gather = Gather::new(engine.sockets().0.report().got_receive, LONGEST_PAUSE);
        Ok(Self {
            wanted: AtomicUsize::new(0),
            state: Mutex::new(State {
                engine,
                driving: false,
                waiting: 0,
                asleep: 0,
                woken: 0,
                closed: false,
                broken: false,
            }),
            changed: Condvar::new(),
            work: Condvar::new(),
            waker: Waker::new()?,
            gather,
        })
    }

    /// The state. The lock is never poisoned: panics of the engine end in [`State::run`].
    fn lock(&self) -> MutexGuard<'_, State> {
        self.wanted.fetch_add(1, Relaxed);
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.wanted.fetch_sub(1, Relaxed);
        state
    }

    /// Drives the sockets until `done`, or waits while another thread does that waits itself.
    fn await_that<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        done: impl Fn(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        state.waiting += 1;
        while !done(&state) {
            if state.driving {
                // The client's own thread may have to be told that it is no longer needed.
                self.waker.wake();
                state.asleep += 1;
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.asleep -= 1;
                state.woken = state.woken.saturating_sub(1);
            } else {
                state = self.drive(state, &done);
            }
        }
        state.waiting -= 1;
        if state.waiting == 0 && !state.is_at_rest() {
            self.work.notify_one();
        }
        state
    }

    /// Drives the sockets until `done`; nobody else does.
    fn drive<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        done: impl Fn(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        debug_assert!(!state.driving, "two threads would wake each other for every datagram");
        state.driving = true;
        while !done(&state) {
            state = self.step(state);
        }
        state.driving = false;
        self.wake_waiting(&mut state);
        state
    }

    /// Has the engine take something in from outside, and all who wait look what came of it.
    /// Returns nothing if the engine is broken.
    pub(crate) fn tell<T>(&self, work: impl FnOnce(&mut Engine) -> T) -> Option<T> {
        let mut state = self.lock();
        let told = state.run(work);
        self.wake_waiting(&mut state);
        drop(state);
        self.work.notify_all();
        self.waker.wake();
        told
    }

    /// Waits until no other rank can lack a sum that this one has, in a job that may move: where it
    /// goes on they would wait for this rank in vain. Not for long: another rank may be stopped, or
    /// have left as the job moves, since it knew already that nobody lacks anything.
    fn linger(&self) -> MutexGuard<'_, State> {
        let state = self.lock();
        let is_needed = |state: &mut State| !state.is_idle() && state.engine.rests_at().is_some();
        let waited = self.changed.wait_timeout_while(state, LINGER, is_needed);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Has all who sleep look whether what they wait for has come.
    fn wake_waiting(&self, state: &mut State) {
        state.woken = state.asleep;
        self.changed.notify_all();
    }

    /// Has the engine do what is due, and wakes who waits if ops have ended. Returns what is left
    /// to do; nothing if the engine is broken.
    fn advance(&self, state: &mut State) -> Option<Next> {
        let progress = state.run(Engine::step);
        if progress.is_none_or(|progress| progress.ended) {
            self.wake_waiting(state);
        }
        Some(progress?.next)
    }

    /// Does what is due, or waits for something to happen. The lock is free while it waits.
    fn step<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let Some(next) = self.advance(&mut state) else { return state };
        // An error of the two waits is as good as readiness: the next step finds out.
        match next {
            Next::Gather(backlog) if self.gather.is_due(backlog) => {
                drop(state);
                drop(self.gather.pause(&self.waker));
            }
            Next::Step | Next::Gather(_) => {
                // Whoever submits, or waits for what has ended, must not wait until there is
                // nothing more to do.
                if self.wanted.load(Relaxed) == 0 && state.woken == 0 {
                    return state;
                }
                drop(state);
                std::thread::yield_now();
            }
            Next::Sleep(patience) => {
                drop(state);
                drop(udp::wait(&[self.waker.as_fd()], patience));
                self.waker.drain();
            }
            Next::Wait(patience) => {
                let (socket, groups) = state.engine.sockets();
                drop(state);
                let sockets = std::iter::once(&*socket).chain(groups.iter());
                let mut fds = [self.waker.as_fd(); udp::MAX_FDS];
                fds.iter_mut().skip(1).zip(sockets).for_each(|(fd, socket)| *fd = socket.as_fd());
                let count = 2 + groups.len();
                if udp::wait(&fds[..count.min(fds.len())], patience).unwrap_or(1) & 1 != 0 {
                    self.waker.drain();
                }
            }
        }
        self.lock()
    }

    /// Sends the first of an op that was just submitted, and sees to it that somebody drives.
    fn set_off(&self, mut state: MutexGuard<'_, State>) {
        self.advance(&mut state);
        let driven = state.driving || state.waiting > 0;
        drop(state);
        if driven {
            self.waker.wake();
        } else {
            self.work.notify_one();
        }
    }

    /// Drives ops that nobody waits for.
    fn drive_in_background(&self) {
        let mut state = self.lock();
        let needless = |state: &State| state.waiting > 0 || state.is_at_rest();
        while !state.closed {
            if needless(&state) {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            } else {
                state = self.drive(state, |state| state.closed || needless(state));
            }
        }
    }
}

fn check_len(have: usize, descriptor: &Descriptor) -> Result<(), Error> {
    let need = descriptor.elements.saturating_mul(descriptor.dtype.size() as u64);
    if have as u64 == need && bytes_of(descriptor, 0..descriptor.elements).len() == have {
        return Ok(());
    }
    let Descriptor { elements, dtype, .. } = *descriptor;
    Err(Error::Length { have, elements, dtype: dtype.name(), need })
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(run)
}

pub(crate) fn span(duration: Duration) -> Span {
    Span(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
}

/// Why nothing can be started once the engine has panicked.
const PANICKED: &str = "a thread of the client panicked";
/// An op that was waited for, and is not there.
const GONE: SubmitError = SubmitError::Ended { why: "the op is gone" };
/// How long a client that closes is there for ranks that may lack its sums: longer than it takes to
/// miss an aggregator, and to move.
const LINGER: Duration = Duration::from_secs(5);
/// Results come at most this much later, and in batches.
const LONGEST_PAUSE: Span = Span::from_micros(200);

#[cfg(test)]
mod tests;
