//! Lines between processes: each message arrives whole, with a descriptor if it was sent with one.
//!
//! Messages are JSON on a `SOCK_SEQPACKET` socket, which keeps their bounds: they are few, and
//! people read them when something is wrong.

#![expect(unsafe_code, reason = "who is at the other end the kernel writes to where it is told")]

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

/// The largest message, in bytes of JSON.
const MAX_MESSAGE: usize = 64 << 10;

/// How long the other side may read nothing before a line fails.
const SEND_PATIENCE: Duration = Duration::from_secs(10);

/// Calls the process that listens at a path for streams, whoever it is. Waits no longer than
/// `patience` while the calls before this one fill its queue.
///
/// # Errors
/// [`CallError::NoSocket`], or the kernel's.
pub fn call_for_stream(path: &Path, patience: Duration) -> Result<UnixStream, CallError> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let socket = socket.map_err(io::Error::from)?;
    // The kernel limits a connect by the timeout of sends.
    set_socket_timeout(&socket, Timeout::Send, Some(patience)).map_err(io::Error::from)?;
    call(&socket, path)?;
    Ok(socket.into())
}

/// Connects a socket to a path.
fn call(socket: &OwnedFd, path: &Path) -> Result<(), CallError> {
    let addr = SocketAddrUnix::new(path).map_err(io::Error::from)?;
    match retry_on_intr(|| connect(socket, &addr)) {
        Err(Errno::AGAIN) => {
            let why = "its queue of callers stays full, so it may be stopped";
            Err(io::Error::new(io::ErrorKind::WouldBlock, why).into())
        }
        called => called.map_err(|errno| CallError::of(path, errno.into())),
    }
}

/// Why a message was not sent or not received. After most of them the line is of no
/// more use.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    /// The message is above the limit.
    #[error("a message of {len} bytes is above the limit of {MAX_MESSAGE}")]
    TooLong {
        /// Its length in bytes.
        len: usize,
    },
    /// The bytes are no message of the kind that was expected.
    #[error("a message cannot be read: {}", PeerText::of(.0))]
    Json(#[from] serde_json::Error),
    /// As many descriptors as this user may send are on their way, to processes that do not read.
    /// The line is as it was.
    #[error("too many descriptors are on their way to processes that do not read")]
    TooManyOnTheWay,
    /// The other side is gone, or does not read.
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

/// The process at the other end, as the kernel knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its process, by this process's numbers; 0 if it has none here, being in a container whose
    /// processes this one does not see.
    pub pid: i32,
    /// Its user, by this process's numbers. All that have none here look like one.
    pub uid: u32,
}

impl Peer {
    /// Returns the process at the other end of a unix socket.
    ///
    /// # Errors
    /// The kernel's.
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        // As the kernel has it: a process of another container is 0, which rustix has no type for.
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = libc::socklen_t::try_from(size_of::<libc::ucred>()).expect("it is small");
        let (into, socket) = ((&raw mut peer).cast(), socket.as_fd().as_raw_fd());
        // SAFETY: the kernel writes at most `len` bytes to `peer`, which has them.
        let got = unsafe {
            libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_PEERCRED, into, &raw mut len)
        };
        match got {
            0 => Ok(Self { pid: peer.pid, uid: peer.uid }),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// A connection to another process of this host.
#[derive(Debug)]
pub struct Line {
    socket: Alive<OwnedFd>,
}

impl Line {
    /// Calls the process that listens at a path, which must be one of this user or of root, or of
    /// the user who alone can put a socket there.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn connect(path: &Path) -> Result<Self, CallError> {
        // The timeout of sends, which it has by now, limits the call as well.
        let line = Self::of(new_socket()?)?;
        call(&line.socket, path)?;
        // The kernel keeps who began to listen: systemd, if it has opened the socket.
        trust::check(line.peer()?.uid, path, own_user())?;
        Ok(line)
    }

    pub(super) fn of(socket: OwnedFd) -> io::Result<Self> {
        set_socket_timeout(&socket, Timeout::Send, Some(SEND_PATIENCE))?;
        Ok(Self { socket: Alive::new(socket) })
    }

    /// Sends a message, with a descriptor if it is to have one; waits ten seconds at most while the
    /// other side has many to read. A line that fails is hung up.
    ///
    /// # Errors
    /// [`LineError`].
    pub fn send<T: Serialize>(
        &self,
        message: &T,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(), LineError> {
        self.send_with(message, descriptor, SendFlags::NOSIGNAL)
    }

    /// The same at once: when the other side has too many to read, the line fails.
    ///
    /// # Errors
    /// [`LineError`].
    pub fn send_now<T: Serialize>(
        &self,
        message: &T,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(), LineError> {
        self.send_with(message, descriptor, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    /// Sends a message if the other side has not too many to read. Returns whether it has sent it.
    ///
    /// # Errors
    /// [`LineError`].
    pub fn offer<T: Serialize>(&self, message: &T) -> Result<bool, LineError> {
        match self.try_send(message, None, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Err(LineError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            sent => self.or_hang_up(sent).map(|()| true),
        }
    }

    /// How long to wait for a message from now on; `None` is for ever. One that does not come in
    /// time is an error, of kind `WouldBlock`.
    ///
    /// # Errors
    /// The kernel's.
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

    /// Hangs up a line that fails.
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
        let bytes = serde_json::to_vec(message)?;
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
            Err(Errno::AGAIN) => Err(late("it does not read what it is told")),
            sent => Ok(sent.map(drop)?),
        }
    }

    /// Waits for the next message; none once the other side has hung up.
    ///
    /// # Errors
    /// [`LineError`].
    pub fn recv<T: DeserializeOwned>(&self) -> Result<Option<(T, Option<OwnedFd>)>, LineError> {
        let mut bytes = vec![0; MAX_MESSAGE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let into = &mut [IoSliceMut::new(&mut bytes)];
            match recvmsg(&self.socket, into, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Ok(None),
                Err(Errno::AGAIN) => return Err(late("it said nothing in time")),
                received => break received?,
            }
        };
        let descriptor = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        match received.bytes {
            0 => Ok(None),
            len => Ok(Some((serde_json::from_slice(&bytes[..len])?, descriptor))),
        }
    }

    /// The process at the other end.
    ///
    /// # Errors
    /// The kernel's.
    pub fn peer(&self) -> io::Result<Peer> {
        Peer::of(&*self.socket)
    }

    /// Hangs up: whoever waits for a message, on either side, hears that there will be none.
    pub fn hang_up(&self) {
        // A line that has been hung up needs no more.
        let hung_up = shutdown(&self.socket, Shutdown::Both);
        debug_assert!(matches!(hung_up, Ok(()) | Err(Errno::NOTCONN)), "sockets can be shut");
    }
}

/// Why a line fails whose other side takes too long: the kernel's own words are of resources.
fn late(what: &'static str) -> LineError {
    LineError::Io(io::Error::new(io::ErrorKind::WouldBlock, what))
}

pub(super) fn new_socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}
