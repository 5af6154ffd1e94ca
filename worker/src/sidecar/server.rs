//! The sidecar: answers ranks, and folds what they hand it.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use racksum_net::local::{Line, LineError, Listener, Peer, SharedMemory};
use racksum_proto::control::Loss;
use racksum_proto::descriptor::Descriptor;

use super::fold::Place;
use super::job::Job;
use super::message::{FromRank, FromSidecar, Join, VERSION};
use super::queue::{Queue, Task};
use crate::options::ConnectOptions;

/// How often ops are looked for that have taken too long.
const TICK: Duration = Duration::from_millis(100);

/// Memories that a rank may lend: a process may have 65530 mappings.
const MAX_MEMORIES: usize = 4096;

/// A sidecar that serves the ranks of this host.
#[derive(Debug)]
pub struct Sidecar {
    listener: Arc<Listener>,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Ends the ticks.
    stop: Option<Sender<()>>,
}

/// What its threads share.
#[derive(Debug, Default)]
struct Shared {
    jobs: Mutex<HashMap<String, Arc<Job>>>,
    /// How to call the aggregator, if there is one.
    upstream: Option<ConnectOptions>,
    /// Those that have called and not hung up.
    lines: Mutex<Vec<Arc<Line>>>,
    queue: Queue,
}

impl Sidecar {
    /// Serves whoever calls, with so many threads to fold. Jobs that have ranks on other hosts are
    /// joined as `upstream` says, whose job and ranks are of no interest.
    ///
    /// # Errors
    /// The kernel's, when there are no threads.
    pub fn start(
        listener: Listener,
        folders: usize,
        upstream: Option<ConnectOptions>,
    ) -> io::Result<Self> {
        let shared = Shared { upstream, ..Shared::default() };
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

    /// How many jobs it has.
    #[must_use]
    pub fn jobs(&self) -> usize {
        self.shared.jobs().len()
    }
}

impl Drop for Sidecar {
    fn drop(&mut self) {
        self.listener.stop();
        drop(self.stop.take());
        self.shared.lines().iter().for_each(|line| line.hang_up());
        self.shared.queue.close();
        for thread in self.threads.drain(..) {
            // A panic was printed where it happened.
            drop(thread.join());
        }
    }
}

impl Shared {
    fn answer_all(self: &Arc<Self>, listener: &Listener) {
        loop {
            let line = match listener.accept() {
                Ok(line) => Arc::new(line),
                // A caller that has hung up already, or too many open files: others may be luckier.
                Err(error) if error.raw_os_error() != Some(INVALID) => {
                    tracing::warn!(%error, "a caller could not be answered");
                    std::thread::sleep(TICK);
                    continue;
                }
                Err(_) => return,
            };
            self.lines().push(Arc::clone(&line));
            let shared = Arc::clone(self);
            let served = spawn("racksum-rank", move || {
                shared.serve(&line);
                line.hang_up();
                shared.lines().retain(|other| !Arc::ptr_eq(other, &line));
            });
            if let Err(error) = served {
                tracing::warn!(%error, "a caller could not be served");
                self.lines().pop();
            }
        }
    }

    /// Serves a rank until it hangs up.
    fn serve(self: &Arc<Self>, line: &Arc<Line>) {
        let Ok(Some((FromRank::Join(join), _))) = line.recv() else { return };
        if join.version != VERSION {
            return say(line, &FromSidecar::WrongVersion { speaks: VERSION });
        }
        let joined = line.peer().map_err(|error| error.to_string());
        let job = match joined.and_then(|peer| self.join(&join, line, peer)) {
            Ok(job) => job,
            Err(reason) => {
                tracing::info!(job = join.job, rank = join.rank, reason, "rank refused");
                return say(line, &FromSidecar::Refused { reason });
            }
        };
        let why = self.hear(line, &job, join.rank).unwrap_or_else(|error| {
            tracing::warn!(job = join.job, rank = join.rank, %error, "rank broke the connection");
            Loss::Broke
        });
        if job.part(join.rank, why) {
            self.jobs().retain(|_, other| !Arc::ptr_eq(other, &job));
        }
    }

