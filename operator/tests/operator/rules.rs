//! The rules that the stand-in enforces, with the texts of the API server.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Service};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Error};
use racksum_operator::crd::AggregatorGroup;
use serde_json::{Value, json};

use crate::standin::{Kind, Server, typed};
use crate::world::{GROUP, NAMESPACE, gated_worker, group, read, worker};

async fn pods(server: &Server, pod: &Value) -> Api<Pod> {
    let pods = Api::namespaced(server.admin(), "ml");
    pods.create(&PostParams::default(), &read(pod)).await.unwrap();
    pods
}

async fn patched(pods: &Api<Pod>, patch: Value) -> Result<Pod, String> {
    let patch: Patch<()> = Patch::Json(serde_json::from_value(patch).unwrap());
    pods.patch("train-0", &PatchParams::default(), &patch).await.map_err(message)
}

fn message(error: Error) -> String {
    match error {
        Error::Api(status) => format!("{} {}", status.code, status.message),
        error => panic!("{error}"),
    }
}

const TERMS: &str = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/\
                     nodeSelectorTerms";

fn pinned(name: &str) -> Value {
    json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]})
}

fn with_terms(terms: &Value) -> Value {
    let mut pod = gated_worker(0);
    pod["spec"]["affinity"] = json!({"nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}
    }});
    pod
}

#[tokio::test]
async fn gates_are_only_removed() {
    let server = Server::start().await;
    let pods = pods(&server, &gated_worker(0)).await;
    let add = json!([{"op": "add", "path": "/spec/schedulingGates/-", "value": {"name": "g2"}}]);
    let refused = patched(&pods, add).await.unwrap_err();
    let expected = "422 Pod \"train-0\" is invalid: spec.schedulingGates[1].name: Forbidden: only \
                    deletion is allowed, but found new scheduling gate 'g2'";
    assert_eq!(refused, expected);
    patched(&pods, json!([{"op": "remove", "path": "/spec/schedulingGates/0"}])).await.unwrap();
}

#[tokio::test]
async fn affinity_is_only_narrowed_inside_terms() {
    let server = Server::start().await;
    let pods = pods(&server, &with_terms(&json!([pinned("h1"), {}]))).await;
    let add = json!([{"op": "add", "path": format!("{TERMS}/-"), "value": pinned("h2")}]);
    let refused = patched(&pods, add).await.unwrap_err();
    let expected = "no additions/deletions to non-empty NodeSelectorTerms list are allowed";
    assert!(refused.ends_with(expected), "{refused}");
    let only = "only additions are allowed (no mutations or deletions)";
    for (index, value) in [(0, pinned("h2")), (1, pinned("h1"))] {
        let replace =
            json!([{"op": "replace", "path": format!("{TERMS}/{index}"), "value": value}]);
        let refused = patched(&pods, replace).await.unwrap_err();
        assert!(refused.ends_with(only), "{refused}");
    }
    let requirement = json!({"key": "rack", "operator": "In", "values": ["r1"]});
    let narrow = json!([
        {"op": "add", "path": format!("{TERMS}/0/matchExpressions"), "value": [requirement]},
        {"op": "remove", "path": "/spec/schedulingGates/0"},
    ]);
    patched(&pods, narrow).await.unwrap();
    // Without gates, nothing of it changes any more.
    let late = json!([{"op": "remove", "path": format!("{TERMS}/0/matchExpressions")}]);
    let refused = patched(&pods, late).await.unwrap_err();
    assert!(refused.contains("pod updates may not change fields other than"), "{refused}");
}

#[tokio::test]
async fn node_selectors_are_only_added_to() {
    let server = Server::start().await;
    let mut pod = gated_worker(0);
    pod["spec"]["nodeSelector"] = json!({"a": "1"});
    let pods = pods(&server, &pod).await;
    let change = json!([{"op": "replace", "path": "/spec/nodeSelector/a", "value": "2"}]);
    let refused = patched(&pods, change).await.unwrap_err();
    let expected = "only additions to spec.nodeSelector are allowed (no mutations or deletions)";
    assert!(refused.ends_with(expected), "{refused}");
    let add = json!([{"op": "add", "path": "/spec/nodeSelector/b", "value": "2"}]);
    patched(&pods, add).await.unwrap();
    let image = json!([{"op": "add", "path": "/spec/hostname", "value": "x"}]);
    let refused = patched(&pods, image).await.unwrap_err();
    assert!(refused.contains("pod updates may not change fields other than"), "{refused}");
}

#[tokio::test]
async fn a_test_that_fails_leaves_the_pod_as_it_is() {
    let server = Server::start().await;
    let pods = pods(&server, &worker(0)).await;
    let patch = json!([
        {"op": "test", "path": "/metadata/resourceVersion", "value": "99"},
        {"op": "add", "path": "/metadata/annotations", "value": {"a": "b"}},
    ]);
    let refused = patched(&pods, patch).await.unwrap_err();
    let expected = "422 the server rejected our request due to an error in our request";
    assert_eq!(refused, expected);
    assert_eq!(pods.get("train-0").await.unwrap().metadata.annotations, None);
}

