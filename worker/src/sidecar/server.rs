//! The sidecar, which answers callers and folds the operands of its ranks.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::local::{Line, Listener, Peer, is_known_user};
use racksum_net::log_limit::LogLimit;
use racksum_proto::job_name::JobName;
use racksum_proto::loss::Loss;
use racksum_proto::peer_text::PeerText;
use racksum_proto::status::{Memory, SidecarStatus};
use racksum_proto::time::{Span, Time};

use super::budget::Budget;
use super::caller_limit::CallerLimit;
use super::error_map::parting;
use super::job::HostJob;
use super::member::LOST;
use super::message::{FromRank, FromSidecar, Join, VERSION};
use super::queue::Queue;
use super::rank_session::RankSession;
use super::status::write_status;
use super::thread::spawn;
use crate::options::ConnectOptions;

/// The interval between checks for ops that have timed out.
const TICK: Duration = Duration::from_millis(100);

/// How long a caller may take to send its first message.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long a stopping sidecar waits for the threads of its ranks. This is enough for [`LINGER`],
/// for resending sums that ranks of other hosts may lack, and for the last message.
const STOP_TIMEOUT: Span = Span::from_secs(13);

/// How long a rank that leaves waits for its ops, which ranks of other hosts may not have called
/// yet.
const LINGER: Duration = Duration::from_secs(5);

/// How long a new caller waits while there are too many lines. A closed line counts until its
/// thread ends.
const PATIENCE_FOR_ROOM: Span = Span::from_millis(200);

/// Number of places for callers without a rank, in addition to one for each rank that may join.
const MAX_UNKNOWN: usize = 64;

/// Limits for all jobs of a sidecar together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of jobs.
    pub jobs: usize,
    /// Maximum number of ranks.
    pub ranks: usize,
    /// Maximum total size of the memory that ranks lend and of the sums of lists, in bytes.
    pub memory: usize,
}

/// A sidecar that serves the ranks of this host.
#[derive(Debug)]
pub struct Sidecar {
    listener: Arc<Listener>,
    pub(super) shared: Arc<ServerState>,
    threads: Vec<JoinHandle<()>>,
    /// The sender whose drop stops the tick thread.
    stop: Option<Sender<()>>,
}

/// State that the sidecar's threads share.
#[derive(Debug)]
pub(super) struct ServerState {
    jobs: Mutex<BTreeMap<JobName, Arc<HostJob>>>,
    /// Options for joining jobs at the aggregator, if there is one.
    upstream: Option<ConnectOptions>,
    limits: Limits,
    pub(super) budget: Arc<Budget>,
    /// Lines that have a thread, including closed lines whose threads have not ended yet.
    lines: Mutex<Vec<Arc<Line>>>,
    /// The lines of callers that have no rank.
    door: CallerLimit,
    pub(super) queue: Queue,
    /// Whether the sidecar accepts no more jobs.
    draining: AtomicBool,
    started: Time,
}

impl Sidecar {
    /// Starts a sidecar with `folders` fold threads, but at least one. If a job has ranks on other
    /// hosts, the sidecar joins it at the aggregator with the options in `upstream`. The requests
    /// of the ranks override the job, the ranks, the lanes and the timeouts in `upstream`.
    ///
    /// # Errors
    /// Returns the kernel's error if a thread cannot be started.
    pub fn start(
        listener: Listener,
        folders: usize,
        upstream: Option<ConnectOptions>,
        limits: Limits,
    ) -> io::Result<Self> {
        let shared = ServerState {
            jobs: Mutex::default(),
            upstream,
            limits,
            budget: Arc::new(Budget::new(limits.memory)),
            lines: Mutex::default(),
            door: CallerLimit::new(limits.ranks + MAX_UNKNOWN),
            queue: Queue::default(),
            draining: AtomicBool::new(false),
            started: Clock::start().now(),
        };
        let (listener, shared) = (Arc::new(listener), Arc::new(shared));
        let (stop, stopped) = channel();
        let threads = Vec::new();
        let mut sidecar = Self { listener, shared, threads, stop: Some(stop) };
        for _ in 0..folders.max(1) {
            let shared = Arc::clone(&sidecar.shared);
            sidecar.threads.push(spawn("racksum-fold", move || shared.queue.fold())?);
        }
        let (shared, listener) = (Arc::clone(&sidecar.shared), Arc::clone(&sidecar.listener));
        sidecar.threads.push(spawn("racksum-accept", move || shared.answer_all(&listener))?);
        let shared = Arc::clone(&sidecar.shared);
        let tick = move || {
            while stopped.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                shared.jobs().values().for_each(|job| job.check_time());
            }
        };
        sidecar.threads.push(spawn("racksum-tick", tick)?);
        Ok(sidecar)
    }

    /// Returns the number of jobs.
    #[must_use]
    pub fn jobs(&self) -> usize {
        self.shared.jobs().len()
    }

    /// Stops accepting jobs. Jobs that have begun continue; the sidecar refuses the others.
    pub fn drain(&self) {
        self.shared.draining.store(true, Relaxed);
        self.shared.jobs().values().for_each(|job| job.refuse(DRAINING));
    }
}

