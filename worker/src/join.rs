//! Joining a job: one control connection to each aggregator, for as long as the worker lives.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::BytesMut;
use racksum_net::NetError;
use racksum_net::auth::Opener;
use racksum_net::clock::Clock;
use racksum_net::interface::{Interface, interface_of, local_addr_towards, max_datagram};
use racksum_net::multicast::{Multicast, open_member};
use racksum_net::quic::{Credentials, connect, frames, lifeline, not_connected};
use racksum_net::udp::{self, RECV_BATCH, RECV_CAPACITY, RecvRing, UdpConfig, UdpSocket};
use racksum_proto::auth::DataAuth;
use racksum_proto::control::{CONTROL_VERSION, FromAggregator, FromWorker, Join, Welcome};
use racksum_proto::error::OpError;
use racksum_proto::ids::Rank;
use racksum_proto::time::Span;
use racksum_proto::wire::Header;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::client::span;
use crate::error::ConnectError;
use crate::options::ConnectOptions;

/// How long an aggregator may take to answer a connection.
const CONNECT_PATIENCE: Span = Span::from_secs(5);
/// How often a worker looks for multicast probes while it joins.
const PROBE_POLL: Duration = Duration::from_millis(2);
/// Most aggregators of a job: their groups, the data socket and a waker are waited for at once.
const MAX_AGGREGATORS: usize = 62;

/// What a control connection tells the worker.
#[derive(Debug)]
pub(crate) enum Event {
    /// A message.
    Said(FromAggregator),
    /// The connection is over.
    Closed(ConnectError),
}

/// A control connection, served by a thread of its own.
#[derive(Debug)]
pub(crate) struct Control {
    say: UnboundedSender<FromWorker>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Connects and joins; what is heard goes to `events`.
    fn start(
        to: SocketAddr,
        join: Join,
        options: &ConnectOptions,
        events: Sender<Event>,
    ) -> Result<Self, ConnectError> {
        let credentials = Credentials::new(options.identity.as_deref(), options.insecure)?;
        // Less than the time to join: that nobody answers is the better reason.
        let patience = Span::from_millis(span(options.join_timeout).as_millis() * 9 / 10);
        let patience = patience.min(CONNECT_PATIENCE);
        let (say, words) = unbounded_channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new().name("control".into()).spawn(move || {
            runtime.block_on(async {
                let closed = converse(to, join, credentials, patience, words, &events).await;
                // Nobody listens any more once the worker is gone.
                drop(events.send(Event::Closed(closed)));
            });
        })?;
        Ok(Self { say, thread: Some(thread) })
    }

