mod bssi;
mod order;
mod trace;

use crate::random::Random;

/// The rate of a port at which a byte takes a nanosecond.
const BYTE_PER_NANO: u64 = 8_000_000_000;

/// Returns the seeds of a test: the one in `SEED`, or `count` fixed ones. Prints them.
fn seeds(count: u64) -> std::ops::Range<u64> {
    let seeds = match std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => seed..seed + 1,
        None => 0..count,
    };
    println!("seeds {seeds:?}");
    seeds
}

/// Returns a random order of `count` things.
fn shuffled(count: usize, random: &mut Random) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    for end in (1..count).rev() {
        order.swap(end, usize::try_from(random.below(end as u64 + 1)).unwrap());
    }
    order
}
