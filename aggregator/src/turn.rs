//! Turns of the jobs at a shard: deficit round robin (Shreedhar and Varghese, SIGCOMM 1995), where
//! what is counted is the bytes that folds read and write.
//!
//! In a round each job may fold as many bytes as its share of the shard is of a quantum; what it
//! overdraws is taken off its next turn. So a job with much to fold delays one with little by no
//! more than its share, and a job that is alone with its work gets all of the shard.

/// Bytes that all jobs together may fold in a round: a few windows for each of many.
const QUANTUM: usize = 8 << 20;

/// A job's turn.
#[derive(Debug)]
pub(crate) struct Turn {
    /// Bytes of a round that are its own.
    quantum: usize,
    /// Bytes that are left of this round's, and what earlier rounds left over.
    left: usize,
    /// Bytes that it has folded beyond its turns.
    overdrawn: usize,
}

impl Turn {
    /// The turns of a job with so many per cent of the shard.
    pub(crate) fn new(share: f64) -> Self {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share")]
        let quantum = (QUANTUM as f64 * (share / 100.0).clamp(0.0, 1.0)) as usize;
        Self { quantum: quantum.max(1), left: 0, overdrawn: 0 }
    }

    /// The job's turn begins.
    pub(crate) fn begin(&mut self) {
        let paid = self.overdrawn.min(self.quantum);
        self.overdrawn -= paid;
        self.left = self.quantum - paid;
    }

    /// Whether the next job is to have its turn.
    pub(crate) const fn is_over(&self) -> bool {
        self.left == 0
    }

    /// So many bytes were folded.
    pub(crate) fn spend(&mut self, bytes: usize) {
        self.overdrawn += bytes.saturating_sub(self.left);
        self.left = self.left.saturating_sub(bytes);
    }

    /// There is nothing more to fold: who waits for work saves up nothing, and owes nothing.
    pub(crate) const fn end(&mut self) {
        self.left = 0;
        self.overdrawn = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Windows that each job has folded after so many rounds, each of which has its own size of
    /// them, and always more.
    fn windows(jobs: &[(f64, usize)], rounds: usize) -> Vec<usize> {
        let mut turns: Vec<_> = jobs.iter().map(|(share, _)| Turn::new(*share)).collect();
        let mut windows = vec![0; jobs.len()];
        for _ in 0..rounds {
            for (i, turn) in turns.iter_mut().enumerate() {
                turn.begin();
                while !turn.is_over() {
                    turn.spend(jobs[i].1);
                    windows[i] += 1;
                }
            }
        }
        windows
    }

    #[test]
    fn jobs_fold_as_many_bytes_as_their_shares_say_whatever_their_windows_are() {
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
    fn who_had_nothing_to_fold_has_saved_up_nothing() {
        let mut turn = Turn::new(100.0);
        for _ in 0..5 {
            turn.begin();
            turn.end();
        }
        turn.begin();
        turn.spend(turn.quantum);
        assert!(turn.is_over());
    }
}
