//! The ranks that the results of an op lack.

use alloc::vec::Vec;

use crate::ids::Rank;
use crate::worker::Path;

/// The ranks that the results of an op lack, as far as they are known.
#[derive(Debug, Default)]
pub(super) struct Absent {
    /// How many ranks the results of each shard lack. A shard has no entry if its results include
    /// all ranks.
    at_shards: Vec<(u8, usize)>,
    /// The ranks that the results lacked before the job moved.
    before: Lacked,
}

/// The ranks that results lack; some of these ranks may be unknown.
#[derive(Debug, Clone, Default)]
struct Lacked {
    /// The known ranks.
    ranks: Vec<Rank>,
    /// The ranks that are unknown yet, by shard.
    unnamed: Vec<Unnamed>,
}

/// The ranks that a shard's results lack, but that the shard has not named.
#[derive(Debug, Clone)]
struct Unnamed {
    /// The ranks that the shard has named.
    named: Vec<Rank>,
    /// How many more ranks its results lack.
    others: usize,
}

impl Absent {
    /// Notes that a result of a shard lacks the first `ranks` ranks that the shard's aggregator
    /// lost.
    pub(super) fn note(&mut self, shard: u8, ranks: usize) {
        if ranks == 0 {
            return;
        }
        match self.at_shards.iter_mut().find(|(of, _)| *of == shard) {
            Some((_, most)) => *most = ranks.max(*most),
            None => self.at_shards.push((shard, ranks)),
        }
    }

    /// Saves which ranks the results of the shards at `paths` lack, before the job moves to other
    /// shards.
    pub(super) fn forget_shards(&mut self, paths: &[Path]) {
        self.before = self.lacked(paths);
        self.at_shards.clear();
    }

    /// Returns the ranks in ascending order; `None` while any of them is unknown.
    pub(super) fn names(&self, paths: &[Path]) -> Option<Vec<Rank>> {
        let Lacked { mut ranks, unnamed } = self.lacked(paths);
        if !unnamed.is_empty() {
            return None;
        }
        ranks.sort_unstable();
        ranks.dedup();
        Some(ranks)
    }

    /// Returns the ranks, as far as the shards at `paths` have named them.
    ///
    /// An old shard's aggregator may have died before it named all ranks that it lost. Those ranks
    /// are among the lost ranks that the new aggregators name. Once the new aggregators have named
    /// at least as many ranks that the old shard had not named as are unknown, this method adds all
    /// of them.
    fn lacked(&self, paths: &[Path]) -> Lacked {
        let Lacked { mut ranks, unnamed: before } = self.before.clone();
        let all = gone(paths);
        let mut unnamed = Vec::new();
        for shard in before {
            let mut others = all.clone();
            others.retain(|rank| !shard.named.contains(rank));
            if others.len() >= shard.others {
                ranks.append(&mut others);
            } else {
                unnamed.push(shard);
            }
        }
        for (shard, lacked) in &self.at_shards {
            let gone = &paths[usize::from(*shard)].gone;
            ranks.extend_from_slice(&gone[..gone.len().min(*lacked)]);
            if *lacked > gone.len() {
                unnamed.push(Unnamed { named: gone.clone(), others: lacked - gone.len() });
            }
        }
        Lacked { ranks, unnamed }
    }
}

/// Returns the lost ranks that any shard has named.
fn gone(paths: &[Path]) -> Vec<Rank> {
    let mut gone: Vec<Rank> = Vec::new();
    for rank in paths.iter().flat_map(|path| path.gone.iter()) {
        if !gone.contains(rank) {
            gone.push(*rank);
        }
    }
    gone
}
