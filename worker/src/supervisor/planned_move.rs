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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervisor::tests::supervisor;

    fn target(host: &str) -> MoveTarget {
        MoveTarget { hosts: vec![host.into()] }
    }

    fn standbys(supervisor: &Supervisor) -> Vec<String> {
        supervisor.options.standbys.iter().map(|set| set.join("+")).collect()
    }

    #[test]
    fn the_sets_that_operators_name_are_bounded_and_those_of_the_user_stay() {
        let (mut supervisor, _sent) = supervisor();
        supervisor.add_set(&target("c:1"));
        assert_eq!(standbys(&supervisor), ["b:1", "c:1"]);
        // The job runs at C now, and the next target comes after it.
        supervisor.at = 2;
        supervisor.add_set(&target("d:1"));
        assert_eq!(
            (standbys(&supervisor), supervisor.at),
            (vec!["b:1".into(), "c:1".into(), "d:1".into()], 2)
        );
        supervisor.at = 3;
        supervisor.add_set(&target("e:1"));
        assert_eq!(
            (standbys(&supervisor), supervisor.at),
            (vec!["b:1".into(), "d:1".into(), "e:1".into()], 2)
        );
        assert_eq!(supervisor.options.standbys[supervisor.at - 1], ["d:1"]);
        // A set that the user named is not added again.
        supervisor.add_set(&target("b:1"));
        assert_eq!(standbys(&supervisor), ["b:1", "d:1", "e:1"]);
        supervisor.at = 0;
        supervisor.forget_sets();
        assert_eq!((standbys(&supervisor), supervisor.at), (vec!["b:1".into()], 0));
    }

    #[test]
    fn a_move_that_cannot_be_is_refused_and_leaves_nothing_behind() {
        let (mut supervisor, [mut sent, _also]) = supervisor();
        for (to, why) in [
            (target("a:1"), "rank 0: the job already runs at a:1"),
            (target("nowhere"), "rank 0: "),
            (MoveTarget { hosts: Vec::new() }, "rank 0: a job moves to 1 to 62 aggregators"),
        ] {
            supervisor.prepare(0, to);
            let Ok(FromWorker::CannotMove { reason }) = sent.try_recv() else { panic!("{why}") };
            assert!(reason.starts_with(why), "{reason}");
            assert!(supervisor.planned.is_none());
        }
        assert_eq!(standbys(&supervisor), ["b:1"]);
    }

    #[test]
    fn only_the_aggregator_that_prepared_a_move_cancels_or_begins_it() {
        let (mut supervisor, [mut sent, mut also]) = supervisor();
        let planned =
            |is_prepared| Some(PlannedMove { to: target("c:1"), by: 0, trial: 7, is_prepared });
        supervisor.add_set(&target("c:1"));
        supervisor.planned = planned(false);
        supervisor.prepare(1, target("d:1"));
        let reason = "rank 0: a move to c:1 is already being prepared".to_owned();
        assert_eq!(also.try_recv(), Ok(FromWorker::CannotMove { reason }));
        // The end of an earlier trial, another aggregator, and a move before its time.
        supervisor.finish_trial(6, Ok(()));
        supervisor.cancel(1);
        supervisor.move_as_planned(0);
        assert!(sent.try_recv().is_err() && supervisor.planned.is_some());
        supervisor.finish_trial(7, Ok(()));
        assert_eq!(
            [&mut sent, &mut also].map(|it| it.try_recv()),
            [Ok(FromWorker::MovePrepared), Ok(FromWorker::MovePrepared)]
        );
        supervisor.move_as_planned(1);
        assert!(supervisor.planned.is_some());
        supervisor.cancel(0);
        assert!(supervisor.planned.is_none());
        assert_eq!(standbys(&supervisor), ["b:1"]);
        supervisor.move_as_planned(0);
        assert!(sent.try_recv().is_err());
        // A trial that fails is reported, and its target forgotten.
        supervisor.add_set(&target("c:1"));
        supervisor.planned = planned(false);
        supervisor.finish_trial(7, Err("c:1: no answer".into()));
        let reason = "rank 0: c:1: no answer".to_owned();
        assert_eq!(sent.try_recv(), Ok(FromWorker::CannotMove { reason }));
        assert_eq!(standbys(&supervisor), ["b:1"]);
    }
}
