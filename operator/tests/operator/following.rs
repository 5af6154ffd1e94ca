//! Mode A: another scheduler places the workers, and the aggregators follow.

use serde_json::{Value, json};

use crate::standin::Kind;
use crate::world::{GROUP, NAMESPACE, World, condition, group, node_of, worker};

/// Creates a group, and workers which the scheduler binds.
async fn running() -> World {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("FollowWorkers", 2, 1));
    (0..2).for_each(|index| world.create(Kind::Pod, worker(index)));
    world.until_condition("Ready", "AggregatorsReady").await;
    world
}

#[tokio::test]
async fn aggregators_wait_for_all_workers_then_go_to_their_rack_and_are_published() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("FollowWorkers", 2, 1));
    let gated = world.until("a gated aggregator", |store| {
        store.get(Kind::Pod, NAMESPACE, "vision-aggregator-0").cloned()
    });
    let gates = gated.await["spec"]["schedulingGates"].clone();
    assert_eq!(gates, json!([{"name": "racksum.dev/placement"}]));
    let waiting = world.until_condition("WorkersReady", "WaitingForWorkers").await;
    assert_eq!(waiting["message"], "0 of 2 workers exist");

    world.hands(|hands| _ = hands.unscheduled.insert("train-1".into()));
    (0..2).for_each(|index| world.create(Kind::Pod, worker(index)));
    let expected = "train-1 has no node yet: 0/4 nodes are available";
    world
        .until("the unbound worker is named", |store| {
            let group = store.get(Kind::Group, NAMESPACE, GROUP)?;
            (condition(group, "WorkersReady")?["message"] == expected).then_some(())
        })
        .await;
    assert!(world.pod("vision-aggregator-0").unwrap()["spec"]["nodeName"].is_null());

    world.hands(|hands| hands.unscheduled.clear());
    world.until_condition("Ready", "AggregatorsReady").await;
    for reason in ["Planned", "AllWorkers", "AggregatorsReady"] {
        world.until_event(reason).await;
    }
    let store = world.server.store_quietly();
    // The scheduler put both workers on h1, where an aggregator fits too.
    assert_eq!(node_of(&store, "vision-aggregator-0").as_deref(), Some("h1"));
    let map = store.get(Kind::ConfigMap, NAMESPACE, "vision-racksum").unwrap();
    let address = "vision-aggregator-0.vision-aggregators.ml.svc:7177";
    assert_eq!(map["data"], json!({"RACKSUM_AGGREGATOR": address, "RACKSUM_INSECURE": "1"}));
    let group = store.get(Kind::Group, NAMESPACE, GROUP).unwrap();
    let status = &group["status"];
    assert_eq!(status["phase"], "Ready");
    assert_eq!(status["endpoints"], json!(["vision-aggregator-0.vision-aggregators.ml.svc:7177"]));
    assert_eq!(status["plan"]["aggregators"], json!(["h1"]));
    assert_eq!(status["plan"]["workers"], json!([{"host": "h1", "count": 2}]));
    assert!(store.get(Kind::Service, NAMESPACE, "vision-aggregators").is_some());
}

#[tokio::test]
async fn two_aggregators_share_the_job_with_a_plus() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("FollowWorkers", 2, 2));
    (0..2).for_each(|index| world.create(Kind::Pod, worker(index)));
    world.until_condition("Ready", "AggregatorsReady").await;
    let store = world.server.store_quietly();
    let map = store.get(Kind::ConfigMap, NAMESPACE, "vision-racksum").unwrap();
    let expected = "vision-aggregator-0.vision-aggregators.ml.svc:7177+\
                    vision-aggregator-1.vision-aggregators.ml.svc:7177";
    assert_eq!(map["data"]["RACKSUM_AGGREGATOR"], expected);
}

