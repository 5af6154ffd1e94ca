//! The control connections of a worker: one to each aggregator of its job.

use std::slice;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use racksum_net::quic::{Caller, Credentials, Ended, LEAVE, converse};
use racksum_proto::control::{Absent, FromAggregator, FromWorker, Join};
use racksum_proto::ids::OpId;
use racksum_proto::time::Span;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use crate::error::ConnectError;
use crate::options::ConnectOptions;
use crate::route::Route;
use crate::span::span;

/// The time limit for an aggregator to answer a connection.
const CONNECT_PATIENCE: Span = Span::from_secs(5);
/// The time limit for an aggregator that a job may move to. It is short because another one may
/// suit better.
const MOVE_PATIENCE: Span = Span::from_secs(1);

/// An event on a control connection.
#[derive(Debug)]
pub(crate) enum Event {
    /// A message from the aggregator.
    Said(FromAggregator),
    /// The connection is over.
    Closed(ConnectError),
}

/// A message to the worker.
#[derive(Debug)]
pub(crate) enum Message {
    /// An event on a control connection, with its session and the place of its aggregator in it.
    Told { session: u32, place: u8, event: Event },
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
    tell: Sender<Message>,
    hear: Receiver<Message>,
    session: u32,
    /// Set once the client is closed.
    pub(crate) closed: Option<Closed>,
    /// The event that the attempt to connect waits for, for threads that watch it.
    pub(crate) awaited: Awaited,
}

/// A text that names what an attempt to connect waits for, shared with other threads.
#[derive(Debug, Clone, Default)]
pub struct Awaited(Arc<Mutex<String>>);

impl Awaited {
    /// Returns what is awaited now.
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
    tell: Sender<Message>,
}

impl CancelHandle {
    /// Cancels the attempt. It ends with [`ConnectError::GivenUp`], unless it has already ended.
    pub fn cancel(&self) {
        // The send fails only if the attempt has already ended.
        drop(self.tell.send(Message::Stop(Closed { next_op: None })));
    }
}

impl Mailbox {
    pub(crate) fn new() -> Self {
        let (tell, hear) = channel();
        Self { tell, hear, session: 0, closed: None, awaited: Awaited::default() }
    }

    /// Returns a sender to this mailbox.
    pub(crate) fn sender(&self) -> Sender<Message> {
        self.tell.clone()
    }

    /// Returns a handle with which another thread can cancel the attempt to connect.
    pub(crate) fn cancel_handle(&self) -> CancelHandle {
        CancelHandle { tell: self.sender() }
    }

    /// Begins the next session. The worker then ignores events of earlier sessions.
    pub(crate) fn next_session(&mut self) {
        self.session += 1;
    }

    /// Ends the session, then waits for `pause` or until the client is closed.
    pub(crate) fn pause(&mut self, pause: Duration) {
        self.next_session();
        drop(self.hear(Some(pause)));
    }

    /// Receives the session's next event, and the place of the connection that sent it. Returns
    /// `None` after `within`, or if the client is closed.
    pub(crate) fn hear(&mut self, within: Option<Duration>) -> Option<(u8, Event)> {
        while self.closed.is_none() {
            let word = match within {
                None => self.hear.recv().ok(),
                Some(within) => Some(self.hear.recv_timeout(within).ok()?),
            };
            match word {
                Some(Message::Told { session, place, event }) if session == self.session => {
                    return Some((place, event));
                }
                Some(Message::Told { .. }) => {}
                Some(Message::Stop(closed)) => self.closed = Some(closed),
                None => self.closed = Some(Closed { next_op: None }),
            }
        }
        None
    }
}

/// The sender of a control connection's events to the worker.
#[derive(Debug, Clone)]
struct Events {
    tell: Sender<Message>,
    session: u32,
    place: u8,
}

