//! The TOML file of a scenario, as it is written.

use std::collections::BTreeMap;
use std::num::{NonZeroU32, NonZeroU64};

use serde::Deserialize;
use toml::Spanned;

use crate::schedules::Weight;
use crate::training::Which;

/// A scenario file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    pub(super) name: String,
    /// Files of profiles, relative to the scenario.
    #[serde(default)]
    pub(super) profiles: Vec<Spanned<String>>,
    /// A file with the profiles of CoInNetFlow's study.
    pub(super) reference: Option<Spanned<ReferenceFile>>,
    pub(super) fabric: Spanned<FabricFile>,
    pub(super) transport: Option<Spanned<TransportFile>>,
    pub(super) schedule: Option<Spanned<ScheduleFile>>,
    #[serde(default)]
    pub(super) jobs: Vec<Spanned<JobFile>>,
    pub(super) arrivals: Option<Spanned<ArrivalsFile>>,
    pub(super) placement: Option<Spanned<PlacementFile>>,
}

/// The study's profiles.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ReferenceFile {
    pub(super) file: String,
    pub(super) device: DeviceFile,
}

/// A device of the study's profiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum DeviceFile {
    V100,
    A100,
    A100MatchV100Bs,
}

/// Nodes and links.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "layout", rename_all = "kebab-case", deny_unknown_fields)]
pub(super) enum FabricFile {
    /// Racks below one core switch.
    TwoLayers {
        racks: usize,
        workers_per_rack: usize,
        #[serde(default = "one")]
        gpus_per_worker: u32,
        /// Between a worker and its rack's switch.
        gbit: Gbit,
        /// Between a rack's switch and the core. The same as `gbit` by default.
        uplink_gbit: Option<Gbit>,
        #[serde(default = "one_us")]
        delay_us: f64,
        /// Capacity of each queue in bytes. No limit by default.
        queue_bytes: Option<u64>,
        /// Queue length above which packets are marked.
        mark_bytes: Option<u64>,
    },
    /// Any nodes and links.
    Links {
        #[serde(default = "one")]
        gpus_per_worker: u32,
        workers: Vec<String>,
        switches: Vec<String>,
        links: Vec<LinkFile>,
    },
}

/// A cable between two nodes.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LinkFile {
    pub(super) between: [String; 2],
    pub(super) gbit: Gbit,
    /// In the opposite direction, if it differs.
    pub(super) back_gbit: Option<Gbit>,
    #[serde(default = "one_us")]
    pub(super) delay_us: f64,
    pub(super) queue_bytes: Option<u64>,
    pub(super) mark_bytes: Option<u64>,
}

/// A rate.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(untagged)]
pub(super) enum Gbit {
    /// In Gbit/s.
    Rate(f64),
    /// A link that takes no time.
    Ideal(Ideal),
}

/// The word for a link that takes no time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Ideal {
    Ideal,
}

/// The data plane.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub(super) enum TransportFile {
    /// SwitchML's slots and versions, as in CoInNetFlow's simulator.
    Reference {
        mtu: Option<u32>,
        elements: Option<u32>,
        #[serde(default = "default_slots")]
        slots: NonZeroU32,
        timeout_ms: Option<f64>,
    },
}

impl Default for TransportFile {
    fn default() -> Self {
        Self::Reference {
            mtu: Some(9000),
            elements: None,
            slots: default_slots(),
            timeout_ms: None,
        }
    }
}

/// Which all-reduces begin when.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ScheduleFile {
    pub(super) kind: KindFile,
    /// Elements of a chunk.
    pub(super) chunk: Option<NonZeroU64>,
    pub(super) weight: Weight,
    pub(super) compress: Which,
    pub(super) sticky: bool,
    /// The demand of a job on ports that it does not use.
    pub(super) d0: u64,
}

/// A schedule's name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum KindFile {
    #[default]
    None,
    ReadyAndGo,
    FifoExclusive,
    ByteScheduler,
    DeficitRoundRobin,
    Sincronia,
}

/// One job, or several equal ones.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct JobFile {
    pub(super) model: String,
    pub(super) iterations: NonZeroU64,
    /// The workers by number, with one GPU each.
    pub(super) workers: Option<Vec<u32>>,
    /// The number of its GPUs, if the placement chooses workers.
    pub(super) gpus: Option<NonZeroU32>,
    #[serde(default)]
    pub(super) submitted_s: f64,
    #[serde(default = "one_job")]
    pub(super) count: NonZeroU32,
}

/// Jobs from a file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ArrivalsFile {
    pub(super) file: String,
    pub(super) format: FormatFile,
    pub(super) iterations: IterationsFile,
    #[serde(default)]
    pub(super) submit_all_at_start: bool,
    #[serde(default = "one_nonzero")]
    pub(super) iteration_factor: NonZeroU64,
    #[serde(default = "one_job")]
    pub(super) gpu_factor: NonZeroU32,
    pub(super) max_jobs: Option<usize>,
    /// The profile for a model of the file.
    #[serde(default)]
    pub(super) models: BTreeMap<String, String>,
}

/// The format of a file of jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum FormatFile {
    Coinnetflow,
    Pollux,
}

/// The source of numbers of iterations.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) enum IterationsFile {
    Column,
    PerSecond(f64),
    Fixed(NonZeroU64),
    PerModel(BTreeMap<String, NonZeroU64>),
}

/// Where jobs without workers go.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PlacementFile {
    pub(super) policy: PolicyFile,
    #[serde(default)]
    pub(super) fallback: bool,
    /// With policy `custom`: `JOB-WORKER&WORKER,…`.
    pub(super) custom: Option<String>,
}

/// A policy's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum PolicyFile {
    Random,
    Distributed,
    SingleRack,
    MultiRack,
    Custom,
}

const fn one() -> u32 {
    1
}

const fn one_us() -> f64 {
    1.0
}

const fn one_job() -> NonZeroU32 {
    NonZeroU32::MIN
}

const fn one_nonzero() -> NonZeroU64 {
    NonZeroU64::MIN
}

const fn default_slots() -> NonZeroU32 {
    NonZeroU32::new(512).expect("not zero")
}
