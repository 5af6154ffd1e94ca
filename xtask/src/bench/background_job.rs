//! A neighbour: another job at the same aggregator, which sends as much as it can while a side is
//! measured.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::thread::{JoinHandle, sleep, spawn};
use std::time::Duration;

use super::process_group::{ITERATION_TIMEOUT, ProcessGroup};

/// What the neighbour's thread and its owner share.
#[derive(Debug, Default)]
struct Shared {
    /// It is to send.
    wanted: AtomicBool,
    /// It sends.
    busy: AtomicBool,
    quit: AtomicBool,
}

/// The ranks of another job, and the thread that has them go on and on.
#[derive(Debug)]
pub(crate) struct BackgroundJob {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl BackgroundJob {
    /// One that is ready to go, and quiet.
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
                    // Nobody is there any more: whoever waits for it to be busy sees that.
                    break;
                }
            }
            own.busy.store(false, SeqCst);
        });
        Self { shared, thread: Some(thread) }
    }

    /// Has it send, or be quiet; returns once it does. False if it is gone.
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
            // A panic was printed where it happened.
            drop(thread.join());
        }
    }
}

const POLL: Duration = Duration::from_millis(5);
/// How long it sends before anything is measured.
const WARM_UP: Duration = Duration::from_millis(300);
