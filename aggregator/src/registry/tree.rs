//! Trees of aggregators: jobs whose sums go to a parent, and jobs that other aggregators join here.
//!
//! An aggregator with a parent joins the job at the parent for each of its ranks, as the rank
//! arrives. Only the parent sees when the world is complete. The job therefore starts at the
//! parent, and all ranks get the parent's grant.

use std::net::SocketAddr;

use racksum_net::auth::{Opener, Sealer};
use racksum_proto::aggregator::Config;
use racksum_proto::control::{
    CONTROL_VERSION, FromAggregator, FromWorker, Join, LostRank, OnRankLoss, Welcome,
};
use racksum_proto::counted::counted;
use racksum_proto::ids::{OpId, Rank};
use racksum_proto::loss::Loss;
use racksum_proto::peer_text::PeerText;
use racksum_proto::status::JobState;
use racksum_proto::worker;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::job::Job;
use super::member::Member;
use super::parent_link::ParentLink;
use super::{Joined, LOST, NOT_JOINED, Registry, Seat};
use crate::shard::{Command, NewParent};

/// A call to the parent: the join, and the messages that follow it.
#[derive(Debug)]
pub(crate) struct ParentCall {
    pub(crate) join: Join,
    pub(crate) messages: UnboundedReceiver<FromWorker>,
    /// Signals that the calling generation of the job is over.
    pub(crate) over: oneshot::Receiver<()>,
}

/// Returns the ranks that a job loses when it loses a member, and the reason.
pub(super) fn lost_with(member: Option<Member>, rank: u16, why: Loss) -> (Vec<u16>, Loss) {
    match member.filter(|member| member.join.aggregates && why != Loss::Left) {
        Some(member) => (member.sorted_ranks(), Loss::Aggregator),
        None => (vec![rank], why),
    }
}

impl Registry {
    /// Checks a join whose job is part of a tree: the caller's number of shards must match, and the
    /// join may ask only for features that a tree supports. Accepts every other join.
    pub(super) fn check_relay(&self, join: &Join) -> Result<(), String> {
        let (mine, theirs) = (self.shards.len(), join.data_ports.len());
        // A sidecar has one port for all shards.
        if join.aggregates && theirs != mine && theirs != 1 {
            return Err(other_shards(mine, theirs));
        }
        match &self.config.parent {
            Some(_) => check_join(join, false),
            None if join.aggregates => check_join(join, join.may_move),
            None => Ok(()),
        }
    }

    /// Begins a call to the parent for a job that gathers ranks. Returns `None` if there is no
    /// longer a reason to call.
    pub(crate) fn call(&mut self, seat: &Seat) -> Option<ParentCall> {
        let data_ports = self.shards.iter().map(|shard| shard.addr.port()).collect();
        let buffers = self.shards.iter().map(|shard| shard.receive_buffer).min().unwrap_or(0);
        let receive_buffer = u32::try_from(buffers).unwrap_or(u32::MAX);
        let data_auth = Some(self.config.data_auth());
        let job = self.job(seat).filter(|job| job.state == JobState::Gathering)?;
        let (sender, messages) = unbounded_channel();
        let mut joins = job.members.iter().flatten().flat_map(Member::joins).cloned();
        let first = joins.next()?;
        // These sends cannot fail, because the receiver still exists.
        joins.for_each(|join| drop(sender.send(FromWorker::AddRank(join))));
        let before = std::mem::take(&mut job.parent.get_or_insert_default().before);
        let (ends, over) = oneshot::channel();
        let (to_parent, ends) = (Some(sender), Some(ends));
        let parent = ParentLink {
            called: true,
            messages: to_parent,
            before,
            _over: ends,
            ..ParentLink::default()
        };
        job.parent = Some(parent);
        let join = Join {
            data_ports,
            receive_buffer,
            data_auth,
            multicast: false,
            aggregates: true,
            ..first
        };
        Some(ParentCall { join, messages, over })
    }

