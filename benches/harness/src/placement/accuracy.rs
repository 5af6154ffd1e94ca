//! The probe's results beside what was set, and the effect of the probe on a job.

use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use racksum_placer::network::{LinkRecord, Network};

use super::job::Program;
use super::scene::{Scene, Seats};
use super::zones::Zones;
use super::{Bench, read};

/// Measures a cluster with known rates, losses and delays; returns whether all bounds hold.
pub(super) fn run(bench: &Bench<'_>) -> Result<bool> {
    let scene = Scene::varied();
    let zones = Zones::build(bench.root, &bench.work, "", &scene)?;
    let inventory = scene.inventory(|host| zones.hosts[host].addr.to_string());
    std::fs::write(bench.file("nodes.json"), serde_json::to_string(&inventory)?)?;
    let _agents = bench.agents(&zones)?;
    let began = now();
    let report = bench.probe(&zones)?;
    println!("{} ({:.0} s)", report.lines().next().unwrap_or(""), began.elapsed().as_secs_f64());
    let network: Network = read(&bench.file("net.json"))?;
    let mut worst = Worst::default();
    for host in &scene.hosts {
        let link = network.links.iter().find(|link| link.of == host.name);
        let link = link.with_context(|| format!("{} was not measured", host.name))?;
        worst.add(host, link)?;
    }
    println!(
        "worst error: rate {:.1} % (at most 10), loss {:.2} points (at most 1), RTT {:.1} % (at \
         most 20)",
        100.0 * worst.rate,
        100.0 * worst.loss,
        100.0 * worst.rtt
    );
    let slowdown = slowdown(bench, &scene, &zones)?;
    println!(
        "a job beside the probe at its default share takes {slowdown:.3} times as long (at most \
         1.02)"
    );
    Ok(worst.rate <= 0.1 && worst.loss <= 0.01 && worst.rtt <= 0.2 && slowdown <= 1.02)
}

/// The greatest errors over all hosts.
#[derive(Debug, Default)]
struct Worst {
    rate: f64,
    /// In shares of datagrams.
    loss: f64,
    rtt: f64,
}

impl Worst {
    fn add(&mut self, host: &super::scene::SceneHost, link: &LinkRecord) -> Result<()> {
        let (up, down) = (link.up.context("no rate up")?, link.down.context("no rate down")?);
        // A link's rate counts all bytes, the probe's the payload of its datagrams.
        let payload = f64::from(host.mbit) * PAYLOAD_SHARE;
        for measured in [up, down] {
            self.rate = self.rate.max((measured.mbit / payload - 1.0).abs());
            self.loss = self.loss.max((measured.loss - host.loss).abs());
        }
        let rtt_us = link.rtt_us.unwrap_or(0.0);
        if host.delay_ms > 0.0 {
            self.rtt = self.rtt.max((rtt_us / (host.delay_ms * 1e3) - 1.0).abs());
        }
        println!(
            "{:<4} set {:>3} Mbit/s, loss {:.1} %, RTT {:>4.1} ms; measured {:.1} up and {:.1} \
             down of payload, loss {:.2} % and {:.2} %, RTT {:.2} ms",
            host.name,
            host.mbit,
            100.0 * host.loss,
            host.delay_ms,
            up.mbit,
            down.mbit,
            100.0 * up.loss,
            100.0 * down.loss,
            rtt_us / 1e3
        );
        Ok(())
    }
}

/// Returns the time of a job's steps beside the probe, divided by that without it. The job has a
/// rank on each host of the fastest zone and on some of the others, and the two alternate.
fn slowdown(bench: &Bench<'_>, scene: &Scene, zones: &Zones) -> Result<f64> {
    let fast = |host: &super::scene::SceneHost| {
        u32::from(host.mbit == 100 && host.loss == 0.0 && host.delay_ms == 0.0)
    };
    let ranks: Vec<_> = scene.hosts.iter().map(fast).collect();
    let aggregator = ranks.iter().position(|ranks| *ranks > 0).context("no host is fast")?;
    let mut job = bench.start(zones, &Seats { ranks, aggregator }, Program::Bench)?;
    job.step_s()?;
    let mut seconds = [0.0; 2];
    let mut steps = [0u32; 2];
    for turn in 0..2 * TURNS {
        let is_beside = turn % 2;
        let probe = if is_beside == 1 {
            let mut command = bench.measuring(zones, "0.01")?;
            Some(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?)
        } else {
            None
        };
        if probe.is_some() {
            // The probe connects and pings first.
            sleep(Duration::from_secs(3));
        }
        let began = now();
        while began.elapsed() < TURN {
            seconds[is_beside] += job.step_s()?;
            steps[is_beside] += 1;
        }
        if let Some(mut probe) = probe {
            ensure!(probe.try_wait()?.is_none(), "the probe ended before the job's turn did");
            probe.kill()?;
            probe.wait()?;
        }
    }
    let mean = |turn: usize| seconds[turn] / f64::from(steps[turn]);
    println!("steps without the probe {:.1} ms, beside it {:.1} ms", 1e3 * mean(0), 1e3 * mean(1));
    Ok(mean(1) / mean(0))
}

#[expect(clippy::disallowed_methods, reason = "the harness measures its own turns")]
fn now() -> Instant {
    Instant::now()
}

/// The share of a link's bytes that is payload in datagrams of 1,200 bytes with headers of 42.
const PAYLOAD_SHARE: f64 = 1200.0 / 1242.0;
/// Turns with the probe, and as many without.
const TURNS: usize = 5;
/// The time of a turn.
const TURN: Duration = Duration::from_secs(20);
