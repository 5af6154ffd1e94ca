//! The JSON of Topograph's graph engine.
//!
//! Format: <https://docs.nvidia.com/topograph/engines/graph>. Each instance lists the switches on
//! its path in `network_layers`. A name may be a hash, and is used as it is.
//!
//! **Direction**: `network_layers` begins with the switch **closest** to the instance, tier 0. An
//! import lists the levels in the opposite order, widest first: `tier2`, `tier1`, `tier0`. Other
//! sources that Topograph reads count the other way: layer 1 of AWS is the widest.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::hostlist::{HostlistError, MOST_NAMES, check_name};
use super::tree::{self, Switch};
use super::{Import, ImportError, ImportErrorKind, Place};

/// The file. It has more keys, which depend on Topograph's version.
#[derive(Deserialize)]
struct Graph {
    instances: Vec<Instance>,
}

#[derive(Deserialize)]
struct Instance {
    id: String,
    #[serde(default)]
    network_layers: Vec<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

/// Returns the hosts of a file. Their names are the instances' IDs, or the values of a label.
///
/// # Errors
/// If the file is malformed or its switches are no tree; the error names the line or the instance.
pub fn read(text: &str, name_label: Option<&str>) -> Result<Import, ImportError> {
    let graph: Graph = serde_json::from_str(text).map_err(|error| {
        ImportErrorKind::Syntax(super::without_position(&error)).at(error.line())
    })?;
    let mut switches = Switches::default();
    // Per host: the instance, and its labels.
    let mut instances: BTreeMap<String, (String, BTreeMap<String, String>)> = BTreeMap::new();
    for instance in graph.instances {
        let id = instance.id.as_str();
        let name = match name_label {
            None => id.to_owned(),
            Some(label) => {
                let missing = || ImportErrorKind::Unlabelled(label.into()).of(id);
                instance.labels.get(label).cloned().ok_or_else(missing)?
            }
        };
        if let Some((first, _)) = instances.get(&name) {
            let first = Place::Host(first.clone());
            return Err(ImportErrorKind::Duplicate { what: "host", name, first }.of(id));
        }
        switches.add(id, &name, &instance.network_layers)?;
        instances.insert(name, (instance.id, instance.labels));
    }
    let mut import = tree::import(&switches.list, |tier| format!("tier{tier}"))?;
    for host in &mut import.hosts {
        let (_, mut labels) = instances.remove(&host.name).unwrap_or_default();
        labels.append(&mut host.labels);
        host.labels = labels;
    }
    Ok(import)
}

/// The switches so far, in the order in which instances name them.
#[derive(Default)]
struct Switches {
    list: Vec<Switch>,
    indices: BTreeMap<String, usize>,
    /// The parent of each switch, and the instance that named it first.
    parents: BTreeMap<usize, (usize, String)>,
}

impl Switches {
    /// Adds an instance's path, closest switch first.
    fn add(&mut self, id: &str, host: &str, layers: &[String]) -> Result<(), ImportError> {
        for name in layers.iter().map(String::as_str).chain([host]) {
            check_name(name).map_err(|error| ImportErrorKind::from(error).of(id))?;
        }
        let path: Vec<_> = layers.iter().map(|name| self.index(id, name)).collect();
        let Some(&closest) = path.first() else { return Err(ImportErrorKind::Layers.of(id)) };
        if self.list.len() > MOST_NAMES {
            return Err(ImportErrorKind::from(HostlistError::Many(host.into())).of(id));
        }
        self.list[closest].hosts.push(host.into());
        for (&child, &parent) in path.iter().zip(path.iter().skip(1)) {
            match self.parents.get(&child) {
                None => {
                    self.parents.insert(child, (parent, id.into()));
                    let child = self.list[child].name.clone();
                    self.list[parent].children.push(child);
                }
                Some(&(other, ref first)) if other != parent => {
                    let name = |index: usize| self.list[index].name.clone();
                    let kind = ImportErrorKind::TwoParents {
                        child: name(child),
                        parent: name(parent),
                        other: name(other),
                        first: Place::Host(first.clone()),
                    };
                    return Err(kind.of(id));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    fn index(&mut self, id: &str, name: &str) -> usize {
        *self.indices.entry(name.into()).or_insert_with(|| {
            let (children, hosts, place) = (vec![], vec![], Place::Host(id.into()));
            self.list.push(Switch { name: name.into(), place, children, hosts });
            self.list.len() - 1
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRAPH: &str = r#"{"instances": [
        {"id": "i-1", "network_layers": ["leaf-a", "spine-1", "core"],
         "labels": {"accelerator.topograph.run/domain": "nvl-1", "name": "n1"}},
        {"id": "i-2", "network_layers": ["leaf-b", "spine-1", "core"], "labels": {"name": "n2"}},
        {"id": "i-3", "network_layers": ["x9d3f0ab1c2e4567", "spine-2", "core"],
         "type": "H100", "attributes": {"nvlink": "nvl-2"}}
    ]}"#;

    fn why(text: &str) -> String {
        read(text, None).unwrap_err().to_string()
    }

    #[test]
    fn the_closest_layer_is_the_last_level() {
        let import = read(GRAPH, None).unwrap();
        assert_eq!(import.levels, ["tier2", "tier1", "tier0"]);
        let host = &import.hosts[0];
        assert_eq!(host.name, "i-1");
        let labels = ["tier2", "tier1", "tier0"].map(|level| host.labels[level].as_str());
        assert_eq!(labels, ["core", "spine-1", "leaf-a"]);
        assert_eq!(host.labels["accelerator.topograph.run/domain"], "nvl-1");
        assert_eq!(import.hosts[2].labels["tier0"], "x9d3f0ab1c2e4567");
        assert_eq!(import.notes, []);
        let inventory = import.inventory(&["100000".parse().unwrap()]).unwrap();
        assert_eq!(inventory.hosts.len(), 3);
    }

    #[test]
    fn a_label_may_be_the_name() {
        let two = GRAPH.replace(r#"{"id": "i-3""#, r#"{"labels": {"name": "n3"}, "id": "i-3""#);
        let import = read(&two, Some("name")).unwrap();
        let names: Vec<_> = import.hosts.iter().map(|host| host.name.as_str()).collect();
        assert_eq!(names, ["n1", "n2", "n3"]);
        let why = read(GRAPH, Some("name")).unwrap_err().to_string();
        assert_eq!(
            why,
            "host \"i-3\": it has no label \"name\"; label it, or choose another label"
        );
    }

    #[test]
    fn paths_of_different_depth_are_noted() {
        let short = GRAPH.replace(r#"["leaf-b", "spine-1", "core"]"#, r#"["spine-1", "core"]"#);
        let import = read(&short, None).unwrap();
        let host = import.hosts.iter().find(|host| host.name == "i-2").unwrap();
        let labels = ["tier2", "tier1", "tier0"].map(|level| host.labels[level].as_str());
        assert_eq!(labels, ["core", "spine-1", "spine-1"]);
        assert_eq!(import.notes.len(), 1);
    }

    #[test]
    fn paths_that_contradict_each_other_are_refused() {
        assert_eq!(
            why(&GRAPH.replace(r#"["leaf-b", "spine-1""#, r#"["leaf-a", "spine-2""#)),
            "host \"i-2\": \"leaf-a\" is below \"spine-2\", and below \"spine-1\" for host \
             \"i-1\"; racksum plans on trees, so list it below one of them"
        );
        let reversed = GRAPH.replace(r#"["leaf-b", "spine-1", "core"]"#, r#"["core", "leaf-a"]"#);
        assert_eq!(
            why(&reversed),
            "host \"i-1\": the switches leaf-a > core > spine-1 > leaf-a form a cycle; each \
             switch needs a way up to one that nothing is above"
        );
        assert_eq!(
            why(&GRAPH.replace(r#""id": "i-2""#, r#""id": "i-1""#)),
            "host \"i-1\": host \"i-1\" is defined twice, first for host \"i-1\"; define it once"
        );
    }

    #[test]
    fn instances_that_share_a_name_are_both_named() {
        let same = GRAPH.replace(r#""name": "n2""#, r#""name": "n1""#);
        let why = read(&same, Some("name")).unwrap_err().to_string();
        assert_eq!(
            why,
            "host \"i-2\": host \"n1\" is defined twice, first for host \"i-1\"; define it once"
        );
    }

    #[test]
    fn files_that_are_wrong_are_refused() {
        assert_eq!(why("{}"), "line 1: missing field `instances`");
        assert_eq!(why(r#"{"instances": []}"#), "the file lists no hosts");
        assert_eq!(
            why(r#"{"instances": [{"id": "i-1"}]}"#),
            "host \"i-1\": it has no network_layers; remove it, or let Topograph find its switches"
        );
        assert_eq!(
            why(r#"{"instances": [{"id": "a/b", "network_layers": ["s"]}]}"#),
            "host \"a/b\": \"a/b\" contains '/', which names of hosts and switches cannot contain"
        );
        for end in 0..GRAPH.len() {
            read(&GRAPH[..end], None).unwrap_err();
        }
    }
}
