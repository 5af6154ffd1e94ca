//! The messages of a worker, and the shards that they go to.

use super::stream::Nack;
use super::{Config, Op, Worker, find};
use crate::geometry::Fragmentation;
use crate::ids::{OpId, Rank, WindowId};
use crate::observer::{Event, Observer};
use crate::time::Time;
use crate::wire::{Flags, Header, Kind, Opening};

/// A datagram or a set of fragments to send now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transmit {
    /// A datagram: the first `len` bytes of the buffer that the driver passed.
    Datagram {
        /// The shard that the datagram goes to.
        shard: u8,
        /// The datagram's length.
        len: usize,
    },
    /// Fragments of a window.
    Data(DataFragments),
}

/// Fragments of a window's packed non-zero blocks, which the driver must gather from the tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataFragments {
    /// The shard that the fragments go to.
    pub shard: u8,
    /// The length of the whole packed payload, in bytes.
    pub len: usize,
    /// How the payload is cut.
    pub cut: Fragmentation,
    /// The fragments to send.
    pub fragments: u64,
    /// The header of each fragment, except for length and fragment number. It names the window and
    /// its blocks.
    pub header: Header,
    /// Whether the payload is the window's sum, which other ranks may lack. Otherwise the payload
    /// is this rank's share.
    pub held: bool,
}

impl Worker {
    /// Returns the next datagram or fragments to send. Takes lanes in priority order and shards in
    /// turn, so that all shards stay busy even if the driver cannot send everything at once. Writes
    /// datagrams into `out`, which must have room for one of the job's datagrams. The driver must
    /// poll until `None`.
    pub fn poll_transmit(
        &mut self,
        now: Time,
        out: &mut [u8],
        observer: &mut impl Observer,
    ) -> Option<Transmit> {
        if !self.failures.is_empty()
            && let Some(failure) = self.write_failure(now, out)
        {
            return Some(failure);
        }
        if let Some(waits) = self.write_waits(out) {
            return Some(waits);
        }
        let shards = usize::from(self.config.shards);
        let turn = usize::from(self.turn);
        (0..self.streams.len()).find_map(|i| {
            let at = i / shards * shards + (i + turn) % shards;
            self.write_open(now, at, out)
                .or_else(|| self.write_nack(now, at, out, observer))
                .or_else(|| self.repeat(at, observer))
                .or_else(|| self.send_next(now, at))
                .or_else(|| self.write_ack(at, out))
        })
    }

    /// Writes an open: either a repetition that the aggregator requested, or the next stretch.
    fn write_open(&mut self, now: Time, at: usize, out: &mut [u8]) -> Option<Transmit> {
        let stream = &mut self.streams[at];
        let (entry, range) = stream.poll_open()?;
        let from = range.start;
        let after = stream.opened_before(entry.op);
        let op = self.ops.get(find(&self.ops, entry.op)?)?;
        let (resumed, share) = (op.is_resumed(), op.share());
        let openings = range.map(|position| {
            let index = entry.window(position).index;
            Opening { owed: share.mask(index) != 0, held: share.holds(index) }
        });
        let body = out.get_mut(Header::LEN..)?;
        let (len, windows) = self.opens.encode(op.descriptor(), after, openings, resumed, body);
        stream.note_opened(now, entry.op, from + u64::from(windows));
        // wire: W-63
        let flags = if resumed { Flags::RESUMED } else { Flags::NONE };
        let header = Header { window: entry.window(from), flags, ..self.header(at, Kind::Open) };
        Some(self.finish(at, header, len, out))
    }

    /// Returns the next fragments to send again, as the aggregator requested.
    fn repeat(&mut self, at: usize, observer: &mut impl Observer) -> Option<Transmit> {
        let (window, fragments) = self.streams[at].poll_repeat()?;
        observer.on_event(&Event::Again { window, fragments });
        Some(self.data(at, window, fragments, Flags::AGAIN))
    }

