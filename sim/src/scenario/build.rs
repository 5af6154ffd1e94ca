//! Turns a scenario's file into a scenario, or says why it cannot be run.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use toml::Spanned;

use super::Scenario;
use super::file::{
    ArrivalsFile, DeviceFile, FabricFile, File, FormatFile, Gbit, IterationsFile, JobFile,
    KindFile, LinkFile, PlacementFile, PolicyFile, ScheduleFile, TransportFile,
};
use crate::engine::Picos;
use crate::fabric::{Kind, Topology, TopologyError, TwoLayers};
use crate::link::LinkConfig;
use crate::schedules::{AllAtOnce, Exclusive, Rule, Sincronia, Weight};
use crate::text::line_of;
use crate::training::{Compression, Coordination, Order, Ports, Which};
use crate::transport::reference::{Config, Format, MOST_CHILDREN};
use crate::workload::arrivals::{self, Arrival, ArrivalError, Iterations, JobNumber, Options};
use crate::workload::duration::{self, DurationError, MICROSECOND, SECOND};
use crate::workload::placement::{Assignments, CustomError, Policy, Spread, WorkerId};
use crate::workload::profile::reference::{Device, Reference, ReferenceError};
use crate::workload::profile::{Profile, ProfileError, Tensor};

/// An error in a scenario.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("line {line}: {kind}")]
pub struct ScenarioError {
    /// The number of the line, from 1.
    pub line: usize,
    /// The reason.
    pub kind: ScenarioErrorKind,
}

/// A reason why a scenario cannot be run.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ScenarioErrorKind {
    /// The text is not such a file.
    #[error("{0}")]
    Syntax(String),
    /// A file that the scenario names cannot be read.
    #[error("cannot read {file:?}: {why}")]
    Read {
        /// The file.
        file: String,
        /// The reason.
        why: String,
    },
    /// A profile is malformed.
    #[error("{file}: {error}")]
    Profile {
        /// The file.
        file: String,
        /// The reason.
        error: ProfileError,
    },
    /// Two profiles have one name.
    #[error("two profiles are named {0:?}; name each model once")]
    TwoProfiles(String),
    /// The study's file is malformed.
    #[error("{file}: {error}")]
    Reference {
        /// The file.
        file: String,
        /// The reason.
        error: ReferenceError,
    },
    /// The file of jobs is malformed.
    #[error("{file}: {error}")]
    Arrivals {
        /// The file.
        file: String,
        /// The reason.
        error: ArrivalError,
    },
    /// A model has no profile.
    #[error("there is no profile of model {model:?}; the profiles are {known}")]
    Model {
        /// The model.
        model: String,
        /// The names of the profiles.
        known: String,
    },
    /// The links do not connect the nodes.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The cluster has no workers.
    #[error("the fabric has no workers")]
    NoWorkers,
    /// The cluster has too many nodes.
    #[error("the fabric has more than {MOST_NODES} nodes")]
    TooLarge,
    /// The scenario has too many jobs.
    #[error("the scenario has more than {MOST_JOBS} jobs")]
    TooManyJobs,
    /// A switch has too many children.
    #[error("switch {switch:?} has {children} children, but aggregates at most {MOST_CHILDREN}")]
    TooWide {
        /// The switch.
        switch: String,
        /// The number of its children.
        children: usize,
    },
    /// A rate is not a positive number.
    #[error("a rate is {0} Gbit/s; give a positive number, or \"ideal\"")]
    Rate(f64),
    /// A time is not one.
    #[error(transparent)]
    Duration(#[from] DurationError),
    /// Packets do not hold their elements.
    #[error(
        "packets of {wire_bytes} bytes on the wire do not hold {elements} elements and {} bytes of \
         headers",
        Format::HEADER_BYTES
    )]
    Format {
        /// The size on the wire.
        wire_bytes: String,
        /// The number of elements.
        elements: String,
    },
    /// A tensor takes too many packets.
    #[error("tensor {tensor:?} of model {model:?} takes 2^32 packets or more; use larger packets")]
    Packets {
        /// The model.
        model: String,
        /// The tensor.
        tensor: String,
    },
    /// The scenario has no jobs.
    #[error("the scenario has no jobs; add [[jobs]] or [arrivals]")]
    NoJobs,
    /// The scenario has jobs from two sources.
    #[error("the scenario has both [[jobs]] and [arrivals]; give one of them")]
    TwoSources,
    /// A job says neither where it goes nor how large it is, or both.
    #[error("give the job `workers` or `gpus`")]
    WorkersOrGpus,
    /// Some jobs have workers, and others do not.
    #[error("either all jobs have `workers`, or none has")]
    SomeWorkers,
    /// Nothing says where jobs go.
    #[error("the jobs have no workers; add [placement]")]
    NoPlacement,
    /// Two things say where jobs go.
    #[error("the jobs have workers already; remove [placement]")]
    TwoPlacements,
    /// A worker does not exist.
    #[error("there is no worker {worker}; the last one is {last}")]
    Worker {
        /// The worker.
        worker: u32,
        /// The last worker.
        last: usize,
    },
    /// A worker is given to a job twice.
    #[error("worker {0} is there twice")]
    TwoOfOneWorker(u32),
    /// The custom placement is malformed.
    #[error("custom: {0}")]
    Custom(#[from] CustomError),
    /// The custom placement is missing or not asked for.
    #[error("give `custom` with policy \"custom\", and with no other")]
    NoCustom,
    /// Only chunks of a schedule can be compressed for their low priority.
    #[error("`compress = \"low-priority\"` needs a schedule with priorities: \"sincronia\"")]
    NoPriorities,
}

