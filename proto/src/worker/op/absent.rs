//! The ranks that the results of an op lack.

use alloc::vec::Vec;

use crate::ids::Rank;
use crate::worker::Path;

/// The ranks that the results of an op lack, as far as their names are known.
#[derive(Debug, Default)]
pub(super) struct Absent {
    /// How many ranks the results of each shard lack; shards whose results lack none have no entry.
    at_shards: Vec<(u8, usize)>,
    /// The ranks that the results lacked before the job moved.
    before: Lacked,
}

/// Ranks that results lack.
#[derive(Debug, Clone, Default)]
struct Lacked {
    /// The ranks whose names are known.
    ranks: Vec<Rank>,
    /// How many more ranks there are.
    unnamed: usize,
}

impl Absent {
    /// Notes that a result of a shard lacks the first `ranks` ranks that its aggregator lost.
    pub(super) fn note(&mut self, shard: u8, ranks: usize) {
        if ranks == 0 {
            return;
        }
        match self.at_shards.iter_mut().find(|(of, _)| *of == shard) {
            Some((_, most)) => *most = ranks.max(*most),
            None => self.at_shards.push((shard, ranks)),
        }
    }

    /// Keeps what the shards at `paths` know, since the job moves to others.
    pub(super) fn forget_shards(&mut self, paths: &[Path]) {
        self.before = self.lacked(paths);
        self.at_shards.clear();
    }

    /// Returns the ranks in ascending order; `None` while the name of one is unknown.
    pub(super) fn names(&self, paths: &[Path]) -> Option<Vec<Rank>> {
        let Lacked { mut ranks, unnamed } = self.lacked(paths);
        if unnamed > 0 {
            return None;
        }
        ranks.sort_unstable();
        ranks.dedup();
        Some(ranks)
    }

    /// Returns the ranks, with the names that the shards at `paths` have given.
    ///
    /// The old aggregator may have died before it named the ranks that it lost. They are among the
    /// ranks that the job is without elsewhere; once enough of those are known, this method names
    /// them all.
    fn lacked(&self, paths: &[Path]) -> Lacked {
        let Lacked { mut ranks, mut unnamed } = self.before.clone();
        if unnamed > 0 {
            let mut others = gone(paths);
            others.retain(|rank| !ranks.contains(rank));
            if others.len() >= unnamed {
                ranks.append(&mut others);
                unnamed = 0;
            }
        }
        for (shard, lacked) in &self.at_shards {
            let gone = &paths[usize::from(*shard)].gone;
            ranks.extend_from_slice(&gone[..gone.len().min(*lacked)]);
            unnamed = unnamed.max(lacked.saturating_sub(gone.len()));
        }
        Lacked { ranks, unnamed }
    }
}

/// Returns the known lost ranks of all shards.
fn gone(paths: &[Path]) -> Vec<Rank> {
    let mut gone: Vec<Rank> = Vec::new();
    for rank in paths.iter().flat_map(|path| path.gone.iter()) {
        if !gone.contains(rank) {
            gone.push(*rank);
        }
    }
    gone
}
