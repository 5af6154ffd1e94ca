//! Jobs that move to or from another aggregator, and the ranks that they lose in the move.

use std::net::IpAddr;
use std::time::Duration;

use racksum_proto::control::{FromAggregator, Join, LostRank, OnRankLoss, Resume};
use racksum_proto::job_name::JobName;
use racksum_proto::loss::Loss;
use racksum_proto::rank_list::named;
use racksum_proto::status::JobState;
use racksum_proto::wire::Flags;
use tokio::time::Instant;

use super::job::{Job, given_up, too_many_absent};
use super::member::Member;
use super::{Joined, LOST, Registry, Seat};

/// How long a job that moves waits for its ranks: as long as a rank may be silent.
const PATIENCE: Duration = Duration::from_secs(20);
/// The maximum silence of a rank that is reported as present: several keep-alive intervals.
const MAX_SILENCE: Duration = Duration::from_secs(2);
/// The extra time that an aggregator with a parent waits, so that a parent with the same timeout
/// gives up first. Otherwise, the parent would report the ranks of this aggregator as missing.
const PARENT_FIRST: Duration = Duration::from_secs(2);

impl Registry {
    /// Checks the timeouts of a job, and returns the job's next step. A job that gathers for too
    /// long ends, and its ranks learn which ranks are missing. A job that has moved here may
    /// continue without the missing ranks. A running job loses the ranks that have moved elsewhere
    /// if the others do not follow in time.
    pub(crate) fn check_timeouts(&mut self, seat: &Seat, now: Instant) -> Joined {
        let patience = Duration::from_secs(self.config.join_timeout_s.into());
        let draining = self.draining;
        let Some(job) = self.job(seat) else { return Joined::Ready };
        match job.state {
            JobState::Gathering => {
                let missing = job.missing();
                let patience = match (&job.parent, job.moved_at) {
                    (Some(_), _) => patience + PARENT_FIRST,
                    (None, Some(_)) => PATIENCE,
                    (None, None) => patience,
                };
                if now.saturating_duration_since(job.opened) < patience {
                    return Joined::Waiting(missing);
                }
                if job.moved_at.is_some() {
                    return self.lose_missing(&seat.job, &missing, now);
                }
                self.give_up(seat, &missing, patience);
            }
            JobState::Running if !draining => {
                let late = |since| now.saturating_duration_since(since) >= PATIENCE;
                if job.departed_at.is_some_and(late) {
                    job.departed_at = None;
                    // These ranks have moved, but the others have not followed.
                    for rank in std::mem::take(&mut job.departed) {
                        self.lose(&Seat { rank, ..seat.clone() }, Loss::Broke, now);
                    }
                }
            }
            JobState::Probing | JobState::Running => {}
        }
        Joined::Ready
    }

    /// Ends a job whose ranks have not all joined in time.
    fn give_up(&mut self, seat: &Seat, missing: &[u16], patience: Duration) {
        let queued = self.job(seat).and_then(|job| job.parent.as_ref()?.queued.clone());
        if let Some(why) = queued {
            let waited = patience.as_secs();
            let reason = format!(
                "its parent had no room for the job within {waited} s: {why}; try again later, or \
                 raise --join-timeout-s at the aggregator"
            );
            return self.refuse_all(&seat.job, &reason);
        }
        let reason = format!(
            "job {:?} waited {} s for {}; start the missing ranks, or raise \
             --join-timeout-s at the aggregator",
            seat.job,
            patience.as_secs(),
            named(missing.iter().copied())
        );
        self.refuse_all(&seat.job, &reason);
    }

    /// Continues without the ranks that did not move here with the job, or ends the job.
    fn lose_missing(&mut self, name: &JobName, missing: &[u16], now: Instant) -> Joined {
        let Some(job) = self.jobs.get_mut(name) else { return Joined::Ready };
        let why = Loss::Silent;
        let lost: Vec<_> = missing.iter().map(|rank| LostRank { rank: *rank, why }).collect();
        // Withdrawn ranks may join elsewhere, but are no longer members here.
        let may_leave: Vec<_> = missing
            .iter()
            .filter_map(|rank| Some((*rank, job.members[usize::from(*rank)].take()?)))
            .collect();
        let goes_on = job.continues_without(&lost, now);
        LOST.note(|left_out| {
            let what = "ranks did not follow the job to this aggregator";
            tracing::warn!(job = ?name, ?missing, goes_on, left_out, "{what}");
        });
        for (rank, member) in may_leave {
            member.send(if goes_on {
                FromAggregator::Refused { reason: given_up(name, rank) }
            } else {
                FromAggregator::PeerLost { ranks: missing.to_vec(), why }
            });
        }
        if !goes_on {
            job.send_to_all(&FromAggregator::PeerLost { ranks: missing.to_vec(), why });
            self.remove(name);
            return Joined::Ready;
        }
        job.absent.extend(lost);
        // A failed start has already refused all members.
        self.start(name).unwrap_or(Joined::Ready)
    }

