//! The custom resource `AggregatorGroup`: the aggregators of a training job, and its workers.
//!
//! The checked-in definition, `deploy/kubernetes/operator/crd.yaml`, is the output of
//! `racksum-operator crd`.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{LocalObjectReference, Toleration};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, CustomResourceExt};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The API group of the resource, and the prefix of racksum's annotations and gates.
pub const GROUP: &str = "racksum.dev";

/// The aggregators of a training job: how many there are, what they need, and where the job's
/// workers are or go.
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "racksum.dev",
    version = "v1alpha1",
    kind = "AggregatorGroup",
    namespaced,
    status = "AggregatorGroupStatus",
    derive = "PartialEq",
    printcolumn = r#"{"name": "Phase", "type": "string", "jsonPath": ".status.phase"}"#,
    printcolumn = r#"{"name": "Domain", "type": "string", "jsonPath": ".status.plan.domain"}"#,
    printcolumn = r#"{"name": "Step-us", "type": "integer",
        "jsonPath": ".status.plan.stepMicroseconds"}"#,
    printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct AggregatorGroupSpec {
    /// Whether the operator places only the aggregators, or the workers too.
    pub mode: Mode,
    /// The pods of the job's workers.
    pub workers: Workers,
    /// The aggregators.
    pub aggregators: Aggregators,
    /// The bytes that the job reduces in each step.
    pub traffic: Traffic,
    /// The levels of the network, and its measurements.
    pub topology: Topology,
    /// The time in seconds that a pod may stay unscheduled after the operator placed it. The
    /// operator then chooses another host for it.
    #[serde(default = "default_pending_ttl")]
    #[schemars(range(min = 1, max = 86_400))]
    pub pending_ttl_seconds: u32,
}

/// The pods that the operator places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Mode {
    /// Mode A: another scheduler places the workers. Aggregators wait until all workers are bound.
    FollowWorkers,
    /// Mode B: workers have the scheduling gate `racksum.dev/placement`, and are placed together
    /// with the aggregators.
    PlaceWorkers,
}

/// The pods of a job's workers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Workers {
    /// Labels that the job's worker pods have, all of them, in the namespace of this object.
    #[schemars(extend("minProperties" = 1))]
    pub match_labels: BTreeMap<String, String>,
    /// The number of worker pods.
    #[schemars(range(min = 1, max = 65_536))]
    pub count: u32,
    /// The ranks of a worker pod that join an aggregator by themselves; 1 if they share a sidecar.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 1024))]
    pub ranks_per_pod: u32,
    /// The path of the identity file in the worker's container. The pod template mounts the Secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity_file: Option<String>,
}

/// The pods of a job's aggregators.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Aggregators {
    /// The number of aggregators. Each sums an equal share of the windows.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 64))]
    pub count: u32,
    /// The number of standbys, each a set of as many aggregators that the job moves to when earlier
    /// ones are gone. Their pods run all the time.
    #[serde(default)]
    #[schemars(range(min = 0, max = 8))]
    pub standbys: u32,
    /// Whether the ranks of each rack join an aggregator of their own, whose parent is the job's.
    /// The operator does not place such aggregators yet, and refuses `true`.
    #[serde(default)]
    pub racks: bool,
    /// The image with the program `racksum`.
    pub image: String,
    /// The UDP and TCP port of the control plane. Shard i receives data on this port + i + 1.
    #[serde(default = "default_port")]
    #[schemars(range(min = 1024, max = 65_000))]
    pub port: u16,
    /// Shards of each aggregator: threads with a socket of their own.
    #[serde(default = "one_shard")]
    #[schemars(range(min = 1, max = 64))]
    pub shards: u8,
    /// The MiB of packet buffers of each shard.
    #[serde(default = "default_pool_mib")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub pool_mib: u32,
    /// The time in seconds that an aggregator which is told to stop has until its jobs have moved
    /// to a standby or ended. The kubelet then kills it, and the jobs fail.
    #[serde(default = "default_drain")]
    #[schemars(range(min = 1, max = 604_800))]
    pub drain_seconds: u32,
    /// CPU and memory of an aggregator, both as request and as limit, as strings.
    #[schemars(with = "BTreeMap<String, String>")]
    pub resources: BTreeMap<String, Quantity>,
    /// The Secret with the aggregators' identity under the key `identity.pem`. Without it, the
    /// aggregators run with `--insecure`, and every pod that reaches them may join any job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity_secret: Option<String>,
    /// Whether aggregators use the host's network. NetworkPolicies then do not apply.
    #[serde(default)]
    pub host_network: bool,
    /// Labels that the nodes of aggregators must have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Taints that aggregators tolerate.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Toleration>,
    /// The priority class of aggregators.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority_class_name: Option<String>,
    /// Secrets for pulling the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub image_pull_secrets: Vec<LocalObjectReference>,
}

