//! Conversions between errors and the messages that tell ranks why an op failed or a job ended.

use std::collections::BTreeMap;
use std::time::Duration;

use racksum_net::NetError;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::ids::Rank;
use racksum_proto::loss::Loss;
use racksum_proto::rank_list::listed;

use super::fold::Handed;
use super::message::{Called, FromSidecar, NotJoined, Outcome};
use crate::error::{ConnectError, Error, SUPERSEDED};

/// Returns the reason why a job ended or was refused, as text for the log and for ranks that join
/// later.
pub(super) fn describe(why: &FromSidecar) -> String {
    match why {
        FromSidecar::Lost { ranks, why: Loss::Left } => {
            format!("an op needs ranks that have left: {}", listed(ranks.iter().copied()))
        }
        FromSidecar::Lost { ranks, why } => why.describe(ranks.iter().copied()),
        FromSidecar::CutOff { why } => why.clone(),
        FromSidecar::TimedOut => "an op timed out".into(),
        FromSidecar::Superseded { why } => why.clone(),
        FromSidecar::Refused { reason } => reason.clone(),
        FromSidecar::NotJoined(why) => ConnectError::from(why.clone()).to_string(),
        other => format!("{other:?}"),
    }
}

/// Returns the log text for a rank that is no longer in its job. A rank that leaves is not logged
/// as lost, because only a later op would need it.
pub(super) fn parting(why: Loss) -> String {
    match why {
        Loss::Left => "rank left".into(),
        why => format!("rank lost: {}", why.name()),
    }
}

/// Converts a failure to join the job at the aggregator into the reason that the ranks receive.
pub(super) fn not_joined(error: ConnectError) -> NotJoined {
    let other = |addr| NotJoined::OtherProtocol { addr };
    match error {
        // No retry can succeed before the version mismatch is fixed, so report only the mismatch.
        ConnectError::Named { ref tried, .. } if error.is_other_version() && !error.may_pass() => {
            let addr = tried.iter().find_map(|error| match error {
                ConnectError::Net(NetError::WrongProtocol { addr }) => Some(*addr),
                _ => None,
            });
            addr.map_or_else(|| NotJoined::NoAggregator { tried: error.to_string() }, other)
        }
        ConnectError::Refused(reason) => NotJoined::Refused { reason },
        ConnectError::Draining => NotJoined::Draining,
        ConnectError::Version { theirs, own } => NotJoined::OtherVersion { speaks: theirs, own },
        ConnectError::Net(NetError::WrongProtocol { addr }) => other(addr),
        ConnectError::NoRoom { why, waited, elsewhere } => {
            NotJoined::NoRoom { why, waited: millis(waited), elsewhere }
        }
        ConnectError::Incomplete { missing, waited, elsewhere } => {
            NotJoined::Incomplete { missing, waited: millis(waited), elsewhere }
        }
        ConnectError::PeerLost { ranks, why } => NotJoined::Lost { ranks: numbers(ranks), why },
        error => NotJoined::NoAggregator { tried: error.to_string() },
    }
}

impl From<NotJoined> for ConnectError {
    fn from(why: NotJoined) -> Self {
        match why {
            NotJoined::Refused { reason } => Self::Refused(reason),
            NotJoined::Draining => Self::Draining,
            NotJoined::OtherVersion { speaks, own } => Self::Version { theirs: speaks, own },
            NotJoined::OtherProtocol { addr } => NetError::WrongProtocol { addr }.into(),
            NotJoined::NoRoom { why, waited, elsewhere } => {
                Self::NoRoom { why, waited: Duration::from_millis(waited), elsewhere }
            }
            NotJoined::Incomplete { missing, waited, elsewhere } => {
                let waited = Duration::from_millis(waited);
                Self::Incomplete { missing, waited, elsewhere }
            }
            NotJoined::Lost { ranks, why } => {
                Self::PeerLost { ranks: ranks.into_iter().map(Rank).collect(), why }
            }
            NotJoined::NoAggregator { tried } => Self::NoAggregator(tried),
        }
    }
}

