//! A race. All sides are set up, and then take turns of one or a few iterations in each round.
//!
//! Turns make the ratios fair, because a disturbance of the machine affects all sides. They cannot
//! cancel the luck of a set-up, such as memory placement or the core of a thread, which a process
//! keeps for its lifetime. Small differences therefore need several set-ups.

use std::path::Path;

use anyhow::Result;
use racksum_tools::interrupt;
use serde::Serialize;

use crate::case::{Bound, Figure, Grade, Race, Side, Took};
use crate::network::Drops;
use crate::setup::Setup;
use crate::side::{Iteration, Team, Venue};
use crate::stats::Summary;
use crate::volume::{Thrift, Volume};

/// The number of set-ups and rounds.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Rounds {
    /// Number of set-ups, each followed by all rounds.
    pub(crate) setups: u32,
    /// Number of warm-up rounds, which are not measured.
    pub(crate) warmup: u32,
    /// Number of measured rounds.
    pub(crate) counted: u32,
}

/// The results of a race.
#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    /// Bytes that the ranks had to move.
    pub(crate) volume: Volume,
    pub(crate) sides: Vec<SideOutcome>,
    pub(crate) bounds: Vec<BoundOutcome>,
}

/// The results of a side.
#[derive(Debug, Serialize)]
pub(crate) struct SideOutcome {
    pub(crate) name: &'static str,
    /// Reason why the side did not race.
    pub(crate) skipped: Option<String>,
    /// Reason why the side did not finish the race.
    pub(crate) failed: Option<String>,
    /// Summary of the rounds, each represented by the median of its iterations.
    pub(crate) summary: Option<Summary>,
    /// Predicted time of an iteration, if the side predicts it.
    pub(crate) predicted_us: Option<f64>,
    /// Summary of the times that individual ranks measured, over all iterations.
    pub(crate) rank_summary: Option<Summary>,
    pub(crate) thrift: Option<Thrift>,
    pub(crate) retransmits: u64,
    /// Packets that the links' queues dropped in the measured rounds.
    pub(crate) drops: Drops,
    /// Median of each round's iterations.
    #[serde(skip)]
    pub(crate) rounds_us: Vec<f64>,
    /// Times of each round's iterations.
    pub(crate) times_us: Vec<Vec<f64>>,
    /// Times that each rank measured in these iterations.
    pub(crate) rank_times_us: Vec<Vec<Vec<f64>>>,
    /// Bytes that each rank sent and received in the last iteration.
    pub(crate) last_traffic: Option<crate::volume::Traffic>,
}

/// The result of a bound.
#[derive(Debug, Serialize)]
pub(crate) struct BoundOutcome {
    #[serde(skip)]
    pub(crate) figure: Figure,
    #[serde(rename = "figure")]
    pub(crate) name: String,
    pub(crate) value: Option<f64>,
    pub(crate) must: f64,
    pub(crate) reach: f64,
    pub(crate) verdict: Grade,
}

/// Runs a race; `show_progress` receives progress messages.
pub(crate) fn run(
    race: &Race,
    rounds: Rounds,
    setup: &Setup,
    logs: &Path,
    show_progress: &mut dyn FnMut(&str),
) -> Result<Outcome> {
    let mut all = vec![Log::default(); race.sides.len()];
    for number in 1..=rounds.setups {
        let of_setups = format!("set-up {number} of {}: ", rounds.setups);
        let which = if rounds.setups > 1 { &of_setups } else { "" };
        let show_progress = &mut |what: &str| show_progress(&format!("{which}{what}"));
        let logs = run_once(race, rounds, number % 2 == 0, setup, logs, show_progress)?;
        all.iter_mut().zip(logs).for_each(|(all, log)| all.add(log));
    }
    Ok(Outcome::of(race, rounds.counted, &all))
}

/// Returns the sides in the order of their set-up and turns. A mirrored set-up swaps the two sides
/// of each pair. A side and its earlier build form a pair, so each takes the other's place once.
/// Reversing the whole order would always put one pair at the ends and another in the middle.
fn in_order<T>(mut sides: Vec<T>, mirrored: bool) -> Vec<T> {
    if mirrored {
        sides.chunks_mut(2).for_each(<[T]>::reverse);
    }
    sides
}

