//! The reasons for a plan in words.

use racksum_placer::explain::{Alternative, Change, Reason};
use racksum_placer::network::Bottleneck;
use racksum_placer::topology::{Topology, VertexId};
use racksum_proto::counted::counted;

/// The names of a topology's links and domains.
pub(super) struct Words<'a>(pub(super) &'a Topology);

impl Words<'_> {
    /// Returns the name of a domain.
    pub(super) fn domain(&self, domain: VertexId) -> String {
        match self.0.name(domain) {
            "" => "the whole cluster".into(),
            name => name.into(),
        }
    }

    /// Returns why a plan uses a host or does not.
    pub(super) fn reason(&self, reason: &Reason, now_s: f64) -> String {
        match reason {
            Reason::Used => "used".into(),
            Reason::Standby(number) => format!("standby {number}"),
            Reason::Excluded(exclusion) => exclusion.to_string(),
            Reason::NoAggregator => "its rack has no aggregator of the plan".into(),
            Reason::Outside => "outside the domain of the plan".into(),
            Reason::Full(domain) => {
                format!("{} has as many ranks as the job allows", self.domain(*domain))
            }
            Reason::Dead(bottleneck) => match bottleneck.text(self.0) {
                Some(link) => format!("nothing passes {link}"),
                None => "nothing passes a path between here and an aggregator or rank".into(),
            },
            Reason::Step(step_s) => format!("a rank here: {}", compared(*step_s, now_s)),
        }
    }

    /// Returns a change that would shorten a step.
    pub(super) fn change(&self, change: Change) -> String {
        match change {
            Change::Faster(bottleneck) => {
                let ends = match bottleneck {
                    Bottleneck::None => String::new(),
                    Bottleneck::Up(vertex) | Bottleneck::Down(vertex) => {
                        format!("the link of {}", self.0.name(vertex))
                    }
                    Bottleneck::Path(one, other) => {
                        let [one, other] = [one, other].map(|host| &self.0.host(host).name);
                        format!("the path between {one} and {other}")
                    }
                };
                format!("with twice the rate of {ends}, both ways")
            }
            Change::Without(constraint) => format!("without {constraint}"),
            Change::Freed { domain, gpus, cpus } => {
                let freed = [(gpus, "more free GPU"), (cpus, "more free CPU core")];
                let freed = freed.into_iter().filter(|(count, _)| *count > 0);
                let freed: Vec<_> = freed.map(|(count, noun)| counted(count, noun)).collect();
                format!("with {} in {}", freed.join(" and "), self.domain(domain))
            }
        }
    }
}

/// Returns how well a job would do in another domain.
pub(super) fn alternative(alternative: Alternative, now_s: f64) -> String {
    match alternative {
        Alternative::Room(room) => format!("room for {}", counted(room, "rank")),
        Alternative::None => "no placement found".into(),
        Alternative::Step(step_s) => compared(step_s, now_s),
    }
}

/// Returns a step with its time in milliseconds, or that it never ends.
pub(super) fn step(time_s: f64) -> String {
    if time_s.is_finite() { format!("step {}", millis(time_s)) } else { "step never ends".into() }
}

/// Returns a time in milliseconds.
pub(super) fn millis(time_s: f64) -> String {
    let millis = time_s * 1e3;
    if millis >= 10.0 || millis == 0.0 {
        format!("{millis:.1} ms")
    } else {
        format!("{millis:.4} ms")
    }
}

/// Returns a step, and how much longer or shorter it is than the present one.
pub(super) fn compared(step_s: f64, now_s: f64) -> String {
    let percent = (step_s / now_s - 1.0) * 100.0;
    if now_s.is_finite() && (step_s - now_s).abs() <= now_s * SAME {
        "the same step".into()
    } else if now_s.is_finite() && percent.is_finite() {
        format!("{} ({percent:+.1} %)", step(step_s))
    } else {
        step(step_s)
    }
}

/// Steps that differ by less than this share would print as 0.0 % longer.
const SAME: f64 = 5e-4;
