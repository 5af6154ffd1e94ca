//! Generations of a job: which joins may end the present one.
//!
//! A join with a greater generation ends the present one. The join must therefore prove that it
//! belongs to the same job, and not to another job with the same name.

use std::collections::BTreeSet;

use racksum_proto::control::{CallerId, FromAggregator, Join};
use racksum_proto::lives::{self, Known};

use super::job::Job;
use super::member::{Member, who};
use super::parent_link::ParentLink;
use super::{Caller, Registry};

/// Returns the identity or address of the joining rank. An aggregator or a sidecar reports those of
/// its ranks, since its own identity proves nothing about their jobs.
pub(super) fn beginner_of(join: &Join, caller: &Caller) -> CallerId {
    let own = who(caller.identity.as_deref(), caller.addr);
    if join.aggregates { join.begun_by.clone().unwrap_or(own) } else { own }
}

impl Registry {
    /// Checks that a rank that begins the next generation of a job may end the present one.
    pub(super) fn check_succession(&self, join: &Join) -> Result<(), String> {
        match self.jobs.get(&join.job) {
            Some(job) if !job.may_be_ended_by(join) => Err(job.is_another(join)),
            _ => Ok(()),
        }
    }

    /// Ends the present generation of a job because the next one begins. Returns the ended
    /// generation's link to the parent.
    pub(super) fn supersede(&mut self, join: &Join) -> Option<ParentLink> {
        let mut job = self.remove(&join.job)?;
        let why = format!(
            "generation {} of job {:?}, begun by {}, replaced generation {}, begun by {}",
            join.generation.0,
            join.job,
            named(join.begun_by.as_ref()),
            job.generation.0,
            job.begun_by()
        );
        tracing::info!(job = ?join.job, "{why}");
        job.send_to_all(&FromAggregator::Superseded { by: join.generation, why });
        job.parent.take()
    }
}

impl Job {
    /// Returns whether a join belongs to the same job. The proof is the secret of the job, or an
    /// identity that has joined or rejoined this generation. An address that has joined is enough
    /// only if the caller has no identity, and neither the job nor the join has a secret.
    pub(super) fn may_be_ended_by(&self, join: &Join) -> bool {
        let known = match join.begun_by.as_ref().filter(|by| self.callers.contains(by)) {
            Some(CallerId::Identity(_)) => Known::ByIdentity,
            Some(CallerId::Address(_)) => Known::ByPlace,
            None => Known::Not,
        };
        lives::may_end(self.secret, join.secret, known)
    }

    /// Checks that a join of the same generation belongs to this job, and not to another job with
    /// the same name.
    pub(super) fn check_secret(&self, join: &Join) -> Result<(), String> {
        let is_same = lives::may_join(self.secret, join.secret);
        if is_same { Ok(()) } else { Err(self.is_another(join)) }
    }

    /// Checks that a rejoining rank has the identity that it had when it left, or gives the proof
    /// that a rank needs in order to end this generation.
    pub(super) fn check_return(&self, join: &Join, caller: &Caller) -> Result<(), String> {
        let by = who(caller.identity.as_deref(), caller.addr);
        let left = self.left.get(&join.rank).is_some_and(|left| left.by == by);
        let is_same = left && matches!(by, CallerId::Identity(_));
        let join = Join { begun_by: Some(by), ..join.clone() };
        if is_same || self.may_be_ended_by(&join) { Ok(()) } else { Err(self.is_another(&join)) }
    }

    /// Returns why a rank of another job with this name is refused.
    pub(super) fn is_another(&self, join: &Join) -> String {
        format!(
            "job {:?} is in generation {}, begun by {}, and {} with generation {} does not prove \
             that it belongs to the same job; give each job its own name (`job`), or wait until \
             that job ends",
            join.job,
            self.generation.0,
            self.begun_by(),
            named(join.begun_by.as_ref()),
            join.generation.0
        )
    }

    /// Records the caller of a rank that joins or rejoins. When there are too many callers, this
    /// method removes the oldest one without a present rank. The limit is needed because an
    /// aggregator that joins for its ranks could name any number of callers.
    pub(super) fn note_caller(&mut self, join: &Join) {
        let Some(by) = join.begun_by.as_ref().filter(|by| !self.callers.contains(by)) else {
            return;
        };
        self.callers.push(by.clone());
        if self.callers.len() > CALLERS_OF_RANK * usize::from(self.world) {
            let joins = self.members.iter().flatten().flat_map(Member::joins);
            let present: BTreeSet<_> = joins.filter_map(|join| join.begun_by.as_ref()).collect();
            // The opener stays, since messages name it.
            let mut others = self.callers.iter().skip(1);
            if let Some(gone) = others.position(|by| !present.contains(by)) {
                self.callers.remove(1 + gone);
            }
        }
    }

    /// Returns the name of the caller that began this generation.
    pub(super) fn begun_by(&self) -> String {
        named(self.callers.first())
    }
}

/// The number of callers that a job remembers per rank. It leaves room for all present ranks and
/// the opener.
const CALLERS_OF_RANK: usize = 4;

fn named(by: Option<&CallerId>) -> String {
    by.map_or_else(|| "an unknown caller".to_owned(), CallerId::to_string)
}

#[cfg(test)]
mod tests;
