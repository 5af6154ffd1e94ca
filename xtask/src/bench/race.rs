//! A race: all sides are set up, and then take turns, one iteration or a few of each in a round.
//!
//! Turns are what makes the ratios fair: whatever else the machine does, it does to all sides.

use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use super::case::{Figure, Program, Race, Verdict};
use super::setup::Setup;
use super::side::{Iteration, Place, Team};
use super::stats::Summary;
use super::volume::{Thrift, Volume};

/// How often the sides take their turns.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Rounds {
    /// Rounds that are not counted.
    pub(crate) warmup: u32,
    pub(crate) counted: u32,
}

/// What came of a race.
#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    /// What the ranks had to move.
    pub(crate) volume: Volume,
    pub(crate) sides: Vec<SideOutcome>,
    pub(crate) bounds: Vec<BoundOutcome>,
}

/// What came of a side.
#[derive(Debug, Serialize)]
pub(crate) struct SideOutcome {
    pub(crate) name: &'static str,
    /// Why the side did not race.
    pub(crate) skipped: Option<String>,
    /// Of the rounds, each of which counts with the median of its iterations.
    pub(crate) summary: Option<Summary>,
    /// Of what single ranks measured of themselves, over all iterations.
    pub(crate) rank_summary: Option<Summary>,
    pub(crate) thrift: Option<Thrift>,
    pub(crate) retransmits: u64,
    /// The iterations of each round.
    pub(crate) times_us: Vec<Vec<f64>>,
    /// What each rank measured of itself in them.
    pub(crate) rank_times_us: Vec<Vec<Vec<f64>>>,
    /// Bytes that each rank sent and received in the last iteration.
    pub(crate) last_traffic: Option<super::volume::Traffic>,
}

/// What came of a bound.
#[derive(Debug, Serialize)]
pub(crate) struct BoundOutcome {
    #[serde(skip)]
    pub(crate) figure: Figure,
    #[serde(rename = "figure")]
    pub(crate) name: String,
    pub(crate) value: Option<f64>,
    pub(crate) must: f64,
    pub(crate) reach: f64,
    pub(crate) verdict: Verdict,
}

/// Runs a race; `tell` hears what is being done.
pub(crate) fn run(
    race: &Race,
    rounds: Rounds,
    setup: &Setup,
    logs: &Path,
    tell: &mut dyn FnMut(&str),
) -> Result<Outcome> {
    tell("setting up the network and the aggregators");
    let place = Place::new(race, setup, logs)?;
    let mut teams = Vec::new();
    for side in &race.sides {
        let skipped = setup.missing(&side.program);
        tell(&format!("setting up {}", side.name));
        let team = match skipped {
            Some(_) => None,
            None => Some(
                Team::start(race, side, &place, setup, logs)
                    .with_context(|| format!("{} was not set up", side.name))?,
            ),
        };
        teams.push((team, skipped, Vec::new()));
    }
    let total = rounds.warmup + rounds.counted;
    for round in 0..total {
        for (side, (team, _, counted)) in race.sides.iter().zip(&mut teams) {
            let Some(team) = team else { continue };
            tell(&format!("round {} of {total}: {}", round + 1, side.name));
            let iterations = (0..race.iterations).map(|_| team.go());
            let iterations = iterations.collect::<Result<Vec<_>>>();
            let iterations =
                iterations.with_context(|| format!("{} in round {}", side.name, round + 1))?;
            if round >= rounds.warmup {
                counted.push(iterations);
            }
        }
    }
    let sides = teams.iter().map(|(_, skipped, rounds)| (skipped.clone(), &rounds[..]));
    Ok(Outcome::of(race, sides))
}

impl Outcome {
    /// Judges what the sides of a race did, in their order.
    fn of<'a>(
        race: &Race,
        done: impl Iterator<Item = (Option<String>, &'a [Vec<Iteration>])>,
    ) -> Self {
        let volume = race.data.volume(race.world);
        let sides: Vec<_> = race
            .sides
            .iter()
            .zip(done)
            .map(|(side, (skipped, rounds))| {
                SideOutcome::of(side.name, &side.program, skipped, rounds, &volume)
            })
            .collect();
        let time = |name: &str| {
            let (i, _) = race.side(name)?;
            Some(sides.get(i)?.summary?.median)
        };
        let judge = |bound: &super::case::Bound| {
            let value = bound.figure.value(time);
            let verdict = bound.judge(value);
            let super::case::Bound { figure, must, reach } = *bound;
            BoundOutcome { figure, name: figure.name(), value, must, reach, verdict }
        };
        let bounds = race.bounds.iter().map(judge).collect();
        Self { volume, sides, bounds }
    }
}

