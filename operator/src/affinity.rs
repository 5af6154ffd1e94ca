//! The rules by which pods accept nodes, and the changes to gated pods that the API server accepts.
//!
//! The API server lets a gated pod's required node affinity become narrower, never wider: a pod
//! without terms may get any, and a term that exists may get further requirements at its end.
//! Terms are never added to others, because terms are alternatives.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Affinity, Node, NodeAffinity, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Pod,
    PodSpec, PreferredSchedulingTerm, Taint, Toleration,
};
use kube::ResourceExt;

/// Returns whether a pod's node selector and required node affinity accept a node.
#[must_use]
pub fn accepts(spec: &PodSpec, node: &Node) -> bool {
    has_labels(node, spec.node_selector.as_ref())
        && required(spec).is_none_or(|terms| terms.iter().any(|term| term_matches(term, node)))
}

/// Returns whether a node has all of these labels.
#[must_use]
pub fn has_labels(node: &Node, labels: Option<&BTreeMap<String, String>>) -> bool {
    labels.into_iter().flatten().all(|(key, value)| node.labels().get(key) == Some(value))
}

/// Returns the first taint of a node that keeps new pods with these tolerations away.
#[must_use]
pub fn untolerated<'a>(node: &'a Node, tolerations: &[Toleration]) -> Option<&'a Taint> {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
    taints.into_iter().flatten().find(|taint| {
        taint.effect != "PreferNoSchedule" && !tolerations.iter().any(|one| tolerates(one, taint))
    })
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let key = toleration.key.as_deref().unwrap_or_default();
    let has_effect = toleration.effect.as_ref().is_none_or(|effect| *effect == taint.effect);
    let is_any = toleration.operator.as_deref() == Some("Exists");
    let value = toleration.value.as_deref().unwrap_or_default();
    let has_value = is_any || value == taint.value.as_deref().unwrap_or_default();
    has_effect && has_value && ((key.is_empty() && is_any) || key == taint.key)
}

/// Returns the required terms of a pod, if it has any.
fn required(spec: &PodSpec) -> Option<&Vec<NodeSelectorTerm>> {
    let affinity = spec.affinity.as_ref()?.node_affinity.as_ref()?;
    let selector = affinity.required_during_scheduling_ignored_during_execution.as_ref()?;
    Some(&selector.node_selector_terms)
}

fn term_matches(term: &NodeSelectorTerm, node: &Node) -> bool {
    if is_empty(term) {
        return false;
    }
    let labels = term.match_expressions.iter().flatten();
    let fields = term.match_fields.iter().flatten();
    labels.into_iter().all(|one| holds(one, node.labels().get(&one.key)))
        && fields.into_iter().all(|one| {
            let name = node.name_any();
            holds(one, (one.key == NAME_FIELD).then_some(&name))
        })
}

/// Returns whether a term has no requirement. Such a term matches no node, and the API server
/// accepts no addition to it.
fn is_empty(term: &NodeSelectorTerm) -> bool {
    let has = |list: &Option<Vec<_>>| list.as_ref().is_some_and(|list| !list.is_empty());
    !has(&term.match_expressions) && !has(&term.match_fields)
}

fn holds(requirement: &NodeSelectorRequirement, value: Option<&String>) -> bool {
    let listed = |value: &String| requirement.values.iter().flatten().any(|one| one == value);
    let compared = |is_right: fn(i64, i64) -> bool| {
        let limit = requirement.values.iter().flatten().next().and_then(|one| one.parse().ok());
        let value = value.and_then(|value| value.parse().ok());
        value.zip(limit).is_some_and(|(value, limit)| is_right(value, limit))
    };
    match requirement.operator.as_str() {
        "In" => value.is_some_and(listed),
        "NotIn" => !value.is_some_and(listed),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compared(|value, limit| value > limit),
        "Lt" => compared(|value, limit| value < limit),
        _ => false,
    }
}

