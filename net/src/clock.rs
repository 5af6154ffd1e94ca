//! The host's clocks. Code that waits uses the monotonic clock; all other code takes the time as an
//! argument.
#![expect(unsafe_code, reason = "std hides the epoch of its monotonic clock; libc does not")]

use racksum_proto::time::Time;

/// The host's monotonic clock, in nanoseconds since the host's own epoch.
///
/// `std::time::Instant` reads the same clock but hides the epoch. The processes of one host must be
/// able to compare their times, because latencies are measured between processes.
#[derive(Debug, Clone, Copy)]
pub struct Clock(());

impl Clock {
    /// Returns the clock. All clocks of one host agree, whenever their processes started.
    #[must_use]
    pub const fn start() -> Self {
        Self(())
    }

    /// Returns the current time, which never goes backwards.
    #[must_use]
    pub fn now(&self) -> Time {
        Time(u64::try_from(nanos_of(libc::CLOCK_MONOTONIC)).unwrap_or(0))
    }

    /// Returns the wall-clock time in nanoseconds since 1970, which may jump.
    #[must_use]
    pub fn wall(&self) -> i64 {
        nanos_of(libc::CLOCK_REALTIME)
    }

    /// Returns the wall-clock time at which the host booted, in nanoseconds since 1970. The result
    /// changes when the wall clock is set or slewed, but not when the host is suspended.
    #[must_use]
    pub fn wall_at_boot(&self) -> i64 {
        let (mut before, mut at_boot) = (nanos_of(libc::CLOCK_BOOTTIME), 0);
        for _ in 0..MAX_READINGS {
            at_boot = nanos_of(libc::CLOCK_REALTIME).saturating_sub(before);
            let after = nanos_of(libc::CLOCK_BOOTTIME);
            // A longer gap means that this process was stopped between the two readings, so read
            // both clocks again.
            if after.saturating_sub(before) < APART {
                break;
            }
            before = after;
        }
        at_boot
    }
}

/// Limit on attempts to read the two clocks close together.
const MAX_READINGS: u32 = 8;
/// Shortest gap, in nanoseconds, at which two readings count as too far apart.
const APART: i64 = 10_000_000;

/// Returns the time of one of the host's clocks, in nanoseconds since the epoch of that clock.
fn nanos_of(clock: libc::clockid_t) -> i64 {
    let mut spec = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `spec` is valid for the write of one timespec.
    let rc = unsafe { libc::clock_gettime(clock, &raw mut spec) };
    // The call fails only for an unknown clock or a bad pointer, and neither can occur here.
    debug_assert_eq!(rc, 0, "Linux always has these clocks");
    spec.tv_sec.saturating_mul(1_000_000_000).saturating_add(spec.tv_nsec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_clocks_share_an_epoch_and_never_go_back() {
        let (one, other) = (Clock::start(), Clock::start());
        let mut last = one.now();
        for _ in 0..1_000 {
            let now = other.now();
            assert!(now >= last);
            last = one.now();
            assert!(last >= now);
        }
    }
}
