//! Plans: when a group needs one, and how it is carried out.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::SignedDuration;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use racksum_placer::network::Network;

use crate::affinity::Pin;
use crate::crd::{Avoided, Mode, Plan};
use crate::decide::{Action, Decider};
use crate::members::{Member, Stage};
use crate::objects::{aggregator, placing};
use crate::planning::{Request, Unplanned, assigned, free_slots, is_usable, planned};
use crate::status::{ACCEPTED, NOT_ACCEPTED, PLANNED};

impl<'a> Decider<'a> {
    /// Replaces pods that stay unscheduled, and avoids their hosts for a while.
    pub(super) fn replace_stuck(&mut self) {
        let ttl = SignedDuration::from_secs(self.observed.group.spec.pending_ttl_seconds.into());
        let aggregators = self.aggregators.clone().into_iter().flatten().map(|one| (one, true));
        let workers = self.workers.clone().into_iter().map(|one| (one, false));
        let workers = workers.filter(|_| self.observed.group.spec.mode == Mode::PlaceWorkers);
        for (member, is_aggregator) in aggregators.chain(workers).collect::<Vec<_>>() {
            let Stage::Unbound { placed: Some((host, at)) } = member.stage else { continue };
            let left = ttl - self.observed.now.duration_since(at);
            // An aggregator can go nowhere else; a worker only prefers the host.
            let is_lost = is_aggregator && !self.is_usable(host);
            if left.is_positive() && !is_lost {
                self.recheck = self.recheck.min(left.unsigned_abs() + MARGIN);
                continue;
            }
            let why = member.scheduling_message().unwrap_or("the scheduler gave no reason");
            let name = member.name();
            // A worker may go to each host of the domain. If none takes it, no plan there helps.
            let others = if is_aggregator { "" } else { " or elsewhere in its domain" };
            let message =
                format!("{name} found no place on {host}{others}: {why}; choosing another host");
            self.conditions.note(true, "PendingTooLong", message, Some(name));
            self.avoid(host, !is_aggregator, ttl);
            if is_aggregator {
                self.delete(&member);
                self.aggregators.iter_mut().for_each(|slot| {
                    _ = slot.take_if(|one| one.name() == name);
                });
            } else {
                let uid = member.pod.uid().unwrap_or_default();
                self.actions.push(Action::EvictPod { name: name.into(), uid });
                self.workers.retain(|one| one.name() != name);
            }
        }
    }

    /// Avoids a host for a while, or its whole domain. If it is avoided already, the end stays:
    /// otherwise a refused eviction would change the status at each try, and each change causes the
    /// next try.
    fn avoid(&mut self, host: &str, whole_domain: bool, ttl: SignedDuration) {
        let has = |one: &Avoided| one.host == host && (one.whole_domain || !whole_domain);
        if self.avoided.iter().any(has) {
            return;
        }
        let until = self.observed.now.saturating_add(ttl.saturating_mul(AVOIDED_TTLS));
        let until = until.unwrap_or(self.observed.now);
        self.avoided.push(Avoided { host: host.into(), whole_domain, until });
    }

    /// Returns whether unplaced pods must not go to a host for a while.
    fn is_avoided(&self, host: &str) -> bool {
        self.avoided.iter().any(|one| {
            one.host == host || (one.whole_domain && self.are_neighbours(&one.host, host))
        })
    }

    /// Returns whether two hosts are in one innermost domain.
    fn are_neighbours(&self, one: &str, other: &str) -> bool {
        let levels = &self.observed.group.spec.topology.levels;
        self.node(one).zip(self.node(other)).is_some_and(|(one, other)| {
            let is_shared = |level: &String| {
                let label = one.labels().get(level);
                label.is_some() && label == other.labels().get(level)
            };
            !levels.is_empty() && levels.iter().all(is_shared)
        })
    }

