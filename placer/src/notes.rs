//! Facts about a plan that its reader may not expect: constraints that match nothing, a scope that
//! the plan leaves, and links without measurements.

use std::fmt;

use crate::inventory::{Inventory, Tree};
use crate::network::Source;
use crate::plan::Plan;
use crate::problem::Problem;
use crate::topology::{HostId, VertexId};
use crate::unmatched::{Unmatched, few, unmatched};

/// A fact about a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// A constraint names something that no host has.
    Unmatched(Unmatched),
    /// The job names a type of GPU, and its ranks use none.
    NoGpus,
    /// The plan is not in one domain of the job's scope.
    LeftScope {
        /// The level of the scope.
        level: String,
        /// The ranks for which a domain of that level has room, if these are too few.
        room: Option<u32>,
    },
    /// A host was measured in another domain than its labels say.
    Misplaced {
        /// The host's name.
        host: String,
        /// The path of the domain that its labels name.
        labelled: String,
        /// The path of the domain that it was measured in.
        measured: String,
    },
    /// Links in use that were not measured, by the names of their vertices.
    Unmeasured(Vec<String>),
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unmatched(unmatched) => unmatched.fmt(f),
            Self::NoGpus => f.write_str("`gpu_type` has no effect, because gpus_per_rank is 0"),
            Self::LeftScope { level, room: Some(room) } => {
                write!(f, "the plan leaves `scope`: no {level} has room for more than {room} ranks")
            }
            Self::LeftScope { level, room: None } => {
                write!(f, "the plan leaves `scope`: no {level} has as short a step")
            }
            Self::Misplaced { host, labelled, measured } => write!(
                f,
                "{host} counts as a host of {measured}, where it was measured; its labels say \
                 {labelled}"
            ),
            Self::Unmeasured(links) => {
                let links = few(links.iter().map(String::as_str));
                write!(f, "links in use were not measured: {links}")
            }
        }
    }
}

/// Returns a note for each host that a network file places elsewhere than its labels.
#[must_use]
pub fn misplaced(inventory: &Inventory, tree: &Tree) -> Vec<Note> {
    let hosts = inventory.hosts.iter().filter(|_| inventory.levels == tree.levels);
    let notes = hosts.filter_map(|host| {
        let labels = inventory.levels.iter().map(|level| host.labels.get(level).cloned());
        let labelled = labels.collect::<Option<Vec<_>>>()?.join("/");
        let measured = tree.hosts.get(&host.name)?.labels.join("/");
        let host = host.name.clone();
        (labelled != measured).then_some(Note::Misplaced { host, labelled, measured })
    });
    notes.collect()
}

/// Returns what the reader of a plan should know.
#[must_use]
pub fn notes(problem: &Problem<'_>, plan: &Plan) -> Vec<Note> {
    let Problem { topology, job, .. } = problem;
    let mut notes: Vec<_> = unmatched(topology, job).into_iter().map(Note::Unmatched).collect();
    if job.gpus_per_rank == 0 && job.gpu_type.is_some() {
        notes.push(Note::NoGpus);
    }
    if let Some(level) = &job.scope
        && topology.depth(plan.domain) < problem.scope
    {
        let rooms = topology.domains(problem.scope).map(|domain| problem.rooms[domain.0]);
        let room = rooms.max().filter(|room| *room < job.ranks);
        notes.push(Note::LeftScope { level: level.clone(), room });
    }
    let unmeasured = unmeasured(problem, plan);
    if !unmeasured.is_empty() {
        notes.push(Note::Unmeasured(unmeasured));
    }
    notes
}

/// Returns the links that a plan uses and that have no measurement, if any link has one.
fn unmeasured(problem: &Problem<'_>, plan: &Plan) -> Vec<String> {
    let Problem { topology, links, .. } = problem;
    let is_measured = |vertex: VertexId| {
        let sources = [links.up(vertex).source, links.down(vertex).source];
        sources.iter().all(|source| matches!(source, Source::Measured | Source::Inferred))
    };
    let vertices = || (1..topology.vertices()).map(VertexId);
    if !vertices().any(is_measured) {
        return vec![];
    }
    let racks = plan.tree.iter().flat_map(|tree| &tree.racks).copied();
    let hosts: Vec<HostId> = plan.placement.hosts().map(|(host, ..)| host).chain(racks).collect();
    let inside = |vertex: VertexId| {
        let range = topology.hosts_of(vertex);
        hosts.iter().filter(|host| range.contains(&host.0)).count()
    };
    // A link with all members on one side carries nothing.
    let is_used = |vertex: &VertexId| (1..hosts.len()).contains(&inside(*vertex));
    let unmeasured = vertices().filter(|vertex| !is_measured(*vertex)).filter(is_used);
    unmeasured.map(|vertex| topology.name(vertex).to_owned()).collect()
}
