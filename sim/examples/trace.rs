//! Prints a seed's plan, and then at most LINES lines of a trace of the seed's run:
//! `cargo run --release -p racksum-sim --example trace -- SEED [LINES]`.

use racksum_proto::geometry::Geometry;
use racksum_sim::check::{Checkers, Trace};
use racksum_sim::cluster::Cluster;
use racksum_sim::plan::Plan;
use racksum_sim::swarm;

fn main() {
    let mut numbers = std::env::args().skip(1).filter_map(|arg| arg.parse::<u64>().ok());
    let plan = swarm::plan(numbers.next().unwrap_or(0));
    describe(&plan);
    let trace = Trace::new(std::io::stdout(), numbers.next().unwrap_or(u64::MAX));
    match Cluster::new(&plan, Checkers::of(&plan).with(trace)).run() {
        Ok(run) => println!("{:?}", run.totals),
        Err(violation) => println!("{violation}"),
    }
}

fn describe(plan: &Plan) {
    println!("{:?}", plan.network);
    for fault in &plan.faults {
        println!("{fault:?}");
    }
    println!("pauses {:?}, noise {}", plan.pauses, plan.noise);
    for job in &plan.jobs {
        println!(
            "job: world {}, lanes {}, slots {}, max ops {}, payload {}, in flight {}, {:?}",
            job.world,
            job.lanes,
            job.pool_slots,
            job.max_ops,
            job.cut.payload(),
            job.in_flight,
            job.missing
        );
        for op in &job.ops {
            let windows = Geometry::new(&op.descriptor).windows();
            println!("  {} ({windows} windows), {:?}", op.descriptor, op.inputs);
            let starts: Vec<_> = op.starts.iter().map(|start| start.as_micros()).collect();
            println!("    called at {starts:?} us, odd {:?}", op.odd);
        }
    }
}