impl Aggregators {
    /// Returns the number of pods: the job's own aggregators, and those of all standbys.
    #[must_use]
    pub const fn pods(&self) -> u32 {
        self.count * (1 + self.standbys)
    }
}

/// The bytes that a job reduces in each step. docs/placement.md describes the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Traffic {
    /// The bytes of a rank's tensors that a step reduces.
    #[schemars(range(min = 1, max = 1_000_000_000_000_000_i64))]
    pub bytes: i64,
    /// The share of blocks that are not zero at a rank.
    #[serde(default = "whole")]
    #[schemars(range(min = 0, max = 1))]
    pub own_density: f64,
    /// The share of blocks that are not zero in the sum.
    #[serde(default = "whole")]
    #[schemars(range(min = 0, max = 1))]
    pub union_density: f64,
    /// Whether the pod network delivers multicast.
    #[serde(default)]
    pub is_multicast: bool,
}

/// The levels of the network, and its measurements.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Topology {
    /// The keys of the nodes' topology labels, widest first.
    pub levels: Vec<String>,
    /// The level to one of whose domains the job is confined if possible. Without it, the
    /// innermost level.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<String>,
    /// Whether the job must not leave one domain of its scope at all, nor its standbys that domain.
    /// In mode `FollowWorkers` this has no effect: another scheduler chooses where workers are.
    #[serde(default)]
    pub requires_scope: bool,
    /// The level of whose domains none may hold aggregators of two sets, such as the job's own and
    /// a standby, or `host`. Without it, the innermost level.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby_level: Option<String>,
    /// The share of the step that a wider domain must save.
    #[serde(default = "default_widen_gain")]
    #[schemars(range(min = 0, max = 1))]
    pub widen_gain: f64,
    /// The rate in Mbit/s of a node without the label `racksum.dev/nic-mbit`.
    #[serde(default = "default_nic_mbit")]
    #[schemars(range(min = 1))]
    pub nic_mbit: f64,
    /// The ConfigMap of this namespace that holds the network file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkFile>,
}

/// A key of a ConfigMap that holds a network file: JSON if the key ends in `.json`, otherwise TOML.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NetworkFile {
    /// The name of the ConfigMap.
    pub name: String,
    /// The key in the ConfigMap.
    pub key: String,
}

/// The state of a group.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AggregatorGroupStatus {
    /// The generation of the spec that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// A summary of the conditions.
    #[serde(default)]
    pub phase: Phase,
    /// Conditions. docs/kubernetes.md lists them.
    #[serde(default)]
    #[schemars(extend(
        "x-kubernetes-list-type" = "map",
        "x-kubernetes-list-map-keys" = ["type"]
    ))]
    pub conditions: Vec<Condition>,
    /// The addresses of the aggregators.
    #[serde(default)]
    pub endpoints: Vec<String>,
    /// The ConfigMap with the variables that workers need, once the aggregators are ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map: Option<String>,
    /// The plan that the operator carries out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<Plan>,
    /// Hosts on which a pod stayed unscheduled, and which plans do not use for a while.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub avoided: Vec<Avoided>,
}

/// A summary of the conditions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Phase {
    /// The spec is wrong, or the network file is.
    Invalid,
    /// Workers are missing, unbound, or blocked by someone else.
    #[default]
    Waiting,
    /// The pods have no room.
    Unplaceable,
    /// Pods are being placed and started.
    Placing,
    /// All aggregators serve.
    Ready,
    /// The group is being deleted.
    Terminating,
}

