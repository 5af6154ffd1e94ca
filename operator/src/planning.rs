//! Plans for a group: from nodes and pods to the placer's inventory and job, and back.
//!
//! If nothing of a group is placed yet, the placer plans it. Members that are placed stay where
//! they are; a lost member then gets the host with the shortest step.

mod assignment;
mod filling;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod, Toleration};
use kube::{Resource, ResourceExt};
use racksum_placer::import::kubernetes::nic_mbit;
use racksum_placer::inventory::{Amount, Host, Inventory};
use racksum_placer::job::Job;
use racksum_placer::model::{StepTime, step_time};
use racksum_placer::network::{Links, Network};
use racksum_placer::notes::{Note, misplaced, notes};
use racksum_placer::placement::Placement;
use racksum_placer::plan::{PlanError, plan};
use racksum_placer::problem::Problem;
use racksum_placer::topology::{HostId, InventoryError, Topology};

pub use self::assignment::assigned;
use self::filling::{Filled, filled};
use crate::affinity::{accepts, untolerated};
use crate::crd::{AggregatorGroup, HostCount, Mode, Plan};
use crate::members::{HOST, Member, Members, has_ended, is_owned};
use crate::objects::{aggregator, aggregator_name};
use crate::quantity::{Amounts, CPU, MEMORY, add, amounts, requested, times};

/// The cluster and the members of a group, as far as a plan depends on them.
#[derive(Debug, Clone)]
pub struct Request<'a> {
    /// The group.
    pub group: &'a AggregatorGroup,
    /// All nodes.
    pub nodes: &'a [Arc<Node>],
    /// All pods of the cluster.
    pub pods: &'a [Arc<Pod>],
    /// All groups. Pods that the plan of another group has not placed yet need their room.
    pub groups: &'a [Arc<AggregatorGroup>],
    /// Measurements of the links.
    pub network: &'a Network,
    /// Nodes that the plan must not use for pods that are not placed yet.
    pub avoided: BTreeSet<&'a str>,
    /// A pod as the group's aggregators are created.
    pub aggregator: &'a Pod,
    /// For each aggregator, the node where it is placed.
    pub aggregators: Vec<Option<&'a str>>,
    /// The workers.
    pub workers: &'a [Member<'a>],
}

/// The reason why there is no plan. Each text says what to do.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Unplanned {
    /// The group's spec is wrong.
    #[error("{0}")]
    Spec(String),
    /// The network file is wrong.
    #[error("{0}")]
    Network(String),
    /// The nodes' labels describe no tree.
    #[error("{0}")]
    Topology(String),
    /// The pods have no room.
    #[error("{0}")]
    Room(String),
}

/// A node, and what it can take.
#[derive(Debug)]
struct Room<'a> {
    node: &'a Node,
    total: Amounts,
    used: Amounts,
    takes_aggregators: bool,
    /// The unplaced workers that accept the node.
    workers: u32,
}

impl Room<'_> {
    fn free(&self) -> Amounts {
        let used = |name: &String| self.used.get(name).copied().unwrap_or(0);
        self.total.iter().map(|(name, total)| (name.clone(), total - used(name))).collect()
    }
}

