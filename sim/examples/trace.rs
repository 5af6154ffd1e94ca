//! Prints what happens in the run of a seed:
//! `cargo run --release -p racksum-sim --example trace -- SEED [LINES]`.

use racksum_proto::wire::Header;
use racksum_sim::check::{Checker, Checkers, Machine, Sight, Violation};
use racksum_sim::cluster::Cluster;
use racksum_sim::engine::Picos;
use racksum_sim::swarm;

/// Prints what it sees, up to a number of lines.
struct Printer {
    lines: u64,
}

impl Checker for Printer {
    fn see(&mut self, at: Picos, machine: Machine, sight: &Sight<'_>) -> Result<(), Violation> {
        let what = match sight {
            Sight::Driven { .. } | Sight::Foreign(_) => return Ok(()),
            Sight::Sent(bytes) => format!("sends {}", summary(bytes)),
            Sight::Received(bytes) => format!("takes {}", summary(bytes)),
            Sight::Ended(op, result) => match result {
                Ok(tensor) => format!("ended op {} with {} bytes", op.0, tensor.len()),
                Err(error) => format!("ended: {error}"),
            },
            other => format!("{other:?}"),
        };
        if let Some(left) = self.lines.checked_sub(1) {
            self.lines = left;
            println!("{:>12.3} us {machine}: {what}", at.0 as f64 / 1e6);
        }
        Ok(())
    }
}

fn summary(bytes: &[u8]) -> String {
    let Ok((header, body)) = Header::decode(bytes) else { return "garbage".to_owned() };
    let Header { kind, lane, shard, window, ack, mask, previous, fragment, .. } = header;
    let mut text = format!(
        "{kind:?} {}.{} lane {lane} shard {shard} ack {}.{} {} bytes",
        window.op.0,
        window.index,
        ack.op.0,
        ack.index,
        body.len()
    );
    if mask != 0 {
        text += &format!(" mask {mask:#x} fragment {fragment}");
    }
    if previous != 0 {
        text += &format!(" previous {previous}");
    }
    if matches!(kind, racksum_proto::wire::Kind::Ask)
        && let Ok(entries) = racksum_proto::wire::AskEntries::decode(body)
    {
        for entry in entries.iter().take(6) {
            text +=
                &format!(" [{}.{} {:x}]", entry.window.op.0, entry.window.index, entry.fragments);
        }
    }
    if matches!(kind, racksum_proto::wire::Kind::Open)
        && let Ok(open) = racksum_proto::wire::Open::decode(body)
    {
        text += &format!(
            " after {:?} windows {} owed {}",
            open.after.map(|op| op.0),
            open.windows,
            open.occupancy().count_ones()
        );
    }
    text
}

fn main() {
    let mut numbers = std::env::args().skip(1).filter_map(|arg| arg.parse::<u64>().ok());
    let seed = numbers.next().unwrap_or(0);
    let lines = numbers.next().unwrap_or(u64::MAX);
    let mut plan = swarm::plan(seed);
    if std::env::args().any(|arg| arg == "quiet") {
        plan.noise = 0;
    }
    println!("network {:?}", plan.network);
    println!("faults {:?}", plan.faults);
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
            let windows = racksum_proto::geometry::Geometry::new(&op.descriptor).windows();
            println!("  {} ({windows} windows), {:?}", op.descriptor, op.inputs);
            println!("    {:?} odd {:?}", op.starts.iter().map(|s| s.as_micros()).collect::<Vec<_>>(), op.odd);
        }
    }
    let checkers = Checkers::of(&plan).with(Printer { lines });
    match Cluster::new(&plan, checkers).run() {
        Ok(run) => println!("{:?}", run.totals),
        Err(violation) => println!("{violation}"),
    }
}
