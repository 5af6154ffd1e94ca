//! Stops the aggregator of a job between two ops. The job moves to its standby, and the next sum
//! has the same bits as the one before. Run it with `cargo run --example failover`.

use std::error::Error;
use std::sync::Barrier;
use std::thread;

use racksum::{Client, ConnectOptions};
use racksum_aggregator::{Aggregator, Config};

const WORLD: u16 = 2;

fn main() -> Result<(), Box<dyn Error>> {
    let start = || Aggregator::start(Config { port: 0, pool_mib: 64, ..Config::default() });
    let (first, standby) = (start()?, start()?);
    let addresses = format!("{},{}", first.addr(), standby.addr());
    let sum = |client: &Client| {
        let mut tensor = vec![0.1_f32; 1000];
        client.allreduce(&mut tensor).map(|_| tensor[0])
    };
    let is_stopped = Barrier::new(usize::from(WORLD) + 1);
    let run = |rank: u16| -> Result<(f32, f32), Box<dyn Error + Send + Sync>> {
        let options = ConnectOptions::new(&addresses, "failover").rank(rank).world(WORLD);
        let client = options.connect()?;
        let before = sum(&client)?;
        is_stopped.wait();
        is_stopped.wait();
        Ok((before, sum(&client)?))
    };
    thread::scope(|scope| {
        let run = &run;
        let ranks: Vec<_> = (0..WORLD).map(|rank| scope.spawn(move || run(rank))).collect();
        is_stopped.wait();
        drop(first);
        println!("the first aggregator has stopped");
        is_stopped.wait();
        for (rank, sums) in ranks.into_iter().enumerate() {
            let sums = sums.join().expect("a rank does not panic");
            let (before, after) = sums.map_err(|error| error as Box<dyn Error>)?;
            println!("rank {rank}: {before} before, {after} at the standby");
        }
        Ok(())
    })
}
