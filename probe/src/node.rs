//! A coordinator's connection to one agent, and the measurements of one pair of agents.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use racksum_net::NetError;
use racksum_net::auth::new_key;
use racksum_net::quic::quinn::{RecvStream, SendStream};
use racksum_net::quic::{Connection, Credentials, connect_with, frames};
use racksum_net::resolve::resolve;
use racksum_placer::topology::HostId;
use racksum_proto::auth::Key;
use racksum_proto::peer_text::PeerText;
use racksum_proto::time::Span;
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::datagram::{HEADERS, PING_LEN, TRAIN_LEN};
use crate::message::{Answer, Order, PROTOCOL, Pinged, Train, VERSION};

/// An agent that has answered.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) host: HostId,
    /// The address of the data socket.
    data: SocketAddr,
    line: Mutex<Line>,
    /// Bytes that crossed the host's interface for measurements, as estimated from the orders.
    spent: AtomicU64,
}

#[derive(Debug)]
struct Line {
    addr: SocketAddr,
    connection: Connection,
    send: SendStream,
    recv: RecvStream,
}

/// The failure of an agent.
#[derive(Debug, Clone)]
pub(crate) struct NodeFailure {
    pub(crate) host: HostId,
    pub(crate) why: String,
}

/// The loss in both directions of a path, and its round-trip times.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Path {
    /// The share of pings that did not arrive.
    pub(crate) loss: f64,
    /// The share of echoes that did not arrive.
    pub(crate) loss_back: f64,
    /// `None` if no echo arrived.
    pub(crate) rtt_us: Option<(f64, f64)>,
}

impl Node {
    /// Connects to the agent at `address`, a name or an address with a port.
    pub(crate) async fn connect(
        host: HostId,
        address: &str,
        credentials: &Credentials,
    ) -> Result<Self, NodeFailure> {
        let failed = |why: String| NodeFailure { host, why };
        let resolved = resolve(address).await;
        let addrs =
            resolved.map_err(|error| failed(format!("cannot resolve {address}: {error}")))?;
        let mut why = format!("{address} has no address");
        for addr in addrs {
            match Line::open(addr, credentials).await {
                Ok((line, data_port)) => {
                    let data = SocketAddr::new(addr.ip(), data_port);
                    let spent = AtomicU64::new(0);
                    return Ok(Self { host, data, line: Mutex::new(line), spent });
                }
                Err(error) => why = error,
            }
        }
        Err(failed(why))
    }

    async fn ask(&self, order: Order) -> Result<Answer, NodeFailure> {
        let answer = self.line.lock().await.ask(&order).await;
        answer.map_err(|why| NodeFailure { host: self.host, why })
    }

    fn unexpected(&self, answer: &Answer) -> NodeFailure {
        // Its fields are the other side's, so only the log shows them.
        tracing::debug!(?answer, "unexpected answer");
        let why = "the agent gave an answer that makes no sense; install the same release on all \
                   hosts, or exclude it"
            .into();
        NodeFailure { host: self.host, why }
    }