    /// Records that a rank was heard from.
    pub(crate) fn note_received(&mut self, seat: &Seat, now: Instant) {
        if let Some(member) = self.member(seat) {
            member.last_received = now;
        }
    }

    /// Stops accepting jobs, and asks the ranks of running jobs to move elsewhere.
    pub(crate) fn drain(&mut self) {
        // The message is sent only once, since the queue of a member that does not read has no room
        // for more.
        if std::mem::replace(&mut self.draining, true) {
            return;
        }
        self.queue.wake();
        let gathering = |job: &&Job| job.state == JobState::Gathering;
        let names =
            self.jobs.iter().filter(|(_, job)| gathering(job)).map(|(name, _)| name.clone());
        for name in names.collect::<Vec<_>>() {
            if let Some(job) = self.remove(&name) {
                job.send_stop_to_parent();
                job.send_to_all(&FromAggregator::Drain);
            }
        }
        for job in self.jobs.values_mut() {
            // Ranks that are not prepared cannot follow those that are.
            job.cancel_move("the aggregator is draining");
            job.send_to_all(&FromAggregator::Drain);
        }
    }

    /// Returns the ranks that wait in the job that this caller asks about, except those that the
    /// caller has lost. Returns no ranks if the caller could not join the job.
    pub(crate) fn present(
        &self,
        join: &Join,
        (identity, addr): (Option<&str>, IpAddr),
        now: Instant,
    ) -> Vec<u16> {
        let fits = |job: &&Job| job.generation == join.generation && job.check(join).is_ok();
        let Some(job) = self.jobs.get(&join.job).filter(fits) else { return Vec::new() };
        if self.admit(join, identity, addr).is_err() {
            return Vec::new();
        }
        let lost = |rank: &u16| {
            join.resume.iter().flat_map(|it| &it.absent).any(|absent| absent.rank == *rank)
        };
        // Leave out silent ranks: if this process was suspended, they may have died without being
        // reported as lost.
        let waits = |member: &&Member| {
            !member.withdraws && now.saturating_duration_since(member.last_received) < MAX_SILENCE
        };
        job.members
            .iter()
            .flatten()
            .filter(waits)
            .flat_map(Member::ranks)
            .filter(|rank| !lost(rank))
            .collect()
    }

    /// Handles a rank's request to withdraw, and returns whether the rank may leave. A rank may
    /// withdraw while its job gathers ranks, unless this aggregator has a parent. The job counts a
    /// withdrawn rank as missing. Once the job has started, its ranks depend on each other, so none
    /// may withdraw. Once the job has ended, the ranks have already been told why.
    pub(crate) fn withdraw(&mut self, seat: &Seat) -> bool {
        // wire: W-67
        let gathers = |job: &&mut Job| job.state == JobState::Gathering && job.parent.is_none();
        let job = self.job(seat).filter(gathers);
        let member = job.and_then(|job| job.members[usize::from(seat.rank)].as_mut());
        let Some(member) = member else { return false };
        if !std::mem::replace(&mut member.withdraws, true) {
            tracing::info!(
                job = ?seat.job,
                rank = seat.rank,
                "rank asks to withdraw to another aggregator"
            );
        }
        true
    }

    /// Takes back a rank's withdrawal.
    pub(crate) fn stay(&mut self, seat: &Seat) -> Joined {
        let withdrawn = self.job(seat).and_then(|job| job.members[usize::from(seat.rank)].as_mut());
        let Some(member) = withdrawn.filter(|member| member.withdraws) else {
            return Joined::Ready;
        };
        member.withdraws = false;
        // A failed start has already refused all members.
        self.start_if_complete(&seat.job).unwrap_or(Joined::Ready)
    }

