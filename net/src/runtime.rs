//! Construction of tokio runtimes. If too few file descriptors are left, this module returns an
//! error; tokio itself would panic.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};

use tokio::runtime::{Builder, Runtime};

/// Builds a runtime that runs its tasks on the thread that blocks on it.
///
/// # Errors
///
/// The kernel's error if the limit on open files is reached.
pub fn single_threaded() -> io::Result<Runtime> {
    // Hold the lock, so that no other runtime takes the descriptors that `reserve` has freed.
    let mut has_built = HAS_BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    if !*has_built {
        reserve()?;
    }
    let runtime = Builder::new_current_thread().enable_all().build()?;
    *has_built = true;
    Ok(runtime)
}

/// Whether this process has built a runtime.
static HAS_BUILT: Mutex<bool> = Mutex::new(false);

/// Checks that the first runtime of a process can open as many files as it needs, by opening that
/// many and closing them again. The first runtime creates a socket pair for signals, and tokio
/// panics if it cannot. All later runtimes use the same pair.
fn reserve() -> io::Result<()> {
    // A runtime opens an epoll descriptor, an eventfd, the socket pair, and a copy of one end of
    // the pair.
    let pairs: io::Result<Vec<_>> = std::iter::repeat_with(UnixStream::pair).take(3).collect();
    pairs.map(drop)
}
