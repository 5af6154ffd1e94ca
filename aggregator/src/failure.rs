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
    told: Sender<Option<String>>,
}

impl Failure {
    pub(crate) fn new() -> Self {
        Self { told: Sender::new(None) }
    }

    /// Returns a receiver of the failure.
    pub(crate) fn subscribe(&self) -> Receiver<Option<String>> {
        self.told.subscribe()
    }

    /// Reports why the aggregator cannot continue, unless a failure was already reported.
    pub(crate) fn tell(&self, why: String) {
        self.told.send_if_modified(|told| {
            let first = told.is_none();
            told.get_or_insert(why);
            first
        });
    }

    /// Starts a thread and reports its panic.
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
        self.failure.tell(format!(
            "the thread {thread} panicked, which is a bug in racksum; all jobs are lost"
        ));
    }
}