/// Plans the members of a group that are not placed yet.
///
/// # Errors
/// If the spec, the network file or the labels are wrong, or the members have no room.
pub fn planned(request: &Request<'_>) -> Result<Plan, Unplanned> {
    let sizes = Sizes::of(request);
    let rooms = rooms(request);
    let mut inventory = inventory(request, &rooms, &sizes)?;
    let mut noted = vec![];
    if let Some(tree) = &request.network.tree {
        noted = misplaced(&inventory, tree);
        inventory = inventory.placed_by(tree);
    }
    let topology = Topology::new(&inventory).map_err(|error| {
        let text = error.to_string();
        match error {
            InventoryError::DuplicateLevel(_) => Unplanned::Spec(format!("topology: {text}")),
            InventoryError::Empty => Unplanned::Topology(no_labels(request)),
            _ => Unplanned::Topology(text),
        }
    })?;
    let links = Links::new(&topology, &request.network.clone().only_of(&topology))
        .map_err(|error| Unplanned::Network(error.to_string()))?;
    let job = job(request, &sizes);
    let problem = Problem::new(&topology, &links, &job)
        .map_err(|error| Unplanned::Spec(error.to_string()))?;
    if request.has_placed() {
        let Filled { placement, aggregators } =
            filled(request, &problem, &topology, &rooms, &sizes)?;
        let time = step_time(&problem, &placement);
        let domain = common_domain(&topology, &placement);
        let step = (time, (time.total_s(), time.total_s()), None);
        let plan = described(&topology, &placement, aggregators, step, domain);
        return Ok(Plan { notes: listed(&noted), ..plan });
    }
    let plan = plan(&topology, &links, &job).map_err(|error| match error {
        PlanError::Job(error) => Unplanned::Spec(error.to_string()),
        error => Unplanned::Room(error.to_string()),
    })?;
    let domain = topology.name(plan.domain).to_owned();
    let step = (plan.time, plan.range_s(&problem), Some(plan.bound_s));
    // In the order of their numbers: the job's own, then one set of standbys after another.
    let standbys = plan.standbys.iter().map(|standby| &standby.aggregators);
    let sets = std::iter::once(&plan.placement.aggregators).chain(standbys);
    let aggregators = sets.flat_map(|counts| {
        let hosts = topology.hosts().iter().zip(counts);
        hosts.flat_map(|(host, count)| std::iter::repeat_n(host.name.clone(), *count as usize))
    });
    let noted = [notes(&problem, &plan), noted].concat();
    let plan = described(&topology, &plan.placement, aggregators.collect(), step, domain);
    Ok(Plan { notes: listed(&noted), ..plan })
}

/// Returns the first notes as texts, and how many more there are: thousands of nodes may be
/// labelled wrong, and a status has limits.
fn listed(notes: &[Note]) -> Vec<String> {
    let more = notes.len().saturating_sub(MOST_NOTES);
    let texts = notes.iter().take(MOST_NOTES).map(ToString::to_string);
    texts.chain((more > 0).then(|| format!("there are {more} more notes"))).collect()
}

/// The number of a plan's notes that are published.
const MOST_NOTES: usize = 5;

/// Checks the parts of a group's spec that do not depend on the cluster.
///
/// # Errors
/// A sentence that names the field.
pub fn check(group: &AggregatorGroup) -> Result<(), String> {
    let spec = &group.spec;
    // Names of pods and Services have no dots, and those of Services begin with a letter.
    let name = group.name_any();
    if !name.starts_with(|first: char| first.is_ascii_lowercase()) || name.contains('.') {
        return Err(format!(
            "the name {name:?} begins with a digit or has a dot, and the names of pods and \
             Services begin with it; rename the group"
        ));
    }
    if spec.aggregators.racks {
        return Err("aggregators.racks is true, and the operator places no parents and \
                    aggregators of racks; remove it, or run them without the operator"
            .into());
    }
    let name = aggregator_name(group, spec.aggregators.pods() - 1);
    if name.len() > LONGEST_LABEL {
        return Err(format!(
            "pod names such as {name} exceed {LONGEST_LABEL} bytes; rename the group"
        ));
    }
    let size = amounts(Some(&spec.aggregators.resources));
    for resource in [CPU, MEMORY] {
        if size.get(resource).is_none_or(|amount| *amount <= 0) {
            return Err(format!("aggregators.resources has no quantity of {resource}; add it"));
        }
    }
    let pool_mib = i128::from(spec.aggregators.shards) * i128::from(spec.aggregators.pool_mib);
    if size[MEMORY] <= (pool_mib << 20) * 1000 {
        return Err(format!(
            "the packet buffers take {pool_mib} MiB, and aggregators.resources.memory is {}; raise \
             it",
            spec.aggregators.resources[MEMORY].0
        ));
    }
    let levels = &spec.topology.levels;
    let host = Host {
        name: "host".into(),
        address: None,
        labels: levels.iter().map(|level| (level.clone(), "domain".into())).collect(),
        nic_mbit: spec.topology.nic_mbit,
        cpus: Amount::default(),
        gpus: BTreeMap::new(),
        taints: vec![],
        aggregator: None,
        max_aggregators: None,
    };
    let inventory = Inventory { levels: levels.clone(), hosts: vec![host] };
    let topology = Topology::new(&inventory).map_err(|error| format!("topology: {error}"))?;
    let links = Links::new(&topology, &Network::default()).map_err(|error| error.to_string())?;
    let aggregator = aggregator(group, 0);
    let request = Request {
        group,
        nodes: &[],
        pods: &[],
        groups: &[],
        network: &Network::default(),
        avoided: BTreeSet::new(),
        aggregator: &aggregator,
        aggregators: vec![],
        workers: &[],
    };
    let mut job = job(&request, &Sizes::of(&request));
    job.requires_scope = spec.topology.requires_scope;
    Problem::new(&topology, &links, &job).map(drop).map_err(|error| error.to_string())
}

