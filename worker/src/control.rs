//! The control connections of a worker: one to each aggregator of its job.

use std::ops::Deref;
use std::slice;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::quic::{CallOptions, Credentials, Ended, LEAVE, run_session};
use racksum_proto::control::{FromAggregator, FromWorker, Join, LostRank};
use racksum_proto::ids::OpId;
use racksum_proto::time::Span;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use crate::error::ConnectError;
use crate::options::ConnectOptions;
use crate::route::Route;
use crate::span::span;

/// The time limit for an aggregator to answer an attempt to connect.
const CONNECT_PATIENCE: Span = Span::from_secs(5);
/// The time limit for an answer from an aggregator that a job may move to. It is short because the
/// job can move to another aggregator instead.
const MOVE_PATIENCE: Span = Span::from_secs(1);

/// An event on a control connection.
#[derive(Debug)]
pub(crate) enum Event {
    /// A message from the aggregator.
    Received(FromAggregator),
    /// The connection is over.
    Closed(ConnectError),
    /// The trial with this number, of other aggregators that the job may move to, has ended. The
    /// error is a sentence for the operator.
    Tried { trial: u64, result: Result<(), String> },
    /// The search with this number, for a standby that would admit the rank, has ended. The result
    /// is a set of aggregators, or the reason why each set would not admit the rank.
    Sought { search: u64, result: Result<Vec<String>, String> },
}

/// A message to the worker.
#[derive(Debug)]
pub(crate) enum Message {
    /// An event on a control connection of a session. `place` is the index of the aggregator in
    /// that session.
    Event { session: u32, place: u8, event: Event },
    /// The client was closed.
    Stop(Closed),
}

/// The state of a client when it was closed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Closed {
    /// The client's next op, if none was in flight.
    pub(crate) next_op: Option<OpId>,
}

/// The queue of all messages to a worker.
#[derive(Debug)]
pub(crate) struct Mailbox {
    sender: Sender<Message>,
    receiver: Receiver<Message>,
    session: u32,
    /// Set once the client is closed.
    pub(crate) closed: Option<Closed>,
    /// A text that names what the attempt to connect is waiting for. Other threads may read it.
    pub(crate) awaited: Awaited,
}

/// A text, shared between threads, that names what an attempt to connect is waiting for.
#[derive(Debug, Clone, Default)]
pub struct Awaited(Arc<Mutex<String>>);

impl Awaited {
    /// Returns the current text.
    #[must_use]
    pub fn now(&self) -> String {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns whether the attempt to connect has ended.
    #[cfg(test)]
    pub(crate) fn is_alone(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    pub(crate) fn set(&self, what: String) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = what;
    }
}

/// A handle that cancels an attempt to connect.
#[derive(Debug, Clone)]
pub struct CancelHandle {
    sender: Sender<Message>,
}

impl CancelHandle {
    /// Cancels the attempt. It ends with [`ConnectError::GivenUp`], unless it has already ended.
    pub fn cancel(&self) {
        // The send fails only if the attempt has already ended.
        drop(self.sender.send(Message::Stop(Closed { next_op: None })));
    }
}

impl Mailbox {
    pub(crate) fn new() -> Self {
        let (sender, receiver) = channel();
        Self { sender, receiver, session: 0, closed: None, awaited: Awaited::default() }
    }

    /// Returns a sender to this mailbox.
    pub(crate) fn sender(&self) -> Sender<Message> {
        self.sender.clone()
    }

    /// Returns a handle with which another thread can cancel the attempt to connect.
    pub(crate) fn cancel_handle(&self) -> CancelHandle {
        CancelHandle { sender: self.sender() }
    }

    /// Begins the next session. The worker then ignores events of earlier sessions.
    pub(crate) fn next_session(&mut self) {
        self.session += 1;
    }

    /// Returns a sender of this session's events, for the aggregator at `place`.
    pub(crate) fn events(&self, place: u8) -> Events {
        Events { sender: self.sender(), session: self.session, place }
    }

