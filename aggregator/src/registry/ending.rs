//! Jobs that are about to end. An op whose result was sent must still end with that result. Before
//! the ranks learn of the end, the aggregator therefore resends results to the ranks that lack
//! them.

use std::time::Duration;

use racksum_proto::control::{Absent, FromAggregator, Join};
use racksum_proto::ids::{JobId, Rank};
use racksum_proto::loss::Loss;
use racksum_proto::status::JobState;
use tokio::time::{Instant, timeout};

use super::job::Job;
use super::lives::beginner_of;
use super::progress::watch;
use super::{Caller, Registry, Seat, Shared, lock};
use crate::shard::Command;
use crate::tenancy::{Tenant, check_room};

/// The maximum time to wait for ranks that lack results.
const PATIENCE: Duration = Duration::from_secs(5);

/// A job that is about to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ending {
    id: JobId,
    /// The rank whose loss ends the job, by its number in datagrams.
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
        let absent = Absent { rank: seat.rank, why };
        let ends = job.state == JobState::Running
            && there
            && why != Loss::Left
            && !job.goes_on_without(&[absent], now);
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

/// A fence around a job: while it exists, the shards fold no more windows of the job.
pub(crate) struct Fence {
    registry: Shared,
    id: JobId,
}

impl Fence {
    fn new(registry: &Shared, id: JobId) -> Self {
        lock(registry).tell_shards(|| Command::Fence(id, true));
        Self { registry: Shared::clone(registry), id }
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        // A job that has ended ignores the command; a job that goes on resumes.
        lock(&self.registry).tell_shards(|| Command::Fence(self.id, false));
    }
}

/// Waits until no rank lacks a result that was sent, or until the timeout. No further results are
/// folded until the returned fence is dropped.
pub(crate) async fn settle(registry: &Shared, ending: Option<Ending>) -> Option<Fence> {
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
    // The job may have ended already, or may not settle in time.
    drop(timeout(PATIENCE, settled).await);
    Some(fence)
}
