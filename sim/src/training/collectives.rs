//! The all-reduces that jobs ask for, and when they begin.
//!
//! Without coordination, each worker begins its job's tensors in the order in which it asks for
//! them. With a schedule, a tensor is ready once all workers of its job have asked for it, a job
//! sends one chunk at a time, and the schedule decides which job begins its next chunk.

use std::collections::{BTreeSet, VecDeque};

use racksum_proto::schedule::{Demand, Schedule, Turn};
use serde::Deserialize;

use crate::engine::Picos;
use crate::random::Random;
use crate::transport::reference::Member;

/// The rules by which all-reduces begin.
pub struct Coordination {
    /// The schedule, or `None` without coordination.
    pub schedule: Option<Box<dyn Schedule<u32>>>,
    /// The order of the tensors of one job.
    pub order: Order,
    /// The greatest number of elements of a chunk. `None` sends whole tensors.
    pub chunk_elements: Option<u64>,
    /// Which chunks are compressed.
    pub compression: Compression,
    /// The ports that a job's demand names.
    pub ports: Ports,
}

impl std::fmt::Debug for Coordination {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { schedule: _, order, chunk_elements, compression, ports } = self;
        f.debug_struct("Coordination")
            .field("order", order)
            .field("chunk_elements", chunk_elements)
            .field("compression", compression)
            .field("ports", ports)
            .finish_non_exhaustive()
    }
}

/// The order of the tensors of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// In the order in which they are ready.
    Ready,
    /// From the front of the model to the back, as the next forward pass needs them.
    Front,
}

/// The ports of a job's demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ports {
    /// The workers of the job.
    Workers,
    /// The switches of the job's tree.
    Switches,
}

/// A choice of chunks to compress: natural compression, which keeps a quarter of the bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Compression {
    /// The chunks that are chosen.
    pub which: Which,
    /// Whether all later chunks of a tensor, in all iterations, are compressed once one was, as in
    /// the study's code.
    pub is_sticky: bool,
}

/// The chunks that are compressed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Which {
    /// None.
    #[default]
    Never,
    /// Chunks of jobs that are not the first in the order.
    LowPriority,
    /// Each with a probability of 40 %.
    TwoInFive,
}

/// A chunk that the workers of a job begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// The elements that the chunk covers.
    pub elements: u64,
    /// The elements that are sent for them.
    pub sent_elements: u64,
    /// The time that a worker takes to compress it.
    pub compressing: Picos,
}

/// The all-reduces of all jobs.
#[derive(Debug)]
pub struct Collectives {
    rules: Coordination,
    jobs: Vec<Job>,
    /// The jobs with a chunk in transmission.
    active: BTreeSet<u32>,
    random: Random,
}

#[derive(Debug, Default)]
struct Job {
    /// Elements of each tensor.
    tensors: Vec<u64>,
    ports: Vec<u32>,
    workers: usize,
    /// Per tensor: the workers that have asked for it since it was last ready.
    asked: Vec<usize>,
    /// Per tensor: whether a chunk of it was compressed.
    sticks: Vec<bool>,
    /// Tensors that are ready, with the elements that are left of them.
    ready: VecDeque<(usize, u64)>,
    active: Option<Active>,
    /// Without coordination: the asks of each worker.
    asks: Vec<Asks>,
}

/// The tensors that a worker has asked for, the one in transmission first.
#[derive(Debug, Clone, Default)]
struct Asks {
    tensors: VecDeque<usize>,
    /// The number of tensors before these. All workers of a job ask in the same order.
    done: u64,
}

#[derive(Debug)]
struct Active {
    tensor: usize,
    left: u64,
    chunk: Chunk,
    workers_left: usize,
    turn: Turn<u32>,
}

impl Collectives {
    /// Creates the all-reduces of no jobs.
    #[must_use]
    pub const fn new(rules: Coordination, random: Random) -> Self {
        Self { rules, jobs: vec![], active: BTreeSet::new(), random }
    }

    /// Returns what a job's demand names as its ports.
    #[must_use]
    pub const fn ports(&self) -> Ports {
        self.rules.ports
    }

    /// Adds the next job, with the elements of its tensors.
    pub fn add_job(&mut self, tensors: Vec<u64>, workers: usize, ports: Vec<u32>) {
        let count = tensors.len();
        let number = self.jobs.len();
        self.jobs.push(Job {
            tensors,
            ports,
            workers,
            asked: vec![0; count],
            sticks: vec![false; count],
            ready: VecDeque::new(),
            active: None,
            asks: vec![Asks::default(); workers],
        });
        if let Some(schedule) = &mut self.rules.schedule {
            schedule.add(u32::try_from(number).expect("fewer than 2^32 jobs"), 1.0);
        }
    }

    /// Notes that a worker asks for the all-reduce of a tensor. Returns a chunk that this worker
    /// begins. `waited` is the time for which the workers of the job have been idle in total.
    pub fn ask(&mut self, member: Member, tensor: usize, waited: Picos) -> Option<Chunk> {
        let job = &mut self.jobs[member.job as usize];
        if self.rules.schedule.is_none() {
            let asks = &mut job.asks[usize::from(member.worker)];
            asks.tensors.push_back(tensor);
            return if asks.tensors.len() == 1 { self.next_of(member) } else { None };
        }
        job.asked[tensor] += 1;
        if job.asked[tensor] == job.workers {
            job.asked[tensor] = 0;
            let place = match self.rules.order {
                Order::Ready => job.ready.len(),
                Order::Front => job.ready.partition_point(|(other, _)| *other <= tensor),
            };
            job.ready.insert(place, (tensor, job.tensors[tensor]));
            self.request(member.job, waited);
        }
        None
    }

