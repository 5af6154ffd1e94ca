//! The problem that a search solves: seats, links and traffic as plain numbers.

use std::ops::{Range, RangeInclusive};

use crate::inventory::Host;
use crate::job::{Job, MOST_AGGREGATORS, Selector, Setting, selects};
use crate::network::Links;
use crate::placement::Placement;
use crate::topology::{HostId, Topology, VertexId};

/// A job on a topology: where its ranks and aggregators may be, and how much they send.
#[derive(Debug, Clone)]
pub struct Problem<'a> {
    pub(crate) topology: &'a Topology,
    pub(crate) links: &'a Links,
    pub(crate) traffic: Traffic,
    /// Per host: why no rank or aggregator may use it, or how many may.
    pub(crate) seats: Vec<Seats>,
    /// Per vertex: the greatest number of ranks in its subtree that the job allows.
    pub(crate) limits: Vec<u32>,
    /// Per vertex: the number of ranks for which its subtree has seats.
    pub(crate) rooms: Vec<u32>,
    /// The depth of the narrowest domains to which the job may be confined.
    pub(crate) scope: usize,
    /// The depth of the domains of which none may hold aggregators of two sets.
    pub(crate) standby_depth: usize,
    pub(crate) job: Job,
}

/// The bytes that a job sends in one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Traffic {
    pub(crate) ranks: u32,
    pub(crate) aggregators: u32,
    /// Bytes that a rank sends to all aggregators together.
    pub(crate) contribution: f64,
    /// Bytes of the sum that a rank receives.
    pub(crate) result: f64,
    pub(crate) is_multicast: bool,
}

/// The seats of a host for ranks and aggregators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seats {
    /// Seats for ranks, if no aggregator is there.
    pub(crate) ranks: u32,
    /// Seats for aggregators, if no rank is there.
    pub(crate) aggregators: u32,
    /// CPU cores that ranks and aggregators share.
    cpus: u32,
    /// The reason why the host takes no rank, if it does not.
    pub(crate) excluded: Option<Exclusion>,
}

/// The reason why a host takes no rank of a job.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Exclusion {
    /// The host has a taint that the job does not tolerate.
    #[error("taint {0:?} is not tolerated")]
    Taint(String),
    /// The host matches no selector of `only`.
    #[error("no selector of `only` matches")]
    NotSelected,
    /// The host matches a selector of `except`.
    #[error("a selector of `except` matches")]
    Excepted,
    /// The host has too few free GPUs for one rank.
    #[error("free GPUs of one type that the job uses: {free} of the {needed} that a rank needs")]
    Gpus {
        /// The greatest number of free GPUs of one type that ranks of the job can use.
        free: u32,
        /// GPUs per rank.
        needed: u32,
    },
    /// The host has too few free CPU cores for one rank.
    #[error("free CPU cores: {free} of the {needed} that a rank needs")]
    Cpus {
        /// Free cores.
        free: u32,
        /// Cores per rank.
        needed: u32,
    },
}

/// The error for a job that no placement can satisfy because its own numbers are wrong.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum JobError {
    /// A value is outside its range.
    #[error("job {job:?}: {field} is {value}; it must be {range}")]
    Value {
        /// The job's name.
        job: String,
        /// The name of the field.
        field: &'static str,
        /// The value given.
        value: f64,
        /// The range of valid values.
        range: &'static str,
    },
    /// The job's name is empty or has control characters.
    #[error("the job's name is {job:?}; give it a name without control characters")]
    Name {
        /// The job's name.
        job: String,
    },
    /// The job must stay in a domain of its scope, and has no scope.
    #[error("job {job:?}: requires_scope is true, but scope is missing; name a level")]
    NoScope {
        /// The job's name.
        job: String,
    },
    /// The job has racks, and something that does not work with these.
    #[error("job {job:?}: racks is true, so {rule}")]
    Racks {
        /// The job's name.
        job: String,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// The number of aggregators is left to the planner, and nothing has chosen it yet.
    #[error("job {job:?}: aggregators is auto; choose a number first")]
    Undecided {
        /// The job's name.
        job: String,
    },
    /// An aggregator has more shards, which are threads, than CPU cores.
    #[error(
        "job {job:?}: shards is {shards}, but cpus_per_aggregator is {cores}; give each \
         shard a core"
    )]
    Shards {
        /// The job's name.
        job: String,
        /// The shards of an aggregator.
        shards: u32,
        /// The cores of an aggregator.
        cores: u32,
    },
    /// The job names a level for its standbys, and has no standby.
    #[error("job {job:?}: standby_level is given, but standbys is 0; raise standbys")]
    NoStandbys {
        /// The job's name.
        job: String,
    },
    /// The job names a level that the inventory does not have.
    #[error("job {job:?}: unknown level {level:?}; {}", known_levels(known))]
    Level {
        /// The job's name.
        job: String,
        /// The level given.
        level: String,
        /// The levels of the inventory.
        known: Vec<String>,
    },
}

