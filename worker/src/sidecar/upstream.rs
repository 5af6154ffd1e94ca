//! Sends a host's sums to the aggregator, and hands the job's sums to the host's ranks.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_proto::call::Call;
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::ids::OpId;
use racksum_proto::loss::Loss;
use racksum_proto::stats::Stats;
use racksum_proto::time::Time;

use super::fold::{Fold, Handed, LentRange, Share, budget_of, give};
use super::fold_error::FoldError;
use super::sums::Sums;
use super::thread::spawn;
use crate::blocks::Blocks;
use crate::error::Error;
use crate::operand::Operand;
use crate::transport::{Reduced, Transport};
use crate::udp_transport::UdpTransport;

/// How long to wait for room for an op before trying again.
const ROOM: Duration = Duration::from_secs(1);

/// A host's membership in a job, on behalf of all ranks of the host. It contributes the host's sums
/// in the order of the ops, although the ops may be folded in another order.
#[derive(Debug)]
pub(super) struct Upstream {
    transport: Arc<UdpTransport>,
    /// The ranks of this host.
    ranks: Vec<u16>,
    folded: Sender<Passed>,
}

/// Receives the results of the ops that an [`Upstream`] passes on.
pub(super) trait OpSink: Send + Sync {
    /// Takes the job's result of an op, or the error that the op ended with.
    fn ended(&self, op: u32, shares: &[Share], result: Result<Option<&Sums>, Error>);

    /// Takes the reason why the ranks cannot receive an op's result.
    fn spoilt(&self, op: u32, error: FoldError);
}

/// A message from a job to the thread that starts its ops at the aggregator.
#[derive(Debug)]
enum Passed {
    /// A folded op.
    Folded(Folded),
    /// An op that the ranks of the host refused, or called with different descriptors.
    Refused(u32, Call),
    /// A notice that an op could not be folded. Later ops would wait for it forever, so they fail
    /// too.
    Spoilt,
}

/// A folded op. If all operands are tensors, the tensor of the first rank holds the host's sum.
#[derive(Debug)]
pub(super) struct Folded {
    pub(super) op: u32,
    /// The time at which the first rank called the op.
    pub(super) since: Time,
    pub(super) fold: Arc<Fold>,
}

impl Upstream {
    /// Starts the threads that exchange a job's sums with the aggregator on behalf of these ranks.
    ///
    /// # Errors
    /// Returns the kernel's error if a thread cannot be started.
    pub(super) fn start(
        transport: UdpTransport,
        ranks: Vec<u16>,
        job: Weak<dyn OpSink>,
    ) -> io::Result<Self> {
        let transport = Arc::new(transport);
        let ((folded, up), (flights, down)) = (channel(), channel());
        let (rising, above) = (Weak::clone(&job), Arc::clone(&transport));
        // The threads end when their channels close.
        drop(spawn("racksum-up", move || pass_up(&above, &up, &flights, &rising))?);
        let above = Arc::clone(&transport);
        drop(spawn("racksum-down", move || pass_down(&above, &down, &job))?);
        Ok(Self { transport, ranks, folded })
    }

    /// Passes a folded op to the aggregator.
    pub(super) fn pass(&self, folded: Folded) {
        self.send(Passed::Folded(folded));
    }

    /// Refuses an op for this host, so that the other hosts receive a mismatch error.
    pub(super) fn refuse(&self, op: u32, call: Call) {
        self.send(Passed::Refused(op, call));
    }

    /// Stops sending sums, because the sum of one op is missing.
    pub(super) fn spoil(&self) {
        self.send(Passed::Spoilt);
    }

    fn send(&self, passed: Passed) {
        // The receiving thread runs as long as this sender exists, so the send succeeds.
        drop(self.folded.send(passed));
    }

    /// Returns the job's network statistics.
    pub(super) fn stats(&self) -> Stats {
        self.transport.stats()
    }

    /// Reports which ranks of this host are lost. The aggregator already knows about other hosts'
    /// ranks; a client that reported them would break the protocol.
    pub(super) fn lose(&self, ranks: &[u16], why: Loss) {
        let own = ranks.iter().filter(|rank| self.ranks.contains(rank));
        own.for_each(|rank| self.transport.part(*rank, why));
    }

    /// Leaves the job.
    pub(super) fn close(&self) {
        self.transport.close();
    }
}

