//! The queue of jobs that wait for room.
//!
//! Tenants take turns round by round, so a tenant with many waiting jobs does not keep out a tenant
//! with a single one. Jobs that move here from another aggregator go first, since their ranks have
//! work in flight. No job can prove that it moves, so only [`MOST_FIRST`] jobs of a tenant go
//! first; its other moving jobs take turns with all other jobs. A job's turn comes once there is
//! room for it in addition to all earlier jobs whose turn has come. A job that does not fit does
//! not keep out other jobs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use racksum_proto::control::Join;
use racksum_proto::job_name::JobName;
use tokio::sync::Notify;

use crate::admit_rule::rule_of;
use crate::config::Config;
use crate::network::network;
use crate::quotas::{Tally, Tenant};

/// The maximum number of waiting ranks: as many as 16 of the largest jobs have.
pub(crate) const MAX_WAITING: usize = 4096;
/// The maximum number of waiting ranks of one identity, of one rule, or from one address.
pub(crate) const MAX_WAITING_EACH: usize = 1024;
/// The maximum number of a tenant's moving jobs that go first until other tenants have had a turn.
/// It covers all jobs that fail over from two aggregators at once, if both have the default
/// `max_jobs`.
const MOST_FIRST: u64 = 16;
/// The maximum number of flows whose last round is remembered.
const MAX_SERVED: usize = 4096;

/// The jobs that wait for room.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    jobs: BTreeMap<Position, Waiting>,
    positions: BTreeMap<Key, Position>,
    /// The number of waiting ranks in each category.
    counts: BTreeMap<Common, usize>,
    /// The current round. Each job that is served in turn advances it, but not past a job that
    /// still waits for its round. It also advances when too many flows are remembered.
    round: u64,
    /// The last round in which each flow was served, unless that round is over. Empty while no job
    /// waits.
    served: BTreeMap<Flow, u64>,
    arrivals: u64,
}

/// A job's place in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Position {
    /// Whether the job waits for its round. False sorts first, so jobs that need not wait are
    /// ahead.
    in_turn: bool,
    /// The job's round. Each further job of a flow gets a later round.
    round: u64,
    arrival: u64,
}

/// The key that groups the waiting ranks of a job. Ranks of one job that different rules admit wait
/// separately, since one of these rules may have room while another has none.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    name: JobName,
    rule: Option<usize>,
    moves: bool,
}

/// A flow: a tenant's new jobs, or its moving jobs. Each job of a flow is in a later round than the
/// flow's previous job.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Flow {
    tenant: Common,
    moves: bool,
}

/// A category by which waiting ranks are counted.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Common {
    All,
    Identity(String),
    Rule(usize),
    Address(IpAddr),
}

#[derive(Debug)]
struct Waiting {
    key: Key,
    flow: Flow,
    identity: Option<String>,
    /// The index of the rule that currently admits the job.
    rule: Option<usize>,
    world: u16,
    lanes: u8,
    /// The number of the job's ranks that wait.
    ranks: usize,
    /// Whether the job's turn has come.
    called: bool,
    /// The number of jobs that are served before this one.
    before: usize,
    room: Arc<Notify>,
}

/// A waiting rank's ticket, with which it leaves the queue.
#[derive(Debug)]
pub(crate) struct Ticket {
    key: Key,
    counted: Vec<Common>,
    /// Notifies the rank that there may be room.
    pub(crate) room: Arc<Notify>,
}

impl Queue {
    /// Adds to the queue a rank that calls from `addr`.
    ///
    /// # Errors
    /// Too many ranks are already waiting.
    pub(crate) fn enter(
        &mut self,
        config: &Config,
        join: &Join,
        identity: Option<&str>,
        addr: IpAddr,
    ) -> Result<Ticket, String> {
        let key = Key::of(config, join, identity);
        let of_identity = identity.map(|name| Common::Identity(name.to_owned()));
        let (rule, address) = (key.rule.map(Common::Rule), Common::Address(network(addr)));
        let counted = [Some(Common::All), of_identity, rule, Some(address)];
        let counted: Vec<_> = counted.into_iter().flatten().collect();
        for common in &counted {
            let (most, whose) = match common {
                Common::All => (MAX_WAITING, "".to_owned()),
                Common::Identity(name) => (MAX_WAITING_EACH, format!(" of identity {name:?}")),
                Common::Rule(_) => (MAX_WAITING_EACH, " of your [[admit]] rule".into()),
                Common::Address(addr) => (MAX_WAITING_EACH, format!(" from {addr}")),
            };
            let waiting = self.counts.get(common).copied().unwrap_or(0);
            if waiting >= most {
                return Err(format!("{waiting} ranks{whose} are already waiting for room"));
            }
        }
        for common in &counted {
            *self.counts.entry(common.clone()).or_default() += 1;
        }
        let position = match self.positions.get(&key) {
            Some(position) => *position,
            None => self.append(&key, Flow::of(join, identity, addr), identity, join),
        };
        let waiting = self.jobs.get_mut(&position).expect("each position holds a waiting job");
        waiting.ranks += 1;
        Ok(Ticket { key, counted, room: Arc::clone(&waiting.room) })
    }

