//! Runs training jobs over a data plane.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::collectives::{Chunk, Collectives, Coordination, Ports};
use super::dispatch::{DispatchError, Dispatcher};
use super::process::{Action, Process, Step};
use crate::engine::{Engine, Picos};
use crate::fabric::{Arrival as PacketArrival, Fabric, NodeId, Topology, TopologyError};
use crate::random::Random;
use crate::transport::reference::{Config, Counts, Member, Net, Overdue, Packet, Reference};
use crate::workload::arrivals::Arrival;
use crate::workload::placement::{Placement, Policy, Rack, Worker as FreeWorker, WorkerId};
use crate::workload::profile::Profile;

/// The inputs of a run.
#[derive(Debug)]
pub struct Inputs {
    /// Nodes and links.
    pub topology: Topology,
    /// GPUs of each worker.
    pub gpus_per_worker: u32,
    /// The data plane.
    pub transport: Config,
    /// When all-reduces begin.
    pub coordination: Coordination,
    /// Where jobs go.
    pub policy: Policy,
    /// The jobs, in the order of their submission.
    pub arrivals: Vec<Arrival>,
    /// The profiles of the jobs' models, by name.
    pub profiles: BTreeMap<String, Arc<Profile>>,
}

/// A job that has finished.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finished {
    /// The job as it was submitted.
    pub arrival: Arrival,
    /// The job's workers.
    pub placement: Placement,
    /// The time at which it started.
    pub started: Picos,
    /// The time at which its last worker finished.
    pub finished: Picos,
}

/// A reason why a run cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RunError {
    /// A job cannot start.
    #[error(transparent)]
    Dispatch(#[from] DispatchError),
    /// The workers of a job cannot aggregate.
    #[error("job {job}: {error}")]
    Tree {
        /// The job.
        job: u64,
        /// The reason.
        error: TopologyError,
    },
    /// A model has no profile.
    #[error("job {job} trains model {model:?}, for which there is no profile")]
    NoProfile {
        /// The job.
        job: u64,
        /// The model.
        model: String,
    },
    /// The simulator broke an invariant, which is a bug.
    #[error("the simulator broke an invariant: {0}; please report the scenario and the seed")]
    Violation(String),
    /// A switch has too many children.
    #[error("job {job} has a switch with more than 64 children; use smaller racks")]
    TooWide {
        /// The job.
        job: u64,
    },
}

/// A run in progress.
#[derive(Debug)]
pub struct Simulation {
    engine: Engine<Event>,
    fabric: Fabric<Packet>,
    transport: Reference,
    collectives: Collectives,
    dispatcher: Dispatcher,
    profiles: BTreeMap<String, Arc<Profile>>,
    workers: Vec<NodeId>,
    /// Jobs that are not submitted yet, the last first.
    arrivals: Vec<Arrival>,
    /// Jobs that have started, by their numbers in the transport.
    jobs: Vec<Job>,
    random: Random,
    events: u64,
}

#[derive(Debug, Clone, Copy)]
enum Event {
    Arrival(PacketArrival),
    Overdue(Overdue),
    /// The next job is submitted.
    Submit,
    Ended(Member, Step),
    /// A worker has compressed its chunk, of this many elements.
    Compressed(Member, u64),
}

impl From<PacketArrival> for Event {
    fn from(arrival: PacketArrival) -> Self {
        Self::Arrival(arrival)
    }
}

impl From<Overdue> for Event {
    fn from(overdue: Overdue) -> Self {
        Self::Overdue(overdue)
    }
}

#[derive(Debug)]
struct Job {
    arrival: Arrival,
    placement: Placement,
    profile: Arc<Profile>,
    started: Picos,
    workers: Vec<Worker>,
    /// Workers that have not finished.
    left: usize,
}

#[derive(Debug)]
struct Worker {
    process: Process,
    random: Random,
    /// The time at which the worker last stopped to compute forward or backward passes, if it does
    /// not compute one now.
    idle_since: Option<Picos>,
    /// The time for which it has been idle, without the present time.
    idle: Picos,
}

impl Simulation {
    /// Creates a run.
    ///
    /// # Errors
    /// If a job's model has no profile.
    pub fn new(inputs: Inputs, random: &Random) -> Result<Self, RunError> {
        let Inputs { topology, gpus_per_worker, transport, coordination, policy, .. } = inputs;
        let Inputs { mut arrivals, profiles, .. } = inputs;
        for Arrival { job, model, .. } in &arrivals {
            if !profiles.contains_key(model) {
                return Err(RunError::NoProfile { job: job.0, model: model.clone() });
            }
        }
        let mut engine = Engine::default();
        arrivals.iter().for_each(|arrival| engine.schedule(arrival.submitted, Event::Submit));
        arrivals.reverse();
        let workers: Vec<_> = topology.workers().collect();
        let number = |node: &NodeId| workers.binary_search(node).expect("a worker");
        let worker = |node: &NodeId| FreeWorker {
            id: WorkerId(NodeId(number(node)).number()),
            free_gpus: gpus_per_worker,
        };
        let racks = topology.racks().into_iter();
        let racks = racks.map(|nodes| Rack { workers: nodes.iter().map(worker).collect() });
        Ok(Self {
            dispatcher: Dispatcher::new(policy, racks.collect(), random.child("placement")),
            collectives: Collectives::new(coordination, random.child("compression")),
            transport: Reference::new(transport),
            fabric: Fabric::new(topology),
            engine,
            profiles,
            workers,
            arrivals,
            jobs: vec![],
            random: random.child("jobs"),
            events: 0,
        })
    }

