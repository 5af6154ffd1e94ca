//! A small cluster around the stand-in: a scheduler, kubelets, and the operator.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use racksum_operator::affinity::{accepts, untolerated};
use racksum_operator::controller::{self, Options};
use racksum_operator::quantity::{Amounts, add, amounts, requested, times};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

pub(crate) use crate::fixtures::{GROUP, NAMESPACE, gated_worker, group, node, worker};
use crate::standin::{Kind, Server, Store};

/// The longest wait for a condition. It is reached only if a test fails.
const PATIENCE: Duration = Duration::from_secs(120);

/// A cluster of four nodes in two racks.
pub(crate) struct World {
    pub(crate) server: Arc<Server>,
    hands: Arc<Mutex<Hands>>,
    kubernetes: JoinHandle<()>,
    operators: Vec<JoinHandle<()>>,
}

/// The steps that the scheduler and the kubelets leave out on purpose.
#[derive(Debug, Default)]
pub(crate) struct Hands {
    /// Pods that the scheduler finds no node for.
    pub(crate) unscheduled: BTreeSet<String>,
    /// Pods that are deleted and do not end, as on a node that is gone.
    pub(crate) unending: BTreeSet<String>,
    /// Pods that do not become ready.
    pub(crate) unready: BTreeSet<String>,
}

impl World {
    /// Starts a cluster without an operator.
    pub(crate) async fn start() -> Self {
        let server = Arc::new(Server::start().await);
        for (name, rack) in [("h1", "r1"), ("h2", "r1"), ("h3", "r2"), ("h4", "r2")] {
            server.store().create(Kind::Node, "", node(name, rack)).unwrap();
        }
        let hands = Arc::<Mutex<Hands>>::default();
        let kubernetes = tokio::spawn(kubernetes(server.clone(), hands.clone()));
        Self { server, hands, kubernetes, operators: vec![] }
    }

    /// Starts a cluster with an operator.
    pub(crate) async fn with_operator() -> Self {
        let mut world = Self::start().await;
        world.start_operator();
        world
    }

    pub(crate) fn start_operator(&mut self) {
        let client = self.server.client();
        self.operators.push(tokio::spawn(controller::run(client, options(), None)));
    }

    /// Stops all operators, wherever they are.
    pub(crate) async fn kill_operators(&mut self) {
        for operator in self.operators.drain(..) {
            operator.abort();
            drop(operator.await);
        }
    }

    pub(crate) fn hands(&self, change: impl FnOnce(&mut Hands)) {
        change(&mut self.hands.lock().unwrap_or_else(PoisonError::into_inner));
        // Wake the scheduler.
        drop(self.server.store());
    }

    /// Waits until a condition holds, and returns what it found.
    pub(crate) async fn until<T>(&self, what: &str, found: impl Fn(&Store) -> Option<T>) -> T {
        let mut receiver = self.server.subscribe();
        let waiting = async {
            loop {
                if let Some(found) = found(&self.server.store_quietly()) {
                    return found;
                }
                self.server.changed(&mut receiver).await;
            }
        };
        let waited = tokio::time::timeout(PATIENCE, waiting).await;
        waited.unwrap_or_else(|_| panic!("never: {what}\n{}", self.describe()))
    }

    /// Waits until a condition of the group has a reason.
    pub(crate) async fn until_condition(&self, name: &str, reason: &str) -> Value {
        let found = |store: &Store| {
            condition(store.get(Kind::Group, NAMESPACE, GROUP)?, name)
                .filter(|condition| condition["reason"] == reason)
        };
        self.until(&format!("{name} is {reason}"), found).await
    }

    /// Waits until an event of the group has a reason, and returns its note.
    pub(crate) async fn until_event(&self, reason: &str) -> String {
        let found = |store: &Store| {
            let mut events = store.list(Kind::Event);
            let event = events.find(|event| event["reason"] == reason)?;
            Some(event["note"].as_str().unwrap_or_default().to_owned())
        };
        self.until(&format!("event {reason}"), found).await
    }

    pub(crate) fn create(&self, kind: Kind, object: Value) {
        self.server.store().create(kind, NAMESPACE, object).unwrap();
    }

    pub(crate) fn pod(&self, name: &str) -> Option<Value> {
        self.server.store_quietly().get(Kind::Pod, NAMESPACE, name).cloned()
    }

    pub(crate) fn group(&self) -> Value {
        self.server.store_quietly().get(Kind::Group, NAMESPACE, GROUP).cloned().unwrap()
    }

    fn describe(&self) -> String {
        let store = self.server.store_quietly();
        let pods = store.list(Kind::Pod).map(|pod| {
            let (spec, meta) = (&pod["spec"], &pod["metadata"]);
            format!(
                "{} node {} gates {} annotations {} deleted {}\n",
                meta["name"],
                spec["nodeName"],
                spec["schedulingGates"],
                meta["annotations"],
                meta["deletionTimestamp"]
            )
        });
        let groups = store.list(Kind::Group).map(|group| format!("{:#}\n", group["status"]));
        let events =
            store.list(Kind::Event).map(|one| format!("{}: {}\n", one["reason"], one["note"]));
        pods.chain(groups).chain(events).collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.kubernetes.abort();
        self.operators.iter().for_each(JoinHandle::abort);
    }
}

