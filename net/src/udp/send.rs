//! Sending, with several datagrams per message and several messages per system call.
#![expect(unsafe_code, reason = "sendmmsg takes pointers to pointers")]

use std::io;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::{self, NonNull};

use libc::{c_int, c_uint};
use racksum_proto::time::Span;
use socket2::SockAddr;

use super::cmsg::Control;
use super::{MAX_DATAGRAM, MAX_SEGMENTS, SEND_BATCH, UdpSocket, wait_writable};

/// Bytes for one receiver or multicast group, sent as one or more datagrams.
#[derive(Debug, Clone, Copy)]
pub struct Transmit<'a> {
    /// Receiver or multicast group.
    pub to: SocketAddr,
    /// Datagrams, one after the other. Together with tail and trailer, the contents have 1 to
    /// 65,507 bytes.
    pub contents: &'a [u8],
    /// Bytes that follow `contents` in the same datagram, sent without a copy in user space. A
    /// transmit with a tail or a trailer is a single datagram.
    pub tail: Tail<'a>,
    /// Bytes that follow the tail in the same datagram.
    pub trailer: &'a [u8],
    /// Length of each datagram but the last, which may be shorter. A transmit has at most 64
    /// datagrams.
    pub stride: usize,
}

impl<'a> Transmit<'a> {
    /// Creates a transmit whose bytes are contiguous.
    #[must_use]
    pub const fn new(to: SocketAddr, contents: &'a [u8], stride: usize) -> Self {
        Self { to, contents, tail: Tail::EMPTY, trailer: &[], stride }
    }

    /// Creates a single datagram whose bytes lie in up to three places.
    #[must_use]
    pub const fn in_parts(
        to: SocketAddr,
        contents: &'a [u8],
        tail: Tail<'a>,
        trailer: &'a [u8],
    ) -> Self {
        let stride = contents.len() + tail.len() + trailer.len();
        Self { to, contents, tail, trailer, stride }
    }

    /// Returns whether tail and trailer are empty.
    pub(crate) const fn is_in_one(&self) -> bool {
        self.tail.is_empty() && self.trailer.is_empty()
    }

    /// Returns the total length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.contents.len() + self.tail.len() + self.trailer.len()
    }

    /// Returns whether the transmit has no bytes. An empty transmit cannot be sent.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of datagrams, or `None` if the transmit exceeds a limit and cannot be
    /// sent.
    #[must_use]
    pub const fn datagrams(&self) -> Option<usize> {
        if self.stride == 0 || self.is_empty() || self.len() > MAX_DATAGRAM {
            return None;
        }
        let count = self.len().div_ceil(self.stride);
        let most = if self.is_in_one() { MAX_SEGMENTS } else { 1 };
        if count > most { None } else { Some(count) }
    }
}

/// Bytes that the kernel reads in place when it sends them. Another process may write to them at
/// any time, so a tail holds their address and no reference.
#[derive(Debug, Clone, Copy)]
pub struct Tail<'a> {
    start: *const u8,
    len: usize,
    memory: PhantomData<&'a [u8]>,
}

// SAFETY: a tail is an address, and only the kernel reads the bytes.
unsafe impl Send for Tail<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for Tail<'_> {}

impl Tail<'_> {
    /// An empty tail.
    pub const EMPTY: Self = Self { start: ptr::null(), len: 0, memory: PhantomData };

    /// Creates a tail of the `len` bytes that begin at `start`.
    ///
    /// # Safety
    ///
    /// The bytes can be read for the lifetime of the tail.
    #[must_use]
    pub const unsafe fn at(start: NonNull<u8>, len: usize) -> Self {
        Self { start: start.as_ptr(), len, memory: PhantomData }
    }

    /// Returns the number of bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the tail has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    const fn iovec(self) -> libc::iovec {
        libc::iovec { iov_base: self.start.cast_mut().cast(), iov_len: self.len }
    }
}

impl<'a> From<&'a [u8]> for Tail<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self { start: bytes.as_ptr(), len: bytes.len(), memory: PhantomData }
    }
}

