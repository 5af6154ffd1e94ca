//! The control server: one QUIC connection a rank, for as long as the rank lives.

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use racksum_net::quic::frames::{self, FrameError};
use racksum_net::quic::{not_connected, quinn};
use racksum_proto::control::{FromAggregator, FromWorker, Loss};
use racksum_proto::ids::OpId;
use tokio::sync::mpsc::Receiver;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use crate::door::Doors;
use crate::handshake::{STRANGERS, answer, shake_hands};
use crate::lifelines::Lifelines;
use crate::parent::call;
use crate::registry::{Joined, Registry, Seat, settle};
use crate::visit::serve_caller;
use crate::words::Words;

/// Callers at a time that have not joined yet, whatever they do. Twice the ranks of a large job.
pub(crate) const MAX_STRANGERS: usize = 512;
/// How long a handshake may take, and then a connection to say who it is.
pub(crate) const JOIN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long ranks are told of the end.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a message may wait until a rank has read enough of those before; then it is lost.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a waiting rank is told whom it waits for.
pub(crate) const WAITING_PERIOD: Duration = Duration::from_millis(500);
/// How often a multicast group is probed.
const PROBE_PERIOD: Duration = Duration::from_millis(20);

/// The registry, shared by the connections. No lock is held across a wait.
pub(crate) type Shared = Arc<Mutex<Registry>>;

pub(crate) fn lock(registry: &Shared) -> MutexGuard<'_, Registry> {
    registry.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What serves callers.
#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) registry: Shared,
    pub(crate) lifelines: Lifelines,
    pub(crate) doors: Doors,
    /// Where it is called.
    pub(crate) addr: Option<SocketAddr>,
    /// Tells that some who were believed when they called are not any more.
    pub(crate) disbelieved: watch::Receiver<()>,
}

/// Serves until the endpoint is closed or the aggregator has failed, with at most `strangers`
/// callers at a time that have not joined.
pub(crate) async fn serve(
    endpoint: quinn::Endpoint,
    registry: Shared,
    strangers: usize,
    mut failure: watch::Receiver<Option<String>>,
    disbelieved: watch::Receiver<()>,
) {
    let lifelines = Lifelines::serve(&endpoint, strangers).await;
    let (doors, addr) = (Doors::new(strangers), endpoint.local_addr().ok());
    let server = Server { registry, lifelines, doors, addr, disbelieved };
    loop {
        let incoming = tokio::select! {
            incoming = endpoint.accept() => incoming,
            Ok(_) = failure.wait_for(Option::is_some) => {
                lock(&server.registry).stop();
                endpoint.close(1u32.into(), b"the aggregator failed");
                None
            }
        };
        let Some(incoming) = incoming else { break };
        let from = incoming.remote_address();
        let mut server = server.clone();
        server.disbelieved.mark_unchanged();
        let knows = lock(&server.registry).knows_identities();
        let Some((connecting, place)) = answer(incoming, &server.doors, knows) else { continue };
        tokio::spawn(async move {
            match shake_hands(connecting, place).await {
                Some(Ok((connection, place))) => serve_caller(connection, place, server).await,
                Some(Err(cause)) => STRANGERS.note(|left_out| {
                    tracing::warn!(left_out, "refused: {}", not_connected(from, cause));
                }),
                None => {}
            }
        });
    }
    // The ranks learn of the end by a word, which must still be sent, and not by silence.
    drop(timeout(CLOSE_TIMEOUT, endpoint.wait_idle()).await);
}

/// A rank that has joined.
pub(crate) struct Seated<'a> {
    pub(crate) seat: Seat,
    pub(crate) joined: Joined,
    pub(crate) send: quinn::SendStream,
    pub(crate) words: Words,
    pub(crate) inbox: Receiver<FromAggregator>,
    /// Returns once the rank has died.
    pub(crate) dead: Pin<Box<dyn Future<Output = ()> + Send + 'a>>,
}

