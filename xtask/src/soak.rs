//! `cargo xtask soak` starts and ends jobs for a chosen time and kills ranks of some of them. The
//! jobs run on two aggregators that are killed or drained in turn, on one steady aggregator, or
//! through racks to a root.
//!
//! The ranks check the sums of every op (`racksum bench -n 1`). The soak checks three more rules:
//!
//! - A job that loses no rank succeeds, even when its aggregators restart.
//! - A job with a victim runs until the victim is killed. It then ends in time with an error that
//!   names the victim.
//! - The steady aggregators (the root and those of the racks) end with all buffers free, with no
//!   more open files than before the first rank joined, and with about the memory that they had
//!   near the beginning.

mod job;
mod served;

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{scope, sleep};
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use racksum_tools::deadline::Deadline;
use racksum_tools::interrupt;
use racksum_tools::shell::Cmd;

use self::job::{Draw, SoakJob};
use self::served::{Resources, Served};

/// Duration and load of a soak.
#[derive(Debug, Args)]
pub(crate) struct SoakArgs {
    /// Duration of the soak in minutes.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
    minutes: u64,
    /// Number of jobs at a time.
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u64).range(1..=32))]
    jobs: u64,
    /// Seed of the random choices.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Counts and faults of a soak.
#[derive(Debug, Default)]
struct Tally {
    jobs: u64,
    /// Number of ops whose sums were checked, over all ranks.
    ops: u64,
    ranks_killed: u64,
    /// Number of jobs that ended with an error that names the killed rank.
    losses_named: u64,
    aggregators_killed: u64,
    aggregators_drained: u64,
    /// Expectations that did not hold.
    faults: Vec<String>,
}

impl Tally {
    /// Records a fault and prints it at once, because later jobs soon overwrite the logs.
    fn fault(&mut self, what: String) {
        println!("fault: {what}");
        self.faults.push(what);
    }
}

/// Runs the soak; returns `true` if every check passed.
pub(crate) fn run(root: &Path, args: &SoakArgs) -> Result<bool> {
    interrupt::listen()?;
    let build = ["build", "--release", "--locked", "-p", "racksum-cli"];
    Cmd::cargo(&build).run(root)?;
    let program = root.join("target/release/racksum");
    let logs = root.join("target/soak");
    std::fs::create_dir_all(&logs)?;
    let start = |name, nth, parent| {
        Served::start(&program, &logs, name, FIRST_PORT + nth * PORTS_EACH, parent)
    };
    let steady = start("steady", 0, None)?;
    let above = Some(steady.addr.as_str());
    let racks = vec![start("left", 1, above)?, start("right", 2, above)?];
    let mut pair = [start("first", 3, None)?, start("second", 4, None)?];
    let both = format!("{},{}", pair[0].addr, pair[1].addr);
    let places = [
        vec![both.clone()],
        vec![steady.addr.clone()],
        racks.iter().map(|rack| rack.addr.clone()).collect(),
    ];
    println!(
        "steady aggregators: {}, the parent of {}; killed or drained in turn: {both}; logs in {}",
        steady.addr,
        places[2].join(" and "),
        logs.display()
    );
    let steady: Vec<Served> = std::iter::once(steady).chain(racks).collect();
    let (tally, over) = (Mutex::new(Tally::default()), AtomicBool::new(false));
    let run = Deadline::after(Duration::from_secs(60 * args.minutes));
    let started = scope(|scope| {
        let (tally, over, steady, program, logs) = (&tally, &over, &steady, &program, &logs);
        for slot in 0..args.jobs {
            let place = usize::try_from(slot).unwrap_or(0) % places.len();
            let aggregators = places[place].clone();
            scope.spawn(move || {
                let mut draw = Draw::new(args.seed * 1000 + slot);
                for nth in 0.. {
                    if over.load(Relaxed) {
                        break;
                    }
                    let name = format!("job-{slot}-{nth}");
                    SoakJob::new(&name, aggregators.clone(), &mut draw).run(program, logs, tally);
                }
            });
        }
        let pair = &mut pair;
        scope.spawn(move || {
            trouble(pair, program, logs, &mut Draw::new(args.seed), tally, over);
        });
        watch(steady, run, tally, over)
    });
    steady.iter().try_for_each(Served::await_peace)?;
    let tally = tally.into_inner().unwrap_or_else(|broken| broken.into_inner());
    report(&tally, &steady, &started?)
}

