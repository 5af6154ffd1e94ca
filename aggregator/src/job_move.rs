//! Moves of running jobs to other aggregators, at an operator's request.
//!
//! A move has three steps. This aggregator asks the target whether it would admit the job. Then it
//! prepares all ranks: each tries out the target too. Until then, nothing has changed, and any
//! failure leaves the job where it is, with all its groups. At last all ranks are told to move, as
//! they do when their aggregator fails. From then on, the rules of a failover decide where they
//! meet. If another job has taken the room at the target meanwhile, the ranks come back.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use racksum_net::quic::{CallOptions, Credentials, ask_room, ask_status};
use racksum_proto::control::Join;
use racksum_proto::counted::counted;
use racksum_proto::job_name::JobName;
use racksum_proto::move_target::MoveTarget;
use racksum_proto::peer_text::PeerText;
use racksum_proto::rank_list::named;
use racksum_proto::status::{AggregatorStatus, JobState, JobStatus};
use racksum_proto::time::Span;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::parent_session::{NotFound, find};
use crate::registry::{MovableJob, SharedRegistry, lock};

/// The time limit for the target to answer.
const PATIENCE: Span = Span::from_secs(5);
/// The time limit for all ranks to prepare. It exceeds the time that a rank waits for ops that
/// started before it was asked to prepare.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(25);
/// The time limit for all ranks to leave, once they are told to. If only some leave, they are lost
/// after 20 seconds.
const DEPART_TIMEOUT: Duration = Duration::from_secs(25);
/// The time limit for the job to run at the target, once all ranks have left. It exceeds the time
/// that the target waits for the ranks.
const ARRIVE_TIMEOUT: Duration = Duration::from_secs(25);
/// How often to ask whether the job runs at the target.
const ARRIVE_POLL: Duration = Duration::from_millis(50);

/// The reason why a job stays once the operator has disconnected.
const CALLER_GONE: &str = "the command that asked for the move has ended";

/// An operator's request.
#[derive(Debug)]
pub(crate) enum Operation {
    /// Move all groups of a job, or one if the name has a group.
    Move(JobName),
    /// Move all jobs, and then stop as at SIGTERM.
    Drain,
}

/// Carries out an operator's request, and sets `drain` if the aggregator at `own` is to stop.
/// Returns the number of moved groups. If this future is dropped because the caller disconnects,
/// moves that have not begun are cancelled. A move that has begun is finished.
///
/// # Errors
/// Returns the reason why a job stays, as a sentence for the operator.
pub(crate) async fn start(
    registry: SharedRegistry,
    drain: watch::Sender<bool>,
    own: SocketAddr,
    (operation, to): (Operation, MoveTarget),
) -> Result<u16, String> {
    let (_present, caller) = watch::channel(());
    let moving = tokio::spawn(async move {
        let mover = Mover { registry, own, to, caller };
        let moved = match &operation {
            Operation::Move(job) => mover.move_named(job).await,
            Operation::Drain => mover.move_all().await,
        };
        if mover.has_no_caller() {
            tracing::info!(?operation, ?moved, "the operator's command ended before its request");
        }
        if matches!(operation, Operation::Drain) && moved.is_ok() {
            drain.send_replace(true);
        }
        moved
    });
    moving.await.unwrap_or_else(|error| Err(format!("the move failed: {error}")))
}

/// The moves of one request.
struct Mover {
    registry: SharedRegistry,
    /// The address of this aggregator.
    own: SocketAddr,
    to: MoveTarget,
    /// A channel that closes once the caller has disconnected.
    caller: watch::Receiver<()>,
}

/// A group of a job that is to move.
struct MovingGroup<'a> {
    name: &'a JobName,
    job: MovableJob,
    target: Target,
    /// The number of the move that its ranks were asked to prepare for.
    number: Option<u32>,
}

/// An aggregator that has room for a group.
struct Target {
    addr: SocketAddr,
    caller: CallOptions,
    /// The time before which the target was asked, and had no job with the group's name.
    asked_at: Instant,
}

impl Mover {
    /// Moves all groups of a job, or one if the name has a group.
    async fn move_named(&self, job: &JobName) -> Result<u16, String> {
        self.to.check()?;
        job.check()?;
        let names = lock(&self.registry).groups_of(job);
        match self.move_groups(&names).await? {
            0 => Err(format!("job {job:?} is not here: {}", lock(&self.registry).absence_of(job))),
            moved => Ok(moved),
        }
    }