impl Seated<'_> {
    /// Serves the rank to its end. Returns where its last words go, unless it is gone.
    pub(crate) async fn serve(
        self: Box<Self>,
        registry: &Shared,
        connection: &quinn::Connection,
    ) -> Option<quinn::SendStream> {
        let Self { seat, joined, mut send, mut words, mut inbox, dead } = *self;
        pursue(registry, &seat, joined);
        let streams = (&mut send, &mut words);
        let parting = tokio::select! {
            parting = attend(registry, &seat, connection, streams, &mut inbox) => parting,
            () = dead => Parting::Lost(Loss::Died),
        };
        note_parting(registry, &seat, parting, connection).await;
        (!matches!(parting, Parting::Lost(_))).then_some(send)
    }
}

/// Tells the registry how a rank and its job have parted.
async fn note_parting(
    registry: &Shared,
    seat: &Seat,
    parting: Parting,
    connection: &quinn::Connection,
) {
    let now = Instant::now();
    match parting {
        Parting::Over => {}
        Parting::Moved => lock(registry).depart(seat, now),
        Parting::Left(next_op) => lock(registry).part(seat, next_op, now),
        Parting::Retreated => lock(registry).retreat(seat, now),
        Parting::Lost(why) => {
            let is_silent = why == Loss::Broke && timed_out(connection);
            let why = if is_silent { Loss::Silent } else { why };
            let ending = lock(registry).ending_by_loss(seat, why, now);
            let _fence = settle(registry, ending).await;
            lock(registry).leave(seat, why, Instant::now());
        }
    }
}

/// Ends a conversation so that its last words still arrive.
pub(crate) async fn end(connection: &quinn::Connection, mut send: quinn::SendStream) {
    drop(send.finish());
    drop(timeout(JOIN_TIMEOUT, connection.closed()).await);
}

/// Tells the rank something; returns false if it is gone or does not read. What is too long for one
/// message is refused in its place: a rank that hears nothing could not tell what is wrong.
pub(crate) async fn say(send: &mut quinn::SendStream, message: &FromAggregator) -> bool {
    let said = async {
        match frames::send(send, message).await {
            // Nothing of it has been sent.
            Err(FrameError::TooLong { len }) => {
                let reason = format!("what the aggregator has to say has {len} bytes, too many");
                tracing::error!("{reason}: this is a bug of racksum");
                frames::send(send, &FromAggregator::Refused { reason }).await
            }
            said => said,
        }
    };
    matches!(timeout(READ_TIMEOUT, said).await, Ok(Ok(())))
}

/// Whether a connection ended because nothing was heard for too long.
fn timed_out(connection: &quinn::Connection) -> bool {
    matches!(connection.close_reason(), Some(quinn::ConnectionError::TimedOut))
}

/// How a rank and its job parted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parting {
    /// The rank is gone.
    Lost(Loss),
    /// The rank has left, and may come back at this op.
    Left(Option<OpId>),
    /// The rank has not come back after all.
    Retreated,
    /// The rank goes on with its job elsewhere.
    Moved,
    /// The job is over, and the rank was told why.
    Over,
}

/// Passes messages both ways until the rank or its job is gone.
async fn attend(
    registry: &Shared,
    seat: &Seat,
    connection: &quinn::Connection,
    (send, words): (&mut quinn::SendStream, &mut Words),
    inbox: &mut Receiver<FromAggregator>,
) -> Parting {
    let joined = Instant::now();
    let mut tick = interval(WAITING_PERIOD);
    let mut heard_before = 0;
    loop {
        tokio::select! {
            message = inbox.recv() => {
                let Some(message) = message else { break Parting::Over };
                if !say(send, &message).await {
                    break Parting::Lost(Loss::Broke);
                }
            }
            word = words.0.recv() => {
                let Some(word) = word else { break Parting::Lost(Loss::Broke) };
                if let ControlFlow::Break(parting) = heed(registry, seat, send, word).await {
                    break parting;
                }
            }
            now = tick.tick() => {
                let received = connection.stats().udp_rx.datagrams;
                if std::mem::replace(&mut heard_before, received) != received {
                    lock(registry).hear_from(seat, now);
                }
                let looked = lock(registry).look_after(seat, now);
                if let Joined::Waiting(missing) = looked {
                    let waited = now.saturating_duration_since(joined);
                    let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
                    if !say(send, &FromAggregator::Waiting { missing, waited_ms }).await {
                        break Parting::Lost(Loss::Broke);
                    }
                } else {
                    pursue(registry, seat, looked);
                }
            }
        }
    }
}

