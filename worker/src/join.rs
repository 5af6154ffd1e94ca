//! Joining a job, over one control connection to each of its aggregators. The connections stay open
//! until the rank leaves or the job moves.

use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use bytes::BytesMut;
use racksum_net::auth::Opener;
use racksum_net::clock::Clock;
use racksum_net::interface::max_datagram;
use racksum_net::log_limit::LogLimit;
use racksum_net::multicast::Multicast;
use racksum_net::udp::{self, RECV_BATCH, RECV_CAPACITY, RecvRing, UdpConfig, UdpSocket};
use racksum_proto::auth::DataAuth;
use racksum_proto::control::{CONTROL_VERSION, FromAggregator, FromWorker, Join, Resume, Welcome};
use racksum_proto::ids::Rank;
use racksum_proto::rank_list::{listed, named};
use racksum_proto::time::{Span, Time};
use racksum_proto::wire::Header;

use crate::control::{Control, Controls, Event, Mailbox, patience};
use crate::error::superseded;
use crate::error::{ConnectError, not_joined};
use crate::join_message::join_message;
use crate::options::ConnectOptions;
use crate::peer_poll::{JoinState, PeerPoll};
use crate::proof::Proof;
use crate::route::{Route, data_addr, find_ways, mtu_of};

/// How often a joining worker checks for multicast pings.
const PING_POLL: Duration = Duration::from_millis(2);
/// The time limit for an aggregator to release a rank that wants to withdraw. When the limit has
/// passed, the rank stays. The limit is shorter than the time for which an aggregator with a queue
/// keeps the place of a released rank.
const FREE_TIMEOUT: Span = Span::from_secs(3);
/// Rate limits for log lines that an aggregator can trigger by changing its messages again and
/// again.
static QUEUED: LogLimit = LogLimit::new(16);
static WAITING: LogLimit = LogLimit::new(64);
static NO_GROUP: LogLimit = LogLimit::new(4);
/// The maximum number of aggregators of a job. The worker waits on their multicast sockets, the
/// data socket and a waker in one system call, which takes at most 64 file descriptors.
const MAX_AGGREGATORS: usize = 62;

/// The connections and grants of a worker after every rank of its job has joined.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) controls: Controls,
    /// Events that arrived before every rank had joined, and that concern the running job.
    pub(crate) early: VecDeque<(u8, Event)>,
    pub(crate) socket: UdpSocket,
    /// Sockets that are members of the multicast groups for results.
    pub(crate) groups: Vec<UdpSocket>,
    /// The address and the grant of each aggregator.
    pub(crate) welcomes: Vec<(SocketAddr, Welcome)>,
}

/// The outcome of joining.
#[expect(clippy::large_enum_variant, reason = "there is one at a time")]
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Every rank has joined.
    Complete(Session),
    /// The rank has left, because other ranks of its job wait at the set of aggregators with this
    /// index.
    Elsewhere(usize),
}

impl Session {
    fn send_to_all(&self, message: &FromWorker) {
        self.controls.iter().for_each(|control| control.send(message.clone()));
    }
}

/// Joins a job at all of `aggregators`. Returns once every rank has joined, or earlier if
/// `peer_poll` finds other ranks at another set. A job that moves from other aggregators resumes at
/// the op in `resume`.
pub(crate) fn join(
    options: &ConnectOptions,
    aggregators: &[String],
    resume: Option<&Resume>,
    peer_poll: &mut PeerPoll<'_>,
    mailbox: &mut Mailbox,
) -> Result<Outcome, ConnectError> {
    check(options, aggregators)?;
    let ways = find_ways(aggregators, options.interface.as_deref())?;
    join_by(options, aggregators, ways, resume, peer_poll, mailbox)
}

/// Joins a job, trying the entries of `ways` in order until an aggregator answers. Each entry holds
/// one route to each aggregator.
pub(crate) fn join_by(
    options: &ConnectOptions,
    aggregators: &[String],
    ways: Vec<Vec<Route>>,
    resume: Option<&Resume>,
    peer_poll: &mut PeerPoll<'_>,
    mailbox: &mut Mailbox,
) -> Result<Outcome, ConnectError> {
    try_ways(options, aggregators, &ways, resume.is_some(), |options, routes| {
        join_at(options, routes, resume, peer_poll, mailbox)
    })
}