    fn node(&self, name: &str) -> Option<&'a Node> {
        let nodes: &'a [Arc<Node>] = self.observed.nodes;
        let by_name = self.nodes.get_or_init(|| {
            nodes
                .iter()
                .filter_map(|node| Some((node.metadata.name.as_deref()?, &**node)))
                .collect()
        });
        by_name.get(name).copied()
    }

    /// Returns whether unplaced pods may go to a host.
    fn is_usable(&self, host: &str) -> bool {
        self.node(host).is_some_and(is_usable) && !self.is_avoided(host)
    }

    /// Returns whether the plan has no usable host for a pod that is not placed.
    pub(super) fn needs_plan(&self) -> bool {
        let Some(plan) = &self.plan else { return true };
        let counts = plan.workers.iter().map(|one| one.count).sum::<u32>();
        let spec = &self.observed.group.spec;
        if plan.aggregators.len() != self.aggregators.len() || counts != spec.workers.count {
            return true;
        }
        let is_lost = |(host, member): (&String, &Option<Member<'_>>)| match member
            .and_then(|member| member.slot())
        {
            Some(slot) => slot != host,
            None => !self.is_usable(host),
        };
        if plan.aggregators.iter().zip(&self.aggregators).any(is_lost) {
            return true;
        }
        match spec.mode {
            Mode::FollowWorkers => {
                let nothing_placed =
                    self.aggregators.iter().flatten().all(|one| one.slot().is_none());
                nothing_placed && self.have_workers_moved() == Some(true)
            }
            Mode::PlaceWorkers => {
                let needed = self.workers.iter().filter(|one| one.slot().is_none()).count();
                let slots = free_slots(plan, &self.workers);
                slots.len() < needed
                    || !slots.iter().all(|host| self.is_usable(host))
                    || self.seats(plan).is_err()
            }
        }
    }

    /// Returns whether the workers are on other nodes than the plan's. `None` if not all are bound.
    fn have_workers_moved(&self) -> Option<bool> {
        // In mode B, a worker is free to leave the host that it prefers.
        if self.observed.group.spec.mode == Mode::PlaceWorkers {
            return Some(false);
        }
        let plan = self.plan.as_ref()?;
        let mut planned: BTreeMap<&str, u32> = BTreeMap::new();
        plan.workers.iter().for_each(|one| *planned.entry(&one.host).or_default() += one.count);
        let mut found: BTreeMap<&str, u32> = BTreeMap::new();
        for worker in &self.workers {
            *found.entry(worker.node()?).or_default() += 1;
        }
        let are_all = self.workers.len() == self.observed.group.spec.workers.count as usize;
        are_all.then_some(planned != found)
    }

    /// Plans the members that are not placed. Returns whether that succeeded.
    pub(super) fn make_plan(&mut self, network: &Network) -> bool {
        let placed = self.aggregators.iter().map(|member| member.and_then(|member| member.slot()));
        let names = self.observed.nodes.iter().filter_map(|node| node.metadata.name.as_deref());
        let request = Request {
            group: self.observed.group,
            nodes: self.observed.nodes,
            pods: self.observed.pods,
            groups: self.observed.groups,
            network,
            avoided: names.filter(|name| self.is_avoided(name)).collect::<BTreeSet<_>>(),
            aggregator: &aggregator(self.observed.group, 0),
            aggregators: placed.collect(),
            workers: &self.workers,
        };
        let plan = match planned(&request) {
            Ok(plan) => plan,
            Err(error) => {
                let message = error.to_string();
                match error {
                    Unplanned::Spec(_) => self.reject_plan("InvalidSpec", message),
                    Unplanned::Network(_) => self.reject_plan("InvalidNetwork", message),
                    Unplanned::Topology(_) => {
                        self.conditions.set(PLANNED, false, "InvalidTopology", message);
                    }
                    Unplanned::Room(_) => self.conditions.set(PLANNED, false, "NoRoom", message),
                }
                self.recheck = self.recheck.min(RETRY);
                return false;
            }
        };
        // The plan counts the workers that accept a node, not which ones do.
        if let Err(worker) = self.seats(&plan) {
            let message = format!(
                "{worker} accepts none of the plan's free hosts; free nodes that it accepts, or \
                 change its node selector or affinity"
            );
            self.conditions.set(PLANNED, false, "NoRoom", message);
            self.recheck = self.recheck.min(RETRY);
            return false;
        }
        if self.plan.is_some() {
            let hosts = plan.aggregators.join(", ");
            let message = format!("the aggregators go to {hosts}");
            self.conditions.note(false, "Replanned", message, None);
        }
        let known = self.plan.as_ref().map_or(&[][..], |plan| &plan.notes);
        if !plan.notes.is_empty() && plan.notes != known {
            self.conditions.note(true, "PlanNotes", plan.notes.join("; "), None);
        }
        self.plan = Some(plan);
        true
    }

    /// Tells that there is no plan because the spec or the network file is wrong.
    pub(super) fn reject_plan(&mut self, reason: &str, message: String) {
        self.conditions.set(ACCEPTED, false, reason, message);
        let message = "correct the spec or the network file as condition Accepted says";
        self.conditions.set(PLANNED, false, NOT_ACCEPTED, message);
    }

    /// Sets the condition of a plan that exists, and says whether its workers are where it says.
    pub(super) fn check_plan(&mut self) {
        let Some(plan) = &self.plan else { return };
        let was_moved =
            self.conditions.get(PLANNED).is_some_and(|planned| planned.reason == "WorkersMoved");
        // While workers are missing, nobody knows where their successors will be.
        if self.have_workers_moved().unwrap_or(was_moved) {
            let message = "workers are on other nodes than the plan's; aggregators stay. Delete \
                           the aggregators' pods between two runs to place them anew";
            return self.conditions.set(PLANNED, true, "WorkersMoved", message);
        }
        let bottleneck = plan.bottleneck.as_ref();
        let message = format!(
            "{} on {}; step {} µs{}",
            if plan.domain.is_empty() { "whole cluster" } else { &plan.domain },
            plan.aggregators.join(", "),
            plan.step_microseconds,
            bottleneck.map_or_else(String::new, |link| format!(", limited by {link}"))
        );
        self.conditions.set(PLANNED, true, "Planned", message);
    }

    /// Pins gated pods to the hosts of the plan and removes their gates, aggregators first.
    pub(super) fn place(&mut self) {
        let Some(plan) = self.plan.clone() else { return };
        if self.needs_plan() {
            return;
        }
        for (host, member) in plan.aggregators.iter().zip(self.aggregators.clone()) {
            if let Some(member) = member.filter(|member| member.stage == Stage::Gated) {
                self.pin(&member, &Pin::Host(host.clone()));
            }
        }
        // A plan that a worker does not accept needs another one.
        for (worker, node) in self.seats(&plan).unwrap_or_default() {
            let pin = self.worker_pin(node);
            self.pin(&worker, &pin);
        }
    }

    /// Returns the gated workers with their nodes of a plan; none in mode A.
    ///
    /// # Errors
    /// The name of a worker that accepts none of the free nodes.
    fn seats(&self, plan: &Plan) -> Result<Vec<(Member<'a>, &'a Node)>, String> {
        if self.observed.group.spec.mode == Mode::FollowWorkers {
            return Ok(vec![]);
        }
        let gated = self.workers.iter().filter(|one| one.stage == Stage::Gated);
        let gated: Vec<_> = gated.copied().collect();
        let slots = free_slots(plan, &self.workers).into_iter();
        let slots: Vec<_> = slots.filter_map(|host| self.node(host)).collect();
        let nodes = assigned(&gated, &slots)?;
        Ok(gated.into_iter().zip(nodes).collect())
    }

    /// Returns the pin of a worker: its innermost domain, and the node as a preference.
    fn worker_pin(&self, node: &Node) -> Pin {
        let host = node.name_any();
        let levels = self.observed.group.spec.topology.levels.iter();
        let labels = levels.map(|level| Some((level.clone(), node.labels().get(level)?.clone())));
        match labels.collect::<Option<Vec<_>>>() {
            Some(labels) if !labels.is_empty() => Pin::Domain { labels, host },
            _ => Pin::Host(host),
        }
    }

    fn pin(&mut self, member: &Member<'_>, pin: &Pin) {
        let patch = placing(member.pod, pin, self.observed.now);
        self.actions.push(Action::PatchPod { name: member.name().into(), patch });
    }
}

/// Hosts on which a pod stayed unscheduled are avoided for this many times the limit.
const AVOIDED_TTLS: i32 = 10;
/// The time to wait beyond a deadline, since clocks are coarse.
const MARGIN: Duration = Duration::from_secs(1);
/// The time after which a plan is tried again. Changes of nodes and pods trigger an earlier try.
pub(super) const RETRY: Duration = Duration::from_secs(30);
