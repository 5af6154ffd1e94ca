//! The rights of the operator, as its manifests grant them.

use std::collections::BTreeSet;

use serde_json::Value;

/// A right: API group, resource with its subresource, and verb.
pub(crate) type Right = (String, String, String);

/// Returns the rights that the manifests grant to the operator.
pub(crate) fn granted() -> BTreeSet<Right> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/kubernetes/operator/rbac.yaml");
    let text = std::fs::read_to_string(path).unwrap();
    let documents =
        text.split("\n---\n").map(|text| serde_saphyr::from_str::<Value>(text).unwrap());
    let mut rights = BTreeSet::new();
    for document in documents {
        for rule in document["rules"].as_array().into_iter().flatten() {
            let list = |field: &str| -> Vec<String> {
                serde_json::from_value(rule[field].clone()).unwrap()
            };
            for group in list("apiGroups") {
                for resource in list("resources") {
                    for verb in list("verbs") {
                        rights.insert((group.clone(), resource.clone(), verb));
                    }
                }
            }
        }
    }
    rights
}
