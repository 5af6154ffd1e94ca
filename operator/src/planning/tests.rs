use racksum_placer::inventory::{Place, Tree};
use serde_json::{Value, json};

use self::fixtures::NAMESPACE;
use super::*;

#[path = "../../tests/operator/fixtures.rs"]
mod fixtures;

pub(super) fn group(mode: &str, workers: u32, change: impl FnOnce(&mut Value)) -> AggregatorGroup {
    let mut group = fixtures::group(mode, workers, 1);
    group["apiVersion"] = json!("racksum.dev/v1alpha1");
    group["kind"] = json!("AggregatorGroup");
    group["metadata"]["namespace"] = json!(NAMESPACE);
    group["metadata"]["uid"] = json!("g1");
    change(&mut group);
    serde_json::from_value(group).unwrap()
}

pub(super) fn node(name: &str, rack: &str, change: impl FnOnce(&mut Value)) -> Arc<Node> {
    let mut node = fixtures::node(name, rack);
    change(&mut node);
    Arc::new(serde_json::from_value(node).unwrap())
}

pub(super) fn worker(index: u32, change: impl FnOnce(&mut Value)) -> Arc<Pod> {
    let mut pod = fixtures::gated_worker(index);
    pod["metadata"]["namespace"] = json!(NAMESPACE);
    change(&mut pod);
    Arc::new(serde_json::from_value(pod).unwrap())
}

/// Plans a group of which nothing is placed.
fn plan_of(
    group: &AggregatorGroup,
    nodes: &[Arc<Node>],
    pods: &[Arc<Pod>],
    groups: &[Arc<AggregatorGroup>],
) -> Result<Plan, Unplanned> {
    let members = Members::of(group, groups, pods);
    planned(&Request {
        group,
        nodes,
        pods,
        groups,
        network: &Network::default(),
        avoided: BTreeSet::new(),
        aggregator: &aggregator(group, 0),
        aggregators: members.aggregators.iter().map(|one| one.and_then(|one| one.slot())).collect(),
        workers: &members.workers,
    })
}

#[test]
fn wrong_specs_are_told() {
    let told = |change: fn(&mut Value)| check(&group("FollowWorkers", 1, change)).unwrap_err();
    assert_eq!(
        told(|group| group["spec"]["aggregators"]["shards"] = json!(4)),
        "the packet buffers take 4096 MiB, and aggregators.resources.memory is 4Gi; raise it"
    );
    assert_eq!(
        told(|group| group["spec"]["aggregators"]["resources"] = json!({"memory": "4Gi"})),
        "aggregators.resources has no quantity of cpu; add it"
    );
    assert_eq!(
        told(|group| group["spec"]["topology"]["requiresScope"] = json!(true)),
        "job \"vision\": requires_scope is true, but scope is missing; name a level"
    );
    assert_eq!(
        told(|group| group["spec"]["topology"]["levels"] = json!(["rack", "rack"])),
        "topology: level \"rack\" is listed twice; list each level once"
    );
    assert_eq!(
        told(|group| group["spec"]["traffic"]["unionDensity"] = json!(0.5)),
        "job \"vision\": union_density is 0.5; it must be a number from own_density to 1"
    );
    assert_eq!(
        told(|group| group["spec"]["aggregators"]["racks"] = json!(true)),
        "aggregators.racks is true, and the operator places no parents and aggregators of racks; \
         remove it, or run them without the operator"
    );
    for name in ["vision.v2", "2vision"] {
        let text = check(&group("FollowWorkers", 1, |group| {
            group["metadata"]["name"] = json!(name);
        }))
        .unwrap_err();
        assert!(text.starts_with(&format!("the name {name:?} begins with a digit")), "{text}");
    }
    let long = told(|group| group["metadata"]["name"] = json!("x".repeat(62)));
    assert!(long.ends_with("exceed 63 bytes; rename the group"), "{long}");
    assert_eq!(check(&group("FollowWorkers", 1, |_| {})), Ok(()));
}

