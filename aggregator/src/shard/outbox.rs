//! The outgoing datagrams of a shard: control messages, pings, and results in window order.

use std::net::SocketAddr;

use racksum_net::auth::Sealer;
use racksum_net::udp::{self, GsoBatch, SEND_BATCH, SendRing, Transmit as Message, UdpSocket};
use racksum_proto::aggregator::{Recipient, ResultFragments};
use racksum_proto::schedule::cost;
use racksum_proto::wire::{Flags, Header};

use super::ShardJob;
use super::report::ShardStats;
use crate::destinations::To;

/// The outgoing datagrams: a buffer for control messages, and results that wait to be sent
/// together.
pub(crate) struct Outbox {
    post: Post,
    /// The buffer for messages that are not results.
    pub(crate) datagram: Box<[u8; MAX_CONTROL]>,
    /// Results of the job being served, to be sent to `joined_to` together.
    joined: Vec<u8>,
    joined_to: To,
    gso_batch: GsoBatch,
}

/// The last step of sending: each datagram is sealed once, and sent to each address.
struct Post {
    ring: SendRing,
    sealed: Vec<u8>,
    datagrams: u64,
    bytes: u64,
    /// The cost of sends that no job has been charged for yet.
    cost: usize,
}

impl Outbox {
    pub(crate) fn new() -> Self {
        let sealed = Vec::with_capacity(udp::MAX_DATAGRAM);
        Self {
            post: Post { ring: SendRing::new(), sealed, datagrams: 0, bytes: 0, cost: 0 },
            datagram: Box::new([0; MAX_CONTROL]),
            joined: Vec::with_capacity(udp::MAX_DATAGRAM),
            joined_to: To::Ranks(Recipient::All),
            gso_batch: GsoBatch::default(),
        }
    }

    pub(crate) fn send_datagram(
        &mut self,
        socket: &UdpSocket,
        job: &mut ShardJob,
        to: To,
        len: usize,
    ) {
        // A wait message states that all earlier results were sent, so it must not overtake any of
        // them.
        self.send_joined(socket, job);
        let Self { post, datagram, .. } = self;
        let contents = &datagram[..len];
        post.ring.set_tos(job.tos(contents));
        let (sealer, addresses) = job.destinations.to(to);
        post.send(socket, sealer, addresses, contents, len);
    }

    /// Sends the results that wait to be sent together.
    pub(crate) fn send_joined(&mut self, socket: &UdpSocket, job: &mut ShardJob) {
        let Self { post, joined, joined_to, gso_batch, .. } = self;
        if !joined.is_empty() {
            post.ring.set_tos(job.tos(joined));
            let (sealer, addresses) = job.destinations.to(*joined_to);
            post.send(socket, sealer, addresses, joined, gso_batch.stride());
            joined.clear();
            *gso_batch = GsoBatch::default();
        }
    }

    pub(crate) fn send_result(
        &mut self,
        socket: &UdpSocket,
        job: &mut ShardJob,
        to: To,
        result: &ResultFragments,
    ) {
        job.slots.write_headers(result);
        let tos = job.tos_of_lane(result.header.lane);
        let again = result.header.flags.has(Flags::AGAIN);
        let small = again || result.len <= MAX_JOINED;
        if !small || to != self.joined_to || tos != job.tos(&self.joined) {
            // Keep results in order, because the receiver would consider an overtaken one lost.
            self.send_joined(socket, job);
        }
        if !small {
            let (contents, stride) = job.slots.datagrams(result);
            let (sealer, addresses) = job.destinations.to(to);
            self.post.ring.set_tos(tos);
            return self.post.send_with_room(socket, sealer, addresses, contents, stride);
        }
        if !again {
            return self.join(socket, job, to, result, None);
        }
        for fragment in (0..64).filter(|i| result.fragments >> i & 1 == 1) {
            self.join(socket, job, to, result, Some(fragment));
        }
    }

