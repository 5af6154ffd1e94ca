//! The session of a client: what its aggregators say while ops run, and where the job goes on when
//! one of them is gone.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::quic::SILENT;
use racksum_proto::control::{Absent, FromAggregator, FromWorker, Loss, Resume};
use racksum_proto::ids::Rank;

use crate::client::{Shared, span};
use crate::control::{Closed, Control, Event, Mailbox};
use crate::error::ConnectError;
use crate::grant::{Membership, grant};
use crate::join::{Session, join};
use crate::lookout::Lookout;
use crate::options::ConnectOptions;

/// How long to wait before aggregators are tried again, none of which could be had.
const PAUSE: Duration = Duration::from_millis(250);
/// The longest that a rank waits at an aggregator before it looks for those that come before.
const LONGEST_LOOK: Duration = Duration::from_secs(15);
/// How long the other ranks may take to come along: what an aggregator waits for them, and a little
/// more.
const MOVE_TIMEOUT: Duration = Duration::from_secs(25);

/// Joins a job at the first of its sets of aggregators that can be had, and says which that is. One
/// that goes away while ranks are waited for is no reason to give up, as long as joining may take:
/// it may be back.
pub(crate) fn join_first(
    options: &ConnectOptions,
    mailbox: &mut Mailbox,
) -> Result<(usize, Session), ConnectError> {
    let (clock, mut words) = (Clock::start(), Words::new(options));
    let mut seen = BTreeSet::new();
    if let Some((name, _)) = words.0.iter().find(|(name, _)| !seen.insert(name)) {
        return Err(ConnectError::Arguments(format!("the aggregator {name} is named twice")));
    }
    let end = clock.now() + span(options.join_timeout);
    let mut look_after = PAUSE;
    'again: loop {
        let mut gone = false;
        for at in 0..words.0.len() {
            let left = Duration::from_nanos(end.since(clock.now()).0);
            let options = ConnectOptions { join_timeout: left, ..options.clone() };
            // One that comes back goes to where its job runs.
            let before = if options.rejoin { 0..0 } else { 0..at };
            let lookout = look_for(&options, before, look_after)?;
            match join(&options, set(&options, at), None, lookout.as_ref(), mailbox) {
                Ok(session) => return Ok((at, session)),
                // Another aggregator would make no difference.
                Err(
                    error @ (ConnectError::Arguments(_)
                    | ConnectError::Incomplete { .. }
                    | ConnectError::NoRoom { .. }
                    | ConnectError::PeerLost { .. }),
                ) => return Err(error),
                Err(error) if options.standbys.is_empty() => return Err(error),
                Err(_) if lookout.is_some_and(|lookout| lookout.has_seen()) => {
                    tracing::info!(aggregator = words.name(at), "back to one that comes before");
                    // It may take no job.
                    look_after = (look_after * 2).min(LONGEST_LOOK);
                    continue 'again;
                }
                Err(error) => {
                    tracing::warn!(aggregator = words.name(at), %error, "not joined");
                    gone |= matches!(
                        error,
                        ConnectError::Closed(_) | ConnectError::Silent | ConnectError::Draining
                    );
                    words.set(at, error.to_string());
                }
            }
        }
        if !gone || clock.now() >= end {
            return Err(ConnectError::NoAggregator(words.text()));
        }
        std::thread::sleep(PAUSE);
    }
}

/// A look at some sets of aggregators, if there are any.
fn look_for(
    options: &ConnectOptions,
    sets: impl Iterator<Item = usize>,
    pause: Duration,
) -> Result<Option<Lookout>, ConnectError> {
    let sets: Vec<_> = sets.map(|at| set(options, at).to_vec()).collect();
    if sets.is_empty() { Ok(None) } else { Lookout::start(options, sets, pause).map(Some) }
}

/// The aggregators that come `at`th.
fn set(options: &ConnectOptions, at: usize) -> &[String] {
    at.checked_sub(1).and_then(|i| options.standbys.get(i)).unwrap_or(&options.aggregators)
}

/// What became of an aggregator that was not come to.
const UNTRIED: &str = "not tried";

/// The sets of aggregators, and what became of each.
struct Words(Vec<(String, String)>);

impl Words {
    fn new(options: &ConnectOptions) -> Self {
        let sets = 0..=options.standbys.len();
        Self(sets.map(|at| (set(options, at).join("+"), UNTRIED.into())).collect())
    }

    fn name(&self, at: usize) -> &str {
        self.0.get(at).map_or("", |(name, _)| name)
    }

    fn set(&mut self, at: usize, word: String) {
        if let Some((_, said)) = self.0.get_mut(at) {
            *said = word;
        }
    }

    /// One is tried now: that is what became of it unless there is more to say.
    fn begin(&mut self, at: usize) {
        if self.0.get(at).is_some_and(|(_, said)| said == UNTRIED) {
            self.set(at, "not joined in time".into());
        }
    }

    fn text(&self) -> String {
        let each = self.0.iter().map(|(name, word)| format!("{name}: {word}"));
        each.collect::<Vec<_>>().join("; ")
    }
}