/// A place for a pod: the requirement that it must meet, and a node that it prefers.
#[derive(Debug, Clone, PartialEq)]
pub enum Pin {
    /// Exactly this node.
    Host(String),
    /// Any node with these labels, preferably the host.
    Domain {
        /// The keys and values of the labels, from the widest level to the innermost: racks of two
        /// zones may have the same name.
        labels: Vec<(String, String)>,
        /// The preferred node.
        host: String,
    },
}

impl Pin {
    /// Returns the node that the plan chose.
    #[must_use]
    pub fn host(&self) -> &str {
        let (Self::Host(host) | Self::Domain { host, .. }) = self;
        host
    }
}

/// Returns a pod's affinity with a pin added to every term.
#[must_use]
pub fn narrowed(pod: &Pod, pin: &Pin) -> Affinity {
    let spec = pod.spec.as_ref();
    let mut affinity = spec.and_then(|spec| spec.affinity.clone()).unwrap_or_default();
    let node = affinity.node_affinity.get_or_insert_with(NodeAffinity::default);
    let selector = node
        .required_during_scheduling_ignored_during_execution
        .get_or_insert_with(NodeSelector::default);
    if selector.node_selector_terms.is_empty() {
        selector.node_selector_terms.push(NodeSelectorTerm::default());
        push(&mut selector.node_selector_terms[0], pin);
    } else {
        let terms = selector.node_selector_terms.iter_mut();
        terms.filter(|term| !is_empty(term)).for_each(|term| push(term, pin));
    }
    if let Pin::Domain { host, .. } = pin {
        let preference =
            NodeSelectorTerm { match_fields: Some(vec![name_is(host)]), ..<_>::default() };
        node.preferred_during_scheduling_ignored_during_execution
            .get_or_insert_with(Vec::new)
            .push(PreferredSchedulingTerm { preference, weight: GREATEST_WEIGHT });
    }
    affinity
}

fn push(term: &mut NodeSelectorTerm, pin: &Pin) {
    let (list, requirements) = match pin {
        Pin::Host(host) => (&mut term.match_fields, vec![name_is(host)]),
        Pin::Domain { labels, .. } => {
            let labels = labels.iter().map(|(key, value)| is_in(key, value));
            (&mut term.match_expressions, labels.collect())
        }
    };
    let list = list.get_or_insert_with(Vec::new);
    for requirement in requirements {
        if !list.contains(&requirement) {
            list.push(requirement);
        }
    }
}

fn name_is(host: &str) -> NodeSelectorRequirement {
    is_in(NAME_FIELD, host)
}

fn is_in(key: &str, value: &str) -> NodeSelectorRequirement {
    let values = Some(vec![value.into()]);
    NodeSelectorRequirement { key: key.into(), operator: "In".into(), values }
}

