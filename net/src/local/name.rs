//! Names of sockets in the file system: how they are created, their permissions and their removal.

use std::fs::{File, Metadata, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, fchmod, flock};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

use super::limits::own_user;

/// Number of callers that may wait in a socket's queue.
const BACKLOG: i32 = 128;

/// Interval between attempts to lock a folder.
const LOCK_POLL: Duration = Duration::from_millis(10);
/// Number of attempts to lock a folder.
const LOCK_TRIES: usize = 200;

/// Name of a socket, removed on drop unless another process has replaced it.
#[derive(Debug)]
pub struct Name {
    path: PathBuf,
    file: (u64, u64),
}

/// Listens for streams at a path; `mode` decides which users may connect.
///
/// # Errors
/// Returns `AddrInUse` if another process listens at the path, `AlreadyExists` if the path names a
/// file other than a socket, `PermissionDenied` if another process replaced the socket, and
/// otherwise the kernel's error.
pub fn listen_for_streams(path: &Path, mode: u32) -> io::Result<(UnixListener, Name)> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let name = Name::listen(&socket, path, mode)?;
    Ok((socket.into(), name))
}

/// Removes those of the `sockets` in `folder` that killed processes have left behind. Removes
/// nothing if the folder cannot be locked within two seconds.
pub fn remove_dead(folder: &Path, sockets: impl IntoIterator<Item = PathBuf>) {
    // Without the lock, a socket at which no process listens may belong to a process that is
    // starting.
    let Some(_alone) = lock(folder) else { return };
    for socket in sockets {
        // Ignore a failure: this process may lack permission to write to the folder, and the socket
        // then stays.
        drop(remove_left(&socket));
    }
}

impl Name {
    /// Binds and listens at a path; `mode` decides which users may connect.
    pub(super) fn listen(socket: &OwnedFd, path: &Path, mode: u32) -> io::Result<Self> {
        // Without the lock, a starting process could mistake the socket of another starting process
        // for a dead one.
        let alone = lock_folder(path);
        remove_left(path)?;
        let name = Self::bind(socket, path, mode)?;
        let listening = widen(path, mode).and_then(|()| Ok(listen(socket, BACKLOG)?));
        // Dropping a name locks the folder too, so this lock must be released first.
        drop(alone);
        listening.map(|()| name)
    }

    /// Binds a socket to a path. Linux creates the file with the socket's mode minus the umask, so
    /// users that `mode` excludes can never connect.
    fn bind(socket: &OwnedFd, path: &Path, mode: u32) -> io::Result<Self> {
        fchmod(socket, Mode::from_raw_mode(mode))?;
        bind(socket, &SocketAddrUnix::new(path)?)?;
        let file = identity(&path.symlink_metadata()?);
        Ok(Self { path: path.to_owned(), file })
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        let _alone = lock_folder(&self.path);
        if self.path.symlink_metadata().is_ok_and(|found| identity(&found) == self.file) {
            // Ignore a failure: this process may have lost permission to write to the folder.
            drop(std::fs::remove_file(&self.path));
        }
    }
}