    /// Moves all jobs. Meanwhile, this aggregator admits no other jobs.
    async fn move_all(&self) -> Result<u16, String> {
        self.to.check()?;
        let (hand_over, names) = HandOver::begin(&self.registry)?;
        let moved = self
            .move_started(names)
            .await
            .map_err(|why| format!("{why}; the aggregator does not stop, and admits jobs again"))?;
        hand_over.finish();
        Ok(moved)
    }

    /// Moves these groups of jobs, job by job.
    async fn move_started(&self, names: BTreeSet<JobName>) -> Result<u16, String> {
        if !names.is_empty() {
            // Otherwise, each of many jobs would wait for an answer, one after the other.
            self.unless_gone(self.check_target()).await?;
        }
        let mut jobs = BTreeMap::<_, Vec<_>>::new();
        for name in names {
            jobs.entry(name.name.clone()).or_default().push(name);
        }
        let (mut moved, mut stay) = (0, vec![]);
        for groups in jobs.values() {
            match self.move_groups(groups).await {
                // An operator who drains an aggregator wants it empty, which jobs that end help.
                Ok(groups) => moved += groups,
                Err(why) => stay.push(why),
            }
        }
        if stay.is_empty() {
            return Ok(moved);
        }
        Err(stay.join("; ") + &others_moved(moved, "other job"))
    }

    /// Moves these groups of a job together: if one of them cannot move, all stay. Leaves out
    /// groups that have ended. Returns the number of moved groups.
    async fn move_groups(&self, names: &[JobName]) -> Result<u16, String> {
        let mut groups = Vec::new();
        for name in names {
            let movable = lock(&self.registry).movable(name);
            let job = match movable {
                Ok(job) => job,
                Err(_) if !lock(&self.registry).serves(name) => continue,
                Err(why) => return Err(why),
            };
            let target = self.unless_gone(self.find_room(&job)).await;
            let target = target.map_err(|why| stays(name, &why))?;
            groups.push(MovingGroup { name, job, target, number: None });
        }
        self.move_prepared(&mut groups).await
    }

    /// Prepares and moves these groups of a job, for which there is room at the target.
    async fn move_prepared(&self, groups: &mut Vec<MovingGroup<'_>>) -> Result<u16, String> {
        let prepared = self.prepare(groups).await;
        let begun = prepared.and_then(|()| {
            let each = groups.iter().filter_map(|group| Some((group.name, group.number?)));
            let begun = lock(&self.registry).begin_moves(&each.collect::<Vec<_>>());
            begun.map_err(|(name, why)| stays(&name, &why))
        });
        match begun {
            Ok(departed) => self.finish(groups, departed).await,
            Err(why) => {
                for group in groups.iter() {
                    if let Some(number) = group.number {
                        lock(&self.registry).cancel_move(group.name, number);
                    }
                }
                Err(why)
            }
        }
    }

    /// Prepares all ranks of these groups, and removes groups that end meanwhile.
    async fn prepare(&self, groups: &mut Vec<MovingGroup<'_>>) -> Result<(), String> {
        let mut answers = JoinSet::new();
        for (at, group) in groups.iter_mut().enumerate() {
            let asked = lock(&self.registry).prepare_move(group.name, group.job.id, &self.to);
            match asked {
                Ok((number, answer)) => {
                    group.number = Some(number);
                    drop(answers.spawn(async move { (at, answer.await) }));
                }
                Err(_) if !self.is_here(group) => {}
                Err(why) => return Err(why),
            }
        }
        let all = async {
            while let Some(answered) = answers.join_next().await {
                if let Ok((at, Ok(Err(why)))) = answered {
                    return Err(stays(groups[at].name, &why));
                }
            }
            Ok(())
        };
        let first = groups.first().map(|group| group.name);
        tokio::select! {
            all = timeout(PREPARE_TIMEOUT, all) => all.unwrap_or_else(|_| Err(self.late(groups)))?,
            () = self.no_caller() => {
                return Err(match first {
                    Some(name) => stays(name, CALLER_GONE),
                    None => CALLER_GONE.to_owned(),
                });
            }
        }
        groups.retain(|group| self.is_here(group));
        Ok(())
    }

    /// Returns whether a group has not ended. Another job may have its name since.
    fn is_here(&self, group: &MovingGroup<'_>) -> bool {
        lock(&self.registry).serves_run(group.name, group.job.id)
    }