impl<'a> Problem<'a> {
    /// Combines a job with a topology and its links.
    ///
    /// # Errors
    /// If a number of the job is outside its range, or a level is unknown.
    pub fn new(topology: &'a Topology, links: &'a Links, job: &Job) -> Result<Self, JobError> {
        let seats = topology.hosts().iter().map(|host| Seats::of(host, job)).collect();
        Self::with_seats(topology, links, job, seats)
    }

    /// Like [`Self::new`], as if no other job used GPUs or CPU cores.
    pub(crate) fn without_other_jobs(
        topology: &'a Topology,
        links: &'a Links,
        job: &Job,
    ) -> Result<Self, JobError> {
        let seats = topology.hosts().iter().map(|host| Seats::of(&host.freed(), job)).collect();
        Self::with_seats(topology, links, job, seats)
    }

    fn with_seats(
        topology: &'a Topology,
        links: &'a Links,
        job: &Job,
        seats: Vec<Seats>,
    ) -> Result<Self, JobError> {
        let aggregators = check(job)?;
        let limits = limits(topology, job)?;
        let scope = job.scope.as_ref().and_then(|scope| topology.depth_of(scope));
        Ok(Self {
            topology,
            links,
            traffic: Traffic::of(job, aggregators),
            rooms: rooms(topology, &seats, &limits),
            seats,
            limits,
            scope: scope.unwrap_or_else(|| topology.levels().len()),
            standby_depth: standby_depth(topology, job)?,
            job: job.clone(),
        })
    }

    /// Returns the depths of the domains that the job may use, the narrowest last.
    pub(crate) fn depths(&self) -> RangeInclusive<usize> {
        if self.job.requires_scope { self.scope..=self.scope } else { 0..=self.scope }
    }

    /// Returns the number of ranks for which the domains that the job may use have room.
    pub(crate) fn room(&self) -> u32 {
        let widest = self.topology.domains(*self.depths().start());
        widest.map(|domain| self.rooms[domain.0]).max().unwrap_or(0)
    }

