//! Attacks an aggregator with jobs that wait for room: `waiters ADDR COUNT SECONDS`.
//!
//! Prints how many jobs wait and how many were refused, and keeps the waiting jobs connected for
//! SECONDS. The aggregator must be on loopback and accept callers without identities.

use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

#[path = "../../tests/src/waiters.rs"]
mod waiters;

fn main() -> Result<(), Box<dyn Error>> {
    let usage = "usage: waiters ADDR COUNT SECONDS";
    let mut arguments = std::env::args().skip(1);
    let mut next = || arguments.next().ok_or(usage);
    let to: SocketAddr = next()?.parse()?;
    let (count, seconds): (usize, u64) = (next()?.parse()?, next()?.parse()?);
    // Each caller has a socket of its own, which counts as an open file.
    racksum_net::local::raise_open_files()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let waiters = waiters::gather(to, &[to.ip()], "crowd", count).await;
        println!("{} wait, {} refused", waiters.waiting.len(), waiters.refused.len());
        if let Some(why) = waiters.refused.first() {
            println!("first refusal: {why}");
        }
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    });
    Ok(())
}
