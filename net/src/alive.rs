//! Sockets that tell peers whether this process is alive: the kernel closes them when the process
//! dies.
//!
//! A forked child, such as a data loader worker, inherits these sockets and would keep them open
//! for as long as it lives. So a fork handler replaces them with `/dev/null` in every child, right
//! after the fork.

#![expect(unsafe_code, reason = "libc registers the fork handler")]

use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, RawFd};
use std::sync::Once;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;

/// Limit on tracked sockets. Forked children keep all further sockets open, so the peers of those
/// sockets detect the death of this process late.
const MOST: usize = 1024;

/// Value of a free entry in `ALL`.
const NONE: RawFd = -1;

/// Descriptors to replace in children. A lock cannot guard them, because the thread that holds it
/// may not exist in the child.
static ALL: [AtomicI32; MOST] = [const { AtomicI32::new(NONE) }; MOST];

/// Descriptor of `/dev/null`, which replaces the sockets in a child. The parent opens it early,
/// because a child may have no free descriptor.
static NOTHING: AtomicI32 = AtomicI32::new(NONE);

/// Socket that forked children do not keep open, unless `ALL` was full.
#[derive(Debug)]
pub(crate) struct Alive<T> {
    /// Entry of `ALL` that holds the descriptor; `None` if `ALL` was full.
    note: Option<&'static AtomicI32>,
    socket: T,
}

impl<T: AsRawFd> Alive<T> {
    /// Tracks a socket, so that children forked later replace it with `/dev/null`.
    pub(crate) fn new(socket: T) -> Self {
        static FORKS: Once = Once::new();
        FORKS.call_once(|| {
            if let Err(error) = prepare() {
                tracing::warn!(
                    %error,
                    "cannot set up the fork handler; forked children keep this process's sockets \
                     open, so peers may detect its death late"
                );
            }
        });
        let fd = socket.as_raw_fd();
        let note =
            ALL.iter().find(|note| note.compare_exchange(NONE, fd, Relaxed, Relaxed).is_ok());
        Self { note, socket }
    }
}

/// Opens `/dev/null`, and registers the fork handler that closes the sockets in children.
fn prepare() -> io::Result<()> {
    let nothing = File::options().read(true).write(true).open("/dev/null")?;
    // SAFETY: the handler calls only async-signal-safe functions.
    let failed = unsafe { libc::pthread_atfork(None, None, Some(let_go)) };
    if failed != 0 {
        return Err(io::Error::from_raw_os_error(failed));
    }
    NOTHING.store(nothing.into_raw_fd(), Relaxed);
    Ok(())
}

/// Replaces the sockets with `/dev/null` in a child. The descriptor numbers stay in use: the
/// child's copies of the socket objects may still close them, and would close another file if the
/// kernel reused a number.
extern "C" fn let_go() {
    let nothing = NOTHING.load(Relaxed);
    for note in &ALL {
        let fd = note.swap(NONE, Relaxed);
        if fd != NONE {
            // SAFETY: the child owns the descriptor, and nothing in the child relies on the socket.
            let _put = unsafe { libc::dup3(nothing, fd, libc::O_CLOEXEC) };
        }
    }
}

impl<T> Drop for Alive<T> {
    fn drop(&mut self) {
        // Free the entry before the kernel can reuse the descriptor number.
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
        // SAFETY: the child calls only async-signal-safe functions.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: `pause` and `_exit` are async-signal-safe.
            unsafe {
                libc::pause();
                libc::_exit(0);
            }
        }
        assert!(child > 0);
        other.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        drop(own);
        let ended = other.read(&mut [0]);
        // SAFETY: this test started the child.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        assert_eq!(ended.unwrap(), 0);
    }
}
