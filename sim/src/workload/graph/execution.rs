//! An execution: the graphs of all ranks, checked against each other.

use std::collections::{BTreeMap, BTreeSet};

use racksum_proto::ids::Rank;

use super::order::{self, Index, Matches};
use super::{Collective, Graph, GraphError, GroupId, MOST_RANKS, Message, Node, Place, Work};

/// Ranks that take part in the same collectives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// The name that messages use.
    pub name: String,
    /// The members. Their order counts: it gives each its part of an operand.
    pub members: Vec<Rank>,
}

/// The graphs of all ranks of a job. An execution that exists can run to its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Execution {
    groups: Vec<Group>,
    graphs: Vec<Graph>,
    /// For each node of each rank its number among the calls or messages that it is matched with.
    turns: Vec<Vec<usize>>,
}

impl Execution {
    /// Creates an execution whose rank r runs the r-th graph.
    ///
    /// # Errors
    /// If a group has an unknown rank, a collective or a message lacks a partner or disagrees with
    /// it, or nodes wait for each other.
    pub fn new(groups: Vec<Group>, graphs: Vec<Graph>) -> Result<Self, GraphError> {
        match graphs.len() {
            0 => return Err(GraphError::NoRanks),
            1..=MOST_RANKS => {}
            ranks => return Err(GraphError::TooManyRanks(ranks)),
        }
        for group in &groups {
            check_group(group, graphs.len())?;
        }
        let turns = graphs.iter().map(|graph| vec![0; graph.nodes().len()]).collect();
        let mut execution = Self { groups, graphs, turns };
        let mut matches = Matches::default();
        execution.match_calls(&mut matches)?;
        execution.match_messages(&mut matches)?;
        match order::cycle(&execution.graphs, &matches) {
            None => Ok(execution),
            Some(nodes) => {
                Err(GraphError::Cycle(nodes.into_iter().map(|at| execution.place(at)).collect()))
            }
        }
    }

    /// Returns the groups; a [`GroupId`] is an index.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Returns the graphs; a rank is an index.
    #[must_use]
    pub fn graphs(&self) -> &[Graph] {
        &self.graphs
    }

    /// Returns the number of a node among its rank's calls of the same group, or among its messages
    /// with the same peer, direction and tag. Partners have equal numbers.
    #[must_use]
    pub fn turn(&self, rank: Rank, index: usize) -> usize {
        self.turns[rank.index()][index]
    }

    /// Describes a node for a message.
    fn place(&self, (rank, index): Index) -> Place {
        Place::new(rank_of(rank), &self.graphs[rank].nodes()[index])
    }

    fn node(&self, (rank, index): Index) -> &Node {
        &self.graphs[rank].nodes()[index]
    }

    /// Returns all nodes, rank by rank.
    fn indices(&self) -> Vec<Index> {
        let ranks = self.graphs.iter().enumerate();
        ranks.flat_map(|(rank, graph)| (0..graph.nodes().len()).map(move |it| (rank, it))).collect()
    }

    /// Numbers the calls of each group and checks that the members agree on them.
    fn match_calls(&mut self, matches: &mut Matches) -> Result<(), GraphError> {
        let mut calls: BTreeMap<(GroupId, usize), Vec<(Index, Collective)>> = BTreeMap::new();
        let groups = self.groups.iter().enumerate();
        let members: BTreeSet<_> = groups
            .flat_map(|(id, group)| group.members.iter().map(move |member| (GroupId(id), *member)))
            .collect();
        for at in self.indices() {
            let Work::Collective(collective) = self.node(at).work else { continue };
            let group = collective.group;
            let node = || self.place(at);
            let Some(Group { name, .. }) = self.groups.get(group.0) else {
                return Err(GraphError::UnknownGroup { node: node(), group });
            };
            if !members.contains(&(group, rank_of(at.0))) {
                return Err(GraphError::NotMember { node: node(), group: name.clone() });
            }
            let calls = calls.entry((group, at.0)).or_default();
            self.turns[at.0][at.1] = calls.len();
            calls.push((at, collective));
        }
        let groups: Vec<_> = calls.keys().map(|(group, _)| *group).collect();
        for group in groups.chunk_by(PartialEq::eq).map(|equal| equal[0]) {
            let of = |member: &Rank| calls.get(&(group, member.index())).map_or(&[][..], |it| it);
            matches.calls.extend(self.agreed(group, of)?);
        }
        Ok(())
    }

