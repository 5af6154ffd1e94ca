//! The control server: one QUIC connection a rank, for as long as the rank lives.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use racksum_net::quic::lifeline::{Lifeline, dead};
use racksum_net::quic::{Certificate, Role, frames, not_connected, quinn};
use racksum_proto::control::{CONTROL_VERSION, FromAggregator, FromWorker, Join, Loss};
use racksum_proto::ids::OpId;
use racksum_proto::peer_text::Unshown;
use tokio::sync::mpsc::{Receiver, channel};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use crate::admission::admit;
use crate::door::{self, Door, PLACES, PLACES_OF_ONE};
use crate::entry::enter;
use crate::handshake::{Known, NOT_CONNECTED, NOT_JOINED, answer, shake_hands};
use crate::lifelines::Lifelines;
use crate::parent::call;
use crate::paths::{PROOFS, PROOFS_OF_ONE, answers_elsewhere, serve_proof};
use crate::registry::{Caller, Joined, Registry, Seat, WORDS, settle};
use crate::status::status;
use crate::tenancy::Refusal;

/// Connections at a time that are no rank's: they have not joined yet, or are about to end. Twice
/// the ranks of a large job.
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
/// Words of a rank that may wait to be heeded.
const QUEUE: usize = 16;

/// The registry, shared by the connections. No lock is held across a wait.
pub(crate) type Shared = Arc<Mutex<Registry>>;

pub(crate) fn lock(registry: &Shared) -> MutexGuard<'_, Registry> {
    registry.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves until the endpoint is closed or the aggregator has failed, with at most `strangers`
/// connections that are no rank's.
pub(crate) async fn serve(
    endpoint: quinn::Endpoint,
    registry: Shared,
    strangers: usize,
    mut failure: watch::Receiver<Option<String>>,
) {
    let lifelines = Lifelines::serve(&endpoint, strangers).await;
    let (door, known) = (Door::new(PLACES, PLACES_OF_ONE), Known::default());
    let proofs = Door::new(PROOFS, PROOFS_OF_ONE);
    let addr = endpoint.local_addr().ok();
    loop {
        let incoming = tokio::select! {
            incoming = endpoint.accept() => incoming,
            Ok(_) = failure.wait_for(Option::is_some) => {
                lock(&registry).stop();
                endpoint.close(1u32.into(), b"the aggregator failed");
                None
            }
        };
        let Some(incoming) = incoming else { break };
        let from = incoming.remote_address();
        let most = lock(&registry).connections() + strangers;
        let Some((connecting, place)) = answer(incoming, &door, &known, most) else { continue };
        let (registry, lifelines) = (Arc::clone(&registry), lifelines.clone());
        let counts = (known.clone(), proofs.clone());
        tokio::spawn(async move {
            match shake_hands(connecting, place).await {
                Some(Ok((connection, place))) => {
                    serve_caller(connection, place, counts, registry, lifelines, addr).await;
                }
                Some(Err(cause)) => NOT_CONNECTED.note(|left_out| {
                    tracing::warn!(left_out, "refused: {}", not_connected(from, cause));
                }),
                None => {}
            }
        });
    }
    // The ranks learn of the end by a word, which must still be sent, and not by silence.
    drop(timeout(CLOSE_TIMEOUT, endpoint.wait_idle()).await);
}

/// Serves whoever calls.
async fn serve_caller(
    connection: quinn::Connection,
    mut place: door::Place,
    (known, proofs): (Known, Door),
    registry: Shared,
    lifelines: Lifelines,
    addr: Option<SocketAddr>,
) {
    let first = tokio::select! {
        first = timeout(JOIN_TIMEOUT, hear_first(&connection)) => first,
        () = place.needed() => return,
    };
    let Ok(Some((word, send, recv))) = first else { return };
    let _one = known.one_more();
    drop(place);
    let said = match word {
        FromWorker::Prove { version } => {
            serve_proof(&connection, &registry, &proofs, version, (send, recv)).await
        }
        word => Some((word, send, recv)),
    };
    let Some((word, mut send, recv)) = said else { return };
    match word {
        FromWorker::Join(join) => {
            serve_rank(&connection, join, (send, recv), registry, lifelines).await;
        }
        FromWorker::Look(join) => {
            let (_, certificate) = identify(&registry, &connection);
            let (identity, from) = (certificate.map(|it| it.name), connection.remote_address());
            let ranks = match answers_elsewhere(&registry, &connection) {
                Some(_) => Vec::new(),
                None => {
                    let asks = (identity.as_deref(), from.ip());
                    lock(&registry).present(&join, asks, Instant::now())
                }
            };
            if say(&mut send, &FromAggregator::Present { ranks }).await {
                end(&connection, send).await;
            }
        }
        FromWorker::AskStatus { version } => {
            let told = match addr.filter(|_| version == CONTROL_VERSION) {
                Some(addr) => tell_status(&connection, &registry, addr, &mut send).await,
                None => {
                    say(&mut send, &FromAggregator::WrongVersion { speaks: CONTROL_VERSION }).await
                }
            };
            if told {
                end(&connection, send).await;
            }
        }
        _ => {}
    }
}

