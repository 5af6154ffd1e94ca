//! Sockets on which a process listens for connections from other processes of its host.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::{Errno, ioctl_fionbio, retry_on_intr, write};
use rustix::net::{SocketFlags, accept_with};

use super::line::{Line, new_socket};
use super::name::Name;

/// Socket that other processes connect to.
#[derive(Debug)]
pub struct Listener {
    /// Name of the listener's socket. Rust drops the name before the socket. The socket must listen
    /// while the name exists, or a successor would take the name for that of a dead process.
    _name: Option<Name>,
    socket: OwnedFd,
    /// Wakes a thread that waits for a caller. The socket itself must not be shut down, because a
    /// socket from systemd also serves the next process of this service.
    stopped: OwnedFd,
}

impl Listener {
    /// Binds and listens at a path; `mode` decides which users may connect.
    ///
    /// # Errors
    /// Returns `AddrInUse` if another process listens at the path, `AlreadyExists` if the path
    /// names a file other than a socket, `PermissionDenied` if another process replaced the socket,
    /// and otherwise the kernel's error.
    pub fn bind(path: &Path, mode: u32) -> io::Result<Self> {
        let listener = Self::of_socket(new_socket()?)?;
        let name = Name::listen(&listener.socket, path, mode)?;
        Ok(Self { _name: Some(name), ..listener })
    }

    /// Wraps a bound and listening socket that another process opened. When the listener is
    /// dropped, the socket's name stays.
    ///
    /// # Errors
    /// Returns the kernel's error if too many files are open.
    pub fn of_socket(socket: OwnedFd) -> io::Result<Self> {
        // Make the socket non-blocking: another process that shares the socket may accept the
        // connection between `poll` and `accept`, which would then block.
        ioctl_fionbio(&socket, true)?;
        Ok(Self { _name: None, socket, stopped: eventfd(0, EventfdFlags::CLOEXEC)? })
    }

    /// Waits for a caller; returns `None` after [`stop`](Self::stop).
    ///
    /// # Errors
    /// Returns the kernel's error; later calls may succeed.
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

    /// Stops the listener: threads that wait for a caller get `None`.
    pub fn stop(&self) {
        let written = write(&self.stopped, &1_u64.to_ne_bytes());
        debug_assert!(written.is_ok(), "the event's counter is far from full");
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