    /// Returns this problem with other rates of the links.
    pub(crate) fn with_links<'b>(&self, links: &'b Links) -> Problem<'b>
    where
        'a: 'b,
    {
        let problem: Problem<'b> = self.clone();
        Problem { links, ..problem }
    }

    /// Returns this problem for a job that sends as little as there is.
    pub(crate) fn with_few_bytes(&self) -> Self {
        let job = Job { bytes: 1, ..self.job.clone() };
        let traffic = Traffic::of(&job, self.traffic.aggregators);
        Self { job, traffic, ..self.clone() }
    }

    /// Returns whether racks may have aggregators of their own. These do not work with several
    /// roots or with standbys.
    pub(crate) fn may_have_racks(&self) -> bool {
        let has_one_root = self.traffic.aggregators == 1 && self.job.standbys == 0;
        self.job.racks != Setting::Given(false) && has_one_root
    }

    /// Returns this problem without the limits on the ranks of domains above a depth.
    pub(crate) fn without_limits_above(&self, depth: usize) -> Self {
        let mut problem = self.clone();
        for (vertex, limit) in problem.limits.iter_mut().enumerate() {
            if self.topology.depth(VertexId(vertex)) < depth {
                *limit = self.traffic.ranks;
            }
        }
        problem.rooms = rooms(self.topology, &problem.seats, &problem.limits);
        problem
    }

    /// Returns this problem with other seats. The change takes a host and its seats.
    pub(crate) fn with_changed_seats(&self, change: impl Fn(usize, &mut Seats)) -> Self {
        let mut problem = self.clone();
        problem.seats.iter_mut().enumerate().for_each(|(host, seats)| change(host, seats));
        problem.rooms = rooms(self.topology, &problem.seats, &problem.limits);
        problem
    }

    /// Returns this problem with the seats that another one has on some hosts.
    pub(crate) fn with_seats_of(&self, other: &Self, hosts: Range<usize>) -> Self {
        let mut problem = self.clone();
        problem.seats[hosts.clone()].clone_from_slice(&other.seats[hosts]);
        problem.rooms = rooms(self.topology, &problem.seats, &problem.limits);
        problem
    }

    /// Returns the number of ranks that a host can take beside this many aggregators.
    pub(crate) fn ranks_beside(&self, host: usize, aggregators: u32) -> u32 {
        let (seats, job) = (&self.seats[host], &self.job);
        if aggregators == 0 {
            return seats.ranks;
        }
        if job.has_dedicated_aggregators {
            return 0;
        }
        let taken = aggregators.saturating_mul(job.cpus_per_aggregator);
        let by_cpus = seats.cpus.saturating_sub(taken).checked_div(job.cpus_per_rank);
        seats.ranks.min(by_cpus.unwrap_or(u32::MAX))
    }

    /// Returns whether a placement keeps to the seats and limits of the problem.
    #[must_use]
    pub fn allows(&self, placement: &Placement) -> bool {
        let Placement { ranks, aggregators } = placement;
        let within_limit = |vertex: usize| {
            let hosts = self.topology.hosts_of(VertexId(vertex));
            ranks[hosts].iter().sum::<u32>() <= self.limits[vertex]
        };
        self.has_seats_for(placement)
            && ranks.iter().sum::<u32>() == self.traffic.ranks
            && aggregators.iter().sum::<u32>() == self.traffic.aggregators
            && (0..self.limits.len()).all(within_limit)
    }

    /// Returns whether each host has seats for its ranks and aggregators of a placement.
    pub(crate) fn has_seats_for(&self, placement: &Placement) -> bool {
        let Placement { ranks, aggregators } = placement;
        let mut placed = ranks.iter().zip(aggregators).enumerate();
        placed.all(|(host, (&ranks, &aggregators))| {
            aggregators <= self.seats[host].aggregators
                && ranks <= self.ranks_beside(host, aggregators)
        })
    }

    /// Returns whether a host and the one before it in the domain can be exchanged without any
    /// effect.
    pub(crate) fn is_like_previous(&self, domain: VertexId, host: usize) -> bool {
        if self.topology.hosts_of(domain).start == host || self.links.has_pairs() {
            return false;
        }
        let (one, other) = (HostId(host - 1), HostId(host));
        let (leaf, other_leaf) = (self.topology.leaf(one), self.topology.leaf(other));
        let (seats, other_seats) = (&self.seats[one.0], &self.seats[other.0]);
        self.topology.parent(leaf) == self.topology.parent(other_leaf)
            && self.limits[leaf.0] == self.limits[other_leaf.0]
            && seats.ranks == other_seats.ranks
            && seats.aggregators == other_seats.aggregators
            && seats.cpus == other_seats.cpus
            && self.links.are_alike(leaf, other_leaf)
    }
}

impl Traffic {
    fn of(job: &Job, aggregators: u32) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "a step has far fewer than 2^53 bytes")]
        let bytes = job.bytes as f64 * OVERHEAD;
        Self {
            ranks: job.ranks,
            aggregators,
            contribution: bytes * job.own_density,
            result: bytes * job.union_density,
            is_multicast: job.is_multicast,
        }
    }

    /// Returns the copies of a result that a link carries to `ranks` ranks behind it.
    pub(crate) fn copies(self, ranks: u32) -> f64 {
        f64::from(if self.is_multicast { ranks.min(1) } else { ranks })
    }

    /// Returns the share of the windows that this many aggregators sum.
    pub(crate) fn share(self, aggregators: u32) -> f64 {
        f64::from(aggregators) / f64::from(self.aggregators)
    }

    /// Returns the bytes that leave a subtree in a step, given the ranks and aggregators in it.
    pub(crate) fn up(self, ranks: u32, aggregators: u32) -> f64 {
        let share = self.share(aggregators);
        let contributions = f64::from(ranks) * (1.0 - share) * self.contribution;
        self.copies(self.ranks - ranks).mul_add(share * self.result, contributions)
    }

    /// Returns the bytes that enter a subtree in a step, given the ranks and aggregators in it.
    pub(crate) fn down(self, ranks: u32, aggregators: u32) -> f64 {
        let share = self.share(aggregators);
        let contributions = f64::from(self.ranks - ranks) * share * self.contribution;
        self.copies(ranks).mul_add((1.0 - share) * self.result, contributions)
    }
}

