//! Handles the datagrams that a worker receives from the aggregator.

use super::Worker;
use crate::descriptor::Descriptor;
use crate::error::OpError;
use crate::geometry::{Fragmentation, Geometry};
use crate::ids::{OpId, Rank, WindowId};
use crate::loss::Loss;
use crate::observer::{Event, Observer};
use crate::reject::Reject;
use crate::time::Time;
use crate::verdict::Verdict;
use crate::wire::{Disagreement, Flags, Header, Kind, MissingRanks, NackEntries};

/// A fragment of a window's packed sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivery {
    /// The shard that sent the fragment.
    pub shard: u8,
    /// The window.
    pub window: WindowId,
    /// The op's descriptor.
    pub descriptor: Descriptor,
    /// The op's geometry: its blocks and windows.
    pub geometry: Geometry,
    /// The blocks that the packed payload holds.
    pub mask: u64,
    /// The length of the whole packed payload, in bytes.
    pub len: usize,
    /// How the payload is cut.
    pub cut: Fragmentation,
    /// The fragment's number.
    pub fragment: u8,
    /// Whether this fragment completes the window. If so, the driver must call
    /// [`Worker::handle_delivered`] once it has written the fragment.
    pub complete: bool,
}

impl Worker {
    /// Handles a datagram of one message. `congested` says whether it carried an ECN congestion
    /// mark.
    pub fn handle_datagram(
        &mut self,
        now: Time,
        datagram: &[u8],
        congested: bool,
        observer: &mut impl Observer,
    ) -> Verdict<Delivery> {
        match Header::decode(datagram) {
            Ok((header, body)) => self.handle_decoded(now, &header, body, congested, observer),
            Err(reject) => rejected(reject, observer),
        }
    }

    /// Handles a message whose header the driver has decoded. Does not read the body of a result,
    /// so the driver may receive the body after the verdict, directly into its place.
    pub fn handle_decoded(
        &mut self,
        now: Time,
        header: &Header,
        body: &[u8],
        congested: bool,
        observer: &mut impl Observer,
    ) -> Verdict<Delivery> {
        match self.handle(now, header, body, congested, observer) {
            Ok(verdict) => verdict,
            Err(reject) => rejected(reject, observer),
        }
    }

    fn handle(
        &mut self,
        now: Time,
        header: &Header,
        body: &[u8],
        congested: bool,
        observer: &mut impl Observer,
    ) -> Result<Verdict<Delivery>, Reject> {
        let at = self.check_identity(header)?;
        let stream = &mut self.streams[at];
        stream.note_mark(congested);
        if header.flags.has(Flags::CONGESTED) {
            self.paths[usize::from(header.shard)].congestion.on_congested();
        }
        if header.kind == Kind::Fail {
            // The credit may pass the failed op, which would then end without the reason.
            self.handle_fail(now, header.window.op, body, observer)?;
        }
        if self.streams[at].handle_low(header.ack) {
            self.pass_ended(at, observer);
            self.release(now, at);
            self.drop_ended();
        }
        match header.kind {
            Kind::Result => self.handle_result(now, header, observer),
            Kind::Nack => self.handle_nack(now, at, body),
            // wire: W-25, W-26
            Kind::Credit if body.is_empty() => {
                // wire: W-56
                let congestion = &mut self.paths[usize::from(header.shard)].congestion;
                self.streams[at].handle_credit(header.window, congestion);
                Ok(Verdict::Control)
            }
            Kind::Ping if body.is_empty() => Ok(Verdict::Control),
            Kind::Fail => Ok(Verdict::Control),
            Kind::Credit | Kind::Ping => Err(Reject::Body),
            Kind::Wait => self.handle_wait(now, at, header.window, body, observer),
            Kind::Open | Kind::Data | Kind::Ack => Err(Reject::Kind),
        }
    }

