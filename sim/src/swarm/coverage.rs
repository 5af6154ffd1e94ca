//! The coverage of a swarm: how many seeds had each feature. A feature that no seed has stays
//! untested, however many seeds run.

use std::collections::BTreeMap;

use racksum_proto::descriptor::Descriptor;
use racksum_proto::wire::Header;

use crate::engine::Picos;
use crate::fault::{Effect, Leg, Rule};
use crate::host::Host;
use crate::inputs::Values;
use crate::plan::{Absence, JobPlan, Move, OpPlan, Plan};
use crate::run::Totals;

/// The number of seeds that had each feature, by the feature's name.
pub type Coverage = BTreeMap<String, u64>;

/// Returns the features of a run and its plan, each once.
pub(super) fn features(plan: &Plan, totals: &Totals) -> Vec<String> {
    let of_ops = plan.jobs.iter().flat_map(|job| &job.ops).map(|op| op.descriptor);
    let kinds = of_ops.flat_map(|descriptor| {
        let Descriptor { dtype, wire, reduction, .. } = descriptor;
        [
            format!("dtype {}", dtype.name()),
            format!("wire {}", wire.name()),
            format!("reduction {}", reduction.name()),
        ]
    });
    let has = of_plan(plan).into_iter().chain(of_run(totals)).filter(|(_, has)| *has);
    let mut features: Vec<_> = has.map(|(name, _)| name.to_owned()).chain(kinds).collect();
    features.sort_unstable();
    features.dedup();
    features
}