/// Starts ops in order. Once an op is missing, no later op is started, because other hosts would
/// mistake it for the missing one.
fn pass_up(
    transport: &UdpTransport,
    passed: &Receiver<Passed>,
    flights: &Sender<(Folded, OpId)>,
    job: &Weak<dyn OpSink>,
) {
    let (mut next, mut early, mut is_spoilt) = (0, BTreeMap::new(), false);
    for passed in passed {
        match passed {
            Passed::Folded(folded) => drop(early.insert(folded.op, Ok(folded))),
            Passed::Refused(op, call) => drop(early.insert(op, Err(call))),
            Passed::Spoilt => is_spoilt = true,
        }
        while !is_spoilt && let Some(due) = early.remove(&next) {
            next += 1;
            let due = match due {
                Ok(folded) => folded,
                Err(call) => {
                    // Ignore an error: the ranks know about the mismatch, and a session that is
                    // over numbers no more ops.
                    drop(once_there_is_room(transport, 0, || transport.refuse(call)));
                    continue;
                }
            };
            match submit(transport, &due) {
                // The receiving thread ends only after this one, so the send succeeds.
                Ok(op) => drop(flights.send((due, op))),
                Err(error) => {
                    // `Error::Op` means that the op failed after it was numbered. Later ops keep
                    // their numbers, so they may start.
                    is_spoilt = !matches!(error, Error::Op(_));
                    report_result(job, &due, Err(error));
                }
            }
        }
        if is_spoilt {
            for late in std::mem::take(&mut early).into_values().flatten() {
                let why = "an earlier op could not be folded or sent";
                report_result(job, &late, Err(OpError::Ended { why: why.into() }.into()));
            }
        }
    }
}

fn submit(transport: &UdpTransport, due: &Folded) -> Result<OpId, Error> {
    let (descriptor, clock) = (due.fold.descriptor(), Clock::start());
    let spent = || clock.now().since(due.since);
    // Send every block that is non-zero at some rank of the host, even if its sum is zero, because
    // the block belongs to the job's union.
    let start = || match (sums_of(&due.fold)?, due.places().next()) {
        (None, Some(first)) => {
            let (tensor, blocks) = (first.region().into(), due.fold.held());
            transport.submit_folded(tensor, descriptor, blocks, spent())
        }
        (sums, _) => {
            let sums = sums.unwrap_or_default();
            let blocks = sums.indices.clone().into_iter();
            transport.submit_folded(sums.into(), descriptor, blocks, spent())
        }
    };
    once_there_is_room(transport, descriptor.lane, start)
}

/// Starts an op as soon as its lane has room for one more op in flight.
fn once_there_is_room<T>(
    transport: &UdpTransport,
    lane: u8,
    start: impl Fn() -> Result<T, Error>,
) -> Result<T, Error> {
    loop {
        match start() {
            Err(Error::Submit(SubmitError::TooManyOps { .. })) => {
                // Retry even after a timeout, because the next attempt detects which ops have ended
                // in the meantime.
                if !transport.has_room_within(lane, ROOM) {
                    tracing::debug!(lane, "an op waits for room in its lane");
                }
            }
            started => return started,
        }
    }
}

/// Reads the host's sums if at least one operand is a list. Returns `None` if all operands are
/// tensors.
fn sums_of(fold: &Fold) -> Result<Option<Blocks>, Error> {
    // A fold that failed does not reach this function.
    let sums = fold.sums().ok().flatten();
    let read = |sums: &Sums| sums.read(Vec::new());
    sums.map(read).transpose().map_err(|error| Error::Memory(error.to_string()))
}

/// Waits for ops to end, and hands the job's sums to all ranks of the host.
fn pass_down(transport: &UdpTransport, flights: &Receiver<(Folded, OpId)>, job: &Weak<dyn OpSink>) {
    for (folded, op) in flights {
        let summed = transport.finish(op).map(|Reduced { tensor, .. }| {
            if let Operand::Blocks(blocks) = tensor {
                return Some(blocks);
            }
            let mut places = folded.places();
            if let Some(first) = places.next() {
                places.for_each(|other| other.copy_from(first));
            }
            None
        });
        match summed.map(|blocks| blocks.map(|blocks| hand_out(transport, &folded, blocks))) {
            Ok(None) => report_result(job, &folded, Ok(None)),
            Ok(Some(Ok(sums))) => report_result(job, &folded, Ok(Some(&sums))),
            Ok(Some(Err(spoilt))) => {
                job.upgrade().into_iter().for_each(|it| it.spoilt(folded.op, spoilt.clone()));
            }
            Err(error) => report_result(job, &folded, Err(error)),
        }
    }
}

/// Writes the job's sums to the host's tensors, and returns the sums for the ranks that passed
/// lists.
fn hand_out(transport: &UdpTransport, folded: &Folded, blocks: Blocks) -> Result<Sums, FoldError> {
    let (descriptor, shares) = (folded.fold.descriptor(), folded.fold.shares());
    give(&descriptor, shares, &blocks);
    let sums = Sums::of(&descriptor, &blocks, budget_of(shares));
    transport.recycle(blocks);
    sums
}

impl Folded {
    /// Returns the places of the ranks' tensors.
    fn places(&self) -> impl Iterator<Item = &LentRange> {
        self.fold.shares().iter().filter_map(|share| match &share.handed {
            Handed::Tensor(place) => Some(place),
            Handed::List(_) => None,
        })
    }
}

fn report_result(job: &Weak<dyn OpSink>, folded: &Folded, result: Result<Option<&Sums>, Error>) {
    if let Some(job) = job.upgrade() {
        if let Ok(Some(own)) = folded.fold.sums() {
            own.free();
        }
        job.ended(folded.op, folded.fold.shares(), result);
    }
}