    /// Handles a message from the parent at `parent_addr`.
    pub(crate) fn handle_parent_message(
        &mut self,
        seat: &Seat,
        parent_addr: SocketAddr,
        message: FromAggregator,
    ) -> Joined {
        let name = &seat.job;
        let Some(job) = self.job(seat) else { return Joined::Ready };
        // Ignore messages that arrive after this side has ended the connection because a member
        // left.
        let Some(parent) = job.parent.as_mut().filter(|parent| parent.messages.is_some()) else {
            return Joined::Ready;
        };
        match message {
            FromAggregator::WrongVersion { speaks } => {
                self.refuse_all(
                    name,
                    &format!(
                        "its parent at {parent_addr} speaks protocol version {speaks}, but the \
                         aggregator itself speaks version {CONTROL_VERSION}; install the same \
                         release on both"
                    ),
                );
            }
            FromAggregator::Refused { reason } if job.state != JobState::Gathering => {
                let reason = parent_gone(&format!("{parent_addr}: the parent refused: {reason}"));
                job.send_to_all(&FromAggregator::ParentLost { reason });
                self.remove(name);
            }
            FromAggregator::Refused { reason } => {
                self.refuse_all(name, &format!("its parent at {parent_addr} refused: {reason}"));
            }
            FromAggregator::RefusedRank { rank, reason } => {
                self.refuse_rank(seat, parent_addr, rank, &reason);
            }
            FromAggregator::Waiting { missing, .. } => {
                parent.missing = Some(of_world(missing, job.world));
                parent.queued = None;
            }
            FromAggregator::Queued { ref why, .. } => {
                parent.queued = Some(why.clone());
                job.send_to_all(&message);
            }
            FromAggregator::Welcome(_) if job.state != JobState::Gathering => {}
            FromAggregator::Welcome(granted) => return self.welcomed(seat, parent_addr, granted),
            FromAggregator::Drain if job.state == JobState::Gathering => {
                self.refuse_all(
                    name,
                    &format!(
                        "its parent at {parent_addr} is draining and takes no more jobs; use \
                         another aggregator, or try again later"
                    ),
                );
            }
            FromAggregator::PeerLost { ranks, why } => {
                let ranks = of_world(ranks, job.world);
                job.send_to_all(&FromAggregator::PeerLost { ranks, why });
                self.remove(name);
            }
            FromAggregator::ParentLost { .. } | FromAggregator::Superseded { .. } => {
                job.send_to_all(&message);
                self.remove(name);
            }
            FromAggregator::PrepareMove { number, .. } => {
                let reason = "an aggregator whose ranks take part in the job has this parent, and \
                              cannot change it; stop the job, and start its ranks with other \
                              aggregators";
                if let Some(messages) = &parent.messages {
                    // Ignore a failed send: `handle_parent_disconnect` handles a closed connection.
                    let reason = reason.into();
                    drop(messages.send(FromWorker::CannotMove { number, reason }));
                }
            }
            // The other messages need no action here. A parent that drains still serves a running
            // job to its end.
            FromAggregator::Drain
            | FromAggregator::Ready { .. }
            | FromAggregator::Lifeline { .. }
            | FromAggregator::Prove { .. }
            | FromAggregator::PingSizes { .. }
            | FromAggregator::Present { .. }
            | FromAggregator::Status { .. }
            | FromAggregator::MayLeave
            | FromAggregator::Room
            | FromAggregator::MoveNow { .. }
            | FromAggregator::CancelMove { .. }
            | FromAggregator::Moved { .. }
            | FromAggregator::ContinueWithout(_) => {}
        }
        Joined::Ready
    }