/// Calls `try_at` with the entries of `ways` in order until an aggregator answers, and with the
/// time limit for the answers. `moves` says whether the job can move elsewhere instead.
pub(crate) fn try_ways<T>(
    options: &ConnectOptions,
    aggregators: &[String],
    ways: &[Vec<Route>],
    moves: bool,
    mut try_at: impl FnMut((&ConnectOptions, Span), &[Route]) -> Result<T, ConnectError>,
) -> Result<T, ConnectError> {
    let clock = Clock::start();
    let (began, mut tried) = (clock.now(), Vec::new());
    let is_address = |host: &String| host.parse::<SocketAddr>().is_ok();
    let is_named = !aggregators.iter().all(is_address);
    for (at, routes) in ways.iter().enumerate() {
        let passed = Duration::from_nanos(clock.now().since(began).0);
        let join_timeout = options.join_timeout.saturating_sub(passed);
        let options = ConnectOptions { join_timeout, ..options.clone() };
        let patience = patience(&options, moves, ways.len() - at);
        match try_at((&options, patience), routes) {
            Err(error) if error.is_of_address() && is_named => {
                let is_answered = error.is_answered();
                tried.push(error);
                if is_answered {
                    break;
                }
            }
            joined => return joined,
        }
    }
    Err(ConnectError::Named { name: aggregators.join("+"), tried })
}

/// The connections to aggregators to which the data path is proven, and the join for each.
pub(crate) struct Reached {
    pub(crate) controls: Controls,
    socket: UdpSocket,
    pub(crate) joins: Vec<Join>,
}

/// Connects over these routes, one to each aggregator, and proves the data path. All aggregators
/// must answer within `patience`.
pub(crate) fn reach(
    (options, patience): (&ConnectOptions, Span),
    routes: &[Route],
    resume: Option<&Resume>,
    mailbox: &mut Mailbox,
) -> Result<Reached, ConnectError> {
    mailbox.next_session();
    let bind = data_addr(routes)?;
    let datagram = max_datagram(mtu_of(routes, options.mtu)?, bind.is_ipv6())?;
    let socket = UdpSocket::open(&UdpConfig::new(bind))?;
    if let Some(shortfall) = socket.report().shortfall() {
        tracing::warn!("{shortfall}");
    }
    let stripes = u8::try_from(routes.len()).unwrap_or(u8::MAX);
    let wishes: Vec<Join> = (0..)
        .map(|place| join_message(options, (place, stripes), resume))
        .take(routes.len())
        .collect();
    let each = routes.iter().zip(&wishes);
    let start = |(route, wish)| Control::start(route, wish, (options, patience), mailbox);
    let started = each.map(start);
    let controls = started.collect::<Result<Controls, _>>()?;
    let proof = Proof { options, routes, controls: &controls, socket: &socket };
    let max_datagram = proof.run(datagram, mailbox)?;
    let join = |(route, wish): (&Route, Join)| Join {
        data_ports: vec![socket.local_addr().port()],
        receive_buffer: u32::try_from(socket.report().got_receive).unwrap_or(u32::MAX),
        max_datagram,
        multicast: options.multicast && route.interface.is_some(),
        ..wish
    };
    let joins = routes.iter().zip(wishes).map(join).collect();
    Ok(Reached { controls, socket, joins })
}

/// Joins over these routes, one to each aggregator. All aggregators must answer within `patience`.
fn join_at(
    (options, patience): (&ConnectOptions, Span),
    routes: &[Route],
    resume: Option<&Resume>,
    peer_poll: &mut PeerPoll<'_>,
    mailbox: &mut Mailbox,
) -> Result<Outcome, ConnectError> {
    let reached = reach((options, patience), routes, resume, mailbox)?;
    let Reached { controls, socket, joins } = reached;
    for (control, join) in controls.iter().zip(joins) {
        control.send(FromWorker::Join(join.clone()));
        for rank in &options.also {
            control.send(FromWorker::AddRank(Join { rank: *rank, ..join.clone() }));
        }
    }
    let (groups, welcomes, early) = Default::default();
    let mut session = Session { controls, early, socket, groups, welcomes };
    let parts = routes.iter().enumerate();
    let parts = parts.map(|(place, to)| Joining::new(options, place, to)).collect();
    Ok(match complete(&mut session, parts, peer_poll, mailbox)? {
        Some(place) => Outcome::Elsewhere(place),
        None => Outcome::Complete(session),
    })
}

