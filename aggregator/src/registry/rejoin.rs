//! Ranks that leave a job between two ops, and come back to it.

use racksum_proto::control::{FromAggregator, Join, Loss, OnRankLoss, Welcome};
use racksum_proto::ids::{OpId, Rank};
use racksum_proto::wire::Header;

use super::job::{Job, Left, Member, State};
use super::{Caller, Joined, Registry, Seat};
use crate::shard::{Command, Rejoin};
use crate::tenancy::Refusal;

impl Registry {
    /// A rank leaves, in the middle of an op or before its next, where it may come back.
    pub(crate) fn part(&mut self, seat: &Seat, next_op: Option<OpId>) {
        let Some(job) = self.job(seat) else { return };
        let member = job.members[usize::from(seat.rank)].as_ref();
        let heard_at = member.filter(|member| member.hears).map(|member| member.addr.ip());
        job.left.insert(seat.rank, Left { next_op, heard_at });
        self.leave(seat, Loss::Left);
    }

    /// Takes a rank back into its job.
    pub(super) fn rejoin(&mut self, join: Join, caller: Caller) -> Result<(Seat, Joined), Refusal> {
        let Caller { identity, mut addr, tell } = caller;
        addr.set_port(join.data_port);
        let job = self.jobs.get_mut(&join.job);
        let Some(job) =
            job.filter(|job| job.generation == join.generation && job.state == State::Running)
        else {
            return Err(Refusal::Never(format!(
                "no job {:?} runs here in generation {} that rank {} could come back to",
                join.job, join.generation.0, join.rank
            )));
        };
        let (rank, next_op) = (join.rank, job.may_rejoin(&join)?);
        let (welcome, locks) = job.granted.as_mut().ok_or("the job was granted nothing")?;
        locks.renew(Rank(rank)).map_err(|error| error.to_string())?;
        let left = job.left.remove(&rank);
        let heard_at = left.and_then(|left| left.heard_at).filter(|_| join.multicast);
        let hears = heard_at == Some(addr.ip());
        let welcome = Welcome {
            group: welcome.group.filter(|_| hears),
            keys: locks.keys_of(Rank(rank)),
            first_op: next_op,
            ..welcome.clone()
        };
        let rejoin = Rejoin { job: job.id, rank: Rank(rank), addr, locks: locks.clone() };
        let seat = Seat { job: join.job.clone(), id: job.id, rank };
        let member = Member { join, identity, addr, tell, hears };
        member.tell(FromAggregator::Welcome(welcome));
        member.tell(FromAggregator::Ready { multicast: hears });
        job.members[usize::from(rank)] = Some(member);
        let heard = job.hears();
        for shard in &self.shards {
            shard.tell(Command::Rejoin(Box::new(rejoin.clone())));
            shard.tell(Command::Listeners(seat.id, heard.clone()));
        }
        Ok((seat, Joined::Ready))
    }
}

impl Job {
    /// Whether a rank may come back; the op that it goes on with.
    fn may_rejoin(&self, join: &Join) -> Result<OpId, String> {
        let (rank, name) = (join.rank, &join.job);
        self.check_shape(join)?;
        if self.on_rank_loss == OnRankLoss::Continue || join.on_rank_loss == OnRankLoss::Continue {
            return Err(format!(
                "a job that goes on without the ranks that leave, as job {name:?} may, cannot have \
                 them back; restart all ranks with a greater --generation"
            ));
        }
        let Some(left) = self.left.get(&rank) else {
            return Err(format!("rank {rank} has not left job {name:?}, so it cannot come back"));
        };
        let Some(next_op) = left.next_op else {
            return Err(format!(
                "rank {rank} left job {name:?} in the middle of an op, so it cannot come back; \
                 restart all ranks with a greater --generation"
            ));
        };
        let fragment = self.granted.as_ref().map_or(0, |(welcome, _)| {
            Header::LEN + usize::from(welcome.fragment_payload) + welcome.data_auth.trailer()
        });
        if usize::from(join.max_datagram) < fragment {
            return Err(format!(
                "datagrams of job {name:?} have up to {fragment} bytes, and rank {rank} takes {}; \
                 give it the MTU that it had",
                join.max_datagram
            ));
        }
        Ok(next_op)
    }
}
