//! What a shard sends: control messages, probes, and results in the order of their windows.

use std::net::SocketAddr;

use racksum_net::udp::{self, SEND_BATCH, SendRing, Train, Transmit as Message, UdpSocket};
use racksum_proto::aggregator::{Recipient, ResultFragments};
use racksum_proto::wire::Header;

use crate::shard::{Job, ShardStats};

/// What goes out: the ring to send with, and room to write a datagram in.
pub(crate) struct Outbox {
    ring: SendRing,
    /// Where the machine writes a message that is not a result.
    pub(crate) datagram: Box<[u8; MAX_CONTROL]>,
    /// Results of the job that is being served, to go to `joined_to` as one train.
    joined: Vec<u8>,
    joined_to: Recipient,
    train: Train,
    datagrams: u64,
    bytes: u64,
}

impl Outbox {
    pub(crate) fn new() -> Self {
        Self {
            ring: SendRing::new(),
            datagram: Box::new([0; MAX_CONTROL]),
            joined: Vec::with_capacity(udp::MAX_DATAGRAM),
            joined_to: Recipient::All,
            train: Train::default(),
            datagrams: 0,
            bytes: 0,
        }
    }

    pub(crate) fn send_datagram(
        &mut self,
        socket: &UdpSocket,
        job: &Job,
        to: Recipient,
        len: usize,
    ) {
        // A wait says that all results before it were sent, so it must not overtake any.
        self.send_joined(socket, job);
        let Self { ring, datagram, datagrams, bytes, .. } = self;
        let contents = &datagram[..len];
        ring.set_tos(job.tos(contents));
        let addresses = addresses(to, job.group, &job.unicast, &job.ranks);
        send(socket, ring, addresses, &[(contents, len)], &mut [datagrams, bytes]);
    }

    /// Sends the results that wait for others to go with them.
    pub(crate) fn send_joined(&mut self, socket: &UdpSocket, job: &Job) {
        let Self { ring, joined, joined_to, train, datagrams, bytes, .. } = self;
        if !joined.is_empty() {
            let addresses = addresses(*joined_to, job.group, &job.unicast, &job.ranks);
            let contents = [(&joined[..], train.stride())];
            ring.set_tos(job.tos(joined));
            send(socket, ring, addresses, &contents, &mut [datagrams, bytes]);
            joined.clear();
            *train = Train::default();
        }
    }

    pub(crate) fn send_result(
        &mut self,
        socket: &UdpSocket,
        job: &mut Job,
        to: Recipient,
        result: &ResultFragments,
    ) {
        job.slots.write_headers(result);
        let tos = job.tos_of_lane(result.header.lane);
        let small = to != Recipient::All || result.len <= MAX_JOINED;
        if !small || to != self.joined_to || tos != job.tos(&self.joined) {
            // Results in order: one that overtakes another looks like a loss.
            self.send_joined(socket, job);
        }
        let (contents, stride) = job.slots.datagrams(result);
        if to == Recipient::All {
            if small {
                return self.join(socket, job, to, contents, stride);
            }
            let addresses = addresses(to, job.group, &job.unicast, &job.ranks);
            let Self { ring, datagrams, bytes, .. } = self;
            ring.set_tos(tos);
            return send(socket, ring, addresses, &[(contents, stride)], &mut [datagrams, bytes]);
        }
        let wanted = |i: &usize| result.fragments >> i & 1 == 1;
        for (_, datagram) in contents.chunks(stride).enumerate().filter(|(i, _)| wanted(i)) {
            self.join(socket, job, to, datagram, datagram.len());
        }
    }

    /// Lets datagrams wait for others to go with them.
    fn join(
        &mut self,
        socket: &UdpSocket,
        job: &Job,
        to: Recipient,
        contents: &[u8],
        stride: usize,
    ) {
        let max_datagram = Header::LEN + job.machine.config().cut.payload();
        if !self.train.couple(contents.len(), stride, max_datagram) {
            self.send_joined(socket, job);
            let first = self.train.couple(contents.len(), stride, max_datagram);
            debug_assert!(first, "an empty train takes any message");
        }
        self.joined_to = to;
        self.joined.extend_from_slice(contents);
    }

    /// Sends the probe that shows who hears the group.
    pub(crate) fn probe(&mut self, socket: &UdpSocket, job: &Job) {
        let Some(group) = job.group else { return };
        let config = job.machine.config();
        let header = Header::probe(config.job, config.generation, config.shard);
        let mut bytes = [0; Header::LEN];
        header.encode(&mut bytes);
        self.ring.set_tos(None);
        let counts = &mut [&mut self.datagrams, &mut self.bytes];
        send(socket, &mut self.ring, [group].into_iter(), &[(&bytes, Header::LEN)], counts);
    }

    pub(crate) fn flush_counts(&mut self, stats: &mut ShardStats) {
        stats.datagrams[1] += std::mem::take(&mut self.datagrams);
        stats.bytes[1] += std::mem::take(&mut self.bytes);
    }
}

/// The addresses a transmit goes to: the group if there is one, then the ranks that do not hear
/// it; or a single rank.
fn addresses<'a>(
    to: Recipient,
    group: Option<SocketAddr>,
    unicast: &'a [SocketAddr],
    ranks: &'a [SocketAddr],
) -> impl Iterator<Item = SocketAddr> + Clone + 'a {
    let (group, ranks) = match to {
        Recipient::All => (group, unicast),
        Recipient::Rank(rank) => (None, ranks.get(rank.index()..=rank.index()).unwrap_or(&[])),
    };
    group.into_iter().chain(ranks.iter().copied())
}

/// Sends messages to each address; waits a little for room in the send buffer. What still does
/// not go is lost, and asked for again.
fn send(
    socket: &UdpSocket,
    ring: &mut SendRing,
    addresses: impl Iterator<Item = SocketAddr>,
    messages: &[(&[u8], usize)],
    counts: &mut [&mut u64; 2],
) {
    let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
    let mut batch = [Message::new(nowhere, &[], 1); SEND_BATCH];
    let mut full = 0;
    let all = addresses.flat_map(|to| {
        messages.iter().map(move |(contents, stride)| Message::new(to, contents, *stride))
    });
    for message in all {
        *counts[0] += message.datagrams().unwrap_or(0) as u64;
        *counts[1] += message.contents.len() as u64;
        batch[full] = message;
        full += 1;
        if full == SEND_BATCH {
            socket.send_patiently(ring, &batch, MAX_SEND_WAITS);
            full = 0;
        }
    }
    socket.send_patiently(ring, &batch[..full], MAX_SEND_WAITS);
}

/// Bytes of the largest result that is copied to go with others.
const MAX_JOINED: usize = 16 << 10;
/// Bytes of the largest datagram without tensor data: an ask or a wait.
const MAX_CONTROL: usize = 2048;
/// How often a full send buffer is waited for before a batch is given up.
const MAX_SEND_WAITS: u32 = 16;

#[cfg(test)]
mod tests;