impl Seats {
    fn of(host: &Host, job: &Job) -> Self {
        let excluded = barred(host, job);
        if excluded.is_some() {
            return Self { ranks: 0, aggregators: 0, cpus: 0, excluded };
        }
        let cpus = host.cpus.free();
        let aggregators = cpus.checked_div(job.cpus_per_aggregator);
        let most = job.aggregators.given().unwrap_or(MOST_AGGREGATORS);
        let aggregators = aggregators.unwrap_or(most).min(most);
        let aggregators = aggregators.min(host.max_aggregators.unwrap_or(u32::MAX));
        let (gpus, needed) = (free_gpus(host, job), job.gpus_per_rank);
        let by_gpus = gpus.checked_div(needed).unwrap_or(u32::MAX);
        let by_cpus = cpus.checked_div(job.cpus_per_rank).unwrap_or(u32::MAX);
        let excluded = if by_gpus == 0 {
            let usable = host.gpus.iter().filter(|(name, _)| job.uses_gpu(name));
            let free = usable.map(|(_, gpus)| gpus.free()).max().unwrap_or(0);
            Some(Exclusion::Gpus { free, needed })
        } else if by_cpus == 0 {
            Some(Exclusion::Cpus { free: cpus, needed: job.cpus_per_rank })
        } else {
            None
        };
        let limit = job.max_ranks_per_host.unwrap_or(u32::MAX);
        let ranks = by_gpus.min(by_cpus).min(limit).min(job.ranks);
        Self { ranks, aggregators, cpus, excluded }
    }
}

/// Returns why a host may serve neither ranks nor aggregators of a job.
fn barred(host: &Host, job: &Job) -> Option<Exclusion> {
    if let Some(taint) = host.taints.iter().find(|taint| !job.tolerates.contains(taint)) {
        return Some(Exclusion::Taint(taint.clone()));
    }
    let matches = |selector: &Selector| selects(selector, host);
    if !job.only.is_empty() && !job.only.iter().any(matches) {
        return Some(Exclusion::NotSelected);
    }
    job.except.iter().any(matches).then_some(Exclusion::Excepted)
}

/// Returns the free GPUs of a host that ranks of a job can use. A rank uses GPUs of one type, so
/// what is left over of each type does not count.
pub(crate) fn free_gpus(host: &Host, job: &Job) -> u32 {
    let usable = host.gpus.iter().filter(|(name, _)| job.uses_gpu(name));
    let free = usable.map(|(_, gpus)| gpus.free());
    let needed = job.gpus_per_rank.max(1);
    free.map(|free| free - free % needed).fold(0, u32::saturating_add)
}

/// Returns the depth of a level that a job names.
fn depth_of(topology: &Topology, job: &Job, level: &str) -> Result<usize, JobError> {
    topology.depth_of(level).ok_or_else(|| JobError::Level {
        job: job.name.clone(),
        level: level.into(),
        known: topology.levels().to_vec(),
    })
}

/// Returns the depth of the domains of which none may hold aggregators of two sets.
fn standby_depth(topology: &Topology, job: &Job) -> Result<usize, JobError> {
    let innermost = topology.levels().len();
    match &job.standby_level {
        Some(_) if job.standbys == 0 => Err(JobError::NoStandbys { job: job.name.clone() }),
        Some(level) if level == "host" => Ok(innermost + 1),
        Some(level) => depth_of(topology, job, level),
        None => Ok(if innermost == 0 { 1 } else { innermost }),
    }
}

/// Returns the greatest number of ranks in each subtree.
fn limits(topology: &Topology, job: &Job) -> Result<Vec<u32>, JobError> {
    match &job.scope {
        Some(scope) => _ = depth_of(topology, job, scope)?,
        None if job.requires_scope => return Err(JobError::NoScope { job: job.name.clone() }),
        None => {}
    }
    let mut limits = vec![job.ranks; topology.vertices()];
    for (level, limit) in &job.max_ranks_per_domain {
        let depth = depth_of(topology, job, level)?;
        for (vertex, found) in limits.iter_mut().enumerate() {
            if topology.depth(VertexId(vertex)) == depth {
                *found = job.ranks.min(*limit);
            }
        }
    }
    // A search in a domain sees no limit of a wider one.
    for vertex in 1..limits.len() {
        let parent = topology.parent(VertexId(vertex)).unwrap_or(Topology::ROOT);
        limits[vertex] = limits[vertex].min(limits[parent.0]);
    }
    Ok(limits)
}

