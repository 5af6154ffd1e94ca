//! The worker's handling of the aggregator's datagrams.

use alloc::vec::Vec;

use super::sent::{Probe, Stalled};
use super::stream::{Arrival, Stream};
use super::{Path, Worker};
use crate::descriptor::Descriptor;
use crate::error::OpError;
use crate::geometry::{Fragmentation, Geometry};
use crate::ids::{OpId, Rank, WindowId};
use crate::loss::Loss;
use crate::observer::{Event, Observer};
use crate::recovery::{self, Asked};
use crate::reject::Reject;
use crate::time::Time;
use crate::wire::{AskEntries, Disagreement, Flags, Header, Kind, MissingRanks};

/// The outcome of a datagram, and what happens to its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The driver writes the body to its place in the tensor.
    Deliver(Delivery),
    /// The fragment had arrived before.
    Duplicate,
    /// The datagram was a control message without payload.
    Control,
    /// The datagram changed nothing but a counter.
    Reject(Reject),
}

/// A fragment of a window's packed sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivery {
    /// The shard that sent it.
    pub shard: u8,
    /// The window.
    pub window: WindowId,
    /// The op's descriptor.
    pub descriptor: Descriptor,
    /// The op's geometry: its blocks and windows.
    pub geometry: Geometry,
    /// The blocks that the packed payload holds.
    pub mask: u64,
    /// Bytes of the whole packed payload.
    pub len: usize,
    /// How the payload is cut.
    pub cut: Fragmentation,
    /// The fragment's number.
    pub fragment: u8,
    /// Whether this fragment completes the window. Once it is written, the driver calls
    /// [`Worker::handle_delivered`].
    pub complete: bool,
}

impl Worker {
    /// Handles a datagram of one message. `congested` says that it carried an ECN congestion mark.
    pub fn handle_datagram(
        &mut self,
        now: Time,
        datagram: &[u8],
        congested: bool,
        observer: &mut impl Observer,
    ) -> Verdict {
        match Header::decode(datagram) {
            Ok((header, body)) => self.handle_decoded(now, &header, body, congested, observer),
            Err(reject) => self.reject(reject, observer),
        }
    }

    /// Handles one message of a datagram whose header the driver has decoded. Does not read the
    /// body of a result: the driver may receive it after the verdict, directly into its place.
    pub fn handle_decoded(
        &mut self,
        now: Time,
        header: &Header,
        body: &[u8],
        congested: bool,
        observer: &mut impl Observer,
    ) -> Verdict {
        match self.handle(now, header, body, congested, observer) {
            Err(reject) => self.reject(reject, observer),
            Ok(Verdict::Duplicate) => {
                self.counters.duplicates += 1;
                Verdict::Duplicate
            }
            Ok(verdict) => verdict,
        }
    }

    /// Counts a datagram that changed nothing.
    pub fn reject(&mut self, reject: Reject, observer: &mut impl Observer) -> Verdict {
        self.counters.rejects.count(reject);
        observer.on_event(&Event::Rejected(reject));
        Verdict::Reject(reject)
    }

    fn handle(
        &mut self,
        now: Time,
        header: &Header,
        body: &[u8],
        congested: bool,
        observer: &mut impl Observer,
    ) -> Result<Verdict, Reject> {
        let at = self.check_identity(header)?;
        let stream = &mut self.streams[at];
        stream.congested |= congested;
        if header.flags.has(Flags::CONGESTED) {
            self.paths[usize::from(header.shard)].congestion.on_congested();
        }
        if stream.handle_low(header.ack) {
            self.pass_ended(at, observer);
            self.release(now, at);
            self.drop_ended();
        }
        match header.kind {
            Kind::Result => self.handle_result(now, header, observer),
            Kind::Ask => self.handle_ask(now, at, body),
            // wire: W-25, W-26
            Kind::Credit if body.is_empty() => {
                // wire: W-56
                let arrived = self.streams[at].sequence.position_from(header.window);
                self.note_off_path(at, arrived);
                Ok(Verdict::Control)
            }
            Kind::Probe if body.is_empty() => Ok(Verdict::Control),
            Kind::Credit | Kind::Probe => Err(Reject::Body),
            Kind::Wait => self.handle_wait(now, at, header.window, body, observer),
            Kind::Fail => self.handle_fail(now, header.window.op, body, observer),
            Kind::Open | Kind::Data | Kind::Ack => Err(Reject::Kind),
        }
    }

