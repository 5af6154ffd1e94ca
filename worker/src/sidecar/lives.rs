//! Lives of a job at a sidecar: which ranks are of one or may end it, and what is said of that.

use racksum_net::local::Peer;
use racksum_proto::lives::{self, Known};

use super::job::Job;
use super::message::{FromSidecar, Join};
use crate::error::superseded;

impl Job {
    /// Whether a rank of the job's user shows that it is of the same job: of this life, or of one
    /// that may end it. The user may have other jobs, so it counts as a place, not as an identity.
    pub(super) fn is_of(&self, join: &Join) -> bool {
        if join.generation == self.generation {
            lives::may_join(self.secret, join.secret)
        } else {
            lives::may_end(self.secret, join.secret, Known::ByPlace)
        }
    }

    /// Why a rank of another job of this name is refused.
    pub(super) fn is_another(&self, join: &Join, peer: Peer) -> String {
        format!(
            "job {:?} here, generation {}, was begun by process {}, and process {}, of generation \
             {}, does not show that it is of the same job; give each job a name of its own \
             (`job`), or wait until that one has ended",
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
