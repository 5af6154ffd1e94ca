//! Turns of the jobs at a shard: deficit round robin (Shreedhar and Varghese, SIGCOMM 1995).
//!
//! All work that a job's messages cause is charged to the job, in bytes: what folds read and
//! write, what is sent, for each address that it goes to, and a fixed cost for each message that
//! arrives and each that is sent. In a round each job may spend as much as its share of the shard
//! is of a quantum. What it overdraws is taken off its next turns, until it is paid or nobody else
//! is there. So a job with much to do delays one with little by no more than its share, and a job
//! that is alone with its work gets all of the shard.
//!
//! What arrives cannot be put off as folds and sends can. A job whose messages alone cost it more
//! than all that its ranks may have in flight is flooded by one of them: its datagrams are dropped
//! unopened until it has paid.

use racksum_proto::dtype::{DType, WireType};

/// Bytes that all jobs together may spend in a round: a few windows for each of many.
pub(crate) const QUANTUM: usize = 16 << 20;

/// What it costs to take a message, besides what is done with its body.
pub(crate) const MESSAGE_COST: usize = 1 << 10;
/// What it costs to take an open: it is decompressed, and its windows are noted one by one.
pub(crate) const OPEN_COST: usize = 16 << 10;
/// What a system call for one address costs, besides the bytes that it sends.
pub(crate) const SEND_COST: usize = 8 << 10;

/// Returns the cost of a fold of so many bytes, inputs and result. Scaled elements take as long as
/// the `f32` that they stand for.
pub(crate) const fn fold_cost(wire: WireType, bytes: usize) -> usize {
    if wire.is_scaled() { bytes * DType::F32.size() / wire.element_size() } else { bytes }
}

/// A job's turn.
#[derive(Debug)]
pub(crate) struct Turn {
    /// Bytes of a round that are its own.
    quantum: usize,
    /// Bytes that are left of this round's.
    left: usize,
    /// Bytes that it has spent beyond its turns.
    overdrawn: usize,
    /// More than this it overdraws only if it is flooded.
    most_overdrawn: usize,
}

impl Turn {
    /// The turns of a job with so many per cent of the shard, whose ranks may have so many bytes
    /// in flight.
    pub(crate) fn new(share: f64, in_flight: usize) -> Self {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share")]
        let quantum = (QUANTUM as f64 * (share / 100.0).clamp(0.0, 1.0)) as usize;
        let most_overdrawn = in_flight.saturating_mul(2).saturating_add(QUANTUM);
        Self { quantum: quantum.max(1), left: 0, overdrawn: 0, most_overdrawn }
    }

    /// The job's turn begins. If the job is `alone`, it lasts until the next begins.
    pub(crate) fn begin(&mut self, alone: bool) {
        if alone {
            (self.left, self.overdrawn) = (usize::MAX, 0);
            return;
        }
        let paid = self.overdrawn.min(self.quantum);
        self.overdrawn -= paid;
        self.left = self.quantum - paid;
    }

    /// Whether the next job is to have its turn.
    pub(crate) const fn is_over(&self) -> bool {
        self.left == 0
    }

    /// The job has caused work of so many bytes.
    pub(crate) fn spend(&mut self, bytes: usize) {
        self.overdrawn = self.overdrawn.saturating_add(bytes.saturating_sub(self.left));
        self.left = self.left.saturating_sub(bytes);
    }

    /// There is nothing more to do: who waits for work saves up nothing.
    pub(crate) const fn end(&mut self) {
        self.left = 0;
    }

    /// Whether the job is flooded by its own ranks.
    pub(crate) const fn is_flooded(&self) -> bool {
        self.overdrawn > self.most_overdrawn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Windows that each job has folded after so many rounds, each of which has its own size of
    /// them, and always more.
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
        // Every tenth round pays for one.
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
        // Another job comes.
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