    fn say(&self, word: FromWorker) {
        // A connection that is closed has said so.
        drop(self.say.send(word));
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.say(FromWorker::Leave);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// The conversation of one control connection; returns why it ended.
async fn converse(
    to: SocketAddr,
    join: Join,
    credentials: Credentials,
    patience: Span,
    mut words: UnboundedReceiver<FromWorker>,
    events: &Sender<Event>,
) -> ConnectError {
    let connection = match connect(to, &credentials, patience).await {
        Ok(connection) => connection,
        Err(error) => return error.into(),
    };
    // An aggregator looks at this side's certificate last, when the connection seems made.
    let closed = |why: String| match connection
        .quic()
        .close_reason()
        .map(|cause| not_connected(to, cause))
    {
        Some(error @ NetError::NotBelieved { .. }) => error.into(),
        _ => ConnectError::Closed(why),
    };
    let (mut send, mut recv) = match connection.quic().open_bi().await {
        Ok(streams) => streams,
        Err(error) => return closed(error.to_string()),
    };
    if let Err(error) = frames::send(&mut send, &FromWorker::Join(join)).await {
        return closed(error.to_string());
    }
    let hear = events.clone();
    let (offered, lifeline) = tokio::sync::oneshot::channel();
    let mut offered = Some(offered);
    let lifeline = async move {
        let (port, token) = lifeline.await.ok()?;
        lifeline::lay(to, port, token).await
    };
    let quic = connection.quic().clone();
    let mut dead = std::pin::pin!(lifeline::dead(&quic, lifeline));
    // A task of its own, since reading a frame must not be cancelled half-way.
    let mut reader = tokio::spawn(async move {
        loop {
            match frames::recv::<FromAggregator>(&mut recv).await {
                Ok(Some(FromAggregator::Lifeline { port, token })) => {
                    // There is one, and nobody waits for another.
                    if let Some(offered) = offered.take() {
                        offered.send((port, token)).unwrap_or_default();
                    }
                }
                Ok(Some(message)) => {
                    if hear.send(Event::Said(message)).is_err() {
                        return "the worker is gone".to_owned();
                    }
                }
                Ok(None) => return "it ended the conversation".to_owned(),
                Err(error) => return error.to_string(),
            }
        }
    });
    loop {
        tokio::select! {
            why = &mut reader => return closed(why.unwrap_or_else(|error| error.to_string())),
            () = &mut dead => return ConnectError::Closed(DEAD.into()),
            word = words.recv() => {
                let word = word.unwrap_or(FromWorker::Leave);
                let last = word == FromWorker::Leave;
                let sent = frames::send(&mut send, &word).await;
                if last || sent.is_err() {
                    drop(send.finish());
                    // The aggregator's end of the stream says that it has read the last word.
                    drop(tokio::time::timeout(Duration::from_secs(1), &mut reader).await);
                    connection.close("left").await;
                    return ConnectError::Closed("left".into());
                }
            }
        }
    }
}

/// Why a conversation ends when the aggregator's host says that it serves no more.
const DEAD: &str = "its process has ended";

/// All that a worker has once its job is complete.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) controls: Vec<Control>,
    pub(crate) events: Vec<Receiver<Event>>,
    pub(crate) socket: UdpSocket,
    /// Members of the groups that results come by.
    pub(crate) groups: Vec<UdpSocket>,
    /// What each aggregator granted, and its address.
    pub(crate) welcomes: Vec<(SocketAddr, Welcome)>,
    pub(crate) clock: Clock,
}

/// The way to an aggregator.
#[derive(Debug)]
struct Route {
    to: SocketAddr,
    /// The address of this host that the way begins at.
    from: SocketAddr,
    interface: Option<Interface>,
}

impl Route {
    fn find(to: SocketAddr) -> Result<Self, ConnectError> {
        let local = local_addr_towards(to)?;
        // Not a new address: one of a link means nothing without the scope that `to` has.
        let mut from = to;
        from.set_ip(local);
        from.set_port(0);
        Ok(Self { to, from, interface: interface_of(local) })
    }
}

/// Checks that no two names mean one aggregator.
fn check_routes(routes: &[Route]) -> Result<(), ConnectError> {
    let mut seen = BTreeSet::new();
    match routes.iter().find(|route| !seen.insert(route.to)) {
        Some(Route { to, .. }) => {
            Err(ConnectError::Arguments(format!("the aggregator {to} is named twice")))
        }
        None => Ok(()),
    }
}

/// Where the data socket is bound. An aggregator takes a rank's data only from the address that
/// the rank's control connection has, so on a host with several ways the kernel chooses the
/// address for each.
fn data_addr(routes: &[Route]) -> Result<SocketAddr, ConnectError> {
    let Route { to, from, .. } = routes[0];
    if let Some(other) = routes.iter().find(|route| route.to.is_ipv6() != to.is_ipv6()) {
        return Err(ConnectError::Arguments(format!(
            "the aggregators {to} and {} are of two IP versions, and a worker has one data \
             socket; name all of them by IPv4 or all by IPv6",
            other.to
        )));
    }
    if routes.iter().all(|route| route.from == from) {
        return Ok(from);
    }
    let any: IpAddr =
        if to.is_ipv6() { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    Ok(SocketAddr::new(any, 0))
}

/// Joins a job at all its aggregators; returns once every rank is there.
pub(crate) fn join(options: &ConnectOptions) -> Result<Session, ConnectError> {
    check(options)?;
    if options.insecure {
        tracing::warn!("insecure: whoever answers at the aggregator's address is believed");
    }
    let clock = Clock::start();
    let routes = options
        .aggregators
        .iter()
        .map(|host| Route::find(resolve(host)?))
        .collect::<Result<Vec<_>, _>>()?;
    check_routes(&routes)?;
    let bind = data_addr(&routes)?;
    // A window is cut the same for all shards, so the narrowest way decides.
    let narrowest = routes.iter().filter_map(|route| Some(route.interface.as_ref()?.mtu)).min();
    if let (Some(mtu), Some(narrowest)) = (options.mtu, narrowest)
        && mtu > narrowest
    {
        return Err(ConnectError::Arguments(format!(
            "an MTU of {mtu} is above the {narrowest} of the interface towards the aggregator"
        )));
    }
    let mtu = options.mtu.or(narrowest).unwrap_or(1500);
    let datagram = max_datagram(mtu, bind.is_ipv6())?;
    let socket = UdpSocket::open(&UdpConfig::new(bind))?;
    if let Some(shortfall) = socket.report().shortfall() {
        tracing::warn!("{shortfall}");
    }
    let stripes = u8::try_from(routes.len()).unwrap_or(u8::MAX);
    let (mut controls, mut events) = (Vec::new(), Vec::new());
    for (place, route) in (0..).zip(&routes) {
        let join = Join {
            version: CONTROL_VERSION,
            job: options.job.clone(),
            generation: options.generation,
            rank: options.rank,
            world: options.world,
            lanes: options.lanes,
            data_port: socket.local_addr().port(),
            receive_buffer: u32::try_from(socket.report().got_receive).unwrap_or(u32::MAX),
            max_datagram: u16::try_from(datagram).unwrap_or(u16::MAX),
            multicast: options.multicast && route.interface.is_some(),
            stripe: (place, stripes),
            pool_slots: options.pool_slots,
            wait: options.wait,
            on_rank_loss: options.on_rank_loss,
        };
        let (tell, hear) = channel();
        controls.push(Control::start(route.to, join, options, tell)?);
        events.push(hear);
    }
    let mut session =
        Session { controls, events, socket, groups: Vec::new(), welcomes: Vec::new(), clock };
    complete(&mut session, options, &routes)?;
    Ok(session)
}

/// Waits until every aggregator says that ops may start: for all at once, since each gives its
/// group only so long to be heard.
fn complete(
    session: &mut Session,
    options: &ConnectOptions,
    routes: &[Route],
) -> Result<(), ConnectError> {
    let parts = routes.iter().enumerate();
    let mut parts: Vec<_> = parts.map(|(place, to)| Joining::new(options, place, to)).collect();
    let started = session.clock.now();
    while parts.iter().any(|part| !part.ready) {
        for part in parts.iter_mut().filter(|part| !part.ready) {
            part.step(session)?;
        }
        let waited = Duration::from_nanos(session.clock.now().since(started).0);
        if parts.iter().any(|part| !part.ready) && waited > options.join_timeout {
            if let Some(why) = parts.iter().find_map(|part| part.queued.clone()) {
                return Err(ConnectError::NoRoom { why, waited });
            }
            let missing =
                parts.into_iter().map(|part| part.missing).find(|ranks| !ranks.is_empty());
            return Err(ConnectError::Incomplete { missing: missing.unwrap_or_default(), waited });
        }
    }
    for Joining { route, welcome, group, .. } in parts {
        let early = || ConnectError::Protocol("ready before welcome".into());
        session.welcomes.push((route.to, welcome.ok_or_else(early)?));
        session.groups.extend(group);
    }
    Ok(())
}

fn check(options: &ConnectOptions) -> Result<(), ConnectError> {
    if options.aggregators.is_empty() {
        return Err(ConnectError::Arguments("no aggregator is named".into()));
    }
    if options.aggregators.len() > MAX_AGGREGATORS {
        return Err(ConnectError::Arguments(format!(
            "{} aggregators are named; a job has at most {MAX_AGGREGATORS}",
            options.aggregators.len()
        )));
    }
    if options.rank >= options.world {
        return Err(ConnectError::Arguments(format!(
            "rank {} is not below the world of {}; ranks count from 0",
            options.rank, options.world
        )));
    }
    Ok(())
}

/// Checks that datagrams are authenticated as they should be, and can be.
fn check_auth(granted: &Welcome, wanted: Option<DataAuth>) -> Result<(), ConnectError> {
    let Welcome { data_auth, ref keys, .. } = *granted;
    if (data_auth == DataAuth::None) != keys.is_none() {
        return Err(ConnectError::Protocol(format!("keys do not go with data auth {data_auth}")));
    }
    match wanted {
        Some(wanted) if wanted != data_auth => Err(ConnectError::Arguments(format!(
            "the aggregator authenticates data with {data_auth:?}, and {wanted:?} was asked for; \
             start both with the same --data-auth",
            data_auth = data_auth.name(),
            wanted = wanted.name()
        ))),
        _ => Ok(()),
    }
}

/// The addresses of an aggregator's shards.
pub(crate) fn shard_addrs(
    aggregator: SocketAddr,
    welcome: &Welcome,
) -> impl Iterator<Item = SocketAddr> + '_ {
    welcome.data_ports.iter().map(move |port| {
        // Not a new address: the scope of one of a link stays.
        let mut addr = aggregator;
        addr.set_port(*port);
        addr
    })
}

/// The address of `HOST:PORT`.
fn resolve(host: &str) -> Result<SocketAddr, ConnectError> {
    let unknown = |why: String| {
        ConnectError::Arguments(format!(
            "{host:?} is no address of an aggregator (HOST:PORT): {why}"
        ))
    };
    let mut addrs = host.to_socket_addrs().map_err(|error| unknown(error.to_string()))?;
    addrs.next().ok_or_else(|| unknown("the name has no address".into()))
}

/// One aggregator's part of joining.
struct Joining<'a> {
    options: &'a ConnectOptions,
    /// Which of the job's aggregators it is.
    place: usize,
    route: &'a Route,
    welcome: Option<Welcome>,
    group: Option<UdpSocket>,
    heard: bool,
    missing: Vec<u16>,
    /// What the job waits for room for.
    queued: Option<String>,
    /// The aggregator has said that ops may start.
    ready: bool,
}