    /// Starts a job with the grant from the parent, or refuses the job if the grant is unusable.
    fn welcomed(&mut self, seat: &Seat, parent_addr: SocketAddr, granted: Welcome) -> Joined {
        let (name, auth) = (&seat.job, self.config.data_auth());
        let (mine, theirs) = (self.shards.len(), granted.data_ports.len());
        if mine != theirs {
            let reason = other_shards(theirs, mine);
            self.refuse_all(name, &format!("its parent at {parent_addr} does not match: {reason}"));
            return Joined::Ready;
        }
        if !may_grant(&granted, self.shards.len()) {
            self.refuse_all(name, &strange(parent_addr));
            return Joined::Ready;
        }
        if granted.data_auth != auth {
            let reason = format!(
                "its parent at {parent_addr} authenticates data with {:?}, but the aggregator \
                 itself uses {:?}; start both with the same `racksum aggregator --data-auth`",
                granted.data_auth.name(),
                auth.name()
            );
            self.refuse_all(name, &reason);
            return Joined::Ready;
        }
        let Some(job) = self.job(seat) else { return Joined::Ready };
        job.keep_only(&granted.rack);
        if job.members.iter().all(Option::is_none) {
            self.refuse_all(name, &strange(parent_addr));
            return Joined::Ready;
        }
        if let Some(parent) = &mut job.parent {
            parent.before.clear();
            (parent.missing, parent.granted) = (Some(Vec::new()), Some((parent_addr, granted)));
        }
        // A failed start has already refused all members.
        self.start(name).unwrap_or(Joined::Ready)
    }

    /// Handles the end of the connection to the parent. Returns true if the parent must be called
    /// again, because a rank that the call included has left.
    pub(crate) fn handle_parent_disconnect(
        &mut self,
        seat: &Seat,
        parent_addr: &str,
        why: &str,
    ) -> bool {
        let Some(job) = self.job(seat) else { return false };
        let closed_here = job.parent.as_ref().is_some_and(|parent| parent.messages.is_none());
        if job.state == JobState::Gathering && closed_here {
            return true;
        }
        let reason = if job.state == JobState::Gathering {
            format!("the aggregator has no connection to its parent at {parent_addr}: {why}")
        } else {
            parent_gone(&format!("{parent_addr}: {why}"))
        };
        let reason = String::from(PeerText::of(reason));
        LOST.note(|left_out| tracing::warn!(job = ?seat.job, left_out, "{reason}"));
        if job.state == JobState::Gathering {
            self.refuse_all(&seat.job, &reason);
        } else if let Some(job) = self.remove(&seat.job) {
            job.send_to_all(&FromAggregator::ParentLost { reason });
        }
        false
    }

    /// Refuses one rank of a job that gathers ranks, whichever aggregator it has joined. The parent
    /// is then called again for the other ranks.
    fn refuse_rank(&mut self, seat: &Seat, parent_addr: SocketAddr, rank: u16, reason: &str) {
        let Some(job) = self.job(seat).filter(|job| job.state == JobState::Gathering) else {
            return;
        };
        let with = |member: &Option<Member>| {
            member.as_ref().is_some_and(|member| member.ranks().any(|other| other == rank))
        };
        let member = job.members.iter_mut().find(|member| with(member)).and_then(Option::take);
        // The parent names a rank that it was never told of. If the rank had left, this message
        // would have been ignored.
        let Some(member) = member else { return self.refuse_all(&seat.job, &strange(parent_addr)) };
        job.hang_up();
        let reason = PeerText::of(format!("its parent at {parent_addr} refused: {reason}"));
        let reason = String::from(reason);
        NOT_JOINED.note(|left_out| {
            tracing::warn!(job = ?seat.job, rank, reason, left_out, "join refused");
        });
        if member.join.aggregates {
            member.send(FromAggregator::RefusedRank { rank, reason });
        } else {
            member.send(FromAggregator::Refused { reason });
        }
        if job.members.iter().all(Option::is_none) {
            self.remove(&seat.job);
        }
    }

