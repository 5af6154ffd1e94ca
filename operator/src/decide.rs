//! The operator's decisions: from what the API server shows of a group to the next writes.
//!
//! Everything that a decision depends on is in the API server, so an operator that restarts goes
//! on where another one stopped. A plan is written to the group's status before any pod is placed:
//! the status is written first, then the actions are taken in order. Pods that are placed keep
//! their place; see [`crate::planning`].

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod, Service};
use kube::{Resource, ResourceExt};
use racksum_placer::network::Network;

use crate::crd::{AggregatorGroup, AggregatorGroupStatus, Avoided, Phase, Plan};
use crate::members::{GATE, INDEX_LABEL, Member, Members, Shared, is_owned};
use crate::objects::{
    FINALIZER, aggregator, aggregator_name, config_map_name, endpoints, releasing, service,
};
use crate::planning::check;
use crate::status::{
    ACCEPTED, APPLIED, Conditions, NOT_ACCEPTED, Note, PLACED, PLANNED, READY, WORKERS_READY,
};

mod checks;
mod plans;

/// A group and its surroundings, as the API server shows them.
#[derive(Debug, Clone, Copy)]
pub struct Observed<'a> {
    /// The group.
    pub group: &'a AggregatorGroup,
    /// All pods of the cluster.
    pub pods: &'a [Arc<Pod>],
    /// All nodes.
    pub nodes: &'a [Arc<Node>],
    /// All groups. Their plans reserve room.
    pub groups: &'a [Arc<AggregatorGroup>],
    /// The Service that the operator created for the group.
    pub service: Option<&'a Service>,
    /// The ConfigMap that the operator created for the group.
    pub config_map: Option<&'a ConfigMap>,
    /// The text of the network file: empty without one, or the reason why it cannot be read.
    pub network: Result<&'a str, &'a str>,
    /// The writes that the API server did not take since the last success, if any.
    pub trouble: Option<&'a Trouble>,
    /// The time.
    pub now: Timestamp,
}

/// Writes that the API server did not take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// Whether the last write failed because the object had changed since it was read.
    pub is_conflict: bool,
    /// Whether the API server answered at all.
    pub is_answered: bool,
    /// The action that was tried, and the answer.
    pub message: String,
    /// The time of the first failure.
    pub since: Timestamp,
    /// The number of failures in a row.
    pub failures: u32,
}

impl Trouble {
    /// Returns whether a person should know. A few conflicts are the normal course.
    #[must_use]
    pub const fn is_reported(&self) -> bool {
        !self.is_conflict || self.failures > NORMAL_CONFLICTS
    }
}

/// The number of conflicts in a row that do not deserve attention.
const NORMAL_CONFLICTS: u32 = 5;

/// The next writes for a group.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// The status, which is written before the actions are taken.
    pub status: AggregatorGroupStatus,
    /// The actions, in order.
    pub actions: Vec<Action>,
    /// Events to publish.
    pub notes: Vec<Note>,
    /// The time after which to decide again, if nothing changes before.
    pub recheck: Duration,
}

impl Decision {
    /// Returns whether the group still exists once the actions are taken.
    #[must_use]
    pub fn is_ongoing(&self) -> bool {
        !self.actions.contains(&Action::RemoveFinalizer)
    }
}

/// Returns whether a decision gives up the placement of a group because it has no workers.
#[must_use]
pub fn would_release(group: &AggregatorGroup, decision: &Decision) -> bool {
    let has_plan = |status: &AggregatorGroupStatus| status.plan.is_some();
    let is_deleted = group.meta().deletion_timestamp.is_some();
    !is_deleted && group.status.as_ref().is_some_and(has_plan) && !has_plan(&decision.status)
}

/// A write to the API server. Names are in the namespace of the group.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Adds the finalizer to the group.
    AddFinalizer,
    /// Removes the finalizer from the group.
    RemoveFinalizer,
    /// Applies the Service.
    ApplyService(Box<Service>),
    /// Applies the ConfigMap.
    ApplyConfigMap(Box<ConfigMap>),
    /// Deletes the ConfigMap.
    DeleteConfigMap,
    /// Creates a pod.
    CreatePod(Box<Pod>),
    /// Changes a pod.
    PatchPod {
        /// The name of the pod.
        name: String,
        /// The change.
        patch: json_patch::Patch,
    },
    /// Deletes a pod of the group.
    DeletePod {
        /// The name of the pod.
        name: String,
        /// The UID of the pod, so that a successor of the same name stays.
        uid: String,
    },
    /// Evicts a worker, whose owner then creates another one.
    EvictPod {
        /// The name of the pod.
        name: String,
        /// The UID of the pod.
        uid: String,
    },
}

