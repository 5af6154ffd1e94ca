//! Admission of a rank to its seat: waiting for room, and rejoining a running job.

use std::sync::Arc;
use std::time::Duration;

use racksum_net::quic::quinn;
use racksum_proto::control::{FromAggregator, FromWorker, Join};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use crate::caller_limits::Permit;
use crate::control_stream::{ControlReader, JOIN_TIMEOUT, WAITING_PERIOD, send_message};
use crate::queue;
use crate::quotas::Refusal;
use crate::registry::{
    Caller, Joined, Progress, Returning, Seat, SharedRegistry, lock, settle, watch,
};

/// Admits a rank to its job, and waits for room if the rank asked to wait. Returns `None` if the
/// rank leaves first. A rank that starts to wait gives up its permit in `CallerLimits::unjoined`,
/// and counts as a waiting rank from then on.
pub(crate) async fn admit(
    registry: &SharedRegistry,
    (send, reader): (&mut quinn::SendStream, &mut ControlReader),
    permit: &mut Option<Permit>,
    join: Join,
    caller: Caller,
) -> Option<Result<(Seat, Joined), Refusal>> {
    let mut queued: Option<Queued> = None;
    loop {
        let joined = if join.rejoin {
            rejoin(registry, &join, &caller, LONGEST_RETURN).await
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
                Ok(new) => (queued, *permit) = (Some(new), None),
                Err(full) => return Some(Err(Refusal::NoWait(format!("{why}; {full}")))),
            }
        }
        if let Some(queued) = &queued {
            queued.wait(&why, (send, reader), join.aggregates).await?;
        }
    }
}

/// A rank's ticket in the queue for room, given up on drop.
struct Queued {
    registry: SharedRegistry,
    ticket: queue::Ticket,
}

impl Queued {
    fn new(registry: &SharedRegistry, join: &Join, caller: &Caller) -> Result<Self, String> {
        let ticket = lock(registry).enter_queue(join, caller)?;
        Ok(Self { registry: Arc::clone(registry), ticket })
    }

    /// Waits for the job's turn, and tells the rank how many jobs are served before its own. Stops
    /// after [`WAIT_PERIODS`] without a turn, because another limit may apply by then. Returns
    /// `None` if the rank leaves first.
    async fn wait(
        &self,
        why: &str,
        (send, reader): (&mut quinn::SendStream, &mut ControlReader),
        aggregates: bool,
    ) -> Option<()> {
        let mut announced = None;
        for _ in 0..WAIT_PERIODS {
            let (_, before) = lock(&self.registry).turn(&self.ticket);
            if announced.replace(before) != Some(before)
                && !send_message(send, &FromAggregator::Queued { before, why: why.into() }).await
            {
                return None;
            }
            await_turn(&self.ticket.room, send, reader, aggregates).await?;
            if lock(&self.registry).turn(&self.ticket).0 {
                break;
            }
        }
        Some(())
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        lock(&self.registry).leave_queue(&self.ticket);
    }
}

/// Waits until the job's turn may have come, but no longer than one waiting period. Returns `None`
/// if the rank leaves first.
async fn await_turn(
    room: &Notify,
    send: &mut quinn::SendStream,
    reader: &mut ControlReader,
    aggregates: bool,
) -> Option<()> {
    // If the turn came before this wait began, `Queued::wait` notices that after the waiting
    // period.
    let mut turn = std::pin::pin!(timeout(WAITING_PERIOD, room.notified()));
    loop {
        tokio::select! {
            _ = &mut turn => return Some(()),
            // Read nothing from an aggregator: it may not withdraw, and its messages about its
            // ranks are handled once it has joined.
            message = reader.next(), if !aggregates => match message {
                // wire: W-67
                Some(FromWorker::Withdraw) => hold_back(send, reader).await?,
                Some(FromWorker::Stay) => {}
                _ => return None,
            }
        }
    }
}

/// Lets a rank withdraw while it waits for room. Returns `Some` if the rank stays after all, and
/// `None` if the rank leaves or does not answer in time.
async fn hold_back(send: &mut quinn::SendStream, reader: &mut ControlReader) -> Option<()> {
    if !send_message(send, &FromAggregator::MayLeave).await {
        return None;
    }
    // Limit the wait, because other ranks wait behind this one.
    let message = timeout(JOIN_TIMEOUT, reader.next()).await.ok()?;
    (message == Some(FromWorker::Stay)).then_some(())
}

/// Lets a rank rejoin its job. If the job may move, the rank waits until every rank has the results
/// of all earlier ops, because the rejoined rank could not supply these results to another rank
/// after a move.
async fn rejoin(
    registry: &SharedRegistry,
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
                "another process is rejoining job {job:?} as rank {rank}; start only one process \
                 for the rank"
            )));
        }
        () = tokio::time::sleep(limit) => {
            return Err(Refusal::Never(format!(
                "a rank of job {job:?} has not acknowledged a result for {} s, and rank {rank} \
                 cannot rejoin before it does; find the silent rank with `racksum status`, and \
                 start rank {rank} again",
                limit.as_secs()
            )));
        }
    };
    let mut registry = lock(registry);
    registry.rejoin(join.clone(), caller.clone(), sealed.unwrap_or_default(), Instant::now())
}

/// A caller that is rejoining as a rank. When this guard is dropped, another caller may rejoin as
/// that rank.
struct Returns {
    registry: SharedRegistry,
    returning: Returning,
}

impl Returns {
    fn begin(registry: &SharedRegistry, join: &Join, caller: &Caller) -> Result<Self, Refusal> {
        let returning = lock(registry).begin_return(join, caller)?;
        Ok(Self { registry: Arc::clone(registry), returning })
    }
}

impl Drop for Returns {
    fn drop(&mut self) {
        lock(&self.registry).end_return(&self.returning);
    }
}

/// The number of waiting periods after which a waiting rank tries to join even if its turn has not
/// come.
const WAIT_PERIODS: usize = 10;
/// The time limit for rejoining. It exceeds the 20 s of silence after which a rank is lost.
const LONGEST_RETURN: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests;