    /// Adds another rank of an aggregator that is a member. A rank that cannot join is refused, and
    /// the aggregator calls again for its other ranks. Returns `None` if the member is not an
    /// aggregator.
    pub(crate) fn also(&mut self, seat: &Seat, join: Join, now: Instant) -> Option<Joined> {
        let place = usize::from(seat.rank);
        let Some(job) = self.job(seat) else { return Some(Joined::Ready) };
        // A refused aggregator may have sent this join before it learned of the refusal.
        let Some(member) = job.members[place].as_ref() else { return Some(Joined::Ready) };
        if !member.join.aggregates {
            return None;
        }
        // Once the job runs, the aggregator knows from its welcome which of its ranks take part.
        if job.state != JobState::Gathering {
            return Some(Joined::Ready);
        }
        let rank = join.rank;
        match self.admit_also(seat, join) {
            Ok(joined) => Some(joined),
            Err(reason) => {
                // If the whole job could not be served, all its members have already been refused.
                let job = self.job(seat);
                if let Some(member) = job.and_then(|job| job.members[place].as_ref()) {
                    NOT_JOINED.note(|left_out| {
                        tracing::warn!(job = ?seat.job, rank, reason, left_out, "join refused");
                    });
                    member.send(FromAggregator::RefusedRank { rank, reason });
                }
                self.leave(seat, Loss::Broke, now);
                Some(Joined::Ready)
            }
        }
    }

    fn admit_also(&mut self, seat: &Seat, mut join: Join) -> Result<Joined, String> {
        let place = usize::from(seat.rank);
        let Some(job) = self.jobs.get(&seat.job).filter(|job| job.id == seat.id) else {
            return Ok(Joined::Ready);
        };
        let Some(member) = job.members[place].as_ref() else { return Ok(Joined::Ready) };
        self.check(&join, member.data_addr(0).ip())?;
        self.check_data(&join)?;
        check_join(&join, member.join.may_move)?;
        if (&join.job, join.generation) != (&seat.job, job.generation) {
            return Err(format!(
                "rank {} belongs to job {:?} in generation {}, but its aggregator has joined job \
                 {:?} in generation {}",
                join.rank, join.job, join.generation.0, seat.job, job.generation.0
            ));
        }
        job.check(&join)?;
        job.check_place(&join)?;
        let Some(job) = self.job(seat) else { return Ok(Joined::Ready) };
        if let Some(member) = &mut job.members[place] {
            join.begun_by = join.begun_by.or_else(|| member.join.begun_by.clone());
            member.also.push(join.clone());
        }
        job.note_caller(&join);
        if job.parent.is_some() {
            return Ok(job.note_joined(&join));
        }
        self.start_if_complete(&seat.job)
    }

    /// Returns whether `rank` is the only rank of a member that is not an aggregator. Such a member
    /// leaves with its rank.
    pub(crate) fn is_only(&self, seat: &Seat, rank: u16) -> bool {
        let job = self.jobs.get(&seat.job).filter(|job| job.id == seat.id);
        let member = job.and_then(|job| job.members.get(usize::from(seat.rank))?.as_ref());
        member.is_some_and(|member| !member.join.aggregates && member.join.rank == rank)
    }

    /// Returns whether a member may report a rank as lost. An aggregator may report the ranks that
    /// have joined through it. Reports about a job that has ended are accepted and have no effect.
    pub(crate) fn may_part(&self, seat: &Seat, rank: u16) -> bool {
        let job = self.jobs.get(&seat.job).filter(|job| job.id == seat.id);
        let member = job.and_then(|job| job.members.get(usize::from(seat.rank))?.as_ref());
        member.is_none_or(|member| member.rack().contains(&rank))
    }

    /// Handles the loss of a rank that had joined through a member aggregator.
    pub(crate) fn parted(&mut self, seat: &Seat, absent: LostRank) {
        let LostRank { rank, why } = absent;
        let Some(job) = self.job(seat).filter(|job| job.state != JobState::Gathering) else {
            return;
        };
        let member = job.members[usize::from(seat.rank)].as_ref();
        if !member.is_some_and(|member| member.ranks().any(|other| other == rank)) {
            return;
        }
        job.send_lost_to_parent(&[rank], why);
        if why == Loss::Left {
            let (id, number) = (job.id, job.number_of(seat.rank));
            if let Some(number) = number {
                let left = || Command::LeftBelow { job: id, rank: number, name: Rank(rank) };
                self.send_to_shards(left);
            }
            return;
        }
        LOST.note(|left_out| {
            tracing::warn!(job = ?seat.job, rank, left_out, "rank lost: {}", why.name());
        });
        job.send_to_all(&FromAggregator::PeerLost { ranks: vec![rank], why });
        self.remove(&seat.job);
        tracing::info!(job = ?seat.job, "job ended");
    }
}

