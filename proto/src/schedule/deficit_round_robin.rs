//! Deficit round robin.

use alloc::collections::{BTreeMap, VecDeque};

use super::{Schedule, Turn};

/// A schedule in which jobs take turns in round-robin order, and each job spends bytes in
/// proportion to its share.
///
/// A turn lasts for one quantum. A job may spend more, if its last piece of work is larger than the
/// rest of its budget or if it is charged for messages. It pays the difference with its next turns.
/// A busy job therefore delays another job by no more than its own share, whatever the sizes of
/// their pieces of work. A job without work saves nothing up, and a job without competitors owes
/// nothing.
///
/// Source: Shreedhar and Varghese, *Efficient Fair Queuing Using Deficit Round Robin*, SIGCOMM
/// 1995. In the paper, a packet must fit the rest of a queue's deficit. In this schedule, the size
/// of a piece of work is known only after the work is done, so the deficit is a debt that is paid
/// later.
#[derive(Debug)]
pub struct DeficitRoundRobin<J> {
    /// Bytes that all jobs together may spend in a round.
    quantum: usize,
    accounts: BTreeMap<J, Account>,
    /// The jobs that wait. The job at the front has the next turn.
    queue: VecDeque<J>,
}

#[derive(Debug)]
struct Account {
    /// Bytes that the job may spend in a turn.
    quantum: usize,
    debt: usize,
    is_waiting: bool,
}

impl<J> DeficitRoundRobin<J> {
    /// Creates a schedule without jobs, in which a job with a share of 1 has turns of `quantum`
    /// bytes.
    #[must_use]
    pub const fn new(quantum: usize) -> Self {
        Self { quantum, accounts: BTreeMap::new(), queue: VecDeque::new() }
    }
}

impl<J: Ord + Copy> DeficitRoundRobin<J> {
    /// Returns whether no job has a competitor.
    fn is_alone(&self) -> bool {
        self.accounts.len() < 2
    }
}

impl<J: Ord + Copy> Schedule<J> for DeficitRoundRobin<J> {
    fn add(&mut self, job: J, share: f64) {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the product is at most the quantum"
        )]
        let quantum = (self.quantum as f64 * share.clamp(0.0, 1.0)) as usize;
        self.remove(job);
        self.accounts.insert(job, Account { quantum: quantum.max(1), debt: 0, is_waiting: false });
    }

    fn remove(&mut self, job: J) {
        if self.accounts.remove(&job).is_some_and(|account| account.is_waiting) {
            self.queue.retain(|other| *other != job);
        }
    }

    fn enqueue(&mut self, job: J) {
        if let Some(account) = self.accounts.get_mut(&job)
            && !core::mem::replace(&mut account.is_waiting, true)
        {
            self.queue.push_back(job);
        }
    }

    fn waiting(&self) -> usize {
        self.queue.len()
    }

    fn next(&mut self) -> Option<Turn<J>> {
        let alone = self.is_alone();
        let job = self.queue.pop_front()?;
        let account = self.accounts.get_mut(&job)?;
        account.is_waiting = false;
        if alone {
            account.debt = 0;
            return Some(Turn::new(job, self.quantum));
        }
        let paid = account.debt.min(account.quantum);
        account.debt -= paid;
        Some(Turn::new(job, account.quantum - paid))
    }

    fn finish(&mut self, turn: Turn<J>) {
        self.charge(turn.job, turn.overdraft());
    }

    fn charge(&mut self, job: J, bytes: usize) {
        if !self.is_alone()
            && let Some(account) = self.accounts.get_mut(&job)
        {
            account.debt = account.debt.saturating_add(bytes);
        }
    }

    fn debt(&self, job: J) -> usize {
        self.accounts.get(&job).map_or(0, |account| account.debt)
    }
}

