//! Limits on the bytes sent in answer to a rank, so that small nacks cannot cause floods.
//!
//! A rank earns the length of each result that it is sent for the first time, since that result may
//! be lost. It earns the length of each message that it sends without data. It also earns a little
//! with time, so that a rank still ends its ops when its path loses more than half of all
//! datagrams. Results that are sent again, waits, nacks and fails cost their length.

use alloc::boxed::Box;
use alloc::vec;

use crate::geometry::WINDOW_BYTES;
use crate::ids::Rank;
use crate::time::{Span, Time};

/// The bytes that one rank has earned and not spent.
#[derive(Debug, Clone, Copy)]
struct Budget {
    left: u64,
    /// The value of [`Budgets::sent`] at the last update of this budget.
    sent: u64,
    /// The time up to which this budget has earned bytes.
    at: Time,
}

/// The budgets of all ranks of a job at a shard.
#[derive(Debug)]
pub(super) struct Budgets {
    ranks: Box<[Budget]>,
    /// Bytes of results that went to every rank for the first time.
    sent: u64,
    /// The largest budget that a rank can save up.
    most: u64,
}

impl Budgets {
    /// Creates the budgets of a job that joins at `now` and has at most `in_flight` bytes of
    /// results in flight. All of these bytes may be lost, and so may the answer that repeats them.
    pub(super) fn new(world: usize, in_flight: usize, now: Time) -> Self {
        let most = Self::START + 2 * in_flight as u64;
        let budget = Budget { left: Self::START, sent: 0, at: now };
        Self { ranks: vec![budget; world].into(), sent: 0, most }
    }

    /// Notes that every rank was sent a result of `len` bytes for the first time.
    pub(super) const fn note_result(&mut self, len: usize) {
        self.sent += len as u64;
    }

    /// Notes a message of `len` bytes without data from the rank.
    pub(super) fn note_message(&mut self, rank: Rank, len: usize) {
        let Self { ranks, most, .. } = self;
        let budget = &mut ranks[rank.index()];
        budget.left = (budget.left + len as u64).min(*most);
    }

    /// Returns how many bytes may be sent to the rank in answer now.
    pub(super) fn left(&mut self, now: Time, rank: Rank) -> usize {
        let Self { ranks, sent, most } = self;
        let budget = &mut ranks[rank.index()];
        let earned = now.since(budget.at).0 / Self::NS_A_BYTE;
        budget.at = budget.at + Span(earned * Self::NS_A_BYTE);
        budget.left = (budget.left + (*sent - budget.sent) + earned).min(*most);
        budget.sent = *sent;
        usize::try_from(budget.left).unwrap_or(usize::MAX)
    }

    /// Deducts an answer of `len` bytes from the rank's budget.
    pub(super) fn spend(&mut self, rank: Rank, len: usize) {
        let left = &mut self.ranks[rank.index()].left;
        *left = left.saturating_sub(len as u64);
    }

    /// The initial budget: a window may be lost several times in a row before the rank has earned
    /// bytes.
    const START: u64 = 8 * WINDOW_BYTES as u64;
    /// Nanoseconds in which a rank earns one byte: 16 KiB a second.
    const NS_A_BYTE: u64 = Span::from_secs(1).0 / (16 << 10);
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANK: Rank = Rank(1);

    /// Returns budgets in which `RANK` has spent its initial budget.
    fn spent() -> Budgets {
        let mut budgets = Budgets::new(2, 1 << 20, Time(0));
        assert_eq!(budgets.left(Time(0), RANK) as u64, Budgets::START);
        budgets.spend(RANK, usize::try_from(Budgets::START).unwrap());
        assert_eq!(budgets.left(Time(0), RANK), 0);
        budgets
    }

    #[test]
    fn a_rank_earns_what_it_is_sent_and_what_it_says() {
        let mut budgets = spent();
        budgets.note_result(1000);
        budgets.note_message(RANK, 66);
        assert_eq!(budgets.left(Time(0), RANK), 1066);
        budgets.spend(RANK, 66);
        assert_eq!(budgets.left(Time(0), RANK), 1000, "it earns a result once");
        budgets.spend(RANK, 2000);
        assert_eq!(budgets.left(Time(0), RANK), 0);
        assert_eq!(budgets.left(Time(0), Rank(0)) as u64, Budgets::START + 1000);
    }

    #[test]
    fn time_earns_a_little_however_often_one_looks() {
        let mut budgets = spent();
        for ms in 1..=1000 {
            budgets.left(Time(0) + Span::from_millis(ms), RANK);
        }
        let second = budgets.left(Time(0) + Span::from_secs(1), RANK);
        assert!((16_300..=16_400).contains(&second), "{second}");
    }

    #[test]
    fn nobody_saves_up_more_than_may_be_lost() {
        let mut budgets = Budgets::new(2, 1000, Time(0));
        budgets.note_result(1 << 30);
        budgets.note_message(RANK, 1 << 30);
        assert_eq!(budgets.left(Time(0), RANK) as u64, Budgets::START + 2000);
    }
}
