//! Warnings about steps of the host's wall clock.
//!
//! The aggregator's timeouts do not depend on that clock, so jobs are unaffected. Operators should
//! know of a step, because log timestamps jump, and certificates may seem expired or not yet valid.

use std::time::Duration;

use racksum_net::clock::Clock;

/// Watches for steps of the wall clock for as long as the future is polled, and warns once about
/// each.
pub(crate) async fn watch(clock: Clock) {
    let mut before = clock.wall_at_boot();
    loop {
        tokio::time::sleep(PERIOD).await;
        let now = clock.wall_at_boot();
        if let Some(step) = step(before, now) {
            tracing::warn!(
                "the wall clock of this host jumped {step}; jobs continue unaffected, but \
                 certificates are checked against this clock"
            );
        }
        // Each reading is compared with the one before it, so the small changes from slewing never
        // add up to a step.
        before = now;
    }
}

/// Describes the step of the wall clock between two readings, or returns `None` if there is none.
fn step(before: i64, now: i64) -> Option<String> {
    let seconds = now.abs_diff(before).saturating_add(SECOND / 2) / SECOND;
    let way = if now > before { "forward" } else { "back" };
    (seconds > 0).then(|| format!("{way} by {seconds} s"))
}

/// One second in nanoseconds.
const SECOND: u64 = 1_000_000_000;

/// The interval between checks of the clock.
const PERIOD: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_clock_is_slewed_by_is_no_step() {
        let step_to = |now| step(5_000_000_000, now);
        assert_eq!(step_to(5_001_000_000), None);
        assert_eq!(step_to(5_499_999_999), None);
        assert_eq!(step_to(5_500_000_000).unwrap(), "forward by 1 s");
        assert_eq!(step_to(5_999_999_999).unwrap(), "forward by 1 s");
        assert_eq!(step_to(-3_595_000_001_000).unwrap(), "back by 3600 s");
        assert!(step(i64::MIN, i64::MAX).is_some());
    }
}