impl Events {
    /// Forwards an aggregator's message to a rank of a job with `world` ranks. Returns false if the
    /// connection should stop receiving.
    fn hear(&self, message: FromAggregator, world: u16) -> bool {
        match check_ranks(&message, world) {
            Ok(()) => self.send(Event::Said(message)),
            Err(why) => {
                self.send(Event::Closed(ConnectError::Protocol(why)));
                false
            }
        }
    }

    /// Sends an event. Returns false if the worker no longer receives.
    fn send(&self, event: Event) -> bool {
        let Self { ref tell, session, place } = *self;
        tell.send(Message::Told { session, place, event }).is_ok()
    }
}

/// Checks that a message names only ranks of the world, and at most as many as the world has. The
/// receiver stores and shows these ranks.
fn check_ranks(message: &FromAggregator, world: u16) -> Result<(), String> {
    let ranks = match message {
        FromAggregator::Waiting { missing: ranks, .. }
        | FromAggregator::PeerLost { ranks, .. }
        | FromAggregator::Present { ranks } => ranks,
        FromAggregator::Without(Absent { rank, .. }) | FromAggregator::RefusedRank { rank, .. } => {
            slice::from_ref(rank)
        }
        _ => return Ok(()),
    };
    if let Some(rank) = ranks.iter().find(|rank| **rank >= world) {
        return Err(format!("it named rank {rank} in a world of {world}"));
    }
    if ranks.len() > usize::from(world) {
        return Err(format!("it named {} ranks in a world of {world}", ranks.len()));
    }
    Ok(())
}

/// Returns the time limit for an aggregator to answer a rank that joins a job, or that moves with
/// it. The aggregator may have several `addresses`.
pub(crate) fn patience(options: &ConnectOptions, moves: bool, addresses: usize) -> Span {
    // The limit is shorter than the join timeout, because the lack of an answer is the more useful
    // error. The time is also shared with standbys and with the other addresses of the aggregator.
    let others = (1 + options.standbys.len() as u64) * addresses.max(1) as u64;
    let patience = Span::from_millis(span(options.join_timeout).as_millis() * 9 / 10 / others);
    patience.min(if moves { MOVE_PATIENCE } else { CONNECT_PATIENCE })
}

/// A control connection, served by a thread of its own.
#[derive(Debug)]
pub(crate) struct Control {
    say: UnboundedSender<FromWorker>,
    thread: Option<JoinHandle<()>>,
    /// The last message, sent on drop.
    parting: FromWorker,
}

