//! Endpoints: one that is called, and one that calls.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{
    AsyncTimer, AsyncUdpSocket, ClientConfig, ConnectError, Connecting, ConnectionError, Endpoint,
    EndpointConfig, Runtime, ServerConfig, TokioRuntime, TransportConfig, TransportErrorCode,
    VarInt,
};
use racksum_proto::time::Span;
use rustls::AlertDescription;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::version::TLS13;
use socket2::SockRef;
use tokio::task::AbortHandle;

use super::NAME;
use super::connection_id::ConnectionIds;
use super::frames::LONGEST;
use super::{Credentials, IDLE_TIMEOUT, KEEP_ALIVE, PROTOCOL, duration};
use crate::NetError;
use crate::interface::{MIN_MTU, path_mtu};

/// An established connection of a client, with the endpoint that carries it.
#[derive(Debug)]
pub struct Connection {
    endpoint: Endpoint,
    quic: quinn::Connection,
    credentials: Credentials,
}

impl Connection {
    /// The connection itself: open streams on it, watch it for its end.
    #[must_use]
    pub const fn quic(&self) -> &quinn::Connection {
        &self.quic
    }

    /// Why the connection to `addr` has ended, if it has.
    pub(super) fn why_ended(&self, addr: SocketAddr) -> Option<NetError> {
        let cause = self.quic.close_reason()?;
        Some(self.credentials.explain(not_connected(addr, cause)))
    }

    /// Ends the connection, and waits until the other side has been told, or a moment.
    pub async fn close(self, reason: &str) {
        self.quic.close(VarInt::from_u32(0), reason.as_bytes());
        // It has gone out long before the endpoint is idle: QUIC stays for three times as long as
        // it takes losses to show (RFC 9000, section 10.2), which is seconds where this process,
        // or the way, was held up.
        drop(tokio::time::timeout(duration(CLOSING), self.endpoint.wait_idle()).await);
    }
}

/// An endpoint at `bind` that takes connections. Port 0 lets the kernel choose.
///
/// # Errors
///
/// A [`NetError`] that names the address: the port is taken, the address is not of this host, or
/// the credentials do not reach that far.
///
/// # Panics
///
/// Outside of a tokio runtime.
pub fn server(bind: SocketAddr, credentials: &Credentials) -> Result<Endpoint, NetError> {
    serve(bind, credentials, PROTOCOL)
}

/// Has a server that is called from now on show other credentials, and believe by them. Connections
/// that stand are left alone.
///
/// # Errors
///
/// A [`NetError`] if the credentials cannot be used.
pub fn change_credentials(server: &Endpoint, credentials: &Credentials) -> Result<(), NetError> {
    server.set_server_config(Some(server_config(credentials, PROTOCOL)?));
    Ok(())
}

/// Calls the server at `to`, and gives up after `patience`.
///
/// # Errors
///
/// A [`NetError`] that names the address: nobody is there, or somebody that speaks something else.
///
/// # Panics
///
/// Outside of a tokio runtime.
pub async fn connect(
    to: SocketAddr,
    credentials: &Credentials,
    patience: Span,
) -> Result<Connection, NetError> {
    connect_from(None, to, credentials, patience).await
}

