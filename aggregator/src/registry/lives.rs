//! Lives of a job: which of them may end which.
//!
//! Whoever begins a greater generation of a job ends the one before, so it has to show that it is
//! the same job, and not another that happens to have its name.

use std::collections::BTreeSet;

use racksum_proto::control::{Beginner, FromAggregator, Join};
use racksum_proto::lives::{self, Known};

use super::job::Job;
use super::member::{Member, who};
use super::parent_link::ParentLink;
use super::{Caller, Registry};

/// Who joins: the identity or the address that calls, or of an aggregator and a sidecar what these
/// say of the rank. An aggregator's own identity says nothing of the jobs of its ranks.
pub(super) fn beginner_of(join: &Join, caller: &Caller) -> Beginner {
    let own = who(caller.identity.as_deref(), caller.addr);
    if join.relays { join.begun_by.clone().unwrap_or(own) } else { own }
}

impl Registry {
    /// Checks that a rank that begins the next life of a job may end the present one.
    pub(super) fn check_succession(&self, join: &Join) -> Result<(), String> {
        match self.jobs.get(&join.job) {
            Some(job) if !job.may_be_ended_by(join) => Err(job.is_another(join)),
            _ => Ok(()),
        }
    }

    /// Ends a life of a job because the next begins. Returns the way that it had to the parent.
    pub(super) fn supersede(&mut self, join: &Join) -> Option<ParentLink> {
        let mut job = self.remove(&join.job)?;
        let why = format!(
            "generation {} of job {:?}, begun by {}, has ended generation {}, begun by {}",
            join.generation.0,
            join.job,
            named(join.begun_by.as_ref()),
            job.generation.0,
            job.begun_by()
        );
        tracing::info!(job = ?join.job, "{why}");
        job.tell(&FromAggregator::Superseded { by: join.generation, why });
        job.parent.take()
    }
}

impl Job {
    /// Whether a rank shows that it is of the same job: by the secret of its lives, or by an
    /// identity that has joined this one or come back to it. Where jobs have no secret, and nobody
    /// has an identity, the address has to do.
    pub(super) fn may_be_ended_by(&self, join: &Join) -> bool {
        let known = match join.begun_by.as_ref().filter(|by| self.callers.contains(by)) {
            Some(Beginner::Identity(_)) => Known::ByIdentity,
            Some(Beginner::Address(_)) => Known::ByPlace,
            None => Known::Not,
        };
        lives::may_end(self.secret, join.secret, known)
    }

    /// Checks that a rank is of no other job that has this one's name, and the same generation.
    pub(super) fn check_secret(&self, join: &Join) -> Result<(), String> {
        let is_same = lives::may_join(self.secret, join.secret);
        if is_same { Ok(()) } else { Err(self.is_another(join)) }
    }

    /// Checks that a rank that comes back shows as much as one that ends the present life, or has
    /// the identity that left.
    pub(super) fn check_return(&self, join: &Join, caller: &Caller) -> Result<(), String> {
        let by = who(caller.identity.as_deref(), caller.addr);
        let left = self.left.get(&join.rank).is_some_and(|left| left.by == by);
        let is_same = left && matches!(by, Beginner::Identity(_));
        let join = Join { begun_by: Some(by), ..join.clone() };
        if is_same || self.may_be_ended_by(&join) { Ok(()) } else { Err(self.is_another(&join)) }
    }

    /// Why a rank of another job of this name is refused.
    pub(super) fn is_another(&self, join: &Join) -> String {
        format!(
            "job {:?} is in generation {}, begun by {}, and {}, of generation {}, does not show \
             that it is of the same job; give each job a name of its own (`job`), or \
             wait until that one has ended",
            join.job,
            self.generation.0,
            self.begun_by(),
            named(join.begun_by.as_ref()),
            join.generation.0
        )
    }

    /// Notes the caller of a rank that joins or comes back. When there are many callers, it forgets
    /// the first of those that have no rank any more: an aggregator that joins for its ranks may
    /// name ever new ones.
    pub(super) fn note_caller(&mut self, join: &Join) {
        let Some(by) = join.begun_by.as_ref().filter(|by| !self.callers.contains(by)) else {
            return;
        };
        self.callers.push(by.clone());
        if self.callers.len() > CALLERS_OF_RANK * usize::from(self.world) {
            let joins = self.members.iter().flatten().flat_map(Member::joins);
            let present: BTreeSet<_> = joins.filter_map(|join| join.begun_by.as_ref()).collect();
            // Messages name the opener.
            let mut others = self.callers.iter().skip(1);
            if let Some(gone) = others.position(|by| !present.contains(by)) {
                self.callers.remove(1 + gone);
            }
        }
    }

    /// Who has begun it.
    pub(super) fn begun_by(&self) -> String {
        named(self.callers.first())
    }
}

/// How many callers a life of a job remembers for each of its ranks: more than those that are there
/// and the opener.
const CALLERS_OF_RANK: usize = 4;

fn named(by: Option<&Beginner>) -> String {
    by.map_or_else(|| "somebody".to_owned(), Beginner::to_string)
}

#[cfg(test)]
mod tests;