#[test]
fn a_plan_names_few_of_the_nodes_that_were_measured_in_other_domains() {
    // Caches have no order.
    let names: Vec<_> = (1..9).rev().map(|number| format!("h{number}")).collect();
    let nodes: Vec<_> = names.iter().map(|name| node(name, "r1", |_| {})).collect();
    let place = |rack: &str| Place { labels: vec![rack.into()], age_s: 0.0 };
    let hosts = names.iter().map(|name| (name.clone(), place("r2"))).collect();
    let tree = Some(Tree { levels: vec!["rack".into()], hosts });
    let asked = group("PlaceWorkers", 1, |_| {});
    let pods = [worker(0, |_| {})];
    let members = Members::of(&asked, &[], &pods);
    let plan = |placed| {
        let request = Request {
            group: &asked,
            nodes: &nodes,
            pods: &pods,
            groups: &[],
            network: &Network { tree: tree.clone(), ..Network::default() },
            avoided: BTreeSet::new(),
            aggregator: &aggregator(&asked, 0),
            aggregators: vec![placed],
            workers: &members.workers,
        };
        planned(&request).unwrap()
    };
    for placed in [None, Some("h2")] {
        let notes = plan(placed).notes;
        assert_eq!(notes.len(), 6, "{notes:?}");
        let first = "h1 counts as a host of r2, where it was measured; its labels say r1";
        assert_eq!(notes[0], first);
        assert_eq!(notes[5], "there are 3 more notes");
    }
}

