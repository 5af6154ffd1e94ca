//! A UDP socket, set up for batches before its first datagram can arrive.

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

/// How a socket is to be opened.
#[derive(Debug, Clone)]
pub struct UdpConfig {
    /// The local address. IPv6 sockets speak IPv6 only, so that a peer has one address.
    pub bind: SocketAddr,
    /// The receive buffer in bytes; 0 leaves the kernel's default.
    pub receive_buffer: usize,
    /// The send buffer in bytes; 0 leaves the kernel's default.
    pub send_buffer: usize,
    /// The TOS byte of what is sent: DSCP in the upper six bits, ECN in the lower two. A
    /// [`super::SendRing`] can mark its own batches otherwise.
    pub tos: u8,
    /// The group to become a member of. [`UdpConfig::bind`] must then be the group itself.
    pub multicast: Option<Multicast>,
}

impl UdpConfig {
    /// A unicast socket at `bind` with buffers of 4 MiB, best effort and ECN-capable.
    #[must_use]
    pub const fn new(bind: SocketAddr) -> Self {
        Self {
            bind,
            receive_buffer: DEFAULT_BUFFER,
            send_buffer: DEFAULT_BUFFER,
            tos: ECT0,
            multicast: None,
        }
    }

    /// A member of `group`, otherwise as [`UdpConfig::new`].
    #[must_use]
    pub fn member(group: Multicast) -> Self {
        Self { multicast: Some(group.clone()), ..Self::new(group.destination()) }
    }
}

/// A non-blocking UDP socket that sends and receives in batches.
///
/// [`UdpSocket::send`] and [`UdpSocket::recv`] take `&self` and a ring of the calling thread's, so
/// one thread may send while another receives.
#[derive(Debug)]
pub struct UdpSocket {
    inner: Socket,
    local: SocketAddr,
    report: BufferReport,
    gso: AtomicBool,
    gro: bool,
    /// Datagrams the kernel dropped, extended from the kernel's 32-bit counter.
    drops: AtomicU64,
    /// Messages that were larger than their buffer.
    truncated: AtomicU64,
    /// Messages that the kernel refused to send, or had no room for too long.
    send_failures: AtomicU64,
}

