//! Finds nodes that wait for each other, within a rank or across ranks.
//!
//! Each node has two events, its start and its end, and an event waits for others: a node starts
//! after the events that it depends on and ends after its start. A collective ends after all
//! members have started it, and a receive after the send has started. An execution can run to its
//! end if and only if no events wait for each other.

use super::{Event, Graph};

/// A node's rank and its index in the rank's graph.
pub(super) type Index = (usize, usize);

/// The calls and messages that belong together.
#[derive(Debug, Default)]
pub(super) struct Matches {
    /// The nodes of each call of a collective.
    pub(super) calls: Vec<Vec<Index>>,
    /// The sender and the receiver of each message.
    pub(super) messages: Vec<(Index, Index)>,
}

/// Returns nodes that wait for each other, if there are such nodes. Each waits for the next, and
/// the last for the first.
pub(super) fn cycle(graphs: &[Graph], matches: &Matches) -> Option<Vec<Index>> {
    let events = Events::new(graphs, matches);
    let stuck = events.stuck();
    let event = stuck.iter().position(|is_stuck| *is_stuck)?;
    let cycle = events.cycle(event, &stuck);
    let mut nodes: Vec<_> = cycle.into_iter().filter_map(|event| events.node(event)).collect();
    nodes.dedup();
    if nodes.len() > 1 && nodes.first() == nodes.last() {
        nodes.pop();
    }
    Some(nodes)
}

/// All events. Those of node n are 2n and 2n + 1, where n counts the nodes of all ranks; the
/// meetings of the collectives follow.
struct Events {
    count: usize,
    /// The number of the first meeting.
    meetings: usize,
    /// The number of nodes in the ranks before each rank.
    before: Vec<usize>,
    /// Pairs of an event and a later one that waits for it.
    waits: Vec<(usize, usize)>,
}

impl Events {
    fn new(graphs: &[Graph], matches: &Matches) -> Self {
        let mut nodes = 0;
        let mut before = Vec::new();
        for graph in graphs {
            before.push(nodes);
            nodes += graph.nodes().len();
        }
        let count = 2 * nodes + matches.calls.len();
        let mut events = Self { count, meetings: 2 * nodes, before, waits: Vec::new() };
        for (rank, graph) in graphs.iter().enumerate() {
            for index in 0..graph.nodes().len() {
                let at = (rank, index);
                events.waits.push((events.of(at, Event::Started), events.of(at, Event::Ended)));
                for &(dependent, event) in graph.dependents(index) {
                    let start = events.of((rank, dependent), Event::Started);
                    events.waits.push((events.of(at, event), start));
                }
            }
        }
        for (call, members) in matches.calls.iter().enumerate() {
            let meeting = events.meetings + call;
            for at in members {
                events.waits.push((events.of(*at, Event::Started), meeting));
                events.waits.push((meeting, events.of(*at, Event::Ended)));
            }
        }
        for (send, recv) in &matches.messages {
            let wait = (events.of(*send, Event::Started), events.of(*recv, Event::Ended));
            events.waits.push(wait);
        }
        events.waits.sort_unstable();
        events
    }

    fn of(&self, (rank, index): Index, event: Event) -> usize {
        2 * (self.before[rank] + index) + usize::from(event == Event::Ended)
    }

    /// Returns the node of an event, or none for a meeting.
    fn node(&self, event: usize) -> Option<Index> {
        let node = event / 2;
        if event >= self.meetings {
            return None;
        }
        // Ranks without nodes have the same count as their successors, so the last one counts.
        let rank = self.before.partition_point(|before| *before <= node) - 1;
        Some((rank, node - self.before[rank]))
    }

    /// Returns for each event whether it can never happen.
    fn stuck(&self) -> Vec<bool> {
        let mut waiting = vec![0_u32; self.count];
        for (_, later) in &self.waits {
            waiting[*later] += 1;
        }
        let mut ready: Vec<_> = (0..self.count).filter(|event| waiting[*event] == 0).collect();
        while let Some(event) = ready.pop() {
            let first = self.waits.partition_point(|(earlier, _)| *earlier < event);
            for (_, later) in self.waits[first..].iter().take_while(|wait| wait.0 == event) {
                waiting[*later] -= 1;
                if waiting[*later] == 0 {
                    ready.push(*later);
                }
            }
        }
        waiting.iter().map(|count| *count > 0).collect()
    }

    /// Returns events that wait for each other, each for the next and the last for the first.
    fn cycle(&self, stuck_event: usize, stuck: &[bool]) -> Vec<usize> {
        let mut blockers: Vec<_> = self.waits.iter().filter(|wait| stuck[wait.0]).collect();
        blockers.sort_unstable_by_key(|(earlier, later)| (*later, *earlier));
        let blocker = |event: usize| {
            let first = blockers.partition_point(|(_, later)| *later < event);
            blockers[first].0
        };
        // An event that is stuck waits for a stuck event, so the walk returns to where it was.
        let mut path = vec![stuck_event];
        let mut place = vec![usize::MAX; self.count];
        place[stuck_event] = 0;
        loop {
            let next = blocker(path[path.len() - 1]);
            if place[next] != usize::MAX {
                return path.split_off(place[next]);
            }
            place[next] = path.len();
            path.push(next);
        }
    }
}