#[tokio::test]
async fn writes_of_old_versions_and_other_uids_are_conflicts() {
    let server = Server::start().await;
    let leases: Api<Lease> = Api::namespaced(server.admin(), "ml");
    let lease: Lease = read(&json!({"metadata": {"name": "l"}, "spec": {}}));
    let old = leases.create(&PostParams::default(), &lease).await.unwrap();
    let mut new = old.clone();
    new.spec.as_mut().unwrap().holder_identity = Some("a".into());
    leases.replace("l", &PostParams::default(), &new).await.unwrap();
    let refused = leases.replace("l", &PostParams::default(), &new).await.map_err(message);
    assert!(refused.unwrap_err().starts_with("409 Operation cannot be fulfilled on leases"));
    let twice = leases.create(&PostParams::default(), &lease).await.map_err(message);
    assert_eq!(twice.unwrap_err(), "409 leases \"l\" already exists");
    let preconditions = Some(Preconditions { uid: Some("x".into()), resource_version: None });
    let params = DeleteParams { preconditions, ..DeleteParams::default() };
    let refused = leases.delete("l", &params).await.map_err(message);
    assert!(refused.unwrap_err().starts_with("409 Precondition failed: UID"));
}

#[tokio::test]
async fn names_that_are_no_labels_of_dns_are_invalid() {
    let server = Server::start().await;
    let services: Api<Service> = Api::namespaced(server.admin(), "ml");
    for name in ["a.b", "2a"] {
        let service: Service = read(&json!({"metadata": {"name": name}, "spec": {}}));
        let refused = services.create(&PostParams::default(), &service).await.map_err(message);
        assert!(refused.unwrap_err().contains("a DNS-1035 label must consist of"), "{name}");
    }
    let mut pod = worker(0);
    pod["spec"]["hostname"] = json!("a.b");
    let pods: Api<Pod> = Api::namespaced(server.admin(), "ml");
    let refused = pods.create(&PostParams::default(), &read(&pod)).await.map_err(message);
    assert!(refused.unwrap_err().contains("spec.hostname: Invalid value: \"a.b\""));
}

#[tokio::test]
async fn finalizers_hold_a_deleted_object_and_its_generation_counts_up() {
    let server = Server::start().await;
    let groups: Api<AggregatorGroup> = Api::namespaced(server.admin(), NAMESPACE);
    let mut group = typed(Kind::Group, group("FollowWorkers", 1, 1));
    group["metadata"]["finalizers"] = json!(["a/b"]);
    groups.create(&PostParams::default(), &read(&group)).await.unwrap();
    groups.delete(GROUP, &DeleteParams::default()).await.unwrap();
    let held = groups.get(GROUP).await.unwrap().metadata;
    assert!(held.deletion_timestamp.is_some());
    assert_eq!(held.generation, Some(2));
    let patch = Patch::Merge(json!({"metadata": {"finalizers": []}}));
    groups.patch(GROUP, &PatchParams::default(), &patch).await.unwrap();
    assert!(groups.get_opt(GROUP).await.unwrap().is_none());
}

#[tokio::test]
async fn watches_that_break_end_and_a_server_that_is_gone_answers_nothing() {
    use futures::StreamExt;
    use kube::api::{WatchEvent, WatchParams};
    let server = Server::start().await;
    let pods = pods(&server, &worker(0)).await;
    let params = WatchParams::default().disable_bookmarks();
    let mut events = pods.watch(&params, "0").await.unwrap().boxed();
    assert!(events.next().await.unwrap().is_ok());
    server.faults(|faults| faults.breaks += 1);
    while let Some(event) = events.next().await {
        event.unwrap();
    }
    let mut events = pods.watch(&params, "0").await.unwrap().boxed();
    assert!(events.next().await.unwrap().is_ok());
    server.faults(|faults| faults.is_gone = true);
    while let Some(event) = events.next().await {
        assert!(matches!(event, Ok(WatchEvent::Bookmark(_)) | Err(_)), "{event:?}");
    }
    assert!(pods.list(&ListParams::default()).await.is_err());
}

#[tokio::test]
async fn applied_fields_have_owners() {
    let server = Server::start().await;
    let maps: Api<ConfigMap> = Api::namespaced(server.admin(), "ml");
    let apply = |manager: &'static str, data: Value, force: bool| {
        let maps = maps.clone();
        async move {
            let params = PatchParams { force, ..PatchParams::apply(manager) };
            let map = json!({
                "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m"}, "data": data,
            });
            maps.patch("m", &params, &Patch::Apply(map)).await.map_err(message)
        }
    };
    apply("a", json!({"x": "1", "y": "1"}), false).await.unwrap();
    let refused = apply("b", json!({"x": "2"}), false).await.unwrap_err();
    assert!(
        refused.starts_with("409 Apply failed with 1 conflict: conflict with \"a\""),
        "{refused}"
    );
    apply("b", json!({"z": "1"}), false).await.unwrap();
    let map = apply("a", json!({"x": "1"}), false).await.unwrap();
    assert_eq!(json!(map.data), json!({"x": "1", "z": "1"}));
}

#[tokio::test]
async fn versions_that_are_gone_cannot_be_watched() {
    use futures::StreamExt;
    use kube::api::{WatchEvent, WatchParams};
    let server = Server::start().await;
    let pods = pods(&server, &worker(0)).await;
    let version =
        pods.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    let mut events = pods.watch(&WatchParams::default(), &version).await.unwrap().boxed();
    let bookmark = events.next().await.unwrap().unwrap();
    assert!(matches!(bookmark, WatchEvent::Bookmark(_)), "{bookmark:?}");
    server
        .store()
        .edit(Kind::Pod, "ml", "train-0", |pod| pod["status"]["phase"] = json!("Running"));
    let event = events.next().await.unwrap().unwrap();
    assert!(matches!(event, WatchEvent::Modified(_)), "{event:?}");
    server.store().compact();
    let mut late = pods.watch(&WatchParams::default(), &version).await.unwrap().boxed();
    let gone = late.next().await.unwrap().unwrap();
    assert!(matches!(&gone, WatchEvent::Error(status) if status.code == 410), "{gone:?}");
}
