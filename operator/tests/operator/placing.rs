//! Mode B: the operator places workers and aggregators together.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::standin::{Kind, Store};
use crate::world::{GROUP, NAMESPACE, World, condition, gated_worker, group, node_of, terms};

/// Returns the number of workers in each rack.
fn racks(store: &Store) -> BTreeMap<String, u32> {
    let mut racks = BTreeMap::new();
    for pod in store.list(Kind::Pod).filter(|pod| pod["metadata"]["labels"]["job"] == "train") {
        let Some(node) = pod["spec"]["nodeName"].as_str() else { continue };
        let node = store.get(Kind::Node, "", node).unwrap();
        let rack = node["metadata"]["labels"]["rack"].as_str().unwrap();
        *racks.entry(rack.to_owned()).or_default() += 1;
    }
    racks
}

async fn ready(world: &World) {
    world.until_condition("Ready", "AggregatorsReady").await;
    world.until_condition("Placed", "AllBound").await;
}

#[tokio::test]
async fn workers_and_aggregators_are_placed_in_one_rack() {
    let world = World::with_operator().await;
    // Rack r1 has room for three workers, rack r2 for four.
    world.server.store().edit(Kind::Node, "", "h1", |node| {
        node["status"]["allocatable"]["nvidia.com/gpu"] = json!("1");
    });
    world.create(Kind::Group, group("PlaceWorkers", 4, 1));
    (0..3).for_each(|index| world.create(Kind::Pod, gated_worker(index)));
    let waiting = world.until_condition("WorkersReady", "WaitingForWorkers").await;
    assert!(waiting["message"].as_str().unwrap().ends_with("of 4 workers exist"), "{waiting}");
    assert!(world.pod("train-0").unwrap()["spec"]["nodeName"].is_null());
    world.create(Kind::Pod, gated_worker(3));
    ready(&world).await;
    let store = world.server.store_quietly();
    assert_eq!(racks(&store), BTreeMap::from([("r2".into(), 4)]));
    let worker = store.get(Kind::Pod, NAMESPACE, "train-0").unwrap();
    let affinity = &worker["spec"]["affinity"]["nodeAffinity"];
    assert_eq!(
        terms(worker),
        json!([{"matchExpressions": [{"key": "rack", "operator": "In", "values": ["r2"]}]}])
    );
    let preference = &affinity["preferredDuringSchedulingIgnoredDuringExecution"][0];
    assert_eq!(preference["preference"]["matchFields"][0]["values"], json!(["h3"]));
    // Ranks are contiguous: the first two workers share a host, and so do the others.
    let hosts: Vec<_> = (0..4).map(|rank| node_of(&store, &format!("train-{rank}"))).collect();
    assert_eq!(hosts[0], hosts[1]);
    assert_eq!(hosts[2], hosts[3]);
    let aggregator = store.get(Kind::Pod, NAMESPACE, "vision-aggregator-0").unwrap();
    let terms = terms(aggregator);
    assert_eq!(terms[0]["matchFields"][0]["key"], "metadata.name");
}

#[tokio::test]
async fn terms_of_a_worker_are_kept_and_all_narrowed() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("PlaceWorkers", 1, 1));
    let mut worker = gated_worker(0);
    let host = |name: &str| {
        json!({"matchExpressions": [
            {"key": "kubernetes.io/hostname", "operator": "In", "values": [name]}
        ]})
    };
    worker["spec"]["affinity"] = json!({
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [host("h3"), host("h4")],
        }},
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []},
    });
    world.create(Kind::Pod, worker);
    ready(&world).await;
    let pod = world.pod("train-0").unwrap();
    let terms = terms(&pod);
    for (index, name) in ["h3", "h4"].into_iter().enumerate() {
        let mut expected = host(name);
        let rack = json!({"key": "rack", "operator": "In", "values": ["r2"]});
        expected["matchExpressions"].as_array_mut().unwrap().push(rack);
        assert_eq!(terms[index], expected);
    }
    assert!(pod["spec"]["affinity"]["podAntiAffinity"].is_object());
}