/// The hosts that the operator chose.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Plan {
    /// The domain that all pods but those of standbys are in, such as `a/a1`. Empty for the whole
    /// cluster.
    pub domain: String,
    /// The expected time of a step's all-reduce.
    pub step_microseconds: i64,
    /// The shortest and the longest step, given the uncertainty of the links' rates.
    pub range_microseconds: [i64; 2],
    /// No placement in the domain is faster. Absent if members kept their places.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound_microseconds: Option<i64>,
    /// The link or path that limits the step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bottleneck: Option<String>,
    /// The node of each aggregator: the job's own, then one set of standbys after another.
    pub aggregators: Vec<String>,
    /// The nodes of the workers, in the order of the ranks.
    pub workers: Vec<HostCount>,
    /// Facts that the reader of the plan may not expect, such as links without measurements. The
    /// last one says how many more there are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A number of workers on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HostCount {
    /// The node.
    pub host: String,
    /// The number of worker pods.
    #[schemars(range(min = 1, max = 65_536))]
    pub count: u32,
}

/// A host that plans do not use for a while.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Avoided {
    /// The node.
    pub host: String,
    /// Whether plans use no other node of its innermost domain either: no node there took a worker.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub whole_domain: bool,
    /// The time after which plans may use it again.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub until: Timestamp,
}

/// Returns the definition of the custom resource.
///
/// # Panics
/// Never: the derived definition has a form in JSON, and removing formats keeps it valid.
#[must_use]
pub fn definition() -> CustomResourceDefinition {
    let mut definition =
        serde_json::to_value(AggregatorGroup::crd()).expect("a derived definition has a JSON form");
    remove_foreign_formats(&mut definition);
    serde_json::from_value(definition).expect("removing formats leaves a definition")
}

/// Removes formats that Kubernetes does not know and would warn about.
fn remove_foreign_formats(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            if map.get("format").and_then(Value::as_str).is_some_and(|f| f.starts_with("uint")) {
                map.remove("format");
            }
            map.values_mut().for_each(remove_foreign_formats);
        }
        Value::Array(list) => list.iter_mut().for_each(remove_foreign_formats),
        _ => {}
    }
}

const fn one() -> u32 {
    1
}

const fn one_shard() -> u8 {
    1
}

const fn default_port() -> u16 {
    7177
}

const fn default_pool_mib() -> u32 {
    1024
}

const fn default_drain() -> u32 {
    3600
}

const fn default_pending_ttl() -> u32 {
    300
}

const fn whole() -> f64 {
    1.0
}

const fn default_widen_gain() -> f64 {
    0.1
}

const fn default_nic_mbit() -> f64 {
    10_000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds the paths of the numbers in a schema that may exceed the fields that hold them.
    fn unbounded(schema: &Value, path: &str, found: &mut Vec<String>) {
        let Value::Object(fields) = schema else { return };
        let is_bounded = fields.contains_key("minimum") && fields.contains_key("maximum");
        let is_integer = fields.get("type").is_some_and(|kind| kind == "integer");
        if is_integer && !is_bounded && fields.get("format").is_none_or(|it| it != "int64") {
            found.push(path.into());
        }
        for (name, schema) in fields {
            unbounded(schema, &format!("{path}/{name}"), found);
        }
    }

    /// Checks that an object which the API server accepts is one that the operator can read:
    /// otherwise a single object would stop the watch of all.
    #[test]
    fn the_schema_accepts_nothing_that_cannot_be_read() {
        let definition = serde_json::to_value(definition()).unwrap();
        let schema = "/spec/versions/0/schema/openAPIV3Schema/properties";
        let path = format!("{schema}/spec/properties/aggregators/properties/resources");
        let resources = definition.pointer(&format!("{path}/additionalProperties"));
        assert_eq!(resources.unwrap(), &serde_json::json!({"type": "string"}));
        let mut found = vec![];
        unbounded(definition.pointer(schema).unwrap(), "", &mut found);
        assert_eq!(found, [""; 0]);
    }

    #[test]
    fn fields_of_later_versions_are_ignored() {
        let group = serde_json::json!({
            "apiVersion": "racksum.dev/v1alpha1", "kind": "AggregatorGroup",
            "metadata": {"name": "g"},
            "spec": {
                "mode": "FollowWorkers", "later": 1,
                "workers": {"matchLabels": {"a": "b"}, "count": 1, "later": 1},
                "aggregators": {"image": "i", "resources": {}, "later": 1},
                "traffic": {"bytes": 1, "later": 1},
                "topology": {"levels": [], "later": 1},
            },
        });
        let group: AggregatorGroup = serde_json::from_value(group).unwrap();
        assert_eq!(group.spec.pending_ttl_seconds, 300);
        assert_eq!(group.spec.aggregators.port, 7177);
    }
}
