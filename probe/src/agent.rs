//! Agents: each serves one host, and measures paths to other agents when a coordinator orders it.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use racksum_net::NetError;
use racksum_net::auth::new_key;
use racksum_net::clock::Clock;
use racksum_net::log_limit::LogLimit;
use racksum_net::quic::lifeline::silence;
use racksum_net::quic::quinn::{Connection, Endpoint, Incoming, RecvStream, SendStream};
use racksum_net::quic::{Certificate, Credentials, Role, frames, serve};
use racksum_proto::auth::Key;
use racksum_proto::peer_text::PeerText;
use racksum_proto::time::{Span, Time};
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

use crate::data::{Data, Shared};
use crate::message::{Answer, Busy, Order, PROTOCOL, RATES_MBIT, Train, VERSION};

/// An agent: a server for coordinators, and a data socket.
///
/// It carries out the orders of callers with an identity of role aggregator. Without an identity it
/// serves only loopback, or any caller if its credentials are insecure. It serves one coordinator
/// at a time, because two measurements at once would slow each other down.
#[derive(Debug)]
pub struct Agent {
    endpoint: Endpoint,
    data: Data,
    holder: Arc<Holder>,
    knows_identities: bool,
}

/// The coordinator that an agent serves.
#[derive(Debug)]
struct Holder {
    clock: Clock,
    /// The coordinator's name, and since when it is served; `None` if there is none.
    held: Mutex<Option<(String, Time)>>,
}

/// The right to give orders to an agent. It ends when this value is dropped.
#[derive(Debug)]
struct Hold(Arc<Holder>);

impl Agent {
    /// Opens an agent at `bind`. Its data socket has the same address and the port `data_port`; 0
    /// lets the kernel choose.
    ///
    /// # Errors
    ///
    /// Returns a [`NetError`] that names the address, for example if a port is taken.
    ///
    /// # Panics
    ///
    /// Panics outside a tokio runtime.
    pub fn open(
        bind: SocketAddr,
        data_port: u16,
        credentials: &Credentials,
    ) -> Result<Self, NetError> {
        let endpoint = serve(bind, credentials, PROTOCOL)?;
        let data = Data::open(SocketAddr::new(bind.ip(), data_port))?;
        let holder = Arc::new(Holder { clock: Clock::start(), held: Mutex::default() });
        Ok(Self { endpoint, data, holder, knows_identities: credentials.are_verified() })
    }

    /// Returns the address of the control server.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn addr(&self) -> std::io::Result<SocketAddr> {
        self.endpoint.local_addr()
    }

    /// Returns the address of the data socket.
    #[must_use]
    pub fn data_addr(&self) -> SocketAddr {
        self.data.addr()
    }

    /// Serves coordinators for as long as the future is polled. Returns only if the data socket
    /// fails.
    pub async fn run(&self) {
        let places = Arc::new(Semaphore::new(MOST_CALLERS));
        loop {
            let incoming = tokio::select! {
                incoming = self.endpoint.accept() => incoming,
                () = self.data.shared().failed.notified() => None,
            };
            let Some(incoming) = incoming else { return };
            // A retry is shorter than the packet that it answers.
            if !incoming.remote_address_validated() {
                drop(incoming.retry());
                continue;
            }
            let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
                incoming.refuse();
                continue;
            };
            let knows_identities = self.knows_identities;
            let (shared, holder) = (Arc::clone(self.data.shared()), Arc::clone(&self.holder));
            tokio::spawn(async move {
                if let Some(connection) = handshake(incoming).await {
                    serve_caller(&connection, shared, holder, knows_identities).await;
                }
                drop(place);
            });
        }
    }
}

async fn handshake(incoming: Incoming) -> Option<Connection> {
    let from = incoming.remote_address();
    let connecting = incoming.accept().ok()?;
    match timeout(HANDSHAKE, connecting).await {
        Ok(Ok(connection)) => Some(connection),
        Ok(Err(error)) => {
            HANDSHAKE_FAILURES.note(|left_out| {
                tracing::warn!(%from, left_out, "connection refused: {}", PeerText::of(&error));
            });
            None
        }
        Err(_) => None,
    }
}

