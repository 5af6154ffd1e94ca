//! Compares the time that ops take in simulation with the limit that the links set:
//! `cargo run --release -p racksum-sim --example rates`.
//!
//! Unless the scenario says otherwise, ranks have links of 1 Gbit/s and shards have links of 10
//! Gbit/s. The switch queues 1 MB per port. The limit is the time that the busiest link needs for
//! its bytes, including headers, plus a round trip and the transfer of the first window.

use std::cell::RefCell;
use std::rc::Rc;

use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::geometry::{Fragmentation, Geometry};
use racksum_proto::ids::Rank;
use racksum_proto::wire::{self, Header, Kind};
use racksum_sim::check::oracle::{Oracle, Truth};
use racksum_sim::check::{Checker, Checkers, Sight, Trace, Violation};
use racksum_sim::cluster::{Cluster, OVERHEAD_BYTES};
use racksum_sim::engine::Picos;
use racksum_sim::fault::{Effect, Leg, Rule};
use racksum_sim::inputs::Inputs;
use racksum_sim::link::LinkConfig;
use racksum_sim::plan::{JobPlan, Network, Plan, PortPlan};
use racksum_sim::run::Machine;

fn main() {
    println!(
        "{:44} {:>8} {:>8} {:>6} {:>8} {:>6} {:>6} {:>6} {:>6} {:>6} {:>8} {:>8}",
        "scenario",
        "ms",
        "limit",
        "ratio",
        "sent",
        "lost",
        "drop",
        "again",
        "dup",
        "asks",
        "probes",
        "idle ms"
    );
    // Given the index of a scenario as the argument, trace the scenario's first seed instead of
    // running all scenarios.
    let traced = std::env::args().nth(1).and_then(|arg| arg.parse::<usize>().ok());
    if let Some(scenario) = traced.and_then(|number| scenarios().into_iter().nth(number)) {
        let plan = plan(&scenario, 0);
        let checkers = Checkers::default().with(Trace::new(std::io::stdout(), u64::MAX));
        println!("{:?}", Cluster::new(&plan, checkers).run().map(|run| run.totals));
        return;
    }
    for scenario in scenarios() {
        let mut rows: Vec<Row> = (0..SEEDS).map(|seed| row(&scenario, seed)).collect();
        rows.sort_by(|one, other| one.ms.total_cmp(&other.ms));
        println!("{}", rows[rows.len() / 2].text);
    }
}

struct Scenario {
    name: &'static str,
    elements: u64,
    density_ppm: u32,
    aligned: bool,
    loss_ppm: u32,
    multicast: bool,
    shards: u8,
    shard_rate_bps: u64,
    mark_bytes: u64,
}

fn scenarios() -> Vec<Scenario> {
    let dense = Scenario {
        name: "10 MB dense, W=8",
        elements: 2_500_000,
        density_ppm: 1_000_000,
        aligned: true,
        loss_ppm: 0,
        multicast: true,
        shards: 1,
        shard_rate_bps: 10_000_000_000,
        mark_bytes: u64::MAX,
    };
    let sparse = Scenario {
        name: "40 MB, 1 % of blocks at random, W=8",
        elements: 10_000_000,
        density_ppm: 10_000,
        aligned: false,
        ..dense
    };
    vec![
        Scenario { ..dense },
        Scenario { name: "  and 0.1 % loss each way", loss_ppm: 1_000, ..dense },
        Scenario { name: "  and 1 % loss each way", loss_ppm: 10_000, ..dense },
        Scenario { name: "  and 5 % loss each way", loss_ppm: 50_000, ..dense },
        Scenario { name: "  unicast to each rank", multicast: false, ..dense },
        Scenario { name: "  two shards", shards: 2, ..dense },
        Scenario { name: "  two shards, 1 % loss", shards: 2, loss_ppm: 10_000, ..dense },
        Scenario { name: "  shard at 1 Gbit/s", shard_rate_bps: 1_000_000_000, ..dense },
        Scenario {
            name: "  shard at 1 Gbit/s, marks from 200 KB on",
            shard_rate_bps: 1_000_000_000,
            mark_bytes: 200_000,
            ..dense
        },
        Scenario { ..sparse },
        Scenario { name: "  and 1 % loss each way", loss_ppm: 10_000, ..sparse },
        Scenario { name: "  the same blocks at every rank", aligned: true, ..sparse },
        Scenario { name: "4 KB, W=8", elements: 1_000, ..dense },
        Scenario { name: "  and 1 % loss each way", elements: 1_000, loss_ppm: 10_000, ..dense },
    ]
}

struct Row {
    ms: f64,
    text: String,
}

fn row(scenario: &Scenario, seed: u64) -> Row {
    let plan = plan(scenario, seed);
    let limit = limit(&plan);
    let idle = Rc::new(RefCell::new(Idle::default()));
    let checkers = Checkers::default().with(SharedIdle(Rc::clone(&idle)));
    let run = match Cluster::new(&plan, checkers).run() {
        Ok(run) => run,
        Err(violation) => {
            let text = format!("{:44} {violation}", scenario.name);
            return Row { ms: f64::INFINITY, text };
        }
    };
    let failed = run.ended.values().filter(|ended| ended.result.is_err()).count();
    let ms = run.took.0 as f64 / 1e9;
    let totals = run.totals;
    let text = format!(
        "{:44} {:8.2} {:8.2} {:6.3} {:8} {:6} {:6} {:6} {:6} {:6} {:8} {:8.2}{}",
        scenario.name,
        ms,
        limit,
        ms / limit,
        totals.sent,
        totals.lost,
        totals.dropped,
        totals.again,
        totals.duplicates,
        totals.asks,
        totals.probes,
        idle.borrow().total.0 as f64 / 1e9,
        if failed > 0 { "  FAILED" } else { "" }
    );
    Row { ms, text }
}

