//! Admission: which jobs there are, who has joined them, what they are granted.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use racksum_proto::aggregator::Config as JobConfig;
use racksum_proto::auth::DataAuth;
use racksum_proto::control::{CONTROL_VERSION, FromAggregator, Join, Welcome};
use racksum_proto::geometry::{Fragmentation, WINDOW_BYTES};
use racksum_proto::ids::{Generation, JobId, Rank};
use racksum_proto::wire::Header;
use tokio::sync::mpsc::Sender;
use tokio::time::Instant;

use crate::admission::admit;
use crate::config::{Config, Fanout};
use crate::locks::Locks;
use crate::shard::{Command, NewJob, ShardHandle};
use crate::slots::MAX_WORLD;

/// Most lanes of a job.
pub const MAX_LANES: u8 = 8;
/// Most bytes of a job's name.
const MAX_NAME: usize = 128;
/// Bytes that a rank may have in flight towards a shard where datagrams hold whole windows, as
/// between processes of one host: there copies are the limit, and what two ranks have on its way
/// should stay in the processor's cache. On slower links, whose datagrams are small, more in
/// flight mends losses sooner.
const MAX_LOCAL_IN_FLIGHT: usize = 1 << 19;
/// Ops that each rank may have in flight.
const MAX_OPS: u16 = 64;
/// From this many ranks on, `auto` tries multicast: one rank alone needs no copies.
const MULTICAST_WORLD: u16 = 2;
/// How often a group is probed where there are copies to fall back to: 300 ms.
const PROBES: u32 = 15;
/// How often where there are none: 5 s. A link that has just come up, or a switch that has just
/// heard of the group, may take seconds to pass multicast on.
const DEMANDED_PROBES: u32 = 250;

/// A rank that has joined.
#[derive(Debug)]
struct Member {
    join: Join,
    /// Where its data comes from: an address of a link means nothing without its scope.
    addr: SocketAddr,
    tell: Sender<FromAggregator>,
    hears: bool,
}

/// A job, gathering its ranks or running.
#[derive(Debug)]
struct Job {
    id: JobId,
    generation: Generation,
    world: u16,
    lanes: u8,
    /// Which of how many aggregators this one is for the job.
    stripe: (u8, u8),
    members: Vec<Option<Member>>,
    state: State,
    opened: Instant,
}

/// A rank's place in a job, which another job of the same name does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seat {
    job: String,
    id: JobId,
    rank: u16,
}

/// How far a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Ranks are missing.
    Gathering,
    /// Finding out who hears the multicast group.
    Probing,
    /// Ops may run.
    Running,
}

/// All jobs of an aggregator.
#[derive(Debug)]
pub(crate) struct Registry {
    config: Config,
    shards: Vec<ShardHandle>,
    jobs: BTreeMap<String, Job>,
    last_id: u32,
    /// Whether the shards' sockets can send to a group.
    can_multicast: bool,
}

/// Who wants to join.
#[derive(Debug)]
pub(crate) struct Caller {
    /// The name in its certificate, if somebody vouches for it.
    pub(crate) identity: Option<String>,
    /// Where it calls from.
    pub(crate) addr: SocketAddr,
    /// How it is told of what becomes of its job.
    pub(crate) tell: Sender<FromAggregator>,
}

/// What a join led to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Joined {
    /// Ranks are missing.
    Waiting,
    /// All ranks are there; the group is to be probed.
    Probe,
    /// All ranks are there and told to go.
    Ready,
}

#[cfg(test)]
impl Seat {
    pub(crate) fn of(job: &str, id: u32, rank: u16) -> Self {
        Self { job: job.to_owned(), id: JobId(id), rank }
    }
}

impl Registry {
    /// Numbers jobs from after `last_id` on. A number that an earlier life of the aggregator has
    /// given is better not given again: datagrams of that life may still come.
    pub(crate) const fn new(
        config: Config,
        shards: Vec<ShardHandle>,
        can_multicast: bool,
        last_id: u32,
    ) -> Self {
        Self { config, shards, jobs: BTreeMap::new(), last_id, can_multicast }
    }

    pub(crate) fn shards(&self) -> &[ShardHandle] {
        &self.shards
    }

    /// Forgets all jobs, since the aggregator stops: no rank is lost by that.
    pub(crate) fn stop(&mut self) {
        self.jobs.clear();
    }

