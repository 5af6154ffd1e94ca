//! Waiting without the GIL, so that a signal, Ctrl-C above all, is acted on.

use std::time::{Duration, Instant};

use pyo3::{PyResult, Python};

/// How long a signal may go unseen.
const SLICE: Duration = Duration::from_millis(50);

/// Waits in slices, none of them with the GIL, until `wait`, which waits so long at most, has come
/// to something. Returns nothing if it has not in `limit`.
///
/// # Errors
/// What a handler of a signal has raised.
pub(crate) fn wait_in_slices<T: Send>(
    py: Python<'_>,
    limit: Option<Duration>,
    wait: impl FnMut(Duration) -> Option<T> + Send,
) -> PyResult<Option<T>> {
    wait_in_checked_slices(py, limit, |_| Ok(()), wait)
}

/// Waits as [`wait_in_slices`] does, and calls `check` after each slice.
///
/// # Errors
/// What `check` or a handler of a signal has raised.
pub(crate) fn wait_in_checked_slices<T: Send>(
    py: Python<'_>,
    limit: Option<Duration>,
    mut check: impl FnMut(Python<'_>) -> PyResult<()>,
    mut wait: impl FnMut(Duration) -> Option<T> + Send,
) -> PyResult<Option<T>> {
    // What is too late for the clock never comes.
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

#[expect(clippy::disallowed_methods, reason = "how long a caller waits is no time of the protocol")]
fn now() -> Instant {
    Instant::now()
}
