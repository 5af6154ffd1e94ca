//! The progress of jobs, for tasks that wait for it. One task per job asks the shards, whatever the
//! number of watchers. A job with many joining and leaving ranks therefore costs the other jobs
//! little.

use std::sync::Arc;
use std::time::Duration;

use racksum_proto::ids::{JobId, Rank};
use tokio::sync::watch;
use tokio::time::sleep;

use super::{Registry, SharedRegistry, lock};
use crate::shard::{JobReport, ShardReport};

/// The interval at which the shards are asked.
const PERIOD: Duration = Duration::from_millis(20);
/// The silence in milliseconds after which a rank no longer counts as waiting for a result. A rank
/// that waits for one asks several times within this period.
const SILENT_MS: u64 = 500;

/// A job's progress, combined from all shards.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// The number of datagrams that each shard has sealed.
    pub(crate) sealed: Vec<u64>,
    /// Whether every rank has the results of all ops.
    pub(crate) settled: bool,
    /// The ranks that lack a sent result and still ask for it.
    pub(crate) lacking: Vec<Rank>,
}

impl Progress {
    fn of(id: JobId, reports: &[ShardReport]) -> Self {
        let jobs: Vec<_> = reports.iter().map(|report| report.jobs.get(&id)).collect();
        let known = || jobs.iter().flatten();
        Self {
            sealed: jobs.iter().map(|job| job.map_or(0, |job| job.sealed)).collect(),
            settled: known().all(|job| job.settled),
            lacking: known().flat_map(|job| lacking(job)).collect(),
        }
    }
}

/// Returns the ranks that lack a sent result and still ask for it.
fn lacking(job: &JobReport) -> impl Iterator<Item = Rank> + '_ {
    let ranks = (0..).map(Rank).zip(&job.ranks);
    let lacks = ranks.filter(|(_, it)| it.lacks && it.silent.as_millis() < SILENT_MS);
    lacks.map(|(rank, _)| rank)
}

/// A subscription to the progress of a job, until dropped.
#[derive(Debug)]
pub(crate) struct Watched {
    progress: watch::Receiver<Progress>,
    /// Whether the first report may have been requested before this subscription began.
    is_late: bool,
}

impl Watched {
    /// Waits for the next report of the job's progress that was requested after the subscription
    /// began. Returns `None` once the job has ended.
    pub(crate) async fn next(&mut self) -> Option<Progress> {
        loop {
            self.progress.changed().await.ok()?;
            let progress = self.progress.borrow_and_update().clone();
            if !std::mem::take(&mut self.is_late) {
                return Some(progress);
            }
        }
    }
}

/// Subscribes to the progress of a job; returns `None` if no such job exists.
pub(crate) fn watch(registry: &SharedRegistry, id: JobId) -> Option<Watched> {
    let (watched, feed) = lock(registry).watch(id)?;
    if let Some(feed) = feed {
        tokio::spawn(publish_progress(Arc::clone(registry), id, feed));
    }
    Some(watched)
}

/// Asks the shards for the progress of a job while it has subscribers.
async fn publish_progress(registry: SharedRegistry, id: JobId, feed: watch::Sender<Progress>) {
    loop {
        let asked = {
            let mut registry = lock(&registry);
            if registry.stop_if_unwatched(id) {
                return;
            }
            registry.ask_shards(Some(id))
        };
        let mut reports = Vec::with_capacity(asked.len());
        for report in asked {
            reports.push(report.await.unwrap_or_default());
        }
        feed.send_replace(Progress::of(id, &reports));
        sleep(PERIOD).await;
    }
}

impl Registry {
    /// Subscribes to the progress of a job. The first subscriber also gets the sender, and must
    /// start the task that publishes the progress.
    fn watch(&mut self, id: JobId) -> Option<(Watched, Option<watch::Sender<Progress>>)> {
        let job = self.jobs.values_mut().find(|job| job.id == id)?;
        let (progress, feed) = match &job.progress {
            Some(asked) => (asked.subscribe(), None),
            None => {
                let (feed, progress) = watch::channel(Progress::default());
                job.progress = Some(feed.clone());
                (progress, Some(feed))
            }
        };
        Some((Watched { progress, is_late: feed.is_none() }, feed))
    }

    /// Stops the feed of a job if the job has no subscribers. Returns whether the feed has stopped;
    /// a later subscriber starts another task.
    fn stop_if_unwatched(&mut self, id: JobId) -> bool {
        let Some(job) = self.jobs.values_mut().find(|job| job.id == id) else { return true };
        job.progress.take_if(|feed| feed.receiver_count() == 0);
        job.progress.is_none()
    }
}

#[cfg(test)]
mod tests {
    use racksum_proto::aggregator::RankProgress;
    use racksum_proto::ids::OpId;
    use racksum_proto::status::Transfers;
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
            contributed: Transfers::default(),
            results: Transfers::default(),
            busy: Span::ZERO,
            waited: Span::ZERO,
            round_trip: None,
        };
        let lacking = |ranks| {
            let job = JobReport { stalled: None, ranks, settled: false, sealed: 7 };
            let reports = [ShardReport { jobs: [(JobId(1), job)].into() }, ShardReport::default()];
            let progress = Progress::of(JobId(1), &reports);
            assert_eq!((&*progress.sealed, progress.settled), (&[7, 0][..], false));
            progress.lacking
        };
        assert_eq!(lacking(vec![of(false, 0), of(false, 0)]), []);
        assert_eq!(lacking(vec![of(false, 0), of(true, SILENT_MS - 1)]), [Rank(1)]);
        assert_eq!(lacking(vec![of(true, SILENT_MS), of(false, 0)]), []);
    }
}
