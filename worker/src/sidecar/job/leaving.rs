//! Removal of ranks from a job. A rank that leaves waits until no fold uses its memory; a lost rank
//! is removed immediately.

use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use racksum_proto::loss::Loss;

use super::{FOR_EVER, HostJob, State};
use crate::sidecar::calls::Folding;
use crate::sidecar::member::Member;
use crate::sidecar::message::FromSidecar;

impl HostJob {
    /// Removes a leaving rank once no op uses its memory. The job ends if ops of the rank still
    /// wait for other hosts after `limit`, because the sums of these ops belong in memory that the
    /// rank takes back.
    pub(in crate::sidecar) fn leave(&self, rank: u16, limit: Duration) {
        let wait_while = |state, limit, is_so: &dyn Fn(&State) -> bool| {
            let waited = self.changed.wait_timeout_while(state, limit, |state| is_so(state));
            waited.unwrap_or_else(PoisonError::into_inner).0
        };
        let is_at_work = |state: &State| state.works_for(rank, |_| true);
        let is_folded_here = |state: &State| state.works_for(rank, |it| !it.is_passed);
        let runs = |state: &State| state.over.is_none();
        let state = wait_while(self.lock(), limit, &|state| runs(state) && is_at_work(state));
        let mut state = wait_while(state, FOR_EVER, &|state| runs(state) && is_folded_here(state));
        if is_at_work(&state) {
            state.end(FromSidecar::Lost { ranks: vec![rank], why: Loss::Left });
            // Leave the job at the aggregator: otherwise ops that wait there for other hosts would
            // not end.
            Self::leave_upstream(state, rank, Loss::Left);
            state = wait_while(self.lock(), FOR_EVER, &is_at_work);
        }
        Self::part_with(state, rank, Loss::Left);
    }

    /// Removes a lost rank.
    pub(in crate::sidecar) fn part(&self, rank: u16, why: Loss) {
        Self::part_with(self.lock(), rank, why);
    }

    /// Removes a rank under the lock that the caller holds, so that the state has not changed since
    /// the caller checked it.
    fn part_with(mut state: MutexGuard<'_, State>, rank: u16, why: Loss) {
        if state.members.remove(&rank).is_none() {
            return;
        }
        if state.is_called && !state.began && state.refused.is_none() {
            let reason = format!("rank {rank} was lost before the job started");
            state.refuse(FromSidecar::Refused { reason });
        }
        if state.began {
            let is_needed = !state.gathering.is_empty();
            if why == Loss::Left && !is_needed {
                state.left.insert(rank);
            } else {
                state.end(FromSidecar::Lost { ranks: vec![rank], why });
            }
        }
        if state.members.is_empty() || state.over.is_some() {
            Self::leave_upstream(state, rank, why);
        }
    }

    /// Reports the lost ranks to the aggregator and leaves the job there. Call this once the job is
    /// over or has no ranks left on this host.
    fn leave_upstream(state: MutexGuard<'_, State>, rank: u16, why: Loss) {
        let Some(upstream) = state.upstream.clone() else { return };
        let (ranks, why) = match &state.over {
            Some(FromSidecar::Lost { ranks, why }) => (ranks.clone(), *why),
            Some(_) => (vec![rank], why),
            None => (Vec::new(), why),
        };
        drop(state);
        upstream.lose(&ranks, why);
        upstream.close();
    }
}

impl State {
    /// Returns whether `is_such` is true for any op in `folding` that has an operand of the rank.
    fn works_for(&self, rank: u16, is_such: impl Fn(&Folding) -> bool) -> bool {
        let has =
            |member: &Member| member.has_any(|op| self.folding.get(&op).is_some_and(&is_such));
        self.members.get(&rank).is_some_and(has)
    }
}
