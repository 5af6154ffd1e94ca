use super::{BYTE_PER_NANO, NANO};
use crate::coflow::fluid::{self, Fluid, TooLong};
use crate::coflow::rates::Rates;
use crate::coflow::workload::{Coflow, Fabric, Flow, Side, Workload, WorkloadError};
use crate::engine::Picos;

fn one_port(coflows: &[(u64, u64)]) -> Workload {
    let coflows = coflows.iter().zip(0..).map(|(&(release_ns, bytes), id)| {
        let flows = vec![Flow { source: 0, destination: 0, bytes }];
        Coflow::new(id, Picos(release_ns * NANO), flows)
    });
    Workload::new(Fabric::uniform(1, BYTE_PER_NANO).unwrap(), coflows.collect()).unwrap()
}

#[test]
fn a_coflow_waits_for_its_release_and_then_preempts() {
    let workload = one_port(&[(0, 10), (4, 3), (30, 5)]);
    let run = |order: &[usize]| fluid::run(&workload, order, Rates::Greedy).unwrap();
    let outcome = run(&[1, 0, 2]);
    assert_eq!(outcome.completed, [13, 7, 35].map(|at| Picos(at * NANO)));
    assert_eq!(outcome.makespan(), Picos(35 * NANO));
    assert_eq!(outcome.total_ps(&workload), u128::from((13 + 3 + 5) * NANO));
    assert_eq!(run(&[0, 1, 2]).completed, [10, 13, 35].map(|at| Picos(at * NANO)));
}

#[test]
fn times_are_rounded_up_to_a_picosecond() {
    let flows = vec![Flow { source: 0, destination: 0, bytes: 1 }];
    let coflows = vec![Coflow::new(0, Picos::ZERO, flows)];
    let workload = Workload::new(Fabric::uniform(1, 3_000_000_000).unwrap(), coflows).unwrap();
    // 8 bits at 3 Gbit/s take 2666.67 ps.
    let outcome = fluid::run(&workload, &[0], Rates::Greedy).unwrap();
    assert_eq!(outcome.completed, [Picos(2667)]);
    assert_eq!(workload.oracle_ps(), [2667]);
}

#[test]
fn a_coflow_without_data_completes_when_it_is_released() {
    let workload = one_port(&[(0, 0), (5, 0), (0, 9)]);
    let outcome = fluid::run(&workload, &[2, 0, 1], Rates::Madd).unwrap();
    assert_eq!(outcome.completed, [0, 5, 9].map(|at| Picos(at * NANO)));
    let empty = Workload::new(Fabric::uniform(0, 1).unwrap(), vec![]).unwrap();
    assert_eq!(fluid::run(&empty, &[], Rates::Greedy).unwrap().makespan(), Picos::ZERO);
}

#[test]
fn a_step_tells_what_is_left() {
    let workload = one_port(&[(0, 10), (100, 1)]);
    let mut fluid = Fluid::new(&workload);
    fluid.step(&[0], Rates::Greedy, Picos(4_500)).unwrap();
    assert_eq!(fluid.now(), Picos(4_500));
    // Five and a half bytes are left, and six of them are not sent whole.
    assert_eq!(fluid.left(0).map(|flow| flow.bytes).collect::<Vec<_>>(), [6]);
    assert_eq!((fluid.active().collect::<Vec<_>>(), fluid.is_idle()), (vec![0], false));
    assert_eq!(fluid.next_release(), Some(Picos(100 * NANO)));
}

#[test]
fn a_run_beyond_the_last_picosecond_is_an_error() {
    let flows = vec![Flow { source: 0, destination: 0, bytes: u64::MAX }];
    let coflows = vec![Coflow::new(0, Picos::ZERO, flows)];
    let workload = Workload::new(Fabric::uniform(1, 1).unwrap(), coflows).unwrap();
    for rates in [Rates::Greedy, Rates::Madd] {
        assert_eq!(fluid::run(&workload, &[0], rates), Err(TooLong));
    }
}

#[test]
#[should_panic(expected = "an order names every coflow once")]
fn an_order_that_lacks_a_coflow_is_refused() {
    drop(fluid::run(&one_port(&[(0, 1), (0, 1)]), &[1, 1], Rates::Greedy));
}

#[test]
fn a_workload_that_does_not_fit_its_fabric_is_refused() {
    let fabric = || Fabric::new(vec![1, 1], vec![1]).unwrap();
    let coflow = |id, source, destination, bytes| {
        Coflow::new(id, Picos::ZERO, vec![Flow { source, destination, bytes }])
    };
    let refused = |coflows| Workload::new(fabric(), coflows).unwrap_err();
    assert_eq!(
        refused(vec![coflow(7, 1, 1, 1)]),
        WorkloadError::NoPort { id: 7, side: Side::Egress, port: 1, ports: 1 }
    );
    assert_eq!(
        refused(vec![coflow(7, 2, 0, 1)]).to_string(),
        "coflow 7 uses ingress port 2, but the fabric has 2, numbered from 0"
    );
    assert_eq!(
        refused(vec![coflow(7, 0, 0, 1), coflow(7, 0, 0, 1)]),
        WorkloadError::RepeatedId { id: 7 }
    );
    let halves = vec![coflow(0, 0, 0, 1 << 63), coflow(1, 0, 0, 1 << 63)];
    assert_eq!(refused(halves), WorkloadError::TooMuch);
    assert_eq!(
        Fabric::new(vec![1], vec![1, 0]),
        Err(WorkloadError::NoRate { side: Side::Egress, port: 1 })
    );
}