    /// Checks that the datagram comes from this job's aggregator and belongs to one of its streams.
    /// Returns the stream's index.
    fn check_identity(&self, header: &Header) -> Result<usize, Reject> {
        // wire: W-10
        if header.lane >= self.config.lanes || header.shard >= self.config.shards {
            return Err(Reject::Stream);
        }
        // wire: W-7
        if header.job != self.paths[usize::from(header.shard)].job {
            return Err(Reject::Job);
        }
        // wire: W-8
        if header.generation != self.config.generation {
            return Err(Reject::Generation);
        }
        // wire: W-9
        if header.sender != Rank::AGGREGATOR {
            return Err(Reject::Sender);
        }
        Ok(self.config.stream(header.lane, header.shard))
    }

    fn handle_result(
        &mut self,
        now: Time,
        header: &Header,
        observer: &mut impl Observer,
    ) -> Result<Verdict, Reject> {
        let window = header.window;
        let at = self.config.stream(header.lane, header.shard);
        let op = self.op(window.op).map(|op| (op.descriptor, op.geometry));
        let stream = &mut self.streams[at];
        let Some(position) = stream.sequence.position(window) else {
            let settled = stream.sequence.is_settled(window.op);
            return Err(if settled { Reject::Stale } else { Reject::Unopened });
        };
        // wire: W-42
        let failed = stream.sequence.get(window.op).is_none_or(|entry| entry.failed);
        let (false, Some((descriptor, geometry))) = (failed || position < stream.cursor, op) else {
            return Err(Reject::Stale);
        };
        if position >= stream.opened {
            return Err(Reject::Unopened);
        }
        let arrival = self.place_arrival(at, position, header)?;
        let held = self.op(window.op).is_some_and(|op| op.holds(window.index));
        let Some(complete) = self.note_arrival(now, at, arrival, header) else {
            let (from, fragment) = (Rank::AGGREGATOR, header.fragment);
            observer.on_event(&Event::Duplicate { from, window, fragment });
            return Ok(Verdict::Duplicate);
        };
        let stream = &mut self.streams[at];
        stream.waited.forget(window.op);
        if complete {
            // wire: W-37
            stream.forget_repeats(position);
        }
        // wire: W-62
        if let Some(op) = self.op_mut(window.op) {
            op.note_absent(header.shard, header.flags.absentees());
        }
        let Arrival { mask, len, .. } = self.streams[at].arrivals[arrival];
        if held {
            // Other ranks lacked this sum. This rank has it, and the caller may have taken the
            // tensor back.
            if complete {
                self.settle_results(now, at, observer);
            }
            return Ok(Verdict::Control);
        }
        if let Some(op) = self.op_mut(window.op).filter(|_| complete) {
            op.note_held(window.index, mask);
        }
        let Header { shard, fragment, .. } = *header;
        let cut = geometry.cut(self.config.cut, len);
        let delivery =
            Delivery { shard, window, descriptor, geometry, mask, len, cut, fragment, complete };
        Ok(Verdict::Deliver(delivery))
    }

    /// Notes a fragment, and queues an ask for losses that it reveals. Returns whether the fragment
    /// completes its window; `None` if it had arrived before.
    fn note_arrival(
        &mut self,
        now: Time,
        at: usize,
        place: usize,
        header: &Header,
    ) -> Option<bool> {
        let path = &mut self.paths[usize::from(header.shard)];
        let stream = &mut self.streams[at];
        let arrival = &mut stream.arrivals[place];
        let position = arrival.position;
        let bit = 1 << header.fragment;
        let new = arrival.have & bit == 0;
        if new {
            stream.quiet_since = now;
            (stream.probes, stream.fruitless, stream.is_told) = (0, 0, false);
            self.heard = now;
        }
        arrival.have |= bit;
        let again = header.flags.has(Flags::AGAIN);
        if let Some(took) = arrival.asked.answer(bit, again, position, now, &mut stream.answered) {
            path.asks.answered(took);
        }
        arrival.sent |= recovery::sent_before(header.fragment, again);
        let complete = arrival.complete();
        let hole = arrival.sent & arrival.all & !arrival.have != 0;
        let proves = recovery::proves_earlier(header.fragment, complete, again);
        let later = proves && position > stream.results_sent;
        if later {
            stream.results_sent = position;
        }
        // wire: W-38
        // A complete window is checked after its delivery.
        let asks = &path.asks;
        let first = hole && place == 0 && stream.is_to_ask_of_first(now, asks);
        if !complete && (first || later && stream.is_to_ask(now, asks)) {
            stream.ask.get_or_insert(Stalled(false));
        }
        new.then_some(complete)
    }

