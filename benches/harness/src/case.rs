//! The parts of a case: sides, network, data and bounds on the times. [`crate::cases`] defines the
//! cases themselves.

use racksum_benches::data::Input;
use racksum_proto::auth::DataAuth;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::WireType;
use serde::Serialize;

use crate::stats::{Summary, ms};
use crate::volume::Data;

/// A case of the benches: a race, or a measurement of memory.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Case {
    Race(Race),
    Memory(Memory),
}

impl Case {
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Race(race) => &race.name,
            Self::Memory(memory) => memory.name,
        }
    }

    /// Turns a race into one of racksum against an earlier build of itself. Sides that use the
    /// Python package take part only if `has_package` is true. Leaves other cases unchanged.
    pub(crate) fn against_before(&mut self, has_package: bool) {
        const MOST: f64 = 0.02;
        if let Self::Race(race) = self {
            race.sides.retain(|side| has_package || !side.program.uses_package());
            race.against_before(MOST);
        }
    }

    /// Describes the case in one line for people.
    pub(crate) fn about(&self) -> String {
        match self {
            Self::Race(race) => race.about(),
            Self::Memory(memory) => memory.about(),
        }
    }
}

/// A race between programs that do the same work in turns.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Race {
    pub(crate) name: String,
    pub(crate) world: u16,
    pub(crate) net: Net,
    /// Shards of each aggregator.
    pub(crate) shards: u8,
    pub(crate) data: Data,
    /// Number of iterations that each side runs in a round. Their median is the time of the round.
    pub(crate) iterations: u32,
    pub(crate) sides: Vec<Side>,
    #[serde(skip)]
    pub(crate) bounds: Vec<Bound>,
}

impl Race {
    fn about(&self) -> String {
        let Data { bytes, density, overlap, .. } = self.data;
        let data = if self.data.is_dense() {
            "dense".to_owned()
        } else {
            format!("{} % of blocks ({})", density * 100.0, overlap.name())
        };
        let net = match self.net {
            Net::Loopback => "loopback".to_owned(),
            Net::Gigabit { aggregators, aggregators_limited } => {
                let limited = if aggregators_limited { " at 1 Gbit/s too" } else { "" };
                format!("1 Gbit/s a worker, {aggregators} aggregator host(s){limited}")
            }
        };
        let blocks = self.sides.iter().filter_map(|side| {
            let block = side.program.racksum()?.block;
            (block != Racksum::PLAIN.block).then(|| format!("; {}: blocks of {block}", side.name))
        });
        let blocks: String = blocks.collect();
        let Self { world, shards, .. } = self;
        format!("{world} ranks, {bytes} B of f32, {data}, {net}, {shards} shard(s){blocks}")
    }

    /// Keeps only racksum's sides, and adds the earlier build of each side after it. No side may
    /// take longer than its earlier build by more than the share `most`.
    fn against_before(&mut self, most: f64) {
        let sides = std::mem::take(&mut self.sides);
        self.bounds.clear();
        for side in sides {
            let Some(program) = side.program.before() else { continue };
            // The cases are few and live as long as the process, so the leak is harmless.
            let name = format!("{}, before", side.name).leak();
            self.sides.extend([side, Side { name, program }]);
            let figure = Figure::CostInTurn(side.name, name);
            self.bounds.push(Bound { figure, must: 1.0 + most, reach: 1.0 });
        }
    }

    /// Returns whether the race's ranks have their tensors on a GPU.
    pub(crate) fn needs_gpu(&self) -> bool {
        let trains = |side: &Side| matches!(side.program, Program::Training(it) if it.gpu);
        self.sides.iter().any(trains)
    }

    /// Returns the index of the side with this name, and the side itself.
    pub(crate) fn side(&self, name: &str) -> Option<(usize, &Side)> {
        self.sides.iter().enumerate().find(|(_, side)| side.name == name)
    }
}

/// The network between the ranks and the aggregators.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Net {
    /// All processes use the loopback interface.
    Loopback,
    /// Each rank has a host of its own, whose link carries 1 Gbit/s in each direction.
    Gigabit {
        aggregators: u8,
        /// Whether the aggregators' hosts are limited to 1 Gbit/s as well.
        aggregators_limited: bool,
    },
}

/// A participant in a race.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Side {
    pub(crate) name: &'static str,
    pub(crate) program: Program,
}

