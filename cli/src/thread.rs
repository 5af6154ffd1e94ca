//! Starts threads. If the system refuses a thread, the user gets a message instead of a panic.

use std::io;
use std::thread::{Builder, JoinHandle};

use crate::exit::Failure;

/// Starts a thread.
///
/// # Errors
/// A message for the user, if the system refuses the thread.
pub(crate) fn spawn(work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Failure> {
    Builder::new().spawn(work).map_err(|error| not_started(&error))
}

/// Returns the failure to report when a thread cannot start.
pub(crate) fn not_started(error: &io::Error) -> Failure {
    Failure::unavailable(format!(
        "cannot start a thread: {error}; use fewer threads, or raise the limit on threads \
         (ulimit -u)"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::Exit;

    #[test]
    fn a_thread_that_is_not_to_be_had_is_a_sentence() {
        spawn(|| {}).unwrap().join().unwrap();
        let failure = not_started(&io::ErrorKind::WouldBlock.into());
        assert!(failure.exit == Exit::UNAVAILABLE, "{failure:?}");
        assert!(failure.why.contains("(ulimit -u)"), "{failure}");
    }
}
