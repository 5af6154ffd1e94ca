//! Tests of graphs and executions.

use proptest::prelude::*;

use super::*;

fn node(id: u64, work: Work, after: &[u64]) -> Node {
    let after = after.iter().map(|id| Dependency { node: NodeId(*id), event: Event::Ended });
    Node { id: NodeId(id), name: format!("n{id}"), unit: Unit(0), work, after: after.collect() }
}

fn compute(id: u64, after: &[u64]) -> Node {
    node(id, Work::Compute(Picos(1)), after)
}

fn sum(id: u64, group: usize, after: &[u64]) -> Node {
    let group = GroupId(group);
    let collective = Collective { kind: CollectiveKind::AllReduce, bytes: 8, group, priority: 0 };
    node(id, Work::Collective(collective), after)
}

fn message(peer: u16, tag: u32) -> Message {
    Message { peer: Rank(peer), bytes: 8, tag, nic: 0 }
}

fn send(id: u64, peer: u16, after: &[u64]) -> Node {
    node(id, Work::Send(message(peer, 0)), after)
}

fn recv(id: u64, peer: u16, after: &[u64]) -> Node {
    node(id, Work::Recv(message(peer, 0)), after)
}

fn group(name: &str, members: &[u16]) -> Group {
    Group { name: name.to_owned(), members: members.iter().copied().map(Rank).collect() }
}

/// Creates an execution with the groups `all`, with every rank, and `pair`, with ranks 0 and 1.
fn execution(ranks: &[&[Node]]) -> Result<Execution, GraphError> {
    let graphs = (0..).zip(ranks).map(|(rank, nodes)| Graph::new(Rank(rank), nodes.to_vec()));
    let graphs = graphs.collect::<Result<Vec<_>, _>>()?;
    let all: Vec<_> = (0..).take(ranks.len()).collect();
    let pair = &all[..ranks.len().min(2)];
    Execution::new(vec![group("all", &all), group("pair", pair)], graphs)
}

fn error(ranks: &[&[Node]]) -> String {
    execution(ranks).unwrap_err().to_string()
}

#[test]
fn dependents_are_found_from_dependencies() {
    let start = Dependency { node: NodeId(7), event: Event::Started };
    let mut last = compute(9, &[8, 7, 8]);
    last.after.push(start);
    let graph = Graph::new(Rank(0), vec![last, compute(8, &[7]), compute(7, &[])]).unwrap();
    assert_eq!(graph.dependents(2), [(0, Event::Started), (0, Event::Ended), (1, Event::Ended)]);
    assert_eq!(graph.dependents(1), [(0, Event::Ended)]);
    assert_eq!(graph.nodes()[0].after.len(), 3);
}

#[test]
fn ids_and_dependencies_are_checked() {
    assert_eq!(
        error(&[&[compute(1, &[]), compute(2, &[]), compute(1, &[])]]),
        "node 1 \"n1\" of rank 0 has the id of \"n1\"; ids must be unique within a rank"
    );
    assert_eq!(
        error(&[&[], &[compute(1, &[3])]]),
        "node 1 \"n1\" of rank 1 waits for node 3, which the rank does not have"
    );
}

#[test]
fn nodes_that_wait_for_each_other_are_named() {
    assert_eq!(
        error(&[&[compute(1, &[1])]]),
        "node 1 \"n1\" of rank 0 waits for itself; remove the dependency"
    );
    // Nodes 1 and 5 are not on the cycle.
    let nodes = [
        compute(1, &[]),
        compute(2, &[1, 4]),
        compute(3, &[2]),
        compute(4, &[3]),
        compute(5, &[4]),
    ];
    let Err(GraphError::Cycle(cycle)) = execution(&[&nodes]) else { panic!() };
    let mut ids: Vec<_> = cycle.iter().map(|place| place.id.0).collect();
    ids.sort_unstable();
    assert_eq!(ids, [2, 3, 4]);
}

#[test]
fn waiting_for_a_start_is_a_cycle_too() {
    let mut first = compute(1, &[]);
    first.after.push(Dependency { node: NodeId(2), event: Event::Started });
    let error = error(&[&[first, compute(2, &[1])]]);
    assert!(error.starts_with("these nodes wait for each other: node "), "{error}");
}