#[cfg(test)]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use super::*;

    const QUANTUM: usize = 16 << 20;

    /// Returns a schedule of jobs with these shares, named by their indices.
    fn schedule(shares: &[f64]) -> DeficitRoundRobin<usize> {
        let mut schedule = DeficitRoundRobin::new(QUANTUM);
        shares.iter().enumerate().for_each(|(job, share)| schedule.add(job, *share));
        schedule
    }

    /// Begins and ends one turn of a job without work. Returns whether the turn was over at once.
    fn idle(schedule: &mut DeficitRoundRobin<usize>, job: usize) -> bool {
        schedule.enqueue(job);
        let turn = schedule.next().unwrap();
        let is_over = turn.is_over();
        schedule.finish(turn);
        is_over
    }

    /// Returns the number of pieces of work that each job has done after `rounds` rounds. Each job
    /// has its own share and size of piece, and always has more to do.
    fn pieces(jobs: &[(f64, usize)], rounds: usize) -> Vec<usize> {
        let shares: Vec<_> = jobs.iter().map(|(share, _)| *share).collect();
        let mut schedule = schedule(&shares);
        let mut pieces = vec![0; jobs.len()];
        (0..jobs.len()).for_each(|job| schedule.enqueue(job));
        for _ in 0..rounds * jobs.len() {
            let mut turn = schedule.next().unwrap();
            while !turn.is_over() {
                turn.spend(jobs[turn.job].1);
                pieces[turn.job] += 1;
            }
            schedule.enqueue(turn.job);
            schedule.finish(turn);
        }
        pieces
    }

    #[test]
    fn jobs_spend_in_proportion_to_their_shares_whatever_the_sizes_of_their_work() {
        let jobs = [(0.25, 180_000), (0.25, 2_000_000), (0.5, 7_000)];
        for (pieces, (share, size)) in pieces(&jobs, 400).into_iter().zip(jobs) {
            let due = 400.0 * QUANTUM as f64 * share;
            assert!(((pieces * size) as f64 / due - 1.0).abs() < 0.01, "{pieces} of {size}");
        }
    }

    #[test]
    fn work_that_is_greater_than_a_turn_takes_several() {
        // The first job pays for one piece with ten turns, and the second with a hundred.
        assert_eq!(pieces(&[(0.01, QUANTUM / 10), (0.01, QUANTUM)], 100), [10, 1]);
    }

    #[test]
    fn a_job_without_work_saves_nothing_up() {
        let mut schedule = schedule(&[0.5, 0.5]);
        (0..5).for_each(|_| assert!(!idle(&mut schedule, 0)));
        schedule.enqueue(0);
        let mut turn = schedule.next().unwrap();
        turn.spend(QUANTUM / 2);
        assert!(turn.is_over());
        schedule.finish(turn);
    }

    #[test]
    fn charges_are_paid_by_the_next_turns() {
        let mut schedule = schedule(&[0.5, 0.5]);
        assert!(!idle(&mut schedule, 0));
        schedule.charge(0, QUANTUM);
        assert_eq!((schedule.debt(0), schedule.debt(1)), (QUANTUM, 0));
        assert_eq!([0; 3].map(|job| idle(&mut schedule, job)), [true, true, false]);
        assert_eq!(schedule.debt(0), 0);
    }

    #[test]
    fn a_job_without_competitors_has_whole_turns_and_owes_nothing() {
        let mut schedule = schedule(&[0.01]);
        schedule.charge(0, 100 * QUANTUM);
        assert_eq!(schedule.debt(0), 0);
        schedule.enqueue(0);
        let mut turn = schedule.next().unwrap();
        turn.spend(QUANTUM - 1);
        assert!(!turn.is_over(), "the share of a lone job must not limit its turn");
        turn.spend(QUANTUM);
        schedule.finish(turn);
        schedule.add(1, 0.99);
        assert!(!idle(&mut schedule, 0), "a job must not owe bytes that it spent while alone");
        // Once the last competitor has left, the debt is forgotten, too.
        schedule.charge(0, 100 * QUANTUM);
        schedule.remove(1);
        assert!(!idle(&mut schedule, 0));
        assert_eq!(schedule.debt(0), 0);
    }

    #[test]
    fn a_job_waits_once_however_often_it_is_enqueued() {
        let mut schedule = schedule(&[0.5, 0.5]);
        for job in [0, 1, 0, 1, 1] {
            schedule.enqueue(job);
        }
        assert_eq!(schedule.waiting(), 2);
        assert_eq!(
            [(); 3].map(|()| schedule.next().map(|turn| turn.job)),
            [Some(0), Some(1), None]
        );
    }

    #[test]
    fn removed_and_unknown_jobs_have_no_turns() {
        let mut schedule = schedule(&[0.5, 0.5]);
        (0..3).for_each(|job| schedule.enqueue(job));
        schedule.remove(0);
        assert_eq!(schedule.waiting(), 1);
        let mut turn = schedule.next().unwrap();
        assert_eq!(turn.job, 1);
        turn.spend(2 * QUANTUM);
        schedule.remove(1);
        schedule.finish(turn);
        schedule.charge(7, 1);
        assert_eq!([0, 1, 7].map(|job| schedule.debt(job)), [0; 3]);
        assert_eq!(schedule.next(), None);
    }

    #[test]
    fn a_job_that_is_added_again_begins_afresh() {
        let mut schedule = schedule(&[0.5, 0.5]);
        schedule.enqueue(0);
        schedule.charge(0, 3 * QUANTUM);
        schedule.add(0, 1.0);
        assert_eq!((schedule.waiting(), schedule.debt(0)), (0, 0));
    }
}
