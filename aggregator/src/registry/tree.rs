//! Jobs whose sums go on to a parent, and those of which aggregators have this one as theirs.
//!
//! An aggregator that has a parent joins it for the ranks of each of its jobs, one after the other
//! as they come. Only the parent sees when the world is complete, so there the job starts, and what
//! it grants is what the ranks are granted below.

use std::net::SocketAddr;

use racksum_net::auth::{Opener, Sealer};
use racksum_proto::aggregator::Config;
use racksum_proto::control::{
    Absent, CONTROL_VERSION, FromAggregator, FromWorker, Join, OnRankLoss, Welcome,
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

/// A call of the parent: what is said first, and whatever is said then.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) join: Join,
    pub(crate) messages: UnboundedReceiver<FromWorker>,
    /// Tells when the job's life that calls is over.
    pub(crate) over: oneshot::Receiver<()>,
}

/// Whom a job loses with a member.
pub(super) fn lost_with(member: Option<Member>, rank: u16, why: Loss) -> (Vec<u16>, Loss) {
    match member.filter(|member| member.join.relays && why != Loss::Left) {
        Some(member) => (member.sorted_ranks(), Loss::Relay),
        None => (vec![rank], why),
    }
}

impl Registry {
    /// Checks that what a rank wants can be had in a tree, if it is to be in one.
    pub(super) fn check_relay(&self, join: &Join) -> Result<(), String> {
        let (mine, theirs) = (self.shards.len(), join.data_ports.len());
        // A sidecar has one port for all shards.
        if join.relays && theirs != mine && theirs != 1 {
            return Err(other_shards(mine, theirs));
        }
        match &self.config.parent {
            Some(_) => check_wish(join, false),
            None if join.relays => check_wish(join, join.may_move),
            None => Ok(()),
        }
    }

    /// What is said to the parent of a job that gathers ranks; none if there is nothing to call it
    /// for any more.
    pub(crate) fn call(&mut self, seat: &Seat) -> Option<Call> {
        let data_ports = self.shards.iter().map(|shard| shard.addr.port()).collect();
        let buffers = self.shards.iter().map(|shard| shard.receive_buffer).min().unwrap_or(0);
        let receive_buffer = u32::try_from(buffers).unwrap_or(u32::MAX);
        let data_auth = Some(self.config.data_auth());
        let job = self.job(seat).filter(|job| job.state == JobState::Gathering)?;
        let (tell, messages) = unbounded_channel();
        let mut joins = job.members.iter().flatten().flat_map(Member::joins).cloned();
        let first = joins.next()?;
        // The receiver is here.
        joins.for_each(|join| drop(tell.send(FromWorker::Also(join))));
        let before = std::mem::take(&mut job.parent.get_or_insert_default().before);
        let (ends, over) = oneshot::channel();
        let (words_to, ends) = (Some(tell), Some(ends));
        let parent = ParentLink {
            called: true,
            messages: words_to,
            before,
            _over: ends,
            ..ParentLink::default()
        };
        job.parent = Some(parent);
        let join =
            Join { data_ports, receive_buffer, data_auth, multicast: false, relays: true, ..first };
        Some(Call { join, messages, over })
    }

    /// Takes what the parent at `parent_addr` says.
    pub(crate) fn hear_from_parent(
        &mut self,
        seat: &Seat,
        parent_addr: SocketAddr,
        message: FromAggregator,
    ) -> Joined {
        let name = &seat.job;
        let Some(job) = self.job(seat) else { return Joined::Ready };
        // What is said after this side has hung up is about ranks of which one is gone.
        let Some(parent) = job.parent.as_mut().filter(|parent| parent.messages.is_some()) else {
            return Joined::Ready;
        };
        match message {
            FromAggregator::WrongVersion { speaks } => {
                self.refuse_all(
                    name,
                    &format!(
                        "its parent at {parent_addr} speaks version {speaks} of the protocol, and \
                         this aggregator version {CONTROL_VERSION}; install the same release on \
                         both"
                    ),
                );
            }
            FromAggregator::Refused { reason } if job.state != JobState::Gathering => {
                let reason = parent_gone(&format!("{parent_addr} refused: {reason}"));
                job.tell(&FromAggregator::ParentLost { reason });
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
                job.tell(&message);
            }
            FromAggregator::Welcome(_) if job.state != JobState::Gathering => {}
            FromAggregator::Welcome(granted) => return self.welcomed(seat, parent_addr, granted),
            FromAggregator::Drain if job.state == JobState::Gathering => {
                self.refuse_all(name, &format!("its parent at {parent_addr} is about to stop"));
            }
            FromAggregator::PeerLost { ranks, why } => {
                let ranks = of_world(ranks, job.world);
                job.tell(&FromAggregator::PeerLost { ranks, why });
                self.remove(name);
            }
            FromAggregator::ParentLost { .. } | FromAggregator::Superseded { .. } => {
                job.tell(&message);
                self.remove(name);
            }
            // The shards have their say in the rest; ranks that know no other aggregator are served
            // to their end.
            FromAggregator::Drain
            | FromAggregator::Ready { .. }
            | FromAggregator::Lifeline { .. }
            | FromAggregator::Prove { .. }
            | FromAggregator::Arrived { .. }
            | FromAggregator::Present { .. }
            | FromAggregator::Status { .. }
            | FromAggregator::Free
            | FromAggregator::Without(_) => {}
        }
        Joined::Ready
    }

