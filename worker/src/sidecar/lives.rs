//! Lives of a job at a sidecar: the ranks that may join or end a life, and the messages about it.

use racksum_net::local::Peer;
use racksum_proto::lives::{self, Known};

use super::job::HostJob;
use super::message::{FromSidecar, Join};
use crate::error::superseded;

impl HostJob {
    /// Returns whether a rank of the job's user belongs to this job, and so may join this life or
    /// end it by starting the next one. One user may run several jobs, so a match of the user is
    /// only weak evidence, like a match of the host ([`Known::ByPlace`]).
    pub(super) fn is_of(&self, join: &Join) -> bool {
        if join.generation == self.generation {
            lives::may_join(self.secret, join.secret)
        } else {
            lives::may_end(self.secret, join.secret, Known::ByPlace)
        }
    }

    /// Returns the reason for refusing a rank that belongs to another job of the same name.
    pub(super) fn is_another(&self, join: &Join, peer: Peer) -> String {
        format!(
            "job {:?} here is in generation {}, begun by process {}, and process {} with \
             generation {} does not prove that it belongs to the same job; give each job its own \
             name (`job`), or wait until that job ends",
            join.job, self.generation.0, self.begun_by, peer.pid, join.generation.0
        )
    }

    /// Returns the message that tells the ranks of this life that a later life has replaced it.
    pub(super) fn superseded(&self, join: &Join, peer: Peer) -> FromSidecar {
        let lives = format!(
            "generation {} of job {:?}, begun by process {}, replaced generation {}, begun by \
             process {}",
            join.generation.0, join.job, peer.pid, self.generation.0, self.begun_by
        );
        FromSidecar::Superseded { why: superseded(&lives) }
    }
}
