//! Random placements, as CoInNetFlow draws them.

use super::{Placement, Rack, Share, Spread, Worker, WorkerId};
use crate::random::Random;

/// Draws a placement, or returns none if there are too few GPUs for the spread.
pub(super) fn place(
    spread: Spread,
    fallback: bool,
    gpus: u32,
    racks: &[Rack],
    random: &mut Random,
) -> Option<Placement> {
    let all = Pool::new(racks.iter().enumerate());
    if u64::from(gpus) > all.free {
        return None;
    }
    if gpus == 1 {
        return Some(shares(&all.draw(1, random)));
    }
    let mut spread = spread;
    loop {
        let drawn = match spread {
            Spread::Any => Some(all.draw(gpus, random)),
            Spread::Distributed => all.draw_from_several(gpus, random, |gpu| gpu.worker.0),
            Spread::SingleRack => single_rack(gpus, racks, random),
            Spread::MultiRack => all.draw_from_several(gpus, random, |gpu| gpu.rack),
        };
        match (drawn, fallback_of(spread)) {
            (Some(drawn), _) => return Some(shares(&drawn)),
            (None, Some(next)) if fallback => spread = next,
            (None, _) => return None,
        }
    }
}

/// Returns the spread to fall back to.
const fn fallback_of(spread: Spread) -> Option<Spread> {
    match spread {
        Spread::MultiRack => Some(Spread::SingleRack),
        Spread::SingleRack => Some(Spread::Distributed),
        Spread::Distributed => Some(Spread::Any),
        Spread::Any => None,
    }
}

/// Draws GPUs of one rack.
fn single_rack(gpus: u32, racks: &[Rack], random: &mut Random) -> Option<Vec<Gpu>> {
    let pools = racks.iter().enumerate().map(|rack| Pool::new([rack].into_iter()));
    let fits = |pool: &Pool| pool.free > gpus.into() && pool.workers.len() > 1;
    let pools: Vec<_> = pools.filter(fits).collect();
    let free: u64 = pools.iter().map(|pool| pool.free).sum();
    if free == 0 {
        return None;
    }
    let mut drawn = random.below(free);
    let pool = pools.iter().find(|pool| match drawn.checked_sub(pool.free) {
        Some(rest) => {
            drawn = rest;
            false
        }
        None => true,
    });
    pool?.draw_from_several(gpus, random, |gpu| gpu.worker.0)
}

/// A free GPU.
#[derive(Debug, Clone, Copy)]
struct Gpu {
    rack: u32,
    worker: WorkerId,
}

/// Free GPUs to draw from.
#[derive(Debug, Clone)]
struct Pool {
    /// The workers with free GPUs, and their numbers of them.
    workers: Vec<(Gpu, u64)>,
    free: u64,
}

impl Pool {
    fn new<'a>(racks: impl Iterator<Item = (usize, &'a Rack)>) -> Self {
        let workers = racks.flat_map(|(rack, workers)| {
            let rack = u32::try_from(rack).expect("a cluster has fewer than 2^32 racks");
            let free = workers.workers.iter().filter(|worker| worker.free_gpus > 0);
            free.map(move |&Worker { id, free_gpus }| {
                (Gpu { rack, worker: id }, u64::from(free_gpus))
            })
        });
        let workers: Vec<_> = workers.collect();
        let free = workers.iter().map(|(_, free)| free).sum();
        Self { workers, free }
    }

    /// Draws `gpus` of the free GPUs without replacement.
    fn draw(&self, gpus: u32, random: &mut Random) -> Vec<Gpu> {
        let mut left = self.workers.clone();
        let draw = |taken: u64| {
            let mut drawn = random.below(self.free - taken);
            for (gpu, free) in &mut left {
                match drawn.checked_sub(*free) {
                    Some(rest) => drawn = rest,
                    None => {
                        *free -= 1;
                        return *gpu;
                    }
                }
            }
            unreachable!("the draw is below the number of GPUs that are left")
        };
        (0..u64::from(gpus)).map(draw).collect()
    }

    /// Draws at least two GPUs that do not all have the same `key`, or none if all free ones have.
    ///
    /// Draws are repeated until they do, so that each allowed choice is equally likely. Of n free
    /// GPUs at least one has another key, so a draw of k succeeds with probability k/n or more.
    fn draw_from_several(
        &self,
        gpus: u32,
        random: &mut Random,
        key: impl Fn(&Gpu) -> u32,
    ) -> Option<Vec<Gpu>> {
        assert!(gpus > 1, "one GPU never has two keys");
        let several = |gpus: &[Gpu]| gpus.iter().any(|gpu| key(gpu) != key(&gpus[0]));
        let workers: Vec<_> = self.workers.iter().map(|(gpu, _)| *gpu).collect();
        if !several(&workers) {
            return None;
        }
        loop {
            let drawn = self.draw(gpus, random);
            if several(&drawn) {
                return Some(drawn);
            }
        }
    }
}

/// Returns the number of GPUs on each worker, ordered by worker.
fn shares(gpus: &[Gpu]) -> Placement {
    let mut workers: Vec<_> = gpus.iter().map(|gpu| gpu.worker).collect();
    workers.sort_unstable();
    let equal = workers.chunk_by(PartialEq::eq);
    let gpus = |equal: &[WorkerId]| u32::try_from(equal.len()).expect("drawn from a u32");
    equal.map(|equal| Share { worker: equal[0], gpus: gpus(equal) }).collect()
}
