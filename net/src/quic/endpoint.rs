//! QUIC endpoints of servers and clients.

use std::collections::BTreeMap;
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

/// Established connection of a client, with the endpoint that carries it.
#[derive(Debug)]
pub struct Connection {
    endpoint: Endpoint,
    quic: quinn::Connection,
    credentials: Credentials,
}

impl Connection {
    /// Returns the QUIC connection, for opening streams and waiting for its end.
    #[must_use]
    pub const fn quic(&self) -> &quinn::Connection {
        &self.quic
    }

    /// Returns the reason why the connection to `addr` has ended, or `None` while it is open.
    #[must_use]
    pub fn why_ended(&self, addr: SocketAddr) -> Option<NetError> {
        let cause = self.quic.close_reason()?;
        Some(self.credentials.explain(not_connected(addr, cause)))
    }

    /// Closes the connection, and waits up to 10 ms for the endpoint to become idle.
    pub async fn close(self, reason: &str) {
        self.quic.close(VarInt::from_u32(0), reason.as_bytes());
        // The close is sent long before the endpoint is idle: QUIC keeps a closed connection for
        // three probe timeouts (RFC 9000, section 10.2). A probe timeout can be seconds long if
        // this process or the network was delayed.
        drop(tokio::time::timeout(duration(CLOSING), self.endpoint.wait_idle()).await);
    }
}

/// Opens an endpoint at `bind` that accepts connections. Port 0 lets the kernel choose.
///
/// # Errors
///
/// Returns a [`NetError`] that names the address: the port is taken, the address does not belong to
/// this host, or the credentials allow only loopback.
///
/// # Panics
///
/// Panics outside a tokio runtime.
pub fn server(bind: SocketAddr, credentials: &Credentials) -> Result<Endpoint, NetError> {
    serve(bind, credentials, PROTOCOL)
}

/// Replaces the credentials that a server uses for new connections. Established connections keep
/// theirs.
///
/// # Errors
///
/// Returns a [`NetError`] if the credentials cannot be used.
pub fn change_credentials(server: &Endpoint, credentials: &Credentials) -> Result<(), NetError> {
    server.set_server_config(Some(server_config(credentials, PROTOCOL)?));
    Ok(())
}

/// Connects to the server at `to`, and gives up after `patience`.
///
/// # Errors
///
/// Returns a [`NetError`] that names the address: no server answers there, the server speaks
/// another protocol, or one side rejects the other's certificate.
///
/// # Panics
///
/// Panics outside a tokio runtime.
pub async fn connect(
    to: SocketAddr,
    credentials: &Credentials,
    patience: Span,
) -> Result<Connection, NetError> {
    connect_from(None, to, credentials, patience).await
}

/// Connects like [`connect`], from the address `from` of this host if one is given.
///
/// # Errors
///
/// Returns the errors of [`connect`].
///
/// # Panics
///
/// Panics outside a tokio runtime.
pub async fn connect_from(
    from: Option<IpAddr>,
    to: SocketAddr,
    credentials: &Credentials,
    patience: Span,
) -> Result<Connection, NetError> {
    credentials.check(to)?;
    let from = from.unwrap_or_else(|| local_for(to));
    let spawner = Spawner::default();
    // Aborts the tasks of a call that fails or is cancelled.
    let mut tasks = Tasks(Some(spawner.clone()));
    let endpoint = endpoint(SocketAddr::new(from, 0), None, Arc::new(spawner))?;
    let config = client_config(credentials, PROTOCOL)?;
    let quic = call(&endpoint, &config, to, credentials, patience).await?;
    tasks.leave();
    Ok(Connection { endpoint, quic, credentials: credentials.clone() })
}

async fn call(
    endpoint: &Endpoint,
    config: &ClientConfig,
    to: SocketAddr,
    credentials: &Credentials,
    patience: Span,
) -> Result<quinn::Connection, NetError> {
    let call = || {
        endpoint.connect_with(config.clone(), to, NAME).map_err(|error: ConnectError| {
            NetError::NotCallable { addr: to, reason: error.to_string() }
        })
    };
    twice(call, duration(patience)).await.map_err(|error| match error {
        NotAnswered::NotCalled(error) => error,
        NotAnswered::Ended(ConnectionError::TimedOut) => {
            // QUIC's first datagrams have 1,200 bytes and are never fragmented, so a small path MTU
            // may be the cause.
            let from = endpoint.local_addr().map_or_else(|_| local_for(to), |local| local.ip());
            let narrow = path_mtu(from, to).ok().filter(|mtu| *mtu < MIN_MTU);
            NetError::NobodyThere { addr: to, waited: patience, narrow }
        }
        NotAnswered::Ended(cause) if is_other_protocol(&cause) => {
            NetError::WrongProtocol { addr: to }
        }
        NotAnswered::Ended(cause) => credentials.explain(not_connected(to, cause)),
    })
}