async fn serve_caller(
    connection: &Connection,
    shared: Arc<Shared>,
    holder: Arc<Holder>,
    knows_identities: bool,
) {
    let certificate = Certificate::of_peer(connection);
    let role = certificate.as_ref().map(|certificate| certificate.role);
    if knows_identities && role != Some(Role::Aggregator) {
        let why = "measuring needs an identity with role aggregator; issue one with `racksum \
                   identity issue NAME --role aggregator`";
        connection.close(1u32.into(), why.as_bytes());
        return;
    }
    let Ok(Ok((send, recv))) = timeout(HANDSHAKE, connection.accept_bi()).await else {
        return;
    };
    let name = certificate.filter(|_| knows_identities).map(|certificate| certificate.name);
    let name = name.unwrap_or_else(|| "a coordinator without an identity".into());
    let caller = format!("{name} at {}", connection.remote_address());
    let session = Session { shared, holder, caller, flows: vec![], hold: None };
    // Both end an order that is being carried out, and with the session its flows.
    tokio::select! {
        () = session.serve(connection, send, recv) => {}
        _ = connection.closed() => {}
        () = silence(connection, SILENCE) => {
            connection.close(1u32.into(), b"the coordinator has been silent for too long");
        }
    }
}

async fn answered(send: &mut SendStream, answer: &Answer) -> bool {
    frames::send(send, answer).await.is_ok()
}

impl Holder {
    fn held(&self) -> MutexGuard<'_, Option<(String, Time)>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a coordinator give orders, unless another one does.
    fn hold(self: &Arc<Self>, caller: &str) -> Result<Hold, Busy> {
        let mut held = self.held();
        match &*held {
            Some((holder, since)) => {
                let held_s = self.clock.now().since(*since).as_millis() / 1000;
                Err(Busy { holder: holder.clone(), held_s })
            }
            None => {
                *held = Some((caller.to_owned(), self.clock.now()));
                Ok(Hold(Arc::clone(self)))
            }
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        *self.0.held() = None;
    }
}

/// The state of one coordinator's connection. Its flows end with it.
struct Session {
    shared: Arc<Shared>,
    holder: Arc<Holder>,
    /// The coordinator's name and address.
    caller: String,
    flows: Vec<u64>,
    hold: Option<Hold>,
}

impl Drop for Session {
    fn drop(&mut self) {
        for flow in &self.flows {
            self.shared.flows.remove(*flow);
        }
    }
}

impl Session {
    /// Carries out orders until the coordinator hangs up.
    async fn serve(mut self, connection: &Connection, mut send: SendStream, mut recv: RecvStream) {
        loop {
            let order = match frames::recv::<Order>(&mut recv).await {
                Ok(Some(order)) => order,
                Ok(None) => return,
                Err(error) => {
                    let why = format!("cannot read an order: {error}");
                    connection.close(1u32.into(), why.as_bytes());
                    return;
                }
            };
            let answer = self.handle(order).await;
            if !answered(&mut send, &answer).await {
                return;
            }
        }
    }

    fn hello(&mut self) -> Answer {
        if self.hold.is_none() {
            match self.holder.hold(&self.caller) {
                Ok(hold) => self.hold = Some(hold),
                Err(busy) => return Answer::Busy(busy),
            }
        }
        Answer::Hello { version: VERSION, data_port: self.shared.port() }
    }

