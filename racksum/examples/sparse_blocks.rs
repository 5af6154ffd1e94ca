//! Sums lists of blocks. A list suits the gradient of an embedding, in which only a few rows are
//! non-zero. Each of two ranks passes two rows of a table, and receives the three rows of the
//! union. Run it with `cargo run --example sparse_blocks`.

use std::error::Error;
use std::thread;

use racksum::{Blocks, ConnectOptions, Descriptor, Element};
use racksum_aggregator::{Aggregator, Config};

/// The number of rows in the table.
const ROWS: u64 = 1_000_000;
/// The number of elements in a row.
const ROW: usize = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let aggregator = Aggregator::start(Config { port: 0, ..Config::default() })?;
    let address = aggregator.addr().to_string();
    let descriptor = Descriptor::sum(ROWS * ROW as u64, f32::DTYPE).with_block(ROW)?;
    let run = |rank: u16, rows: [u32; 2]| -> Result<Blocks, Box<dyn Error + Send + Sync>> {
        let options = ConnectOptions::new(&address, "sparse-blocks").rank(rank).world(2);
        let client = options.connect()?;
        let gradient = Blocks::new(rows.to_vec(), &[1.0_f32; 2 * ROW]);
        Ok(client.submit(gradient, descriptor)?.wait()?.tensor)
    };
    thread::scope(|scope| {
        let ranks = [(0, [7, 999_999]), (1, [7, 42])]
            .map(|(rank, rows)| scope.spawn(move || run(rank, rows)));
        for (rank, sums) in ranks.into_iter().enumerate() {
            let sums = sums
                .join()
                .expect("a rank does not panic")
                .map_err(|error| error as Box<dyn Error>)?;
            let values = sums.elements::<f32>().expect("the elements of the op are f32");
            for (row, values) in sums.indices.iter().zip(values.chunks(ROW)) {
                println!("rank {rank}: row {row} is {}", values[0]);
            }
        }
        Ok(())
    })
}