    /// Checks a result's shape, and finds or creates its entry in `arrivals`.
    fn place_arrival(
        &mut self,
        at: usize,
        position: u64,
        header: &Header,
    ) -> Result<usize, Reject> {
        let stream = &mut self.streams[at];
        let entry = stream.sequence.at(position).ok_or(Reject::Stale)?;
        let index = header.window.index;
        // wire: W-11
        if header.mask & !entry.geometry.full_mask(index) != 0 {
            return Err(Reject::Shape);
        }
        let len = entry.geometry.payload_len(index, header.mask);
        let cut = entry.geometry.cut(self.config.cut, len);
        let fragment = usize::from(header.fragment);
        // wire: W-21
        let length = usize::from(header.length);
        if fragment >= cut.count(len) || cut.range(len, fragment).len() != length {
            return Err(Reject::Shape);
        }
        let start = if header.previous == Header::NO_PREVIOUS {
            entry.base
        } else {
            let previous = WindowId::new(header.window.op, header.previous);
            stream.sequence.position(previous).ok_or(Reject::Shape)? + 1
        };
        // wire: W-23
        if start > position {
            return Err(Reject::Shape);
        }
        match stream.arrivals.binary_search_by_key(&position, |arrival| arrival.position) {
            // wire: W-29
            Ok(i) if stream.arrivals[i].mask == header.mask => Ok(i),
            Ok(_) => Err(Reject::Shape),
            Err(_) if stream.arrivals.len() as u64 >= stream.pool() => Err(Reject::BeyondPool),
            Err(i) => {
                let (mask, all) = (header.mask, cut.all(len));
                // An ask for a gap covers every window in the gap.
                let (mut asked, gap_asked) = match stream.arrivals.get(i) {
                    Some(next) if position < next.start => (next.gap_asked, Asked::default()),
                    Some(_) => Default::default(),
                    None => stream.asked_behind(position),
                };
                asked.limit(all);
                let arrival =
                    Arrival { position, start, mask, have: 0, all, len, sent: 0, asked, gap_asked };
                stream.arrivals.insert(i, arrival);
                Ok(i)
            }
        }
    }

    /// Notes that the driver has written a delivery that completes its window. Schedules an
    /// acknowledgement and asks for results that must have been lost.
    pub fn handle_delivered(
        &mut self,
        now: Time,
        delivery: &Delivery,
        observer: &mut impl Observer,
    ) {
        let at = self.config.stream(delivery.descriptor.lane, delivery.shard);
        self.settle_results(now, at, observer);
    }

    /// Moves the cursor past complete results, frees what was in flight for them, and queues an ask
    /// for results that must have been lost.
    fn settle_results(&mut self, now: Time, at: usize, observer: &mut impl Observer) {
        while let Some(op) = self.streams[at].advance(now) {
            self.finish_stream(op, observer);
        }
        self.release(now, at);
        let stream = &mut self.streams[at];
        let asks = &self.paths[usize::from(stream.shard)].asks;
        // wire: W-38
        if stream.is_to_ask(now, asks) {
            stream.ask.get_or_insert(Stalled(false));
        }
    }

    /// Frees what was in flight for windows before the cursor or the credit. A window that this
    /// rank opened gets no result if it turns out that all ranks have its sum.
    pub(super) fn release(&mut self, now: Time, at: usize) {
        let stream = &mut self.streams[at];
        let path = &mut self.paths[usize::from(stream.shard)];
        let done = stream.cursor.max(stream.low);
        while let Some(sent) = stream.in_flight.pop_front_if(|sent| sent.position < done) {
            stream.repeats -= usize::from(sent.again != 0);
            path.congestion.on_delivered(sent.on_path);
            if !sent.repeated && sent.position < stream.cursor {
                path.rtt.sample(now.since(sent.at));
            }
        }
    }