fn plan(scenario: &Scenario, seed: u64) -> Plan {
    let delay = Picos::from_micros(25);
    let port = |rate_bps| {
        let up = LinkConfig::lossless(rate_bps, delay);
        let down = LinkConfig { queue_bytes: 1_000_000, mark_bytes: scenario.mark_bytes, ..up };
        PortPlan {
            up,
            down,
            receive_buffer: RECEIVE_BUFFER,
            send_buffer: SEND_BUFFER,
            service: Picos(200_000),
        }
    };
    let network = Network {
        shards: scenario.shards,
        own_numbers: false,
        worker: port(1_000_000_000),
        shard: port(scenario.shard_rate_bps),
        multicast: scenario.multicast,
        quantum: 1 << 24,
        work: Picos::ZERO,
    };
    let cut = Fragmentation::new(1424).expect("1424 bytes is a valid payload size");
    let inputs = Inputs {
        density_ppm: scenario.density_ppm,
        aligned: scenario.aligned,
        ..Inputs::dense(seed)
    };
    let descriptor = Descriptor::sum(scenario.elements, DType::F32);
    // These are the limits that a real aggregator grants.
    let job = JobPlan {
        in_flight: RECEIVE_BUFFER / usize::from(WORLD),
        results_in_flight: RECEIVE_BUFFER / usize::from(scenario.shards) / 2,
        pool_slots: 256,
        ..JobPlan::new(WORLD, cut)
    };
    let job = job.with(descriptor, inputs, Picos::ZERO);
    let mut plan = Plan::new(seed, network, vec![job]);
    if scenario.loss_ppm > 0 {
        let loss = |leg| Rule::chance(leg, scenario.loss_ppm, Effect::Drop);
        plan.faults = vec![loss(Leg::Up), loss(Leg::Down)];
    }
    plan
}

/// Returns the shortest time that the links allow, in milliseconds.
fn limit(plan: &Plan) -> f64 {
    let oracle = Oracle::new(plan);
    let truth = oracle.truth(0, racksum_proto::ids::OpId(0)).expect("the plan has one op");
    let cut = plan.jobs[0].cut;
    let bytes = |mask: &dyn Fn(&Truth, u32) -> u64| -> u64 {
        (0..truth.windows())
            .map(|window| {
                let len = truth.payload_len(window, mask(truth, window));
                let headers = if len == 0 { 0 } else { cut.count(len) as u64 };
                len as u64 + headers * (Header::LEN as u64 + OVERHEAD_BYTES)
            })
            .sum()
    };
    let world = u64::from(plan.jobs[0].world);
    let union = bytes(&|truth, window| truth.union(window));
    let own = (0..plan.jobs[0].world)
        .map(|rank| bytes(&|truth, window| truth.mask(Rank(rank), window)))
        .max()
        .expect("a job has ranks");
    let network = &plan.network;
    let shards = u64::from(network.shards);
    let seconds = |bytes: u64, rate_bps: u64| bytes as f64 * 8.0 / rate_bps as f64;
    let results = if network.multicast { union } else { world * union };
    let busiest = [
        seconds(own, network.worker.up.rate_bps),
        seconds(union, network.worker.down.rate_bps),
        seconds(world * own / shards, network.shard.down.rate_bps),
        seconds(results / shards, network.shard.up.rate_bps),
    ];
    let hops = 2.0 * (network.worker.up.delay.0 + network.shard.down.delay.0) as f64 / 1e9;
    // A fold needs its whole window, so the upload of the first window adds to the limit.
    let geometry = Geometry::new(&plan.jobs[0].ops[0].descriptor);
    let first = truth.payload_len(0, truth.union(0)).min(geometry.window_elements() * 4) as u64;
    busiest.into_iter().fold(0.0, f64::max) * 1e3
        + hops
        + seconds(first, network.worker.up.rate_bps) * 1e3
}

/// The time during which rank 0 received no results, summed over the gaps longer than 0.5 ms.
#[derive(Default)]
struct Idle {
    last: Picos,
    total: Picos,
}

struct SharedIdle(Rc<RefCell<Idle>>);

impl Checker for SharedIdle {
    fn see(&mut self, at: Picos, machine: Machine, sight: &Sight<'_>) -> Result<(), Violation> {
        let Sight::Received(bytes) = sight else { return Ok(()) };
        let is_result =
            wire::messages(bytes).flatten().any(|(header, _)| header.kind == Kind::Result);
        if machine == (Machine::Worker { job: 0, rank: Rank(0) }) && is_result {
            let mut idle = self.0.borrow_mut();
            let gap = at.since(idle.last);
            if gap > Picos::from_micros(500) {
                idle.total = idle.total + gap;
            }
            idle.last = at;
        }
        Ok(())
    }
}

const WORLD: u16 = 8;
const RECEIVE_BUFFER: usize = 8 << 20;
const SEND_BUFFER: usize = 256 << 10;
/// The number of runs of each scenario. Only the run with the median time is printed.
const SEEDS: u64 = 5;
