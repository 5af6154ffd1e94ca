//! Names of sockets in folders: who may call there, and when a name goes.

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

/// How many callers may wait to be answered.
const BACKLOG: i32 = 128;

/// How often, and how many times, it is tried to lock a folder that others have locked.
const LOCK_POLL: Duration = Duration::from_millis(10);
const LOCK_TRIES: usize = 200;

/// The name of a socket, which is removed when it is dropped unless others have put theirs there.
#[derive(Debug)]
pub struct Name {
    path: PathBuf,
    file: (u64, u64),
}

/// Listens at a path for streams; only those may call whom the mode lets write.
///
/// # Errors
/// The kernel's; `AddrInUse` when somebody listens there already, and `AlreadyExists` when there is
/// something else than a socket.
pub fn listen_for_streams(path: &Path, mode: u32) -> io::Result<(UnixListener, Name)> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let name = Name::listen(&socket, path, mode)?;
    Ok((socket.into(), name))
}

/// Removes those of a folder's sockets that killed processes have left behind. Removes nothing
/// while other processes keep the folder locked.
pub fn remove_dead(folder: &Path, sockets: impl IntoIterator<Item = PathBuf>) {
    // Without the lock, a socket at which nobody listens may be one that is just being started.
    let Some(_alone) = lock(folder) else { return };
    for socket in sockets {
        // The folder may be closed to this process, and then its sockets stay.
        drop(remove_left(&socket));
    }
}

impl Name {
    /// Binds and listens at a path; `mode` decides who may connect.
    pub(super) fn listen(socket: &OwnedFd, path: &Path, mode: u32) -> io::Result<Self> {
        // Of two that start at once, the second would take the first for one that was killed.
        let alone = lock_folder(path);
        remove_left(path)?;
        let name = Self::bind(socket, path, mode)?;
        let listening = widen(path, mode).and_then(|()| Ok(listen(socket, BACKLOG)?));
        // A name that is dropped locks the folder as well.
        drop(alone);
        listening.map(|()| name)
    }

    /// Binds a socket to a path. Linux makes the file with what the umask leaves of the socket's
    /// own mode, so there is no moment in which the mode would let others call.
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
            // Its folder may be closed to this process by now.
            drop(std::fs::remove_file(&self.path));
        }
    }
}

/// Gives the socket at a path what the umask has taken from its mode. Whoever may write to the
/// folder may have put something else there, whose mode stays as it is.
fn widen(path: &Path, mode: u32) -> io::Result<()> {
    let flags = libc::O_PATH | libc::O_NOFOLLOW;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    let found = file.metadata()?;
    if found.mode() & 0o7777 == mode {
        return Ok(());
    }
    if !found.file_type().is_socket() || found.uid() != own_user() || found.nlink() != 1 {
        let why = "somebody has put another file in the place of the socket";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    // What was opened, under whatever name. A descriptor of this kind has no `fchmod`.
    let opened = format!("/proc/self/fd/{}", file.as_raw_fd());
    std::fs::set_permissions(opened, Permissions::from_mode(mode))
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
    if is_live(path)? {
        // To bind says so.
        return Ok(());
    }
    match std::fs::remove_file(path) {
        // Its process has removed it meanwhile.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Whether a process listens at the socket that was found at a path, or whether that cannot be
/// told. Does not wait: a process that is stopped, with a full queue of callers, listens.
fn is_live(path: &Path) -> io::Result<bool> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    // A listener for streams refuses a socket of this type in other words than a dead one.
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    Ok(connect(&socket, &SocketAddrUnix::new(path)?) != Err(Errno::CONNREFUSED))
}

/// Locks the folder of a path, so that others that lock it too do not listen in it meanwhile. If
/// others have it locked for long, no lock is held.
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
    // Whoever may read a folder may lock it, and is to keep nobody from serving in it.
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