impl<'a> Joining<'a> {
    const fn new(options: &'a ConnectOptions, place: usize, route: &'a Route) -> Self {
        Self {
            options,
            place,
            route,
            welcome: None,
            group: None,
            heard: false,
            missing: Vec::new(),
            queued: None,
            ready: false,
        }
    }

    /// Takes what the aggregator says next, if it says something soon.
    fn step(&mut self, session: &Session) -> Result<(), ConnectError> {
        match session.events[self.place].recv_timeout(PROBE_POLL) {
            Ok(Event::Said(message)) => self.take(message, session)?,
            Ok(Event::Closed(error)) => return Err(error),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(ConnectError::Closed("its thread ended".into()));
            }
        }
        if !self.heard && self.probed() {
            self.heard = true;
            session.controls[self.place].say(FromWorker::Heard);
        }
        Ok(())
    }

    fn take(&mut self, message: FromAggregator, session: &Session) -> Result<(), ConnectError> {
        match message {
            FromAggregator::Refused { reason } => return Err(ConnectError::Refused(reason)),
            // The conversation takes it.
            FromAggregator::Lifeline { .. } => {}
            FromAggregator::Queued { before, why } => {
                if self.queued.as_ref() != Some(&why) {
                    tracing::warn!(before, "waiting for room: {why}");
                }
                self.queued = Some(why);
            }
            FromAggregator::Waiting { missing, .. } => {
                self.queued = None;
                if missing != self.missing {
                    tracing::info!(?missing, "waiting for ranks");
                }
                self.missing = missing;
            }
            FromAggregator::Welcome(granted) => {
                check_auth(&granted, self.options.data_auth)?;
                self.queued = None;
                if let (Some(group), Some(interface)) = (granted.group, &self.route.interface) {
                    let group = Multicast { group, interface: interface.clone() };
                    let buffer = session.socket.report().asked_receive;
                    // Without the group this rank is sent copies.
                    self.group = open_member(&group, buffer)
                        .inspect_err(|error| tracing::warn!(%error, "no multicast"))
                        .ok();
                }
                self.welcome = Some(granted);
            }
            FromAggregator::Ready { multicast } => {
                if !multicast {
                    self.group = None;
                }
                self.ready = true;
            }
            FromAggregator::Without { rank, .. } => {
                return Err(ConnectError::Protocol(format!(
                    "rank {rank} is lost before it is there"
                )));
            }
            FromAggregator::PeerLost { ranks, why } => {
                let ranks = ranks.into_iter().map(Rank).collect();
                return Err(ConnectError::Closed(OpError::PeerLost { ranks, why }.to_string()));
            }
            FromAggregator::Superseded { by } => {
                return Err(ConnectError::Refused(format!(
                    "generation {} of the job has begun, and {} is over",
                    by.0, self.options.generation.0
                )));
            }
        }
        Ok(())
    }

    /// Whether a multicast probe has arrived.
    fn probed(&self) -> bool {
        let (Some(group), Some(welcome)) = (&self.group, &self.welcome) else { return false };
        if udp::wait(&[group.as_fd()], Some(Span::ZERO)).unwrap_or(0) == 0 {
            return false;
        }
        let mut ring = RecvRing::new();
        let mut buffers = [(); RECV_BATCH].map(|()| BytesMut::with_capacity(RECV_CAPACITY));
        let count = group.recv(&mut ring, &mut buffers).unwrap_or(0);
        ring.received().iter().zip(&mut buffers[..count]).any(|(meta, buffer)| {
            let mut datagrams = buffer.chunks_mut(meta.stride);
            datagrams.any(|datagram| self.is_probe(welcome, datagram, meta.from))
        })
    }

    /// Whether a datagram is a probe for this rank, and not another's that shares the group.
    /// Results are taken from these addresses only, so a probe from elsewhere shows nothing.
    fn is_probe(&self, welcome: &Welcome, datagram: &mut [u8], from: SocketAddr) -> bool {
        let first = self.place * welcome.data_ports.len();
        let mut shards = (first..).zip(shard_addrs(self.route.to, welcome));
        let shard = shards.find(|(_, addr)| *addr == from);
        let Some(shard) = shard.and_then(|(shard, _)| u8::try_from(shard).ok()) else {
            return false;
        };
        let generation = self.options.generation;
        let opener = welcome
            .keys
            .as_ref()
            .and_then(|keys| Opener::of_shard(welcome.data_auth, keys, generation, shard));
        let opened = match opener {
            Some(mut opener) => opener.open(datagram),
            None => Ok(datagram),
        };
        let probe = Header::probe(welcome.job, generation, shard);
        opened.is_ok_and(|message| Header::decode(message).is_ok_and(|(header, _)| header == probe))
    }
}

#[cfg(test)]
mod tests;