impl Drop for Sidecar {
    fn drop(&mut self) {
        self.listener.stop();
        drop(self.stop.take());
        let stops = FromSidecar::CutOff { why: "it was told to stop".into() };
        self.shared.jobs().values().for_each(|job| job.end(stops.clone()));
        self.shared.lines().iter().for_each(|line| line.hang_up());
        // Wait for the threads of these lines: they report to the aggregator that the ranks are
        // lost.
        let began = Clock::start().now();
        while !self.shared.lines().is_empty() && Clock::start().now().since(began) < STOP_TIMEOUT {
            std::thread::sleep(TICK / 10);
        }
        self.shared.queue.close();
        for thread in self.threads.drain(..) {
            // The join succeeds, because a panic of the thread would have ended the process.
            drop(thread.join());
        }
    }
}

/// Limits log messages about failed connections, and about callers that break the protocol.
static CALLERS: LogLimit = LogLimit::new(16);
/// Limits log messages about refused ranks, because all ranks of a job may be refused at the same
/// time.
static REFUSED: LogLimit = LogLimit::new(64);

impl ServerState {
    fn answer_all(self: &Arc<Self>, listener: &Listener) {
        loop {
            let line = match listener.accept() {
                Ok(Some(line)) => Arc::new(line),
                Ok(None) => return,
                // The caller has disconnected, or too many files are open. The next call may
                // succeed.
                Err(error) => {
                    CALLERS.note(|left_out| {
                        tracing::warn!(%error, left_out, "cannot accept a connection");
                    });
                    std::thread::sleep(TICK);
                    continue;
                }
            };
            if !self.let_in(&line) {
                CALLERS.note(|left_out| {
                    let most = self.most_lines();
                    tracing::warn!(left_out, most, "closing a new connection: too many are open");
                });
                continue;
            }
            let (shared, served) = (Arc::clone(self), Arc::clone(&line));
            let served = spawn("racksum-rank", move || {
                shared.serve(&served);
                shared.let_go(&served);
            });
            if let Err(error) = served {
                CALLERS.note(|left_out| {
                    tracing::warn!(%error, left_out, "cannot start a thread for a connection");
                });
                self.let_go(&line);
            }
        }
    }

    /// Admits a caller. If too many callers have not joined, disconnects one of them, so that no
    /// caller waits for silent ones. Returns false if there are still too many lines after
    /// [`PATIENCE_FOR_ROOM`]. The threads of closed lines may wait much longer for folds, and new
    /// callers must not wait that long.
    fn let_in(&self, line: &Arc<Line>) -> bool {
        let clock = Clock::start();
        let began = clock.now();
        while self.lines().len() >= self.most_lines() {
            if clock.now().since(began) > PATIENCE_FOR_ROOM {
                return false;
            }
            std::thread::sleep(TICK / 100);
        }
        self.lines().push(Arc::clone(line));
        // Ignore an error: the thread of this line detects it too, and ends.
        let uid = line.peer().map_or(u32::MAX, |peer| peer.uid);
        if let Some(uid) = self.door.enter(uid, line) {
            CALLERS.note(|left_out| {
                let what = "too many callers have no rank; disconnecting this user's oldest caller";
                tracing::warn!(uid, left_out, "{what}");
            });
        }
        true
    }

    /// Returns the maximum number of lines. This is enough for all ranks and all callers without a
    /// rank, and leaves room for closed lines.
    pub(super) const fn most_lines(&self) -> usize {
        2 * (self.limits.ranks + MAX_UNKNOWN)
    }

    fn let_go(&self, line: &Arc<Line>) {
        line.hang_up();
        self.door.leave(line);
        self.lines().retain(|other| !Arc::ptr_eq(other, line));
    }

