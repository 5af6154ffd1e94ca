//! The limits on what each job may hold at an aggregator.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use racksum_proto::control::{CONTROL_VERSION, POOL_SLOTS};
use racksum_proto::counted::{are, counted};
use racksum_proto::job_name::JobName;
use racksum_proto::peer_text::PeerText;

use crate::admit_rule::{Admit, rule_of};
use crate::config::Config;

/// The reason why a rank was not admitted to its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The aggregator is draining and accepts no more jobs.
    Draining,
    /// The rank speaks this version of the protocol, and the aggregator speaks another.
    WrongVersion(u16),
    /// The join can never be admitted as it is.
    Never(String),
    /// There is no room now; the text names the limit.
    NoRoom(String),
    /// There is no room now, and too many ranks are already waiting.
    NoWait(String),
}

/// The end of the advice in a refusal: whom to ask, and for what.
const OPERATOR: &str = "the operator of the aggregator for room";

impl Refusal {
    /// Returns the reason for the refusal, worded for the refused rank.
    pub(crate) fn why(self) -> String {
        let why = match self {
            Self::Never(why) => why,
            Self::NoRoom(why) => format!("{why}; try again later, set `wait`, or ask {OPERATOR}"),
            Self::NoWait(why) => format!("{why}; try again later, or ask {OPERATOR}"),
            Self::Draining => "this aggregator is draining".into(),
            Self::WrongVersion(theirs) => format!(
                "this aggregator speaks protocol version {CONTROL_VERSION}, but the worker speaks \
                 version {theirs}; install the same release on both"
            ),
        };
        PeerText::of(why).into()
    }
}

impl From<String> for Refusal {
    fn from(why: String) -> Self {
        Self::Never(why)
    }
}

impl From<&str> for Refusal {
    fn from(why: &str) -> Self {
        Self::Never(why.to_owned())
    }
}

/// A job, with the identity that opened it or asks to open it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tenant<'a> {
    pub(crate) name: &'a JobName,
    pub(crate) identity: Option<&'a str>,
    /// The index of the rule that admits the job.
    pub(crate) rule: Option<usize>,
    pub(crate) world: u16,
    pub(crate) lanes: u8,
    /// The share that the job was granted, in per cent, even if the configuration has changed
    /// since; `None` before the grant.
    pub(crate) granted: Option<f64>,
}

impl<'a> Tenant<'a> {
    /// Creates a tenant without a grant, for a job with these numbers of ranks and lanes.
    pub(crate) fn new(
        config: &Config,
        name: &'a JobName,
        identity: Option<&'a str>,
        (world, lanes): (u16, u8),
    ) -> Self {
        let rule = rule_of(&config.admit, identity, &name.name);
        Self { name, identity, rule, world, lanes, granted: None }
    }

    fn rule<'c>(&self, config: &'c Config) -> Option<&'c Admit> {
        config.admit.get(self.rule?)
    }

    /// Returns the maximum number of slots of each stream of the job.
    pub(crate) fn pool_slots(&self, config: &Config) -> u32 {
        let own = self.rule(config).and_then(|rule| rule.pool_slots);
        own.unwrap_or(u32::MAX).min(config.pool_slots)
    }
}

/// The total that a set of jobs holds. The groups of a job count as one job, but their ranks and
/// packet buffers are added up.
#[derive(Debug, Default)]
pub(crate) struct Tally<'a> {
    all: Held<'a>,
    rules: BTreeMap<usize, Held<'a>>,
    /// The share of the packet buffers that all jobs hold, in per cent.
    share: f64,
    shares: BTreeMap<&'a str, OfJob>,
}

/// The share of the packet buffers that a job holds, and the number of its groups.
#[derive(Debug, Default, Clone, Copy)]
struct OfJob {
    /// The share of the packet buffers, in per cent.
    share: f64,
    groups: u32,
}

#[derive(Debug, Default)]
struct Held<'a> {
    jobs: BTreeSet<&'a str>,
    ranks: u32,
}