#[tokio::test]
async fn kueue_removes_its_gate_first_and_its_choice_is_kept() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("PlaceWorkers", 2, 1));
    for index in 0..2 {
        let mut worker = gated_worker(index);
        let gates = json!([{"name": "kueue.x-k8s.io/topology"}, {"name": "racksum.dev/placement"}]);
        worker["spec"]["schedulingGates"] = gates;
        world.create(Kind::Pod, worker);
    }
    let waiting = world.until_condition("WorkersReady", "WaitingForOtherGates").await;
    let expected = "train-0 still has the gate kueue.x-k8s.io/topology, which its owner removes";
    assert_eq!(waiting["message"], expected);
    // Kueue pins each pod to a host and removes its gate. The hosts are in opposite order.
    for (index, host) in [(0, "h4"), (1, "h3")] {
        world.server.store().edit(Kind::Pod, NAMESPACE, &format!("train-{index}"), |pod| {
            pod["spec"]["schedulingGates"] = json!([{"name": "racksum.dev/placement"}]);
            pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": host});
        });
    }
    ready(&world).await;
    let store = world.server.store_quietly();
    assert_eq!(node_of(&store, "train-0").as_deref(), Some("h4"));
    assert_eq!(node_of(&store, "train-1").as_deref(), Some("h3"));
    let aggregator = node_of(&store, "vision-aggregator-0").unwrap();
    assert!(["h3", "h4"].contains(&aggregator.as_str()), "{aggregator}");
}

#[tokio::test]
async fn the_trap_of_jobset_is_told_and_leads_out() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("PlaceWorkers", 2, 1));
    let mut leader = gated_worker(0);
    leader["metadata"]["annotations"] =
        json!({"alpha.jobset.sigs.k8s.io/exclusive-topology": "rack"});
    world.create(Kind::Pod, leader);
    let told = world.until_condition("WorkersReady", "JobSetExclusiveTopology").await;
    let message = told["message"].as_str().unwrap();
    assert!(message.contains("remove the annotation"), "{message}");
    world.until_event("JobSetExclusiveTopology").await;
    // Without the annotation, JobSet creates the other worker.
    world.server.store().edit(Kind::Pod, NAMESPACE, "train-0", |pod| {
        pod["metadata"]["annotations"] = json!({});
    });
    world.create(Kind::Pod, gated_worker(1));
    ready(&world).await;
}

#[tokio::test]
async fn leaders_of_jobs_with_one_pod_each_are_in_no_trap() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("PlaceWorkers", 2, 1));
    for index in 0..2 {
        let mut leader = gated_worker(index);
        leader["metadata"]["annotations"] =
            json!({"alpha.jobset.sigs.k8s.io/exclusive-topology": "rack"});
        world.create(Kind::Pod, leader);
    }
    ready(&world).await;
}

#[tokio::test]
async fn a_lost_worker_gets_the_place_that_it_left() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("PlaceWorkers", 4, 1));
    (0..4).for_each(|index| world.create(Kind::Pod, gated_worker(index)));
    ready(&world).await;
    let before = node_of(&world.server.store_quietly(), "train-1").unwrap();
    let mut replacement = gated_worker(1);
    replacement["metadata"]["name"] = json!("train-1-again");
    let mut store = world.server.store();
    store.remove(&(Kind::Pod, NAMESPACE.into(), "train-1".into()));
    store.create(Kind::Pod, NAMESPACE, replacement).unwrap();
    drop(store);
    let after = world.until("the replacement is bound", |store| node_of(store, "train-1-again"));
    assert_eq!(after.await, before);
}

#[tokio::test]
async fn a_worker_whose_host_is_gone_is_placed_near_the_others() {
    let world = World::with_operator().await;
    let mut asked = group("PlaceWorkers", 2, 1);
    asked["spec"]["topology"]["levels"] = json!(["rack", "kubernetes.io/hostname"]);
    asked["spec"]["topology"]["scope"] = json!("rack");
    world.create(Kind::Group, asked);
    // One GPU a node, so that the workers are on two hosts.
    for name in ["h1", "h2", "h3", "h4"] {
        world.server.store().edit(Kind::Node, "", name, |node| {
            node["status"]["allocatable"]["nvidia.com/gpu"] = json!("1");
        });
    }
    (0..2).for_each(|index| world.create(Kind::Pod, gated_worker(index)));
    ready(&world).await;
    let aggregator = node_of(&world.server.store_quietly(), "vision-aggregator-0").unwrap();
    let workers: Vec<_> = (0..2).map(|index| format!("train-{index}")).collect();
    let lost = {
        let store = world.server.store_quietly();
        let mut apart = workers.iter().filter(|name| node_of(&store, name).unwrap() != aggregator);
        apart.next().unwrap().clone()
    };
    let node = node_of(&world.server.store_quietly(), &lost).unwrap();
    let index = lost.strip_prefix("train-").unwrap().parse().unwrap();
    let mut store = world.server.store();
    store.remove(&(Kind::Node, String::new(), node));
    store.remove(&(Kind::Pod, NAMESPACE.into(), lost.clone()));
    let mut replacement = gated_worker(index);
    replacement["metadata"]["name"] = json!("again");
    store.create(Kind::Pod, NAMESPACE, replacement).unwrap();
    drop(store);
    world.until_event("Replanned").await;
    // No host of the rack has a free GPU, so the worker leaves it.
    world.until("the replacement is bound", |store| node_of(store, "again")).await;
    ready(&world).await;
    assert_eq!(node_of(&world.server.store_quietly(), "vision-aggregator-0").unwrap(), aggregator);
}

