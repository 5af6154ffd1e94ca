//! Lines: connections between processes of one host. A line delivers each message whole, with its
//! descriptor if it has one.
//!
//! Messages are JSON on a `SOCK_SEQPACKET` socket, which keeps message boundaries. Messages are
//! few, and JSON lets people read them when debugging.

#![expect(unsafe_code, reason = "getsockopt writes the peer's credentials through a pointer")]

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use racksum_proto::peer_text::PeerText;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect,
    recvmsg, sendmsg, shutdown, socket_with,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::call_error::CallError;
use super::limits::own_user;
use super::trust;
use crate::alive::Alive;

/// Size of the largest message, in bytes of JSON.
const MAX_MESSAGE: usize = 64 << 10;

/// Longest time that a send waits for a peer that does not read.
const SEND_PATIENCE: Duration = Duration::from_secs(10);

/// Connects to the stream socket at a path, without checking which user listens at it. Waits at
/// most `patience` while the listener's queue of callers is full.
///
/// # Errors
/// Returns [`CallError::NoSocket`] or the kernel's error.
pub fn call_for_stream(path: &Path, patience: Duration) -> Result<UnixStream, CallError> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let socket = socket.map_err(io::Error::from)?;
    // On a unix socket, `connect` obeys the send timeout.
    set_socket_timeout(&socket, Timeout::Send, Some(patience)).map_err(io::Error::from)?;
    call(&socket, path)?;
    Ok(socket.into())
}

/// Connects a socket to a path.
fn call(socket: &OwnedFd, path: &Path) -> Result<(), CallError> {
    let addr = SocketAddrUnix::new(path).map_err(io::Error::from)?;
    match retry_on_intr(|| connect(socket, &addr)) {
        Err(Errno::AGAIN) => {
            let why = "the queue of the process that listens there is full; the process may be \
                       suspended";
            Err(io::Error::new(io::ErrorKind::WouldBlock, why).into())
        }
        called => called.map_err(|errno| CallError::of(path, errno.into())),
    }
}

/// Reason why a message was not sent or not received. The line is unusable after most of these
/// errors.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    /// The message is longer than the limit.
    #[error("a message of {len} bytes exceeds the limit of {MAX_MESSAGE}")]
    TooLong {
        /// Length of the message in bytes.
        len: usize,
    },
    /// The bytes are not a message of the expected type.
    #[error("cannot parse a message: {}", PeerText::of(.0))]
    Decode(serde_json::Error),
    /// The message cannot be written as JSON.
    #[error("cannot encode a message: {0}")]
    Encode(serde_json::Error),
    /// This user has reached the kernel's limit on descriptors that are sent but not yet received.
    /// The line stays usable.
    #[error("too many file descriptors are in flight to processes that do not read")]
    TooManyOnTheWay,
    /// The peer is dead, does not read, or sent nothing before the timeout.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl From<Errno> for LineError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::TOOMANYREFS => Self::TooManyOnTheWay,
            errno => Self::Io(errno.into()),
        }
    }
}

/// Process at the other end of a line, as the kernel reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Process id as this process sees it. The id is 0 if this process cannot see the peer, for
    /// example because the peer runs in another container.
    pub pid: i32,
    /// User id as this process sees it. All users without an id in this namespace share one id.
    pub uid: u32,
}

