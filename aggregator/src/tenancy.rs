//! How much of an aggregator each job may have, and who waits for room.

use std::collections::VecDeque;

use racksum_proto::control::CONTROL_VERSION;
use racksum_proto::job_name::JobName;

use crate::admission::rule_of;
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
    /// There is no room now.
    NoRoom(String),
}

impl Refusal {
    /// The sentence for the one who is refused.
    pub(crate) fn why(self) -> String {
        match self {
            Self::Never(why) | Self::NoRoom(why) => why,
            Self::Draining => "this aggregator is about to stop".into(),
            Self::WrongVersion(theirs) => format!(
                "this aggregator speaks version {CONTROL_VERSION} of the protocol, the worker \
                 version {theirs}; install the same release on both"
            ),
        }
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
    pub(crate) job: &'a str,
    /// Which of the job's groups.
    pub(crate) group: &'a str,
    pub(crate) identity: Option<&'a str>,
    pub(crate) world: u16,
    /// The share that it was granted, whatever the configuration says by now; none before that.
    pub(crate) granted: Option<f64>,
}

impl<'a> Tenant<'a> {
    /// A job that is granted nothing yet.
    pub(crate) fn new(name: &'a JobName, identity: Option<&'a str>, world: u16) -> Self {
        let JobName { name: job, group } = name;
        Self { job, group, identity, world, granted: None }
    }

    fn name(&self) -> JobName {
        JobName { name: self.job.to_owned(), group: self.group.to_owned() }
    }

    /// The share of each shard's packet buffers that the job may have, in per cent.
    pub(crate) fn share(&self, config: &Config) -> f64 {
        let rule = rule_of(&config.admit, self.identity, self.job);
        let own = || rule.and_then(|at| config.admit.get(at)?.share_percent).map(f64::from);
        let equal = || 100.0 / f64::from(config.max_jobs.max(1));
        self.granted.or_else(own).unwrap_or_else(equal)
    }