impl Control {
    /// Connects to one aggregator of the mailbox's session and asks to prove the data path. The
    /// aggregator must answer within `patience`. `wish` holds its place and how the rank joins.
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
            (_, true) => FromWorker::Retreat,
            _ => LEAVE,
        };
        let (tell, session, place) = (mailbox.sender(), mailbox.session, wish.stripe.0);
        let world = wish.world;
        let first = FromWorker::Prove { version: wish.version };
        let events = Events { tell, session, place };
        let (to, from) = (route.to, route.caller());
        let (say, words) = unbounded_channel();
        let runtime = racksum_net::runtime::single_threaded()?;
        let thread = std::thread::Builder::new().name("control".into()).spawn(move || {
            runtime.block_on(async {
                let hear = events.clone();
                let hear = move |message| hear.hear(message, world);
                let caller = Caller { from, credentials, patience };
                let ended = converse(to, first, &caller, words, hear).await;
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
        Ok(Self { say, thread: Some(thread), parting })
    }

    /// Makes the rank a member: from now on, dropping the connection leaves the job.
    pub(crate) fn stay(&mut self) {
        self.parting = LEAVE;
    }

    /// Leaves the aggregator because the job goes on at another.
    pub(crate) fn depart(mut self) {
        self.parting = FromWorker::Move;
    }

    /// Leaves the job. The rank may rejoin at its next op.
    pub(crate) fn leave(mut self, next_op: Option<OpId>) {
        self.parting = FromWorker::Leave { next_op };
    }

    pub(crate) fn say(&self, word: FromWorker) {
        // A closed connection has already sent `Event::Closed`.
        drop(self.say.send(word));
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.say(self.parting.clone());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Senders that report lost ranks of this client to the job's current aggregators. After a move
/// they report these ranks again.
#[derive(Debug, Clone, Default)]
pub(crate) struct ControlSenders {
    spoken: Arc<Mutex<Spoken>>,
}

#[derive(Debug, Default)]
struct Spoken {
    to: Vec<UnboundedSender<FromWorker>>,
    parted: Vec<Absent>,
}

impl ControlSenders {
    /// Sends to these connections from now on.
    pub(crate) fn set(&self, controls: &[Control]) {
        let mut spoken = self.lock();
        spoken.to = controls.iter().map(|control| control.say.clone()).collect();
        // Reports that were sent while the job moved have reached no aggregator.
        spoken.parted.iter().for_each(|parted| spoken.say(*parted));
    }

    /// Reports that a rank is lost.
    pub(crate) fn part(&self, parted: Absent) {
        let mut spoken = self.lock();
        if spoken.parted.iter().all(|known| known.rank != parted.rank) {
            spoken.parted.push(parted);
            spoken.say(parted);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Spoken> {
        self.spoken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Spoken {
    fn say(&self, parted: Absent) {
        for voice in &self.to {
            // A closed connection has already sent `Event::Closed`.
            drop(voice.send(FromWorker::Parted(parted)));
        }
    }
}

#[cfg(test)]
mod tests {
    use racksum_proto::loss::Loss;

    use super::*;

    #[test]
    fn an_aggregator_that_names_ranks_beyond_the_world_is_heard_no_more() {
        let (tell, told) = channel();
        let events = Events { tell, session: 0, place: 0 };
        let waiting = |missing| FromAggregator::Waiting { missing, waited_ms: 0 };
        let lost = |ranks| FromAggregator::PeerLost { ranks, why: Loss::Died };
        let without = |rank| FromAggregator::Without(Absent { rank, why: Loss::Died });
        for of_world in [waiting(vec![0, 1]), lost(vec![1]), without(1)] {
            assert!(events.hear(of_world.clone(), 2));
            let Message::Told { event: Event::Said(said), .. } = told.recv().unwrap() else {
                panic!("it is passed on")
            };
            assert_eq!(said, of_world);
        }
        let named = |ranks: Vec<u16>| [waiting(ranks.clone()), lost(ranks)];
        let beyond = named(vec![0, 2]).into_iter().chain([without(2)]);
        let beyond = beyond.map(|message| (message, "it named rank 2 in a world of 2"));
        let often =
            named(vec![1; 9000]).map(|message| (message, "it named 9000 ranks in a world of 2"));
        for (message, why) in beyond.chain(often) {
            assert!(!events.hear(message, 2), "{why}");
            let Message::Told { event: Event::Closed(error), .. } = told.recv().unwrap() else {
                panic!("{why}: it is passed on")
            };
            assert!(error.to_string().ends_with(why), "{error}");
        }
    }

    #[test]
    fn who_has_gone_while_a_job_moves_is_named_where_it_goes_on() {
        let control = || {
            let (say, said) = unbounded_channel();
            (Control { say, thread: None, parting: LEAVE }, said)
        };
        let gone = |rank| Absent { rank, why: Loss::Died };
        let (senders, (before, mut heard)) = (ControlSenders::default(), control());
        senders.set(slice::from_ref(&before));
        senders.part(gone(1));
        assert_eq!(heard.try_recv().unwrap(), FromWorker::Parted(gone(1)));
        drop((before, heard));
        senders.part(gone(2));
        let (after, mut heard) = control();
        senders.set(slice::from_ref(&after));
        senders.part(gone(3));
        for rank in 1..=3 {
            assert_eq!(heard.try_recv().unwrap(), FromWorker::Parted(gone(rank)));
        }
    }
}
