//! An API server that refuses, vanishes, and breaks watches.

use std::time::Duration;

use racksum_operator::controller::{self, Options};
use serde_json::json;

use crate::standin::{Faults, Kind, Refusal, Store};
use crate::world::{GROUP, NAMESPACE, World, gated_worker, group, node_of, options, worker};

fn refusal(method: &'static str, part: &str, code: u16, message: &str) -> Refusal {
    Refusal { method, part: part.into(), times: u32::MAX, code, message: message.into() }
}

#[tokio::test]
async fn a_refused_write_is_told_and_retried_until_it_is_allowed() {
    let world = World::with_operator().await;
    let text = "pods \"vision-aggregator-0\" is forbidden: User \"racksum\" cannot patch pods";
    world.server.refuse(refusal("PATCH", "/pods/vision-aggregator-0", 403, text));
    world.create(Kind::Group, group("FollowWorkers", 1, 1));
    world.create(Kind::Pod, worker(0));
    let told = world.until_condition("Applied", "Refused").await;
    let message = told["message"].as_str().unwrap();
    assert!(message.starts_with("placing pod vision-aggregator-0: "), "{message}");
    assert!(message.contains("is forbidden"), "{message}");
    let note = world.until_event("Refused").await;
    assert!(note.contains("cannot patch"), "{note}");
    assert!(world.pod("vision-aggregator-0").unwrap()["spec"]["nodeName"].is_null());
    world.server.faults(|faults| faults.refusals.clear());
    world.until_condition("Applied", "Written").await;
    world.until_condition("Ready", "AggregatorsReady").await;
}

#[tokio::test]
async fn a_write_that_fails_several_times_succeeds_in_the_end() {
    let world = World::with_operator().await;
    let message = "etcdserver: request timed out";
    let mut failing = refusal("POST", "/pods", 500, message);
    failing.times = 6;
    world.server.refuse(failing);
    world.create(Kind::Group, group("FollowWorkers", 1, 1));
    world.create(Kind::Pod, worker(0));
    world.until_condition("Ready", "AggregatorsReady").await;
    world.until_event("Refused").await;
    let left = world.server.faults(|faults| faults.refusals[0].times);
    assert_eq!(left, 0);
}

#[tokio::test]
async fn a_server_that_vanishes_is_told_once_it_is_back() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("FollowWorkers", 1, 1));
    world.until_condition("WorkersReady", "WaitingForWorkers").await;
    // The first failures have an answer; the retries after them have none.
    let text = "the server is about to vanish";
    world.server.refuse(refusal("GET", "/aggregatorgroups/vision", 500, text));
    world.create(Kind::Pod, worker(0));
    let has_failed = |faults: &mut Faults| faults.refusals[0].times < u32::MAX;
    world.until("a failed read", |_| world.server.faults(has_failed).then_some(())).await;
    world.server.faults(|faults| faults.is_gone = true);
    let is_tried = |faults: &mut Faults| faults.unanswered >= 20;
    world.until("retries", |_| world.server.faults(is_tried).then_some(())).await;
    world.server.faults(|faults| {
        faults.refusals.clear();
        faults.is_gone = false;
    });
    world.until_event("Unreachable").await;
    world.until_condition("Ready", "AggregatorsReady").await;
    world.until_condition("Applied", "Written").await;
}

#[tokio::test]
async fn watches_that_break_or_expire_lose_nothing() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("PlaceWorkers", 2, 1));
    world.until_condition("WorkersReady", "WaitingForWorkers").await;
    // Hold all events, change pods, forget the history, then break the watches.
    world.server.faults(|faults| faults.holds_events = true);
    (0..2).for_each(|index| world.create(Kind::Pod, gated_worker(index)));
    world.server.store().compact();
    world.server.faults(|faults| {
        faults.holds_events = false;
        faults.breaks += 1;
    });
    world.until_condition("Ready", "AggregatorsReady").await;
}