/// Waits until every aggregator reports that ops may start. Waits for all of them at the same time,
/// because each aggregator tests its multicast group for a limited time only. Returns the index of
/// another set if `peer_poll` finds other ranks there and all aggregators release this rank.
fn complete(
    session: &mut Session,
    mut parts: Vec<Joining<'_>>,
    peer_poll: &mut PeerPoll<'_>,
    mailbox: &mut Mailbox,
) -> Result<Option<usize>, ConnectError> {
    let clock = Clock::start();
    let (started, mut goal) = (clock.now(), None);
    while parts.iter().any(|part| !part.ready) {
        let received = mailbox.recv(Some(PING_POLL));
        if mailbox.closed.is_some() {
            return Err(ConnectError::GivenUp);
        }
        if let Some((place, event)) = received {
            match parts.get_mut(usize::from(place)).filter(|part| !part.ready) {
                Some(part) => {
                    part.take(event, session)?;
                    mailbox.awaited.set(awaited(&parts));
                }
                None => session.early.push_back((place, event)),
            }
        }
        parts.iter_mut().for_each(|part| part.report_ping(session));
        goal = pursue(goal, &mut parts, session, peer_poll, clock.now());
        if let Some(goal) = &goal
            && parts.iter().all(|part| part.unanswered == 0)
        {
            return Ok(Some(goal.place));
        }
        let waited = Duration::from_nanos(clock.now().since(started).0);
        let is_late = |part: &Joining<'_>| !part.ready && waited > part.options.join_timeout;
        if parts.iter().any(is_late) {
            let elsewhere = String::new();
            if let Some(why) = parts.iter().find_map(|part| part.queued.clone()) {
                return Err(ConnectError::NoRoom { why, waited, elsewhere });
            }
            let missing =
                parts.into_iter().map(|part| part.missing).find(|ranks| !ranks.is_empty());
            let missing = missing.unwrap_or_default();
            return Err(ConnectError::Incomplete { missing, waited, elsewhere });
        }
    }
    for Joining { route, welcome, group, .. } in parts {
        let early = || ConnectError::Protocol("it sent ready before welcome".into());
        session.welcomes.push((route.to, welcome.ok_or_else(early)?));
        session.groups.extend(group);
    }
    Ok(None)
}

/// Describes what a rank waits for at its aggregators.
fn awaited(parts: &[Joining<'_>]) -> String {
    let gathering = parts.iter().filter(|part| part.welcome.is_none());
    let ranks: BTreeSet<u16> = gathering.flat_map(|part| &part.missing).copied().collect();
    match parts.iter().find_map(|part| part.queued.as_ref()) {
        Some(why) => format!("room: {why}"),
        None if ranks.is_empty() => "the start of the job".into(),
        None => named(ranks),
    }
}

pub(crate) fn check(options: &ConnectOptions, aggregators: &[String]) -> Result<(), ConnectError> {
    if aggregators.is_empty() {
        return Err(ConnectError::of_aggregators(
            "no aggregator is given; set `aggregator` to HOST:PORT",
        ));
    }
    if aggregators.len() > MAX_AGGREGATORS {
        return Err(ConnectError::of_aggregators(format!(
            "{} aggregators are listed; a job can have at most {MAX_AGGREGATORS}",
            aggregators.len()
        )));
    }
    check_name(options)?;
    if options.rank >= options.world {
        let ConnectOptions { rank, world, .. } = options;
        let why =
            format!("rank {rank} must be below the number of ranks, {world}; ranks count from 0");
        return Err(ConnectError::Arguments { options: &["rank", "world"], why });
    }
    Ok(())
}

/// Checks the name of a job.
pub(crate) fn check_name(options: &ConnectOptions) -> Result<(), ConnectError> {
    let refused = |why| ConnectError::Arguments { options: &["job"], why };
    options.job_name().check().map_err(refused)
}

/// Checks that the grant has keys if and only if data is authenticated, and that the authentication
/// mode is the one that the rank asked for.
fn check_auth(granted: &Welcome, wanted: Option<DataAuth>) -> Result<(), ConnectError> {
    let Welcome { data_auth, ref keys, .. } = *granted;
    if (data_auth == DataAuth::None) != keys.is_none() {
        return Err(ConnectError::Protocol(format!("its keys do not match data auth {data_auth}")));
    }
    match wanted {
        // The join asked for this mode, so an honest aggregator would have refused the rank.
        Some(wanted) if wanted != data_auth => Err(ConnectError::Protocol(format!(
            "it granted data auth {data_auth} instead of {wanted}"
        ))),
        _ => Ok(()),
    }
}

/// Returns the addresses of an aggregator's shards.
pub(crate) fn shard_addrs(
    aggregator: SocketAddr,
    welcome: &Welcome,
) -> impl Iterator<Item = SocketAddr> + '_ {
    welcome.data_ports.iter().map(move |port| SocketAddr::new(aggregator.ip(), *port))
}