/// Decides the next writes for a group.
#[must_use]
pub fn decide(observed: Observed<'_>) -> Decision {
    let mut decider = Decider::new(observed);
    let meta = observed.group.meta();
    let has_finalizer = meta.finalizers.iter().flatten().any(|one| one == FINALIZER);
    if meta.deletion_timestamp.is_some() {
        if has_finalizer {
            decider.terminate();
        }
    } else if has_finalizer {
        decider.reconcile();
    } else {
        decider.actions.push(Action::AddFinalizer);
    }
    decider.finish()
}

/// Returns the status of a group, unchanged but for the condition that tells of a trouble, and the
/// events.
#[must_use]
pub fn report(
    group: &AggregatorGroup,
    trouble: &Trouble,
    now: Timestamp,
) -> (AggregatorGroupStatus, Vec<Note>) {
    let mut status = group.status.clone().unwrap_or_default();
    let old = std::mem::take(&mut status.conditions);
    let mut conditions = Conditions::new(old, group.meta().generation, now);
    set_applied(&mut conditions, Some(trouble));
    let (conditions, notes) = conditions.finish();
    status.conditions = conditions;
    (status, notes)
}

/// Sets the condition of the operator's writes.
fn set_applied(conditions: &mut Conditions, trouble: Option<&Trouble>) {
    let Some(trouble) = trouble else {
        return conditions.set(APPLIED, true, "Written", "the API server takes all writes");
    };
    let reason = if trouble.is_answered { "Refused" } else { "Unreachable" };
    // No number of failures: a status that changes causes the next try at once.
    let message = format!("{} (since {}); the operator retries", trouble.message, trouble.since);
    conditions.set(APPLIED, false, reason, message);
}

/// A decision in the making.
struct Decider<'a> {
    observed: Observed<'a>,
    conditions: Conditions,
    plan: Option<Plan>,
    avoided: Vec<Avoided>,
    is_published: bool,
    actions: Vec<Action>,
    recheck: Duration,
    /// The workers that have not ended, in the order of the ranks.
    workers: Vec<Member<'a>>,
    /// The pod of each aggregator that has not ended.
    aggregators: Vec<Option<Member<'a>>>,
    /// The names of all pods in the namespace, including those that are ending.
    names: BTreeMap<&'a str, &'a Pod>,
    /// A pod that the group's labels select, and that another group keeps.
    shared: Option<Shared>,
    /// The nodes by name, once one has been asked for.
    nodes: OnceCell<BTreeMap<&'a str, &'a Node>>,
}

/// The time after which a decision is taken again even if nothing changed.
const LONGEST_RECHECK: Duration = Duration::from_secs(300);

impl<'a> Decider<'a> {
    fn new(observed: Observed<'a>) -> Self {
        let group = observed.group;
        let status = group.status.clone().unwrap_or_default();
        let Members { workers, aggregators, pods, shared } =
            Members::of(group, observed.groups, observed.pods);
        Self {
            conditions: Conditions::new(status.conditions, group.meta().generation, observed.now),
            plan: status.plan,
            avoided: status.avoided.into_iter().filter(|one| one.until > observed.now).collect(),
            is_published: observed.config_map.is_some(),
            actions: vec![],
            recheck: LONGEST_RECHECK,
            workers,
            aggregators,
            names: pods,
            shared,
            nodes: OnceCell::new(),
            observed,
        }
    }

    fn reconcile(&mut self) {
        if let Err(message) = check(self.observed.group) {
            return self.reject(message);
        }
        self.keep_service();
        // Pods that another group keeps may have joined the aggregators that run.
        if self.plan.is_some() && self.workers.is_empty() && self.shared.is_none() {
            return self.release();
        }
        self.create_aggregators();
        self.replace_stuck();
        let are_workers_ready = self.check_workers();
        if self.needs_plan() && !self.plan_anew(are_workers_ready) {
            // Pods that run may have been lost.
            self.check_placed();
            return self.publish();
        }
        self.conditions.set(ACCEPTED, true, "Valid", "the spec is valid");
        self.check_plan();
        self.place();
        self.check_placed();
        self.publish();
    }

