//! UDP sockets, configured for batches before their first datagram can arrive.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use libc::c_int;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use super::{BufferReport, ECT0, MAX_SEGMENTS, SendError, buffers};
use crate::interface::Interface;
use crate::multicast::{self, Multicast};
use crate::{NetError, options};

/// Settings for opening a [`UdpSocket`].
#[derive(Debug, Clone)]
pub struct UdpConfig {
    /// Local address. IPv6 sockets are IPv6-only, so that each peer has one address.
    pub bind: SocketAddr,
    /// Receive buffer in bytes; 0 keeps the kernel's default.
    pub receive_buffer: usize,
    /// Send buffer in bytes; 0 keeps the kernel's default.
    pub send_buffer: usize,
    /// TOS byte of sent datagrams: DSCP in the upper six bits, ECN in the lower two. A
    /// [`super::SendRing`] can override it for its own batches.
    pub tos: u8,
    /// Multicast group to join. [`UdpConfig::bind`] must then be the group's address.
    pub multicast: Option<Multicast>,
    /// Whether the kernel reports when it received each message.
    pub timestamps: bool,
}

impl UdpConfig {
    /// Returns settings for a unicast socket at `bind` that has buffers of 4 MiB and sends
    /// best-effort, ECN-capable datagrams.
    #[must_use]
    pub const fn new(bind: SocketAddr) -> Self {
        Self {
            bind,
            receive_buffer: DEFAULT_BUFFER,
            send_buffer: DEFAULT_BUFFER,
            tos: ECT0,
            multicast: None,
            timestamps: false,
        }
    }

    /// Returns settings for a member of `group`, otherwise like [`UdpConfig::new`].
    #[must_use]
    pub fn member(group: Multicast) -> Self {
        Self { multicast: Some(group.clone()), ..Self::new(group.destination()) }
    }
}

/// Non-blocking UDP socket that sends and receives in batches.
///
/// [`UdpSocket::send`] and [`UdpSocket::recv`] take `&self` and a ring of the calling thread, so
/// one thread may send while another receives.
#[derive(Debug)]
pub struct UdpSocket {
    inner: Socket,
    local: SocketAddr,
    report: BufferReport,
    gso: AtomicBool,
    gro: bool,
    /// Number of messages that the kernel has dropped: its wrapping 32-bit counter, extended to 64
    /// bits. A coalesced batch of datagrams counts as one.
    drops: AtomicU64,
    /// Number of messages that were larger than their buffer.
    truncated: AtomicU64,
    /// Number of transmits that the kernel refused, or for which the send buffer stayed full.
    send_failures: AtomicU64,
}

impl UdpSocket {
    /// Opens, configures and binds a socket, and joins the group if one is set.
    ///
    /// # Errors
    ///
    /// Returns a [`NetError`], whose message names the address and, if the port is taken, states
    /// what to do. Smaller buffers than requested are not an error: see [`UdpSocket::report`].
    pub fn open(config: &UdpConfig) -> Result<Self, NetError> {
        let addr = config.bind;
        if let Some(group) = &config.multicast {
            group.check(addr)?;
        }
        let inner = Socket::new(Domain::for_address(addr), Type::DGRAM, Some(Protocol::UDP))
            .map_err(|cause| NetError::Socket { addr, cause })?;
        prepare(&inner, config)?;
        // Switch GRO on before binding, so that the kernel joins even the first datagrams. Kernels
        // older than 5.0 lack GRO.
        let gro = options::set_int(inner.as_fd(), libc::SOL_UDP, libc::UDP_GRO, 1).is_ok();
        // Kernels older than 4.18 lack GSO and reject even a read of this option.
        let gso = options::get_int(inner.as_fd(), libc::SOL_UDP, libc::UDP_SEGMENT).is_ok();
        let report = buffers::size(&inner, config.receive_buffer, config.send_buffer)
            .map_err(|cause| NetError::Option { option: "SO_RCVBUF or SO_SNDBUF", addr, cause })?;

        inner.bind(&SockAddr::from(addr)).map_err(|cause| NetError::bind(addr, cause))?;
        if let Some(group) = &config.multicast {
            multicast::join(&inner, group)?;
        }
        let local = inner
            .local_addr()
            .map_err(|cause| NetError::Socket { addr, cause })?
            .as_socket()
            .unwrap_or(addr);
        Ok(Self {
            inner,
            local,
            report,
            gso: AtomicBool::new(gso),
            gro,
            drops: AtomicU64::new(0),
            truncated: AtomicU64::new(0),
            send_failures: AtomicU64::new(0),
        })
    }

    /// Returns the address that the socket is bound to, with the port the kernel chose for port 0.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Returns the requested and granted buffer sizes.
    #[must_use]
    pub const fn report(&self) -> &BufferReport {
        &self.report
    }

    /// Returns whether one message may hold several datagrams. Some drivers cannot segment. Once a
    /// segmented message fails but its datagrams can be sent one by one, the result stays false.
    #[must_use]
    pub fn gso_enabled(&self) -> bool {
        self.gso.load(Ordering::Relaxed)
    }

    /// Returns how many datagrams one message may hold: 64, or 1 without GSO.
    #[must_use]
    pub fn max_gso_segments(&self) -> usize {
        if self.gso_enabled() { MAX_SEGMENTS } else { 1 }
    }

    /// Returns whether the kernel coalesces received datagrams from one sender (GRO).
    #[must_use]
    pub const fn gro_enabled(&self) -> bool {
        self.gro
    }

