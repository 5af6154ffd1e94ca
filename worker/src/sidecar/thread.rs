//! The sidecar's threads.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

/// Starts a thread whose panic ends the process: half of a sidecar would leave ops waiting for the
/// other half, or memory with folds that still write to it.
pub(super) fn spawn(
    name: &str,
    work: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let work = || {
        if catch_unwind(AssertUnwindSafe(work)).is_err() {
            // It was printed where it happened.
            std::process::exit(1);
        }
    };
    std::thread::Builder::new().name(name.into()).spawn(work)
}