/// Connects as [`connect`] does, from an address of this host if one is given.
///
/// # Errors
///
/// As [`connect`].
///
/// # Panics
///
/// Outside of a tokio runtime.
pub async fn connect_from(
    from: Option<IpAddr>,
    to: SocketAddr,
    credentials: &Credentials,
    patience: Span,
) -> Result<Connection, NetError> {
    credentials.check(to)?;
    let from = from.unwrap_or_else(|| local_for(to));
    let spawner = Spawner::default();
    // Of a call that comes to nothing, nothing is left.
    let mut tasks = Tasks(Some(spawner.clone()));
    let endpoint = endpoint(SocketAddr::new(from, 0), None, Arc::new(spawner))?;
    let config = client_config(credentials)?;
    let call = || {
        endpoint.connect_with(config.clone(), to, NAME).map_err(|error: ConnectError| {
            NetError::NotCallable { addr: to, reason: error.to_string() }
        })
    };
    match twice(call, duration(patience)).await {
        Ok(quic) => {
            tasks.leave();
            Ok(Connection { endpoint, quic, credentials: credentials.clone() })
        }
        Err(NotAnswered::NotCalled(error)) => Err(error),
        Err(NotAnswered::Ended(ConnectionError::TimedOut)) => {
            // What QUIC begins with has 1,200 bytes, and is not sent in fragments.
            let narrow = path_mtu(from, to).ok().filter(|mtu| *mtu < MIN_MTU);
            Err(NetError::NobodyThere { addr: to, waited: patience, narrow })
        }
        Err(NotAnswered::Ended(cause)) if is_other_protocol(&cause) => {
            Err(NetError::WrongProtocol { addr: to })
        }
        Err(NotAnswered::Ended(cause)) => Err(credentials.explain(not_connected(to, cause))),
    }
}

/// Calls, and once more if that has not come to anything after half of the time, and takes what is
/// answered first. A call may be lost for good where packets are: quinn takes no Retry after one
/// that was corrupted on its way.
async fn twice(
    call: impl Fn() -> Result<Connecting, NetError>,
    patience: Duration,
) -> Result<quinn::Connection, NotAnswered> {
    let (mut first, mut late) = (pin!(call()?), pin!(tokio::time::sleep(patience)));
    if let Ok(answered) = tokio::time::timeout(patience / 2, &mut first).await {
        return Ok(answered?);
    }
    let mut second = pin!(call()?);
    let (cause, other) = tokio::select! {
        answered = &mut first => match answered {
            Ok(connection) => return Ok(connection),
            Err(cause) => (cause, second),
        },
        answered = &mut second => match answered {
            Ok(connection) => return Ok(connection),
            Err(cause) => (cause, first),
        },
        () = &mut late => return Err(ConnectionError::TimedOut.into()),
    };
    // One that is refused, for want of room as it may be, does not end the other.
    tokio::select! {
        answered = other => Ok(answered?),
        () = late => Err(cause.into()),
    }
}

