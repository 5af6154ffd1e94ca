//! The measurements of one path: pings and trains of a flow between two agents.

use std::sync::Arc;

use racksum_net::NetError;
use racksum_net::auth::new_key;

use crate::datagram::{HEADERS, PING_LEN, TRAIN_LEN};
use crate::message::{Arrived, Pinged, Train};
use crate::node::{FlowReport, Node, NodeFailure, Sent};

/// The loss in both directions of a path, and its round-trip times.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PathPings {
    /// The share of pings that did not arrive.
    pub(crate) loss: f64,
    /// The share of echoes that did not arrive.
    pub(crate) loss_back: f64,
    /// The median and the 99th percentile in microseconds. `None` if no echo arrived.
    pub(crate) rtt_us: Option<(f64, f64)>,
}

/// Measures the loss and the round-trip times between two agents.
///
/// A path that loses pings gets more of them, because a share needs many to be exact.
pub(crate) async fn measure_pings(
    from: Arc<Node>,
    to: Arc<Node>,
) -> Result<PathPings, NodeFailure> {
    let mut flow = FlowOrders::open(from, to).await?;
    let pinged = match flow.ping_path().await {
        Ok(pinged) => pinged,
        Err(failure) => return Err(flow.abandon(failure).await),
    };
    let arrived = flow.end(0).await?.pings;
    Ok(PathPings {
        loss: lost(pinged.sent, arrived),
        loss_back: lost(arrived, pinged.echoes),
        rtt_us: (pinged.echoes > 0).then_some((pinged.rtt_p50_us, pinged.rtt_p99_us)),
    })
}

/// A flow that both agents know until it is ended.
#[derive(Debug)]
pub(crate) struct FlowOrders {
    from: Arc<Node>,
    to: Arc<Node>,
    number: u64,
    /// Pings that were sent.
    pings: u32,
}

impl FlowOrders {
    async fn open(from: Arc<Node>, to: Arc<Node>) -> Result<Self, NodeFailure> {
        let no_key = |error: NetError| from.failure(error.to_string());
        let key = new_key().map_err(no_key)?;
        let number = new_key().map_err(no_key)?.0;
        let number = number.into_iter().take(8).fold(0, |flow, byte| flow << 8 | u64::from(byte));
        to.expect(number, key, &from).await?;
        let flow = Self { from, to, number, pings: 0 };
        match flow.from.expect(number, key, &flow.to).await {
            Ok(()) => Ok(flow),
            Err(failure) => Err(flow.abandon(failure).await),
        }
    }

    /// Opens a flow, and lets the receiver show that it agrees to receive trains. Returns `None` if
    /// no ping passes.
    pub(crate) async fn open_proven(
        from: Arc<Node>,
        to: Arc<Node>,
    ) -> Result<Option<Self>, NodeFailure> {
        let mut flow = Self::open(from, to).await?;
        for _ in 0..PROOFS {
            match flow.ping(PROOF_PINGS).await {
                Ok(pinged) if pinged.echoes > 0 => return Ok(Some(flow)),
                Ok(_) => {}
                Err(failure) => return Err(flow.abandon(failure).await),
            }
        }
        flow.end(0).await?;
        Ok(None)
    }

    /// Sends a train and ends the flow. Returns the rate of [`shown_mbit`].
    pub(crate) async fn send(self, train: Train) -> Result<Option<f64>, NodeFailure> {
        let datagrams = match self.from.train(self.number, train).await {
            Ok(datagrams) => datagrams,
            Err(failure) => return Err(self.abandon(failure).await),
        };
        self.count(train_bytes(datagrams.into()));
        let arrived = self.end(datagrams).await?.train;
        Ok(shown_mbit(arrived, train))
    }

    async fn ping_path(&mut self) -> Result<Pinged, NodeFailure> {
        let mut pinged = self.ping(PINGS).await?;
        // An agent could send one ping each time, and so keep all others waiting.
        for _ in 0..FURTHER_TURNS {
            let Some(count) = further_pings(&pinged) else { break };
            pinged = self.ping(count).await?;
        }
        Ok(pinged)
    }

    async fn ping(&mut self, count: u32) -> Result<Pinged, NodeFailure> {
        let pinged = self.from.ping(self.number, self.pings, count).await?;
        // Each ping has an echo.
        self.count(2 * ping_bytes(pinged.sent - self.pings));
        self.pings = pinged.sent;
        Ok(pinged)
    }

    /// Counts bytes between the two hosts.
    fn count(&self, bytes: u64) {
        [&self.from, &self.to].iter().for_each(|node| node.count(bytes));
    }

    /// Ends the flow at both agents. Returns the part of it that arrived.
    async fn end(self, trained: u32) -> Result<FlowReport, NodeFailure> {
        let sent = Sent { pings: self.pings, train: trained };
        let nothing = Sent { pings: 0, train: 0 };
        match self.to.report(self.number, sent).await {
            Ok(report) => self.from.report(self.number, nothing).await.map(|_| report),
            Err(failure) => Err(self.abandon(failure).await),
        }
    }

