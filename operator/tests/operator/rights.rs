//! The operator uses all rights that its manifests grant, and no others.

use std::collections::BTreeSet;
use std::time::Duration;

use racksum_operator::lease::Election;
use serde_json::{Value, json};

use crate::standin::{Kind, granted};
use crate::world::{GROUP, NAMESPACE, World, gated_worker, group};

#[tokio::test]
async fn all_rights_that_are_granted_are_used() {
    let world = World::with_operator().await;
    // Leader election.
    let mut election = Election::new(&world.server.client(), NAMESPACE, "racksum-operator", "one");
    election.times.retry = Duration::from_millis(10);
    election.acquire().await;
    election.release().await.unwrap();
    // A worker that stays pending, so that it is evicted.
    let mut asked = group("PlaceWorkers", 2, 1);
    asked["spec"]["pendingTtlSeconds"] = json!(1);
    asked["spec"]["topology"]["network"] = json!({"name": "net", "key": "net.json"});
    let network = json!({"metadata": {"name": "net"}, "data": {"net.json": "{}"}});
    world.create(Kind::ConfigMap, network);
    world.create(Kind::Group, asked);
    world.hands(|hands| _ = hands.unscheduled.insert("train-1".into()));
    (0..2).for_each(|index| world.create(Kind::Pod, gated_worker(index)));
    world.until_event("PendingTooLong").await;
    world.until_condition("Ready", "AggregatorsReady").await;
    // The same event again patches the first one.
    for _ in 0..2 {
        world.hands(|hands| _ = hands.unready.insert("vision-aggregator-0".into()));
        world.until_condition("Ready", "AggregatorsNotReady").await;
        world.hands(|hands| hands.unready.clear());
        world.until_condition("Ready", "AggregatorsReady").await;
    }
    // The workers end, and the group is deleted.
    let mut store = world.server.store();
    let is_worker = |pod: &&Value| pod["metadata"]["labels"]["job"] == "train";
    let workers: Vec<Value> = store.list(Kind::Pod).filter(is_worker).cloned().collect();
    for worker in workers {
        let name = worker["metadata"]["name"].as_str().unwrap().to_owned();
        store.remove(&(Kind::Pod, NAMESPACE.into(), name));
    }
    drop(store);
    world.until_event("WorkersGone").await;
    drop(world.server.store().delete(&(Kind::Group, NAMESPACE.into(), GROUP.into()), None));
    let is_gone = |store: &crate::standin::Store| {
        store.get(Kind::Group, NAMESPACE, GROUP).is_none().then_some(())
    };
    world.until("the group is gone", is_gone).await;

    let used = world.server.rights();
    let unused: BTreeSet<_> = granted().into_keys().filter(|right| !used.contains(right)).collect();
    // The API server asks for this one by itself, when an object gets an owner.
    let implicit = ("racksum.dev", "aggregatorgroups/finalizers", "update");
    let implicit = (implicit.0.into(), implicit.1.into(), implicit.2.into());
    assert_eq!(unused, BTreeSet::from([implicit]));
}

#[tokio::test]
async fn a_request_without_a_right_is_forbidden() {
    let world = World::start().await;
    let nodes: kube::Api<k8s_openapi::api::core::v1::Node> = kube::Api::all(world.server.client());
    let error = nodes.delete("h1", &<_>::default()).await.unwrap_err().to_string();
    let expected = "nodes is forbidden: User \"racksum-operator\" cannot delete resource \"nodes\" \
                    in API group \"\"";
    assert!(error.contains(expected), "{error}");
    let leases: kube::Api<k8s_openapi::api::coordination::v1::Lease> =
        kube::Api::namespaced(world.server.client(), NAMESPACE);
    let error = leases.get("other").await.unwrap_err().to_string();
    assert!(error.contains("leases is forbidden"), "{error}");
}