    /// The most slots that a stream of the job may have.
    pub(crate) fn pool_slots(&self, config: &Config) -> u32 {
        let rule = rule_of(&config.admit, self.identity, self.job);
        let own = rule.and_then(|at| config.admit.get(at)?.pool_slots);
        own.unwrap_or(u32::MAX).min(config.pool_slots)
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
    check_own(config, held, wanted)?;
    let limits =
        [("max_ranks", Some(config.max_ranks)), ("--max-jobs", Some(config.max_jobs.into()))];
    check_counts(config, held, wanted, limits)?;
    let taken: f64 = held.iter().map(|it| it.share(config)).sum();
    let share = wanted.share(config);
    // Shares are sums of fractions.
    if taken + share > 100.0 + 1e-6 {
        let what =
            format!("{taken:.0} % of the packet buffers are taken, and {share:.0} % asked for");
        return Err(no_room(config, held, wanted, &what));
    }
    Ok(())
}

/// Whether the rule that admits a job has room for it: a limit that no job of another rule is in
/// the way of.
///
/// # Errors
/// As [`check_room`].
pub(crate) fn check_own(
    config: &Config,
    held: &[Tenant<'_>],
    wanted: &Tenant<'_>,
) -> Result<(), Refusal> {
    let rule_of = |it: &Tenant<'_>| rule_of(&config.admit, it.identity, it.job);
    let Some((rule, limits)) = rule_of(wanted).and_then(|at| Some((at, config.admit.get(at)?)))
    else {
        return Ok(());
    };
    let own: Vec<_> = held.iter().filter(|it| rule_of(it) == Some(rule)).copied().collect();
    let limits = [
        ("max_ranks of your [[admit]] rule", limits.max_ranks),
        ("max_jobs of your [[admit]] rule", limits.max_jobs.map(u32::from)),
    ];
    check_counts(config, &own, wanted, limits)
}

/// Whether ranks and jobs, in this order, stay within limits with one more job.
fn check_counts(
    config: &Config,
    of: &[Tenant<'_>],
    wanted: &Tenant<'_>,
    [ranks, jobs]: [(&str, Option<u32>); 2],
) -> Result<(), Refusal> {
    let world = u32::from(wanted.world);
    if let (limit, Some(most)) = ranks {
        if world > most {
            let why = format!("{world} ranks are more than the {most} that {limit} allows");
            return Err(Refusal::Never(why));
        }
        let taken: u32 = of.iter().map(|it| u32::from(it.world)).sum();
        if taken + world > most {
            let what =
                format!("{taken} of {most} ranks are taken ({limit}), and {world} asked for");
            return Err(no_room(config, of, wanted, &what));
        }
    }
    if let (limit, Some(most)) = jobs
        && of.len() >= most as usize
    {
        let what = format!("there are {} jobs, and {limit} allows {most}", of.len());
        return Err(no_room(config, of, wanted, &what));
    }
    Ok(())
}

fn no_room(config: &Config, of: &[Tenant<'_>], wanted: &Tenant<'_>, what: &str) -> Refusal {
    let holders = holders(config, of, wanted);
    Refusal::NoRoom(format!("{what}{holders}; try again later, or --wait"))
}

/// Who holds what: by name the jobs that the one who asks might join, the others by number.
fn holders(config: &Config, held: &[Tenant<'_>], wanted: &Tenant<'_>) -> String {
    let visible = |tenant: &&Tenant<'_>| {
        config.admit.is_empty() || rule_of(&config.admit, wanted.identity, tenant.job).is_some()
    };
    let mut names: Vec<_> = held
        .iter()
        .filter(visible)
        .map(|it| format!("{:?} with {} ranks", it.name(), it.world))
        .collect();
    let others = held.len() - names.len();
    if others > 0 {
        names.push(format!("{others} jobs of others"));
    }
    if names.is_empty() { String::new() } else { format!(", held by {}", names.join(", ")) }
}

/// Jobs that wait for room, the first first.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    jobs: VecDeque<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    job: JobName,
    identity: Option<String>,
    world: u16,
    /// How many of its ranks are waiting.
    ranks: usize,
}

impl Queue {
    /// One more rank of a job waits.
    pub(crate) fn enter(&mut self, tenant: &Tenant<'_>) {
        let job = tenant.name();
        if let Some(waiting) = self.jobs.iter_mut().find(|it| it.job == job) {
            waiting.ranks += 1;
            return;
        }
        let identity = tenant.identity.map(str::to_owned);
        self.jobs.push_back(Waiting { job, identity, world: tenant.world, ranks: 1 });
    }

    /// A rank of a job waits no more.
    pub(crate) fn leave(&mut self, job: &JobName) {
        if let Some(at) = self.jobs.iter().position(|it| it.job == *job) {
            self.jobs[at].ranks -= 1;
            if self.jobs[at].ranks == 0 {
                self.jobs.remove(at);
            }
        }
    }

    /// How many jobs are served before this one. Those that wait for room of their own rule alone
    /// hold up nobody.
    pub(crate) fn before(&self, config: &Config, held: &[Tenant<'_>], job: &JobName) -> usize {
        let earlier = self.jobs.iter().take_while(|it| it.job != *job);
        let in_turn = earlier.filter(|it| {
            let (identity, world) = (it.identity.as_deref(), it.world);
            let tenant = Tenant::new(&it.job, identity, world);
            check_own(config, held, &tenant).is_ok()
        });
        in_turn.count()
    }

    /// The names of the jobs, the first first.
    pub(crate) fn names(&self) -> Vec<String> {
        self.jobs.iter().map(|it| it.job.to_string()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::Admit;

    fn tenant<'a>(job: &'a str, identity: &'a str, world: u16) -> Tenant<'a> {
        Tenant { job, group: "", identity: Some(identity), world, granted: None }
    }

    fn rule(identity: &str, jobs: &str) -> Admit {
        Admit { identity: identity.into(), jobs: vec![jobs.into()], ..Admit::default() }
    }

    fn why(checked: Result<(), Refusal>) -> (bool, String) {
        match checked.unwrap_err() {
            Refusal::Never(why) => (false, why),
            Refusal::NoRoom(why) => (true, why),
            Refusal::Draining | Refusal::WrongVersion(_) => panic!("nobody does so here"),
        }
    }

    #[test]
    fn jobs_and_ranks_are_counted_and_the_holders_named() {
        let config = Config { max_jobs: 2, max_ranks: 10, ..Config::default() };
        let (one, two) = (tenant("one", "a", 4), tenant("two", "b", 4));
        assert_eq!(check_room(&config, &[one], &two), Ok(()));
        let (later, told) = why(check_room(&config, &[one, two], &tenant("three", "c", 1)));
        let expected = "there are 2 jobs, and --max-jobs allows 2, held by \"one\" with 4 ranks, \
                        \"two\" with 4 ranks; try again later, or --wait";
        assert_eq!((later, &*told), (true, expected));
        let (later, told) = why(check_room(&config, &[one], &tenant("two", "b", 7)));
        assert!(later && told.starts_with("4 of 10 ranks are taken (max_ranks), and 7"), "{told}");
        let (later, told) = why(check_room(&config, &[], &tenant("two", "b", 11)));
        assert!(!later && told.starts_with("11 ranks are more than the 10 that max"), "{told}");
    }

    #[test]
    fn each_rule_has_limits_of_its_own_and_others_are_not_named() {
        let vision = Admit { max_jobs: Some(1), max_ranks: Some(8), ..rule("vision-*", "v-*") };
        let config = Config { admit: vec![vision, rule("speech-*", "s-*")], ..Config::default() };
        let held = [tenant("s-1", "speech-1", 100), tenant("v-1", "vision-1", 4)];
        let (later, told) = why(check_room(&config, &held, &tenant("v-2", "vision-2", 4)));
        let expected = "there are 1 jobs, and max_jobs of your [[admit]] rule allows 1, held by \
                        \"v-1\" with 4 ranks; try again later, or --wait";
        assert_eq!((later, &*told), (true, expected));
        let (later, told) = why(check_room(&config, &held, &tenant("v-2", "vision-2", 9)));
        assert!(!later && told.contains("max_ranks of your [[admit]] rule"), "{told}");
        assert_eq!(check_room(&config, &held, &tenant("s-2", "speech-1", 100)), Ok(()));
        // What others hold is a number.
        let full = Config { max_jobs: 2, ..config };
        let (_, told) = why(check_room(&full, &held, &tenant("s-2", "speech-2", 1)));
        assert!(told.contains("held by \"s-1\" with 100 ranks, 1 jobs of others;"), "{told}");
    }

    #[test]
    fn shares_are_of_a_whole() {
        let half = Admit { share_percent: Some(50), pool_slots: Some(7), ..rule("*", "big*") };
        let config = Config { max_jobs: 4, admit: vec![half, rule("*", "*")], ..Config::default() };
        let (big, small) = (tenant("big", "x", 1), tenant("small", "x", 1));
        assert_eq!((big.share(&config), small.share(&config)), (50.0, 25.0));
        assert_eq!((big.pool_slots(&config), small.pool_slots(&config)), (7, 256));
        assert_eq!(check_room(&config, &[small, small], &big), Ok(()));
        let (later, told) = why(check_room(&config, &[small, big, small], &small));
        assert!(
            later && told.starts_with("100 % of the packet buffers are taken, and 25"),
            "{told}"
        );
    }

    #[test]
    fn a_share_that_was_granted_is_held_whatever_the_configuration_says_by_now() {
        let config = Config { max_jobs: 8, ..Config::default() };
        // From when there were four jobs at most.
        let held =
            ["a", "b", "c", "d"].map(|job| Tenant { granted: Some(25.0), ..tenant(job, "x", 1) });
        let (later, told) = why(check_room(&config, &held, &tenant("e", "x", 1)));
        assert!(
            later && told.starts_with("100 % of the packet buffers are taken, and 12"),
            "{told}"
        );
        assert_eq!(check_room(&config, &held[..3], &tenant("e", "x", 1)), Ok(()));
    }

    #[test]
    fn who_waits_is_served_in_turn() {
        let config = Config::default();
        let mut queue = Queue::default();
        for job in ["a", "b", "a", "c"] {
            queue.enter(&tenant(job, "x", 1));
        }
        let before = |queue: &Queue, job: &str| queue.before(&config, &[], &job.into());
        assert_eq!(["a", "b", "c", "new"].map(|job| before(&queue, job)), [0, 1, 2, 3]);
        queue.leave(&"a".into());
        assert_eq!(queue.names(), ["a", "b", "c"]);
        queue.leave(&"a".into());
        queue.leave(&"never".into());
        assert_eq!((before(&queue, "b"), queue.names()), (0, vec!["b".into(), "c".into()]));
    }

    #[test]
    fn who_waits_for_room_of_a_rule_of_its_own_holds_up_nobody_else() {
        let small = Admit { max_jobs: Some(1), ..rule("vision", "v-*") };
        let config = Config { admit: vec![small, rule("speech", "s-*")], ..Config::default() };
        let mut queue = Queue::default();
        queue.enter(&tenant("v-2", "vision", 1));
        let held = [tenant("v-1", "vision", 1)];
        assert_eq!(queue.before(&config, &held, &"s-1".into()), 0);
        assert_eq!(queue.before(&config, &[], &"s-1".into()), 1, "its turn, once there is room");
    }
}
