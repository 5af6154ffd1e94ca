//! Lines between processes: each message arrives whole, with a descriptor if it was sent with one.
//!
//! Messages are JSON on a `SOCK_SEQPACKET` socket, which keeps their bounds: they are few, and
//! people read them when something is wrong.

use std::fs::Permissions;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType,
    accept_with, bind, connect, listen, recvmsg, sendmsg, shutdown, socket_with,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The largest message, in bytes of JSON.
const MAX_MESSAGE: usize = 64 << 10;

/// How many callers may wait to be answered.
const BACKLOG: i32 = 128;

/// Why a message was not sent or not received. After any of them the line is of no more use.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    /// The message is above the limit.
    #[error("a message of {len} bytes is above the limit of {MAX_MESSAGE}")]
    TooLong {
        /// Its length in bytes.
        len: usize,
    },
    /// The bytes are no message of the kind that was expected.
    #[error("a message cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    /// The other side is gone, or does not read.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl From<Errno> for LineError {
    fn from(errno: Errno) -> Self {
        Self::Io(errno.into())
    }
}

/// The process at the other end, as the kernel knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its process, by this process's numbers; 0 if it is not among them.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
}

/// A connection to another process of this host.
#[derive(Debug)]
pub struct Line {
    socket: OwnedFd,
}

impl Line {
    /// Calls whoever listens at a path.
    ///
    /// # Errors
    /// The kernel's: nobody listens there, or this user may not.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let socket = new_socket()?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self { socket })
    }

    /// Sends a message, with a descriptor if it is to have one; waits while the other side has
    /// many to read. A line that fails is hung up.
    ///
    /// # Errors
    /// [`LineError`].
    pub fn send<T: Serialize>(
        &self,
        message: &T,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(), LineError> {
        self.send_with(message, descriptor, SendFlags::NOSIGNAL).inspect_err(|_| self.hang_up())
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
            .inspect_err(|_| self.hang_up())
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
        retry_on_intr(|| sendmsg(&self.socket, &bytes, &mut ancillary, flags))?;
        Ok(())
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
        let peer = socket_peercred(&self.socket)?;
        Ok(Peer { pid: peer.pid.as_raw_nonzero().get(), uid: peer.uid.as_raw() })
    }

    /// Hangs up: whoever waits for a message, on either side, hears that there will be none.
    pub fn hang_up(&self) {
        // A line that has been hung up needs no more.
        let hung_up = shutdown(&self.socket, Shutdown::Both);
        debug_assert!(matches!(hung_up, Ok(()) | Err(Errno::NOTCONN)), "sockets can be shut");
    }
}

/// Where other processes call this one.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    /// Whose name is to go with the listener.
    path: Option<PathBuf>,
}

impl Listener {
    /// Listens at a path, which only those may call that its permissions let write.
    ///
    /// # Errors
    /// The kernel's; `AddrInUse` when somebody listens there already.
    pub fn bind(path: &Path, mode: u32) -> io::Result<Self> {
        if let Err(error) = Line::connect(path)
            && error.kind() == io::ErrorKind::ConnectionRefused
        {
            // Of a process that was killed.
            std::fs::remove_file(path)?;
        }
        let socket = new_socket()?;
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        let listener = Self { socket, path: Some(path.to_owned()) };
        std::fs::set_permissions(path, Permissions::from_mode(mode))?;
        listen(&listener.socket, BACKLOG)?;
        Ok(listener)
    }

    /// One whose socket this process was given, bound and listening.
    #[must_use]
    pub const fn of_socket(socket: OwnedFd) -> Self {
        Self { socket, path: None }
    }

    /// Waits for a caller.
    ///
    /// # Errors
    /// The kernel's; there may be callers after that.
    pub fn accept(&self) -> io::Result<Line> {
        let socket = retry_on_intr(|| accept_with(&self.socket, SocketFlags::CLOEXEC))?;
        Ok(Line { socket })
    }

    /// Has nobody call any more: whoever waits for a caller gets an error.
    pub fn stop(&self) {
        // One that has been stopped needs no more.
        let hung_up = shutdown(&self.socket, Shutdown::Both);
        debug_assert!(matches!(hung_up, Ok(()) | Err(Errno::NOTCONN)), "sockets can be shut");
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // Somebody may have removed it.
            drop(std::fs::remove_file(path));
        }
    }
}

fn new_socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}
