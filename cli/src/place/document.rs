//! A plan as JSON. docs/placement.md lists the keys.

use racksum_placer::explain::Explanation;
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
    hosts: Vec<Host<'a>>,
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
    let hosts = plan.placement.hosts().map(|(host, ranks, aggregators)| Host {
        host: &topology.host(host).name,
        domain: topology.name(topology.domain_of(host)),
        ranks: ranks.collect(),
        aggregators,
    });
    let document = Document {
        job: &planned.job.name,
        domain: topology.name(plan.domain),
        step_s: plan.time.total_s(),
        step_least_s: plan.range_s.0,
        step_greatest_s: plan.range_s.1,
        bound_s: plan.bound_s,
        gap: plan.gap(),
        bottleneck: plan.time.bottleneck.text(topology),
        hosts: hosts.collect(),
        explain: planned.explanation.as_ref().map(|explanation| explain(planned, explanation)),
    };
    serde_json::to_string(&document).expect("numbers and texts have a form in JSON")
}

fn explain<'a>(planned: &Planned<'a>, explanation: &Explanation) -> Explain<'a> {
    let topology = planned.topology;
    let (words, now_s) = (Words(topology), planned.plan.time.total_s());
    let hosts = topology.hosts().iter().zip(&explanation.hosts);
    let domains = explanation.domains.iter();
    let helps = explanation.helps.iter();
    Explain {
        hosts: hosts
            .map(|(host, reason)| Reason { of: &host.name, reason: words::reason(reason, now_s) })
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