/// Returns the number of ranks for which each subtree has seats.
fn rooms(topology: &Topology, seats: &[Seats], limits: &[u32]) -> Vec<u32> {
    let mut rooms = vec![0u32; limits.len()];
    for (host, seats) in seats.iter().enumerate() {
        rooms[topology.leaf(HostId(host)).0] = seats.ranks;
    }
    for vertex in (0..limits.len()).rev() {
        rooms[vertex] = rooms[vertex].min(limits[vertex]);
        if let Some(parent) = topology.parent(VertexId(vertex)) {
            rooms[parent.0] = rooms[parent.0].saturating_add(rooms[vertex]);
        }
    }
    rooms
}

fn known_levels(known: &[String]) -> String {
    if known.is_empty() {
        "the inventory has no levels".into()
    } else {
        format!("the inventory has {}", known.join(", "))
    }
}

/// Checks the numbers of a job. Returns the number of its aggregators.
fn check(job: &Job) -> Result<u32, JobError> {
    let undecided = || JobError::Undecided { job: job.name.clone() };
    let aggregators = job.aggregators.given().ok_or_else(undecided)?;
    let share = 0.0..=1.0;
    let at_least_one = "at least 1";
    let is_plain = !job.name.is_empty() && !job.name.contains(char::is_control);
    if !is_plain {
        return Err(JobError::Name { job: job.name.clone() });
    }
    let a_share = "a number from 0 to 1";
    #[expect(clippy::cast_precision_loss, reason = "only zero is rejected")]
    let bytes = job.bytes as f64;
    let checks: [(_, f64, bool, _); 7] = [
        ("standbys", job.standbys.into(), job.standbys <= MOST_STANDBYS, "from 0 to 8"),
        ("ranks", job.ranks.into(), (1..=MOST_RANKS).contains(&job.ranks), "from 1 to 65536"),
        (
            "aggregators",
            aggregators.into(),
            (1..=MOST_AGGREGATORS).contains(&aggregators),
            "from 1 to 1024",
        ),
        ("bytes", bytes, job.bytes > 0, at_least_one),
        ("own_density", job.own_density, share.contains(&job.own_density), a_share),
        ("widen_gain", job.widen_gain, share.contains(&job.widen_gain), a_share),
        (
            "union_density",
            job.union_density,
            (job.own_density..=1.0).contains(&job.union_density),
            "a number from own_density to 1",
        ),
    ];
    for (field, value, is_valid, range) in checks {
        if !is_valid {
            return Err(JobError::Value { job: job.name.clone(), field, value, range });
        }
    }
    if job.racks == Setting::Given(true) {
        let (standbys, job) = (job.standbys, || job.name.clone());
        if aggregators != 1 {
            return Err(JobError::Racks { job: job(), rule: "aggregators must be 1, the root" });
        }
        if standbys > 0 {
            return Err(JobError::Racks { job: job(), rule: "standbys must be 0" });
        }
    }
    if let Some(shards) = job.shards {
        let cores = job.cpus_per_aggregator;
        if !(1..=MOST_SHARDS).contains(&shards) {
            let (value, range) = (shards.into(), "from 1 to 64");
            return Err(JobError::Value { job: job.name.clone(), field: "shards", value, range });
        }
        if cores > 0 && shards > cores {
            return Err(JobError::Shards { job: job.name.clone(), shards, cores });
        }
    }
    Ok(aggregators)
}

/// The greatest number of shards of an aggregator.
pub(crate) const MOST_SHARDS: u32 = 64;
/// The greatest number of ranks of a job.
const MOST_RANKS: u32 = 65_536;
/// The greatest number of standbys of a job.
const MOST_STANDBYS: u32 = 8;
/// Headers and packing add at most this factor to the bytes of an op (invariant I3).
pub(crate) const OVERHEAD: f64 = 1.06;
