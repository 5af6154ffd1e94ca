//! The search for aggregators that a rank's job can be at: set by set in their order, round after
//! round, and to another set where others of the job wait.

use std::collections::BTreeSet;
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::log_limit::LogLimit;
use racksum_net::quic::IDLE_TIMEOUT;
use racksum_proto::control::Resume;
use racksum_proto::time::{Span, Time};

use crate::control::Mailbox;
use crate::error::ConnectError;
use crate::join::{Outcome, Session, join};
use crate::options::ConnectOptions;
use crate::peer_poll::{Candidate, PeerPoll};
use crate::route::check_address;
use crate::span::span;

/// How long a set is not looked at that would not have the rank, and twice as long each next time.
const FIRST_SHUN: Duration = Duration::from_secs(4);
/// The longest: more than ranks that move are waited for, so that those that are lost are missed.
const LONGEST_SHUN: Duration = Duration::from_secs(30);
/// How long an aggregator that is back may still take a rank for there, and refuse it as its own
/// double: a little longer than it may take to miss one that is gone.
const DOUBLES: Span = Span::from_secs(IDLE_TIMEOUT.as_millis() / 1_000 + 1);

/// The shortest try that is worth its while: one with less time would say nothing.
const LEAST_TRY: Duration = Duration::from_millis(500);

/// What is said of an aggregator that was there, and at which no later call found anybody.
const SILENT_SINCE: &str = "; nobody has answered there since: start it again, or name another";

/// Jobs that were not joined: a user of a sidecar may start as many as it likes.
static NOT_JOINED: LogLimit = LogLimit::new(64);

/// A search under way.
#[derive(Debug)]
pub(crate) struct AggregatorSelector<'a> {
    options: &'a ConnectOptions,
    clock: Clock,
    began: Time,
    /// How long it may take, where that is known.
    limit: Option<Duration>,
    sets: Vec<Set<'a>>,
    /// The set that is tried first in each round.
    first: usize,
    /// The set whose turn it is.
    at: usize,
    /// Whether it has its turn because others were seen there.
    goes_to_others: bool,
}

/// A set of aggregators.
#[derive(Debug)]
struct Set<'a> {
    name: String,
    hosts: &'a [String],
    /// What became of it, if it was tried.
    said: Option<String>,
    /// Why it could not be joined last; of several tries the one that says most.
    error: Option<ConnectError>,
    /// Until when it is not looked at, and how long that was.
    shunned: Option<(Time, Duration)>,
    /// When it was found to be gone that had been there.
    gone_at: Option<Time>,
    /// Whether nobody has answered there since.
    is_silent: bool,
}

