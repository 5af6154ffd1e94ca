//! Moves that an operator asks for. The ranks are prepared first, and move only once all of them
//! are ready; `crate::job_move` drives this.

use std::collections::BTreeSet;

use racksum_proto::control::{FromAggregator, Join, Resume};
use racksum_proto::ids::{JobId, OpId};
use racksum_proto::job_name::JobName;
use racksum_proto::move_target::MoveTarget;
use racksum_proto::rank_list::named;
use racksum_proto::status::{JobState, MovedJob};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::job::{Job, millis};
use super::member::Member;
use super::planned_move::{PlannedMove, Prepared};
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
    /// Returns the names of a job's groups at this aggregator, or the name itself if it has a
    /// group.
    pub(crate) fn groups_of(&self, job: &JobName) -> Vec<JobName> {
        self.jobs.keys().filter(|name| is_of(name, job)).cloned().collect()
    }

    /// Returns why a job is not here, as a clause for the operator.
    pub(crate) fn absence_of(&self, job: &JobName) -> String {
        match self.moved.iter().find(|(moved, ..)| is_of(moved, job)) {
            Some((_, to, at)) => format!("it moved to {to} {} s ago", millis(*at) / 1_000),
            None => "it has ended, or never was here; `racksum status` lists the jobs of an \
                     aggregator"
                .into(),
        }
    }

    /// Returns whether a job is at this aggregator.
    pub(crate) fn serves(&self, name: &JobName) -> bool {
        self.jobs.contains_key(name)
    }

    /// Returns whether this run of a job is still at this aggregator.
    pub(crate) fn serves_run(&self, name: &JobName, id: JobId) -> bool {
        self.jobs.get(name).is_some_and(|job| job.id == id)
    }

    /// Returns a job that is to move.
    ///
    /// # Errors
    /// Returns the reason why the job cannot move, as a sentence for the operator.
    pub(crate) fn movable(&self, name: &JobName) -> Result<MovableJob, String> {
        let gone = || format!("job {name:?} is not here: {}", self.absence_of(name));
        let job = self.jobs.get(name).ok_or_else(gone)?;
        job.check_movable(name)?;
        let member = job.members.iter().flatten().next();
        let member = member.ok_or_else(|| format!("job {name:?} has no ranks"))?;
        let resume = Resume { first_op: OpId(0), absent: job.absent.clone() };
        let join = Join {
            // Only an aggregator that a rank joins needs the job's secret.
            secret: None,
            begun_by: Some(member.beginner()),
            may_move: true,
            rejoin: false,
            resume: Some(resume),
            ..member.join.clone()
        };
        Ok(MovableJob { id: job.id, join })
    }

    /// Asks the members of a job to prepare for a move. Returns the number of the move, and a
    /// channel that reports that all of them are ready, or why one of them is not.
    ///
    /// # Errors
    /// Returns the reason why the job cannot move, as a sentence for the operator.
    pub(crate) fn prepare_move(
        &mut self,
        name: &JobName,
        id: JobId,
        to: &MoveTarget,
    ) -> Result<(u32, Prepared), String> {
        let job = self.jobs.get_mut(name).filter(|job| job.id == id);
        let job = job.ok_or_else(|| format!("job {name:?} has ended"))?;
        job.check_movable(name)?;
        self.last_move = self.last_move.wrapping_add(1);
        let number = self.last_move;
        let places = (0..).zip(&job.members).filter(|(_, member)| member.is_some());
        let places = places.map(|(place, _)| place).collect();
        let (planned, receiver) = PlannedMove::new(number, to.clone(), places);
        job.planned = Some(planned);
        job.send_to_all(&FromAggregator::PrepareMove { number, to: to.clone() });
        Ok((number, receiver))
    }

    /// Returns a job with its move, if the move with this number is in progress. Any other move is
    /// another operator's, even if it has the same target.
    fn moving(&self, name: &JobName, number: u32) -> Option<(&Job, &PlannedMove)> {
        let job = self.jobs.get(name)?;
        let planned = job.planned.as_ref().filter(|planned| planned.number == number)?;
        Some((job, planned))
    }

    /// Like [`Self::moving`], for changes.
    fn moving_mut(&mut self, name: &JobName, number: u32) -> Option<&mut Job> {
        let job = self.jobs.get_mut(name)?;
        job.move_of(number)?;
        Some(job)
    }

    /// Returns the ranks of a job that are not prepared for the move with this number.
    pub(crate) fn unprepared(&self, name: &JobName, number: u32) -> Vec<u16> {
        let Some((job, planned)) = self.moving(name, number) else { return Vec::new() };
        let places = planned.unprepared().iter().map(|place| usize::from(*place));
        let members = places.filter_map(|place| job.members.get(place)?.as_ref());
        members.flat_map(Member::ranks).collect()
    }

    /// Tells the members of all these jobs to move, if all of them are still prepared for the moves
    /// with these numbers; otherwise tells none. Each channel reports that all members of a job
    /// have left.
    ///
    /// # Errors
    /// Returns the first job that cannot move, and the reason as a clause for the operator.
    pub(crate) fn begin_moves(
        &mut self,
        moves: &[(&JobName, u32)],
    ) -> Result<Vec<oneshot::Receiver<()>>, (JobName, String)> {
        for (name, number) in moves {
            let planned = self.moving(name, *number).map(|(_, planned)| planned);
            let can_begin = planned.ok_or_else(|| "the move was cancelled; try again".into());
            can_begin
                .and_then(PlannedMove::check_can_begin)
                .map_err(|why| ((*name).clone(), why))?;
        }
        let begin = |(name, _): &(&JobName, u32)| self.jobs.get_mut(*name)?.begin_move(name);
        Ok(moves.iter().filter_map(begin).collect())
    }

    /// Cancels the move with this number, unless it has begun.
    pub(crate) fn cancel_move(&mut self, name: &JobName, number: u32) {
        if let Some(job) = self.moving_mut(name, number) {
            job.cancel_move("the move was cancelled");
        }
    }

    /// Ends the move with this number, which has begun. Returns the ranks that have not left,
    /// although they were told to.
    pub(crate) fn end_move(&mut self, name: &JobName, number: u32) -> Vec<u16> {
        let Some(job) = self.moving_mut(name, number) else { return Vec::new() };
        job.planned = None;
        job.send_to_all(&FromAggregator::CancelMove { number });
        job.members.iter().flatten().flat_map(Member::ranks).collect()
    }

    /// Handles a member's report whether it knows other aggregators.
    pub(crate) fn handle_may_move(&mut self, seat: &Seat, may_move: bool) {
        let member = self.job(seat).and_then(|job| job.members[usize::from(seat.rank)].as_mut());
        if let Some(member) = member {
            member.join.may_move = may_move;
        }
    }

    /// Handles a member's report that it can move.
    pub(crate) fn handle_move_prepared(&mut self, seat: &Seat, number: u32) {
        if let Some(planned) = self.job(seat).and_then(|job| job.move_of(number)) {
            planned.note_prepared(seat.rank);
        }
    }

    /// Handles a member's report that it cannot move.
    pub(crate) fn handle_cannot_move(&mut self, seat: &Seat, number: u32, reason: String) {
        if let Some(planned) = self.job(seat).and_then(|job| job.move_of(number)) {
            planned.stop(reason);
        }
    }

    /// Records that a job runs at the target of a planned move.
    pub(crate) fn note_moved(&mut self, job: JobName, to: MoveTarget, now: Instant) {
        self.moved.truncate(MAX_MOVED - 1);
        self.moved.push_front((job, to, now));
    }

    /// Begins to hand all jobs over to other aggregators, in order to stop, and returns the jobs
    /// that have started. The others end like at SIGTERM: their ranks join elsewhere. Until
    /// [`Self::end_hand_over`], no other job is admitted.
    ///
    /// # Errors
    /// Returns the reason why the aggregator cannot hand its jobs over, as a sentence for the
    /// operator.
    pub(crate) fn begin_hand_over(&mut self) -> Result<BTreeSet<JobName>, String> {
        if self.handing_over.is_some() {
            let why = "the jobs of this aggregator are already being moved away; wait until that \
                       has ended, as `racksum status` shows";
            return Err(why.into());
        }
        let started = |(_, job): &(_, &Job)| job.state != JobState::Gathering;
        let jobs: BTreeSet<_> =
            self.jobs.iter().filter(started).map(|(name, _)| name.clone()).collect();
        self.handing_over = Some(jobs.clone());
        Ok(jobs)
    }

    /// Admits jobs again, since some job stays.
    pub(crate) fn end_hand_over(&mut self) {
        self.handing_over = None;
        self.call_waiting();
    }

    /// Returns whether this aggregator admits no ranks of a join's job: it drains, or hands its
    /// jobs over. A job that is handed over may come back.
    pub(super) fn is_closed_to(&self, join: &Join) -> bool {
        let may_stay = |jobs: &BTreeSet<JobName>| {
            jobs.contains(&join.job) && (join.resume.is_some() || join.rejoin)
        };
        self.draining || self.handing_over.as_ref().is_some_and(|jobs| !may_stay(jobs))
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

/// Returns whether a name is that of a job, or of one of its groups if `job` has no group.
fn is_of(name: &JobName, job: &JobName) -> bool {
    job.name == name.name && (job.group.is_empty() || job.group == name.group)
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
        if let Some(to) = self.planned.as_ref().map(|planned| &planned.to) {
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
        let stuck = self.members.iter().flatten().filter(|member| !member.reads());
        let stuck: Vec<u16> = stuck.flat_map(Member::ranks).collect();
        if !stuck.is_empty() {
            return Err(format!(
                "{} of job {name:?} did not read its earlier messages yet; try again later",
                named(stuck)
            ));
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

    /// Returns the move with this number, if it is in progress.
    fn move_of(&mut self, number: u32) -> Option<&mut PlannedMove> {
        self.planned.as_mut().filter(|planned| planned.number == number)
    }

    /// Tells the members to move. The channel reports that all of them have left.
    fn begin_move(&mut self, name: &JobName) -> Option<oneshot::Receiver<()>> {
        let planned = self.planned.as_mut()?;
        let receiver = planned.begin();
        tracing::info!(job = ?name, to = %planned.to, "moving the job");
        let number = planned.number;
        self.send_to_all(&FromAggregator::MoveNow { number });
        Some(receiver)
    }

    /// Checks that the members have not been told to move.
    pub(super) fn check_not_moving(&self, name: &JobName) -> Result<(), String> {
        match self.planned.as_ref().filter(|planned| planned.has_begun()) {
            Some(planned) => {
                Err(format!("job {name:?} is moving to {}; join it there", planned.to))
            }
            None => Ok(()),
        }
    }

    /// Returns whether ranks may be together at another aggregator: some rank knows one, or knew
    /// one when it was lost or left.
    pub(super) fn may_split(&self) -> bool {
        self.may_move || self.members.iter().flatten().any(|member| member.join.may_move)
    }

    /// Removes a member that is lost or has left, and returns it. If it knows another aggregator,
    /// it may be there, unless it is certainly gone.
    pub(super) fn take_member(&mut self, rank: u16, is_gone: bool) -> Option<Member> {
        let member = self.members[usize::from(rank)].take();
        self.may_move |= !is_gone && member.as_ref().is_some_and(|member| member.join.may_move);
        member
    }

    /// Cancels a move that has not begun, if one is being prepared.
    pub(super) fn cancel_move(&mut self, why: &str) {
        if let Some(mut planned) = self.planned.take_if(|planned| !planned.has_begun()) {
            planned.stop(why.to_owned());
            self.send_to_all(&FromAggregator::CancelMove { number: planned.number });
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
