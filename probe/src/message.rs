//! Control messages between the coordinator and an agent, on one QUIC stream. The agent answers
//! each order but [`Order::Stay`] with one answer.

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
    /// Shows that the coordinator still needs the agent, although it has no other order for it now.
    Stay,
    /// Announces a flow with the data socket of the other agent. Until [`Order::Report`], the agent
    /// sends its datagrams there and accepts them from there.
    Expect { flow: u64, key: Key, peer: SocketAddr },
    /// Sends pings of a flow and waits for their echoes.
    Ping { flow: u64, count: u32, interval_us: u32 },
    /// Sends a train of a flow whose other agent has echoed a ping.
    Train { flow: u64, train: Train },
    /// Asks what arrived of a flow, and ends the flow. The agent waits until a train of `train`
    /// datagrams has arrived, or no more of it comes.
    Report { flow: u64, train: u32 },
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
    /// The name and address of the coordinator.
    pub(crate) holder: String,
    /// The seconds for which the agent has served the coordinator.
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn orders() -> Vec<Order> {
        let (flow, key) = (u64::MAX, Key([7; Key::LEN]));
        vec![
            Order::Hello { version: VERSION },
            Order::Stay,
            Order::Expect { flow, key, peer: "[::1]:7188".parse().unwrap() },
            Order::Ping { flow, count: 400, interval_us: 1_000 },
            Order::Train { flow, train: Train { bytes: 4_000_000, millis: 100, mbit: 125.0 } },
            Order::Report { flow, train: 50 },
        ]
    }

    fn answers() -> Vec<Answer> {
        vec![
            Answer::Hello { version: VERSION, data_port: 7188 },
            Answer::Busy(Busy { holder: "operator at 10.0.0.1:4000".into(), held_s: 7 }),
            Answer::Expected,
            Answer::Pinged(Pinged { sent: 9, echoes: 8, rtt_p50_us: 50.5, rtt_p99_us: 60.0 }),
            Answer::Trained { datagrams: 50 },
            Answer::Report { pings: 9, train: Some(Arrived { datagrams: 50, mbit: Some(94.5) }) },
            Answer::Report { pings: 0, train: None },
            Answer::Refused { reason: "it is full".into() },
        ]
    }

    #[test]
    fn messages_are_the_json_that_other_agents_of_this_version_read() {
        let json = |order: &Order| serde_json::to_string(order).unwrap();
        let orders = orders();
        assert_eq!(json(&orders[0]), r#"{"order":"hello","version":1}"#);
        assert_eq!(json(&orders[1]), r#"{"order":"stay"}"#);
        let text = json(&orders[4]);
        let (start, train) = (r#"{"order":"train","flow":18446744073709551615,"#, "125.0}}");
        assert!(text.starts_with(start) && text.ends_with(train), "{text}");
        for order in &orders {
            assert_eq!(&serde_json::from_str::<Order>(&json(order)).unwrap(), order);
        }
        for answer in &answers() {
            let text = serde_json::to_string(answer).unwrap();
            assert_eq!(&serde_json::from_str::<Answer>(&text).unwrap(), answer);
        }
        for wrong in ["", "{}", r#"{"order":"hello"}"#, r#"{"order":"report","flow":1,"train":-1}"#]
        {
            assert!(serde_json::from_str::<Order>(wrong).is_err(), "{wrong}");
        }
    }

    /// Returns a message with one byte changed and its end cut off.
    fn spoiled(message: &impl Serialize, at: usize, byte: u8, cut: usize) -> Vec<u8> {
        let mut json = serde_json::to_vec(message).unwrap();
        let len = json.len();
        json[at % len] = byte;
        json.truncate(len - cut % len);
        json
    }

    proptest! {
        /// A spoiled message is an error, or one that can be sent again as it is.
        #[test]
        fn no_message_of_a_peer_panics(
            which in 0..8_usize,
            at in any::<usize>(),
            byte in any::<u8>(),
            cut in prop_oneof![Just(0_usize), any::<usize>()],
        ) {
            let (orders, answers) = (orders(), answers());
            let order = spoiled(&orders[which % orders.len()], at, byte, cut);
            if let Ok(order) = serde_json::from_slice::<Order>(&order) {
                let text = serde_json::to_string(&order).unwrap();
                prop_assert_eq!(serde_json::from_str::<Order>(&text).unwrap(), order);
            }
            let answer = spoiled(&answers[which], at, byte, cut);
            if let Ok(answer) = serde_json::from_slice::<Answer>(&answer) {
                let text = serde_json::to_string(&answer).unwrap();
                prop_assert_eq!(serde_json::from_str::<Answer>(&text).unwrap(), answer);
            }
        }
    }
}