/// Why a call has not come to a connection.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
enum NotAnswered {
    /// It was none.
    NotCalled(#[from] NetError),
    /// It has ended.
    Ended(#[from] ConnectionError),
}

/// Why a connection to `addr` failed, or ended: for certificates that one side does not accept,
/// what to do about it. A client may hear what a server thinks of its certificate only after it has
/// taken the connection for made.
#[must_use]
pub fn not_connected(addr: SocketAddr, cause: ConnectionError) -> NetError {
    let alert = |code: TransportErrorCode| {
        let code = u64::from(code).checked_sub(TransportErrorCode::crypto(0).into())?;
        u8::try_from(code).ok().map(AlertDescription::from)
    };
    let (ours, said) = match &cause {
        ConnectionError::TransportError(error) => (false, alert(error.code)),
        ConnectionError::ConnectionClosed(close) => (true, alert(close.error_code)),
        _ => (false, None),
    };
    let why = match said {
        Some(AlertDescription::CertificateExpired) => {
            "has expired, or the clock of one of the two hosts is wrong"
        }
        Some(AlertDescription::UnknownCA | AlertDescription::DecryptError) => {
            "is of another authority"
        }
        Some(AlertDescription::BadCertificate) => {
            "lacks subjectAltName=DNS:racksum, the name of every aggregator, or is damaged"
        }
        Some(AlertDescription::CertificateUnknown) => {
            "is of a form that TLS does not take, as an authority's own"
        }
        Some(AlertDescription::CertificateRequired) => "is missing",
        Some(AlertDescription::AccessDenied) if ours => "is its own, of no authority",
        Some(AlertDescription::AccessDenied) => return NetError::NoneShown { addr },
        Some(AlertDescription::UnsupportedCertificate) => "is for another role",
        _ => return NetError::Connect { addr, cause },
    };
    if ours { NetError::NotBelieved { addr, why } } else { NetError::Unbelievable { addr, why } }
}

pub(super) fn serve(
    bind: SocketAddr,
    credentials: &Credentials,
    protocol: &str,
) -> Result<Endpoint, NetError> {
    credentials.check(bind)?;
    endpoint(bind, Some(server_config(credentials, protocol)?), Arc::new(TokioRuntime))
}

/// Starts the tasks of a client, and knows them.
#[derive(Debug, Clone, Default)]
struct Spawner(Arc<Mutex<Vec<AbortHandle>>>);

impl Runtime for Spawner {
    fn new_timer(&self, at: Instant) -> Pin<Box<dyn AsyncTimer>> {
        TokioRuntime.new_timer(at)
    }

    fn spawn(&self, task: Pin<Box<dyn Future<Output = ()> + Send>>) {
        let task = tokio::spawn(task).abort_handle();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(task);
    }

    fn wrap_udp_socket(&self, socket: UdpSocket) -> io::Result<Arc<dyn AsyncUdpSocket>> {
        TokioRuntime.wrap_udp_socket(socket)
    }

    fn now(&self) -> Instant {
        TokioRuntime.now()
    }
}

/// The tasks of a call, which end when this is dropped. Left alone, quinn keeps the socket and the
/// state of a call that was given up for seconds, until nothing of it can come back any more.
#[derive(Debug)]
struct Tasks(Option<Spawner>);

impl Tasks {
    /// Leaves the tasks alone, which have the end of a connection to tell.
    fn leave(&mut self) {
        self.0 = None;
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        let Some(Spawner(tasks)) = &self.0 else { return };
        let tasks = tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.iter().for_each(AbortHandle::abort);
    }
}

/// Both kinds of endpoint, so that a failed bind reads the same.
fn endpoint(
    bind: SocketAddr,
    config: Option<ServerConfig>,
    runtime: Arc<dyn Runtime>,
) -> Result<Endpoint, NetError> {
    let ids = ConnectionIds::new()?;
    let make = move || -> io::Result<Endpoint> {
        let socket = UdpSocket::bind(bind)?;
        if config.is_some() {
            // Calls that come while this process waits for a core. The kernel gives what it may.
            SockRef::from(&socket).set_recv_buffer_size(RECEIVE_BUFFER)?;
        }
        let mut own = EndpointConfig::default();
        own.cid_generator(move || Box::new(ids.clone()));
        Endpoint::new(own, config, socket, runtime)
    };
    make().map_err(|cause| NetError::bind(bind, cause))
}

/// Loopback is called from loopback, so that a firewall or a monitor sees what it is.
const fn local_for(to: SocketAddr) -> IpAddr {
    match (to, to.ip().is_loopback()) {
        (SocketAddr::V4(_), true) => IpAddr::V4(Ipv4Addr::LOCALHOST),
        (SocketAddr::V4(_), false) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        (SocketAddr::V6(_), true) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        (SocketAddr::V6(_), false) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

/// The cryptography is named here and not installed for the process, which may be someone else's
/// Python interpreter with TLS of its own.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

fn server_config(credentials: &Credentials, protocol: &str) -> Result<ServerConfig, NetError> {
    let (provider, identity) = (provider(), &credentials.identity);
    let mut tls = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])
        .map_err(tls_error)?
        .with_client_cert_verifier(credentials.judge_of_clients(provider)?)
        .with_single_cert(identity.chain(), identity.key())
        .map_err(tls_error)?;
    tls.alpn_protocols = vec![protocol.as_bytes().to_vec()];
    let crypto = QuicServerConfig::try_from(tls).map_err(tls_error)?;
    let mut config = ServerConfig::with_crypto(Arc::new(crypto));
    // A rank's data goes to the address of its connection. Only the handshake proves that the rank
    // hears there, so no later datagram may move the connection to another address.
    config
        .transport_config(transport(CALLER_STREAMS))
        .migration(false)
        .max_incoming(MAX_INCOMING)
        .incoming_buffer_size(MAX_INCOMING_BYTES)
        .incoming_buffer_size_total(MAX_INCOMING_BYTES * MAX_INCOMING as u64);
    Ok(config)
}

pub(super) fn client_config(credentials: &Credentials) -> Result<ClientConfig, NetError> {
    let (provider, identity) = (provider(), &credentials.identity);
    let mut tls = rustls::ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])
        .map_err(tls_error)?
        .dangerous()
        .with_custom_certificate_verifier(credentials.judge_of_servers(provider)?)
        .with_client_auth_cert(identity.chain(), identity.key())
        .map_err(tls_error)?;
    tls.alpn_protocols = vec![PROTOCOL.as_bytes().to_vec()];
    let crypto = QuicClientConfig::try_from(tls).map_err(tls_error)?;
    let mut config = ClientConfig::new(Arc::new(crypto));
    // An aggregator opens no stream.
    config.transport_config(transport(0));
    Ok(config)
}

