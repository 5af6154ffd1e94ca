//! A job with a parent. In addition to the aggregator half, it has a worker half, which contributes
//! the sums to the parent and passes the results on. `racksum_proto::aggregator` documents the
//! duties of each half.

use std::net::SocketAddr;

use racksum_net::auth::{Opener, Sealer};
use racksum_net::udp::UdpSocket;
use racksum_proto::aggregator::{Failed, FragmentPlace, ResultFragments};
use racksum_proto::error::OpError;
use racksum_proto::geometry::{Geometry, Stripe};
use racksum_proto::ids::{JobId, WindowId};
use racksum_proto::reject::Reject;
use racksum_proto::schedule::Turn;
use racksum_proto::time::{Span, Time};
use racksum_proto::verdict::Verdict;
use racksum_proto::wire::{Disagreement, Header};
use racksum_proto::worker::{Config, Outcome, Transmit, Worker};

use super::ShardJob;
use super::outbox::Outbox;
use crate::destinations::To;

/// The link to the parent, as announced to a shard.
#[derive(Debug)]
pub(crate) struct NewParent {
    pub(crate) config: Config,
    /// The address of the parent's shard.
    pub(crate) addr: SocketAddr,
    pub(crate) sealer: Option<Sealer>,
    pub(crate) opener: Option<Opener>,
}

/// A job's link to its parent.
#[derive(Debug)]
pub(crate) struct ParentStream {
    pub(super) machine: Worker,
    /// The opener of datagrams from the parent, if they are authenticated.
    opener: Option<Opener>,
}

impl ParentStream {
    pub(super) fn new(config: Config, opener: Option<Opener>, now: Time) -> Self {
        Self { machine: Worker::new(config, now), opener }
    }
}

/// Returns the messages of a datagram from the parent, if the datagram is authentic.
pub(super) fn open<'a>(job: &mut ShardJob, datagram: &'a mut [u8]) -> Option<&'a [u8]> {
    let parent = job.parent.as_mut()?;
    let opened = match &mut parent.opener {
        Some(opener) => opener.open(datagram),
        None => Ok(datagram),
    };
    opened.map(|messages| &*messages).inspect_err(|reject| job.events.rejects.count(*reject)).ok()
}

/// Handles a message from the parent. Returns the message's body and the place to store it, if the
/// body must be stored.
pub(super) fn take<'a>(
    job: &mut ShardJob,
    now: Time,
    message: Result<(Header, &'a [u8]), Reject>,
    congested: bool,
) -> Option<(FragmentPlace, &'a [u8])> {
    let ShardJob { machine, parent: Some(parent), events, .. } = job else { return None };
    let (header, body) = message.inspect_err(|reject| events.rejects.count(*reject)).ok()?;
    let verdict = parent.machine.handle_decoded(now, &header, body, congested, events);
    let Verdict::Store(delivery) = verdict else { return None };
    let place = machine.handle_from_parent(&delivery);
    if delivery.complete {
        parent.machine.handle_delivered(now, &delivery, events);
    }
    Some((place?, body))
}

impl ShardJob {
    /// Returns the time of the next timeout of the link to the parent, or `Time::NEVER` without a
    /// parent.
    pub(super) fn timeout(&self) -> Time {
        self.parent.as_ref().map_or(Time::NEVER, |parent| parent.machine.poll_timeout())
    }

    /// Handles a due timeout of the worker half, and updates the aggregator half with the progress
    /// at the parent.
    pub(super) fn poll_parent(&mut self, now: Time) {
        let Self { machine, parent: Some(parent), events, .. } = self else { return };
        if parent.machine.poll_timeout() <= now {
            parent.machine.handle_timeout(now, events);
        }
        let shard = machine.config().shard;
        for lane in 0..machine.config().lanes {
            let (done, low) = parent.machine.reached(lane, shard);
            machine.handle_parent_at(lane, done, low);
            machine.handle_parent_waits(lane, parent.machine.waits(now, lane, shard));
        }
    }