impl Job {
    /// Returns whether any aggregator has joined for its ranks.
    pub(super) fn has_racks(&self) -> bool {
        self.members.iter().flatten().any(|member| member.join.aggregates)
    }

    /// Returns whether the job's sums pass through several aggregators, one after another.
    pub(super) fn is_of_tree(&self) -> bool {
        self.parent.is_some() || self.has_racks()
    }

    /// Checks that the rank asks only for features that a tree supports, if the job is part of one.
    /// A member with several ranks does not keep others from moving if the member may itself move,
    /// as a sidecar with standbys may.
    pub(super) fn check_tree(&self, join: &Join) -> Result<(), String> {
        if self.has_racks() {
            let racks = self.members.iter().flatten().filter(|member| member.join.aggregates);
            let all_move = racks.clone().all(|member| member.join.may_move);
            check_join(join, all_move)?;
        }
        if join.aggregates && !join.may_move && self.may_move {
            return Err(format!(
                "some ranks of job {:?} have standbys, but others joined without standbys through \
                 an aggregator with a parent, or through a sidecar; set one aggregator, or the \
                 same aggregators at all ranks",
                join.job
            ));
        }
        Ok(())
    }

    /// Checks that a rank has not joined yet.
    pub(super) fn check_place(&self, join: &Join) -> Result<(), String> {
        let rank = join.rank;
        let Some(member) = self.member_with(rank) else { return Ok(()) };
        let there = member.data_addr(0);
        let (ip, port) = (there.ip(), there.port());
        let by = if member.join.aggregates { "through the aggregator at" } else { "from" };
        let round =
            if self.is_of_tree() { ", and check that the parents form no cycle" } else { "" };
        Err(format!(
            "rank {rank} of job {:?} has already joined {by} {ip} (data port {port}); give each \
             worker its own `rank`{round}",
            join.job
        ))
    }

    /// Tells the parent that a rank has joined, or returns [`Joined::CallParent`] if the parent
    /// must be called first.
    pub(super) fn note_joined(&mut self, join: &Join) -> Joined {
        let Some(parent) = &mut self.parent else { return Joined::Ready };
        if !std::mem::replace(&mut parent.called, true) {
            return Joined::CallParent;
        }
        if let Some(messages) = &parent.messages {
            // Ignore a failed send: `handle_parent_disconnect` handles a closed connection.
            drop(messages.send(FromWorker::AddRank(join.clone())));
        }
        Joined::Waiting(self.missing())
    }

    /// Tells the parent that ranks are lost, since the parent may already have started the job.
    /// While the job gathers ranks, this method also ends the connection, and the parent is called
    /// again for the remaining ranks.
    pub(super) fn send_lost_to_parent(&mut self, ranks: &[u16], why: Loss) {
        let Some(parent) = &mut self.parent else { return };
        for rank in ranks {
            if let Some(messages) = &parent.messages {
                // Ignore a failed send: `handle_parent_disconnect` handles a closed connection.
                drop(messages.send(FromWorker::RankLost(LostRank { rank: *rank, why })));
            }
        }
        if self.state == JobState::Gathering {
            self.hang_up();
        }
    }

    /// Ends the connection to the parent.
    fn hang_up(&mut self) {
        if let Some(parent) = &mut self.parent {
            parent.messages = None;
        }
    }

    /// Keeps only the ranks that the parent has counted; the others have joined too late.
    fn keep_only(&mut self, rack: &[u16]) {
        for place in &mut self.members {
            if let Some(member) = place {
                // A member aggregator drops its late ranks itself, once its welcome lists the
                // remaining ones.
                member.also.retain(|join| rack.contains(&join.rank));
            }
            let late = |member: &mut Member| !rack.contains(&member.join.rank);
            if let Some(member) = place.take_if(late) {
                let name = &member.join.job;
                let reason = format!(
                    "job {name:?} is already running without this rank; to include it, restart all \
                     ranks with a greater `generation`"
                );
                member.send(FromAggregator::Refused { reason });
            }
        }
    }

