use super::BYTE_PER_NANO;
use crate::coflow::order::Order;
use crate::coflow::workload::{Coflow, Fabric, Flow, Workload};
use crate::engine::Picos;

/// Four coflows that each simple rule orders differently, on a fabric with one slow port or none.
fn workload(last_egress_bps: u64) -> Workload {
    let coflow = |id, flows: &[(usize, usize, u64)]| {
        let flow = |&(source, destination, bytes)| Flow { source, destination, bytes };
        Coflow::new(id, Picos::ZERO, flows.iter().map(flow).collect())
    };
    let coflows = vec![
        coflow(3, &[(0, 0, 6)]),
        coflow(1, &[(0, 0, 4), (1, 1, 4)]),
        coflow(2, &[(0, 0, 3), (1, 0, 3), (2, 0, 3)]),
        coflow(0, &[(0, 0, 5), (1, 1, 1), (2, 2, 1)]),
    ];
    let fast = BYTE_PER_NANO;
    let fabric = Fabric::new(vec![fast; 3], vec![fast, fast, last_egress_bps]).unwrap();
    Workload::new(fabric, coflows).unwrap()
}

#[test]
fn each_simple_order_sorts_by_its_key_and_then_by_id() {
    let workload = workload(BYTE_PER_NANO);
    assert_eq!(Order::Sebf.of(&workload), [1, 3, 0, 2], "4, 5, 6 and 9 bytes at one port");
    assert_eq!(Order::Scf.of(&workload), [2, 1, 3, 0], "flows of up to 3, 4, 5 and 6 bytes");
    assert_eq!(Order::Tcf.of(&workload), [0, 3, 1, 2], "6, 7, 8 and 9 bytes");
    assert_eq!(Order::Ncf.of(&workload), [2, 0, 1, 3], "widths of 1, 1, 2 and 3");
}

#[test]
fn the_effective_bottleneck_counts_the_rate_of_the_port() {
    assert_eq!(Order::Sebf.of(&workload(BYTE_PER_NANO / 10)), [1, 0, 2, 3]);
}