    /// Runs until the next job finishes, and returns what became of it. `None` once all have.
    ///
    /// # Errors
    /// If a job can never start.
    pub fn next_finished(&mut self) -> Result<Option<Finished>, RunError> {
        while let Some(event) = self.engine.next_event() {
            self.events += 1;
            if let Some(finished) = self.handle(event)? {
                return Ok(Some(finished));
            }
        }
        self.check_end().map_err(RunError::Violation)?;
        Ok(None)
    }

    /// Checks what must hold once nothing happens any more.
    fn check_end(&self) -> Result<(), String> {
        if let Some(link) = self.fabric.unsound() {
            let topology = self.fabric.topology();
            let link = topology.links()[link.0];
            let (from, to) = (topology.name(link.from), topology.name(link.to));
            return Err(format!(
                "the link from {from} to {to} lost, made or reordered packets, or idled"
            ));
        }
        let late = self.engine.late();
        if late > 0 {
            return Err(format!("{late} events were scheduled for the past"));
        }
        match self.jobs.iter().find(|job| job.left > 0) {
            Some(job) => Err(format!("job {} has not finished", job.arrival.job.0)),
            None => Ok(()),
        }
    }

    /// Returns the present simulated time.
    #[must_use]
    pub const fn now(&self) -> Picos {
        self.engine.now()
    }

    /// Returns the totals of the data plane.
    #[must_use]
    pub const fn counts(&self) -> Counts {
        self.transport.counts()
    }

    /// Returns the number of events so far.
    #[must_use]
    pub const fn events(&self) -> u64 {
        self.events
    }

    /// Returns the ports.
    #[must_use]
    pub const fn fabric(&self) -> &Fabric<Packet> {
        &self.fabric
    }

    fn handle(&mut self, event: Event) -> Result<Option<Finished>, RunError> {
        match event {
            Event::Arrival(arrival) => {
                let packet = self.fabric.take(&mut self.engine, arrival);
                let Self { engine, fabric, transport, .. } = self;
                if let Some(member) = transport.arrive(&mut Net { engine, fabric }, packet) {
                    self.reduced(member);
                }
            }
            Event::Overdue(overdue) => {
                let Self { engine, fabric, transport, .. } = self;
                transport.overdue(&mut Net { engine, fabric }, overdue);
            }
            Event::Submit => {
                let arrival = self.arrivals.pop().expect("one event for each job");
                self.dispatcher.submit(arrival);
                self.start_jobs()?;
            }
            Event::Compressed(member, elements) => self.send(member, elements),
            Event::Ended(member, step) => return self.ended(member, step),
        }
        Ok(None)
    }

    /// Starts the jobs that wait and fit.
    fn start_jobs(&mut self) -> Result<(), RunError> {
        while let Some((arrival, placement)) = self.dispatcher.start_next()? {
            let job = arrival.job.0;
            let nodes: Vec<_> =
                placement.iter().map(|share| self.workers[share.worker.0 as usize]).collect();
            let random = self.random.nth(job);
            let tree = self.fabric.topology().tree(&nodes, random.clone().bits());
            let tree = tree.map_err(|error| RunError::Tree { job, error })?;
            let (of_workers, of_switches) = tree.nodes.split_at(nodes.len());
            let ports = match self.collectives.ports() {
                Ports::Workers => of_workers,
                Ports::Switches => of_switches,
            };
            let mut ports: Vec<_> = ports.iter().map(|node| node.node.number()).collect();
            ports.sort_unstable();
            let profile = Arc::clone(&self.profiles[&arrival.model]);
            // Packets count in elements of 4 bytes.
            let elements =
                profile.tensors().iter().map(|tensor| tensor.bytes().div_ceil(4)).collect();
            self.collectives.add_job(elements, nodes.len(), ports);
            let number = self.transport.add_job(tree).ok_or(RunError::TooWide { job })?;
            let iterations = arrival.iterations.get();
            let (process, first) = Process::new(profile.tensors().len(), iterations);
            let worker = |worker| Worker {
                process: process.clone(),
                random: random.nth(worker),
                idle_since: None,
                idle: Picos::ZERO,
            };
            let workers: Vec<_> = (0..nodes.len() as u64).map(worker).collect();
            let (left, started) = (workers.len(), self.engine.now());
            self.jobs.push(Job { arrival, placement, profile, started, workers, left });
            for worker in 0..self.transport.workers(number) {
                self.act(Member { job: number, worker }, first);
            }
        }
        Ok(())
    }

    fn worker(&mut self, Member { job, worker }: Member) -> &mut Worker {
        &mut self.jobs[job as usize].workers[usize::from(worker)]
    }

