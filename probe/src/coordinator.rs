//! The coordinator: measures all paths within a budget, and infers the network.

use std::sync::Arc;

use racksum_placer::inventory::Inventory;
use racksum_placer::network::{Measurement, Network, PairRecord};
use racksum_placer::survey::{Sample, fit, found_tree, misplaced, passed};
use racksum_placer::topology::Topology;

use crate::outcome::{MeasureError, Options, Outcome, WrongLabel};
use crate::survey::Survey;

/// Measures the paths between the hosts of an inventory. Calls `progress` with the number of rounds
/// that are done, and of all.
///
/// # Errors
///
/// If the inventory is inconsistent, two hosts have the same agent, an agent serves another
/// coordinator, or no pair of hosts could be measured.
///
/// # Panics
///
/// Panics outside a tokio runtime.
pub async fn measure(
    inventory: &Inventory,
    options: &Options,
    progress: impl Fn(usize, usize),
) -> Result<Outcome, MeasureError> {
    let mut survey = Survey::connect(Topology::new(inventory)?, options).await?;
    survey.measure_pairs(&progress).await;
    let (topology, samples) = (Arc::clone(survey.topology()), survey.samples());
    if samples.is_empty() {
        let failed = survey.failures();
        survey.finish().await;
        return Err(MeasureError::Nothing { failed });
    }
    let places = move || (found_tree(&topology, &samples), wrong_labels(&topology, &samples));
    let (tree, wrong_labels) = survey.compute(places).await;
    let has_unknown_racks = inventory.levels.is_empty() && survey.is_mostly_unaffordable();
    let tree = tree.filter(|_| !has_unknown_racks);
    if let Some(tree) = &tree {
        survey.move_to(Topology::new(&inventory.clone().placed_by(tree))?);
    }
    let contended = survey.measure_uplinks().await;
    survey.measure_again(&contended).await;
    let (topology, samples) = (Arc::clone(survey.topology()), survey.samples());
    let inferred =
        move || (fit(&topology, &samples, &contended), passed(&topology, &samples, &contended));
    let (network, passed) = survey.compute(inferred).await;
    let mut network = Network { tree, ..network };
    let mut outcome = survey.finish().await;
    outcome.passed = passed;
    network.pairs.extend(outcome.dead.iter().flat_map(|(one, other)| {
        [(one, other), (other, one)].map(|(from, to)| dead_path(from, to))
    }));
    (outcome.network, outcome.wrong_labels) = (network, wrong_labels);
    outcome.has_unknown_racks = has_unknown_racks;
    Ok(outcome)
}

fn wrong_labels(topology: &Topology, samples: &[Sample]) -> Vec<WrongLabel> {
    let wrong = misplaced(topology, samples).into_iter().map(|found| WrongLabel {
        host: topology.host(found.host).name.clone(),
        labelled: topology.name(found.labelled).into(),
        measured: topology.name(found.measured).into(),
        ratio: found.ratio,
    });
    wrong.collect()
}

/// Returns the record of a path that no ping passed.
fn dead_path(from: &str, to: &str) -> PairRecord {
    let path = Measurement {
        mbit: 0.0,
        loss: 1.0,
        age_s: 0.0,
        confidence: 1.0,
        is_inferred: false,
        is_least: false,
    };
    PairRecord { from: from.into(), to: to.into(), path, rtt_us: None, rtt_p99_us: None }
}
