//! Moves that an operator asks for. The ranks are prepared first, and move only once all of them
//! are ready; `crate::job_move` drives this.

use racksum_proto::control::{FromAggregator, Join, Resume};
use racksum_proto::ids::{JobId, OpId};
use racksum_proto::job_name::JobName;
use racksum_proto::move_target::MoveTarget;
use racksum_proto::rank_list::named;
use racksum_proto::status::{JobState, MovedJob};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::job::{Job, millis};
use super::planned_move::PlannedMove;
use super::{Registry, Seat};

/// The maximum number of moved jobs that the status lists.
const MAX_MOVED: usize = 16;

/// A job that an operator wants to move.
#[derive(Debug, Clone)]
pub(crate) struct MovableJob {
    pub(crate) id: JobId,
    /// The join of one of the job's ranks, as it would be at the target.
    pub(crate) join: Join,
}

impl Registry {
    /// Returns the names of a job's groups at this aggregator, or of all jobs without a name.
    pub(crate) fn groups_of(&self, job: Option<&JobName>) -> Vec<JobName> {
        let is_of = |name: &&JobName| {
            let same_group = |job: &JobName| job.group.is_empty() || job.group == name.group;
            job.is_none_or(|job| job.name == name.name && same_group(job))
        };
        self.jobs.keys().filter(is_of).cloned().collect()
    }

    /// Returns whether a job is at this aggregator.
    pub(crate) fn serves(&self, name: &JobName) -> bool {
        self.jobs.contains_key(name)
    }

    /// Returns whether a job still gathers its ranks.
    pub(crate) fn is_gathering(&self, name: &JobName) -> bool {
        self.jobs.get(name).is_some_and(|job| job.state == JobState::Gathering)
    }

    /// Returns a job that is to move.
    ///
    /// # Errors
    /// Returns the reason why the job cannot move, as a sentence for the operator.
    pub(crate) fn movable(&self, name: &JobName) -> Result<MovableJob, String> {
        let job = self.jobs.get(name).ok_or_else(|| format!("job {name:?} has ended"))?;
        job.check_movable(name)?;
        let member = job.members.iter().flatten().next();
        let member = member.ok_or_else(|| format!("job {name:?} has no ranks"))?;
        let resume = Resume { first_op: OpId(0), absent: job.absent.clone() };
        let join = Join {
            begun_by: Some(member.beginner()),
            may_move: true,
            rejoin: false,
            resume: Some(resume),
            ..member.join.clone()
        };
        Ok(MovableJob { id: job.id, join })
    }

    /// Asks the members of a job to prepare for a move. The channel reports that all of them are
    /// ready, or why one of them is not.
    ///
    /// # Errors
    /// Returns the reason why the job cannot move, as a sentence for the operator.
    pub(crate) fn prepare_move(
        &mut self,
        name: &JobName,
        id: JobId,
        to: &MoveTarget,
    ) -> Result<oneshot::Receiver<Result<(), String>>, String> {
        let job = self.jobs.get_mut(name).filter(|job| job.id == id);
        let job = job.ok_or_else(|| format!("job {name:?} has ended"))?;
        job.check_movable(name)?;
        let places = (0..).zip(&job.members).filter(|(_, member)| member.is_some());
        let places = places.map(|(place, _)| place).collect();
        let (planned, receiver) = PlannedMove::new(to.clone(), places);
        job.planned = Some(planned);
        job.send_to_all(&FromAggregator::PrepareMove { to: to.clone() });
        Ok(receiver)
    }

    /// Tells the members of a job to move, if all of them are still prepared. The channel reports
    /// that all of them have left.
    pub(crate) fn begin_move(
        &mut self,
        name: &JobName,
        id: JobId,
    ) -> Option<oneshot::Receiver<()>> {
        let job = self.jobs.get_mut(name).filter(|job| job.id == id)?;
        let planned = job.planned.as_mut()?;
        let receiver = planned.begin()?;
        job.may_move = true;
        tracing::info!(job = ?name, to = %planned.to, "moving the job");
        job.send_to_all(&FromAggregator::MoveNow);
        Some(receiver)
    }

    /// Cancels a move that has not begun.
    pub(crate) fn cancel_move(&mut self, name: &JobName, id: JobId) {
        if let Some(job) = self.jobs.get_mut(name).filter(|job| job.id == id) {
            job.cancel_move("the move was cancelled");
        }
    }

    /// Handles a member's report that it can move.
    pub(crate) fn handle_move_prepared(&mut self, seat: &Seat) {
        let Some(job) = self.job(seat) else { return };
        // Another aggregator of the job may have prepared the member.
        job.may_move = true;
        if let Some(planned) = &mut job.planned {
            planned.note_prepared(seat.rank);
        }
    }

    /// Handles a member's report that it cannot move.
    pub(crate) fn handle_cannot_move(&mut self, seat: &Seat, reason: String) {
        if let Some(job) = self.job(seat) {
            job.stop_move(reason);
        }
    }

    /// Records that a job has moved to the target of a planned move.
    pub(super) fn note_moved(&mut self, job: JobName, to: MoveTarget, now: Instant) {
        self.moved.truncate(MAX_MOVED - 1);
        self.moved.push_front((job, to, now));
    }

    /// Returns the last jobs that have moved, oldest first.
    pub(super) fn moved_jobs(&self) -> Vec<MovedJob> {
        let moved = self.moved.iter().rev();
        let moved = moved.map(|(job, to, at)| MovedJob {
            job: job.clone(),
            to: to.to_string(),
            ago_ms: millis(*at),
        });
        moved.collect()
    }
}

impl Job {
    /// Checks that an operator may move the job now.
    fn check_movable(&self, name: &JobName) -> Result<(), String> {
        if self.state != JobState::Running {
            let missing = self.missing();
            let why = match &missing[..] {
                [] => "its multicast group is being tested".to_owned(),
                missing => format!("it waits for {}", named(missing.iter().copied())),
            };
            return Err(format!("job {name:?} has not started: {why}; try again once it runs"));
        }
        if let Some(PlannedMove { to, .. }) = &self.planned {
            return Err(format!("a move of job {name:?} to {to} is in progress"));
        }
        if self.parent.is_some() {
            return Err(format!(
                "job {name:?} sends its sums to a parent, so it cannot move; stop the job, and \
                 start its ranks with other aggregators"
            ));
        }
        if let Some(rank) = self.departed.first() {
            return Err(format!("job {name:?} is moving: rank {rank} has left for a standby"));
        }
        let gone: Vec<u16> = self.left.keys().copied().collect();
        if !gone.is_empty() {
            return Err(format!(
                "{} left job {name:?}, and the job would wait for it at the new aggregator; try \
                 again once it has rejoined",
                named(gone)
            ));
        }
        Ok(())
    }

    /// Continues to prepare a move without a rank that is lost.
    pub(super) fn note_move_without(&mut self, rank: u16) {
        if let Some(planned) = &mut self.planned {
            planned.note_prepared(rank);
        }
    }

    /// Cancels a move that has not begun, if one is being prepared.
    pub(super) fn cancel_move(&mut self, why: &str) {
        if let Some(mut planned) = self.planned.take_if(|planned| !planned.has_begun()) {
            planned.stop(why.to_owned());
            self.send_to_all(&FromAggregator::CancelMove);
        }
    }

    /// Reports why a move cannot begin, if one is being prepared.
    pub(super) fn stop_move(&mut self, why: String) {
        if let Some(planned) = &mut self.planned {
            planned.stop(why);
        }
    }
}

#[cfg(test)]
mod tests;