    /// Tells that the spec cannot be carried out. What runs stays as it is, and so does the plan.
    fn reject(&mut self, message: String) {
        self.conditions.set(ACCEPTED, false, "InvalidSpec", message);
        self.check_workers();
        self.check_placed();
        let message = "the spec is invalid; correct it as condition Accepted says. Pods that run \
                       stay as they are";
        for name in [PLANNED, READY] {
            self.conditions.set(name, false, NOT_ACCEPTED, message);
        }
    }

    /// Makes a plan once all workers are there. Returns whether there is one.
    fn plan_anew(&mut self, are_workers_ready: bool) -> bool {
        // A file that becomes unreadable later does no harm to a plan that exists.
        let mut network = match self.network() {
            Ok(network) => network,
            Err(message) => {
                // Nobody tells the operator that a foreign ConfigMap has changed.
                self.recheck = self.recheck.min(plans::RETRY);
                self.reject_plan("InvalidNetwork", message);
                return false;
            }
        };
        self.conditions.set(ACCEPTED, true, "Valid", "the spec is valid");
        if !are_workers_ready {
            self.conditions.set(PLANNED, false, "WaitingForWorkers", "waiting for the workers");
            return false;
        }
        let stale_s = network.stale_s();
        network.forget();
        let is_planned = self.make_plan(&network);
        if let Some(stale_s) = stale_s.filter(|_| is_planned) {
            let message = format!(
                "some measurements of the network file are {:.1} hours old and count little or, \
                 after four half-lives, not at all; measure again, and update the ConfigMap",
                stale_s / 3600.0
            );
            self.conditions.note(true, "StaleNetwork", message, None);
        }
        is_planned
    }

    /// Reads the network file, with the ages that its measurements have now.
    fn network(&self) -> Result<Network, String> {
        let Some(file) = &self.observed.group.spec.topology.network else {
            return Ok(Network::default());
        };
        let text = self.observed.network.map_err(ToOwned::to_owned)?;
        let parsed: Result<Network, _> = if file.key.ends_with(".json") {
            serde_json::from_str(text).map_err(|error| error.to_string())
        } else {
            toml::from_str(text).map_err(|error| error.to_string())
        };
        let now = u64::try_from(self.observed.now.as_second()).unwrap_or(0);
        let checked = parsed.and_then(|network| {
            network.check().map_err(|error| error.to_string())?;
            Ok(network.at(now))
        });
        checked.map_err(|error| format!("key {} of ConfigMap {}: {error}", file.key, file.name))
    }

    fn keep_service(&mut self) {
        let wanted = service(self.observed.group);
        let spec = |service: &Service| {
            let spec = service.spec.clone().unwrap_or_default();
            let ports = spec.ports.unwrap_or_default();
            (spec.selector, ports.iter().map(|port| port.port).collect::<Vec<_>>())
        };
        if self.observed.service.is_none_or(|have| spec(have) != spec(&wanted)) {
            self.actions.push(Action::ApplyService(Box::new(wanted)));
        }
    }

    /// Returns aggregators to their gated state once all workers have gone.
    fn release(&mut self) {
        for member in self.aggregators.clone().into_iter().flatten() {
            if member.slot().is_some() {
                self.delete(&member);
            }
        }
        if self.is_published {
            self.actions.push(Action::DeleteConfigMap);
            self.is_published = false;
        }
        self.plan = None;
        // The next plan reads the network file, and only the spec has been checked here.
        self.conditions.set(ACCEPTED, true, "Valid", "the spec is valid");
        let message = "all workers have ended; the aggregators' nodes are free again";
        self.conditions.set(WORKERS_READY, false, "WorkersGone", message);
        for name in [PLANNED, PLACED, READY] {
            self.conditions.set(name, false, "WaitingForWorkers", "waiting for the next workers");
        }
    }

