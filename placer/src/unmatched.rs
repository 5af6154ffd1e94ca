//! Values in the constraints of a job that no host has, such as a misspelt label.

use std::collections::BTreeSet;
use std::fmt;

use crate::job::{Job, Selector, selects};
use crate::topology::Topology;

/// A value of a job that no host has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unmatched {
    /// The field of the job.
    pub field: &'static str,
    /// The value in the field.
    pub value: String,
    /// The values that hosts have, or the reason why none has it.
    pub cause: String,
}

impl fmt::Display for Unmatched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { field, value, cause } = self;
        write!(f, "`{field}` names {value}, which no host has; {cause}")
    }
}

/// Returns the values of a job's constraints that no host has.
pub(crate) fn unmatched(topology: &Topology, job: &Job) -> Vec<Unmatched> {
    let selectors = |field, selectors: &[Selector]| {
        let unmatched = selectors.iter().filter_map(|selector| {
            let is_matched = topology.hosts().iter().any(|host| selects(selector, host));
            let (value, cause) = (selector_text(selector), || cause(topology, selector));
            (!is_matched).then(|| Unmatched { field, value, cause: cause() })
        });
        unmatched.collect::<Vec<_>>()
    };
    let hosts = topology.hosts().iter();
    let gpus: BTreeSet<_> = hosts.flat_map(|host| host.gpus.keys()).collect();
    let wanted = job.gpu_type.iter().filter(|_| job.gpus_per_rank > 0);
    let gpu_type = wanted.filter(|wanted| !gpus.contains(wanted)).map(|wanted| Unmatched {
        field: "gpu_type",
        value: format!("{wanted:?}"),
        cause: known("types of GPUs", &gpus),
    });
    let taints: BTreeSet<_> = topology.hosts().iter().flat_map(|host| &host.taints).collect();
    let tolerated = job.tolerates.iter().filter(|taint| !taints.contains(taint));
    let tolerates = tolerated.map(|taint| Unmatched {
        field: "tolerates",
        value: format!("{taint:?}"),
        cause: known("taints", &taints),
    });
    let (only, except) = (selectors("only", &job.only), selectors("except", &job.except));
    only.into_iter().chain(except).chain(gpu_type).chain(tolerates).collect()
}

fn selector_text(selector: &Selector) -> String {
    let labels = selector.iter().map(|(key, value)| format!("{key} = {value:?}"));
    format!("{{ {} }}", labels.collect::<Vec<_>>().join(", "))
}

/// Returns why no host matches a selector.
fn cause(topology: &Topology, selector: &Selector) -> String {
    for (key, value) in selector {
        let one = Selector::from([(key.clone(), value.clone())]);
        if topology.hosts().iter().any(|host| selects(&one, host)) {
            continue;
        }
        if key == "host" {
            return format!("no host has the name {value:?}");
        }
        let values: BTreeSet<_> =
            topology.hosts().iter().filter_map(|host| host.labels.get(key)).collect();
        if values.is_empty() {
            let keys: BTreeSet<_> =
                topology.hosts().iter().flat_map(|host| host.labels.keys()).collect();
            return format!("no host has the label {key:?}; {}", known("labels", &keys));
        }
        return known(&format!("values of {key}"), &values);
    }
    "hosts have each of these labels, and none has all of them".into()
}

/// Names things that hosts have.
fn known(things: &str, names: &BTreeSet<&String>) -> String {
    match names.is_empty() {
        true => format!("the hosts have no {things}"),
        false => format!("the {things} are {}", few(names.iter().map(|name| name.as_str()))),
    }
}

/// Lists names, and says how many more there are beyond the first ones.
pub(crate) fn few<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let more = names.len().saturating_sub(MOST_NAMED);
    let named = names.take(MOST_NAMED).collect::<Vec<_>>().join(", ");
    if more > 0 { format!("{named} and {more} more") } else { named }
}

/// Longer lists are cut.
const MOST_NAMED: usize = 5;
