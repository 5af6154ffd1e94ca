//! Finds the rank to blame: a rank that failed on its own, not a rank that only reports the loss of
//! another.

use std::collections::BTreeSet;
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_proto::time::Span;
use serde::de::IgnoredAny;

use super::ProcessGroup;
use crate::exit::Failure;

impl ProcessGroup {
    /// Returns why the job failed, after `rank` has reported `failure`. If the failure is only that
    /// other ranks were lost, waits up to [`PATIENCE`] for the failures of these ranks, because
    /// reports arrive in any order. If none arrives, returns `failure`.
    pub(super) fn cause(&mut self, rank: usize, failure: Failure) -> Failure {
        let clock = Clock::start();
        let start = clock.now();
        let mut awaited: BTreeSet<usize> = lost(&failure).collect();
        let mut reported = BTreeSet::from([rank]);
        let first = of_rank(rank, failure);
        // A lost rank may have exited with an error before another rank reported the loss.
        if let Some(failure) = awaited.iter().find_map(|rank| self.has_failed(*rank)) {
            return failure;
        }
        while !awaited.is_subset(&reported) {
            let left = Duration::from_nanos(PATIENCE.0.saturating_sub(clock.now().since(start).0));
            let Ok((rank, line)) = self.output.recv_timeout(left) else { break };
            let failure = match line {
                Some(line) => failed(&line).map(|failure| of_rank(rank, failure)),
                // A rank that has reported its failure or finished its work exits successfully.
                None if self.end(rank).is_ok_and(|status| status.success()) => {
                    reported.insert(rank);
                    None
                }
                None => Some(self.ended_early(rank)),
            };
            let Some(failure) = failure else { continue };
            if failure.lost.is_empty() {
                return failure;
            }
            reported.insert(rank);
            awaited.extend(lost(&failure));
        }
        first
    }

    /// Returns why a rank failed, if its process has exited with an error.
    fn has_failed(&mut self, rank: usize) -> Option<Failure> {
        let status = self.ranks.get_mut(rank)?.try_wait().ok().flatten()?;
        (!status.success()).then(|| self.ended_early(rank))
    }
}

/// Returns the failure that a line reports, if any.
fn failed(line: &str) -> Option<Failure> {
    serde_json::from_str::<Result<IgnoredAny, Failure>>(line).ok()?.err()
}

/// Returns the ranks that a failure reports as lost.
fn lost(failure: &Failure) -> impl Iterator<Item = usize> {
    failure.lost.iter().map(|rank| usize::from(*rank))
}

fn of_rank(rank: usize, failure: Failure) -> Failure {
    Failure { why: format!("rank {rank}: {failure}"), ..failure }
}

/// How long to wait for the failures of lost ranks. They arrive immediately unless a rank hangs.
const PATIENCE: Span = Span::from_secs(3);

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};
    use std::sync::mpsc::channel;

    use super::*;

    fn lost(rank: u16) -> Failure {
        Failure { lost: vec![rank], ..Failure::failed(format!("lost rank {rank}")) }
    }

    /// Returns the reason that a process group reports if rank 2 fails first and these lines
    /// follow.
    fn cause(failure: Failure, lines: &[(usize, Option<Failure>)], ranks: Vec<Child>) -> String {
        let (sender, output) = channel();
        for (rank, failure) in lines {
            let done = serde_json::to_string(&Ok::<_, Failure>("part of it")).unwrap();
            sender.send((*rank, Some(done))).unwrap();
            let line = failure
                .as_ref()
                .map(|failure| serde_json::to_string(&Err::<(), _>(failure)).unwrap());
            sender.send((*rank, line)).unwrap();
        }
        drop(sender);
        ProcessGroup { ranks, _leashes: Vec::new(), output }.cause(2, failure).why
    }

    fn process(script: &str) -> Child {
        Command::new("sh").args(["-c", script]).spawn().unwrap()
    }

    #[test]
    fn a_rank_s_own_reason_goes_before_that_it_was_lost() {
        let own = || Failure::usage("no memory");
        assert_eq!(cause(own(), &[(1, Some(own()))], Vec::new()), "rank 2: no memory");
        for lines in [
            &[(1, Some(own()))][..],
            &[(0, Some(lost(1))), (1, Some(own()))],
            &[(0, Some(lost(2))), (1, Some(lost(3))), (3, Some(own()))],
        ] {
            let (rank, _) = lines[lines.len() - 1];
            let why = cause(lost(1), lines, Vec::new());
            assert_eq!(why, format!("rank {rank}: no memory"));
        }
    }

    #[test]
    fn a_rank_that_has_no_reason_of_its_own_is_named_by_one_that_lost_it() {
        for lines in [&[][..], &[(1, Some(lost(2)))]] {
            assert_eq!(cause(lost(1), lines, Vec::new()), "rank 2: lost rank 1");
        }
        let done = ["exit 0", "exit 0"].map(process).into();
        assert_eq!(cause(lost(1), &[(1, None)], done), "rank 2: lost rank 1");
    }

    #[test]
    fn a_rank_that_ended_without_a_word_is_named_whether_its_end_was_heard_or_not() {
        let ended = || ["exit 0", "kill -9 $$"].map(process).into();
        let why = "rank 1 exited early (signal: 9 (SIGKILL))";
        assert_eq!(cause(lost(1), &[(1, None)], ended()), why);
        let mut ranks: Vec<Child> = ended();
        ranks[1].wait().unwrap();
        assert_eq!(cause(lost(1), &[], ranks), why);
    }
}
