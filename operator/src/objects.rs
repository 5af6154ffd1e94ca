//! The objects that the operator creates for a group, and the patches that place its pods.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Service};
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};

use crate::affinity::{Pin, narrowed};
use crate::crd::AggregatorGroup;
use crate::members::{GATE, GROUP_LABEL, HOST, INDEX_LABEL, PLACED_AT};

/// The name by which the operator owns fields.
pub const MANAGER: &str = "racksum-operator";
/// The finalizer of a group.
pub const FINALIZER: &str = "racksum.dev/placement";
/// The label of all objects that the operator creates.
pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";

/// Returns the name of an aggregator's pod, which is its host name too.
#[must_use]
pub fn aggregator_name(group: &AggregatorGroup, index: u32) -> String {
    format!("{}-aggregator-{index}", group.name_any())
}

/// Returns the name of the Service. A JobSet's own Service often has the name of the group.
#[must_use]
pub fn service_name(group: &AggregatorGroup) -> String {
    format!("{}-aggregators", group.name_any())
}

/// Returns the pod of an aggregator, gated.
///
/// # Panics
/// Never: the pod has the form of the API.
#[must_use]
pub fn aggregator(group: &AggregatorGroup, index: u32) -> Pod {
    let spec = &group.spec.aggregators;
    let name = aggregator_name(group, index);
    let mut labels = labels(group);
    labels.insert(INDEX_LABEL.into(), index.to_string());
    let mut args = vec![
        "aggregator".to_owned(),
        "--bind=$(POD_IP)".into(),
        format!("--port={}", spec.port),
        format!("--shards={}", spec.shards),
        format!("--pool-mib={}", spec.pool_mib),
        "--status-socket=/run/racksum/status".into(),
    ];
    args.push(match spec.identity_secret {
        Some(_) => "--identity=/etc/racksum/identity.pem".into(),
        None => "--insecure".into(),
    });
    let probe = |seconds: u32, failures: u32| {
        json!({
            "exec": {"command": ["racksum", "status", "/run/racksum/status"]},
            "periodSeconds": seconds, "timeoutSeconds": 5, "failureThreshold": failures,
        })
    };
    let mut mounts = vec![json!({"name": "run", "mountPath": "/run/racksum"})];
    let mut volumes = vec![json!({
        "name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"},
    })];
    if let Some(secret) = &spec.identity_secret {
        mounts.push(json!({"name": "identity", "mountPath": "/etc/racksum", "readOnly": true}));
        volumes.push(json!({
            "name": "identity", "secret": {"secretName": secret, "defaultMode": 0o440},
        }));
    }
    let data_ports = (1..=u16::from(spec.shards)).map(|shard| {
        json!({
            "name": format!("data-{shard}"), "containerPort": spec.port + shard, "protocol": "UDP",
        })
    });
    let mut ports = vec![
        json!({"name": "control", "containerPort": spec.port, "protocol": "UDP"}),
        json!({"name": "lifeline", "containerPort": spec.port, "protocol": "TCP"}),
    ];
    ports.extend(data_ports);
    let mut pod = json!({
        "metadata": {
            "name": name,
            "namespace": group.namespace(),
            "labels": labels,
            "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
            "ownerReferences": [group.controller_owner_ref(&())],
        },
        "spec": {
            "schedulingGates": [{"name": GATE}],
            "hostname": name,
            "subdomain": service_name(group),
            "restartPolicy": "Always",
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "terminationGracePeriodSeconds": spec.drain_seconds,
            "securityContext": {
                "runAsNonRoot": true, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [{
                "name": "aggregator",
                "image": spec.image,
                "command": ["racksum"],
                "args": args,
                "env": [{
                    "name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}},
                }],
                "ports": ports,
                "resources": {"requests": spec.resources, "limits": spec.resources},
                "startupProbe": probe(1, 60),
                "readinessProbe": probe(5, 2),
                "livenessProbe": probe(20, 3),
                "securityContext": {
                    "allowPrivilegeEscalation": false,
                    "readOnlyRootFilesystem": true,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": mounts,
            }],
            "volumes": volumes,
        },
    });
    let fields = &mut pod["spec"];
    set(fields, "hostNetwork", spec.host_network.then_some(&true));
    set(fields, "dnsPolicy", spec.host_network.then_some(&"ClusterFirstWithHostNet"));
    set(fields, "nodeSelector", (!spec.node_selector.is_empty()).then_some(&spec.node_selector));
    set(fields, "tolerations", (!spec.tolerations.is_empty()).then_some(&spec.tolerations));
    set(fields, "priorityClassName", spec.priority_class_name.as_ref());
    let secrets = &spec.image_pull_secrets;
    set(fields, "imagePullSecrets", (!secrets.is_empty()).then_some(secrets));
    serde_json::from_value(pod).expect("the pod above has the form of the API")
}

/// Sets a field that may be absent.
fn set<T: serde::Serialize>(object: &mut Value, field: &str, value: Option<&T>) {
    if let Some(value) = value {
        object[field] = json!(value);
    }
}

/// The user of the aggregators' processes, as in `deploy/kubernetes/aggregator`.
const USER: i64 = 65_532;

fn labels(group: &AggregatorGroup) -> BTreeMap<String, String> {
    BTreeMap::from([
        (MANAGED_BY.into(), MANAGER.into()),
        ("app.kubernetes.io/name".into(), "racksum-aggregator".into()),
        (GROUP_LABEL.into(), group.name_any()),
    ])
}

/// Returns the headless Service that gives each aggregator a name.
///
/// # Panics
/// Never: the Service has the form of the API.
#[must_use]
pub fn service(group: &AggregatorGroup) -> Service {
    let port = group.spec.aggregators.port;
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": service_name(group),
            "namespace": group.namespace(),
            "labels": labels(group),
            "ownerReferences": [group.controller_owner_ref(&())],
        },
        "spec": {
            "clusterIP": "None",
            "selector": {GROUP_LABEL: group.name_any()},
            "ports": [{"name": "control", "port": port, "protocol": "UDP"}],
        },
    });
    serde_json::from_value(service).expect("the Service above has the form of the API")
}

