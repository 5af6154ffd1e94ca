//! Round-trip estimate and retransmission timeout with Jacobson's estimator (RFC 6298).
//!
//! The round trip of a window's result includes the wait for other ranks and for their lost
//! datagrams. The answer to a nack does not wait for other ranks, so a multiple of the round trip
//! from nack to answer bounds the wait for a result. An early nack costs one small datagram; a late
//! nack stalls every rank.

use crate::time::{Span, Time};

/// A smoothed round trip and its variation.
#[derive(Debug, Clone, Copy)]
pub struct Rtt {
    smoothed_ns: u64,
    variation_ns: u64,
    /// The shortest measurement.
    shortest: Option<Span>,
    /// Whether a nack was repeated since the last measurement.
    repeated: bool,
    /// How many more fragments that were sent again have come twice than once, of late.
    needless: u8,
    /// The time at which needless repetitions last raised the estimate, if nothing was measured
    /// since.
    raised_at: Option<Time>,
}

impl Rtt {
    /// Creates an estimate that equals `initial` until the first measurement replaces it.
    #[must_use]
    pub const fn new(initial: Span) -> Self {
        let Span(ns) = initial;
        Self {
            smoothed_ns: ns,
            variation_ns: ns / 2,
            shortest: None,
            repeated: false,
            needless: 0,
            raised_at: None,
        }
    }

    /// Records one measured round trip.
    pub fn sample(&mut self, rtt: Span) {
        let shortest = self.shortest.map_or(rtt, |shortest| shortest.min(rtt));
        if self.shortest.is_none() || self.raised_at.is_some() {
            *self = Self { shortest: Some(shortest), ..Self::new(rtt) };
            return;
        }
        self.shortest = Some(shortest);
        self.repeated = false;
        let error = self.smoothed_ns.abs_diff(rtt.0);
        self.variation_ns = (3 * self.variation_ns + error) / 4;
        self.smoothed_ns = (7 * self.smoothed_ns + rtt.0) / 8;
    }

    /// Returns the shortest measured round trip, if there is any.
    #[must_use]
    pub const fn shortest(&self) -> Option<Span> {
        self.shortest
    }

    /// Records how long an answer took, or `None` if its nack was repeated. A repeated nack gives
    /// no sample; instead the timeout doubles until the next sample (Karn and Partridge, SIGCOMM
    /// 1987). Without the doubling, an estimate that is too short would cause every nack to be
    /// repeated. The timeout doubles only once: under heavy loss most nacks are repeated, so
    /// samples are rare.
    pub(crate) fn answered(&mut self, took: Option<Span>) {
        match took {
            Some(took) => self.sample(took),
            None => self.repeated = true,
        }
    }

    /// Notes the arrival of a fragment that was sent again, which is not `new` if it had arrived
    /// before. If most of them are not, nacks were repeated although the first answers were on
    /// their way (as in the Eifel detection, RFC 3522). The timeout then doubles, at most once in
    /// its own time, and the next measurement replaces it. Otherwise a queue that delays answers
    /// for longer than the timeout would fill with repeated answers, and no answer to a nack that
    /// was sent only once would correct the estimate.
    pub(crate) fn note_again(&mut self, now: Time, new: bool) {
        if new {
            self.needless = self.needless.saturating_sub(1);
            return;
        }
        self.needless += 1;
        if self.needless < Self::MANY {
            return;
        }
        self.needless = 0;
        if self.raised_at.is_none_or(|raised_at| now.since(raised_at) >= self.timeout()) {
            let raised = (2 * self.timeout().0).min(Self::MOST_RAISED.0);
            self.smoothed_ns = self.smoothed_ns.max(raised);
            self.raised_at = Some(now);
        }
    }

    /// Returns how long to wait for an answer before the first repeated nack.
    #[must_use]
    pub fn timeout(&self) -> Span {
        let timeout = self.smoothed_ns + (4 * self.variation_ns).max(Self::GRANULARITY.0);
        let timeout = timeout << u32::from(self.repeated);
        Span(timeout.clamp(Self::MIN_TIMEOUT.0, Self::MAX_TIMEOUT.0))
    }

    /// Returns how long to wait after `attempts` nacks without an answer.
    #[must_use]
    pub fn backed_off(&self, attempts: u32) -> Span {
        let timeout = self.timeout();
        Self::back_off(timeout, attempts, timeout.max(Self::MAX_BACKOFF))
    }

    /// Returns how long to wait after `attempts` nacks, if answers also wait for other ranks.
    /// `alone` is the estimate for answers that do not wait for other ranks; a small multiple of
    /// its round trip bounds the timeout.
    #[must_use]
    pub fn patience(&self, alone: &Self, attempts: u32) -> Span {
        let most = Span(Self::MOST_TIMES * alone.smoothed_ns).max(Self::PATIENCE);
        let timeout = self.timeout().min(most);
        Self::back_off(timeout, attempts, timeout.max(Self::MAX_PATIENCE))
    }

    fn back_off(Span(timeout): Span, attempts: u32, most: Span) -> Span {
        Span(timeout.saturating_mul(1 << attempts.min(10)).min(most.0))
    }

