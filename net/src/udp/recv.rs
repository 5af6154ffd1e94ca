//! Receiving into the caller's buffers, with several datagrams per message and several messages per
//! system call.
#![expect(unsafe_code, reason = "recvmmsg writes through pointers into spare capacity")]

use std::io;
use std::mem;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};

use bytes::BytesMut;
use libc::{c_int, c_uint};
use socket2::{SockAddr, SockAddrStorage};

use super::cmsg::{Control, SPACE};
use super::{CE, RECV_BATCH, RECV_CAPACITY, UdpSocket};

/// Metadata of one received message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Sender of the message.
    pub from: SocketAddr,
    /// Length of the message in bytes. The caller must skip a message of length 0, which is empty
    /// or larger than its buffer.
    pub len: usize,
    /// Length of each datagram in the message but the last, which may be shorter. At least 1, so
    /// that `chunks(stride)` never panics.
    pub stride: usize,
    /// TOS byte of the message: the sender's DSCP, and ECN bits that queues may have changed.
    pub tos: u8,
    /// Whether a queue on the path marked the message with CE (congestion experienced).
    pub ce: bool,
    /// Wall-clock time at which the kernel received the message, in nanoseconds since 1970. `None`
    /// unless [`UdpConfig::timestamps`](super::UdpConfig::timestamps) is set. Of several joined
    /// datagrams, this is the time of the first.
    pub at: Option<i64>,
}

/// Storage for `recvmmsg` calls of one thread, with the result of the last call.
pub struct RecvRing {
    storage: Box<Storage>,
    received: [Received; RECV_BATCH],
    count: usize,
    /// Number of messages that the last call requested.
    asked: usize,
    /// Limit on the messages that the next call requests.
    batch: usize,
}

struct Storage {
    headers: [libc::mmsghdr; RECV_BATCH],
    iovecs: [libc::iovec; RECV_BATCH],
    names: [SockAddrStorage; RECV_BATCH],
    controls: [Control; RECV_BATCH],
}

// SAFETY: right before each system call, this module rewrites the pointers in the headers and
// iovecs. They point at this storage or at memory that the call borrows, and no code uses them
// outside of the call.
unsafe impl Send for Storage {}

