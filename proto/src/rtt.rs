//! Round-trip estimate and retransmission timeout, after Jacobson's estimator (RFC 6298).

use crate::time::Span;

/// A smoothed round trip and its variation.
#[derive(Debug, Clone, Copy)]
pub struct Rtt {
    smoothed_ns: u64,
    variation_ns: u64,
    measured: bool,
}

impl Rtt {
    /// An estimate to start from, until the first measurement replaces it.
    #[must_use]
    pub const fn new(initial: Span) -> Self {
        Self { smoothed_ns: initial.0, variation_ns: initial.0 / 2, measured: false }
    }

    /// Takes one measured round trip.
    pub fn sample(&mut self, rtt: Span) {
        if !self.measured {
            *self = Self { smoothed_ns: rtt.0, variation_ns: rtt.0 / 2, measured: true };
            return;
        }
        let error = self.smoothed_ns.abs_diff(rtt.0);
        self.variation_ns = (3 * self.variation_ns + error) / 4;
        self.smoothed_ns = (7 * self.smoothed_ns + rtt.0) / 8;
    }

    /// The smoothed round trip.
    #[must_use]
    pub const fn smoothed(&self) -> Span {
        Span(self.smoothed_ns)
    }

    /// How long to wait for an answer before asking again the first time.
    #[must_use]
    pub fn timeout(&self) -> Span {
        let timeout = self.smoothed_ns + (4 * self.variation_ns).max(Self::GRANULARITY.0);
        Span(timeout.clamp(Self::MIN_TIMEOUT.0, Self::MAX_TIMEOUT.0))
    }

    /// How long to wait after `attempts` questions without an answer.
    #[must_use]
    pub fn backed_off(&self, attempts: u32) -> Span {
        let timeout = self.timeout().0.saturating_mul(1 << attempts.min(10));
        Span(timeout.min(Self::MAX_BACKOFF.0))
    }

    /// A scheduler's hiccup is not a loss.
    const GRANULARITY: Span = Span::from_micros(500);
    const MIN_TIMEOUT: Span = Span::from_millis(2);
    const MAX_TIMEOUT: Span = Span::from_millis(200);
    const MAX_BACKOFF: Span = Span::from_secs(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_sample_replaces_the_guess() {
        let mut rtt = Rtt::new(Span::from_millis(100));
        rtt.sample(Span::from_millis(4));
        assert_eq!(rtt.smoothed(), Span::from_millis(4));
        assert_eq!(rtt.timeout(), Span::from_millis(12));
    }

    #[test]
    fn steady_samples_draw_the_timeout_in_and_jitter_widens_it() {
        let mut rtt = Rtt::new(Span::from_millis(1));
        (0..100).for_each(|_| rtt.sample(Span::from_millis(10)));
        assert!(rtt.timeout() < Span::from_millis(11));
        rtt.sample(Span::from_millis(30));
        assert!(rtt.timeout() > Span::from_millis(30));
    }

    #[test]
    fn questions_back_off_up_to_a_second() {
        let rtt = Rtt::new(Span::from_millis(1));
        assert_eq!(rtt.backed_off(0), rtt.timeout());
        assert_eq!(rtt.backed_off(2).0, rtt.timeout().0 * 4);
        assert_eq!(rtt.backed_off(60), Span::from_secs(1));
    }
}
