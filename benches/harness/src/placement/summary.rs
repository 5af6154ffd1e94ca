//! Figures over all scenes, and the bounds on them.

use std::fmt;

use super::Outcome;

/// Figures over all scenes.
#[derive(Debug)]
pub(crate) struct Summary {
    /// The share of the step of the best fit that the placer saves: the median over flawed scenes.
    saved: Option<f64>,
    /// Like `saved`, for steps of DDP; `None` if no scene trained.
    ddp_saved: Option<f64>,
    /// The step of the best placement tried, divided by the placer's: the median over flawed
    /// scenes.
    of_best: Option<f64>,
    /// The step of the placer divided by that of the best fit: the median over uniform scenes.
    uniform: Option<f64>,
    /// The number of held-out placements.
    held_out: usize,
    spearman: Option<f64>,
    /// The mean of |predicted / measured - 1|.
    error: Option<f64>,
}

impl Summary {
    pub(crate) fn of(outcomes: &[Outcome]) -> Self {
        let scenes = outcomes.chunk_by(|one, other| one.scene == other.scene);
        let (uniform, flawed): (Vec<_>, Vec<_>) =
            scenes.partition(|scene| scene[0].flaw == "uniform");
        let step = |scene: &[Outcome], placement: &str| Some(find(scene, placement)?.measured_s);
        let ratio = |scene: &&[Outcome]| Some(step(scene, "placer")? / step(scene, "labels")?);
        let ddp_ratio = |scene: &&[Outcome]| {
            Some(find(scene, "placer")?.ddp_s? / find(scene, "labels")?.ddp_s?)
        };
        let best = |scene: &&[Outcome]| {
            let best = scene.iter().map(|it| it.measured_s).reduce(f64::min)?;
            Some(best / step(scene, "placer")?)
        };
        let held_out: Vec<_> = outcomes.iter().filter(|it| it.placement == "random").collect();
        let predicted: Vec<_> = held_out.iter().map(|it| it.predicted_s).collect();
        let measured: Vec<_> = held_out.iter().map(|it| it.measured_s).collect();
        let errors = predicted.iter().zip(&measured).map(|(p, m)| (p / m - 1.0).abs());
        Self {
            saved: median(flawed.iter().filter_map(ratio)).map(|ratio| 1.0 - ratio),
            ddp_saved: median(flawed.iter().filter_map(ddp_ratio)).map(|ratio| 1.0 - ratio),
            of_best: median(flawed.iter().filter_map(best)),
            uniform: median(uniform.iter().filter_map(ratio)),
            held_out: held_out.len(),
            spearman: correlation(&ranked(&predicted), &ranked(&measured)),
            error: mean(errors),
        }
    }

    /// Returns whether all figures exist and are within their bounds.
    pub(crate) fn holds(&self) -> bool {
        self.saved.is_some_and(|saved| saved >= LEAST_SAVED)
            && self.ddp_saved.is_none_or(|saved| saved >= LEAST_SAVED)
            && self.of_best.is_some_and(|share| share >= LEAST_OF_BEST)
            && self.uniform.is_some_and(|ratio| ratio <= MOST_UNIFORM)
            && self.held_out >= LEAST_HELD_OUT
            && self.spearman.is_some_and(|spearman| spearman >= LEAST_SPEARMAN)
            && self.error.is_some_and(|error| error <= MOST_ERROR)
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |value: Option<f64>| {
            value.map_or_else(|| "none".to_owned(), |value| format!("{value:.3}"))
        };
        writeln!(
            f,
            "saved against a best fit by labels (median, at least {LEAST_SAVED}): {}",
            number(self.saved)
        )?;
        writeln!(f, "the same of DDP's steps: {}", number(self.ddp_saved))?;
        writeln!(
            f,
            "best step tried / placer's (median, at least {LEAST_OF_BEST}): {}",
            number(self.of_best)
        )?;
        writeln!(
            f,
            "uniform: placer's step / best fit's (median, at most {MOST_UNIFORM}): {}",
            number(self.uniform)
        )?;
        writeln!(
            f,
            "{} held-out placements (at least {LEAST_HELD_OUT}): Spearman (at least \
             {LEAST_SPEARMAN}) {}, mean error (at most {MOST_ERROR}) {}",
            self.held_out,
            number(self.spearman),
            number(self.error)
        )
    }
}

fn find<'a>(scene: &'a [Outcome], placement: &str) -> Option<&'a Outcome> {
    scene.iter().find(|outcome| outcome.placement == placement)
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    crate::stats::Summary::of(&values.collect::<Vec<_>>()).map(|summary| summary.median)
}