/// Sends signs of life, and bounds what the other side can make us hold. The other side may open so
/// many streams.
fn transport(streams: u32) -> Arc<TransportConfig> {
    let idle_ms = u32::try_from(IDLE_TIMEOUT.as_millis()).unwrap_or(u32::MAX);
    let mut config = TransportConfig::default();
    config
        .keep_alive_interval(Some(duration(KEEP_ALIVE)))
        .max_idle_timeout(Some(VarInt::from_u32(idle_ms).into()))
        .initial_rtt(INITIAL_RTT)
        .max_concurrent_bidi_streams(VarInt::from_u32(streams))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .stream_receive_window(VarInt::from_u32(WINDOW))
        .receive_window(VarInt::from_u32(WINDOW))
        .send_window(u64::from(WINDOW))
        .datagram_receive_buffer_size(None);
    Arc::new(config)
}

/// Another application, another version of ours, or another QUIC.
fn is_other_protocol(error: &ConnectionError) -> bool {
    let no_alpn = TransportErrorCode::crypto(u8::from(AlertDescription::NoApplicationProtocol));
    match error {
        ConnectionError::VersionMismatch => true,
        ConnectionError::ConnectionClosed(close) => close.error_code == no_alpn,
        ConnectionError::TransportError(error) => error.code == no_alpn,
        _ => false,
    }
}

fn tls_error(error: impl std::fmt::Display) -> NetError {
    NetError::Tls { reason: error.to_string() }
}

/// The round trip time assumed before one is measured: long for a cluster. A handshake that is
/// given up is kept for nine of these (RFC 9000, section 10.2); a lost first packet costs three.
const INITIAL_RTT: Duration = Duration::from_millis(100);
/// How long a connection that was closed is seen to its end.
const CLOSING: Span = Span::from_millis(10);
/// Bytes of calls that the kernel may hold.
const RECEIVE_BUFFER: usize = 4 << 20;
/// Calls that may wait until this side looks at them, which is at once, and what each may send
/// meanwhile.
const MAX_INCOMING: usize = 1024;
const MAX_INCOMING_BYTES: u64 = 16 << 10;
/// Streams that a caller may have open: the conversation is one, and nobody reads another.
const CALLER_STREAMS: u32 = 1;
/// Unread bytes of a connection, and unacknowledged bytes that we hold for it: the longest message,
/// whole. Thousands of ranks may wait at an aggregator, each with as much unread.
#[expect(clippy::cast_possible_truncation, reason = "it is 64 KiB and a little")]
const WINDOW: u32 = LONGEST as u32;
