//! Trials of aggregators that a job may move to.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_proto::control::{CONTROL_VERSION, FromAggregator, FromWorker, Join, Resume};
use racksum_proto::move_target::MoveTarget;
use racksum_proto::time::Span;

use crate::control::{Event, Mailbox};
use crate::driver::Driver;
use crate::error::ConnectError;
use crate::join::{Reached, check, reach, try_ways};
use crate::options::ConnectOptions;
use crate::route::{Route, find_ways};

/// How long ops that started before a rank was prepared may take to end at all ranks. This is
/// shorter than the time that the aggregator waits for its ranks' answers.
const READY_TIMEOUT: Span = Span::from_secs(15);
/// How often to check whether these ops have ended.
const READY_POLL: Duration = Duration::from_millis(2);

/// A trial of the aggregators that a job may move to, by a thread of its own.
pub(crate) struct Trial {
    pub(crate) options: ConnectOptions,
    pub(crate) to: MoveTarget,
    /// The point at which the rank would resume, as far as it is known.
    pub(crate) resume: Resume,
    pub(crate) driver: Arc<Driver>,
    /// Upgradable while the move is not cancelled.
    pub(crate) wanted: Weak<()>,
}

impl Trial {
    /// Tries out the aggregators, and then waits until this rank keeps all sums that another rank
    /// may lack, or the move is cancelled. An error says why the rank cannot move.
    pub(crate) fn run(&self) -> Result<(), String> {
        let Self { options, to, resume, .. } = self;
        // The joins at the new aggregators say that the rank may move.
        let mut options = options.clone();
        options.standbys.push(to.hosts.clone());
        try_out(&options, &to.hosts, resume, &mut Mailbox::new())
            .map_err(|error| format!("{to}: {error}"))?;
        let clock = Clock::start();
        let deadline = clock.now() + READY_TIMEOUT;
        loop {
            let mut state = self.driver.lock();
            let has_ended = state.closed || state.run(|it| it.has_ended()).unwrap_or(true);
            if has_ended {
                return Err("the session has ended".into());
            }
            if state.engine.is_ready_to_move() {
                return Ok(());
            }
            drop(state);
            if self.wanted.strong_count() == 0 {
                return Err("the move was cancelled".into());
            }
            if clock.now() >= deadline {
                return Err(format!(
                    "ops that had started before did not end at all ranks within {} s; find the \
                     rank that is behind with `racksum status`",
                    READY_TIMEOUT.as_millis() / 1_000
                ));
            }
            std::thread::sleep(READY_POLL);
        }
    }
}

/// A round of trials of a rank's standbys, by a thread of its own.
pub(crate) struct StandbyTrials {
    pub(crate) options: ConnectOptions,
    /// The sets of aggregators to try, in this order.
    pub(crate) sets: Vec<Vec<String>>,
    /// The point at which the rank would resume, as far as it is known.
    pub(crate) resume: Resume,
}

impl StandbyTrials {
    /// Returns the first set of aggregators that would admit this rank. An error says why none
    /// would.
    pub(crate) fn run(self) -> Result<Vec<String>, String> {
        let Self { options, sets, resume } = self;
        if sets.is_empty() {
            return Err("the rank knows no other".into());
        }
        let mut tried = Vec::new();
        for set in sets {
            match try_out(&options, &set, &resume, &mut Mailbox::new()) {
                Ok(()) => return Ok(set),
                Err(error) => tried.push(format!("{}: {error}", set.join("+"))),
            }
        }
        Err(tried.join("; "))
    }
}

/// Checks that this rank could join its job at `aggregators`, where it would resume as in `resume`:
/// they answer, the data path works, and they would admit the rank. Joins nothing.
fn try_out(
    options: &ConnectOptions,
    aggregators: &[String],
    resume: &Resume,
    mailbox: &mut Mailbox,
) -> Result<(), ConnectError> {
    check(options, aggregators)?;
    let ways = find_ways(aggregators, options.interface.as_deref())?;
    try_ways(options, aggregators, &ways, false, |options, routes| {
        try_out_at(options, routes, resume, mailbox)
    })
}

/// Asks over these routes, one to each aggregator, whether the aggregators would admit this rank.
fn try_out_at(
    (options, patience): (&ConnectOptions, Span),
    routes: &[Route],
    resume: &Resume,
    mailbox: &mut Mailbox,
) -> Result<(), ConnectError> {
    let reached = reach((options, patience), routes, Some(resume), mailbox)?;
    let Reached { controls, joins, .. } = reached;
    for (control, join) in controls.iter().zip(joins) {
        // Only an aggregator that the rank joins needs the job's secret.
        control.send(FromWorker::AskRoom(Join { secret: None, ..join }));
    }
    let mut unanswered: BTreeSet<_> = (0..controls.len()).collect();
    while !unanswered.is_empty() {
        let received = mailbox.recv(Some(Duration::from_nanos(patience.0)));
        let Some((place, event)) = received else { return Err(ConnectError::Silent) };
        match event {
            Event::Received(FromAggregator::Room) => drop(unanswered.remove(&place.into())),
            Event::Received(message) => return Err(refusal(message)),
            // An aggregator hangs up once it has answered.
            Event::Closed(error) if unanswered.contains(&place.into()) => return Err(error),
            Event::Closed(_) | Event::Tried { .. } | Event::Sought { .. } => {}
        }
    }
    Ok(())
}

/// Returns the reason for which an aggregator would not admit this rank.
fn refusal(message: FromAggregator) -> ConnectError {
    match message {
        FromAggregator::Refused { reason } => ConnectError::Refused(reason),
        FromAggregator::WrongVersion { speaks } => {
            ConnectError::Version { theirs: speaks, own: CONTROL_VERSION }
        }
        FromAggregator::Drain => ConnectError::Draining,
        other => ConnectError::Protocol(format!("it sent {other:?} instead of a refusal")),
    }
}
