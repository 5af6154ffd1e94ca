//! The supervisor of a client's session. Its thread handles the aggregators' messages while ops
//! run. It moves the job to a standby when an aggregator fails, and to the aggregators that an
//! operator names.

mod counters;
mod migration;
mod planned_move;
mod standby_search;

use std::borrow::Cow;
use std::sync::Arc;

use racksum_net::log_limit::LogLimit;
use racksum_net::quic::SILENT;
use racksum_proto::control::{FromAggregator, FromWorker, LostRank};
use racksum_proto::ids::Rank;
use racksum_proto::loss::Loss;

use crate::control::{Closed, ControlSenders, Event, Mailbox};
use crate::driver::Driver;
use crate::error::{ConnectError, superseded};
use crate::grant::Membership;
use crate::options::ConnectOptions;
use counters::Reports;
use planned_move::PlannedMove;
use standby_search::StandbySearch;

/// Rate limits for log records that an aggregator can trigger.
static LOST: LogLimit = LogLimit::new(64);
static NO_PARENT: LogLimit = LogLimit::new(4);

/// The state of a client's supervising thread.
pub(crate) struct Supervisor {
    pub(crate) options: ConnectOptions,
    /// The index of the job's current set of aggregators.
    pub(crate) at: usize,
    pub(crate) membership: Membership,
    /// The senders that report lost ranks to the aggregators of the current set.
    pub(crate) senders: ControlSenders,
    /// The lost ranks that the job continues without.
    pub(crate) absent: Vec<LostRank>,
    pub(crate) mailbox: Mailbox,
    pub(crate) driver: Arc<Driver>,
    /// The number of sets of aggregators that the user named. Further sets in `options` are those
    /// of operators.
    pub(crate) user_sets: usize,
    /// The move that is being prepared, if any.
    pub(crate) planned: Option<PlannedMove>,
    /// The search for a standby, while an aggregator of the current set drains.
    pub(crate) search: Option<StandbySearch>,
    /// The number of trials of other aggregators so far.
    pub(crate) trials: u64,
    /// Each trial that runs for a planned move holds a copy.
    pub(crate) trying: Arc<()>,
    /// The reports of the rank's own counters.
    reports: Reports,
}

impl Supervisor {
    pub(crate) fn new(
        options: ConnectOptions,
        at: usize,
        membership: Membership,
        senders: ControlSenders,
        mailbox: Mailbox,
        driver: Arc<Driver>,
    ) -> Self {
        Self {
            user_sets: 1 + options.standbys.len(),
            options,
            at,
            membership,
            senders,
            absent: Vec::new(),
            mailbox,
            driver,
            planned: None,
            search: None,
            trials: 0,
            trying: Arc::default(),
            reports: Reports::new(),
        }
    }

    /// Handles the aggregators' messages until the client is closed, and then leaves the job.
    pub(crate) fn run(mut self) {
        while let Some((place, event)) = self.next() {
            match event {
                Event::Received(FromAggregator::PeerLost { ranks, why }) => self.lose(&ranks, why),
                Event::Received(FromAggregator::ContinueWithout(absent)) => {
                    self.continue_without(absent, place)
                }
                Event::Received(FromAggregator::Superseded { why, .. }) => {
                    self.end(superseded(&why));
                }
                Event::Received(FromAggregator::ParentLost { reason }) => {
                    NO_PARENT.note(|left_out| tracing::warn!(left_out, "{reason}"));
                    self.end(reason);
                }
                Event::Received(FromAggregator::PrepareMove { number, to }) => {
                    self.prepare((place, number), to);
                }
                Event::Received(FromAggregator::CancelMove { number }) => {
                    self.cancel((place, number));
                }
                Event::Received(FromAggregator::MoveNow { number }) => {
                    self.move_as_planned((place, number));
                }
                Event::Tried { trial, result } => self.finish_trial(trial, result),
                Event::Received(FromAggregator::Drain) if self.may_move() => {
                    self.seek_standby(place);
                }
                Event::Sought { search, result } => self.finish_search(place, search, result),
                Event::Closed(error) if self.may_move() => self.move_on(error.to_string()),
                Event::Closed(ConnectError::Silent) => {
                    self.end(format!("{}: {SILENT}", self.host(place)));
                }
                Event::Closed(error @ ConnectError::Protocol(_)) => {
                    self.end(format!("{}: {error}", self.host(place)));
                }
                Event::Closed(_) => {
                    self.end(format!("the aggregator {} is gone", self.host(place)));
                }
                Event::Received(_) => {}
            }
        }
        if let Some(Closed { next_op }) = self.mailbox.closed {
            // The rank may rejoin at `next_op`, unless it leaves in the middle of an op.
            self.membership.controls.close(&FromWorker::Leave { next_op });
        }
    }

