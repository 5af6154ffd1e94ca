use super::{BYTE_PER_NANO, MIXED, NANO, SMALL, draw, seeds, shuffled};
use crate::coflow::fluid;
use crate::coflow::order::Order;
use crate::coflow::rates::{Rates, Sending};
use crate::coflow::workload::{Coflow, Fabric, Flow, WORK_PER_BYTE, Workload};
use crate::engine::Picos;
use crate::random::Random;

const BOTH: [Rates; 2] = [Rates::Greedy, Rates::Madd];

fn sending(workload: &Workload) -> Vec<Vec<Sending>> {
    let flow = |it: &Flow| Sending {
        source: it.source,
        destination: it.destination,
        left: u128::from(it.bytes) * WORK_PER_BYTE,
        rate_bps: 0,
    };
    workload.coflows().iter().map(|it| it.flows.iter().map(flow).collect()).collect()
}

/// Returns what each port has left when the flows move: those of ingress, then those of egress.
fn free(fabric: &Fabric, sending: &[Vec<Sending>]) -> (Vec<u64>, Vec<u64>) {
    let (mut ingress, mut egress) = (fabric.ingress_bps().to_vec(), fabric.egress_bps().to_vec());
    for flow in sending.iter().flatten() {
        let take = |free: &mut u64| *free = free.checked_sub(flow.rate_bps).expect("no overload");
        take(&mut ingress[flow.source]);
        take(&mut egress[flow.destination]);
    }
    (ingress, egress)
}

#[test]
fn no_port_is_overloaded_and_no_flow_could_get_more() {
    for seed in seeds(500) {
        for shape in [SMALL, MIXED] {
            let workload = draw(shape, seed);
            let order = shuffled(workload.coflows().len(), &mut Random::new(seed).child("order"));
            for rates in BOTH {
                let mut sending = sending(&workload);
                let span = rates.assign(workload.fabric(), &order, &mut sending);
                assert!(span.is_some_and(|span| span > 0), "seed {seed}: {rates:?} stands still");
                let (ingress, egress) = free(workload.fabric(), &sending);
                for flow in sending.iter().flatten() {
                    let more = ingress[flow.source].min(egress[flow.destination]);
                    assert_eq!(more, 0, "seed {seed}: {rates:?} leaves {more} bit/s to {flow:?}");
                }
            }
        }
    }
}

#[test]
fn later_coflows_do_not_slow_earlier_ones() {
    for seed in seeds(300) {
        let workload = draw(MIXED, seed);
        let order = shuffled(workload.coflows().len(), &mut Random::new(seed).child("order"));
        let mut all = sending(&workload);
        Rates::Greedy.assign(workload.fabric(), &order, &mut all);
        for count in 1..order.len() {
            let mut first = sending(&workload);
            Rates::Greedy.assign(workload.fabric(), &order[..count], &mut first);
            for &coflow in &order[..count] {
                assert_eq!(first[coflow], all[coflow], "seed {seed}");
            }
        }
    }
}

#[test]
fn no_coflow_completes_before_it_could_alone() {
    for seed in seeds(300) {
        let workload = draw(MIXED, seed);
        let oracle_ps = workload.oracle_ps();
        for (rates, order) in BOTH.into_iter().flat_map(|it| Order::ALL.map(|order| (it, order))) {
            let outcome = fluid::run(&workload, &order.of(&workload), rates).unwrap();
            for ((at, coflow), &alone) in
                outcome.completed.iter().zip(workload.coflows()).zip(&oracle_ps)
            {
                let took = u128::from(at.since(coflow.release).0);
                assert!(took >= alone, "seed {seed}: {rates:?} {order:?} {took} < {alone}");
            }
            assert!(u128::from(outcome.makespan().0) >= workload.busiest_ps(), "seed {seed}");
            assert!(outcome.total_ps(&workload) >= oracle_ps.iter().sum(), "seed {seed}");
        }
    }
}

/// Two flows of 30 and 10 bytes from one port, and a coflow of 10 bytes to the second's target.
fn madd_example() -> Workload {
    let flow = |source, destination, bytes| Flow { source, destination, bytes };
    let coflows = vec![
        Coflow::new(0, Picos::ZERO, vec![flow(0, 0, 30), flow(0, 1, 10)]),
        Coflow::new(1, Picos::ZERO, vec![flow(1, 1, 15)]),
    ];
    Workload::new(Fabric::uniform(2, BYTE_PER_NANO).unwrap(), coflows).unwrap()
}

