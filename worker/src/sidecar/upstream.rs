//! The way of a host's sums to the aggregator, and of the job's sums back.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_proto::call::Call;
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::loss::Loss;
use racksum_proto::time::Time;

use super::fold::{Fold, Handed, Place, Share, budget_of, give};
use super::fold_error::FoldError;
use super::sums::Sums;
use super::thread::spawn;
use crate::blocks::Blocks;
use crate::client::{Client, Handle};
use crate::engine::Stats;
use crate::error::Error;
use crate::tensor::Region;

/// How long room for an op is waited for before it is looked for again.
const ROOM: Duration = Duration::from_secs(1);

/// A client that speaks for the ranks of a host. It contributes their sums, in the order of the
/// ops, which may be folded in another.
#[derive(Debug)]
pub(super) struct Upstream {
    client: Arc<Client>,
    /// The ranks of this host, for which the client has joined.
    ranks: Vec<u16>,
    folded: Sender<Passed>,
}

/// Takes what becomes of the ops that an [`Upstream`] passes on.
pub(super) trait OpSink: Send + Sync {
    /// Takes the job's result of an op, or why there is none.
    fn ended(&self, op: u32, shares: &[Share], result: Result<Option<&Sums>, Error>);

    /// Takes why an op's result could not be handed to the ranks.
    fn spoilt(&self, op: u32, error: FoldError);
}

/// What a job passes on.
#[derive(Debug)]
enum Passed {
    /// An op that is folded.
    Folded(Folded),
    /// An op that a rank of the host refused, or that its ranks disagree about.
    Refused(u32, Call),
    /// Some op could not be folded, which the others wait for: there are no more.
    Spoilt,
}

/// An op of which the sum of this host's ranks is known: of tensors it lies where the first of them
/// has its own.
#[derive(Debug)]
pub(super) struct Folded {
    pub(super) op: u32,
    /// When some rank called it.
    pub(super) since: Time,
    pub(super) fold: Arc<Fold>,
}

/// The same on its way.
#[derive(Debug)]
enum Flight {
    Tensor(Handle<Region>),
    Blocks(Handle<Blocks>),
}

impl Upstream {
    /// Passes on what a job folds, for these ranks.
    ///
    /// # Errors
    /// The kernel's, when there are no threads.
    pub(super) fn start(
        client: Client,
        ranks: Vec<u16>,
        job: Weak<dyn OpSink>,
    ) -> io::Result<Self> {
        let client = Arc::new(client);
        let ((folded, up), (flights, down)) = (channel(), channel());
        let (rising, above) = (Weak::clone(&job), Arc::clone(&client));
        // They end with their channels.
        drop(spawn("racksum-up", move || pass_up(&above, &up, &flights, &rising))?);
        let above = Arc::clone(&client);
        drop(spawn("racksum-down", move || pass_down(&above, &down, &job))?);
        Ok(Self { client, ranks, folded })
    }

    /// Sends a host's sum.
    pub(super) fn pass(&self, folded: Folded) {
        self.tell(Passed::Folded(folded));
    }

    /// Refuses an op for this host: the other hosts hear of a mismatch.
    pub(super) fn refuse(&self, op: u32, call: Call) {
        self.tell(Passed::Refused(op, call));
    }

    /// Sends no more sums: one is missing.
    pub(super) fn spoil(&self) {
        self.tell(Passed::Spoilt);
    }

    fn tell(&self, passed: Passed) {
        // The thread ends only with this.
        drop(self.folded.send(passed));
    }

    /// What has been sent and received.
    pub(super) fn stats(&self) -> Stats {
        self.client.stats()
    }

    /// Says which ranks of this host are gone. The aggregator has named the others itself, and
    /// takes a client that speaks for ranks of other hosts for broken.
    pub(super) fn lose(&self, ranks: &[u16], why: Loss) {
        let own = ranks.iter().filter(|rank| self.ranks.contains(rank));
        own.for_each(|rank| self.client.part(*rank, why));
    }

    /// Leaves the job.
    pub(super) fn close(&self) {
        self.client.close();
    }
}