/// A limit that prevents a job from being opened.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Limit {
    /// The job alone has more ranks than the limit allows.
    World { world: u16, most: u32, limit: &'static str },
    /// Other jobs have taken too many ranks.
    Ranks { world: u16, taken: u32, most: u32, limit: &'static str },
    /// There are too many jobs.
    Jobs { jobs: usize, most: u32, limit: &'static str },
    /// Other jobs have taken too much of the packet buffers.
    Share { taken: f64, share: f64 },
    /// The job's groups leave too little of the packet buffers for one more group. The buffers are
    /// the job's own share if a rule admits it, and otherwise all of them.
    Groups { groups: u32, own: Option<f64> },
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::World { world, most, limit } => {
                write!(f, "{world} ranks exceed the {most} that {limit} allows")
            }
            Self::Ranks { world, taken, most, limit } => {
                write!(f, "{taken} of {most} ranks are taken ({limit}), and the job needs {world}")
            }
            Self::Jobs { jobs, most, limit } => {
                let (are, jobs) = (are(jobs), counted(jobs, "job"));
                write!(f, "there {are} {jobs}, and {limit} allows {most}")
            }
            Self::Share { taken, share } => write!(
                f,
                "{taken:.0} % of the packet buffers are taken, and the job needs {share:.0} %"
            ),
            Self::Groups { groups, own: Some(own) } => write!(
                f,
                "this job has {}, and too little of its share ({own:.0} % of the packet buffers) \
                 is left for one more group; destroy groups, or raise --pool-mib at the \
                 aggregator or share_percent of the job's [[admit]] rule",
                counted(groups, "group")
            ),
            Self::Groups { groups, own: None } => write!(
                f,
                "this job has {}, and too few packet buffers are left for one more group; destroy \
                 groups, or raise --pool-mib at the aggregator",
                counted(groups, "group")
            ),
        }
    }
}

