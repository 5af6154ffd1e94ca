//! Conditions: each describes the latest spec.

use serde_json::{Value, json};

use crate::standin::{Kind, Refusal, Store};
use crate::world::{GROUP, NAMESPACE, World, condition, gated_worker, group, worker};

/// Creates a group, and workers which the scheduler binds.
async fn running() -> World {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("FollowWorkers", 2, 1));
    (0..2).for_each(|index| world.create(Kind::Pod, worker(index)));
    world.until_condition("Ready", "AggregatorsReady").await;
    world.until_condition("Placed", "AllBound").await;
    world
}

/// Changes the spec as a person does.
fn change(world: &World, change: impl FnOnce(&mut Value)) {
    world.server.store().edit(Kind::Group, NAMESPACE, GROUP, |group| {
        change(&mut group["spec"]);
        let generation = group["metadata"]["generation"].as_i64().unwrap();
        group["metadata"]["generation"] = json!(generation + 1);
    });
}

/// Waits until each condition describes a generation, and returns their reasons by type.
async fn described(world: &World, generation: i64) -> Value {
    let found = |store: &Store| {
        let status = &store.get(Kind::Group, NAMESPACE, GROUP)?["status"];
        let conditions = status["conditions"].as_array()?;
        let are_new = conditions.iter().all(|one| one["observedGeneration"] == generation);
        if !are_new || status["observedGeneration"] != generation {
            return None;
        }
        let reasons = conditions
            .iter()
            .map(|one| (one["type"].as_str().unwrap().to_owned(), one["reason"].clone()));
        Some(reasons.collect())
    };
    world.until("all conditions describe the spec", found).await
}

#[tokio::test]
async fn a_spec_that_changes_is_described_by_all_conditions() {
    let world = running().await;
    // Nothing is planned anew for this field.
    change(&world, |spec| spec["pendingTtlSeconds"] = json!(600));
    let expected = json!({
        "Accepted": "Valid", "Applied": "Written", "Placed": "AllBound", "Planned": "Planned",
        "Ready": "AggregatorsReady", "WorkersReady": "AllWorkers",
    });
    assert_eq!(described(&world, 2).await, expected);
}

#[tokio::test]
async fn a_group_whose_spec_becomes_invalid_is_not_ready_and_its_pods_stay() {
    let world = running().await;
    let before = world.pod("vision-aggregator-0").unwrap();
    change(&world, |spec| spec["topology"]["scope"] = json!("zone"));
    let expected = json!({
        "Accepted": "InvalidSpec", "Applied": "Written", "Placed": "AllBound",
        "Planned": "NotAccepted", "Ready": "NotAccepted", "WorkersReady": "AllWorkers",
    });
    assert_eq!(described(&world, 2).await, expected);
    for name in ["Accepted", "Planned", "Ready"] {
        assert_eq!(condition(&world.group(), name).unwrap()["status"], "False", "{name}");
    }
    assert_eq!(world.group()["status"]["phase"], "Invalid");
    assert_eq!(world.pod("vision-aggregator-0").unwrap(), before);
    assert!(
        world.server.store_quietly().get(Kind::ConfigMap, NAMESPACE, "vision-racksum").is_some()
    );
    // An aggregator that is lost meanwhile is told too.
    let key = (Kind::Pod, NAMESPACE.into(), "vision-aggregator-0".into());
    world.server.store().remove(&key);
    world.until_condition("Placed", "Gated").await;
    change(&world, |spec| spec["topology"]["scope"] = json!("rack"));
    world.until_condition("Ready", "AggregatorsReady").await;
    let reasons = described(&world, 3).await;
    assert_eq!(reasons["Planned"], "Planned");
    assert_eq!(world.group()["status"]["phase"], "Ready");
}

#[tokio::test]
async fn racks_are_refused_and_not_ignored() {
    let world = World::with_operator().await;
    let mut asked = group("FollowWorkers", 1, 1);
    asked["spec"]["aggregators"]["racks"] = json!(true);
    world.create(Kind::Group, asked);
    world.create(Kind::Pod, worker(0));
    let told = world.until_condition("Accepted", "InvalidSpec").await;
    assert!(told["message"].as_str().unwrap().starts_with("aggregators.racks is true"), "{told}");
    change(&world, |spec| spec["aggregators"]["racks"] = json!(false));
    world.until_condition("Ready", "AggregatorsReady").await;
}

#[tokio::test]
async fn a_plan_that_lacks_its_network_file_is_told_by_its_own_condition() {
    let world = World::with_operator().await;
    let mut asked = group("FollowWorkers", 1, 1);
    asked["spec"]["topology"]["network"] = json!({"name": "net", "key": "net.toml"});
    world.create(Kind::Group, asked);
    world.create(Kind::Pod, worker(0));
    world.until_condition("Accepted", "InvalidNetwork").await;
    world.until_condition("Planned", "NotAccepted").await;
}

#[tokio::test]
async fn workers_with_the_operators_gate_in_mode_a_are_told() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("FollowWorkers", 1, 1));
    world.create(Kind::Pod, gated_worker(0));
    let told = world.until_condition("WorkersReady", "GateInFollowWorkers").await;
    let message = told["message"].as_str().unwrap();
    assert!(message.starts_with("train-0 has the gate racksum.dev/placement"), "{message}");
    world.until_event("GateInFollowWorkers").await;
    // The other way out than another template.
    change(&world, |spec| spec["mode"] = json!("PlaceWorkers"));
    world.until_condition("Ready", "AggregatorsReady").await;
}

#[tokio::test]
async fn a_group_that_is_being_deleted_is_not_ready() {
    let world = running().await;
    world.server.refuse(Refusal {
        method: "DELETE",
        part: "/pods/vision-aggregator-0".into(),
        times: u32::MAX,
        code: 403,
        message: "cannot delete pods".into(),
    });
    let key = (Kind::Group, NAMESPACE.to_owned(), GROUP.to_owned());
    drop(world.server.store().delete(&key, None));
    let told = world.until_condition("Ready", "Deleting").await;
    assert_eq!(told["status"], "False");
    let left = "; its aggregators have 3600 s to hand over their jobs";
    assert!(told["message"].as_str().unwrap().ends_with(left), "{told}");
    world.until_condition("Applied", "Refused").await;
    assert_eq!(world.group()["status"]["phase"], "Terminating");
    world.server.faults(|faults| faults.refusals.clear());
    let is_gone = |store: &Store| store.get(Kind::Group, NAMESPACE, GROUP).is_none().then_some(());
    world.until("the group is gone", is_gone).await;
}

#[tokio::test]
async fn a_former_aggregator_that_does_not_end_is_named_with_its_node() {
    let world = running().await;
    let name = "vision-aggregator-0";
    world.hands(|hands| _ = hands.unending.insert(name.into()));
    drop(world.server.store().delete(&(Kind::Pod, NAMESPACE.into(), name.into()), None));
    let expected = "the former pod vision-aggregator-0 is still ending on h1; if that node is \
                    gone, delete the node or force the deletion of the pod";
    let is_told = |store: &Store| {
        let told = condition(store.get(Kind::Group, NAMESPACE, GROUP)?, "Placed")?;
        (told["message"] == expected).then_some(())
    };
    world.until("the pod is named", is_told).await;
    world.hands(|hands| hands.unending.clear());
    world.until_condition("Placed", "AllBound").await;
    world.until_condition("Ready", "AggregatorsReady").await;
}
