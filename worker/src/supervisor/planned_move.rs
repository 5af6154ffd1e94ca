//! Moves that an operator asks for, to aggregators that the rank may not have known.
//!
//! First the aggregator prepares all ranks: each tries out the new aggregators, and starts to keep
//! sums for other ranks if it did not do so already. Once every rank has answered that it is ready,
//! the aggregator tells all to move; otherwise it cancels the move, and the ranks are as before. A
//! prepared rank also knows the new aggregators as its last standby. So if the aggregator dies in
//! between, the ranks still meet.

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

/// The maximum number of trials at a time. Those of cancelled moves end within seconds.
const MAX_TRIALS: usize = 8;

/// The index of the aggregator, in the current set, that prepares a move, and its number of the
/// move.
type Planner = (u8, u32);

/// A move that is being prepared.
#[derive(Debug)]
pub(crate) struct PlannedMove {
    pub(super) to: MoveTarget,
    by: Planner,
    /// The number of the trial of the new aggregators.
    trial: u64,
    /// Ends the trial once it is dropped.
    _wanted: Arc<()>,
    /// The sets of aggregators before the target was added to them; `None` until the rank is
    /// prepared.
    before: Option<Sets>,
}

/// A rank's standbys, and the index of the job's current set of aggregators.
#[derive(Debug)]
struct Sets {
    standbys: Vec<Vec<String>>,
    at: usize,
}

impl Supervisor {
    /// Begins to prepare a move for an aggregator, which gets an answer later.
    pub(super) fn prepare(&mut self, by: Planner, to: MoveTarget) {
        if let Err(reason) = self.begin(by, to) {
            self.refuse(by, reason);
        }
    }

    fn begin(&mut self, by: Planner, to: MoveTarget) -> Result<(), String> {
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
        if Arc::strong_count(&self.trying) > MAX_TRIALS {
            return Err("its trials of other aggregators have not ended; try again later".into());
        }
        self.trials += 1;
        let (number, wanted) = (self.trials, Arc::new(()));
        let trial = Trial {
            options: self.options.clone(),
            to: to.clone(),
            resume: Resume { first_op: OpId(0), absent: self.absent.clone() },
            driver: Arc::clone(&self.driver),
            wanted: Arc::downgrade(&wanted),
        };
        let trying = Arc::clone(&self.trying);
        let events = self.mailbox.events(by.0);
        let started = std::thread::Builder::new().name("move-trial".into()).spawn(move || {
            let event = Event::Tried { trial: number, result: trial.run() };
            drop(trying);
            // The send fails only if the client is gone.
            events.send(event);
        });
        started.map_err(|error| format!("cannot start a thread: {error}"))?;
        // The trial waits until the engine keeps sums, so it may start before.
        self.driver.with_engine(|engine| engine.prepare_to_move());
        self.planned = Some(PlannedMove { to, by, trial: number, _wanted: wanted, before: None });
        Ok(())
    }

    /// Handles the end of a trial, and answers the aggregator that prepares the move.
    pub(super) fn finish_trial(&mut self, trial: u64, result: Result<(), String>) {
        let Some(planned) = self.planned.as_mut().filter(|planned| planned.trial == trial) else {
            return;
        };
        let by = planned.by;
        match result {
            Ok(()) => {
                let standbys = self.options.standbys.clone();
                let knew_none = standbys.is_empty();
                planned.before = Some(Sets { standbys, at: self.at });
                let to = planned.to.clone();
                // Only now may the rank move there if its aggregator dies.
                self.add_set(&to);
                if knew_none {
                    self.report_may_move(true);
                }
                self.answer(by, FromWorker::MovePrepared { number: by.1 });
            }
            Err(reason) => {
                self.forget_planned();
                self.refuse(by, reason);
            }
        }
    }

    /// Handles the end of a preparation.
    pub(super) fn cancel(&mut self, by: Planner) {
        if self.planned.as_ref().is_some_and(|planned| planned.by == by) {
            self.forget_planned();
        }
    }

