//! Tests of schedules.

use proptest::prelude::*;

use super::*;
use crate::workload::duration::{MICROSECOND, NANOSECOND};

const SCHEDULE: &str = "// A ping.
num_ranks 2

rank 0 {
  l1: calc 100 cpu 1
  l2: send 10b to 1 tag 5 cpu 2 nic 3
  l2 requires l1
  l3: recv 20 b from 1
  l3 irequires l2
}
/* The other
   rank. */
rank 1 {
  a: recv 10b from 0 tag 5
  send 20b to 0
}
";

fn schedule(text: &str) -> Execution {
    read(text, NANOSECOND).unwrap()
}

/// Returns the error of [`SCHEDULE`] with `old` replaced by `new`.
fn error(old: &str, new: &str) -> String {
    assert!(SCHEDULE.contains(old), "{old}");
    read(&SCHEDULE.replacen(old, new, 1), NANOSECOND).unwrap_err().to_string()
}

#[test]
fn a_schedule_reads_as_written() {
    let execution = schedule(SCHEDULE);
    let nodes = execution.graphs()[0].nodes();
    let on = |id, event| vec![Dependency { node: NodeId(id), event }];
    let message = |peer, bytes, tag, nic| Message { peer: Rank(peer), bytes, tag, nic };
    let expected = [
        (0, "l1 (line 5)", Unit(1), Work::Compute(Picos(100_000)), Vec::new()),
        (1, "l2 (line 6)", Unit(2), Work::Send(message(1, 10, 5, 3)), on(0, Event::Ended)),
        (2, "l3 (line 8)", Unit(0), Work::Recv(message(1, 20, 0, 0)), on(1, Event::Started)),
    ];
    let expected = expected.map(|(id, name, unit, work, after)| Node {
        id: NodeId(id),
        name: name.to_owned(),
        unit,
        work,
        after,
    });
    assert_eq!(nodes, expected);
    let nodes = execution.graphs()[1].nodes();
    assert_eq!(nodes[1].name, "send (line 15)");
    assert_eq!(nodes[1].work, Work::Send(message(0, 20, 0, 0)));
    assert_eq!(execution.groups(), []);
}

#[test]
fn calc_counts_the_callers_unit() {
    let execution = read("num_ranks 1\nrank 0 { calc 3 }", MICROSECOND).unwrap();
    assert_eq!(execution.graphs()[0].nodes()[0].work, Work::Compute(Picos::from_micros(3)));
}

#[test]
fn statements_end_at_a_line_a_semicolon_or_a_bracket() {
    let text = "num_ranks 1; rank 0 { l1: calc 1; l2: calc 2 cpu 0; l2 requires l1; }";
    let execution = schedule(text);
    assert_eq!(execution.graphs()[0].nodes()[1].after.len(), 1);
    let other = schedule("num_ranks 1\r\nrank 0 {\r\nl1:calc 1// a\nl2 : calc 2\nl2 requires l1}");
    let works = |execution: &Execution| -> Vec<_> {
        execution.graphs()[0].nodes().iter().map(|node| (node.work, node.after.clone())).collect()
    };
    assert_eq!(works(&execution), works(&other));
}

#[test]
fn a_label_may_be_used_before_its_line_and_again_in_another_rank() {
    let text = "num_ranks 2\nrank 1 { b requires a; a: calc 1; b: calc 1 }\nrank 0 { a: calc 5 }";
    let execution = schedule(text);
    assert_eq!(execution.graphs()[0].nodes()[0].work, Work::Compute(Picos(5_000)));
    assert_eq!(execution.graphs()[1].nodes()[1].after[0].node, NodeId(0));
}