    /// Returns how many messages the kernel has dropped since the socket was opened, because the
    /// receive buffer was full or [`UdpSocket::refuse`] named the sender. The kernel reports the
    /// count only with each received message, so later drops are not included yet.
    #[must_use]
    pub fn drops(&self) -> u64 {
        self.drops.load(Ordering::Relaxed)
    }

    /// Returns how many messages were skipped because they were larger than their buffer.
    #[must_use]
    pub fn truncated(&self) -> u64 {
        self.truncated.load(Ordering::Relaxed)
    }

    /// Opens a socket that receives only datagrams that are sent to the group.
    ///
    /// The socket is bound to the group's own address, so unicast datagrams cannot reach it. Any
    /// number of processes on a host may be members; each gets a copy.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`open`](Self::open), and [`NetError::Multicast`] if the interface
    /// cannot join.
    pub fn open_member(group: &Multicast, receive_buffer: usize) -> Result<Self, NetError> {
        let config = UdpConfig::member(group.clone());
        // A member only receives, so its send buffer keeps the kernel's default.
        Self::open(&UdpConfig { receive_buffer, send_buffer: 0, ..config })
    }

    /// Makes this socket send multicast through `interface`, with a hop limit of `ttl` (1 stays in
    /// the local network). Members on this host receive the multicast as well.
    ///
    /// # Errors
    ///
    /// Returns [`NetError::Multicast`] if the interface cannot be used.
    pub fn set_multicast_sender(&self, interface: &Interface, ttl: u8) -> Result<(), NetError> {
        multicast::prepare_sender(&self.inner, self.local.is_ipv6(), interface, ttl)
            .map_err(|cause| NetError::Multicast { interface: interface.name.clone(), cause })
    }

    /// Sends one datagram outside of any batch, without waiting.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error: `WouldBlock` if the send buffer is full, or another one, for
    /// example if the datagram exceeds the interface's MTU or a firewall of this host blocks it.
    pub fn send_one(&self, to: SocketAddr, datagram: &[u8]) -> io::Result<()> {
        self.inner.send_to(datagram, &SockAddr::from(to)).map(drop)
    }

    pub(super) const fn socket(&self) -> &Socket {
        &self.inner
    }

    /// Switches segmentation on or off, as the result of a send requires.
    pub(super) fn set_gso(&self, on: bool) {
        self.gso.store(on, Ordering::Relaxed);
    }

    pub(super) fn count_truncated(&self) {
        self.truncated.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns how many transmits were not sent, because the kernel refused them or the send buffer
    /// stayed full.
    #[must_use]
    pub fn send_failures(&self) -> u64 {
        self.send_failures.load(Ordering::Relaxed)
    }

    /// Counts transmits that were not sent, and logs the first failure.
    pub(super) fn note_send_failures(&self, count: usize, last: Option<SendError>) {
        let known = self.send_failures.fetch_add(count as u64, Ordering::Relaxed);
        if let (0, 1.., Some(error)) = (known, count, last) {
            tracing::warn!(
                "cannot send from {}: {error}; later send failures are only counted",
                self.local
            );
        }
    }

    /// Updates the drop count from the kernel's counter, which has 32 bits and wraps.
    pub(super) fn note_drops(&self, counter: u32) {
        let known = self.drops();
        #[expect(clippy::cast_possible_truncation, reason = "the kernel's counter has 32 bits")]
        let ahead = counter.wrapping_sub(known as u32);
        // A larger difference means that another thread has already noted a newer value.
        if ahead <= u32::MAX / 2 {
            self.drops.fetch_max(known + u64::from(ahead), Ordering::Relaxed);
        }
    }
}

impl AsFd for UdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl AsRawFd for UdpSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.inner.as_raw_fd()
    }
}

/// Sets all options that must precede binding, except GRO and the buffer sizes.
fn prepare(socket: &Socket, config: &UdpConfig) -> Result<(), NetError> {
    let addr = config.bind;
    let failed = |option| move |cause| NetError::Option { option, addr, cause };
    let int = |level, name, value, option| {
        options::set_int(socket.as_fd(), level, name, value).map_err(failed(option))
    };
    socket.set_nonblocking(true).map_err(failed("O_NONBLOCK"))?;
    if config.multicast.is_some() {
        // Several processes of one host may join the group, and each gets a copy.
        socket.set_reuse_address(true).map_err(failed("SO_REUSEADDR"))?;
    }
    int(libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1, "SO_RXQ_OVFL")?;
    if config.timestamps {
        int(libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1, "SO_TIMESTAMPNS")?;
    }
    let tos = c_int::from(config.tos);
    // With `PMTUDISC_PROBE`, the kernel never fragments, and ignores path MTUs that ICMP reports. A
    // datagram that is too large for the interface fails immediately.
    if addr.is_ipv6() {
        socket.set_only_v6(true).map_err(failed("IPV6_V6ONLY"))?;
        let level = libc::IPPROTO_IPV6;
        int(level, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE, "IPV6_MTU_DISCOVER")?;
        int(level, libc::IPV6_RECVTCLASS, 1, "IPV6_RECVTCLASS")?;
        int(level, libc::IPV6_TCLASS, tos, "IPV6_TCLASS")
    } else {
        let level = libc::IPPROTO_IP;
        int(level, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE, "IP_MTU_DISCOVER")?;
        int(level, libc::IP_RECVTOS, 1, "IP_RECVTOS")?;
        int(level, libc::IP_TOS, tos, "IP_TOS")
    }
}

/// Default buffer size in bytes: the bandwidth-delay product of 25 Gbit/s and 1.3 ms.
const DEFAULT_BUFFER: usize = 4 << 20;
