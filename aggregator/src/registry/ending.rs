//! Jobs that are about to end. If a result was sent to any rank, every rank must end the op with
//! that result. Before the ranks learn that the job ends, the aggregator therefore resends results
//! to the ranks that lack them.

use std::time::Duration;

use racksum_proto::control::{FromAggregator, Join, LostRank};
use racksum_proto::ids::{JobId, Rank};
use racksum_proto::loss::Loss;
use racksum_proto::status::JobState;
use tokio::time::{Instant, timeout};

use super::job::Job;
use super::lives::beginner_of;
use super::progress::watch;
use super::{Caller, Registry, Seat, SharedRegistry, lock};
use crate::quotas::{Tenant, check_room};
use crate::shard::Command;

/// The maximum time to wait for ranks that lack results.
const PATIENCE: Duration = Duration::from_secs(5);

/// A job that is about to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ending {
    id: JobId,
    /// The number, as used in datagrams, of the rank whose loss ends the job.
    lost: Option<Rank>,
}

impl Registry {
    /// Returns the running job that ends because a rank joins its next generation.
    pub(crate) fn ending_by_join(&self, join: &Join, caller: &Caller) -> Option<Ending> {
        let ends = |job: &&Job| job.state == JobState::Running && job.generation < join.generation;
        let id = self.jobs.get(&join.job).filter(ends)?.id;
        let join = Join { begun_by: Some(beginner_of(join, caller)), ..join.clone() };
        let identity = caller.identity.as_deref();
        let wanted = Tenant::new(&self.config, &join.job, identity, (join.world, join.lanes));
        // A join that will be refused ends no job.
        self.check_caller(&join, caller).ok()?;
        self.check_succession(&join).ok()?;
        check_room(&self.config, &self.held_beside(&join.job), &wanted).ok()?;
        Some(Ending { id, lost: None })
    }

    /// Returns the running job that ends because it loses this rank.
    pub(crate) fn ending_by_loss(&self, seat: &Seat, why: Loss, now: Instant) -> Option<Ending> {
        let job = self.jobs.get(&seat.job).filter(|job| job.id == seat.id)?;
        let there = job.members.get(usize::from(seat.rank)).is_some_and(Option::is_some);
        let absent = LostRank { rank: seat.rank, why };
        let ends = job.state == JobState::Running
            && there
            && why != Loss::Left
            && !job.continues_without(&[absent], now);
        ends.then(|| Ending { id: job.id, lost: job.number_of(seat.rank) })
    }

    /// Returns the running job that ends because of a message from the parent.
    pub(crate) fn ending_by_message(
        &self,
        seat: &Seat,
        message: &FromAggregator,
    ) -> Option<Ending> {
        let job = self.jobs.get(&seat.job).filter(|job| job.id == seat.id)?;
        let ends = matches!(
            message,
            FromAggregator::PeerLost { .. }
                | FromAggregator::ParentLost { .. }
                | FromAggregator::Superseded { .. }
        );
        (ends && job.state == JobState::Running).then_some(Ending { id: job.id, lost: None })
    }

    /// Returns the running job that ends because a member has lost one of its ranks.
    pub(crate) fn ending_below(&self, seat: &Seat, why: Loss) -> Option<Ending> {
        let job = self.jobs.get(&seat.job).filter(|job| job.id == seat.id)?;
        let ends = job.state == JobState::Running && why != Loss::Left;
        ends.then_some(Ending { id: job.id, lost: None })
    }
}

/// A fence around a job: while it exists, the shards fold no windows of the job, unless the job has
/// a parent.
pub(crate) struct Fence {
    registry: SharedRegistry,
    id: JobId,
}

impl Fence {
    fn new(registry: &SharedRegistry, id: JobId) -> Self {
        lock(registry).send_to_shards(|| Command::Fence(id, true));
        Self { registry: SharedRegistry::clone(registry), id }
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        // If the job has ended, the command has no effect. Otherwise the shards fold its windows
        // again.
        lock(&self.registry).send_to_shards(|| Command::Fence(self.id, false));
    }
}

/// Waits until no rank except the lost one still asks for a result that was sent, or until the
/// timeout. Returns the fence around the job; dropping the fence removes it.
pub(crate) async fn settle(registry: &SharedRegistry, ending: Option<Ending>) -> Option<Fence> {
    let Ending { id, lost } = ending?;
    let fence = Fence::new(registry, id);
    let settled = async {
        let mut watched = watch(registry, id)?;
        loop {
            let lacking = watched.next().await?.lacking;
            if lacking.iter().all(|rank| Some(*rank) == lost) {
                return Some(());
            }
        }
    };
    // Ignore the outcome: the job may have ended already, or may not settle in time.
    drop(timeout(PATIENCE, settled).await);
    Some(fence)
}
