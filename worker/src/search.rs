//! The search for aggregators that a rank's job can be at: set by set in their order, round after
//! round, and back to a set that comes before where others of the job wait.

use std::collections::BTreeSet;
use std::time::Duration;

use racksum_proto::control::Resume;

use crate::control::Mailbox;
use crate::error::ConnectError;
use crate::join::{Outcome, Session, join};
use crate::lookout::Lookout;
use crate::options::ConnectOptions;

/// How long to wait before aggregators are tried again, none of which could be had.
pub(crate) const PAUSE: Duration = Duration::from_millis(250);
/// What became of an aggregator that was not come to.
const UNTRIED: &str = "not tried";

/// A search under way.
#[derive(Debug)]
pub(crate) struct Search<'a> {
    options: &'a ConnectOptions,
    /// The names of the sets, and what became of each.
    sets: Vec<(String, String)>,
    /// The set that is tried first in each round.
    first: usize,
    /// The set whose turn it is.
    at: usize,
    /// Whether it has its turn because others were seen there.
    goes_back: bool,
    /// The sets where others were seen that would not have this rank.
    in_vain: BTreeSet<usize>,
}

impl<'a> Search<'a> {
    /// A search that begins at the `first` set.
    pub(crate) fn new(options: &'a ConnectOptions, first: usize) -> Self {
        let sets = 0..=options.standbys.len();
        let sets = sets.map(|at| (set(options, at).join("+"), UNTRIED.into())).collect();
        Self { options, sets, first, at: first, goes_back: false, in_vain: BTreeSet::new() }
    }

    /// Checks that no set is named twice.
    pub(crate) fn check(&self) -> Result<(), ConnectError> {
        let mut seen = BTreeSet::new();
        match self.sets.iter().find(|(name, _)| !seen.insert(name)) {
            Some((name, _)) => {
                Err(ConnectError::Arguments(format!("the aggregator {name} is named twice")))
            }
            None => Ok(()),
        }
    }

    /// The set whose turn it is.
    pub(crate) const fn at(&self) -> usize {
        self.at
    }

    /// Its name.
    pub(crate) fn name(&self) -> &str {
        &self.sets[self.at].0
    }

    /// Notes what became of the set whose turn it is.
    fn note(&mut self, what: String) {
        self.sets[self.at].1 = what;
    }

    /// What became of each set.
    pub(crate) fn text(&self) -> String {
        let each = self.sets.iter().map(|(name, what)| format!("{name}: {what}"));
        each.collect::<Vec<_>>().join("; ")
    }

    /// The same of those that were tried before the one whose turn it is.
    pub(crate) fn text_of_others(&self) -> String {
        let others = self.sets.iter().enumerate();
        let tried = others.filter(|(at, (_, what))| *at != self.at && what != UNTRIED);
        tried.map(|(_, (name, what))| format!("; {name}: {what}")).collect()
    }

    /// Leaves the set whose turn it is, which the job was at: rounds begin after it.
    pub(crate) fn leave(&mut self, why: String) {
        self.note(why);
        self.at = (self.at + 1) % self.sets.len();
        self.first = self.at;
    }

    /// Says that the set whose turn it is is being tried: if the time is over meanwhile, there is
    /// no more to say of it.
    pub(crate) fn begin(&mut self) {
        if self.sets[self.at].1 == UNTRIED {
            self.note("not joined in time".into());
        }
    }

    /// Joins the job at the set whose turn it is, where all must have come within `patience`.
    /// Returns nothing if others wait at a set that comes before, whose turn it is then.
    pub(crate) fn join(
        &mut self,
        patience: Duration,
        resume: Option<&Resume>,
        mailbox: &mut Mailbox,
    ) -> Result<Option<Session>, ConnectError> {
        let options = ConnectOptions { join_timeout: patience, ..self.options.clone() };
        let mut lookout = Lookout::new(&options, resume.is_some(), self.sets_before());
        match join(&options, set(&options, self.at), resume, &mut lookout, mailbox)? {
            Outcome::Complete(session) => Ok(Some(session)),
            Outcome::Elsewhere(place) => {
                let from = self.name().to_owned();
                (self.at, self.goes_back) = (place, true);
                tracing::info!(from, to = self.name(), "others of the job wait there");
                Ok(None)
            }
        }
    }

    /// Where others are looked for: at what comes before in the order that all ranks know, so that
    /// they go one way.
    fn sets_before(&self) -> Vec<(usize, Vec<String>)> {
        // One that comes back goes to where its job runs.
        let end = if self.options.rejoin { 0 } else { self.at };
        let places = (0..end).filter(|at| !self.in_vain.contains(at));
        places.map(|at| (at, set(self.options, at).to_vec())).collect()
    }

    /// Passes over the set whose turn it is. Returns whether a round is over.
    pub(crate) fn pass_over(&mut self, error: &ConnectError) -> bool {
        tracing::warn!(aggregator = self.name(), %error, "not joined");
        self.note(error.to_string());
        if std::mem::take(&mut self.goes_back) && !is_gone(error) {
            self.in_vain.insert(self.at);
        }
        self.at = (self.at + 1) % self.sets.len();
        self.at == self.first
    }
}

/// The aggregators that come `at`th.
fn set(options: &ConnectOptions, at: usize) -> &[String] {
    at.checked_sub(1).and_then(|i| options.standbys.get(i)).unwrap_or(&options.aggregators)
}

/// Whether an aggregator that was there is gone, and may be back.
pub(crate) const fn is_gone(error: &ConnectError) -> bool {
    matches!(error, ConnectError::Closed(_) | ConnectError::Silent | ConnectError::Draining)
}

#[cfg(test)]
mod tests;
