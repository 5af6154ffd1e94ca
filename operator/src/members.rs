//! The pods of a group: its workers and aggregators, and how far each of them is.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use kube::{Resource, ResourceExt};

use crate::crd::AggregatorGroup;

/// The scheduling gate that the operator removes once it has placed a pod.
pub const GATE: &str = "racksum.dev/placement";
/// The annotation with the node that the operator chose for a pod.
pub const HOST: &str = "racksum.dev/host";
/// The annotation with the time at which the operator placed a pod.
pub const PLACED_AT: &str = "racksum.dev/placed-at";
/// The label with the name of an aggregator's group.
pub const GROUP_LABEL: &str = "racksum.dev/group";
/// The label with the number of an aggregator in its group.
pub const INDEX_LABEL: &str = "racksum.dev/aggregator";

/// The pods of a group.
#[derive(Debug, Default)]
pub struct Members<'a> {
    /// The workers that have not ended, in the order of the ranks.
    pub workers: Vec<Member<'a>>,
    /// The pod of each aggregator, if it has not ended.
    pub aggregators: Vec<Option<Member<'a>>>,
    /// All pods of the namespace by name, including those that have ended.
    pub pods: BTreeMap<&'a str, &'a Pod>,
    /// The first by name of the pods that the group's labels select, and that other groups keep.
    pub shared: Option<Shared>,
}

/// A pod that the labels of two groups select.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shared {
    /// The name of the pod.
    pub pod: String,
    /// The name of the group that keeps it.
    pub keeper: String,
}

impl<'a> Members<'a> {
    /// Finds the members of a group. Of all groups that select a pod, only the oldest has it as a
    /// worker: two would pin and evict it by two plans. An aggregator is no worker at all.
    #[must_use]
    pub fn of(
        group: &AggregatorGroup,
        groups: &[Arc<AggregatorGroup>],
        pods: &'a [Arc<Pod>],
    ) -> Self {
        let meta = group.meta();
        let others = groups.iter().filter(|other| {
            other.meta().namespace == meta.namespace && other.meta().uid != meta.uid
        });
        let mut others: Vec<_> = others.map(|other| (by_age(other), other)).collect();
        others.sort_by(|(one, _), (other, _)| one.cmp(other));
        let own = by_age(group);
        let keeper = |pod: &Pod| {
            let mut keepers = others
                .iter()
                .filter(|(key, other)| is_owned(pod, other) || (*key < own && selects(other, pod)));
            keepers.next().map(|(_, keeper)| keeper.name_any())
        };
        let aggregators = vec![None; group.spec.aggregators.pods() as usize];
        let mut members = Self { aggregators, ..Self::default() };
        for pod in pods.iter().filter(|pod| pod.metadata.namespace == meta.namespace) {
            members.pods.insert(pod.metadata.name.as_deref().unwrap_or_default(), pod);
            let Some(member) = Member::of(pod) else { continue };
            if is_owned(pod, group) {
                let index = pod.labels().get(INDEX_LABEL).and_then(|index| index.parse().ok());
                let slot = index.and_then(|index: usize| members.aggregators.get_mut(index));
                if let Some(slot) = slot
                    && slot.is_none_or(|first| member.name() < first.name())
                {
                    *slot = Some(member);
                }
            } else if selects(group, pod) {
                match keeper(pod).map(|keeper| Shared { pod: pod.name_any(), keeper }) {
                    // A cache has no order, and a condition must not change with it.
                    Some(one) if members.shared.as_ref().is_some_and(|first| *first <= one) => {}
                    Some(one) => members.shared = Some(one),
                    None => members.workers.push(member),
                }
            }
        }
        members.workers.sort_by_cached_key(Member::order);
        members
    }
}

/// Returns whether the labels of a group's workers select a pod.
fn selects(group: &AggregatorGroup, pod: &Pod) -> bool {
    let mut wanted = group.spec.workers.match_labels.iter();
    wanted.all(|(key, value)| pod.labels().get(key) == Some(value))
}

/// Returns the key that sorts the groups of a namespace, the oldest first. Times have whole
/// seconds, so names decide between equal ones. A group that is being deleted counts as the newest:
/// it would free gated pods that another one is about to place.
fn by_age(group: &AggregatorGroup) -> (bool, Option<Timestamp>, String) {
    let meta = group.meta();
    let created = meta.creation_timestamp.as_ref().map(|time| time.0);
    (meta.deletion_timestamp.is_some(), created, group.name_any())
}