    fn append(&mut self, key: &Key, flow: Flow, identity: Option<&str>, join: &Join) -> Position {
        self.arrivals += 1;
        let position = Position { arrival: self.arrivals, ..self.last_position(&flow) };
        let waiting = Waiting {
            key: key.clone(),
            flow,
            identity: identity.map(str::to_owned),
            rule: key.rule,
            world: join.world,
            lanes: join.lanes,
            ranks: 0,
            called: false,
            before: 0,
            room: Arc::default(),
        };
        self.jobs.insert(position, waiting);
        self.positions.insert(key.clone(), position);
        position
    }

    /// Returns the position for one more job of a flow, after all other jobs of its round.
    fn last_position(&self, flow: &Flow) -> Position {
        let own = self.jobs.iter().filter(|(_, job)| job.flow == *flow);
        let last =
            own.map(|(position, _)| position.round).chain(self.served.get(flow).copied()).max();
        let round = self.round.max(last.map_or(0, |last| last + 1));
        let in_turn = !flow.moves || round >= self.round + MOST_FIRST;
        Position { in_turn, round, arrival: u64::MAX }
    }

    /// Notes that a job was opened for a rank that calls from `addr`, whether or not the rank has
    /// waited.
    pub(crate) fn note_served(
        &mut self,
        config: &Config,
        join: &Join,
        identity: Option<&str>,
        addr: IpAddr,
    ) {
        if self.jobs.is_empty() {
            return;
        }
        let own = self.positions.get(&Key::of(config, join, identity)).copied();
        let waiting =
            own.and_then(|position| Some((position, self.jobs.get(&position)?.flow.clone())));
        let (position, flow) = waiting.unwrap_or_else(|| {
            let flow = Flow::of(join, identity, addr);
            (self.last_position(&flow), flow)
        });
        if position.in_turn {
            // Do not advance the round past a job that still waits. A job that never had to wait
            // may be in a late round. If the round advanced that far, newcomers would wait behind
            // all earlier rounds of other tenants.
            let others = self.jobs.keys().filter(|other| other.in_turn && Some(**other) != own);
            let first = others.map(|other| other.round).min().unwrap_or(u64::MAX);
            self.round = self.round.max(position.round.min(first));
        }
        let last = self.served.entry(flow).or_default();
        *last = position.round.max(*last);
        self.forget_served();
    }

    /// Forgets flows that were last served in a past round, and ends rounds early while too many
    /// flows are remembered.
    fn forget_served(&mut self) {
        self.served.retain(|_, last| *last >= self.round);
        while self.served.len() > MAX_SERVED {
            let oldest = self.served.values().min().copied().unwrap_or(self.round);
            self.round = oldest + 1;
            self.served.retain(|_, last| *last >= self.round);
        }
    }

    /// Removes a waiting rank from the queue.
    pub(crate) fn leave(&mut self, ticket: &Ticket) {
        for common in &ticket.counted {
            if let Some(count) = self.counts.get_mut(common) {
                *count -= 1;
                if *count == 0 {
                    self.counts.remove(common);
                }
            }
        }
        let Some(position) = self.positions.get(&ticket.key).copied() else { return };
        let Some(waiting) = self.jobs.get_mut(&position) else { return };
        waiting.ranks -= 1;
        if waiting.ranks == 0 {
            self.jobs.remove(&position);
            self.positions.remove(&ticket.key);
        }
        if self.jobs.is_empty() {
            self.served.clear();
        }
    }

