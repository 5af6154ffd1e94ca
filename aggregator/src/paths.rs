//! Proofs of data paths before a rank joins: from callers to this aggregator, and from this
//! aggregator to its parent. `racksum_proto::path` schedules the pings.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicU16;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use racksum_net::auth::new_key;
use racksum_net::clock::Clock;
use racksum_net::interface::{local_addr_towards, max_datagram};
use racksum_net::quic::{ControlConnection, SILENT, frames, quinn};
use racksum_proto::auth::Key;
use racksum_proto::control::{CONTROL_VERSION, FromAggregator, FromWorker};
use racksum_proto::path::{Blocked, COMMON_MTUS, Prover, SMALL};
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::timeout;

use crate::control_stream::{end, send_message};
use crate::registry::{SharedRegistry, lock, other_ip_version};
use crate::shard::{Command, Proof};

/// The time limit for a caller to prove its data path and then join.
const PROOF_TIMEOUT: Duration = Duration::from_secs(15);
/// The time limit for the parent to accept a request for a proof.
const PROVE_TIMEOUT: Duration = Duration::from_secs(5);
/// The time limit for the parent to report which pings arrived.
const ARRIVED_TIMEOUT: Duration = Duration::from_secs(1);

/// A proof in progress. Dropping this guard makes the shards forget the proof.
struct Proving {
    registry: SharedRegistry,
    token: Key,
}

impl Proving {
    /// Begins a proof at all shards; `proof` creates each shard's part, given the shard's number.
    fn begin(registry: &SharedRegistry, token: Key, proof: impl Fn(usize) -> Proof) -> Self {
        for (number, shard) in lock(registry).shards().iter().enumerate() {
            shard.send(Command::Prove(token, proof(number)));
        }
        Self { registry: Arc::clone(registry), token }
    }
}

impl Drop for Proving {
    fn drop(&mut self) {
        for shard in lock(&self.registry).shards() {
            shard.send(Command::Proven(self.token));
        }
    }
}

/// Lets a caller prove its data path. Returns the caller's next message and the streams, or `None`
/// if the conversation has ended.
pub(crate) async fn serve_proof(
    connection: &quinn::Connection,
    registry: &SharedRegistry,
    version: u16,
    (mut send, mut recv): (quinn::SendStream, quinn::RecvStream),
) -> Option<(FromWorker, quinn::SendStream, quinn::RecvStream)> {
    let elsewhere = other_ip_version(connection.remote_address().ip())
        .or_else(|| answers_elsewhere(registry, connection));
    let refused = match elsewhere {
        _ if version != CONTROL_VERSION => {
            Some(FromAggregator::WrongVersion { speaks: CONTROL_VERSION })
        }
        elsewhere => elsewhere.map(|reason| FromAggregator::Refused { reason }),
    };
    if let Some(refused) = refused {
        if send_message(&mut send, &refused).await {
            end(connection, send).await;
        }
        return None;
    }
    let token = new_key().ok()?;
    let data_ports: Vec<u16> =
        lock(registry).shards().iter().map(|shard| shard.addr.port()).collect();
    let arrived: Vec<Arc<AtomicU16>> = data_ports.iter().map(|_| Arc::default()).collect();
    let _proving = Proving::begin(registry, token, |shard| {
        Proof::OfCaller(arrived.get(shard).map(Arc::clone).unwrap_or_default())
    });
    let ip = connection.remote_address().ip().to_canonical();
    if !send_message(&mut send, &FromAggregator::Prove { data_ports, token, ip }).await {
        return None;
    }
    let answer = async {
        let message = frames::recv::<FromWorker>(&mut recv).await.ok()??;
        if message != FromWorker::AskPingSizes {
            return Some(message);
        }
        let sizes = arrived.iter().map(|size| size.load(Relaxed)).collect();
        if !send_message(&mut send, &FromAggregator::PingSizes { sizes }).await {
            return None;
        }
        frames::recv(&mut recv).await.ok()?
    };
    let message = timeout(PROOF_TIMEOUT, answer).await.ok()??;
    Some((message, send, recv))
}

/// Returns why a rank would reject the shards' datagrams as foreign, or `None` if it would accept
/// them. An aggregator bound to all addresses sends from the address that the routing table
/// selects, which may differ from the address that the rank called.
pub(crate) fn answers_elsewhere(
    registry: &SharedRegistry,
    connection: &quinn::Connection,
) -> Option<String> {
    let on_all = lock(registry).shards().iter().any(|shard| shard.addr.ip().is_unspecified());
    let called = connection.local_ip().filter(|_| on_all)?.to_canonical();
    let from = local_addr_towards(connection.remote_address()).ok()?.to_canonical();
    (from != called).then(|| {
        format!(
            "this aggregator serves on all addresses, and would answer calls to {called} from \
             {from}; call it at {from}, or start it with --bind {called}"
        )
    })
}

