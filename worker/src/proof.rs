//! The proof of the data path before a rank joins: full-size datagrams travel to every shard and
//! back. `racksum_proto::path` decides which pings to send, and when.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::time::Duration;

use bytes::BytesMut;
use racksum_net::clock::Clock;
use racksum_net::interface::max_datagram;
use racksum_net::udp::{self, RECV_BATCH, RECV_CAPACITY, RecvRing, UdpSocket};
use racksum_proto::auth::Key;
use racksum_proto::control::{CONTROL_VERSION, FromAggregator, FromWorker};
use racksum_proto::path::{Blocked, COMMON_MTUS, Datagram, Obstacle, Passed, Prover, SMALL};
use racksum_proto::time::Span;

use crate::control::{Control, Event, Mailbox};
use crate::error::ConnectError;
use crate::options::ConnectOptions;
use crate::route::Route;

/// How often to check `join_timeout` while waiting for the aggregators.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// How long an aggregator may take to report which pings arrived.
const ARRIVED_PATIENCE: Duration = Duration::from_secs(1);

/// A proof of the paths to all aggregators of a job.
pub(crate) struct Proof<'a> {
    pub(crate) options: &'a ConnectOptions,
    pub(crate) routes: &'a [Route],
    pub(crate) controls: &'a [Control],
    pub(crate) socket: &'a UdpSocket,
}

/// The path to a shard.
struct Path {
    /// The index of the shard's aggregator.
    place: usize,
    shard: SocketAddr,
    token: Key,
    /// The IP address of this host, as the aggregator sees it.
    ip: IpAddr,
    /// The reason why the last ping could not be sent; `None` if it was sent.
    refused: Option<String>,
}

impl Proof<'_> {
    /// Returns the size of the largest datagrams that pass to every shard and back, in bytes; at
    /// most `wanted`.
    ///
    /// # Errors
    /// Returns [`ConnectError::Blocked`] if datagrams do not pass, or the reason why an aggregator
    /// ended the proof.
    pub(crate) fn run(&self, wanted: usize, mailbox: &mut Mailbox) -> Result<u16, ConnectError> {
        let mut paths = self.paths(mailbox)?;
        let wanted = u16::try_from(wanted).unwrap_or(u16::MAX);
        let is_ipv6 = self.socket.local_addr().is_ipv6();
        let size =
            |mtu| max_datagram(mtu, is_ipv6).map(|size| u16::try_from(size).unwrap_or(u16::MAX));
        let mut ladder = vec![SMALL];
        for mtu in COMMON_MTUS {
            ladder.push(size(mtu)?);
        }
        let lowest = size(COMMON_MTUS[COMMON_MTUS.len() - 1])?;
        // If the user chose an MTU, fail instead of lowering it.
        let least = if self.options.mtu.is_some() { wanted } else { lowest };
        let is_here = |route: &Route| route.to.ip().is_loopback();
        // A path within this host passes every size that its interface allows, so test only the
        // lowest size.
        let here = self.routes.iter().all(is_here);
        let (largest, least) = if here { (lowest, lowest) } else { (wanted, least) };
        let clock = Clock::start();
        let mut prover = Prover::new(clock.now(), paths.len(), largest, least, &ladder);
        let mut received = RecvBuffers::new();
        while !prover.is_over(clock.now()) {
            while let Some((shard, size)) = prover.poll_transmit(clock.now()) {
                paths[shard].send(self.socket, size);
            }
            let left = prover.poll_timeout().since(clock.now());
            received.wait(self.socket, left, &paths, &mut prover);
            self.check_mailbox(mailbox)?;
        }
        // wire: W-76
        self.check(prover.passed(), &paths, least, mailbox)?;
        let narrowest = prover.passed().iter().map(|passed| passed.size).min();
        let Some(narrowest) = narrowest.filter(|size| *size < largest) else { return Ok(wanted) };
        let aggregators = self.options.aggregators.join("+");
        tracing::warn!(
            "the path to {aggregators} passes datagrams of {narrowest} bytes, but the interface \
             allows {wanted}; the job sends datagrams of at most {narrowest} bytes"
        );
        Ok(narrowest)
    }

    /// Waits for the data ports, token and address from each aggregator, and returns the paths to
    /// all shards.
    fn paths(&self, mailbox: &mut Mailbox) -> Result<Vec<Path>, ConnectError> {
        let (clock, mut of_places) = (Clock::start(), vec![None; self.routes.len()]);
        let started = clock.now();
        while of_places.iter().any(Option::is_none) {
            let waited = Duration::from_nanos(clock.now().since(started).0);
            if waited > self.options.join_timeout {
                let (missing, elsewhere) = (Vec::new(), String::new());
                return Err(ConnectError::Incomplete { missing, waited, elsewhere });
            }
            match self.recv(POLL_INTERVAL, mailbox)? {
                Some((place, FromAggregator::Prove { data_ports, token, ip })) => {
                    if let Some(of_place) = of_places.get_mut(place) {
                        *of_place = Some((data_ports, token, ip));
                    }
                }
                Some((_, other)) => return Err(out_of_turn(&other)),
                None => {}
            }
        }
        let mut paths = Vec::new();
        for (place, (route, of_place)) in self.routes.iter().zip(of_places).enumerate() {
            let Some((data_ports, token, ip)) = of_place else { continue };
            paths.extend(data_ports.into_iter().map(|port| {
                let shard = SocketAddr::new(route.to.ip(), port);
                Path { place, shard, token, ip, refused: None }
            }));
        }
        Ok(paths)
    }

    /// Checks that datagrams of `least` bytes pass on all paths. If not, asks an aggregator which
    /// pings arrived, to find the cause.
    fn check(
        &self,
        passed: &[Passed],
        paths: &[Path],
        least: u16,
        mailbox: &mut Mailbox,
    ) -> Result<(), ConnectError> {
        let port = self.socket.local_addr().port();
        let find = |arrived: &[u16]| {
            let arrived = arrived.iter().copied().chain(std::iter::repeat(0));
            let mut each = paths.iter().zip(passed).zip(arrived);
            each.find_map(|((path, passed), arrived)| {
                let caller = SocketAddr::new(path.ip, port);
                let blocked = Blocked::find(path.shard, caller, *passed, least, arrived)?;
                Some((blocked, path))
            })
        };
        let Some((_, path)) = find(&[]) else { return Ok(()) };
        let place = path.place;
        self.controls[place].send(FromWorker::AskPingSizes);
        let mut arrived = vec![0; paths.len()];
        if let Some((_, FromAggregator::PingSizes { sizes })) =
            self.recv(ARRIVED_PATIENCE, mailbox)?
        {
            let of_place = paths.iter().zip(&mut arrived).filter(|(path, _)| path.place == place);
            of_place.zip(sizes).for_each(|((_, arrived), size)| *arrived = size);
        }
        match find(&arrived) {
            Some((Blocked { what: Obstacle::Up, shard, .. }, Path { refused: Some(why), .. })) => {
                Err(ConnectError::Blocked(format!(
                    "this host cannot send to the aggregator's data port {shard} (UDP): {why}; \
                     check the firewall and routes of this host"
                )))
            }
            Some((blocked, _)) => Err(ConnectError::Blocked(blocked.to_string())),
            None => Ok(()),
        }
    }

    /// Waits up to `within` for a message from an aggregator.
    fn recv(
        &self,
        within: Duration,
        mailbox: &mut Mailbox,
    ) -> Result<Option<(usize, FromAggregator)>, ConnectError> {
        let received = mailbox.recv(Some(within));
        if mailbox.closed.is_some() {
            return Err(ConnectError::GivenUp);
        }
        match received {
            None => Ok(None),
            Some((_, Event::Closed(error))) => Err(error),
            // A trial belongs to a session that has ended.
            Some((_, Event::Tried { .. } | Event::Sought { .. })) => Ok(None),
            Some((place, Event::Received(message))) => match message {
                FromAggregator::Refused { reason } => Err(ConnectError::Refused(reason)),
                FromAggregator::WrongVersion { speaks } => {
                    Err(ConnectError::Version { theirs: speaks, own: CONTROL_VERSION })
                }
                FromAggregator::Drain => Err(ConnectError::Draining),
                message => Ok(Some((usize::from(place), message))),
            },
        }
    }

    /// Returns an error if the attempt was cancelled, or if an aggregator closed the connection or
    /// sent an unexpected message. Does not wait.
    fn check_mailbox(&self, mailbox: &mut Mailbox) -> Result<(), ConnectError> {
        match self.recv(Duration::ZERO, mailbox)? {
            Some((_, other)) => Err(out_of_turn(&other)),
            None => Ok(()),
        }
    }
}

