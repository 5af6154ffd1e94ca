//! A shard that has a parent. Its aggregator half serves the ranks; its worker half sends their
//! sums to the parent and receives the parent's results.

use racksum_proto::aggregator::Failed;
use racksum_proto::error::OpError;
use racksum_proto::geometry::{Geometry, Stripe};
use racksum_proto::ids::{OpId, WindowId};
use racksum_proto::observer::{Event, Observer};
use racksum_proto::time::{Span, Time};
use racksum_proto::verdict::Verdict;
use racksum_proto::wire::{self, Disagreement};
use racksum_proto::worker::{self, Worker};

use crate::node::{Datagram, Endpoint, Joined, ShardNode, buffer, fragments};

/// A shard connected to the parent's shard with the same number.
#[derive(Debug)]
pub struct ChildNode {
    /// The aggregator half, which the ranks see.
    pub shard: ShardNode,
    /// The worker half, which the parent sees.
    pub worker: Worker,
    /// Failed ops to report to the aggregator's other shards.
    pub failed: Vec<Failed>,
    buffer: Box<[u8]>,
}

impl ChildNode {
    /// Creates a shard of a job whose aggregator has a parent.
    ///
    /// # Panics
    /// Panics if `shard` is not configured with a parent or `worker` is not configured for a child
    /// aggregator.
    #[must_use]
    pub fn new(shard: ShardNode, worker: worker::Config, now: Time) -> Self {
        assert!(
            shard.machine.config().has_parent && worker.child.is_some(),
            "configure `shard` with a parent and `worker` for a child aggregator"
        );
        Self {
            shard,
            failed: Vec::new(),
            buffer: buffer(worker.cut),
            worker: Worker::new(worker, now),
        }
    }

    /// Handles a datagram from the parent.
    pub fn handle_from_parent(&mut self, now: Time, bytes: &[u8], observer: &mut impl Observer) {
        for message in wire::messages(bytes) {
            let (header, body) = match message {
                Ok(message) => message,
                Err(reject) => {
                    observer.on_event(&Event::Rejected(reject));
                    continue;
                }
            };
            let verdict = self.worker.handle_decoded(now, &header, body, false, observer);
            if let Verdict::Store(delivery) = verdict {
                if let Some(place) = self.shard.machine.handle_from_parent(&delivery) {
                    self.shard.store(place, body);
                }
                if delivery.complete {
                    self.worker.handle_delivered(now, &delivery, observer);
                }
            }
        }
    }

    /// Handles timeouts of the worker half.
    pub fn handle_timeout(&mut self, now: Time, observer: &mut impl Observer) {
        self.worker.handle_timeout(now, observer);
    }

    /// Folds windows, passes sums and results on, and appends the datagrams that are due: those for
    /// the ranks to `down`, those for the parent to `up`.
    pub fn drive(
        &mut self,
        now: Time,
        down: &mut Vec<Datagram>,
        up: &mut Vec<Datagram>,
        observer: &mut impl Observer,
    ) {
        let mut joined = Joined::new(self.worker.config().cut);
        loop {
            let number = self.shard.machine.config().shard;
            for lane in 0..self.shard.machine.config().lanes {
                let (done, low) = self.worker.reached(lane, number);
                self.shard.machine.handle_parent_at(lane, done, low);
                let waits = self.worker.waits(now, lane, number);
                self.shard.machine.handle_parent_waits(lane, waits);
            }
            self.shard.drive(now, down, observer);
            let mut any = self.begin(now);
            any |= self.fail(observer);
            any |= self.scan();
            while let Some(lane) = self.worker.poll_waits() {
                self.worker.queue_waits(lane, self.shard.machine.awaited(now, lane));
            }
            while let Some(transmit) = self.worker.poll_transmit(now, &mut self.buffer, observer) {
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

    /// Submits to the parent the ops that the ranks have begun.
    fn begin(&mut self, now: Time) -> bool {
        let mut any = false;
        let Self { shard, worker, .. } = self;
        while let Some((op, descriptor)) = shard.machine.poll_begun(|lane| worker.has_room(lane)) {
            // The ranks decide when an op times out, so this timeout is far longer than theirs. If
            // the worker half cannot start an op, that op also times out at the ranks.
            any |= worker.submit_sum(now, op, descriptor, Span::from_secs(1 << 20)).is_ok();
        }
        any
    }

    /// Passes failures from each half to the other.
    fn fail(&mut self, observer: &mut impl Observer) -> bool {
        let mut any = false;
        while let Some(failed) = self.shard.machine.poll_failed() {
            let Failed { op, why, from_parent } = failed;
            if !from_parent {
                self.worker.fail_sum(op, why, observer);
            }
            self.failed.push(failed);
            any = true;
        }
        let dropped = |(op, lane): &(OpId, u8)| self.shard.machine.has_dropped(*lane, *op);
        let dropped: Vec<_> = self.worker.sums().filter(dropped).collect();
        for (op, _) in dropped {
            self.worker.drop_sum(op, observer);
            any = true;
        }
        while let Some(outcome) = self.worker.poll_outcome() {
            if let Err(OpError::Mismatch { op, one, other }) = outcome.result {
                let why = Disagreement { one, other };
                self.shard.machine.handle_parent_failed(op, why, observer);
            }
            any = true;
        }
        any
    }

    /// Reports to the worker half the non-zero blocks of each window whose sum is known.
    fn scan(&mut self) -> bool {
        let mut any = false;
        let config = *self.shard.machine.config();
        for lane in 0..config.lanes {
            while let Some(scan) = self.worker.poll_scan_of(lane) {
                let Some(descriptor) = self.worker.descriptor(scan.op) else { break };
                let windows = Geometry::new(&descriptor).windows();
                let stripe = Stripe::new(scan.op, windows, config.shard, config.shards);
                let window = WindowId::new(scan.op, scan.index);
                let mask = match stripe.nth(scan.index) {
                    None => Some(0),
                    Some(_) => self.shard.machine.summed(lane, window),
                };
                let Some(mask) = mask else { break };
                self.worker.handle_scanned(scan, mask);
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
                let slot = self.shard.machine.slot_of(header.lane, header.window);
                let sum =
                    self.shard.result(header.lane, slot.expect("a window that is sent has a slot"));
                fragments(data.cut, header, data.fragments, sum, |bytes| {
                    joined.push(data.shard, bytes);
                });
            }
        }
    }
}
