//! The queue of jobs that wait for room.
//!
//! Tenants take turns round by round, so a tenant with many waiting jobs does not keep out a tenant
//! with a single one. Jobs that move here from another aggregator go first, since their ranks have
//! work in flight. No job can prove that it moves, so only [`MOST_FIRST`] jobs of a tenant go
//! first; further ones take turns with all others. A job has its turn when there is room for it
//! beside the earlier jobs that have their turn. A job without room keeps out no other job.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use racksum_proto::control::Join;
use racksum_proto::job_name::JobName;
use tokio::sync::Notify;

use crate::admission::rule_of;
use crate::config::Config;
use crate::network::network;
use crate::tenancy::{Tally, Tenant};

/// The maximum number of waiting ranks: those of 16 of the largest jobs.
pub(crate) const MAX_WAITING: usize = 4096;
/// The maximum number of waiting ranks of one identity, of one rule, or from one address.
pub(crate) const MAX_WAITING_EACH: usize = 1024;
/// The maximum number of a tenant's moving jobs that go first before other tenants have had a turn.
/// It covers all jobs that fail over from two aggregators at once, with the default `max_jobs` of
/// each.
const MOST_FIRST: u64 = 16;
/// The maximum number of lines with a remembered last round.
const MAX_SERVED: usize = 4096;

/// The jobs that wait for room.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    jobs: BTreeMap<Turn, Waiting>,
    turns: BTreeMap<Key, Turn>,
    /// The number of waiting ranks in each category.
    counts: BTreeMap<Common, usize>,
    /// The latest round in which a job was served, not counting jobs that went first. It is at most
    /// the round of every job that waits for its round.
    round: u64,
    /// The last round in which each line was served, unless that round is over. Empty while no job
    /// waits.
    served: BTreeMap<Line, u64>,
    arrivals: u64,
}

/// A job's place in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Turn {
    /// Whether the job waits for its round. False sorts first.
    in_turn: bool,
    /// The job's round. Each further job of a line gets a later round.
    round: u64,
    arrival: u64,
}

/// The key that groups the waiting ranks of a job. Ranks of one job that different rules admit wait
/// separately, since only one of the rules may have room.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    name: JobName,
    rule: Option<usize>,
    moves: bool,
}

/// A line of jobs: a tenant's new jobs, or its moving jobs. Each job of a line is in a later round.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Line {
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
    line: Line,
    identity: Option<String>,
    /// The index of the rule that currently admits the job.
    rule: Option<usize>,
    world: u16,
    lanes: u8,
    /// The number of its ranks that wait.
    ranks: usize,
    /// Whether there is room for the job.
    called: bool,
    /// The number of jobs that are served before this one.
    before: usize,
    room: Arc<Notify>,
}

/// A rank's place in the queue.
#[derive(Debug)]
pub(crate) struct Place {
    key: Key,
    counted: Vec<Common>,
    /// Notifies the rank that there may be room.
    pub(crate) room: Arc<Notify>,
}