#[test]
fn each_role_has_its_own_tolerations() {
    let gpu = |node: &mut Value| {
        node["spec"]["taints"] = json!([{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]);
    };
    let plain = |node: &mut Value| node["status"]["allocatable"]["nvidia.com/gpu"] = json!("0");
    let nodes = [node("g1", "r1", gpu), node("c1", "r1", plain), node("c2", "r2", plain)];
    let tolerant = |pod: &mut Value| {
        pod["spec"]["tolerations"] = json!([{"key": "nvidia.com/gpu", "operator": "Exists"}]);
    };
    let pods = [worker(0, tolerant), worker(1, tolerant)];
    let plan = plan_of(&group("PlaceWorkers", 2, |_| {}), &nodes, &pods, &[]).unwrap();
    assert_eq!(plan.aggregators, ["c1"]);
    assert_eq!(plan.workers, [HostCount { host: "g1".into(), count: 2 }]);
    assert_eq!(plan.domain, "r1");
}

#[test]
fn memory_of_workers_is_kept_from_aggregators() {
    let small = |node: &mut Value| node["status"]["allocatable"]["memory"] = json!("18Gi");
    let plain = |node: &mut Value| node["status"]["allocatable"]["nvidia.com/gpu"] = json!("0");
    let nodes = [node("g1", "r1", small), node("c1", "r1", plain)];
    let pods = [worker(0, |_| {}), worker(1, |_| {})];
    let plan = plan_of(&group("PlaceWorkers", 2, |_| {}), &nodes, &pods, &[]).unwrap();
    assert_eq!(plan.aggregators, ["c1"]);
}

#[test]
fn nodes_that_are_cordoned_not_ready_or_full_are_not_used() {
    let cordoned = |node: &mut Value| node["spec"]["unschedulable"] = json!(true);
    let unready = |node: &mut Value| node["status"]["conditions"][0]["status"] = json!("Unknown");
    let nodes = [
        node("h1", "r1", cordoned),
        node("h2", "r1", unready),
        node("h3", "r1", |_| {}),
        node("h4", "r2", |_| {}),
    ];
    let other = worker(9, |pod| {
        pod["metadata"]["labels"] = json!({});
        pod["spec"]["nodeName"] = json!("h3");
        pod["spec"]["containers"][0]["resources"]["requests"] = json!({"nvidia.com/gpu": "2"});
    });
    let pods = [worker(0, |_| {}), other];
    let plan = plan_of(&group("PlaceWorkers", 1, |_| {}), &nodes, &pods, &[]).unwrap();
    assert_eq!(plan.workers, [HostCount { host: "h4".into(), count: 1 }]);
    let error = plan_of(&group("PlaceWorkers", 3, |_| {}), &nodes, &pods, &[]).unwrap_err();
    let expected = "job \"vision\" has 3 ranks, and there is room for 1; without other jobs, 3 fit";
    // The cordoned nodes and one worker of three that exists bound the room.
    assert!(
        matches!(&error, Unplanned::Room(text) if text.starts_with(&expected[..54])),
        "{error}"
    );
}

/// Returns an aggregator of a group that takes a whole node, while it is being deleted.
fn ending(group: &str, node: &str, change: fn(&mut Value)) -> Arc<Pod> {
    worker(9, |pod| {
        pod["metadata"] = json!({
            "name": format!("{group}-aggregator-0"), "namespace": NAMESPACE,
            "deletionTimestamp": "2026-11-30T00:00:00Z",
            "ownerReferences": [{
                "apiVersion": "racksum.dev/v1alpha1", "kind": "AggregatorGroup",
                "name": group, "uid": group,
            }],
        });
        pod["spec"]["nodeName"] = json!(node);
        pod["spec"]["containers"][0]["resources"]["requests"] = json!({"cpu": "16"});
        change(pod);
    })
}

#[test]
fn a_pod_that_is_being_deleted_takes_room_until_it_has_ended() {
    let nodes = [node("h1", "r1", |_| {}), node("h2", "r2", |_| {})];
    for (other, host) in [
        (ending("other", "h1", |_| {}), "h2"),
        (ending("other", "h1", |pod| pod["status"] = json!({"phase": "Succeeded"})), "h1"),
        // The successor of an own aggregator waits for it in any case.
        (ending("g1", "h1", |_| {}), "h1"),
    ] {
        let pods = [worker(0, |_| {}), other];
        let plan = plan_of(&group("PlaceWorkers", 1, |_| {}), &nodes, &pods, &[]).unwrap();
        assert_eq!((plan.aggregators[0].as_str(), plan.workers[0].host.as_str()), (host, host));
    }
}

#[test]
fn an_aggregator_that_is_being_deleted_and_its_successor_take_room_once() {
    let nodes = [node("h1", "r1", |node| {
        node["status"]["allocatable"]["cpu"] = json!("24");
    })];
    let other = group("FollowWorkers", 1, |group| {
        group["metadata"] = json!({"name": "other", "namespace": NAMESPACE, "uid": "other"});
        group["spec"]["workers"]["matchLabels"] = json!({"job": "other"});
        group["spec"]["aggregators"]["resources"]["cpu"] = json!("16");
        group["status"] = json!({"plan": {
            "domain": "r1", "stepMicroseconds": 1, "rangeMicroseconds": [1, 1],
            "aggregators": ["h1"], "workers": [],
        }});
    });
    let pods = [worker(0, |_| {}), ending("other", "h1", |_| {})];
    plan_of(&group("PlaceWorkers", 1, |_| {}), &nodes, &pods, &[Arc::new(other)]).unwrap();
}

#[test]
fn a_plan_of_another_group_reserves_its_room() {
    let nodes = [node("h1", "r1", |_| {}), node("h2", "r2", |_| {})];
    let theirs = |index: u32| {
        worker(index, |pod| {
            pod["metadata"]["name"] = json!(format!("o-{index}"));
            pod["metadata"]["labels"] = json!({"job": "other"});
        })
    };
    let other = group("PlaceWorkers", 2, |group| {
        group["metadata"] = json!({"name": "other", "namespace": NAMESPACE, "uid": "g2"});
        group["spec"]["workers"]["matchLabels"] = json!({"job": "other"});
        group["status"] = json!({"plan": {
            "domain": "r1", "stepMicroseconds": 1, "rangeMicroseconds": [1, 1],
            "aggregators": ["h1"], "workers": [{"host": "h1", "count": 2}],
        }});
    });
    let pods = [worker(0, |_| {}), worker(1, |_| {}), theirs(0), theirs(1)];
    let asked = group("PlaceWorkers", 2, |_| {});
    let alone = plan_of(&asked, &nodes, &pods, &[]).unwrap();
    assert_eq!(alone.workers[0].host, "h1");
    let beside = plan_of(&asked, &nodes, &pods, &[Arc::new(other)]).unwrap();
    assert_eq!(beside.workers[0].host, "h2");
}

#[test]
fn a_label_that_is_no_rate_is_told() {
    let nodes = [node("h1", "r1", |node| {
        node["metadata"]["labels"]["racksum.dev/nic-mbit"] = json!("25G");
    })];
    let error = plan_of(&group("FollowWorkers", 1, |_| {}), &nodes, &[], &[]).unwrap_err();
    let expected = "node h1: the label racksum.dev/nic-mbit is \"25G\"; give a number of Mbit/s \
                    from 0.001 to 1e9";
    assert_eq!(error, Unplanned::Topology(expected.into()));
}

#[test]
fn nodes_without_the_labels_are_told() {
    let nodes = [node("h1", "r1", |node| node["metadata"]["labels"] = json!({}))];
    let asked = group("FollowWorkers", 1, |_| {});
    let error = plan_of(&asked, &nodes, &[], &[]).unwrap_err();
    let expected = "no node has the labels rack; label the nodes, or correct `topology.levels`";
    assert_eq!(error, Unplanned::Topology(expected.into()));
    // A worker on such a node has no place in the tree.
    let bound = worker(0, |pod| {
        pod["spec"]["nodeName"] = json!("h1");
        pod["spec"]["schedulingGates"] = json!([]);
    });
    let error = plan_of(&asked, &nodes, &[bound], &[]).unwrap_err();
    assert!(matches!(&error, Unplanned::Topology(text) if text.contains("\"h1\" has no label")));
}

#[test]
fn workers_get_slots_that_they_accept() {
    let nodes = [node("h1", "r1", |_| {}), node("h2", "r1", |_| {}), node("h3", "r2", |_| {})];
    let only = |index: u32, racks: &[&str]| {
        worker(index, |pod| {
            pod["spec"]["affinity"] = json!({"nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "rack", "operator": "In", "values": racks}]}
                ]}
            }});
        })
    };
    let assign = |pods: &[Arc<Pod>]| {
        let members: Vec<_> = pods.iter().map(|pod| Member::of(pod).unwrap()).collect();
        let slots: Vec<_> = nodes.iter().map(|node| &**node).collect();
        let hosts = assigned(&members, &slots)?;
        Ok(hosts.iter().map(|node| node.name_any()).collect::<Vec<_>>())
    };
    let any = ["r1", "r2"];
    assert_eq!(assign(&[only(0, &any), only(1, &any), only(2, &any)]).unwrap(), ["h1", "h2", "h3"]);
    let hosts = assign(&[only(0, &any), only(1, &["r1"]), only(2, &["r1"])]).unwrap();
    assert_eq!(hosts, ["h3", "h2", "h1"]);
    let refused: Result<_, String> = assign(&[only(0, &["r2"]), only(1, &["r2"])]);
    assert_eq!(refused.unwrap_err(), "train-1");
}