#[expect(clippy::cast_precision_loss, reason = "few values")]
fn mean(values: impl ExactSizeIterator<Item = f64>) -> Option<f64> {
    let count = values.len();
    (count > 0).then(|| values.sum::<f64>() / count as f64)
}

/// Returns the rank of each value; equal values have the mean of their ranks.
fn ranked(values: &[f64]) -> Vec<f64> {
    let below = |value: f64| values.iter().filter(|other| **other < value).count();
    let equal = |value: f64| values.iter().filter(|other| **other == value).count();
    #[expect(clippy::cast_precision_loss, reason = "few values")]
    let rank = |value: &f64| below(*value) as f64 + (equal(*value) as f64 - 1.0) / 2.0;
    values.iter().map(rank).collect()
}

/// Returns Pearson's correlation. Of ranks, that is Spearman's.
fn correlation(one: &[f64], other: &[f64]) -> Option<f64> {
    let (mean_one, mean_other) = (mean(one.iter().copied())?, mean(other.iter().copied())?);
    let sum = |products: &mut dyn Iterator<Item = f64>| products.sum::<f64>();
    let pairs = one.iter().zip(other);
    let both = sum(&mut pairs.map(|(a, b)| (a - mean_one) * (b - mean_other)));
    let square = |values: &[f64], mean: f64| values.iter().map(|v| (v - mean).powi(2)).sum::<f64>();
    let scale = (square(one, mean_one) * square(other, mean_other)).sqrt();
    (scale > 0.0).then(|| both / scale)
}

const LEAST_SAVED: f64 = 0.2;
const LEAST_OF_BEST: f64 = 0.95;
const MOST_UNIFORM: f64 = 1.02;
const LEAST_HELD_OUT: usize = 40;
const LEAST_SPEARMAN: f64 = 0.9;
const MOST_ERROR: f64 = 0.15;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_equal_values_are_their_mean() {
        assert_eq!(ranked(&[3.0, 1.0, 3.0, 2.0]), [2.5, 0.0, 2.5, 1.0]);
    }

    #[test]
    fn the_correlation_of_ranks_ignores_the_scale() {
        let (one, other) = ([1.0, 2.0, 3.0, 4.0], [1.0, 10.0, 100.0, 1000.0]);
        assert_eq!(correlation(&ranked(&one), &ranked(&other)), Some(1.0));
        let turned: Vec<_> = other.iter().rev().copied().collect();
        assert_eq!(correlation(&ranked(&one), &ranked(&turned)), Some(-1.0));
        assert_eq!(correlation(&[1.0, 1.0], &[1.0, 2.0]), None);
        // Without ties: 1 - 6 * (1 + 1) / (4 * 15).
        let near = correlation(&[0.0, 1.0, 2.0, 3.0], &[1.0, 0.0, 2.0, 3.0]).unwrap();
        assert!((near - 0.8).abs() < 1e-12);
    }

    #[test]
    fn a_summary_compares_placements_of_the_same_scene() {
        let outcome = |scene, flaw: &str, placement, predicted_s, measured_s| Outcome {
            scene,
            flaw: flaw.into(),
            placement,
            ranks: vec![],
            aggregator: 0,
            predicted_s,
            measured_s,
            ddp_s: (flaw != "uniform").then_some(2.0 * measured_s),
        };
        let mut outcomes = vec![
            outcome(0, "h1 slow", "placer", 1.0, 1.0),
            outcome(0, "h1 slow", "labels", 2.0, 2.0),
            outcome(1, "uniform", "placer", 1.0, 1.01),
            outcome(1, "uniform", "labels", 1.0, 1.0),
        ];
        for _ in 0..LEAST_HELD_OUT / 2 {
            outcomes.insert(2, outcome(0, "h1 slow", "random", 1.2, 1.0));
            outcomes.insert(2, outcome(0, "h1 slow", "random", 4.0, 4.0));
        }
        let summary = Summary::of(&outcomes);
        assert_eq!(
            (summary.saved, summary.ddp_saved, summary.of_best, summary.uniform),
            (Some(0.5), Some(0.5), Some(1.0), Some(1.01))
        );
        assert!((summary.error.unwrap() - 0.1).abs() < 1e-12);
        assert!(summary.holds());
        outcomes.remove(2);
        assert!(!Summary::of(&outcomes).holds(), "too few placements test the predictions");
    }
}
