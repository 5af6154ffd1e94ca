//! Control messages between the coordinator and an agent, on one QUIC stream. The agent answers
//! each order with one answer.

use std::net::SocketAddr;
use std::ops::RangeInclusive;

use racksum_proto::auth::Key;
use serde::{Deserialize, Serialize};

/// ALPN name of this protocol.
pub(crate) const PROTOCOL: &str = "racksum-probe/1";

/// Version of these messages and of the datagrams.
pub(crate) const VERSION: u16 = 1;

/// The least and the greatest rate in Mbit/s that an order may name or that counts as measured: up
/// to 10 Tbit/s.
pub(crate) const RATES_MBIT: RangeInclusive<f64> = 1e-3..=1e7;

/// A message from the coordinator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Order {
    /// Asks the agent to serve this coordinator and no other one until the connection ends.
    Hello {
        /// The coordinator's [`VERSION`].
        version: u16,
    },
    /// Announces a flow with the data socket of the other agent. Until [`Order::Report`], the agent
    /// sends its datagrams there and accepts them from there.
    Expect { flow: u64, key: Key, peer: SocketAddr },
    /// Sends pings of a flow and waits for their echoes.
    Ping { flow: u64, count: u32, interval_us: u32 },
    /// Sends a train of a flow whose other agent has echoed a ping.
    Train { flow: u64, train: Train },
    /// Asks what arrived of a flow, and ends the flow.
    Report { flow: u64 },
}

/// The limits of a train. It ends at the first that is reached.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Train {
    /// Bytes of datagrams.
    pub(crate) bytes: u64,
    /// Time of sending in milliseconds.
    pub(crate) millis: u32,
    /// Rate at which the sender sends, in Mbit/s.
    pub(crate) mbit: f64,
}

/// A message from an agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Answer {
    /// Answers [`Order::Hello`].
    Hello { version: u16, data_port: u16 },
    /// Answers [`Order::Hello`] if the agent serves another coordinator.
    Busy(Busy),
    /// Answers [`Order::Expect`].
    Expected,
    /// Answers [`Order::Ping`].
    Pinged(Pinged),
    /// Answers [`Order::Train`].
    Trained { datagrams: u32 },
    /// Answers [`Order::Report`].
    Report {
        /// Pings that arrived, each counted once.
        pings: u32,
        /// The train that arrived, if any of it did.
        train: Option<Arrived>,
    },
    /// The agent does not carry out the order.
    Refused { reason: String },
}

/// The coordinator that an agent serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Busy {
    /// The coordinator's name and address.
    pub(crate) holder: String,
    /// The seconds for which the agent has served it.
    pub(crate) held_s: u64,
}

/// The pings that an agent sent in a flow so far, and their echoes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Pinged {
    pub(crate) sent: u32,
    /// Echoes that arrived, each counted once.
    pub(crate) echoes: u32,
    /// Median round-trip time in microseconds, without the time that the other agent held the ping.
    pub(crate) rtt_p50_us: f64,
    /// 99th percentile of the round-trip times in microseconds.
    pub(crate) rtt_p99_us: f64,
}

/// The part of a train that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Arrived {
    pub(crate) datagrams: u32,
    /// Rate in the middle of the train's time at the receiver, in Mbit/s. `None` if the datagrams
    /// arrived in too short a time to show a rate.
    pub(crate) mbit: Option<f64>,
}
