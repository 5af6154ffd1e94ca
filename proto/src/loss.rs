//! Reasons for the loss of a rank.

use alloc::format;
use alloc::string::String;

use serde::{Deserialize, Serialize};

use crate::rank_list::named;

/// The reason why a rank is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// The rank's process exited unexpectedly, as its host reported.
    Died,
    /// The rank sent nothing for too long.
    Silent,
    /// The rank dropped the connection or violated the protocol.
    Broke,
    /// The rank left the job, and an op of other ranks needs it.
    Left,
    /// The aggregator that the rank had joined is lost and no longer contributes the rank's share.
    Aggregator,
}

impl Loss {
    /// Returns whether a rank lost for this reason is certainly out of the job. Otherwise the rank
    /// may continue at another aggregator: silence toward this aggregator does not mean that the
    /// rank has stopped.
    #[must_use]
    pub const fn is_certain(self) -> bool {
        matches!(self, Self::Died | Self::Left)
    }

    /// Describes the loss of `ranks` in a sentence: `lost ranks 1, 2: they left the job, ...`.
    #[must_use]
    pub fn describe(self, ranks: impl IntoIterator<Item = u16> + Clone) -> String {
        let why = match ranks.clone().into_iter().nth(1) {
            None => self.name(),
            Some(_) => self.name_of_several(),
        };
        format!("lost {}: {why}", named(ranks))
    }

    /// Returns the clause that describes the loss of one rank.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Died => "its process exited unexpectedly; check its log",
            Self::Silent => {
                "it is silent; its process is suspended, or its host is down or unreachable"
            }
            Self::Broke => "it dropped the connection or violated the protocol; check its log",
            Self::Left => "it left the job, and this op needs it",
            Self::Aggregator => {
                "its rack's aggregator is lost or has ended the job; check the aggregator's log"
            }
        }
    }

    /// Returns the clause that describes the loss of several ranks.
    const fn name_of_several(self) -> &'static str {
        match self {
            Self::Died => "their processes exited unexpectedly; check their logs",
            Self::Silent => {
                "they are silent; their processes are suspended, or their hosts are down or \
                 unreachable"
            }
            Self::Broke => "they dropped the connection or violated the protocol; check their logs",
            Self::Left => "they left the job, and this op needs them",
            Self::Aggregator => {
                "their rack's aggregator is lost or has ended the job; check the aggregator's log"
            }
        }
    }
}
