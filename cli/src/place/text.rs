//! A plan as text for people.

use std::ops::Range;

use racksum_placer::explain::Explanation;
use racksum_proto::counted::counted;

use super::Planned;
use super::words::{self, Words, millis};

/// Returns a plan as lines of text.
pub(super) fn of(planned: &Planned<'_>) -> String {
    let Planned { topology, job, plan, .. } = planned;
    let words = Words(topology);
    let hosts: Vec<_> = plan.placement.hosts().collect();
    let mut lines = vec![
        format!(
            "job {}: {} and {} on {} of {}, in {}",
            job.name,
            counted(job.ranks, "rank"),
            counted(job.aggregators, "aggregator"),
            hosts.len(),
            counted(topology.hosts().len() as u64, "host"),
            words.domain(plan.domain)
        ),
        format!(
            "step {}, {} to {} given the uncertainty of the rates",
            millis(plan.time.total_s()),
            millis(plan.range_s.0),
            millis(plan.range_s.1)
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
    if let Some(explanation) = &planned.explanation {
        lines.extend(explain(planned, explanation));
    }
    lines.join("\n")
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

/// Formats rows under headings. Columns are separated by two spaces.
fn table<const N: usize>(headings: [&str; N], rows: Vec<[String; N]>) -> Vec<String> {
    let rows: Vec<_> = std::iter::once(headings.map(Into::into)).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..N).map(|column| width(column).unwrap_or(0)).collect();
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}