#[test]
fn workers_may_all_have_to_move_for_the_last_one() {
    // Each worker accepts its own host and the next one, and the last worker only the first host.
    const COUNT: u32 = 300;
    let name = |index: u32| format!("h{index:03}");
    let nodes: Vec<_> = (0..COUNT).map(|index| node(&name(index), "r1", |_| {})).collect();
    let hosts = |index: u32| match index {
        last if last == COUNT - 1 => vec![name(0)],
        index => vec![name(index), name(index + 1)],
    };
    let pods: Vec<_> = (0..COUNT)
        .map(|index| {
            worker(index, |pod| {
                pod["spec"]["affinity"] = json!({"nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                        {"matchFields": [{
                            "key": "metadata.name", "operator": "In", "values": hosts(index),
                        }]}
                    ]}
                }});
            })
        })
        .collect();
    let members: Vec<_> = pods.iter().map(|pod| Member::of(pod).unwrap()).collect();
    let slots: Vec<_> = nodes.iter().map(|node| &**node).collect();
    let seats = assigned(&members, &slots).unwrap();
    let seats: Vec<_> = seats.iter().map(|node| node.name_any()).collect();
    let expected: Vec<_> = (1..COUNT).map(name).chain([name(0)]).collect();
    assert_eq!(seats, expected);
}

#[test]
fn aggregators_on_the_network_of_their_host_are_on_hosts_of_their_own() {
    let nodes = [node("h1", "r1", |_| {}), node("h2", "r1", |_| {})];
    let plan = |host_network: bool| {
        let asked = group("PlaceWorkers", 1, |group| {
            group["spec"]["aggregators"]["count"] = json!(2);
            group["spec"]["aggregators"]["hostNetwork"] = json!(host_network);
        });
        plan_of(&asked, &nodes, &[worker(0, |_| {})], &[]).unwrap().aggregators
    };
    assert_eq!(plan(false), ["h1", "h1"]);
    assert_eq!(plan(true), ["h1", "h2"]);
}

/// Plans a group whose aggregators are on these nodes, if they are placed.
fn filled_plan(
    asked: &AggregatorGroup,
    nodes: &[Arc<Node>],
    placed: &[Option<&str>],
) -> Result<Plan, Unplanned> {
    let bound = worker(0, |pod| {
        pod["spec"]["nodeName"] = json!("h1");
        pod["spec"]["schedulingGates"] = json!([]);
    });
    let pods = [bound];
    let members = Members::of(asked, &[], &pods);
    planned(&Request {
        group: asked,
        nodes,
        pods: &pods,
        groups: &[],
        network: &Network::default(),
        avoided: BTreeSet::new(),
        aggregator: &aggregator(asked, 0),
        aggregators: placed.to_vec(),
        workers: &members.workers,
    })
}