    /// Returns which ranks of these groups have not prepared in time.
    fn late(&self, groups: &[MovingGroup<'_>]) -> String {
        let late = groups.iter().filter_map(|group| {
            Some((group.name, lock(&self.registry).unprepared(group.name, group.number?)))
        });
        let late = late.filter(|(_, ranks)| !ranks.is_empty()).map(|(name, ranks)| {
            let why = format!(
                "{} did not prepare within {} s; see the logs of the ranks",
                named(ranks),
                PREPARE_TIMEOUT.as_secs()
            );
            stays(name, &why)
        });
        late.collect::<Vec<_>>().join("; ")
    }

    /// Waits until these groups, whose ranks were told to move, run at the target.
    async fn finish(
        &self,
        groups: &[MovingGroup<'_>],
        departed: Vec<oneshot::Receiver<()>>,
    ) -> Result<u16, String> {
        let deadline = Instant::now() + DEPART_TIMEOUT;
        for departed in departed {
            // Ignore the outcome: which ranks are still here decides.
            drop(timeout_at(deadline, departed).await);
        }
        let stayed = groups.iter().map(|group| {
            let number = group.number?;
            Some(lock(&self.registry).end_move(group.name, number))
        });
        let stayed: Vec<_> = stayed.map(Option::unwrap_or_default).collect();
        let deadline = Instant::now() + ARRIVE_TIMEOUT;
        let (mut moved, mut stay) = (0, vec![]);
        for (group, stayed) in groups.iter().zip(stayed) {
            match self.await_arrival(group, stayed, deadline).await {
                Ok(()) => moved += 1,
                Err(why) => stay.push(why),
            }
        }
        if stay.is_empty() {
            return Ok(moved);
        }
        Err(stay.join("; ") + &others_moved(moved, "other group"))
    }

    /// Returns whether the caller has disconnected.
    fn has_no_caller(&self) -> bool {
        self.caller.has_changed().is_err()
    }

    /// Returns the outcome of `work`, unless the caller disconnects before.
    async fn unless_gone<T>(
        &self,
        work: impl Future<Output = Result<T, String>>,
    ) -> Result<T, String> {
        tokio::select! {
            biased;
            () = self.no_caller() => Err(CALLER_GONE.to_owned()),
            done = work => done,
        }
    }

    /// Waits until the caller has disconnected.
    async fn no_caller(&self) {
        let mut caller = self.caller.clone();
        while caller.changed().await.is_ok() {}
    }

    /// Returns the options for calls to the target.
    async fn call_options(&self) -> Result<CallOptions, String> {
        let (identity, insecure) = {
            let registry = lock(&self.registry);
            (registry.config().identity.clone(), registry.config().insecure)
        };
        // The identity is read for each move, since it may have been renewed.
        let credentials = Credentials::read(identity, insecure).await;
        let credentials = credentials.map_err(|why| why.to_string())?;
        Ok(CallOptions { from: None, credentials, patience: PATIENCE })
    }

    /// Checks that every aggregator of the target answers.
    async fn check_target(&self) -> Result<(), String> {
        let caller = self.call_options().await?;
        for host in &self.to.hosts {
            let mut tried = Vec::new();
            for addr in find(self.own, host).await.map_err(NotFound::why)? {
                match ask_status(addr, &caller).await {
                    Ok(_) => {
                        tried.clear();
                        break;
                    }
                    Err(why) => tried.push(why.to_string()),
                }
            }
            if !tried.is_empty() {
                return Err(format!("{host}: {}", tried.join("; ")));
            }
        }
        Ok(())
    }

    /// Asks every aggregator of the target whether it would admit the job. Returns the first.
    async fn find_room(&self, job: &MovableJob) -> Result<Target, String> {
        let caller = self.call_options().await?;
        let stripes = u8::try_from(self.to.hosts.len()).unwrap_or(u8::MAX);
        let (asked_at, mut first) = (Instant::now(), None);
        for (place, host) in (0..).zip(&self.to.hosts) {
            let addrs = find(self.own, host).await.map_err(NotFound::why)?;
            let join = Join { stripe: (place, stripes), ..job.join.clone() };
            let addr = ask_each(&addrs, &join, &caller).await;
            first.get_or_insert(addr.map_err(|why| format!("{host}: {why}"))?);
        }
        let addr = first.ok_or("no target is given")?;
        Ok(Target { addr, caller, asked_at })
    }

    /// Waits until a group whose ranks were told to leave runs at the target. `stayed` holds the
    /// ranks that did not leave in time.
    async fn await_arrival(
        &self,
        group: &MovingGroup<'_>,
        stayed: Vec<u16>,
        deadline: Instant,
    ) -> Result<(), String> {
        let (name, to) = (group.name, &self.to);
        if !stayed.is_empty() {
            return Err(format!(
                "{} of job {name:?} did not leave for {to} within {} s; see the logs of the ranks",
                named(stayed),
                DEPART_TIMEOUT.as_secs()
            ));
        }
        loop {
            let status = ask_status(group.target.addr, &group.target.caller).await;
            let status =
                status.ok().and_then(|it| serde_json::from_str::<AggregatorStatus>(&it).ok());
            let mut jobs = status.iter().flat_map(|status| &status.jobs);
            if jobs.any(|job| group.runs_as(job)) {
                lock(&self.registry).note_moved(name.clone(), to.clone(), Instant::now());
                return Ok(());
            }
            if lock(&self.registry).serves(name) {
                return Err(format!(
                    "job {name:?} has come back to this aggregator: its ranks were not all \
                     admitted at {to}; see the logs of the ranks"
                ));
            }
            if Instant::now() >= deadline {
                return Err(format!(
                    "job {name:?} has left, but does not run at {to}; it may have ended, or have \
                     moved on: see its ranks, and `racksum status` of their aggregators"
                ));
            }
            sleep(ARRIVE_POLL).await;
        }
    }
}

/// The hand-over of an aggregator's jobs. If it is dropped before it finishes, even by a panic, the
/// aggregator admits jobs again.
struct HandOver<'a>(Option<&'a SharedRegistry>);

impl<'a> HandOver<'a> {
    /// Begins to hand all jobs over. Returns the jobs to move.
    fn begin(registry: &'a SharedRegistry) -> Result<(Self, BTreeSet<JobName>), String> {
        let names = lock(registry).begin_hand_over()?;
        Ok((Self(Some(registry)), names))
    }

