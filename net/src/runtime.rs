//! Runtimes of tokio: where a limit leaves too few open files, an error and not a panic.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};

use tokio::runtime::{Builder, Runtime};

/// Builds a runtime that lives on the thread that blocks on it.
///
/// # Errors
///
/// What the kernel says when it gives no more open files.
pub fn single_threaded() -> io::Result<Runtime> {
    // Held, so that no other runtime takes the files that were reserved.
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

/// Opens as many files as the first runtime of a process, and closes them again. Tokio then makes a
/// pair of sockets for signals, and panics if it cannot; it keeps the pair for all later runtimes.
fn reserve() -> io::Result<()> {
    // Epoll, an eventfd, the pair, and a copy of one end.
    let pairs: io::Result<Vec<_>> = std::iter::repeat_with(UnixStream::pair).take(3).collect();
    pairs.map(drop)
}