    /// Whether somebody vouches for the identities of callers.
    pub(crate) const fn knows_identities(&self) -> bool {
        self.config.identity.is_some()
    }

    /// How many jobs there are.
    pub(crate) fn jobs(&self) -> usize {
        self.jobs.len()
    }

    /// How many ranks have joined.
    pub(crate) fn ranks(&self) -> usize {
        self.jobs.values().map(|job| job.members.iter().flatten().count()).sum()
    }

    /// Takes a rank into its job.
    ///
    /// # Errors
    /// A sentence for the user that says why not.
    pub(crate) fn join(
        &mut self,
        join: Join,
        caller: Caller,
        now: Instant,
    ) -> Result<(Seat, Joined), String> {
        let Caller { identity, mut addr, tell } = caller;
        Self::check(&join, addr.ip())?;
        // Before anything is said that depends on a job.
        admit(&self.config.admit, identity.as_deref(), &join.job)?;
        addr.set_port(join.data_port);
        let name = join.job.clone();
        if !self.jobs.contains_key(&name) {
            self.open(&join, now)?;
        }
        let job = self.jobs.get_mut(&name).ok_or("the job vanished while it was opened")?;
        job.check(&join)?;
        let place = &mut job.members[usize::from(join.rank)];
        if let Some(member) = place {
            let (rank, there, port) = (join.rank, member.addr.ip(), member.addr.port());
            return Err(format!(
                "rank {rank} of job {name:?} has already joined from {there} (data port {port}); \
                 give each worker its own --rank"
            ));
        }
        let seat = Seat { job: name, id: job.id, rank: join.rank };
        *place = Some(Member { join, addr, tell, hears: false });
        if job.members.iter().any(Option::is_none) {
            return Ok((seat, Joined::Waiting));
        }
        let joined = self.start(&seat.job)?;
        Ok((seat, joined))
    }

    /// Checks what does not depend on the job.
    fn check(join: &Join, addr: IpAddr) -> Result<(), String> {
        if join.version != CONTROL_VERSION {
            return Err(format!(
                "this aggregator speaks version {CONTROL_VERSION} of the protocol, the worker \
                 version {}; install the same release on both",
                join.version
            ));
        }
        let (rank, world) = (join.rank, join.world);
        if world == 0 || world > MAX_WORLD {
            return Err(format!("a job has 1 to {MAX_WORLD} ranks, not {world}"));
        }
        if rank >= world {
            return Err(format!("rank {rank} is not below the world of {world}"));
        }
        if join.lanes == 0 || join.lanes > MAX_LANES {
            return Err(format!("a job has 1 to {MAX_LANES} lanes, not {}", join.lanes));
        }
        let (place, aggregators) = join.stripe;
        if place >= aggregators {
            return Err(format!("aggregator {place} is not one of {aggregators}"));
        }
        if join.job.is_empty() || join.job.len() > MAX_NAME {
            return Err(format!("a job's name has 1 to {MAX_NAME} bytes, not {}", join.job.len()));
        }
        if join.data_port == 0 {
            return Err("a rank needs a UDP port for its data, and 0 is none".into());
        }
        if join.pool_slots == 1 {
            return Err("a stream has 2 slots or more, not 1".into());
        }
        if let IpAddr::V6(v6) = addr
            && v6.to_ipv4_mapped().is_some()
        {
            // The control socket takes both, the data sockets take one, so that a peer has one
            // address.
            return Err("this aggregator serves IPv6, and the worker came by IPv4; call it by an \
                        IPv6 address, or start it with an IPv4 address to --bind"
                .into());
        }
        Ok(())
    }

    /// Opens a job for its first rank.
    fn open(&mut self, join: &Join, now: Instant) -> Result<(), String> {
        if self.jobs.len() >= usize::from(self.config.max_jobs) {
            return Err(format!(
                "this aggregator has {} jobs, as many as --max-jobs allows; try again when one \
                 has ended",
                self.jobs.len()
            ));
        }
        let job = Job {
            id: self.free_id(),
            generation: join.generation,
            world: join.world,
            lanes: join.lanes,
            stripe: join.stripe,
            members: (0..join.world).map(|_| None).collect(),
            state: State::Gathering,
            opened: now,
        };
        self.jobs.insert(join.job.clone(), job);
        Ok(())
    }

