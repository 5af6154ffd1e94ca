//! Who has joined a job: a rank, or an aggregator for its ranks.

use std::net::{IpAddr, SocketAddr};

use racksum_proto::control::{Beginner, FromAggregator, Join};
use racksum_proto::ids::OpId;
use racksum_proto::wire::Flags;
use tokio::sync::mpsc::Sender;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Caller;

/// Words to a member that may wait to be sent: more than twice a welcome, a start, each rank that
/// the job can go on without, a drain and a last word.
pub(crate) const MEMBER_QUEUE: usize = 2 * (Flags::MAX_ABSENT + 8);

/// A rank that has joined, or an aggregator that has joined for its ranks.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) join: Join,
    /// The other ranks that it has joined for, if it is an aggregator.
    pub(super) also: Vec<Join>,
    /// The name in its certificate.
    pub(super) identity: Option<String>,
    /// Where it calls from; its data comes from other ports of the same host.
    addr: SocketAddr,
    tell: Sender<FromAggregator>,
    pub(super) hears: bool,
    /// It would rather be elsewhere, and has been told that it may.
    pub(super) withdraws: bool,
    /// When anything was last heard of it.
    pub(super) heard: Instant,
    /// What it had left with, if it has come back.
    pub(super) came_back: Option<Left>,
}

impl Member {
    pub(super) fn new(join: Join, caller: Caller, now: Instant) -> Self {
        let Caller { identity, addr, tell } = caller;
        let (also, came_back) = (Vec::new(), None);
        let (hears, withdraws) = (false, false);
        Self { join, also, identity, addr, tell, hears, withdraws, heard: now, came_back }
    }

    /// The name in its certificate, or its address where callers have none.
    pub(super) fn beginner(&self) -> Beginner {
        who(self.identity.as_deref(), self.addr)
    }

    /// The wishes of all its ranks.
    pub(super) fn joins(&self) -> impl Iterator<Item = &Join> {
        std::iter::once(&self.join).chain(&self.also)
    }

    /// Its ranks.
    pub(super) fn ranks(&self) -> impl Iterator<Item = u16> + '_ {
        self.joins().map(|join| join.rank)
    }

    /// The same in order.
    pub(super) fn sorted_ranks(&self) -> Vec<u16> {
        let mut ranks: Vec<_> = self.ranks().collect();
        ranks.sort_unstable();
        ranks
    }

    /// The ranks that it has joined for, where it is an aggregator.
    pub(super) fn rack(&self) -> Vec<u16> {
        if self.join.relays { self.sorted_ranks() } else { Vec::new() }
    }

    /// What people call it: an aggregator by the first of its ranks.
    pub(super) fn name(&self) -> u16 {
        self.ranks().min().unwrap_or(self.join.rank)
    }

    /// Where its data to the aggregator's shard of this number comes from.
    pub(super) fn data_addr(&self, shard: usize) -> SocketAddr {
        let ports = &self.join.data_ports;
        let port = ports.get(shard).or_else(|| ports.first()).copied().unwrap_or(0);
        SocketAddr::new(self.addr.ip(), port)
    }

    /// Why it has no part in a job that demands multicast.
    pub(super) fn unreached(&self) -> String {
        unreached(&self.join, self.addr.ip())
    }

    /// Queues a message for the member. There is room: a member gets fewer than [`MEMBER_QUEUE`]
    /// messages in a life, besides its place in the queue, which is sent only while half is free.
    pub(super) fn tell(&self, message: FromAggregator) {
        let queued = matches!(message, FromAggregator::Queued { .. });
        if !queued || self.tell.capacity() > MEMBER_QUEUE / 2 {
            // Its connection's task ends when it is gone, or does not read, and says so.
            drop(self.tell.try_send(message));
        }
    }
}

/// A rank that has left.
#[derive(Debug, Clone)]
pub(super) struct Left {
    /// The op that it would start next, unless it left in the middle of one.
    pub(super) next_op: Option<OpId>,
    /// The caller that had the seat.
    pub(super) by: Beginner,
}

/// The caller that is on its way back as a rank.
#[derive(Debug)]
pub(super) struct Return {
    pub(super) number: u64,
    pub(super) by: Beginner,
    /// Told when another caller is preferred.
    pub(super) replaced: oneshot::Sender<()>,
}

/// Returns the caller as this side knows it: its identity, or its address where it has none.
pub(super) fn who(identity: Option<&str>, addr: SocketAddr) -> Beginner {
    identity.map_or_else(
        || Beginner::Address(addr.ip().to_canonical()),
        |name| Beginner::Identity(name.into()),
    )
}

/// Why who joins from `ip` has no part in a job that demands multicast.
pub(super) fn unreached(join: &Join, ip: IpAddr) -> String {
    if join.relays {
        return format!(
            "the aggregator at {ip} calls this one its parent, and is sent copies; start the \
             parent with --fanout auto or unicast"
        );
    }
    format!(
        "multicast does not reach rank {} at {ip}; start the aggregator with --fanout auto or \
         unicast",
        join.rank
    )
}