/// Does what a member says.
async fn heed(
    registry: &Shared,
    seat: &Seat,
    send: &mut quinn::SendStream,
    word: FromWorker,
) -> ControlFlow<Parting> {
    const BROKE: ControlFlow<Parting> = ControlFlow::Break(Parting::Lost(Loss::Broke));
    match word {
        FromWorker::Heard => lock(registry).heard(seat),
        FromWorker::Also(join) => {
            let joined = lock(registry).also(seat, join, Instant::now());
            let Some(joined) = joined else { return BROKE };
            pursue(registry, seat, joined);
        }
        FromWorker::Parted(absent) if lock(registry).is_only(seat, absent.rank) => {
            return ControlFlow::Break(Parting::Lost(loss_of_only(absent.why)));
        }
        FromWorker::Parted(absent) => {
            if !lock(registry).may_part(seat, absent.rank) {
                return BROKE;
            }
            let ending = lock(registry).ending_below(seat, absent.why);
            let _fence = settle(registry, ending).await;
            lock(registry).parted(seat, absent);
        }
        FromWorker::Leave { next_op } => return ControlFlow::Break(Parting::Left(next_op)),
        FromWorker::Retreat => return ControlFlow::Break(Parting::Retreated),
        FromWorker::Withdraw => {
            let is_free = lock(registry).withdraw(seat);
            if is_free && !say(send, &FromAggregator::Free).await {
                return BROKE;
            }
        }
        FromWorker::Stay => {
            let joined = lock(registry).stay(seat);
            pursue(registry, seat, joined);
        }
        FromWorker::Move => return ControlFlow::Break(Parting::Moved),
        FromWorker::Prove { .. }
        | FromWorker::Arrived
        | FromWorker::Join(_)
        | FromWorker::Look(_)
        | FromWorker::AskStatus { .. }
        | FromWorker::Stop => return BROKE,
    }
    ControlFlow::Continue(())
}

/// How a member has lost its only rank, by its own word. What it says of other ranks' aggregators
/// cannot be: it has none below.
const fn loss_of_only(said: Loss) -> Loss {
    match said {
        Loss::Relay => Loss::Broke,
        // That it has left it may say with a word of its own as well.
        Loss::Died | Loss::Silent | Loss::Broke | Loss::Left => said,
    }
}

/// Does what a job needs next.
fn pursue(registry: &Shared, seat: &Seat, joined: Joined) {
    let (registry, seat) = (Arc::clone(registry), seat.clone());
    match joined {
        Joined::Probe => drop(tokio::spawn(probe(registry, seat))),
        Joined::Call => drop(tokio::spawn(call(registry, seat))),
        Joined::Waiting(_) | Joined::Ready => {}
    }
}

/// Probes a job's group until every rank that listens has heard it, or long enough.
pub(crate) async fn probe(registry: Shared, seat: Seat) {
    let mut tick = interval(PROBE_PERIOD);
    // Each probe is to have its time, also when this thread was kept from running for a while.
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let probes = lock(&registry).probes();
    for _ in 0..probes {
        tick.tick().await;
        if !lock(&registry).probe(&seat) {
            return;
        }
    }
    tick.tick().await;
    lock(&registry).end_probe(&seat);
}

#[cfg(test)]
mod tests;