/// Starts ops in their order. Once one of them is missing, there are no more: other hosts would
/// take the next for it.
fn pass_up(
    client: &Client,
    passed: &Receiver<Passed>,
    flights: &Sender<(Folded, Flight)>,
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
                    // Its ranks know already; a session that is over numbers no more ops.
                    drop(once_there_is_room(client, 0, || client.refuse(call)));
                    continue;
                }
            };
            match submit(client, &due) {
                // The other thread ends only after this one.
                Ok(flight) => drop(flights.send((due, flight))),
                Err(error) => {
                    // Otherwise it was numbered, and has failed.
                    is_spoilt = !matches!(error, Error::Op(_));
                    tell(job, &due, Err(error));
                }
            }
        }
        if is_spoilt {
            for late in std::mem::take(&mut early).into_values().flatten() {
                let why = "an op before it could not be folded";
                tell(job, &late, Err(OpError::Ended { why: why.into() }.into()));
            }
        }
    }
}

fn submit(client: &Client, due: &Folded) -> Result<Flight, Error> {
    let (descriptor, clock) = (due.fold.descriptor(), Clock::start());
    let spent = || clock.now().since(due.since);
    // What ranks of the host have is sent although it comes to zero: it is of the job's union.
    let start = || match (sums_of(&due.fold)?, due.places().next()) {
        (None, Some(first)) => {
            let (tensor, blocks) = (first.region(), due.fold.held());
            Ok(Flight::Tensor(client.submit_folded(tensor, descriptor, blocks, spent())?))
        }
        (sums, _) => {
            let sums = sums.unwrap_or_default();
            let blocks = sums.indices.clone().into_iter();
            Ok(Flight::Blocks(client.submit_folded(sums, descriptor, blocks, spent())?))
        }
    };
    once_there_is_room(client, descriptor.lane, start)
}

/// Starts an op of a lane as soon as one more may be in flight.
fn once_there_is_room<T>(
    client: &Client,
    lane: u8,
    start: impl Fn() -> Result<T, Error>,
) -> Result<T, Error> {
    loop {
        match start() {
            Err(Error::Submit(SubmitError::TooManyOps { .. })) => {
                // What has ended meanwhile, the next try finds out.
                if !client.has_room_within(lane, ROOM) {
                    tracing::debug!(lane, "an op waits for room");
                }
            }
            started => return started,
        }
    }
}

/// The sums of lists, if there are any.
fn sums_of(fold: &Fold) -> Result<Option<Blocks>, Error> {
    // What could not be folded does not come here.
    let sums = fold.sums().ok().flatten();
    let read = |sums: &Sums| sums.read(Vec::new());
    sums.map(read).transpose().map_err(|error| Error::Memory(error.to_string()))
}

/// Waits for ops, and gives all ranks of the host the job's sums.
fn pass_down(client: &Client, flights: &Receiver<(Folded, Flight)>, job: &Weak<dyn OpSink>) {
    for (folded, flight) in flights {
        let summed = match flight {
            Flight::Tensor(handle) => client.wait(handle).map(|_| {
                let mut places = folded.places();
                if let Some(first) = places.next() {
                    places.for_each(|other| other.copy_from(first));
                }
                None
            }),
            Flight::Blocks(handle) => client.wait(handle).map(|reduced| Some(reduced.tensor)),
        };
        match summed.map(|blocks| blocks.map(|blocks| hand_out(client, &folded, blocks))) {
            Ok(None) => tell(job, &folded, Ok(None)),
            Ok(Some(Ok(sums))) => tell(job, &folded, Ok(Some(&sums))),
            Ok(Some(Err(spoilt))) => {
                job.upgrade().into_iter().for_each(|it| it.spoilt(folded.op, spoilt.clone()));
            }
            Err(error) => tell(job, &folded, Err(error)),
        }
    }
}

/// Makes of a union what the ranks of the host get.
fn hand_out(client: &Client, folded: &Folded, blocks: Blocks) -> Result<Sums, FoldError> {
    let (descriptor, shares) = (folded.fold.descriptor(), folded.fold.shares());
    give(&descriptor, shares, &blocks);
    let sums = Sums::of(&descriptor, &blocks, budget_of(shares));
    client.recycle(blocks);
    sums
}

impl Folded {
    /// Where the ranks' tensors lie.
    fn places(&self) -> impl Iterator<Item = &Place> {
        self.fold.shares().iter().filter_map(|share| match &share.handed {
            Handed::Tensor(place) => Some(place),
            Handed::List(_) => None,
        })
    }
}

fn tell(job: &Weak<dyn OpSink>, folded: &Folded, result: Result<Option<&Sums>, Error>) {
    if let Some(job) = job.upgrade() {
        if let Ok(Some(own)) = folded.fold.sums() {
            own.free();
        }
        job.ended(folded.op, folded.fold.shares(), result);
    }
}