    /// Serves a caller as a rank, or sends it the status, depending on its first message.
    fn serve(self: &Arc<Self>, line: &Arc<Line>) {
        let Ok(peer) = line.set_patience(Some(PATIENCE)).and_then(|()| line.peer()) else { return };
        if !is_known_user(peer.uid) {
            let reason = "the sidecar cannot identify this process's user; map the user's id into \
                          the sidecar's user namespace";
            return send(line, &FromSidecar::Refused { reason: reason.into() });
        }
        let first = match line.recv::<serde_json::Value>() {
            Ok(Some((first, _))) => first,
            Ok(None) => return,
            Err(error) => {
                return CALLERS.note(|left_out| {
                    let pid = peer.pid;
                    tracing::warn!(pid, %error, left_out, "cannot read a caller's first message");
                });
            }
        };
        // Check the version first, because this version may be unable to read the rest of another
        // version's message.
        let version = first.pointer("/join/version").and_then(serde_json::Value::as_u64);
        if version.is_some_and(|version| version != u64::from(VERSION)) {
            return send(line, &FromSidecar::WrongVersion { speaks: VERSION });
        }
        match serde_json::from_value(first) {
            Ok(FromRank::Join(join)) => self.serve_rank(line, &join, peer),
            Ok(FromRank::AskStatus) => self.send_status(line, peer),
            Ok(_) => CALLERS.note(|left_out| {
                let what = "a caller's first message was neither a join nor a status request";
                tracing::warn!(pid = peer.pid, left_out, "{what}");
            }),
            Err(error) => CALLERS.note(|left_out| {
                let (pid, error) = (peer.pid, PeerText::of(error));
                tracing::warn!(pid, %error, left_out, "a caller sent an invalid message");
            }),
        }
    }

    fn serve_rank(self: &Arc<Self>, line: &Arc<Line>, join: &Join, peer: Peer) {
        let patient = line.set_patience(None).map_err(|error| error.to_string());
        let job = match patient.and_then(|()| self.join(join, line, peer)) {
            Ok(job) => job,
            Err(reason) => {
                REFUSED.note(|left_out| {
                    let (job, rank, pid) = (&join.job, join.rank, peer.pid);
                    tracing::warn!(?job, rank, pid, reason, left_out, "join refused");
                });
                return send(line, &FromSidecar::Refused { reason });
            }
        };
        self.door.leave(line);
        tracing::info!(job = ?join.job, rank = join.rank, pid = peer.pid, "rank joined");
        let why = RankSession::new(&self.queue, &self.budget, line, &job, join.rank)
            .serve()
            .unwrap_or_else(|error| {
                LOST.note(|left_out| {
                    let (job, rank) = (&join.job, join.rank);
                    tracing::warn!(?job, rank, %error, left_out, "can no longer serve this rank");
                });
                Loss::Broke
            });
        tracing::info!(job = ?join.job, rank = join.rank, "{}", parting(why));
        match why {
            // Wait for ops that use the rank's memory, because the rank takes the memory back.
            Loss::Left => job.leave(join.rank, LINGER),
            why => job.part(join.rank, why),
        }
        self.jobs().retain(|_, job| !job.is_deserted());
    }

    /// Adds a rank to its job, or returns the reason why the rank is refused.
    pub(super) fn join(
        &self,
        join: &Join,
        line: &Arc<Line>,
        peer: Peer,
    ) -> Result<Arc<HostJob>, String> {
        check(join)?;
        if join.local_world < join.world && self.upstream.is_none() {
            let Join { local_world, world, .. } = *join;
            return Err(format!(
                "this host has {local_world} of the job's {world} ranks, and the sidecar has no \
                 aggregator for the others; restart the sidecar with \
                 `racksum worker --aggregator`, or correct `local_world`"
            ));
        }
        let mut jobs = self.jobs();
        let job = match jobs.get(&join.job) {
            // Another user may not begin the job's next life either.
            Some(job) if job.uid != peer.uid => {
                return Err(format!(
                    "job {:?} belongs to another user; choose another `job`",
                    join.job
                ));
            }
            // One user may have two jobs of the same name.
            Some(job) if !job.is_of(join) => return Err(job.is_another(join, peer)),
            Some(job) if job.generation == join.generation && !job.is_refused() => Arc::clone(job),
            Some(job) if job.generation > join.generation => {
                return Err(format!(
                    "job {:?} is in generation {}, and rank {} has the earlier generation {}; \
                     start the rank with the job's current `generation`",
                    join.job, job.generation.0, join.rank, join.generation.0
                ));
            }
            before => {
                self.check_room(join, &jobs)?;
                before.into_iter().for_each(|job| job.end(job.superseded(join, peer)));
                Arc::new(HostJob::new(join, peer))
            }
        };
        let is_to_call = job.join(join, line, peer)?;
        jobs.insert(join.job.clone(), Arc::clone(&job));
        if let Some(upstream) = self.upstream.clone().filter(|_| is_to_call) {
            let called = Arc::clone(&job);
            if let Err(error) = spawn("racksum-call", move || called.call(&upstream)) {
                let reason = format!(
                    "cannot start a thread to call the aggregator: {error}; raise the sidecar's \
                     limit on threads (ulimit -u)"
                );
                job.refuse(&reason);
                // Remove the rank here, because its own thread does so only after a successful
                // join.
                job.part(join.rank, Loss::Broke);
                jobs.retain(|_, job| !job.is_deserted());
                return Err(reason);
            }
        }
        Ok(job)
    }

