//! The clocks of the host. Whatever waits goes by the monotonic one; everything else takes time
//! as an argument.
#![expect(unsafe_code, reason = "std hides the epoch of its monotonic clock; libc does not")]

use racksum_proto::time::Time;

/// The host's monotonic clock, in nanoseconds since the host's own epoch.
///
/// `std::time::Instant` reads the same clock but hides the epoch, and the processes of one host
/// must be able to compare their times: latencies are measured across them.
#[derive(Debug, Clone, Copy)]
pub struct Clock(());

impl Clock {
    /// The clock. All of one host agree, whenever they were started.
    #[must_use]
    pub const fn start() -> Self {
        Self(())
    }

    /// The present instant; never earlier than an earlier answer.
    #[must_use]
    pub fn now(&self) -> Time {
        Time(u64::try_from(nanos_of(libc::CLOCK_MONOTONIC)).unwrap_or(0))
    }

    /// The host's wall clock when it started, in nanoseconds since 1970. It changes when the wall
    /// clock is set or slewed, and not while the host is suspended.
    #[must_use]
    pub fn wall_at_boot(&self) -> i64 {
        let (mut before, mut at_boot) = (nanos_of(libc::CLOCK_BOOTTIME), 0);
        for _ in 0..MAX_READINGS {
            at_boot = nanos_of(libc::CLOCK_REALTIME).saturating_sub(before);
            let after = nanos_of(libc::CLOCK_BOOTTIME);
            // Otherwise this process was stopped between the two.
            if after.saturating_sub(before) < APART {
                break;
            }
            before = after;
        }
        at_boot
    }
}

/// How often two clocks are read again that were not read together.
const MAX_READINGS: u32 = 8;
/// Nanoseconds between two readings that are not together.
const APART: i64 = 10_000_000;

/// What a clock of the host shows, in nanoseconds since its epoch.
fn nanos_of(clock: libc::clockid_t) -> i64 {
    let mut spec = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `spec` is a valid timespec to write to for the whole call.
    let rc = unsafe { libc::clock_gettime(clock, &raw mut spec) };
    // It fails only for an unknown clock or a bad pointer, and neither can be here.
    debug_assert_eq!(rc, 0, "these clocks are always there");
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
