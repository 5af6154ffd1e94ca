//! A coordinator's connection to one agent.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use racksum_net::NetError;
use racksum_net::quic::quinn::{self, RecvStream, SendStream};
use racksum_net::quic::{Caller, Connection, frames};
use racksum_net::resolve::resolve;
use racksum_proto::auth::Key;
use racksum_proto::peer_text::PeerText;
use racksum_proto::time::Span;
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::datagram::{HEADERS, TRAIN_LEN};
use crate::message::{Answer, Arrived, Busy, Order, Pinged, RATES_MBIT, Train, VERSION};

/// An agent that serves this coordinator.
#[derive(Debug)]
pub(crate) struct Node {
    /// The name of the host. Numbers of hosts change with the topology, and this does not.
    pub(crate) host: String,
    /// The address of the data socket.
    data: SocketAddr,
    quic: quinn::Connection,
    control: Mutex<Control>,
    /// Bytes of measurements that crossed the host's interface.
    measured: AtomicU64,
}

/// The stream of orders and answers.
#[derive(Debug)]
struct Control {
    addr: SocketAddr,
    connection: Connection,
    send: SendStream,
    recv: RecvStream,
}

/// The failure of an agent.
#[derive(Debug, Clone)]
pub(crate) struct NodeFailure {
    pub(crate) host: String,
    pub(crate) why: String,
}

/// The reason why an agent does not serve this coordinator.
#[derive(Debug)]
pub(crate) enum Unserved {
    Failed(NodeFailure),
    Busy {
        /// The name of the agent's host.
        host: String,
        busy: Busy,
    },
}

/// The part of a flow that arrived.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FlowReport {
    pub(crate) pings: u32,
    pub(crate) train: Option<Arrived>,
}

/// The numbers of datagrams of a flow that were sent to an agent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sent {
    pub(crate) pings: u32,
    pub(crate) train: u32,
}

impl Node {
    /// Connects to the agent at `address`, a name or an address with a port.
    pub(crate) async fn connect(
        host: String,
        address: &str,
        caller: &Caller,
    ) -> Result<Self, Unserved> {
        let failed = |host, why| Unserved::Failed(NodeFailure { host, why });
        let addrs = match resolve(address).await {
            Ok(addrs) => addrs,
            Err(error) => {
                let advice = "give the host's `address` in the nodes file";
                return Err(failed(host, format!("cannot resolve {address}: {error}; {advice}")));
            }
        };
        let mut why = format!("{address} has no address");
        for addr in addrs {
            match Control::open(addr, caller).await {
                Ok((control, Answer::Hello { version: VERSION, data_port })) => {
                    return Ok(Self {
                        host,
                        data: SocketAddr::new(addr.ip(), data_port),
                        quic: control.connection.quic().clone(),
                        control: Mutex::new(control),
                        measured: AtomicU64::new(0),
                    });
                }
                Ok((_, Answer::Busy(busy))) => return Err(Unserved::Busy { host, busy }),
                Ok(_) => why = NO_SENSE.into(),
                Err(error) => why = error,
            }
        }
        Err(failed(host, why))
    }

    async fn ask(&self, order: Order) -> Result<Answer, NodeFailure> {
        let answer = self.control.lock().await.ask(&order).await;
        answer.map_err(|why| self.failure(why))
    }

    pub(crate) fn failure(&self, why: String) -> NodeFailure {
        NodeFailure { host: self.host.clone(), why }
    }

    fn unexpected(&self, answer: &Answer) -> NodeFailure {
        // Its fields are the other side's, so only the log shows them.
        tracing::debug!(?answer, "unexpected answer");
        self.failure(NO_SENSE.into())
    }

    /// Shows an agent that carries out no order that this coordinator still needs it. Hangs up on
    /// an agent that reads no orders.
    pub(crate) async fn stay(&self) {
        // Another order shows it as well. The next one meets the failure of an agent that is gone.
        if let Ok(mut control) = self.control.try_lock() {
            let sent = timeout(STREAM_PATIENCE, frames::send(&mut control.send, &Order::Stay));
            if sent.await.is_err() {
                // A part of the order may be sent, so no other order can follow it.
                self.quic.close(1u32.into(), UNREAD.as_bytes());
            }
        }
    }