    async fn handle(&mut self, order: Order) -> Answer {
        match order {
            Order::Ping { flow, .. } | Order::Train { flow, .. } | Order::Report { flow }
                if !self.flows.contains(&flow) =>
            {
                ended()
            }
            Order::Hello { version } if version == VERSION => self.hello(),
            Order::Hello { version } => refused(format!(
                "the agent speaks version {VERSION} and the coordinator version {version}; \
                 install the same release on both"
            )),
            _ if self.hold.is_none() => refused("the first order must be a hello"),
            Order::Expect { flow, key, peer } => {
                let nonce = match new_key() {
                    Ok(Key(random)) => random.into_iter().take(8),
                    Err(error) => return refused(error.to_string()),
                };
                let nonce = nonce.fold(0, |nonce, byte| nonce << 8 | u64::from(byte));
                if !self.shared.flows.add(flow, &key, peer, nonce) {
                    return refused("the flow exists, or the agent has too many flows");
                }
                self.flows.push(flow);
                Answer::Expected
            }
            Order::Ping { interval_us, .. } if !INTERVALS_US.contains(&interval_us) => {
                refused(format!("pings must be {INTERVALS_US:?} microseconds apart"))
            }
            Order::Ping { flow, count, interval_us } => {
                let interval = Duration::from_micros(interval_us.into());
                self.blocking(move |shared| shared.ping(flow, count, interval))
                    .await
                    .map_or_else(ended, Answer::Pinged)
            }
            Order::Train { flow, train } => self.train(flow, train).await,
            Order::Report { flow } => self.report(flow).await,
        }
    }

    async fn train(&self, flow: u64, train: Train) -> Answer {
        if !RATES_MBIT.contains(&train.mbit) || train.millis > MOST_MILLIS {
            return refused(format!(
                "a train needs a rate of {RATES_MBIT:?} Mbit/s and at most {MOST_MILLIS} ms"
            ));
        }
        // Without this rule, an order could aim a train at a host that runs no agent.
        let is_proven = self.shared.flows.with(flow, |flow| flow.is_proven());
        match is_proven {
            Some(true) => {}
            Some(false) => return refused("the other agent has not answered a ping of this flow"),
            None => return ended(),
        }
        self.blocking(move |shared| shared.train(flow, &train))
            .await
            .map_or_else(ended, |datagrams| Answer::Trained { datagrams })
    }

    /// Waits until a train has ended, and reports what arrived of the flow.
    async fn report(&mut self, flow: u64) -> Answer {
        let mut last = None;
        for _ in 0..MOST_QUIET_CHECKS {
            let Some(arrival) = self.shared.flows.with(flow, |flow| flow.last_arrival()) else {
                return ended();
            };
            if arrival == last {
                break;
            }
            last = arrival;
            sleep(QUIET).await;
        }
        self.flows.retain(|known| *known != flow);
        let Some(flow) = self.shared.flows.remove(flow) else { return ended() };
        Answer::Report { pings: flow.pings(), train: flow.arrived() }
    }

    /// Runs work that sends datagrams on a thread of its own. Returns `None` if the flow has ended.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Shared) -> Option<T> + Send + 'static,
    ) -> Option<T> {
        let shared = Arc::clone(&self.shared);
        spawn_blocking(move || work(&shared)).await.ok()?
    }
}

fn refused(reason: impl Into<String>) -> Answer {
    Answer::Refused { reason: reason.into() }
}

fn ended() -> Answer {
    refused("the flow is unknown or has ended")
}

/// The log limit for callers that fail the handshake.
static HANDSHAKE_FAILURES: LogLimit = LogLimit::new(3);
/// Silence after which an agent serves other coordinators: ten keep-alives of the connection.
pub(crate) const SILENCE: Span = Span::from_secs(5);
/// The greatest number of connected callers.
const MOST_CALLERS: usize = 16;
/// The time limit of a handshake, and of opening the stream after it.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Intervals between pings in microseconds. The shortest is 11 Mbit/s; with the longest, a flow's
/// pings end after 100 s.
const INTERVALS_US: RangeInclusive<u32> = 100..=10_000;
/// The longest train in milliseconds.
const MOST_MILLIS: u32 = 2_000;
/// A train has ended when nothing arrives for this long.
const QUIET: Duration = Duration::from_millis(50);
/// The greatest number of checks for that.
const MOST_QUIET_CHECKS: u32 = 200;
