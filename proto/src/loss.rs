//! How a rank was lost.

use serde::{Deserialize, Serialize};

/// What became of a rank that is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// Its process ended without a word: its host says so.
    Died,
    /// Nothing was heard of it for too long.
    Silent,
    /// It broke the connection, or does not keep to the protocol.
    Broke,
    /// It left the job, and an op of others needs it.
    Left,
    /// The aggregator that it had joined is gone, and contributes its share no more.
    Relay,
}

impl Loss {
    /// Whether a rank that was lost so is not in the job any more, wherever it may be: one that
    /// others do not hear may go on elsewhere.
    #[must_use]
    pub const fn is_certain(self) -> bool {
        matches!(self, Self::Died | Self::Left)
    }

    /// What is said of one rank that was lost so.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Died => "its process ended without a word; see what it said last",
            Self::Silent => "nothing is heard of it; it is stopped, or its host is down or cut off",
            Self::Broke => "it broke the connection; see what it said last",
            Self::Left => "it left the job, and this op needs it",
            Self::Relay => {
                "the aggregator of the rack is gone, or has ended the job; see what it said last"
            }
        }
    }
}
