//! Sending: many datagrams a message, many messages a system call.
#![expect(unsafe_code, reason = "sendmmsg takes pointers to pointers")]

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;

use libc::{c_int, c_uint};
use racksum_proto::time::Span;
use socket2::SockAddr;

use super::cmsg::Control;
use super::{MAX_DATAGRAM, MAX_SEGMENTS, SEND_BATCH, UdpSocket, wait_writable};

/// Bytes for one receiver, to be cut into datagrams.
#[derive(Debug, Clone, Copy)]
pub struct Transmit<'a> {
    /// The receiver, or the multicast group.
    pub to: SocketAddr,
    /// The datagrams, one behind the other: 1 to 65,507 bytes.
    pub contents: &'a [u8],
    /// What follows `contents` in their last datagram, from where it lies: a transmit that has a
    /// tail or a trailer is a single datagram.
    pub tail: &'a [u8],
    /// What follows the tail, likewise.
    pub trailer: &'a [u8],
    /// The length of each datagram but the last, which may be shorter. At most 64 datagrams.
    pub stride: usize,
}

impl<'a> Transmit<'a> {
    /// A transmit whose bytes lie in one place.
    #[must_use]
    pub const fn new(to: SocketAddr, contents: &'a [u8], stride: usize) -> Self {
        Self { to, contents, tail: &[], trailer: &[], stride }
    }

    /// One datagram whose bytes lie in up to three places.
    #[must_use]
    pub const fn in_parts(to: SocketAddr, parts: [&'a [u8]; 3]) -> Self {
        let [contents, tail, trailer] = parts;
        let stride = contents.len() + tail.len() + trailer.len();
        Self { to, contents, tail, trailer, stride }
    }

    /// Whether all of its bytes are its contents.
    const fn is_in_one(&self) -> bool {
        self.tail.is_empty() && self.trailer.is_empty()
    }

    /// Bytes in all.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.contents.len() + self.tail.len() + self.trailer.len()
    }

    /// Whether there are none, so that it cannot be sent.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many datagrams it is. None if it breaks a bound, and so cannot be sent.
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

/// What became of a batch.
///
/// The first `sent + failed` transmits are done with. Those after them were not tried, because
/// the socket's buffer is full: offer them again once it is writable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SendOutcome {
    /// Transmits handed to the kernel.
    pub sent: usize,
    /// The socket's buffer is full. This never happens over loopback, which takes everything and
    /// lets the receiver drop it.
    pub blocked: bool,
    /// Transmits that were given up, for the reason of the last in [`SendOutcome::last_error`].
    pub failed: usize,
    /// Why the last of the failed ones failed.
    pub last_error: Option<SendError>,
}

/// Why a transmit was not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// It is empty, above 65,507 bytes, above 64 datagrams or, with a tail, above one: the caller's
    /// mistake.
    #[error("a transmit must be 1 to 65507 bytes and at most 64 datagrams")]
    Unsendable,
    /// Its datagrams are larger than the interface's MTU.
    #[error("the datagram is larger than the MTU of the interface it would leave by")]
    TooLarge,
    /// The kernel refused for another reason, by this errno.
    #[error("the kernel refused the datagram: {}", io::Error::from_raw_os_error(*.0))]
    Os(c_int),
    /// The send buffer stayed full.
    #[error("the send buffer stayed full: the link is slower than what it is given")]
    NoRoom,
}

/// The storage of one `sendmmsg`, for one thread.
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

// SAFETY: the pointers in the headers and iovecs are written anew before each system call, point
// at this very storage or at what the call borrows, and are never followed outside of the call.
unsafe impl Send for Storage {}

impl UdpSocket {
    /// Sends a batch, and waits for room in the send buffer, 2 ms at most and `waits` times at
    /// most. What still does not go is lost, and so whoever lacks it asks for it. It is counted,
    /// as is what the kernel refuses: see [`UdpSocket::send_failures`].
    pub fn send_patiently(&self, ring: &mut SendRing, mut batch: &[Transmit<'_>], waits: u32) {
        for left in (0..=waits).rev() {
            if batch.is_empty() {
                return;
            }
            let outcome = self.send(ring, batch);
            self.note_send_failures(outcome.failed, outcome.last_error);
            batch = &batch[(outcome.sent + outcome.failed).min(batch.len())..];
            if outcome.blocked && left > 0 {
                // A timeout and readiness are the same here: try again.
                drop(wait_writable(self.as_fd(), Some(Span::from_millis(2))));
            }
        }
        self.note_send_failures(batch.len(), Some(SendError::NoRoom));
    }

    /// Sends a batch, in order, with as few system calls as its size allows.
    ///
    /// Without GSO each datagram is a message. When the buffer fills in the middle of a transmit,
    /// that one counts as not sent although its first datagrams are out: offering it again repeats
    /// them, and the receiver is to tell duplicates anyway.
    pub fn send(&self, ring: &mut SendRing, batch: &[Transmit<'_>]) -> SendOutcome {
        let mut job = Job { batch, at: Cursor::default(), outcome: SendOutcome::default() };
        // The errno with which a segmented message failed, while it is being tried singly.
        let mut trial: Option<c_int> = None;
        // The fate of earlier datagrams (ICMP) comes out of a later call, which then sent nothing.
        let mut stale_left = MAX_STALE_ERRORS;
        while !job.is_done() && !job.outcome.blocked {
            // Read once: another thread on this socket may switch it off meanwhile.
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
                        tracing::warn!(%local, errno, "GSO fails here; datagrams now go singly");
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
                    // Its datagrams fail singly too, so segmentation was not to blame.
                    if trial.take().is_some() {
                        self.set_gso(true);
                    }
                    job.fail(SendError::from_errno(errno));
                }
            }
        }
        // A full buffer cut the trial short: undecided.
        if trial.is_some() {
            self.set_gso(true);
        }
        job.outcome
    }
}