/// Returns whether a group controls a pod.
#[must_use]
pub fn is_owned(pod: &Pod, group: &AggregatorGroup) -> bool {
    let owners = pod.metadata.owner_references.iter().flatten();
    owners.into_iter().any(|owner| Some(&owner.uid) == group.meta().uid.as_ref())
}

/// Returns whether no container of a pod will run any more.
#[must_use]
pub fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// A pod of a group.
#[derive(Debug, Clone, Copy)]
pub struct Member<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// How far the pod is.
    pub stage: Stage<'a>,
}

/// How far a pod is on its way to a node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Stage<'a> {
    /// Another controller's gate must go first.
    Held {
        /// The name of that gate.
        gate: &'a str,
    },
    /// Only the operator's gate is left.
    Gated,
    /// The pod has no gate and no node yet.
    Unbound {
        /// The node that the operator chose, and when. `None` if it never placed the pod.
        placed: Option<(&'a str, Timestamp)>,
    },
    /// The pod is on a node.
    Bound {
        /// The name of the node.
        node: &'a str,
    },
}

impl<'a> Member<'a> {
    /// Returns a pod as a member, or `None` if it has ended or is being deleted.
    #[must_use]
    pub fn of(pod: &'a Pod) -> Option<Self> {
        let is_over = has_ended(pod) || pod.metadata.deletion_timestamp.is_some();
        (!is_over).then(|| Self { pod, stage: Stage::of(pod) })
    }

    /// Returns the name of the pod.
    #[must_use]
    pub fn name(&self) -> &'a str {
        self.pod.metadata.name.as_deref().unwrap_or_default()
    }

    /// Returns the node that the pod is on, or else the one that the operator chose.
    #[must_use]
    pub fn host(&self) -> Option<&'a str> {
        match self.stage {
            Stage::Bound { node } => Some(node),
            Stage::Unbound { placed } => placed.map(|(host, _)| host),
            Stage::Held { .. } | Stage::Gated => None,
        }
    }

    /// Returns the node of the plan that the pod takes the place of: the chosen one even if the
    /// scheduler preferred another.
    #[must_use]
    pub fn slot(&self) -> Option<&'a str> {
        placed(self.pod).map(|(host, _)| host).or_else(|| self.host())
    }

    /// Returns the node that the pod is on.
    #[must_use]
    pub fn node(&self) -> Option<&'a str> {
        match self.stage {
            Stage::Bound { node } => Some(node),
            _ => None,
        }
    }

    /// Returns whether all containers of the pod are ready.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        condition(self.pod, "Ready").is_some_and(|ready| ready.status == "True")
    }

    /// Returns why the scheduler found no node, if it said so.
    #[must_use]
    pub fn scheduling_message(&self) -> Option<&'a str> {
        condition(self.pod, "PodScheduled")?.message.as_deref()
    }

    /// Returns a worker's place in the order of the ranks: the number of its job in a JobSet, its
    /// completion index, and its name with numbers as numbers.
    #[must_use]
    pub fn order(&self) -> (u64, u64, Vec<(String, u64)>) {
        let number = |key: &str| {
            let labels = self.pod.metadata.labels.as_ref().and_then(|all| all.get(key));
            let all = self.pod.metadata.annotations.as_ref();
            let text = labels.or_else(|| all.and_then(|all| all.get(key)));
            text.and_then(|text| text.parse().ok()).unwrap_or(0)
        };
        (number(JOB_INDEX), number(COMPLETION_INDEX), natural(self.name()))
    }

    /// Returns whether a worker waits for a leader that waits for the operator: JobSet rejects all
    /// other pods of a job with an exclusive topology until the first of them is scheduled.
    #[must_use]
    pub fn is_in_jobset_trap(&self) -> bool {
        let has = |key: &str| self.pod.annotations().contains_key(key);
        self.stage == Stage::Gated && has(EXCLUSIVE_TOPOLOGY) && !has(NODE_SELECTOR_STRATEGY)
    }
}

impl<'a> Stage<'a> {
    fn of(pod: &'a Pod) -> Self {
        let Some(spec) = &pod.spec else { return Self::Unbound { placed: None } };
        if let Some(node) = &spec.node_name {
            return Self::Bound { node };
        }
        let gates = spec.scheduling_gates.as_deref().unwrap_or_default();
        match gates.iter().find(|gate| gate.name != GATE) {
            Some(gate) => Self::Held { gate: &gate.name },
            None if !gates.is_empty() => Self::Gated,
            None => Self::Unbound { placed: placed(pod) },
        }
    }
}

/// Returns the node that the operator chose for a pod, and when.
fn placed(pod: &Pod) -> Option<(&str, Timestamp)> {
    let annotations = pod.metadata.annotations.as_ref()?;
    let at = annotations.get(PLACED_AT)?.parse().ok()?;
    Some((annotations.get(HOST)?, at))
}

