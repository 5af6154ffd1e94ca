//! Tests of the reader, with traces that are made here and with public ones.

use std::process::Command;

use proptest::prelude::*;
use prost::Message as _;

use super::wire::{Attribute, Value};
use super::*;
use crate::engine::Picos;
use crate::workload::graph::{
    Collective, CollectiveKind, Dependency, Event, GroupId, Message, Node, NodeId, Unit, Work,
};
use crate::workload::shared_data;

/// The kinds of nodes in the schema.
const COMPUTE: i32 = 4;
const SEND: i32 = 5;
const RECV: i32 = 6;
const COLLECTIVE: i32 = 7;

/// Returns a node with id 3 and these attributes.
fn node(kind: i32, attributes: &[(&str, Value)]) -> wire::Node {
    let attributes = attributes
        .iter()
        .map(|(name, value)| Attribute { name: (*name).to_owned(), value: Some(value.clone()) });
    wire::Node {
        id: 3,
        name: "work".to_owned(),
        kind,
        attributes: attributes.collect(),
        ..wire::Node::default()
    }
}

fn text(text: &str) -> Value {
    Value::Text(text.to_owned())
}

/// An all-reduce of 64 bytes in group `dp`.
fn all_reduce() -> wire::Node {
    let size = ("comm_size", Value::Int64(64));
    node(COLLECTIVE, &[("comm_type", Value::Int64(0)), size, ("pg_name", text("dp"))])
}

/// Returns `node` without an attribute.
fn without(mut node: wire::Node, attribute: &str) -> wire::Node {
    node.attributes.retain(|it| it.name != attribute);
    node
}

fn trace(nodes: &[wire::Node]) -> Vec<u8> {
    let head = wire::GlobalMetadata { version: "0.0.4".to_owned() };
    let mut bytes = head.encode_length_delimited_to_vec();
    bytes.extend(nodes.iter().flat_map(wire::Node::encode_length_delimited_to_vec));
    bytes
}

/// Returns rules in which group `dp` has rank 0.
fn rules() -> Rules {
    Rules { groups: [("dp".to_owned(), vec![Rank(0)])].into(), ..Rules::default() }
}

/// Reads a trace of one rank with one node.
fn only(node: wire::Node, rules: &Rules) -> Result<Node, String> {
    let execution = read(&[&trace(&[node])], rules).map_err(|error| error.to_string())?;
    Ok(execution.graphs()[0].nodes()[0].clone())
}

fn work(node: wire::Node, rules: &Rules) -> Result<Work, String> {
    only(node, rules).map(|node| node.work)
}

#[test]
fn a_node_keeps_its_id_name_time_and_dependencies() {
    let first = wire::Node { id: 1, duration_micros: 5, ..node(COMPUTE, &[]) };
    let second = wire::Node { id: 2, ctrl_deps: vec![1], ..node(COMPUTE, &[]) };
    let third = wire::Node { ctrl_deps: vec![1], data_deps: vec![2, 1], ..node(COMPUTE, &[]) };
    let bytes = trace(&[first, second, third]);
    let on = |id| Dependency { node: NodeId(id), event: Event::Ended };
    let execution = read(&[&bytes], &Rules::default()).unwrap();
    let nodes = execution.graphs()[0].nodes();
    assert_eq!(nodes[0].work, Work::Compute(Picos::from_micros(5)));
    assert_eq!((nodes[2].id, nodes[2].name.as_str()), (NodeId(3), "work"));
    assert_eq!(nodes[2].after, [on(1), on(2)]);
    let rules = Rules { control: Control::Ignore, ..Rules::default() };
    let execution = read(&[&bytes], &rules).unwrap();
    assert_eq!(execution.graphs()[0].nodes()[1].after, []);
}

/// Returns `parts` after their length.
fn framed(parts: &[&[u8]]) -> Vec<u8> {
    let bytes = parts.concat();
    [&[u8::try_from(bytes.len()).unwrap()][..], &bytes].concat()
}