    /// Returns the nodes of each call of a group, if its members agree.
    fn agreed<'a>(
        &self,
        group: GroupId,
        of: impl Fn(&Rank) -> &'a [(Index, Collective)],
    ) -> Result<Vec<Vec<Index>>, GraphError> {
        let Group { name, members } = &self.groups[group.0];
        let most = members.iter().max_by_key(|member| of(member).len());
        let most = of(most.expect("a group has members"));
        let fewest = members.iter().min_by_key(|member| of(member).len());
        let fewest = *fewest.expect("a group has members");
        let calls = of(&fewest).len();
        if let Some((at, _)) = most.get(calls) {
            let (node, group) = (self.place(*at), name.clone());
            return Err(GraphError::MissingCall {
                node,
                call: calls + 1,
                group,
                member: fewest,
                calls,
            });
        }
        let meet = |call: usize| {
            let (other_at, other) = of(&members[0])[call];
            let nodes = members.iter().map(|member| {
                let (at, collective) = of(member)[call];
                let Some(what) = difference(collective, other) else { return Ok(at) };
                let (node, other) = (self.place(at), self.place(other_at));
                let group = name.clone();
                Err(GraphError::DifferentCalls { node, other, call: call + 1, group, what })
            });
            nodes.collect()
        };
        (0..calls).map(meet).collect()
    }

    /// Numbers the messages between each pair of ranks and finds their partners.
    fn match_messages(&mut self, matches: &mut Matches) -> Result<(), GraphError> {
        let (mut sends, mut recvs) = (Messages::new(), Messages::new());
        let ranks = self.graphs.len();
        for at in self.indices() {
            let (message, is_send) = match self.node(at).work {
                Work::Send(message) => (message, true),
                Work::Recv(message) => (message, false),
                Work::Compute(_) | Work::Collective(_) => continue,
            };
            let peer = message.peer.index();
            if peer == at.0 || peer >= ranks {
                let (node, peer) = (self.place(at), message.peer);
                return Err(GraphError::UnknownPeer { node, peer, ranks });
            }
            let list = if is_send {
                sends.entry((at.0, peer, message.tag)).or_default()
            } else {
                recvs.entry((peer, at.0, message.tag)).or_default()
            };
            self.turns[at.0][at.1] = list.len();
            list.push((at, message));
        }
        let unmatched = |(at, message): &(Index, Message), partner| {
            let (node, peer) = (self.place(*at), message.peer);
            Err(GraphError::Unmatched { node, partner, peer })
        };
        for (key, sends) in &sends {
            let recvs = recvs.remove(key).unwrap_or_default();
            for (send, recv) in sends.iter().zip(&recvs) {
                if send.1.bytes > recv.1.bytes {
                    let (bytes, room) = (send.1.bytes, recv.1.bytes);
                    let (send, recv) = (self.place(send.0), self.place(recv.0));
                    return Err(GraphError::Truncated { send, bytes, recv, room });
                }
                matches.messages.push((send.0, recv.0));
            }
            if let Some(send) = sends.get(recvs.len()) {
                return unmatched(send, "receive");
            }
            if let Some(recv) = recvs.get(sends.len()) {
                return unmatched(recv, "send");
            }
        }
        match recvs.values().next() {
            Some(recvs) => unmatched(&recvs[0], "send"),
            None => Ok(()),
        }
    }
}

/// The messages of each sender, receiver and tag.
type Messages = BTreeMap<(usize, usize, u32), Vec<(Index, Message)>>;

fn check_group(group: &Group, ranks: usize) -> Result<(), GraphError> {
    let name = || group.name.clone();
    if group.members.is_empty() {
        return Err(GraphError::EmptyGroup(name()));
    }
    let mut members = group.members.clone();
    members.sort_unstable();
    if let Some(pair) = members.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(GraphError::RepeatedMember { group: name(), member: pair[0] });
    }
    match members.iter().find(|member| member.index() >= ranks) {
        Some(&member) => Err(GraphError::UnknownMember { group: name(), member, ranks }),
        None => Ok(()),
    }
}

/// Returns the property in which two calls differ.
fn difference(a: Collective, b: Collective) -> Option<&'static str> {
    if a.kind != b.kind {
        Some("their operation")
    } else if a.bytes != b.bytes {
        Some("their bytes")
    } else {
        None
    }
}

/// Converts an index below [`MOST_RANKS`].
fn rank_of(index: usize) -> Rank {
    Rank(u16::try_from(index).expect("an execution has at most MOST_RANKS ranks"))
}
