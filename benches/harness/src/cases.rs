//! The cases: those with bounds, and small ones that cover every mechanism.

use racksum_benches::data::{Input, Overlap};
use racksum_proto::auth::DataAuth;
use racksum_proto::dtype::WireType;

use crate::case::{
    Bound, Build, Case, Figure, Memory, Net, Program, Race, Racksum, Side, Training, Way,
};
use crate::volume::Data;

/// Returns all cases that have bounds, in the order in which they run.
pub(crate) fn all(seed: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    for (world, must, reach) in [(2, 1.15, 1.2), (4, 1.25, 1.4), (8, 1.45, 1.7)] {
        cases.push(dense_loopback(seed, world, must, reach));
    }
    for (world, must, reach) in [(2, 1.4, 1.8), (4, 1.7, 2.2), (8, 2.2, 3.0)] {
        cases.push(bf16_loopback(seed, world, must, reach));
    }
    cases.extend(on_slow_links(seed));
    cases.push(sparse_loopback(seed, "sparse1-loopback-w8", Input::Dense, 60.0, 40.0));
    cases.push(sparse_loopback(seed, "blocks1-loopback-w8", Input::Blocks, 30.0, 15.0));
    cases.push(small(seed, 2, 0.1, 0.05));
    cases.push(small(seed, 8, 1.0, 0.4));
    cases.push(loss(seed));
    cases.push(Case::Memory(Memory {
        name: "memory-8x8",
        jobs: 8,
        world: 8,
        bytes: 4_000_000,
        shards: 2,
        pool_mib: 256,
        spare_bytes: 64_000_000,
    }));
    cases.push(two_aggregators(seed));
    cases.push(tenants(seed));
    cases.extend(authenticated(seed));
    cases.extend(trainings(seed));
    cases.push(training_on_a_gpu(seed));
    cases.push(sidecar(seed));
    cases.push(hook(seed));
    cases
}

