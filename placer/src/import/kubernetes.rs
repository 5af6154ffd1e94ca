//! Nodes of Kubernetes, as `kubectl get nodes -o json` prints them.
//!
//! **Direction**: the caller lists the labels that are levels, **widest first**, as in
//! `topology.kubernetes.io/zone`, `rack`. The reader refuses a list in the opposite order.
//!
//! CPU cores and GPUs are what nodes can allocate; what pods use is not part of a node. Taints with
//! the effects NoSchedule and NoExecute become `key=value`, or `key` if they have no value. The
//! label [`NIC_LABEL`] has the rate of the network interface.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::{Import, ImportError, ImportErrorKind, ImportedHost};
use crate::inventory::MBIT;
use crate::quantity::whole;

/// The label with the rate of a node's network interface in Mbit/s.
pub const NIC_LABEL: &str = "racksum.dev/nic-mbit";

#[derive(Deserialize)]
struct List {
    items: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    metadata: Metadata,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Deserialize)]
struct Metadata {
    name: String,
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

#[derive(Deserialize, Default)]
struct Spec {
    #[serde(default)]
    taints: Vec<Taint>,
}

#[derive(Deserialize)]
struct Taint {
    key: String,
    #[serde(default)]
    value: String,
    effect: String,
}

#[derive(Deserialize, Default)]
struct Status {
    #[serde(default)]
    allocatable: BTreeMap<String, String>,
}

/// Returns the hosts of a list of nodes, with these levels: keys of labels, widest first.
///
/// # Errors
/// If the list is malformed, a node lacks a label, or the levels are narrowest first.
pub fn read(text: &str, levels: &[String]) -> Result<Import, ImportError> {
    let list: List = serde_json::from_str(text).map_err(|error| {
        ImportErrorKind::Syntax(super::without_position(&error)).at(error.line())
    })?;
    if list.items.is_empty() {
        return Err(ImportErrorKind::Empty.nowhere());
    }
    let hosts = list.items.into_iter().map(|node| host(node, levels));
    let hosts: Vec<_> = hosts.collect::<Result<_, _>>()?;
    for (first, second) in levels.iter().zip(levels.iter().skip(1)) {
        check_order(&hosts, first, second)?;
    }
    Ok(Import { levels: levels.into(), hosts, notes: vec![] })
}

fn host(node: Node, levels: &[String]) -> Result<ImportedHost, ImportError> {
    let Node { metadata: Metadata { name, labels }, spec, status } = node;
    if let Some(level) = levels.iter().find(|level| !labels.contains_key(*level)) {
        return Err(ImportErrorKind::Unlabelled(level.clone()).of(&name));
    }
    let amount = |resource: &str| match status.allocatable.get(resource) {
        None => Ok(0),
        Some(amount) => whole(amount).ok_or_else(|| {
            ImportErrorKind::Amount { resource: resource.into(), amount: amount.clone() }.of(&name)
        }),
    };
    let mut gpus = BTreeMap::new();
    for (resource, product) in GPUS {
        let count = amount(resource)?;
        if count > 0 {
            let kind = labels.get(product).map_or(resource, String::as_str);
            gpus.insert(kind.to_owned(), count);
        }
    }
    let keeps_off = |taint: &Taint| ["NoSchedule", "NoExecute"].contains(&taint.effect.as_str());
    let taints =
        spec.taints.into_iter().filter(keeps_off).map(|taint| match taint.value.as_str() {
            "" => taint.key,
            value => format!("{}={value}", taint.key),
        });
    // A taint is often set with both effects.
    let taints: BTreeSet<_> = taints.collect();
    let cpus = amount("cpu")?;
    let nic_mbit = nic_mbit(&labels).map_err(|error| error.of(&name))?;
    Ok(ImportedHost { name, labels, nic_mbit, cpus, gpus, taints: taints.into_iter().collect() })
}

/// Returns the rate of a node's network interface in Mbit/s, if a label has it.
///
/// # Errors
/// If the label has no rate.
pub fn nic_mbit(labels: &BTreeMap<String, String>) -> Result<Option<f64>, ImportErrorKind> {
    let Some(text) = labels.get(NIC_LABEL) else { return Ok(None) };
    let mbit = text.parse().ok().filter(|mbit| MBIT.contains(mbit));
    mbit.map(Some).ok_or_else(|| ImportErrorKind::NicLabel(text.clone()))
}

/// The resources that are GPUs, each with the label that names their type.
const GPUS: [(&str, &str); 2] =
    [("nvidia.com/gpu", "nvidia.com/gpu.product"), ("amd.com/gpu", "amd.com/gpu.product-name")];

/// Refuses two levels of which the first is the narrower one: each of its values lies in one value
/// of the second, which contains several of them.
fn check_order(hosts: &[ImportedHost], first: &str, second: &str) -> Result<(), ImportError> {
    let pairs =
        hosts.iter().map(|host| (host.labels[first].as_str(), host.labels[second].as_str()));
    let pairs: BTreeSet<_> = pairs.collect();
    let mut within = BTreeMap::new();
    let mut contains: BTreeMap<&str, usize> = BTreeMap::new();
    for &(one, other) in &pairs {
        if within.insert(one, other).is_some() {
            return Ok(());
        }
        *contains.entry(other).or_default() += 1;
    }
    let example = contains.iter().find(|(_, count)| **count > 1);
    example.map_or(Ok(()), |(example, _)| {
        let (first, second, example) = (first.into(), second.into(), (*example).into());
        Err(ImportErrorKind::Reversed { first, second, example }.nowhere())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODES: &str = r#"{"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "Node",
         "metadata": {"name": "gpu-1", "uid": "x", "labels": {
            "kubernetes.io/hostname": "gpu-1", "topology.kubernetes.io/zone": "a", "rack": "r1",
            "racksum.dev/nic-mbit": "100000", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}},
         "spec": {"taints": [
            {"key": "nvidia.com/gpu", "effect": "NoSchedule", "value": "present"},
            {"key": "nvidia.com/gpu", "effect": "NoExecute", "value": "present"},
            {"key": "busy", "effect": "PreferNoSchedule"}]},
         "status": {"capacity": {"cpu": "64", "nvidia.com/gpu": "8"},
                    "allocatable": {"cpu": "63500m", "memory": "1Gi", "nvidia.com/gpu": "8"}}},
        {"metadata": {"name": "cpu-1",
                      "labels": {"topology.kubernetes.io/zone": "a", "rack": "r2"}},
         "spec": {"taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]},
         "status": {"allocatable": {"cpu": "32"}}}
    ]}"#;

    fn levels(keys: &[&str]) -> Vec<String> {
        keys.iter().map(ToString::to_string).collect()
    }

    const ZONE: &str = "topology.kubernetes.io/zone";

    #[test]
    fn nodes_become_hosts() {
        let import = read(NODES, &levels(&[ZONE, "rack"])).unwrap();
        let [gpu, cpu] = &import.hosts[..] else { panic!("two nodes") };
        assert_eq!((gpu.name.as_str(), gpu.cpus), ("gpu-1", 63));
        assert_eq!(gpu.gpus, [("NVIDIA-H100-80GB-HBM3".to_owned(), 8)].into());
        assert_eq!(gpu.taints, ["nvidia.com/gpu=present"]);
        assert_eq!((cpu.cpus, cpu.gpus.len()), (32, 0));
        assert_eq!(cpu.taints, ["node.kubernetes.io/unschedulable"]);
        let inventory = import.inventory(&["25000".parse().unwrap()]).unwrap();
        assert_eq!(inventory.levels, [ZONE, "rack"]);
        let rates = inventory.hosts.iter().map(|host| host.nic_mbit);
        assert_eq!(rates.collect::<Vec<_>>(), [100_000.0, 25_000.0]);
        // Without the label of a product, the resource is the type.
        let plain = NODES.replace(r#","nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3""#, "");
        let plain = plain.replace("nvidia.com/gpu.product", "other");
        assert_eq!(read(&plain, &[]).unwrap().hosts[0].gpus, [("nvidia.com/gpu".into(), 8)].into());
    }

    #[test]
    fn levels_in_the_opposite_order_are_refused() {
        assert_eq!(
            read(NODES, &levels(&["rack", ZONE])).unwrap_err().to_string(),
            "level \"rack\" is listed before \"topology.kubernetes.io/zone\", but \
             \"topology.kubernetes.io/zone\" is wider: \"a\" contains several values of \"rack\"; \
             list the widest level first, or leave the second out"
        );
        // Racks may have the same names in all zones.
        let labels = r#"{"topology.kubernetes.io/zone": "b", "rack": "r1"}"#;
        let more = format!(r#", {{"metadata": {{"name": "c", "labels": {labels}}}}} ]}}"#);
        let more = format!("{}{more}", NODES.trim_end().trim_end_matches("]}"));
        assert_eq!(read(&more, &levels(&[ZONE, "rack"])).unwrap().hosts.len(), 3);
    }

    #[test]
    fn lists_that_are_wrong_are_refused() {
        let why = |text: &str, keys: &[&str]| read(text, &levels(keys)).unwrap_err().to_string();
        assert_eq!(
            why(NODES, &["row"]),
            "host \"gpu-1\": it has no label \"row\"; label it, or choose another label"
        );
        assert_eq!(
            why(&NODES.replace("63500m", "6 cores"), &[]),
            "host \"gpu-1\": cpu is \"6 cores\"; racksum reads numbers, as in 64 or 63500m"
        );
        for rate in ["100G", "0", "NaN"] {
            assert_eq!(
                why(&NODES.replace("\"100000\"", &format!("\"{rate}\"")), &[]),
                format!(
                    "host \"gpu-1\": the label racksum.dev/nic-mbit is \"{rate}\"; give a number \
                     of Mbit/s from 0.001 to 1e9"
                )
            );
        }
        assert_eq!(why("{}", &[]), "line 1: missing field `items`");
        assert_eq!(why(r#"{"items": []}"#, &[]), "the file lists no hosts");
        for end in 0..NODES.len() {
            read(&NODES[..end], &[]).unwrap_err();
        }
    }
}
