//! Lives of jobs that are about to end. An op whose result has been sent ends with it: so before
//! the ranks hear of the end, those that lack a result get it again.

use std::time::Duration;

use racksum_proto::control::{Absent, FromAggregator, Join, Loss};
use racksum_proto::ids::{JobId, Rank};
use tokio::time::Instant;

use super::job::{Job, State};
use super::lives::beginner_of;
use super::{Caller, Registry, Seat};
use crate::server::{Shared, lock};
use crate::shard::{Command, JobReport};
use crate::tenancy::{Tenant, check_room};

/// How long ranks are waited for at most that lack results.
const PATIENCE: Duration = Duration::from_secs(5);
/// A rank that waits for a result asks for it several times in this time. One that is silent for
/// longer has no use for it, or is gone.
const SILENT_MS: u64 = 500;
/// How often it is looked whether all ranks have all results.
const PERIOD: Duration = Duration::from_millis(20);

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
        let ends = |job: &&Job| job.state == State::Running && job.generation < join.generation;
        let id = self.jobs.get(&join.job).filter(ends)?.id;
        let join = Join { begun_by: Some(beginner_of(join, caller)), ..join.clone() };
        let identity = caller.identity.as_deref();
        let wanted = Tenant::new(&self.config, &join.job, identity, join.world);
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
        let ends = job.state == State::Running
            && there
            && why != Loss::Left
            && !job.goes_on_without(&[absent], now);
        ends.then(|| Ending { id: job.id, lost: job.number_of(seat.rank) })
    }

    /// The job that is about to end since a word of its parent's says so.
    pub(crate) fn ending_by_word(&self, seat: &Seat, word: &FromAggregator) -> Option<Ending> {
        let job = self.jobs.get(&seat.job).filter(|job| job.id == seat.id)?;
        let ends = matches!(
            word,
            FromAggregator::PeerLost { .. }
                | FromAggregator::ParentLost { .. }
                | FromAggregator::Superseded { .. }
        );
        (ends && job.state == State::Running).then_some(Ending { id: job.id, lost: None })
    }

    /// The job that is about to end since a rank below one of its members is gone.
    pub(crate) fn ending_below(&self, seat: &Seat, why: Loss) -> Option<Ending> {
        let job = self.jobs.get(&seat.job).filter(|job| job.id == seat.id)?;
        let ends = job.state == State::Running && why != Loss::Left;
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
    let began = Instant::now();
    while began.elapsed() < PATIENCE {
        let asked = lock(registry).ask_shards();
        let mut lacks = false;
        for report in asked {
            let report = report.await.unwrap_or_default();
            lacks |= report.jobs.get(&id).is_some_and(|job| is_lacking(job, lost));
        }
        if !lacks {
            break;
        }
        tokio::time::sleep(PERIOD).await;
    }
    Some(fence)
}

/// Whether a rank lacks a result that was sent, and would have it.
fn is_lacking(job: &JobReport, lost: Option<Rank>) -> bool {
    let ranks = (0..).map(Rank).zip(&job.ranks);
    ranks
        .filter(|(rank, _)| Some(*rank) != lost)
        .any(|(_, progress)| progress.lacks && progress.silent.as_millis() < SILENT_MS)
}

#[cfg(test)]
mod tests {
    use racksum_proto::aggregator::RankProgress;
    use racksum_proto::ids::OpId;
    use racksum_proto::time::Span;

    use super::*;

    #[test]
    fn only_a_rank_that_lacks_a_result_and_was_heard_of_lately_is_waited_for() {
        let of = |lacks: bool, silent_ms| RankProgress {
            next_op: OpId(1),
            opened: 1,
            delivered: u64::from(!lacks),
            lacks,
            silent: Span::from_millis(silent_ms),
            behind: false,
        };
        let job = |ranks| JobReport { stalled: None, ranks, settled: false, sealed: 0 };
        assert!(!is_lacking(&job(vec![of(false, 0), of(false, 0)]), None));
        let late = job(vec![of(false, 0), of(true, SILENT_MS - 1)]);
        assert!(is_lacking(&late, None) && is_lacking(&late, Some(Rank(0))));
        assert!(!is_lacking(&late, Some(Rank(1))), "it is lost");
        assert!(!is_lacking(&job(vec![of(true, SILENT_MS), of(false, 0)]), None));
    }
}
