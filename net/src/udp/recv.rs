//! Receiving: many datagrams a message, many messages a system call, into the caller's buffers.
#![expect(unsafe_code, reason = "recvmmsg writes through pointers into spare capacity")]

use std::io;
use std::mem;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::ptr;

use bytes::BytesMut;
use libc::{c_int, c_uint};
use socket2::{SockAddr, SockAddrStorage};

use super::cmsg::{Control, SPACE};
use super::{CE, RECV_BATCH, RECV_CAPACITY, UdpSocket};

/// What is known of one received message besides its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// The sender.
    pub from: SocketAddr,
    /// The message's length; 0 for one to be skipped (empty, or larger than its buffer).
    pub len: usize,
    /// The length of each datagram in it but the last, which may be shorter. At least 1, so that
    /// `chunks(stride)` holds.
    pub stride: usize,
    /// The TOS byte it arrived with: the sender's DSCP, and ECN bits that queues may have changed.
    pub tos: u8,
    /// A queue on the way marked it: congestion experienced.
    pub ce: bool,
}

/// The storage of one `recvmmsg`, for one thread, and what the last one brought.
pub struct RecvRing {
    storage: Box<Storage>,
    received: [Received; RECV_BATCH],
    count: usize,
    /// Messages that the last call asked for.
    asked: usize,
    /// Messages that the next asks for, at most.
    batch: usize,
}

struct Storage {
    headers: [libc::mmsghdr; RECV_BATCH],
    iovecs: [libc::iovec; RECV_BATCH],
    names: [SockAddrStorage; RECV_BATCH],
    controls: [Control; RECV_BATCH],
}

// SAFETY: the pointers in the headers and iovecs are written anew before each system call, point
// at this very storage or at what the call borrows, and are never followed outside of the call.
unsafe impl Send for Storage {}

impl UdpSocket {
    /// Receives what is there, without waiting, into the spare capacity of `buffers`: at most
    /// [`RECV_BATCH`] messages, and few after large ones, one a buffer. The answer is how many; 0
    /// if nothing is there.
    ///
    /// The buffers that it asks for messages in are cleared first, and those that got one then hold
    /// exactly it; [`RecvRing::received`] says how many. The others stay as they were. Buffers
    /// should have a capacity of [`super::RECV_CAPACITY`]: a message that does not fit is counted
    /// in [`UdpSocket::truncated`] and has length 0.
    ///
    /// # Errors
    ///
    /// The kernel's, when the socket itself is of no use any more.
    pub fn recv(&self, ring: &mut RecvRing, buffers: &mut [BytesMut]) -> io::Result<usize> {
        ring.count = 0;
        let asked = buffers.len().min(ring.batch);
        ring.asked = asked;
        if asked == 0 {
            return Ok(0);
        }
        let buffers = &mut buffers[..asked];
        ring.lay_out(buffers);
        ring.count = none_if_passing(ring.submit(self, asked, 0))?.unwrap_or(0).min(asked);
        for (index, buffer) in buffers.iter_mut().enumerate().take(ring.count) {
            let received = ring.read(self, index, buffer.capacity());
            // SAFETY: the kernel has just written `received.len` bytes at the start of the spare
            // capacity, which is the start of the buffer as it was cleared; `read` keeps the
            // length within the capacity.
            unsafe { buffer.set_len(received.len) };
            ring.received[index] = received;
        }
        ring.choose_batch();
        Ok(ring.count)
    }

    /// Looks at the first message that is there, without waiting and without taking it: copies its
    /// first bytes to `head`. The answer's length is the whole message's, which may be shorter.
    /// `None` if nothing is there.
    ///
    /// # Errors
    ///
    /// As [`UdpSocket::recv`].
    pub fn peek(&self, ring: &mut RecvRing, head: &mut [u8]) -> io::Result<Option<Received>> {
        ring.count = 0;
        ring.lay_out_one(0, head.as_mut_ptr(), head.len());
        // With MSG_TRUNC the kernel says how long the message is, however little room it had.
        let flags = libc::MSG_PEEK | libc::MSG_TRUNC;
        if none_if_passing(ring.submit(self, 1, flags))?.unwrap_or(0) == 0 {
            return Ok(None);
        }
        Ok(Some(ring.read_whole(self, 0)))
    }

