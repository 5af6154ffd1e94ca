//! The state that the client's threads share: the engine, and which thread drives it.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::task;
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::udp::{self, Gather, Waker};
use racksum_proto::error::SubmitError;
use racksum_proto::ids::OpId;
use racksum_proto::time::{Span, Time};

use crate::engine::{Engine, Next, Readable};
use crate::span::span;

/// The state that the client's threads share.
#[derive(Debug)]
pub(crate) struct Driver {
    state: Mutex<State>,
    /// The number of threads that wait to lock the state.
    wanted: AtomicUsize,
    /// Signals that an op ended, or that no thread drives the sockets any more.
    changed: Condvar,
    /// Signals that the background thread has work.
    pub(crate) work: Condvar,
    pub(crate) waker: Waker,
    gather: Gather,
}

/// The engine, and the threads that drive it or wait for it.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) engine: Engine,
    /// Whether a thread drives the sockets.
    pub(crate) driving: bool,
    /// The number of threads that wait for an op. One of them drives the sockets, instead of the
    /// client's own thread.
    waiting: usize,
    /// The number of threads that sleep until the state changes, because another one drives.
    pub(crate) asleep: usize,
    /// The number of woken threads that have not rechecked the state yet. The driving thread yields
    /// to them.
    woken: usize,
    /// The wakers of the tasks that await an op, by op.
    wakers: BTreeMap<OpId, task::Waker>,
    pub(crate) closed: bool,
    /// Set once the engine has panicked: every op has ended, and the engine is never used again.
    broken: bool,
}

impl State {
    /// Runs `work` on the engine. If the engine panics, every op ends with an error and the engine
    /// is never used again. If a driving thread unwound instead, the others would wait forever.
    pub(crate) fn run<T>(&mut self, work: impl FnOnce(&mut Engine) -> T) -> Option<T> {
        if self.broken {
            return None;
        }
        // The engine may be in any state after a panic, and `broken` prevents any further use of
        // it.
        let worked = catch_unwind(AssertUnwindSafe(|| work(&mut self.engine)));
        if worked.is_err() {
            self.broken = true;
            self.engine.give_up(PANICKED);
        }
        worked.ok()
    }

    /// Starts an op.
    pub(crate) fn submit(
        &mut self,
        start: impl FnOnce(&mut Engine) -> Result<OpId, SubmitError>,
    ) -> Result<OpId, SubmitError> {
        self.run(start).unwrap_or_else(|| Err(SubmitError::Ended { why: PANICKED.into() }))
    }

    /// Returns whether an op has ended. If not, stores `waker`, which is woken when the op ends.
    pub(crate) fn poll_ended(&mut self, op: OpId, waker: &task::Waker) -> bool {
        let has_ended = !self.engine.is_in_flight(op);
        if !has_ended {
            self.wakers.insert(op, waker.clone());
        }
        has_ended
    }

    /// Abandons an op that no caller will wait for.
    pub(crate) fn abandon(&mut self, op: OpId) {
        self.wakers.remove(&op);
        self.engine.abandon(op);
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.broken || self.engine.is_idle()
    }

    pub(crate) fn is_at_rest(&self) -> bool {
        self.broken || self.engine.is_at_rest()
    }
}

impl Driver {
    pub(crate) fn new(engine: Engine) -> std::io::Result<Self> {
        let gather = Gather::new(engine.sockets().0.report().got_receive, LONGEST_PAUSE);
        Ok(Self {
            wanted: AtomicUsize::new(0),
            state: Mutex::new(State {
                engine,
                driving: false,
                waiting: 0,
                asleep: 0,
                woken: 0,
                wakers: BTreeMap::new(),
                closed: false,
                broken: false,
            }),
            changed: Condvar::new(),
            work: Condvar::new(),
            waker: Waker::new()?,
            gather,
        })
    }

