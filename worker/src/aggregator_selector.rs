//! The search for aggregators where a rank's job can run. It tries the sets of aggregators in
//! order, round after round, and switches to another set if other ranks of the job wait there.

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

/// How long the rank avoids a set that has rejected it although other ranks wait there. The time
/// doubles with each further rejection, up to [`LONGEST_SHUN`].
const FIRST_SHUN: Duration = Duration::from_secs(4);
/// The longest time for which the rank avoids a set that keeps rejecting it. This exceeds the time
/// for which an aggregator waits for the ranks of a moving job, so the aggregator has detected any
/// lost rank by then.
const LONGEST_SHUN: Duration = Duration::from_secs(30);
/// How long an aggregator that is reachable again may still count a rank as present, and so refuse
/// it as a duplicate. This is slightly longer than the aggregator may take to detect a lost rank.
const DOUBLES: Span = Span::from_secs(IDLE_TIMEOUT.as_millis() / 1_000 + 1);

/// The first pause of a joining rank between two rounds of tries.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// The longest pause of a joining rank between two rounds of tries; the pause doubles after each
/// round.
const LONGEST_PAUSE: Duration = Duration::from_secs(4);

/// The minimum time that must be left for another try. A shorter try is unlikely to succeed.
const LEAST_TRY: Duration = Duration::from_millis(500);

/// The note about an aggregator that was reachable once and has not answered since.
const SILENT_SINCE: &str = "; no answer from it since; restart it, or set another aggregator";

/// Rate limit for log records of failed joins: a user of a sidecar can start any number of jobs.
static NOT_JOINED: LogLimit = LogLimit::new(64);

/// A search for aggregators, in progress.
#[derive(Debug)]
pub(crate) struct AggregatorSelector<'a> {
    options: &'a ConnectOptions,
    clock: Clock,
    began: Time,
    /// The time limit of the search, if there is one.
    limit: Option<Duration>,
    sets: Vec<Set<'a>>,
    /// The index of the set that is tried first in each round.
    first: usize,
    /// The index of the current set.
    at: usize,
    /// Whether the current set was chosen because other ranks were seen there.
    goes_to_others: bool,
    /// Whether the rank waits for room at a set, instead of trying the next.
    waits: bool,
}

/// A set of aggregators.
#[derive(Debug)]
struct Set<'a> {
    name: String,
    hosts: &'a [String],
    /// The outcome of the tries, as text; `None` before the first try.
    outcome: Option<String>,
    /// The most informative error of the recent tries.
    error: Option<ConnectError>,
    /// The end and the length of the pause during which the rank does not poll this set.
    shunned: Option<(Time, Duration)>,
    /// The time at which an aggregator that had once been reachable was last found to be gone or
    /// unreachable.
    gone_at: Option<Time>,
    /// Whether no aggregator of the set has answered since one was found to be gone.
    is_silent: bool,
}