#[test]
fn the_bytes_of_a_trace_have_the_schemas_field_numbers() {
    let bytes = [
        framed(&[b"\x0a\x050.0.4"]),
        // Id, name, type and duration.
        framed(&[b"\x08\x01", b"\x12\x01a", b"\x18\x04", b"\x38\x05"]),
        framed(&[
            b"\x08\x02",
            b"\x12\x01b",
            b"\x18\x07",
            // A packed control dependency, an unpacked data dependency, a start time, inputs.
            b"\x22\x01\x01",
            b"\x28\x04",
            b"\x30\x09",
            b"\x42\x03\x0a\x01x",
            // Attributes: bool 0, int64 7, uint64 1048576, a string and int32 3.
            b"\x52\x0e\x0a\x09is_cpu_op\xd8\x01\x00",
            b"\x52\x0d\x0a\x09comm_type\x48\x07",
            b"\x52\x0f\x0a\x09comm_size\x68\x80\x80\x40",
            b"\x52\x0e\x0a\x07pg_name\xea\x01\x02dp",
            b"\x52\x11\x0a\x0dcomm_priority\x38\x03",
        ]),
        framed(&[b"\x08\x04", b"\x18\x04"]),
    ];
    let execution = read(&[&bytes.concat()], &rules()).unwrap();
    let nodes = execution.graphs()[0].nodes();
    assert_eq!((nodes[0].id, nodes[0].name.as_str()), (NodeId(1), "a"));
    assert_eq!(nodes[0].work, Work::Compute(Picos::from_micros(5)));
    let kind = CollectiveKind::ReduceScatter;
    let expected = Collective { kind, bytes: 1 << 20, group: GroupId(1), priority: 3 };
    assert_eq!(nodes[1].work, Work::Collective(expected));
    let after = [1, 4].map(|id| Dependency { node: NodeId(id), event: Event::Ended });
    assert_eq!(nodes[1].after, after);
    assert_eq!((nodes[0].unit, nodes[1].unit), (Unit(0), Unit(1)));
}

#[test]
fn numbers_of_any_width_are_accepted() {
    for size in [
        Value::Int32(64),
        Value::Int64(64),
        Value::Uint32(64),
        Value::Uint64(64),
        Value::Sint32(64),
        Value::Sint64(64),
        Value::Fixed32(64),
        Value::Fixed64(64),
        Value::Sfixed32(64),
        Value::Sfixed64(64),
    ] {
        let mut node = without(all_reduce(), "comm_size");
        node.attributes.push(Attribute { name: "comm_size".to_owned(), value: Some(size) });
        let group = GroupId(1);
        let kind = CollectiveKind::AllReduce;
        let expected = Collective { kind, bytes: 64, group, priority: 0 };
        assert_eq!(work(node, &rules()), Ok(Work::Collective(expected)));
    }
}

#[test]
fn collectives_have_the_types_of_the_schema() {
    let kinds = [
        CollectiveKind::AllReduce,
        CollectiveKind::Reduce,
        CollectiveKind::AllGather,
        CollectiveKind::Gather,
        CollectiveKind::Scatter,
        CollectiveKind::Broadcast,
        CollectiveKind::AllToAll,
        CollectiveKind::ReduceScatter,
        CollectiveKind::ReduceScatter,
        CollectiveKind::Barrier,
    ];
    for (number, kind) in (0..).zip(kinds) {
        let mut node = all_reduce();
        node.attributes[0].value = Some(Value::Int64(number));
        let Ok(Work::Collective(collective)) = work(node, &rules()) else { panic!() };
        assert_eq!(collective.kind, kind);
    }
    let barrier = [("comm_type", Value::Int64(9)), ("pg_name", text("dp"))];
    let Ok(Work::Collective(barrier)) = work(node(COLLECTIVE, &barrier), &rules()) else {
        panic!()
    };
    assert_eq!(barrier.bytes, 0);
    let mut node = all_reduce();
    node.attributes[0].value = Some(Value::Int64(10));
    let error = work(node, &rules()).unwrap_err();
    assert!(error.ends_with("its comm_type is 10, which the schema does not have"), "{error}");
}

