//! A background job: another job at the same aggregator, which sends as much as it can while a
//! side is measured.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::thread::{JoinHandle, sleep, spawn};
use std::time::Duration;

use crate::process_group::{ITERATION_TIMEOUT, ProcessGroup};

/// The flags that the background thread shares with its owner.
#[derive(Debug, Default)]
struct Flags {
    /// Whether the ranks should send.
    wanted: AtomicBool,
    /// Whether the ranks are sending.
    busy: AtomicBool,
    quit: AtomicBool,
}

/// The ranks of another job, and the thread that runs their iterations.
#[derive(Debug)]
pub(crate) struct BackgroundJob {
    flags: Arc<Flags>,
    thread: Option<JoinHandle<()>>,
}

impl BackgroundJob {
    /// Creates a background job that is ready but does not send yet.
    pub(crate) fn new(mut process_group: ProcessGroup) -> Self {
        let flags = Arc::new(Flags::default());
        let own = Arc::clone(&flags);
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
        Self { flags, thread: Some(thread) }
    }

    /// Makes the ranks start or stop sending, and waits until they do. After a start, also waits
    /// for [`WARM_UP`]. Returns false if the thread has ended.
    pub(crate) fn set(&self, sends: bool) -> bool {
        self.flags.wanted.store(sends, SeqCst);
        while self.flags.busy.load(SeqCst) != sends {
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
        self.flags.quit.store(true, SeqCst);
        if let Some(thread) = self.thread.take() {
            // Ignore a panic, because the thread has already printed it.
            drop(thread.join());
        }
    }
}

const POLL: Duration = Duration::from_millis(5);
/// Time for which the background job sends before a measurement begins.
const WARM_UP: Duration = Duration::from_millis(300);