/// Result of sending a batch.
///
/// The first `sent + failed` transmits are finished. The others remain unsent, because the socket's
/// send buffer is full: send them once the socket is writable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SendOutcome {
    /// Number of transmits that the kernel accepted.
    pub sent: usize,
    /// Whether the send buffer is full. This never happens on loopback, which accepts every
    /// datagram and lets the receiver drop those that do not fit.
    pub blocked: bool,
    /// Number of transmits that failed. [`SendOutcome::last_error`] holds the reason for the last
    /// failure.
    pub failed: usize,
    /// Reason why the last failed transmit failed.
    pub last_error: Option<SendError>,
}

/// Reason why a transmit was not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The caller passed an invalid transmit: it is empty, has a stride of 0, has more than 65,507
    /// bytes or 64 datagrams, or has several datagrams and a tail or a trailer.
    #[error(
        "a transmit must have 1 to 65507 bytes and at most 64 datagrams, or one datagram if it has \
         a tail or a trailer"
    )]
    Unsendable,
    /// The datagrams are larger than the interface's MTU.
    #[error("the datagram is larger than the MTU of its outgoing interface")]
    TooLarge,
    /// The kernel refused the datagram for another reason, with this errno.
    #[error("the kernel refused the datagram: {}", io::Error::from_raw_os_error(*.0))]
    Os(c_int),
    /// The send buffer stayed full.
    #[error("the send buffer stayed full: the link is slower than the sender")]
    NoRoom,
}

/// Storage for `sendmmsg` calls of one thread.
pub struct SendRing {
    storage: Box<Storage>,
    tos: Option<u8>,
}

struct Storage {
    headers: [libc::mmsghdr; SEND_BATCH],
    iovecs: [[libc::iovec; 3]; SEND_BATCH],
    names: [SockAddr; SEND_BATCH],
    controls: [Control; SEND_BATCH],
}

// SAFETY: right before each system call, this module rewrites the pointers in the headers and
// iovecs. They point at this storage or at memory that the call borrows, and no code uses them
// outside of the call.
unsafe impl Send for Storage {}