    /// Sends the parent the sums that have been folded. Adds failed ops to `failed`; the caller
    /// must report them to the other shards. Returns whether there was anything to do.
    pub(super) fn send_to_parent(
        &mut self,
        now: Time,
        turn: &mut Turn<JobId>,
        socket: &UdpSocket,
        out: &mut Outbox,
        failed: &mut Vec<Failed>,
    ) -> bool {
        let mut any = self.begin(now);
        any |= self.pass_failures(failed);
        if self.parent.is_none() {
            return any;
        }
        any |= self.scan();
        self.pass_waits(now);
        while !turn.is_over()
            && let Some(parent) = &mut self.parent
            && let Some(transmit) =
                parent.machine.poll_transmit(now, &mut out.datagram[..], &mut self.events)
        {
            any = true;
            match transmit {
                Transmit::Datagram { len, .. } => out.send_datagram(socket, self, To::Parent, len),
                Transmit::Data(data) => {
                    let (lane, window) = (data.header.lane, data.header.window);
                    let Some(slot) = self.machine.slot_of(lane, window) else { continue };
                    let (len, cut, fragments) = (data.len, data.cut, data.fragments);
                    let header = data.header;
                    let sum = ResultFragments { lane, slot, len, cut, fragments, header };
                    out.send_result(socket, self, To::Parent, &sum);
                }
            }
            turn.spend(out.take_cost());
        }
        out.send_joined(socket, self);
        turn.spend(out.take_cost());
        any | self.pass_failures(failed)
    }

    /// Submits to the worker half the ops that the ranks have begun.
    fn begin(&mut self, now: Time) -> bool {
        let Self { machine, parent: Some(parent), .. } = self else { return false };
        let mut any = false;
        let parent = &mut parent.machine;
        while let Some((op, descriptor)) = machine.poll_begun(|lane| parent.has_room(lane)) {
            // An op cannot start if the parent has ended the session. Such an op ends when it times
            // out.
            any |= parent.submit_sum(now, op, descriptor, NO_TIMEOUT).is_ok();
        }
        any
    }

    /// Reports to each half the ops that have failed at the other. Adds the failures of the
    /// aggregator half to `failed`. Returns whether there was anything to do.
    fn pass_failures(&mut self, failed: &mut Vec<Failed>) -> bool {
        let Self { machine, parent, events, .. } = self;
        let before = failed.len();
        failed.extend(std::iter::from_fn(|| machine.poll_failed()));
        let Some(parent) = parent else { return failed.len() > before };
        for Failed { op, why, from_parent } in &failed[before..] {
            if !from_parent {
                parent.machine.fail_sum(*op, *why, events);
            }
        }
        let dropped = parent.machine.sums().filter(|(op, lane)| machine.has_dropped(*lane, *op));
        let dropped: Vec<_> = dropped.collect();
        for (op, _) in &dropped {
            parent.machine.drop_sum(*op, events);
        }
        let mut any = failed.len() > before || !dropped.is_empty();
        while let Some(Outcome { result, .. }) = parent.machine.poll_outcome() {
            any = true;
            if let Err(OpError::Mismatch { op, one, other }) = result {
                machine.handle_parent_failed(op, Disagreement { one, other }, events);
            }
        }
        any
    }

    /// Reports to the parent which ranks the job waits for, when such a report is due.
    fn pass_waits(&mut self, now: Time) {
        let Self { machine, parent: Some(parent), .. } = self else { return };
        while let Some(lane) = parent.machine.poll_waits() {
            parent.machine.queue_waits(lane, machine.awaited(now, lane));
        }
    }

    /// Reports to the worker half which blocks of each window the ranks have contributed to.
    /// Returns whether there was anything to report.
    fn scan(&mut self) -> bool {
        let Self { machine, parent: Some(parent), .. } = self else { return false };
        let config = *machine.config();
        let mut any = false;
        for lane in 0..config.lanes {
            while let Some(scan) = parent.machine.poll_scan_of(lane) {
                let Some(descriptor) = parent.machine.descriptor(scan.op) else { break };
                let windows = Geometry::new(&descriptor).windows();
                let stripe = Stripe::new(scan.op, windows, config.shard, config.shards);
                let mask = match stripe.nth(scan.index) {
                    None => Some(0),
                    Some(_) => machine.summed(lane, WindowId::new(scan.op, scan.index)),
                };
                let Some(mask) = mask else { break };
                parent.machine.handle_scanned(scan, mask);
                any = true;
            }
        }
        any
    }
}

/// A timeout of 12 days, which never expires in practice: the ranks enforce the timeout of an op.
const NO_TIMEOUT: Span = Span::from_secs(1 << 20);