/// Returns the addresses of a group's aggregators: the job's own, then one set of standbys after
/// another.
#[must_use]
pub fn endpoints(group: &AggregatorGroup) -> Vec<String> {
    let (service, port) = (service_name(group), group.spec.aggregators.port);
    let namespace = group.namespace().unwrap_or_default();
    let endpoint =
        |index| format!("{}.{service}.{namespace}.svc:{port}", aggregator_name(group, index));
    (0..group.spec.aggregators.pods()).map(endpoint).collect()
}

/// Returns the ConfigMap with the variables that racksum's workers and Python package read.
///
/// # Panics
/// Never: the ConfigMap has the form of the API.
#[must_use]
pub fn config_map(group: &AggregatorGroup) -> ConfigMap {
    let endpoints = endpoints(group);
    let sets = endpoints.chunks(group.spec.aggregators.count as usize).map(|set| set.join("+"));
    let sets: Vec<_> = sets.collect();
    let mut data = BTreeMap::from([("RACKSUM_AGGREGATOR", sets.join(","))]);
    match &group.spec.workers.identity_file {
        Some(file) => data.insert("RACKSUM_IDENTITY", file.clone()),
        None if group.spec.aggregators.identity_secret.is_none() => {
            data.insert("RACKSUM_INSECURE", "1".into())
        }
        None => None,
    };
    let map = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": config_map_name(group),
            "namespace": group.namespace(),
            "labels": labels(group),
            "ownerReferences": [group.controller_owner_ref(&())],
        },
        "data": data,
    });
    serde_json::from_value(map).expect("the ConfigMap above has the form of the API")
}

/// Returns the name of the ConfigMap that a group publishes.
#[must_use]
pub fn config_map_name(group: &AggregatorGroup) -> String {
    format!("{}-racksum", group.name_any())
}

/// Returns a JSON Patch that pins a gated pod and removes its gate.
///
/// The patch starts with a `test` of the resource version, so it changes only the pod that was
/// observed: nobody else can have added a term or a gate since.
///
/// # Panics
/// Never: the patch has the form of RFC 6902.
#[must_use]
pub fn placing(pod: &Pod, pin: &Pin, now: Timestamp) -> json_patch::Patch {
    let mut operations = vec![test_version(pod)];
    operations.push(json!({"op": "add", "path": "/spec/affinity", "value": narrowed(pod, pin)}));
    let annotations = [(HOST, pin.host().to_owned()), (PLACED_AT, now.to_string())];
    if pod.metadata.annotations.is_some() {
        operations.extend(annotations.map(|(key, value)| {
            let path = format!("/metadata/annotations/{}", key.replace('/', "~1"));
            json!({"op": "add", "path": path, "value": value})
        }));
    } else {
        let annotations = BTreeMap::from(annotations);
        operations
            .push(json!({"op": "add", "path": "/metadata/annotations", "value": annotations}));
    }
    operations.extend(without_gate(pod));
    serde_json::from_value(Value::Array(operations))
        .expect("each operation above is one of RFC 6902")
}

/// Returns a JSON Patch that removes the gate of a pod, which nobody will place any more.
///
/// # Panics
/// Never: the patch has the form of RFC 6902.
#[must_use]
pub fn releasing(pod: &Pod) -> json_patch::Patch {
    let mut operations = vec![test_version(pod)];
    operations.extend(without_gate(pod));
    serde_json::from_value(Value::Array(operations))
        .expect("each operation above is one of RFC 6902")
}

fn test_version(pod: &Pod) -> Value {
    json!({"op": "test", "path": "/metadata/resourceVersion", "value": pod.resource_version()})
}

