//! Standbys: further sets of aggregators, in another failure domain.

use serde_json::{Value, json};

use crate::standin::{Kind, Store};
use crate::world::{GROUP, NAMESPACE, World, gated_worker, group, node_of, worker};

fn with_standby(mode: &str, workers: u32, aggregators: u32) -> Value {
    let mut asked = group(mode, workers, aggregators);
    asked["spec"]["aggregators"]["standbys"] = json!(1);
    asked
}

/// Returns the rack of a pod's node, once it has one.
fn rack_of(store: &Store, pod: &str) -> Option<String> {
    let node = store.get(Kind::Node, "", &node_of(store, pod)?)?;
    node["metadata"]["labels"]["rack"].as_str().map(ToOwned::to_owned)
}

fn aggregator(number: u32) -> String {
    format!("vision-aggregator-{number}")
}

/// Returns the variable that workers get, once it is published.
fn published(store: &Store) -> Option<String> {
    let map = store.get(Kind::ConfigMap, NAMESPACE, "vision-racksum")?;
    map["data"]["RACKSUM_AGGREGATOR"].as_str().map(ToOwned::to_owned)
}

fn address(number: u32) -> String {
    format!("{}.vision-aggregators.ml.svc:7177", aggregator(number))
}

#[tokio::test]
async fn a_standby_is_in_another_rack_and_published_behind_a_comma() {
    for mode in ["FollowWorkers", "PlaceWorkers"] {
        let world = World::with_operator().await;
        world.create(Kind::Group, with_standby(mode, 2, 2));
        for index in 0..2 {
            let pod = if mode == "FollowWorkers" { worker(index) } else { gated_worker(index) };
            world.create(Kind::Pod, pod);
        }
        world.until_condition("Ready", "AggregatorsReady").await;
        let store = world.server.store_quietly();
        let racks: Vec<_> =
            (0..4).map(|number| rack_of(&store, &aggregator(number)).unwrap()).collect();
        assert_eq!(racks[0], rack_of(&store, "train-0").unwrap(), "{mode}");
        assert!(racks[0] == racks[1] && racks[2] == racks[3] && racks[0] != racks[2], "{racks:?}");
        let [a, b, c, d] = [0, 1, 2, 3].map(address);
        assert_eq!(published(&store).unwrap(), format!("{a}+{b},{c}+{d}"));
        let status = &store.get(Kind::Group, NAMESPACE, GROUP).unwrap()["status"];
        assert_eq!(status["endpoints"], json!([a, b, c, d]));
        assert_eq!(status["plan"]["domain"], racks[0]);
        assert_eq!(status["plan"]["aggregators"].as_array().unwrap().len(), 4);
    }
}

#[tokio::test]
async fn without_another_rack_nothing_is_placed_and_the_standby_is_named() {
    let world = World::with_operator().await;
    let mut store = world.server.store();
    for node in ["h3", "h4"] {
        store.edit(Kind::Node, "", node, |node| node["spec"]["unschedulable"] = json!(true));
    }
    drop(store);
    world.create(Kind::Group, with_standby("FollowWorkers", 1, 1));
    world.create(Kind::Pod, worker(0));
    let told = world.until_condition("Planned", "NoRoom").await;
    assert!(told["message"].as_str().unwrap().contains("standby 1"), "{told}");
    assert!(node_of(&world.server.store_quietly(), &aggregator(0)).is_none());
    world.server.store().edit(Kind::Node, "", "h4", |node| {
        node["spec"]["unschedulable"] = json!(false);
    });
    world.until_condition("Ready", "AggregatorsReady").await;
    assert_eq!(node_of(&world.server.store_quietly(), &aggregator(1)).as_deref(), Some("h4"));
}

#[tokio::test]
async fn the_successor_of_a_lost_aggregator_stays_out_of_the_rack_of_the_standby() {
    let world = World::with_operator().await;
    world.create(Kind::Group, with_standby("FollowWorkers", 1, 1));
    world.create(Kind::Pod, worker(0));
    world.until_condition("Ready", "AggregatorsReady").await;
    let before = published(&world.server.store_quietly()).unwrap();
    // The other node of the rack is full, and both of the standby's rack are free.
    let mut store = world.server.store();
    store.edit(Kind::Node, "", "h1", |node| node["spec"]["unschedulable"] = json!(true));
    store.edit(Kind::Node, "", "h2", |node| node["status"]["allocatable"]["cpu"] = json!("0"));
    store.remove(&(Kind::Pod, NAMESPACE.into(), aggregator(0)));
    drop(store);
    let told = world.until_condition("Planned", "NoRoom").await;
    assert!(told["message"].as_str().unwrap().contains("another aggregator apart from"), "{told}");
    world.until_condition("Ready", "AggregatorsNotReady").await;
    world.server.store().edit(Kind::Node, "", "h2", |node| {
        node["status"]["allocatable"]["cpu"] = json!("16");
    });
    world.until_condition("Ready", "AggregatorsReady").await;
    let store = world.server.store_quietly();
    assert_eq!(node_of(&store, &aggregator(0)).as_deref(), Some("h2"));
    assert_eq!(published(&store).unwrap(), before);
}

#[tokio::test]
async fn standbys_are_added_to_a_group_that_runs_and_removed_from_it() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("FollowWorkers", 1, 1));
    world.create(Kind::Pod, worker(0));
    world.until_condition("Ready", "AggregatorsReady").await;
    let uid = world.pod(&aggregator(0)).unwrap()["metadata"]["uid"].clone();
    for (standbys, expected) in [(1, format!("{},{}", address(0), address(1))), (0, address(0))] {
        world.server.store().edit(Kind::Group, NAMESPACE, GROUP, |group| {
            group["spec"]["aggregators"]["standbys"] = json!(standbys);
            group["metadata"]["generation"] = json!(2 + standbys);
        });
        world
            .until("the addresses", |store| {
                let has_standby = store.get(Kind::Pod, NAMESPACE, &aggregator(1)).is_some();
                let is_right = published(store)? == expected && has_standby == (standbys > 0);
                is_right.then_some(())
            })
            .await;
        world.until_condition("Ready", "AggregatorsReady").await;
    }
    // The aggregator that the job uses has stayed.
    assert_eq!(world.pod(&aggregator(0)).unwrap()["metadata"]["uid"], uid);
}