/// The schedule of a scenario, from which each run makes its own. The default is none.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ScheduleRules {
    kind: KindFile,
    chunk_elements: Option<u64>,
    weight: Weight,
    compression: Compression,
    d0: u64,
}

impl ScheduleRules {
    fn new(file: &ScheduleFile) -> Result<Self, ScenarioErrorKind> {
        if file.compress == Which::LowPriority && file.kind != KindFile::Sincronia {
            return Err(ScenarioErrorKind::NoPriorities);
        }
        let is_whole =
            matches!(file.kind, KindFile::None | KindFile::ReadyAndGo | KindFile::FifoExclusive);
        let chunk = file.chunk.map_or(DEFAULT_CHUNK, std::num::NonZero::get);
        Ok(Self {
            kind: file.kind,
            chunk_elements: (!is_whole).then_some(chunk),
            weight: file.weight,
            compression: Compression { which: file.compress, is_sticky: file.sticky },
            d0: file.d0,
        })
    }

    /// Makes the schedule of one run.
    pub(super) fn coordination(&self) -> Coordination {
        let bytes = self.chunk_elements.and_then(|elements| elements.checked_mul(4));
        let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX);
        let schedule: Option<Box<dyn racksum_proto::schedule::Schedule<u32>>> = match self.kind {
            KindFile::None => None,
            KindFile::ReadyAndGo | KindFile::ByteScheduler => Some(Box::new(AllAtOnce::new(bytes))),
            KindFile::FifoExclusive => Some(Box::new(Exclusive::new(Rule::Fifo, bytes))),
            KindFile::DeficitRoundRobin => Some(Box::new(Exclusive::new(Rule::LeastServed, bytes))),
            KindFile::Sincronia => Some(Box::new(Sincronia::new(self.weight, bytes, self.d0))),
        };
        let order = match self.kind {
            KindFile::ByteScheduler | KindFile::Sincronia => Order::Front,
            _ => Order::Ready,
        };
        let ports = match self.kind {
            KindFile::FifoExclusive | KindFile::DeficitRoundRobin => Ports::Switches,
            _ => Ports::Workers,
        };
        let Self { chunk_elements, compression, .. } = *self;
        Coordination { schedule, order, chunk_elements, compression, ports }
    }
}

impl Scenario {
    /// Reads a scenario. `read` returns the contents of a file that it names, or why it cannot be
    /// read.
    ///
    /// # Errors
    /// If the scenario or one of its files is malformed, or if what it describes cannot be run.
    pub fn parse(
        text: &str,
        read: &dyn Fn(&str) -> Result<String, String>,
    ) -> Result<Self, ScenarioError> {
        let at = |span: Range<usize>| {
            move |kind| ScenarioError { line: line_of(text, span.start), kind }
        };
        let file: File = toml::from_str(text).map_err(|error| {
            let kind = ScenarioErrorKind::Syntax(error.message().to_owned());
            at(error.span().unwrap_or(0..0))(kind)
        })?;
        let profiles = profiles(&file, read, &at)?;
        let (topology, gpus_per_worker) =
            fabric(file.fabric.get_ref()).map_err(at(file.fabric.span()))?;
        let transport = file.transport.as_ref();
        let transport = match transport {
            Some(transport) => config(transport.get_ref()).map_err(at(transport.span()))?,
            None => config(&TransportFile::default()).map_err(at(0..0))?,
        };
        for profile in profiles.values() {
            let is_too_large = |tensor: &&Tensor| {
                transport.format.packets(tensor.bytes().div_ceil(4)) > u64::from(u32::MAX)
            };
            if let Some(tensor) = profile.tensors().iter().find(is_too_large) {
                let (model, tensor) = (profile.name().into(), tensor.name.clone());
                return Err(at(0..0)(ScenarioErrorKind::Packets { model, tensor }));
            }
        }
        let schedule = match &file.schedule {
            Some(schedule) => {
                ScheduleRules::new(schedule.get_ref()).map_err(at(schedule.span()))?
            }
            None => ScheduleRules::new(&ScheduleFile::default()).map_err(at(0..0))?,
        };
        let workers = topology.workers().count();
        let (arrivals, policy) = jobs(&file, &profiles, workers, read, &at)?;
        Ok(Self {
            name: file.name,
            topology,
            gpus_per_worker,
            transport,
            schedule,
            policy,
            arrivals,
            profiles,
        })
    }
}

