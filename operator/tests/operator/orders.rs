//! Decisions about odd objects: none panics, and none depends on the order of the caches.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use racksum_operator::crd::AggregatorGroup;
use racksum_operator::decide::{Decision, Observed, decide};
use serde_json::json;

use crate::world::{NAMESPACE, gated_worker, group, node, read};

/// A generator of numbers (xorshift64*).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let high = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        usize::try_from(high).unwrap() % sides
    }

    fn pick<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.roll(all.len())].clone()
    }

    fn shuffle<T>(&mut self, all: &mut [T]) {
        (1..all.len()).rev().for_each(|last| all.swap(last, self.roll(last + 1)));
    }
}

const NAMES: [&str; 3] = ["a", "b", "c"];

fn odd_group(dice: &mut Dice, name: &str) -> AggregatorGroup {
    let mode = dice.pick(&["FollowWorkers", "PlaceWorkers"]);
    let [workers, aggregators] = [3, 2].map(|most| u32::try_from(1 + dice.roll(most)).unwrap());
    let mut asked = group(mode, workers, aggregators);
    asked["apiVersion"] = json!("racksum.dev/v1alpha1");
    asked["kind"] = json!("AggregatorGroup");
    let label = dice.pick(&["job", "team", "racksum.dev/group"]);
    asked["spec"]["workers"]["matchLabels"] = json!({label: dice.pick(&["train", name])});
    asked["metadata"] = json!({
        "name": name, "namespace": NAMESPACE, "uid": name, "generation": 1,
        "finalizers": ["racksum.dev/placement"],
        "creationTimestamp": format!("2026-11-29T00:00:0{}Z", dice.roll(2)),
    });
    if dice.roll(6) == 0 {
        asked["metadata"]["deletionTimestamp"] = json!("2026-11-29T00:00:09Z");
    }
    if dice.roll(2) == 0 {
        let mut host = || dice.pick(&["h1", "h2", "h3", "h4", "gone"]);
        let aggregators: Vec<_> = (0..aggregators).map(|_| host()).collect();
        asked["status"] = json!({"plan": {
            "domain": "r1", "stepMicroseconds": 1, "rangeMicroseconds": [1, 1],
            "aggregators": aggregators, "workers": [{"host": host(), "count": workers}],
        }});
    }
    read(&asked)
}

fn odd_node(dice: &mut Dice, name: &str) -> Arc<Node> {
    let mut node = node(name, dice.pick(&["r1", "r2"]));
    match dice.roll(8) {
        0 => node["metadata"]["labels"]["racksum.dev/nic-mbit"] = json!("25G"),
        1 => node["metadata"]["labels"] = json!({}),
        2 => node["spec"]["unschedulable"] = json!(true),
        3 => node["status"]["allocatable"]["cpu"] = json!(dice.pick(&["-1", "1e30", "x", ""])),
        _ => {}
    }
    Arc::new(read(&node))
}

fn odd_pod(dice: &mut Dice, number: usize) -> Arc<Pod> {
    let mut pod = gated_worker(u32::try_from(number).unwrap());
    let owner = dice.pick(&NAMES);
    pod["metadata"]["namespace"] = json!(NAMESPACE);
    pod["metadata"]["uid"] = json!(number.to_string());
    let label = dice.pick(&["job", "team", "racksum.dev/group"]);
    pod["metadata"]["labels"][label] = json!(dice.pick(&["train", owner]));
    if dice.roll(3) == 0 {
        let index = dice.pick(&["0", "0", "1", "7", "-1", "x"]);
        pod["metadata"]["labels"]["racksum.dev/aggregator"] = json!(index);
        let group = json!({
            "apiVersion": "racksum.dev/v1alpha1", "kind": "AggregatorGroup",
            "name": owner, "uid": owner,
        });
        pod["metadata"]["ownerReferences"] = json!([group]);
        if number < 4 {
            pod["metadata"]["name"] = json!(format!("{owner}-aggregator-{}", number % 2));
        }
    }
    if dice.roll(2) == 0 {
        pod["spec"]["schedulingGates"] = dice.pick(&[json!([]), json!([{"name": "other"}])]);
    }
    if dice.roll(3) == 0 {
        let at = dice.pick(&["2026-11-29T00:00:00Z", "9999-12-30T00:00:00Z", "never", ""]);
        let host = dice.pick(&["h1", "h2", "gone"]);
        pod["metadata"]["annotations"] =
            json!({"racksum.dev/host": host, "racksum.dev/placed-at": at});
    }
    if dice.roll(3) == 0 {
        pod["spec"]["nodeName"] = json!(dice.pick(&["h1", "h2", "h3", "gone"]));
    }
    if dice.roll(6) == 0 {
        pod["metadata"]["deletionTimestamp"] = json!("2026-11-29T00:00:09Z");
    }
    if dice.roll(4) == 0 {
        pod["status"] = json!({"phase": dice.pick(&["Succeeded", "Failed", "Running"])});
    }
    Arc::new(read(&pod))
}

/// A cluster of odd objects.
struct Odd {
    pods: Vec<Arc<Pod>>,
    nodes: Vec<Arc<Node>>,
    groups: Vec<Arc<AggregatorGroup>>,
}

impl Odd {
    fn new(dice: &mut Dice) -> Self {
        // Names are unique.
        let mut pods: Vec<_> = (0..8).map(|number| odd_pod(dice, number)).collect();
        pods.sort_by(|one, other| one.metadata.name.cmp(&other.metadata.name));
        pods.dedup_by(|one, other| one.metadata.name == other.metadata.name);
        let groups = NAMES.map(|name| Arc::new(odd_group(dice, name))).to_vec();
        Self {
            pods,
            nodes: ["h1", "h2", "h3", "h4"].map(|name| odd_node(dice, name)).to_vec(),
            groups,
        }
    }

    fn shuffle(&mut self, dice: &mut Dice) {
        dice.shuffle(&mut self.pods);
        dice.shuffle(&mut self.nodes);
        dice.shuffle(&mut self.groups);
    }

    /// Decides about all groups, in the order of their names.
    fn decisions(&self) -> Vec<Decision> {
        let mut groups = self.groups.clone();
        groups.sort_by(|one, other| one.metadata.name.cmp(&other.metadata.name));
        let decisions = groups.iter().map(|group| {
            decide(Observed {
                group,
                pods: &self.pods,
                nodes: &self.nodes,
                groups: &self.groups,
                service: None,
                config_map: None,
                network: Ok(""),
                trouble: None,
                now: "2026-11-30T00:00:00Z".parse::<Timestamp>().unwrap(),
            })
        });
        decisions.collect()
    }
}

#[test]
fn no_decision_panics_or_depends_on_the_order_of_the_caches() {
    let seeds = match std::env::var("SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => (1..1000).collect::<Vec<u64>>(),
    };
    for seed in seeds {
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut odd = Odd::new(&mut dice);
        let first = odd.decisions();
        odd.shuffle(&mut dice);
        assert_eq!(odd.decisions(), first, "SEED={seed}");
    }
}