/// A feature's name, and whether the plan or run has it.
type Feature = (&'static str, bool);

fn of_plan(plan: &Plan) -> Vec<Feature> {
    let ops = plan.jobs.iter().flat_map(|job| &job.ops);
    let mut features = of_network(plan);
    features.extend(plan.jobs.iter().flat_map(of_job));
    features.extend(ops.flat_map(of_op));
    features
}

fn of_network(plan: &Plan) -> Vec<Feature> {
    let network = &plan.network;
    let rule = |is: &dyn Fn(&Rule) -> bool| plan.faults.iter().any(is);
    let lost = |leg, least| {
        rule(&|rule| {
            let chance = (least..1_000_000).contains(&rule.chance_ppm);
            rule.to.leg == Some(leg) && rule.effect == Effect::Drop && chance
        })
    };
    let paused = |is: fn(Host) -> bool| plan.pauses.iter().any(|pause| is(pause.host));
    let is_worker = |host| matches!(host, Host::Worker { .. });
    vec![
        ("several jobs", plan.jobs.len() > 1),
        ("several shards", network.shards > 1),
        ("several aggregators", network.shards > 1 && network.own_numbers),
        ("multicast", network.multicast),
        ("copies to each rank", !network.multicast),
        ("loss up", lost(Leg::Up, 1)),
        ("loss down", lost(Leg::Down, 1)),
        ("loss over 10 %", lost(Leg::Up, 100_000) || lost(Leg::Down, 100_000)),
        ("loss over 25 %", lost(Leg::Up, 250_000) || lost(Leg::Down, 250_000)),
        ("outage", rule(&|rule| rule.chance_ppm == 1_000_000 && rule.effect == Effect::Drop)),
        ("host cut off", rule(&|rule| rule.to.leg.is_none() && rule.effect == Effect::Drop)),
        ("aggregator dies", !plan.moves.is_empty()),
        ("aggregators die one after the other", plan.moves.len() > 1),
        ("ranks move one by one", plan.moves.iter().any(|it| it.spread > Picos::ZERO)),
        ("aggregator dies before all ranks have joined", plan.moves.windows(2).any(joins_late)),
        ("job moves without a standby", plan.prepares && !plan.moves.is_empty()),
        ("move cancelled", plan.prepares && plan.cancels > 0 && !plan.moves.is_empty()),
        ("duplicates", rule(&|rule| matches!(rule.effect, Effect::Copy(_)))),
        ("duplicates among later ops", rule(&|rule| copies_late(rule))),
        ("reordering", rule(&|rule| matches!(rule.effect, Effect::Delay(_)))),
        ("rank paused", paused(is_worker)),
        ("shard paused", paused(|host| matches!(host, Host::Shard(_)))),
        ("strangers", plan.noise > 0),
        ("send buffers that fill", network.worker.send_buffer < usize::MAX),
    ]
}

fn of_run(totals: &Totals) -> Vec<Feature> {
    vec![
        ("queue or socket overflowed", totals.dropped > 0),
        ("congestion marks", totals.marked > 0),
        ("sent again", totals.again > 0),
        ("arrived twice", totals.duplicates > 0),
        ("gap nacked", totals.asks > totals.probes),
        ("probed", totals.probes > 0),
    ]
}

fn of_job(job: &JobPlan) -> Vec<Feature> {
    let datagram = job.cut.payload() + Header::LEN;
    let absence = job.missing.map(|missing| missing.absence);
    vec![
        ("world of 1", job.world == 1),
        ("world of 2 to 8", (2..=8).contains(&job.world)),
        ("world of 9 to 16", (9..=16).contains(&job.world)),
        ("world of 17 to 64", job.world > 16),
        ("several lanes", job.lanes > 1),
        ("pool of 1 slot", job.pool_slots == 1),
        ("pool of 2 to 4 slots", (2..=4).contains(&job.pool_slots)),
        ("several ops in flight", job.max_ops > 1 && job.ops.len() > 1),
        ("MTU of 1280", datagram <= 1280),
        ("jumbo frames", (1501..=9000).contains(&datagram)),
        ("datagrams of 64 KB", datagram > 65_000),
        ("missing rank that calls too few ops", matches!(absence, Some(Absence::Calls(_)))),
        ("missing rank that dies", matches!(absence, Some(Absence::Dies(_)))),
    ]
}

fn of_op(op: &OpPlan) -> Vec<Feature> {
    let differs = |is: &dyn Fn(&Descriptor) -> bool| op.odd.is_some_and(|(_, odd)| is(&odd));
    let own = op.descriptor;
    let late = op.starts.iter().max().zip(op.starts.iter().min());
    vec![
        ("disagreement about the size", differs(&|odd| odd.elements != own.elements)),
        ("disagreement about the lane", differs(&|odd| odd.lane != own.lane)),
        (
            "disagreement about something else",
            differs(&|odd| (odd.elements, odd.lane) == (own.elements, own.lane)),
        ),
        ("no elements", own.elements == 0),
        ("all blocks zero", op.inputs.density_ppm == 0),
        ("NaNs and infinities", op.inputs.values == Values::Wild),
        ("straggler", late.is_some_and(|(last, first)| last.since(*first).as_micros() > 20_000)),
    ]
}

/// Returns whether, of two moves, the second begins before all ranks have ended the first.
fn joins_late(moves: &[Move]) -> bool {
    matches!(moves, [first, second] if second.at < first.at + first.length())
}

/// Returns whether copies may arrive so late that ops have ended by then.
fn copies_late(rule: &Rule) -> bool {
    matches!(&rule.effect, Effect::Copy(late) if late.end.as_micros() > 20_000)
}

#[cfg(test)]
mod tests {
    use racksum_proto::dtype::{DType, Reduction, WireType};

    use super::*;
    use crate::swarm::plan;

    #[test]
    fn a_thousand_seeds_try_every_feature() {
        let mut seen: BTreeMap<&str, bool> = BTreeMap::new();
        let mut kinds = Coverage::new();
        for seed in 0..1_000 {
            let plan = plan(seed);
            for (name, has) in of_plan(&plan) {
                *seen.entry(name).or_default() |= has;
            }
            let features = features(&plan, &Totals::default()).into_iter();
            kinds.extend(features.filter(|name| !seen.contains_key(&**name)).map(|name| (name, 1)));
        }
        let missing: Vec<_> = seen.iter().filter(|(_, has)| !**has).collect();
        assert!(missing.is_empty(), "no plan has these features: {missing:?}");
        assert_eq!(kinds.len(), DType::ALL.len() + WireType::ALL.len() + Reduction::ALL.len());
    }
}