/// Sets the sides up and runs their turns. The side that is set up first is about 4 % slower for
/// its lifetime. The first side of a round finds idle cores asleep, which slows small ops by up to
/// 5 %. So the order changes from round to round and from set-up to set-up.
fn run_once(
    race: &Race,
    rounds: Rounds,
    mirrored: bool,
    setup: &Setup,
    logs: &Path,
    show_progress: &mut dyn FnMut(&str),
) -> Result<Vec<Log>> {
    show_progress("setting up the network and the aggregators");
    let place = Venue::new(race, setup, logs)?;
    let mut racers: Vec<_> = race.sides.iter().map(|side| Racer::start(side, setup)).collect();
    for (side, racer) in in_order(race.sides.iter().zip(&mut racers).collect(), mirrored) {
        if racer.log.skipped.is_none() {
            show_progress(&format!("setting up {}", side.name));
            let team = Team::start(race, side, &place, setup, logs);
            racer.team = racer.log.keep(team, "set-up");
            racer.log.predicted_us = racer.team.as_ref().and_then(Team::predicted_us);
        }
    }
    let total = rounds.warmup + rounds.counted;
    for round in 1..=total {
        let mut turns = in_order(race.sides.iter().zip(&mut racers).collect(), mirrored);
        if round % 2 == 0 {
            turns.reverse();
        }
        for (side, racer) in turns {
            interrupt::check()?;
            show_progress(&format!("round {round} of {total}: {}", side.name));
            let before = place.drops()?;
            racer.turn(race.iterations, round > rounds.warmup, round);
            if round > rounds.warmup {
                racer.log.drops += place.drops()?.since(before);
            }
        }
    }
    Ok(racers.into_iter().map(|racer| racer.log).collect())
}

/// A side during a race.
struct Racer {
    /// The ranks; `None` if the side did not start or has failed.
    team: Option<Team>,
    log: Log,
}

/// The record of a side.
#[derive(Debug, Clone, Default)]
struct Log {
    skipped: Option<String>,
    failed: Option<String>,
    predicted_us: Option<f64>,
    /// Iterations of each measured round.
    rounds: Vec<Vec<Iteration>>,
    drops: Drops,
}

impl Racer {
    fn start(side: &Side, setup: &Setup) -> Self {
        let skipped = setup.missing(&side.program);
        Self { team: None, log: Log { skipped, ..Log::default() } }
    }

    /// Takes a turn. A side that fails is stopped, and the other sides continue.
    fn turn(&mut self, iterations: u32, counts: bool, round: u32) {
        let Some(team) = &mut self.team else { return };
        let done = team.set_background(true).and_then(|()| {
            let done = (0..iterations).map(|_| team.go()).collect::<Result<Vec<_>>>();
            team.set_background(false).and(done)
        });
        match self.log.keep(done, &format!("round {round}")) {
            Some(iterations) if counts => self.log.rounds.push(iterations),
            Some(_) => {}
            None => self.team = None,
        }
    }
}

impl Log {
    /// Appends the record of a further set-up.
    fn add(&mut self, later: Self) {
        self.skipped = self.skipped.take().or(later.skipped);
        self.failed = self.failed.take().or(later.failed);
        self.predicted_us = self.predicted_us.or(later.predicted_us);
        self.rounds.extend(later.rounds);
        self.drops += later.drops;
    }

    /// Returns the value, or records the error and returns `None`.
    fn keep<T>(&mut self, had: Result<T>, when: &str) -> Option<T> {
        match had {
            Ok(had) => Some(had),
            Err(error) => {
                self.failed = Some(format!("{when}: {error:#}"));
                None
            }
        }
    }
}

impl Outcome {
    /// Judges the logs of a race's sides, given in the order of the sides; a set-up has `counted`
    /// measured rounds.
    fn of(race: &Race, counted: u32, logs: &[Log]) -> Self {
        let volume = race.data.volume(race.world);
        let sides = race.sides.iter().zip(logs);
        let sides: Vec<_> = sides.map(|(side, log)| SideOutcome::of(side, log, &volume)).collect();
        let took = |name: &str| {
            let SideOutcome { summary, rounds_us, predicted_us, .. } =
                sides.get(race.side(name)?.0)?;
            let measured = (*summary)?.median;
            Some(Took { measured, rounds: rounds_us, counted, predicted: *predicted_us })
        };
        let judge = |bound: &Bound| {
            let value = bound.figure.value(took);
            let verdict = bound.judge(value);
            let Bound { figure, must, reach } = *bound;
            BoundOutcome { figure, name: figure.name(), value, must, reach, verdict }
        };
        let bounds = race.bounds.iter().map(judge).collect();
        Self { volume, sides, bounds }
    }
}