impl<'a> Tally<'a> {
    /// Returns the total that these jobs hold.
    pub(crate) fn of(config: &Config, held: &[Tenant<'a>]) -> Self {
        let mut tally = Self::default();
        held.iter().for_each(|tenant| tally.add(config, tenant));
        tally
    }

    /// Adds a job.
    pub(crate) fn add(&mut self, config: &Config, tenant: &Tenant<'a>) {
        let share = tenant.granted.unwrap_or_else(|| self.share_of(config, tenant));
        self.share += share;
        let of_job = self.shares.entry(&tenant.name.name).or_default();
        of_job.share += share;
        of_job.groups += 1;
        let own = tenant.rule.map(|rule| self.rules.entry(rule).or_default());
        for held in own.into_iter().chain([&mut self.all]) {
            held.jobs.insert(&tenant.name.name);
            held.ranks += u32::from(tenant.world);
        }
    }

    /// Returns the share of each shard's packet buffers, in per cent, that a job is granted
    /// alongside other jobs.
    ///
    /// A job that a rule admits has a share of its own: the rule's share, or an equal share. The
    /// first group of the job gets half of it. If this group has no name, it is the job itself, and
    /// gets three quarters, since most jobs have no other groups. Further groups get part of the
    /// rest, so that they cannot get around the rule's `max_jobs`.
    ///
    /// Without rules, the first group of a job gets an equal share, and further groups get part of
    /// all free buffers.
    pub(crate) fn share_of(&self, config: &Config, wanted: &Tenant<'_>) -> f64 {
        let equal = Self::equal(config);
        let least = least_share(config, wanted.world, wanted.lanes);
        match (self.shares.get(&*wanted.name.name), Self::own(config, wanted)) {
            (None, Some(own)) if wanted.name.group.is_empty() => own * 0.75,
            (None, Some(own)) => own / 2.0,
            (None, None) => equal,
            (Some(held), Some(own)) => further(own - held.share, own / 8.0, least),
            (Some(_), None) => further(100.0 - self.share, 50.0, least).min(equal.max(least)),
        }
    }

    fn equal(config: &Config) -> f64 {
        100.0 / f64::from(config.max_jobs.max(1))
    }

    /// Returns the share for all groups of a job together, if a rule admits the job.
    fn own(config: &Config, wanted: &Tenant<'_>) -> Option<f64> {
        let rule = wanted.rule(config)?;
        Some(rule.share_percent.map_or_else(|| Self::equal(config), f64::from))
    }

    /// Checks whether one more job may be opened in addition to those of this tally.
    pub(crate) fn check(&self, config: &Config, wanted: &Tenant<'_>) -> Result<(), Limit> {
        self.check_own(config, wanted)?;
        let limits = [
            ("--max-ranks of the aggregator", Some(config.max_ranks)),
            ("--max-jobs of the aggregator", Some(config.max_jobs.into())),
        ];
        self.all.check(wanted, limits)?;
        let (taken, share) = (self.share, self.share_of(config, wanted));
        if let Some(OfJob { groups, .. }) = self.shares.get(&*wanted.name.name).copied()
            && share <= 0.0
        {
            return Err(Limit::Groups { groups, own: Self::own(config, wanted) });
        }
        if taken + share > 100.0 + ROUNDING {
            return Err(Limit::Share { taken, share });
        }
        Ok(())
    }

    /// Checks whether the rule that admits a job has room for it. Jobs of other rules do not count.
    pub(crate) fn check_own(&self, config: &Config, wanted: &Tenant<'_>) -> Result<(), Limit> {
        let Some(limits) = wanted.rule(config) else { return Ok(()) };
        let limits = [
            ("max_ranks of your [[admit]] rule", limits.max_ranks),
            ("max_jobs of your [[admit]] rule", limits.max_jobs.map(u32::from)),
        ];
        let nothing = Held::default();
        let held = wanted.rule.and_then(|rule| self.rules.get(&rule)).unwrap_or(&nothing);
        held.check(wanted, limits)
    }
}

/// The rounding error that a sum of shares may have.
pub(crate) const ROUNDING: f64 = 1e-6;

/// Returns the share of a job's next group when `left` remains for further groups. The number of
/// groups is not known in advance, so shares shrink: the first few groups get an eighth of what
/// remains beyond `kept`, and later groups get a 128th of what remains. Every share is at least
/// `least`, or 0 if that does not fit.
fn further(left: f64, kept: f64, least: f64) -> f64 {
    let share = ((left - kept) / 8.0).max(left / 128.0).max(least);
    if share <= left + ROUNDING { share } else { 0.0 }
}

/// Returns the smallest share of the packet buffers, in per cent, that is enough for the minimum
/// number of slots of a job.
pub(crate) fn least_share(config: &Config, world: u16, lanes: u8) -> f64 {
    let held = u32::from(lanes) * POOL_SLOTS.start() * buffers_of_slot(config, world);
    100.0 * f64::from(held) / config.buffers() as f64
}

/// Returns the number of packet buffers per slot of a stream: one for each rank, one for the parent
/// if there is one, and one for the result.
pub(crate) fn buffers_of_slot(config: &Config, ranks: u16) -> u32 {
    u32::from(ranks) + 1 + u32::from(config.parent.is_some())
}

impl Held<'_> {
    /// Checks that the ranks and jobs stay within their limits with one more job. Ranks are checked
    /// first.
    fn check(
        &self,
        wanted: &Tenant<'_>,
        [ranks, jobs]: [(&'static str, Option<u32>); 2],
    ) -> Result<(), Limit> {
        let (world, taken) = (wanted.world, self.ranks);
        if let (limit, Some(most)) = ranks {
            if u32::from(world) > most {
                return Err(Limit::World { world, most, limit });
            }
            if taken + u32::from(world) > most {
                return Err(Limit::Ranks { world, taken, most, limit });
            }
        }
        let is_there = self.jobs.contains(&*wanted.name.name);
        if let (limit, Some(most)) = jobs
            && !is_there
            && self.jobs.len() >= most as usize
        {
            return Err(Limit::Jobs { jobs: self.jobs.len(), most, limit });
        }
        Ok(())
    }
}

/// Checks whether one more job may be opened in addition to the present ones.
///
/// # Errors
/// A limit prevents the job from being opened. The refusal names the limit, and the jobs that hold
/// the room, as far as the caller may know of them.
pub(crate) fn check_room(
    config: &Config,
    held: &[Tenant<'_>],
    wanted: &Tenant<'_>,
) -> Result<(), Refusal> {
    let tally = Tally::of(config, held);
    tally.check(config, wanted).map_err(|limit| {
        match limit {
            Limit::World { .. } => return Refusal::Never(limit.to_string()),
            // The job's own groups hold the buffers, so the message lists no other holders.
            Limit::Groups { .. } => return Refusal::NoRoom(limit.to_string()),
            Limit::Ranks { .. } | Limit::Jobs { .. } | Limit::Share { .. } => {}
        }
        let is_of_rule = tally.check_own(config, wanted).is_err();
        let of = held.iter().filter(|it| !is_of_rule || it.rule == wanted.rule);
        let holders = holders(config, of, wanted);
        Refusal::NoRoom(format!("{limit}{holders}"))
    })
}

/// Returns the part of a refusal that names the holders of the room, or empty text if there are
/// none. Jobs that the caller might join are named group by group. The message only states how many
/// other jobs there are, and does not mention their groups.
fn holders<'a>(
    config: &Config,
    held: impl Iterator<Item = &'a Tenant<'a>>,
    wanted: &Tenant<'_>,
) -> String {
    let visible = |tenant: &&Tenant<'_>| {
        let job = &tenant.name.name;
        config.admit.is_empty() || rule_of(&config.admit, wanted.identity, job).is_some()
    };
    let (seen, others): (Vec<&Tenant<'_>>, Vec<_>) = held.partition(visible);
    let named = seen.iter().take(MAX_HOLDERS);
    let mut names: Vec<_> =
        named.map(|it| format!("{:?} with {}", it.name, counted(it.world, "rank"))).collect();
    if let Some(more @ 1..) = seen.len().checked_sub(MAX_HOLDERS) {
        let jobs = if more == 1 { "job or group" } else { "jobs or groups" };
        names.push(format!("{more} more {jobs}"));
    }
    let others: BTreeSet<&str> = others.iter().map(|it| &*it.name.name).collect();
    match others.len() {
        0 => {}
        jobs => names.push(format!("{} of other identities", counted(jobs, "job"))),
    }
    if names.is_empty() { String::new() } else { format!("; room is held by {}", names.join(", ")) }
}

/// The maximum number of jobs named in a refusal.
const MAX_HOLDERS: usize = 16;

#[cfg(test)]
mod tests;
