//! Lives of jobs that are about to end. An op whose result has been sent ends with it: so before
//! the ranks hear of the end, those that lack a result get it again.

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

/// How long ranks are waited for at most that lack results.
const PATIENCE: Duration = Duration::from_secs(5);

/// A life of a job that is about to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ending {
    id: JobId,
    /// The rank whose loss ends it, by its number in datagrams.
    lost: Option<Rank>,
}

impl Registry {
    /// The life of a job that is about to end since a rank joins the next.
    pub(crate) fn ending_by_join(&self, join: &Join, caller: &Caller) -> Option<Ending> {
        let ends = |job: &&Job| job.state == JobState::Running && job.generation < join.generation;
        let id = self.jobs.get(&join.job).filter(ends)?.id;
        let join = Join { begun_by: Some(beginner_of(join, caller)), ..join.clone() };
        let identity = caller.identity.as_deref();
        let wanted = Tenant::new(&self.config, &join.job, identity, (join.world, join.lanes));
        // Whoever will be refused ends nothing.
        self.check_caller(&join, caller).ok()?;
        self.check_succession(&join).ok()?;
        check_room(&self.config, &self.held_beside(&join.job), &wanted).ok()?;
        Some(Ending { id, lost: None })
    }

    /// The job that is about to end since it has lost a rank.
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

    /// The job that is about to end since a word of its parent's says so.
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

    /// The job that is about to end since a rank below one of its members is gone.
    pub(crate) fn ending_below(&self, seat: &Seat, why: Loss) -> Option<Ending> {
        let job = self.jobs.get(&seat.job).filter(|job| job.id == seat.id)?;
        let ends = job.state == JobState::Running && why != Loss::Left;
        ends.then_some(Ending { id: job.id, lost: None })
    }
}

/// While it lasts, the shards sum nothing more of a job.
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
        // Nobody is told of a job that has ended. One that has not goes on.
        lock(&self.registry).tell_shards(|| Command::Fence(self.id, false));
    }
}

/// Waits until no rank lacks a result that was sent, or long enough. No more are sent until what is
/// returned is dropped.
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
    // It may be gone already, or not be settled in time.
    drop(timeout(PATIENCE, settled).await);
    Some(fence)
}
