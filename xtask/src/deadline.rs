//! How long a chore waits for its processes.

use std::time::{Duration, Instant};

/// A while that began when it was made.
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

    /// Whether it is over.
    pub(crate) fn is_over(&self) -> bool {
        self.elapsed() >= self.patience
    }

    /// How much of it has passed.
    pub(crate) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }
}
