//! Migration of a job to other aggregators, when one of its current aggregators fails or drains.

use std::time::Duration;

use racksum_net::log_limit::LogLimit;
use racksum_proto::control::{FromWorker, Resume};

use super::Supervisor;
use super::counters::Reports;
use crate::aggregator_selector::AggregatorSelector;
use crate::error::ConnectError;
use crate::grant::{Granted, grant};

/// How long to wait for the other ranks after a move: as long as an aggregator does, plus a margin.
const MOVE_TIMEOUT: Duration = Duration::from_secs(25);

/// The pause after all aggregators were tried without success.
const PAUSE: Duration = Duration::from_millis(250);

/// Rate limits for log records that an aggregator can trigger.
static MOVING: LogLimit = LogLimit::new(16);
static MOVED: LogLimit = LogLimit::new(16);

impl Supervisor {
    /// Moves the job to other aggregators. Tries set after set, starting with the next one, until a
    /// set accepts the job, a rank is lost, an op times out, or the client is closed.
    pub(super) fn move_on(&mut self, why: String) {
        self.migrate(why, None);
    }

    /// Like [`move_on`](Self::move_on), but starts with the set of aggregators with index `to`, or
    /// with the next set if there is none.
    pub(super) fn migrate(&mut self, why: String, to: Option<usize>) {
        // The aggregators that prepared a move or drained are left.
        (self.planned, self.search) = (None, None);
        let options = self.options.clone();
        let mut selector = AggregatorSelector::new(&options, self.at);
        match to {
            Some(to) => selector.leave_for(to, why.clone()),
            None => selector.leave(why.clone()),
        }
        let text = selector.text();
        let first_op =
            self.driver.with_engine(|engine| (!engine.has_ended()).then(|| engine.leave(text)));
        let controls = std::mem::take(&mut self.membership.controls);
        let Some(Some(first_op)) = first_op else {
            // The session has ended, so this rank does not join the next aggregators. If the client
            // was closed, the mailbox holds its next op.
            self.mailbox.next_session();
            drop(self.mailbox.recv(Some(Duration::ZERO)));
            let next_op = self.mailbox.closed.and_then(|closed| closed.next_op);
            return controls.close(&FromWorker::Leave { next_op });
        };
        MOVING.note(|left_out| {
            tracing::warn!(aggregator = selector.name(), left_out, "moving: {why}");
        });
        controls.close(&FromWorker::Move);
        let resume = Resume { first_op, absent: self.absent.clone() };
        while self.mailbox.closed.is_none() && self.note_tried(selector.text_of_try()) {
            let joined = selector.join(MOVE_TIMEOUT, Some(&resume), &mut self.mailbox);
            let granted = joined
                .and_then(|session| session.map(|session| grant(&options, session)).transpose());
            match granted {
                Ok(Some(granted)) => return self.resume(selector.at(), selector.name(), granted),
                Ok(None) => {}
                Err(ConnectError::PeerLost { ranks, why }) => {
                    // The job has failed, so ignore further messages from these aggregators.
                    self.mailbox.next_session();
                    self.driver.with_engine(|engine| engine.lose(&ranks, why));
                    return;
                }
                Err(error) => {
                    if selector.pass_over(error) {
                        // The pause also discards messages from the failed attempts.
                        self.mailbox.pause(PAUSE);
                    }
                }
            }
        }
    }

    /// Records the outcome at each aggregator, for the error of an op that times out. Returns
    /// whether the session still runs.
    fn note_tried(&self, text: String) -> bool {
        let ended = self.driver.with_engine(|engine| {
            engine.note_tried(text);
            engine.has_ended()
        });
        ended == Some(false)
    }

    /// Resumes the job with the grant of the new aggregators.
    fn resume(&mut self, at: usize, name: &str, granted: Granted) {
        MOVED.note(|left_out| tracing::info!(aggregator = name, left_out, "the job has moved"));
        self.at = at;
        let resumed =
            self.driver.with_engine(|engine| engine.resume(granted.config, granted.links));
        // If the session has ended, the grant is dropped. This rank then leaves immediately, and no
        // other rank waits for it.
        if resumed == Some(true) {
            self.membership = granted.membership;
            self.reports = Reports::new();
            self.senders.set(&self.membership.controls);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::Arc;

    use racksum_proto::ids::OpId;

    use super::*;
    use crate::control::tests::control;
    use crate::control::{Closed, ControlSenders, Controls, Mailbox, Message};
    use crate::driver::Driver;
    use crate::engine::tests::Bench;
    use crate::grant::Membership;
    use crate::options::ConnectOptions;

    #[test]
    fn a_closed_client_leaves_a_failed_set_of_aggregators_for_good() {
        let driver = Driver::new(Bench::new(1, 1, Ipv4Addr::LOCALHOST).engine).unwrap();
        driver.with_engine(|engine| engine.end("the client was closed"));
        let (control, mut messages) = control();
        let (mailbox, next_op) = (Mailbox::new(), Some(OpId(7)));
        mailbox.sender().send(Message::Stop(Closed { next_op })).unwrap();
        let options = ConnectOptions {
            standbys: vec![vec!["127.0.0.1:9".into()]],
            ..ConnectOptions::new("127.0.0.1:8", "job")
        };
        let (controls, early) = (Controls::from_iter([control]), Default::default());
        let membership = Membership { controls, early };
        let (senders, driver) = (ControlSenders::default(), Arc::new(driver));
        let mut supervisor = Supervisor::new(options, 0, membership, senders, mailbox, driver);
        supervisor.move_on("one of its aggregators is gone".into());
        assert_eq!(messages.try_recv().unwrap(), FromWorker::Leave { next_op });
    }
}