    /// Begins the next chunk that the schedule allows, and returns its job.
    pub fn begin_next(&mut self) -> Option<(u32, Chunk)> {
        let turn = self.rules.schedule.as_mut()?.next()?;
        let number = turn.job;
        let priority = self.priority(number);
        let job = &mut self.jobs[number as usize];
        let (tensor, left) = job.ready.pop_front()?;
        let elements = left.min(self.rules.chunk_elements.unwrap_or(u64::MAX));
        let chosen = match self.rules.compression.which {
            Which::Never => false,
            Which::LowPriority => priority > 1,
            Which::TwoInFive => self.random.chance(TWO_IN_FIVE_PPM),
        };
        let chunk = compressed(self.rules.compression, &mut job.sticks[tensor], chosen, elements);
        job.active = Some(Active { tensor, left, chunk, workers_left: job.workers, turn });
        self.active.insert(number);
        Some((number, chunk))
    }

    /// Notes that a worker has the result of its chunk. Returns the tensor that is done, if this
    /// was its last chunk.
    pub fn end(&mut self, member: Member, waited: Picos) -> Option<usize> {
        let job = &mut self.jobs[member.job as usize];
        if self.rules.schedule.is_none() {
            let asks = &mut job.asks[usize::from(member.worker)];
            asks.done += 1;
            return asks.tensors.pop_front();
        }
        let active = job.active.as_mut()?;
        let left = active.left - active.chunk.elements;
        let ended = (left == 0).then_some(active.tensor);
        active.workers_left -= 1;
        if active.workers_left == 0
            && let Some(Active { tensor, chunk, mut turn, .. }) = job.active.take()
        {
            if left > 0 {
                let place = match self.rules.order {
                    Order::Ready => 0,
                    Order::Front => job.ready.partition_point(|(other, _)| *other < tensor),
                };
                job.ready.insert(place, (tensor, left));
            }
            turn.spend(usize::try_from(chunk.elements * 4).unwrap_or(usize::MAX));
            self.active.remove(&member.job);
            if let Some(schedule) = &mut self.rules.schedule {
                schedule.finish(turn);
            }
            self.request(member.job, waited);
        }
        ended
    }

    /// Without coordination: returns the next chunk that a worker begins.
    pub fn next_of(&mut self, member: Member) -> Option<Chunk> {
        let job = &mut self.jobs[member.job as usize];
        let asks = &job.asks[usize::from(member.worker)];
        let tensor = *asks.tensors.front()?;
        // The draw is the same at all workers.
        let mut draw = self.random.nth(u64::from(member.job)).nth(asks.done);
        let chosen =
            self.rules.compression.which == Which::TwoInFive && draw.chance(TWO_IN_FIVE_PPM);
        let elements = job.tensors[tensor];
        Some(compressed(self.rules.compression, &mut job.sticks[tensor], chosen, elements))
    }

    /// Returns the priority of a job's packets.
    #[must_use]
    pub fn priority(&self, job: u32) -> u32 {
        self.rules.schedule.as_ref().map_or(0, |schedule| schedule.priority(job))
    }

    /// Returns the jobs with a chunk in transmission.
    pub fn active(&self) -> impl Iterator<Item = u32> + '_ {
        self.active.iter().copied()
    }

    /// Removes a job that has finished.
    pub fn remove_job(&mut self, job: u32) {
        if let Some(schedule) = &mut self.rules.schedule {
            schedule.remove(job);
        }
        self.jobs[job as usize] = Job::default();
    }

    /// Tells the schedule what a job asks for now.
    fn request(&mut self, number: u32, waited: Picos) {
        let Some(schedule) = &mut self.rules.schedule else { return };
        let job = &self.jobs[number as usize];
        let active = job.active.as_ref().map(|active| (active.tensor, active.left));
        let head = active.or_else(|| job.ready.front().copied());
        let demand = head.map_or_else(Demand::default, |(tensor, left)| Demand {
            left: left * 4,
            bytes: job.tensors[tensor] * 4,
            layer: u32::try_from(tensor).unwrap_or(u32::MAX),
            layers: u32::try_from(job.tensors.len()).unwrap_or(u32::MAX),
            waited: waited.time().since(racksum_proto::time::Time(0)),
            ports: job.ports.clone(),
        });
        schedule.demand(number, demand);
        if active.is_none() && head.is_some() {
            schedule.enqueue(number);
        }
    }
}

/// Returns a chunk, compressed if it is chosen or an earlier choice sticks.
fn compressed(rules: Compression, sticks: &mut bool, chosen: bool, elements: u64) -> Chunk {
    let is_compressed = chosen || rules.is_sticky && *sticks;
    *sticks |= is_compressed;
    if !is_compressed {
        return Chunk { elements, sent_elements: elements, compressing: Picos::ZERO };
    }
    let compressing = u128::from(elements) * 1_000_000_000 / ELEMENTS_PER_MILLISECOND;
    Chunk {
        elements,
        sent_elements: elements.div_ceil(4),
        compressing: Picos(u64::try_from(compressing).unwrap_or(u64::MAX)),
    }
}

const TWO_IN_FIVE_PPM: u32 = 400_000;
/// Elements that a worker compresses in a millisecond, as measured in the study.
const ELEMENTS_PER_MILLISECOND: u128 = 44_525_520;