    /// Takes the message that [`UdpSocket::peek`] has shown: its first bytes to `head`, those
    /// behind to `tail`. The answer is how many were written; more than both hold are lost.
    ///
    /// # Errors
    ///
    /// The kernel's; `WouldBlock` if nothing is there, which is not so after a peek, as long as
    /// nobody else receives.
    pub fn take_peeked(&self, head: &mut [u8], tail: &mut [u8]) -> io::Result<usize> {
        let mut places = [io::IoSliceMut::new(head), io::IoSliceMut::new(tail)];
        // SAFETY: msghdr is plain C data, for which all zeros is a value.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = places.as_mut_ptr().cast();
        message.msg_iovlen = places.len() as _;
        loop {
            // SAFETY: the header points at two slices (IoSliceMut has the layout of iovec) that
            // are lent for longer than the call.
            let rc =
                unsafe { libc::recvmsg(self.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
            match usize::try_from(rc).map_err(|_| io::Error::last_os_error()) {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock && is_passing(&error) => {}
                outcome => return outcome,
            }
        }
    }
}

/// Whether a receive that failed so may be tried again: nothing is there, a signal came, or the
/// fate of an earlier datagram of ours (ICMP) did, and is read now.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR | libc::ECONNREFUSED))
}

fn none_if_passing(outcome: io::Result<usize>) -> io::Result<Option<usize>> {
    match outcome {
        Err(error) if is_passing(&error) => Ok(None),
        outcome => outcome.map(Some),
    }
}

impl RecvRing {
    /// An empty ring.
    #[must_use]
    pub fn new() -> Self {
        let storage = Box::new(Storage {
            // SAFETY: mmsghdr and iovec are plain C data, for which all zeros is a value.
            headers: unsafe { mem::zeroed() },
            // SAFETY: as above.
            iovecs: unsafe { mem::zeroed() },
            names: std::array::from_fn(|_| SockAddrStorage::zeroed()),
            controls: [Control::new(); RECV_BATCH],
        });
        let received = [Received::NOTHING; RECV_BATCH];
        Self { storage, received, count: 0, asked: 0, batch: RECV_BATCH }
    }

    /// Whether the last [`UdpSocket::recv`] brought as many messages as it asked for, so that
    /// there may be more.
    #[must_use]
    pub const fn is_full(&self) -> bool {
        self.count > 0 && self.count == self.asked
    }

    /// Bounds the next batch by the messages of the last.
    fn choose_batch(&mut self) {
        if let Some(longest) = self.received().iter().map(|message| message.len).max() {
            self.batch = (BATCH_BYTES / longest.max(1)).clamp(1, RECV_BATCH);
        }
    }

    /// What came with message `index` of the last [`UdpSocket::recv`].
    ///
    /// # Panics
    ///
    /// If that call brought fewer messages.
    #[must_use]
    pub fn meta(&self, index: usize) -> Received {
        self.received()[index]
    }

    /// What came with each message of the last [`UdpSocket::recv`], in the buffers' order.
    #[must_use]
    pub fn received(&self) -> &[Received] {
        &self.received[..self.count]
    }

    /// Clears the buffers and points the headers at their capacity.
    fn lay_out(&mut self, buffers: &mut [BytesMut]) {
        for (slot, buffer) in buffers.iter_mut().enumerate().take(RECV_BATCH) {
            buffer.clear();
            let spare = buffer.spare_capacity_mut();
            self.lay_out_one(slot, spare.as_mut_ptr().cast(), spare.len());
        }
    }