/// The program that a side runs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Program {
    Racksum(Racksum),
    Gloo {
        sparse: bool,
    },
    /// Training steps.
    Training(Training),
    /// A reduction through the sidecar of a host; dense only, loopback only.
    Sidecar {
        way: Way,
        build: Build,
    },
    /// Open MPI over TCP or shared memory; dense only, loopback only.
    OpenMpi {
        shared: bool,
    },
    /// Bare sockets, whose time is a lower bound; dense only, loopback only.
    Floor {
        wire: WireType,
    },
}

impl Program {
    pub(crate) const fn racksum(&self) -> Option<&Racksum> {
        match self {
            Self::Racksum(racksum) => Some(racksum),
            Self::Gloo { .. }
            | Self::OpenMpi { .. }
            | Self::Floor { .. }
            | Self::Sidecar { .. }
            | Self::Training(_) => None,
        }
    }

    /// Returns the program of an earlier build, or `None` if this program does not use racksum.
    fn before(self) -> Option<Self> {
        const BUILD: Build = Build::Before;
        match self {
            Self::Racksum(racksum) => Some(Self::Racksum(Racksum { build: BUILD, ..racksum })),
            Self::Training(training) => {
                let racksum = Some(Racksum { build: BUILD, ..training.racksum? });
                Some(Self::Training(Training { racksum, ..training }))
            }
            Self::Sidecar { way: Way::Memcpy, .. }
            | Self::Gloo { .. }
            | Self::OpenMpi { .. }
            | Self::Floor { .. } => None,
            Self::Sidecar { way, .. } => Some(Self::Sidecar { way, build: BUILD }),
        }
    }

    /// Returns whether the program uses racksum's Python package.
    pub(crate) const fn uses_package(&self) -> bool {
        matches!(self, Self::Training(_) | Self::Sidecar { .. })
    }

    /// Returns the racksum settings of the aggregator that the program needs, if it needs one.
    pub(crate) const fn served(&self) -> Option<&Racksum> {
        match self {
            Self::Training(training) => training.racksum.as_ref(),
            _ => self.racksum(),
        }
    }
}

/// The input of a reduction through the sidecar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Way {
    /// A tensor in memory that the sidecar shares.
    Shared,
    /// A tensor in the rank's own memory.
    Own,
    /// A bucket, through DDP's hook.
    Hook,
    /// No reduction: a tensor is copied to another and back.
    Memcpy,
}

impl Way {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Shared => "shared",
            Self::Own => "own",
            Self::Hook => "hook",
            Self::Memcpy => "memcpy",
        }
    }
}

/// A training script that runs a fixed number of steps in each iteration, with racksum or with
/// Gloo.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Training {
    /// Name of a script in `benches/workloads` or `benches/peers`.
    pub(crate) script: &'static str,
    pub(crate) flags: &'static [&'static str],
    pub(crate) racksum: Option<Racksum>,
    /// Whether the training runs on a GPU.
    pub(crate) gpu: bool,
}

/// The build of racksum that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Build {
    /// The build of this source.
    Own,
    /// The build to race against.
    Before,
}

/// The settings of racksum.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Racksum {
    pub(crate) build: Build,
    /// Wire type of the elements.
    pub(crate) wire: WireType,
    /// Number of elements in a block.
    pub(crate) block: usize,
    /// Form of an op's operand.
    pub(crate) input: Input,
    /// Share of datagrams that each rank drops on purpose, in each direction. With any value but
    /// `None`, a rank generates a random number for each datagram.
    pub(crate) drop: Option<f64>,
    /// Number of the network's aggregators that serve the job.
    pub(crate) aggregators: u8,
    /// Authentication of datagrams; `None` leaves the default.
    pub(crate) data_auth: Option<DataAuth>,
    /// Op size in bytes of a background job: another job with as many ranks, which uses the same
    /// aggregator during the measurement. `None` means no background job.
    pub(crate) beside: Option<u64>,
}

impl Racksum {
    pub(crate) const PLAIN: Self = Self {
        build: Build::Own,
        wire: WireType::F32,
        block: Descriptor::DEFAULT_BLOCK,
        input: Input::Dense,
        drop: None,
        aggregators: 1,
        data_auth: None,
        beside: None,
    };
    /// Racksum in bf16 with blocks of 512 elements. A window has at most 64 blocks and 60 KiB. With
    /// elements of 2 bytes, 64 blocks of 256 elements fill only half of a window, and blocks of 512
    /// elements fill it.
    pub(crate) const BF16: Self = Self { wire: WireType::Bf16, block: 512, ..Self::PLAIN };
}

/// A case of many jobs at one aggregator, whose memory is measured afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Memory {
    pub(crate) name: &'static str,
    pub(crate) jobs: u16,
    /// Ranks of each job.
    pub(crate) world: u16,
    /// Size of each dense tensor.
    pub(crate) bytes: u64,
    pub(crate) shards: u8,
    pub(crate) pool_mib: u32,
    /// Memory that the process may use beyond the pool.
    pub(crate) spare_bytes: u64,
}

