//! The one clock of the project. Everything else takes time as an argument.
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
        let mut spec = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `spec` is a valid timespec to write to for the whole call.
        let rc = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut spec) };
        // It fails only for an unknown clock or a bad pointer, and neither can be here.
        debug_assert_eq!(rc, 0, "CLOCK_MONOTONIC is always there");
        let seconds = u64::try_from(spec.tv_sec).unwrap_or(0);
        let nanos = u64::try_from(spec.tv_nsec).unwrap_or(0);
        Time(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
    }
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