#[tokio::test]
async fn a_worker_that_stays_pending_is_evicted_and_its_successor_placed_elsewhere() {
    let world = World::with_operator().await;
    let mut asked = group("PlaceWorkers", 2, 1);
    asked["spec"]["pendingTtlSeconds"] = json!(1);
    asked["spec"]["topology"]["levels"] = json!(["rack", "kubernetes.io/hostname"]);
    world.create(Kind::Group, asked);
    world.hands(|hands| _ = hands.unscheduled.insert("train-1".into()));
    (0..2).for_each(|index| world.create(Kind::Pod, gated_worker(index)));
    world
        .until("the worker is evicted", |store| {
            store.get(Kind::Pod, NAMESPACE, "train-1").is_none().then_some(())
        })
        .await;
    let note = world.until_event("PendingTooLong").await;
    assert!(note.starts_with("train-1 found no place"), "{note}");
    let avoided = world.group()["status"]["avoided"][0]["host"].as_str().unwrap().to_owned();
    let mut successor = gated_worker(1);
    successor["metadata"]["name"] = json!("again");
    world.create(Kind::Pod, successor);
    let node = world.until("the successor is bound", |store| node_of(store, "again")).await;
    assert_ne!(node, avoided);
}

#[tokio::test]
async fn a_worker_that_no_host_of_its_rack_takes_gets_another_rack() {
    let world = World::with_operator().await;
    let mut asked = group("PlaceWorkers", 1, 1);
    asked["spec"]["pendingTtlSeconds"] = json!(1);
    world.create(Kind::Group, asked);
    // The plan does not see why: as for a volume of another zone.
    world.hands(|hands| _ = hands.unscheduled.insert("train-0".into()));
    world.create(Kind::Pod, gated_worker(0));
    let note = world.until_event("PendingTooLong").await;
    let expected = "train-0 found no place on h1 or elsewhere in its domain: ";
    assert!(note.starts_with(expected), "{note}");
    let mut successor = gated_worker(0);
    successor["metadata"]["name"] = json!("again");
    world.create(Kind::Pod, successor);
    let node = world.until("the successor is bound", |store| node_of(store, "again")).await;
    assert!(["h3", "h4"].contains(&node.as_str()), "{node}");
}

#[tokio::test]
async fn a_lost_aggregator_is_replaced_on_its_node_beside_the_workers() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("PlaceWorkers", 2, 1));
    (0..2).for_each(|index| world.create(Kind::Pod, gated_worker(index)));
    ready(&world).await;
    let aggregator = "vision-aggregator-0";
    let old = world.pod(aggregator).unwrap();
    world.server.store().remove(&(Kind::Pod, NAMESPACE.into(), aggregator.into()));
    let new = world.until("a new aggregator", |store| {
        let pod = store.get(Kind::Pod, NAMESPACE, aggregator)?;
        let is_new = pod["metadata"]["uid"] != old["metadata"]["uid"];
        (is_new && !pod["spec"]["nodeName"].is_null()).then(|| pod["spec"]["nodeName"].clone())
    });
    assert_eq!(new.await, old["spec"]["nodeName"]);
    ready(&world).await;
}

#[tokio::test]
async fn an_aggregator_that_stays_pending_goes_to_another_node_and_the_workers_stay() {
    let world = World::with_operator().await;
    let mut asked = group("PlaceWorkers", 2, 1);
    asked["spec"]["pendingTtlSeconds"] = json!(1);
    world.hands(|hands| _ = hands.unscheduled.insert("vision-aggregator-0".into()));
    world.create(Kind::Group, asked);
    (0..2).for_each(|index| world.create(Kind::Pod, gated_worker(index)));
    let note = world.until_event("PendingTooLong").await;
    let host = note.strip_prefix("vision-aggregator-0 found no place on ").unwrap();
    let host = host.split(':').next().unwrap().to_owned();
    let workers = [0, 1].map(|index| world.pod(&format!("train-{index}")).unwrap());
    world.hands(|hands| hands.unscheduled.clear());
    ready(&world).await;
    let store = world.server.store_quietly();
    assert_ne!(node_of(&store, "vision-aggregator-0").unwrap(), host);
    for worker in workers {
        let name = worker["metadata"]["name"].as_str().unwrap();
        let uid = &store.get(Kind::Pod, NAMESPACE, name).unwrap()["metadata"]["uid"];
        assert_eq!(uid, &worker["metadata"]["uid"]);
    }
}