#[tokio::test]
async fn conflicts_with_other_writers_are_retried_and_no_trouble() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("PlaceWorkers", 4, 1));
    (0..4).for_each(|index| world.create(Kind::Pod, gated_worker(index)));
    // Another controller annotates the pods all the time.
    for round in 0..200 {
        for index in 0..4 {
            let name = format!("train-{index}");
            world.server.store().edit(Kind::Pod, NAMESPACE, &name, |pod| {
                pod["metadata"]["annotations"]["round"] = json!(round.to_string());
            });
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    world.until_condition("Ready", "AggregatorsReady").await;
    world.until_condition("Placed", "AllBound").await;
    let store = world.server.store_quietly();
    for index in 0..4 {
        let pod = store.get(Kind::Pod, NAMESPACE, &format!("train-{index}")).unwrap();
        assert_eq!(pod["metadata"]["annotations"]["round"], "199", "no update was lost");
    }
}

#[tokio::test]
async fn a_pod_of_the_same_name_that_belongs_to_others_is_left_alone() {
    let world = World::with_operator().await;
    let mut other = worker(0);
    other["metadata"]["name"] = json!("vision-aggregator-0");
    other["metadata"]["labels"] = json!({"app": "other"});
    world.create(Kind::Pod, other);
    world.create(Kind::Group, group("FollowWorkers", 1, 1));
    let told = world.until_condition("Placed", "NameInUse").await;
    assert!(told["message"].as_str().unwrap().contains("pod vision-aggregator-0 exists"), "{told}");
    world.create(Kind::Pod, worker(1));
    world.server.store().remove(&(Kind::Pod, NAMESPACE.into(), "vision-aggregator-0".into()));
    world.until_condition("Ready", "AggregatorsReady").await;
    assert!(node_of(&world.server.store_quietly(), "vision-aggregator-0").is_some());
}

#[tokio::test]
async fn an_eviction_that_a_disruption_budget_forbids_is_told_and_tried_again() {
    let world = World::with_operator().await;
    let text = "Cannot evict pod as it would violate the pod's disruption budget.";
    world.server.refuse(refusal("POST", "/pods/train-1/eviction", 429, text));
    let mut asked = group("PlaceWorkers", 2, 1);
    asked["spec"]["pendingTtlSeconds"] = json!(1);
    world.create(Kind::Group, asked);
    world.hands(|hands| _ = hands.unscheduled.insert("train-1".into()));
    (0..2).for_each(|index| world.create(Kind::Pod, gated_worker(index)));
    let told = world.until_condition("Applied", "Refused").await;
    assert!(told["message"].as_str().unwrap().contains("disruption budget"), "{told}");
    assert!(world.pod("train-1").is_some());
    // Its successor is waited for; there is room for it.
    world.until_condition("Planned", "WaitingForWorkers").await;
    // Other groups are served meanwhile.
    let mut other = group("FollowWorkers", 1, 1);
    other["metadata"]["name"] = json!("speech");
    other["spec"]["workers"]["matchLabels"] = json!({"job": "other"});
    world.create(Kind::Group, other);
    let mut pod = worker(2);
    pod["metadata"]["labels"]["job"] = json!("other");
    world.create(Kind::Pod, pod);
    let is_served = |store: &Store| node_of(store, "speech-aggregator-0");
    world.until("the other group's aggregator is bound", is_served).await;
    world.server.faults(|faults| faults.refusals.clear());
    let is_gone =
        |store: &Store| store.get(Kind::Pod, NAMESPACE, "train-1").is_none().then_some(());
    world.until("the eviction", is_gone).await;
    world.until_condition("Applied", "Written").await;
}

#[tokio::test]
async fn writes_that_stay_refused_hold_up_no_others() {
    let world = World::with_operator().await;
    // The paths of 0 to 3 and of 10 to 39: more than the requests that are in flight at once.
    for digit in 0..4 {
        let part = format!("/pods/vision-aggregator-{digit}");
        world.server.refuse(refusal("PATCH", &part, 403, "forbidden"));
    }
    let mut asked = group("FollowWorkers", 1, 42);
    asked["spec"]["aggregators"]["poolMib"] = json!(1);
    asked["spec"]["aggregators"]["resources"] = json!({"cpu": "100m", "memory": "64Mi"});
    world.create(Kind::Group, asked);
    world.create(Kind::Pod, worker(0));
    let are_bound = |store: &Store| {
        let mut others = (4..10).chain(40..42).map(|number| format!("vision-aggregator-{number}"));
        others.all(|name| node_of(store, &name).is_some()).then_some(())
    };
    world.until("all others are bound", are_bound).await;
    assert!(node_of(&world.server.store_quietly(), "vision-aggregator-0").is_none());
    world.until_condition("Applied", "Refused").await;
}

#[tokio::test]
async fn a_write_that_stays_refused_is_tried_again_only_after_a_pause() {
    for part in ["/pods/train-1/eviction", "/pods/vision-aggregator-0"] {
        let world = World::start().await;
        let method = if part.ends_with("eviction") { "POST" } else { "PATCH" };
        world.server.refuse(refusal(method, part, 429, "refused"));
        let pause = Duration::from_secs(3600);
        let options = Options { first_retry: pause, longest_retry: pause, ..options() };
        let operator = tokio::spawn(controller::run(world.server.client(), options, None));
        let mut asked = group("PlaceWorkers", 2, 1);
        asked["spec"]["pendingTtlSeconds"] = json!(1);
        world.create(Kind::Group, asked);
        world.hands(|hands| _ = hands.unscheduled.insert("train-1".into()));
        (0..2).for_each(|index| world.create(Kind::Pod, gated_worker(index)));
        world.until_condition("Applied", "Refused").await;
        let tries = || world.server.faults(|faults| u32::MAX - faults.refusals[0].times);
        let before = tries();
        // Changes in the cluster do not shorten the pause.
        for round in 0..50 {
            let note = json!({"round": round.to_string()});
            world.server.store().edit(Kind::Pod, NAMESPACE, "train-0", |pod| {
                pod["metadata"]["annotations"]["round"] = note["round"].clone();
            });
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(tries(), before, "{part}");
        operator.abort();
    }
}

#[tokio::test]
async fn a_status_that_others_write_too_is_written_from_what_is_there() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("FollowWorkers", 1, 1));
    world.create(Kind::Pod, worker(0));
    // Each change of the group makes a status that was decided before a conflict.
    for round in 0..200 {
        world.server.store().edit(Kind::Group, NAMESPACE, GROUP, |group| {
            group["metadata"]["labels"] = json!({"round": round.to_string()});
        });
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    world.until_condition("Ready", "AggregatorsReady").await;
    assert_eq!(world.group()["metadata"]["labels"]["round"], "199", "no update was lost");
}

#[tokio::test]
async fn changes_that_concern_no_group_ask_the_server_nothing() {
    let world = World::with_operator().await;
    world.create(Kind::Group, group("FollowWorkers", 1, 1));
    world.create(Kind::Pod, worker(0));
    world.until_condition("Ready", "AggregatorsReady").await;
    world.until_condition("Placed", "AllBound").await;
    let mut pod = worker(1);
    pod["metadata"]["name"] = json!("other");
    pod["metadata"]["labels"] = json!({"job": "other"});
    world.create(Kind::Pod, pod);
    world.until("the other pod is bound", |store| node_of(store, "other")).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    world.server.refuse(refusal("GET", "/aggregatorgroups/vision", 500, "nobody should ask"));
    for round in 0..50 {
        world.server.store().edit(Kind::Pod, NAMESPACE, "other", |pod| {
            pod["metadata"]["annotations"] = json!({"round": round.to_string()});
        });
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // A change that does concern the group is asked about.
    let asked = |faults: &mut Faults| u32::MAX - faults.refusals[0].times;
    assert_eq!(world.server.faults(asked), 0);
    world.hands(|hands| _ = hands.unready.insert("vision-aggregator-0".into()));
    world.until("a request", |_| (world.server.faults(asked) > 0).then_some(())).await;
}

#[tokio::test]
async fn lists_that_are_refused_are_told() {
    let world = World::start().await;
    let text = "nodes is forbidden: User \"racksum\" cannot list resource \"nodes\"";
    world.server.refuse(refusal("GET", "/api/v1/nodes", 403, text));
    let options = Options { patience: Duration::from_millis(300), ..options() };
    let operator = tokio::spawn(controller::run(world.server.client(), options, None));
    world.create(Kind::Group, group("FollowWorkers", 1, 1));
    world.create(Kind::Pod, worker(0));
    let told = world.until_condition("Applied", "Refused").await;
    assert!(told["message"].as_str().unwrap().starts_with("listing nodes: "), "{told}");
    let note = world.until_event("Refused").await;
    assert!(note.contains("cannot list resource"), "{note}");
    world.server.faults(|faults| faults.refusals.clear());
    world.until_condition("Ready", "AggregatorsReady").await;
    world.until_condition("Applied", "Written").await;
    operator.abort();
}