#[tokio::test]
async fn measurements_of_the_network_file_count() {
    let world = World::with_operator().await;
    let mut asked = group("FollowWorkers", 2, 1);
    asked["spec"]["topology"]["network"] = json!({"name": "net", "key": "net.toml"});
    world.create(Kind::Group, asked);
    let missing = world.until_condition("Accepted", "InvalidNetwork").await;
    assert!(missing["message"].as_str().unwrap().contains("net does not exist"), "{missing}");
    // h1 receives slowly, so the aggregator of the workers there goes elsewhere. A host that does
    // not exist any more does no harm.
    let text = "[[links]]\nof = 'h1'\nup = { mbit = 9000, age_s = 180000 }\n\
                down = { mbit = 9000 }\n\
                [[links]]\nof = 'h2'\nup = { mbit = 9 }\ndown = { mbit = 9 }\n\
                [[links]]\nof = 'gone'\nup = { mbit = 9 }\n";
    world.create(Kind::ConfigMap, json!({"metadata": {"name": "net"}, "data": {"net.toml": text}}));
    // Leave no room for the aggregator beside the workers.
    world.server.store().edit(Kind::Node, "", "h1", |node| {
        node["status"]["allocatable"]["cpu"] = json!("8");
    });
    (0..2).for_each(|index| world.create(Kind::Pod, worker(index)));
    world.until_condition("Ready", "AggregatorsReady").await;
    let node = node_of(&world.server.store_quietly(), "vision-aggregator-0").unwrap();
    assert!(["h3", "h4"].contains(&node.as_str()), "{node}");
    let note = world.until_event("StaleNetwork").await;
    assert!(note.starts_with("some measurements of the network file are 50.0 hours old"), "{note}");
    // The plan uses links that nobody measured, once told as an event and as long as it holds.
    let note = world.until_event("PlanNotes").await;
    assert!(note.starts_with("links in use were not measured: "), "{note}");
    assert_eq!(world.group()["status"]["plan"]["notes"], json!([note]));
}

#[tokio::test]
async fn an_aggregator_that_stays_pending_goes_to_another_host() {
    let world = World::with_operator().await;
    let mut asked = group("FollowWorkers", 2, 1);
    asked["spec"]["pendingTtlSeconds"] = json!(1);
    world.hands(|hands| _ = hands.unscheduled.insert("vision-aggregator-0".into()));
    world.create(Kind::Group, asked);
    (0..2).for_each(|index| world.create(Kind::Pod, worker(index)));
    let note = world.until_event("PendingTooLong").await;
    assert!(note.starts_with("vision-aggregator-0 found no place on h1"), "{note}");
    world.hands(|hands| hands.unscheduled.clear());
    world.until_condition("Ready", "AggregatorsReady").await;
    let node = node_of(&world.server.store_quietly(), "vision-aggregator-0").unwrap();
    assert_ne!(node, "h1");
    assert!(world.group()["status"]["avoided"].to_string().contains("h1"));
}

#[tokio::test]
async fn an_aggregator_whose_node_is_cordoned_before_it_is_bound_goes_elsewhere_at_once() {
    let world = World::with_operator().await;
    world.hands(|hands| _ = hands.unscheduled.insert("vision-aggregator-0".into()));
    world.create(Kind::Group, group("FollowWorkers", 2, 1));
    (0..2).for_each(|index| world.create(Kind::Pod, worker(index)));
    world.until_condition("Placed", "Pending").await;
    // Its time to be scheduled has not passed: it is an hour.
    world.server.store().edit(Kind::Node, "", "h1", |node| {
        node["spec"]["unschedulable"] = json!(true);
    });
    world.until_event("PendingTooLong").await;
    world.hands(|hands| hands.unscheduled.clear());
    world.until_condition("Ready", "AggregatorsReady").await;
    let node = node_of(&world.server.store_quietly(), "vision-aggregator-0").unwrap();
    assert_ne!(node, "h1");
}