impl UdpSocket {
    /// Sends a batch, and waits up to `waits` times for room in the send buffer, at most 2 ms each
    /// time. Transmits that are still unsent are lost, and their receivers request the data again.
    /// [`UdpSocket::send_failures`] counts the lost transmits and those that the kernel refuses.
    pub fn send_patiently(&self, ring: &mut SendRing, mut batch: &[Transmit<'_>], waits: u32) {
        for left in (0..=waits).rev() {
            if batch.is_empty() {
                return;
            }
            let outcome = self.send(ring, batch);
            self.note_send_failures(outcome.failed, outcome.last_error);
            batch = &batch[(outcome.sent + outcome.failed).min(batch.len())..];
            if outcome.blocked && left > 0 {
                // Try again in either case: after a timeout, and when the socket is writable.
                drop(wait_writable(self.as_fd(), Some(Span::from_millis(2))));
            }
        }
        self.note_send_failures(batch.len(), Some(SendError::NoRoom));
    }

    /// Sends a batch in order, with as few system calls as its size allows.
    ///
    /// Without GSO, each datagram is a message of its own. If the send buffer fills up in the
    /// middle of a transmit, the transmit counts as unsent although its first datagrams were sent.
    /// Sending the transmit again repeats them, but receivers detect duplicates anyway.
    pub fn send(&self, ring: &mut SendRing, batch: &[Transmit<'_>]) -> SendOutcome {
        let mut job = BatchSend { batch, at: Cursor::default(), outcome: SendOutcome::default() };
        // Errno of a segmented message that failed, set while this method tries the datagrams of
        // that message one by one.
        let mut trial: Option<c_int> = None;
        // ICMP errors of earlier datagrams surface in a later call, which then sends nothing.
        let mut stale_left = MAX_STALE_ERRORS;
        while !job.is_done() && !job.outcome.blocked {
            // Read the flag once per round, because another thread on this socket may switch GSO
            // off during the round.
            let gso = self.gso_enabled();
            let count = ring.fill(&job, gso);
            if count == 0 {
                job.fail(SendError::Unsendable);
                continue;
            }
            match ring.submit(self, count) {
                Ok(taken) => {
                    job.advance(taken, gso);
                    if let Some(errno) = trial.take() {
                        let local = self.local_addr();
                        tracing::warn!(
                            %local,
                            errno,
                            "GSO failed; now sending datagrams one by one"
                        );
                    }
                }
                Err(libc::EINTR) => {}
                Err(libc::EAGAIN | libc::ENOBUFS) => job.outcome.blocked = true,
                Err(libc::ECONNREFUSED) if stale_left > 0 => stale_left -= 1,
                Err(errno @ (libc::EIO | libc::EINVAL)) if gso && job.is_segmented() => {
                    self.set_gso(false);
                    trial = Some(errno);
                }
                Err(errno) => {
                    // A datagram on its own failed too, so segmentation was not the cause.
                    if trial.take().is_some() {
                        self.set_gso(true);
                    }
                    job.fail(SendError::from_errno(errno));
                }
            }
        }
        // The buffer filled up before the trial was decided, so switch GSO on again.
        if trial.is_some() {
            self.set_gso(true);
        }
        job.outcome
    }
}

impl SendRing {
    /// Creates a ring whose batches use the socket's own TOS.
    #[must_use]
    pub fn new() -> Self {
        let unspecified = SockAddr::from(SocketAddr::from(([0, 0, 0, 0], 0)));
        let storage = Box::new(Storage {
            // SAFETY: mmsghdr and iovec are plain C data, for which all zeros is a valid value.
            headers: unsafe { std::mem::zeroed() },
            // SAFETY: all zeros is a valid iovec, as for the headers.
            iovecs: unsafe { std::mem::zeroed() },
            names: std::array::from_fn(|_| unspecified.clone()),
            controls: [Control::new(); SEND_BATCH],
        });
        Self { storage, tos: None }
    }

    /// Sets the TOS byte (DSCP and ECN bits) of later batches of this ring; `None` restores the
    /// socket's own. Lanes that share a socket can thus have different TOS bytes without a system
    /// call for each change.
    pub const fn set_tos(&mut self, tos: Option<u8>) {
        self.tos = tos;
    }

    /// Lays out the next messages of a batch and returns their number, which is 0 if the next
    /// transmit exceeds a limit.
    fn fill(&mut self, job: &BatchSend<'_>, gso: bool) -> usize {
        let (mut at, mut count) = (job.at, 0);
        while count < SEND_BATCH
            && let Some(piece) = at.step(job.batch, gso)
        {
            self.place(count, &piece);
            count += 1;
        }
        count
    }

    fn place(&mut self, slot: usize, piece: &Piece<'_>) {
        let Storage { headers, iovecs, names, controls } = &mut *self.storage;
        let control = &mut controls[slot];
        let mut used = 0;
        if let Some(stride) = piece.segment {
            used = control.push(used, libc::SOL_UDP, libc::UDP_SEGMENT, &stride.to_ne_bytes());
        }
        if let Some(tos) = self.tos {
            let (level, kind) = match piece.of.to {
                SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS),
                SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
            };
            used = control.push(used, level, kind, &c_int::from(tos).to_ne_bytes());
        }
        names[slot] = SockAddr::from(piece.of.to);
        let Transmit { tail, trailer, .. } = *piece.of;
        iovecs[slot] = [piece.contents.into(), tail, trailer.into()].map(Tail::iovec);
        let header = &mut headers[slot].msg_hdr;
        header.msg_name = names[slot].as_ptr().cast_mut().cast();
        header.msg_namelen = names[slot].len();
        header.msg_iov = iovecs[slot].as_mut_ptr();
        header.msg_iovlen = if piece.of.is_in_one() { 1 } else { iovecs[slot].len() };
        header.msg_control = if used > 0 { control.as_mut_ptr().cast() } else { ptr::null_mut() };
        header.msg_controllen = used;
    }

    /// Sends the first `count` messages; returns how many the kernel accepted, or an errno.
    fn submit(&mut self, socket: &UdpSocket, count: usize) -> Result<usize, c_int> {
        #[expect(clippy::cast_possible_truncation, reason = "at most SEND_BATCH")]
        let vlen = count.min(SEND_BATCH) as c_uint;
        let headers = self.storage.headers.as_mut_ptr();
        // SAFETY: `fill` has just laid out `count` messages. Their names and control messages lie
        // in this ring, and their contents in the batch that the caller of `send` still lends.
        let rc = unsafe { libc::sendmmsg(socket.as_raw_fd(), headers, vlen, libc::MSG_DONTWAIT) };
        usize::try_from(rc).map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }
}

impl Default for SendRing {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for SendRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SendRing").field("tos", &self.tos).finish_non_exhaustive()
    }
}