    /// Handles the end of a computation.
    fn ended(&mut self, member: Member, step: Step) -> Result<Option<Finished>, RunError> {
        if !matches!(step, Step::Update(_)) {
            let now = self.engine.now();
            self.worker(member).idle_since = Some(now);
        }
        let actions = self.worker(member).process.handle_end(step);
        for action in actions.into_iter().flatten() {
            if action != Action::Finish {
                self.act(member, action);
                continue;
            }
            let job = &mut self.jobs[member.job as usize];
            job.left -= 1;
            if job.left == 0 {
                return self.finish(member.job).map(Some);
            }
        }
        Ok(None)
    }

    /// Frees what a job held, and starts others.
    fn finish(&mut self, number: u32) -> Result<Finished, RunError> {
        let job = &mut self.jobs[number as usize];
        let finished = Finished {
            arrival: job.arrival.clone(),
            placement: job.placement.clone(),
            started: job.started,
            finished: self.engine.now(),
        };
        job.workers = vec![];
        if !self.transport.remove_job(number) {
            let job = finished.arrival.job.0;
            let why = format!("switches did not count each packet of job {job} once");
            return Err(RunError::Violation(why));
        }
        self.collectives.remove_job(number);
        self.dispatcher.free(&finished.placement);
        self.start_jobs()?;
        self.begin_turns();
        Ok(finished)
    }

    fn act(&mut self, member: Member, action: Action) {
        match action {
            Action::Compute(step) => self.compute(member, step),
            Action::Reduce { tensor } if self.transport.workers(member.job) == 1 => {
                self.compute(member, Step::Update(tensor));
            }
            Action::Reduce { tensor } => {
                let waited = self.waited(member.job);
                if let Some(chunk) = self.collectives.ask(member, tensor, waited) {
                    self.begin(member, chunk);
                }
                self.begin_turns();
            }
            Action::Finish => {}
        }
    }

    /// Computes for a time that is close to the step's mean.
    fn compute(&mut self, member: Member, step: Step) {
        let tensors = self.jobs[member.job as usize].profile.tensors();
        let mean = match step {
            Step::Forward(tensor) => tensors[tensor].forward,
            Step::Backward(tensor) => tensors[tensor].backward,
            Step::Update(tensor) => tensors[tensor].update,
        };
        let now = self.engine.now();
        let worker = self.worker(member);
        if !matches!(step, Step::Update(_))
            && let Some(since) = worker.idle_since.take()
        {
            worker.idle = worker.idle + now.since(since);
        }
        let takes = noisy(&mut worker.random, mean);
        self.engine.schedule(now + takes, Event::Ended(member, step));
    }

    /// Returns the time for which the workers of a job have been idle in total.
    fn waited(&self, job: u32) -> Picos {
        let now = self.engine.now();
        let idle = self.jobs[job as usize].workers.iter().map(|worker| {
            worker.idle + worker.idle_since.map_or(Picos::ZERO, |since| now.since(since))
        });
        idle.fold(Picos::ZERO, |sum, idle| sum + idle)
    }

    /// Lets all jobs begin the chunks that the schedule allows.
    fn begin_turns(&mut self) {
        let mut has_changed = false;
        while let Some((job, chunk)) = self.collectives.begin_next() {
            has_changed = true;
            self.transport.set_priority(job, self.collectives.priority(job));
            for worker in 0..self.transport.workers(job) {
                self.begin(Member { job, worker }, chunk);
            }
        }
        if has_changed {
            for job in self.collectives.active() {
                self.transport.set_priority(job, self.collectives.priority(job));
            }
        }
    }

    /// Lets a worker compress and send a chunk.
    fn begin(&mut self, member: Member, chunk: Chunk) {
        if chunk.compressing == Picos::ZERO {
            return self.send(member, chunk.sent_elements);
        }
        let at = self.engine.now() + chunk.compressing;
        self.engine.schedule(at, Event::Compressed(member, chunk.sent_elements));
    }

    fn send(&mut self, member: Member, elements: u64) {
        let Self { engine, fabric, transport, .. } = self;
        let packets = transport.packets(elements);
        transport.begin(&mut Net { engine, fabric }, member, packets);
    }

    /// Handles the end of a worker's chunk.
    fn reduced(&mut self, member: Member) {
        let waited = self.waited(member.job);
        if let Some(tensor) = self.collectives.end(member, waited) {
            self.compute(member, Step::Update(tensor));
        }
        if let Some(chunk) = self.collectives.next_of(member) {
            self.begin(member, chunk);
        }
        self.begin_turns();
    }
}

/// Draws a time whose standard deviation is 2 % of its mean.
fn noisy(random: &mut Random, mean: Picos) -> Picos {
    // The sum of twelve uniform numbers has a variance of one, and the same value everywhere.
    let sum: u64 = (0..12).map(|_| random.bits() >> 32).sum();
    let normal = i128::from(sum) - (6 << 32);
    let more = i128::from(mean.0) * normal / (50 << 32);
    Picos(u64::try_from(i128::from(mean.0) + more).unwrap_or(0))
}
