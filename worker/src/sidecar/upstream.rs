//! The way of a host's sums to the aggregator, and of the job's sums back.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use racksum_proto::control::Loss;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::error::SubmitError;

use super::fold::Place;
use super::job::Job;
use crate::client::{Client, Handle};
use crate::error::Error;
use crate::tensor::Region;

/// How long room for an op is waited for before it is looked for again.
const ROOM: Duration = Duration::from_secs(1);

/// A client that speaks for the ranks of a host. It contributes their sums, in the order of the
/// ops, which may be folded in another.
#[derive(Debug)]
pub(super) struct Upstream {
    client: Arc<Client>,
    folded: Sender<Folded>,
}

/// An op whose sum of this host's ranks lies where the first of them has its tensor.
#[derive(Debug)]
pub(super) struct Folded {
    pub(super) op: u32,
    pub(super) descriptor: Descriptor,
    /// Where all of them have theirs.
    pub(super) places: Vec<Place>,
}

impl Upstream {
    /// Passes on what a job folds.
    ///
    /// # Errors
    /// The kernel's, when there are no threads.
    pub(super) fn start(client: Client, job: Weak<Job>) -> io::Result<Self> {
        let client = Arc::new(client);
        let ((folded, up), (flights, down)) = (channel(), channel());
        let (rising, above) = (Weak::clone(&job), Arc::clone(&client));
        spawn("racksum-up", move || pass_up(&above, &up, &flights, &rising))?;
        let above = Arc::clone(&client);
        spawn("racksum-down", move || pass_down(&above, &down, &job))?;
        Ok(Self { client, folded })
    }

    /// Sends a host's sum.
    pub(super) fn pass(&self, folded: Folded) {
        // The thread ends only with this.
        drop(self.folded.send(folded));
    }

    /// Leaves the job, which loses a rank if there is one that is gone.
    pub(super) fn close(&self, gone: Option<(u16, Loss)>) {
        if let Some((rank, why)) = gone {
            self.client.part(rank, why);
        }
        self.client.close();
    }
}

/// Starts ops in their order.
fn pass_up(
    client: &Client,
    folded: &Receiver<Folded>,
    flights: &Sender<(Folded, Handle<Region>)>,
    job: &Weak<Job>,
) {
    let (mut next, mut early) = (0, BTreeMap::new());
    for arrived in folded {
        early.insert(arrived.op, arrived);
        while let Some(due) = early.remove(&next) {
            next += 1;
            match submit(client, &due) {
                // The other thread ends only after this one.
                Ok(handle) => drop(flights.send((due, handle))),
                Err(error) => tell(job, due.op, Err(error)),
            }
        }
    }
}

fn submit(client: &Client, due: &Folded) -> Result<Handle<Region>, Error> {
    let first = &due.places[0];
    loop {
        match client.submit(first.region(), due.descriptor) {
            Err(Error::Submit(SubmitError::TooManyOps { .. })) => {
                while !client.has_room_within(due.descriptor.lane, ROOM) {}
            }
            submitted => return submitted,
        }
    }
}

/// Waits for ops, and gives all ranks of the host the job's sums.
fn pass_down(client: &Client, flights: &Receiver<(Folded, Handle<Region>)>, job: &Weak<Job>) {
    for (Folded { op, places, .. }, handle) in flights {
        let result = client.wait(handle).map(|_| {
            if let Some((first, others)) = places.split_first() {
                others.iter().for_each(|other| other.copy_from(first));
            }
        });
        tell(job, op, result);
    }
}

fn tell(job: &Weak<Job>, op: u32, result: Result<(), Error>) {
    if let Some(job) = job.upgrade() {
        job.ended(op, result);
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    // It ends with its channel.
    std::thread::Builder::new().name(name.into()).spawn(work).map(drop)
}
