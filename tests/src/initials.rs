//! Callers that fall silent. Each caller proves that it receives packets (QUIC Retry), so that the
//! server begins a handshake, and then sends nothing more.
//!
//! The tests of the control port use this module, and `examples/initials.rs` floods an aggregator
//! on this host.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use quinn_proto::crypto::rustls::QuicClientConfig;
use quinn_proto::{
    ClientConfig, Connection, ConnectionHandle, DatagramEvent, Endpoint, EndpointConfig,
    EndpointEvent,
};
use racksum_net::quic::PROTOCOL;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::version::TLS13;

/// The settings of a flood.
#[derive(Debug, Clone)]
pub(crate) struct Flood {
    /// Address of the server.
    pub(crate) to: SocketAddr,
    /// Addresses of this host that the calls come from, in turn.
    pub(crate) from: Vec<IpAddr>,
    /// Number of first packets per second, over all addresses.
    pub(crate) rate: u32,
    /// Duration of the flood.
    pub(crate) lasts: Duration,
}

/// The counts of a flood.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Flooded {
    /// Number of first packets sent.
    pub(crate) calls: u64,
    /// Number of calls that the server answered with a Retry and that were then sent again.
    pub(crate) shown: u64,
}

impl Flood {
    /// Floods in this thread, until `lasts` has passed or `stop` returns true.
    pub(crate) fn run(&self, stop: impl Fn() -> bool) -> io::Result<Flooded> {
        let config = config();
        let callers = self.from.iter().map(|from| Caller::new(*from, self.to));
        let mut callers = callers.collect::<io::Result<Vec<_>>>()?;
        let (start, mut flooded) = (now(), Flooded::default());
        while start.elapsed() < self.lasts && !stop() {
            let due = start.elapsed().as_micros() * u128::from(self.rate) / 1_000_000;
            for _ in 0..BURST.min(due.saturating_sub(u128::from(flooded.calls))) {
                let next = usize::try_from(flooded.calls).unwrap_or(0) % callers.len();
                callers[next].call(&config)?;
                flooded.calls += 1;
            }
            for caller in &mut callers {
                flooded.shown += caller.answer_retries()?;
            }
            std::thread::sleep(PAUSE);
        }
        Ok(flooded)
    }
}

/// Maximum number of calls between two reads of the sockets.
const BURST: u128 = 64;
const PAUSE: Duration = Duration::from_micros(500);
/// Maximum number of calls from one address that await an answer.
const MOST_PENDING: usize = 1024;

/// A source address and its calls in progress.
struct Caller {
    to: SocketAddr,
    socket: UdpSocket,
    endpoint: Endpoint,
    pending: BTreeMap<ConnectionHandle, Connection>,
}

impl Caller {
    fn new(from: IpAddr, to: SocketAddr) -> io::Result<Self> {
        let socket = UdpSocket::bind((from, 0))?;
        socket.set_nonblocking(true)?;
        let endpoint = Endpoint::new(Arc::new(EndpointConfig::default()), None, false, None);
        Ok(Self { to, socket, endpoint, pending: BTreeMap::new() })
    }

    /// Sends a first packet.
    fn call(&mut self, config: &ClientConfig) -> io::Result<()> {
        let now = now();
        let called = self.endpoint.connect(now, config.clone(), self.to, "racksum");
        let (handle, mut connection) = called.map_err(io::Error::other)?;
        self.send(&mut connection, now)?;
        self.pending.insert(handle, connection);
        if self.pending.len() > MOST_PENDING
            && let Some((handle, _)) = self.pending.pop_first()
        {
            self.endpoint.handle_event(handle, EndpointEvent::drained());
        }
        Ok(())
    }

    /// Repeats the first packets that got a Retry, and forgets their connections. Returns the
    /// number of repeated packets.
    fn answer_retries(&mut self) -> io::Result<u64> {
        let (mut shown, mut datagram, mut answer) = (0, [0; 2048], Vec::new());
        while let Ok(len) = self.socket.recv(&mut datagram) {
            let now = now();
            let received = BytesMut::from(&datagram[..len]);
            let event = self.endpoint.handle(now, self.to, None, None, received, &mut answer);
            let Some(DatagramEvent::ConnectionEvent(handle, event)) = event else { continue };
            let Some(mut connection) = self.pending.remove(&handle) else { continue };
            connection.handle_event(event);
            self.send(&mut connection, now)?;
            self.endpoint.handle_event(handle, EndpointEvent::drained());
            shown += 1;
        }
        Ok(shown)
    }

    /// Sends one datagram of a connection.
    fn send(&self, connection: &mut Connection, now: Instant) -> io::Result<()> {
        let mut packet = Vec::new();
        if let Some(transmit) = connection.poll_transmit(now, 1, &mut packet) {
            match self.socket.send_to(&packet[..transmit.size], self.to) {
                // A full send buffer has the same effect as loss.
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                Ok(_) | Err(_) => {}
            }
        }
        Ok(())
    }
}

/// Returns the current time as quinn's type.
#[expect(clippy::disallowed_methods, reason = "quinn's state machine takes std's time")]
fn now() -> Instant {
    Instant::now()
}

/// Returns a TLS configuration for handshakes that end before the caller sees a certificate.
fn config() -> ClientConfig {
    let mut tls = rustls::ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_protocol_versions(&[&TLS13])
        .expect("the provider has TLS 1.3")
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    tls.alpn_protocols = vec![PROTOCOL.as_bytes().to_vec()];
    let crypto = QuicClientConfig::try_from(tls).expect("TLS 1.3 has QUIC's initial cipher suite");
    ClientConfig::new(Arc::new(crypto))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::SeqCst;

    use racksum_worker::Client;

    use super::*;
    use crate::rig::{Rig, bounded};
    use crate::waits::await_that;

    /// Joins twenty jobs one after the other, during a flood from the addresses `from`.
    fn join_beside(from: Vec<IpAddr>, rate: u32) {
        bounded(120, move || {
            let rig = Rig::start(|_| {});
            let flood =
                Flood { to: rig.aggregator.addr(), from, rate, lasts: Duration::from_secs(60) };
            let (stop, begun) = (AtomicBool::new(false), AtomicBool::new(false));
            std::thread::scope(|scope| {
                let flooding = scope.spawn(|| {
                    let started = now();
                    flood.run(|| {
                        // By then, a server without limits would be full.
                        let full = started.elapsed() > Duration::from_secs(2);
                        begun.fetch_or(full, SeqCst);
                        stop.load(SeqCst)
                    })
                });
                await_that("the flood is at its height", || begun.load(SeqCst));
                for job in 0..20 {
                    let options = rig.options(&format!("job-{job}"), 0, 1);
                    drop(Client::connect(&options).unwrap());
                }
                stop.store(true, SeqCst);
                let flooded = flooding.join().unwrap().unwrap();
                assert!(flooded.shown >= 64, "the flood must take all places: {flooded:?}");
            });
        });
    }

    #[test]
    fn one_address_whose_calls_fall_silent_keeps_nobody_else_out() {
        join_beside(vec![[127, 0, 1, 1].into()], 1000);
    }

    #[test]
    fn many_addresses_whose_calls_fall_silent_keep_nobody_else_out() {
        join_beside((1..=50).map(|last| [127, 0, 1, last].into()).collect(), 200);
    }
}
