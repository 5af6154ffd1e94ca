//! Ranks that leave a job between two ops and rejoin it later.
//!
//! Several callers may claim to be the same rank, but only one at a time waits to rejoin, and only
//! one of them rejoins.

use racksum_proto::control::{FromAggregator, Join, OnRankLoss, Welcome};
use racksum_proto::ids::{JobId, OpId, Rank};
use racksum_proto::loss::Loss;
use racksum_proto::status::JobState;
use racksum_proto::wire::Header;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::job::Job;
use super::lives::beginner_of;
use super::member::{Left, Member, Return, who};
use super::{Caller, Joined, Registry, Seat};
use crate::config::Fanout;
use crate::quotas::Refusal;
use crate::shard::{Command, Rejoin};

/// The state that a rejoining caller holds until its rank has rejoined.
#[derive(Debug)]
pub(crate) struct Returning {
    pub(crate) seat: Seat,
    number: u64,
    /// Whether the job may move.
    pub(crate) may_move: bool,
    /// Signals that another caller is preferred.
    pub(crate) replaced: oneshot::Receiver<()>,
}

impl Registry {
    /// Registers a caller that rejoins as a rank, until [`Self::end_return`]. The caller that held
    /// the rank before is preferred to others. If one caller tries several times, its latest
    /// attempt is preferred, since earlier ones may be dead.
    ///
    /// # Errors
    /// Returns the reason for the refusal, as a sentence for the user.
    pub(crate) fn begin_return(
        &mut self,
        join: &Join,
        caller: &Caller,
    ) -> Result<Returning, Refusal> {
        let (id, may_move) = self.may_rejoin(join, caller)?;
        let seat = Seat { job: join.job.clone(), id, rank: join.rank };
        let job = self.jobs.get_mut(&seat.job).ok_or("the job ended")?;
        let by = who(caller.identity.as_deref(), caller.addr);
        let was = job.left.get(&join.rank).map(|left| &left.by);
        if let Some(present) = job.returns.get(&join.rank)
            && was != Some(&by)
            && present.by != by
        {
            return Err(Refusal::Never(format!(
                "{} is already rejoining job {:?} as rank {}; start only one process for the rank",
                present.by, join.job, join.rank
            )));
        }
        job.last_return += 1;
        let number = job.last_return;
        let (sender, replaced) = oneshot::channel();
        let before = job.returns.insert(join.rank, Return { number, by, replaced: sender });
        if let Some(before) = before {
            // Ignore a failed send: the replaced caller may have disconnected.
            before.replaced.send(()).ok();
        }
        Ok(Returning { seat, number, may_move, replaced })
    }

    /// Removes a caller that no longer rejoins.
    pub(crate) fn end_return(&mut self, returning: &Returning) {
        let Some(job) = self.job(&returning.seat) else { return };
        let rank = returning.seat.rank;
        if job.returns.get(&rank).is_some_and(|present| present.number == returning.number) {
            job.returns.remove(&rank);
        }
    }

    /// Handles a rank that leaves: before `next_op`, at which it may rejoin, or in the middle of an
    /// op if `next_op` is `None`.
    pub(crate) fn part(&mut self, seat: &Seat, next_op: Option<OpId>, now: Instant) {
        let Some(job) = self.job(seat) else { return };
        if job.state == JobState::Running
            && let Some(member) = &job.members[usize::from(seat.rank)]
        {
            job.left.insert(seat.rank, Left { next_op, by: member.beginner() });
        }
        self.leave(seat, Loss::Left, now);
    }

    /// Handles a rank that has rejoined and leaves before it has done anything.
    pub(crate) fn retreat(&mut self, seat: &Seat, now: Instant) {
        let Some(job) = self.job(seat) else { return };
        let member = job.members[usize::from(seat.rank)].as_ref();
        let next_op = member.and_then(|member| member.came_back.as_ref()?.next_op);
        self.part(seat, next_op, now);
    }

    /// Checks whether a rank may rejoin. Returns the job's number, and whether the job may move.
    ///
    /// # Errors
    /// Returns the reason for the refusal, as a sentence for the user.
    pub(crate) fn may_rejoin(
        &self,
        join: &Join,
        caller: &Caller,
    ) -> Result<(JobId, bool), Refusal> {
        self.admit(join, caller.identity.as_deref(), caller.addr.ip())?;
        self.check_data(join)?;
        if self.config.fanout == Fanout::Multicast {
            return Err(Refusal::Never(
                "a rank that rejoins needs unicast results, but this aggregator only multicasts; \
                 start it with --fanout auto"
                    .into(),
            ));
        }
        let runs = |job: &&Job| job.generation == join.generation && job.state == JobState::Running;
        let Some(job) = self.jobs.get(&join.job).filter(runs) else {
            return Err(Refusal::Never(format!(
                "job {:?} is not running here in generation {}, so rank {} cannot rejoin it",
                join.job, join.generation.0, join.rank
            )));
        };
        job.check_return(join, caller)?;
        job.rejoins_at(join)?;
        job.check_not_moving(&join.job)?;
        Ok((job.id, job.may_move))
    }