impl<'a> AggregatorSelector<'a> {
    /// A search that begins at the `first` set.
    pub(crate) fn new(options: &'a ConnectOptions, first: usize) -> Self {
        let all = std::iter::once(&options.aggregators).chain(&options.standbys);
        let set = |hosts: &'a Vec<String>| Set {
            name: hosts.join("+"),
            hosts,
            said: None,
            error: None,
            shunned: None,
            gone_at: None,
            is_silent: false,
        };
        let (clock, sets) = (Clock::start(), all.map(set).collect());
        let began = clock.now();
        let (limit, goes_to_others) = (None, false);
        Self { options, clock, began, limit, sets, first, at: first, goes_to_others }
    }

    /// The same search, which may take so long.
    pub(crate) fn within(self, limit: Duration) -> Self {
        Self { limit: Some(limit), ..self }
    }

    /// Checks that every address can be one, since no later try would mend it, and that no two sets
    /// share an aggregator: ranks at it could be of either, and wait there for each other.
    pub(crate) fn check(&self) -> Result<(), ConnectError> {
        self.sets.iter().flat_map(|set| set.hosts).try_for_each(|host| check_address(host))?;
        let mut seen = BTreeSet::new();
        match self.sets.iter().flat_map(|set| set.hosts).find(|host| !seen.insert(*host)) {
            Some(host) => {
                Err(ConnectError::of_aggregators(format!("the aggregator {host} is named twice")))
            }
            None => Ok(()),
        }
    }

    /// How long it has taken so far.
    pub(crate) fn waited(&self) -> Duration {
        Duration::from_nanos(self.clock.now().since(self.began).0)
    }

    /// Whether some set was tried.
    pub(crate) fn has_tried(&self) -> bool {
        self.sets.iter().any(|set| set.said.is_some())
    }

    /// The set whose turn it is.
    pub(crate) const fn at(&self) -> usize {
        self.at
    }

    /// Its name.
    pub(crate) fn name(&self) -> &str {
        &self.sets[self.at].name
    }

    /// Notes what became of the set whose turn it is.
    fn note(&mut self, what: String) {
        self.sets[self.at].said = Some(what);
    }

    /// What became of each set.
    pub(crate) fn text(&self) -> String {
        self.text_with(|_| None)
    }

    /// The same, should the time be over while the one whose turn it is is tried.
    pub(crate) fn text_of_try(&self) -> String {
        self.text_with(|at| (at == self.at).then_some("not joined in time"))
    }

    /// What became of each set, but for those of which something else is to be said.
    fn text_with(&self, instead: impl Fn(usize) -> Option<&'static str>) -> String {
        let each = self.sets.iter().enumerate().map(|(at, set)| {
            let since = if set.is_silent { SILENT_SINCE } else { "" };
            match (instead(at), &set.said) {
                (Some(text), _) => format!("{}: {text}", set.name),
                (None, Some(said)) => format!("{}: {said}{since}", set.name),
                (None, None) => format!("{}: not tried", set.name),
            }
        });
        each.collect::<Vec<_>>().join("; ")
    }

    /// What became of those that were tried but for the one whose turn it is.
    pub(crate) fn text_of_others(&self) -> String {
        let others = self.sets.iter().enumerate().filter(|(at, _)| *at != self.at);
        let tried = others.filter_map(|(_, set)| Some((&set.name, set.said.as_ref()?)));
        tried.map(|(name, said)| format!("; {name}: {said}")).collect()
    }

    /// Leaves the set whose turn it is, which the job was at: rounds begin after it.
    pub(crate) fn leave(&mut self, why: String) {
        self.note(why);
        self.at = (self.at + 1) % self.sets.len();
        self.first = self.at;
    }

    /// Joins the job at the set whose turn it is, where all must have come within `patience`.
    /// Returns nothing if others wait at another set, whose turn it is then.
    pub(crate) fn join(
        &mut self,
        patience: Duration,
        resume: Option<&Resume>,
        mailbox: &mut Mailbox,
    ) -> Result<Option<Session>, ConnectError> {
        let options = ConnectOptions { join_timeout: patience, ..self.options.clone() };
        // One that comes back goes to where its job runs.
        let candidates =
            if options.rejoin && resume.is_none() { Vec::new() } else { self.candidates() };
        let mut peer_poll = PeerPoll::new(&options, resume, self.at, candidates);
        mailbox.awaited.set(format!("an answer of {}", self.name()));
        match join(&options, self.sets[self.at].hosts, resume, &mut peer_poll, mailbox)? {
            Outcome::Complete(session) => Ok(Some(session)),
            Outcome::Elsewhere(place) => {
                let to = self.sets[place].name.clone();
                tracing::info!(from = self.name(), to, "others of the job wait there");
                self.note(format!("left, since others waited at {to}"));
                // The set that was left has its turn before a round is over.
                (self.at, self.first) = (place, place);
                self.goes_to_others = true;
                Ok(None)
            }
        }
    }

    /// Where others are looked for.
    fn candidates(&self) -> Vec<Candidate> {
        let candidate = |(place, set): (usize, &Set<'_>)| {
            let from = set.shunned.map_or(self.began, |(until, _)| until);
            Candidate { place, hosts: set.hosts.to_vec(), from }
        };
        self.sets.iter().enumerate().map(candidate).collect()
    }

    /// Passes over the set whose turn it is. Returns whether a round is over.
    pub(crate) fn pass_over(&mut self, error: ConnectError) -> bool {
        let (now, set) = (self.clock.now(), &mut self.sets[self.at]);
        if error.is_gone() || error.is_unanswered() && set.gone_at.is_some() {
            set.gone_at = Some(now);
        }
        // One that only cannot be had now says by its next answer that it can.
        if std::mem::take(&mut self.goes_to_others) && !error.may_pass() {
            let last = set.shunned.map_or(Duration::ZERO, |(_, last)| last);
            let long = (last * 2).clamp(FIRST_SHUN, LONGEST_SHUN);
            set.shunned = Some((now + span(long), long));
        }
        let next = (self.at + 1) % self.sets.len();
        let is_round_over = next == self.first;
        if let Some(why) = self.keep(error)
            // What ends the search is returned, and said by whoever called.
            && !(is_round_over && self.next_try().is_none())
        {
            NOT_JOINED.note(|left_out| {
                tracing::warn!(aggregator = self.name(), left_out, "not joined: {why}");
            });
        }
        self.at = next;
        is_round_over
    }

    /// Keeps why the set whose turn it is could not be joined. Returns what there is to say of it,
    /// unless that is said.
    fn keep(&mut self, error: ConnectError) -> Option<String> {
        let left = self.limit.map(|limit| limit.saturating_sub(self.waited()));
        let set = &mut self.sets[self.at];
        if set.error.as_ref().is_some_and(|before| says_more(before, &error)) {
            tracing::debug!(aggregator = set.name, %error, "not joined either");
            set.is_silent |= set.error.as_ref().is_some_and(ConnectError::is_gone);
            return None;
        }
        let why = match left.filter(|left| error.may_pass() && !left.is_zero()) {
            // What to do about it is said in the end.
            Some(left) => {
                let (what, left) = (error.without_advice(), left.as_secs_f64().ceil());
                format!("{what}; trying again for up to {left} s")
            }
            None => error.to_string(),
        };
        let error = match self.limit {
            Some(limit) => error.within(limit),
            None => error,
        };
        let said = error.to_string();
        let is_news = set.said.as_ref() != Some(&said);
        set.is_silent = false;
        (set.said, set.error) = (Some(said), Some(error));
        is_news.then_some(why)
    }

    /// How long another round may take; none if there is no time for it, or no use in it.
    pub(crate) fn next_try(&self) -> Option<Duration> {
        let left = self.limit.map_or(Duration::MAX, |limit| limit.saturating_sub(self.waited()));
        let left = left.checked_sub(LEAST_TRY).filter(|left| !left.is_zero());
        left.filter(|_| self.may_succeed())
    }

    /// Whether another round may come to something: some aggregator may yet answer, or is back and
    /// may still take this rank for its own double.
    fn may_succeed(&self) -> bool {
        let is_double = |set: &Set<'_>| {
            let gone_at =
                set.gone_at.filter(|_| matches!(set.error, Some(ConnectError::Refused(_))));
            gone_at.is_some_and(|at| self.clock.now().since(at) < DOUBLES)
        };
        let may = |set: &Set<'_>| {
            set.error.as_ref().is_some_and(ConnectError::may_pass) || is_double(set)
        };
        self.sets.iter().any(may)
    }

    /// Why no aggregator could be joined.
    pub(crate) fn failure(mut self) -> ConnectError {
        match &mut self.sets[..] {
            [Set { error, is_silent: false, .. }] => error.take(),
            _ => None,
        }
        .unwrap_or_else(|| ConnectError::NoAggregator(self.text()))
    }
}

/// Whether an error of an earlier try says more than that nothing answered this one: that it had
/// longer for that, or that an aggregator was there and is gone.
fn says_more(before: &ConnectError, now: &ConnectError) -> bool {
    now.is_silence() && (before.is_gone() || before.is_silence())
}

#[cfg(test)]
mod tests;
