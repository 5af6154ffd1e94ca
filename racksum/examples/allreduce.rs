//! Sums one tensor from each of four ranks. The ranks are threads, and the aggregator runs in this
//! process. Run it with `cargo run --example allreduce`.

use std::error::Error;
use std::thread;

use racksum::ConnectOptions;
use racksum_aggregator::{Aggregator, Config};

const WORLD: u16 = 4;
const ELEMENTS: usize = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let aggregator = Aggregator::start(Config { port: 0, ..Config::default() })?;
    let address = aggregator.addr().to_string();
    let run = |rank: u16| -> Result<f32, Box<dyn Error + Send + Sync>> {
        let options = ConnectOptions::new(&address, "allreduce").rank(rank).world(WORLD);
        let client = options.connect()?;
        let mut gradient = vec![f32::from(rank); ELEMENTS];
        client.allreduce(&mut gradient)?;
        Ok(gradient[0])
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..WORLD).map(|rank| scope.spawn(move || run(rank))).collect();
        for (rank, sum) in ranks.into_iter().enumerate() {
            let sum = sum
                .join()
                .expect("a rank does not panic")
                .map_err(|error| error as Box<dyn Error>)?;
            println!("rank {rank}: the sum of 0, 1, 2 and 3 is {sum}");
        }
        Ok(())
    })
}