#[tokio::test]
async fn when_all_workers_have_ended_the_next_run_is_placed_anew() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("PlaceWorkers", 2, 1));
    (0..2).for_each(|index| world.create(Kind::Pod, gated_worker(index)));
    ready(&world).await;
    let mut store = world.server.store();
    for name in ["train-0", "train-1"] {
        store.edit(Kind::Pod, NAMESPACE, name, |pod| pod["status"]["phase"] = json!("Succeeded"));
    }
    drop(store);
    world.until_event("WorkersGone").await;
    world
        .until("a gated aggregator and no addresses", |store| {
            let pod = store.get(Kind::Pod, NAMESPACE, "vision-aggregator-0")?;
            let is_hidden = store.get(Kind::ConfigMap, NAMESPACE, "vision-racksum").is_none();
            (pod["spec"]["schedulingGates"].is_array() && is_hidden).then_some(())
        })
        .await;
    for index in 0..2 {
        let mut worker = gated_worker(index);
        worker["metadata"]["name"] = json!(format!("again-{index}"));
        world.create(Kind::Pod, worker);
    }
    world.until("the next run is bound", |store| node_of(store, "again-1")).await;
    ready(&world).await;
}

#[tokio::test]
async fn a_worker_that_accepts_no_node_of_the_plan_is_named_and_none_is_placed() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("PlaceWorkers", 3, 1));
    // The plan counts the nodes that workers accept, and takes rack r1 for all of them.
    for (index, racks) in [(0, json!(["r1"])), (1, json!(["r1"])), (2, json!(["r2"]))] {
        let mut worker = gated_worker(index);
        worker["spec"]["affinity"] = json!({"nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                {"matchExpressions": [{"key": "rack", "operator": "In", "values": racks}]}
            ]}
        }});
        world.create(Kind::Pod, worker);
    }
    let told = world.until_condition("Planned", "NoRoom").await;
    let expected = "train-2 accepts none of the plan's free hosts; ";
    assert!(told["message"].as_str().unwrap().starts_with(expected), "{told}");
    let store = world.server.store_quietly();
    assert!((0..3).all(|index| node_of(&store, &format!("train-{index}")).is_none()));
    assert!(node_of(&store, "vision-aggregator-0").is_none());
    assert!(store.list(Kind::Event).all(|event| event["reason"] != "Planned"));
}

#[tokio::test]
async fn a_successor_that_does_not_accept_the_place_of_a_lost_worker_gets_another() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("PlaceWorkers", 2, 1));
    (0..2).for_each(|index| world.create(Kind::Pod, gated_worker(index)));
    ready(&world).await;
    let before = racks(&world.server.store_quietly());
    assert_eq!(before, BTreeMap::from([("r1".into(), 2)]));
    let mut successor = gated_worker(1);
    successor["metadata"]["name"] = json!("again");
    successor["spec"]["nodeSelector"] = json!({"rack": "r2"});
    let mut store = world.server.store();
    store.remove(&(Kind::Pod, NAMESPACE.into(), "train-1".into()));
    store.create(Kind::Pod, NAMESPACE, successor).unwrap();
    drop(store);
    world.until("the successor is bound", |store| node_of(store, "again")).await;
    ready(&world).await;
    let after = racks(&world.server.store_quietly());
    assert_eq!(after, BTreeMap::from([("r1".into(), 1), ("r2".into(), 1)]));
}

#[tokio::test]
async fn workers_that_came_too_early_keep_their_place() {
    let world = World::with_operator().await;
    // A worker without a gate is bound before the operator can place it.
    let mut early = gated_worker(0);
    early["spec"]["schedulingGates"] = json!([]);
    early["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": "h4"});
    world.create(Kind::Pod, early);
    world.create(Kind::Group, group("PlaceWorkers", 2, 1));
    world.create(Kind::Pod, gated_worker(1));
    ready(&world).await;
    let store = world.server.store_quietly();
    assert_eq!(racks(&store), BTreeMap::from([("r2".into(), 2)]));
}

