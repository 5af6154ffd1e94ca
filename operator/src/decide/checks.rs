//! The conditions of workers, placed pods and aggregators.

use crate::crd::Mode;
use crate::decide::plans::RETRY;
use crate::decide::{Action, Decider};
use crate::members::{GATE, Member, Shared, Stage};
use crate::objects::{aggregator_name, config_map, config_map_name};
use crate::status::{PLACED, READY, WORKERS_READY};

impl Decider<'_> {
    /// Sets the condition of the workers. Returns whether a plan can be made.
    pub(super) fn check_workers(&mut self) -> bool {
        if let Some(Shared { pod, keeper }) = &self.shared {
            let message = format!(
                "workers.matchLabels selects {pod}, which group {keeper} keeps; make the labels \
                 of one group narrower, or delete one of the groups"
            );
            self.conditions.set(WORKERS_READY, false, "SharedWorkers", message);
            // No event tells that the other group has changed.
            self.recheck = self.recheck.min(RETRY);
            return false;
        }
        let spec = &self.observed.group.spec;
        let (found, wanted) = (self.workers.len(), spec.workers.count as usize);
        let first =
            |is_it: &dyn Fn(&Member<'_>) -> bool| self.workers.iter().find(|one| is_it(one));
        // If each job has a single pod, all pods are leaders, and none is missing.
        if let Some(worker) = first(&|one| found < wanted && one.is_in_jobset_trap()) {
            let message = format!(
                "JobSet creates the other workers only once {} is scheduled, and that waits for \
                 them: remove the annotation alpha.jobset.sigs.k8s.io/exclusive-topology, add \
                 alpha.jobset.sigs.k8s.io/node-selector, or use mode FollowWorkers",
                worker.name()
            );
            self.conditions.set(WORKERS_READY, false, "JobSetExclusiveTopology", message);
            return false;
        }
        let follows = spec.mode == Mode::FollowWorkers;
        if let Some(worker) = first(&|one| follows && one.stage == Stage::Gated) {
            let message = format!(
                "{} has the gate {GATE}, which goes only in mode PlaceWorkers: remove the gate \
                 from the pod template, or set mode to PlaceWorkers",
                worker.name()
            );
            self.conditions.set(WORKERS_READY, false, "GateInFollowWorkers", message);
            return false;
        }
        let (reason, message) = if found > wanted {
            let text = format!(
                "{found} pods match workers.matchLabels, and workers.count is {wanted}; correct \
                 one of them"
            );
            ("TooManyWorkers", text)
        } else if let Some((worker, gate)) = self.workers.iter().find_map(|one| match one.stage {
            Stage::Held { gate } => Some((one, gate)),
            _ => None,
        }) {
            let text =
                format!("{} still has the gate {gate}, which its owner removes", worker.name());
            ("WaitingForOtherGates", text)
        } else if found < wanted {
            ("WaitingForWorkers", format!("{found} of {wanted} workers exist"))
        } else if let Some(worker) = first(&|one| !self.is_ready_to_plan(one)) {
            let why = worker.scheduling_message();
            let why = why.map_or_else(String::new, |why| format!(": {why}"));
            ("WaitingForWorkers", format!("{} has no node yet{why}", worker.name()))
        } else {
            let state = if follows { "are bound" } else { "can be placed" };
            let message = format!("all {wanted} workers {state}");
            self.conditions.set(WORKERS_READY, true, "AllWorkers", message);
            return true;
        };
        self.conditions.set(WORKERS_READY, false, reason, message);
        false
    }

    fn is_ready_to_plan(&self, worker: &Member<'_>) -> bool {
        match self.observed.group.spec.mode {
            Mode::FollowWorkers => worker.node().is_some(),
            Mode::PlaceWorkers => worker.stage == Stage::Gated || worker.slot().is_some(),
        }
    }

    /// Sets the condition of the pods that the operator places.
    pub(super) fn check_placed(&mut self) {
        let workers = match self.observed.group.spec.mode {
            Mode::FollowWorkers => &[],
            Mode::PlaceWorkers => self.workers.as_slice(),
        };
        if self.conditions.get(PLACED).is_some_and(|one| one.reason == "NameInUse")
            && self.aggregators.iter().any(Option::is_none)
        {
            return;
        }
        let placed = self.aggregators.iter().flatten().chain(workers);
        let unbound = placed.clone().find(|member| member.node().is_none());
        let missing = self.aggregators.iter().any(Option::is_none);
        let (is_true, reason, message) = match unbound {
            Some(member) if member.slot().is_some() => {
                let host = member.slot().unwrap_or_default();
                let why = member.scheduling_message();
                let why = why.map_or_else(String::new, |why| format!(": {why}"));
                (false, "Pending", format!("{} waits for {host}{why}", member.name()))
            }
            Some(member) => (false, "Gated", format!("{} is gated", member.name())),
            None if missing => (false, "Gated", self.missing()),
            None => (true, "AllBound", format!("all {} pods are bound", placed.count())),
        };
        self.conditions.set(PLACED, is_true, reason, message);
    }

    /// Says why an aggregator has no pod. The pod of a node that is gone ends only once somebody
    /// removes the node or the pod.
    fn missing(&self) -> String {
        let group = self.observed.group;
        let names = (0..group.spec.aggregators.pods()).map(|index| aggregator_name(group, index));
        let mut ending = names.filter_map(|name| {
            let pod = self.names.get(name.as_str())?;
            pod.metadata.deletion_timestamp.as_ref()?;
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone())?;
            Some(format!(
                "the former pod {name} is still ending on {node}; if that node is gone, delete the \
                 node or force the deletion of the pod"
            ))
        });
        ending.next().unwrap_or_else(|| "an aggregator's pod is missing".into())
    }

    /// Publishes the aggregators' addresses once all aggregators serve.
    pub(super) fn publish(&mut self) {
        let group = self.observed.group;
        let not_ready =
            |member: &&Option<Member<'_>>| !member.is_some_and(|member| member.is_ready());
        let waiting = self.aggregators.iter().filter(not_ready).count();
        if waiting > 0 {
            let message =
                format!("{waiting} of {} aggregators do not serve", self.aggregators.len());
            // Until the first success, this is the normal course.
            let was_ready = self
                .conditions
                .get(READY)
                .is_some_and(|one| one.status == "True" || one.reason == "AggregatorsNotReady");
            let reason = if was_ready { "AggregatorsNotReady" } else { "Starting" };
            return self.conditions.set(READY, false, reason, message);
        }
        let wanted = config_map(group);
        if self.observed.config_map.is_none_or(|have| have.data != wanted.data) {
            self.actions.push(Action::ApplyConfigMap(Box::new(wanted)));
            return self.conditions.set(READY, false, "Publishing", "publishing their addresses");
        }
        let message = format!("ConfigMap {} has their addresses", config_map_name(group));
        self.conditions.set(READY, true, "AggregatorsReady", message);
    }
}
