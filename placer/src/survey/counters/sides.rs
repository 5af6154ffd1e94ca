//! Figures that both sides of a path count of the same transfers, and which side is right.
//!
//! The receiver of a fragment knows whether it arrived only as a copy that was sent again. Its
//! sender knows only that it sent copies, some of which were not needed. So the loss of
//! contributions is the aggregator's figure, and that of results the rank's. Both measure round
//! trips, and the shorter one bounds the path's.

use super::{RankCounters, loss};

/// A side of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The aggregator.
    Aggregator,
    /// The rank.
    Rank,
}

impl Side {
    /// Returns the side's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Aggregator => "aggregator",
            Self::Rank => "rank",
        }
    }
}

/// A figure that the two sides count differently.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Difference {
    /// The figure.
    pub of: Figure,
    /// The aggregator's value, if it has one.
    pub aggregator: Option<f64>,
    /// The rank's value, if it has one.
    pub rank: Option<f64>,
    /// The side whose value counts.
    pub right: Side,
}

/// A figure that both sides count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figure {
    /// The share of the contributions' fragments that were lost.
    LossUp,
    /// The share of the results' fragments that were lost.
    LossDown,
    /// The shortest round trip in microseconds.
    RoundTrip,
}

impl RankCounters {
    /// Returns the share of the results' fragments that were lost.
    pub(super) fn result_loss(&self) -> f64 {
        loss(self.own.map_or(self.results, |own| own.results))
    }

    /// Returns the shortest round trip in microseconds.
    pub(super) fn shortest_trip_us(&self) -> Option<f64> {
        let own = self.own.and_then(|own| own.round_trip_us);
        self.round_trip_us.into_iter().chain(own).min_by(f64::total_cmp)
    }

    /// Returns the figures that the rank and its aggregator count differently. Empty if the rank
    /// has not reported its counters.
    #[must_use]
    pub fn differences(&self) -> Vec<Difference> {
        let Some(own) = self.own else { return vec![] };
        let losses = [
            (Figure::LossUp, Side::Aggregator, self.contributed, own.sent),
            (Figure::LossDown, Side::Rank, self.results, own.results),
        ];
        let losses = losses.into_iter().filter_map(|(of, right, ours, theirs)| {
            let (aggregator, rank) = (loss(ours), loss(theirs));
            let differs = (aggregator - rank).abs() >= LEAST_LOSS;
            differs.then_some(Difference {
                of,
                aggregator: Some(aggregator),
                rank: Some(rank),
                right,
            })
        });
        let (aggregator, rank) = (self.round_trip_us, own.round_trip_us);
        let right = self.shortest_trip_us().and_then(|shortest_us| {
            let known = |trip_us: Option<f64>| trip_us.unwrap_or(f64::INFINITY);
            let differs = known(aggregator).max(known(rank)) > shortest_us * LEAST_TRIPS;
            let is_rank = known(rank) < known(aggregator);
            differs.then_some(if is_rank { Side::Rank } else { Side::Aggregator })
        });
        let trip = right.map(|right| Difference { of: Figure::RoundTrip, aggregator, rank, right });
        losses.chain(trip).collect()
    }
}

/// Two shares of lost fragments differ by at least this.
const LEAST_LOSS: f64 = 0.001;
/// Two round trips differ by more than this factor.
const LEAST_TRIPS: f64 = 1.2;