/// Client whose connections to many servers share a few sockets.
#[derive(Debug)]
pub struct Caller {
    credentials: Credentials,
    config: ClientConfig,
    /// Endpoints by their local addresses: IPv4 or IPv6, loopback or not.
    endpoints: Mutex<BTreeMap<IpAddr, Endpoint>>,
}

impl Caller {
    /// Creates a client of servers that [`serve`] opened for a protocol.
    ///
    /// # Errors
    ///
    /// Returns a [`NetError`] if the credentials cannot be used.
    pub fn new(protocol: &str, credentials: &Credentials) -> Result<Self, NetError> {
        let config = client_config(credentials, protocol)?;
        Ok(Self { credentials: credentials.clone(), config, endpoints: Mutex::default() })
    }

    /// Connects like [`connect`].
    ///
    /// # Errors
    ///
    /// Returns the errors of [`connect`].
    ///
    /// # Panics
    ///
    /// Panics outside a tokio runtime.
    pub async fn connect(&self, to: SocketAddr, patience: Span) -> Result<Connection, NetError> {
        self.credentials.check(to)?;
        let endpoint = self.endpoint_for(to)?;
        let quic = call(&endpoint, &self.config, to, &self.credentials, patience).await?;
        Ok(Connection { endpoint, quic, credentials: self.credentials.clone() })
    }

    fn endpoint_for(&self, to: SocketAddr) -> Result<Endpoint, NetError> {
        let local = local_for(to);
        let mut endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = endpoints.get(&local) {
            return Ok(known.clone());
        }
        let opened = endpoint(SocketAddr::new(local, 0), None, Arc::new(TokioRuntime))?;
        endpoints.insert(local, opened.clone());
        Ok(opened)
    }
}

/// Calls the server, calls again if half of `patience` passes without an answer, and returns the
/// first connection. A lossy path can make a call fail for good: once a Retry has been corrupted in
/// transit, quinn accepts no later Retry.
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
    // Keep waiting for the other call: the server may have refused this one because it had no room
    // then.
    tokio::select! {
        answered = other => Ok(answered?),
        () = late => Err(cause.into()),
    }
}

