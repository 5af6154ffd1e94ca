//! A plan as text for people.

use std::ops::Range;

use racksum_placer::explain::Explanation;
use racksum_placer::rebalance::Rebalance;
use racksum_proto::counted::counted;

use super::Planned;
use super::words::{self, Words, millis};
use crate::table::table;

/// Returns a plan as lines of text.
pub(super) fn of(planned: &Planned<'_>) -> String {
    let Planned { topology, job, plan, .. } = planned;
    let words = Words(topology);
    let hosts: Vec<_> = plan.placement.hosts().collect();
    let mut lines = vec![
        format!(
            "job {}: {} and {} of {} on {} of {}, in {}",
            job.name,
            counted(job.ranks, "rank"),
            counted(plan.placement.aggregators.iter().sum::<u32>(), "aggregator"),
            counted(planned.shards, "shard"),
            hosts.len(),
            counted(topology.hosts().len() as u64, "host"),
            words.domain(plan.domain)
        ),
        format!(
            "step {}, {} to {} given the uncertainty of the rates",
            millis(plan.time.total_s()),
            millis(planned.range_s.0),
            millis(planned.range_s.1)
        ),
        format!(
            "no placement in {} takes less than {}{}",
            words.domain(plan.domain),
            millis(plan.bound_s),
            plan.gap().map_or_else(String::new, |gap| format!(": gap {:.1} %", gap * 100.0))
        ),
    ];
    lines.extend(plan.time.bottleneck.text(topology).map(|link| format!("limited by {link}")));
    lines.push(String::new());
    let rows = hosts.into_iter().map(|(host, ranks, aggregators)| {
        [
            topology.host(host).name.clone(),
            topology.name(topology.domain_of(host)).into(),
            numbers(ranks),
            aggregators.to_string(),
        ]
    });
    lines.extend(table(["host", "domain", "rank numbers", "aggregators"], rows.collect()));
    if let Some(tree) = plan.tree.as_ref().filter(|tree| !tree.racks.is_empty()) {
        lines.push(String::new());
        let root = &topology.host(tree.root).name;
        lines.extend(tree.racks.iter().map(|rack| {
            let (of, host) = (topology.name(topology.domain_of(*rack)), topology.host(*rack));
            format!("aggregator of {of}: {}, with parent {root}", host.name)
        }));
    }
    if !plan.standbys.is_empty() {
        lines.push(String::new());
    }
    lines.extend((1..).zip(&plan.standbys).map(|(number, standby)| {
        let hosts = standby.hosts().map(|(host, aggregators)| match aggregators {
            1 => topology.host(host).name.clone(),
            _ => format!("{} ({aggregators} aggregators)", topology.host(host).name),
        });
        let hosts: Vec<_> = hosts.collect();
        let step = millis(standby.time.total_s());
        format!("standby {number}: {}; step {step} once it has taken over", hosts.join(", "))
    }));
    if let Some(rebalance) = &planned.rebalance {
        lines.push(String::new());
        lines.extend(moves(planned, rebalance));
    }
    if let Some(explanation) = &planned.explanation {
        lines.extend(explain(planned, explanation));
    }
    lines.join("\n")
}

fn moves(planned: &Planned<'_>, rebalance: &Rebalance) -> Vec<String> {
    let topology = planned.topology;
    let mut lines = vec![];
    if !rebalance.is_allowed {
        lines.push("the job does not allow its present placement any more".into());
    }
    let proposals = [
        ("moves of aggregators, while the job runs", &rebalance.aggregators),
        ("moves of ranks, which restart the job", &rebalance.ranks),
    ];
    for (title, proposal) in proposals {
        let Some(proposal) = proposal else {
            lines.push(format!("no {title}: none saves enough"));
            continue;
        };
        let step = millis(proposal.time.total_s());
        lines.push(format!("{title}: step {step} (-{:.1} %)", proposal.saving * 100.0));
        let aggregators = proposal.aggregator_moves.iter().map(|moved| (moved, "aggregator"));
        let ranks = proposal.rank_moves.iter().map(|moved| (moved, "rank"));
        lines.extend(aggregators.chain(ranks).map(|(moved, noun)| {
            let [from, to] = [moved.from, moved.to].map(|host| &topology.host(host).name);
            format!("  {} from {from} to {to}", counted(moved.count, noun))
        }));
    }
    lines
}

fn explain(planned: &Planned<'_>, explanation: &Explanation) -> Vec<String> {
    let Planned { topology, plan, .. } = planned;
    let (words, now_s) = (Words(topology), plan.time.total_s());
    let mut lines = vec![String::new()];
    let hosts = topology.hosts().iter().zip(&explanation.hosts);
    let hosts = hosts.map(|(host, reason)| [host.name.clone(), words::reason(reason, now_s)]);
    lines.extend(table(["host", "reason"], hosts.collect()));
    if !explanation.domains.is_empty() {
        lines.push(String::new());
        let domains = explanation.domains.iter();
        let domains = domains.map(|(domain, alternative)| {
            [words.domain(*domain), words::alternative(*alternative, now_s)]
        });
        lines.extend(table(["domain", "instead"], domains.collect()));
    }
    lines.push(String::new());
    if explanation.helps.is_empty() {
        lines.push("no single change saves 5 % of the step".into());
    }
    lines.extend(explanation.helps.iter().map(|help| {
        let change = words.change(help.change);
        format!("{change}: step {} (-{:.0} %)", millis(help.step_s), help.saving * 100.0)
    }));
    lines
}

/// Formats rank numbers as a range.
pub(super) fn numbers(ranks: Range<u32>) -> String {
    match ranks.len() {
        0 => "-".into(),
        1 => ranks.start.to_string(),
        _ => format!("{}-{}", ranks.start, ranks.end - 1),
    }
}
