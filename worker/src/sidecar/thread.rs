//! Threads of the sidecar.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

/// Starts a thread whose panic ends the process. If the other threads went on, ops would wait
/// forever for this one, or folds would still write to memory that ranks use again.
pub(super) fn spawn(
    name: &str,
    work: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let work = || {
        if catch_unwind(AssertUnwindSafe(work)).is_err() {
            // The thread has already printed its panic.
            std::process::exit(1);
        }
    };
    std::thread::Builder::new().name(name.into()).spawn(work)
}
