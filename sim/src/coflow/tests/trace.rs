use super::seeds;
use crate::coflow::trace::{Dialect, Reason, Trace, TraceError};
use crate::coflow::workload::{Coflow, Flow};
use crate::engine::Picos;
use crate::random::Random;

const FLOWS: &str = "4 2\n0 3 2 2 1 0 3 1 2 3 50\n\n1 6 1 1 1 3 1 2.5\n";
const BENCHMARK: &str = "4 2\n1 0 3 0 2 3 2 1:3 2:0.5\n2 15 0 0\n";
const MEGABYTE: u64 = 1 << 20;

fn flow(source: usize, destination: usize, bytes: u64) -> Flow {
    Flow { source, destination, bytes }
}

#[test]
fn a_trace_of_flows_is_read() {
    let trace = Trace::parse(FLOWS).unwrap();
    assert_eq!((trace.dialect, trace.ports), (Dialect::Flows, 4));
    let first = vec![flow(0, 3, MEGABYTE), flow(2, 3, 50 * MEGABYTE)];
    let second = vec![flow(3, 1, 5 * MEGABYTE / 2)];
    let expected = [
        Coflow::new(0, Picos::from_millis(3), first),
        Coflow::new(1, Picos::from_millis(6), second),
    ];
    assert_eq!(trace.coflows, expected);
}

#[test]
fn a_benchmark_trace_is_read_and_reducers_are_divided() {
    let trace = Trace::parse(BENCHMARK).unwrap();
    assert_eq!((trace.dialect, trace.ports), (Dialect::Benchmark, 4));
    let half = MEGABYTE / 2;
    // A half megabyte leaves two bytes when it is divided by three.
    let flows = vec![
        flow(0, 1, MEGABYTE),
        flow(2, 1, MEGABYTE),
        flow(3, 1, MEGABYTE),
        flow(0, 2, half / 3 + 1),
        flow(2, 2, half / 3 + 1),
        flow(3, 2, half / 3),
    ];
    assert_eq!(half % 3, 2);
    let expected =
        [Coflow::new(1, Picos::ZERO, flows), Coflow::new(2, Picos::from_millis(15), vec![])];
    assert_eq!(trace.coflows, expected);
}

#[test]
fn the_stated_width_is_kept() {
    let trace = Trace::parse("4 1\n0 0 2 2 1 0 3 1 2 1 1\n").unwrap();
    assert_eq!(trace.coflows[0].width, 1, "the flows have two destinations");
}

#[test]
fn sizes_have_decimals() {
    let bytes = |size: &str| {
        let text = format!("2 1\n0 0 1 1 1 0 1 {size}\n");
        Trace::parse(&text).map(|trace| trace.coflows[0].flows[0].bytes)
    };
    assert_eq!(bytes("0"), Ok(0));
    assert_eq!(bytes("1.000"), Ok(MEGABYTE));
    assert_eq!(bytes("0.1"), Ok(104_858), "104857.6, rounded");
    assert_eq!(bytes("2."), Ok(2 * MEGABYTE));
    assert_eq!(bytes("17592186044415.9"), Ok(u64::MAX - 104_857));
    for bad in ["-1", "1e3", ".5", "nan", "1.2.3", "17592186044416", "0.1234567890123456789"] {
        let error = bytes(bad).unwrap_err();
        assert!(error.to_string().starts_with("line 2: a size is"), "{bad}: {error}");
    }
}

#[test]
fn errors_name_the_line_and_the_reason() {
    let cases = [
        ("", "line 1: the trace is empty; begin it with the numbers of ports and coflows"),
        ("4", "line 1: the number of coflows is missing"),
        ("x 1", "line 1: the number of ports is \"x\", not a whole number below 2^64"),
        ("70000 1", "line 1: the number of ports is 70000; the most is 65536"),
        ("4 1 9", "line 1: \"9\" follows the last field"),
        ("4 2\n0 0 0 0 0", "line 2: the first line announces 2 coflows, but 1 follow"),
        ("4 0\n0 0 0 0 0", "line 2: the first line announces 0 coflows, but 1 follow"),
        ("4 1\n\n0 0 1 1 1 0", "line 3: a flow's destination is missing"),
        (
            "4 1\n0 0 1 1 1 0 4 1",
            "line 2: a flow's destination is 4, but the first line announces 4 ports, numbered \
             from 0",
        ),
        ("4 1\n0 0 1 1 1 0 3 1 5", "line 2: \"5\" follows the last field"),
        ("4 1\n0 -3 0 0 0", "line 2: the arrival in milliseconds is \"-3\", not a whole number"),
        ("4 1\n0 99999999999 0 0 0", "line 2: the arrival in milliseconds is 99999999999; the"),
        ("4 1\n0 0 99999999 1 1", "line 2: the number of flows is 99999999; the most is 16777216"),
        ("4 1\n0 0 1 2 1 3", "line 2: a flow's destination is missing"),
        ("4 1\n0 0 1 2 1 3:", "line 2: a size is \"\", not megabytes as a decimal number"),
        ("4 1\n0 0 1 2 2 3:1 3", "line 2: reducer \"3\" has no colon; write port:megabytes"),
        ("4 1\n0 0 0 1 3:1", "line 2: the coflow has reducers but no mappers"),
        ("4 1\n0 0 1 9 1 3:1", "line 2: a mapper's port is 9, but the first line announces 4"),
    ];
    for (text, expected) in cases {
        let error = Trace::parse(text).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{text:?}: {error}");
    }
}

#[test]
fn mappers_times_reducers_are_limited() {
    let mappers = "0 ".repeat(60_000);
    let text = format!("1 1\n0 0 60000 {mappers}60000 {}", "0:1 ".repeat(60_000));
    assert_eq!(Trace::parse(&text), Err(TraceError { line: 2, reason: Reason::TooManyFlows }));
}

#[test]
fn damaged_traces_never_panic() {
    let mut read = 0;
    for seed in seeds(20_000) {
        let mut random = Random::new(seed).child("damage");
        let mut text = random.pick(&[FLOWS, BENCHMARK]).as_bytes().to_vec();
        for _ in 0..random.within(1..=4) {
            let place = usize::try_from(random.below(text.len() as u64)).unwrap();
            let byte = random.pick(b"0123456789 \n:.-x\xc3");
            match random.below(3) {
                0 => text[place] = byte,
                1 => text.insert(place, byte),
                _ => text.truncate(place.max(1)),
            }
        }
        read += u64::from(Trace::parse(&String::from_utf8_lossy(&text)).is_ok());
    }
    println!("{read} damaged traces could still be read");
}