/// Tells a caller what the aggregator does: an aggregator's identity of all jobs, others of the
/// jobs that the rules let them join. Returns false if the caller is gone.
async fn tell_status(
    connection: &quinn::Connection,
    registry: &Shared,
    addr: SocketAddr,
    send: &mut quinn::SendStream,
) -> bool {
    let (_, certificate) = identify(registry, connection);
    let mut told = status(registry, addr).await;
    if certificate.as_ref().is_none_or(|it| it.role != Role::Aggregator) {
        let rules = lock(registry).config().admit.clone();
        let identity = certificate.as_ref().map(|it| &*it.name);
        told.keep_only(|job| admit(&rules, identity, job).is_ok());
    }
    let mut parts = told.parts().into_iter().peekable();
    while let Some(part) = parts.next() {
        let more = parts.peek().is_some();
        if !say(send, &FromAggregator::Status { part: Unshown(part), more }).await {
            return false;
        }
    }
    true
}

/// Whether somebody vouches for callers, and for what of this one.
fn identify(registry: &Shared, connection: &quinn::Connection) -> (bool, Option<Certificate>) {
    let knows = lock(registry).knows_identities();
    (knows, knows.then(|| Certificate::of_peer(connection)).flatten())
}

/// Serves one rank from its join to its end.
async fn serve_rank(
    connection: &quinn::Connection,
    join: Join,
    (mut send, recv): (quinn::SendStream, quinn::RecvStream),
    registry: Shared,
    lifelines: Lifelines,
) {
    let (tell, mut inbox) = channel(WORDS);
    let addr = connection.remote_address();
    let (name, rank, relays) = (join.job.clone(), join.rank, join.relays);
    let mut words = Words::of(recv);
    let Ok(lifeline) = offer(&lifelines, &mut send).await else { return };
    let mut dead = std::pin::pin!(dead(connection, lifeline));
    let (knows, certificate) = identify(&registry, connection);
    let stranger = if join.relays && knows { no_aggregator(certificate.as_ref()) } else { None };
    let identity = certificate.map(|it| it.name);
    let joined = match stranger.or_else(|| answers_elsewhere(&registry, connection)) {
        Some(reason) => Err(Refusal::Never(reason)),
        None => {
            let caller = Caller { identity: identity.clone(), addr, tell };
            let entered = tokio::select! {
                entered = enter(&registry, (&mut send, &mut words), join, caller) => entered,
                () = &mut dead => return,
                _ = connection.closed() => return,
            };
            match entered {
                Some(joined) => joined,
                None => return end(connection, send).await,
            }
        }
    };
    match joined {
        Err(refusal) => {
            let reason = refusal.clone().why();
            NOT_JOINED.note(|left_out| {
                let job = &name;
                tracing::warn!(%job, rank, %addr, identity, reason, left_out, "join refused");
            });
            let refused = match refusal {
                Refusal::Draining => FromAggregator::Drain,
                // An aggregator may call again for its other ranks.
                Refusal::Never(_) | Refusal::WrongVersion(_) if relays => {
                    FromAggregator::RefusedRank { rank, reason }
                }
                Refusal::WrongVersion(_) => {
                    FromAggregator::WrongVersion { speaks: CONTROL_VERSION }
                }
                Refusal::Never(_) | Refusal::NoRoom(_) => FromAggregator::Refused { reason },
            };
            if say(&mut send, &refused).await {
                end(connection, send).await;
            }
        }
        Ok((seat, joined)) => {
            tracing::info!(job = %name, rank, %addr, identity, "rank joined");
            pursue(&registry, &seat, joined);
            let parting = tokio::select! {
                parting = attend(
                    &registry, &seat, connection, (&mut send, &mut words), &mut inbox
                ) => parting,
                () = &mut dead => Parting::Lost(Loss::Died),
            };
            note_parting(&registry, &seat, parting, connection).await;
            if !matches!(parting, Parting::Lost(_)) {
                end(connection, send).await;
            }
        }
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

/// Why somebody may not join for others, if so.
fn no_aggregator(certificate: Option<&Certificate>) -> Option<String> {
    let Some(Certificate { name, role, .. }) = certificate else {
        return Some("what joins for others must show that it is an aggregator".into());
    };
    let it = (*role != Role::Aggregator).then_some(role)?;
    Some(format!("{name:?} is no aggregator but a {it}, and joins for others"))
}

/// Offers a rank to lay a lifeline. The error says that the rank is gone.
async fn offer(
    lifelines: &Lifelines,
    send: &mut quinn::SendStream,
) -> Result<impl Future<Output = Lifeline> + use<>, ()> {
    let offered = lifelines.offer();
    if let Some((token, port, _)) = &offered {
        let (token, port) = (*token, *port);
        if !say(send, &FromAggregator::Lifeline { port, token }).await {
            return Err(());
        }
    }
    Ok(async move {
        let laid = match offered {
            Some((.., laid)) => laid.await.ok(),
            None => None,
        };
        laid.map_or(Lifeline::Impossible, Lifeline::Laid)
    })
}

/// What a rank says, read by a task of its own: reading a frame must not be cancelled half-way.
pub(crate) struct Words(pub(crate) Receiver<FromWorker>, AbortHandle);

impl Words {
    fn of(mut recv: quinn::RecvStream) -> Self {
        let (heard, words) = channel(QUEUE);
        let reader = tokio::spawn(async move {
            while let Ok(Some(word)) = frames::recv::<FromWorker>(&mut recv).await {
                if heard.send(word).await.is_err() {
                    return;
                }
            }
        });
        Self(words, reader.abort_handle())
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        self.1.abort();
    }
}

/// The first word of a connection, and the stream that it came by.
async fn hear_first(
    connection: &quinn::Connection,
) -> Option<(FromWorker, quinn::SendStream, quinn::RecvStream)> {
    let (send, mut recv) = connection.accept_bi().await.ok()?;
    Some((frames::recv(&mut recv).await.ok()??, send, recv))
}

/// Ends a conversation so that its last words still arrive.
pub(crate) async fn end(connection: &quinn::Connection, mut send: quinn::SendStream) {
    drop(send.finish());
    drop(timeout(JOIN_TIMEOUT, connection.closed()).await);
}

/// Tells the rank something; returns false if it is gone or does not read.
pub(crate) async fn say(send: &mut quinn::SendStream, message: &FromAggregator) -> bool {
    matches!(timeout(READ_TIMEOUT, frames::send(send, message)).await, Ok(Ok(())))
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
            word = words.0.recv() => match word {
                Some(FromWorker::Heard) => lock(registry).heard(seat),
                Some(FromWorker::Also(join)) => {
                    let joined = lock(registry).also(seat, join, Instant::now());
                    let Some(joined) = joined else { break Parting::Lost(Loss::Broke) };
                    pursue(registry, seat, joined);
                }
                Some(FromWorker::Parted(absent)) => {
                    let ending = lock(registry).ending_below(seat, absent.why);
                    let _fence = settle(registry, ending).await;
                    lock(registry).parted(seat, absent);
                }
                Some(FromWorker::Leave { next_op }) => break Parting::Left(next_op),
                Some(FromWorker::Retreat) => break Parting::Retreated,
                Some(FromWorker::Withdraw) => {
                    let is_free = lock(registry).withdraw(seat);
                    if is_free && !say(send, &FromAggregator::Free).await {
                        break Parting::Lost(Loss::Broke);
                    }
                }
                Some(FromWorker::Stay) => {
                    let joined = lock(registry).stay(seat);
                    pursue(registry, seat, joined);
                }
                Some(FromWorker::Move) => break Parting::Moved,
                Some(
                    FromWorker::Prove { .. }
                    | FromWorker::Arrived
                    | FromWorker::Join(_)
                    | FromWorker::Look(_)
                    | FromWorker::AskStatus { .. }
                    | FromWorker::Stop,
                )
                | None => {
                    break Parting::Lost(Loss::Broke);
                }
            },
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
