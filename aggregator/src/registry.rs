//! The registry of jobs: admission, members, and grants.

mod checks;
mod ending;
mod job;
mod job_move;
mod lives;
mod member;
mod migration;
mod parent_link;
mod planned_move;
mod progress;
mod rejoin;
mod room;
mod tree;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) use checks::other_ip_version;
pub(crate) use ending::settle;
use job::{Job, group_of, millis};
pub(crate) use job_move::MovableJob;
use lives::beginner_of;
pub(crate) use member::MEMBER_QUEUE;
use member::Member;
use parent_link::ParentLink;
pub(crate) use progress::{Progress, watch};
use racksum_net::log_limit::LogLimit;
use racksum_proto::control::{FromAggregator, Join, LostRank, Welcome};
use racksum_proto::ids::{JobId, Rank};
use racksum_proto::job_name::JobName;
use racksum_proto::loss::Loss;
use racksum_proto::move_target::MoveTarget;
use racksum_proto::status::{AggregatorStatus, JobState, OwnCounters};
pub(crate) use rejoin::Returning;
use tokio::sync::mpsc::Sender;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::config::{Config, Fanout};
use crate::job_keys::JobKeys;
use crate::queue::{Queue, Ticket};
use crate::quotas::{Refusal, Tenant};
use crate::shard::{Command, NewJob, ShardHandle, ShardReport};
pub(crate) use tree::ParentCall;
use tree::lost_with;

/// The maximum number of lanes of a job.
pub const MAX_LANES: u8 = 8;
/// The smallest world for which `auto` tries multicast, which saves nothing for a single rank.
const MULTICAST_WORLD: u16 = 2;
/// The number of pings of a multicast group if the fallback is to send copies; together they take
/// 300 ms.
const PINGS: u32 = 15;
/// The number of pings of a multicast group if there is no fallback; together they take 5 s. A new
/// link, or a switch that has just learned of the group, may need seconds to forward multicast.
const DEMANDED_PINGS: u32 = 250;

/// The log limit for lost ranks, and for jobs that ended because of a loss. A tenant may lose any
/// number of ranks, and one failed host can take down ranks of several jobs.
static LOST: LogLimit = LogLimit::new(64);

/// The log limit for refused joins: all ranks of a large job may be refused at once.
pub(crate) static NOT_JOINED: LogLimit = LogLimit::new(64);

/// The registry, shared by all connections. No lock is held across an await.
pub(crate) type SharedRegistry = Arc<Mutex<Registry>>;

pub(crate) fn lock(registry: &SharedRegistry) -> MutexGuard<'_, Registry> {
    registry.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A rank's place in one run of a job; a later job with the same name has other seats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seat {
    job: JobName,
    id: JobId,
    rank: u16,
}

/// The registry of all jobs of an aggregator.
#[derive(Debug)]
pub(crate) struct Registry {
    config: Config,
    shards: Vec<ShardHandle>,
    jobs: BTreeMap<JobName, Job>,
    last_id: u32,
    /// Whether the shards' sockets can send multicast.
    can_multicast: bool,
    queue: Queue,
    /// Whether the aggregator accepts no more jobs.
    draining: bool,
    /// The jobs that an operator moves away before the aggregator stops, while that is in progress.
    handing_over: Option<BTreeSet<JobName>>,
    /// The number of the last planned move.
    last_move: u32,
    /// The last jobs that an operator has moved away, with the targets and times of the moves.
    moved: VecDeque<(JobName, MoveTarget, Instant)>,
    started: Instant,
}

/// A caller that wants to join.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    /// The name in the caller's certificate, if it is verified.
    pub(crate) identity: Option<String>,
    /// The address that the caller calls from.
    pub(crate) addr: SocketAddr,
    /// The queue for messages to the caller about its job.
    pub(crate) outbox: Sender<FromAggregator>,
}

/// The next step of a job after a join.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Joined {
    /// The job waits for these ranks.
    Waiting(Vec<u16>),
    /// All ranks have joined, and the multicast group must be pinged.
    Ping,
    /// The parent must be called.
    CallParent,
    /// The job needs no further step: all ranks have joined, or the job has ended.
    Ready,
}

impl Seat {
    /// Returns the job's number.
    pub(crate) const fn id(&self) -> JobId {
        self.id
    }
}

#[cfg(test)]
impl Seat {
    pub(crate) fn of(job: &str, id: u32, rank: u16) -> Self {
        Self { job: job.into(), id: JobId(id), rank }
    }
}