    async fn expect(&self, flow: u64, key: Key, peer: &Self) -> Result<(), NodeFailure> {
        match self.ask(Order::Expect { flow, key, peer: peer.data }).await? {
            Answer::Expected => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    async fn ping(&self, flow: u64, to: &Self, count: u32) -> Result<Pinged, NodeFailure> {
        [self, to].iter().for_each(|node| node.spend(2 * ping_bytes(count)));
        let order = Order::Ping { flow, count, interval_us: INTERVAL_US };
        match self.ask(order).await? {
            Answer::Pinged(pinged) if is_plausible(&pinged) => Ok(pinged),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Ends a flow. Returns the pings that arrived, and the rate of the train in Mbit/s.
    async fn report(&self, flow: u64) -> Result<(u32, Option<f64>), NodeFailure> {
        match self.ask(Order::Report { flow }).await? {
            Answer::Report { pings, train } if train.is_none_or(|it| is_rate(it.mbit)) => {
                Ok((pings, train.map(|train| train.mbit)))
            }
            other => Err(self.unexpected(&other)),
        }
    }

    /// Returns the bytes that measurements have used at this host.
    pub(crate) fn spent(&self) -> u64 {
        self.spent.load(Ordering::Relaxed)
    }

    fn spend(&self, bytes: u64) {
        self.spent.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Ends the connection.
    pub(crate) async fn close(self) {
        self.line.into_inner().connection.close("measured").await;
    }
}

impl Line {
    async fn open(addr: SocketAddr, credentials: &Credentials) -> Result<(Self, u16), String> {
        let connection = connect_with(PROTOCOL, None, addr, credentials, PATIENCE).await;
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
        let streams = connection.quic().open_bi().await;
        let (send, recv) = streams.map_err(|error| PeerText::of(error).as_str().to_owned())?;
        let mut line = Self { addr, connection, send, recv };
        match line.ask(&Order::Hello { version: VERSION }).await? {
            Answer::Hello { version: VERSION, data_port } => Ok((line, data_port)),
            _ => Err("the agent gave an answer that makes no sense to a hello".into()),
        }
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
        match answer.unwrap_or_else(|_| Err("the agent does not answer".to_owned())) {
            Ok(Answer::Refused { reason }) => {
                Err(format!("the agent refuses: {}", PeerText::of(reason)))
            }
            Ok(answer) => Ok(answer),
            // The agent states its reason in the close of the connection.
            Err(why) => Err(match self.connection.why_ended(self.addr) {
                Some(cause) => cause.to_string(),
                None => why,
            }),
        }
    }
}

/// Measures the loss and the round-trip times between two agents.
///
/// A path that loses pings gets more of them, because a share needs many to be exact.
pub(crate) async fn measure_path(from: &Node, to: &Node) -> Result<Path, NodeFailure> {
    let flow = expect_flow(from, to).await?;
    let mut pinged = from.ping(flow, to, PINGS).await?;
    let is_lossy = pinged.echoes < pinged.sent;
    if is_lossy && pinged.echoes > 0 {
        pinged = from.ping(flow, to, MORE_PINGS).await?;
    }
    let (arrived, _) = to.report(flow).await?;
    from.report(flow).await?;
    let is_answered = pinged.echoes > 0;
    Ok(Path {
        loss: lost(pinged.sent, arrived),
        loss_back: lost(arrived, pinged.echoes),
        rtt_us: is_answered.then_some((pinged.rtt_p50_us, pinged.rtt_p99_us)),
    })
}

/// A flow between two agents over which a train may be sent.
#[derive(Debug)]
pub(crate) struct Way {
    from: Arc<Node>,
    to: Arc<Node>,
    flow: u64,
}

impl Way {
    /// Opens a flow, and lets the receiver show that it agrees to receive. Returns `None` if no
    /// ping passes.
    pub(crate) async fn open(from: Arc<Node>, to: Arc<Node>) -> Result<Option<Self>, NodeFailure> {
        let flow = expect_flow(&from, &to).await?;
        for _ in 0..PROOFS {
            if from.ping(flow, &to, PROOF_PINGS).await?.echoes > 0 {
                return Ok(Some(Self { from, to, flow }));
            }
        }
        to.report(flow).await?;
        from.report(flow).await?;
        Ok(None)
    }

    /// Sends a train. Returns its rate at the receiver in Mbit/s.
    pub(crate) async fn send(self, train: Train) -> Result<f64, NodeFailure> {
        let Self { from, to, flow } = self;
        let most = train.bytes / TRAIN_LEN as u64;
        let datagrams = match from.ask(Order::Train { flow, train }).await? {
            Answer::Trained { datagrams } if u64::from(datagrams) <= most => datagrams,
            other => return Err(from.unexpected(&other)),
        };
        [&from, &to].iter().for_each(|node| node.spend(train_bytes(datagrams.into())));
        let (_, mbit) = to.report(flow).await?;
        from.report(flow).await?;
        Ok(mbit.unwrap_or(0.0))
    }
}

async fn expect_flow(from: &Node, to: &Node) -> Result<u64, NodeFailure> {
    let no_key = |error: NetError| NodeFailure { host: from.host, why: error.to_string() };
    let key = new_key().map_err(no_key)?;
    let number = new_key().map_err(no_key)?.0;
    let flow = number.into_iter().take(8).fold(0, |flow, byte| flow << 8 | u64::from(byte));
    to.expect(flow, key, from).await?;
    from.expect(flow, key, to).await?;
    Ok(flow)
}

fn is_plausible(pinged: &Pinged) -> bool {
    let is_time = |us: f64| us.is_finite() && us >= 0.0;
    pinged.echoes <= pinged.sent
        && pinged.sent <= PINGS + MORE_PINGS
        && is_time(pinged.rtt_p50_us)
        && is_time(pinged.rtt_p99_us)
}

/// Returns whether an interface could have this rate in Mbit/s.
fn is_rate(mbit: f64) -> bool {
    (0.0..=MOST_MBIT).contains(&mbit)
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

/// Returns the greatest number of bytes that the proofs of [`Way::open`] use at a host.
pub(crate) const fn proof_bytes() -> u64 {
    2 * ping_bytes(PROOFS * PROOF_PINGS)
}

/// Returns the greatest number of bytes that [`measure_path`] uses at a host.
pub(crate) const fn path_bytes() -> u64 {
    2 * ping_bytes(PINGS + MORE_PINGS)
}

/// Time limit for the connection to an agent.
const PATIENCE: Span = Span::from_secs(5);
/// Time limit for the answer to an order, which may take several seconds to carry out.
const ANSWER_PATIENCE: Duration = Duration::from_secs(30);
/// Interval between pings in microseconds.
const INTERVAL_US: u32 = 1_000;
/// Pings of a path at first. If 1 % are lost, at least one of 400 is lost in 98 of 100 cases.
const PINGS: u32 = 400;
/// Further pings if some were lost: then a loss of 5 % is exact to 1 point in 95 of 100 cases.
const MORE_PINGS: u32 = 1_600;
/// The greatest rate in Mbit/s that counts: 10 Tbit/s.
const MOST_MBIT: f64 = 1e7;
/// Pings that prove that an agent agrees to receive a train.
const PROOF_PINGS: u32 = 3;
/// The greatest number of such proofs.
const PROOFS: u32 = 5;
