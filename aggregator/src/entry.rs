//! Admission of a rank to its seat: waiting for room, and rejoining a running job.

use std::sync::Arc;
use std::time::Duration;

use racksum_net::quic::quinn;
use racksum_proto::control::{FromAggregator, FromWorker, Join};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use crate::control_stream::{ControlReader, JOIN_TIMEOUT, WAITING_PERIOD, send_message};
use crate::door::Place;
use crate::queue;
use crate::registry::{Caller, Joined, Progress, Returning, Seat, Shared, lock, settle, watch};
use crate::tenancy::Refusal;

/// Admits a rank to its job, and waits for room if the rank asks for that. Returns `None` if the
/// rank leaves first. A rank that starts to wait gives up its place among callers that have not
/// joined, and counts as a waiting rank from then on.
pub(crate) async fn enter(
    registry: &Shared,
    (send, reader): (&mut quinn::SendStream, &mut ControlReader),
    place: &mut Option<Place>,
    join: Join,
    caller: Caller,
) -> Option<Result<(Seat, Joined), Refusal>> {
    let mut queued: Option<Queued> = None;
    loop {
        let joined = if join.rejoin {
            come_back(registry, &join, &caller, LONGEST_RETURN).await
        } else {
            let ending = lock(registry).ending_by_join(&join, &caller);
            let _fence = settle(registry, ending).await;
            lock(registry).join(join.clone(), caller.clone(), Instant::now())
        };
        let why = match joined {
            Err(Refusal::NoRoom(why)) if join.wait => why,
            joined => return Some(joined),
        };
        if queued.is_none() {
            match Queued::new(registry, &join, &caller) {
                Ok(new) => (queued, *place) = (Some(new), None),
                Err(full) => return Some(Err(Refusal::NoWait(format!("{why}; {full}")))),
            }
        }
        if let Some(queued) = &queued {
            queued.wait(&why, (send, reader), join.relays).await?;
        }
    }
}

/// A rank's place in the queue for room, given up on drop.
struct Queued {
    registry: Shared,
    place: queue::Place,
}

impl Queued {
    fn new(registry: &Shared, join: &Join, caller: &Caller) -> Result<Self, String> {
        let place = lock(registry).enter_queue(join, caller)?;
        Ok(Self { registry: Arc::clone(registry), place })
    }

    /// Waits until it is the job's turn, and tells the rank how many jobs are served before it.
    /// Returns after a while in any case, since another limit may apply by then. Returns `None` if
    /// the rank leaves first.
    async fn wait(
        &self,
        why: &str,
        (send, reader): (&mut quinn::SendStream, &mut ControlReader),
        relays: bool,
    ) -> Option<()> {
        let mut told = None;
        for _ in 0..LOOKS {
            let (_, before) = lock(&self.registry).turn(&self.place);
            if told.replace(before) != Some(before)
                && !send_message(send, &FromAggregator::Queued { before, why: why.into() }).await
            {
                return None;
            }
            await_turn(&self.place.room, send, reader, relays).await?;
            if lock(&self.registry).turn(&self.place).0 {
                break;
            }
        }
        Some(())
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        lock(&self.registry).leave_queue(&self.place);
    }
}

/// Waits until the rank should try again to join. Returns `None` if the rank leaves first.
async fn await_turn(
    room: &Notify,
    send: &mut quinn::SendStream,
    reader: &mut ControlReader,
    relays: bool,
) -> Option<()> {
    // If room becomes free before this wait begins, the next attempt finds it.
    let mut turn = std::pin::pin!(timeout(WAITING_PERIOD, room.notified()));
    loop {
        tokio::select! {
            _ = &mut turn => return Some(()),
            // An aggregator may not withdraw. Messages about its ranks are handled once it has
            // joined.
            message = reader.next(), if !relays => match message {
                // wire: W-67
                Some(FromWorker::Withdraw) => hold_back(send, reader).await?,
                Some(FromWorker::Stay) => {}
                _ => return None,
            }
        }
    }
}

/// Releases a rank that waits for room. Returns `Some` if the rank decides to stay, else `None`.
async fn hold_back(send: &mut quinn::SendStream, reader: &mut ControlReader) -> Option<()> {
    if !send_message(send, &FromAggregator::Free).await {
        return None;
    }
    // Other ranks wait behind this one.
    let message = timeout(JOIN_TIMEOUT, reader.next()).await.ok()?;
    (message == Some(FromWorker::Stay)).then_some(())
}

/// Lets a rank rejoin its job. In a job that may move, it first waits until every rank has the
/// results of all earlier ops. The rejoined rank could not supply these results to another rank.
async fn come_back(
    registry: &Shared,
    join: &Join,
    caller: &Caller,
    limit: Duration,
) -> Result<(Seat, Joined), Refusal> {
    let mut returns = Returns::begin(registry, join, caller)?;
    let Returning { seat, replaced, may_move, .. } = &mut returns.returning;
    let settled = async {
        // If the job has ended, there is no progress to watch.
        let mut watched = watch(registry, seat.id())?;
        loop {
            let Progress { sealed, settled, .. } = watched.next().await?;
            if settled || !*may_move {
                return Some(sealed);
            }
        }
    };
    let Join { job, rank, .. } = join;
    let sealed = tokio::select! {
        sealed = settled => sealed,
        Ok(()) = replaced => {
            return Err(Refusal::Never(format!(
                "another process rejoins job {job:?} as rank {rank}; start only one process for \
                 the rank"
            )));
        }
        () = tokio::time::sleep(limit) => {
            return Err(Refusal::Never(format!(
                "a rank of job {job:?} has waited {} s for a result, and rank {rank} cannot rejoin \
                 before that rank has it; find the silent rank with `racksum status`, and start \
                 rank {rank} again",
                limit.as_secs()
            )));
        }
    };
    let mut registry = lock(registry);
    registry.rejoin(join.clone(), caller.clone(), sealed.unwrap_or_default(), Instant::now())
}

/// A rank that is rejoining. When this is dropped, another caller may rejoin as that rank.
struct Returns {
    registry: Shared,
    returning: Returning,
}

impl Returns {
    fn begin(registry: &Shared, join: &Join, caller: &Caller) -> Result<Self, Refusal> {
        let returning = lock(registry).begin_return(join, caller)?;
        Ok(Self { registry: Arc::clone(registry), returning })
    }
}

impl Drop for Returns {
    fn drop(&mut self) {
        lock(&self.registry).end_return(&self.returning);
    }
}

/// How many waiting periods pass before a waiting rank tries again to join without being called.
const LOOKS: usize = 10;
/// The time limit for rejoining. It exceeds the 20 s of silence after which a rank is lost.
const LONGEST_RETURN: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests;