    /// Returns the next event, or `None` once the client is closed. Reports the rank's counters
    /// while it waits.
    fn next(&mut self) -> Option<(u8, Event)> {
        if let Some(early) = self.membership.early.pop_front() {
            return Some(early);
        }
        loop {
            self.report_counters();
            let event = self.mailbox.recv(Some(self.reports.left()));
            if event.is_some() || self.mailbox.closed.is_some() {
                return event;
            }
        }
    }

    /// Returns the sets of aggregators that the rank knows.
    fn sets(&self) -> impl Iterator<Item = &Vec<String>> {
        std::iter::once(&self.options.aggregators).chain(&self.options.standbys)
    }

    /// Returns the name, as given by the user, of the aggregator at `place` in the current set.
    fn host(&self, place: u8) -> &str {
        let host = self.sets().nth(self.at).and_then(|set| set.get(usize::from(place)));
        host.map_or("an aggregator", String::as_str)
    }

    /// Returns whether the rank knows other aggregators, and keeps all sums that other ranks may
    /// lack there.
    fn may_move(&self) -> bool {
        let is_ready = || self.driver.with_engine(|engine| engine.is_ready_to_move());
        !self.options.standbys.is_empty() && is_ready() == Some(true)
    }

    fn lose(&self, ranks: &[u16], why: Loss) {
        let ranks: Vec<Rank> = ranks.iter().copied().map(Rank).collect();
        self.driver.with_engine(|engine| engine.lose(&ranks, why));
    }

    fn continue_without(&mut self, absent: LostRank, place: u8) {
        let LostRank { rank, why } = absent;
        if self.absent.iter().all(|known| known.rank != rank) {
            if why != Loss::Left {
                LOST.note(|left_out| {
                    tracing::warn!(rank, left_out, "rank lost: {}; the job continues", why.name());
                });
            }
            self.absent.push(absent);
        }
        self.driver.with_engine(|engine| engine.continue_without(Rank(rank), place));
    }

    fn end(&self, why: impl Into<Cow<'static, str>>) {
        self.driver.with_engine(|engine| engine.end(why));
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::sync::mpsc::UnboundedReceiver;

    use super::*;
    use crate::control::Controls;
    use crate::control::tests::control;
    use crate::engine::tests::Bench;

    /// Returns a supervisor at A, which knows B as its standby, and the messages that it sends to
    /// two aggregators of its set.
    pub(super) fn supervisor() -> (Supervisor, [UnboundedReceiver<FromWorker>; 2]) {
        let driver = Driver::new(Bench::new(1, 1, Ipv4Addr::LOCALHOST).engine).unwrap();
        let [(one, sent), (other, also)] = [(); 2].map(|()| control());
        let options = ConnectOptions {
            standbys: vec![vec!["b:1".into()]],
            ..ConnectOptions::new("a:1", "job")
        };
        let (controls, early) = (Controls::from_iter([one, other]), Default::default());
        let (membership, senders) = (Membership { controls, early }, ControlSenders::default());
        let driver = Arc::new(driver);
        let mailbox = Mailbox::new();
        (Supervisor::new(options, 0, membership, senders, mailbox, driver), [sent, also])
    }
}