#[test]
fn a_standby_is_outside_the_domain_of_the_others() {
    let nodes = ["h1", "h2"].map(|name| node(name, "r1", |_| {}));
    let far = [nodes[0].clone(), nodes[1].clone(), node("h3", "r2", |_| {})];
    let asked = |level: Option<&str>| {
        group("FollowWorkers", 1, |group| {
            group["spec"]["aggregators"]["standbys"] = json!(1);
            group["spec"]["topology"]["standbyLevel"] = json!(level);
        })
    };
    for placed in [vec![None, None], vec![Some("h1"), None], vec![None, Some("h3")]] {
        let plan = filled_plan(&asked(None), &far, &placed).unwrap();
        assert_eq!(plan.aggregators, ["h1", "h3"], "{placed:?}");
        assert_eq!(plan.domain, "r1");
    }
    // A set that is placed keeps its rack, and the other one goes elsewhere.
    let plan = filled_plan(&asked(None), &far, &[None, Some("h2")]).unwrap();
    assert_eq!(plan.aggregators, ["h3", "h2"]);
    let plan = filled_plan(&asked(Some("host")), &nodes, &[None, None]).unwrap();
    assert_eq!(plan.aggregators, ["h1", "h2"]);

    let told =
        |asked: &AggregatorGroup, placed: &[Option<&str>]| match filled_plan(asked, &nodes, placed)
            .unwrap_err()
        {
            Unplanned::Room(text) => text,
            error => panic!("{error:?}"),
        };
    let text = told(&asked(None), &[None, None]);
    assert!(text.contains("no placement of standby 1 found outside each rack"), "{text}");
    let text = told(&asked(None), &[Some("h1"), None]);
    assert!(text.starts_with("no node has room for another standby apart from those of"), "{text}");
    let wrong = check(&asked(Some("zone"))).unwrap_err();
    assert!(wrong.contains("zone"), "{wrong}");
}

#[test]
fn lost_members_do_not_leave_a_required_scope() {
    let one_gpu = |node: &mut Value| node["status"]["allocatable"]["nvidia.com/gpu"] = json!("1");
    let nodes = [node("h1", "r1", one_gpu), node("h2", "r2", |_| {})];
    let bound = worker(0, |pod| {
        pod["spec"]["nodeName"] = json!("h1");
        pod["spec"]["schedulingGates"] = json!([]);
    });
    let asked = |workers: u32, is_required: bool| {
        group("PlaceWorkers", workers, |group| {
            group["spec"]["topology"]["scope"] = json!("rack");
            group["spec"]["topology"]["requiresScope"] = json!(is_required);
            if workers == 1 {
                group["spec"]["aggregators"]["standbys"] = json!(1);
                group["spec"]["topology"]["standbyLevel"] = json!("host");
            }
        })
    };
    let pods = [bound, worker(1, |_| {})];
    let plan = plan_of(&asked(2, false), &nodes, &pods, &[]).unwrap();
    assert_eq!(plan.workers.iter().map(|one| &*one.host).collect::<Vec<_>>(), ["h1", "h2"]);
    let told = plan_of(&asked(2, true), &nodes, &pods, &[]).unwrap_err().to_string();
    let expected = "no node of the job's rack has room for another worker; free one that accepts \
                    it, or set topology.requiresScope to false";
    assert_eq!(told, expected);

    let placed = [Some("h1"), None];
    assert_eq!(filled_plan(&asked(1, false), &nodes, &placed).unwrap().aggregators, ["h1", "h2"]);
    let told = filled_plan(&asked(1, true), &nodes, &placed).unwrap_err().to_string();
    let expected = "no node of the job's rack has room for another standby apart from those of \
                    other sets; free one that accepts it, or set topology.requiresScope to false";
    assert_eq!(told, expected);
}

#[test]
fn each_standby_has_as_many_aggregators_as_the_job() {
    let nodes: Vec<_> = [("h1", "r1"), ("h2", "r1"), ("h3", "r2"), ("h4", "r2"), ("h5", "r3")]
        .map(|(name, rack)| node(name, rack, |_| {}))
        .into();
    let asked = group("FollowWorkers", 1, |group| {
        group["spec"]["aggregators"]["count"] = json!(2);
        group["spec"]["aggregators"]["standbys"] = json!(2);
        group["spec"]["aggregators"]["hostNetwork"] = json!(false);
    });
    let plan = filled_plan(&asked, &nodes, &[None; 6]).unwrap();
    let racks: Vec<_> = plan
        .aggregators
        .iter()
        .map(|host| {
            nodes.iter().find(|node| node.name_any() == *host).unwrap().labels()["rack"].clone()
        })
        .collect();
    assert_eq!(racks[0], racks[1]);
    assert_eq!(racks[2], racks[3]);
    assert_eq!(racks[4], racks[5]);
    assert_eq!(racks.iter().collect::<BTreeSet<_>>().len(), 3, "{racks:?}");
}