#[test]
fn a_priority_and_a_numeric_group_are_read() {
    let mut node = without(all_reduce(), "pg_name");
    for (name, value) in [("pg_name", Value::Int32(7)), ("comm_priority", Value::Int32(2))] {
        node.attributes.push(Attribute { name: name.to_owned(), value: Some(value) });
    }
    let rules = Rules { groups: [("7".to_owned(), vec![Rank(0)])].into(), ..Rules::default() };
    let Ok(Work::Collective(collective)) = work(node, &rules) else { panic!() };
    assert_eq!((collective.priority, collective.group), (2, GroupId(1)));
}

#[test]
fn the_last_attribute_of_a_name_counts() {
    let mut node = all_reduce();
    let last = Attribute { name: "comm_size".to_owned(), value: Some(Value::Int64(8)) };
    node.attributes.push(last);
    let Ok(Work::Collective(collective)) = work(node, &rules()) else { panic!() };
    assert_eq!(collective.bytes, 8);
}

#[test]
fn a_gap_is_refused_with_the_nodes_name_and_id() {
    let node = without;
    for (node, reason) in [
        (node(all_reduce(), "comm_size"), "it has no comm_size; correct the trace, or choose"),
        (node(all_reduce(), "comm_type"), "it has no comm_type; correct the trace, or choose"),
        (node(all_reduce(), "pg_name"), "it has no pg_name; correct the trace, or choose"),
    ] {
        let error = work(node, &rules()).unwrap_err();
        let expected = format!("trace of rank 0: node 3 \"work\": {reason}");
        assert!(error.starts_with(&expected), "{error}");
    }
    let error = work(all_reduce(), &Rules::default()).unwrap_err();
    assert!(error.ends_with("its process group \"dp\" has no ranks in `groups`; list them"));
}

#[test]
fn a_gap_is_filled_by_the_rule_of_its_kind() {
    let collective = MissingCollective::Fill { kind: CollectiveKind::Broadcast, bytes: 9 };
    let fill = Rules { collective, group: MissingGroup::World, ..rules() };
    let (sum, broadcast) = (CollectiveKind::AllReduce, CollectiveKind::Broadcast);
    for (lacks, kind, bytes, group) in
        [("comm_size", sum, 9, 1), ("comm_type", broadcast, 64, 1), ("pg_name", sum, 64, 0)]
    {
        let expected = Collective { kind, bytes, group: GroupId(group), priority: 0 };
        assert_eq!(work(without(all_reduce(), lacks), &fill), Ok(Work::Collective(expected)));
    }
    let compute = Rules { collective: MissingCollective::Compute, ..rules() };
    let node = wire::Node { duration_micros: 4, ..without(all_reduce(), "comm_size") };
    assert_eq!(work(node, &compute), Ok(Work::Compute(Picos::from_micros(4))));
    // A rule changes nothing that the trace has.
    assert_eq!(work(all_reduce(), &compute), work(all_reduce(), &rules()));
}

#[test]
fn work_without_a_time_is_refused_or_timed_by_rule() {
    let with_ops = || node(COMPUTE, &[("num_ops", Value::Int64(3_000))]);
    let memory = || node(2, &[("tensor_size", Value::Uint64(64))]);
    let rules = |time| Rules { time, ..Rules::default() };
    for node in [with_ops(), memory()] {
        let error = work(node, &Rules::default()).unwrap_err();
        assert!(error.contains("node 3 \"work\": it has no duration_micros"), "{error}");
    }
    let fixed = rules(MissingTime::Fixed(Picos(7)));
    assert_eq!(work(with_ops(), &fixed), Ok(Work::Compute(Picos(7))));
    assert_eq!(work(memory(), &fixed), Ok(Work::Compute(Picos(7))));
    let rate = rules(MissingTime::OpsPerSecond(1_000_000_000_000));
    assert_eq!(work(with_ops(), &rate), Ok(Work::Compute(Picos(3_000))));
    assert!(work(memory(), &rate).unwrap_err().contains("it has no duration_micros"));
    let zero = rules(MissingTime::OpsPerSecond(0));
    assert!(work(with_ops(), &zero).unwrap_err().contains("has a rate of zero"));
    let huge = node(COMPUTE, &[("num_ops", Value::Uint64(u64::MAX))]);
    let slow = rules(MissingTime::OpsPerSecond(1));
    assert!(work(huge, &slow).unwrap_err().contains("the duration is above the limit"));
    // A recorded time counts, and a node without operations may take none.
    let timed = wire::Node { duration_micros: 2, ..with_ops() };
    assert_eq!(work(timed, &fixed), Ok(Work::Compute(Picos::from_micros(2))));
    assert_eq!(work(node(COMPUTE, &[]), &Rules::default()), Ok(Work::Compute(Picos::ZERO)));
}