impl Registry {
    /// Creates a registry whose first job gets the number after `last_id`. Numbers of an earlier
    /// run of the aggregator should not repeat, since datagrams of that run may still arrive.
    pub(crate) fn new(
        config: Config,
        shards: Vec<ShardHandle>,
        can_multicast: bool,
        last_id: u32,
    ) -> Self {
        let (jobs, queue, draining) = (BTreeMap::new(), Queue::default(), false);
        let (moved, started) = (VecDeque::new(), Instant::now());
        let (handing_over, last_move) = (None, 0);
        Self {
            config,
            shards,
            jobs,
            last_id,
            can_multicast,
            queue,
            draining,
            handing_over,
            last_move,
            moved,
            started,
        }
    }

    pub(crate) fn shards(&self) -> &[ShardHandle] {
        &self.shards
    }

    /// Removes all jobs because the aggregator stops, without reporting any rank as lost.
    pub(crate) fn stop(&mut self) {
        self.jobs.values().for_each(Job::send_stop_to_parent);
        self.jobs.clear();
    }

    /// Returns the configuration.
    pub(crate) const fn config(&self) -> &Config {
        &self.config
    }

    /// Applies another configuration. Running jobs keep their grants.
    pub(crate) fn reconfigure(&mut self, config: Config) {
        self.config = config;
        self.queue.reconfigure(&self.config);
        self.call_waiting();
    }

    /// Adds a rank to the queue for room.
    ///
    /// # Errors
    /// Too many ranks are already waiting.
    pub(crate) fn enter_queue(&mut self, join: &Join, caller: &Caller) -> Result<Ticket, String> {
        let (identity, ip) = (caller.identity.as_deref(), caller.addr.ip());
        let ticket = self.queue.enter(&self.config, join, identity, ip)?;
        self.call_waiting();
        Ok(ticket)
    }

    /// Removes a rank from the queue for room.
    pub(crate) fn leave_queue(&mut self, ticket: &Ticket) {
        self.queue.leave(ticket);
        self.call_waiting();
    }

    /// Returns whether a waiting rank should try again, and how many jobs are served before its
    /// own.
    pub(crate) fn turn(&self, ticket: &Ticket) -> (bool, u16) {
        let (is_called, before) = self.queue.turn(ticket);
        (is_called || self.draining, before)
    }

    /// Finds the waiting jobs for which there is room now, and notifies their ranks.
    fn call_waiting(&mut self) {
        let Self { config, jobs, queue, .. } = self;
        let held: Vec<_> = jobs.iter().map(|(name, job)| job.tenant(config, name)).collect();
        queue.call(config, &held);
    }

