//! What the client's threads share: the engine, and whose turn it is to drive it.

use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::udp::{self, Gather, Waker};
use racksum_proto::error::SubmitError;
use racksum_proto::ids::OpId;
use racksum_proto::time::{Span, Time};

use crate::engine::{Engine, Next};

/// What the client's threads share.
#[derive(Debug)]
pub(crate) struct Driver {
    state: Mutex<State>,
    /// Threads that want the state while another one drives.
    wanted: AtomicUsize,
    /// An op ended, or nobody drives any more.
    changed: Condvar,
    /// There is something to drive in the background.
    pub(crate) work: Condvar,
    pub(crate) waker: Waker,
    gather: Gather,
}

/// The engine, and who drives it.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) engine: Engine,
    /// Some thread drives the sockets.
    pub(crate) driving: bool,
    /// Threads that wait for an op: one of them drives, and not the client's own thread.
    waiting: usize,
    /// Those of them that sleep, since another drives.
    pub(crate) asleep: usize,
    /// Those of the sleeping that were woken and have yet to look: the driver lets them.
    woken: usize,
    pub(crate) closed: bool,
    /// The engine panicked: every op has ended, and it is not to be used again.
    broken: bool,
}

impl State {
    /// Lets the engine work. If it panics it is never used again, and every op ends with an error:
    /// a thread that unwound while it drove would leave the others waiting for ever.
    pub(crate) fn run<T>(&mut self, work: impl FnOnce(&mut Engine) -> T) -> Option<T> {
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
    pub(crate) fn submit(
        &mut self,
        start: impl FnOnce(&mut Engine) -> Result<OpId, SubmitError>,
    ) -> Result<OpId, SubmitError> {
        self.run(start).unwrap_or_else(|| Err(SubmitError::Ended { why: PANICKED.into() }))
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
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.wanted.fetch_add(1, Relaxed);
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.wanted.fetch_sub(1, Relaxed);
        state
    }

    /// Drives the sockets until `done`, or waits while another thread does that waits itself.
    pub(crate) fn await_that<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        done: impl FnMut(&mut State) -> bool,
    ) -> MutexGuard<'a, State> {
        self.await_until(Time::NEVER, state, done)
    }

    /// The same, but not beyond `deadline`: then it may not be done.
    pub(crate) fn await_until<'a>(
        &'a self,
        deadline: Time,
        mut state: MutexGuard<'a, State>,
        mut done: impl FnMut(&mut State) -> bool,
    ) -> MutexGuard<'a, State> {
        state.waiting += 1;
        while !done(&mut state) {
            let left = left_until(deadline);
            if left == Some(Span::ZERO) {
                break;
            }
            if state.driving {
                // The client's own thread may have to be told that it is no longer needed.
                self.waker.wake();
                state.asleep += 1;
                state = self.sleep(state, left);
                state.asleep -= 1;
                state.woken = state.woken.saturating_sub(1);
            } else {
                state = self.drive(deadline, state, &mut done);
            }
        }
        state.waiting -= 1;
        if state.waiting == 0 && !state.is_at_rest() {
            self.work.notify_one();
        }
        state
    }

    /// Sleeps until something has changed, but not longer than this.
    fn sleep<'a>(
        &self,
        state: MutexGuard<'a, State>,
        limit: Option<Span>,
    ) -> MutexGuard<'a, State> {
        match limit {
            None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(limit) => {
                let slept = self.changed.wait_timeout(state, Duration::from_nanos(limit.0));
                slept.unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }

    /// Drives the sockets until `done`, or until `deadline`; nobody else does.
    fn drive<'a>(
        &'a self,
        deadline: Time,
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
            state = self.step(left, state);
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

    /// Waits until no other rank can lack a sum that this one has, in a job that may move, where it
    /// goes on they would wait for this rank in vain; but not longer than this. Returns whether
    /// none can.
    pub(crate) fn is_unneeded_within(&self, limit: Duration) -> bool {
        let is_needed = |state: &mut State| !state.is_idle() && state.engine.rests_at().is_some();
        let waited = self.changed.wait_timeout_while(self.lock(), limit, is_needed);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Has all who sleep look whether what they wait for has come.
    pub(crate) fn wake_waiting(&self, state: &mut State) {
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

    /// Does what is due, or waits for something to happen, but not longer than `limit`. The lock is
    /// free while it waits.
    pub(crate) fn step<'a>(
        &'a self,
        limit: Option<Span>,
        mut state: MutexGuard<'a, State>,
    ) -> MutexGuard<'a, State> {
        let limited = |patience: Option<Span>| limit.into_iter().chain(patience).min();
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
                drop(udp::wait(&[self.waker.as_fd()], limited(patience)));
                self.waker.drain();
            }
            Next::Wait(patience) => {
                let (socket, groups) = state.engine.sockets();
                drop(state);
                let sockets = std::iter::once(&*socket).chain(groups.iter());
                let mut fds = [self.waker.as_fd(); udp::MAX_FDS];
                fds.iter_mut().skip(1).zip(sockets).for_each(|(fd, socket)| *fd = socket.as_fd());
                let count = 2 + groups.len();
                let ready = udp::wait(&fds[..count.min(fds.len())], limited(patience));
                if ready.unwrap_or(1) & 1 != 0 {
                    self.waker.drain();
                }
            }
        }
        self.lock()
    }

    /// Sends the first of an op that was just submitted, and sees to it that somebody drives.
    pub(crate) fn set_off(&self, mut state: MutexGuard<'_, State>) {
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
    pub(crate) fn drive_in_background(&self) {
        let mut state = self.lock();
        let needless = |state: &mut State| state.waiting > 0 || state.is_at_rest();
        while !state.closed {
            if needless(&mut state) {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            } else {
                let told = |state: &mut State| state.closed || needless(state);
                state = self.drive(Time::NEVER, state, told);
            }
        }
    }
}

/// How long it is until then; nothing if it never is.
fn left_until(deadline: Time) -> Option<Span> {
    (deadline < Time::NEVER).then(|| deadline.since(Clock::start().now()))
}

/// Why nothing can be started once the engine has panicked.
const PANICKED: &str = "a thread of the client panicked";
/// Results come at most this much later, and in batches.
const LONGEST_PAUSE: Span = Span::from_micros(200);