#[test]
fn a_malformed_line_is_refused_with_its_number() {
    for (old, new, expected) in [
        ("num_ranks 2", "", "line 4: expected `num_ranks`, but found \"rank\""),
        ("num_ranks 2", "num_ranks x", "line 2: expected a number, but found \"x\""),
        ("num_ranks 2", "num_ranks 0", "line 2: num_ranks is 0; it must be 1 to 65536"),
        ("num_ranks 2", "num_ranks 65536", "line 2: num_ranks is 65536, but rank 2 has no block"),
        ("num_ranks 2", "num_ranks 65537", "line 2: num_ranks is 65537; it must be 1 to 65536"),
        ("num_ranks 2", "num_ranks 99999999999", "line 2: num_ranks is 99999999999; it must"),
        ("num_ranks 2", "num_ranks 3", "line 2: num_ranks is 3, but rank 2 has no block"),
        ("num_ranks 2", "num_ranks 1", "line 13: rank 1 does not exist; num_ranks is 1"),
        ("rank 1 {", "rank 0 {", "line 13: rank 0 has a second block; merge it with the first"),
        ("rank 1 {", "rank 1", "line 13: expected `{`, but found the end of the statement"),
        ("rank 1 {", "job 1 {", "line 13: expected `rank` or the end of the text, but found \"job"),
        ("calc 100", "calc", "line 5: expected a number, but found \"cpu\""),
        ("calc 100", "calc 99999999999999999999", "line 5: 99999999999999999999 is too large for"),
        ("calc 100", "calc 18446744073709551615", "line 5: the duration is above the limit"),
        ("calc 100", "put 100", "line 5: operation \"put\" is not supported; the operations are"),
        ("l1: calc 100 cpu 1", "put 1b to 1", "line 5: operation \"put\" is not supported"),
        ("cpu 1", "cpu", "line 5: expected a number, but found the end of the statement"),
        ("cpu 1", "tag 1", "line 5: unexpected attribute \"tag\"; calc takes cpu, and send"),
        ("cpu 1", "cpu 1 cpu 1", "line 5: unexpected attribute \"cpu\""),
        ("nic 3", "prio 3", "line 6: unexpected attribute \"prio\""),
        ("nic 3", "nic 4294967296", "line 6: 4294967296 is too large for nic; the limit is"),
        ("10b to", "10 to", "line 6: expected `b` after the number of bytes, but found \"to\""),
        ("10b to", "10b from", "line 6: expected `to`, but found \"from\""),
        ("to 1", "to 70000", "line 6: 70000 is too large for destination; the limit is 65535"),
        ("b from 1", "b from -1", "line 8: any source (-1) is not supported; name one"),
        ("0 tag 5", "0 tag -1", "line 14: any tag (-1) is not supported; name one"),
        ("l3: recv", "l1: recv", "line 8: label \"l1\" was used in line 5; labels must be unique"),
        ("requires l1", "requires l9", "line 7: the rank has no operation with label \"l9\""),
        ("l2 requires", "a requires", "line 7: the rank has no operation with label \"a\""),
        ("l2 requires", "l2 needs", "line 7: expected `:`, `requires` or `irequires`, but found"),
        ("requires l1", "requires", "line 7: expected a label, but found the end of the"),
        ("requires l1", "requires l1 l3", "line 7: expected the end of the line, but found \"l3"),
        ("l1: calc", "l1: : calc", "line 5: expected an operation, but found `:`"),
        ("l1: calc", "7: calc", "line 5: expected an operation, a label or `}`, but found 7"),
        ("tag 5 cpu", "tag: 5 cpu", "line 6: expected a number, but found `:`"),
        ("rank. */", "rank.", "line 11: this comment has no end; add */"),
        ("// A ping", "/ A ping", "line 1: unexpected character '/'"),
        ("calc 100", "calc +100", "line 5: unexpected character '+'"),
        ("to 0\n}", "to 0\n", "line 17: expected an operation, a label or `}`, but found the end"),
    ] {
        let error = error(old, new);
        assert!(error.starts_with(expected), "{new}: {error}");
    }
}

#[test]
fn a_schedule_that_cannot_run_is_refused_with_the_lines_of_its_operations() {
    let cycle = error("l2 requires l1", "l2 requires l1\n  l1 requires l3");
    for node in ["\"l1 (line 5)\"", "\"l2 (line 6)\"", "\"l3 (line 9)\""] {
        assert!(cycle.contains(node), "{cycle}");
    }
    assert_eq!(
        error("from 0 tag 5", "from 0 tag 6"),
        "node 1 \"l2 (line 6)\" of rank 0 has no matching receive at rank 1"
    );
    assert!(error("20 b", "19 b").contains("has room for 19 bytes, but node 1 \"send (line 15)\""));
}

/// Writes a chain of messages between two ranks, as a schedule generator would.
fn chain(sizes: &[u64]) -> String {
    let mut blocks = [String::new(), String::new()];
    for (index, size) in sizes.iter().enumerate() {
        let sender = index % 2;
        let receiver = 1 - sender;
        blocks[sender] += &format!("l{index}: send {size}b to {receiver} tag {index}\n");
        blocks[receiver] += &format!("l{index}: recv {size}b from {sender} tag {index}\n");
        if index > 0 {
            let previous = index - 1;
            blocks[sender] += &format!("l{index} requires l{previous}\n");
        }
    }
    format!("num_ranks 2\nrank 0 {{\n{}}}\nrank 1 {{\n{}}}\n", blocks[0], blocks[1])
}

proptest! {
    #[test]
    fn a_generated_chain_reads_with_its_sizes(sizes in prop::collection::vec(any::<u64>(), 0..9)) {
        let execution = schedule(&chain(&sizes));
        for graph in execution.graphs() {
            let read = graph.nodes().iter().map(|node| match node.work {
                Work::Send(message) | Work::Recv(message) => message.bytes,
                _ => unreachable!(),
            });
            prop_assert_eq!(&read.collect::<Vec<_>>(), &sizes);
        }
    }

    #[test]
    fn any_text_is_read_or_refused(text in "(?s).{0,200}") {
        if let Err(error) = read(&text, NANOSECOND) {
            prop_assert!(!error.to_string().is_empty());
        }
    }

    #[test]
    fn any_tokens_are_read_or_refused(
        tokens in prop::collection::vec(
            prop::sample::select(vec![
                "num_ranks", "rank", "0", "1", "{", "}", "calc", "send", "recv", "5b", "to", "from",
                "l1", "l2", ":", "requires", "irequires", "tag", "cpu", "nic", "-1", "\n", ";",
                "//", "/*", "*/",
            ]),
            0..40,
        ),
    ) {
        let text = format!("num_ranks 2\nrank 0 {{ {} ", tokens.join(" "));
        if let Err(error) = read(&text, NANOSECOND) {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}