impl Queue {
    /// Adds a rank that calls from `addr` to the queue.
    ///
    /// # Errors
    /// Too many ranks wait already.
    pub(crate) fn enter(
        &mut self,
        config: &Config,
        join: &Join,
        identity: Option<&str>,
        addr: IpAddr,
    ) -> Result<Place, String> {
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
                return Err(format!("{waiting} ranks{whose} already wait for room"));
            }
        }
        for common in &counted {
            *self.counts.entry(common.clone()).or_default() += 1;
        }
        let turn = match self.turns.get(&key) {
            Some(turn) => *turn,
            None => self.append(&key, Line::of(join, identity, addr), identity, join),
        };
        let waiting = self.jobs.get_mut(&turn).expect("appended above");
        waiting.ranks += 1;
        Ok(Place { key, counted, room: Arc::clone(&waiting.room) })
    }

    fn append(&mut self, key: &Key, line: Line, identity: Option<&str>, join: &Join) -> Turn {
        self.arrivals += 1;
        let turn = Turn { arrival: self.arrivals, ..self.last_turn(&line) };
        let waiting = Waiting {
            key: key.clone(),
            line,
            identity: identity.map(str::to_owned),
            rule: key.rule,
            world: join.world,
            lanes: join.lanes,
            ranks: 0,
            called: false,
            before: 0,
            room: Arc::default(),
        };
        self.jobs.insert(turn, waiting);
        self.turns.insert(key.clone(), turn);
        turn
    }

    /// Returns a turn for one more job of a line, after all other jobs of its round.
    fn last_turn(&self, line: &Line) -> Turn {
        let own = self.jobs.iter().filter(|(_, job)| job.line == *line);
        let last = own.map(|(turn, _)| turn.round).chain(self.served.get(line).copied()).max();
        let round = self.round.max(last.map_or(0, |last| last + 1));
        let in_turn = !line.moves || round >= self.round + MOST_FIRST;
        Turn { in_turn, round, arrival: u64::MAX }
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
        let own = self.turns.get(&Key::of(config, join, identity)).copied();
        let waiting = own.and_then(|turn| Some((turn, self.jobs.get(&turn)?.line.clone())));
        let (turn, line) = waiting.unwrap_or_else(|| {
            let line = Line::of(join, identity, addr);
            (self.last_turn(&line), line)
        });
        if turn.in_turn {
            // A job that fits at once may be of a late round. Jobs of earlier rounds keep their
            // places ahead of the next newcomer.
            let others = self.jobs.keys().filter(|other| other.in_turn && Some(**other) != own);
            let first = others.map(|other| other.round).min().unwrap_or(u64::MAX);
            self.round = self.round.max(turn.round.min(first));
        }
        let last = self.served.entry(line).or_default();
        *last = turn.round.max(*last);
        self.forget_served();
    }

    /// Forgets lines served in rounds that are over, and ends rounds while too many lines are
    /// remembered.
    fn forget_served(&mut self) {
        self.served.retain(|_, last| *last >= self.round);
        while self.served.len() > MAX_SERVED {
            let oldest = self.served.values().min().copied().unwrap_or(self.round);
            self.round = oldest + 1;
            self.served.retain(|_, last| *last >= self.round);
        }
    }

    /// Removes a waiting rank from the queue.
    pub(crate) fn leave(&mut self, place: &Place) {
        for common in &place.counted {
            if let Some(count) = self.counts.get_mut(common) {
                *count -= 1;
                if *count == 0 {
                    self.counts.remove(common);
                }
            }
        }
        let Some(turn) = self.turns.get(&place.key).copied() else { return };
        let Some(waiting) = self.jobs.get_mut(&turn) else { return };
        waiting.ranks -= 1;
        if waiting.ranks == 0 {
            self.jobs.remove(&turn);
            self.turns.remove(&place.key);
        }
        if self.jobs.is_empty() {
            self.served.clear();
        }
    }

    /// Finds the jobs that have their turn beside the `held` jobs, and notifies their ranks. Called
    /// whenever a job is added or removed, here or at the aggregator.
    pub(crate) fn call(&mut self, config: &Config, held: &[Tenant<'_>]) {
        let found = self.whose_turn(config, held);
        for (job, (called, before)) in self.jobs.values_mut().zip(found) {
            (job.called, job.before) = (called, before);
            if called {
                job.room.notify_waiters();
            }
        }
    }

    /// Returns for each waiting job whether it has its turn, and how many jobs are served before
    /// it.
    fn whose_turn(&self, config: &Config, held: &[Tenant<'_>]) -> Vec<(bool, usize)> {
        let mut tally = Tally::of(config, held);
        let mut there: BTreeSet<_> = held.iter().map(|tenant| tenant.name).collect();
        let mut before = 0;
        let mut found = Vec::with_capacity(self.jobs.len());
        for job in self.jobs.values() {
            let tenant = job.tenant();
            let own = tally.check_own(config, &tenant).is_ok();
            // A job that runs already, or waits under two rules, counts once.
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

    /// Returns the jobs that have their turn before the job of a rank that joins now from `addr`.
    pub(crate) fn called_before(
        &self,
        config: &Config,
        join: &Join,
        identity: Option<&str>,
        addr: IpAddr,
    ) -> impl Iterator<Item = Tenant<'_>> {
        let own = self.turns.get(&Key::of(config, join, identity)).copied();
        let last = own.unwrap_or_else(|| self.last_turn(&Line::of(join, identity, addr)));
        // A job that has not waited comes after all called jobs, unless it goes first.
        let is_after_all = own.is_none() && last.in_turn;
        let is_before = move |turn: &Turn| is_after_all || *turn < last;
        let called = self.jobs.iter().filter(move |(turn, job)| job.called && is_before(turn));
        called.map(|(_, job)| job.tenant()).filter(|tenant| *tenant.name != join.job)
    }

    /// Returns whether a rank's job has its turn, and how many jobs are served before it.
    pub(crate) fn turn(&self, place: &Place) -> (bool, u16) {
        let waiting = self.turns.get(&place.key).and_then(|turn| self.jobs.get(turn));
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

impl Line {
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
