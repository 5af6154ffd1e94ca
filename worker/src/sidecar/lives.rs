//! Lives of a job at a sidecar: what is said when one would end another.

use racksum_net::local::Peer;

use super::job::Job;
use super::message::{FromSidecar, Join};
use crate::supervisor::superseded;

impl Job {
    /// Why a rank of another job of this name is refused.
    pub(super) fn is_another(&self, join: &Join, peer: Peer) -> String {
        format!(
            "job {:?} here, generation {}, was begun by process {}, and process {}, of generation \
             {}, is of another job of that name; give each job a name of its own",
            join.job, self.generation.0, self.begun_by, peer.pid, join.generation.0
        )
    }

    /// What the ranks are told whose job goes on in another life.
    pub(super) fn superseded(&self, join: &Join, peer: Peer) -> FromSidecar {
        let lives = format!(
            "generation {} of job {:?}, begun by process {}, has ended generation {}, begun by \
             process {}",
            join.generation.0, join.job, peer.pid, self.generation.0, self.begun_by
        );
        FromSidecar::Superseded { why: superseded(&lives) }
    }
}
