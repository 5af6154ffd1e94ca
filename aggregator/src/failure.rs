//! A thread of the aggregator that panics, which is a bug of ours, or whose socket fails: it ends
//! the aggregator as a whole.
//!
//! Half an aggregator would be worse than none, since its jobs would wait for the dead half.

use std::io;
use std::thread::{Builder, JoinHandle};

use tokio::sync::watch::{Receiver, Sender};

/// Starts threads, and tells of the first that fails.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    told: Sender<Option<String>>,
}

impl Failure {
    pub(crate) fn new() -> Self {
        Self { told: Sender::new(None) }
    }

    /// Hears of the failure.
    pub(crate) fn subscribe(&self) -> Receiver<Option<String>> {
        self.told.subscribe()
    }

    /// Tells why the aggregator cannot go on, unless that is known already.
    pub(crate) fn tell(&self, why: String) {
        self.told.send_if_modified(|told| {
            let first = told.is_none();
            told.get_or_insert(why);
            first
        });
    }

    /// Starts a thread whose panic is told.
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

/// Lives as long as a thread's work.
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
            "the thread {thread} failed, which is a bug of racksum; all jobs are lost"
        ));
    }
}