    /// Returns all jobs except `job`, as tenants.
    fn held_beside(&self, job: &JobName) -> Vec<Tenant<'_>> {
        let others = self.jobs.iter().filter(|(name, _)| *name != job);
        others.map(|(name, job)| job.tenant(&self.config, name)).collect()
    }

    /// Removes a job, which frees its room.
    fn remove(&mut self, name: &JobName) -> Option<Job> {
        let job = self.jobs.remove(name)?;
        self.send_to_shards(|| Command::Remove(job.id));
        self.call_waiting();
        Some(job)
    }

    /// Returns whether callers are identified by their certificates.
    pub(crate) const fn knows_identities(&self) -> bool {
        self.config.identity.is_some()
    }

    /// Returns the number of open jobs, including those that still gather ranks.
    pub(crate) fn jobs(&self) -> usize {
        self.jobs.len()
    }

    /// Returns the aggregator's status without the shards' progress reports.
    pub(crate) fn status(&self, addr: SocketAddr) -> AggregatorStatus {
        let shards = self.shards.iter().map(|shard| {
            let addr = shard.addr.to_string();
            shard.stats().status(addr)
        });
        AggregatorStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            addr: addr.to_string(),
            up_ms: millis(self.started),
            parent: self.config.parent.clone(),
            insecure: self.config.insecure,
            data_auth: self.config.data_auth().name().to_owned(),
            max_jobs: self.config.max_jobs,
            draining: self.draining || self.handing_over.is_some(),
            jobs: self.jobs.iter().map(|(name, job)| job.status(name)).collect(),
            queued: self.queue.names(),
            moved: self.moved_jobs(),
            shards: shards.collect(),
        }
    }

    /// Asks every shard for the progress of one job, or of all its jobs.
    pub(crate) fn ask_shards(&self, job: Option<JobId>) -> Vec<oneshot::Receiver<ShardReport>> {
        self.shards.iter().map(|shard| shard.ask(job)).collect()
    }

    /// Returns the number of connections of members and of ranks that wait for room.
    #[cfg(test)]
    pub(crate) fn connections(&self) -> usize {
        let joined = self.jobs.values().map(|job| job.members.iter().flatten().count());
        joined.sum::<usize>() + self.queue.ranks()
    }

    /// Admits a rank to its job.
    ///
    /// # Errors
    /// Returns the reason for the refusal, as a sentence for the user.
    pub(crate) fn join(
        &mut self,
        mut join: Join,
        caller: Caller,
        now: Instant,
    ) -> Result<(Seat, Joined), Refusal> {
        self.check_caller(&join, &caller)?;
        join.begun_by = Some(beginner_of(&join, &caller));
        let name = join.job.clone();
        let present = self.jobs.get(&name).map(|job| job.generation);
        if let Some(present) = present.filter(|present| join.generation < *present) {
            return Err(Refusal::Never(format!(
                "job {name:?} is in generation {}, begun by {}, and generation {} has ended; start \
                 the rank with the job's current `generation`",
                present.0,
                self.jobs.get(&name).map(Job::begun_by).unwrap_or_default(),
                join.generation.0
            )));
        }
        if present != Some(join.generation) {
            self.open(&join, &caller, now)?;
        }
        let job = self.jobs.get_mut(&name).ok_or("the job ended while it was being opened")?;
        job.check(&join)?;
        job.check_place(&join)?;
        let seat = Seat { job: name, id: job.id, rank: join.rank };
        let resume = join.resume.clone();
        job.may_move |= join.may_move;
        job.left.remove(&join.rank);
        job.note_caller(&join);
        let place = usize::from(join.rank);
        job.members[place] = Some(Member::new(join.clone(), caller, now));
        resume.iter().for_each(|resume| job.note_resume(&seat.job, resume));
        // If no other rank is present, the time limit for gathering starts over.
        if job.members.iter().flatten().count() == 1 {
            job.opened = now;
        }
        let joined = match job.parent {
            Some(_) => job.note_joined(&join),
            None => self.start_if_complete(&seat.job)?,
        };
        Ok((seat, joined))
    }

    /// Starts a job if no rank is missing; otherwise returns the missing ranks.
    fn start_if_complete(&mut self, name: &JobName) -> Result<Joined, String> {
        let missing = self.jobs.get(name).map(Job::missing).unwrap_or_default();
        if missing.is_empty() { self.start(name) } else { Ok(Joined::Waiting(missing)) }
    }

    /// Opens a job for its first rank, and replaces the job's earlier generation if there is one.
    fn open(&mut self, join: &Join, caller: &Caller, now: Instant) -> Result<(), Refusal> {
        self.check_succession(join)?;
        let (identity, ip) = (caller.identity.as_deref(), caller.addr.ip());
        let share = self.find_share(join, identity, ip)?;
        let mut parent = self.config.parent.is_some().then(ParentLink::default);
        if self.jobs.contains_key(&join.job) {
            let before = self.supersede(join);
            parent = parent.map(|_| ParentLink::after(before));
        } else {
            self.queue.note_served(&self.config, join, identity, ip);
        }
        let job = Job {
            identity: identity.map(str::to_owned),
            callers: Vec::new(),
            secret: join.secret,
            share,
            id: self.free_id(),
            generation: join.generation,
            world: join.world,
            lanes: join.lanes,
            on_rank_loss: join.on_rank_loss,
            may_move: false,
            absent: Vec::new(),
            left: BTreeMap::new(),
            returns: BTreeMap::new(),
            last_return: 0,
            progress: None,
            least_buffer: 0,
            granted: None,
            departed: Vec::new(),
            departed_at: None,
            planned: None,
            moved_at: join.resume.as_ref().map(|resume| resume.first_op),
            stripe: join.stripe,
            members: (0..join.world).map(|_| None).collect(),
            order: Vec::new(),
            parent,
            state: JobState::Gathering,
            opened: now,
        };
        self.jobs.insert(join.job.clone(), job);
        self.call_waiting();
        Ok(())
    }

    /// Returns the next free job number. There are far more numbers than jobs, so one is always
    /// free.
    fn free_id(&mut self) -> JobId {
        loop {
            self.last_id = self.last_id.wrapping_add(1).max(1);
            let id = JobId(self.last_id);
            if self.jobs.values().all(|job| job.id != id) {
                return id;
            }
        }
    }

    /// Grants a complete job its share, and sends the grant to all its ranks. If the grant fails,
    /// refuses all ranks.
    fn start(&mut self, name: &JobName) -> Result<Joined, String> {
        let gone = "the job ended before it could start";
        self.jobs.get_mut(name).ok_or(gone)?.number();
        let slots = self.jobs.get(name).map(|job| self.slots(name, job)).unwrap_or(0);
        let job = self.jobs.get_mut(name).ok_or(gone)?;
        let auth = self.config.data_auth();
        let world = u16::try_from(job.order.len()).unwrap_or(job.world);
        let granted = job.grant(slots, auth, &self.shards).and_then(|granted| {
            let job_keys = JobKeys::new(auth, world).map_err(|error| error.to_string())?;
            Ok((granted, job_keys))
        });
        let ((welcome, configs), job_keys) = match granted {
            Ok(granted) => granted,
            Err(reason) => {
                self.refuse_all(name, &reason);
                return Err(reason);
            }
        };
        let fanout = match self.config.fanout {
            Fanout::Auto if world < MULTICAST_WORLD => Fanout::Unicast,
            fanout => fanout,
        };
        let listens = job.members.iter().flatten().any(|member| member.join.multicast);
        let group = (fanout != Fanout::Unicast && self.can_multicast && listens)
            .then(|| group_of(job.id, self.shards[0].addr));
        let names = job.names();
        for (i, (shard, config)) in self.shards.iter().zip(configs).enumerate() {
            let (ranks, names) = (job.data_addrs(i), names.clone());
            let (parent, job_keys, share) = (job.new_parent(&config), job_keys.clone(), job.share);
            let new = NewJob { config, ranks, names, parent, group, job_keys, share };
            shard.send(Command::Add(Box::new(new)));
        }
        for (number, member) in (0..).map(Rank).zip(job.numbered()) {
            let Some(member) = member else { continue };
            let group = group.filter(|_| member.join.multicast);
            let (rank, keys) = (number, job_keys.keys_of(number));
            let welcome = Welcome { group, rank, rack: member.rack(), keys, ..welcome.clone() };
            member.send(FromAggregator::Welcome(welcome));
        }
        let buffers = job.members.iter().flatten().map(|member| member.join.receive_buffer);
        job.least_buffer = buffers.min().unwrap_or(0);
        job.granted = Some((Welcome { group, ..welcome }, job_keys));
        if group.is_some() {
            job.state = JobState::Probing;
            return Ok(Joined::Ping);
        }
        self.run(name);
        Ok(Joined::Ready)
    }

    /// Returns how many times a group is pinged.
    pub(crate) const fn pings(&self) -> u32 {
        match self.config.fanout {
            Fanout::Multicast => DEMANDED_PINGS,
            Fanout::Auto | Fanout::Unicast => PINGS,
        }
    }

    /// Returns the job of a seat, unless it has ended.
    fn job(&mut self, seat: &Seat) -> Option<&mut Job> {
        self.jobs.get_mut(&seat.job).filter(|job| job.id == seat.id)
    }

    fn member(&mut self, seat: &Seat) -> Option<&mut Member> {
        self.job(seat)?.members.get_mut(usize::from(seat.rank))?.as_mut()
    }

    /// Takes the counters that a member reports about itself.
    pub(crate) fn note_counters(&mut self, seat: &Seat, counters: OwnCounters) {
        if let Some(member) = self.member(seat) {
            member.note_counters(counters);
        }
    }

    /// Sends a ping to a job's group. Returns false once the job is no longer being pinged.
    pub(crate) fn ping(&mut self, seat: &Seat) -> bool {
        let pinging = self.job(seat).is_some_and(|job| job.state == JobState::Probing);
        if let Some(shard) = self.shards.first().filter(|_| pinging) {
            shard.send(Command::Ping(seat.id));
        }
        pinging
    }

    /// Notes that a rank has received a ping to the group. The job runs once all listening ranks
    /// have received one.
    pub(crate) fn handle_ping_arrived(&mut self, seat: &Seat) {
        let Some(job) = self.job(seat) else { return };
        if let Some(member) = &mut job.members[usize::from(seat.rank)] {
            member.receives_multicast = true;
        }
        let mut listening = job.members.iter().flatten().filter(|member| member.join.multicast);
        if job.state == JobState::Probing && listening.all(|member| member.receives_multicast) {
            self.run(&seat.job);
        }
    }

    /// Ends the pings of a job. A rank that received no ping gets copies; where multicast is
    /// required, the whole job is refused.
    pub(crate) fn end_pings(&mut self, seat: &Seat) {
        let demanded = self.config.fanout == Fanout::Multicast;
        let Some(job) = self.job(seat).filter(|job| job.state == JobState::Probing) else { return };
        let unreached = job.members.iter().flatten().find(|member| !member.receives_multicast);
        match unreached.filter(|_| demanded).map(Member::unreached) {
            Some(reason) => self.refuse_all(&seat.job, &reason),
            None => self.run(&seat.job),
        }
    }

    fn run(&mut self, name: &JobName) {
        let Some(job) = self.jobs.get_mut(name) else { return };
        job.state = JobState::Running;
        let receives_multicast = job.receives_multicast();
        for shard in &self.shards {
            shard.send(Command::Listeners(job.id, receives_multicast.clone()));
        }
        for member in job.members.iter().flatten() {
            member.send(FromAggregator::Ready { multicast: member.receives_multicast });
        }
        // These ranks were lost before the job ran.
        for absent in &job.absent {
            job.send_to_all(&FromAggregator::ContinueWithout(*absent));
            for shard in &self.shards {
                shard.send(Command::Gone(job.id, Rank(absent.rank)));
            }
        }
        tracing::info!(job = ?name, world = job.world, id = job.id.0, "job started");
    }

    fn refuse_all(&mut self, name: &JobName, reason: &str) {
        if let Some(job) = self.remove(name) {
            job.send_stop_to_parent();
            job.send_to_all(&FromAggregator::Refused { reason: reason.to_owned() });
        }
    }

    /// Removes a rank that has left or is lost. A loss ends a job that has started and frees its
    /// room immediately, unless the job's policy lets the job continue. A rank that leaves ends its
    /// job only if it is the last one.
    pub(crate) fn leave(&mut self, seat: &Seat, why: Loss, now: Instant) {
        let is_member = |job: &mut Job| job.members[usize::from(seat.rank)].is_some();
        if self.job(seat).is_some_and(is_member) {
            self.lose(seat, why, now);
        }
    }

    fn lose(&mut self, seat: &Seat, why: Loss, now: Instant) {
        let (name, rank) = (&seat.job, seat.rank);
        let Some(job) = self.job(seat) else { return };
        let number = job.number_of(rank);
        let member = job.take_member(rank, why.is_certain());
        let (ranks, why) = lost_with(member, rank, why);
        job.send_lost_to_parent(&ranks, why);
        let absent = LostRank { rank, why };
        let goes_on = job.continues_without(&[absent], now);
        let over = match (why, job.state) {
            // The remaining ranks keep waiting for the missing one.
            (_, JobState::Gathering) => false,
            // The absent ranks are announced together when the job runs.
            (_, JobState::Probing) if goes_on => {
                job.absent.push(absent);
                false
            }
            (why, JobState::Running) if goes_on => {
                job.send_to_all(&FromAggregator::ContinueWithout(absent));
                job.absent.push(absent);
                job.note_move_without(rank);
                if why != Loss::Left {
                    LOST.note(|left_out| {
                        let why = format_args!("rank lost: {}; the job continues", why.name());
                        tracing::warn!(job = ?name, rank, left_out, "{why}");
                    });
                }
                self.send_to_shards(|| Command::Gone(seat.id, Rank(rank)));
                false
            }
            (Loss::Left, JobState::Probing | JobState::Running) => {
                job.stop_move(format!("rank {rank} has left the job"));
                if let Some(number) = number {
                    self.send_to_shards(|| Command::Left(seat.id, number));
                }
                false
            }
            (why, JobState::Probing | JobState::Running) => {
                LOST.note(|left_out| {
                    let why = why.describe(ranks.iter().copied());
                    tracing::warn!(job = ?name, left_out, "the job ends: {why}");
                });
                job.send_to_all(&FromAggregator::PeerLost { ranks, why });
                true
            }
        };
        let empty = |job: &Job| job.members.iter().all(Option::is_none);
        if over || self.jobs.get(name).is_some_and(empty) {
            self.remove(name);
            tracing::info!(job = ?name, "job ended");
        }
    }

    fn send_to_shards(&self, command: impl Fn() -> Command) {
        for shard in &self.shards {
            shard.send(command());
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
