//! A plan as text for people.

use racksum_placer::explain::Explanation;
use racksum_placer::racks::Tree;
use racksum_placer::rebalance::Rebalance;
use racksum_placer::standby::Standby;
use racksum_placer::topology::Topology;
use racksum_proto::counted::counted;

use super::Planned;
use super::words::{self, Words, millis, step};
use crate::table::table;

/// Returns a plan as lines of text.
pub(super) fn of(planned: &Planned<'_>) -> String {
    let Planned { topology, job, plan, .. } = planned;
    let words = Words(topology);
    let hosts: Vec<_> = planned.hosts().collect();
    let mut lines = vec![format!(
        "job {}: {} and {} of {} on {} of {}, in {}",
        job.name,
        counted(job.ranks, "rank"),
        counted(plan.placement.aggregators.iter().sum::<u32>(), "aggregator"),
        counted(planned.shards, "shard"),
        hosts.len(),
        counted(topology.hosts().len() as u64, "host"),
        words.domain(plan.domain)
    )];
    lines.extend(step_lines(planned));
    lines.extend(planned.notes.iter().map(|note| format!("note: {note}")));
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
        lines.extend(rack_lines(topology, tree));
    }
    if !plan.standbys.is_empty() {
        lines.push(String::new());
    }
    lines.extend(standby_lines(topology, &plan.standbys));
    if let Some(rebalance) = &planned.rebalance {
        lines.push(String::new());
        lines.extend(moves(planned, rebalance));
    }
    if let Some(explanation) = &planned.explanation {
        lines.extend(explain(planned, explanation));
    }
    lines.join("\n")
}

/// Returns the step time, its bound and what limits it.
fn step_lines(planned: &Planned<'_>) -> Vec<String> {
    let Planned { topology, plan, .. } = planned;
    let (time_s, domain) = (plan.time.total_s(), Words(topology).domain(plan.domain));
    let bottleneck = plan.time.bottleneck.text(topology);
    if !time_s.is_finite() {
        let link = bottleneck.unwrap_or_default();
        return vec![format!("{}: nothing passes {link}", step(time_s))];
    }
    let gap = plan.gap().map_or_else(String::new, |gap| format!(": gap {:.1} %", gap * 100.0));
    let mut lines = vec![
        format!(
            "{}, {} to {} given the uncertainty of the rates",
            step(time_s),
            millis(planned.range_s.0),
            millis(planned.range_s.1)
        ),
        format!("no placement in {domain} takes less than {}{gap}", millis(plan.bound_s)),
    ];
    lines.extend(bottleneck.map(|link| format!("limited by {link}")));
    lines
}

/// Returns a line for the aggregator of each rack.
fn rack_lines<'a>(topology: &'a Topology, tree: &'a Tree) -> impl Iterator<Item = String> + 'a {
    let root = &topology.host(tree.root).name;
    tree.racks.iter().map(move |rack| {
        let (of, host) = (topology.name(topology.domain_of(*rack)), topology.host(*rack));
        format!("aggregator of {of}: {}, with parent {root}", host.name)
    })
}

/// Returns a line for each standby.
fn standby_lines<'a>(
    topology: &'a Topology,
    standbys: &'a [Standby],
) -> impl Iterator<Item = String> + use<'a> {
    (1..).zip(standbys).map(|(number, standby)| {
        let hosts = standby.hosts().map(|(host, aggregators)| match aggregators {
            1 => topology.host(host).name.clone(),
            _ => format!("{} ({aggregators} aggregators)", topology.host(host).name),
        });
        let hosts: Vec<_> = hosts.collect();
        let step = step(standby.time.total_s());
        format!("standby {number}: {}; {step} once it has taken over", hosts.join(", "))
    })
}

fn moves(planned: &Planned<'_>, rebalance: &Rebalance) -> Vec<String> {
    let topology = planned.topology;
    let mut lines = vec![];
    if !rebalance.is_allowed {
        lines.push("the job does not allow its present placement any more".into());
    }
    if !rebalance.are_standbys_allowed {
        lines.push("the job does not allow its present standbys, or lacks some".into());
    }
    let of_aggregators = match &planned.plan.tree {
        Some(_) => "moves of aggregators alone, which restart a job with racks",
        None => "moves of aggregators, while the job runs",
    };
    let proposals = [
        (of_aggregators, &rebalance.aggregators),
        ("moves of ranks, which restart the job", &rebalance.ranks),
    ];
    for (title, proposal) in proposals {
        let Some(proposal) = proposal else {
            lines.push(format!("no {title}: none saves enough"));
            continue;
        };
        let step = words::compared(proposal.time.total_s(), planned.plan.time.total_s());
        lines.push(format!("{title}: {step}"));
        let aggregators = proposal.aggregator_moves.iter().map(|moved| (moved, "aggregator"));
        let ranks = proposal.rank_moves.iter().map(|moved| (moved, "rank"));
        lines.extend(aggregators.chain(ranks).map(|(moved, noun)| {
            let [from, to] = [moved.from, moved.to].map(|host| &topology.host(host).name);
            format!("  {} from {from} to {to}", counted(moved.count, noun))
        }));
        if let Some(tree) = &proposal.tree
            && proposal.tree != planned.plan.tree
        {
            lines.extend(rack_lines(topology, tree).map(indented));
        }
        if proposal.standbys != planned.plan.standbys {
            lines.extend(standby_lines(topology, &proposal.standbys).map(indented));
        }
    }
    let title = "moves of standbys, which ranks learn when they start";
    match &rebalance.standbys {
        Some(proposal) => {
            lines.push(format!("{title}:"));
            lines.extend(standby_lines(topology, &proposal.standbys).map(indented));
        }
        None if planned.job.standbys > 0 => lines.push(format!("no {title}: none saves enough")),
        None => {}
    }
    lines
}

fn explain(planned: &Planned<'_>, explanation: &Explanation) -> Vec<String> {
    let Planned { topology, plan, .. } = planned;
    let (words, now_s) = (Words(topology), plan.time.total_s());
    let mut lines = vec![String::new()];
    let hosts = topology.hosts().iter().zip(&explanation.hosts);
    let hosts = hosts.map(|(host, reason)| [host.name.clone(), words.reason(reason, now_s)]);
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
        format!("{change}: {} (-{:.0} %)", step(help.step_s), help.saving * 100.0)
    }));
    lines
}

fn indented(line: String) -> String {
    format!("  {line}")
}

/// Names the ranks of a host.
pub(super) fn rank_numbers(ranks: &[u32]) -> String {
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", numbers(ranks))
}

/// Formats ascending rank numbers as ranges.
fn numbers(ranks: &[u32]) -> String {
    let ranges = ranks.chunk_by(|one, next| one + 1 == *next).map(|range| match range {
        [rank] => rank.to_string(),
        _ => format!("{}-{}", range[0], range[range.len() - 1]),
    });
    if ranks.is_empty() { "-".into() } else { ranges.collect::<Vec<_>>().join(",") }
}