    fn join(&self, join: &Join, line: &Arc<Line>, peer: Peer) -> Result<Arc<Job>, String> {
        check(join)?;
        if join.local_world < join.world && self.upstream.is_none() {
            let Join { local_world, world, .. } = *join;
            return Err(format!(
                "{local_world} of the job's {world} ranks are on this host, and the sidecar knows \
                 no aggregator for the others; start it with --aggregator"
            ));
        }
        let mut jobs = self.jobs();
        let job = match jobs.get(&join.job) {
            Some(job) if job.generation == join.generation => Arc::clone(job),
            Some(job) if job.generation > join.generation => {
                return Err(format!(
                    "job {:?} is in its life {}, and rank {} is of life {}, before that",
                    join.job, job.generation.0, join.rank, join.generation.0
                ));
            }
            before => {
                before.into_iter().for_each(|job| job.supersede());
                Arc::new(Job::new(join, peer))
            }
        };
        let is_to_call = job.join(join, line, peer)?;
        jobs.insert(join.job.clone(), Arc::clone(&job));
        if let Some(upstream) = self.upstream.clone().filter(|_| is_to_call) {
            let (called, name) = (Arc::clone(&job), join.job.clone());
            spawn("racksum-call", move || called.call(&name, &upstream))
                .map_err(|error| error.to_string())?;
        }
        Ok(job)
    }

    /// Hears a rank until it is gone; returns what became of it.
    fn hear(&self, line: &Line, job: &Arc<Job>, rank: u16) -> Result<Loss, LineError> {
        let mut memories = HashMap::new();
        while let Some((message, descriptor)) = line.recv()? {
            match message {
                FromRank::Lend { memory } if memories.len() < MAX_MEMORIES => {
                    let descriptor: OwnedFd = descriptor.ok_or_else(|| broken("no descriptor"))?;
                    memories.insert(memory, Arc::new(SharedMemory::of(descriptor)?));
                }
                FromRank::TakeBack { memory } => {
                    memories.remove(&memory);
                }
                FromRank::Submit { descriptor, memory, at } => {
                    let memory = memories.get(&memory).ok_or_else(|| broken("no such memory"))?;
                    let descriptor = Descriptor::decode(&descriptor)
                        .map_err(|_| broken("an impossible descriptor"))?;
                    let len = descriptor.elements * descriptor.dtype.size() as u64;
                    let place = Place::new(memory, at, len)
                        .ok_or_else(|| broken("a tensor beyond its memory"))?;
                    if let Some((op, fold)) = job.submit(rank, descriptor, place) {
                        if fold.is_empty() {
                            job.folded(op, &fold);
                        } else {
                            let job = Arc::clone(job);
                            self.queue.push(descriptor.lane, Task { fold, job, op });
                        }
                    }
                }
                FromRank::Leave => return Ok(Loss::Left),
                FromRank::Lend { .. } => return Err(broken("too many memories")),
                FromRank::Join(_) => return Err(broken("it has joined already")),
            }
        }
        Ok(Loss::Died)
    }

    fn jobs(&self) -> MutexGuard<'_, HashMap<String, Arc<Job>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lines(&self) -> MutexGuard<'_, Vec<Arc<Line>>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Checks that a wish makes sense in itself.
fn check(join: &Join) -> Result<(), String> {
    let Join { rank, world, local_world, lanes, .. } = *join;
    if world == 0 || rank >= world {
        return Err(format!("rank {rank} is not one of {world} ranks"));
    }
    if local_world == 0 || local_world > world {
        return Err(format!("{local_world} of {world} ranks cannot be on this host"));
    }
    if lanes == 0 {
        return Err("a job has one lane or more".into());
    }
    Ok(())
}

fn say(line: &Line, message: &FromSidecar) {
    // Whoever has hung up needs no word.
    drop(line.send_now(message));
}

fn broken(what: &'static str) -> LineError {
    LineError::Io(io::Error::new(io::ErrorKind::InvalidData, what))
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(work)
}

/// What a listener that was stopped says: `EINVAL`.
const INVALID: i32 = 22;