#[test]
fn messages_have_peers_sizes_and_tags() {
    let attributes = |own, other| {
        [
            (own, Value::Int32(0)),
            (other, Value::Uint32(1)),
            ("comm_size", Value::Uint64(9)),
            ("comm_tag", Value::Int32(5)),
        ]
    };
    let send = node(SEND, &attributes("comm_src", "comm_dst"));
    let mut recv = node(RECV, &attributes("comm_dst", "comm_src"));
    recv.attributes[0].value = Some(Value::Int32(1));
    recv.attributes[1].value = Some(Value::Int32(0));
    let pair = |send: &wire::Node, recv: &wire::Node, rules: &Rules| {
        let traces = [trace(std::slice::from_ref(send)), trace(std::slice::from_ref(recv))];
        read(&[&traces[0], &traces[1]], rules).map_err(|error| error.to_string())
    };
    let execution = pair(&send, &recv, &Rules::default()).unwrap();
    let message = |peer| Message { peer: Rank(peer), bytes: 9, tag: 5, nic: 0 };
    assert_eq!(execution.graphs()[0].nodes()[0].work, Work::Send(message(1)));
    assert_eq!(execution.graphs()[1].nodes()[0].work, Work::Recv(message(0)));

    let error = pair(&recv, &send, &Rules::default()).unwrap_err();
    assert!(error.contains("its comm_dst is rank 1; give the traces in the order"), "{error}");
    let error = pair(&without(send.clone(), "comm_dst"), &recv, &Rules::default()).unwrap_err();
    assert!(error.ends_with("node 3 \"work\": it has no comm_dst; correct the trace"), "{error}");
    let (send, recv) = (without(send, "comm_size"), without(recv, "comm_size"));
    assert!(pair(&send, &recv, &Rules::default()).unwrap_err().contains("it has no comm_size"));
    let filled = Rules { message: MissingSize::Bytes(9), ..Rules::default() };
    assert_eq!(pair(&send, &recv, &filled), Ok(execution));
}

#[test]
fn an_attribute_of_another_type_is_refused() {
    let with = |kind, name, value| work(node(kind, &[(name, value)]), &rules()).unwrap_err();
    let error = with(COLLECTIVE, "comm_size", text("64"));
    assert!(error.ends_with("its attribute comm_size must be a whole number"), "{error}");
    let error = with(COLLECTIVE, "comm_size", Value::Int64(-1));
    assert!(error.ends_with("its attribute comm_size must be a number of 0 or more"), "{error}");
    // A double has no field here, but no rule may take the size for missing.
    let double = b"\x0a\x09comm_size\x19\x00\x00\x00\x00\x00\x00\x50\x40";
    let mut sized = without(all_reduce(), "comm_size");
    sized.attributes.push(Attribute::decode(&double[..]).unwrap());
    let error = work(sized, &filling()).unwrap_err();
    assert!(error.ends_with("its attribute comm_size must be a whole number"), "{error}");
    let error = with(COMPUTE, "is_cpu_op", Value::Int64(1));
    assert!(error.ends_with("its attribute is_cpu_op must be a bool"), "{error}");
    let error = with(SEND, "comm_dst", Value::Int64(70_000));
    assert!(error.ends_with("its attribute comm_dst must be a number in its range"), "{error}");
}

#[test]
fn work_that_the_simulator_lacks_is_refused_by_name() {
    for (kind, name) in [(0, "INVALID_NODE"), (8, "STORAGE_NODE"), (11, "number 11")] {
        let error = work(node(kind, &[]), &Rules::default()).unwrap_err();
        assert!(error.contains(&format!("node 3 \"work\": its type is {name}, which")), "{error}");
    }
}

