//! Datagrams out: windows are gathered from the tensor into a small staging buffer, and sent a
//! window a segmented message, several messages a system call.

use std::ops::Range;
use std::os::fd::AsFd;

use racksum_net::udp::{self, BATCH, RECV_CAPACITY, SendRing, Transmit as Message, UdpSocket};
use racksum_proto::time::{Span, Time};
use racksum_proto::wire::Header;
use racksum_proto::worker::{DataFragments, Transmit};

use super::{Engine, Links};
use crate::fault::{Dice, Fate};

/// Messages that wait to be sent, and their bytes.
pub(super) struct Staging {
    ring: SendRing,
    bytes: Vec<u8>,
    used: usize,
    messages: Vec<Staged>,
    /// A datagram held back by a fault.
    held: Option<(u8, Vec<u8>)>,
}

/// One message: where its bytes are, how far apart its datagrams, for which shard.
#[derive(Debug, Clone)]
struct Staged {
    range: Range<usize>,
    stride: usize,
    shard: u8,
}

impl Staging {
    pub(super) fn new() -> Self {
        Self {
            ring: SendRing::new(),
            bytes: vec![0; STAGING],
            used: 0,
            messages: Vec::with_capacity(BATCH),
            held: None,
        }
    }

    fn is_full(&self) -> bool {
        self.bytes.len() - self.used < RECV_CAPACITY || self.messages.len() == BATCH
    }

    /// Adds the next `len` bytes, datagrams `stride` apart. What fits into the datagram before
    /// joins it: sparse windows are small, and a datagram costs the same whatever it holds.
    fn push(&mut self, len: usize, stride: usize, shard: u8, max_datagram: usize) {
        let range = self.used..self.used + len;
        self.used += len;
        if let Some(last) = self.messages.last_mut()
            && last.shard == shard
            && last.range.end == range.start
            && last.range.len() <= last.stride
            && len <= stride
            && last.range.len() + len <= max_datagram
        {
            last.range.end = range.end;
            last.stride = max_datagram;
            return;
        }
        self.messages.push(Staged { range, stride, shard });
    }
}

impl Engine {
    /// Stages all that the machine has to say.
    pub(super) fn transmit(&mut self, now: Time) {
        loop {
            if self.staging.is_full() {
                self.flush();
            }
            let Self { machine, staging, .. } = self;
            let max_datagram = Header::LEN + machine.config().cut.payload();
            let out = &mut staging.bytes[staging.used..];
            match machine.poll_transmit(now, out, &mut ()) {
                None => return,
                Some(Transmit::Datagram { shard, len }) => {
                    staging.push(len, len, shard, max_datagram)
                }
                Some(Transmit::Data(data)) => self.stage_window(&data),
            }
        }
    }

    fn stage_window(&mut self, data: &DataFragments) {
        let Self { payloads, staging, machine, .. } = self;
        let Some(payload) = payloads.get(&data.header.window.op) else { return };
        let cut = machine.config().cut;
        let stride = Header::LEN + cut.payload();
        let out = &mut staging.bytes[staging.used..];
        let len = payload.gather(&data.header, cut, data.len, out);
        if data.fragments == cut.all(data.len) {
            staging.push(len, stride, data.shard, stride);
            return;
        }
        // Some fragments of a window, one message each.
        let start = staging.used;
        for fragment in (0..cut.count(data.len)).filter(|i| data.fragments >> i & 1 == 1) {
            let at = start + fragment * stride;
            let end = (at + stride).min(start + len);
            if staging.messages.len() == BATCH {
                flush(&self.links, staging, &mut self.stats, self.faults.as_mut());
            }
            staging.messages.push(Staged { range: at..end, stride, shard: data.shard });
        }
        staging.used = start + len;
    }

    /// Sends what is staged.
    pub(super) fn flush(&mut self) {
        flush(&self.links, &mut self.staging, &mut self.stats, self.faults.as_mut());
        self.staging.used = 0;
    }
}

fn flush(
    links: &Links,
    staging: &mut Staging,
    stats: &mut super::Stats,
    faults: Option<&mut [Dice; 2]>,
) {
    let Staging { ring, bytes, messages, held, .. } = staging;
    let nowhere = std::net::SocketAddr::from(([0, 0, 0, 0], 0));
    let mut batch = [Message { to: nowhere, contents: &[], stride: 1 }; BATCH];
    for (message, staged) in batch.iter_mut().zip(messages.iter()) {
        let to = links.shards[usize::from(staged.shard)].0;
        *message = Message { to, contents: &bytes[staged.range.clone()], stride: staged.stride };
        stats.tx_bytes += staged.range.len() as u64;
        stats.tx_datagrams += message.datagrams().unwrap_or(0) as u64;
    }
    let batch = &batch[..messages.len()];
    match faults {
        None => send(&links.socket, ring, batch),
        Some([dice, _]) => {
            for (message, staged) in batch.iter().zip(messages.iter()) {
                for datagram in message.contents.chunks(staged.stride) {
                    send_by_chance(links, ring, dice, held, staged.shard, datagram);
                }
            }
        }
    }
    messages.clear();
}

/// Sends a datagram, or not, or twice, or after the next.
fn send_by_chance(
    links: &Links,
    ring: &mut SendRing,
    dice: &mut Dice,
    held: &mut Option<(u8, Vec<u8>)>,
    shard: u8,
    datagram: &[u8],
) {
    let fate = dice.roll();
    let post = |ring: &mut SendRing, shard: u8, contents: &[u8]| {
        let to = links.shards[usize::from(shard)].0;
        send(&links.socket, ring, &[Message { to, contents, stride: contents.len().max(1) }]);
    };
    if fate == Fate::Hold && held.is_none() {
        *held = Some((shard, datagram.to_vec()));
        return;
    }
    for _ in 0..fate.copies() {
        post(ring, shard, datagram);
    }
    if let Some((shard, late)) = held.take() {
        post(ring, shard, &late);
    }
}

/// Sends messages, waiting for room in the send buffer. What still does not go is lost, and
/// asked for again.
fn send(socket: &UdpSocket, ring: &mut SendRing, mut batch: &[Message<'_>]) {
    for _ in 0..MAX_SEND_WAITS {
        if batch.is_empty() {
            return;
        }
        let outcome = socket.send(ring, batch);
        batch = &batch[(outcome.sent + outcome.failed).min(batch.len())..];
        if outcome.blocked {
            // A timeout and readiness are the same here: try again.
            drop(udp::wait_writable(socket.as_fd(), Some(Span::from_millis(2))));
        }
    }
}

/// Bytes staged at a time: a few windows, so that they stay in the processor's cache.
const STAGING: usize = 4 * RECV_CAPACITY;
/// How often a full send buffer is waited for before a batch is given up.
const MAX_SEND_WAITS: usize = 64;
