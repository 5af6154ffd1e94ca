//! Turns of the jobs at a shard: deficit round robin (Shreedhar and Varghese, SIGCOMM 1995).
//!
//! Every job is charged, in bytes, for the work that its messages cause. The charge covers what
//! folds read and write, what is sent to each address, and a fixed cost for each message received
//! or sent. In each round a job may spend a quantum in proportion to its share of the shard. An
//! overdraft is deducted from its next turns, until it is paid or no other job is there. A busy job
//! therefore delays another job by no more than its own share, and a job that is alone gets the
//! whole shard.
//!
//! Received messages cannot be postponed as folds and sends can. If a job's messages alone cost
//! more than all that its ranks may have in flight, one of its ranks floods it. The job's datagrams
//! are then dropped unopened until the overdraft is paid.

use racksum_proto::dtype::{DType, WireType};

/// Bytes that all jobs together may spend in a round: a few windows for each of many jobs.
pub(crate) const QUANTUM: usize = 16 << 20;

/// The cost of receiving a message, without the handling of its body.
pub(crate) const MESSAGE_COST: usize = 1 << 10;
/// The cost of receiving an open: it is decompressed, and its windows are recorded one by one.
pub(crate) const OPEN_COST: usize = 16 << 10;
/// The cost of a system call for one address, besides the bytes sent.
pub(crate) const SEND_COST: usize = 8 << 10;

/// Returns the cost of a fold of this many bytes, inputs and result. Scaled elements cost as much
/// as the `f32` values they represent.
pub(crate) const fn fold_cost(wire: WireType, bytes: usize) -> usize {
    if wire.is_scaled() { bytes * DType::F32.size() / wire.element_size() } else { bytes }
}

/// The turn of a job at a shard.
#[derive(Debug)]
pub(crate) struct Turn {
    /// Bytes that the job may spend in each round.
    quantum: usize,
    /// Bytes left in this round.
    left: usize,
    /// Bytes that the job has spent beyond its turns.
    overdrawn: usize,
    /// The overdraft above which the job counts as flooded.
    most_overdrawn: usize,
}

impl Turn {
    /// Creates the turn of a job with this share of the shard, in per cent, and this many bytes in
    /// flight.
    pub(crate) fn new(share: f64, in_flight: usize) -> Self {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share")]
        let quantum = (QUANTUM as f64 * (share / 100.0).clamp(0.0, 1.0)) as usize;
        let most_overdrawn = in_flight.saturating_mul(2).saturating_add(QUANTUM);
        Self { quantum: quantum.max(1), left: 0, overdrawn: 0, most_overdrawn }
    }

    /// Begins the job's turn. If the job is `alone`, the turn lasts until the next one begins.
    pub(crate) fn begin(&mut self, alone: bool) {
        if alone {
            (self.left, self.overdrawn) = (usize::MAX, 0);
            return;
        }
        let paid = self.overdrawn.min(self.quantum);
        self.overdrawn -= paid;
        self.left = self.quantum - paid;
    }

    /// Returns whether it is the next job's turn.
    pub(crate) const fn is_over(&self) -> bool {
        self.left == 0
    }

    /// Charges the job for work of this many bytes.
    pub(crate) fn spend(&mut self, bytes: usize) {
        self.overdrawn = self.overdrawn.saturating_add(bytes.saturating_sub(self.left));
        self.left = self.left.saturating_sub(bytes);
    }

    /// Ends the turn of a job without work: an idle job saves up nothing.
    pub(crate) const fn end(&mut self) {
        self.left = 0;
    }

    /// Returns whether the job's own ranks flood it.
    pub(crate) const fn is_flooded(&self) -> bool {
        self.overdrawn > self.most_overdrawn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of windows that each job has folded after `rounds` rounds. Each job has
    /// its own window size and always has more to fold.
    fn windows(jobs: &[(f64, usize)], rounds: usize) -> Vec<usize> {
        let mut turns: Vec<_> = jobs.iter().map(|(share, _)| Turn::new(*share, 0)).collect();
        let mut windows = vec![0; jobs.len()];
        for _ in 0..rounds {
            for (i, turn) in turns.iter_mut().enumerate() {
                turn.begin(false);
                while !turn.is_over() {
                    turn.spend(jobs[i].1);
                    windows[i] += 1;
                }
            }
        }
        windows
    }

    #[test]
    fn a_fold_costs_as_much_as_its_elements_take() {
        for (wire, costs) in [
            (WireType::F32, 100),
            (WireType::F64, 100),
            (WireType::Bf16, 100),
            (WireType::Fixed32, 100),
            (WireType::Int8, 400),
        ] {
            assert_eq!(fold_cost(wire, 100), costs, "{wire:?}");
        }
    }

    #[test]
    fn jobs_spend_as_many_bytes_as_their_shares_say_whatever_their_windows_are() {
        let jobs = [(25.0, 180_000), (25.0, 2_000_000), (50.0, 7_000)];
        let bytes: Vec<_> = windows(&jobs, 400)
            .iter()
            .zip(jobs)
            .map(|(windows, (_, size))| windows * size)
            .collect();
        for (bytes, (share, _)) in bytes.iter().zip(jobs) {
            let due = 400.0 * QUANTUM as f64 * share / 100.0;
            assert!((*bytes as f64 / due - 1.0).abs() < 0.01, "{bytes} of {due}");
        }
    }

    #[test]
    fn a_window_that_is_greater_than_a_turn_takes_several() {
        // Every tenth round pays for one window.
        assert_eq!(windows(&[(1.0, QUANTUM / 10)], 100), [10]);
    }

    #[test]
    fn who_had_nothing_to_do_has_saved_up_nothing() {
        let mut turn = Turn::new(100.0, 0);
        for _ in 0..5 {
            turn.begin(false);
            turn.end();
        }
        turn.begin(false);
        turn.spend(turn.quantum);
        assert!(turn.is_over());
    }

    #[test]
    fn what_messages_cost_is_owed_although_there_is_nothing_else_to_do() {
        let mut turn = Turn::new(50.0, 0);
        turn.begin(false);
        turn.end();
        turn.spend(QUANTUM);
        for _ in 0..2 {
            turn.begin(false);
            assert!(turn.is_over(), "the turn pays for what came before");
        }
        turn.begin(false);
        assert!(!turn.is_over());
    }

    #[test]
    fn who_is_alone_has_no_end_and_owes_nothing() {
        let mut turn = Turn::new(1.0, 0);
        turn.spend(100 * QUANTUM);
        turn.begin(true);
        turn.spend(100 * QUANTUM);
        assert!(!turn.is_over() && !turn.is_flooded());
        // Another job arrives.
        turn.begin(false);
        assert!(!turn.is_over());
    }

    #[test]
    fn a_job_is_flooded_when_its_messages_cost_more_than_its_ranks_may_have_in_flight() {
        let mut turn = Turn::new(10.0, QUANTUM);
        turn.spend(3 * QUANTUM);
        assert!(!turn.is_flooded());
        turn.spend(1);
        assert!(turn.is_flooded());
        turn.begin(false);
        assert!(!turn.is_flooded());
    }
}
