//! Sockets by which others see that this process lives: its host closes them when it dies.
//!
//! A child that was forked has them too, and would keep them open for as long as it lives itself,
//! as the workers of a data loader may. So it lets go of them at once.

#![expect(unsafe_code, reason = "what a child does after a fork is said to libc")]

use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, RawFd};
use std::sync::Once;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;

/// Most such sockets. Those beyond are kept by children, so that a death is missed late.
const MOST: usize = 1024;

/// No descriptor.
const NONE: RawFd = -1;

/// The descriptors. No lock: a thread that held it would not be there in the child.
static ALL: [AtomicI32; MOST] = [const { AtomicI32::new(NONE) }; MOST];

/// `/dev/null`, which takes their place in a child. Opened early: a child may have no free
/// descriptor.
static NOTHING: AtomicI32 = AtomicI32::new(NONE);

/// A socket that no child keeps.
#[derive(Debug)]
pub(crate) struct Alive<T> {
    /// Where its descriptor is noted, if there was room.
    note: Option<&'static AtomicI32>,
    socket: T,
}

impl<T: AsRawFd> Alive<T> {
    /// Has children that are forked from now on let go of a socket.
    pub(crate) fn new(socket: T) -> Self {
        static FORKS: Once = Once::new();
        FORKS.call_once(|| {
            if let Err(error) = prepare() {
                tracing::warn!(%error, "children that are forked keep this process's sockets");
            }
        });
        let fd = socket.as_raw_fd();
        let note =
            ALL.iter().find(|note| note.compare_exchange(NONE, fd, Relaxed, Relaxed).is_ok());
        Self { note, socket }
    }
}

/// Registers the fork handler that closes the sockets in children.
fn prepare() -> io::Result<()> {
    let nothing = File::options().read(true).write(true).open("/dev/null")?;
    // SAFETY: the function calls nothing but what a signal handler may.
    let failed = unsafe { libc::pthread_atfork(None, None, Some(let_go)) };
    if failed != 0 {
        return Err(io::Error::from_raw_os_error(failed));
    }
    NOTHING.store(nothing.into_raw_fd(), Relaxed);
    Ok(())
}

/// Puts something of no meaning in the place of the sockets, in a child. Their numbers stay taken:
/// what the child has copied may still close them.
extern "C" fn let_go() {
    let nothing = NOTHING.load(Relaxed);
    for note in &ALL {
        let fd = note.swap(NONE, Relaxed);
        if fd != NONE {
            // SAFETY: the child has the descriptor, and nothing in it relies on what it was.
            let _put = unsafe { libc::dup3(nothing, fd, libc::O_CLOEXEC) };
        }
    }
}

impl<T> Drop for Alive<T> {
    fn drop(&mut self) {
        // Before the number is another's.
        if let Some(note) = self.note {
            note.store(NONE, Relaxed);
        }
    }
}

impl<T: AsFd> AsFd for Alive<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl<T> Deref for Alive<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.socket
    }
}

impl<T> DerefMut for Alive<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.socket
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_child_keeps_no_socket_open() {
        let (own, mut other) = UnixStream::pair().unwrap();
        let own = Alive::new(own);
        // SAFETY: the child calls nothing but what a signal handler may.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe {
                libc::pause();
                libc::_exit(0);
            }
        }
        assert!(child > 0);
        other.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        drop(own);
        let ended = other.read(&mut [0]);
        // SAFETY: the child is this test's.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        assert_eq!(ended.unwrap(), 0);
    }
}