#[tokio::test]
async fn a_network_file_that_cannot_be_read_is_told_and_can_be_corrected() {
    let world = World::with_operator().await;
    let mut asked = group("FollowWorkers", 1, 1);
    asked["spec"]["topology"]["network"] = json!({"name": "net", "key": "net.toml"});
    let map = |key: &str, text: &str| json!({"metadata": {"name": "net"}, "data": {key: text}});
    world.create(Kind::ConfigMap, map("other", ""));
    world.create(Kind::Group, asked);
    world.create(Kind::Pod, worker(0));
    let message = |world: &World| {
        let told = condition(&world.group(), "Accepted").unwrap();
        told["message"].as_str().unwrap().to_owned()
    };
    world.until_condition("Accepted", "InvalidNetwork").await;
    assert_eq!(message(&world), "ConfigMap net has no key net.toml; add it");
    for (text, reason) in [
        ("links = 3", "key net.toml of ConfigMap net: "),
        ("[[links]]\nof = 'h1'\nup = { mbit = -1 }", "h1"),
        // Not forgotten as too old.
        ("[[links]]\nof = 'h2'\nup = { mbit = 1, age_s = inf }", "h2"),
    ] {
        let key = (Kind::ConfigMap, NAMESPACE.to_owned(), "net".to_owned());
        let mut store = world.server.store();
        store.remove(&key);
        store.create(Kind::ConfigMap, NAMESPACE, map("net.toml", text)).unwrap();
        // Another pod makes the operator look again: it watches no foreign ConfigMaps.
        store.edit(Kind::Pod, NAMESPACE, "train-0", |pod| {
            pod["metadata"]["annotations"] = json!({"text": text});
        });
        drop(store);
        let is_told = |store: &crate::standin::Store| {
            let told = condition(store.get(Kind::Group, NAMESPACE, GROUP)?, "Accepted")?;
            let is_it = told["reason"] == "InvalidNetwork"
                && told["message"].as_str().unwrap().contains(reason);
            is_it.then_some(())
        };
        world.until(reason, is_told).await;
    }
    let mut store = world.server.store();
    store.edit(Kind::ConfigMap, NAMESPACE, "net", |map| map["data"]["net.toml"] = json!(""));
    store.edit(Kind::Pod, NAMESPACE, "train-0", |pod| pod["metadata"]["annotations"] = json!({}));
    drop(store);
    world.until_condition("Ready", "AggregatorsReady").await;
}

#[tokio::test]
async fn nodes_without_labels_are_told_and_can_be_labelled() {
    let world = World::with_operator().await;
    let label = |rack: Option<&str>| {
        let mut store = world.server.store();
        for name in ["h1", "h2", "h3", "h4"] {
            store.edit(Kind::Node, "", name, |node| {
                node["metadata"]["labels"] = json!({"kubernetes.io/hostname": name});
                if let Some(rack) = rack {
                    node["metadata"]["labels"]["rack"] = json!(rack);
                }
            });
        }
    };
    label(None);
    world.create(Kind::Group, group("FollowWorkers", 1, 1));
    world.create(Kind::Pod, worker(0));
    let told = world.until_condition("Planned", "InvalidTopology").await;
    assert!(told["message"].as_str().unwrap().contains("rack"), "{told}");
    assert_eq!(world.group()["status"]["phase"], "Unplaceable");
    label(Some("r1"));
    world.until_condition("Ready", "AggregatorsReady").await;
}

#[tokio::test]
async fn a_lost_aggregator_is_replaced_and_its_address_stays() {
    let world = running().await;
    let old = world.pod("vision-aggregator-0").unwrap()["metadata"]["uid"].clone();
    let before = world.group()["status"]["endpoints"].clone();
    // The node goes away with its pod.
    let mut store = world.server.store();
    store.edit(Kind::Node, "", "h1", |node| node["spec"]["unschedulable"] = json!(true));
    store.remove(&(Kind::Pod, NAMESPACE.into(), "vision-aggregator-0".into()));
    drop(store);
    world
        .until("a new aggregator", |store| {
            let pod = store.get(Kind::Pod, NAMESPACE, "vision-aggregator-0")?;
            (pod["metadata"]["uid"] != old && pod["spec"]["nodeName"] == "h2").then_some(())
        })
        .await;
    world.until_condition("Ready", "AggregatorsReady").await;
    assert_eq!(world.group()["status"]["endpoints"], before);
}

#[tokio::test]
async fn a_lost_aggregator_is_told_even_if_the_network_file_is_gone() {
    let world = World::with_operator().await;
    let mut asked = group("FollowWorkers", 1, 1);
    asked["spec"]["topology"]["network"] = json!({"name": "net", "key": "net.toml"});
    let map = json!({"metadata": {"name": "net"}, "data": {"net.toml": ""}});
    world.create(Kind::ConfigMap, map.clone());
    world.create(Kind::Group, asked);
    world.create(Kind::Pod, worker(0));
    world.until_condition("Ready", "AggregatorsReady").await;
    let mut store = world.server.store();
    store.remove(&(Kind::ConfigMap, NAMESPACE.into(), "net".into()));
    store.edit(Kind::Node, "", "h1", |node| node["spec"]["unschedulable"] = json!(true));
    store.remove(&(Kind::Pod, NAMESPACE.into(), "vision-aggregator-0".into()));
    drop(store);
    world.until_condition("Accepted", "InvalidNetwork").await;
    world.until_condition("Ready", "AggregatorsNotReady").await;
    world.until_condition("Placed", "Gated").await;
    let mut store = world.server.store();
    store.create(Kind::ConfigMap, NAMESPACE, map).unwrap();
    // Another pod makes the operator look again: it watches no foreign ConfigMaps.
    store.edit(Kind::Pod, NAMESPACE, "train-0", |pod| pod["metadata"]["annotations"] = json!({}));
    drop(store);
    world.until_condition("Ready", "AggregatorsReady").await;
    assert_eq!(node_of(&world.server.store_quietly(), "vision-aggregator-0").unwrap(), "h2");
}

