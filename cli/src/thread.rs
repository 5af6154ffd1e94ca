//! Threads: where a limit leaves none, a sentence and not a panic.

use std::io;
use std::thread::{Builder, JoinHandle};

use crate::exit::Failure;

/// Starts a thread.
///
/// # Errors
/// A sentence, if the system gives none.
pub(crate) fn spawn(work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Failure> {
    Builder::new().spawn(work).map_err(|error| not_started(&error))
}

/// Why there is no thread.
pub(crate) fn not_started(error: &io::Error) -> Failure {
    Failure::unavailable(format!(
        "cannot start a thread: {error}; use fewer threads, or raise the limit on them (ulimit -u)"
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