    /// Leaves the aggregator closed, since it now stops.
    fn finish(mut self) {
        self.0 = None;
    }
}

impl Drop for HandOver<'_> {
    fn drop(&mut self) {
        if let Some(registry) = self.0 {
            lock(registry).end_hand_over();
        }
    }
}

impl MovingGroup<'_> {
    /// Returns whether a job of the target is this group. When the target was asked, it had no job
    /// with this name, and another job that has taken the name since is of other shape, or refuses
    /// this group's ranks.
    fn runs_as(&self, job: &JobStatus) -> bool {
        let (name, join) = (self.name, &self.job.join);
        let is_new = u128::from(job.age_ms) <= self.target.asked_at.elapsed().as_millis();
        (&job.job, &job.group) == (&name.name, &name.group)
            && (job.generation, job.world) == (join.generation.0, join.world)
            && job.state == JobState::Running.name()
            && is_new
    }
}

/// Returns the sentence that a job does not move.
fn stays(name: &JobName, why: &str) -> String {
    format!("job {name:?} stays at this aggregator: {why}")
}

/// Returns the end of a sentence, which counts the moved jobs or groups if there are any.
fn others_moved(moved: u16, what: &str) -> String {
    match moved {
        0 => String::new(),
        moved => format!("; {} moved", counted(moved, what)),
    }
}

