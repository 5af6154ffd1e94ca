//! Floods an aggregator's control port with calls that fall silent, and prints their number:
//! `cargo run -p racksum-tests --example initials -- TO ADDRESSES RATE SECONDS`. The calls come
//! from ADDRESSES addresses, starting with 127.0.1.1, at RATE a second in total.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

#[path = "../src/initials.rs"]
mod initials;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some(flood) = flood(&args) else {
        eprintln!(
            "usage: initials TO ADDRESSES(1-250) RATE(1-100000) SECONDS(1-600); TO is a loopback \
             address and port, such as 127.0.0.1:7177"
        );
        return ExitCode::from(2);
    };
    match flood.run(|| false) {
        Ok(flooded) => {
            println!("{{\"calls\":{},\"shown\":{}}}", flooded.calls, flooded.shown);
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("cannot flood {}: {error}", flood.to);
            ExitCode::FAILURE
        }
    }
}

/// Parses the arguments of a flood, which may only target this host.
fn flood(args: &[String]) -> Option<initials::Flood> {
    let [to, addresses, rate, seconds] = args else { return None };
    let to: SocketAddr = to.parse().ok().filter(|to: &SocketAddr| to.ip().is_loopback())?;
    let addresses: u8 = addresses.parse().ok().filter(|count| (1..=250).contains(count))?;
    let rate = rate.parse().ok().filter(|rate| (1..=100_000).contains(rate))?;
    let seconds = seconds.parse().ok().filter(|seconds| (1..=600).contains(seconds))?;
    let from = (1..=addresses).map(|last| IpAddr::from([127, 0, 1, last])).collect();
    Some(initials::Flood { to, from, rate, lasts: Duration::from_secs(seconds) })
}