impl SideOutcome {
    fn of(side: &Side, log: &Log, volume: &Volume) -> Self {
        let rounds = &log.rounds;
        let spans = |round: &Vec<Iteration>| round.iter().map(|i| i.span_us).collect::<Vec<_>>();
        let times_us: Vec<_> = rounds.iter().map(spans).collect();
        let medians: Vec<_> =
            times_us.iter().filter_map(|round| Some(Summary::of(round)?.median)).collect();
        let all = || rounds.iter().flatten();
        let rank_times: Vec<_> = all().flat_map(|i| i.rank_us.iter().copied()).collect();
        let thrift = side.program.racksum().and_then(|racksum| {
            let owed = volume.on_the_wire(racksum.wire);
            owed.judge(all().filter_map(|iteration| iteration.traffic.as_ref()))
        });
        let of_ranks = |round: &Vec<Iteration>| round.iter().map(|i| i.rank_us.clone()).collect();
        Self {
            name: side.name,
            skipped: log.skipped.clone(),
            failed: log.failed.clone(),
            summary: Summary::of(&medians),
            predicted_us: log.predicted_us,
            rank_summary: Summary::of(&rank_times),
            thrift,
            retransmits: all().map(|iteration| iteration.retransmits).sum(),
            drops: log.drops,
            rounds_us: medians,
            times_us,
            rank_times_us: rounds.iter().map(of_ranks).collect(),
            last_traffic: all().last().and_then(|iteration| iteration.traffic.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases;
    use crate::volume::Traffic;

    fn race() -> Race {
        match cases::chosen(&["dense-loopback-w2".to_owned()], 1).unwrap().remove(0) {
            crate::case::Case::Race(race) => race,
            crate::case::Case::Memory(_) => panic!("the case is not a race"),
        }
    }

    fn iteration(span_us: f64, tx: u64) -> Iteration {
        let traffic = Some(Traffic { tx: vec![tx; 2], rx: vec![100_000_000; 2] });
        Iteration { span_us, rank_us: vec![span_us - 1.0; 2], traffic, retransmits: 1 }
    }

    /// Creates the log of a side that took these rounds.
    fn log(rounds: &[Vec<Iteration>]) -> Log {
        Log { rounds: rounds.to_vec(), ..Log::default() }
    }

    #[test]
    fn a_round_counts_with_its_median_and_a_side_with_that_of_its_rounds() {
        let once = |span_us| vec![iteration(span_us, 0)];
        let first = vec![iteration(10.0, 0), iteration(90.0, 0), iteration(20.0, 0)];
        let ours = log(&[first, once(30.0), once(25.0)]);
        let gloo = log(&[once(30.0), once(30.0), once(31.0)]);
        let outcome = Outcome::of(&race(), 3, &[ours, gloo, Log::default()]);
        let summary = outcome.sides[0].summary.unwrap();
        assert_eq!((summary.median, summary.min, summary.max), (25.0, 20.0, 30.0));
        assert_eq!(outcome.sides[0].retransmits, 5);
        assert_eq!(outcome.sides[2].summary, None);
        let [bound] = &outcome.bounds[..] else { panic!("the race must have one bound") };
        assert_eq!((bound.value, bound.verdict), (Some(1.2), Grade::Reach));
    }

    #[test]
    fn a_further_set_up_adds_its_rounds_and_hides_no_failure() {
        let mut all = log(&[vec![iteration(10.0, 0)]]);
        all.add(log(&[vec![iteration(20.0, 0)], vec![iteration(30.0, 0)]]));
        all.add(Log { failed: Some("round 1: a rank is silent".to_owned()), ..Log::default() });
        all.add(log(&[vec![iteration(40.0, 0)]]));
        let outcome = Outcome::of(&race(), 3, &[all, Log::default(), Log::default()]);
        assert_eq!(outcome.sides[0].times_us, [[10.0], [20.0], [30.0], [40.0]]);
        assert!(outcome.sides[0].failed.is_some());
    }

    #[test]
    fn a_side_and_its_earlier_build_have_each_other_s_places_in_a_mirrored_setup() {
        let sides = || vec!["a", "a, before", "b", "b, before", "c"];
        assert_eq!(in_order(sides(), false), sides());
        assert_eq!(in_order(sides(), true), ["a, before", "a", "b, before", "b", "c"]);
    }

    #[test]
    fn one_greedy_iteration_breaks_the_invariant_and_peers_have_none() {
        let judged = |tx| {
            let log = || log(&[vec![iteration(1.0, 100_000_000)], vec![iteration(1.0, tx)]]);
            let mut outcome = Outcome::of(&race(), 3, &[log(), log(), log()]);
            assert_eq!(outcome.sides[1].thrift, None);
            outcome.sides.remove(0).thrift.unwrap().holds
        };
        assert!(judged(106_000_000));
        assert!(!judged(107_000_000));
    }

    #[test]
    fn a_bound_on_a_missing_side_is_not_measured() {
        let ours = log(&[vec![iteration(10.0, 0)]]);
        let outcome = Outcome::of(&race(), 3, &[ours, Log::default(), Log::default()]);
        assert_eq!(outcome.bounds[0].verdict, Grade::NotMeasured);
    }

    #[test]
    fn a_failure_is_noted_with_its_time_and_cause() {
        let mut log = Log::default();
        assert_eq!(log.keep(Ok(7), "round 1"), Some(7));
        let error = anyhow::anyhow!("a rank is silent").context("no sum");
        assert_eq!(log.keep(Err::<(), _>(error), "round 2"), None);
        assert_eq!(log.failed.unwrap(), "round 2: no sum: a rank is silent");
    }
}