pub(crate) fn options() -> Options {
    Options {
        gather: Duration::from_millis(5),
        first_retry: Duration::from_millis(20),
        longest_retry: Duration::from_millis(200),
        ..Options::default()
    }
}

/// Returns the required terms of a pod's node affinity.
pub(crate) fn terms(pod: &Value) -> Value {
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    pod["spec"]["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"].clone()
}

pub(crate) fn condition(group: &Value, name: &str) -> Option<Value> {
    let conditions = group["status"]["conditions"].as_array()?;
    conditions.iter().find(|condition| condition["type"] == name).cloned()
}

pub(crate) fn node_of(store: &Store, pod: &str) -> Option<String> {
    let pod = store.get(Kind::Pod, NAMESPACE, pod)?;
    pod["spec"]["nodeName"].as_str().map(ToOwned::to_owned)
}

pub(crate) fn read<T: DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap()
}

/// Plays the scheduler and the kubelets, at each change of the store.
async fn kubernetes(server: Arc<Server>, hands: Arc<Mutex<Hands>>) {
    let mut receiver = server.subscribe();
    loop {
        let has_acted = {
            let hands = hands.lock().unwrap_or_else(PoisonError::into_inner);
            act(&mut server.store_quietly(), &hands)
        };
        if has_acted {
            drop(server.store());
        }
        server.changed(&mut receiver).await;
    }
}

/// Takes all steps that are due. Returns whether there was one.
fn act(store: &mut Store, hands: &Hands) -> bool {
    let before = store.version;
    let pods: Vec<Value> = store.list(Kind::Pod).cloned().collect();
    for pod in &pods {
        let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
        if !pod["metadata"]["deletionTimestamp"].is_null() {
            if hands.unending.contains(&name) {
                continue;
            }
            store.remove(&(Kind::Pod, NAMESPACE.into(), name));
        } else if pod["spec"]["nodeName"].is_null() {
            schedule(store, hands, &name, pod);
        } else {
            let is_ready = !hands.unready.contains(&name);
            let status = if is_ready { "True" } else { "False" };
            set_condition(store, &name, json!({"type": "Ready", "status": status}));
        }
    }
    store.version != before
}

fn schedule(store: &mut Store, hands: &Hands, name: &str, pod: &Value) {
    let pod: Pod = read(pod);
    let spec = pod.spec.as_ref().unwrap();
    if spec.scheduling_gates.as_ref().is_some_and(|gates| !gates.is_empty()) {
        let gated = json!({"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"});
        return set_condition(store, name, gated);
    }
    let nodes: Vec<Node> = store.list(Kind::Node).map(read).collect();
    let node =
        nodes.iter().filter(|node| !hands.unscheduled.contains(name) && fits(store, &pod, node));
    let preferred = |node: &&Node| {
        let affinity = spec.affinity.as_ref().and_then(|one| one.node_affinity.as_ref());
        let preferred = affinity
            .and_then(|one| one.preferred_during_scheduling_ignored_during_execution.as_ref());
        preferred.into_iter().flatten().any(|one| {
            let fields = one.preference.match_fields.iter().flatten();
            fields.into_iter().any(|field| field.values.as_ref().unwrap().contains(&name_of(node)))
        })
    };
    let node = node.min_by_key(|node| (!preferred(node), name_of(node))).map(name_of);
    let Some(node) = node else {
        return set_condition(
            store,
            name,
            json!({
                "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                "message": "0/4 nodes are available",
            }),
        );
    };
    store.edit(Kind::Pod, NAMESPACE, name, |pod| {
        pod["spec"]["nodeName"] = json!(node);
        pod["status"]["phase"] = json!("Running");
    });
    set_condition(store, name, json!({"type": "PodScheduled", "status": "True"}));
}

fn name_of(node: &Node) -> String {
    node.metadata.name.clone().unwrap()
}

fn fits(store: &Store, pod: &Pod, node: &Node) -> bool {
    let spec = pod.spec.as_ref().unwrap();
    let mut used = Amounts::new();
    for other in store.list(Kind::Pod).filter(|other| other["spec"]["nodeName"] == name_of(node)) {
        add(&mut used, &requested(&read(other)));
    }
    let mut free = amounts(node.status.as_ref().unwrap().allocatable.as_ref());
    used.iter().for_each(|(name, used)| *free.entry(name.clone()).or_default() -= used);
    accepts(spec, node)
        && node.spec.as_ref().and_then(|spec| spec.unschedulable) != Some(true)
        && untolerated(node, spec.tolerations.as_deref().unwrap_or_default()).is_none()
        && times(&free, &requested(pod), |_| true) > 0
}

fn set_condition(store: &mut Store, name: &str, condition: Value) {
    store.edit(Kind::Pod, NAMESPACE, name, |pod| {
        let status = &mut pod["status"];
        if status["conditions"].is_null() {
            status["conditions"] = json!([]);
        }
        let conditions = status["conditions"].as_array_mut().unwrap();
        conditions.retain(|one| one["type"] != condition["type"]);
        conditions.push(condition);
        conditions.sort_by_key(|one| one["type"].as_str().unwrap().to_owned());
    });
}