    /// Creates aggregators that are missing, and deletes those that are too many.
    fn create_aggregators(&mut self) {
        let group = self.observed.group;
        for index in 0..group.spec.aggregators.pods() {
            let name = aggregator_name(group, index);
            if self.aggregators[index as usize].is_some() {
                continue;
            }
            match self.names.get(name.as_str()) {
                None => self.actions.push(Action::CreatePod(Box::new(aggregator(group, index)))),
                // The predecessor is still ending, or has ended and blocks the name.
                Some(pod) if is_owned(pod, group) => {
                    if pod.metadata.deletion_timestamp.is_none() {
                        self.delete_pod(pod);
                    }
                }
                Some(_) => {
                    let message = format!(
                        "pod {name} exists and is not an aggregator of this group; delete it"
                    );
                    self.conditions.set(PLACED, false, "NameInUse", message);
                }
            }
        }
        let pods = self.names.values().filter(|pod| is_owned(pod, group)).copied();
        let index = |pod: &Pod| pod.labels().get(INDEX_LABEL).and_then(|index| index.parse().ok());
        let extra =
            |pod: &&Pod| index(pod).is_none_or(|index: u32| index >= group.spec.aggregators.pods());
        let extra: Vec<_> = pods.filter(extra).filter(|pod| Member::of(pod).is_some()).collect();
        extra.into_iter().for_each(|pod| self.delete_pod(pod));
    }

    /// Frees gated workers and deletes the aggregators, then lets go of the group.
    fn terminate(&mut self) {
        let has_gate = |pod: &Pod| {
            let gates = pod.spec.as_ref().and_then(|spec| spec.scheduling_gates.as_deref());
            gates.unwrap_or_default().iter().any(|gate| gate.name == GATE)
        };
        for worker in self.workers.iter().filter(|worker| has_gate(worker.pod)) {
            let patch = releasing(worker.pod);
            self.actions.push(Action::PatchPod { name: worker.name().into(), patch });
        }
        let group = self.observed.group;
        let own: Vec<_> = self.names.values().filter(|pod| is_owned(pod, group)).copied().collect();
        for pod in &own {
            if pod.metadata.deletion_timestamp.is_none() {
                self.delete_pod(pod);
            }
        }
        let mut message = "the group is being deleted".to_owned();
        if !own.is_empty() {
            let seconds = group.spec.aggregators.drain_seconds;
            let left = format!("; its aggregators have {seconds} s to hand over their jobs");
            message.push_str(&left);
        }
        self.conditions.set(READY, false, "Deleting", message);
        // Owner references remove the other objects.
        if own.is_empty() && self.actions.is_empty() {
            self.actions.push(Action::RemoveFinalizer);
        }
    }

    fn delete(&mut self, member: &Member<'_>) {
        self.delete_pod(member.pod);
    }

    fn delete_pod(&mut self, pod: &Pod) {
        let (name, uid) = (pod.name_any(), pod.uid().unwrap_or_default());
        self.actions.push(Action::DeletePod { name, uid });
    }

    fn finish(mut self) -> Decision {
        let group = self.observed.group;
        set_applied(&mut self.conditions, self.observed.trouble);
        let phase = self.phase();
        let (conditions, notes) = self.conditions.finish();
        let status = AggregatorGroupStatus {
            observed_generation: group.meta().generation,
            phase,
            conditions,
            endpoints: if self.is_published { endpoints(group) } else { vec![] },
            config_map: self.is_published.then(|| config_map_name(group)),
            plan: self.plan,
            avoided: self.avoided,
        };
        Decision { status, actions: self.actions, notes, recheck: self.recheck }
    }

    fn phase(&self) -> Phase {
        let is_true = |name| self.conditions.is_true(name);
        let reason = |name: &str| self.conditions.get(name).map(|one| one.reason.as_str());
        if self.observed.group.meta().deletion_timestamp.is_some() {
            Phase::Terminating
        } else if self.conditions.get(ACCEPTED).is_some() && !is_true(ACCEPTED) {
            Phase::Invalid
        } else if is_true(READY) {
            Phase::Ready
        } else if matches!(reason(PLANNED), Some("NoRoom" | "InvalidTopology")) {
            Phase::Unplaceable
        } else if self.plan.is_none() {
            Phase::Waiting
        } else {
            Phase::Placing
        }
    }
}