fn without_gate(pod: &Pod) -> Vec<Value> {
    let gates = pod.spec.as_ref().and_then(|spec| spec.scheduling_gates.as_deref());
    let index = gates.unwrap_or_default().iter().position(|gate| gate.name == GATE);
    let operations = index.map(|index| {
        let path = format!("/spec/schedulingGates/{index}");
        [
            json!({"op": "test", "path": format!("{path}/name"), "value": GATE}),
            json!({"op": "remove", "path": path}),
        ]
    });
    operations.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(change: impl FnOnce(&mut Value)) -> Value {
        let mut pod = json!({
            "metadata": {"name": "w", "resourceVersion": "7"},
            "spec": {
                "containers": [],
                "schedulingGates": [{"name": "other"}, {"name": GATE}],
            },
        });
        change(&mut pod);
        pod
    }

    fn group(aggregators: Value) -> AggregatorGroup {
        let group = json!({
            "apiVersion": "racksum.dev/v1alpha1", "kind": "AggregatorGroup",
            "metadata": {"name": "g", "uid": "g"},
            "spec": {
                "mode": "FollowWorkers",
                "workers": {"matchLabels": {"a": "b"}, "count": 1},
                "aggregators": aggregators,
                "traffic": {"bytes": 1},
                "topology": {"levels": []},
            },
        });
        serde_json::from_value(group).unwrap()
    }

    #[test]
    fn the_service_of_the_manifest_selects_its_own_aggregator_and_none_of_a_group() {
        let service = include_str!("../../deploy/kubernetes/aggregator/one/service.yaml");
        let service: Service = serde_saphyr::from_str(service).unwrap();
        let selector = service.spec.unwrap().selector.unwrap();
        let selects = |labels: &BTreeMap<String, String>| {
            selector.iter().all(|(key, value)| labels.get(key) == Some(value))
        };
        let manifest = include_str!("../../deploy/kubernetes/aggregator/one/deployment.yaml");
        let manifest: Value = serde_saphyr::from_str(manifest).unwrap();
        let labels = manifest["spec"]["template"]["metadata"]["labels"].clone();
        assert!(selects(&serde_json::from_value(labels).unwrap()));
        let pod = aggregator(&group(json!({"image": "i", "resources": {}})), 0);
        assert!(!selects(&pod.metadata.labels.unwrap()));
    }

    #[test]
    fn an_aggregator_drains_as_long_as_the_manifest_without_an_operator_says() {
        let manifest = include_str!("../../deploy/kubernetes/aggregator/one/deployment.yaml");
        let grace = |aggregators: Value| {
            let pod = aggregator(&group(aggregators), 0);
            pod.spec.unwrap().termination_grace_period_seconds.unwrap()
        };
        let seconds = grace(json!({"image": "i", "resources": {}}));
        let line = format!("terminationGracePeriodSeconds: {seconds}\n");
        assert!(manifest.contains(&line), "the manifest lacks {line}");
        assert_eq!(grace(json!({"image": "i", "resources": {}, "drainSeconds": 60})), 60);
    }

    fn patched(observed: &Value, now: &Value) -> Result<Value, json_patch::PatchError> {
        let pin = Pin::Host("h1".into());
        let observed: Pod = serde_json::from_value(observed.clone()).unwrap();
        let patch = placing(&observed, &pin, Timestamp::UNIX_EPOCH);
        let mut now = now.clone();
        json_patch::patch(&mut now, &patch).map(|()| now)
    }

    #[test]
    fn a_patch_pins_a_pod_and_removes_only_the_own_gate() {
        for annotations in [Value::Null, json!({"a/b": "c"})] {
            let pod = pod(|pod| {
                if !annotations.is_null() {
                    pod["metadata"]["annotations"] = annotations.clone();
                }
            });
            let placed = patched(&pod, &pod).unwrap();
            assert_eq!(placed["spec"]["schedulingGates"], json!([{"name": "other"}]));
            assert_eq!(placed["metadata"]["annotations"][HOST], "h1");
            assert_eq!(placed["metadata"]["annotations"][PLACED_AT], "1970-01-01T00:00:00Z");
            assert_eq!(placed["metadata"]["annotations"]["a/b"], annotations["a/b"]);
            assert!(placed["spec"]["affinity"].to_string().contains("metadata.name"));
        }
    }

    #[test]
    fn a_patch_changes_no_pod_but_the_observed_version() {
        let observed = pod(|_| {});
        for change in [
            (|pod| pod["metadata"]["resourceVersion"] = json!("8")) as fn(&mut Value),
            |pod| pod["spec"]["schedulingGates"] = json!([{"name": "other"}, {"name": "third"}]),
            |pod| pod["spec"]["schedulingGates"] = json!([{"name": GATE}]),
        ] {
            assert!(patched(&observed, &pod(change)).is_err());
        }
    }
}
