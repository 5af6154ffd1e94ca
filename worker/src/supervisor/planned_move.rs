//! Moves that an operator asks for, to aggregators that the rank may not have known.
//!
//! First the aggregator prepares all ranks: each tries out the new aggregators, and starts to keep
//! sums for other ranks if it did not do so already. Once every rank has answered that it is ready,
//! the aggregator tells all to move; otherwise it cancels the move. A prepared rank also knows the
//! new aggregators as its last standby. So if the aggregator dies in between, the ranks still meet.

use std::sync::Arc;

use racksum_net::log_limit::LogLimit;
use racksum_proto::control::{FromWorker, Resume};
use racksum_proto::ids::OpId;
use racksum_proto::move_target::MoveTarget;

use super::Supervisor;
use crate::control::Event;
use crate::route::check_address;
use crate::trial::Trial;

/// Rate limit for log records that an aggregator can trigger.
static NOT_PREPARED: LogLimit = LogLimit::new(16);

/// A move that is being prepared.
#[derive(Debug)]
pub(crate) struct PlannedMove {
    to: MoveTarget,
    /// The index of the aggregator, in the current set, that prepares the move.
    by: u8,
    /// The number of the trial of the new aggregators.
    trial: u64,
    is_prepared: bool,
}

impl Supervisor {
    /// Begins to prepare a move for the aggregator at `place`, which gets an answer later.
    pub(super) fn prepare(&mut self, place: u8, to: MoveTarget) {
        if let Err(reason) = self.begin(place, to) {
            self.refuse(place, reason);
        }
    }

    fn begin(&mut self, place: u8, to: MoveTarget) -> Result<(), String> {
        if let Some(PlannedMove { to: other, .. }) = &self.planned {
            return Err(format!("a move to {other} is already being prepared"));
        }
        to.check()?;
        for host in &to.hosts {
            check_address(host).map_err(|error| error.to_string())?;
        }
        if self.index_of(&to) == Some(self.at) {
            return Err(format!("the job already runs at {to}"));
        }
        self.trials += 1;
        let number = self.trials;
        let trial = Trial {
            options: self.options.clone(),
            to: to.clone(),
            resume: Resume { first_op: OpId(0), absent: self.absent.clone() },
            driver: Arc::clone(&self.driver),
        };
        self.driver.with_engine(|engine| engine.prepare_to_move());
        let events = self.mailbox.events(place);
        let started = std::thread::Builder::new().name("move-trial".into()).spawn(move || {
            let event = Event::Tried { trial: number, result: trial.run() };
            // The send fails only if the client is gone.
            events.send(event);
        });
        started.map_err(|error| format!("cannot start a thread: {error}"))?;
        self.add_set(&to);
        self.planned = Some(PlannedMove { to, by: place, trial: number, is_prepared: false });
        Ok(())
    }

    /// Handles the end of a trial, and answers the aggregator that prepares the move.
    pub(super) fn finish_trial(&mut self, trial: u64, result: Result<(), String>) {
        let Some(planned) = self.planned.as_mut().filter(|planned| planned.trial == trial) else {
            return;
        };
        match result {
            Ok(()) => {
                planned.is_prepared = true;
                // All aggregators of the set learn that the rank may leave for others.
                let controls = self.membership.controls.iter();
                controls.for_each(|control| control.send(FromWorker::MovePrepared));
            }
            Err(reason) => {
                let place = planned.by;
                self.forget_planned();
                self.refuse(place, reason);
            }
        }
    }

    /// Handles the end of a preparation by the aggregator at `place`.
    pub(super) fn cancel(&mut self, place: u8) {
        if self.planned.as_ref().is_some_and(|planned| planned.by == place) {
            self.forget_planned();
        }
    }

    /// Moves the job, as the aggregator at `place` has prepared.
    pub(super) fn move_as_planned(&mut self, place: u8) {
        let is_prepared = |it: &&PlannedMove| it.by == place && it.is_prepared;
        let Some(planned) = self.planned.as_ref().filter(is_prepared) else { return };
        let (to, why) =
            (self.index_of(&planned.to), format!("an operator moved the job to {}", planned.to));
        self.migrate(why, to);
    }

    fn refuse(&self, place: u8, reason: String) {
        NOT_PREPARED.note(|left_out| {
            tracing::warn!(left_out, "cannot prepare a move of the job: {reason}");
        });
        if let Some(control) = self.membership.controls.get(usize::from(place)) {
            let reason = format!("rank {}: {reason}", self.options.rank);
            control.send(FromWorker::CannotMove { reason });
        }
    }

    /// Returns the index of the set of aggregators that a move goes to, if the rank knows it.
    fn index_of(&self, to: &MoveTarget) -> Option<usize> {
        let mut sets = std::iter::once(&self.options.aggregators).chain(&self.options.standbys);
        sets.position(|set| *set == to.hosts)
    }

    /// Adds the target of a move to the rank's sets of aggregators, as the last one. Forgets the
    /// targets of earlier moves, except for the current set.
    fn add_set(&mut self, to: &MoveTarget) {
        if self.index_of(to).is_none() {
            self.forget_sets();
            self.options.standbys.push(to.hosts.clone());
        }
    }

    fn forget_planned(&mut self) {
        self.planned = None;
        self.forget_sets();
    }

    /// Forgets the sets of aggregators that operators named, except for the current one.
    fn forget_sets(&mut self) {
        let (first, last) = (self.user_sets, 1 + self.options.standbys.len());
        for place in (first..last).rev().filter(|place| *place != self.at) {
            self.options.standbys.remove(place - 1);
        }
        // Only the current set can be left of these.
        self.at = self.at.min(first);
    }
}