#[test]
fn a_long_cycle_is_named_in_part() {
    let nodes: Vec<_> = (0..20).map(|id| compute(id, &[(id + 1) % 20])).collect();
    let error = error(&[&nodes]);
    assert!(error.ends_with(" and 12 more nodes"), "{error}");
}

#[test]
fn collectives_in_opposite_orders_are_a_cycle_across_ranks() {
    let one = [sum(1, 0, &[]), sum(2, 1, &[1])];
    let other = [sum(3, 1, &[]), sum(4, 0, &[3])];
    assert!(execution(&[&one, &one]).is_ok());
    let error = error(&[&one, &other]);
    for node in ["node 1 \"n1\" of rank 0", "node 3 \"n3\" of rank 1"] {
        assert!(error.contains(node), "{error}");
    }
    // Without dependencies, a rank may be in both calls at once.
    let unordered = [sum(3, 1, &[]), sum(4, 0, &[])];
    assert!(execution(&[&one, &unordered]).is_ok());
}

#[test]
fn two_ranks_that_receive_first_are_a_cycle() {
    let first = [recv(1, 1, &[]), send(2, 1, &[1])];
    let second = [recv(1, 0, &[]), send(2, 0, &[1])];
    assert!(error(&[&first, &second]).starts_with("these nodes wait for each other"));
    // Sends do not wait for their receivers.
    let first = [send(2, 1, &[]), recv(1, 1, &[2])];
    let second = [send(2, 0, &[]), recv(1, 0, &[2])];
    assert!(execution(&[&first, &second]).is_ok());
}

#[test]
fn groups_have_ranks_that_exist() {
    let graphs = || vec![Graph::default(), Graph::default()];
    let error = |members: &[u16]| {
        Execution::new(vec![group("tp", members)], graphs()).unwrap_err().to_string()
    };
    assert_eq!(error(&[0, 2]), "group \"tp\" has rank 2, but the execution has only ranks 0 to 1");
    assert_eq!(error(&[1, 0, 1]), "group \"tp\" has rank 1 twice");
    assert_eq!(error(&[]), "group \"tp\" has no members");
    assert_eq!(Execution::new(Vec::new(), Vec::new()), Err(GraphError::NoRanks));
    let many = vec![Graph::default(); MOST_RANKS + 1];
    assert_eq!(Execution::new(Vec::new(), many), Err(GraphError::TooManyRanks(MOST_RANKS + 1)));
}

#[test]
fn every_member_makes_the_same_calls() {
    let two = [sum(1, 0, &[]), sum(2, 0, &[1])];
    assert_eq!(
        error(&[&two, &two[..1]]),
        "node 2 \"n2\" of rank 0 is call 2 of group \"all\", but rank 1 makes only 1"
    );
    assert_eq!(
        error(&[&[], &two]),
        "node 1 \"n1\" of rank 1 is call 1 of group \"all\", but rank 0 makes only 0"
    );
    let mut other = two.clone();
    let Work::Collective(collective) = &mut other[1].work else { panic!() };
    collective.bytes = 9;
    assert_eq!(
        error(&[&two, &other]),
        "node 2 \"n2\" of rank 1 meets node 2 \"n2\" of rank 0 in call 2 of group \"all\", but \
         differs in their bytes"
    );
    let Work::Collective(collective) = &mut other[1].work else { panic!() };
    collective.kind = CollectiveKind::Barrier;
    assert!(error(&[&two, &other]).ends_with("but differs in their operation"));
    assert_eq!(
        error(&[&[], &[], &[sum(1, 1, &[])]]),
        "node 1 \"n1\" of rank 2 uses group \"pair\", which does not have this rank"
    );
    assert!(error(&[&[sum(1, 2, &[])]]).contains("uses group number 2, which the execution does"));
}