    /// Returns the next non-zero window, if the pool has a slot for it and congestion control
    /// admits it.
    fn send_next(&mut self, now: Time, at: usize) -> Option<Transmit> {
        loop {
            let (window, geometry) = self.streams[at].next_to_send()?;
            let mask = self.mask(window);
            if mask == 0 {
                self.streams[at].pass_empty();
                self.note_passed(window);
                continue;
            }
            let len = geometry.payload_len(window.index, mask);
            let stream = &mut self.streams[at];
            let shard = stream.shard();
            if !stream.send(now, len, &mut self.paths[usize::from(shard)].congestion) {
                return None;
            }
            self.note_passed(window);
            self.turn = (shard + 1) % self.config.shards;
            return Some(self.data(at, window, u64::MAX, Flags::NONE));
        }
    }

    /// Notes that a window was sent or is empty. More windows can then be scanned.
    fn note_passed(&mut self, window: WindowId) {
        if let Some(op) = self.op_mut(window.op) {
            op.share_mut().pass(window.index);
        }
    }

    fn data(&mut self, at: usize, window: WindowId, fragments: u64, flags: Flags) -> Transmit {
        let mask = self.mask(window);
        let op = self.op(window.op);
        let held = op.is_some_and(|op| op.is_resumed() && op.share().holds(window.index));
        let geometry = op.map(Op::geometry);
        let len = geometry.map_or(0, |geometry| geometry.payload_len(window.index, mask));
        let cut = geometry.map_or(self.config.cut, |geometry| geometry.cut(self.config.cut, len));
        let flags = flags.with(self.congestion_flag(at));
        let header = Header { window, mask, flags, ..self.header(at, Kind::Data) };
        let fragments = fragments & cut.all(len);
        let sent = &mut self.paths[usize::from(header.shard)].sent;
        match flags.has(Flags::AGAIN) {
            true => sent.again += u64::from(fragments.count_ones()),
            false => sent.add(len, fragments.count_ones()),
        }
        Transmit::Data(DataFragments { shard: header.shard, len, cut, fragments, header, held })
    }

    /// Writes a nack for missing results, or a probe.
    fn write_nack(
        &mut self,
        now: Time,
        at: usize,
        out: &mut [u8],
        observer: &mut impl Observer,
    ) -> Option<Transmit> {
        let stream = &mut self.streams[at];
        let nack = stream.poll_nack()?;
        let nacks = &self.paths[usize::from(stream.shard())].nacks;
        let len = stream.write_nack(now, nack, nacks, out.get_mut(Header::LEN..)?)?;
        let header = self.header(at, Kind::Nack);
        let window = header.ack;
        let probe = nack == Nack::Probe;
        observer.on_event(&Event::Nacked { of: Rank::AGGREGATOR, from: window, probe });
        Some(self.finish(at, Header { window, ..header }, len, out))
    }

    fn write_ack(&mut self, at: usize, out: &mut [u8]) -> Option<Transmit> {
        if !self.streams[at].is_ack_due() {
            return None;
        }
        let header = self.header(at, Kind::Ack);
        Some(self.finish(at, header, 0, out))
    }

    /// Writes the header in front of a body of `len` bytes.
    pub(super) fn finish(
        &mut self,
        at: usize,
        header: Header,
        len: usize,
        out: &mut [u8],
    ) -> Transmit {
        let flags = header.flags.with(self.congestion_flag(at));
        let length = u16::try_from(len).unwrap_or(u16::MAX);
        let header = Header { flags, length, ..header };
        if let Some(place) = out.first_chunk_mut() {
            header.encode(place);
        }
        Transmit::Datagram { shard: header.shard, len: Header::LEN + len }
    }

    fn congestion_flag(&mut self, at: usize) -> Flags {
        if self.streams[at].report_mark() { Flags::CONGESTED } else { Flags::NONE }
    }

    pub(super) fn header(&mut self, at: usize, kind: Kind) -> Header {
        let Config { generation, rank, .. } = self.config;
        let stream = &mut self.streams[at];
        let job = self.paths[usize::from(stream.shard())].job;
        Header {
            kind,
            job,
            generation,
            sender: rank,
            lane: stream.lane(),
            shard: stream.shard(),
            window: WindowId::new(OpId(0), 0),
            ack: stream.acknowledge(),
            mask: 0,
            previous: 0,
            length: 0,
            fragment: 0,
            flags: Flags::NONE,
        }
    }
}