fn out_of_turn(message: &FromAggregator) -> ConnectError {
    ConnectError::Protocol(format!("it sent {message:?} during the path proof"))
}

impl Path {
    fn send(&mut self, socket: &UdpSocket, size: u16) {
        let mut datagram = Vec::new();
        Datagram { token: self.token, seen: None, size }.encode(&mut datagram);
        self.refused = socket.send_one(self.shard, &datagram).err().map(|error| error.to_string());
    }
}

/// The buffers for datagrams that the proof receives on the data socket.
struct RecvBuffers {
    ring: RecvRing,
    buffers: [BytesMut; RECV_BATCH],
}

impl RecvBuffers {
    fn new() -> Self {
        let buffers = [(); RECV_BATCH].map(|()| BytesMut::with_capacity(RECV_CAPACITY));
        Self { ring: RecvRing::new(), buffers }
    }

    /// Waits up to `limit`, at most 100 ms, for answers and passes them to the prover.
    fn wait(&mut self, socket: &UdpSocket, limit: Span, paths: &[Path], prover: &mut Prover) {
        let limit = limit.min(Span::from_millis(100));
        // Treat an error as readiness: the receive call then returns it and finds no answers.
        if udp::wait(&[socket.as_fd()], Some(limit)).unwrap_or(1) == 0 {
            return;
        }
        let Self { ring, buffers } = self;
        buffers.iter_mut().for_each(BytesMut::clear);
        let count = socket.recv(ring, buffers).unwrap_or(0);
        for (meta, buffer) in ring.received().iter().zip(&buffers[..count]) {
            for datagram in buffer.chunks(meta.stride.max(1)) {
                let Some(Datagram { token, seen: Some(seen), size }) = Datagram::decode(datagram)
                else {
                    continue;
                };
                // The worker takes sums from these addresses only, so an answer from another
                // address proves nothing.
                let is_of = |path: &Path| path.shard == meta.from && path.token == token;
                if let Some(shard) = paths.iter().position(is_of) {
                    prover.handle_answer(shard, size, seen);
                }
            }
        }
    }
}