/// Restores the mode bits that the umask removed from the socket at a path. If another user of the
/// folder has replaced the socket, the replacement keeps its mode.
fn widen(path: &Path, mode: u32) -> io::Result<()> {
    let flags = libc::O_PATH | libc::O_NOFOLLOW;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    let found = file.metadata()?;
    if found.mode() & 0o7777 == mode {
        return Ok(());
    }
    if !found.file_type().is_socket() || found.uid() != own_user() || found.nlink() != 1 {
        let why =
            "another process replaced the socket; choose a folder that only this user can write to";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    // Use this path, which names the opened file even if it was renamed, because `fchmod` rejects
    // `O_PATH` descriptors.
    let opened = format!("/proc/self/fd/{}", file.as_raw_fd());
    std::fs::set_permissions(opened, Permissions::from_mode(mode))
}

/// Removes the socket of a killed process, and leaves every other file alone.
fn remove_left(path: &Path) -> io::Result<()> {
    match path.symlink_metadata() {
        Ok(found) if !found.file_type().is_socket() => {
            let why = "a file that is not a socket exists there; remove it, or choose another path";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
        }
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    }
    if is_live(path)? {
        // Leave the socket: the following `bind` then fails with `AddrInUse`.
        return Ok(());
    }
    match std::fs::remove_file(path) {
        // Another process has removed the socket in the meantime.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Returns whether a process listens, or may listen, on the socket that a path names. Does not
/// wait: a stopped process with a full queue of callers counts as listening.
fn is_live(path: &Path) -> io::Result<bool> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    // A live stream listener rejects this socket type, but with an error other than that of a dead
    // socket.
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    Ok(connect(&socket, &SocketAddrUnix::new(path)?) != Err(Errno::CONNREFUSED))
}

/// Locks the folder of a path, so that no other process starts to listen in it. Returns `None` if
/// the folder stays locked for two seconds or cannot be locked.
fn lock_folder(path: &Path) -> Option<File> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    lock(folder.unwrap_or_else(|| Path::new(".")))
}

fn lock(folder: &Path) -> Option<File> {
    let folder = File::open(folder).ok()?;
    for _ in 0..LOCK_TRIES {
        match flock(folder.as_fd(), FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(folder),
            Err(Errno::WOULDBLOCK) => std::thread::sleep(LOCK_POLL),
            Err(_) => return None,
        }
    }
    // Give up: any user who can read a folder can lock it, but must not be able to block servers in
    // it.
    None
}

fn identity(file: &Metadata) -> (u64, u64) {
    (file.dev(), file.ino())
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::os::unix::fs::symlink;
    use std::sync::Barrier;

    use super::super::line::new_socket;
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("racksum-{name}-{}", std::process::id()));
        drop(std::fs::remove_dir_all(&folder));
        std::fs::create_dir(&folder).unwrap();
        folder
    }

    fn mode(path: &Path) -> u32 {
        path.symlink_metadata().unwrap().mode() & 0o7777
    }

    #[test]
    fn a_socket_is_open_to_nobody_before_its_mode_says_so_and_then_to_all_that_it_names() {
        let folder = folder("modes");
        for (nth, wanted) in [0o600, 0o620, 0o660, 0o666, 0o777].into_iter().enumerate() {
            let (early, late) = (folder.join(format!("early-{nth}")), folder.join("late"));
            let name = Name::bind(&new_socket().unwrap(), &early, wanted).unwrap();
            assert_eq!(mode(&early) & !wanted, 0, "{:o} of {wanted:o}", mode(&early));
            let socket = new_socket().unwrap();
            let served = Name::listen(&socket, &late, wanted).unwrap();
            assert_eq!(mode(&late), wanted);
            drop((name, served));
            let streams = listen_for_streams(&late, wanted).unwrap();
            assert_eq!(mode(&late), wanted);
            drop(streams);
            assert!(!late.exists() && !early.exists());
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_dead_socket_that_another_removes_first_is_no_error() {
        let folder = folder("twice");
        let path = folder.join("socket");
        for _ in 0..200 {
            drop(UnixListener::bind(&path).unwrap());
            let begin = Barrier::new(4);
            std::thread::scope(|scope| {
                let remove = || {
                    begin.wait();
                    remove_left(&path)
                };
                let removers: Vec<_> = (0..4).map(|_| scope.spawn(remove)).collect();
                removers.into_iter().for_each(|remover| remover.join().unwrap().unwrap());
            });
            assert!(!path.exists());
        }
        std::fs::remove_dir(folder).unwrap();
    }

    #[test]
    fn what_others_put_in_the_place_of_a_socket_keeps_its_mode() {
        let folder = folder("places");
        let (place, theirs) = (folder.join("place"), folder.join("theirs"));
        let socket = listen_for_streams(&theirs, 0o600).unwrap();
        std::fs::hard_link(&theirs, &place).unwrap();
        assert_eq!(widen(&place, 0o666).unwrap_err().kind(), ErrorKind::PermissionDenied);
        std::fs::remove_file(&place).unwrap();
        symlink(&theirs, &place).unwrap();
        assert_eq!(widen(&place, 0o666).unwrap_err().kind(), ErrorKind::PermissionDenied);
        assert_eq!(mode(&theirs), 0o600);
        drop(socket);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
