//! Where other processes call this one.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::{Errno, ioctl_fionbio, retry_on_intr, write};
use rustix::net::{SocketFlags, accept_with};

use super::line::{Line, new_socket};
use super::name::Name;

/// A socket that other processes call.
#[derive(Debug)]
pub struct Listener {
    /// The name that goes with the listener. Fields are dropped in this order: while the name is
    /// there, the socket must listen, or a successor takes the name for one that was left behind.
    _name: Option<Name>,
    socket: OwnedFd,
    /// Wakes who waits for a caller. A socket of systemd's is not to be shut down: it goes on in
    /// the next life of this process.
    stopped: OwnedFd,
}

impl Listener {
    /// Listens at a path, which only those may call that its permissions let write.
    ///
    /// # Errors
    /// The kernel's; `AddrInUse` when somebody listens there already, and `AlreadyExists` when
    /// there is something else than a socket.
    pub fn bind(path: &Path, mode: u32) -> io::Result<Self> {
        let listener = Self::of_socket(new_socket()?)?;
        let name = Name::listen(&listener.socket, path, mode)?;
        Ok(Self { _name: Some(name), ..listener })
    }

    /// One whose socket this process was given, bound and listening. It stays as it is.
    ///
    /// # Errors
    /// The kernel's, when there are too many open files.
    pub fn of_socket(socket: OwnedFd) -> io::Result<Self> {
        // A caller that was seen may be another's by now.
        ioctl_fionbio(&socket, true)?;
        Ok(Self { _name: None, socket, stopped: eventfd(0, EventfdFlags::CLOEXEC)? })
    }

    /// Waits for a caller; none once it was told to [stop](Self::stop).
    ///
    /// # Errors
    /// The kernel's; there may be callers after that.
    pub fn accept(&self) -> io::Result<Option<Line>> {
        loop {
            let mut awaited = [&self.socket, &self.stopped]
                .map(|descriptor| PollFd::new(descriptor, PollFlags::IN));
            retry_on_intr(|| poll(&mut awaited, None))?;
            if !awaited[1].revents().is_empty() {
                return Ok(None);
            }
            match retry_on_intr(|| accept_with(&self.socket, SocketFlags::CLOEXEC)) {
                Err(Errno::AGAIN) => {}
                socket => return Line::of(socket?).map(Some),
            }
        }
    }

    /// Answers nobody any more: whoever waits for a caller gets none.
    pub fn stop(&self) {
        let told = write(&self.stopped, &1_u64.to_ne_bytes());
        debug_assert!(told.is_ok(), "it is told once or twice");
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
