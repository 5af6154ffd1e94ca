//! Errors of ops: [`SubmitError`] if an op does not start, and [`OpError`] if it ends without a
//! result.

use alloc::borrow::Cow;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use crate::counted::counted;
use crate::descriptor::{Descriptor, DescriptorError};
use crate::ids::{OpId, Rank};
use crate::loss::Loss;
use crate::time::Span;

/// The reason why an op was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The descriptor is invalid.
    #[error("{0}")]
    Descriptor(#[from] DescriptorError),
    /// The job already has as many ops in flight as it was granted.
    #[error(
        "the job already has {max} ops in flight, the most that it was granted; wait for the \
         oldest op first"
    )]
    TooManyOps {
        /// The maximum number of ops that the job may have in flight.
        max: usize,
    },
    /// The lane does not exist.
    #[error(
        "lane {lane} does not exist: the job joined with {}, numbered from 0",
        counted(*lanes, "lane")
    )]
    NoSuchLane {
        /// The requested lane.
        lane: u8,
        /// The number of lanes of the job.
        lanes: u8,
    },
    /// The session ended; a new session needs a new generation.
    #[error("the session ended: {why}")]
    Ended {
        /// The reason why the session ended.
        why: Cow<'static, str>,
    },
    /// The session ended because ranks are lost; a new session needs a new generation.
    #[error("the session ended: {}", OpError::PeerLost { ranks: ranks.clone(), why: *why })]
    PeerLost {
        /// The lost ranks.
        ranks: Vec<Rank>,
        /// The reason for the loss.
        why: Loss,
    },
    /// The op numbers of this generation are used up.
    #[error("this generation has used all 4294967295 op numbers; join again with a new generation")]
    OpsExhausted,
}

impl SubmitError {
    /// Returns whether the call itself is invalid, whatever the state of the session.
    #[must_use]
    pub const fn is_refusal(&self) -> bool {
        matches!(self, Self::Descriptor(_) | Self::NoSuchLane { .. })
    }
}

/// The reason why an op ended without a result.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpError {
    /// The ranks called the op with different descriptors. The job may continue.
    Mismatch {
        /// The op.
        op: OpId,
        /// One rank and its descriptor.
        one: (Rank, Descriptor),
        /// Another rank and its descriptor.
        other: (Rank, Descriptor),
    },
    /// The ranks disagreed about the op, and the other ranks dropped it before this rank learned of
    /// the disagreement. The job continues.
    Dropped {
        /// The op.
        op: OpId,
    },
    /// The op did not end in time, so the session has ended.
    Timeout {
        /// The op.
        op: OpId,
        /// The time since the op began.
        after: Span,
        /// The ranks that the op waits for, as the aggregator last reported, and how long each had
        /// been silent.
        missing: Vec<(Rank, Span)>,
        /// The time since the last result of any op.
        idle: Span,
    },
    /// The fixed-point wire type cannot represent a value or a sum.
    Overflow {
        /// The op.
        op: OpId,
        /// The first element of the block that overflowed.
        element: u64,
    },
    /// Ranks are lost, so the session has ended.
    PeerLost {
        /// The lost ranks.
        ranks: Vec<Rank>,
        /// The reason for the loss.
        why: Loss,
    },
    /// The job has lost every aggregator that it could use, so the session has ended.
    NoAggregator {
        /// The last error of each aggregator.
        tried: String,
    },
    /// The session ended while the op was in flight, because another op or the connection failed.
    Ended {
        /// The reason why the session ended.
        why: Cow<'static, str>,
    },
}

impl OpError {
    /// The time without a result after which results no longer count as still arriving. A result
    /// that arrived before the op began does not count.
    const STILL_COMING: Span = Span::from_secs(1);
}

impl fmt::Display for OpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mismatch { op, one, other } => write!(
                f,
                "op {}: the ranks disagree: rank {} has {}; rank {} has {}",
                op.0,
                one.0.0,
                one.1.beside(&other.1),
                other.0.0,
                other.1.beside(&one.1)
            ),
            Self::Dropped { op } => write!(
                f,
                "op {}: the ranks disagree; the error at another rank shows the difference",
                op.0
            ),
            Self::Timeout { op, after, missing, idle } if missing.is_empty() => {
                let still_coming = *idle < Self::STILL_COMING.min(*after);
                let (op, after) = (op.0, after.as_millis());
                if still_coming {
                    return write!(
                        f,
                        "op {op}: not done after {after} ms, although results still arrive; the \
                         network is slow or lossy, or the op's timeout is too short"
                    );
                }
                write!(
                    f,
                    "op {op}: no result after {after} ms, and the aggregator named no missing \
                     rank; check that the aggregator (and its parent, if any) is running, and \
                     that UDP passes between the hosts"
                )
            }
            Self::Timeout { op, after, missing, .. } => {
                write!(f, "op {}: no result after {} ms; waiting for", op.0, after.as_millis())?;
                for (i, (rank, silent)) in missing.iter().enumerate() {
                    let comma = if i == 0 { "" } else { "," };
                    let ms = silent.as_millis();
                    write!(f, "{comma} rank {} (silent for {ms} ms)", rank.0)?;
                }
                Ok(())
            }
            Self::Overflow { op, element } => write!(
                f,
                "op {}: the block at element {element} holds a value that fixed32 cannot carry \
                 (NaN, infinity, or a sum that overflows); use another wire type",
                op.0
            ),
            Self::PeerLost { ranks, why } => {
                f.write_str(&why.describe(ranks.iter().map(|rank| rank.0)))
            }
            Self::NoAggregator { tried } => write!(f, "no aggregator is left: {tried}"),
            Self::Ended { why } => write!(f, "the session ended: {why}"),
        }
    }
}

impl core::error::Error for OpError {}