/// Reason why a call did not lead to a connection.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
enum NotAnswered {
    /// The call could not start.
    NotCalled(#[from] NetError),
    /// The call ended before the connection was established.
    Ended(#[from] ConnectionError),
}

/// Returns the error for a connection to `addr` that failed or ended. If one side rejected a
/// certificate, the error says what to do. A client may learn that the server rejected its
/// certificate only after its own handshake is complete.
#[must_use]
pub fn not_connected(addr: SocketAddr, cause: ConnectionError) -> NetError {
    let alert = |code: TransportErrorCode| {
        let code = u64::from(code).checked_sub(TransportErrorCode::crypto(0).into())?;
        u8::try_from(code).ok().map(AlertDescription::from)
    };
    let (ours, description) = match &cause {
        ConnectionError::TransportError(error) => (false, alert(error.code)),
        ConnectionError::ConnectionClosed(close) => (true, alert(close.error_code)),
        _ => (false, None),
    };
    let why = match description {
        Some(AlertDescription::CertificateExpired) => {
            "has expired, or the clock of one of the two hosts is wrong"
        }
        Some(AlertDescription::UnknownCA | AlertDescription::DecryptError) => {
            "was issued by another authority"
        }
        Some(AlertDescription::BadCertificate) => {
            "is damaged, or lacks subjectAltName=DNS:racksum, the name that every aggregator has, \
             or has two roles or an unprintable name"
        }
        Some(AlertDescription::CertificateUnknown) => {
            "is of a kind that TLS does not accept, such as an authority's own certificate"
        }
        Some(AlertDescription::CertificateRequired) => "is missing",
        Some(AlertDescription::AccessDenied) if ours => {
            "is self-signed, not issued by an authority"
        }
        Some(AlertDescription::AccessDenied) => return NetError::NoneShown { addr },
        Some(AlertDescription::UnsupportedCertificate) => "is for another role",
        _ => return NetError::Connect { addr, cause },
    };
    if ours {
        NetError::IdentityRejected { addr, why }
    } else {
        NetError::CertificateRejected { addr, why }
    }
}

/// Opens an endpoint like [`server`] for another protocol than racksum's control messages. Both
/// sides must offer the protocol's ALPN name.
///
/// # Errors
///
/// Returns the errors of [`server`].
///
/// # Panics
///
/// Panics outside a tokio runtime.
pub fn serve(
    bind: SocketAddr,
    credentials: &Credentials,
    protocol: &str,
) -> Result<Endpoint, NetError> {
    credentials.check(bind)?;
    endpoint(bind, Some(server_config(credentials, protocol)?), Arc::new(TokioRuntime))
}

/// Tokio runtime of one client, which records the client's tasks.
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

/// Tasks of a call, aborted on drop. Otherwise quinn would keep the socket and the state of an
/// abandoned call for seconds, until no datagram of that call can arrive any more.
#[derive(Debug)]
struct Tasks(Option<Spawner>);

impl Tasks {
    /// Keeps the tasks running: an established connection needs them until its close is sent.
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

/// Creates an endpoint: a server's if `config` is given, and otherwise a client's.
fn endpoint(
    bind: SocketAddr,
    config: Option<ServerConfig>,
    runtime: Arc<dyn Runtime>,
) -> Result<Endpoint, NetError> {
    let ids = ConnectionIds::new()?;
    let make = move || -> io::Result<Endpoint> {
        let socket = UdpSocket::bind(bind)?;
        if config.is_some() {
            // A large buffer holds the calls that arrive while this process waits for a core. The
            // kernel may grant less.
            SockRef::from(&socket).set_recv_buffer_size(RECEIVE_BUFFER)?;
        }
        let mut own = EndpointConfig::default();
        own.cid_generator(move || Box::new(ids.clone()));
        Endpoint::new(own, config, socket, runtime)
    };
    make().map_err(|cause| NetError::bind(bind, cause))
}

/// Returns the local address for calls to `to`. If `to` is a loopback address, the result is one
/// too, so that firewalls and monitors recognize the traffic as local.
const fn local_for(to: SocketAddr) -> IpAddr {
    match (to, to.ip().is_loopback()) {
        (SocketAddr::V4(_), true) => IpAddr::V4(Ipv4Addr::LOCALHOST),
        (SocketAddr::V4(_), false) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        (SocketAddr::V6(_), true) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        (SocketAddr::V6(_), false) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

/// Returns the cryptography provider. This library does not install it for the whole process, which
/// may be a Python interpreter that uses TLS too.
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
    // receives at this address, so later datagrams must not move the connection to another address.
    config
        .transport_config(transport(CALLER_STREAMS))
        .migration(false)
        .max_incoming(MAX_INCOMING)
        .incoming_buffer_size(MAX_INCOMING_BYTES)
        .incoming_buffer_size_total(MAX_INCOMING_BYTES * MAX_INCOMING as u64);
    Ok(config)
}

pub(super) fn client_config(
    credentials: &Credentials,
    protocol: &str,
) -> Result<ClientConfig, NetError> {
    let (provider, identity) = (provider(), &credentials.identity);
    let mut tls = rustls::ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])
        .map_err(tls_error)?
        .dangerous()
        .with_custom_certificate_verifier(credentials.judge_of_servers(provider)?)
        .with_client_auth_cert(identity.chain(), identity.key())
        .map_err(tls_error)?;
    tls.alpn_protocols = vec![protocol.as_bytes().to_vec()];
    let crypto = QuicClientConfig::try_from(tls).map_err(tls_error)?;
    let mut config = ClientConfig::new(Arc::new(crypto));
    // Aggregators open no streams.
    config.transport_config(transport(0));
    Ok(config)
}

/// Returns a transport configuration that sends keep-alives and bounds the memory the peer can
/// occupy. The peer may have `streams` streams open.
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

/// Returns whether the peer is another application, or speaks another version of racksum or QUIC.
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

/// Round-trip time assumed before the first measurement. It is long for a cluster. QUIC keeps an
/// abandoned handshake for nine times this value (RFC 9000, section 10.2), and a lost first packet
/// delays the handshake by three times this value.
const INITIAL_RTT: Duration = Duration::from_millis(100);
/// Time that [`Connection::close`] waits for the endpoint to become idle.
const CLOSING: Span = Span::from_millis(10);
/// Receive buffer of a server's socket, in bytes.
const RECEIVE_BUFFER: usize = 4 << 20;
/// Limit on the calls that wait until this side handles them. This side normally handles calls
/// immediately.
const MAX_INCOMING: usize = 1024;
/// Limit on the bytes that each waiting call may send.
const MAX_INCOMING_BYTES: u64 = 16 << 10;
/// Limit on the streams that a caller may have open: the control session needs one, and the server
/// reads no other.
const CALLER_STREAMS: u32 = 1;
/// Limit on the bytes of a connection that are unread, or sent but not acknowledged: one message of
/// the maximum length. An aggregator may hold this much unread data for each of thousands of ranks.
#[expect(clippy::cast_possible_truncation, reason = "it is just above 64 KiB")]
const WINDOW: u32 = LONGEST as u32;
