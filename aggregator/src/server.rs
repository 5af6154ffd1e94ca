//! The control server: one QUIC connection a rank, for as long as the rank lives.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use racksum_net::quic::{frames, quinn};
use racksum_proto::control::{FromAggregator, FromWorker};
use tokio::sync::mpsc::{Receiver, channel};
use tokio::time::{Instant, interval, timeout};

use crate::registry::{Joined, Registry};

/// How long a connection may take to say who it is.
const JOIN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long ranks are told of the end.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// How often a waiting rank is told whom it waits for.
const WAITING_PERIOD: Duration = Duration::from_millis(500);
/// How often, and for how long, a multicast group is probed.
const PROBE_PERIOD: Duration = Duration::from_millis(20);
const PROBES: u32 = 15;
/// Messages that may wait for a rank to read them.
const QUEUE: usize = 16;

/// The registry, shared by the connections. No lock is held across a wait.
pub(crate) type Shared = Arc<Mutex<Registry>>;

pub(crate) fn lock(registry: &Shared) -> MutexGuard<'_, Registry> {
    registry.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves until the endpoint is closed.
pub(crate) async fn serve(endpoint: quinn::Endpoint, registry: Shared) {
    while let Some(incoming) = endpoint.accept().await {
        let registry = Arc::clone(&registry);
        tokio::spawn(async move {
            if let Ok(connection) = incoming.await {
                serve_rank(connection, registry).await;
            }
        });
    }
    // The ranks learn of the end by a word, which must still be sent, and not by silence.
    drop(timeout(CLOSE_TIMEOUT, endpoint.wait_idle()).await);
}

/// Serves one rank from its join to its end.
async fn serve_rank(connection: quinn::Connection, registry: Shared) {
    let Ok(Ok((mut send, mut recv))) = timeout(JOIN_TIMEOUT, connection.accept_bi()).await else {
        return;
    };
    let first = timeout(JOIN_TIMEOUT, frames::recv(&mut recv)).await;
    let Ok(Ok(Some(FromWorker::Join(join)))) = first else { return };
    let (tell, mut inbox) = channel(QUEUE);
    let addr = connection.remote_address().ip();
    let (name, rank) = (join.job.clone(), join.rank);
    let (joined, id) = {
        let mut registry = lock(&registry);
        let joined = registry.join(join, addr, tell);
        (joined, registry.id(&name))
    };
    match joined {
        Err(reason) => {
            tracing::warn!(job = name, rank, %addr, reason, "join refused");
            drain(&mut inbox, &mut send).await;
            // Whether or not the refusal arrives, there is nothing more to do for it.
            drop(frames::send(&mut send, &FromAggregator::Refused { reason }).await);
            drop(send.finish());
            drop(timeout(JOIN_TIMEOUT, connection.closed()).await);
            return;
        }
        Ok(Joined::Probe) => {
            tokio::spawn(probe(Arc::clone(&registry), name.clone()));
        }
        Ok(Joined::Waiting | Joined::Ready) => {}
    }
    tracing::info!(job = name, rank, %addr, "rank joined");
    let clean = attend(&registry, &name, rank, &mut send, recv, &mut inbox).await;
    lock(&registry).leave(&name, id, rank, clean);
    if clean {
        drop(send.finish());
        drop(timeout(JOIN_TIMEOUT, connection.closed()).await);
    }
}

/// Sends what is queued.
async fn drain(inbox: &mut Receiver<FromAggregator>, send: &mut quinn::SendStream) {
    while let Ok(message) = inbox.try_recv() {
        if frames::send(send, &message).await.is_err() {
            return;
        }
    }
}

/// Passes messages both ways until the rank is gone; returns whether it left by itself.
async fn attend(
    registry: &Shared,
    name: &str,
    rank: u16,
    send: &mut quinn::SendStream,
    mut recv: quinn::RecvStream,
    inbox: &mut Receiver<FromAggregator>,
) -> bool {
    let (heard, mut words) = channel(QUEUE);
    // A task of its own, since reading a frame must not be cancelled half-way.
    let reader = tokio::spawn(async move {
        while let Ok(Some(word)) = frames::recv::<FromWorker>(&mut recv).await {
            if heard.send(word).await.is_err() {
                return;
            }
        }
    });
    let joined = Instant::now();
    let mut tick = interval(WAITING_PERIOD);
    let clean = loop {
        tokio::select! {
            message = inbox.recv() => {
                let Some(message) = message else { break false };
                if frames::send(send, &message).await.is_err() {
                    break false;
                }
            }
            word = words.recv() => match word {
                Some(FromWorker::Heard) => lock(registry).heard(name, rank),
                Some(FromWorker::Leave) => break true,
                Some(FromWorker::Join(_)) | None => break false,
            },
            now = tick.tick() => {
                let missing = lock(registry).missing(name);
                let waited = now.saturating_duration_since(joined);
                let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
                let waiting = FromAggregator::Waiting { missing: missing.clone(), waited_ms };
                if !missing.is_empty() && frames::send(send, &waiting).await.is_err() {
                    break false;
                }
            }
        }
    };
    reader.abort();
    clean
}

/// Probes a job's group until every rank has heard it, or long enough.
async fn probe(registry: Shared, name: String) {
    let mut tick = interval(PROBE_PERIOD);
    for _ in 0..PROBES {
        tick.tick().await;
        if !lock(&registry).probe(&name) {
            return;
        }
    }
    lock(&registry).end_probe(&name);
}