    /// Queues the datagrams of a result, or one of them, to be sent together with others.
    fn join(
        &mut self,
        socket: &UdpSocket,
        job: &mut ShardJob,
        to: To,
        result: &ResultFragments,
        fragment: Option<usize>,
    ) {
        let cut = job.machine.config().cut;
        let (len, stride) = match fragment {
            None => {
                (Header::LEN * result.cut.count(result.len) + result.len, result.cut.unsealed())
            }
            Some(fragment) => {
                let len = Header::LEN + result.cut.range(result.len, fragment).len();
                (len, len)
            }
        };
        if !self.gso_batch.try_append(len, stride, cut.unsealed()) {
            self.send_joined(socket, job);
            let first = self.gso_batch.try_append(len, stride, cut.unsealed());
            debug_assert!(first, "an empty batch has room for any message");
        }
        self.joined_to = to;
        let (contents, stride) = job.slots.datagrams(result);
        let wanted = |i: &usize| fragment.is_none_or(|fragment| *i == fragment);
        for (_, datagram) in contents.chunks(stride).enumerate().filter(|(i, _)| wanted(i)) {
            self.joined.extend_from_slice(&datagram[..datagram.len() - cut.trailer()]);
        }
    }

    /// Sends the ping that shows which ranks receive multicast.
    pub(crate) fn ping(&mut self, socket: &UdpSocket, job: &mut ShardJob) {
        let Some(group) = job.destinations.group else { return };
        let config = job.machine.config();
        let header = Header::ping(config.job, config.generation, config.shard);
        let mut bytes = [0; Header::LEN];
        header.encode(&mut bytes);
        self.post.ring.set_tos(None);
        let to = std::iter::once(group);
        self.post.send(socket, job.destinations.sealer.as_mut(), to, &bytes, Header::LEN);
    }

    /// Returns the cost of all sends since the last call, and resets it to zero.
    pub(crate) const fn take_cost(&mut self) -> usize {
        std::mem::replace(&mut self.post.cost, 0)
    }

    pub(crate) fn flush_counts(&mut self, stats: &mut ShardStats) {
        stats.datagrams.sent += std::mem::take(&mut self.post.datagrams);
        stats.bytes.sent += std::mem::take(&mut self.post.bytes);
    }
}

impl Post {
    /// Sends datagrams that lie `stride` bytes apart, each with space for its authentication
    /// trailer.
    fn send_with_room(
        &mut self,
        socket: &UdpSocket,
        sealer: Option<&mut Sealer>,
        addresses: impl Iterator<Item = SocketAddr>,
        contents: &mut [u8],
        stride: usize,
    ) {
        let mut sealed = std::mem::take(&mut self.sealed);
        let contents = match sealer {
            None => contents,
            Some(sealer) => sealer.seal_with_room(contents, stride, &mut sealed),
        };
        self.send(socket, None, addresses, contents, stride);
        self.sealed = sealed;
    }

    /// Sends datagrams to each address, and waits briefly for room in the send buffer. In
    /// `contents`, the datagrams lie `stride` bytes apart. Datagrams that still cannot be sent are
    /// lost, and their receivers request them again.
    fn send(
        &mut self,
        socket: &UdpSocket,
        sealer: Option<&mut Sealer>,
        addresses: impl Iterator<Item = SocketAddr>,
        contents: &[u8],
        stride: usize,
    ) {
        let Self { ring, sealed, datagrams, bytes, cost } = self;
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        let mut message = Message::new(nowhere, contents, stride);
        // wire: W-57
        if let Some(sealer) = sealer {
            sealed.clear();
            let stride = sealer.seal(&message, sealed);
            message = Message::new(nowhere, sealed, stride);
        }
        let mut batch = [message; SEND_BATCH];
        let mut full = 0;
        for to in addresses {
            *datagrams += message.datagrams().unwrap_or(0) as u64;
            *bytes += message.contents.len() as u64;
            *cost += cost::SEND + message.contents.len();
            batch[full].to = to;
            full += 1;
            if full == SEND_BATCH {
                socket.send_patiently(ring, &batch, MAX_SEND_WAITS);
                full = 0;
            }
        }
        socket.send_patiently(ring, &batch[..full], MAX_SEND_WAITS);
    }
}

/// The maximum size in bytes of a result that is copied to be sent together with others.
const MAX_JOINED: usize = 16 << 10;
/// The maximum size in bytes of a datagram without tensor data, such as a nack or a wait.
const MAX_CONTROL: usize = 2048;
/// How many times to wait for room in the send buffer before giving up on a batch.
const MAX_SEND_WAITS: u32 = 16;

#[cfg(test)]
mod tests;
