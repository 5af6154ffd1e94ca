//! Transmission of datagrams. Windows are sent from the tensor, or gathered into a small staging
//! buffer. Each system call sends several batches of datagrams.

use std::ops::Range;

use racksum_net::udp::{self, GsoBatch, RECV_CAPACITY, SEND_BATCH, SendRing, Transmit as Message};
use racksum_proto::ids::OpId;
use racksum_proto::time::Time;
use racksum_proto::wire::Header;
use racksum_proto::worker::{DataFragments, Transmit};

use super::seal::SEALED;
use super::staged::{NOWHERE, Staged, Stream};
use super::{Engine, Links};
use crate::fault::{Dice, Fate};

/// Staged messages and their bytes.
pub(super) struct Staging {
    ring: SendRing,
    bytes: Vec<u8>,
    used: usize,
    /// The sealed bytes to send, if datagrams are authenticated.
    sealed: Vec<u8>,
    messages: Vec<Staged>,
    /// The number of lanes of the job.
    lanes: u8,
    /// A datagram that an injected fault holds back.
    held: Option<(Stream, Vec<u8>)>,
}

impl Staging {
    pub(super) fn new(lanes: u8) -> Self {
        Self {
            ring: SendRing::new(),
            bytes: vec![0; STAGING],
            used: 0,
            sealed: Vec::new(),
            messages: Vec::with_capacity(SEND_BATCH),
            lanes,
            held: None,
        }
    }

    /// Adds a message whose header is already in the buffer, and whose body is the range `tail` of
    /// the tensor of `op`.
    fn push_in_place(&mut self, stream: Stream, op: OpId, tail: Range<usize>) {
        let mut gso_batch = GsoBatch::default();
        let first = gso_batch.try_append(Header::LEN, Header::LEN, Header::LEN);
        debug_assert!(first, "an empty batch accepts any message");
        let start = self.used;
        self.used += Header::LEN;
        self.messages.push(Staged { start, gso_batch, stream, in_tensor: Some((op, tail)) });
    }

    /// Discards all staged messages, and the datagram that a fault holds back.
    pub(super) fn clear(&mut self) {
        self.messages.clear();
        self.used = 0;
        self.held = None;
    }

    fn is_full(&self) -> bool {
        self.bytes.len() - self.used < RECV_CAPACITY || self.messages.len() == SEND_BATCH
    }

    /// Adds the next `len` bytes of the buffer, which hold one datagram per `stride` bytes.
    fn push(&mut self, len: usize, stride: usize, stream: Stream, max_datagram: usize) {
        let start = self.used;
        self.used += len;
        let before = self.messages.last_mut().filter(|last| {
            last.stream == stream
                && last.start + last.gso_batch.len() == start
                && last.in_tensor.is_none()
        });
        if !before.is_some_and(|last| last.gso_batch.try_append(len, stride, max_datagram)) {
            let mut gso_batch = GsoBatch::default();
            let first = gso_batch.try_append(len, stride, max_datagram);
            debug_assert!(first, "an empty batch accepts any message");
            self.messages.push(Staged { start, gso_batch, stream, in_tensor: None });
        }
    }
}

impl Engine {
    /// Stages all messages that the machine has to send.
    pub(super) fn transmit(&mut self, now: Time) {
        loop {
            if self.staging.is_full() {
                self.flush();
            }
            let Self { machine, events, staging, .. } = self;
            let max_datagram = machine.config().cut.unsealed();
            let out = &mut staging.bytes[staging.used..];
            match machine.poll_transmit(now, out, events) {
                None => return,
                Some(Transmit::Datagram { shard, len }) => {
                    let lane = Header::decode(&out[..len]).map_or(0, |(header, _)| header.lane);
                    staging.push(len, len, Stream { lane, shard }, max_datagram);
                }
                Some(Transmit::Data(data)) => self.stage_window(&data),
            }
        }
    }

