//! Timeouts for a program that waits for its processes.

use std::time::{Duration, Instant};

/// A timeout that starts when it is created.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    began: Instant,
    patience: Duration,
}

impl Deadline {
    /// Creates a timeout that expires after `patience`.
    #[expect(clippy::disallowed_methods, reason = "how long a program waits for a process")]
    #[must_use]
    pub fn after(patience: Duration) -> Self {
        Self { began: Instant::now(), patience }
    }

    /// Returns whether the timeout has expired.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.elapsed() >= self.patience
    }

    /// Returns the time since the timeout was created.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }
}
