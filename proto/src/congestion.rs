//! Congestion control: how many bytes may be in flight to one receiver.
//!
//! The algorithm is slow start, additive increase and multiplicative decrease (RFC 5681), with two
//! changes for this traffic. First, the receiver's advertised buffer size limits the congestion
//! window, since incast at one socket is the normal case. Second, a cut needs more than a few lost
//! fragments in a round. Stray loss does not indicate a queue, and a cut for each stray loss would
//! collapse the congestion window (the argument for BBRv2's loss threshold).

/// A congestion window, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Congestion {
    window: usize,
    least: usize,
    max: usize,
    slow_start_below: usize,
    in_flight: usize,
    /// The maximum number of bytes in flight since the round began.
    peak: usize,
    /// The number of bytes delivered since the round began. A round ends once a whole congestion
    /// window has been delivered.
    delivered: usize,
    lost: usize,
    /// The number of finished rounds.
    round: u64,
    cut_this_round: bool,
}

impl Congestion {
    /// Creates a congestion window that stays between `least` and `max` bytes. A `max` below
    /// [`Self::LEAST`] is raised to it, and a `least` above `max` is lowered to `max`.
    #[must_use]
    pub fn new(least: usize, max: usize) -> Self {
        let max = max.max(Self::LEAST);
        let least = least.min(max);
        Self {
            window: (Self::START_TIMES * least).min(max),
            least,
            max,
            slow_start_below: max,
            in_flight: 0,
            peak: 0,
            delivered: 0,
            lost: 0,
            round: 0,
            cut_this_round: false,
        }
    }

    /// Returns whether `len` more bytes may be sent now. With nothing in flight, any length may be
    /// sent.
    #[must_use]
    pub const fn admits(&self, len: usize) -> bool {
        self.in_flight == 0 || self.in_flight + len <= self.window
    }

    /// Returns the size of the congestion window, in bytes.
    #[must_use]
    pub const fn window(&self) -> usize {
        self.window
    }

    /// Records that `len` bytes were sent, for the first time or again.
    pub const fn on_sent(&mut self, len: usize) {
        self.in_flight += len;
        if self.peak < self.in_flight {
            self.peak = self.in_flight;
        }
    }

    /// Records that `len` bytes were delivered.
    pub fn on_delivered(&mut self, len: usize) {
        // A congestion window that is not used up says nothing about the path. If it grew, it would
        // allow a burst later (RFC 7661).
        let used = 2 * self.peak >= self.window;
        self.in_flight = self.in_flight.saturating_sub(len);
        self.delivered += len;
        if used {
            let step = Self::STEP * len / self.window;
            let step = if self.window < self.slow_start_below { len } else { step };
            self.window = (self.window + step).min(self.max);
        }
        if self.delivered >= self.window {
            self.delivered = 0;
            self.lost = 0;
            self.peak = self.in_flight;
            self.round += 1;
            self.cut_this_round = false;
        }
    }

    /// Records that `len` bytes in flight no longer need to arrive.
    pub const fn on_forgotten(&mut self, len: usize) {
        self.in_flight = self.in_flight.saturating_sub(len);
    }

    /// Records that the receiver lacks `len` bytes.
    pub fn on_lost(&mut self, len: usize) {
        self.lost += len;
        self.on_lost_in_round(self.lost);
    }

    /// Records that one of several receivers has lacked `len` bytes since the current round began.
    pub fn on_lost_in_round(&mut self, len: usize) {
        if len > (self.window / Self::LOSS_DIVISOR).max(Self::STRAY_LOSS) {
            self.cut(7, 10);
        }
    }

    /// Returns the number of the current round, from 0.
    #[must_use]
    pub const fn round(&self) -> u64 {
        self.round
    }

    /// Records that the path marked datagrams, because a queue is building up.
    pub fn on_congested(&mut self) {
        self.cut(8, 10);
    }

    fn cut(&mut self, numerator: usize, denominator: usize) {
        if self.cut_this_round {
            return;
        }
        self.cut_this_round = true;
        self.delivered = 0;
        self.window = (self.window * numerator / denominator).max(self.least);
        self.slow_start_below = self.window;
    }

    /// The least congestion window, in bytes: two full windows of data. With less, a stream would
    /// stop and wait for each window.
    pub const LEAST: usize = 2 * crate::geometry::WINDOW_BYTES;
    /// The initial congestion window as a multiple of the least one. A switch's queue may hold much
    /// less than the receiver's buffer, so the congestion window starts small.
    const START_TIMES: usize = 2;
    /// Growth per round after slow start, in bytes. A switch's queue may hold only a few windows
    /// from all ranks together, and an overflow drops whole batches. If the congestion window grew
    /// by a whole window of data per round, the queue would overflow every other round.
    const STEP: usize = 2 << 10;
    /// The tolerated loss in a round is the congestion window divided by this number.
    const LOSS_DIVISOR: usize = 16;
    /// The least tolerated loss in a round, in bytes: a few stray datagrams are a large part of a
    /// small congestion window.
    const STRAY_LOSS: usize = crate::geometry::WINDOW_BYTES / 2;
}

#[cfg(test)]
mod tests {
    use super::*;

    const KB: usize = 1024;

    /// Sends and delivers `len` bytes.
    fn pass(congestion: &mut Congestion, len: usize) {
        congestion.on_sent(len);
        congestion.on_delivered(len);
    }

    #[test]
    fn grows_by_what_is_delivered_until_the_first_cut() {
        let mut congestion = Congestion::new(Congestion::LEAST, 4000 * KB);
        let start = congestion.window();
        congestion.on_sent(start);
        assert!(!congestion.admits(1));
        congestion.on_delivered(start);
        assert_eq!(congestion.window(), 2 * start);
    }

    #[test]
    fn stray_loss_does_not_cut_but_a_burst_does_once_a_round() {
        let mut congestion = Congestion::new(Congestion::LEAST, 1000 * KB);
        pass(&mut congestion, 1000 * KB);
        congestion.on_lost(10 * KB);
        assert_eq!(congestion.window(), 1000 * KB);
        congestion.on_lost(100 * KB);
        assert_eq!(congestion.window(), 700 * KB);
        congestion.on_lost(100 * KB);
        assert_eq!(congestion.window(), 700 * KB);
        pass(&mut congestion, 800 * KB);
        congestion.on_congested();
        assert!(congestion.window() < 700 * KB);
    }

    #[test]
    fn what_is_not_used_does_not_grow() {
        let mut congestion = Congestion::new(Congestion::LEAST, 1000 * KB);
        let start = congestion.window();
        (0..100).for_each(|_| pass(&mut congestion, start / 4));
        assert_eq!(congestion.window(), start);
    }

    #[test]
    fn never_closes_and_never_exceeds_its_limit() {
        let mut congestion = Congestion::new(Congestion::LEAST, 500 * KB);
        for _ in 0..50 {
            congestion.on_congested();
            pass(&mut congestion, 500 * KB);
        }
        assert!(congestion.window() >= Congestion::LEAST);
        (0..400).for_each(|_| pass(&mut congestion, 500 * KB));
        assert_eq!(congestion.window(), 500 * KB);
    }
}