#[test]
fn madd_lets_the_flows_of_a_coflow_end_together() {
    let workload = madd_example();
    let mut sending = sending(&workload);
    let span = Rates::Madd.assign(workload.fabric(), &[0, 1], &mut sending);
    let rates: Vec<u64> = sending.iter().flatten().map(|flow| flow.rate_bps).collect();
    // The first coflow takes 3/4 and 1/4 of its port. The second gets what its egress port has.
    assert_eq!(rates, [BYTE_PER_NANO / 4 * 3, BYTE_PER_NANO / 4, BYTE_PER_NANO / 4 * 3]);
    assert_eq!(span, Some(u128::from(20 * NANO)));
}

#[test]
fn greedy_rates_and_madd_differ_as_by_hand() {
    let workload = madd_example();
    let completed = |rates| fluid::run(&workload, &[0, 1], rates).unwrap().completed;
    // Greedy sends the first flow alone for 30 ns while the second coflow has its port.
    assert_eq!(completed(Rates::Greedy), [Picos(40 * NANO), Picos(15 * NANO)]);
    assert_eq!(completed(Rates::Madd), [Picos(40 * NANO), Picos(20 * NANO)]);
}

#[test]
fn madd_shares_what_is_left_between_coflows_with_a_full_port() {
    let flow = |source, destination| Flow { source, destination, bytes: 8 };
    let coflows = vec![
        Coflow::new(0, Picos::ZERO, vec![flow(0, 0), flow(0, 1), flow(0, 2)]),
        Coflow::new(1, Picos::ZERO, vec![flow(0, 3), flow(1, 3)]),
        Coflow::new(2, Picos::ZERO, vec![flow(0, 4), flow(2, 3)]),
    ];
    let workload = Workload::new(Fabric::uniform(5, BYTE_PER_NANO).unwrap(), coflows).unwrap();
    let mut sending = sending(&workload);
    Rates::Madd.assign(workload.fabric(), &[0, 1, 2], &mut sending);
    let rates: Vec<u64> = sending.iter().flatten().map(|flow| flow.rate_bps).collect();
    // A third of the rate leaves 2 bit/s, with which the port still counts as full.
    let (third, half) = (BYTE_PER_NANO / 3, BYTE_PER_NANO / 2);
    assert_eq!(rates, [third + 2, third, third, 0, half, 0, half]);
}

#[test]
fn madd_keeps_the_proportions_of_very_large_flows() {
    let flow = |bytes| Flow { source: 0, destination: 0, bytes };
    let flows = vec![flow(1 << 60), flow(3 << 60)];
    let rate = 1 << 60;
    let fabric = Fabric::uniform(1, rate).unwrap();
    let workload = Workload::new(fabric, vec![Coflow::new(0, Picos::ZERO, flows)]).unwrap();
    let mut sending = sending(&workload);
    Rates::Madd.assign(workload.fabric(), &[0], &mut sending);
    let quarter = u128::from(sending[0][0].rate_bps) * 4;
    assert!(quarter.abs_diff(rate.into()) < 1 << 30, "{quarter}");
}

#[test]
fn madd_ends_a_lone_coflow_at_its_oracle_time() {
    for seed in seeds(300) {
        let lone = |it: &Coflow| {
            Workload::new(draw(MIXED, seed).fabric().clone(), vec![it.clone()]).unwrap()
        };
        for workload in draw(MIXED, seed).coflows().iter().map(lone) {
            let outcome = fluid::run(&workload, &[0], Rates::Madd).unwrap();
            let (took, alone) = (outcome.total_ps(&workload), workload.oracle_ps()[0]);
            assert!(took >= alone && took - alone <= 1 + alone / 1_000_000, "{took} {alone}");
        }
    }
}

#[test]
fn ports_slower_than_their_flows_still_end() {
    let flows = (0..5).map(|_| Flow { source: 0, destination: 0, bytes: 1 }).collect();
    let coflows = vec![
        Coflow::new(0, Picos::ZERO, flows),
        Coflow::new(1, Picos::ZERO, vec![Flow { source: 0, destination: 1, bytes: 1 }]),
    ];
    let workload = Workload::new(Fabric::uniform(2, 1).unwrap(), coflows).unwrap();
    for rates in BOTH {
        let outcome = fluid::run(&workload, &[0, 1], rates).unwrap();
        assert_eq!(outcome.makespan(), Picos(6 * 8_000_000_000_000), "{rates:?}");
    }
}