    /// Announces a flow with the agent `peer`.
    pub(crate) async fn expect(&self, flow: u64, key: Key, peer: &Self) -> Result<(), NodeFailure> {
        match self.ask(Order::Expect { flow, key, peer: peer.data }).await? {
            Answer::Expected => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Sends up to `count` pings of a flow of which `sent` were sent before.
    pub(crate) async fn ping(
        &self,
        flow: u64,
        sent: u32,
        count: u32,
    ) -> Result<Pinged, NodeFailure> {
        match self.ask(Order::Ping { flow, count, interval_us: INTERVAL_US }).await? {
            Answer::Pinged(pinged) if is_plausible(&pinged, sent..=sent + count) => Ok(pinged),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Sends a train. Returns the number of its datagrams.
    pub(crate) async fn train(&self, flow: u64, train: Train) -> Result<u32, NodeFailure> {
        let most = train.bytes / TRAIN_LEN as u64;
        match self.ask(Order::Train { flow, train }).await? {
            Answer::Trained { datagrams } if u64::from(datagrams) <= most => Ok(datagrams),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Ends a flow. Returns the part of it that arrived. `sent` is what was sent to this agent.
    pub(crate) async fn report(&self, flow: u64, sent: Sent) -> Result<FlowReport, NodeFailure> {
        match self.ask(Order::Report { flow, train: sent.train }).await? {
            Answer::Report { pings, train } if is_possible(pings, train, sent) => {
                Ok(FlowReport { pings, train })
            }
            other => Err(self.unexpected(&other)),
        }
    }

    /// Returns the bytes that measurements and orders have sent or received at this host, with
    /// headers. Lost datagrams count as received.
    pub(crate) fn used(&self) -> u64 {
        let stats = self.quic.stats();
        let orders = [stats.udp_tx, stats.udp_rx]
            .iter()
            .map(|udp| udp.bytes + udp.datagrams * HEADERS as u64)
            .sum::<u64>();
        self.measured.load(Ordering::Relaxed) + orders
    }

    /// Counts bytes of datagrams that the host sent or received.
    pub(crate) fn count(&self, bytes: u64) {
        self.measured.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Ends the connection.
    pub(crate) async fn close(self) {
        self.control.into_inner().connection.close("measured").await;
    }
}

impl Control {
    /// Connects, and returns the answer to a hello.
    async fn open(addr: SocketAddr, caller: &Caller) -> Result<(Self, Answer), String> {
        let connection = caller.connect(addr, PATIENCE).await;
        let connection = connection.map_err(|error| match error {
            NetError::NobodyThere { .. } => format!(
                "no answer from {addr} within {} s; check the address, and that `racksum probe \
                 serve` runs there",
                PATIENCE.as_millis() / 1000
            ),
            NetError::WrongProtocol { .. } => {
                format!("{addr} is no agent of this release of `racksum probe serve`")
            }
            error => error.to_string(),
        })?;
        // The agent decides when it has room for a stream.
        let opened = timeout(STREAM_PATIENCE, connection.quic().open_bi()).await;
        let streams = opened.map_err(|_| UNREAD.to_owned())?;
        let (send, recv) = streams.map_err(|error| PeerText::of(error).as_str().to_owned())?;
        let mut control = Self { addr, connection, send, recv };
        let answer = control.ask(&Order::Hello { version: VERSION }).await?;
        Ok((control, answer))
    }

    /// Returns whether this coordinator has hung up.
    fn is_hung_up(&self) -> bool {
        self.connection.quic().close_reason() == Some(quinn::ConnectionError::LocallyClosed)
    }

    /// Sends an order and waits for the answer; the error says why there is none.
    async fn ask(&mut self, order: &Order) -> Result<Answer, String> {
        let exchange = async {
            frames::send(&mut self.send, order).await.map_err(|error| error.to_string())?;
            match frames::recv::<Answer>(&mut self.recv).await {
                Ok(Some(answer)) => Ok(answer),
                Ok(None) => Err("the agent ended the connection".to_owned()),
                Err(error) => Err(error.to_string()),
            }
        };
        let answer = timeout(ANSWER_PATIENCE, exchange).await;
        match answer.unwrap_or_else(|_| Err(UNANSWERED.to_owned())) {
            Ok(Answer::Refused { reason }) => {
                Err(format!("the agent refuses: {}", PeerText::of(reason)))
            }
            Ok(answer) => Ok(answer),
            // The agent states its reason in the close of the connection.
            Err(why) => Err(match self.connection.why_ended(self.addr) {
                _ if self.is_hung_up() => UNREAD.to_owned(),
                Some(NetError::Connect { addr, cause }) => {
                    format!("the connection to {addr} ended: {}", PeerText::of(cause))
                }
                Some(cause) => cause.to_string(),
                None => why,
            }),
        }
    }
}

pub(crate) fn is_plausible(pinged: &Pinged, sent: RangeInclusive<u32>) -> bool {
    pinged.echoes <= pinged.sent
        && sent.contains(&pinged.sent)
        && (0.0..=MOST_RTT_US).contains(&pinged.rtt_p50_us)
        && (pinged.rtt_p50_us..=MOST_RTT_US).contains(&pinged.rtt_p99_us)
}

/// Returns whether an agent can have received this of what was sent to it.
pub(crate) fn is_possible(pings: u32, train: Option<Arrived>, sent: Sent) -> bool {
    let is_possible = |train: Arrived| {
        (1..=sent.train).contains(&train.datagrams)
            && train.mbit.is_none_or(|mbit| RATES_MBIT.contains(&mbit))
    };
    pings <= sent.pings && train.is_none_or(is_possible)
}

/// Time limit for the connection to an agent.
const PATIENCE: Span = Span::from_secs(5);
/// Time limit for the answer to an order, which may take several seconds to carry out.
const ANSWER_PATIENCE: Duration = Duration::from_secs(30);
/// Time limit for an agent to have room for the stream of orders, or for a short order on it. An
/// agent that reads its orders has room at once.
const STREAM_PATIENCE: Duration = Duration::from_secs(5);
/// The failure of an agent that has no room for an order.
const UNREAD: &str = "the agent reads no orders; start it again, or exclude it";
/// The failure of an agent that answers too late.
const UNANSWERED: &str = "the agent did not answer within 30 s; start it again, or exclude it";
/// The failure of an agent whose answer is not one to the order.
const NO_SENSE: &str = "the agent gave an answer that makes no sense; install the same release on \
                        all hosts, or exclude it";
/// Interval between pings in microseconds.
const INTERVAL_US: u32 = 1_000;
/// The longest round trip that counts, in microseconds: the time limit for the answer.
const MOST_RTT_US: f64 = 1e6 * ANSWER_PATIENCE.as_secs_f64();

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_finite_and_ordered_round_trips_are_plausible() {
        let pinged = |sent, echoes, rtt_p50_us, rtt_p99_us| {
            is_plausible(&Pinged { sent, echoes, rtt_p50_us, rtt_p99_us }, 100..=500)
        };
        assert!(pinged(500, 499, 50.0, 60.0));
        for (p50, p99) in [
            (f64::NAN, 60.0),
            (50.0, f64::NAN),
            (50.0, f64::INFINITY),
            (f64::INFINITY, f64::INFINITY),
            (-1.0, 60.0),
            (60.0, 50.0),
            (50.0, 30.1e6),
        ] {
            assert!(!pinged(500, 499, p50, p99), "{p50} {p99}");
        }
        for (sent, echoes) in [(500, 501), (99, 0), (501, 0)] {
            assert!(!pinged(sent, echoes, 50.0, 60.0), "{sent} {echoes}");
        }
    }

    #[test]
    fn an_agent_cannot_receive_more_than_was_sent() {
        let possible = |pings: u32, datagrams: u32, mbit: Option<f64>| {
            let sent = Sent { pings: 400, train: 50 };
            is_possible(pings, Some(Arrived { datagrams, mbit }), sent)
        };
        assert!(possible(400, 50, Some(100.0)) && possible(0, 1, None));
        assert!(is_possible(400, None, Sent { pings: 400, train: 0 }));
        assert!(!possible(401, 50, None) && !possible(400, 51, None) && !possible(400, 0, None));
        for mbit in [f64::NAN, f64::INFINITY, 0.0, -1.0, 1e300] {
            assert!(!possible(400, 50, Some(mbit)), "{mbit}");
        }
    }
}
