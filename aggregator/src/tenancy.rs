//! How much of an aggregator each job may have.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use racksum_proto::control::{CONTROL_VERSION, POOL_SLOTS};
use racksum_proto::counted::{are, counted};
use racksum_proto::job_name::JobName;
use racksum_proto::peer_text::PeerText;

use crate::admission::{Admit, rule_of};
use crate::config::Config;

/// Why a rank was not taken into its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The aggregator is about to stop.
    Draining,
    /// It speaks this version of the protocol.
    WrongVersion(u16),
    /// It never will be, as it asks.
    Never(String),
    /// There is no room now: what is in the way.
    NoRoom(String),
    /// Nor is there room to wait for it.
    NoWait(String),
}

/// Who can make more room.
const OPERATOR: &str = "whoever runs the aggregator";

impl Refusal {
    /// The sentence for the one who is refused.
    pub(crate) fn why(self) -> String {
        let why = match self {
            Self::Never(why) => why,
            Self::NoRoom(why) => format!("{why}; try again later, set `wait`, or ask {OPERATOR}"),
            Self::NoWait(why) => format!("{why}; try again later, or ask {OPERATOR}"),
            Self::Draining => "this aggregator is about to stop".into(),
            Self::WrongVersion(theirs) => format!(
                "this aggregator speaks version {CONTROL_VERSION} of the protocol, the worker \
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

/// A job, and who has opened it or would.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tenant<'a> {
    pub(crate) name: &'a JobName,
    pub(crate) identity: Option<&'a str>,
    /// The rule that admits it.
    pub(crate) rule: Option<usize>,
    pub(crate) world: u16,
    pub(crate) lanes: u8,
    /// The share that it was granted, whatever the configuration says by now; none before that.
    pub(crate) granted: Option<f64>,
}

impl<'a> Tenant<'a> {
    /// A job of so many ranks and lanes that is granted nothing yet.
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

    /// The most slots that a stream of the job may have.
    pub(crate) fn pool_slots(&self, config: &Config) -> u32 {
        let own = self.rule(config).and_then(|rule| rule.pool_slots);
        own.unwrap_or(u32::MAX).min(config.pool_slots)
    }
}

/// What jobs hold together. Groups of one job count as one job; their ranks and their packet
/// buffers all count.
#[derive(Debug, Default)]
pub(crate) struct Tally<'a> {
    all: Held<'a>,
    rules: BTreeMap<usize, Held<'a>>,
    /// Per cent of the packet buffers that all hold.
    share: f64,
    shares: BTreeMap<&'a str, OfJob>,
}

/// The packet buffers and the groups of a job.
#[derive(Debug, Default, Clone, Copy)]
struct OfJob {
    /// Per cent of the packet buffers.
    share: f64,
    groups: u32,
}

#[derive(Debug, Default)]
struct Held<'a> {
    jobs: BTreeSet<&'a str>,
    ranks: u32,
}

/// A limit that is in the way of a job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Limit {
    /// It has more ranks than it ever may have.
    World { world: u16, most: u32, limit: &'static str },
    /// Others have taken so many ranks.
    Ranks { world: u16, taken: u32, most: u32, limit: &'static str },
    /// There are so many jobs.
    Jobs { jobs: usize, most: u32, limit: &'static str },
    /// Others have taken so much of the packet buffers.
    Share { taken: f64, share: f64 },
    /// The job has so many groups that too little of the packet buffers is left for one more: of
    /// the job's own share if a rule admits it, and else of all.
    Groups { groups: u32, own: Option<f64> },
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::World { world, most, limit } => {
                write!(f, "{world} ranks are more than the {most} that {limit} allows")
            }
            Self::Ranks { world, taken, most, limit } => {
                write!(f, "{taken} of {most} ranks are taken ({limit}), and {world} asked for")
            }
            Self::Jobs { jobs, most, limit } => {
                let (are, jobs) = (are(jobs), counted(jobs, "job"));
                write!(f, "there {are} {jobs}, and {limit} allows {most}")
            }
            Self::Share { taken, share } => write!(
                f,
                "{taken:.0} % of the packet buffers are taken, and {share:.0} % asked for"
            ),
            Self::Groups { groups, own: Some(own) } => write!(
                f,
                "the job has all of the {own:.0} % of the packet buffers that it may have, in {}; \
                 destroy groups, or raise --pool-mib at the aggregator or share_percent of the \
                 job's [[admit]] rule",
                counted(groups, "group")
            ),
            Self::Groups { groups, own: None } => write!(
                f,
                "the job and others have all packet buffers, the job in {}; destroy groups, or \
                 raise --pool-mib at the aggregator",
                counted(groups, "group")
            ),
        }
    }
}

impl<'a> Tally<'a> {
    /// What these jobs hold.
    pub(crate) fn of(config: &Config, held: &[Tenant<'a>]) -> Self {
        let mut tally = Self::default();
        held.iter().for_each(|tenant| tally.add(config, tenant));
        tally
    }

    /// One more job is there.
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

    /// The share of each shard's packet buffers that a job is granted beside the others, in per
    /// cent: what its rule says, or an equal one. Of a job with a share of its own, the first group
    /// has half of that, or three quarters if it is none: most jobs stay without groups. What is
    /// left for further groups is of the job's own share, if a rule admits it: groups must not get
    /// around the rule's `max_jobs`. Without rules anybody may take all.
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

    /// The share that a job has with all its groups, if a rule admits it.
    fn own(config: &Config, wanted: &Tenant<'_>) -> Option<f64> {
        let rule = wanted.rule(config)?;
        Some(rule.share_percent.map_or_else(|| Self::equal(config), f64::from))
    }

    /// Whether one more job may be opened beside these.
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

    /// Whether the rule that admits a job has room for it: a limit that no job of another rule is
    /// in the way of.
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

/// Returns the share of a further group of a job, of which `left` is left for groups: nobody knows
/// how many there will be. The first few have an eighth each of what is left beyond `kept`; later
/// ones have a 128th of what is left, and at least `least`. The share is 0 once that does not fit.
fn further(left: f64, kept: f64, least: f64) -> f64 {
    let share = ((left - kept) / 8.0).max(left / 128.0).max(least);
    if share <= left + ROUNDING { share } else { 0.0 }
}

/// The share of the packet buffers, in per cent, that is enough for the fewest slots of a job.
pub(crate) fn least_share(config: &Config, world: u16, lanes: u8) -> f64 {
    let held = u32::from(lanes) * POOL_SLOTS.start() * buffers_of_slot(config, world);
    100.0 * f64::from(held) / config.buffers() as f64
}

/// Packet buffers that a slot holds of a stream: one for each that contributes, and the result.
pub(crate) fn buffers_of_slot(config: &Config, ranks: u16) -> u32 {
    u32::from(ranks) + 1 + u32::from(config.parent.is_some())
}

impl Held<'_> {
    /// Whether ranks and jobs, in this order, stay within limits with one more job.
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

/// Whether one more job may be opened beside those that are there.
///
/// # Errors
/// Which limit is in the way, and who holds what of it, as far as the one who asks may know.
pub(crate) fn check_room(
    config: &Config,
    held: &[Tenant<'_>],
    wanted: &Tenant<'_>,
) -> Result<(), Refusal> {
    let tally = Tally::of(config, held);
    tally.check(config, wanted).map_err(|limit| {
        match limit {
            Limit::World { .. } => return Refusal::Never(limit.to_string()),
            // It is the job itself that holds what there is.
            Limit::Groups { .. } => return Refusal::NoRoom(limit.to_string()),
            Limit::Ranks { .. } | Limit::Jobs { .. } | Limit::Share { .. } => {}
        }
        let is_of_rule = tally.check_own(config, wanted).is_err();
        let of = held.iter().filter(|it| !is_of_rule || it.rule == wanted.rule);
        let holders = holders(config, of, wanted);
        Refusal::NoRoom(format!("{limit}{holders}"))
    })
}

/// Who holds what: by name the jobs that the one who asks might join, group by group, and the
/// number of the others, whose groups are their own affair.
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
        names.push(format!("{more} more jobs or groups of them"));
    }
    let others: BTreeSet<&str> = others.iter().map(|it| &*it.name.name).collect();
    match others.len() {
        0 => {}
        jobs => names.push(format!("{} of others", counted(jobs, "job"))),
    }
    if names.is_empty() { String::new() } else { format!(", held by {}", names.join(", ")) }
}

/// Most jobs that are named in a refusal.
const MAX_HOLDERS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::Admit;