impl UdpSocket {
    /// Receives pending messages into the spare capacity of `buffers`, without waiting. Returns the
    /// number of received messages, one in each buffer; 0 if none is pending. A call receives at
    /// most [`RECV_BATCH`] messages, and fewer if the previous messages were large.
    ///
    /// The call clears the buffers that it offers to the kernel, and leaves all others unchanged.
    /// Afterwards the first buffers hold exactly one message each, and [`RecvRing::received`]
    /// returns the metadata. Buffers should have a capacity of [`super::RECV_CAPACITY`]: a message
    /// that does not fit gets the length 0, and [`UdpSocket::truncated`] counts it.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error if the socket has become unusable.
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
            // SAFETY: the kernel has just written `received.len` bytes at the start of the buffer,
            // which was cleared before. `read` keeps the length within the capacity.
            unsafe { buffer.set_len(received.len) };
            ring.received[index] = received;
        }
        ring.choose_batch();
        Ok(ring.count)
    }

    /// Copies the first bytes of the next message to `head`, without waiting and without taking the
    /// message. Returns its metadata, with the length of the whole message, or `None` if no message
    /// is pending.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`UdpSocket::recv`].
    pub fn peek(&self, ring: &mut RecvRing, head: &mut [u8]) -> io::Result<Option<Received>> {
        ring.count = 0;
        ring.lay_out_one(0, head.as_mut_ptr(), head.len());
        // MSG_TRUNC makes the kernel return the message's full length, even if `head` is shorter.
        let flags = libc::MSG_PEEK | libc::MSG_TRUNC;
        if none_if_passing(ring.submit(self, 1, flags))?.unwrap_or(0) == 0 {
            return Ok(None);
        }
        Ok(Some(ring.read_whole(self, 0)))
    }

    /// Takes the message that [`UdpSocket::peek`] has shown: its first bytes go to `head`, the next
    /// to `tail`. Returns how many bytes were written; bytes that fit into neither are lost.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error; `WouldBlock` if no message is pending, which happens after a
    /// peek only if another thread receives.
    pub fn take_peeked(&self, head: &mut [u8], tail: &mut [u8]) -> io::Result<usize> {
        // SAFETY: the tail stays mutably borrowed during the call, so its bytes are writable and no
        // other code uses them.
        unsafe { self.take_peeked_at(head, NonNull::from(&mut *tail).cast(), tail.len()) }
    }

    /// Takes a message like [`UdpSocket::take_peeked`], with a tail that another process may read
    /// or write during the call.
    ///
    /// # Safety
    ///
    /// The `len` bytes at `tail` are writable, and no reference to them is used during the call.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`UdpSocket::take_peeked`].
    pub unsafe fn take_peeked_at(
        &self,
        head: &mut [u8],
        tail: NonNull<u8>,
        len: usize,
    ) -> io::Result<usize> {
        let iovec = |start: *mut u8, len| libc::iovec { iov_base: start.cast(), iov_len: len };
        let mut places = [iovec(head.as_mut_ptr(), head.len()), iovec(tail.as_ptr(), len)];
        // SAFETY: msghdr is plain C data, for which all zeros is a valid value.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = places.as_mut_ptr();
        message.msg_iovlen = places.len() as _;
        loop {
            // SAFETY: the header points at `head`, which is borrowed, and at the tail, which the
            // caller guarantees to be writable.
            let rc =
                unsafe { libc::recvmsg(self.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
            match usize::try_from(rc).map_err(|_| io::Error::last_os_error()) {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock && is_passing(&error) => {}
                outcome => return outcome,
            }
        }
    }
}

/// Returns whether a receive that failed with this error may be retried: nothing is pending, a
/// signal arrived, or the kernel reported an ICMP error of an earlier datagram, now cleared.
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
    /// Creates an empty ring.
    #[must_use]
    pub fn new() -> Self {
        let storage = Box::new(Storage {
            // SAFETY: mmsghdr and iovec are plain C data, for which all zeros is a valid value.
            headers: unsafe { mem::zeroed() },
            // SAFETY: all zeros is a valid iovec, as for the headers.
            iovecs: unsafe { mem::zeroed() },
            names: std::array::from_fn(|_| SockAddrStorage::zeroed()),
            controls: [Control::new(); RECV_BATCH],
        });
        let received = [Received::NOTHING; RECV_BATCH];
        Self { storage, received, count: 0, asked: 0, batch: RECV_BATCH }
    }

    /// Returns whether the last [`UdpSocket::recv`] got as many messages as it requested. If so,
    /// more may be pending.
    #[must_use]
    pub const fn is_full(&self) -> bool {
        self.count > 0 && self.count == self.asked
    }

    /// Sets the size of the next batch from the longest message of the last batch.
    fn choose_batch(&mut self) {
        if let Some(longest) = self.received().iter().map(|message| message.len).max() {
            self.batch = (BATCH_BYTES / longest.max(1)).clamp(1, RECV_BATCH);
        }
    }

    /// Returns the metadata of message `index` of the last [`UdpSocket::recv`].
    ///
    /// # Panics
    ///
    /// Panics if that call received `index` messages or fewer.
    #[must_use]
    pub fn meta(&self, index: usize) -> Received {
        self.received()[index]
    }

    /// Returns the metadata of all messages of the last [`UdpSocket::recv`], in the buffers' order.
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

    /// Points header number `slot` at the `len` bytes that begin at `start`.
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
        // this ring, and at bytes that the caller of `recv` or `peek` still lends.
        let rc = unsafe { libc::recvmmsg(fd, headers, vlen, flags, ptr::null_mut()) };
        usize::try_from(rc).map_err(|_| io::Error::last_os_error())
    }

    /// Returns the metadata of message `index`, whose buffer has `capacity` bytes.
    fn read(&mut self, socket: &UdpSocket, index: usize, capacity: usize) -> Received {
        let whole = self.read_whole(socket, index);
        if self.storage.headers[index].msg_hdr.msg_flags & libc::MSG_TRUNC != 0 {
            socket.count_truncated();
            return Received::NOTHING;
        }
        Received { len: whole.len.min(capacity), ..whole }
    }

    /// Returns the metadata of message `index` with its full length, even if its buffer was
    /// shorter.
    fn read_whole(&mut self, socket: &UdpSocket, index: usize) -> Received {
        let Storage { headers, controls, .. } = &*self.storage;
        let header = &headers[index];
        let control = controls[index].messages(header.msg_hdr.msg_controllen);
        let (mut stride, mut tos, mut at) = (None, 0, None);
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
                (libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS) => at = message.nanos(),
                _ => {}
            }
        }
        let len = usize::try_from(header.msg_len).unwrap_or(0);
        let Some(from) = self.sender(index) else { return Received::NOTHING };
        Received { from, len, stride: stride_of(stride, len), tos, ce: tos & CE == CE, at }
    }

    fn sender(&mut self, index: usize) -> Option<SocketAddr> {
        // Take the name, and leave a zeroed name for the next call.
        let name = mem::replace(&mut self.storage.names[index], SockAddrStorage::zeroed());
        let len = self.storage.headers[index].msg_hdr.msg_namelen.min(name.size_of());
        // SAFETY: the storage was zeroed, and the kernel wrote an address of `len` bytes into it.
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
        at: None,
    };
}

/// Returns a message's stride. The kernel reports one only if it joined datagrams; a single
/// datagram's stride is its length.
fn stride_of(gro: Option<c_int>, len: usize) -> usize {
    gro.and_then(|stride| usize::try_from(stride).ok()).filter(|s| *s > 0).unwrap_or(len).max(1)
}

/// Size in bytes of a batch of large messages. The size is small, so that a batch stays in the
/// processor's cache until it is processed, without evicting the other data that the processing
/// needs.
const BATCH_BYTES: usize = 2 * RECV_CAPACITY;