#[test]
fn every_message_has_two_ends() {
    let sends = [send(1, 1, &[]), send(2, 1, &[1])];
    assert_eq!(
        error(&[&sends, &[recv(1, 0, &[])]]),
        "node 2 \"n2\" of rank 0 has no matching receive at rank 1"
    );
    assert_eq!(
        error(&[&sends[..1], &[recv(1, 0, &[]), recv(2, 0, &[])]]),
        "node 2 \"n2\" of rank 1 has no matching send at rank 0"
    );
    assert!(error(&[&[], &[recv(1, 0, &[])]]).contains("no matching send at rank 0"));
    let tagged = node(1, Work::Recv(message(0, 7)), &[]);
    assert!(error(&[&sends[..1], &[tagged]]).contains("no matching receive at rank 1"));
    for peer in [0, 2] {
        let error = error(&[&[send(1, peer, &[])], &[]]);
        assert!(error.ends_with("as its peer; it must be another of the 2 ranks"), "{error}");
    }
    let small = node(1, Work::Recv(Message { bytes: 7, ..message(0, 0) }), &[]);
    assert_eq!(
        error(&[&sends[..1], &[small]]),
        "node 1 \"n1\" of rank 1 has room for 7 bytes, but node 1 \"n1\" of rank 0 sends it 8"
    );
}

#[test]
fn partners_have_equal_turns() {
    let first = [sum(1, 0, &[]), send(2, 1, &[]), sum(3, 1, &[]), sum(4, 0, &[]), send(5, 1, &[])];
    let second = [recv(1, 0, &[]), sum(2, 0, &[]), sum(3, 0, &[]), recv(4, 0, &[]), sum(5, 1, &[])];
    let execution = execution(&[&first, &second]).unwrap();
    let turns = |rank| (0..5).map(|index| execution.turn(Rank(rank), index)).collect::<Vec<_>>();
    assert_eq!(turns(0), [0, 0, 0, 1, 1]);
    assert_eq!(turns(1), [0, 0, 1, 1, 0]);
}

/// Runs the events of an execution in any order that is possible, and returns whether all nodes
/// end. The naive model of the search for cycles.
fn runs(ranks: &[Vec<Node>]) -> bool {
    let mut started: Vec<Vec<bool>> = ranks.iter().map(|it| vec![false; it.len()]).collect();
    let mut ended = started.clone();
    loop {
        let mut moved = false;
        for rank in 0..ranks.len() {
            for (index, node) in ranks[rank].iter().enumerate() {
                let happened = |dependency: &Dependency| {
                    let at = ranks[rank].iter().position(|it| it.id == dependency.node).unwrap();
                    match dependency.event {
                        Event::Started => started[rank][at],
                        Event::Ended => ended[rank][at],
                    }
                };
                let starts = node.after.iter().all(happened);
                // All ranks have collectives of one group, at equal indices.
                let meets = match node.work {
                    Work::Collective(_) => (0..ranks.len()).all(|other| started[other][index]),
                    _ => true,
                };
                let ends = started[rank][index] && meets;
                moved |= (starts && !started[rank][index]) || (ends && !ended[rank][index]);
                started[rank][index] |= starts;
                ended[rank][index] |= ends;
            }
        }
        if !moved {
            return ended.iter().flatten().all(|ended| *ended);
        }
    }
}

proptest! {
    #[test]
    fn an_execution_is_refused_if_and_only_if_it_cannot_end(
        collectives in prop::collection::vec(any::<bool>(), 1..6),
        edges in prop::collection::vec((0..2_usize, 0..6_u64, 0..6_u64, any::<bool>()), 0..9),
    ) {
        let nodes = || {
            let nodes = (0..).zip(&collectives);
            nodes.map(|(id, it)| if *it { sum(id, 0, &[]) } else { compute(id, &[]) })
        };
        let mut ranks: Vec<Vec<Node>> = vec![nodes().collect(), nodes().collect()];
        let count = collectives.len() as u64;
        for (rank, node, on, ended) in edges {
            let event = if ended { Event::Ended } else { Event::Started };
            let dependency = Dependency { node: NodeId(on % count), event };
            ranks[rank][usize::try_from(node % count).unwrap()].after.push(dependency);
        }
        let checked = execution(&[&ranks[0], &ranks[1]]);
        prop_assert_eq!(checked.is_ok(), runs(&ranks));
        if let Err(error) = checked {
            prop_assert!(matches!(error, GraphError::Cycle(nodes) if !nodes.is_empty()));
        }
    }
}
