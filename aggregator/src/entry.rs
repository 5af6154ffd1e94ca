//! From a rank's join to its seat: the wait for room, and the way back into a job that runs.

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

/// Takes a rank into its job, once there is room for it if the rank wants to wait; returns `None`
/// if the rank leaves first. Its place with callers that have not joined is given up once it
/// waits: from then on it counts with ranks that do.
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

/// A rank's place among those that wait for room, given up when it is dropped.
struct Queued {
    registry: Shared,
    place: queue::Place,
}

impl Queued {
    fn new(registry: &Shared, join: &Join, caller: &Caller) -> Result<Self, String> {
        let place = lock(registry).enter_queue(join, caller)?;
        Ok(Self { registry: Arc::clone(registry), place })
    }

    /// Waits until the job has its turn, and tells the rank how many are served before it. Gives
    /// up after a while, since another limit may be in the way by then. Returns `None` if the rank
    /// leaves first.
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

/// Waits until it is time to look for room again. Returns `None` if the rank leaves first.
async fn await_turn(
    room: &Notify,
    send: &mut quinn::SendStream,
    reader: &mut ControlReader,
    relays: bool,
) -> Option<()> {
    // What there may be room for by the time that it is waited for is seen at the next look.
    let mut turn = std::pin::pin!(timeout(WAITING_PERIOD, room.notified()));
    loop {
        tokio::select! {
            _ = &mut turn => return Some(()),
            // An aggregator is not let go, and what it says of its ranks is heeded once it is in.
            message = reader.next(), if !relays => match message {
                // wire: W-67
                Some(FromWorker::Withdraw) => hold_back(send, reader).await?,
                Some(FromWorker::Stay) => {}
                _ => return None,
            }
        }
    }
}

/// Lets a rank go that waits for room. Returns once it stays after all, and nothing if it does not.
async fn hold_back(send: &mut quinn::SendStream, reader: &mut ControlReader) -> Option<()> {
    if !send_message(send, &FromAggregator::Free).await {
        return None;
    }
    // Others wait behind it.
    let message = timeout(JOIN_TIMEOUT, reader.next()).await.ok()?;
    (message == Some(FromWorker::Stay)).then_some(())
}

/// Takes a rank back into its job. In a job that may move it waits until every rank has the results
/// of all ops before: afterwards there is one rank that could not help another to them.
async fn come_back(
    registry: &Shared,
    join: &Join,
    caller: &Caller,
    limit: Duration,
) -> Result<(Seat, Joined), Refusal> {
    let mut returns = Returns::begin(registry, join, caller)?;
    let Returning { seat, replaced, may_move, .. } = &mut returns.returning;
    let settled = async {
        // There is nothing to watch once the job is gone.
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
                "another process comes back as rank {rank} of job {job:?}; start the rank once"
            )));
        }
        () = tokio::time::sleep(limit) => {
            return Err(Refusal::Never(format!(
                "some rank of job {job:?} has lacked a result for {} s, before which rank {rank} \
                 cannot come back; see which is silent in `racksum status`, and start rank {rank} \
                 again",
                limit.as_secs()
            )));
        }
    };
    let mut registry = lock(registry);
    registry.rejoin(join.clone(), caller.clone(), sealed.unwrap_or_default(), Instant::now())
}

/// A rank on its way back, which another may be once this is dropped.
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

/// How often a rank that waits for room is looked after before it is tried again whether there is.
const LOOKS: usize = 10;
/// How long a rank may be on its way back. A rank that hears nothing for 20 s is lost.
const LONGEST_RETURN: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests;