/// Proves the path from every shard to the parent's shard of the same number. Returns the size in
/// bytes of the largest datagrams that pass, at most `wanted`. An error says why no useful size
/// passes.
pub(crate) async fn prove(
    registry: &SharedRegistry,
    line: &mut ControlConnection,
    parent: SocketAddr,
    wanted: u16,
) -> Result<u16, String> {
    let (data_ports, token, ip) = ask(line).await?;
    let (sender, mut answers) = unbounded_channel();
    let _proving =
        Proving::begin(registry, token, |shard| Proof::AtParent { shard, sender: sender.clone() });
    // If the shard counts differ, the parent reports the difference when this aggregator joins.
    let own: Vec<u16> = lock(registry).shards().iter().map(|shard| shard.addr.port()).collect();
    let paths: Vec<(u16, SocketAddr)> =
        own.iter().copied().zip(data_ports.iter().map(|port| with_port(parent, *port))).collect();
    let size = |mtu| {
        let size = max_datagram(mtu, parent.is_ipv6()).map_err(|error| error.to_string())?;
        Ok::<_, String>(u16::try_from(size).unwrap_or(u16::MAX))
    };
    let least = size(COMMON_MTUS[COMMON_MTUS.len() - 1])?;
    let mut ladder = vec![SMALL];
    for mtu in COMMON_MTUS {
        ladder.push(size(mtu)?);
    }
    // On loopback, prove only the smallest common size, because no hop has a smaller MTU than the
    // interface.
    let largest = if parent.ip().is_loopback() { least } else { wanted };
    let clock = Clock::start();
    let mut prover = Prover::new(clock.now(), paths.len(), largest, least, &ladder);
    while !prover.is_over(clock.now()) {
        while let Some((shard, size)) = prover.poll_transmit(clock.now()) {
            let (_, to) = paths[shard];
            if let Some(shard) = lock(registry).shards().get(shard) {
                shard.send(Command::SendPing { to, token, size });
            }
        }
        let left = Duration::from_nanos(prover.poll_timeout().since(clock.now()).0);
        if let Ok(Some(answer)) = timeout(left, answers.recv()).await
            && paths.get(answer.shard).is_some_and(|(_, to)| *to == answer.from)
        {
            prover.handle_answer(answer.shard, answer.size, answer.seen);
        }
    }
    let passed = prover.passed().to_vec();
    let blocked = |arrived: &[u16]| {
        let mut each = paths.iter().zip(&passed).zip(arrived.iter().chain(std::iter::repeat(&0)));
        each.find_map(|(((port, to), passed), arrived)| {
            Blocked::find(*to, SocketAddr::new(ip, *port), *passed, least, *arrived)
        })
    };
    if blocked(&[]).is_some() {
        line.send(&FromWorker::AskPingSizes).await.map_err(|ended| ended.to_string())?;
        let sizes = match timeout(ARRIVED_TIMEOUT, line.recv()).await {
            Ok(Ok(FromAggregator::PingSizes { sizes })) => sizes,
            _ => Vec::new(),
        };
        if let Some(why) = blocked(&sizes) {
            return Err(why.to_string());
        }
    }
    if largest < wanted {
        return Ok(wanted);
    }
    let narrowest = passed.iter().map(|passed| passed.size).min().unwrap_or(wanted);
    if narrowest < wanted {
        tracing::warn!(
            %parent,
            "the path to the parent passes datagrams of {narrowest} bytes, but not of {wanted}; \
             the job sends datagrams of at most {narrowest} bytes"
        );
    }
    Ok(narrowest)
}

/// Asks the parent to start a proof. Returns the ports of the parent's shards, the token for the
/// pings, and this aggregator's address as the parent sees it.
async fn ask(line: &mut ControlConnection) -> Result<(Vec<u16>, Key, IpAddr), String> {
    let answer = async {
        line.send(&FromWorker::Prove { version: CONTROL_VERSION }).await?;
        line.recv().await
    };
    let answer = timeout(PROVE_TIMEOUT, answer).await;
    match answer.map_err(|_late| SILENT)?.map_err(|ended| ended.to_string())? {
        FromAggregator::Prove { data_ports, token, ip } => Ok((data_ports, token, ip)),
        FromAggregator::Refused { reason } => Err(format!("the parent refused: {reason}")),
        FromAggregator::WrongVersion { speaks } => Err(format!(
            "the parent speaks protocol version {speaks}, but this aggregator speaks version \
             {CONTROL_VERSION}; install the same release on both"
        )),
        other => Err(format!(
            "the parent sent {other:?} instead of a path proof; install the same release on both"
        )),
    }
}

fn with_port(mut addr: SocketAddr, port: u16) -> SocketAddr {
    addr.set_port(port);
    addr
}

#[cfg(test)]
mod tests;