    /// Notes that a rank has moved to another aggregator with its job; the other ranks should
    /// follow soon. If the job may not move, the rank is lost instead.
    pub(crate) fn depart(&mut self, seat: &Seat, now: Instant) {
        let Some(job) = self.job(seat) else { return };
        if !job.may_split() {
            return self.leave(seat, Loss::Broke, now);
        }
        let member = job.take_member(seat.rank, false);
        // A rank that only tried to join here was never part of the running job.
        if member.is_some() && job.state != JobState::Gathering {
            job.departed.push(seat.rank);
            job.departed_at.get_or_insert(now);
        }
        if job.members.iter().all(Option::is_none) {
            let planned = job.planned.take();
            self.remove(&seat.job);
            tracing::info!(job = ?seat.job, "job moved");
            if let Some(planned) = planned {
                planned.finish();
            }
        } else {
            let rank = seat.rank;
            job.stop_move(format!("rank {rank} has already moved to another aggregator"));
        }
    }
}

impl Job {
    pub(super) fn is_absent(&self, rank: u16) -> bool {
        self.absent.iter().any(|absent| absent.rank == rank)
    }

    /// Returns whether the job continues if it also loses these ranks, which may already have been
    /// removed from the registry.
    ///
    /// Silent ranks may have gathered at another aggregator, and the job must not continue at both.
    /// In a job that may move, the ranks that this aggregator still hears from, and those that have
    /// departed, must therefore be a majority of the ranks that are not certainly lost.
    pub(super) fn continues_without(&self, lost: &[LostRank], now: Instant) -> bool {
        let gone = || self.absent.iter().chain(lost);
        let certain = gone().filter(|absent| absent.why.is_certain()).count();
        let is_lost = |rank: u16| lost.iter().any(|lost| lost.rank == rank);
        let is_recent =
            |member: &Member| now.saturating_duration_since(member.last_received) < PATIENCE / 2;
        let recent = (0..)
            .zip(&self.members)
            .filter(|(rank, member)| !is_lost(*rank) && member.as_ref().is_some_and(is_recent));
        let here = recent.count() + self.departed.len();
        let is_most = 2 * here > usize::from(self.world) - certain;
        let splits = self.may_split() && certain < gone().count();
        // Results cannot name more than `MAX_ABSENT` lost ranks.
        let nameable = gone().count() <= Flags::MAX_ABSENT;
        self.on_rank_loss == OnRankLoss::Continue && nameable && (is_most || !splits)
    }

    /// Returns whether results can name all absent ranks: those that a rank reports, and those that
    /// are already known.
    pub(super) fn has_names_for(&self, resume: &Resume) -> bool {
        let more = resume.absent.iter().filter(|absent| !self.is_absent(absent.rank)).count();
        self.absent.len() + more <= Flags::MAX_ABSENT
    }

    /// Applies a rank's statement of where the job resumes. The statement has already been checked.
    pub(super) fn note_resume(&mut self, name: &JobName, resume: &Resume) {
        self.moved_at = self.moved_at.max(Some(resume.first_op));
        for absent in &resume.absent {
            if self.is_absent(absent.rank) {
                continue;
            }
            self.absent.push(*absent);
            // The other ranks have lost this rank, but the rank has joined here.
            if let Some(member) = self.members[usize::from(absent.rank)].take() {
                member.send(FromAggregator::Refused { reason: given_up(name, absent.rank) });
            }
        }
    }
}

/// Checks a rank's statement of where its job resumes.
pub(super) fn check_resume(join: &Join) -> Result<(), String> {
    let Some(resume) = &join.resume else { return Ok(()) };
    let mut ranks: Vec<u16> = resume.absent.iter().map(|absent| absent.rank).collect();
    ranks.sort_unstable();
    ranks.dedup();
    // Check the number of lost ranks here, before a job is opened for the rank.
    if ranks.len() > Flags::MAX_ABSENT {
        return Err(too_many_absent());
    }
    let aborts = join.on_rank_loss == OnRankLoss::Abort && !ranks.is_empty();
    let strange = |rank: &u16| *rank >= join.world || *rank == join.rank;
    if aborts || ranks.len() < resume.absent.len() || ranks.iter().any(strange) {
        return Err(format!(
            "rank {} claims that the job continued without ranks {ranks:?}, which is impossible; \
             restart all ranks with a greater `generation`",
            join.rank
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
