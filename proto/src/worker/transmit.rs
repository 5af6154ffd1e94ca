//! The messages of a worker, and the shards that they go to.

use super::sent::{Probe, Sent, Stalled};
use super::{Config, Worker, find};
use crate::geometry::Fragmentation;
use crate::ids::{OpId, Rank, WindowId};
use crate::observer::{Event, Observer};
use crate::time::Time;
use crate::wire::{AskEntries, Flags, Header, Kind, Opening};

/// A datagram or a set of fragments to send now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transmit {
    /// The first `len` bytes of the buffer.
    Datagram {
        /// The shard that the datagram goes to.
        shard: u8,
        /// The datagram's length.
        len: usize,
    },
    /// Fragments of a window.
    Data(DataFragments),
}

/// Fragments of a window's packed non-zero blocks, which the driver gathers from the tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataFragments {
    /// The shard that the fragments go to.
    pub shard: u8,
    /// Bytes of the whole packed payload.
    pub len: usize,
    /// How the payload is cut.
    pub cut: Fragmentation,
    /// The fragments to send.
    pub fragments: u64,
    /// The header of each fragment, except for length and fragment number. It names the window and
    /// its blocks.
    pub header: Header,
    /// Whether the payload is the window's sum, which other ranks lack, and not this rank's share.
    pub held: bool,
}

