//! Timeouts of a chore that waits for its processes.

use std::time::{Duration, Instant};

/// A timeout that starts when it is created.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    began: Instant,
    patience: Duration,
}

impl Deadline {
    #[expect(clippy::disallowed_methods, reason = "how long a chore waits for a process")]
    pub(crate) fn after(patience: Duration) -> Self {
        Self { began: Instant::now(), patience }
    }

    /// Returns whether the time is over.
    pub(crate) fn is_over(&self) -> bool {
        self.elapsed() >= self.patience
    }

    /// Returns how much time has passed.
    pub(crate) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }
}
