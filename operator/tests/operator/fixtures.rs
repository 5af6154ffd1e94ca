//! Objects of a small cluster. The unit tests of plans include this file too.

use serde_json::{Value, json};

pub(crate) const NAMESPACE: &str = "ml";
pub(crate) const GROUP: &str = "vision";

/// Returns a node that is ready and has two GPUs.
pub(crate) fn node(name: &str, rack: &str) -> Value {
    json!({
        "metadata": {"name": name, "labels": {"rack": rack, "kubernetes.io/hostname": name}},
        "spec": {},
        "status": {
            "allocatable": {"cpu": "16", "memory": "64Gi", "pods": "110", "nvidia.com/gpu": "2"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    })
}

/// Returns a worker that other schedulers place.
pub(crate) fn worker(index: u32) -> Value {
    json!({
        "metadata": {
            "name": format!("train-{index}"),
            "labels": {
                "job": "train", "batch.kubernetes.io/job-completion-index": index.to_string(),
            },
        },
        "spec": {"containers": [{
            "name": "worker", "image": "train:1",
            "resources": {"requests": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1"},
                          "limits": {"nvidia.com/gpu": "1"}},
            "envFrom": [{"configMapRef": {"name": "vision-racksum"}}],
        }]},
    })
}

/// Returns a worker that the operator places.
pub(crate) fn gated_worker(index: u32) -> Value {
    let mut worker = worker(index);
    worker["spec"]["schedulingGates"] = json!([{"name": "racksum.dev/placement"}]);
    worker
}

/// Returns a group of the workers.
pub(crate) fn group(mode: &str, workers: u32, aggregators: u32) -> Value {
    json!({
        "metadata": {"name": GROUP},
        "spec": {
            "mode": mode,
            "workers": {"matchLabels": {"job": "train"}, "count": workers, "ranksPerPod": 1},
            "aggregators": {
                "count": aggregators, "image": "racksum:1",
                "port": 7177, "shards": 1, "poolMib": 1024,
                "resources": {"cpu": "2", "memory": "4Gi"},
            },
            "traffic": {"bytes": 100_000_000},
            "topology": {"levels": ["rack"]},
            "pendingTtlSeconds": 3600,
        },
    })
}