    /// Points the header of a slot at `len` bytes from `start` on.
    fn lay_out_one(&mut self, slot: usize, start: *mut u8, len: usize) {
        let Storage { headers, iovecs, names, controls } = &mut *self.storage;
        iovecs[slot] = libc::iovec { iov_base: start.cast(), iov_len: len };
        let header = &mut headers[slot];
        header.msg_len = 0;
        header.msg_hdr.msg_name = (&raw mut names[slot]).cast();
        header.msg_hdr.msg_namelen = names[slot].size_of();
        header.msg_hdr.msg_iov = &raw mut iovecs[slot];
        header.msg_hdr.msg_iovlen = 1;
        header.msg_hdr.msg_control = controls[slot].as_mut_ptr().cast();
        header.msg_hdr.msg_controllen = SPACE;
        header.msg_hdr.msg_flags = 0;
    }

    fn submit(&mut self, socket: &UdpSocket, count: usize, flags: c_int) -> io::Result<usize> {
        #[expect(clippy::cast_possible_truncation, reason = "at most RECV_BATCH")]
        let vlen = count.min(RECV_BATCH) as c_uint;
        let headers = self.storage.headers.as_mut_ptr();
        let (fd, flags) = (socket.as_raw_fd(), flags | libc::MSG_DONTWAIT);
        // SAFETY: `lay_out_one` has just pointed `count` headers at names and control messages of
        // this ring and at bytes that the caller of `recv` or `peek` still lends.
        let rc = unsafe { libc::recvmmsg(fd, headers, vlen, flags, ptr::null_mut()) };
        usize::try_from(rc).map_err(|_| io::Error::last_os_error())
    }

    /// What the kernel said of message `index`, which has `capacity` bytes of room.
    fn read(&mut self, socket: &UdpSocket, index: usize, capacity: usize) -> Received {
        let whole = self.read_whole(socket, index);
        if self.storage.headers[index].msg_hdr.msg_flags & libc::MSG_TRUNC != 0 {
            socket.count_truncated();
            return Received::NOTHING;
        }
        Received { len: whole.len.min(capacity), ..whole }
    }

    /// The same, however much of it there was room for.
    fn read_whole(&mut self, socket: &UdpSocket, index: usize) -> Received {
        let Storage { headers, controls, .. } = &*self.storage;
        let header = &headers[index];
        let control = controls[index].messages(header.msg_hdr.msg_controllen);
        let (mut stride, mut tos) = (None, 0);
        for message in control {
            match (message.level, message.kind) {
                (libc::SOL_UDP, libc::UDP_GRO) => stride = message.int(),
                (libc::IPPROTO_IP, libc::IP_TOS) => tos = message.byte().unwrap_or(0),
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                    tos = message.int().and_then(|tos| u8::try_from(tos).ok()).unwrap_or(0);
                }
                (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => {
                    message.int().into_iter().for_each(|n| socket.note_drops(n.cast_unsigned()));
                }
                _ => {}
            }
        }
        let len = usize::try_from(header.msg_len).unwrap_or(0);
        let Some(from) = self.sender(index) else { return Received::NOTHING };
        Received { from, len, stride: stride_of(stride, len), tos, ce: tos & CE == CE }
    }

    fn sender(&mut self, index: usize) -> Option<SocketAddr> {
        // Taken, not copied: the next call zeroes and fills it anew.
        let name = mem::replace(&mut self.storage.names[index], SockAddrStorage::zeroed());
        let len = self.storage.headers[index].msg_hdr.msg_namelen.min(name.size_of());
        // SAFETY: the storage was zeroed and the kernel wrote an address of `len` bytes into it.
        let addr = unsafe { SockAddr::new(name, len) };
        addr.as_socket()
    }
}

impl Default for RecvRing {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for RecvRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RecvRing").field("received", &self.received()).finish_non_exhaustive()
    }
}

impl Received {
    const NOTHING: Self = Self {
        from: SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
        len: 0,
        stride: 1,
        tos: 0,
        ce: false,
    };
}

/// The kernel names a stride only where it joined; a lone datagram is its own.
fn stride_of(gro: Option<c_int>, len: usize) -> usize {
    gro.and_then(|stride| usize::try_from(stride).ok()).filter(|s| *s > 0).unwrap_or(len).max(1)
}

/// Bytes of a batch of large messages: few, so that they are still in the processor's cache when
/// they are worked on, and what is worked on is not driven out of it.
const BATCH_BYTES: usize = 2 * RECV_CAPACITY;