#[test]
fn each_thread_and_stream_is_a_unit() {
    let on = |is_host, tid| {
        let attributes = [("is_cpu_op", Value::Bool(is_host)), ("tid", Value::Int64(tid))];
        node(COMPUTE, &attributes)
    };
    let nodes = [on(true, 1), on(false, 1), on(true, 1), on(true, 2), node(COMPUTE, &[])];
    let nodes = (0..).zip(nodes).map(|(id, node)| wire::Node { id, ..node });
    let execution = read(&[&trace(&nodes.collect::<Vec<_>>())], &Rules::default()).unwrap();
    let units: Vec<_> = execution.graphs()[0].nodes().iter().map(|node| node.unit).collect();
    assert_eq!(units, [0, 1, 0, 2, 3].map(Unit));
}

#[test]
fn a_truncated_trace_is_refused_at_every_length() {
    let bytes = trace(&[all_reduce(), node(COMPUTE, &[])]);
    let mut whole = vec![trace(&[]).len(), trace(&[all_reduce()]).len(), bytes.len()];
    for length in 0..=bytes.len() {
        let read = read(&[&bytes[..length]], &rules());
        if whole.first() == Some(&length) {
            whole.remove(0);
            // The third message repeats an id, so only the first two traces can run.
            assert_eq!(read.is_ok(), length < bytes.len(), "{length}");
        } else {
            let error = read.unwrap_err().to_string();
            assert!(error.starts_with("trace of rank 0: message "), "{length}: {error}");
        }
    }
    assert!(whole.is_empty());
}

#[test]
fn a_message_that_claims_to_be_huge_allocates_nothing() {
    for (bytes, reason) in [
        (
            &[0xff, 0xff, 0xff, 0xff, 0x0f, 0][..],
            "it has 4294967295 bytes, but the trace has only 1",
        ),
        (&[0xff; 11], "its length is malformed"),
        (&[2, 0x0a, 0xff], "failed to decode Protobuf message"),
        (&[], "the trace is empty"),
    ] {
        let error = read(&[bytes], &rules()).unwrap_err().to_string();
        let expected = format!("trace of rank 0: message 0 at byte 0: {reason}");
        assert!(error.starts_with(&expected), "{error}");
    }
}

#[test]
fn a_dependency_that_the_converter_lost_is_refused_by_name() {
    let bytes = trace(&[wire::Node { data_deps: vec![9], ..node(COMPUTE, &[]) }]);
    let error = read(&[&bytes], &rules()).unwrap_err().to_string();
    assert_eq!(error, "node 3 \"work\" of rank 0 waits for node 9, which the rank does not have");
}

#[test]
fn groups_are_read_from_json() {
    let groups = groups_from_json("{\"0\": [0, 1],\n \"tp\": [1]}").unwrap();
    assert_eq!(groups["0"], [Rank(0), Rank(1)]);
    assert_eq!(groups["tp"], [Rank(1)]);
    for json in ["{\n\"0\": [-1]}", "{\n\"0\": [70000]}", "{\n\"0\": 1}", "{\n"] {
        assert_eq!(groups_from_json(json).unwrap_err().line, 2, "{json}");
    }
}