/// The longest label of a DNS name.
const LONGEST_LABEL: usize = 63;

impl Request<'_> {
    fn follows(&self) -> bool {
        self.group.spec.mode == Mode::FollowWorkers
    }

    /// Returns whether a member is placed, apart from the workers that another scheduler places.
    fn has_placed(&self) -> bool {
        let has_worker = self.workers.iter().any(|worker| worker.slot().is_some());
        self.aggregators.iter().any(Option::is_some) || (!self.follows() && has_worker)
    }

    /// Returns the number of placed workers by node.
    fn placed_workers(&self) -> BTreeMap<&str, u32> {
        let mut placed = BTreeMap::new();
        for worker in self.workers {
            let host = if self.follows() { worker.node() } else { worker.slot() };
            if let Some(host) = host {
                *placed.entry(host).or_default() += 1;
            }
        }
        placed
    }
}

/// The amounts that one member needs.
#[derive(Debug)]
struct Sizes {
    aggregator: Amounts,
    /// The greatest amount that any unplaced worker needs of each resource.
    worker: Amounts,
}

impl Sizes {
    fn of(request: &Request<'_>) -> Self {
        let mut worker = Amounts::new();
        for member in request.workers.iter().filter(|member| member.slot().is_none()) {
            crate::quantity::raise(&mut worker, &requested(member.pod));
        }
        Self { aggregator: requested(request.aggregator), worker }
    }
}

/// Returns the nodes that have all labels of the topology, or a member of the group, by name.
fn rooms<'a>(request: &Request<'a>) -> Vec<Room<'a>> {
    let mut used: BTreeMap<&str, Amounts> = BTreeMap::new();
    for pod in request.pods {
        // The successor of an own aggregator has its name, so it starts only when the room is free.
        let has_successor = is_owned(pod, request.group) && Member::of(pod).is_none();
        if let Some(node) = occupied(pod).filter(|_| !has_successor) {
            add(used.entry(node).or_default(), &requested(pod));
        }
    }
    let others = request.groups.iter().filter(|other| other.meta().uid != request.group.meta().uid);
    for other in others {
        for (host, amounts) in reserved(other, request) {
            add(used.entry(host).or_default(), &amounts);
        }
    }
    let levels = &request.group.spec.topology.levels;
    let placed = request.placed_workers();
    let spec = request.aggregator.spec.as_ref();
    let mut rooms: Vec<_> = request
        .nodes
        .iter()
        .filter_map(|node| {
            let name = node.metadata.name.as_deref()?;
            let has_member = placed.contains_key(name) || request.aggregators.contains(&Some(name));
            let has_labels = levels.iter().all(|level| node.labels().contains_key(level));
            if !has_labels && !has_member {
                return None;
            }
            let is_open = is_usable(node) && !request.avoided.contains(name);
            let takes = |pod: &Pod| {
                let spec = pod.spec.as_ref();
                spec.is_some_and(|spec| {
                    accepts(spec, node) && is_tolerated(node, spec.tolerations.as_ref())
                })
            };
            let unplaced = request.workers.iter().filter(|worker| worker.slot().is_none());
            let workers =
                if is_open { unplaced.filter(|worker| takes(worker.pod)).count() } else { 0 };
            Some(Room {
                node,
                total: amounts(node.status.as_ref().and_then(|status| status.allocatable.as_ref())),
                used: used.remove(name).unwrap_or_default(),
                takes_aggregators: is_open && spec.is_some() && takes(request.aggregator),
                workers: u32::try_from(workers).unwrap_or(u32::MAX),
            })
        })
        .collect();
    // Caches have no order, and neither notes nor messages may change with it.
    rooms.sort_by(|one, other| one.node.metadata.name.cmp(&other.node.metadata.name));
    rooms
}

/// Returns the node whose room a pod takes, if it takes any. A pod that is being deleted takes it
/// until it has ended: an aggregator may drain for hours.
fn occupied(pod: &Pod) -> Option<&str> {
    match Member::of(pod) {
        Some(member) => member.node().or_else(|| pod.annotations().get(HOST).map(String::as_str)),
        None => pod.spec.as_ref()?.node_name.as_deref().filter(|_| !has_ended(pod)),
    }
}

