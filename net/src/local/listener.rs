//! Listening sockets for calls from other processes.

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
    /// Name of the listener's socket. Fields are dropped in this order: the socket must listen
    /// while the name exists, or a successor takes the name for that of a dead process.
    _name: Option<Name>,
    socket: OwnedFd,
    /// Wakes a thread that waits for a caller. The socket itself must not be shut down: one from
    /// systemd also serves the next process of this service.
    stopped: OwnedFd,
}

impl Listener {
    /// Binds and listens at a path; `mode` decides which users may connect.
    ///
    /// # Errors
    /// Returns the kernel's error: `AddrInUse` if another process listens there, and
    /// `AlreadyExists` if a file that is not a socket is there.
    pub fn bind(path: &Path, mode: u32) -> io::Result<Self> {
        let listener = Self::of_socket(new_socket()?)?;
        let name = Name::listen(&listener.socket, path, mode)?;
        Ok(Self { _name: Some(name), ..listener })
    }

    /// Wraps a socket that this process was given, bound and listening. Dropping the listener keeps
    /// the socket's name.
    ///
    /// # Errors
    /// Returns the kernel's error if too many files are open.
    pub fn of_socket(socket: OwnedFd) -> io::Result<Self> {
        // Another process that shares the socket may accept a caller between `poll` and `accept`.
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
        let told = write(&self.stopped, &1_u64.to_ne_bytes());
        debug_assert!(told.is_ok(), "the counter of the event is far from full");
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