impl Memory {
    fn about(&self) -> String {
        let Self { jobs, world, bytes, shards, pool_mib, .. } = self;
        format!(
            "{jobs} jobs of {world} ranks, {bytes} B of f32 each, one aggregator with {shards} \
             shard(s) of {pool_mib} MiB"
        )
    }
}

/// A figure and its limits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Bound {
    pub(crate) figure: Figure,
    pub(crate) must: f64,
    pub(crate) reach: f64,
}

/// A figure that a bound limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Figure {
    /// A side's time in microseconds; smaller is better.
    Time(&'static str),
    /// The second side's time divided by the first's; larger is better.
    Gain(&'static str, &'static str),
    /// The first side's time divided by the second's; smaller is better.
    Cost(&'static str, &'static str),
    /// Like [`Self::Cost`], but precise enough for small differences. Each pair of rounds yields
    /// the geometric mean of its two costs, and the figure is the median of these means. A pair is
    /// a round and its mirror: the round with the same number in the next set-up, where the sides
    /// have swapped places. The sides take their turns of a round close together, so the machine
    /// changes little between them.
    CostInTurn(&'static str, &'static str),
    /// The relative error of a side's predicted time; smaller is better.
    Miss(&'static str),
}

/// The times of a side, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Took<'a> {
    pub(crate) measured: f64,
    /// Median time of each round.
    pub(crate) rounds: &'a [f64],
    /// Number of measured rounds in a set-up.
    pub(crate) counted: u32,
    pub(crate) predicted: Option<f64>,
}

impl Figure {
    /// Computes the figure from the sides' times; returns `None` if a time is missing.
    pub(crate) fn value<'a>(self, took: impl Fn(&str) -> Option<Took<'a>>) -> Option<f64> {
        let time = |side| Some(took(side)?.measured);
        Some(match self {
            Self::Time(side) => time(side)?,
            Self::Gain(side, other) => time(other)? / time(side)?,
            Self::Cost(side, other) => time(side)? / time(other)?,
            Self::CostInTurn(side, other) => {
                let (own, its) = (took(side)?.rounds, took(other)?.rounds);
                // If one side lacks rounds, the rounds of the two sides cannot be paired.
                let rounds = (own.len() == its.len()).then(|| own.iter().zip(its))?;
                let ratios: Vec<_> = rounds.map(|(own, its)| own / its).collect();
                // Each round of a set-up has its mirror in the next set-up.
                let counted = took(side)?.counted as usize;
                let mirrored = ratios.chunks_exact(2 * counted).flat_map(|two| {
                    let (one, other) = two.split_at(counted);
                    one.iter().zip(other).map(|(one, other)| (one * other).sqrt())
                });
                Summary::of(&mirrored.collect::<Vec<_>>())?.median
            }
            Self::Miss(side) => (took(side)?.predicted? / time(side)? - 1.0).abs(),
        })
    }

    pub(crate) fn name(self) -> String {
        match self {
            Self::Time(side) => side.to_owned(),
            Self::Gain(side, other) => format!("{other} / {side}"),
            Self::Cost(side, other) | Self::CostInTurn(side, other) => format!("{side} / {other}"),
            Self::Miss(side) => format!("{side}, off its prediction"),
        }
    }

    /// Formats a value of this figure for people.
    pub(crate) fn show(self, value: f64) -> String {
        match self {
            Self::Time(_) => ms(value),
            Self::Gain(..) | Self::Cost(..) => format!("{value:.2}"),
            Self::CostInTurn(..) => format!("{value:.3}"),
            Self::Miss(_) => format!("{:.0} %", value * 100.0),
        }
    }

    /// Returns the comparison sign between a value and its bound.
    pub(crate) const fn sign(self) -> &'static str {
        match self {
            Self::Time(_) | Self::Cost(..) | Self::CostInTurn(..) | Self::Miss(_) => "<=",
            Self::Gain(..) => ">=",
        }
    }

    fn keeps(self, value: f64, bound: f64) -> bool {
        match self {
            Self::Time(_) | Self::Cost(..) | Self::CostInTurn(..) | Self::Miss(_) => value <= bound,
            Self::Gain(..) => value >= bound,
        }
    }
}

/// The result of comparing a figure with its limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Grade {
    /// The figure meets the stricter goal, `reach`.
    Reach,
    /// The figure meets its bound, `must`.
    Pass,
    /// The figure misses its bound.
    Missed,
    /// A time of a side is missing.
    NotMeasured,
}