type Profiles = BTreeMap<String, Arc<Profile>>;

fn profiles<F: Fn(ScenarioErrorKind) -> ScenarioError>(
    file: &File,
    read: &dyn Fn(&str) -> Result<String, String>,
    at: &impl Fn(Range<usize>) -> F,
) -> Result<Profiles, ScenarioError> {
    let mut profiles = Profiles::new();
    let mut add = |profile: Profile| {
        let name = profile.name().to_owned();
        match profiles.insert(name.clone(), Arc::new(profile)) {
            Some(_) => Err(ScenarioErrorKind::TwoProfiles(name)),
            None => Ok(()),
        }
    };
    for name in &file.profiles {
        let file = name.get_ref().clone();
        let profile = read_file(read, &file).and_then(|text| {
            text.parse().map_err(|error| ScenarioErrorKind::Profile { file, error })
        });
        profile.and_then(&mut add).map_err(at(name.span()))?;
    }
    if let Some(reference) = &file.reference {
        let file = reference.get_ref().file.clone();
        let device = match reference.get_ref().device {
            DeviceFile::V100 => Device::V100,
            DeviceFile::A100 => Device::A100,
            DeviceFile::A100MatchV100Bs => Device::A100MatchV100,
        };
        let found = read_file(read, &file).and_then(|text| {
            Reference::parse(&text).map_err(|error| ScenarioErrorKind::Reference { file, error })
        });
        let found = found.map_err(at(reference.span()))?;
        found.profiles(device).cloned().try_for_each(add).map_err(at(reference.span()))?;
    }
    Ok(profiles)
}

fn read_file(
    read: &dyn Fn(&str) -> Result<String, String>,
    file: &str,
) -> Result<String, ScenarioErrorKind> {
    read(file).map_err(|why| ScenarioErrorKind::Read { file: file.into(), why })
}

/// Returns nodes and links, and the GPUs of each worker.
fn fabric(file: &FabricFile) -> Result<(Topology, u32), ScenarioErrorKind> {
    let (topology, gpus_per_worker) = match file {
        FabricFile::TwoLayers {
            racks,
            workers_per_rack,
            gpus_per_worker,
            gbit,
            uplink_gbit,
            delay_us,
            queue_bytes,
            mark_bytes,
        } => {
            let link = |gbit| link(gbit, *delay_us, *queue_bytes, *mark_bytes);
            let two_layers = TwoLayers {
                racks: *racks,
                workers_per_rack: *workers_per_rack,
                worker: link(*gbit)?,
                uplink: link(uplink_gbit.unwrap_or(*gbit))?,
            };
            let workers = racks.checked_mul(*workers_per_rack);
            let nodes = workers.and_then(|workers| workers.checked_add(*racks)?.checked_add(1));
            if nodes.is_none_or(|nodes| nodes > MOST_NODES) {
                return Err(ScenarioErrorKind::TooLarge);
            }
            if workers == Some(0) {
                return Err(ScenarioErrorKind::NoWorkers);
            }
            (two_layers.build(), *gpus_per_worker)
        }
        FabricFile::Links { workers, switches, .. }
            if workers.len() + switches.len() > MOST_NODES =>
        {
            return Err(ScenarioErrorKind::TooLarge);
        }
        FabricFile::Links { gpus_per_worker, workers, switches, links } => {
            (connected(workers, switches, links)?, *gpus_per_worker)
        }
    };
    let workers: Vec<_> = topology.workers().collect();
    if workers.is_empty() {
        return Err(ScenarioErrorKind::NoWorkers);
    }
    // A job may have any workers.
    let tree = topology.tree(&workers, 0)?;
    if let Some(node) = tree.nodes.iter().find(|node| node.children.len() > MOST_CHILDREN) {
        let (switch, children) = (topology.name(node.node).into(), node.children.len());
        return Err(ScenarioErrorKind::TooWide { switch, children });
    }
    Ok((topology, gpus_per_worker))
}