    /// Ends the flow at the agent that has not failed. An agent has room for few flows.
    async fn abandon(&self, failure: NodeFailure) -> NodeFailure {
        let other = if failure.host == self.from.host { &self.to } else { &self.from };
        // A second failure adds nothing to the first.
        let nothing = Sent { pings: 0, train: 0 };
        drop(other.report(self.number, nothing).await);
        failure
    }
}

/// Returns the rate that a train shows, in Mbit/s: zero if nothing arrived, and `None` if it was
/// too short to show one.
///
/// A path passes no more than was sent: if it shows more, it held datagrams back and then passed
/// them at once, or the agent is wrong.
fn shown_mbit(arrived: Option<Arrived>, train: Train) -> Option<f64> {
    arrived.map_or(Some(0.0), |arrived| arrived.mbit.map(|mbit| mbit.min(train.mbit)))
}

/// Returns the number of further pings that a path needs.
fn further_pings(pinged: &Pinged) -> Option<u32> {
    let most = match pinged.sent - pinged.echoes {
        lost if lost == pinged.sent => return None,
        0 => PINGS,
        // The agent may have stopped early, because no echo had arrived by then.
        _ if pinged.sent < PINGS => PINGS,
        _ => PINGS + MORE_PINGS,
    };
    most.checked_sub(pinged.sent).filter(|count| *count > 0)
}

fn lost(sent: u32, arrived: u32) -> f64 {
    if sent == 0 { 0.0 } else { 1.0 - f64::from(arrived.min(sent)) / f64::from(sent) }
}

const fn ping_bytes(count: u32) -> u64 {
    count as u64 * (PING_LEN + HEADERS) as u64
}

/// Returns the bytes that a link carries for datagrams of a train.
pub(crate) const fn train_bytes(datagrams: u64) -> u64 {
    datagrams * (TRAIN_LEN + HEADERS) as u64
}

/// Returns the greatest number of bytes that [`measure_pings`] uses at a host.
pub(crate) const fn path_bytes() -> u64 {
    2 * ping_bytes(PINGS + MORE_PINGS) + ORDER_BYTES
}

/// Returns the greatest number of bytes that a train of up to `bytes` and the proof before it use
/// at a host.
pub(crate) const fn proven_train_bytes(bytes: u64) -> u64 {
    train_bytes(bytes.div_ceil(TRAIN_LEN as u64))
        + 2 * ping_bytes(PROOFS * PROOF_PINGS)
        + ORDER_BYTES
}

/// Pings of a path at first. If 1 % are lost, at least one of 400 is lost in 98 of 100 cases.
const PINGS: u32 = 400;
/// Further pings if some were lost: then a loss of 5 % is exact to 1 point in 95 of 100 cases.
const MORE_PINGS: u32 = 1_600;
/// Further orders to ping a path: one if the agent stopped before the first echo, and one if pings
/// were lost.
const FURTHER_TURNS: u32 = 2;
/// Pings that prove that an agent agrees to receive a train.
const PROOF_PINGS: u32 = 3;
/// The greatest number of such proofs.
const PROOFS: u32 = 5;
/// Bytes that the orders of a flow and their answers use at a host, and some more.
const ORDER_BYTES: u64 = 16 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::MOST_UNPROVEN;

    #[test]
    fn a_long_path_gets_as_many_pings_as_a_short_one_and_a_lossy_one_more() {
        let further = |sent: u32, echoes: u32| {
            further_pings(&Pinged { sent, echoes, rtt_p50_us: 1.0, rtt_p99_us: 1.0 })
        };
        // The first echo takes longer than the pings that an agent may send before it.
        assert_eq!(further(MOST_UNPROVEN, MOST_UNPROVEN), Some(PINGS - MOST_UNPROVEN));
        assert_eq!(further(MOST_UNPROVEN, 1), Some(PINGS - MOST_UNPROVEN));
        assert_eq!(further(PINGS, PINGS), None);
        assert_eq!(further(PINGS, PINGS - 1), Some(MORE_PINGS));
        assert_eq!(further(PINGS + MORE_PINGS, PINGS), None);
        assert_eq!((further(MOST_UNPROVEN, 0), further(0, 0)), (None, None));
    }

    #[test]
    fn a_train_shows_no_more_than_the_rate_at_which_it_was_sent() {
        let train = Train { bytes: 4_000_000, millis: 100, mbit: 125.0 };
        let shown = |mbit| shown_mbit(Some(Arrived { datagrams: 50, mbit }), train);
        assert_eq!([Some(94.0), Some(1e7), None].map(shown), [Some(94.0), Some(125.0), None]);
        assert_eq!(shown_mbit(None, train), Some(0.0));
    }
}
