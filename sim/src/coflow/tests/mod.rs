mod bssi;
mod fluid;
mod golden;
mod online;
mod optimum;
mod order;
mod rates;
mod trace;

use crate::coflow::workload::{Coflow, Fabric, Flow, Workload};
use crate::engine::Picos;
use crate::random::Random;

/// The rate of a port at which a byte takes a nanosecond.
const BYTE_PER_NANO: u64 = 8_000_000_000;
const NANO: u64 = 1_000;

/// Returns the seeds of a test: the one in `SEED`, or `count` fixed ones. Prints them.
fn seeds(count: u64) -> std::ops::Range<u64> {
    let seeds = match std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => seed..seed + 1,
        None => 0..count,
    };
    println!("seeds {seeds:?}");
    seeds
}

/// The limits of random workloads.
#[derive(Debug, Clone, Copy)]
struct Shape {
    coflows: u64,
    ports: usize,
    flows: u64,
    bytes: u64,
    weight: u64,
    release: Picos,
    /// The highest rate as a multiple of the lowest.
    rates: u64,
}

/// Instances that are small enough to try every order.
const SMALL: Shape =
    Shape { coflows: 5, ports: 3, flows: 4, bytes: 10, weight: 1, release: Picos::ZERO, rates: 1 };

/// Instances with everything that a workload can have.
const MIXED: Shape = Shape {
    coflows: 12,
    ports: 5,
    flows: 9,
    bytes: 10_000,
    weight: 7,
    release: Picos(20_000_000),
    rates: 40,
};

fn draw(shape: Shape, seed: u64) -> Workload {
    let mut random = Random::new(seed).child("coflows");
    let ports = shape.ports as u64;
    let port = |random: &mut Random| usize::try_from(random.below(ports)).unwrap();
    let coflows = (0..shape.coflows).map(|id| {
        let flows = (0..random.within(1..=shape.flows)).map(|_| Flow {
            source: port(&mut random),
            destination: port(&mut random),
            bytes: random.within(1..=shape.bytes),
        });
        let flows = flows.collect();
        let release = Picos(random.within(0..=shape.release.0));
        Coflow { weight: random.within(1..=shape.weight), ..Coflow::new(id, release, flows) }
    });
    let coflows = coflows.collect();
    let mut rates = || {
        (0..ports).map(|_| BYTE_PER_NANO / 7 * random.within(1..=shape.rates)).collect::<Vec<_>>()
    };
    let fabric = if shape.rates == 1 {
        Fabric::uniform(shape.ports, BYTE_PER_NANO)
    } else {
        Fabric::new(rates(), rates())
    };
    Workload::new(fabric.unwrap(), coflows).unwrap()
}

/// Returns a random order of `count` things.
fn shuffled(count: usize, random: &mut Random) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    for end in (1..count).rev() {
        order.swap(end, usize::try_from(random.below(end as u64 + 1)).unwrap());
    }
    order
}