fn connected(
    workers: &[String],
    switches: &[String],
    links: &[LinkFile],
) -> Result<Topology, ScenarioErrorKind> {
    let mut topology = Topology::default();
    for (names, kind) in [(workers, Kind::Worker), (switches, Kind::Switch)] {
        for name in names {
            topology.add_node(name, kind)?;
        }
    }
    for file in links {
        let LinkFile { between: [one, other], gbit, back_gbit, .. } = file;
        let (one, other) = (topology.node(one)?, topology.node(other)?);
        let link = |gbit| link(gbit, file.delay_us, file.queue_bytes, file.mark_bytes);
        topology.connect(one, other, link(*gbit)?, link(back_gbit.unwrap_or(*gbit))?)?;
    }
    topology.finish()?;
    Ok(topology)
}

fn link(
    gbit: Gbit,
    delay_us: f64,
    queue_bytes: Option<u64>,
    mark_bytes: Option<u64>,
) -> Result<LinkConfig, ScenarioErrorKind> {
    let Gbit::Rate(gbit) = gbit else {
        return Ok(LinkConfig::IDEAL);
    };
    let rate_bps = gbit * 1e9;
    if !(1.0..=1e18).contains(&rate_bps) {
        return Err(ScenarioErrorKind::Rate(gbit));
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "checked above: between one and a limit below 2^64"
    )]
    let rate_bps = rate_bps.round() as u64;
    Ok(LinkConfig {
        rate_bps,
        delay: duration::from_units(delay_us, MICROSECOND)?,
        queue_bytes: queue_bytes.unwrap_or(u64::MAX),
        mark_bytes: mark_bytes.unwrap_or(u64::MAX),
    })
}

fn config(file: &TransportFile) -> Result<Config, ScenarioErrorKind> {
    let TransportFile::Reference { mtu, elements, slots, timeout_ms } = file;
    let format = Format::new(*mtu, *elements).ok_or_else(|| {
        let text =
            |number: Option<u32>| number.map_or_else(|| "any".into(), |number| number.to_string());
        ScenarioErrorKind::Format { wire_bytes: text(*mtu), elements: text(*elements) }
    })?;
    let timeout = timeout_ms.map(|ms| duration::from_units(ms, Picos::from_millis(1)));
    Ok(Config { format, slots: slots.get(), timeout: timeout.transpose()? })
}

/// Returns the jobs, and where they go.
fn jobs<F: Fn(ScenarioErrorKind) -> ScenarioError>(
    file: &File,
    profiles: &Profiles,
    workers: usize,
    read: &dyn Fn(&str) -> Result<String, String>,
    at: &impl Fn(Range<usize>) -> F,
) -> Result<(Vec<Arrival>, Policy), ScenarioError> {
    let mut assigned = vec![];
    let arrivals = match (&file.jobs[..], &file.arrivals) {
        ([], None) => return Err(at(0..0)(ScenarioErrorKind::NoJobs)),
        ([], Some(source)) => {
            traced(source.get_ref(), profiles, read).map_err(at(source.span()))?
        }
        ([first, ..], Some(_)) => return Err(at(first.span())(ScenarioErrorKind::TwoSources)),
        (jobs, None) => listed(jobs, profiles, workers, &mut assigned, at)?,
    };
    let policy = match (&file.placement, assigned.is_empty()) {
        (None, true) => return Err(at(0..0)(ScenarioErrorKind::NoPlacement)),
        (None, false) => Policy::Assigned(Assignments::from_plan(assigned)),
        (Some(placement), true) => policy(placement.get_ref()).map_err(at(placement.span()))?,
        (Some(placement), false) => {
            return Err(at(placement.span())(ScenarioErrorKind::TwoPlacements));
        }
    };
    Ok((arrivals, policy))
}