    /// Checks that the sidecar accepts a new job and has room for its ranks on this host.
    fn check_room(
        &self,
        join: &Join,
        jobs: &BTreeMap<JobName, Arc<HostJob>>,
    ) -> Result<(), String> {
        if self.draining.load(Relaxed) {
            return Err(DRAINING.into());
        }
        let others = || jobs.iter().filter(|(name, _)| **name != join.job);
        let Limits { jobs: most, ranks: most_ranks, .. } = self.limits;
        // Groups of one job count as one job.
        let names: BTreeSet<_> = others().map(|(other, _)| &other.name).collect();
        if !names.contains(&join.job.name) && names.len() >= most {
            return Err(format!(
                "the sidecar already serves its maximum number of jobs, {most}; raise `racksum \
                 worker --max-jobs`"
            ));
        }
        let ranks: usize = others().map(|(_, job)| job.seats()).sum();
        if ranks + usize::from(join.local_world) > most_ranks {
            return Err(format!(
                "the job's ranks on this host ({}) and the ranks of other jobs ({ranks}) exceed \
                 the sidecar's limit, {most_ranks}; raise `racksum worker --max-ranks`",
                join.local_world
            ));
        }
        Ok(())
    }

    /// Sends a caller the status, with the jobs that the caller may see.
    fn send_status(&self, line: &Line, peer: Peer) {
        let sees_all = peer.uid == 0 || peer.uid == own_uid();
        let jobs = self.jobs();
        let seen = jobs.values().filter(|job| sees_all || job.uid == peer.uid);
        let upstream = self.upstream.iter();
        let sets = upstream.flat_map(|it| std::iter::once(&it.aggregators).chain(&it.standbys));
        let status = SidecarStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            up_ms: Clock::start().now().since(self.started).as_millis(),
            aggregators: sets.map(|set| set.join("+")).collect(),
            insecure: self.upstream.as_ref().is_some_and(|it| it.insecure),
            draining: self.draining.load(Relaxed),
            max_jobs: self.limits.jobs,
            max_ranks: self.limits.ranks,
            ranks: jobs.values().map(|job| job.ranks()).sum(),
            memory: Memory { used: self.budget.used() as u64, limit: self.budget.most() as u64 },
            jobs: seen.map(|job| job.status()).collect(),
        };
        drop(jobs);
        // A caller that has disconnected or does not read needs no answer.
        drop(write_status(&status, line));
    }

    fn jobs(&self) -> MutexGuard<'_, BTreeMap<JobName, Arc<HostJob>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lines(&self) -> MutexGuard<'_, Vec<Arc<Line>>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Checks that a request to join is internally consistent.
fn check(join: &Join) -> Result<(), String> {
    let Join { ref job, rank, world, local_world, lanes, .. } = *join;
    job.check()?;
    if world == 0 || rank >= world {
        return Err(format!("rank {rank} must be below the number of ranks, {world}"));
    }
    if local_world == 0 || local_world > world {
        return Err(format!("`local_world` must be from 1 to {world}, not {local_world}"));
    }
    if lanes == 0 {
        return Err("`lanes` must be at least 1, not 0".into());
    }
    Ok(())
}

/// Returns the user id of this process.
fn own_uid() -> u32 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").map_or(u32::MAX, |own| own.uid())
}

fn send(line: &Line, message: &FromSidecar) {
    // A caller that has disconnected needs no message.
    drop(line.send_now(message, None));
}

/// The reason that a draining sidecar gives when it refuses a job.
const DRAINING: &str = "the sidecar is draining and takes no more jobs";
