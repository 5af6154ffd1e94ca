//! Where other processes call this one.

use std::fs::{File, Metadata, Permissions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::io::{Errno, ioctl_fionbio, retry_on_intr, write};
use rustix::net::{SocketAddrUnix, SocketFlags, accept_with, bind, listen};

use super::line::{Line, new_socket};

/// How many callers may wait to be answered.
const BACKLOG: i32 = 128;

/// How often, and how many times, it is tried to lock a folder that others have locked.
const LOCK_POLL: Duration = Duration::from_millis(10);
const LOCK_TRIES: usize = 200;

/// A socket that other processes call.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    /// Wakes who waits for a caller. A socket of systemd's is not to be shut down: it goes on in
    /// the next life of this process.
    stopped: OwnedFd,
    /// Whose name is to go with the listener.
    name: Option<Name>,
}

/// The name of a socket, and which file it is: others may have put theirs there.
#[derive(Debug)]
struct Name {
    path: PathBuf,
    file: (u64, u64),
}

impl Listener {
    /// Listens at a path, which only those may call that its permissions let write.
    ///
    /// # Errors
    /// The kernel's; `AddrInUse` when somebody listens there already, and `AlreadyExists` when
    /// there is something else than a socket.
    pub fn bind(path: &Path, mode: u32) -> io::Result<Self> {
        // Of two that start at once, the second would take the first for one that was killed.
        let _alone = lock_folder(path);
        remove_left(path)?;
        let socket = new_socket()?;
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        let file = identity(&path.symlink_metadata()?);
        let mut listener = Self::of_socket(socket)?;
        listener.name = Some(Name { path: path.to_owned(), file });
        std::fs::set_permissions(path, Permissions::from_mode(mode))?;
        listen(&listener.socket, BACKLOG)?;
        Ok(listener)
    }

    /// One whose socket this process was given, bound and listening. It stays as it is.
    ///
    /// # Errors
    /// The kernel's, when there are too many open files.
    pub fn of_socket(socket: OwnedFd) -> io::Result<Self> {
        // A caller that was seen may be another's by now.
        ioctl_fionbio(&socket, true)?;
        Ok(Self { socket, stopped: eventfd(0, EventfdFlags::CLOEXEC)?, name: None })
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

impl Drop for Listener {
    fn drop(&mut self) {
        let Some(Name { path, file }) = &self.name else { return };
        let _alone = lock_folder(path);
        if path.symlink_metadata().is_ok_and(|found| identity(&found) == *file) {
            // Its folder may be closed to this process by now.
            drop(std::fs::remove_file(path));
        }
    }
}

/// Removes the socket of a process that was killed, and nothing else.
fn remove_left(path: &Path) -> io::Result<()> {
    match path.symlink_metadata() {
        Ok(found) if !found.file_type().is_socket() => {
            let why = "there is something else than a socket; it is left as it is";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
        }
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    }
    match Line::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)
        }
        // Somebody is there, and to bind says so.
        _ => Ok(()),
    }
}

/// Keeps others that do so from listening in the folder of a path. Where it cannot be locked for so
/// long, nobody is kept.
fn lock_folder(path: &Path) -> Option<File> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = File::open(folder.unwrap_or_else(|| Path::new("."))).ok()?;
    for _ in 0..LOCK_TRIES {
        match flock(folder.as_fd(), FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(folder),
            Err(Errno::WOULDBLOCK) => std::thread::sleep(LOCK_POLL),
            Err(_) => return None,
        }
    }
    // Whoever may read a folder may lock it, and is to keep nobody from serving in it.
    None
}

fn identity(file: &Metadata) -> (u64, u64) {
    (file.dev(), file.ino())
}