/// What the client's supervising thread has.
pub(crate) struct Supervisor {
    pub(crate) options: ConnectOptions,
    /// Which of the sets of aggregators the job is at.
    pub(crate) at: usize,
    pub(crate) membership: Membership,
    /// The ranks that the job is known to go on without.
    pub(crate) absent: Vec<Absent>,
    pub(crate) mailbox: Mailbox,
    pub(crate) shared: Arc<Shared>,
}

impl Supervisor {
    /// Takes what the aggregators say until the client is closed, or the session has ended.
    pub(crate) fn run(mut self) {
        while let Some((place, event)) = self.next() {
            match event {
                Event::Said(FromAggregator::PeerLost { ranks, why }) => self.lose(&ranks, why),
                Event::Said(FromAggregator::Without(absent)) => self.go_on_without(absent, place),
                Event::Said(FromAggregator::Superseded { .. }) => {
                    self.end("a new generation of the job has begun");
                }
                Event::Said(FromAggregator::ParentLost { reason }) => {
                    tracing::warn!("{reason}");
                    self.end("the parent of the aggregator is gone");
                }
                Event::Said(FromAggregator::Drain) if self.may_move() => {
                    self.move_on("it is about to stop".into());
                }
                Event::Closed(error) if self.may_move() => self.move_on(error.to_string()),
                Event::Closed(ConnectError::Silent) => self.end(SILENT),
                Event::Closed(_) => self.end("the aggregator is gone"),
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
                tracing::warn!(rank, "rank lost, job goes on: {}", why.name());
            }
            self.absent.push(absent);
        }
        self.shared.tell(|engine| engine.go_on_without(Rank(rank), place));
    }

    fn end(&self, why: &'static str) {
        self.shared.tell(|engine| engine.end(why));
    }

    /// Goes on at other aggregators, from the next set on, until one can be had or the session
    /// ends because an op's time is over.
    fn move_on(&mut self, why: String) {
        let mut words = Words::new(&self.options);
        tracing::warn!(aggregator = words.name(self.at), "moving on: {why}");
        words.set(self.at, why);
        let text = words.text();
        let first_op = self.shared.tell(|engine| (!engine.has_ended()).then(|| engine.leave(text)));
        let controls = std::mem::take(&mut self.membership.controls);
        // To all before any is waited for.
        controls.iter().for_each(|control| control.say(FromWorker::Move));
        controls.into_iter().for_each(Control::depart);
        let Some(Some(first_op)) = first_op else { return };
        let resume = Resume { first_op, absent: self.absent.clone() };
        let sets = 1 + self.options.standbys.len();
        let order: Vec<_> = (0..sets).cycle().skip(self.at + 1).take(sets).collect();
        let (mut turn, mut look_after) = (0, PAUSE);
        while self.mailbox.closed.is_none() {
            let before = order[..turn].iter().copied();
            let lookout = look_for(&self.options, before, look_after).unwrap_or(None);
            words.begin(order[turn]);
            self.note_tried(&words);
            if self.try_at(order[turn], &resume, lookout.as_ref(), &mut words) {
                return;
            }
            let ended = self.note_tried(&words);
            turn = (turn + 1) % sets;
            if lookout.is_some_and(|lookout| lookout.has_seen()) {
                // It may not take the job.
                (turn, look_after) = (0, (look_after * 2).min(LONGEST_LOOK));
            } else if turn == 0 {
                // What is said now is of attempts that have failed.
                self.mailbox.next_session();
                drop(self.mailbox.hear(Some(PAUSE)));
            }
            if ended != Some(false) {
                return;
            }
        }
    }

    /// Notes what to say if the time is over. Returns whether it is.
    fn note_tried(&self, words: &Words) -> Option<bool> {
        let text = words.text();
        self.shared.tell(|engine| {
            engine.note_tried(text);
            engine.has_ended()
        })
    }

    /// Tries to go on at one set of aggregators. Returns whether there is no more to try.
    fn try_at(
        &mut self,
        at: usize,
        resume: &Resume,
        lookout: Option<&Lookout>,
        words: &mut Words,
    ) -> bool {
        let options = ConnectOptions { join_timeout: MOVE_TIMEOUT, ..self.options.clone() };
        let joined = join(&options, set(&options, at), Some(resume), lookout, &mut self.mailbox);
        match joined.and_then(|session| grant(&self.options, session)) {
            Ok(granted) => {
                tracing::info!(aggregator = words.name(at), "moved");
                self.at = at;
                let resumed =
                    self.shared.tell(|engine| engine.resume(granted.config, granted.links));
                // Otherwise it leaves at once, since the others would wait for it.
                if resumed == Some(true) {
                    self.membership = granted.membership;
                }
                true
            }
            Err(ConnectError::PeerLost { ranks, why }) => {
                self.shared.tell(|engine| engine.lose(&ranks, why));
                true
            }
            Err(error) => {
                tracing::warn!(aggregator = words.name(at), %error, "not joined");
                words.set(at, error.to_string());
                false
            }
        }
    }
}