/// Returns small cases that cover every mechanism once, without peers and bounds.
pub(crate) fn smoke(seed: u64) -> Vec<Case> {
    let race = |name: &str, world, net, data, sides: &[(&'static str, Racksum)]| {
        let sides =
            sides.iter().map(|(name, racksum)| Side { name, program: Program::Racksum(*racksum) });
        let sides = sides.collect();
        let name = name.to_owned();
        let (iterations, bounds) = (1, Vec::new());
        Case::Race(Race { name, world, net, shards: 1, data, iterations, sides, bounds })
    };
    let plain = Racksum::PLAIN;
    let bf16 = Racksum::BF16;
    let loss = Racksum { drop: Some(0.01), ..plain };
    let blocks = Racksum { input: Input::Blocks, ..plain };
    let two = Racksum { aggregators: 2, ..plain };
    let sparse = Data { density: 0.05, ..dense(seed, 4_000_000) };
    // The ranks' own links are the bottleneck, and their queues hold everything that the ranks
    // send.
    let links = Net::Gigabit { aggregators: 2, aggregators_limited: false };
    vec![
        race(
            "smoke-loopback",
            2,
            Net::Loopback,
            // The tensor has enough windows for 1 % of loss to stay well within the 6 % that I3
            // allows.
            dense(seed, 16_000_000),
            &[("racksum", plain), ("racksum-bf16", bf16), ("racksum-loss", loss)],
        ),
        race(
            "smoke-sparse",
            4,
            Net::Loopback,
            sparse,
            &[("racksum", plain), ("racksum-blocks", blocks)],
        ),
        race("smoke-small", 2, Net::Loopback, dense(seed, 4096), &[("racksum", plain)]),
        race(
            "smoke-1g",
            2,
            links,
            dense(seed, 2_000_000),
            &[("one-aggregator", plain), ("two-aggregators", two)],
        ),
        Case::Memory(Memory {
            name: "smoke-memory",
            jobs: 2,
            world: 2,
            bytes: 1_000_000,
            shards: 1,
            pool_mib: 64,
            spare_bytes: 64_000_000,
        }),
    ]
}

/// Returns the cases that a user named, each by its full name or by a prefix that ends before a
/// dash. If `names` is empty, returns all cases that have bounds.
pub(crate) fn chosen(names: &[String], seed: u64) -> Result<Vec<Case>, String> {
    if names.is_empty() {
        return Ok(all(seed));
    }
    let mut cases = [all(seed), smoke(seed)].concat();
    let is_named = |case: &Case, name: &String| {
        let rest = case.name().strip_prefix(name.as_str());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    };
    for name in names {
        if !cases.iter().any(|case| is_named(case, name)) {
            let known: Vec<_> = cases.iter().map(Case::name).collect();
            return Err(format!("there is no case {name:?}; the cases are {}", known.join(", ")));
        }
    }
    cases.retain(|case| names.iter().any(|name| is_named(case, name)));
    Ok(cases)
}

fn dense(seed: u64, bytes: u64) -> Data {
    Data { bytes, density: 1.0, overlap: Overlap::Random, seed }
}

/// Returns data of 100 000 blocks; `density` is the share of blocks that are not zero.
fn sparse(seed: u64, density: f64, overlap: Overlap) -> Data {
    Data { bytes: 102_400_000, density, overlap, seed }
}

const RACKSUM: Side = Side { name: "racksum", program: Program::Racksum(Racksum::PLAIN) };
/// Racksum with a list of blocks as its operand.
const RACKSUM_BLOCKS: Side = Side {
    name: "racksum",
    program: Program::Racksum(Racksum { input: Input::Blocks, ..Racksum::PLAIN }),
};
/// Racksum with whole tensors, for races where another racksum side has a list of blocks.
const RACKSUM_DENSE: Side =
    Side { name: "racksum-dense-in", program: Program::Racksum(Racksum::PLAIN) };
const GLOO: Side = Side { name: "gloo", program: Program::Gloo { sparse: false } };
const GLOO_SPARSE: Side = Side { name: "gloo-sparse", program: Program::Gloo { sparse: true } };
const FLOOR: Side = Side { name: "floor", program: Program::Floor { wire: WireType::F32 } };
const FLOOR_BF16: Side = Side { name: "floor", program: Program::Floor { wire: WireType::Bf16 } };
const OPENMPI: Side = Side { name: "openmpi", program: Program::OpenMpi { shared: false } };
const OPENMPI_SHARED: Side = Side { name: "openmpi", program: Program::OpenMpi { shared: true } };

/// Number of shards for dense tensors on loopback. With eight ranks, the remaining cores suffice
/// for two shards.
const BULK_SHARDS: u8 = 2;

/// Workers at 1 Gbit/s with an unlimited aggregator.
const GIGABIT: Net = Net::Gigabit { aggregators: 1, aggregators_limited: false };

fn gain(peer: &'static str, must: f64, reach: f64) -> Bound {
    Bound { figure: Figure::Gain("racksum", peer), must, reach }
}

fn time(must_ms: f64, reach_ms: f64) -> Bound {
    Bound { figure: Figure::Time("racksum"), must: must_ms * 1e3, reach: reach_ms * 1e3 }
}

fn dense_loopback(seed: u64, world: u16, must: f64, reach: f64) -> Case {
    Case::Race(Race {
        name: format!("dense-loopback-w{world}"),
        world,
        net: Net::Loopback,
        shards: BULK_SHARDS,
        data: dense(seed, 100_000_000),
        iterations: 1,
        sides: vec![RACKSUM, GLOO, OPENMPI, FLOOR],
        bounds: vec![gain("gloo", must, reach)],
    })
}

fn bf16_loopback(seed: u64, world: u16, must: f64, reach: f64) -> Case {
    let program = Program::Racksum(Racksum::BF16);
    let usual = Program::Racksum(Racksum { block: Racksum::PLAIN.block, ..Racksum::BF16 });
    let usual = Side { name: "racksum-256", program: usual };
    Case::Race(Race {
        name: format!("bf16-loopback-w{world}"),
        world,
        net: Net::Loopback,
        shards: BULK_SHARDS,
        data: dense(seed, 100_000_000),
        iterations: 1,
        sides: vec![Side { name: "racksum", program }, usual, GLOO, FLOOR_BF16],
        bounds: vec![gain("gloo", must, reach)],
    })
}

/// Number of iterations in a turn, for ops that take milliseconds. A single iteration would also
/// measure how the machine wakes after the other sides' turns.
const SHORT_ITERATIONS: u32 = 5;

/// Returns the cases with eight workers at 1 Gbit/s.
fn on_slow_links(seed: u64) -> Vec<Case> {
    let race = |name: &str, data: Data, sides: &[Side], bounds: &[Bound]| {
        Case::Race(Race {
            name: name.to_owned(),
            world: 8,
            net: GIGABIT,
            shards: 1,
            iterations: if data.density <= 0.01 { SHORT_ITERATIONS } else { 1 },
            data,
            sides: sides.to_vec(),
            bounds: bounds.to_vec(),
        })
    };
    let random = |density| sparse(seed, density, Overlap::Random);
    vec![
        race(
            "dense-1g-w8",
            dense(seed, 100_000_000),
            &[RACKSUM, GLOO],
            &[time(900.0, 870.0), gain("gloo", 1.6, 1.6)],
        ),
        // The cores of this one host do the scans of all eight hosts, and scans of whole tensors
        // take longer than the transfer over these links. The judged side therefore gets a list of
        // blocks, as Gloo's sparse side does.
        race(
            "sparse1-1g-w8",
            random(0.01),
            &[RACKSUM_BLOCKS, RACKSUM_DENSE, GLOO_SPARSE],
            &[time(80.0, 70.0)],
        ),
        race(
            "sparse1-all-1g-w8",
            sparse(seed, 0.01, Overlap::All),
            &[RACKSUM_BLOCKS, RACKSUM_DENSE, GLOO_SPARSE],
            &[time(15.0, 11.0)],
        ),
        race("sparse10-1g-w8", random(0.1), &[RACKSUM, GLOO, GLOO_SPARSE], &[time(560.0, 520.0)]),
    ]
}

/// Returns training cases with four ranks at 1 Gbit/s: DDP with the hook, and DDP with Gloo.
fn trainings(seed: u64) -> Vec<Case> {
    let race = |name: &str, bytes: u64, sides: &[(&'static str, Training)], bounds: &[Bound]| {
        let side = |(name, training): &(&'static str, Training)| Side {
            name,
            program: Program::Training(*training),
        };
        Case::Race(Race {
            name: name.to_owned(),
            world: 4,
            net: GIGABIT,
            shards: 1,
            iterations: 1,
            data: dense(seed, bytes),
            sides: sides.iter().map(side).collect(),
            bounds: bounds.to_vec(),
        })
    };
    let racksum = Some(Racksum::PLAIN);
    let words = Training { script: "words", flags: &["--steps=5"], racksum, gpu: false };
    let sparse = Training { flags: &["--steps=20", "--sparse"], ..words };
    let layers = Training { script: "layers", flags: &["--steps=3"], ..words };
    let gloo = |training| Training { racksum: None, ..training };
    let bf16 = Training { racksum: Some(Racksum::BF16), ..layers };
    let bf16_gain = Bound { figure: Figure::Gain("racksum-bf16", "gloo"), must: 1.8, reach: 2.5 };
    let foreseen = |side| Bound { figure: Figure::Miss(side), must: 0.15, reach: 0.07 };
    vec![
        race(
            "train-words-1g-w4",
            51_714_000,
            &[("racksum", words), ("gloo", gloo(words))],
            &[gain("gloo", 3.0, 8.0), foreseen("racksum"), foreseen("gloo")],
        ),
        race(
            "train-sparse-1g-w4",
            51_714_000,
            &[("racksum", sparse), ("gloo", gloo(sparse))],
            &[gain("gloo", 2.0, 4.0)],
        ),
        race(
            "train-layers-1g-w4",
            42_000_000,
            &[("racksum", layers), ("racksum-bf16", bf16), ("gloo", gloo(layers))],
            &[
                gain("gloo", 1.3, 1.6),
                bf16_gain,
                foreseen("racksum"),
                foreseen("racksum-bf16"),
                foreseen("gloo"),
            ],
        ),
    ]
}

/// Returns a training case with two ranks, which share a GPU if there is only one. Gradients go
/// through host memory.
fn training_on_a_gpu(seed: u64) -> Case {
    let racksum = Some(Racksum::PLAIN);
    let gpt = Training { script: "gpt", flags: &["--steps=3"], racksum, gpu: true };
    let side = |name, training| Side { name, program: Program::Training(training) };
    Case::Race(Race {
        name: "train-gpu-w2".to_owned(),
        world: 2,
        net: Net::Loopback,
        shards: BULK_SHARDS,
        iterations: 1,
        data: dense(seed, 496_186_368),
        sides: vec![side("racksum", gpt), side("gloo", Training { racksum: None, ..gpt })],
        bounds: vec![gain("gloo", 1.2, 1.2)],
    })
}

/// Returns a race of eight ranks on one host: the sidecar, Gloo and Open MPI.
fn sidecar(seed: u64) -> Case {
    let ahead = |side, peer, must, reach| Bound { figure: Figure::Gain(side, peer), must, reach };
    Case::Race(Race {
        name: "sidecar-w8".to_owned(),
        world: 8,
        net: Net::Loopback,
        shards: 1,
        iterations: 3,
        data: dense(seed, 100_000_000),
        sides: vec![beside("shared", Way::Shared), beside("own", Way::Own), GLOO, OPENMPI_SHARED],
        bounds: vec![
            ahead("shared", "gloo", 4.0, 6.0),
            ahead("shared", "openmpi", 3.0, 4.5),
            ahead("own", "gloo", 1.8, 2.5),
            ahead("own", "openmpi", 1.3, 1.8),
        ],
    })
}

/// Returns a race that measures the hook's own cost. It compares the reduction of one rank's bucket
/// with a copy of the bucket to another buffer and back.
fn hook(seed: u64) -> Case {
    let cost = Figure::Cost("hook", "memcpy");
    Case::Race(Race {
        name: "hook-w1".to_owned(),
        world: 1,
        net: Net::Loopback,
        shards: 1,
        iterations: 10,
        data: dense(seed, 25_000_000),
        sides: vec![beside("hook", Way::Hook), beside("memcpy", Way::Memcpy)],
        bounds: vec![Bound { figure: cost, must: 1.5, reach: 1.1 }],
    })
}

const fn beside(name: &'static str, way: Way) -> Side {
    Side { name, program: Program::Sidecar { way, build: Build::Own } }
}

/// Returns a loopback race with `density` 0.01. The bounds on times come from a machine where
/// Gloo's sparse sum took 113 ms. The ratio to Gloo holds on any machine.
fn sparse_loopback(seed: u64, name: &str, input: Input, must_ms: f64, reach_ms: f64) -> Case {
    let ahead = |ms: f64| GLOO_SPARSE_MS / ms;
    let program = Program::Racksum(Racksum { input, ..Racksum::PLAIN });
    Case::Race(Race {
        name: name.to_owned(),
        world: 8,
        net: Net::Loopback,
        shards: 1,
        data: sparse(seed, 0.01, Overlap::Random),
        iterations: SHORT_ITERATIONS,
        sides: vec![Side { name: "racksum", program }, GLOO_SPARSE],
        bounds: vec![time(must_ms, reach_ms), gain("gloo-sparse", ahead(must_ms), ahead(reach_ms))],
    })
}

/// Time of Gloo's sparse sum over loopback on the machine where the bounds were set.
const GLOO_SPARSE_MS: f64 = 113.0;

fn small(seed: u64, world: u16, must_ms: f64, reach_ms: f64) -> Case {
    Case::Race(Race {
        name: format!("small-loopback-w{world}"),
        world,
        net: Net::Loopback,
        shards: 1,
        data: dense(seed, 4096),
        iterations: 200,
        sides: vec![RACKSUM, GLOO],
        bounds: vec![time(must_ms, reach_ms)],
    })
}

fn loss(seed: u64) -> Case {
    let dropping = |share| Program::Racksum(Racksum { drop: Some(share), ..Racksum::PLAIN });
    Case::Race(Race {
        name: "loss1-1g-w8".to_owned(),
        world: 8,
        net: GIGABIT,
        shards: 1,
        data: dense(seed, 100_000_000),
        iterations: 1,
        sides: vec![
            RACKSUM,
            // This side generates a random number for each datagram but drops none, so it shows the
            // cost of the random numbers.
            Side { name: "racksum-dice", program: dropping(1e-15) },
            Side { name: "racksum-loss", program: dropping(0.01) },
        ],
        bounds: vec![Bound {
            figure: Figure::Cost("racksum-loss", "racksum"),
            must: 1.25,
            reach: 1.1,
        }],
    })
}

fn two_aggregators(seed: u64) -> Case {
    let two = Program::Racksum(Racksum { aggregators: 2, ..Racksum::PLAIN });
    Case::Race(Race {
        name: "two-aggregators-1g".to_owned(),
        world: 4,
        net: Net::Gigabit { aggregators: 2, aggregators_limited: true },
        shards: 1,
        // An aggregator's link carries four times as many bytes as a worker's.
        data: dense(seed, 32_000_000),
        iterations: 1,
        sides: vec![
            Side { name: "one-aggregator", program: Program::Racksum(Racksum::PLAIN) },
            Side { name: "two-aggregators", program: two },
        ],
        bounds: vec![Bound {
            figure: Figure::Gain("two-aggregators", "one-aggregator"),
            must: 1.8,
            reach: 1.9,
        }],
    })
}

/// Returns a race that shows how much a background job with 20 times as many bytes slows a job
/// down.
fn tenants(seed: u64) -> Case {
    let light = 1 << 20;
    let beside = Racksum { beside: Some(20 * light), ..Racksum::PLAIN };
    Case::Race(Race {
        name: "tenants-loopback-w2".to_owned(),
        world: 2,
        net: Net::Loopback,
        shards: 1,
        data: dense(seed, light),
        iterations: 100,
        sides: vec![
            Side { name: "alone", program: Program::Racksum(Racksum::PLAIN) },
            Side { name: "beside-20x", program: Program::Racksum(beside) },
        ],
        bounds: vec![Bound { figure: Figure::Cost("beside-20x", "alone"), must: 2.2, reach: 2.0 }],
    })
}

/// Returns races that measure the cost of authenticating and of encrypting datagrams.
fn authenticated(seed: u64) -> Vec<Case> {
    let with = |how: DataAuth| {
        let program = Program::Racksum(Racksum { data_auth: Some(how), ..Racksum::PLAIN });
        Side { name: how.name(), program }
    };
    let cost = |most| Bound { figure: Figure::Cost("mac", "none"), must: most, reach: most };
    let race = |name: String, world, net, shards, most| {
        Case::Race(Race {
            name,
            world,
            net,
            shards,
            data: dense(seed, 100_000_000),
            iterations: 1,
            sides: DataAuth::ALL.map(with).into(),
            bounds: vec![cost(most)],
        })
    };
    let on_loopback = |world| {
        let name = format!("auth-loopback-w{world}");
        race(name, world, Net::Loopback, BULK_SHARDS, 1.4)
    };
    let mut cases: Vec<_> = [2, 4, 8].map(on_loopback).into();
    // The race has two workers because the cores of one host seal and open the datagrams of all
    // workers. With eight workers the race would measure those cores.
    cases.push(race("auth-1g-w2".to_owned(), 2, GIGABIT, 1, 1.02));
    cases
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::case::Took;

    #[test]
    fn names_are_told_apart() {
        let cases = [all(1), smoke(1)].concat();
        let names: BTreeSet<_> = cases.iter().map(|case| case.name().to_owned()).collect();
        assert_eq!(names.len(), cases.len());
    }

    #[test]
    fn every_bound_is_of_sides_that_race_and_reach_is_no_less_than_must() {
        let took = Took { measured: 1.0, rounds: &[1.0], counted: 1, predicted: Some(2.0) };
        for case in all(1) {
            let Case::Race(race) = case else { continue };
            assert!(!race.bounds.is_empty(), "{}", race.name);
            for bound in &race.bounds {
                let value = bound.figure.value(|side| race.side(side).map(|_| took));
                assert_eq!(value, Some(1.0), "{} {:?}", race.name, bound.figure);
                let at_reach = bound.judge(Some(bound.reach));
                assert_eq!(at_reach, crate::case::Grade::Reach);
                assert_ne!(bound.judge(Some(bound.must)), crate::case::Grade::Missed);
            }
        }
    }

    #[test]
    fn a_case_is_chosen_by_its_name_or_the_beginning_of_it() {
        let names = |given: &[&str]| {
            let given: Vec<_> = given.iter().map(|name| (*name).to_owned()).collect();
            chosen(&given, 1)
                .map(|cases| cases.iter().map(|case| case.name().to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(names(&["loss1"]).unwrap(), ["loss1-1g-w8"]);
        assert_eq!(names(&["sparse1-1g-w8", "memory"]).unwrap(), ["sparse1-1g-w8", "memory-8x8"]);
        assert_eq!(names(&["dense-loopback"]).unwrap().len(), 3);
        assert!(names(&["smoke"]).unwrap().iter().all(|name| name.starts_with("smoke-")));
        assert!(names(&[]).unwrap().iter().all(|name| !name.starts_with("smoke-")));
        let error = names(&["dens"]).unwrap_err();
        assert!(error.contains("\"dens\"") && error.contains("dense-1g-w8"), "{error}");
    }
}
