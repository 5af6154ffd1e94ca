//! The rights of the operator, as its manifests grant them.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

/// A right: API group, resource with its subresource, and verb.
pub(crate) type Right = (String, String, String);

/// Rights, and the names of the objects to which each is limited; none if it is not.
pub(crate) type Granted = BTreeMap<Right, BTreeSet<String>>;

/// Returns the rights that the manifests grant to the operator.
pub(crate) fn granted() -> Granted {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/kubernetes/operator/rbac.yaml");
    let text = std::fs::read_to_string(path).unwrap();
    let documents =
        text.split("\n---\n").map(|text| serde_saphyr::from_str::<Value>(text).unwrap());
    let mut rights = Granted::new();
    for document in documents {
        for rule in document["rules"].as_array().into_iter().flatten() {
            let list = |field: &str| -> Vec<String> {
                serde_json::from_value(rule[field].clone()).unwrap()
            };
            let names = rule.get("resourceNames").cloned().unwrap_or_default();
            let names: Option<BTreeSet<String>> = serde_json::from_value(names).unwrap();
            let names = names.unwrap_or_default();
            for group in list("apiGroups") {
                for resource in list("resources") {
                    for verb in list("verbs") {
                        rights.insert((group.clone(), resource.clone(), verb), names.clone());
                    }
                }
            }
        }
    }
    rights
}