    /// Moves the job as prepared.
    pub(super) fn move_as_planned(&mut self, by: Planner) {
        let is_prepared = |it: &&PlannedMove| it.by == by && it.before.is_some();
        let Some(planned) = self.planned.as_ref().filter(is_prepared) else { return };
        let (to, why) =
            (self.index_of(&planned.to), format!("an operator moved the job to {}", planned.to));
        self.migrate(why, to);
    }

    fn refuse(&self, by: Planner, reason: String) {
        NOT_PREPARED.note(|left_out| {
            tracing::warn!(left_out, "cannot prepare a move of the job: {reason}");
        });
        let reason = format!("rank {}: {reason}", self.options.rank);
        self.answer(by, FromWorker::CannotMove { number: by.1, reason });
    }

    fn answer(&self, (place, _): Planner, answer: FromWorker) {
        if let Some(control) = self.membership.controls.get(usize::from(place)) {
            control.send(answer);
        }
    }

    /// Returns the index of the set of aggregators that a move goes to, if the rank knows it.
    pub(super) fn index_of(&self, to: &MoveTarget) -> Option<usize> {
        self.sets().position(|set| *set == to.hosts)
    }

    /// Adds the target of a move to the rank's sets of aggregators, as the last one. Forgets the
    /// targets of earlier moves, except for the current set.
    fn add_set(&mut self, to: &MoveTarget) {
        if self.index_of(to).is_none() {
            self.forget_sets();
            self.options.standbys.push(to.hosts.clone());
        }
    }

    /// Undoes the preparation of a move. The rank knows the same aggregators as before, so it finds
    /// the other ranks if its own aggregator fails.
    fn forget_planned(&mut self) {
        let planned = self.planned.take();
        if let Some(Sets { standbys, at }) = planned.and_then(|planned| planned.before) {
            self.options.standbys = standbys;
            self.at = at;
        }
        // A rank that knows another set may still have to move there, so it keeps sums.
        if self.options.standbys.is_empty() {
            self.driver.with_engine(|engine| engine.stop_keeping());
            self.report_may_move(false);
        }
    }