    /// The next number that no job has. There are far more numbers than jobs.
    fn free_id(&mut self) -> JobId {
        loop {
            self.last_id = self.last_id.wrapping_add(1).max(1);
            let id = JobId(self.last_id);
            if self.jobs.values().all(|job| job.id != id) {
                return id;
            }
        }
    }

    /// Grants a complete job its share and tells everyone.
    fn start(&mut self, name: &str) -> Result<Joined, String> {
        let slots = self.jobs.get(name).map(|job| self.slots(job)).unwrap_or(0);
        let job = self.jobs.get_mut(name).ok_or("the job vanished before it could start")?;
        let auth = self.config.data_auth();
        let granted = job.grant(slots, auth, &self.shards).and_then(|granted| {
            let locks = Locks::new(auth, job.world).map_err(|error| error.to_string())?;
            Ok((granted, locks))
        });
        let ((welcome, configs), locks) = match granted {
            Ok(granted) => granted,
            Err(reason) => {
                self.refuse_all(name, &reason);
                return Err(reason);
            }
        };
        let deaf = job.members.iter().flatten().find(|member| !member.join.multicast);
        if let (Fanout::Multicast, Some(deaf)) = (self.config.fanout, deaf) {
            let reason = deaf.unreached();
            self.refuse_all(name, &reason);
            return Err(reason);
        }
        let fanout = match self.config.fanout {
            Fanout::Auto if job.world < MULTICAST_WORLD => Fanout::Unicast,
            fanout => fanout,
        };
        let listens = job.members.iter().flatten().any(|member| member.join.multicast);
        let group = (fanout != Fanout::Unicast && self.can_multicast && listens)
            .then(|| group_of(job.id, self.shards[0].addr));
        let ranks: Vec<SocketAddr> = job.data_addrs().collect();
        for (shard, config) in self.shards.iter().zip(configs) {
            let new = NewJob { config, ranks: ranks.clone(), group, locks: locks.clone() };
            shard.tell(Command::Add(Box::new(new)));
        }
        for member in job.members.iter().flatten() {
            let group = group.filter(|_| member.join.multicast);
            let keys = locks.keys_of(Rank(member.join.rank));
            member.tell(FromAggregator::Welcome(Welcome { group, keys, ..welcome.clone() }));
        }
        if group.is_some() {
            job.state = State::Probing;
            return Ok(Joined::Probe);
        }
        self.run(name);
        Ok(Joined::Ready)
    }

    /// Slots that each stream of a job is granted: its share of the packet buffers, at most what
    /// it asks for.
    fn slots(&self, job: &Job) -> u32 {
        let share = self.config.buffers() / usize::from(self.config.max_jobs);
        let per_slot = usize::from(job.lanes) * (usize::from(job.world) + 1);
        let affordable = u32::try_from(share / per_slot).unwrap_or(u32::MAX);
        let asked = job.members.iter().flatten().map(|member| member.join.pool_slots);
        let asked = asked.filter(|slots| *slots > 0).min().unwrap_or(u32::MAX);
        affordable.min(asked).min(self.config.pool_slots)
    }

    /// How often a group is to be probed.
    pub(crate) const fn probes(&self) -> u32 {
        match self.config.fanout {
            Fanout::Multicast => DEMANDED_PROBES,
            Fanout::Auto | Fanout::Unicast => PROBES,
        }
    }

    /// The job of a seat, unless it is gone.
    fn job(&mut self, seat: &Seat) -> Option<&mut Job> {
        self.jobs.get_mut(&seat.job).filter(|job| job.id == seat.id)
    }

    /// Sends one probe to the group of a job that is being probed. Returns false once it is not.
    pub(crate) fn probe(&mut self, seat: &Seat) -> bool {
        let probing = self.job(seat).is_some_and(|job| job.state == State::Probing);
        if let Some(shard) = self.shards.first().filter(|_| probing) {
            shard.tell(Command::Probe(seat.id));
        }
        probing
    }

    /// Notes that a rank hears the group; the job runs once all that listen do.
    pub(crate) fn heard(&mut self, seat: &Seat) {
        let Some(job) = self.job(seat) else { return };
        if let Some(member) = &mut job.members[usize::from(seat.rank)] {
            member.hears = true;
        }
        let mut listening = job.members.iter().flatten().filter(|member| member.join.multicast);
        if job.state == State::Probing && listening.all(|member| member.hears) {
            self.run(&seat.job);
        }
    }