/// The set that a rank wants to move to, and the state of the rank when it found others there.
struct Goal {
    place: usize,
    state: JoinState,
    /// The time at which the rank asked to withdraw.
    asked: Time,
}

/// Asks to withdraw once other ranks are found at another set, and reports to the aggregators if
/// the rank stays after all.
fn pursue(
    goal: Option<Goal>,
    parts: &mut [Joining<'_>],
    session: &Session,
    peer_poll: &mut PeerPoll<'_>,
    now: Time,
) -> Option<Goal> {
    // wire: W-67
    let state = state(parts);
    let Some(goal) = goal else {
        let place = peer_poll.seen(state)?;
        session.send_to_all(&FromWorker::Withdraw);
        parts.iter_mut().for_each(|part| part.unanswered += 1);
        return Some(Goal { place, state, asked: now });
    };
    // The rank stays in three cases: an aggregator has begun the job, so all ranks are here; the
    // rank has received a place here, where others may join it; or an aggregator does not answer
    // while others reserve a place for the rank.
    let is_held = parts.iter().any(|part| part.unanswered > 0);
    if goal.state != state || is_held && now.since(goal.asked) >= FREE_TIMEOUT {
        session.send_to_all(&FromWorker::Stay);
        peer_poll.restart();
        return None;
    }
    Some(goal)
}

/// Returns the state of a rank across all of its aggregators.
fn state(parts: &[Joining<'_>]) -> JoinState {
    if parts.iter().any(|part| part.welcome.is_some() || !(part.waits || part.queued.is_some())) {
        return JoinState::Busy;
    }
    let queued = parts.iter().any(|part| part.queued.is_some());
    if queued { JoinState::Queued } else { JoinState::Waits }
}

/// The progress of joining at one aggregator.
struct Joining<'a> {
    options: &'a ConnectOptions,
    /// The aggregator's index among those of the job.
    place: usize,
    route: &'a Route,
    welcome: Option<Welcome>,
    group: Option<UdpSocket>,
    ping_arrived: bool,
    missing: Vec<u16>,
    /// Whether the aggregator has a place for the rank and waits for other ranks.
    waits: bool,
    /// The number of withdraw requests that the aggregator has not answered.
    unanswered: u32,
    /// The aggregator's reason why the job waits for room.
    queued: Option<String>,
    /// Whether the aggregator has reported that ops may start.
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
            ping_arrived: false,
            missing: Vec::new(),
            waits: false,
            unanswered: 0,
            queued: None,
            ready: false,
        }
    }

    /// Reports to the aggregator once a multicast ping has arrived.
    fn report_ping(&mut self, session: &Session) {
        if !self.ping_arrived && self.pinged() {
            self.ping_arrived = true;
            session.controls[self.place].send(FromWorker::PingArrived);
        }
    }

    /// Handles an event of the aggregator.
    fn take(&mut self, event: Event, session: &mut Session) -> Result<(), ConnectError> {
        let message = match event {
            Event::Received(message) => message,
            // Name the missing ranks, which may be the reason why the job has failed.
            Event::Closed(ConnectError::Closed(why)) if !self.missing.is_empty() => {
                let missing = not_joined(&self.missing);
                return Err(ConnectError::Closed(format!("{why}; until then {missing}")));
            }
            Event::Closed(error) => return Err(error),
            // A trial belongs to a session that has ended.
            Event::Tried { .. } | Event::Sought { .. } => return Ok(()),
        };
        match message {
            FromAggregator::Refused { reason } | FromAggregator::RefusedRank { reason, .. } => {
                return Err(ConnectError::Refused(reason));
            }
            FromAggregator::WrongVersion { speaks } => {
                return Err(ConnectError::Version { theirs: speaks, own: CONTROL_VERSION });
            }
            // `run_session` handles lifelines, and the proof of the data path is over.
            FromAggregator::Lifeline { .. }
            | FromAggregator::Prove { .. }
            | FromAggregator::PingSizes { .. } => {}
            FromAggregator::Queued { before, why } => self.wait_for_room(before, why),
            FromAggregator::Waiting { missing, .. } => self.wait_for_ranks(missing),
            FromAggregator::MayLeave => self.unanswered = self.unanswered.saturating_sub(1),
            FromAggregator::Present { .. }
            | FromAggregator::Status { .. }
            | FromAggregator::Room
            | FromAggregator::Moved { .. } => {
                return Err(ConnectError::Protocol("it sent an answer without a request".into()));
            }
            FromAggregator::PrepareMove { .. }
            | FromAggregator::MoveNow { .. }
            | FromAggregator::CancelMove { .. } => {
                let why = "it moved a job that had not started";
                return Err(ConnectError::Protocol(why.into()));
            }
            FromAggregator::Welcome(granted) if !granted.is_sound() => {
                let why = "its grant is invalid";
                return Err(ConnectError::Protocol(why.into()));
            }
            FromAggregator::Welcome(granted) => self.start(granted, session)?,
            FromAggregator::Ready { multicast } => {
                if !multicast {
                    self.group = None;
                }
                self.ready = true;
            }
            FromAggregator::ParentLost { reason } => return Err(ConnectError::Closed(reason)),
            // The engine needs this message once ops run.
            FromAggregator::ContinueWithout(_) => {
                let place = u8::try_from(self.place).unwrap_or(u8::MAX);
                session.early.push_back((place, Event::Received(message)));
            }
            FromAggregator::PeerLost { ranks, why } => {
                let ranks = ranks.into_iter().map(Rank).collect();
                return Err(ConnectError::PeerLost { ranks, why });
            }
            FromAggregator::Drain => {
                return Err(ConnectError::Draining);
            }
            FromAggregator::Superseded { why, .. } => {
                return Err(ConnectError::Refused(superseded(&why)));
            }
        }
        Ok(())
    }

    fn wait_for_room(&mut self, before: u16, why: String) {
        if self.queued.as_ref() != Some(&why) {
            QUEUED.note(|left_out| {
                tracing::warn!(before, left_out, "waiting for room: {why}");
            });
        }
        self.queued = Some(why);
    }

    fn wait_for_ranks(&mut self, mut missing: Vec<u16>) {
        (self.waits, self.queued) = (true, None);
        // A rank that asked to withdraw is itself among the missing ranks.
        missing.retain(|rank| *rank != self.options.rank);
        if missing != self.missing {
            WAITING.note(|left_out| {
                let missing = listed(missing.iter().copied());
                tracing::info!(missing, left_out, "waiting for ranks");
            });
        }
        self.missing = missing;
    }

    /// Stores the grant, and joins its multicast group.
    fn start(&mut self, granted: Welcome, session: &Session) -> Result<(), ConnectError> {
        check_auth(&granted, self.options.data_auth)?;
        self.queued = None;
        if let (Some(group), Some(interface)) = (granted.group, &self.route.interface) {
            let group = Multicast { group, interface: interface.clone() };
            let buffer = session.socket.report().asked_receive;
            let log = |error: &_| {
                NO_GROUP.note(|left_out| {
                    tracing::warn!(%error, left_out, "cannot join the multicast group; the \
                                                      aggregator sends copies instead")
                });
            };
            // Without the group, the aggregator sends copies to this rank.
            self.group = UdpSocket::open_member(&group, buffer).inspect_err(log).ok();
        }
        self.welcome = Some(granted);
        Ok(())
    }

    /// Returns whether a multicast ping has arrived.
    fn pinged(&self) -> bool {
        let (Some(group), Some(welcome)) = (&self.group, &self.welcome) else { return false };
        if udp::wait(&[group.as_fd()], Some(Span::ZERO)).unwrap_or(0) == 0 {
            return false;
        }
        let mut ring = RecvRing::new();
        let mut buffers = [(); RECV_BATCH].map(|()| BytesMut::with_capacity(RECV_CAPACITY));
        let count = group.recv(&mut ring, &mut buffers).unwrap_or(0);
        ring.received().iter().zip(&mut buffers[..count]).any(|(meta, buffer)| {
            let mut datagrams = buffer.chunks_mut(meta.stride);
            datagrams.any(|datagram| self.is_ping(welcome, datagram, meta.from))
        })
    }

    /// Returns whether a datagram is a ping for this rank's job, and not for another job that
    /// shares the group. The ping must come from a shard's address, because the worker accepts
    /// results only from there.
    fn is_ping(&self, welcome: &Welcome, datagram: &mut [u8], from: SocketAddr) -> bool {
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
        let ping = Header::ping(welcome.job, generation, shard);
        opened.is_ok_and(|message| Header::decode(message).is_ok_and(|(header, _)| header == ping))
    }
}

#[cfg(test)]
pub(crate) mod tests;