fn condition<'a>(pod: &'a Pod, name: &str) -> Option<&'a PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == name)
}

/// Splits a name into text and numbers, so that `w-2` sorts before `w-10`.
fn natural(name: &str) -> Vec<(String, u64)> {
    let mut parts = vec![];
    let mut rest = name;
    while !rest.is_empty() {
        let (text, tail) = rest.split_at(rest.find(char::is_numeric).unwrap_or(rest.len()));
        let end = tail.find(|c: char| !c.is_numeric()).unwrap_or(tail.len());
        let (number, tail) = tail.split_at(end);
        parts.push((text.into(), number.parse().unwrap_or(u64::MAX)));
        rest = tail;
    }
    parts
}

/// The label with the number of a job in its JobSet.
const JOB_INDEX: &str = "jobset.sigs.k8s.io/job-global-index";
/// The label and annotation with the number of a pod in its indexed Job.
const COMPLETION_INDEX: &str = "batch.kubernetes.io/job-completion-index";
/// The annotation by which JobSet keeps each job in a topology domain of its own.
const EXCLUSIVE_TOPOLOGY: &str = "alpha.jobset.sigs.k8s.io/exclusive-topology";
/// The annotation by which JobSet does so with node labels instead of its webhook.
const NODE_SELECTOR_STRATEGY: &str = "alpha.jobset.sigs.k8s.io/node-selector";

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(spec: &Value, annotations: &Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "w-0", "annotations": annotations},
            "spec": spec,
        }))
        .unwrap()
    }

    fn stage(spec: &Value, annotations: &Value, expected: Stage<'_>) {
        assert_eq!(Member::of(&pod(spec, annotations)).unwrap().stage, expected);
    }

    #[test]
    fn a_pod_is_as_far_as_its_gates_and_its_node_say() {
        let kueue = "kueue.x-k8s.io/topology";
        let both = json!({"containers": [], "schedulingGates": [{"name": GATE}, {"name": kueue}]});
        stage(&both, &json!({}), Stage::Held { gate: kueue });
        let ours = json!({"containers": [], "schedulingGates": [{"name": GATE}]});
        stage(&ours, &json!({}), Stage::Gated);
        let free = json!({"containers": []});
        stage(&free, &json!({}), Stage::Unbound { placed: None });
        let placed = Some(("h1", Timestamp::UNIX_EPOCH));
        let annotations = json!({HOST: "h1", PLACED_AT: "1970-01-01T00:00:00Z"});
        stage(&free, &annotations, Stage::Unbound { placed });
        stage(
            &json!({"containers": [], "nodeName": "h2"}),
            &json!({}),
            Stage::Bound { node: "h2" },
        );
    }

    fn group(name: &str, created: u8, label: &str) -> Arc<AggregatorGroup> {
        let group = json!({
            "apiVersion": "racksum.dev/v1alpha1", "kind": "AggregatorGroup",
            "metadata": {
                "name": name, "uid": name, "namespace": "ml",
                "creationTimestamp": format!("2026-11-29T00:00:0{created}Z"),
            },
            "spec": {
                "mode": "PlaceWorkers",
                "workers": {"matchLabels": {label: "x"}, "count": 2},
                "aggregators": {"image": "i", "resources": {}},
                "traffic": {"bytes": 1},
                "topology": {"levels": []},
            },
        });
        Arc::new(serde_json::from_value(group).unwrap())
    }

    #[test]
    fn a_pod_that_several_groups_select_is_a_worker_of_the_oldest() {
        let worker = |name: &str, labels: Value| -> Arc<Pod> {
            let meta = json!({"name": name, "namespace": "ml", "labels": labels});
            let pod = json!({"metadata": meta, "spec": {"containers": []}});
            Arc::new(serde_json::from_value(pod).unwrap())
        };
        let pods =
            [worker("both", json!({"job": "x", "team": "x"})), worker("one", json!({"team": "x"}))];
        let names = |group: &AggregatorGroup, groups: &[Arc<AggregatorGroup>]| {
            let members = Members::of(group, groups, &pods);
            let names: Vec<_> = members.workers.iter().map(|one| one.name().to_owned()).collect();
            (names, members.shared)
        };
        let shared = |keeper: &str| Some(Shared { pod: "both".into(), keeper: keeper.into() });
        for (older, newer) in [
            (group("z", 1, "job"), group("a", 2, "team")),
            // Created in one second.
            (group("a", 1, "job"), group("z", 1, "team")),
        ] {
            let groups = [newer.clone(), older.clone()];
            assert_eq!(names(&older, &groups), (vec!["both".into()], None));
            let keeper = older.name_any();
            assert_eq!(names(&newer, &groups), (vec!["one".into()], shared(&keeper)));
            // The newer one gets the pod once the older one is gone.
            let all = vec!["both".to_owned(), "one".into()];
            assert_eq!(names(&newer, &groups[..1]), (all.clone(), None));
            let mut deleted = AggregatorGroup::clone(&older);
            deleted.metadata.deletion_timestamp = deleted.metadata.creation_timestamp.clone();
            let groups = [newer.clone(), deleted.clone().into()];
            assert_eq!(names(&newer, &groups), (all.clone(), None));
            assert_eq!(names(&deleted, &groups), (vec![], shared(&newer.name_any())));
            let mut elsewhere = AggregatorGroup::clone(&older);
            elsewhere.metadata.namespace = Some("other".into());
            assert_eq!(names(&newer, &[newer.clone(), elsewhere.into()]), (all, None));
        }
    }

    #[test]
    fn of_several_shared_pods_and_keepers_the_first_are_told_in_any_order() {
        let pod = |name: &str| -> Arc<Pod> {
            let labels = json!({"job": "x", "team": "x", "app": "x"});
            let meta = json!({"name": name, "namespace": "ml", "labels": labels});
            Arc::new(serde_json::from_value(json!({"metadata": meta})).unwrap())
        };
        let (mut pods, newest) = ([pod("p-1"), pod("p-2"), pod("p-3")], group("c", 3, "app"));
        let mut groups = [group("b", 1, "job"), group("a", 2, "team"), newest.clone()];
        for _ in 0..2 {
            let shared = Members::of(&newest, &groups, &pods).shared;
            assert_eq!(shared, Some(Shared { pod: "p-1".into(), keeper: "b".into() }));
            pods.reverse();
            groups.reverse();
        }
    }

    #[test]
    fn an_aggregator_of_another_group_is_no_worker() {
        let (one, other) = (group("a", 1, "app"), group("b", 2, "job"));
        let pod: Pod = serde_json::from_value(json!({"metadata": {
            "name": "b-aggregator-0", "namespace": "ml", "labels": {"app": "x"},
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "AggregatorGroup", "name": "b", "uid": "b"},
            ],
        }}))
        .unwrap();
        let pods = [Arc::new(pod)];
        let members = Members::of(&one, &[one.clone(), other], &pods);
        assert!(members.workers.is_empty(), "{members:?}");
        assert_eq!(members.shared.unwrap().keeper, "b");
    }

    #[test]
    fn numbers_in_names_count_as_numbers() {
        let mut names = ["w-10", "w-2", "v-3"];
        names.sort_by_key(|name| natural(name));
        assert_eq!(names, ["v-3", "w-2", "w-10"]);
    }

    #[test]
    fn workers_are_in_the_order_of_their_jobs_and_completion_indexes() {
        let worker = |name: &str, job: &str, index: &str| -> Pod {
            serde_json::from_value(json!({"metadata": {
                "name": name,
                "labels": {JOB_INDEX: job},
                "annotations": {COMPLETION_INDEX: index},
            }}))
            .unwrap()
        };
        let pods = [
            worker("a", "10", "0"),
            worker("b", "2", "10"),
            worker("c", "2", "9"),
            // Without numbers, as pods of other controllers.
            worker("w-10", "", ""),
            worker("w-9", "", ""),
        ];
        let mut members: Vec<_> = pods.iter().map(|pod| Member::of(pod).unwrap()).collect();
        members.sort_by_cached_key(Member::order);
        let names: Vec<_> = members.iter().map(Member::name).collect();
        assert_eq!(names, ["w-9", "w-10", "c", "b", "a"]);
    }

    #[test]
    fn a_gated_leader_with_an_exclusive_topology_is_a_trap() {
        let gated = json!({"containers": [], "schedulingGates": [{"name": GATE}]});
        let trap = |spec: &Value, annotations: Value| {
            Member::of(&pod(spec, &annotations)).unwrap().is_in_jobset_trap()
        };
        assert!(trap(&gated, json!({EXCLUSIVE_TOPOLOGY: "rack"})));
        assert!(!trap(&gated, json!({EXCLUSIVE_TOPOLOGY: "rack", NODE_SELECTOR_STRATEGY: "true"})));
        assert!(!trap(&gated, json!({})));
        assert!(!trap(&json!({"containers": []}), json!({EXCLUSIVE_TOPOLOGY: "rack"})));
    }
}