/// Returns the jobs of the scenario itself, and adds their workers to `assigned`.
fn listed<F: Fn(ScenarioErrorKind) -> ScenarioError>(
    jobs: &[Spanned<JobFile>],
    profiles: &Profiles,
    workers: usize,
    assigned: &mut Vec<(JobNumber, Vec<WorkerId>)>,
    at: &impl Fn(Range<usize>) -> F,
) -> Result<Vec<Arrival>, ScenarioError> {
    let mut arrivals = vec![];
    for job in jobs {
        let at = at(job.span());
        let job = job.get_ref();
        if !profiles.contains_key(&job.model) {
            let known = profiles.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            return Err(at(ScenarioErrorKind::Model { model: job.model.clone(), known }));
        }
        let gpus = match (&job.workers, job.gpus) {
            (Some(numbers), None) => {
                check_workers(numbers, workers).map_err(&at)?;
                u32::try_from(numbers.len()).ok().and_then(std::num::NonZeroU32::new)
            }
            (None, gpus) => gpus,
            (Some(_), Some(_)) => None,
        };
        let gpus = gpus.ok_or_else(|| at(ScenarioErrorKind::WorkersOrGpus))?;
        let submitted = duration::from_units(job.submitted_s, SECOND);
        let submitted = submitted.map_err(|error| at(error.into()))?;
        if arrivals.len() + job.count.get() as usize > MOST_JOBS {
            return Err(at(ScenarioErrorKind::TooManyJobs));
        }
        for _ in 0..job.count.get() {
            let (number, model) = (JobNumber(arrivals.len() as u64), job.model.clone());
            let (name, iterations) = (model.clone(), job.iterations);
            arrivals.push(Arrival { job: number, name, submitted, gpus, iterations, model });
            if let Some(numbers) = &job.workers {
                assigned.push((number, numbers.iter().map(|number| WorkerId(*number)).collect()));
            }
        }
        if !assigned.is_empty() && assigned.len() != arrivals.len() {
            return Err(at(ScenarioErrorKind::SomeWorkers));
        }
    }
    // Equal times keep the order of the file.
    arrivals.sort_by_key(|arrival| arrival.submitted);
    Ok(arrivals)
}

fn check_workers(numbers: &[u32], workers: usize) -> Result<(), ScenarioErrorKind> {
    for (index, worker) in numbers.iter().enumerate() {
        if *worker as usize >= workers {
            return Err(ScenarioErrorKind::Worker { worker: *worker, last: workers - 1 });
        }
        if numbers[..index].contains(worker) {
            return Err(ScenarioErrorKind::TwoOfOneWorker(*worker));
        }
    }
    Ok(())
}

/// Returns the jobs of a trace.
fn traced(
    source: &ArrivalsFile,
    profiles: &Profiles,
    read: &dyn Fn(&str) -> Result<String, String>,
) -> Result<Vec<Arrival>, ScenarioErrorKind> {
    let text = read_file(read, &source.file)?;
    let iterations = match &source.iterations {
        IterationsFile::Column => Iterations::Column,
        IterationsFile::PerSecond(rate) => Iterations::PerSecond(*rate),
        IterationsFile::Fixed(number) => Iterations::Fixed(*number),
        IterationsFile::PerModel(numbers) => Iterations::PerModel(numbers.clone()),
    };
    let options = Options {
        submit_all_at_start: source.submit_all_at_start,
        iteration_factor: source.iteration_factor,
        gpu_factor: source.gpu_factor,
        max_jobs: source.max_jobs,
        models: source.models.clone(),
        ..Options::new(iterations, profiles.keys().cloned())
    };
    let jobs = match source.format {
        FormatFile::Coinnetflow => arrivals::coinnetflow::read(&text, &options),
        FormatFile::Pollux => arrivals::pollux::read(&text, &options),
    };
    jobs.map_err(|error| ScenarioErrorKind::Arrivals { file: source.file.clone(), error })
}

fn policy(file: &PlacementFile) -> Result<Policy, ScenarioErrorKind> {
    let spread = match (file.policy, &file.custom) {
        (PolicyFile::Custom, Some(custom)) => return Ok(Policy::Assigned(custom.parse()?)),
        (PolicyFile::Custom, None) | (_, Some(_)) => return Err(ScenarioErrorKind::NoCustom),
        (PolicyFile::Random, None) => Spread::Any,
        (PolicyFile::Distributed, None) => Spread::Distributed,
        (PolicyFile::SingleRack, None) => Spread::SingleRack,
        (PolicyFile::MultiRack, None) => Spread::MultiRack,
    };
    Ok(Policy::Random { spread, fallback: file.fallback })
}

/// The number of nodes of the largest fabric, and of jobs of the largest scenario.
const MOST_NODES: usize = 65_000;
const MOST_JOBS: usize = 1_000_000;
/// Elements of a chunk: 1 MiB of `f32`, as in ByteScheduler.
const DEFAULT_CHUNK: u64 = 262_144;
