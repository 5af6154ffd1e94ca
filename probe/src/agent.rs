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
/// It carries out the orders of callers with an identity of role operator. Without an identity it
/// serves only loopback, or any caller if its credentials are insecure. It serves one coordinator
/// at a time, because two measurements at once would slow each other down. It ends the connection
/// of a coordinator that gives no order for a minute.
#[derive(Debug)]
pub struct Agent {
    endpoint: Endpoint,
    data: Data,
    holder: Arc<Holder>,
    knows_identities: bool,
    /// The longest time from an answer to the next order.
    pub(crate) patience: Duration,
}

/// The coordinator that an agent serves.
#[derive(Debug)]
struct Holder {
    clock: Clock,
    /// The coordinator's name, and since when the agent serves it.
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
        let knows_identities = credentials.are_verified();
        Ok(Self { endpoint, data, holder, knows_identities, patience: PATIENCE })
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
            let (knows_identities, patience) = (self.knows_identities, self.patience);
            let (shared, holder) = (Arc::clone(self.data.shared()), Arc::clone(&self.holder));
            tokio::spawn(async move {
                if let Some(connection) = handshake(incoming).await {
                    let limits = (knows_identities, patience);
                    serve_caller(&connection, shared, holder, limits).await;
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

/// Serves a caller until either side hangs up.
async fn serve_caller(
    connection: &Connection,
    shared: Arc<Shared>,
    holder: Arc<Holder>,
    (knows_identities, patience): (bool, Duration),
) {
    let certificate = Certificate::of_peer(connection);
    let role = certificate.as_ref().map(|certificate| certificate.role);
    if knows_identities && role != Some(Role::Operator) {
        let why = "measuring needs an identity with role operator; issue one with `racksum \
                   identity issue NAME --role operator`";
        connection.close(1u32.into(), why.as_bytes());
        return;
    }
    let Ok(Ok((mut send, mut recv))) = timeout(HANDSHAKE, connection.accept_bi()).await else {
        connection.close(1u32.into(), b"the coordinator gave no order");
        return;
    };
    let name = certificate.filter(|_| knows_identities).map(|certificate| certificate.name);
    let name = name.unwrap_or_else(|| "a coordinator without an identity".into());
    let caller = format!("{name} at {}", connection.remote_address());
    let shown = PeerText::of(&caller);
    let mut session = Session { shared, holder, patience, caller, flows: vec![], hold: None };
    // The first two end an order that is being carried out, and with the session its flows.
    let why = tokio::select! {
        _ = connection.closed() => None,
        () = silence(connection, SILENCE) => {
            Some(format!("nothing came from the coordinator for {} s", seconds(SILENCE)))
        }
        why = session.serve(&mut send, &mut recv) => why,
    };
    // The agent is free before the coordinator hears of it.
    drop(session);
    // A read from a coordinator that has hung up fails too.
    if let Some(why) = why.filter(|_| connection.close_reason().is_none()) {
        HANG_UPS.note(|left_out| tracing::warn!(caller = %shown, left_out, "hung up: {why}"));
        connection.close(1u32.into(), why.as_bytes());
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
    /// The longest time from an answer to the next order.
    patience: Duration,
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
    /// Carries out orders until the coordinator hangs up. Returns the reason why the agent should
    /// hang up, if it is the first to do so.
    async fn serve(&mut self, send: &mut SendStream, recv: &mut RecvStream) -> Option<String> {
        loop {
            let order = match timeout(self.patience, frames::recv::<Order>(recv)).await {
                Ok(Ok(order)) => order?,
                Ok(Err(error)) => return Some(format!("cannot read an order: {error}")),
                Err(_) => {
                    let seconds = self.patience.as_secs();
                    return Some(format!("the coordinator gave no order for {seconds} s"));
                }
            };
            if let Some(answer) = self.handle(order).await
                && !answered(send, &answer).await
            {
                return None;
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

    /// Carries out an order. Returns the answer, if the order has one.
    async fn handle(&mut self, order: Order) -> Option<Answer> {
        let answer = match order {
            Order::Stay if self.hold.is_some() => return None,
            Order::Ping { flow, .. } | Order::Train { flow, .. } | Order::Report { flow, .. }
                if !self.flows.contains(&flow) =>
            {
                ended()
            }
            Order::Hello { version } if version == VERSION => self.hello(),
            Order::Hello { version } => refused(format!(
                "the agent speaks version {VERSION} and the coordinator version {version}; \
                 install the same release on both"
            )),
            _ if self.hold.is_none() => refused(NO_HELLO),
            Order::Expect { flow, key, peer } => self.expect(flow, &key, peer),
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
            Order::Report { flow, train } => self.report(flow, train).await,
            Order::Stay => refused(NO_HELLO),
        };
        Some(answer)
    }

    fn expect(&mut self, flow: u64, key: &Key, peer: SocketAddr) -> Answer {
        let nonce = match new_key() {
            Ok(Key(random)) => random.into_iter().take(8),
            Err(error) => return refused(error.to_string()),
        };
        let nonce = nonce.fold(0, |nonce, byte| nonce << 8 | u64::from(byte));
        if !self.shared.flows.add(flow, key, peer, nonce) {
            return refused("the flow exists, or the agent has too many flows");
        }
        self.flows.push(flow);
        Answer::Expected
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

    /// Waits until a train of `train` datagrams has ended, and reports what arrived of the flow.
    async fn report(&mut self, flow: u64, train: u32) -> Answer {
        let (mut last, mut quiet) = (0, 0);
        for _ in 0..MOST_CHECKS {
            let Some(arrived) = self.shared.flows.with(flow, |flow| flow.train_arrived()) else {
                return ended();
            };
            quiet = if arrived == last { quiet + 1 } else { 0 };
            // Orders may overtake the first datagram.
            let most_quiet = if arrived == 0 { MOST_QUIET_AT_FIRST } else { MOST_QUIET };
            if arrived >= train || quiet > most_quiet {
                break;
            }
            last = arrived;
            sleep(CHECK).await;
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

const fn seconds(span: Span) -> u64 {
    span.as_millis() / 1000
}

const NO_HELLO: &str = "the first order must be a hello";

/// The log limit for callers that fail the handshake.
static HANDSHAKE_FAILURES: LogLimit = LogLimit::new(3);
/// The log limit for coordinators that an agent stops serving.
static HANG_UPS: LogLimit = LogLimit::new(10);
/// Silence after which an agent serves other coordinators: ten keep-alives of the connection.
pub(crate) const SILENCE: Span = Span::from_secs(5);
/// Time without an order after which an agent serves other coordinators.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// The greatest number of connected callers.
const MOST_CALLERS: usize = 16;
/// The time limit of a handshake, and of opening the stream after it.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Intervals between pings in microseconds. The shortest is 11 Mbit/s; with the longest, a flow's
/// pings end after 100 s.
const INTERVALS_US: RangeInclusive<u32> = 100..=10_000;
/// The longest train in milliseconds.
const MOST_MILLIS: u32 = 2_000;
/// The time between two checks whether a train has ended.
const CHECK: Duration = Duration::from_millis(10);
/// The greatest number of checks.
const MOST_CHECKS: u32 = 1_000;
/// A train has ended after this many checks in which nothing arrived.
const MOST_QUIET: u32 = 5;
/// The number of such checks before the first datagram: half a second, as for echoes.
const MOST_QUIET_AT_FIRST: u32 = 50;