impl<'a> AggregatorSelector<'a> {
    /// Creates a search that begins at the `first` set.
    pub(crate) fn new(options: &'a ConnectOptions, first: usize) -> Self {
        let all = std::iter::once(&options.aggregators).chain(&options.standbys);
        let set = |hosts: &'a Vec<String>| Set {
            name: hosts.join("+"),
            hosts,
            outcome: None,
            error: None,
            shunned: None,
            gone_at: None,
            is_silent: false,
        };
        let (clock, sets) = (Clock::start(), all.map(set).collect());
        let began = clock.now();
        let (limit, goes_to_others, waits) = (None, false, options.wait);
        Self { options, clock, began, limit, sets, first, at: first, goes_to_others, waits }
    }

    /// Sets the time limit of the search.
    pub(crate) fn within(self, limit: Duration) -> Self {
        Self { limit: Some(limit), ..self }
    }

    /// Checks that every address is valid and that no aggregator is listed twice. Retries cannot
    /// fix an invalid address. If two sets shared an aggregator, ranks that join through different
    /// sets would wait for each other there.
    pub(crate) fn check(&self) -> Result<(), ConnectError> {
        self.sets.iter().flat_map(|set| set.hosts).try_for_each(|host| check_address(host))?;
        let mut seen = BTreeSet::new();
        match self.sets.iter().flat_map(|set| set.hosts).find(|host| !seen.insert(*host)) {
            Some(host) => Err(ConnectError::of_aggregators(format!(
                "the aggregator {host} is listed twice; list each aggregator once"
            ))),
            None => Ok(()),
        }
    }

    /// Returns how long the search has taken so far.
    pub(crate) fn waited(&self) -> Duration {
        Duration::from_nanos(self.clock.now().since(self.began).0)
    }

    /// Returns whether any set was tried.
    pub(crate) fn has_tried(&self) -> bool {
        self.sets.iter().any(|set| set.outcome.is_some())
    }

    /// Returns the index of the current set.
    pub(crate) const fn at(&self) -> usize {
        self.at
    }

    /// Returns the name of the current set.
    pub(crate) fn name(&self) -> &str {
        &self.sets[self.at].name
    }

    /// Records the outcome at the current set.
    fn note(&mut self, what: String) {
        self.sets[self.at].outcome = Some(what);
    }

    /// Describes the outcome at each set.
    pub(crate) fn text(&self) -> String {
        self.text_with(|_| None)
    }

    /// Like [`text`](Self::text), but describes the current set as not joined in time.
    pub(crate) fn text_of_try(&self) -> String {
        self.text_with(|at| (at == self.at).then_some("not joined in time"))
    }

    /// Describes the outcome at each set. `instead` may supply another text for a set, by its
    /// index.
    fn text_with(&self, instead: impl Fn(usize) -> Option<&'static str>) -> String {
        let each = self.sets.iter().enumerate().map(|(at, set)| {
            let since = if set.is_silent { SILENT_SINCE } else { "" };
            match (instead(at), &set.outcome) {
                (Some(text), _) => format!("{}: {text}", set.name),
                (None, Some(outcome)) => format!("{}: {outcome}{since}", set.name),
                (None, None) => format!("{}: not tried", set.name),
            }
        });
        each.collect::<Vec<_>>().join("; ")
    }

    /// Describes the outcome at each tried set except the current one.
    pub(crate) fn text_of_others(&self) -> String {
        let others = self.sets.iter().enumerate().filter(|(at, _)| *at != self.at);
        let tried = others.filter_map(|(_, set)| Some((&set.name, set.outcome.as_ref()?)));
        tried.map(|(name, outcome)| format!("; {name}: {outcome}")).collect()
    }

    /// Leaves the current set, where the job ran, and makes the next set current. Later rounds
    /// begin at the new set. In the first round, the rank waits for room nowhere.
    pub(crate) fn leave(&mut self, why: String) {
        self.leave_for((self.at + 1) % self.sets.len(), why);
    }

    /// Like [`leave`](Self::leave), but makes the set with index `to` the current one.
    pub(crate) fn leave_for(&mut self, to: usize, why: String) {
        self.note(why);
        // Ops are in flight, so a set with room goes before one where the job would wait for it.
        self.waits = false;
        (self.at, self.first) = (to, to);
    }

    /// Joins the job at the current set. All ranks must join within `patience`. If other ranks wait
    /// at another set, makes that set the current one and returns `None`.
    pub(crate) fn join(
        &mut self,
        patience: Duration,
        resume: Option<&Resume>,
        mailbox: &mut Mailbox,
    ) -> Result<Option<Session>, ConnectError> {
        let options =
            ConnectOptions { join_timeout: patience, wait: self.waits, ..self.options.clone() };
        // A rejoining rank must join where its job runs, so it does not look for other ranks.
        let candidates =
            if options.rejoin && resume.is_none() { Vec::new() } else { self.candidates() };
        let mut peer_poll = PeerPoll::new(&options, resume, self.at, candidates);
        mailbox.awaited.set(format!("an answer from {}", self.name()));
        match join(&options, self.sets[self.at].hosts, resume, &mut peer_poll, mailbox)? {
            Outcome::Complete(session) => Ok(Some(session)),
            Outcome::Elsewhere(place) => {
                let to = self.sets[place].name.clone();
                tracing::info!(
                    from = self.name(),
                    to,
                    "moving to the aggregator where other ranks wait"
                );
                self.note(format!("left because other ranks waited at {to}"));
                // Rounds now begin at the new set, so the set that the rank left is still tried in
                // the same round.
                (self.at, self.first) = (place, place);
                self.goes_to_others = true;
                Ok(None)
            }
        }
    }

    /// Returns the sets where the rank looks for other ranks.
    fn candidates(&self) -> Vec<Candidate> {
        let candidate = |(place, set): (usize, &Set<'_>)| {
            let from = set.shunned.map_or(self.began, |(until, _)| until);
            Candidate { place, hosts: set.hosts.to_vec(), from }
        };
        self.sets.iter().enumerate().map(candidate).collect()
    }

    /// Skips the current set after an error. Returns whether this ends the round.
    pub(crate) fn pass_over(&mut self, error: ConnectError) -> bool {
        let (now, set) = (self.clock.now(), &mut self.sets[self.at]);
        if error.is_gone() || error.is_unanswered() && set.gone_at.is_some() {
            set.gone_at = Some(now);
        }
        // A set that is only unavailable for now needs no pause: its next answer shows that it is
        // back.
        if std::mem::take(&mut self.goes_to_others) && !error.may_pass() {
            let last = set.shunned.map_or(Duration::ZERO, |(_, last)| last);
            let long = (last * 2).clamp(FIRST_SHUN, LONGEST_SHUN);
            set.shunned = Some((now + span(long), long));
        }
        let next = (self.at + 1) % self.sets.len();
        let is_round_over = next == self.first;
        if let Some(why) = self.keep(error)
            // Do not log an error that ends the search: the caller reports it.
            && !(is_round_over && self.next_try().is_none())
        {
            NOT_JOINED.note(|left_out| {
                tracing::warn!(aggregator = self.name(), left_out, "cannot join: {why}");
            });
        }
        self.at = next;
        if is_round_over {
            self.waits = self.options.wait;
        }
        is_round_over
    }

    /// Keeps the reason why the current set could not be joined. Returns a text for the log, or
    /// `None` if an equal or more informative reason was logged before.
    fn keep(&mut self, error: ConnectError) -> Option<String> {
        let left = self.limit.map(|limit| limit.saturating_sub(self.waited()));
        let set = &mut self.sets[self.at];
        if set.error.as_ref().is_some_and(|before| is_more_informative(before, &error)) {
            tracing::debug!(aggregator = set.name, %error, "still cannot join");
            set.is_silent |= set.error.as_ref().is_some_and(ConnectError::is_gone);
            return None;
        }
        let why = match left.filter(|left| error.may_pass() && !left.is_zero()) {
            // Leave out the advice, which is shown only if all tries fail.
            Some(left) => {
                let (what, left) = (error.without_advice(), left.as_secs_f64().ceil());
                format!("{what}; retrying for up to {left} s")
            }
            None => error.to_string(),
        };
        let error = match self.limit {
            Some(limit) => error.within(limit),
            None => error,
        };
        let outcome = error.to_string();
        let is_news = set.outcome.as_ref() != Some(&outcome);
        set.is_silent = false;
        (set.outcome, set.error) = (Some(outcome), Some(error));
        is_news.then_some(why)
    }

    /// Returns the maximum pause before another round. Returns `None` if there is too little time
    /// for another round, or if none can succeed.
    pub(crate) fn next_try(&self) -> Option<Duration> {
        let left = self.limit.map_or(Duration::MAX, |limit| limit.saturating_sub(self.waited()));
        let left = left.checked_sub(LEAST_TRY).filter(|left| !left.is_zero());
        left.filter(|_| self.may_succeed())
    }

    /// Returns whether another round may succeed: an aggregator may answer later, or one that is
    /// back may have refused this rank only as a duplicate.
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

    /// Returns the reason why no aggregator could be joined.
    pub(crate) fn failure(mut self) -> ConnectError {
        match &mut self.sets[..] {
            [Set { error, is_silent: false, .. }] => error.take(),
            _ => None,
        }
        .unwrap_or_else(|| ConnectError::NoAggregator(self.text()))
    }
}

