//! Waits that release the GIL and react to signals such as Ctrl-C.

use std::time::{Duration, Instant};

use pyo3::{PyResult, Python};

/// The maximum time for which a signal may go unnoticed.
const SLICE: Duration = Duration::from_millis(50);

/// Waits without the GIL, in slices, until `wait` returns a result. `wait` must return within the
/// duration that it is given. Returns `None` if `limit` passes first.
///
/// # Errors
/// Returns the exception that a signal handler raised.
pub(crate) fn wait_in_slices<T: Send>(
    py: Python<'_>,
    limit: Option<Duration>,
    wait: impl FnMut(Duration) -> Option<T> + Send,
) -> PyResult<Option<T>> {
    wait_in_checked_slices(py, limit, |_| Ok(()), wait)
}

/// Waits like [`wait_in_slices`], and calls `check` after each slice.
///
/// # Errors
/// Returns the exception that `check` or a signal handler raised.
pub(crate) fn wait_in_checked_slices<T: Send>(
    py: Python<'_>,
    limit: Option<Duration>,
    mut check: impl FnMut(Python<'_>) -> PyResult<()>,
    mut wait: impl FnMut(Duration) -> Option<T> + Send,
) -> PyResult<Option<T>> {
    // A deadline beyond the clock's range never comes.
    let deadline = limit.and_then(|limit| now().checked_add(limit));
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(now()));
        let slice = left.map_or(SLICE, |left| left.min(SLICE));
        if let Some(done) = py.detach(|| wait(slice)) {
            return Ok(Some(done));
        }
        py.check_signals()?;
        check(py)?;
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(None);
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "the time of a caller's wait is not protocol time")]
fn now() -> Instant {
    Instant::now()
}