#[tokio::test]
async fn an_aggregator_that_stops_serving_is_told_and_addresses_stay_published() {
    let world = running().await;
    world.hands(|hands| _ = hands.unready.insert("vision-aggregator-0".into()));
    world.until_condition("Ready", "AggregatorsNotReady").await;
    world.until_event("AggregatorsNotReady").await;
    let store = world.server.store_quietly();
    assert!(store.get(Kind::ConfigMap, NAMESPACE, "vision-racksum").is_some());
}

#[tokio::test]
async fn workers_that_move_while_aggregators_run_are_told() {
    let world = running().await;
    let mut store = world.server.store();
    store.remove(&(Kind::Pod, NAMESPACE.into(), "train-1".into()));
    store.edit(Kind::Node, "", "h1", |node| node["spec"]["unschedulable"] = json!(true));
    store.create(Kind::Pod, NAMESPACE, worker(1)).unwrap();
    drop(store);
    world.until_condition("Planned", "WorkersMoved").await;
    let node = node_of(&world.server.store_quietly(), "vision-aggregator-0");
    assert_eq!(node.as_deref(), Some("h1"), "a running aggregator stays");
    // They come back.
    let mut store = world.server.store();
    store.edit(Kind::Node, "", "h1", |node| node["spec"]["unschedulable"] = json!(false));
    store.remove(&(Kind::Pod, NAMESPACE.into(), "train-1".into()));
    store.create(Kind::Pod, NAMESPACE, worker(1)).unwrap();
    drop(store);
    world.until_condition("Planned", "Planned").await;
}

#[tokio::test]
async fn own_aggregators_that_the_labels_select_are_no_workers() {
    let world = World::with_operator().await;
    let mut asked = group("FollowWorkers", 1, 1);
    asked["spec"]["workers"]["matchLabels"] = json!({"racksum.dev/group": GROUP});
    world.create(Kind::Group, asked);
    let mut only = worker(0);
    only["metadata"]["labels"]["racksum.dev/group"] = json!(GROUP);
    world.create(Kind::Pod, only);
    world.until_condition("Ready", "AggregatorsReady").await;
    world.server.store().edit(Kind::Pod, NAMESPACE, "train-0", |pod| {
        pod["status"]["phase"] = json!("Succeeded");
    });
    world.until_event("WorkersGone").await;
}

#[tokio::test]
async fn when_all_workers_have_ended_the_aggregators_are_gated_again() {
    let world = running().await;
    let mut store = world.server.store();
    for name in ["train-0", "train-1"] {
        store.edit(Kind::Pod, NAMESPACE, name, |pod| pod["status"]["phase"] = json!("Succeeded"));
    }
    drop(store);
    world.until_event("WorkersGone").await;
    world
        .until("a gated aggregator and no addresses", |store| {
            let pod = store.get(Kind::Pod, NAMESPACE, "vision-aggregator-0")?;
            let is_gated = pod["spec"]["schedulingGates"].is_array();
            let is_hidden = store.get(Kind::ConfigMap, NAMESPACE, "vision-racksum").is_none();
            (is_gated && is_hidden).then_some(())
        })
        .await;
    // The next run of the job gets a plan of its own.
    let mut store = world.server.store();
    for name in ["train-0", "train-1"] {
        store.remove(&(Kind::Pod, NAMESPACE.into(), name.into()));
    }
    store.edit(Kind::Node, "", "h1", |node| node["spec"]["unschedulable"] = json!(true));
    for index in 0..2 {
        store.create(Kind::Pod, NAMESPACE, worker(index)).unwrap();
    }
    drop(store);
    world.until_condition("Ready", "AggregatorsReady").await;
    assert_eq!(world.group()["status"]["plan"]["aggregators"], json!(["h2"]));
}