impl SideOutcome {
    fn of(
        name: &'static str,
        program: &Program,
        skipped: Option<String>,
        rounds: &[Vec<Iteration>],
        volume: &Volume,
    ) -> Self {
        let spans = |round: &Vec<Iteration>| round.iter().map(|i| i.span_us).collect::<Vec<_>>();
        let times_us: Vec<_> = rounds.iter().map(spans).collect();
        let medians: Vec<_> =
            times_us.iter().filter_map(|round| Some(Summary::of(round)?.median)).collect();
        let all = || rounds.iter().flatten();
        let rank_times: Vec<_> = all().flat_map(|i| i.rank_us.iter().copied()).collect();
        let thrift = program.racksum().and_then(|racksum| {
            let owed = volume.on_the_wire(racksum.wire.element_bytes());
            owed.judge(all().filter_map(|iteration| iteration.traffic.as_ref()))
        });
        let of_ranks = |round: &Vec<Iteration>| round.iter().map(|i| i.rank_us.clone()).collect();
        Self {
            name,
            skipped,
            summary: Summary::of(&medians),
            rank_summary: Summary::of(&rank_times),
            thrift,
            retransmits: all().map(|iteration| iteration.retransmits).sum(),
            times_us,
            rank_times_us: rounds.iter().map(of_ranks).collect(),
            last_traffic: all().last().and_then(|iteration| iteration.traffic.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::cases;
    use super::super::volume::Traffic;
    use super::*;

    fn race() -> Race {
        match cases::chosen(&["dense-loopback-w2".to_owned()], 1).unwrap().remove(0) {
            super::super::case::Case::Race(race) => race,
            super::super::case::Case::Memory(_) => panic!("a race"),
        }
    }

    fn iteration(span_us: f64, tx: u64) -> Iteration {
        let traffic = Some(Traffic { tx: vec![tx; 2], rx: vec![100_000_000; 2] });
        Iteration { span_us, rank_us: vec![span_us - 1.0; 2], traffic, retransmits: 1 }
    }

    #[test]
    fn a_round_counts_with_its_median_and_a_side_with_that_of_its_rounds() {
        let ours = [
            vec![iteration(10.0, 0), iteration(90.0, 0), iteration(20.0, 0)],
            vec![iteration(30.0, 0)],
            vec![iteration(25.0, 0)],
        ];
        let gloo = [vec![iteration(30.0, 0)], vec![iteration(30.0, 0)], vec![iteration(31.0, 0)]];
        let sides = [(None, &ours[..]), (None, &gloo[..]), (Some("no MPI".to_owned()), &[][..])];
        let outcome = Outcome::of(&race(), sides.into_iter());
        let summary = outcome.sides[0].summary.unwrap();
        assert_eq!((summary.median, summary.min, summary.max), (25.0, 20.0, 30.0));
        assert_eq!(outcome.sides[0].retransmits, 5);
        assert_eq!(outcome.sides[2].summary, None);
        let [bound] = &outcome.bounds[..] else { panic!("one bound") };
        assert_eq!((bound.value, bound.verdict), (Some(1.2), Verdict::Reach));
    }

    #[test]
    fn one_greedy_iteration_breaks_the_invariant_and_peers_have_none() {
        let judged = |tx| {
            let rounds = [vec![iteration(1.0, 100_000_000)], vec![iteration(1.0, tx)]];
            let sides = [(None, &rounds[..]), (None, &rounds[..]), (None, &rounds[..])];
            let mut outcome = Outcome::of(&race(), sides.into_iter());
            assert_eq!(outcome.sides[1].thrift, None);
            outcome.sides.remove(0).thrift.unwrap().holds
        };
        assert!(judged(106_000_000));
        assert!(!judged(107_000_000));
    }

    #[test]
    fn a_bound_on_a_missing_side_is_not_measured() {
        let ours = [vec![iteration(10.0, 0)]];
        let none = || (Some("no python".to_owned()), &[][..]);
        let outcome = Outcome::of(&race(), [(None, &ours[..]), none(), none()].into_iter());
        assert_eq!(outcome.bounds[0].verdict, Verdict::NotMeasured);
    }
}