impl UdpSocket {
    /// Opens, sizes, marks and binds a socket; joins the group if there is one.
    ///
    /// # Errors
    ///
    /// A [`NetError`] that names the address and, for a port that is taken, what to do. Buffers
    /// that came out smaller than asked for are no error: see [`UdpSocket::report`].
    pub fn open(config: &UdpConfig) -> Result<Self, NetError> {
        let addr = config.bind;
        if let Some(group) = &config.multicast {
            group.check(addr)?;
        }
        let inner = Socket::new(Domain::for_address(addr), Type::DGRAM, Some(Protocol::UDP))
            .map_err(|cause| NetError::Socket { addr, cause })?;
        prepare(&inner, config)?;
        // Before binding: what arrives without it arrives in pieces. Kernels below 5.0 lack it.
        let gro = options::set_int(inner.as_fd(), libc::SOL_UDP, libc::UDP_GRO, 1).is_ok();
        // Kernels below 4.18 do not know this option even to read it.
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

    /// The address it is bound to, with the port the kernel chose if none was asked for.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// What became of the buffers that were asked for.
    #[must_use]
    pub const fn report(&self) -> &BufferReport {
        &self.report
    }

    /// Whether one message may still be many datagrams. Once a message fails whose datagrams go out
    /// singly, this is false for good: some drivers cannot do it.
    #[must_use]
    pub fn gso_enabled(&self) -> bool {
        self.gso.load(Ordering::Relaxed)
    }

    /// How many datagrams one message may be: 64, or 1 without GSO.
    #[must_use]
    pub fn max_gso_segments(&self) -> usize {
        if self.gso_enabled() { MAX_SEGMENTS } else { 1 }
    }

    /// Whether the kernel joins datagrams of one sender on their way in.
    #[must_use]
    pub const fn gro_enabled(&self) -> bool {
        self.gro
    }

    /// How many messages the kernel dropped since the socket was opened because the receive buffer
    /// was full, or because they were to be refused ([`UdpSocket::refuse`]). The kernel tells with
    /// each message received, so this is as of the last one.
    #[must_use]
    pub fn drops(&self) -> u64 {
        self.drops.load(Ordering::Relaxed)
    }

    /// How many messages were larger than the buffer given for them, and skipped.
    #[must_use]
    pub fn truncated(&self) -> u64 {
        self.truncated.load(Ordering::Relaxed)
    }

    /// Opens a socket that receives what is sent to the group, and nothing else.
    ///
    /// Bound to the group's own address, so that no unicast finds it; and any number of processes
    /// on a host may be members, each with a copy of its own.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open), and [`NetError::Multicast`] if the interface cannot join.
    pub fn open_member(group: &Multicast, receive_buffer: usize) -> Result<Self, NetError> {
        let config = UdpConfig::member(group.clone());
        // A member only receives: its send buffer stays as the kernel has it.
        Self::open(&UdpConfig { receive_buffer, send_buffer: 0, ..config })
    }

    /// Sends multicast from this socket through `interface`, to at most `ttl` routers' distance
    /// (1 stays in the local network), and to the members on this host as well.
    ///
    /// # Errors
    ///
    /// [`NetError::Multicast`] if the interface would not take it.
    pub fn set_multicast_sender(&self, interface: &Interface, ttl: u8) -> Result<(), NetError> {
        multicast::prepare_sender(&self.inner, self.local.is_ipv6(), interface, ttl)
            .map_err(|cause| NetError::Multicast { interface: interface.name.clone(), cause })
    }

    /// Sends one datagram outside of any batch; it is lost if there is no room for it now.
    ///
    /// # Errors
    ///
    /// The kernel's: the datagram is larger than the interface takes, or a firewall of this host
    /// forbids it.
    pub fn send_one(&self, to: SocketAddr, datagram: &[u8]) -> io::Result<()> {
        self.inner.send_to(datagram, &SockAddr::from(to)).map(drop)
    }

    pub(super) const fn socket(&self) -> &Socket {
        &self.inner
    }

    /// Switches segmentation on or off, by what sending found out.
    pub(super) fn set_gso(&self, on: bool) {
        self.gso.store(on, Ordering::Relaxed);
    }

    pub(super) fn count_truncated(&self) {
        self.truncated.fetch_add(1, Ordering::Relaxed);
    }

    /// How many messages were not sent: the kernel refused them, or had no room for too long.
    #[must_use]
    pub fn send_failures(&self) -> u64 {
        self.send_failures.load(Ordering::Relaxed)
    }

    /// Counts messages that were not sent, and says so of the first.
    pub(super) fn note_send_failures(&self, count: usize, last: Option<SendError>) {
        let known = self.send_failures.fetch_add(count as u64, Ordering::Relaxed);
        if let (0, 1.., Some(error)) = (known, count, last) {
            tracing::warn!("from {}: {error}; others that fail are only counted", self.local);
        }
    }

    /// Takes note of the kernel's own counter, which has 32 bits and wraps.
    pub(super) fn note_drops(&self, counter: u32) {
        let known = self.drops();
        #[expect(clippy::cast_possible_truncation, reason = "the counter's own width")]
        let ahead = counter.wrapping_sub(known as u32);
        // More than half the circle ahead is behind: another thread was first with a newer value.
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

/// Everything that is set before binding, but for the buffers.
fn prepare(socket: &Socket, config: &UdpConfig) -> Result<(), NetError> {
    let addr = config.bind;
    let failed = |option| move |cause| NetError::Option { option, addr, cause };
    let int = |level, name, value, option| {
        options::set_int(socket.as_fd(), level, name, value).map_err(failed(option))
    };
    socket.set_nonblocking(true).map_err(failed("O_NONBLOCK"))?;
    if config.multicast.is_some() {
        // Several members of one group on one host, each with a copy of its own.
        socket.set_reuse_address(true).map_err(failed("SO_REUSEADDR"))?;
    }
    int(libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1, "SO_RXQ_OVFL")?;
    let tos = c_int::from(config.tos);
    // PROBE: no fragments, ever, and no belief in what ICMP says about the path; a datagram that
    // is too large for the interface is an error at once.
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

/// A bandwidth-delay product that covers 25 Gbit/s over more than a millisecond.
const DEFAULT_BUFFER: usize = 4 << 20;