    /// Starts a job as its parent grants it.
    fn welcomed(&mut self, seat: &Seat, parent_addr: SocketAddr, granted: Welcome) -> Joined {
        let (name, auth) = (&seat.job, self.config.data_auth());
        let (mine, theirs) = (self.shards.len(), granted.data_ports.len());
        if mine != theirs {
            let reason = other_shards(theirs, mine);
            self.refuse_all(name, &format!("its parent at {parent_addr} refused: {reason}"));
            return Joined::Ready;
        }
        if !may_grant(&granted, self.shards.len()) {
            self.refuse_all(name, &strange(parent_addr));
            return Joined::Ready;
        }
        if granted.data_auth != auth {
            let reason = format!(
                "its parent at {parent_addr} authenticates data with {:?}, and this aggregator \
                 with {:?}; start both with the same `racksum aggregator --data-auth`",
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
        // If it cannot be served, all have been told so.
        self.start(name).unwrap_or(Joined::Ready)
    }

    /// The conversation with the parent is over. Returns whether it is to be called again, since a
    /// rank that it had been called for has gone meanwhile.
    pub(crate) fn hung_up(&mut self, seat: &Seat, parent_addr: &str, why: &str) -> bool {
        let Some(job) = self.job(seat) else { return false };
        let hung_up_here = job.parent.as_ref().is_some_and(|parent| parent.messages.is_none());
        if job.state == JobState::Gathering && hung_up_here {
            return true;
        }
        let reason = if job.state == JobState::Gathering {
            format!("the aggregator's parent at {parent_addr} cannot be had: {why}")
        } else {
            parent_gone(&format!("{parent_addr}: {why}"))
        };
        let reason = String::from(PeerText::of(reason));
        LOST.note(|left_out| tracing::warn!(job = ?seat.job, left_out, "{reason}"));
        if job.state == JobState::Gathering {
            self.refuse_all(&seat.job, &reason);
        } else if let Some(job) = self.remove(&seat.job) {
            job.tell(&FromAggregator::ParentLost { reason });
        }
        false
    }

    /// Refuses one rank of a job that gathers ranks, wherever below it has joined; the parent is
    /// called anew for the others.
    fn refuse_rank(&mut self, seat: &Seat, parent_addr: SocketAddr, rank: u16, reason: &str) {
        let Some(job) = self.job(seat).filter(|job| job.state == JobState::Gathering) else {
            return;
        };
        let with = |member: &Option<Member>| {
            member.as_ref().is_some_and(|member| member.ranks().any(|other| other == rank))
        };
        let member = job.members.iter_mut().find(|member| with(member)).and_then(Option::take);
        // Of ranks that are gone nothing is heard any more.
        let Some(member) = member else { return self.refuse_all(&seat.job, &strange(parent_addr)) };
        job.hang_up();
        let reason = PeerText::of(format!("its parent at {parent_addr} refused: {reason}"));
        let reason = String::from(reason);
        NOT_JOINED.note(|left_out| {
            tracing::warn!(job = ?seat.job, rank, reason, left_out, "join refused");
        });
        if member.join.relays {
            member.tell(FromAggregator::RefusedRank { rank, reason });
        } else {
            member.tell(FromAggregator::Refused { reason });
        }
        if job.members.iter().all(Option::is_none) {
            self.remove(&seat.job);
        }
    }

    /// Another rank has joined an aggregator that is a member. One that cannot be is refused, and
    /// the aggregator calls anew for its others. None if it is no aggregator that says so.
    pub(crate) fn also(&mut self, seat: &Seat, join: Join, now: Instant) -> Option<Joined> {
        let place = usize::from(seat.rank);
        let Some(job) = self.job(seat) else { return Some(Joined::Ready) };
        // One that was refused has said more before it could hear of that.
        let Some(member) = job.members[place].as_ref() else { return Some(Joined::Ready) };
        if !member.join.relays {
            return None;
        }
        // Once the job runs, the aggregator has been told which of its ranks do.
        if job.state != JobState::Gathering {
            return Some(Joined::Ready);
        }
        let rank = join.rank;
        match self.admit_also(seat, join) {
            Ok(joined) => Some(joined),
            Err(reason) => {
                // If it is the job that cannot be served, its members have been told so.
                let job = self.job(seat);
                if let Some(member) = job.and_then(|job| job.members[place].as_ref()) {
                    NOT_JOINED.note(|left_out| {
                        tracing::warn!(job = ?seat.job, rank, reason, left_out, "join refused");
                    });
                    member.tell(FromAggregator::RefusedRank { rank, reason });
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
        check_wish(&join, member.join.may_move)?;
        if (&join.job, join.generation) != (&seat.job, job.generation) {
            return Err(format!(
                "rank {} is of job {:?} in generation {}, and was brought into job {:?} in \
                 generation {}",
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

    /// Whether a rank is the only one that a member has, as of a sidecar with one. Then the member
    /// goes with it.
    pub(crate) fn is_only(&self, seat: &Seat, rank: u16) -> bool {
        let job = self.jobs.get(&seat.job).filter(|job| job.id == seat.id);
        let member = job.and_then(|job| job.members.get(usize::from(seat.rank))?.as_ref());
        member.is_some_and(|member| !member.join.relays && member.join.rank == rank)
    }

    /// Whether a member may say that a rank is gone: an aggregator, of a rank that has joined it.
    /// Anything may be said of a job that is over.
    pub(crate) fn may_part(&self, seat: &Seat, rank: u16) -> bool {
        let job = self.jobs.get(&seat.job).filter(|job| job.id == seat.id);
        let member = job.and_then(|job| job.members.get(usize::from(seat.rank))?.as_ref());
        member.is_none_or(|member| member.rack().contains(&rank))
    }

    /// A rank is gone that had joined an aggregator which is a member.
    pub(crate) fn parted(&mut self, seat: &Seat, absent: Absent) {
        let Absent { rank, why } = absent;
        let Some(job) = self.job(seat).filter(|job| job.state != JobState::Gathering) else {
            return;
        };
        let member = job.members[usize::from(seat.rank)].as_ref();
        if !member.is_some_and(|member| member.ranks().any(|other| other == rank)) {
            return;
        }
        job.tell_parent_of(&[rank], why);
        if why == Loss::Left {
            let (id, number) = (job.id, job.number_of(seat.rank));
            if let Some(number) = number {
                let left = || Command::LeftBelow { job: id, rank: number, name: Rank(rank) };
                self.tell_shards(left);
            }
            return;
        }
        LOST.note(|left_out| {
            tracing::warn!(job = ?seat.job, rank, left_out, "rank lost: {}", why.name());
        });
        job.tell(&FromAggregator::PeerLost { ranks: vec![rank], why });
        self.remove(&seat.job);
        tracing::info!(job = ?seat.job, "job ended");
    }
}

impl Job {
    /// Whether aggregators have joined for their ranks.
    pub(super) fn has_racks(&self) -> bool {
        self.members.iter().flatten().any(|member| member.join.relays)
    }

    /// Whether its sums go through several aggregators, one after the other.
    pub(super) fn is_of_tree(&self) -> bool {
        self.parent.is_some() || self.has_racks()
    }

    /// Checks that ranks that want what a tree does not have are in none. Members of several ranks
    /// that move themselves, as sidecars do, are no hindrance to others that move.
    pub(super) fn check_tree(&self, join: &Join) -> Result<(), String> {
        if self.has_racks() {
            let racks = self.members.iter().flatten().filter(|member| member.join.relays);
            let all_move = racks.clone().all(|member| member.join.may_move);
            check_wish(join, all_move)?;
        }
        if join.relays && !join.may_move && self.may_move {
            return Err(format!(
                "some ranks of job {:?} have joined here and name standbys, which cannot be where \
                 others have joined at an aggregator with a parent, or a sidecar, that names none; \
                 name one aggregator, or the same at all",
                join.job
            ));
        }
        Ok(())
    }

    /// Checks that a rank has not joined.
    pub(super) fn check_place(&self, join: &Join) -> Result<(), String> {
        let rank = join.rank;
        let Some(member) = self.member_with(rank) else { return Ok(()) };
        let there = member.data_addr(0);
        let (ip, port) = (there.ip(), there.port());
        let by = if member.join.relays { "through the aggregator at" } else { "from" };
        let round =
            if self.is_of_tree() { ", and let no parents go round in a circle" } else { "" };
        Err(format!(
            "rank {rank} of job {:?} has already joined {by} {ip} (data port {port}); give each \
             worker its own `rank`{round}",
            join.job
        ))
    }

    /// Tells the parent that a rank has joined, or wants it to be called.
    pub(super) fn note_joined(&mut self, join: &Join) -> Joined {
        let Some(parent) = &mut self.parent else { return Joined::Ready };
        if !std::mem::replace(&mut parent.called, true) {
            return Joined::Call;
        }
        if let Some(messages) = &parent.messages {
            // One that is gone has said so.
            drop(messages.send(FromWorker::Also(join.clone())));
        }
        Joined::Waiting(self.missing())
    }

    /// Tells the parent that ranks are gone. While ranks are gathered this side hangs up as well,
    /// and calls again for those that are left; the parent may have started the job by then.
    pub(super) fn tell_parent_of(&mut self, ranks: &[u16], why: Loss) {
        let Some(parent) = &mut self.parent else { return };
        for rank in ranks {
            if let Some(messages) = &parent.messages {
                // One that is gone has said so.
                drop(messages.send(FromWorker::Parted(Absent { rank: *rank, why })));
            }
        }
        if self.state == JobState::Gathering {
            self.hang_up();
        }
    }

    /// Ends the conversation with the parent.
    fn hang_up(&mut self) {
        if let Some(parent) = &mut self.parent {
            parent.messages = None;
        }
    }

    /// Keeps only the ranks that the parent has counted: others have come too late.
    fn keep_only(&mut self, rack: &[u16]) {
        for place in &mut self.members {
            if let Some(member) = place {
                // An aggregator drops them by itself, once it hears who is left.
                member.also.retain(|join| rack.contains(&join.rank));
            }
            let late = |member: &mut Member| !rack.contains(&member.join.rank);
            if let Some(member) = place.take_if(late) {
                let name = &member.join.job;
                let reason = format!("job {name:?} is running: its ranks have joined");
                member.tell(FromAggregator::Refused { reason });
            }
        }
    }

    /// Tells the parent that this aggregator stops.
    pub(super) fn tell_parent_of_stop(&self) {
        if let Some(messages) = self.parent.as_ref().and_then(|parent| parent.messages.as_ref()) {
            // One that is gone needs no word.
            drop(messages.send(FromWorker::Stop));
        }
    }

    /// What people call those that send data, by number.
    pub(super) fn names(&self) -> Vec<Rank> {
        let name = |(rank, member): (u16, Option<&Member>)| Rank(member.map_or(rank, Member::name));
        (0..).zip(self.numbered()).map(name).collect()
    }

    /// The way to the parent of the shard of a configuration.
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
            relay: Some(worker::Relay { shard: below.shard, slots: below.pool_slots }),
        };
        Some(NewParent { config, addr, sealer, opener })
    }
}

/// Whether a parent may grant this to an aggregator of so many shards.
fn may_grant(granted: &Welcome, shards: usize) -> bool {
    granted.is_sound() && granted.data_ports.len() == shards && !granted.rack.is_empty()
}

/// Why an aggregator cannot be another's parent.
fn other_shards(parent_addr: usize, calling: usize) -> String {
    format!(
        "the parent has {} and the aggregator that calls it {calling}; start both with the same \
         --shards",
        counted(parent_addr, "shard")
    )
}

/// Returns the ranks that a parent names, in order, and none that the job does not have: it is said
/// to all ranks here.
fn of_world(mut ranks: Vec<u16>, world: u16) -> Vec<u16> {
    ranks.retain(|rank| *rank < world);
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// Why a job is over that has lost the parent, in the sentence that all its ranks are told.
fn parent_gone(how: &str) -> String {
    format!("the parent of the aggregator is gone: {how}")
}

/// Why a parent is none.
fn strange(parent_addr: SocketAddr) -> String {
    format!("its parent at {parent_addr} does not keep to the protocol")
}

/// Checks that a rank wants nothing that a job does not have whose members have several ranks:
/// among others to move, unless all of these may.
fn check_wish(join: &Join, all_move: bool) -> Result<(), String> {
    let moves = !all_move && (join.may_move || join.resume.is_some());
    let wants = [
        (moves, "move to a standby; name one aggregator"),
        (join.rejoin, "have a rank back; restart all ranks with a greater `generation`"),
        (
            join.on_rank_loss == OnRankLoss::Continue,
            "go on without a rank; start its ranks with `on_rank_loss` abort",
        ),
        (join.stripe.1 > 1, "be spread over several; name one aggregator"),
    ];
    match wants.iter().find(|(wants, _)| *wants) {
        Some((_, what)) => Err(format!(
            "job {:?} is summed by an aggregator with a parent, or has ranks at a sidecar, where a \
             job cannot {what}",
            join.job
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