    /// Tells all aggregators of the set whether the rank knows others, where it may be if they hear
    /// nothing from it.
    fn report_may_move(&self, may_move: bool) {
        let controls = self.membership.controls.iter();
        controls.for_each(|control| control.send(FromWorker::MayMove { may_move }));
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
    use std::net::UdpSocket;

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
            supervisor.prepare((0, 3), to);
            let Ok(FromWorker::CannotMove { number: 3, reason }) = sent.try_recv() else {
                panic!("{why}")
            };
            assert!(reason.starts_with(why), "{reason}");
            assert!(supervisor.planned.is_none());
        }
        assert_eq!(standbys(&supervisor), ["b:1"]);
    }

    #[test]
    fn an_aggregator_cannot_make_a_rank_start_any_number_of_trials() {
        let (mut supervisor, [mut sent, _also]) = supervisor();
        // Nobody answers at this address, so the trials last.
        let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = target(&silent.local_addr().unwrap().to_string());
        for number in 0.. {
            supervisor.prepare((0, number), to.clone());
            if supervisor.planned.is_none() {
                break;
            }
            supervisor.cancel((0, number));
        }
        let refused = std::iter::from_fn(|| sent.try_recv().ok()).last();
        let reason = "rank 0: its trials of other aggregators have not ended; try again later";
        let number = u32::try_from(MAX_TRIALS).unwrap();
        assert_eq!(refused, Some(FromWorker::CannotMove { number, reason: reason.into() }));
    }

    /// Returns a move to C that the aggregator at place 0 prepares with this number.
    fn planned(number: u32) -> Option<PlannedMove> {
        Some(PlannedMove {
            to: target("c:1"),
            by: (0, number),
            trial: 7,
            _wanted: Arc::default(),
            before: None,
        })
    }

    #[test]
    fn only_the_aggregator_that_prepared_a_move_cancels_or_begins_it() {
        let (mut supervisor, [mut sent, mut also]) = supervisor();
        supervisor.planned = planned(3);
        supervisor.prepare((1, 3), target("d:1"));
        let reason = "rank 0: a move to c:1 is already being prepared".to_owned();
        assert_eq!(also.try_recv(), Ok(FromWorker::CannotMove { number: 3, reason }));
        // The end of an earlier trial, other moves, and a move before its time.
        supervisor.finish_trial(6, Ok(()));
        [(1, 3), (0, 2)].into_iter().for_each(|other| supervisor.cancel(other));
        supervisor.move_as_planned((0, 3));
        assert!(sent.try_recv().is_err() && supervisor.planned.is_some());
        assert_eq!(standbys(&supervisor), ["b:1"], "a target is no standby before it was tried");
        supervisor.finish_trial(7, Ok(()));
        assert_eq!(standbys(&supervisor), ["b:1", "c:1"]);
        assert_eq!(sent.try_recv(), Ok(FromWorker::MovePrepared { number: 3 }));
        assert!(also.try_recv().is_err());
        [(1, 3), (0, 2)].into_iter().for_each(|other| supervisor.move_as_planned(other));
        assert!(supervisor.planned.is_some());
        supervisor.cancel((0, 3));
        assert!(supervisor.planned.is_none());
        assert_eq!(standbys(&supervisor), ["b:1"]);
        supervisor.move_as_planned((0, 3));
        assert!(sent.try_recv().is_err());
        // A trial that fails is reported, and its target forgotten.
        supervisor.planned = planned(4);
        supervisor.finish_trial(7, Err("c:1: no answer".into()));
        let reason = "rank 0: c:1: no answer".to_owned();
        assert_eq!(sent.try_recv(), Ok(FromWorker::CannotMove { number: 4, reason }));
        assert_eq!(standbys(&supervisor), ["b:1"]);
    }

    #[test]
    fn a_move_that_does_not_come_about_leaves_the_target_of_an_earlier_one() {
        // The job is back at A: it was moved to C, which then failed. Or it runs at C now.
        for at in [0, 2] {
            let (mut supervisor, _sent) = supervisor();
            supervisor.add_set(&target("c:1"));
            supervisor.at = at;
            let planned = |number| Some(PlannedMove { to: target("d:1"), ..planned(number)? });
            for (number, result) in [(3, Ok(())), (4, Err("d:1: no answer".into()))] {
                supervisor.planned = planned(number);
                supervisor.finish_trial(7, result);
                supervisor.cancel((0, number));
                assert_eq!(
                    (standbys(&supervisor), supervisor.at),
                    (vec!["b:1".into(), "c:1".into()], at)
                );
            }
        }
    }

    #[test]
    fn a_rank_is_after_a_cancelled_move_as_it_was_before() {
        let keeps = |it: &Supervisor| it.driver.with_engine(|engine| engine.is_ready_to_move());
        let prepare = |supervisor: &mut Supervisor| {
            supervisor.driver.with_engine(|engine| engine.prepare_to_move());
            supervisor.planned = planned(3);
        };
        for knows in [false, true] {
            let (mut supervisor, [mut sent, mut also]) = supervisor();
            if !knows {
                supervisor.options.standbys.clear();
                supervisor.user_sets = 1;
            }
            let mut reports = |may_move| {
                let report = (!knows).then_some(FromWorker::MayMove { may_move });
                assert_eq!(also.try_recv().ok(), report);
            };
            prepare(&mut supervisor);
            assert_eq!(supervisor.may_move(), knows, "the target was not tried yet");
            supervisor.finish_trial(7, Ok(()));
            assert!(supervisor.may_move());
            reports(true);
            supervisor.cancel((0, 3));
            assert_eq!((supervisor.may_move(), keeps(&supervisor)), (knows, Some(knows)));
            reports(false);
            prepare(&mut supervisor);
            supervisor.finish_trial(7, Err("c:1: no answer".into()));
            assert_eq!(keeps(&supervisor), Some(knows));
            reports(false);
            let all: Vec<_> = std::iter::from_fn(|| sent.try_recv().ok()).collect();
            let first = if knows { 0 } else { 1 };
            assert_eq!(all[first], FromWorker::MovePrepared { number: 3 });
        }
    }
}