    /// Ends the session, then waits for `pause` or until the client is closed.
    pub(crate) fn pause(&mut self, pause: Duration) {
        self.next_session();
        drop(self.recv(Some(pause)));
    }

    /// Receives the session's next event, with the place of its aggregator. Returns `None` if none
    /// arrives within `within`, or if the client is closed.
    pub(crate) fn recv(&mut self, within: Option<Duration>) -> Option<(u8, Event)> {
        let clock = Clock::start();
        let deadline = within.map(|within| clock.now() + span(within));
        while self.closed.is_none() {
            // Ignored messages of earlier sessions must not extend the wait.
            let message = match deadline {
                None => self.receiver.recv().ok(),
                Some(deadline) => {
                    let left = Duration::from_nanos(deadline.since(clock.now()).0);
                    Some(self.receiver.recv_timeout(left).ok()?)
                }
            };
            match message {
                Some(Message::Event { session, place, event }) if session == self.session => {
                    return Some((place, event));
                }
                Some(Message::Event { .. }) => {}
                Some(Message::Stop(closed)) => self.closed = Some(closed),
                None => self.closed = Some(Closed { next_op: None }),
            }
        }
        None
    }
}

/// The sender of a control connection's events to the worker.
#[derive(Debug, Clone)]
pub(crate) struct Events {
    sender: Sender<Message>,
    session: u32,
    place: u8,
}

impl Events {
    /// Forwards an aggregator's message to a rank of a job with `world` ranks. Returns false if the
    /// connection should stop receiving.
    fn forward(&self, message: FromAggregator, world: u16) -> bool {
        match check_ranks(&message, world) {
            Ok(()) => self.send(Event::Received(message)),
            Err(why) => {
                self.send(Event::Closed(ConnectError::Protocol(why)));
                false
            }
        }
    }

    /// Sends an event. Returns false if the worker no longer receives.
    pub(crate) fn send(&self, event: Event) -> bool {
        let Self { ref sender, session, place } = *self;
        sender.send(Message::Event { session, place, event }).is_ok()
    }
}

/// Checks that a message names only ranks of the job, and at most as many as the job has, because
/// the receiver stores and shows these ranks.
fn check_ranks(message: &FromAggregator, world: u16) -> Result<(), String> {
    let ranks = match message {
        FromAggregator::Waiting { missing: ranks, .. }
        | FromAggregator::PeerLost { ranks, .. }
        | FromAggregator::Present { ranks } => ranks,
        FromAggregator::ContinueWithout(LostRank { rank, .. })
        | FromAggregator::RefusedRank { rank, .. } => slice::from_ref(rank),
        _ => return Ok(()),
    };
    if let Some(rank) = ranks.iter().find(|rank| **rank >= world) {
        return Err(format!("it named rank {rank} in a job of {world} ranks"));
    }
    if ranks.len() > usize::from(world) {
        return Err(format!("it named {} ranks in a job of {world} ranks", ranks.len()));
    }
    Ok(())
}

/// Returns the time limit for an aggregator to answer a rank that joins a job, or that moves with
/// it. `addresses` is the number of the aggregator's addresses that are still to be tried.
pub(crate) fn patience(options: &ConnectOptions, moves: bool, addresses: usize) -> Span {
    // The limit is shorter than the join timeout, because an error about a missing answer is more
    // useful than one about an expired join timeout. The standbys and the other addresses of the
    // aggregator also need a share of the join timeout.
    let others = (1 + options.standbys.len() as u64) * addresses.max(1) as u64;
    let patience = Span::from_millis(span(options.join_timeout).as_millis() * 9 / 10 / others);
    patience.min(if moves { MOVE_PATIENCE } else { CONNECT_PATIENCE })
}

/// A control connection, served by a thread of its own.
#[derive(Debug)]
pub(crate) struct Control {
    sender: UnboundedSender<FromWorker>,
    thread: Option<JoinHandle<()>>,
    /// The last message, sent on drop.
    parting: FromWorker,
}

impl Control {
    /// Starts a thread that connects to one aggregator of the mailbox's session and asks to prove
    /// the data path. The aggregator must answer within `patience`. `wish` is the message with
    /// which the rank will join; it contains the aggregator's place.
    pub(crate) fn start(
        route: &Route,
        wish: &Join,
        (options, patience): (&ConnectOptions, Span),
        mailbox: &Mailbox,
    ) -> Result<Self, ConnectError> {
        let credentials = Credentials::read_blocking(options.identity.clone(), options.insecure)?;
        let moves = wish.resume.is_some();
        // Until the session is complete, dropping the connection must leave the job as it was.
        let parting = match (moves, wish.rejoin) {
            (true, _) => FromWorker::Move,
            (_, true) => FromWorker::CancelRejoin,
            _ => LEAVE,
        };
        let (events, world) = (mailbox.events(wish.stripe.0), wish.world);
        let first = FromWorker::Prove { version: wish.version };
        let (to, from) = (route.to, route.caller());
        let (sender, messages) = unbounded_channel();
        let runtime = racksum_net::runtime::single_threaded()?;
        let thread = std::thread::Builder::new().name("control".into()).spawn(move || {
            runtime.block_on(async {
                let forwarder = events.clone();
                let on_message = move |message| forwarder.forward(message, world);
                let caller = CallOptions { from, credentials, patience };
                let ended = run_session(to, first, &caller, messages, on_message).await;
                // The send fails only if the worker is gone.
                events.send(Event::Closed(match ended {
                    Ended::Unconnected(error) => error.into(),
                    Ended::Silent => ConnectError::Silent,
                    ended @ (Ended::Closed(_) | Ended::Parted) => {
                        ConnectError::Closed(ended.to_string())
                    }
                }));
            });
        })?;
        Ok(Self { sender, thread: Some(thread), parting })
    }

