//! Limits on the bytes sent in answer to each rank's messages, so that small nacks cannot cause
//! floods.
//!
//! A rank earns the length of each result that is sent to it for the first time, since that result
//! may be lost. It also earns the length of each message that it sends, unless the message carries
//! data. Finally, it earns a little over time, so that it can end its ops even if its path loses
//! more than half of all datagrams. Every message that is addressed to the rank alone costs its
//! length: a repeated result, a wait, a nack or a fail.

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
    /// The total length of the results sent to every rank for the first time, in bytes.
    sent: u64,
    /// The largest budget that a rank can save up.
    most: u64,
}

impl Budgets {
    /// Creates the budgets of a job that starts at `now` and has at most `in_flight` bytes of
    /// results in flight. A budget is at most the initial budget plus twice these bytes: all of
    /// them may be lost, and so may the answer that repeats them.
    pub(super) fn new(world: usize, in_flight: usize, now: Time) -> Self {
        let most = Self::START + 2 * in_flight as u64;
        let budget = Budget { left: Self::START, sent: 0, at: now };
        Self { ranks: vec![budget; world].into(), sent: 0, most }
    }

    /// Notes that every rank was sent a result of `len` bytes for the first time.
    pub(super) const fn note_result(&mut self, len: usize) {
        self.sent += len as u64;
    }

    /// Notes that the rank has sent a message of `len` bytes that is not data.
    pub(super) fn note_message(&mut self, rank: Rank, len: usize) {
        let Self { ranks, most, .. } = self;
        let budget = &mut ranks[rank.index()];
        budget.left = (budget.left + len as u64).min(*most);
    }

    /// Returns how many bytes of answers may be sent to the rank now.
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

    /// The initial budget. It covers a window that is lost several times in a row before the rank
    /// has earned any bytes.
    const START: u64 = 8 * WINDOW_BYTES as u64;
    /// The time in which a rank earns one byte, in nanoseconds. The rate is 16 KiB per second.
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
        assert_eq!(
            budgets.left(Time(0), RANK),
            1000,
            "a rank earns the length of a result only once"
        );
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