    /// A job whose rule the configuration has.
    fn of(
        config: &Config,
        job: &'static str,
        identity: &'static str,
        world: u16,
    ) -> Tenant<'static> {
        group_of(config, job, "", identity, world)
    }

    fn group_of(
        config: &Config,
        job: &str,
        group: &str,
        identity: &'static str,
        world: u16,
    ) -> Tenant<'static> {
        let name = Box::leak(Box::new(JobName::new(job, group)));
        Tenant::new(config, name, Some(identity), (world, 1))
    }

    fn rule(identity: &str, jobs: &str) -> Admit {
        Admit { identity: identity.into(), jobs: vec![jobs.into()], ..Admit::default() }
    }

    fn why(checked: Result<(), Refusal>) -> (bool, String) {
        match checked.unwrap_err() {
            Refusal::Never(why) => (false, why),
            refusal @ Refusal::NoRoom(_) => (true, refusal.why()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn jobs_and_ranks_are_counted_and_the_holders_named() {
        let config = Config { max_jobs: 2, max_ranks: 10, ..Config::default() };
        let tenant = |job, identity, world| of(&config, job, identity, world);
        let (one, two) = (tenant("one", "a", 4), tenant("two", "b", 4));
        assert_eq!(check_room(&config, &[one], &two), Ok(()));
        let (later, told) = why(check_room(&config, &[one, two], &tenant("three", "c", 1)));
        let expected = "there are 2 jobs, and --max-jobs of the aggregator allows 2, \
                        held by \"one\" with 4 ranks, \
                        \"two\" with 4 ranks; try again later, set `wait`, \
                        or ask whoever runs the aggregator";
        assert_eq!((later, &*told), (true, expected));
        let (later, told) = why(check_room(&config, &[one], &tenant("two", "b", 7)));
        assert!(
            later
                && told
                    .starts_with("4 of 10 ranks are taken (--max-ranks of the aggregator), and 7"),
            "{told}"
        );
        let (later, told) = why(check_room(&config, &[], &tenant("two", "b", 11)));
        assert!(
            !later && told.starts_with("11 ranks are more than the 10 that --max-ranks"),
            "{told}"
        );
    }

    #[test]
    fn only_who_is_refused_is_told_what_to_do_about_it() {
        let config = Config { max_jobs: 1, ..Config::default() };
        let there = of(&config, "one", "a", 4);
        let refusal = check_room(&config, &[there], &of(&config, "two", "b", 4)).unwrap_err();
        let why = "there is 1 job, and --max-jobs of the aggregator allows 1, \
                   held by \"one\" with 4 ranks";
        // Who waits hears this.
        assert_eq!(refusal, Refusal::NoRoom(why.into()));
        assert_eq!(refusal.why(), format!("{why}; try again later, set `wait`, or ask {OPERATOR}"));
        let full = Refusal::NoWait(format!("{why}; 1024 ranks wait")).why();
        assert!(
            full.ends_with("ranks wait; try again later, or ask whoever runs the aggregator"),
            "{full}"
        );
    }

    #[test]
    fn each_rule_has_limits_of_its_own_and_others_are_not_named() {
        let vision = Admit { max_jobs: Some(1), max_ranks: Some(8), ..rule("vision-*", "v-*") };
        let config = Config { admit: vec![vision, rule("speech-*", "s-*")], ..Config::default() };
        let tenant = |job, identity, world| of(&config, job, identity, world);
        let held = [tenant("s-1", "speech-1", 100), tenant("v-1", "vision-1", 4)];
        let (later, told) = why(check_room(&config, &held, &tenant("v-2", "vision-2", 4)));
        let expected = "there is 1 job, and max_jobs of your [[admit]] rule allows 1, held by \
                        \"v-1\" with 4 ranks; try again later, set `wait`, \
                        or ask whoever runs the aggregator";
        assert_eq!((later, &*told), (true, expected));
        let (later, told) = why(check_room(&config, &held, &tenant("v-2", "vision-2", 9)));
        assert!(!later && told.contains("max_ranks of your [[admit]] rule"), "{told}");
        assert_eq!(check_room(&config, &held, &tenant("s-2", "speech-1", 100)), Ok(()));
        // What others hold is a number.
        let full = Config { max_jobs: 2, ..config.clone() };
        let (_, told) = why(check_room(&full, &held, &of(&full, "s-2", "speech-2", 1)));
        assert!(told.contains("held by \"s-1\" with 100 ranks, 1 job of others;"), "{told}");
    }

    #[test]
    fn shares_are_of_a_whole() {
        let half = Admit { share_percent: Some(50), pool_slots: Some(7), ..rule("*", "big*") };
        let config = Config { max_jobs: 4, admit: vec![half, rule("*", "*")], ..Config::default() };
        let [big, one, two, three] =
            ["big", "one", "two", "three"].map(|job| of(&config, job, "x", 1));
        let share = |tenant| Tally::default().share_of(&config, tenant);
        assert_eq!((share(&big), share(&one)), (37.5, 18.75));
        assert_eq!((big.pool_slots(&config), one.pool_slots(&config)), (7, 256));
        assert_eq!(check_room(&config, &[one, two], &big), Ok(()));
        let with_groups = Tenant { granted: Some(50.0), ..big };
        let (later, told) = why(check_room(&config, &[one, with_groups, two], &three));
        assert!(
            later && told.starts_with("88 % of the packet buffers are taken, and 19"),
            "{told}"
        );
    }

    #[test]
    fn a_share_that_was_granted_is_held_whatever_the_configuration_says_by_now() {
        let config = Config { max_jobs: 8, ..Config::default() };
        // From when there were four jobs at most.
        let held = ["a", "b", "c", "d"]
            .map(|job| Tenant { granted: Some(25.0), ..of(&config, job, "x", 1) });
        let (later, told) = why(check_room(&config, &held, &of(&config, "e", "x", 1)));
        assert!(
            later && told.starts_with("100 % of the packet buffers are taken, and 12"),
            "{told}"
        );
        assert_eq!(check_room(&config, &held[..3], &of(&config, "e", "x", 1)), Ok(()));
    }

    #[test]
    fn groups_of_one_job_are_one_job_and_have_what_is_left_of_the_buffers() {
        let config = Config::default();
        let mut held: Vec<Tenant<'static>> = Vec::new();
        for group in ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11"] {
            let wanted = group_of(&config, "train", group, "x", 8);
            assert_eq!(check_room(&config, &held, &wanted), Ok(()), "group {group}");
            let share = Tally::of(&config, &held).share_of(&config, &wanted);
            held.push(Tenant { granted: Some(share), ..wanted });
        }
        // Ranks are counted group by group.
        let few = Config { max_ranks: 100, ..config.clone() };
        let (_, told) = why(check_room(&few, &held, &group_of(&few, "train", "12", "x", 8)));
        assert!(told.starts_with("96 of 100 ranks are taken (--max-ranks of"), "{told}");
        // Another job has its equal share still, and counts as the second.
        assert_eq!(check_room(&config, &held, &of(&config, "other", "y", 8)), Ok(()));
        let one = Config { max_jobs: 1, ..config };
        let (_, told) = why(check_room(&one, &held, &of(&one, "other", "y", 8)));
        assert!(
            told.starts_with("there is 1 job, and --max-jobs of the aggregator allows 1, held by"),
            "{told}"
        );
    }

    #[test]
    fn the_limits_of_a_rule_are_those_of_a_job_with_all_its_groups() {
        let own = Admit { max_jobs: Some(1), share_percent: Some(40), ..rule("x", "train") };
        let config = Config { admit: vec![own], ..Config::default() };
        for (first, share) in [("0", 20.0), ("", 30.0)] {
            let mut held: Vec<Tenant<'static>> = Vec::new();
            for group in [first, "1", "2", "3", "4", "5", "6", "7", "8"] {
                let wanted = group_of(&config, "train", group, "x", 2);
                assert_eq!(check_room(&config, &held, &wanted), Ok(()), "group {group}");
                let share = Tally::of(&config, &held).share_of(&config, &wanted);
                held.push(Tenant { granted: Some(share), ..wanted });
            }
            let taken: f64 = held.iter().filter_map(|it| it.granted).sum();
            assert!(held[0].granted == Some(share) && taken < 40.0, "{taken}");
        }
    }

    #[test]
    fn groups_do_not_get_around_the_most_jobs_of_a_rule() {
        let vision = Admit { max_jobs: Some(1), ..rule("vision-*", "v-*") };
        let admit = vec![vision, rule("speech-*", "s-*")];
        let config = Config { max_jobs: 4, admit, ..Config::default() };
        let mut held: Vec<Tenant<'static>> = Vec::new();
        for group in 0..40 {
            let wanted = group_of(&config, "v-x", &group.to_string(), "vision-1", 1);
            assert_eq!(check_room(&config, &held, &wanted), Ok(()), "group {group}");
            let share = Tally::of(&config, &held).share_of(&config, &wanted);
            held.push(Tenant { granted: Some(share), ..wanted });
        }
        for job in ["s-1", "s-2", "s-3"] {
            let wanted = of(&config, job, "speech-1", 1);
            assert_eq!(check_room(&config, &held, &wanted), Ok(()), "{job}");
            held.push(Tenant { granted: Some(25.0), ..wanted });
        }
        // Forty groups are one job, to others at least.
        let (_, told) = why(check_room(&config, &held[..43], &of(&config, "s-4", "speech-2", 1)));
        assert!(told.contains("\"s-3\" with 1 rank, 1 job of others;"), "{told}");
        let of_vision = Tenant { granted: None, ..held[0] };
        let (_, told) = why(check_room(&config, &held[..40], &of(&config, "v-y", "vision-2", 1)));
        assert!(told.contains(", 24 more jobs or groups of them;"), "{told}");
        // A job that has all it may have is told so.
        let all = Tenant { granted: Some(25.0), ..held[1] };
        let (later, told) = why(check_room(&config, &[all], &of_vision));
        let expected = "the job has all of the 25 % of the packet buffers that it may have, in 1 \
                        group; destroy groups, or raise --pool-mib at the aggregator or \
                        share_percent of the job's [[admit]] rule; try again later, set `wait`, \
                        or ask whoever runs the aggregator";
        assert_eq!((later, &*told), (true, expected));
    }

    /// Opens groups of a job until there is no room for one, and returns them and the refusal.
    fn open_groups(config: &Config, world: u16) -> (Vec<Tenant<'static>>, String) {
        let mut held: Vec<Tenant<'static>> = Vec::new();
        loop {
            let wanted = group_of(config, "train", &held.len().to_string(), "x", world);
            if let Err(refusal) = check_room(config, &held, &wanted) {
                return (held, why(Err(refusal)).1);
            }
            let share = Tally::of(config, &held).share_of(config, &wanted);
            held.push(Tenant { granted: Some(share), ..wanted });
        }
    }

    #[test]
    fn a_job_has_as_many_groups_as_there_is_memory_for_and_each_works() {
        let config = Config::default();
        let rule = Config { admit: vec![rule("x", "train")], ..config.clone() };
        // Three dimensions of 8 ranks are 192 groups of 8.
        for (config, most, fewest, world) in
            [(&config, 100.0, 192, 8), (&config, 100.0, 300, 2), (&rule, 12.5, 30, 8)]
        {
            let (held, told) = open_groups(config, world);
            assert!(held.len() >= fewest, "{} groups of {world}", held.len());
            let shares: Vec<f64> = held.iter().filter_map(|it| it.granted).collect();
            assert!(shares.iter().sum::<f64>() <= most + ROUNDING);
            let least = least_share(config, world, 1);
            assert!(shares.iter().all(|share| *share >= least), "{shares:?}");
            let expected = format!("in {} groups; destroy groups", held.len());
            assert!(told.contains(&expected) && told.contains("raise --pool-mib"), "{told}");
            // A group that ends gives its place back.
            let wanted = group_of(config, "train", "another", "x", world);
            assert_eq!(check_room(config, &held[1..], &wanted), Ok(()));
        }
    }

    #[test]
    fn a_group_has_the_fewest_slots_of_each_lane_or_waits() {
        let config = Config::default();
        let first = group_of(&config, "train", "0", "x", 8);
        let wanted = |lanes| Tenant { lanes, ..group_of(&config, "train", "1", "x", 8) };
        let held = [Tenant { granted: Some(98.0), ..first }];
        let tally = Tally::of(&config, &held);
        let least = least_share(&config, 8, 8);
        assert_eq!(tally.share_of(&config, &wanted(8)), least);
        assert!(tally.share_of(&config, &wanted(1)) < least);
        // Less is left than it needs.
        let held = [Tenant { granted: Some(100.0 - least / 2.0), ..first }];
        assert_eq!(check_room(&config, &held, &wanted(1)), Ok(()));
        let (later, told) = why(check_room(&config, &held, &wanted(8)));
        assert!(later && told.contains("in 1 group; destroy groups"), "{told}");
    }
}
