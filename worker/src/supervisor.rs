//! The supervision of a client's session: it handles the aggregators' messages while ops run, and
//! moves the job to a standby when an aggregator fails.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use racksum_net::log_limit::LogLimit;
use racksum_net::quic::SILENT;
use racksum_proto::control::{Absent, FromAggregator, FromWorker, Resume};
use racksum_proto::ids::Rank;
use racksum_proto::loss::Loss;

use crate::aggregator_selector::AggregatorSelector;
use crate::control::{Closed, Control, ControlSenders, Event, Mailbox};
use crate::driver::Driver;
use crate::error::{ConnectError, superseded};
use crate::grant::{Granted, Membership, grant};
use crate::options::ConnectOptions;

/// How long to wait for the other ranks after a move: as long as an aggregator does, plus a margin.
const MOVE_TIMEOUT: Duration = Duration::from_secs(25);

/// The pause after all aggregators were tried without success.
const PAUSE: Duration = Duration::from_millis(250);

/// Limits on the log records that aggregators can cause.
static LOST: LogLimit = LogLimit::new(64);
static NO_PARENT: LogLimit = LogLimit::new(4);
static MOVING: LogLimit = LogLimit::new(16);
static MOVED: LogLimit = LogLimit::new(16);

/// The state of a client's supervising thread.
pub(crate) struct Supervisor {
    pub(crate) options: ConnectOptions,
    /// The index of the job's current set of aggregators.
    pub(crate) at: usize,
    pub(crate) membership: Membership,
    /// The senders of the client's messages to the aggregators of the current set.
    pub(crate) senders: ControlSenders,
    /// The lost ranks that the job continues without.
    pub(crate) absent: Vec<Absent>,
    pub(crate) mailbox: Mailbox,
    pub(crate) driver: Arc<Driver>,
}

impl Supervisor {
    /// Handles the aggregators' messages until the client is closed, and then leaves the job.
    pub(crate) fn run(mut self) {
        while let Some((place, event)) = self.next() {
            match event {
                Event::Said(FromAggregator::PeerLost { ranks, why }) => self.lose(&ranks, why),
                Event::Said(FromAggregator::Without(absent)) => self.go_on_without(absent, place),
                Event::Said(FromAggregator::Superseded { why, .. }) => {
                    self.end(superseded(&why));
                }
                Event::Said(FromAggregator::ParentLost { reason }) => {
                    NO_PARENT.note(|left_out| tracing::warn!(left_out, "{reason}"));
                    self.end(reason);
                }
                Event::Said(FromAggregator::Drain) if self.may_move() => {
                    self.move_on("it is draining".into());
                }
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
                Event::Said(_) => {}
            }
        }
        if let Some(Closed { next_op }) = self.mailbox.closed {
            self.membership.controls.drain(..).for_each(|control| control.leave(next_op));
        }
    }

    fn next(&mut self) -> Option<(u8, Event)> {
        let early = self.membership.early.pop_front();
        early.or_else(|| self.mailbox.hear(None))
    }

    /// Returns the name, as given by the user, of the aggregator at `place` in the current set.
    fn host(&self, place: u8) -> &str {
        let mut sets = std::iter::once(&self.options.aggregators).chain(&self.options.standbys);
        let host = sets.nth(self.at).and_then(|set| set.get(usize::from(place)));
        host.map_or("an aggregator", String::as_str)
    }

    const fn may_move(&self) -> bool {
        !self.options.standbys.is_empty()
    }

    fn lose(&self, ranks: &[u16], why: Loss) {
        let ranks: Vec<Rank> = ranks.iter().copied().map(Rank).collect();
        self.driver.tell(|engine| engine.lose(&ranks, why));
    }

    fn go_on_without(&mut self, absent: Absent, place: u8) {
        let Absent { rank, why } = absent;
        if self.absent.iter().all(|known| known.rank != rank) {
            if why != Loss::Left {
                LOST.note(|left_out| {
                    tracing::warn!(rank, left_out, "rank lost, the job continues: {}", why.name());
                });
            }
            self.absent.push(absent);
        }
        self.driver.tell(|engine| engine.go_on_without(Rank(rank), place));
    }

    fn end(&self, why: impl Into<Cow<'static, str>>) {
        self.driver.tell(|engine| engine.end(why));
    }

    /// Moves the job to other aggregators. Tries set after set, starting with the next one, until a
    /// set accepts the job, a rank is lost, an op times out, or the client is closed.
    fn move_on(&mut self, why: String) {
        let options = self.options.clone();
        let mut selector = AggregatorSelector::new(&options, self.at);
        MOVING.note(|left_out| {
            tracing::warn!(aggregator = selector.name(), left_out, "moving to a standby: {why}");
        });
        selector.leave(why);
        let text = selector.text();
        let first_op = self.driver.tell(|engine| (!engine.has_ended()).then(|| engine.leave(text)));
        let controls = std::mem::take(&mut self.membership.controls);
        // Send to all before waiting for any.
        controls.iter().for_each(|control| control.say(FromWorker::Move));
        controls.into_iter().for_each(Control::depart);
        let Some(Some(first_op)) = first_op else { return };
        let resume = Resume { first_op, absent: self.absent.clone() };
        while self.mailbox.closed.is_none() && self.note_tried(selector.text_of_try()) {
            let joined = selector.join(MOVE_TIMEOUT, Some(&resume), &mut self.mailbox);
            let granted = joined
                .and_then(|session| session.map(|session| grant(&options, session)).transpose());
            match granted {
                Ok(Some(granted)) => return self.resume(selector.at(), selector.name(), granted),
                Ok(None) => {}
                Err(ConnectError::PeerLost { ranks, why }) => {
                    // The job has failed, so ignore further messages of these aggregators.
                    self.mailbox.next_session();
                    self.driver.tell(|engine| engine.lose(&ranks, why));
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

    /// Records the fate of each aggregator for the error of an op that times out. Returns whether
    /// the session still runs.
    fn note_tried(&self, text: String) -> bool {
        let ended = self.driver.tell(|engine| {
            engine.note_tried(text);
            engine.has_ended()
        });
        ended == Some(false)
    }

    /// Resumes the job with the grant of the new aggregators.
    fn resume(&mut self, at: usize, name: &str, granted: Granted) {
        MOVED.note(|left_out| tracing::info!(aggregator = name, left_out, "moved"));
        self.at = at;
        let resumed = self.driver.tell(|engine| engine.resume(granted.config, granted.links));
        // Otherwise drop the grant to leave at once: the other ranks would wait for this one.
        if resumed == Some(true) {
            self.membership = granted.membership;
            self.senders.set(&self.membership.controls);
        }
    }
}
