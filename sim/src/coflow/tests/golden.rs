//! Figures of Sincronia's published offline simulator on the traces of its authors.
//!
//! The traces have no licence, so they are not in this repository. `RACKSUM_COFLOW_TRACES` names
//! the folder that holds them; without it, the folder is `../shared/data/coflow` from the root.

use std::path::PathBuf;

use crate::coflow::fluid;
use crate::coflow::order::Order;
use crate::coflow::rates::Rates;
use crate::coflow::trace::Trace;
use crate::coflow::workload::{Coflow, Fabric, Workload};
use crate::engine::Picos;

/// The rate at which a megabyte takes a millisecond, the unit of the published figures.
const MEGABYTE_PER_MILLI: u64 = 8_388_608_000;
const PICOS_PER_UNIT: f64 = 1e9;

/// Published figures of one trace: average completion times, and totals.
struct Golden {
    file: &'static str,
    bssi_greedy: f64,
    bssi_madd: f64,
    sebf_madd: f64,
    sebf: f64,
    scf: f64,
    tcf: f64,
    ncf: f64,
    makespan: f64,
    oracle: f64,
}

const GOLDEN: [Golden; 3] = [
    Golden {
        file: "10-0.9-FB-UPWS.txt",
        bssi_greedy: 8.1,
        bssi_madd: 8.224,
        sebf_madd: 8.145,
        sebf: 8.2,
        scf: 8.5,
        tcf: 8.2,
        ncf: 22.5,
        makespan: 47.0,
        oracle: 67.0,
    },
    Golden {
        file: "50-0.9-FB-UPWS.txt",
        bssi_greedy: 26.8,
        bssi_madd: 27.869,
        sebf_madd: 29.196,
        sebf: 27.7,
        scf: 28.4,
        tcf: 27.0,
        ncf: 91.96,
        makespan: 250.0,
        oracle: 577.0,
    },
    Golden {
        file: "200-0.9-FB-UPWS.txt",
        bssi_greedy: 97.555,
        bssi_madd: 106.863,
        sebf_madd: 108.328,
        sebf: 104.395,
        scf: 172.22,
        tcf: 103.22,
        ncf: 363.65,
        makespan: 1379.0,
        oracle: 7010.0,
    },
];

/// Reads a trace, with all coflows released at once. Returns none, and says so, without the file.
fn workload(file: &str) -> Option<Workload> {
    let folder = std::env::var_os("RACKSUM_COFLOW_TRACES").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/data/coflow")),
        PathBuf::from,
    );
    let path = folder.join(file);
    if !path.exists() {
        eprintln!("skipped: there is no {}; set RACKSUM_COFLOW_TRACES", path.display());
        return None;
    }
    let trace = Trace::parse(&std::fs::read_to_string(path).unwrap()).unwrap();
    let at_once = |it: Coflow| Coflow { release: Picos::ZERO, ..it };
    let coflows = trace.coflows.into_iter().map(at_once).collect();
    let fabric = Fabric::uniform(trace.ports, MEGABYTE_PER_MILLI).unwrap();
    Some(Workload::new(fabric, coflows).unwrap())
}

/// Returns the average completion time and the makespan.
fn figures(workload: &Workload, order: &[usize], rates: Rates) -> (f64, f64) {
    let outcome = fluid::run(workload, order, rates).unwrap();
    let average = outcome.total_ps(workload) as f64 / workload.coflows().len() as f64;
    (average / PICOS_PER_UNIT, outcome.makespan().0 as f64 / PICOS_PER_UNIT)
}