/// The only field of a node that a term may match.
const NAME_FIELD: &str = "metadata.name";
/// The greatest weight of a preference.
const GREATEST_WEIGHT: i32 = 100;

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(affinity: &Value) -> Pod {
        serde_json::from_value(json!({"spec": {"containers": [], "affinity": affinity}})).unwrap()
    }

    fn node(name: &str, labels: &[(&str, &str)]) -> Node {
        let labels: BTreeMap<_, _> = labels.iter().copied().collect();
        serde_json::from_value(json!({"metadata": {"name": name, "labels": labels}})).unwrap()
    }

    fn required_of(terms: &Value) -> Value {
        json!({"nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}
        }})
    }

    #[test]
    fn a_pin_is_added_to_every_term_and_widens_none() {
        let a = json!({"key": "zone", "operator": "In", "values": ["a"]});
        let b = json!({"key": "zone", "operator": "In", "values": ["b"]});
        let name = json!({"key": "metadata.name", "operator": "In", "values": ["h1"]});
        let terms = json!([{"matchExpressions": [a]}, {"matchExpressions": [b]}, {}]);
        let pinned = narrowed(&pod(&required_of(&terms)), &Pin::Host("h1".into()));
        let expected = json!([
            {"matchExpressions": [a], "matchFields": [name]},
            {"matchExpressions": [b], "matchFields": [name]},
            {},
        ]);
        assert_eq!(serde_json::to_value(&pinned).unwrap(), required_of(&expected));
        let spec = PodSpec { affinity: Some(pinned), ..PodSpec::default() };
        assert!(accepts(&spec, &node("h1", &[("zone", "a")])));
        assert!(!accepts(&spec, &node("h1", &[("zone", "c")])));
        assert!(!accepts(&spec, &node("h2", &[("zone", "a")])));
    }

    #[test]
    fn a_pod_without_terms_gets_one_and_keeps_its_other_affinity() {
        let preferred = json!([{"weight": 1, "preference": {"matchExpressions": [
            {"key": "disk", "operator": "Exists"}
        ]}}]);
        let pod = pod(&json!({
            "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred},
            "podAffinity": {},
        }));
        let labels = [("zone", "a"), ("rack", "r1")];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let pin = Pin::Domain { labels, host: "h1".into() };
        let pinned = serde_json::to_value(narrowed(&pod, &pin)).unwrap();
        let preferences =
            &pinned["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"];
        assert_eq!(preferences[0], preferred[0]);
        assert_eq!(
            preferences[1]["preference"]["matchFields"][0]["values"],
            json!(["h1"]),
            "{preferences}"
        );
        assert!(pinned["podAffinity"].is_object());
        let required = &pinned["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
        assert_eq!(
            *required,
            json!({"nodeSelectorTerms": [{"matchExpressions": [
                {"key": "zone", "operator": "In", "values": ["a"]},
                {"key": "rack", "operator": "In", "values": ["r1"]},
            ]}]})
        );
    }

    #[test]
    fn all_operators_of_requirements_are_known() {
        let node = node("h1", &[("cores", "64"), ("zone", "a")]);
        let holds = |key: &str, operator: &str, values: &[&str]| {
            let term = json!([{"matchExpressions": [
                {"key": key, "operator": operator, "values": values}
            ]}]);
            accepts(pod(&required_of(&term)).spec.as_ref().unwrap(), &node)
        };
        assert!(holds("zone", "In", &["b", "a"]) && !holds("zone", "In", &["b"]));
        assert!(holds("zone", "NotIn", &["b"]) && holds("gone", "NotIn", &["b"]));
        assert!(holds("zone", "Exists", &[]) && holds("gone", "DoesNotExist", &[]));
        assert!(holds("cores", "Gt", &["63"]) && !holds("cores", "Gt", &["64"]));
        assert!(holds("cores", "Lt", &["65"]) && !holds("zone", "Lt", &["65"]));
        assert!(!holds("zone", "Near", &["a"]));
    }

    #[test]
    fn taints_keep_pods_away_unless_they_are_tolerated() {
        let node: Node = serde_json::from_value(json!({"spec": {"taints": [
            {"key": "soft", "effect": "PreferNoSchedule"},
            {"key": "gpu", "value": "h100", "effect": "NoSchedule"},
        ]}}))
        .unwrap();
        let kept_away = |toleration: Value| {
            untolerated(&node, &[serde_json::from_value(toleration).unwrap()]).is_some()
        };
        assert!(untolerated(&node, &[]).is_some());
        assert!(!kept_away(json!({"operator": "Exists"})));
        assert!(!kept_away(json!({"key": "gpu", "operator": "Exists"})));
        assert!(!kept_away(json!({"key": "gpu", "value": "h100", "effect": "NoSchedule"})));
        assert!(kept_away(json!({"key": "gpu", "value": "a100"})));
        assert!(kept_away(json!({"key": "gpu", "operator": "Exists", "effect": "NoExecute"})));
    }
}