/// Prints the progress until the run ends. Returns the steady aggregators' resources near the
/// beginning.
fn watch(
    steady: &[Served],
    run: Deadline,
    tally: &Mutex<Tally>,
    over: &AtomicBool,
) -> Result<Vec<Resources>> {
    let resources = || steady.iter().map(Served::resources).collect::<Result<Vec<_>>>();
    let mut started = None;
    while !run.is_over() && !interrupt::is_noted() {
        sleep(Duration::from_secs(5));
        if started.is_none() && run.elapsed() > WARM_UP {
            started = Some(resources());
        }
        if run.elapsed().as_secs() % 60 < 5 {
            let memory = resources().map_or_else(|why| format!("{why:#}"), in_mb);
            let tally = lock(tally);
            println!(
                "{:>3} min: {} jobs, {} checked ops, {} ranks and {} aggregators killed, {} \
                 drained, {} faults; memory of steady aggregators: {memory}",
                run.elapsed().as_secs() / 60,
                tally.jobs,
                tally.ops,
                tally.ranks_killed,
                tally.aggregators_killed,
                tally.aggregators_drained,
                tally.faults.len()
            );
        }
    }
    over.store(true, Relaxed);
    started.unwrap_or_else(resources)
}

/// Formats the memory of each aggregator.
fn in_mb(all: Vec<Resources>) -> String {
    let each: Vec<_> = all.iter().map(|one| one.resident_mb.to_string()).collect();
    format!("{} MB", each.join(", "))
}

/// Kills or drains the two aggregators in turn, and starts each again, until the soak is over.
fn trouble(
    pair: &mut [Served; 2],
    program: &Path,
    logs: &Path,
    draw: &mut Draw,
    tally: &Mutex<Tally>,
    over: &AtomicBool,
) {
    for turn in 0.. {
        // Jobs need one of the two aggregators, so the restarted one must run for a while before
        // this thread stops the other.
        let pause = Deadline::after(Duration::from_millis(draw.between(5_000, 9_000)));
        while !pause.is_over() && !over.load(Relaxed) {
            sleep(Duration::from_millis(50));
        }
        if over.load(Relaxed) {
            return;
        }
        let served = &mut pair[turn % 2];
        let kills = draw.between(0, 2) < 2;
        let renewed = if kills { served.kill() } else { served.drain() }
            .and_then(|()| served.again(program, logs));
        let mut tally = lock(tally);
        match renewed {
            Ok(()) if kills => tally.aggregators_killed += 1,
            Ok(()) => tally.aggregators_drained += 1,
            Err(error) => tally.fault(format!("aggregator {}: {error:#}", served.addr)),
        }
    }
}

fn report(tally: &Tally, steady: &[Served], before: &[Resources]) -> Result<bool> {
    let Tally {
        jobs,
        ops,
        ranks_killed,
        losses_named,
        aggregators_killed,
        aggregators_drained,
        faults,
    } = tally;
    println!("jobs run                       {jobs}");
    println!("ops, every sum checked         {ops}");
    println!("ranks killed                   {ranks_killed}, named by {losses_named} jobs");
    println!("aggregators killed, drained    {aggregators_killed}, {aggregators_drained}");
    println!("steady aggregators, near the start and at the end:");
    let mut clean = true;
    for (served, before) in steady.iter().zip(before) {
        let after = served.resources()?;
        println!("  {}", served.name);
        println!(
            "    resident memory            {} MB, {} MB",
            before.resident_mb, after.resident_mb
        );
        println!("    open files                 {}, {}", before.files, after.files);
        println!("    jobs, buffers taken        {}, {}", after.jobs, after.buffers_taken);
        let grown = after.resident_mb.saturating_sub(before.resident_mb);
        let left = after.jobs + after.buffers_taken;
        clean &= grown <= SPARE_MB && left == 0 && after.files <= before.idle_files;
    }
    println!("faults                         {}", faults.len());
    for fault in faults {
        println!("  {fault}");
    }
    ensure!(*jobs > 0, "no job has ended; pass a larger --minutes");
    Ok(faults.is_empty() && clean)
}

fn lock(tally: &Mutex<Tally>) -> std::sync::MutexGuard<'_, Tally> {
    tally.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The first aggregator's port. It lies below the kernel's ephemeral ports, so that no rank's
/// socket takes a port that an aggregator is about to bind again.
const FIRST_PORT: u16 = 17_170;
const PORTS_EACH: u16 = 10;
/// Time until the aggregators have touched the memory that they use.
const WARM_UP: Duration = Duration::from_secs(45);
/// Growth in memory, in MB, that a steady aggregator is allowed after the warm-up.
const SPARE_MB: u64 = 32;
