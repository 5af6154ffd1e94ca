//! A shard that has a parent. Its aggregator half serves the ranks; its worker half sends their
//! sums to the parent and takes the parent's results.

use racksum_proto::aggregator::Failed;
use racksum_proto::error::OpError;
use racksum_proto::geometry::{Geometry, Stripe};
use racksum_proto::ids::{OpId, WindowId};
use racksum_proto::observer::Observer;
use racksum_proto::time::{Span, Time};
use racksum_proto::wire::{self, Disagreement};
use racksum_proto::worker::{self, Worker};

use crate::node::{Datagram, Endpoint, Joined, ShardNode, buffer, fragments};

/// A shard connected to the parent's shard of the same number.
#[derive(Debug)]
pub struct RelayNode {
    /// The aggregator half, which the ranks see.
    pub below: ShardNode,
    /// The worker half, which the parent sees.
    pub above: Worker,
    /// Failed ops that the aggregator's other shards must be told about.
    pub failed: Vec<Failed>,
    buffer: Box<[u8]>,
}

impl RelayNode {
    /// Creates a shard of a job whose aggregator has a parent.
    ///
    /// # Panics
    /// If `below` is not configured with a parent or `above` is not configured as a relay.
    #[must_use]
    pub fn new(below: ShardNode, above: worker::Config, now: Time) -> Self {
        assert!(below.machine.config().has_parent && above.relay.is_some(), "no relay");
        Self {
            below,
            failed: Vec::new(),
            buffer: buffer(above.cut),
            above: Worker::new(above, now),
        }
    }

    /// Handles a datagram from the parent.
    pub fn handle_from_above(&mut self, now: Time, bytes: &[u8], observer: &mut impl Observer) {
        for message in wire::messages(bytes) {
            let (header, body) = match message {
                Ok(message) => message,
                Err(reject) => {
                    self.above.reject(reject, observer);
                    continue;
                }
            };
            let verdict = self.above.handle_decoded(now, &header, body, false, observer);
            if let worker::Verdict::Deliver(delivery) = verdict {
                if let Some(place) = self.below.machine.handle_from_parent(&delivery) {
                    self.below.store(place, body);
                }
                if delivery.complete {
                    self.above.handle_delivered(now, &delivery, observer);
                }
            }
        }
    }

    /// Handles timeouts of the worker half.
    pub fn handle_timeout(&mut self, now: Time, observer: &mut impl Observer) {
        self.above.handle_timeout(now, observer);
    }

    /// Folds, relays and sends everything due: `down` to the ranks, `up` to the parent.
    pub fn drive(
        &mut self,
        now: Time,
        down: &mut Vec<Datagram>,
        up: &mut Vec<Datagram>,
        observer: &mut impl Observer,
    ) {
        let mut joined = Joined::new(self.above.config().cut);
        loop {
            let shard = self.below.machine.config().shard;
            for lane in 0..self.below.machine.config().lanes {
                let (done, low) = self.above.reached(lane, shard);
                self.below.machine.handle_parent_at(lane, done, low);
                let waits = self.above.waits(now, lane, shard);
                self.below.machine.handle_parent_waits(lane, waits);
            }
            self.below.drive(now, down, observer);
            let mut any = self.begin(now);
            any |= self.fail(observer);
            any |= self.scan();
            while let Some(lane) = self.above.poll_waits() {
                self.above.say_waits(lane, self.below.machine.awaited(now, lane));
            }
            while let Some(transmit) = self.above.poll_transmit(now, &mut self.buffer, observer) {
                self.send(&transmit, &mut joined);
                any = true;
            }
            any |= self.fail(observer);
            if !any {
                break;
            }
        }
        let datagrams = joined.datagrams.into_iter();
        up.extend(
            datagrams
                .map(|(shard, bytes)| Datagram { to: Endpoint::Shard(shard), bytes: bytes.into() }),
        );
    }

    /// Submits the ops that the ranks have begun to the parent.
    fn begin(&mut self, now: Time) -> bool {
        let mut any = false;
        let Self { below, above, .. } = self;
        while let Some((op, descriptor)) = below.machine.poll_begun(|lane| above.has_room(lane)) {
            // The ranks decide when an op times out, so this timeout is just very long. An op that
            // cannot start times out at the ranks too.
            any |= above.submit_sum(now, op, descriptor, Span::from_secs(1 << 20)).is_ok();
        }
        any
    }

    /// Passes failures from each half to the other.
    fn fail(&mut self, observer: &mut impl Observer) -> bool {
        let mut any = false;
        while let Some(failed) = self.below.machine.poll_failed() {
            let Failed { op, why, from_parent } = failed;
            if !from_parent {
                self.above.fail_sum(op, why, observer);
            }
            self.failed.push(failed);
            any = true;
        }
        let dropped = |(op, lane): &(OpId, u8)| self.below.machine.has_dropped(*lane, *op);
        let dropped: Vec<_> = self.above.sums().filter(dropped).collect();
        for (op, _) in dropped {
            self.above.drop_sum(op, observer);
            any = true;
        }
        while let Some(outcome) = self.above.poll_outcome() {
            if let Err(OpError::Mismatch { op, one, other }) = outcome.result {
                let why = Disagreement { one, other };
                self.below.machine.handle_parent_failed(op, why, observer);
            }
            any = true;
        }
        any
    }

    /// Reports to the worker half which windows the ranks have contributed to.
    fn scan(&mut self) -> bool {
        let mut any = false;
        let config = *self.below.machine.config();
        for lane in 0..config.lanes {
            while let Some(scan) = self.above.poll_scan_of(lane) {
                let Some(descriptor) = self.above.descriptor(scan.op) else { break };
                let windows = Geometry::new(&descriptor).windows();
                let stripe = Stripe::new(scan.op, windows, config.shard, config.shards);
                let window = WindowId::new(scan.op, scan.index);
                let mask = match stripe.nth(scan.index) {
                    None => Some(0),
                    Some(_) => self.below.machine.summed(lane, window),
                };
                let Some(mask) = mask else { break };
                self.above.handle_scanned(scan, mask);
                any = true;
            }
        }
        any
    }

    fn send(&self, transmit: &worker::Transmit, joined: &mut Joined<u8>) {
        match transmit {
            worker::Transmit::Datagram { shard, len } => {
                joined.push(*shard, self.buffer[..*len].to_vec());
            }
            worker::Transmit::Data(data) => {
                let header = &data.header;
                let slot = self.below.machine.slot_of(header.lane, header.window);
                let sum = self.below.result(header.lane, slot.expect("what is sent is held"));
                fragments(data.cut, header, data.fragments, sum, |bytes| {
                    joined.push(data.shard, bytes);
                });
            }
        }
    }
}