    /// Finds the jobs for which there is room in addition to the `held` jobs, and notifies their
    /// ranks. Call this whenever a job is added to or removed from the queue or the aggregator.
    pub(crate) fn call(&mut self, config: &Config, held: &[Tenant<'_>]) {
        let found = self.whose_turn(config, held);
        for (job, (called, before)) in self.jobs.values_mut().zip(found) {
            (job.called, job.before) = (called, before);
            if called {
                job.room.notify_waiters();
            }
        }
    }

    /// Returns for each waiting job whether its turn has come, and how many jobs are served before
    /// it.
    fn whose_turn(&self, config: &Config, held: &[Tenant<'_>]) -> Vec<(bool, usize)> {
        let mut tally = Tally::of(config, held);
        let mut there: BTreeSet<_> = held.iter().map(|tenant| tenant.name).collect();
        let mut before = 0;
        let mut found = Vec::with_capacity(self.jobs.len());
        for job in self.jobs.values() {
            let tenant = job.tenant();
            let own = tally.check_own(config, &tenant).is_ok();
            // A job that already runs, or that waits under two rules, counts once.
            let is_there = there.contains(&job.key.name);
            let called = is_there || own && tally.check(config, &tenant).is_ok();
            found.push((called, before));
            before += usize::from(own);
            if called && there.insert(&job.key.name) {
                tally.add(config, &tenant);
            }
        }
        found
    }

    /// Returns the jobs whose turn has come and that are ahead of a job whose rank now joins from
    /// `addr`.
    pub(crate) fn called_before(
        &self,
        config: &Config,
        join: &Join,
        identity: Option<&str>,
        addr: IpAddr,
    ) -> impl Iterator<Item = Tenant<'_>> {
        let own = self.positions.get(&Key::of(config, join, identity)).copied();
        let last = own.unwrap_or_else(|| self.last_position(&Flow::of(join, identity, addr)));
        // A job that has not waited comes after all jobs whose turn has come, unless it goes first.
        let is_after_all = own.is_none() && last.in_turn;
        let is_before = move |position: &Position| is_after_all || *position < last;
        let called =
            self.jobs.iter().filter(move |(position, job)| job.called && is_before(position));
        called.map(|(_, job)| job.tenant()).filter(|tenant| *tenant.name != join.job)
    }

    /// Returns whether the turn of a rank's job has come, and how many jobs are served before it.
    pub(crate) fn turn(&self, ticket: &Ticket) -> (bool, u16) {
        let waiting = self.positions.get(&ticket.key).and_then(|position| self.jobs.get(position));
        let before = |job: &Waiting| u16::try_from(job.before).unwrap_or(u16::MAX);
        waiting.map_or((true, 0), |job| (job.called, before(job)))
    }

    /// Applies new rules.
    pub(crate) fn reconfigure(&mut self, config: &Config) {
        for job in self.jobs.values_mut() {
            job.rule = rule_of(&config.admit, job.identity.as_deref(), &job.key.name.name);
        }
    }

    /// Wakes all waiting ranks so that each tries again.
    pub(crate) fn wake(&self) {
        self.jobs.values().for_each(|job| job.room.notify_waiters());
    }

    /// Returns the number of waiting ranks.
    #[cfg(test)]
    pub(crate) fn ranks(&self) -> usize {
        self.counts.get(&Common::All).copied().unwrap_or(0)
    }

    /// Returns the names of the waiting jobs, in queue order.
    pub(crate) fn names(&self) -> Vec<JobName> {
        self.jobs.values().map(|job| job.key.name.clone()).collect()
    }
}

impl Key {
    fn of(config: &Config, join: &Join, identity: Option<&str>) -> Self {
        let rule = rule_of(&config.admit, identity, &join.job.name);
        Self { name: join.job.clone(), rule, moves: join.resume.is_some() }
    }
}

impl Flow {
    fn of(join: &Join, identity: Option<&str>, addr: IpAddr) -> Self {
        let tenant = identity.map(|name| Common::Identity(name.to_owned()));
        let tenant = tenant.unwrap_or_else(|| Common::Address(network(addr)));
        Self { tenant, moves: join.resume.is_some() }
    }
}

impl Waiting {
    fn tenant(&self) -> Tenant<'_> {
        let Self { identity, rule, world, lanes, .. } = self;
        let (name, identity) = (&self.key.name, identity.as_deref());
        Tenant { name, identity, rule: *rule, world: *world, lanes: *lanes, granted: None }
    }
}

#[cfg(test)]
mod tests;
