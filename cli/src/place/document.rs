//! A plan as JSON. docs/placement.md lists the keys.

use racksum_placer::explain::Explanation;
use racksum_placer::placement::{Placement, RankNumbers};
use racksum_placer::racks::Tree;
use racksum_placer::rebalance;
use racksum_placer::standby;
use racksum_placer::topology::{HostId, Topology};
use serde::Serialize;

use super::Planned;
use super::words::{self, Words};

#[derive(Serialize)]
struct Document<'a> {
    job: &'a str,
    /// The path of the domain that the job stays in. Empty for the whole cluster.
    domain: &'a str,
    step_s: f64,
    step_least_s: f64,
    step_greatest_s: f64,
    bound_s: f64,
    gap: Option<f64>,
    bottleneck: Option<String>,
    /// The shards of each aggregator.
    shards: u32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
    hosts: Vec<Host<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    racks: Vec<RackAggregator<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    standbys: Vec<Standby<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rebalance: Option<Rebalance<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    explain: Option<Explain<'a>>,
}

#[derive(Serialize)]
struct Host<'a> {
    host: &'a str,
    domain: &'a str,
    ranks: Vec<u32>,
    aggregators: u32,
}

/// An aggregator that serves one rack, and the host of its parent.
#[derive(Serialize)]
struct RackAggregator<'a> {
    host: &'a str,
    domain: &'a str,
    parent: &'a str,
}

/// The moves of a running job that save enough.
#[derive(Serialize)]
struct Rebalance<'a> {
    /// Whether the job allows its present placement.
    is_allowed: bool,
    /// Whether the job has all its standbys, and each is on hosts that the job allows.
    are_standbys_allowed: bool,
    /// Moves of aggregators alone.
    aggregators: Option<Proposal<'a>>,
    /// Moves of ranks too.
    ranks: Option<Proposal<'a>>,
    /// Other standbys.
    standbys: Option<StandbyProposal<'a>>,
}

#[derive(Serialize)]
struct StandbyProposal<'a> {
    saving: f64,
    standbys: Vec<Standby<'a>>,
}

#[derive(Serialize)]
struct Proposal<'a> {
    step_s: f64,
    saving: f64,
    aggregator_moves: Vec<Move<'a>>,
    rank_moves: Vec<Move<'a>>,
    hosts: Vec<Host<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    racks: Vec<RackAggregator<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    standbys: Vec<Standby<'a>>,
}

#[derive(Serialize)]
struct Move<'a> {
    from: &'a str,
    to: &'a str,
    count: u32,
}

/// A set of aggregators that can take over, and the step time with it.
#[derive(Serialize)]
struct Standby<'a> {
    step_s: f64,
    hosts: Vec<AggregatorHost<'a>>,
}

#[derive(Serialize)]
struct AggregatorHost<'a> {
    host: &'a str,
    domain: &'a str,
    aggregators: u32,
}

#[derive(Serialize)]
struct Explain<'a> {
    hosts: Vec<Reason<'a>>,
    domains: Vec<Reason<'a>>,
    helps: Vec<Help>,
}

/// The reason why a host or domain is used or not.
#[derive(Serialize)]
struct Reason<'a> {
    of: &'a str,
    reason: String,
}

#[derive(Serialize)]
struct Help {
    change: String,
    step_s: f64,
    saving: f64,
}

/// Returns a plan as one JSON object.
pub(super) fn of(planned: &Planned<'_>) -> String {
    let Planned { topology, plan, .. } = planned;
    let document = Document {
        job: &planned.job.name,
        domain: topology.name(plan.domain),
        step_s: plan.time.total_s(),
        step_least_s: planned.range_s.0,
        step_greatest_s: planned.range_s.1,
        bound_s: plan.bound_s,
        gap: plan.gap(),
        bottleneck: plan.time.bottleneck.text(topology),
        shards: planned.shards,
        notes: planned.notes.iter().map(ToString::to_string).collect(),
        hosts: hosts_of(topology, &plan.placement, &planned.rank_numbers),
        racks: racks_of(topology, plan.tree.as_ref()),
        standbys: standbys_of(topology, &plan.standbys),
        rebalance: planned.rebalance.as_ref().map(|found| Rebalance {
            is_allowed: found.is_allowed,
            are_standbys_allowed: found.are_standbys_allowed,
            aggregators: found.aggregators.as_ref().map(|found| proposal_of(planned, found)),
            ranks: found.ranks.as_ref().map(|found| proposal_of(planned, found)),
            standbys: found.standbys.as_ref().map(|found| StandbyProposal {
                saving: found.saving,
                standbys: standbys_of(topology, &found.standbys),
            }),
        }),
        explain: planned.explanation.as_ref().map(|explanation| explain(planned, explanation)),
    };
    serde_json::to_string(&document).expect("numbers and texts have a form in JSON")
}

