//! Proofs of data paths at a shard: the shard answers pings of callers, and passes on the answers
//! of a parent.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU16;
use std::sync::atomic::Ordering::Relaxed;

use racksum_net::udp::UdpSocket;
use racksum_proto::auth::Key;
use racksum_proto::path::Datagram;
use racksum_proto::reject::Reject;
use tokio::sync::mpsc::UnboundedSender;

use super::ShardStats;

/// A proof that is in progress.
#[derive(Debug)]
pub(crate) enum Proof {
    /// A caller proves its path. The value is the size in bytes of the largest ping that has
    /// arrived.
    OfCaller(Arc<AtomicU16>),
    /// This aggregator proves that datagrams pass between one of its shards and the parent.
    AtParent {
        /// The shard's number.
        shard: usize,
        /// The channel for the answers.
        sender: UnboundedSender<Answer>,
    },
}

/// An answer from a shard of the parent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Answer {
    /// The number of the shard that sent the ping.
    pub(crate) shard: usize,
    /// The size of the ping in bytes.
    pub(crate) size: u16,
    /// The source address of the answer.
    pub(crate) from: SocketAddr,
    /// This shard's address, as the parent sees it.
    pub(crate) seen: SocketAddr,
}

/// The proofs in progress at a shard.
#[derive(Debug, Default)]
pub(super) struct Proofs {
    /// The proofs by token, with the number of answers that may still be sent.
    by_token: BTreeMap<[u8; Key::LEN], (Proof, u32)>,
    datagram: Vec<u8>,
}

impl Proofs {
    pub(super) fn begin(&mut self, token: Key, proof: Proof) {
        self.by_token.insert(token.0, (proof, MOST_ANSWERS));
    }

    pub(super) fn end(&mut self, token: Key) {
        self.by_token.remove(&token.0);
    }

    /// Sends a ping. A ping that cannot be sent counts as lost.
    pub(super) fn send(&mut self, socket: &UdpSocket, to: SocketAddr, token: Key, size: u16) {
        Datagram { token, seen: None, size }.encode(&mut self.datagram);
        if let Err(error) = socket.send_one(to, &self.datagram) {
            tracing::debug!(%to, size, %error, "cannot send a ping");
        }
    }

    /// Handles a datagram that looks like a ping or an answer. Returns whether it belongs to a
    /// proof in progress.
    pub(super) fn take(
        &mut self,
        socket: &UdpSocket,
        from: SocketAddr,
        datagram: &[u8],
        stats: &mut ShardStats,
    ) -> bool {
        let Some(ping) = Datagram::decode(datagram) else {
            stats.events.rejects.count(Reject::Truncated);
            return false;
        };
        // wire: W-75
        match (self.by_token.get_mut(&ping.token.0), ping.seen) {
            (Some((Proof::OfCaller(arrived), left @ 1..)), None) => {
                *left -= 1;
                arrived.fetch_max(ping.size, Relaxed);
                Datagram { seen: Some(from), ..ping }.encode(&mut self.datagram);
                stats.datagrams.sent += 1;
                stats.bytes.sent += self.datagram.len() as u64;
                if let Err(error) = socket.send_one(from, &self.datagram) {
                    tracing::debug!(%from, size = ping.size, %error, "cannot answer a ping");
                }
            }
            (Some((Proof::AtParent { shard, sender }, _)), Some(seen)) => {
                // Ignore a failed send: the proof may have ended already.
                let answer = Answer { shard: *shard, size: ping.size, from, seen };
                sender.send(answer).unwrap_or_default();
            }
            _ => {
                stats.events.rejects.count(Reject::Sender);
                return false;
            }
        }
        true
    }
}

/// The maximum number of a caller's pings that a shard answers. A prover sends fewer.
const MOST_ANSWERS: u32 = 128;