/// Joins a job at the first available set of aggregators. Returns the set's index and the session.
/// Retries until `join_timeout` expires, because an aggregator that does not answer, or fails while
/// ranks are missing, may soon be back.
pub(crate) fn join_first(
    options: &ConnectOptions,
    mailbox: &mut Mailbox,
) -> Result<(usize, Session), ConnectError> {
    let mut selector = AggregatorSelector::new(options, 0).within(options.join_timeout);
    selector.check()?;
    let mut pause = FIRST_PAUSE;
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
            // Another aggregator would reject these options too.
            error if error.is_usage() => return Err(error),
            ConnectError::PeerLost { .. } | ConnectError::GivenUp => return Err(error),
            ConnectError::NoRoom { why, .. } => {
                return Err(ConnectError::NoRoom { why, waited, elsewhere });
            }
            ConnectError::Incomplete { missing, .. } => {
                let order = "; check that all ranks list the same aggregators in the same order";
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

/// Returns whether an earlier error is more informative than a new one that only reports silence.
/// Such an earlier error comes from a try with a longer timeout, or shows that an aggregator was
/// reachable and is gone.
fn is_more_informative(before: &ConnectError, now: &ConnectError) -> bool {
    now.is_silence() && (before.is_gone() || before.is_silence())
}

#[cfg(test)]
mod tests;