/// Asks the addresses of one aggregator in order whether it would admit a join. Returns the address
/// that would.
async fn ask_each(
    addrs: &[SocketAddr],
    join: &Join,
    caller: &CallOptions,
) -> Result<SocketAddr, String> {
    let mut tried = Vec::new();
    for addr in addrs {
        match ask_room(*addr, join.clone(), caller).await {
            Ok(()) => return Ok(*addr),
            Err(why) => tried.push(why.to_string()),
        }
    }
    Err(PeerText::of(tried.join("; ")).to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use racksum_proto::control::FromAggregator;

    use super::*;
    use crate::config::{Config, Fanout};
    use crate::registry::tests::{join, registry, wish};

    #[test]
    fn a_move_whose_command_ends_before_it_begins_is_cancelled() {
        let mut registry = registry(Fanout::Unicast, 0);
        let name = JobName::from("job");
        let (_seat, _, mut inbox) = join(&mut registry, wish("job", 0, 1)).unwrap();
        let job = registry.movable(&name).unwrap();
        let registry = Arc::new(Mutex::new(registry));
        let nowhere: SocketAddr = "127.0.0.1:9".parse().unwrap();
        let credentials = Credentials::read_blocking(None, false).unwrap();
        let caller = CallOptions { from: None, credentials, patience: PATIENCE };
        let to = MoveTarget { hosts: vec!["agg-2:7177".into()] };
        let (present, gone) = watch::channel(());
        let mover = Mover { registry: Arc::clone(&registry), own: nowhere, to, caller: gone };
        let target = Target { addr: nowhere, caller, asked_at: Instant::now() };
        let mut groups = vec![MovingGroup { name: &name, job, target, number: None }];
        drop(present);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let why = runtime.block_on(mover.move_prepared(&mut groups)).unwrap_err();
        let ended = "job \"job\" stays at this aggregator: the command that asked for the move has \
                     ended";
        assert_eq!(why, ended);
        let last = std::iter::from_fn(|| inbox.try_recv().ok()).last();
        assert_eq!(last, Some(FromAggregator::CancelMove { number: 1 }));
        assert!(lock(&registry).movable(&name).is_ok());
    }

    #[test]
    fn a_drain_whose_command_ends_asks_no_target_for_the_jobs_that_are_left() {
        let mut registry = registry(Fanout::Unicast, 0);
        let (_seat, _, mut inbox) = join(&mut registry, wish("job", 0, 1)).unwrap();
        while inbox.try_recv().is_ok() {}
        let registry = Arc::new(Mutex::new(registry));
        let (present, gone) = watch::channel(());
        drop(present);
        let own = "127.0.0.1:9".parse().unwrap();
        let to = MoveTarget { hosts: vec!["agg-2:7177".into()] };
        let mover = Mover { registry: Arc::clone(&registry), own, to, caller: gone };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let why = runtime.block_on(mover.move_all()).unwrap_err();
        let goes_on = "; the aggregator does not stop, and admits jobs again";
        assert_eq!(why, format!("{CALLER_GONE}{goes_on}"));
        let why = runtime.block_on(mover.move_groups(&["job".into()])).unwrap_err();
        assert_eq!(why, format!("job \"job\" stays at this aggregator: {CALLER_GONE}"));
        assert!(inbox.try_recv().is_err(), "no rank is asked to prepare");
        assert!(!lock(&registry).status(own).draining);
    }

    #[test]
    fn a_drain_to_a_target_that_does_not_answer_fails_once_for_all_jobs() {
        let mut registry = registry(Fanout::Unicast, 0);
        registry.reconfigure(Config { max_jobs: 2, ..registry.config().clone() });
        let joined = ["a", "b"].map(|name| join(&mut registry, wish(name, 0, 1)).unwrap());
        let (_present, caller) = watch::channel(());
        let own = "127.0.0.1:9".parse().unwrap();
        let to = MoveTarget { hosts: vec!["[::1]:7177".into()] };
        let registry = Arc::new(Mutex::new(registry));
        let mover = Mover { registry: Arc::clone(&registry), own, to, caller };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let why = runtime.block_on(mover.move_all()).unwrap_err();
        assert!(
            why.starts_with("this aggregator serves on 127.0.0.1, which cannot reach"),
            "{why}"
        );
        assert!(!lock(&registry).status(own).draining);
        drop(joined);
    }

    #[test]
    fn a_drain_that_is_dropped_in_its_midst_opens_the_aggregator_again() {
        let mut registry = registry(Fanout::Unicast, 0);
        let joined = join(&mut registry, wish("job", 0, 1)).unwrap();
        let (_present, caller) = watch::channel(());
        let own = "127.0.0.1:9".parse().unwrap();
        let to = MoveTarget { hosts: vec!["127.0.0.1:7".into()] };
        let registry = Arc::new(Mutex::new(registry));
        let mover = Mover { registry: Arc::clone(&registry), own, to, caller };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            tokio::select! {
                biased;
                moved = mover.move_all() => panic!("the drain waits for its target: {moved:?}"),
                () = std::future::ready(()) => {}
            }
        });
        assert!(!lock(&registry).status(own).draining);
        drop(joined);
    }

    #[test]
    fn another_job_with_the_name_of_the_one_that_moves_is_no_proof_of_its_arrival() {
        let mut registry = registry(Fanout::Unicast, 0);
        let name = JobName::from("job");
        let (_seat, _, _inbox) = join(&mut registry, wish("job", 0, 1)).unwrap();
        let job = registry.movable(&name).unwrap();
        let there = || registry.status("127.0.0.1:9".parse().unwrap()).jobs.remove(0);
        let credentials = Credentials::read_blocking(None, false).unwrap();
        let caller = CallOptions { from: None, credentials, patience: PATIENCE };
        let addr = "127.0.0.1:9".parse().unwrap();
        let asked_at = Instant::now() - Duration::from_secs(60);
        let target = Target { addr, caller, asked_at };
        let group = MovingGroup { name: &name, job, target, number: None };
        let arrived = JobStatus { age_ms: 1_000, ..there() };
        assert!(group.runs_as(&arrived));
        for other in [
            JobStatus { age_ms: 1_000_000, ..there() },
            JobStatus { generation: 1, ..arrived.clone() },
            JobStatus { world: 2, ..arrived.clone() },
            JobStatus { group: "dp".into(), ..arrived.clone() },
            JobStatus { state: JobState::Gathering.name().into(), ..arrived },
        ] {
            assert!(!group.runs_as(&other), "{other:?}");
        }
    }
}