impl Peer {
    /// Returns the process at the other end of a unix socket.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        // Call libc directly: rustix's `Pid` cannot be 0, which the kernel reports for a process of
        // another container.
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len =
            libc::socklen_t::try_from(size_of::<libc::ucred>()).expect("a ucred is small");
        let (into, socket) = ((&raw mut peer).cast(), socket.as_fd().as_raw_fd());
        // SAFETY: the kernel writes at most `len` bytes to `peer`, which is that long.
        let got = unsafe {
            libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_PEERCRED, into, &raw mut len)
        };
        match got {
            0 => Ok(Self { pid: peer.pid, uid: peer.uid }),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Connection to another process of this host.
#[derive(Debug)]
pub struct Line {
    socket: Alive<OwnedFd>,
}

impl Line {
    /// Connects to the process that listens at a path. The process must run as this user, as root,
    /// or as the only user who can put a socket at the path.
    ///
    /// # Errors
    /// Returns a [`CallError`] if the call fails or the process that listens at the path is not
    /// trusted.
    pub fn connect(path: &Path) -> Result<Self, CallError> {
        // `of` sets the send timeout, which also limits the connect.
        let line = Self::of(new_socket()?)?;
        call(&line.socket, path)?;
        // The kernel reports the process that called `listen`, which is systemd if it opened the
        // socket.
        trust::check(line.peer()?.uid, path, own_user())?;
        Ok(line)
    }

    pub(super) fn of(socket: OwnedFd) -> io::Result<Self> {
        set_socket_timeout(&socket, Timeout::Send, Some(SEND_PATIENCE))?;
        Ok(Self { socket: Alive::new(socket) })
    }

    /// Sends a message, with a descriptor if one is given. Waits up to ten seconds while the peer's
    /// queue is full. A failed send shuts the line down, except for [`LineError::TooManyOnTheWay`].
    ///
    /// # Errors
    /// Returns a [`LineError`] if the message was not sent.
    pub fn send<T: Serialize>(
        &self,
        message: &T,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(), LineError> {
        self.send_with(message, descriptor, SendFlags::NOSIGNAL)
    }

    /// Sends a message like [`send`](Self::send), but fails immediately if the peer's queue is
    /// full.
    ///
    /// # Errors
    /// Returns a [`LineError`] if the message was not sent.
    pub fn send_now<T: Serialize>(
        &self,
        message: &T,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(), LineError> {
        self.send_with(message, descriptor, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    /// Sends a message unless the peer's queue is full. Returns whether the message was sent.
    ///
    /// # Errors
    /// Returns a [`LineError`] if the send fails for a reason other than a full queue.
    pub fn offer<T: Serialize>(&self, message: &T) -> Result<bool, LineError> {
        match self.try_send(message, None, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Err(LineError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            sent => self.or_hang_up(sent).map(|()| true),
        }
    }

    /// Sets how long [`recv`](Self::recv) waits for a message; `None` waits forever. A timeout is
    /// an error of kind `WouldBlock`.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn set_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        Ok(set_socket_timeout(&self.socket, Timeout::Recv, patience)?)
    }

    fn send_with<T: Serialize>(
        &self,
        message: &T,
        descriptor: Option<BorrowedFd<'_>>,
        flags: SendFlags,
    ) -> Result<(), LineError> {
        self.or_hang_up(self.try_send(message, descriptor, flags))
    }

    /// Shuts the line down after a failed send, except for [`LineError::TooManyOnTheWay`].
    fn or_hang_up(&self, sent: Result<(), LineError>) -> Result<(), LineError> {
        sent.inspect_err(|error| {
            if !matches!(error, LineError::TooManyOnTheWay) {
                self.hang_up();
            }
        })
    }

    fn try_send<T: Serialize>(
        &self,
        message: &T,
        descriptor: Option<BorrowedFd<'_>>,
        flags: SendFlags,
    ) -> Result<(), LineError> {
        let bytes = serde_json::to_vec(message).map_err(LineError::Encode)?;
        if bytes.len() > MAX_MESSAGE {
            return Err(LineError::TooLong { len: bytes.len() });
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let descriptors = descriptor.as_slice();
        if !descriptors.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let bytes = [IoSlice::new(&bytes)];
        match retry_on_intr(|| sendmsg(&self.socket, &bytes, &mut ancillary, flags)) {
            Err(Errno::AGAIN) => Err(late("the peer does not read its messages")),
            sent => Ok(sent.map(drop)?),
        }
    }

    /// Waits for the next message; returns `None` once either side has shut the line down.
    ///
    /// # Errors
    /// Returns a [`LineError`] if no message arrives in time or the message cannot be read.
    pub fn recv<T: DeserializeOwned>(&self) -> Result<Option<(T, Option<OwnedFd>)>, LineError> {
        let mut bytes = vec![0; MAX_MESSAGE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let into = &mut [IoSliceMut::new(&mut bytes)];
            match recvmsg(&self.socket, into, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Ok(None),
                Err(Errno::AGAIN) => return Err(late("the peer sent nothing before the timeout")),
                received => break received?,
            }
        };
        let descriptor = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        match received.bytes {
            0 => Ok(None),
            len => {
                let message = serde_json::from_slice(&bytes[..len]).map_err(LineError::Decode)?;
                Ok(Some((message, descriptor)))
            }
        }
    }

    /// Returns the process at the other end.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn peer(&self) -> io::Result<Peer> {
        Peer::of(&*self.socket)
    }

    /// Shuts the line down: threads on either side that wait for a message get `None`.
    pub fn hang_up(&self) {
        // Ignore `NOTCONN`: the peer may already have closed the line.
        let result = shutdown(&self.socket, Shutdown::Both);
        debug_assert!(
            matches!(result, Ok(()) | Err(Errno::NOTCONN)),
            "a connected socket can be shut down"
        );
    }
}

/// Returns the error for a peer that takes too long. The kernel's own text would misleadingly
/// mention unavailable resources.
fn late(what: &'static str) -> LineError {
    LineError::Io(io::Error::new(io::ErrorKind::WouldBlock, what))
}

pub(super) fn new_socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}
