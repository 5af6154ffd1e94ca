//! Members of a job: ranks, and aggregators that have joined for their ranks.

use std::net::{IpAddr, SocketAddr};

use racksum_proto::control::{CallerId, FromAggregator, Join};
use racksum_proto::ids::OpId;
use racksum_proto::status::OwnCounters;
use racksum_proto::wire::Flags;
use tokio::sync::mpsc::Sender;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Caller;

/// The maximum number of messages queued for a member. It is more than twice the number that a job
/// sends: a welcome, a start, a message for each rank that the job can continue without, a drain,
/// and a final message.
pub(crate) const MEMBER_QUEUE: usize = 2 * (Flags::MAX_ABSENT + 8);

/// A rank that has joined, or an aggregator that has joined for its ranks.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) join: Join,
    /// The joins of the member's other ranks, if it is an aggregator.
    pub(super) also: Vec<Join>,
    /// The name in the member's certificate, if it is verified.
    pub(super) identity: Option<String>,
    /// The address that the member calls from; its data comes from other ports of the same host.
    addr: SocketAddr,
    outbox: Sender<FromAggregator>,
    pub(super) receives_multicast: bool,
    /// Whether the member has withdrawn and was told that it may leave.
    pub(super) withdraws: bool,
    /// The time at which the member was last heard from.
    pub(super) last_received: Instant,
    /// The rank's own counters, as it last reported them.
    pub(super) own: Option<OwnCounters>,
    /// The record of the rank's earlier departure, if the rank has rejoined.
    pub(super) came_back: Option<Left>,
}

impl Member {
    pub(super) fn new(join: Join, caller: Caller, now: Instant) -> Self {
        let Caller { identity, addr, outbox } = caller;
        let (also, came_back) = (Vec::new(), None);
        let (receives_multicast, withdraws) = (false, false);
        Self {
            join,
            also,
            identity,
            addr,
            outbox,
            receives_multicast,
            withdraws,
            last_received: now,
            own: None,
            came_back,
        }
    }

    /// Returns the name in the member's certificate, or the member's IP address if there is no such
    /// name.
    pub(super) fn beginner(&self) -> CallerId {
        who(self.identity.as_deref(), self.addr)
    }

    /// Returns the joins of all the member's ranks.
    pub(super) fn joins(&self) -> impl Iterator<Item = &Join> {
        std::iter::once(&self.join).chain(&self.also)
    }

    /// Returns the member's ranks.
    pub(super) fn ranks(&self) -> impl Iterator<Item = u16> + '_ {
        self.joins().map(|join| join.rank)
    }

    /// Returns the member's ranks in ascending order.
    pub(super) fn sorted_ranks(&self) -> Vec<u16> {
        let mut ranks: Vec<_> = self.ranks().collect();
        ranks.sort_unstable();
        ranks
    }

    /// Returns the ranks that an aggregator has joined for; empty for a rank.
    pub(super) fn rack(&self) -> Vec<u16> {
        if self.join.aggregates { self.sorted_ranks() } else { Vec::new() }
    }

    /// Returns the rank that identifies the member in messages: for an aggregator, the smallest of
    /// its ranks.
    pub(super) fn name(&self) -> u16 {
        self.ranks().min().unwrap_or(self.join.rank)
    }

    /// Takes the counters that the member reports about itself. They are shown and nothing more, so
    /// a report that cannot follow the last one is left out.
    pub(super) fn note_counters(&mut self, counters: OwnCounters) {
        // wire: W-80
        if counters.may_follow(&self.own.unwrap_or_default()) {
            self.own = Some(counters);
        }
    }

    /// Returns the source address of the member's data for this shard.
    pub(super) fn data_addr(&self, shard: usize) -> SocketAddr {
        let ports = &self.join.data_ports;
        let port = ports.get(shard).or_else(|| ports.first()).copied().unwrap_or(0);
        SocketAddr::new(self.addr.ip(), port)
    }

    /// Returns why the member is refused in a job that requires multicast.
    pub(super) fn unreached(&self) -> String {
        unreached(&self.join, self.addr.ip())
    }

    /// Returns whether more than half of the queue is free, and so has room for messages that are
    /// not counted in [`MEMBER_QUEUE`].
    pub(super) fn reads(&self) -> bool {
        self.outbox.capacity() > MEMBER_QUEUE / 2
    }

    /// Queues a message for the member. The queue has room: a member gets fewer than
    /// [`MEMBER_QUEUE`] messages in a job, apart from those about the job's place in the parent's
    /// queue and about moves. Such messages are sent only while the member [reads](Self::reads).
    pub(super) fn send(&self, message: FromAggregator) {
        let queued = matches!(message, FromAggregator::Queued { .. });
        if !queued || self.reads() {
            // If the member has disconnected or does not read, its session ends and reports the
            // loss.
            drop(self.outbox.try_send(message));
        }
    }
}

/// A rank that has left.
#[derive(Debug, Clone)]
pub(super) struct Left {
    /// The op at which the rank would continue, or `None` if it left in the middle of an op.
    pub(super) next_op: Option<OpId>,
    /// The caller that had the seat.
    pub(super) by: CallerId,
}

/// A caller that is rejoining as a rank.
#[derive(Debug)]
pub(super) struct Return {
    pub(super) number: u64,
    pub(super) by: CallerId,
    /// Signals that another caller is preferred.
    pub(super) replaced: oneshot::Sender<()>,
}

/// Returns the caller's identity, or its address if it has none.
pub(super) fn who(identity: Option<&str>, addr: SocketAddr) -> CallerId {
    identity.map_or_else(
        || CallerId::Address(addr.ip().to_canonical()),
        |name| CallerId::Identity(name.into()),
    )
}

/// Returns why a join from `ip` is refused in a job that requires multicast.
pub(super) fn unreached(join: &Join, ip: IpAddr) -> String {
    if join.aggregates {
        return format!(
            "the aggregator at {ip} needs unicast results from its parent; start the parent with \
             --fanout auto or unicast"
        );
    }
    format!(
        "multicast does not reach rank {} at {ip}; start the aggregator with --fanout auto or \
         unicast",
        join.rank
    )
}