#[tokio::test]
async fn without_room_nothing_is_placed() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("PlaceWorkers", 9, 1));
    (0..9).for_each(|index| world.create(Kind::Pod, gated_worker(index)));
    let told = world.until_condition("Planned", "NoRoom").await;
    let expected = "job \"vision\" has 9 ranks, and there is room for 8";
    assert!(told["message"].as_str().unwrap().starts_with(expected), "{told}");
    let store = world.server.store_quietly();
    let is_gated = |pod: &Value| pod["spec"]["schedulingGates"].is_array();
    assert!(store.list(Kind::Pod).all(is_gated));
}

#[tokio::test]
async fn two_groups_do_not_plan_with_the_same_room() {
    let world = World::with_operator().await;
    let mut other = group("PlaceWorkers", 4, 1);
    other["metadata"]["name"] = json!("speech");
    other["spec"]["workers"]["matchLabels"] = json!({"job": "other"});
    world.create(Kind::Group, group("PlaceWorkers", 4, 1));
    world.create(Kind::Group, other);
    for index in 0..4 {
        world.create(Kind::Pod, gated_worker(index));
        let mut worker = gated_worker(index);
        worker["metadata"]["name"] = json!(format!("other-{index}"));
        worker["metadata"]["labels"]["job"] = json!("other");
        world.create(Kind::Pod, worker);
    }
    // All eight GPUs are in use in the end, so no two workers were meant for the same one.
    world
        .until("all workers are bound", |store| {
            let bound =
                |job: &str| (0..4).all(|index| node_of(store, &format!("{job}-{index}")).is_some());
            (bound("train") && bound("other")).then_some(())
        })
        .await;
}

#[tokio::test]
async fn pods_that_two_groups_select_are_placed_only_by_the_older_one() {
    let world = World::with_operator().await;
    let mut older = group("PlaceWorkers", 2, 1);
    // Both are created in one second, so the name decides.
    older["metadata"]["name"] = json!("speech");
    world.create(Kind::Group, group("PlaceWorkers", 2, 1));
    world.create(Kind::Group, older);
    (0..2).for_each(|index| world.create(Kind::Pod, gated_worker(index)));
    let told = world.until_condition("WorkersReady", "SharedWorkers").await;
    let message = told["message"].as_str().unwrap();
    assert!(message.contains("which group speech keeps; make the labels"), "{message}");
    let is_ready = |store: &Store| {
        let group = store.get(Kind::Group, NAMESPACE, "speech")?;
        condition(group, "Ready").filter(|one| one["status"] == "True")
    };
    world.until("the older group is ready", is_ready).await;
    {
        let store = world.server.store_quietly();
        assert!((0..2).all(|index| node_of(&store, &format!("train-{index}")).is_some()));
        assert!(node_of(&store, "vision-aggregator-0").is_none());
        assert!(store.get(Kind::Group, NAMESPACE, GROUP).unwrap()["status"]["plan"].is_null());
    }
    let key = (Kind::Group, NAMESPACE.to_owned(), "speech".to_owned());
    drop(world.server.store().delete(&key, None));
    ready(&world).await;
}

#[tokio::test]
async fn an_operator_that_restarts_anywhere_goes_on() {
    let mut world = World::start().await;
    world.create(Kind::Group, group("PlaceWorkers", 4, 1));
    (0..4).for_each(|index| world.create(Kind::Pod, gated_worker(index)));
    let mut writes = 0;
    let is_done = |group: &Value| {
        ["Ready", "Placed"]
            .iter()
            .all(|name| condition(group, name).is_some_and(|one| one["status"] == "True"))
    };
    while !is_done(&world.group()) {
        world.start_operator();
        world.until("a write", |store| (store.writes.len() > writes).then_some(())).await;
        world.kill_operators().await;
        writes = world.server.store_quietly().writes.len();
        assert!(writes < 500, "no progress");
    }
    let store = world.server.store_quietly();
    assert_eq!(racks(&store).len(), 1);
    assert_eq!(racks(&store).values().sum::<u32>(), 4);
}

#[tokio::test]
async fn deletion_frees_gated_workers() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("PlaceWorkers", 4, 1));
    (0..2).for_each(|index| world.create(Kind::Pod, gated_worker(index)));
    world.until_condition("WorkersReady", "WaitingForWorkers").await;
    let key = (Kind::Group, NAMESPACE.to_owned(), GROUP.to_owned());
    drop(world.server.store().delete(&key, None));
    world
        .until("the group is gone and the workers run", |store| {
            let is_gone = store.get(Kind::Group, NAMESPACE, GROUP).is_none();
            (is_gone && node_of(store, "train-0").is_some() && node_of(store, "train-1").is_some())
                .then_some(())
        })
        .await;
}