    /// Ends the probing of a job: who has not heard the group is sent copies, or refused.
    pub(crate) fn end_probe(&mut self, seat: &Seat) {
        let demanded = self.config.fanout == Fanout::Multicast;
        let Some(job) = self.job(seat).filter(|job| job.state == State::Probing) else { return };
        let deaf = job.members.iter().flatten().find(|member| !member.hears);
        match deaf.filter(|_| demanded).map(Member::unreached) {
            Some(reason) => self.refuse_all(&seat.job, &reason),
            None => self.run(&seat.job),
        }
    }

    fn run(&mut self, name: &str) {
        let Some(job) = self.jobs.get_mut(name) else { return };
        job.state = State::Running;
        let hears = job.hears();
        for shard in &self.shards {
            shard.tell(Command::Listeners(job.id, hears.clone()));
        }
        for member in job.members.iter().flatten() {
            member.tell(FromAggregator::Ready { multicast: member.hears });
        }
        tracing::info!(job = name, world = job.world, id = job.id.0, "job runs");
    }

    fn refuse_all(&mut self, name: &str, reason: &str) {
        if let Some(job) = self.jobs.remove(name) {
            for member in job.members.iter().flatten() {
                member.tell(FromAggregator::Refused { reason: reason.to_owned() });
            }
            self.forget(job.id);
        }
    }

    /// The ranks that a job lacks; empty when it has started. A job that has gathered for too
    /// long ends here: those who came are told who did not.
    pub(crate) fn missing(&mut self, seat: &Seat, now: Instant) -> Vec<u16> {
        let patience = Duration::from_secs(self.config.join_timeout_s.into());
        let Some(job) = self.job(seat).filter(|job| job.state == State::Gathering) else {
            return Vec::new();
        };
        let absent = job.members.iter().zip(0..).filter(|(member, _)| member.is_none());
        let missing: Vec<u16> = absent.map(|(_, rank)| rank).collect();
        if now.saturating_duration_since(job.opened) < patience {
            return missing;
        }
        let names: Vec<_> = missing.iter().map(u16::to_string).collect();
        let reason = format!(
            "job {:?} has waited {} s for rank{} {}; start what is missing, or raise \
             --join-timeout-s at the aggregator",
            seat.job,
            patience.as_secs(),
            if names.len() == 1 { "" } else { "s" },
            names.join(", ")
        );
        self.refuse_all(&seat.job, &reason);
        Vec::new()
    }

    /// A rank is gone: cleanly, or lost. A running job that loses a rank is over for all.
    pub(crate) fn leave(&mut self, seat: &Seat, clean: bool) {
        let (name, rank) = (&seat.job, seat.rank);
        let Some(job) = self.job(seat) else { return };
        job.members[usize::from(rank)] = None;
        if !clean && job.state != State::Gathering {
            for member in job.members.iter().flatten() {
                member.tell(FromAggregator::PeerLost { ranks: vec![rank] });
            }
            tracing::warn!(job = name, rank, "rank lost");
        }
        if job.members.iter().all(Option::is_none) {
            self.jobs.remove(name);
            self.forget(seat.id);
            tracing::info!(job = name, "job ended");
        }
    }

    fn forget(&self, id: JobId) {
        for shard in &self.shards {
            shard.tell(Command::Remove(id));
        }
    }
}

impl Job {
    /// Checks that a join fits what the job was opened with.
    fn check(&self, join: &Join) -> Result<(), String> {
        let name = &join.job;
        if self.state != State::Gathering {
            return Err(format!(
                "job {name:?} is running: its {} ranks have joined; choose another --job, or wait \
                 until it has ended (a rank that died is missed after 10 s)",
                self.world
            ));
        }
        for (what, mine, theirs) in [
            ("world", u64::from(self.world), u64::from(join.world)),
            ("lanes", u64::from(self.lanes), u64::from(join.lanes)),
            ("aggregators", u64::from(self.stripe.1), u64::from(join.stripe.1)),
            ("place among aggregators", u64::from(self.stripe.0), u64::from(join.stripe.0)),
            ("generation", u64::from(self.generation.0), u64::from(join.generation.0)),
        ] {
            if mine != theirs {
                return Err(format!(
                    "job {name:?} was opened with {what} {mine}, but rank {} says {theirs}",
                    join.rank
                ));
            }
        }
        Ok(())
    }