    /// Tells the parent that this aggregator stops serving the job.
    pub(super) fn send_stop_to_parent(&self) {
        if let Some(messages) = self.parent.as_ref().and_then(|parent| parent.messages.as_ref()) {
            // Ignore a failed send: a closed connection needs no message.
            drop(messages.send(FromWorker::Stop));
        }
    }

    /// Returns, by number in datagrams, the rank that identifies each member in messages. An
    /// aggregator is identified by the smallest of its ranks.
    pub(super) fn names(&self) -> Vec<Rank> {
        let name = |(rank, member): (u16, Option<&Member>)| Rank(member.map_or(rank, Member::name));
        (0..).zip(self.numbered()).map(name).collect()
    }

    /// Returns a shard's link to the parent.
    pub(super) fn new_parent(&self, below: &Config) -> Option<NewParent> {
        let (parent_addr, granted) = self.parent.as_ref()?.granted.as_ref()?;
        let mut addr = *parent_addr;
        addr.set_port(*granted.data_ports.get(usize::from(below.shard))?);
        let Welcome { data_auth, rank, ref keys, .. } = *granted;
        let keys = keys.as_ref();
        let sealer = keys.and_then(|keys| Sealer::of_rank(data_auth, keys, rank, below.shard));
        let opener =
            keys.and_then(|keys| Opener::of_shard(data_auth, keys, below.generation, below.shard));
        let config = worker::Config {
            job: granted.job,
            generation: below.generation,
            rank,
            lanes: below.lanes,
            shards: below.shards,
            pool_slots: granted.pool_slots,
            max_ops: granted.max_ops,
            cut: below.cut,
            in_flight: granted.in_flight as usize,
            first_op: OpId(0),
            may_move: false,
            acks_at_rest: granted.may_move,
            child: Some(worker::ChildShard { shard: below.shard, slots: below.pool_slots }),
        };
        Some(NewParent { config, addr, sealer, opener })
    }
}

/// Returns whether a parent's grant is valid for an aggregator with this many shards.
fn may_grant(granted: &Welcome, shards: usize) -> bool {
    granted.is_sound() && granted.data_ports.len() == shards && !granted.rack.is_empty()
}

/// Returns the error for a parent and a calling aggregator with different numbers of shards.
fn other_shards(parent: usize, calling: usize) -> String {
    format!(
        "the parent has {}, but the aggregator that calls it has {calling}; start both with the \
         same --shards",
        counted(parent, "shard")
    )
}

/// Returns the ranks that a parent names, sorted and limited to the job's world. The list must be
/// bounded, because all of this aggregator's ranks receive it.
fn of_world(mut ranks: Vec<u16>, world: u16) -> Vec<u16> {
    ranks.retain(|rank| *rank < world);
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// Returns the message to the ranks of a job that ends because the parent is lost.
fn parent_gone(how: &str) -> String {
    format!("the aggregator lost its parent at {how}")
}

/// Returns the error for a parent that breaks the protocol.
fn strange(parent_addr: SocketAddr) -> String {
    format!("its parent at {parent_addr} violated the protocol; install the same release on both")
}

/// Checks that a join asks only for features that a job with members of several ranks supports.
/// Moving is supported only if all such members may move.
fn check_join(join: &Join, all_move: bool) -> Result<(), String> {
    let moves = !all_move && (join.may_move || join.resume.is_some());
    let wants = [
        (moves, "move to a standby; set one aggregator"),
        (join.rejoin, "let a rank rejoin; restart all ranks with a greater `generation`"),
        (
            join.on_rank_loss == OnRankLoss::Continue,
            "continue without a rank; set `on_rank_loss` to `abort`",
        ),
        (join.stripe.1 > 1, "use several aggregators at once; set one aggregator"),
    ];
    match wants.iter().find(|(wants, _)| *wants) {
        Some((_, what)) => Err(format!(
            "job {:?} uses a sidecar, or an aggregator with a parent, so it cannot {what}",
            join.job
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
