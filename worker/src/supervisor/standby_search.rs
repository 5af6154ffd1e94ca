//! The search for a standby while an aggregator drains. The rank stays until a standby would admit
//! it: the draining aggregator serves the job to its end, but a standby may be gone. In particular,
//! the aggregators that an operator has moved the job away from may have stopped since.

use std::time::Duration;

use racksum_net::log_limit::LogLimit;
use racksum_proto::control::Resume;
use racksum_proto::ids::OpId;

use super::Supervisor;
use crate::control::Event;
use crate::trial::StandbyTrials;

/// The first pause after a round of trials in which no standby would admit the rank.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The longest pause between two rounds; the pause doubles after each round.
const LONGEST_PAUSE: Duration = Duration::from_secs(4);

/// Rate limit for log records that an aggregator can trigger.
static NO_STANDBY: LogLimit = LogLimit::new(16);

/// A search in progress.
#[derive(Debug)]
pub(crate) struct StandbySearch {
    /// The number of the current round of trials.
    number: u64,
    /// The pause before the next round.
    pause: Duration,
}

impl Supervisor {
    /// Begins to search for a standby, because the aggregator at `place` drains.
    pub(super) fn seek_standby(&mut self, place: u8) {
        if self.search.is_none() {
            self.try_standbys(place, Duration::ZERO, FIRST_PAUSE);
        }
    }

    /// Handles the end of a round of trials: moves the job to the standby that would admit the
    /// rank, or begins the next round.
    pub(super) fn finish_search(
        &mut self,
        place: u8,
        search: u64,
        result: Result<Vec<String>, String>,
    ) {
        let is_current = |it: &&StandbySearch| it.number == search;
        let Some(StandbySearch { pause, .. }) = self.search.as_ref().filter(is_current) else {
            return;
        };
        let pause = *pause;
        if self.options.standbys.is_empty() {
            // The move that named the only other aggregators was cancelled.
            self.search = None;
            return;
        }
        let found = result.as_ref().ok().and_then(|set| self.sets().position(|it| it == set));
        match result {
            Ok(_) if found.is_some() && self.may_move() => {
                self.migrate("the aggregator is draining".into(), found);
            }
            result => {
                NO_STANDBY.note(|left_out| {
                    let why = result.err().unwrap_or_else(|| "a move was cancelled".into());
                    let draining = self.host(place);
                    tracing::warn!(
                        left_out,
                        "the aggregator {draining} is draining, but the job stays until a standby \
                         would admit it: {why}"
                    );
                });
                self.try_standbys(place, pause, (pause * 2).min(LONGEST_PAUSE));
            }
        }
    }

    /// Starts a round of trials after a pause. If it fails, the next round starts after `next`.
    fn try_standbys(&mut self, place: u8, pause: Duration, next: Duration) {
        self.trials += 1;
        let number = self.trials;
        let (earlier, later): (Vec<_>, Vec<_>) =
            self.sets().enumerate().partition(|(at, _)| *at < self.at);
        // The target of a planned move is no standby before the job runs there.
        let target = self.planned.as_ref().map(|planned| &planned.to.hosts);
        let sets = later.into_iter().skip(1).chain(earlier).map(|(_, set)| set);
        let trials = StandbyTrials {
            options: self.options.clone(),
            sets: sets.filter(|set| Some(*set) != target).cloned().collect(),
            resume: Resume { first_op: OpId(0), absent: self.absent.clone() },
        };
        let events = self.mailbox.events(place);
        let started = std::thread::Builder::new().name("standby-trials".into()).spawn(move || {
            std::thread::sleep(pause);
            let event = Event::Sought { search: number, result: trials.run() };
            // The send fails only if the client is gone.
            events.send(event);
        });
        match started {
            Ok(_) => self.search = Some(StandbySearch { number, pause: next }),
            // Without a thread, the standbys cannot be tried before the move.
            Err(_) => self.move_on("the aggregator is draining".into()),
        }
    }
}
