//! Failures of the aggregator's threads. A thread that panics because of a bug, or whose socket
//! fails, ends the whole aggregator.
//!
//! A partial aggregator would be worse than none, since its jobs would wait for the dead thread.

use std::io;
use std::thread::{Builder, JoinHandle};

use tokio::sync::watch::{Receiver, Sender};

/// Starts threads, and reports the first one that fails.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    reason: Sender<Option<String>>,
}

impl Failure {
    pub(crate) fn new() -> Self {
        Self { reason: Sender::new(None) }
    }

    /// Returns a receiver for the reason why the first thread failed.
    pub(crate) fn subscribe(&self) -> Receiver<Option<String>> {
        self.reason.subscribe()
    }

    /// Reports why the aggregator cannot continue, unless a failure was already reported.
    pub(crate) fn report(&self, why: String) {
        self.reason.send_if_modified(|reason| {
            let first = reason.is_none();
            reason.get_or_insert(why);
            first
        });
    }

    /// Starts a thread, and reports a failure if the thread panics.
    pub(crate) fn spawn(
        &self,
        name: String,
        body: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let guard = Guard { thread: name.clone(), failure: self.clone() };
        Builder::new().name(name).spawn(move || {
            let _guard = guard;
            body();
        })
    }
}

/// A guard that reports a panic of its thread on drop.
struct Guard {
    thread: String,
    failure: Failure,
}

impl Drop for Guard {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let thread = &self.thread;
        self.failure.report(format!(
            "the thread {thread} panicked, which is a bug in racksum; all jobs have ended"
        ));
    }
}