    /// Checks that the datagram comes from this job's aggregator and belongs to a stream of the
    /// job. Returns the stream's index.
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
    ) -> Result<Verdict<Delivery>, Reject> {
        let window = header.window;
        let at = self.config.stream(header.lane, header.shard);
        let op = self.op(window.op).map(|op| (*op.descriptor(), *op.geometry()));
        let stream = &mut self.streams[at];
        let nacks = &mut self.paths[usize::from(header.shard)].nacks;
        let position = stream.awaited(window).inspect_err(|reject| {
            if *reject == Reject::Stale && header.flags.has(Flags::AGAIN) {
                nacks.note_again(now, false);
            }
        })?;
        let (descriptor, geometry) = op.ok_or(Reject::Stale)?;
        let arrived = stream.handle_result(now, position, header, self.config.cut, nacks)?;
        let Some((len, complete)) = arrived else {
            let (from, fragment) = (Rank::AGGREGATOR, header.fragment);
            observer.on_event(&Event::Duplicate { from, window, fragment });
            return Ok(Verdict::Duplicate);
        };
        self.last_received = now;
        let results = &mut self.paths[usize::from(header.shard)].results;
        results.again += u64::from(header.flags.has(Flags::AGAIN));
        let cut = geometry.cut(self.config.cut, len);
        if complete {
            results.add(len, cut.all(len).count_ones());
        }
        let mut held = false;
        if let Some(op) = self.op_mut(window.op) {
            // wire: W-62
            op.note_absent(header.shard, header.flags.absentees());
            held = op.share().holds(window.index);
            if complete && !held {
                op.share_mut().note_held(window.index, header.mask);
            }
        }
        if held {
            // The sum was sent for ranks that lacked it. This rank has the sum and must not write
            // it again, because the caller may have taken the tensor back.
            if complete {
                self.settle_results(now, at, observer);
            }
            return Ok(Verdict::Control);
        }
        let Header { mask, shard, fragment, .. } = *header;
        let delivery =
            Delivery { shard, window, descriptor, geometry, mask, len, cut, fragment, complete };
        Ok(Verdict::Store(delivery))
    }

    /// Notes that the driver has written a delivery that completes its window. Schedules an
    /// acknowledgement, and a nack for results that must have been lost.
    pub fn handle_delivered(
        &mut self,
        now: Time,
        delivery: &Delivery,
        observer: &mut impl Observer,
    ) {
        let at = self.config.stream(delivery.descriptor.lane, delivery.shard);
        self.settle_results(now, at, observer);
    }

    /// Moves the cursor past complete results, removes their windows from those in flight, and
    /// queues a nack for results that must have been lost.
    fn settle_results(&mut self, now: Time, at: usize, observer: &mut impl Observer) {
        while let Some(op) = self.streams[at].advance(now) {
            self.finish_stream(op, observer);
        }
        self.release(now, at);
        let stream = &mut self.streams[at];
        stream.nack_lost(now, &self.paths[usize::from(stream.shard())].nacks);
    }

    /// Removes the windows that no longer need a result from those that a stream has in flight.
    fn release(&mut self, now: Time, at: usize) {
        let stream = &mut self.streams[at];
        stream.release(now, &mut self.paths[usize::from(stream.shard())]);
        stream.note_awaited(now);
    }

    /// Handles a nack: the aggregator lacks fragments or opens.
    fn handle_nack(
        &mut self,
        now: Time,
        at: usize,
        body: &[u8],
    ) -> Result<Verdict<Delivery>, Reject> {
        let entries = NackEntries::decode(body)?;
        let stream = &mut self.streams[at];
        let congestion = &mut self.paths[usize::from(stream.shard())].congestion;
        stream.handle_nack(now, &entries, self.config.cut, congestion);
        Ok(Verdict::Control)
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
    ) -> Result<Verdict<Delivery>, Reject> {
        let missing = MissingRanks::decode(body)?;
        let stream = &mut self.streams[at];
        let nacks = &mut self.paths[usize::from(stream.shard())].nacks;
        let left = stream.handle_wait(now, end, missing, nacks);
        // wire: W-61 A child aggregator takes no action: the ranks below it decide what the
        // departure of a rank means.
        if !left.is_empty() && self.config.child.is_none() {
            self.handle_peers_lost(&left, Loss::Left, observer);
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
    ) -> Result<(), Reject> {
        let Disagreement { one, other } = Disagreement::decode(body)?;
        self.note_failure_confirmed(op);
        // wire: W-41
        self.fail(op, OpError::Mismatch { op, one, other }, observer);
        // The failed op may have held up complete results of later ops.
        for at in 0..self.streams.len() {
            self.settle_results(now, at, observer);
        }
        Ok(())
    }
}

/// Reports a rejected datagram to the observer.
fn rejected(reject: Reject, observer: &mut impl Observer) -> Verdict<Delivery> {
    observer.on_event(&Event::Rejected(reject));
    Verdict::Reject(reject)
}
