//! Moves of running jobs to other aggregators, at an operator's request.
//!
//! A move has three steps. This aggregator asks the target whether it would admit the job. Then it
//! prepares all ranks: each tries out the target too. Until then, nothing has changed, and any
//! failure leaves the job where it is. At last all ranks are told to move, as they do when their
//! aggregator fails. From then on, the rules of a failover decide where they meet.

use std::net::SocketAddr;
use std::time::Duration;

use racksum_net::quic::{CallOptions, Credentials, ask_room, ask_status};
use racksum_proto::control::Join;
use racksum_proto::counted::counted;
use racksum_proto::job_name::JobName;
use racksum_proto::move_target::MoveTarget;
use racksum_proto::peer_text::PeerText;
use racksum_proto::status::{AggregatorStatus, JobState};
use racksum_proto::time::Span;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::parent_session::{NotFound, find};
use crate::registry::{MovableJob, SharedRegistry, lock};

/// The time limit for the target to answer.
const PATIENCE: Span = Span::from_secs(5);
/// The time limit for all ranks to prepare. It exceeds the time that a rank waits for ops that
/// started before it was asked to prepare.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(25);
/// The time limit for all ranks to leave, once they are told to. Ranks that do not follow are lost
/// after 20 seconds.
const DEPART_TIMEOUT: Duration = Duration::from_secs(25);
/// The time limit for the job to run at the target, once all ranks have left. It exceeds the time
/// that the target waits for the ranks.
const ARRIVE_TIMEOUT: Duration = Duration::from_secs(25);
/// How often to ask whether the job runs at the target.
const ARRIVE_POLL: Duration = Duration::from_millis(50);

/// An operator's request.
#[derive(Debug)]
pub(crate) enum Operation {
    /// Move all groups of a job, or one if the name has a group.
    Move(JobName),
    /// Move all jobs, and then stop as at SIGTERM.
    Drain,
}

/// Carries out an operator's request, even if the caller disconnects, and sets `drain` if the
/// aggregator at `own` is to stop. Returns the number of moved jobs.
///
/// # Errors
/// Returns the reason why a job stays, as a sentence for the operator.
pub(crate) async fn start(
    registry: SharedRegistry,
    drain: watch::Sender<bool>,
    own: SocketAddr,
    (operation, to): (Operation, MoveTarget),
) -> Result<u16, String> {
    let moving = tokio::spawn(async move {
        let mover = Mover { registry, own, to };
        let moved = mover.move_all(&operation).await?;
        if let Operation::Drain = operation {
            drain.send_replace(true);
        }
        Ok(moved)
    });
    moving.await.unwrap_or_else(|error| Err(format!("the move failed: {error}")))
}

/// The end of a job's move.
enum Moved {
    /// The job runs at the target.
    Arrived,
    /// The job had ended before its ranks were told to move.
    Ended,
}

/// The moves of one request.
struct Mover {
    registry: SharedRegistry,
    /// The address of this aggregator.
    own: SocketAddr,
    to: MoveTarget,
}

impl Mover {
    async fn move_all(&self, operation: &Operation) -> Result<u16, String> {
        self.to.check()?;
        let names = match operation {
            Operation::Move(job) => {
                job.check()?;
                let names = lock(&self.registry).groups_of(Some(job));
                if names.is_empty() {
                    return Err(format!(
                        "job {job:?} is not here; `racksum status` lists the jobs of an aggregator"
                    ));
                }
                names
            }
            Operation::Drain => {
                let registry = lock(&self.registry);
                let names = registry.groups_of(None).into_iter();
                // A job that has not started ends like at SIGTERM: its ranks join elsewhere.
                names.filter(|name| !registry.is_gathering(name)).collect()
            }
        };
        let (mut moved, mut stay) = (0, vec![]);
        for name in &names {
            match self.move_job(name).await {
                Ok(Moved::Arrived) => moved += 1,
                // An operator who drains an aggregator wants it empty, which this job helps.
                Ok(Moved::Ended) if matches!(operation, Operation::Drain) => {}
                Ok(Moved::Ended) => stay.push(format!("job {name:?} ended before it could move")),
                Err(why) => stay.push(why),
            }
        }
        if stay.is_empty() {
            return Ok(moved);
        }
        let before = match moved {
            0 => String::new(),
            moved => format!("; {} moved", counted(moved, "other job")),
        };
        Err(stay.join("; ") + &before)
    }