    /// Handles an ask: the aggregator lacks fragments or opens.
    fn handle_ask(&mut self, now: Time, at: usize, body: &[u8]) -> Result<Verdict, Reject> {
        let entries = AskEntries::decode(body)?;
        let stream = &mut self.streams[at];
        // The answer to a probe says nothing about windows sent after the probe.
        let end = stream.probe.as_mut().map_or(u64::MAX, Probe::answered);
        let position =
            |stream: &Stream, window| stream.sequence.position(window).filter(|at| *at < end);
        let asked = entries.iter().filter(|entry| entry.fragments != 0);
        // Everything sent up to the last window that lacks something has left the path.
        if let Some(last) = asked.filter_map(|entry| position(stream, entry.window)).max() {
            self.note_off_path(at, last + 1);
        }
        let stream = &mut self.streams[at];
        let path: &mut Path = &mut self.paths[usize::from(stream.shard)];
        let mut fruitless: Option<u32> = None;
        for entry in entries.iter() {
            // wire: W-36
            if entry.fragments == 0 {
                let from = stream.sequence.position_from(entry.window).min(stream.opened);
                stream.reopen = Some(stream.reopen.map_or(from, |at| at.min(from)));
                continue;
            }
            let lacked = position(stream, entry.window);
            // wire: W-37
            let Some(position) = lacked.filter(|at| !stream.is_summed(*at)) else { continue };
            let found = stream.in_flight.binary_search_by_key(&position, |sent| sent.position);
            let Ok(i) = found else { continue };
            let len = stream.in_flight[i].len;
            let op = stream.sequence.at(position);
            let cut = op.map_or(self.config.cut, |op| op.geometry.cut(self.config.cut, len));
            let sent = &mut stream.in_flight[i];
            let lacked = sent.note_lacked(entry.fragments & cut.all(len));
            fruitless = Some(fruitless.map_or(lacked, |least| least.min(lacked)));
            let wanted = sent.lacked & !sent.again;
            stream.repeats += usize::from(sent.again == 0 && wanted != 0);
            sent.again |= wanted;
            stream.quiet_since = now;
            stream.probes = 0;
            let lost = cut.payload() * wanted.count_ones() as usize;
            let lost = lost.min(sent.len);
            // Losing a repetition proves nothing more about the path than the first loss.
            if !core::mem::replace(&mut sent.repeated, true) {
                path.congestion.on_lost(lost);
            }
            path.congestion.on_sent(lost);
            sent.on_path += lost;
        }
        // wire: W-77
        stream.fruitless = fruitless.unwrap_or(stream.fruitless);
        Ok(Verdict::Control)
    }

    /// Notes that all data sent before `position` has arrived or is lost. Its results may take
    /// longer, but the path has room again.
    fn note_off_path(&mut self, at: usize, position: u64) {
        let stream = &mut self.streams[at];
        let path = &mut self.paths[usize::from(stream.shard)];
        for sent in stream.in_flight.iter_mut().take_while(|sent| sent.position < position) {
            path.congestion.on_delivered(core::mem::take(&mut sent.on_path));
        }
    }

    /// Handles a wait: the aggregator has sent all results of windows before `end`, and waits for
    /// ranks.
    fn handle_wait(
        &mut self,
        now: Time,
        at: usize,
        end: WindowId,
        body: &[u8],
        observer: &mut impl Observer,
    ) -> Result<Verdict, Reject> {
        let missing = MissingRanks::decode(body)?;
        let stream = &mut self.streams[at];
        let asks = &mut self.paths[usize::from(stream.shard)].asks;
        // After several probes, this may be the late answer to the first, so it gives no sample
        // (Karn).
        let first = stream.probes == 1;
        if let Some(probe) = stream.probe.take().filter(|_| first) {
            asks.sample(now.since(probe.at));
        }
        // wire: W-38
        if !stream.note_wait(now, end, asks) {
            stream.waited.forget_all();
            return Ok(Verdict::Control);
        }
        stream.waited.set(now, end.op, missing);
        // The wait is obsolete if the results of all opened windows have arrived since.
        let waits = stream.awaits();
        let gone =
            stream.waited.ranks(now).iter().filter(|(_, silent)| *silent == MissingRanks::LEFT);
        let gone: Vec<Rank> = gone.map(|(rank, _)| *rank).collect();
        // wire: W-61
        // The ranks below a relay decide themselves what the departure means.
        if waits && !gone.is_empty() && self.config.relay.is_none() {
            self.handle_peers_lost(&gone, Loss::Left, observer);
        }
        Ok(Verdict::Control)
    }

    /// Handles a fail: the ranks disagree about an op.
    fn handle_fail(
        &mut self,
        now: Time,
        op: OpId,
        body: &[u8],
        observer: &mut impl Observer,
    ) -> Result<Verdict, Reject> {
        let Disagreement { one, other } = Disagreement::decode(body)?;
        self.note_failure_heard(op);
        // wire: W-41
        self.fail(op, OpError::Mismatch { op, one, other }, observer);
        // Results of later ops may have waited for this op.
        for at in 0..self.streams.len() {
            self.settle_results(now, at, observer);
        }
        Ok(Verdict::Control)
    }
}