/// Returns all rules, each of which fills its gap.
fn filling() -> Rules {
    Rules {
        collective: MissingCollective::Compute,
        message: MissingSize::Bytes(1),
        group: MissingGroup::World,
        time: MissingTime::Fixed(Picos(1)),
        control: Control::Ignore,
        ..rules()
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        if let Err(error) = read(&[&bytes, &bytes], &filling()) {
            prop_assert!(!error.to_string().is_empty());
        }
    }

    #[test]
    fn a_damaged_trace_is_read_or_refused(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let first = wire::Node { id: 1, data_deps: vec![3], ..node(COMPUTE, &[]) };
        let mut bytes = trace(&[first, all_reduce()]);
        for (index, byte) in damage {
            let index = index.index(bytes.len());
            bytes[index] = byte;
        }
        if let Err(error) = read(&[&bytes], &filling()) {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}

#[test]
fn the_microbenchmarks_of_astra_sim_are_read() {
    let Some(folder) = shared_data::path("chakra/microbenchmarks") else { return };
    for (name, kind) in [
        ("all_reduce", CollectiveKind::AllReduce),
        ("all_gather", CollectiveKind::AllGather),
        ("all_to_all", CollectiveKind::AllToAll),
        ("reduce_scatter", CollectiveKind::ReduceScatter),
    ] {
        for ranks in [4, 8, 16] {
            let file = |rank| {
                let path = format!("{name}/{ranks}npus_1MB/{name}.{rank}.et");
                std::fs::read(folder.join(path)).unwrap()
            };
            let files: Vec<_> = (0..ranks).map(file).collect();
            let traces: Vec<_> = files.iter().map(Vec::as_slice).collect();
            let error = read(&traces, &Rules::default()).unwrap_err().to_string();
            let expected =
                format!("trace of rank 0: node 0 \"{name}_{ranks}npus_1MB\": it has no pg_name");
            assert!(error.starts_with(&expected), "{error}");
            let world = Rules { group: MissingGroup::World, ..Rules::default() };
            let execution = read(&traces, &world).unwrap();
            assert_eq!(execution.groups()[0].members.len(), ranks);
            for graph in execution.graphs() {
                let group = GroupId(0);
                let expected = Collective { kind, bytes: 1 << 20, group, priority: 0 };
                assert_eq!(graph.nodes().len(), 1);
                assert_eq!(graph.nodes()[0].work, Work::Collective(expected));
            }
        }
    }
}

/// Returns the trace that Chakra's feeder is tested with.
fn feeder_trace() -> Option<Vec<u8>> {
    let path = shared_data::path("chakra/feeder_tests_trace.tar.gz")?;
    match Command::new("tar").arg("-xzOf").arg(path).output() {
        Ok(output) if output.status.success() => Some(output.stdout),
        _ => {
            racksum_test_report::skip("tar cannot unpack the trace");
            None
        }
    }
}

#[test]
fn a_real_trace_is_refused_where_no_rule_fills_its_gaps() {
    let Some(bytes) = feeder_trace() else { return };
    let error = |rules: &Rules| read(&[&bytes, &bytes], rules).unwrap_err().to_string();
    let no_size = "trace of rank 0: node 432 \"c10d::broadcast_(0)\": it has no comm_size";
    assert!(error(&Rules::default()).starts_with(no_size));
    let sized = Rules { collective: MissingCollective::Compute, ..Rules::default() };
    assert!(error(&sized).contains("node 435 \"ncclKernel_Broadcast_RING_LL_Sum_int8_t"));
    let grouped = Rules { group: MissingGroup::World, ..sized };
    let lost = error(&grouped);
    assert!(lost.contains("of rank 0 waits for node "), "{lost}");
}

#[test]
fn a_real_trace_is_read_by_rules() {
    let Some(bytes) = feeder_trace() else { return };
    let mut rules = filling();
    let collectives = |rules: &Rules| -> Vec<Collective> {
        let execution = read(&[&bytes, &bytes], rules).unwrap();
        assert_eq!(execution.graphs()[1].nodes().len(), 3_664);
        let nodes = execution.graphs()[0].nodes().iter();
        let collectives = nodes.filter_map(|node| match node.work {
            Work::Collective(collective) => Some(collective),
            _ => None,
        });
        collectives.collect()
    };
    let kernels = collectives(&rules);
    let sizes: Vec<_> = kernels.iter().map(|it| it.bytes).collect();
    let expected = [212_480, 424, 8_196_000, 31_502_336, 26_255_360, 26_550_272, 9_724_160];
    assert_eq!(sizes, expected);
    let broadcasts = kernels.iter().filter(|it| it.kind == CollectiveKind::Broadcast).count();
    assert_eq!(broadcasts, 2);
    rules.collective = MissingCollective::Fill { kind: CollectiveKind::AllReduce, bytes: 77 };
    let all = collectives(&rules);
    assert_eq!(all.len(), 21);
    assert_eq!(all.iter().filter(|it| it.bytes == 77).count(), 14);
}
