//! The session of a client: what its aggregators say while ops run, and where the job goes on when
//! one of them is gone.

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
use crate::join::Session;
use crate::options::ConnectOptions;

/// How long the other ranks may take to come along: what an aggregator waits for them, and a little
/// more.
const MOVE_TIMEOUT: Duration = Duration::from_secs(25);

/// How long to wait before aggregators are tried again, none of which could be had.
const PAUSE: Duration = Duration::from_millis(250);
/// The longest such pause of a rank that joins, each of which is twice as long as the one before.
const LONGEST_PAUSE: Duration = Duration::from_secs(4);

/// Limits on what aggregators can make a worker log.
static LOST: LogLimit = LogLimit::new(64);
static NO_PARENT: LogLimit = LogLimit::new(4);
static MOVING: LogLimit = LogLimit::new(16);
static MOVED: LogLimit = LogLimit::new(16);

/// Joins a job at the first of its sets of aggregators that can be had, and says which that is. An
/// aggregator that does not answer, or goes away while ranks are waited for, is tried again for as
/// long as joining may take: it may be about to start.
pub(crate) fn join_first(
    options: &ConnectOptions,
    mailbox: &mut Mailbox,
) -> Result<(usize, Session), ConnectError> {
    let mut selector = AggregatorSelector::new(options, 0).within(options.join_timeout);
    selector.check()?;
    let mut pause = PAUSE;
    loop {
        let left = options.join_timeout.saturating_sub(selector.waited());
        if left.is_zero() && selector.has_tried() {
            return Err(selector.failure());
        }
        let error = match selector.join(left, None, mailbox) {
            Ok(Some(session)) => return Ok((selector.at(), session)),
            Ok(None) => continue,
            Err(error) => error,
        };
        let (waited, elsewhere) = (selector.waited(), selector.text_of_others());
        match error {
            // Another aggregator would make no difference.
            error if error.is_usage() => return Err(error),
            ConnectError::PeerLost { .. } | ConnectError::GivenUp => return Err(error),
            ConnectError::NoRoom { why, .. } => {
                return Err(ConnectError::NoRoom { why, waited, elsewhere });
            }
            ConnectError::Incomplete { missing, .. } => {
                let order = "; do all ranks name the same aggregators, in the same order?";
                let elsewhere = match options.standbys.is_empty() {
                    true => elsewhere,
                    false => elsewhere + order,
                };
                return Err(ConnectError::Incomplete { missing, waited, elsewhere });
            }
            error => {
                if selector.pass_over(error) {
                    let Some(longest) = selector.next_try() else { return Err(selector.failure()) };
                    mailbox.pause(pause.min(longest));
                    if mailbox.closed.is_some() {
                        return Err(ConnectError::GivenUp);
                    }
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }
}

/// What the client's supervising thread has.
pub(crate) struct Supervisor {
    pub(crate) options: ConnectOptions,
    /// Which of the sets of aggregators the job is at.
    pub(crate) at: usize,
    pub(crate) membership: Membership,
    /// How the client speaks to the aggregators of it.
    pub(crate) senders: ControlSenders,
    /// The ranks that the job is known to go on without.
    pub(crate) absent: Vec<Absent>,
    pub(crate) mailbox: Mailbox,
    pub(crate) shared: Arc<Driver>,
}

impl Supervisor {
    /// Takes what the aggregators say until the client is closed, or the session has ended.
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
                    self.move_on("it is about to stop".into());
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

    /// The aggregator of a place in the set that the job is at, as the user has named it.
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
        self.shared.tell(|engine| engine.lose(&ranks, why));
    }

    fn go_on_without(&mut self, absent: Absent, place: u8) {
        let Absent { rank, why } = absent;
        if self.absent.iter().all(|known| known.rank != rank) {
            if why != Loss::Left {
                LOST.note(|left_out| {
                    tracing::warn!(rank, left_out, "rank lost, job goes on: {}", why.name());
                });
            }
            self.absent.push(absent);
        }
        self.shared.tell(|engine| engine.go_on_without(Rank(rank), place));
    }

    fn end(&self, why: impl Into<Cow<'static, str>>) {
        self.shared.tell(|engine| engine.end(why));
    }

    /// Goes on at other aggregators, from the next set on, until one can be had or the session
    /// ends because an op's time is over.
    fn move_on(&mut self, why: String) {
        let options = self.options.clone();
        let mut selector = AggregatorSelector::new(&options, self.at);
        MOVING.note(|left_out| {
            tracing::warn!(aggregator = selector.name(), left_out, "moving on: {why}");
        });
        selector.leave(why);
        let text = selector.text();
        let first_op = self.shared.tell(|engine| (!engine.has_ended()).then(|| engine.leave(text)));
        let controls = std::mem::take(&mut self.membership.controls);
        // To all before any is waited for.
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
                    // There is no more to hear there.
                    self.mailbox.next_session();
                    self.shared.tell(|engine| engine.lose(&ranks, why));
                    return;
                }
                Err(error) => {
                    if selector.pass_over(error) {
                        // What is said now is of attempts that have failed.
                        self.mailbox.pause(PAUSE);
                    }
                }
            }
        }
    }

    /// Notes what there is to say of aggregators if the time is over. Returns whether it is not.
    fn note_tried(&self, text: String) -> bool {
        let ended = self.shared.tell(|engine| {
            engine.note_tried(text);
            engine.has_ended()
        });
        ended == Some(false)
    }

    /// Goes on as granted.
    fn resume(&mut self, at: usize, name: &str, granted: Granted) {
        MOVED.note(|left_out| tracing::info!(aggregator = name, left_out, "moved"));
        self.at = at;
        let resumed = self.shared.tell(|engine| engine.resume(granted.config, granted.links));
        // Otherwise it leaves at once, since the others would wait for it.
        if resumed == Some(true) {
            self.membership = granted.membership;
            self.senders.set(&self.membership.controls);
        }
    }
}
