//! What ranks are told of their ops, and of what ends their job.

use std::collections::BTreeMap;

use racksum_proto::descriptor::Descriptor;
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::ids::Rank;

use super::fold::Handed;
use super::message::{Called, FromSidecar, Outcome};
use crate::error::Error;

/// What has ended a job, for the log.
pub(super) fn in_words(why: &FromSidecar) -> String {
    match why {
        FromSidecar::Lost { ranks, why } => format!("lost rank {ranks:?}: {}", why.name()),
        FromSidecar::CutOff { why } => why.clone(),
        FromSidecar::TimedOut => "an op timed out".into(),
        FromSidecar::Superseded => "its next life has begun".into(),
        other => format!("{other:?}"),
    }
}

/// What ranks are told of an op that has failed at the aggregator: what came of it, and what has
/// ended the job.
pub(super) fn said(error: Error) -> (Option<Outcome>, Option<FromSidecar>) {
    let numbers = |ranks: Vec<Rank>| ranks.into_iter().map(|rank| rank.0).collect();
    match error {
        Error::Op(OpError::Mismatch { one, other, .. }) => {
            let called = |(rank, descriptor): (Rank, Descriptor)| Called::new(rank.0, &descriptor);
            let (one, other) = (called(one), called(other));
            (Some(Outcome::Mismatch { one, other }), None)
        }
        Error::Op(OpError::Overflow { element, .. }) => (Some(Outcome::Overflow { element }), None),
        Error::Op(OpError::Timeout { after, missing, .. }) => {
            let missing = missing.into_iter().map(|(rank, _)| rank.0).collect();
            let outcome = Outcome::Timeout { after: after.as_millis(), missing };
            (Some(outcome), Some(FromSidecar::TimedOut))
        }
        Error::Op(OpError::PeerLost { ranks, why })
        | Error::Submit(SubmitError::PeerLost { ranks, why }) => {
            (None, Some(FromSidecar::Lost { ranks: numbers(ranks), why }))
        }
        error => (None, Some(FromSidecar::CutOff { why: error.to_string() })),
    }
}

/// Two ranks that have called an op differently.
pub(super) fn disagreement(called: &BTreeMap<u16, (Descriptor, Handed)>) -> Option<Outcome> {
    let mut called = called.iter().map(|(rank, (descriptor, _))| (*rank, descriptor));
    let (first, descriptor) = called.next()?;
    let (other, differs) = called.find(|(_, other)| *other != descriptor)?;
    let (one, other) = (Called::new(first, descriptor), Called::new(other, differs));
    Some(Outcome::Mismatch { one, other })
}