    /// Who hears the group, by rank; one that is gone hears nothing.
    fn hears(&self) -> Vec<bool> {
        let hears = |member: &Option<Member>| member.as_ref().is_some_and(|member| member.hears);
        self.members.iter().map(hears).collect()
    }

    fn data_addrs(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        let members = self.members.iter().flatten();
        members.map(|member| member.addr)
    }

    /// What the job is granted: for its ranks, and for each shard.
    fn grant(
        &self,
        pool_slots: u32,
        auth: DataAuth,
        handles: &[ShardHandle],
    ) -> Result<(Welcome, Vec<JobConfig>), String> {
        if pool_slots < 2 {
            return Err(format!(
                "{} ranks with {} lanes need more packet buffers than a job's share; raise \
                 --pool-mib or lower --max-jobs at the aggregator",
                self.world, self.lanes
            ));
        }
        let joins = || self.members.iter().flatten().map(|member| &member.join);
        let datagram = joins().map(|join| usize::from(join.max_datagram)).min().unwrap_or(0);
        let payload = datagram.saturating_sub(Header::LEN + DataAuth::MAX_TRAILER);
        let payload = payload.min(WINDOW_BYTES);
        let cut = Fragmentation::new(payload).ok_or_else(|| {
            format!("datagrams of {datagram} bytes are too small; the MTU must be 1280 or more")
        })?;
        let cut = cut.with_trailer(auth);
        let lowest = joins().map(|join| join.receive_buffer).min().unwrap_or(0) as usize;
        let receive = handles.iter().map(|shard| shard.receive_buffer).min().unwrap_or(0);
        let most = if payload == WINDOW_BYTES { MAX_LOCAL_IN_FLIGHT } else { usize::MAX };
        let in_flight = (receive / usize::from(self.world)).clamp(2 * WINDOW_BYTES, most);
        let mine = u8::try_from(handles.len()).unwrap_or(u8::MAX);
        let (place, aggregators) = self.stripe;
        let shards = mine.checked_mul(aggregators).ok_or_else(|| {
            format!("{aggregators} aggregators of {mine} shards are more shards than 255")
        })?;
        let first = mine * place;
        let welcome = Welcome {
            job: self.id,
            data_ports: handles.iter().map(|shard| shard.addr.port()).collect(),
            pool_slots,
            max_ops: MAX_OPS,
            fragment_payload: u16::try_from(cut.payload()).unwrap_or(u16::MAX),
            in_flight: u32::try_from(in_flight).unwrap_or(u32::MAX),
            group: None,
            data_auth: auth,
            keys: None,
        };
        let config = |shard| JobConfig {
            job: self.id,
            generation: self.generation,
            world: self.world,
            lanes: self.lanes,
            shard,
            shards,
            pool_slots,
            max_ops: MAX_OPS,
            cut,
            // The results of all streams meet in each rank's receive buffer.
            results_in_flight: lowest / usize::from(shards) / usize::from(self.lanes.max(1)) / 2,
        };
        Ok((welcome, (first..first + mine).map(config).collect()))
    }
}

impl Member {
    /// Why this rank is no rank of a job that demands multicast.
    fn unreached(&self) -> String {
        format!(
            "multicast does not reach rank {} at {}; start the aggregator with --fanout auto or \
             unicast",
            self.join.rank,
            self.addr.ip()
        )
    }

    /// Tells the rank something. One that does not read is given up by its connection's task.
    fn tell(&self, message: FromAggregator) {
        if self.tell.try_send(message).is_err() {
            tracing::warn!(rank = self.join.rank, "the rank does not read its messages");
        }
    }
}

/// The group that a job's results are multicast to: by job within an aggregator, by port between
/// aggregators of one network.
fn group_of(id: JobId, shard: SocketAddr) -> SocketAddr {
    let [a, b, c, d] = id.0.to_be_bytes();
    let ip = match shard.ip() {
        // Organisation-local scope, RFC 2365.
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::new(239, 192 + b % 4, c, d)),
        // Link-local scope, transient, RFC 4291.
        IpAddr::V6(_) => {
            let (high, low) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
            IpAddr::V6(Ipv6Addr::new(0xff12, 0, 0, 0, 0, 0x7273, high, low))
        }
    };
    SocketAddr::new(ip, shard.port())
}

#[cfg(test)]
mod tests;