impl SendRing {
    /// A ring whose batches bear the socket's own TOS.
    #[must_use]
    pub fn new() -> Self {
        let unspecified = SockAddr::from(SocketAddr::from(([0, 0, 0, 0], 0)));
        let storage = Box::new(Storage {
            // SAFETY: mmsghdr and iovec are plain C data, for which all zeros is a value.
            headers: unsafe { std::mem::zeroed() },
            // SAFETY: as above.
            iovecs: unsafe { std::mem::zeroed() },
            names: std::array::from_fn(|_| unspecified.clone()),
            controls: [Control::new(); SEND_BATCH],
        });
        Self { storage, tos: None }
    }

    /// Marks what this ring sends from now on with `tos`, DSCP and ECN bits; none goes back to the
    /// socket's own. This is how lanes of one socket differ without a system call each.
    pub const fn set_tos(&mut self, tos: Option<u8>) {
        self.tos = tos;
    }

    /// Lays out the next messages of a job; the answer is how many. None are laid out if the
    /// job's next transmit breaks a bound.
    fn fill(&mut self, job: &Job<'_>, gso: bool) -> usize {
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
        iovecs[slot] = [piece.contents, tail, trailer].map(|part| libc::iovec {
            iov_base: part.as_ptr().cast_mut().cast(),
            iov_len: part.len(),
        });
        let header = &mut headers[slot].msg_hdr;
        header.msg_name = names[slot].as_ptr().cast_mut().cast();
        header.msg_namelen = names[slot].len();
        header.msg_iov = iovecs[slot].as_mut_ptr();
        header.msg_iovlen = if piece.of.is_in_one() { 1 } else { iovecs[slot].len() };
        header.msg_control = if used > 0 { control.as_mut_ptr().cast() } else { ptr::null_mut() };
        header.msg_controllen = used;
    }

    /// Hands over the first `count` messages; the answer is how many the kernel took, or an errno.
    fn submit(&mut self, socket: &UdpSocket, count: usize) -> Result<usize, c_int> {
        #[expect(clippy::cast_possible_truncation, reason = "at most SEND_BATCH")]
        let vlen = count.min(SEND_BATCH) as c_uint;
        let headers = self.storage.headers.as_mut_ptr();
        // SAFETY: `fill` has just laid out `count` messages. Their names and control messages lie
        // in this ring and their contents in the batch that the caller of `send` still lends.
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

/// A batch on its way, and what became of it so far.
struct Job<'a> {
    batch: &'a [Transmit<'a>],
    at: Cursor,
    outcome: SendOutcome,
}

impl Job<'_> {
    const fn is_done(&self) -> bool {
        self.at.index >= self.batch.len()
    }

    /// Whether the next message would be cut by the kernel.
    fn is_segmented(&self) -> bool {
        let mut ahead = self.at;
        ahead.step(self.batch, true).is_some_and(|piece| piece.segment.is_some())
    }

    /// The kernel took `messages` of them.
    fn advance(&mut self, messages: usize, gso: bool) {
        let before = self.at.index;
        for _ in 0..messages {
            self.at.step(self.batch, gso);
        }
        self.outcome.sent += self.at.index - before;
    }

    /// The next transmit is given up.
    const fn fail(&mut self, error: SendError) {
        self.outcome.failed += 1;
        self.outcome.last_error = Some(error);
        self.at = Cursor { index: self.at.index + 1, offset: 0 };
    }
}

/// How far a batch is: whole transmits, and bytes of the next.
#[derive(Clone, Copy, Default)]
struct Cursor {
    index: usize,
    offset: usize,
}

/// What one message holds.
struct Piece<'a> {
    of: &'a Transmit<'a>,
    /// What it takes of the transmit's contents.
    contents: &'a [u8],
    /// The datagrams' length, if the kernel is to cut.
    segment: Option<u16>,
}

impl Cursor {
    /// The next message and a step past it; none at the end and at a transmit that breaks a bound.
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

/// How many reports of earlier datagrams' fates one call reads over.
const MAX_STALE_ERRORS: u32 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    /// The loopback interface never fills a send buffer, so the bookkeeping is tested by itself.
    #[test]
    fn a_transmit_cut_short_is_not_counted_until_its_last_datagram_is_out() {
        let to = SocketAddr::from(([127, 0, 0, 1], 9));
        let batch = [10, 25, 30].map(|len| Transmit::new(to, &[7; 30][..len], 10));
        let mut job = Job { batch: &batch, at: Cursor::default(), outcome: SendOutcome::default() };
        // One datagram, then three, then three.
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
