//! Waits for conditions and measures times. The CLI's tests (`cli/tests/cli`) include this file
//! too.

use std::time::Duration;

use racksum_net::clock::Clock;

/// A test counts as hung after this multiple of its time on a quiet machine.
pub(crate) const BUSY: u64 = 20;

/// Waits for a condition, and panics with `what` if it does not come true in time.
pub(crate) fn await_that(what: &str, mut done: impl FnMut() -> bool) {
    let clock = Clock::start();
    let start = clock.now();
    while !done() {
        assert!(
            clock.now().since(start).as_millis() < 10_000 * BUSY,
            "timed out waiting until {what}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs `work`; returns its result and its duration in milliseconds.
pub(crate) fn timed<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let clock = Clock::start();
    let start = clock.now();
    let done = work();
    (done, clock.now().since(start).as_millis())
}