impl Worker {
    /// Returns the next thing to send. Lanes go in priority order and shards in turn, so that all
    /// shards stay busy even if the driver cannot send everything at once. Writes datagrams into
    /// `out`, which has room for one of the job's datagrams. The driver polls until `None`.
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
            self.write_open(at, out)
                .or_else(|| self.write_ask(now, at, out, observer))
                .or_else(|| self.repeat(at, observer))
                .or_else(|| self.send_next(now, at))
                .or_else(|| self.write_ack(at, out))
        })
    }

    /// Writes an open: one that was asked for again, or the next stretch once it is long enough or
    /// ends its op.
    fn write_open(&mut self, at: usize, out: &mut [u8]) -> Option<Transmit> {
        let stream = &mut self.streams[at];
        // The results of windows before the cursor have arrived, so the opens have arrived too.
        let (from, to) = match stream.reopen.map(|from| from.max(stream.cursor)) {
            Some(from) if from < stream.opened => (from, stream.opened),
            _ => {
                stream.reopen = None;
                let from = stream.opened;
                let entry = stream.sequence.at(from)?;
                if entry.failed {
                    // The op failed before any of it was opened.
                    stream.skip_failed();
                    return self.write_open(at, out);
                }
                if from == entry.base {
                    stream.stretch = stream.min_stretch();
                }
                // wire: W-35
                let reach = stream.low + crate::wire::OPEN_AHEAD;
                let to = stream.scanned.min(entry.end()).min(reach);
                // A relay that awaits no result must not wait for a full stretch: further sums may
                // need earlier results first.
                let waits = self.config.relay.is_none() || stream.awaits();
                let short = waits && to < entry.end() && to < from + stream.stretch;
                if short || to <= from {
                    return None;
                }
                (from, to)
            }
        };
        let entry = *stream.sequence.at(from)?;
        if entry.failed {
            stream.reopen = Some(entry.end());
            return self.write_open(at, out);
        }
        let window = entry.window(from);
        let to = to.min(entry.end());
        let after = stream.sequence.before(entry.op);
        let op = self.ops.get(find(&self.ops, entry.op)?)?;
        let resumed = op.resumed;
        let openings = (from..to).map(|position| {
            let index = entry.window(position).index;
            Opening { owed: op.masks[index as usize] != 0, held: op.holds(index) }
        });
        let body = out.get_mut(Header::LEN..)?;
        let (len, windows) = self.opens.encode(&op.descriptor, after, openings, resumed, body);
        let end = from + u64::from(windows);
        stream.sequence.note_opened(entry.op);
        stream.note_opened(end);
        stream.reopen = stream.reopen.is_some().then_some(end).filter(|end| *end < stream.opened);
        // wire: W-63
        let flags = if resumed { Flags::RESUMED } else { Flags::NONE };
        let header = Header { window, flags, ..self.header(at, Kind::Open) };
        Some(self.finish(at, header, len, out))
    }

    /// Returns the next fragments to send again, as the aggregator asked.
    fn repeat(&mut self, at: usize, observer: &mut impl Observer) -> Option<Transmit> {
        let stream = &mut self.streams[at];
        if stream.repeats == 0 {
            return None;
        }
        let sent = stream.in_flight.iter_mut().find(|sent| sent.again != 0)?;
        let (position, fragments) = (sent.position, core::mem::take(&mut sent.again));
        stream.repeats -= 1;
        // A failed op has no windows in flight.
        let window = stream.sequence.at(position)?.window(position);
        self.counters.fragments_again += u64::from(fragments.count_ones());
        observer.on_event(&Event::Again { window, fragments });
        Some(self.data(at, window, fragments, Flags::AGAIN))
    }

    /// Returns the next non-zero window, if the pool has a slot for it and congestion control
    /// admits it.
    fn send_next(&mut self, now: Time, at: usize) -> Option<Transmit> {
        let (window, len) = loop {
            let stream = &mut self.streams[at];
            if stream.sent >= stream.opened {
                return None;
            }
            let entry = *stream.sequence.at(stream.sent)?;
            if entry.failed {
                stream.skip_failed();
                continue;
            }
            let window = entry.window(stream.sent);
            let position = stream.sent;
            let (low, pool) = (stream.low, stream.pool());
            let mask = self.mask(window);
            if mask == 0 {
                self.pass(at, window);
                continue;
            }
            let len = entry.geometry.payload_len(window.index, mask);
            let path = &self.paths[usize::from(self.streams[at].shard)];
            // wire: W-28
            // Each stream may always have its lowest window in flight. Otherwise two ranks could
            // fill their paths with windows of different lanes, and each would wait for the other.
            let in_flight = self.streams[at].in_flight.len() as u64;
            let admitted = in_flight == 0 || path.congestion.admits(len);
            // The aggregator may have skipped a failed op before this rank received the failure.
            // The op's windows still count here.
            if position >= low + pool {
                self.streams[at].note_no_slot();
                return None;
            }
            if in_flight >= pool || !admitted {
                return None;
            }
            break (window, len);
        };
        let position = self.pass(at, window);
        let stream = &mut self.streams[at];
        let sent = Sent {
            position,
            len,
            on_path: len,
            at: now,
            again: 0,
            repeated: false,
            lacked: 0,
            fruitless: 0,
        };
        stream.in_flight.push_back(sent);
        self.paths[usize::from(stream.shard)].congestion.on_sent(len);
        self.turn = (stream.shard + 1) % self.config.shards;
        Some(self.data(at, window, u64::MAX, Flags::NONE))
    }

    /// Passes the next window of a stream, so that more windows are scanned. Returns its position.
    fn pass(&mut self, at: usize, window: WindowId) -> u64 {
        if let Some(op) = self.op_mut(window.op) {
            op.passed = op.passed.max(window.index + 1);
        }
        let stream = &mut self.streams[at];
        stream.sent += 1;
        stream.sent - 1
    }

    fn data(&mut self, at: usize, window: WindowId, fragments: u64, flags: Flags) -> Transmit {
        let mask = self.mask(window);
        let op = self.op(window.op);
        let held = op.is_some_and(|op| op.resumed && op.holds(window.index));
        let geometry = op.map(|op| op.geometry);
        let len = geometry.map_or(0, |geometry| geometry.payload_len(window.index, mask));
        let cut = geometry.map_or(self.config.cut, |geometry| geometry.cut(self.config.cut, len));
        let flags = flags.with(self.congestion_flag(at));
        let header = Header { window, mask, flags, ..self.header(at, Kind::Data) };
        let fragments = fragments & cut.all(len);
        Transmit::Data(DataFragments { shard: header.shard, len, cut, fragments, header, held })
    }

    /// Writes an ask for missing results, or a probe.
    fn write_ask(
        &mut self,
        now: Time,
        at: usize,
        out: &mut [u8],
        observer: &mut impl Observer,
    ) -> Option<Transmit> {
        let stream = &mut self.streams[at];
        let Stalled(stalled) = stream.ask.take()?;
        let asks = &self.paths[usize::from(stream.shard)].asks;
        let body = out.get_mut(Header::LEN..)?;
        let len = AskEntries::encode(stream.missing(now, asks, stalled), body);
        if len == AskEntries::NONE_LEN {
            return None;
        }
        stream.note_asked(now, asks);
        if stalled {
            // An earlier probe may still be answered.
            let unanswered = stream.probe.map_or(u64::MAX, |probe| probe.sent);
            stream.probe = Some(Probe { at: now, sent: stream.sent.min(unanswered) });
        }
        let window = stream.sequence.window(stream.cursor);
        self.counters.asks += 1;
        self.counters.probes += u64::from(stalled);
        observer.on_event(&Event::Asked { of: Rank::AGGREGATOR, from: window });
        let header = Header { window, ..self.header(at, Kind::Ask) };
        Some(self.finish(at, header, len, out))
    }

    fn write_ack(&mut self, at: usize, out: &mut [u8]) -> Option<Transmit> {
        if !self.streams[at].ack_due {
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
        let congested = core::mem::take(&mut self.streams[at].congested);
        if congested { Flags::CONGESTED } else { Flags::NONE }
    }

    pub(super) fn header(&mut self, at: usize, kind: Kind) -> Header {
        let Config { generation, rank, .. } = self.config;
        let stream = &mut self.streams[at];
        let job = self.paths[usize::from(stream.shard)].job;
        Header {
            kind,
            job,
            generation,
            sender: rank,
            lane: stream.lane,
            shard: stream.shard,
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