/// Orders as the published code does: in single precision, and with the last flow alone of several
/// between the same ports.
///
/// The traces have many ties, which its rounding decides.
fn single_precision_order(workload: &Workload) -> Vec<usize> {
    let fabric = workload.fabric();
    let demands = workload.coflows().iter().map(|it| {
        let is_last = |place: usize| {
            let ends = |at: usize| (it.flows[at].source, it.flows[at].destination);
            (place + 1..it.flows.len()).all(|later| ends(later) != ends(place))
        };
        let flows = (0..it.flows.len()).filter(|&place| is_last(place));
        let bytes = fabric.demands(flows.map(|place| it.flows[place]));
        bytes.into_iter().map(|bytes| (bytes >> 20) as f32).collect::<Vec<f32>>()
    });
    let demands: Vec<Vec<f32>> = demands.collect();
    let ports = fabric.rates_bps().len();
    let mut left: Vec<usize> = (0..demands.len()).collect();
    let mut prices: Vec<(usize, f32)> = Vec::new();
    let mut order = Vec::new();
    while !left.is_empty() {
        let load = |port: usize| left.iter().map(|&it| demands[it][port]).sum::<f32>();
        let port = (0..ports).fold(0, |most, it| if load(it) > load(most) { it } else { most });
        let ratio = |it: usize| {
            let paid =
                prices.iter().fold(0.0, |sum, &(port, price)| sum + demands[it][port] * price);
            (1.0 - paid) / demands[it][port]
        };
        let place =
            (0..left.len()).fold(0, |l, it| if ratio(left[it]) < ratio(left[l]) { it } else { l });
        prices.push((port, ratio(left[place])));
        order.push(left.remove(place));
    }
    order.reverse();
    order
}

#[test]
fn the_simple_orders_have_the_published_averages() {
    for golden in &GOLDEN {
        let Some(workload) = workload(golden.file) else { continue };
        let expected = [
            (Order::Sebf, Rates::Greedy, golden.sebf),
            (Order::Sebf, Rates::Madd, golden.sebf_madd),
            (Order::Scf, Rates::Greedy, golden.scf),
            (Order::Tcf, Rates::Greedy, golden.tcf),
            (Order::Ncf, Rates::Greedy, golden.ncf),
        ];
        for (order, rates, expected) in expected {
            let (average, _) = figures(&workload, &order.of(&workload), rates);
            println!("{}: {order:?} {rates:?} {average:.3}, published {expected}", golden.file);
            assert!((average - expected).abs() < 0.000_6, "{average} is not {expected}");
        }
        let oracle = workload.oracle_ps().iter().sum::<u128>() as f64 / PICOS_PER_UNIT;
        assert_eq!(oracle, golden.oracle, "{}", golden.file);
    }
}

#[test]
fn bssi_in_single_precision_has_the_published_averages() {
    for golden in &GOLDEN {
        let Some(workload) = workload(golden.file) else { continue };
        let order = single_precision_order(&workload);
        let (greedy, makespan) = figures(&workload, &order, Rates::Greedy);
        let (madd, _) = figures(&workload, &order, Rates::Madd);
        println!("{}: greedy {greedy:.3}, MADD {madd:.3}, {makespan}", golden.file);
        assert!((greedy - golden.bssi_greedy).abs() < 0.000_6, "{greedy}");
        assert!((madd - golden.bssi_madd).abs() < 0.000_6, "{madd}");
        assert_eq!(makespan, golden.makespan);
    }
}

#[test]
fn exact_bssi_is_within_a_percent_of_the_published_averages() {
    for golden in &GOLDEN {
        let Some(workload) = workload(golden.file) else { continue };
        let order = Order::Bssi.of(&workload);
        for (rates, expected) in
            [(Rates::Greedy, golden.bssi_greedy), (Rates::Madd, golden.bssi_madd)]
        {
            let (average, makespan) = figures(&workload, &order, rates);
            println!("{}: {rates:?} {average:.3}, published {expected}", golden.file);
            assert!((average / expected - 1.0).abs() <= 0.01, "{average} is not {expected}");
            assert!((makespan / golden.makespan - 1.0).abs() <= 0.02, "{makespan}");
        }
        let (bssi, _) = figures(&workload, &order, Rates::Greedy);
        let (sebf, _) = figures(&workload, &Order::Sebf.of(&workload), Rates::Greedy);
        assert!(bssi < sebf, "BSSI is better: {bssi} and {sebf}");
    }
}