    pub(crate) fn send(&self, message: FromWorker) {
        // Ignore a failed send: a closed connection has already reported `Event::Closed`.
        drop(self.sender.send(message));
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // `Controls` may have sent the last message already; the connection then ignores this one.
        self.send(self.parting.clone());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// The control connections to all aggregators of a session.
#[derive(Debug, Default)]
pub(crate) struct Controls(Vec<Control>);

impl Deref for Controls {
    type Target = [Control];

    fn deref(&self) -> &[Control] {
        &self.0
    }
}

impl FromIterator<Control> for Controls {
    fn from_iter<T: IntoIterator<Item = Control>>(controls: T) -> Self {
        Self(controls.into_iter().collect())
    }
}

impl Controls {
    /// Makes the rank a member, which leaves the job when its connections are dropped.
    pub(crate) fn stay(&mut self) {
        self.0.iter_mut().for_each(|control| control.parting = LEAVE);
    }

    /// Sends `last` as the last message on each connection, and closes the connections.
    pub(crate) fn close(mut self, last: &FromWorker) {
        self.0.iter_mut().for_each(|control| control.parting = last.clone());
    }
}

impl Drop for Controls {
    fn drop(&mut self) {
        // Send all last messages before waiting for a connection to close, so that a slow
        // aggregator does not delay the message to the others.
        self.0.iter().for_each(|control| control.send(control.parting.clone()));
    }
}

/// Senders that report the loss of ranks that this client represents: to the job's current
/// aggregators, and again to the new aggregators after a move.
#[derive(Debug, Clone, Default)]
pub(crate) struct ControlSenders {
    reports: Arc<Mutex<Reports>>,
}

#[derive(Debug, Default)]
struct Reports {
    to: Vec<UnboundedSender<FromWorker>>,
    parted: Vec<LostRank>,
}

impl ControlSenders {
    /// Sends later reports to these connections, and repeats all earlier reports to them.
    pub(crate) fn set(&self, controls: &[Control]) {
        let mut reports = self.lock();
        reports.to = controls.iter().map(|control| control.sender.clone()).collect();
        // Repeat all reports, because those sent while the job moved have reached no aggregator.
        reports.parted.iter().for_each(|parted| reports.send(*parted));
    }

    /// Reports that a rank is lost.
    pub(crate) fn part(&self, parted: LostRank) {
        let mut reports = self.lock();
        if reports.parted.iter().all(|known| known.rank != parted.rank) {
            reports.parted.push(parted);
            reports.send(parted);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Reports> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reports {
    fn send(&self, parted: LostRank) {
        for sender in &self.to {
            // Ignore a failed send: a closed connection has already reported `Event::Closed`.
            drop(sender.send(FromWorker::RankLost(parted)));
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use racksum_proto::loss::Loss;
    use tokio::sync::mpsc::UnboundedReceiver;

    use super::*;

    /// Returns a connection of a member, and the messages that it sends.
    pub(crate) fn control() -> (Control, UnboundedReceiver<FromWorker>) {
        let (sender, messages) = unbounded_channel();
        (Control { sender, thread: None, parting: LEAVE }, messages)
    }

    #[test]
    fn an_aggregator_that_names_ranks_beyond_the_world_is_heard_no_more() {
        let (sender, receiver) = channel();
        let events = Events { sender, session: 0, place: 0 };
        let waiting = |missing| FromAggregator::Waiting { missing, waited_ms: 0 };
        let lost = |ranks| FromAggregator::PeerLost { ranks, why: Loss::Died };
        let without = |rank| FromAggregator::ContinueWithout(LostRank { rank, why: Loss::Died });
        for of_world in [waiting(vec![0, 1]), lost(vec![1]), without(1)] {
            assert!(events.forward(of_world.clone(), 2));
            let Message::Event { event: Event::Received(message), .. } = receiver.recv().unwrap()
            else {
                panic!("the message is not passed on")
            };
            assert_eq!(message, of_world);
        }
        let named = |ranks: Vec<u16>| [waiting(ranks.clone()), lost(ranks)];
        let beyond = named(vec![0, 2]).into_iter().chain([without(2)]);
        let beyond = beyond.map(|message| (message, "it named rank 2 in a job of 2 ranks"));
        let often = named(vec![1; 9000])
            .map(|message| (message, "it named 9000 ranks in a job of 2 ranks"));
        for (message, why) in beyond.chain(often) {
            assert!(!events.forward(message, 2), "{why}");
            let Message::Event { event: Event::Closed(error), .. } = receiver.recv().unwrap()
            else {
                panic!("{why}: the connection is not closed")
            };
            assert!(error.to_string().ends_with(why), "{error}");
        }
    }

    #[test]
    fn a_connection_that_is_slow_to_close_does_not_hold_back_the_last_message_to_another() {
        let ((mut first, _first_messages), (second, mut messages)) = (control(), control());
        let (closed, is_closed) = channel();
        // The first connection closes only once the second one has its message.
        let slow = std::thread::spawn(move || {
            let clock = Clock::start();
            let began = clock.now();
            while messages.try_recv() != Ok(FromWorker::Move) {
                assert!(
                    clock.now().since(began) < Span::from_secs(100),
                    "the second connection got no message"
                );
                std::thread::yield_now();
            }
            closed.send(()).unwrap();
        });
        first.thread = Some(slow);
        Controls::from_iter([first, second]).close(&FromWorker::Move);
        is_closed.try_recv().unwrap();
    }

    #[test]
    fn who_has_gone_while_a_job_moves_is_named_where_it_goes_on() {
        let gone = |rank| LostRank { rank, why: Loss::Died };
        let (senders, (before, mut messages)) = (ControlSenders::default(), control());
        senders.set(slice::from_ref(&before));
        senders.part(gone(1));
        assert_eq!(messages.try_recv().unwrap(), FromWorker::RankLost(gone(1)));
        drop((before, messages));
        senders.part(gone(2));
        let (after, mut messages) = control();
        senders.set(slice::from_ref(&after));
        senders.part(gone(3));
        for rank in 1..=3 {
            assert_eq!(messages.try_recv().unwrap(), FromWorker::RankLost(gone(rank)));
        }
    }
}