impl Grade {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Reach => "PASS, reach",
            Self::Pass => "PASS",
            Self::Missed => "missed",
            Self::NotMeasured => "not measured",
        }
    }
}

impl Bound {
    pub(crate) fn judge(&self, value: Option<f64>) -> Grade {
        match value {
            None => Grade::NotMeasured,
            Some(value) if self.figure.keeps(value, self.reach) => Grade::Reach,
            Some(value) if self.figure.keeps(value, self.must) => Grade::Pass,
            Some(_) => Grade::Missed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn took(side: &str) -> Option<Took<'static>> {
        let took =
            |measured, rounds, predicted| Some(Took { measured, rounds, counted: 2, predicted });
        match side {
            "racksum" => took(200.0, &[200.0, 100.0, 300.0], Some(180.0)),
            "gloo" => took(300.0, &[300.0, 40.0, 450.0], None),
            "failed" => took(300.0, &[300.0], None),
            // The side that is set up first takes a quarter longer; the last set-up has no mirror.
            "first" => took(100.0, &[125.0, 125.0, 100.0, 100.0, 500.0, 500.0], None),
            "second" => took(100.0, &[100.0, 100.0, 125.0, 125.0, 100.0, 100.0], None),
            _ => None,
        }
    }

    #[test]
    fn figures_are_times_or_their_ratios() {
        assert_eq!(Figure::Time("racksum").value(took), Some(200.0));
        assert_eq!(Figure::Gain("racksum", "gloo").value(took), Some(1.5));
        assert_eq!(Figure::Cost("gloo", "racksum").value(took), Some(1.5));
        assert_eq!(Figure::CostInTurn("first", "second").value(took), Some(1.0));
        assert_eq!(Figure::CostInTurn("racksum", "failed").value(took), None);
        assert_eq!(Figure::Gain("racksum", "openmpi").value(took), None);
        let miss = Figure::Miss("racksum").value(took).unwrap();
        assert!((miss - 0.1).abs() < 1e-9, "{miss}");
        assert_eq!(Figure::Miss("gloo").value(took), None);
    }

    #[test]
    fn a_race_against_an_earlier_build_has_each_side_of_racksum_twice_and_nobody_else() {
        let mut cases = crate::cases::all(1);
        cases.iter_mut().for_each(|case| case.against_before(false));
        let Case::Race(race) = &cases[0] else { panic!("the case is not a race") };
        let sides: Vec<_> = race.sides.iter().map(|side| side.name).collect();
        assert_eq!(sides, ["racksum", "racksum, before"]);
        let build = |side: &Side| side.program.racksum().unwrap().build;
        assert_eq!(race.sides.iter().map(build).collect::<Vec<_>>(), [Build::Own, Build::Before]);
        let [bound] = race.bounds[..] else { panic!("the race must have one bound") };
        assert_eq!((bound.figure.name(), bound.must), ("racksum / racksum, before".into(), 1.02));
    }

    #[test]
    fn a_race_against_a_checkout_has_the_sides_of_its_python_package_too() {
        let names = |case: &str, has_package| {
            let mut case = crate::cases::chosen(&[case.to_owned()], 1).unwrap().remove(0);
            case.against_before(has_package);
            let Case::Race(race) = case else { panic!("the case is not a race") };
            race.sides.iter().map(|side| side.name).collect::<Vec<_>>()
        };
        assert_eq!(names("hook-w1", true), ["hook", "hook, before"]);
        assert_eq!(names("train-words-1g-w4", true), ["racksum", "racksum, before"]);
        assert_eq!(names("hook-w1", false), [""; 0]);
        assert_eq!(names("train-words-1g-w4", false), [""; 0]);
    }

    #[test]
    fn small_times_and_large_gains_pass() {
        let judge = |figure, must, reach| Bound { figure, must, reach }.judge(figure.value(took));
        let of_time = |must, reach| judge(Figure::Time("racksum"), must, reach);
        assert_eq!(of_time(200.0, 199.0), Grade::Pass);
        assert_eq!(of_time(250.0, 200.0), Grade::Reach);
        assert_eq!(of_time(199.0, 150.0), Grade::Missed);
        let of_gain = |must, reach| judge(Figure::Gain("racksum", "gloo"), must, reach);
        assert_eq!(of_gain(1.5, 1.6), Grade::Pass);
        assert_eq!(of_gain(1.6, 2.0), Grade::Missed);
        assert_eq!(judge(Figure::Time("openmpi"), 1.0, 1.0), Grade::NotMeasured);
    }
}