fn hosts_of<'a>(
    topology: &'a Topology,
    placement: &Placement,
    rank_numbers: &RankNumbers,
) -> Vec<Host<'a>> {
    let hosts = placement.hosts().map(|(host, _, aggregators)| Host {
        host: &topology.host(host).name,
        domain: topology.name(topology.domain_of(host)),
        ranks: rank_numbers.get(&host).cloned().unwrap_or_default(),
        aggregators,
    });
    hosts.collect()
}

fn proposal_of<'a>(planned: &Planned<'a>, proposal: &rebalance::Proposal) -> Proposal<'a> {
    let topology = planned.topology;
    // Ranks that stay keep their numbers; a job that restarts gets new ones.
    let rank_numbers = match proposal.rank_moves[..] {
        [] => planned.rank_numbers.clone(),
        _ => proposal.placement.rank_numbers(),
    };
    let moves = |moves: &[rebalance::Move]| {
        let name = |host| topology.host(host).name.as_str();
        let moves = moves.iter();
        let moves = moves.map(|moved| Move {
            from: name(moved.from),
            to: name(moved.to),
            count: moved.count,
        });
        moves.collect()
    };
    Proposal {
        step_s: proposal.time.total_s(),
        saving: proposal.saving,
        aggregator_moves: moves(&proposal.aggregator_moves),
        rank_moves: moves(&proposal.rank_moves),
        hosts: hosts_of(topology, &proposal.placement, &rank_numbers),
        racks: racks_of(topology, proposal.tree.as_ref()),
        standbys: standbys_of(topology, &proposal.standbys),
    }
}

fn racks_of<'a>(topology: &'a Topology, tree: Option<&Tree>) -> Vec<RackAggregator<'a>> {
    let Some(tree) = tree else { return vec![] };
    let aggregator = |rack: &HostId| RackAggregator {
        host: &topology.host(*rack).name,
        domain: topology.name(topology.domain_of(*rack)),
        parent: &topology.host(tree.root).name,
    };
    tree.racks.iter().map(aggregator).collect()
}

fn standbys_of<'a>(topology: &'a Topology, standbys: &[standby::Standby]) -> Vec<Standby<'a>> {
    let standby_of = |standby: &standby::Standby| {
        let hosts = standby.hosts().map(|(host, aggregators)| AggregatorHost {
            host: &topology.host(host).name,
            domain: topology.name(topology.domain_of(host)),
            aggregators,
        });
        Standby { step_s: standby.time.total_s(), hosts: hosts.collect() }
    };
    standbys.iter().map(standby_of).collect()
}

fn explain<'a>(planned: &Planned<'a>, explanation: &Explanation) -> Explain<'a> {
    let topology = planned.topology;
    let (words, now_s) = (Words(topology), planned.plan.time.total_s());
    let hosts = topology.hosts().iter().zip(&explanation.hosts);
    let domains = explanation.domains.iter();
    let helps = explanation.helps.iter();
    Explain {
        hosts: hosts
            .map(|(host, reason)| Reason { of: &host.name, reason: words.reason(reason, now_s) })
            .collect(),
        domains: domains
            .map(|(domain, alternative)| Reason {
                of: topology.name(*domain),
                reason: words::alternative(*alternative, now_s),
            })
            .collect(),
        helps: helps
            .map(|help| Help {
                change: words.change(help.change),
                step_s: help.step_s,
                saving: help.saving,
            })
            .collect(),
    }
}