/// Converts a duration to whole milliseconds, the unit that the messages use.
pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn numbers(ranks: Vec<Rank>) -> Vec<u16> {
    ranks.into_iter().map(|rank| rank.0).collect()
}

/// Splits an op's error at the aggregator into the op's outcome and the reason why the job is over.
/// Either may be absent.
pub(super) fn split_error(error: Error) -> (Option<Outcome>, Option<FromSidecar>) {
    match error {
        Error::Op(OpError::Mismatch { one, other, .. }) => {
            let called = |(rank, descriptor): (Rank, Descriptor)| Called::new(rank.0, &descriptor);
            let (one, other) = (called(one), called(other));
            (Some(Outcome::Mismatch { one, other }), None)
        }
        Error::Op(OpError::Dropped { .. }) => (Some(Outcome::Dropped), None),
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
        Error::Op(OpError::Ended { why }) | Error::Submit(SubmitError::Ended { why })
            if why.starts_with(SUPERSEDED) =>
        {
            (None, Some(FromSidecar::Superseded { why: why.into_owned() }))
        }
        error => (None, Some(FromSidecar::CutOff { why: error.to_string() })),
    }
}

/// Returns [`Outcome::Mismatch`] if two ranks called an op with different descriptors.
pub(super) fn disagreement(
    called: &BTreeMap<u16, (Descriptor, Option<Handed>)>,
) -> Option<Outcome> {
    let mut called = called.iter().map(|(rank, (descriptor, _))| (*rank, descriptor));
    let (first, descriptor) = called.next()?;
    let (other, differs) = called.find(|(_, other)| *other != descriptor)?;
    let (one, other) = (Called::new(first, descriptor), Called::new(other, differs));
    Some(Outcome::Mismatch { one, other })
}

#[cfg(test)]
mod tests {
    use racksum_proto::ids::OpId;

    use super::*;

    #[test]
    fn an_op_that_other_hosts_dropped_does_not_end_the_job() {
        let (outcome, end) = split_error(OpError::Dropped { op: OpId(3) }.into());
        assert!(matches!(outcome, Some(Outcome::Dropped)), "{outcome:?}");
        assert!(end.is_none(), "{end:?}");
    }

    #[test]
    fn a_rank_that_leaves_is_not_said_to_be_lost() {
        assert_eq!(parting(Loss::Left), "rank left");
        assert!(parting(Loss::Died).starts_with("rank lost: its process exited"));
        let over = |why| describe(&FromSidecar::Lost { ranks: vec![1, 2], why });
        assert_eq!(over(Loss::Left), "an op needs ranks that have left: 1, 2");
        assert!(over(Loss::Died).starts_with("lost ranks 1, 2: their processes exited"));
    }

    #[test]
    fn why_a_job_is_not_joined_is_said_to_ranks_as_to_those_that_join_themselves() {
        let (why, elsewhere) = ("it is full".to_owned(), "; b:1: gone".to_owned());
        for error in [
            ConnectError::Refused("no rule admits it".into()),
            ConnectError::Draining,
            ConnectError::Version { theirs: 2, own: 1 },
            NetError::WrongProtocol { addr: "192.0.2.1:7177".parse().unwrap() }.into(),
            ConnectError::NoRoom { why, waited: Duration::from_millis(2500), elsewhere },
            ConnectError::Incomplete {
                missing: vec![4],
                waited: Duration::from_secs(9),
                elsewhere: "; b:1: gone".into(),
            },
            ConnectError::PeerLost { ranks: vec![Rank(3)], why: Loss::Died },
            ConnectError::NoAggregator("a:1: nobody answered".into()),
        ] {
            let (kind, text) = (std::mem::discriminant(&error), error.to_string());
            let converted = ConnectError::from(not_joined(error));
            assert_eq!((std::mem::discriminant(&converted), converted.to_string()), (kind, text));
        }
        let converted = ConnectError::from(not_joined(ConnectError::Silent));
        assert!(matches!(converted, ConnectError::NoAggregator(tried) if !tried.is_empty()));
    }
}