/// Returns what the members of a group need that its plan has a node for, but that are not placed.
fn reserved<'a>(group: &'a AggregatorGroup, request: &Request<'_>) -> Vec<(&'a str, Amounts)> {
    let Some(plan) = group.status.as_ref().and_then(|status| status.plan.as_ref()) else {
        return vec![];
    };
    let members = Members::of(group, request.groups, request.pods);
    let size = requested(&aggregator(group, 0));
    let aggregators = (0..).zip(plan.aggregators.iter().zip(&members.aggregators));
    let unplaced = aggregators.filter(|(index, (host, one))| {
        // A predecessor that is still ending there has the room.
        let former = || members.pods.get(aggregator_name(group, *index).as_str());
        let has_room = || former().and_then(|pod| occupied(pod)) == Some(host.as_str());
        one.is_none_or(|one| one.slot().is_none()) && !has_room()
    });
    let mut reserved: Vec<_> =
        unplaced.map(|(_, (host, _))| (host.as_str(), size.clone())).collect();
    let gated = members.workers.iter().filter(|one| one.slot().is_none());
    let slots = free_slots(plan, &members.workers);
    reserved.extend(slots.into_iter().zip(gated).map(|(host, one)| (host, requested(one.pod))));
    reserved
}

/// Returns the workers' nodes of a plan that no placed worker has taken, in order.
#[must_use]
pub fn free_slots<'a>(plan: &'a Plan, workers: &[Member<'_>]) -> Vec<&'a str> {
    let mut taken: BTreeMap<&str, u32> = BTreeMap::new();
    workers.iter().filter_map(Member::slot).for_each(|host| *taken.entry(host).or_default() += 1);
    let free = plan.workers.iter().flat_map(|one| {
        let taken = taken.get(one.host.as_str()).copied().unwrap_or(0);
        std::iter::repeat_n(one.host.as_str(), one.count.saturating_sub(taken) as usize)
    });
    free.collect()
}

/// Returns whether new pods may go to a node: it is ready and not cordoned.
#[must_use]
pub fn is_usable(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    let ready = conditions.into_iter().flatten().find(|condition| condition.type_ == "Ready");
    let is_cordoned = node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false);
    ready.is_some_and(|ready| ready.status == "True")
        && !is_cordoned
        && node.metadata.deletion_timestamp.is_none()
}

fn is_tolerated(node: &Node, tolerations: Option<&Vec<Toleration>>) -> bool {
    untolerated(node, tolerations.map_or(&[], Vec::as_slice)).is_none()
}

