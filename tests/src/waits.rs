//! Waiting for something to happen, and telling how long it took. The tests of the program share
//! this file.

use std::time::Duration;

use racksum_net::clock::Clock;

/// How many times longer than on a quiet machine a test may take before it counts as hung.
pub(crate) const BUSY: u64 = 20;

/// Waits for a condition, and fails if it does not come about.
pub(crate) fn await_that(what: &str, mut done: impl FnMut() -> bool) {
    let clock = Clock::start();
    let start = clock.now();
    while !done() {
        assert!(clock.now().since(start).as_millis() < 10_000 * BUSY, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// How long something took, in milliseconds.
pub(crate) fn timed<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let clock = Clock::start();
    let start = clock.now();
    let done = work();
    (done, clock.now().since(start).as_millis())
}