    /// Locks the state. The lock is never poisoned, because [`State::run`] catches panics of the
    /// engine.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.wanted.fetch_add(1, Relaxed);
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.wanted.fetch_sub(1, Relaxed);
        state
    }

    /// Drives the sockets, or sleeps while another thread drives them, until `done` returns true.
    pub(crate) fn await_that<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        done: impl FnMut(&mut State) -> bool,
    ) -> MutexGuard<'a, State> {
        self.await_until(Time::NEVER, state, done)
    }

    /// Like [`await_that`](Self::await_that), but returns at `deadline` even if `done` has not
    /// returned true.
    pub(crate) fn await_until<'a>(
        &'a self,
        deadline: Time,
        mut state: MutexGuard<'a, State>,
        mut done: impl FnMut(&mut State) -> bool,
    ) -> MutexGuard<'a, State> {
        // Send before reading, because other ranks may be waiting for this rank's data. A wait with
        // a deadline may be too short for a second step, so its first step also reads.
        let first = if deadline < Time::NEVER { Readable::ALL } else { Readable::NONE };
        state.waiting += 1;
        while !done(&mut state) {
            let left = left_until(deadline);
            if left == Some(Span::ZERO) {
                break;
            }
            if state.driving {
                // The client's own thread may be driving, and stops once it is woken.
                self.waker.wake();
                state = self.sleep(state, left);
            } else {
                state = self.drive(deadline, first, state, &mut done);
            }
        }
        state.waiting -= 1;
        if state.waiting == 0 && !state.is_at_rest() {
            self.work.notify_one();
        }
        state
    }

    /// Sleeps until the state changes or `limit` has passed.
    fn sleep<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        limit: Option<Span>,
    ) -> MutexGuard<'a, State> {
        state.asleep += 1;
        state = match limit {
            None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(limit) => {
                let slept = self.changed.wait_timeout(state, Duration::from_nanos(limit.0));
                slept.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        state.asleep -= 1;
        state.woken = state.woken.saturating_sub(1);
        state
    }

    /// Drives the sockets until `done` returns true, or until `deadline`. The first step reads the
    /// `readable` sockets. No other thread may drive the sockets meanwhile.
    fn drive<'a>(
        &'a self,
        deadline: Time,
        mut readable: Readable,
        mut state: MutexGuard<'a, State>,
        mut done: impl FnMut(&mut State) -> bool,
    ) -> MutexGuard<'a, State> {
        debug_assert!(!state.driving, "two threads would wake each other for every datagram");
        state.driving = true;
        while !done(&mut state) {
            let left = left_until(deadline);
            if left == Some(Span::ZERO) {
                break;
            }
            let Some(next) = self.advance(readable, &mut state) else { continue };
            // The step may have made `done` true without ending an op.
            if next != Next::Step && done(&mut state) {
                break;
            }
            (state, readable) = self.wait(next, left, state);
        }
        state.driving = false;
        self.wake_waiting(&mut state);
        state
    }

    /// Runs `work` on the engine, and wakes all waiting threads so that they check its effect.
    /// Returns `None` if the engine is broken.
    pub(crate) fn with_engine<T>(&self, work: impl FnOnce(&mut Engine) -> T) -> Option<T> {
        let mut state = self.lock();
        let result = state.run(work);
        self.wake_waiting(&mut state);
        drop(state);
        self.work.notify_all();
        self.waker.wake();
        result
    }

    /// Waits up to `limit` until no other rank can lack a sum that this rank has. In a job that may
    /// move, a rank without that sum would need this rank after the move. Returns false on timeout.
    /// Returns true without waiting while an op is in flight or after the session has ended.
    pub(crate) fn is_done_within(&self, limit: Duration) -> bool {
        let deadline = Clock::start().now() + span(limit);
        let mut state = self.lock();
        while !state.is_idle() && state.engine.rests_at().is_some() {
            let left = left_until(deadline);
            if left == Some(Span::ZERO) {
                return false;
            }
            state = self.sleep(state, left);
        }
        true
    }

    /// Wakes the tasks whose ops have ended, and all sleeping threads, which check their own
    /// conditions.
    pub(crate) fn wake_waiting(&self, state: &mut State) {
        let State { wakers, engine, .. } = state;
        wakers.extract_if(.., |op, _| !engine.is_in_flight(*op)).for_each(|(_, it)| it.wake());
        state.woken = state.asleep;
        // A notification is a system call even if no thread sleeps.
        if state.asleep > 0 {
            self.changed.notify_all();
        }
    }

    /// Runs one step of the engine, and wakes waiting threads if ops have ended. Returns the next
    /// action to take, or `None` if the engine is broken.
    pub(crate) fn advance(&self, readable: Readable, state: &mut State) -> Option<Next> {
        let progress = state.run(|engine| engine.step(readable));
        if progress.is_none_or(|progress| progress.ended) {
            self.wake_waiting(state);
        }
        Some(progress?.next)
    }

    /// Waits up to `limit` for an event, unless the engine can continue immediately. Releases the
    /// lock during the wait. Returns the sockets that may hold datagrams afterwards.
    pub(crate) fn wait<'a>(
        &'a self,
        next: Next,
        limit: Option<Span>,
        state: MutexGuard<'a, State>,
    ) -> (MutexGuard<'a, State>, Readable) {
        let limited = |patience: Option<Span>| limit.into_iter().chain(patience).min();
        let mut readable = Readable::ALL;
        // A thread that submits an op, or waits for one that has ended, must not wait until the
        // engine runs out of work.
        let yields = self.wanted.load(Relaxed) > 0 || state.woken > 0;
        if next == Next::Step && !yields {
            return (state, readable);
        }
        let (socket, groups) = state.engine.sockets();
        drop(state);
        if yields {
            std::thread::yield_now();
        }
        match next {
            Next::Step => {}
            Next::Wait { backlog, .. } if self.gather.is_due(backlog) => {
                // Ignore an error: the next receive reports it.
                drop(self.gather.pause(&self.waker));
            }
            Next::Sleep(patience) => {
                drop(udp::wait(&[self.waker.as_fd()], limited(patience)));
                self.waker.drain();
            }
            Next::Wait { patience, .. } => {
                let sockets = std::iter::once(&*socket).chain(groups.iter());
                let mut fds = [self.waker.as_fd(); udp::MAX_FDS];
                fds.iter_mut().skip(1).zip(sockets).for_each(|(fd, socket)| *fd = socket.as_fd());
                let count = 2 + groups.len();
                // Treat a failed wait as readiness: the next receive reports the error.
                let ready = udp::wait(&fds[..count.min(fds.len())], limited(patience));
                let ready = ready.unwrap_or(u64::MAX);
                if ready & 1 != 0 {
                    self.waker.drain();
                }
                readable = Readable { own: ready & 2 != 0, groups: ready & !3 != 0 };
            }
        }
        (self.lock(), readable)
    }

    /// Sends the first datagrams of a submitted op, and ensures that a thread drives it.
    pub(crate) fn set_off(&self, mut state: MutexGuard<'_, State>) {
        self.advance(Readable::ALL, &mut state);
        let driven = state.driving || state.waiting > 0;
        drop(state);
        if driven {
            self.waker.wake();
        } else {
            self.work.notify_one();
        }
    }

    /// Drives ops that no thread waits for, until the client is closed.
    pub(crate) fn drive_in_background(&self) {
        let mut state = self.lock();
        let needless = |state: &mut State| state.waiting > 0 || state.is_at_rest();
        while !state.closed {
            if needless(&mut state) {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            } else {
                let is_done = |state: &mut State| state.closed || needless(state);
                state = self.drive(Time::NEVER, Readable::ALL, state, is_done);
            }
        }
    }
}

/// Returns the time left until `deadline`, or `None` if the deadline is [`Time::NEVER`].
fn left_until(deadline: Time) -> Option<Span> {
    (deadline < Time::NEVER).then(|| deadline.since(Clock::start().now()))
}

/// The error text of ops once the engine has panicked.
const PANICKED: &str = "a thread of the client panicked";
/// The longest time for which the driving thread leaves results in the sockets, to receive them in
/// batches.
const LONGEST_PAUSE: Span = Span::from_micros(200);
