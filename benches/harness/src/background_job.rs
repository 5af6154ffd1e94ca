//! A neighbour: another job at the same aggregator that sends as much as it can while a side is
//! measured.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::thread::{JoinHandle, sleep, spawn};
use std::time::Duration;

use crate::process_group::{ITERATION_TIMEOUT, ProcessGroup};

/// State that the neighbour's thread shares with its owner.
#[derive(Debug, Default)]
struct Shared {
    /// Whether the neighbour should send.
    wanted: AtomicBool,
    /// Whether the neighbour is sending.
    busy: AtomicBool,
    quit: AtomicBool,
}

/// The ranks of another job, and the thread that runs their iterations.
#[derive(Debug)]
pub(crate) struct BackgroundJob {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl BackgroundJob {
    /// Creates a neighbour that is ready but does not send yet.
    pub(crate) fn new(mut process_group: ProcessGroup) -> Self {
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        let thread = spawn(move || {
            while !own.quit.load(SeqCst) {
                let wanted = own.wanted.load(SeqCst);
                own.busy.store(wanted, SeqCst);
                if !wanted {
                    sleep(POLL);
                } else if process_group.ask("go", ITERATION_TIMEOUT).is_err() {
                    // The ranks have failed. `set` detects that this thread has ended.
                    break;
                }
            }
            own.busy.store(false, SeqCst);
        });
        Self { shared, thread: Some(thread) }
    }

    /// Starts or stops the neighbour's sending, and waits until the change has taken effect.
    /// Returns false if the neighbour's thread has ended.
    pub(crate) fn set(&self, sends: bool) -> bool {
        self.shared.wanted.store(sends, SeqCst);
        while self.shared.busy.load(SeqCst) != sends {
            if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                return false;
            }
            sleep(POLL);
        }
        if sends {
            sleep(WARM_UP);
        }
        true
    }
}

impl Drop for BackgroundJob {
    fn drop(&mut self) {
        self.shared.quit.store(true, SeqCst);
        if let Some(thread) = self.thread.take() {
            // Ignore a panic, because the thread has already printed it.
            drop(thread.join());
        }
    }
}

const POLL: Duration = Duration::from_millis(5);
/// Time for which the neighbour sends before a measurement begins.
const WARM_UP: Duration = Duration::from_millis(300);