    fn stage_window(&mut self, data: &DataFragments) {
        let Self { payloads, kept, staging, machine, faults, .. } = self;
        let op = data.header.window.op;
        let Some(payload) = payloads.get(&op).or_else(|| kept.get(&op)) else { return };
        let stream = Stream { lane: data.header.lane, shard: data.shard };
        // Injected faults need each datagram in one contiguous buffer, so they rule out sending
        // from the tensor.
        if faults.is_none()
            && let Some(range) = payload.in_place(&data.header, data.len, data.cut)
            && let Some(head) = staging.bytes[staging.used..].first_chunk_mut()
        {
            data.header.of_fragment(0, range.len()).encode(head);
            return staging.push_in_place(stream, op, range);
        }
        let len = payload.gather(data, &mut staging.bytes[staging.used..]);
        let max_datagram = machine.config().cut.unsealed();
        staging.push(len, data.cut.unsealed(), stream, max_datagram);
    }

    /// Sends the staged messages.
    pub(super) fn flush(&mut self) {
        let Self { links, staging, payloads, stats, faults, .. } = self;
        let Staging { ring, bytes, sealed, messages, lanes, held, used, .. } = staging;
        let most = if links.are_sealed() { SEALED } else { SEND_BATCH };
        for lane in messages.chunk_by(|one, other| one.stream.lane == other.stream.lane) {
            ring.set_tos(udp::tos_of_lane(lane[0].stream.lane, *lanes));
            for run in lane.chunks(most) {
                let mut batch = [Message::new(NOWHERE, &[], 1); SEND_BATCH];
                let batch = &mut batch[..run.len()];
                if links.are_sealed() {
                    links.seal(run, bytes, payloads, sealed, batch);
                } else {
                    for (message, staged) in batch.iter_mut().zip(run) {
                        let to = links.shards[usize::from(staged.stream.shard)].addr;
                        *message = staged.message(to, bytes, payloads);
                    }
                }
                for message in &*batch {
                    stats.tx_bytes += message.len() as u64;
                    stats.tx_datagrams += message.datagrams().unwrap_or(0) as u64;
                }
                match faults {
                    None => links.socket.send_patiently(ring, batch, MAX_SEND_WAITS),
                    Some([dice, _]) => {
                        for (message, staged) in batch.iter().zip(run) {
                            send_by_chance(links, ring, dice, held, staged.stream, message);
                        }
                    }
                }
            }
        }
        messages.clear();
        *used = 0;
    }
}

/// Sends a batch with injected faults, which drop, duplicate or reorder datagrams. Datagrams
/// without a fault are sent together.
fn send_by_chance(
    links: &Links,
    ring: &mut SendRing,
    dice: &mut Dice,
    held: &mut Option<(Stream, Vec<u8>)>,
    stream: Stream,
    message: &Message<'_>,
) {
    let Message { contents, tail, trailer, stride, .. } = *message;
    debug_assert!(tail.is_empty() && trailer.is_empty(), "faults need contiguous datagrams");
    let mut post = |stream: Stream, contents: &[u8], stride: usize| {
        if !contents.is_empty() {
            let to = links.shards[usize::from(stream.shard)].addr;
            let batch = [Message::new(to, contents, stride)];
            links.socket.send_patiently(ring, &batch, MAX_SEND_WAITS);
        }
    };
    let mut rest = 0;
    for (i, datagram) in contents.chunks(stride).enumerate() {
        let fate = dice.roll();
        if fate == Fate::Pass && held.is_none() {
            continue;
        }
        post(stream, &contents[rest..i * stride], stride);
        rest = i * stride + datagram.len();
        if fate == Fate::Hold && held.is_none() {
            *held = Some((stream, datagram.to_vec()));
            continue;
        }
        for _ in 0..fate.copies() {
            post(stream, datagram, stride);
        }
        if let Some((stream, late)) = held.take() {
            post(stream, &late, late.len());
        }
    }
    post(stream, &contents[rest..], stride);
}

/// The size of the staging buffer in bytes: a few windows, so that they stay in the processor's
/// cache.
const STAGING: usize = 4 * RECV_CAPACITY;
/// How many times to wait for room in the send buffer before giving up on a batch.
const MAX_SEND_WAITS: u32 = 64;