fn inventory(
    request: &Request<'_>,
    rooms: &[Room<'_>],
    sizes: &Sizes,
) -> Result<Inventory, Unplanned> {
    let topology = &request.group.spec.topology;
    let placed = request.placed_workers();
    let hosts = rooms.iter().map(|room| {
        let name = room.node.name_any();
        let labelled = nic_mbit(room.node.labels())
            .map_err(|error| Unplanned::Topology(format!("node {name}: {error}")))?;
        let seats = if request.follows() {
            let here = placed.get(name.as_str()).copied().unwrap_or(0);
            Amount { total: here, used: 0 }
        } else {
            // CPU cores are shared with aggregators, so the placer counts them itself.
            let fits = |room: &Amounts| times(room, &sizes.worker, |name| name != CPU);
            let total = fits(&room.total).min(room.workers);
            Amount { total, used: total.saturating_sub(fits(&room.free())) }
        };
        let mut left = room.free();
        if !request.follows() {
            // Memory that workers may need is kept from aggregators.
            let kept = sizes.worker.iter().map(|(name, amount)| {
                let amount = if name == CPU { 0 } else { amount * i128::from(seats.free()) };
                (name.clone(), -amount)
            });
            add(&mut left, &kept.collect());
        }
        let fits =
            if room.takes_aggregators { times(&left, &sizes.aggregator, |_| true) } else { 0 };
        // On the host's network, two of them would need the same port.
        let fits = if request.group.spec.aggregators.host_network { fits.min(1) } else { fits };
        let cpu = |amounts: &Amounts| amounts.get(CPU).map_or(0, |amount| millis(*amount));
        let total = cpu(&room.total);
        Ok(Host {
            address: None,
            nic_mbit: labelled.unwrap_or(topology.nic_mbit),
            labels: room.node.labels().clone(),
            cpus: Amount { total, used: cpu(&room.used).min(total) },
            gpus: BTreeMap::from([(SEATS.into(), seats)]),
            taints: vec![],
            aggregator: None,
            max_aggregators: Some(fits),
            name,
        })
    });
    Ok(Inventory { levels: topology.levels.clone(), hosts: hosts.collect::<Result<_, _>>()? })
}

/// The placer's resource that stands for places of workers.
const SEATS: &str = "workers";

fn job(request: &Request<'_>, sizes: &Sizes) -> Job {
    let spec = &request.group.spec;
    let cpu = |amounts: &Amounts| amounts.get(CPU).map_or(0, |amount| millis(*amount));
    let bytes = u64::try_from(spec.traffic.bytes).unwrap_or(0);
    Job {
        name: request.group.name_any(),
        ranks: spec.workers.count,
        gpus_per_rank: 1,
        gpu_type: Some(SEATS.into()),
        cpus_per_rank: if request.follows() { 0 } else { cpu(&sizes.worker) },
        bytes: bytes.saturating_mul(spec.workers.ranks_per_pod.into()),
        own_density: spec.traffic.own_density,
        union_density: spec.traffic.union_density,
        aggregators: spec.aggregators.count.into(),
        shards: None,
        racks: false.into(),
        standbys: spec.aggregators.standbys,
        standby_level: spec.topology.standby_level.clone(),
        cpus_per_aggregator: cpu(&sizes.aggregator),
        is_multicast: spec.traffic.is_multicast,
        scope: spec.topology.scope.clone(),
        // The placer cannot move workers that another scheduler placed.
        requires_scope: spec.topology.requires_scope && !request.follows(),
        widen_gain: spec.topology.widen_gain,
        tolerates: vec![],
        only: vec![],
        except: vec![],
        max_ranks_per_host: None,
        max_ranks_per_domain: BTreeMap::new(),
        has_dedicated_aggregators: false,
    }
}

fn millis(amount: i128) -> u32 {
    u32::try_from(amount.max(0)).unwrap_or(u32::MAX)
}

/// Returns the path of the innermost domain that holds all members.
fn common_domain(topology: &Topology, placement: &Placement) -> String {
    let paths = placement.hosts().map(|(host, ..)| path(topology, host));
    let shared = paths.reduce(|mut shared, path| {
        let same = shared.iter().zip(&path).take_while(|(one, other)| one == other).count();
        shared.truncate(same);
        shared
    });
    shared.unwrap_or_default().pop().unwrap_or_default()
}

/// Returns the domains of a host, the widest first.
fn path(topology: &Topology, host: HostId) -> Vec<String> {
    let innermost = Some(topology.domain_of(host)).filter(|domain| *domain != Topology::ROOT);
    let wider = |domain: &_| topology.parent(*domain).filter(|domain| *domain != Topology::ROOT);
    let mut path: Vec<_> = std::iter::successors(innermost, wider)
        .map(|domain| topology.name(domain).to_owned())
        .collect();
    path.reverse();
    path
}

fn described(
    topology: &Topology,
    placement: &Placement,
    aggregators: Vec<String>,
    (time, range_s, bound_s): (StepTime, (f64, f64), Option<f64>),
    domain: String,
) -> Plan {
    let hosts = topology.hosts().iter().map(|host| &host.name);
    let workers = hosts.zip(&placement.ranks).filter(|(_, count)| **count > 0);
    Plan {
        domain,
        step_microseconds: microseconds(time.total_s()),
        range_microseconds: [microseconds(range_s.0), microseconds(range_s.1)],
        bound_microseconds: bound_s.map(microseconds),
        bottleneck: time.bottleneck.text(topology),
        aggregators,
        workers: workers
            .map(|(host, count)| HostCount { host: host.clone(), count: *count })
            .collect(),
        notes: vec![],
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a cast saturates, and an endless step is long"
)]
fn microseconds(seconds: f64) -> i64 {
    (seconds * 1e6).round() as i64
}

fn no_labels(request: &Request<'_>) -> String {
    format!(
        "no node has the labels {}; label the nodes, or correct `topology.levels`",
        request.group.spec.topology.levels.join(" and ")
    )
}

#[cfg(test)]
mod tests;