impl SendError {
    const fn from_errno(errno: c_int) -> Self {
        match errno {
            libc::EMSGSIZE => Self::TooLarge,
            other => Self::Os(other),
        }
    }
}

/// Batch that is being sent, with its outcome so far.
struct BatchSend<'a> {
    batch: &'a [Transmit<'a>],
    at: Cursor,
    outcome: SendOutcome,
}

impl BatchSend<'_> {
    const fn is_done(&self) -> bool {
        self.at.index >= self.batch.len()
    }

    /// Returns whether the kernel would cut the next message into several datagrams.
    fn is_segmented(&self) -> bool {
        let mut ahead = self.at;
        ahead.step(self.batch, true).is_some_and(|piece| piece.segment.is_some())
    }

    /// Moves past `messages` messages that the kernel accepted.
    fn advance(&mut self, messages: usize, gso: bool) {
        let before = self.at.index;
        for _ in 0..messages {
            self.at.step(self.batch, gso);
        }
        self.outcome.sent += self.at.index - before;
    }

    /// Counts the next transmit as failed, and moves past it.
    const fn fail(&mut self, error: SendError) {
        self.outcome.failed += 1;
        self.outcome.last_error = Some(error);
        self.at = Cursor { index: self.at.index + 1, offset: 0 };
    }
}

/// Position in a batch: the number of finished transmits, and the number of finished bytes of the
/// next transmit.
#[derive(Clone, Copy, Default)]
struct Cursor {
    index: usize,
    offset: usize,
}

/// Contents of one message.
struct Piece<'a> {
    of: &'a Transmit<'a>,
    /// Part of the transmit's contents that this message carries.
    contents: &'a [u8],
    /// Length of the datagrams if the kernel cuts the message.
    segment: Option<u16>,
}

impl Cursor {
    /// Returns the next message and moves past it; returns `None` at the end of the batch or at a
    /// transmit that exceeds a limit.
    fn step<'a>(&mut self, batch: &'a [Transmit<'a>], gso: bool) -> Option<Piece<'a>> {
        let transmit = batch.get(self.index)?;
        transmit.datagrams()?;
        let rest = transmit.contents.get(self.offset..)?;
        let len = if gso { rest.len() } else { rest.len().min(transmit.stride) };
        let contents = rest.get(..len)?;
        *self = if len == rest.len() {
            Self { index: self.index + 1, offset: 0 }
        } else {
            Self { index: self.index, offset: self.offset + len }
        };
        let segment =
            if len > transmit.stride { u16::try_from(transmit.stride).ok() } else { None };
        Some(Piece { of: transmit, contents, segment })
    }
}

/// Limit on the ICMP errors of earlier datagrams that one call ignores.
const MAX_STALE_ERRORS: u32 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests the bookkeeping alone, because loopback never fills a send buffer.
    #[test]
    fn a_transmit_cut_short_is_not_counted_until_its_last_datagram_is_out() {
        let to = SocketAddr::from(([127, 0, 0, 1], 9));
        let batch = [10, 25, 30].map(|len| Transmit::new(to, &[7; 30][..len], 10));
        let mut job =
            BatchSend { batch: &batch, at: Cursor::default(), outcome: SendOutcome::default() };
        // The three transmits have one, three and three datagrams.
        for (taken, sent) in [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)] {
            job.advance(taken, false);
            assert_eq!(job.outcome.sent, sent);
        }
        assert!(job.is_done());
    }

    #[test]
    fn with_gso_each_transmit_is_one_message() {
        let to = SocketAddr::from(([127, 0, 0, 1], 9));
        let batch = [10, 25].map(|len| Transmit::new(to, &[7; 30][..len], 10));
        let mut at = Cursor::default();
        let segments: Vec<_> = std::iter::from_fn(|| at.step(&batch, true))
            .map(|piece| (piece.contents.len(), piece.segment))
            .collect();
        assert_eq!(segments, [(10, None), (25, Some(10))]);
    }
}