    /// The least margin over the smoothed round trip: a scheduling delay is not a loss.
    const GRANULARITY: Span = Span::from_micros(500);
    const MIN_TIMEOUT: Span = Span::from_millis(2);
    /// The bound on the timeout in `patience`, as a multiple of the round trip of `alone`.
    /// [`Self::PATIENCE`] applies if it is longer.
    const MOST_TIMES: u64 = 3;
    const PATIENCE: Span = Span::from_millis(4);
    /// The number of needless repetitions that raise the estimate. The network's own copies of
    /// datagrams are fewer.
    const MANY: u8 = 16;
    /// The greatest estimate that needless repetitions lead to. Under heavy loss, where copies of
    /// datagrams look like needless repetitions, a greater one would delay all repairs.
    const MOST_RAISED: Span = Span::from_millis(200);
    const MAX_TIMEOUT: Span = Span::from_secs(1);
    /// The longest backoff of a nack, unless the timeout itself is longer.
    const MAX_BACKOFF: Span = Span::from_millis(100);
    /// The longest backoff of `patience`, unless the timeout itself is longer. It is short because
    /// a probe and its answer cost little, and because only the next probe reveals a loss during
    /// the wait for other ranks.
    const MAX_PATIENCE: Span = Span::from_millis(25);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needless_repetitions_raise_the_timeout_until_an_answer_is_measured() {
        let mut rtt = Rtt::new(Span::from_millis(1));
        rtt.sample(Span::from_millis(1));
        // Answers wait for 150 ms in a queue, and each nack is repeated after every timeout.
        let (mut now, mut raised) = (Time(0), 0);
        while rtt.timeout() < Span::from_millis(150) {
            now = now + rtt.timeout();
            // The fragments of one answer arrive together and count once.
            (0..40).for_each(|_| rtt.note_again(now, false));
            raised += 1;
        }
        assert_eq!(raised, 5);
        for _ in 0..100 {
            now = now + rtt.timeout();
            (0..40).for_each(|_| rtt.note_again(now, false));
        }
        let most = Rtt::MOST_RAISED.0 + 4 * Span::from_micros(500).0;
        assert_eq!(rtt.timeout(), Span(most));
        rtt.sample(Span::from_millis(1));
        assert_eq!(rtt.timeout(), Span::from_millis(3));
        // A longer measurement stays.
        (0..40).for_each(|_| rtt.note_again(now, false));
        rtt.sample(Span::from_millis(300));
        let measured = rtt.timeout();
        (0..40).for_each(|_| rtt.note_again(now + measured, false));
        assert_eq!(rtt.timeout(), measured);
        // Copies that the network makes of a tenth of all datagrams raise nothing.
        for number in 0..1_000 {
            rtt.note_again(now + Span(number), number % 11 > 0);
        }
        assert_eq!(rtt.timeout(), measured);
    }

    #[test]
    fn the_first_sample_replaces_the_guess() {
        let mut rtt = Rtt::new(Span::from_millis(100));
        assert_eq!(rtt.shortest(), None);
        rtt.sample(Span::from_millis(4));
        // The timeout is the first sample plus four times half of it.
        assert_eq!(rtt.timeout(), Span::from_millis(12));
    }

    #[test]
    fn steady_samples_draw_the_timeout_in_and_jitter_widens_it() {
        let mut rtt = Rtt::new(Span::from_millis(1));
        (0..100).for_each(|_| rtt.sample(Span::from_millis(10)));
        assert!(rtt.timeout() < Span::from_millis(11));
        rtt.sample(Span::from_millis(30));
        assert!(rtt.timeout() > Span::from_millis(25));
        assert_eq!(rtt.shortest(), Some(Span::from_millis(10)));
    }

    #[test]
    fn waits_for_others_do_not_make_it_patient() {
        let [mut rtt, mut alone] = [Rtt::new(Span::from_millis(1)); 2];
        alone.sample(Span::from_micros(200));
        (0..50).for_each(|_| rtt.sample(Span::from_millis(150)));
        assert_eq!(rtt.patience(&alone, 0), Rtt::PATIENCE);
    }

    #[test]
    fn an_estimate_that_is_too_short_gives_the_next_question_longer() {
        let mut rtt = Rtt::new(Span::from_millis(1));
        rtt.sample(Span::from_millis(1));
        let short = rtt.timeout();
        rtt.answered(None);
        rtt.answered(None);
        assert_eq!(rtt.timeout().0, 2 * short.0);
        rtt.answered(Some(Span::from_millis(8)));
        assert!(rtt.timeout() > Span::from_millis(8));
        rtt.answered(None);
        rtt.sample(Span::from_millis(8));
        assert!(rtt.timeout() < Span::from_millis(20), "a sample ends the doubling");
    }

    #[test]
    fn questions_back_off_up_to_a_bound() {
        let rtt = Rtt::new(Span::from_millis(1));
        assert_eq!(rtt.backed_off(0), rtt.timeout());
        assert_eq!(rtt.backed_off(2).0, rtt.timeout().0 * 4);
        assert_eq!(rtt.backed_off(60), Rtt::MAX_BACKOFF);
        assert_eq!(rtt.patience(&rtt, 60), Rtt::MAX_PATIENCE);
    }
}