#[tokio::test]
async fn more_workers_than_the_spec_says_are_told() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("FollowWorkers", 1, 1));
    (0..2).for_each(|index| world.create(Kind::Pod, worker(index)));
    let told = world.until_condition("WorkersReady", "TooManyWorkers").await;
    let expected = "2 pods match workers.matchLabels, and workers.count is 1; correct one of them";
    assert_eq!(told["message"], expected);
    world.until_event("TooManyWorkers").await;
}

#[tokio::test]
async fn a_wrong_spec_is_told_and_can_be_corrected() {
    let world = World::with_operator().await;
    let mut asked = group("FollowWorkers", 2, 1);
    asked["spec"]["topology"]["scope"] = json!("zone");
    world.create(Kind::Group, asked);
    let told = world.until_condition("Accepted", "InvalidSpec").await;
    let expected = "job \"vision\": unknown level \"zone\"; the inventory has rack";
    assert_eq!(told["message"], expected);
    assert_eq!(world.group()["status"]["phase"], "Invalid");
    world.server.store().edit(Kind::Group, NAMESPACE, GROUP, |group| {
        group["spec"]["topology"]["scope"] = json!("rack");
        group["metadata"]["generation"] = json!(2);
    });
    world.until_condition("Accepted", "Valid").await;
}

#[tokio::test]
async fn without_room_the_reason_is_told_and_room_that_appears_is_used() {
    let world = World::with_operator().await;
    for name in ["h1", "h2", "h3", "h4"] {
        world.server.store().edit(Kind::Node, "", name, |node| {
            node["status"]["allocatable"]["cpu"] = json!("8");
            node["metadata"]["labels"]["disk"] = json!("slow");
        });
    }
    let mut asked = group("FollowWorkers", 2, 1);
    asked["spec"]["aggregators"]["nodeSelector"] = json!({"disk": "fast"});
    world.create(Kind::Group, asked);
    (0..2).for_each(|index| world.create(Kind::Pod, worker(index)));
    let told = world.until_condition("Planned", "NoRoom").await;
    assert!(told["message"].as_str().unwrap().contains("no placement"), "{told}");
    world.server.store().edit(Kind::Node, "", "h2", |node| {
        node["metadata"]["labels"]["disk"] = json!("fast");
    });
    world.until_condition("Ready", "AggregatorsReady").await;
    assert_eq!(world.group()["status"]["plan"]["aggregators"], json!(["h2"]));
}

#[tokio::test]
async fn an_operator_that_restarts_anywhere_goes_on() {
    let mut world = World::start().await;
    world.create(Kind::Group, group("FollowWorkers", 2, 2));
    (0..2).for_each(|index| world.create(Kind::Pod, worker(index)));
    // Stop the operator after each of its writes, until the group is ready.
    let mut writes = 0;
    while condition(&world.group(), "Ready").is_none_or(|ready| ready["status"] != "True") {
        world.start_operator();
        let more = |store: &crate::standin::Store| (store.writes.len() > writes).then_some(());
        world.until("a write", more).await;
        world.kill_operators().await;
        writes = world.server.store_quietly().writes.len();
        assert!(writes < 500, "no progress");
    }
    let store = world.server.store_quietly();
    let plan = &store.get(Kind::Group, NAMESPACE, GROUP).unwrap()["status"]["plan"];
    for index in 0..2 {
        let name = format!("vision-aggregator-{index}");
        assert_eq!(plan["aggregators"][index], json!(node_of(&store, &name)));
    }
}

#[tokio::test]
async fn deletion_removes_the_aggregators_and_then_the_group() {
    let world = running().await;
    let key = (Kind::Group, NAMESPACE.to_owned(), GROUP.to_owned());
    drop(world.server.store().delete(&key, None));
    let is_gone = |store: &crate::standin::Store| {
        let group = store.get(Kind::Group, NAMESPACE, GROUP).is_none();
        let pod = store.get(Kind::Pod, NAMESPACE, "vision-aggregator-0").is_none();
        (group && pod).then_some(())
    };
    world.until("the group is gone", is_gone).await;
    let left: Vec<Value> = world.server.store_quietly().list(Kind::ConfigMap).cloned().collect();
    assert_eq!(left, [] as [Value; 0]);
    assert!(world.pod("train-0").is_some());
}
