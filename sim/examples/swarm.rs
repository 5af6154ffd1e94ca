//! Runs a swarm of the seeds from FIRST up to, but not including, END:
//! `cargo run --release -p racksum-sim --example swarm -- [FIRST [END [THREADS]]]`.

use racksum_sim::swarm;

fn main() -> std::io::Result<()> {
    let mut numbers = std::env::args().skip(1).filter_map(|arg| arg.parse::<u64>().ok());
    let first = numbers.next().unwrap_or(0);
    let end = numbers.next().unwrap_or(first + 100);
    let threads = numbers.next().and_then(|n| usize::try_from(n).ok()).unwrap_or(2);
    let mut failed = 0;
    let summary = swarm::run(first..end, threads, |summary| {
        if summary.failed > failed {
            failed = summary.failed;
            if let Some(failure) = summary.failures.last() {
                println!("{failure}");
            }
        }
    })?;
    println!(
        "{} seeds, {} failed, {} ops in {} simulated seconds; {:?}",
        summary.seeds,
        summary.failed,
        summary.ops,
        summary.took_us / 1_000_000,
        summary.totals
    );
    std::process::exit(i32::from(summary.failed > 0));
}
