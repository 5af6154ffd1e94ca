//! Threads of the sidecar.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

/// Starts a thread whose panic ends the process. If the other threads continued after the panic,
/// ops might wait forever for this thread, or folds might still write to memory that ranks use
/// again.
pub(super) fn spawn(
    name: &str,
    work: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let work = || {
        if catch_unwind(AssertUnwindSafe(work)).is_err() {
            // The panic hook has already printed the message.
            std::process::exit(1);
        }
    };
    std::thread::Builder::new().name(name.into()).spawn(work)
}