    /// Readmits a rank to its job. `sealed` is the number of datagrams that each shard of the job
    /// has sealed.
    ///
    /// # Errors
    /// Returns the reason for the refusal, as a sentence for the user.
    pub(crate) fn rejoin(
        &mut self,
        mut join: Join,
        caller: Caller,
        sealed: Vec<u64>,
        now: Instant,
    ) -> Result<(Seat, Joined), Refusal> {
        let (id, _) = self.may_rejoin(&join, &caller)?;
        join.begun_by = Some(beginner_of(&join, &caller));
        let seat = Seat { job: join.job.clone(), id, rank: join.rank };
        let job = self.jobs.get_mut(&seat.job).ok_or("the job ended")?;
        let (rank, next_op) = (Rank(join.rank), job.rejoins_at(&join)?);
        // The new process is not prepared.
        job.stop_move(format!("rank {} rejoins the job; try again", rank.0));
        let (welcome, job_keys) = job.granted.as_mut().ok_or("the job is not running")?;
        job_keys.renew(rank).map_err(|error| error.to_string())?;
        let keys = job_keys.keys_of(rank);
        let welcome =
            Welcome { group: None, rank, keys, first_op: next_op, sealed, ..welcome.clone() };
        let job_keys = job_keys.clone();
        job.note_caller(&join);
        let came_back = job.left.remove(&rank.0);
        let mut member = Member::new(join, caller, now);
        member.came_back = came_back;
        let rejoin = Rejoin { job: id, rank, addr: member.data_addr(0), job_keys };
        member.send(FromAggregator::Welcome(welcome));
        member.send(FromAggregator::Ready { multicast: false });
        job.members[rank.index()] = Some(member);
        let receives_multicast = job.receives_multicast();
        for shard in &self.shards {
            shard.send(Command::Rejoin(Box::new(rejoin.clone())));
            shard.send(Command::Listeners(id, receives_multicast.clone()));
        }
        Ok((seat, Joined::Ready))
    }
}

impl Job {
    /// Checks whether a rank may rejoin. Returns the op at which it continues.
    fn rejoins_at(&self, join: &Join) -> Result<OpId, String> {
        let (rank, name) = (join.rank, &join.job);
        self.check_shape(join)?;
        if self.is_of_tree() {
            return Err(format!(
                "ranks cannot rejoin job {name:?}, because a tree of aggregators sums it; restart \
                 all ranks with a greater `generation`"
            ));
        }
        if self.on_rank_loss == OnRankLoss::Continue || join.on_rank_loss == OnRankLoss::Continue {
            return Err(format!(
                "ranks cannot rejoin job {name:?}, because its `on_rank_loss` is continue; restart \
                 all ranks with a greater `generation`"
            ));
        }
        let left = self.left.get(&rank);
        let Some(left) = left.filter(|_| self.members[usize::from(rank)].is_none()) else {
            return Err(format!("rank {rank} has not left job {name:?}, so it cannot rejoin"));
        };
        let Some(next_op) = left.next_op else {
            return Err(format!(
                "rank {rank} left job {name:?} during an op, so it cannot rejoin; restart all \
                 ranks with a greater `generation`"
            ));
        };
        let fragment = self.granted.as_ref().map_or(0, |(welcome, _)| {
            Header::LEN + usize::from(welcome.fragment_payload) + welcome.data_auth.trailer()
        });
        if usize::from(join.max_datagram) < fragment {
            return Err(format!(
                "datagrams of job {name:?} have up to {fragment} bytes, but rank {rank} now takes \
                 at most {}; give the rank its former MTU",
                join.max_datagram
            ));
        }
        // When the job started, its results in flight were limited to the size of its ranks'
        // smallest receive buffer.
        if join.receive_buffer < self.least_buffer {
            return Err(format!(
                "rank {rank} now has a receive buffer of {} bytes, but job {name:?} needs {}; give \
                 the rank its former buffer (net.core.rmem_max)",
                join.receive_buffer, self.least_buffer
            ));
        }
        Ok(next_op)
    }
}