    /// Moves one job. If it fails before the ranks are told to move, the job stays as it is.
    async fn move_job(&self, name: &JobName) -> Result<Moved, String> {
        let stays = |why: &str| format!("job {name:?} stays at this aggregator: {why}");
        if !lock(&self.registry).serves(name) {
            return Ok(Moved::Ended);
        }
        let job = lock(&self.registry).movable(name)?;
        let target = self.find_room(&job).await.map_err(|why| stays(&why))?;
        let prepared = lock(&self.registry).prepare_move(name, job.id, &self.to);
        let prepared = match prepared {
            Ok(prepared) => prepared,
            Err(_) if !lock(&self.registry).serves(name) => return Ok(Moved::Ended),
            Err(why) => return Err(why),
        };
        let prepared = match timeout(PREPARE_TIMEOUT, prepared).await {
            Ok(Ok(Ok(()))) => Ok(()),
            Ok(Ok(Err(why))) => Err(why),
            Ok(Err(_)) => return Ok(Moved::Ended),
            Err(_) => Err(format!(
                "some ranks did not prepare within {} s; see the logs of the ranks",
                PREPARE_TIMEOUT.as_secs()
            )),
        };
        let departed = match &prepared {
            Ok(()) => lock(&self.registry).begin_move(name, job.id),
            Err(_) => None,
        };
        let Some(departed) = departed else {
            lock(&self.registry).cancel_move(name, job.id);
            let changed = || "a rank left or joined meanwhile; try again".to_owned();
            return Err(stays(&prepared.err().unwrap_or_else(changed)));
        };
        // Ignore the outcome: whether the job runs at the target decides.
        drop(timeout(DEPART_TIMEOUT, departed).await);
        self.await_arrival(name, &target).await.map(|()| Moved::Arrived)
    }

    /// Asks every aggregator of the target whether it would admit the job. Returns the addresses of
    /// the first, and what to call them with.
    async fn find_room(&self, job: &MovableJob) -> Result<Target, String> {
        let (identity, insecure) = {
            let registry = lock(&self.registry);
            (registry.config().identity.clone(), registry.config().insecure)
        };
        // The identity is read for each move, since it may have been renewed.
        let credentials = Credentials::read(identity, insecure).await;
        let credentials = credentials.map_err(|why| why.to_string())?;
        let caller = CallOptions { from: None, credentials, patience: PATIENCE };
        let stripes = u8::try_from(self.to.hosts.len()).unwrap_or(u8::MAX);
        let mut first = None;
        for (place, host) in (0..).zip(&self.to.hosts) {
            let addrs = find(self.own, host).await.map_err(NotFound::why)?;
            let join = Join { stripe: (place, stripes), ..job.join.clone() };
            let addr = ask_each(&addrs, &join, &caller).await;
            first.get_or_insert(addr.map_err(|why| format!("{host}: {why}"))?);
        }
        let addr = first.ok_or("no target is given")?;
        Ok(Target { addr, caller })
    }

    /// Waits until a job whose ranks have left runs at the target.
    async fn await_arrival(&self, name: &JobName, target: &Target) -> Result<(), String> {
        let deadline = Instant::now() + ARRIVE_TIMEOUT;
        let runs = JobState::Running.name();
        loop {
            let status = ask_status(target.addr, &target.caller).await;
            let status =
                status.ok().and_then(|it| serde_json::from_str::<AggregatorStatus>(&it).ok());
            let mut jobs = status.iter().flat_map(|status| &status.jobs);
            if jobs.any(|job| job.job == name.name && job.group == name.group && job.state == runs)
            {
                return Ok(());
            }
            if lock(&self.registry).serves(name) {
                return Err(format!(
                    "job {name:?} has come back to this aggregator: its ranks did not all reach {}",
                    self.to
                ));
            }
            if Instant::now() >= deadline {
                return Err(format!(
                    "job {name:?} has left, but does not run at {}; it may have ended, or have \
                     moved on: see its ranks, and `racksum status` of their aggregators",
                    self.to
                ));
            }
            sleep(ARRIVE_POLL).await;
        }
    }
}

/// An aggregator that has room for a job.
struct Target {
    addr: SocketAddr,
    caller: CallOptions,
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
