//! `racksum sim run`: runs scenarios and prints their results.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_proto::counted::counted;
use racksum_sim::results::{self, Line, RunLine, quantile};
use racksum_sim::scenario::Scenario;

use crate::args::{self, Format};
use crate::exit::{Failure, print_line};
use crate::progress::{self, Work};
use crate::table::table;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Scenario files.
    #[arg(required = true, value_name = "FILE")]
    scenarios: Vec<PathBuf>,
    /// Seeds from A up to, but not including, B.
    #[arg(long, value_name = "A..B", value_parser = super::seeds, default_value = "0..1")]
    seeds: Range<u64>,
    /// Number of threads [default: one per core].
    #[arg(long, value_parser = args::number::<usize>(args::THREADS))]
    threads: Option<usize>,
    /// Output format. With JSON, each job and each run is printed as soon as it has ended.
    #[arg(long, value_enum, ignore_case = true, default_value_t = Format::Text)]
    format: Format,
}

/// A message from a thread that runs scenarios.
enum Message {
    Line(Line),
    Failed(String),
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let scenarios = args.scenarios.iter().map(|path| read(path)).collect::<Result<Vec<_>, _>>()?;
    let runs: Vec<_> = scenarios
        .iter()
        .flat_map(|scenario| args.seeds.clone().map(move |seed| (scenario, seed)))
        .collect();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = args.threads.unwrap_or(cores).min(runs.len());
    let jobs: usize = runs.iter().map(|(scenario, _)| scenario.arrivals().len()).sum();
    let work = Work::new(jobs as u64);
    let progress = {
        let (work, count) = (work.clone(), counted(runs.len(), "run"));
        progress::Line::start(move |passed: Duration| format!("{count}: {}", work.text(passed)))
    };
    let (next, (sender, receiver)) = (AtomicUsize::new(0), channel());
    let mut ended = vec![];
    let outcome = std::thread::scope(|scope| {
        for _ in 0..threads {
            let (sender, runs, next) = (sender.clone(), &runs, &next);
            scope.spawn(move || run_all(runs, next, &sender));
        }
        drop(sender);
        for message in receiver {
            match message {
                Message::Failed(why) => return Err(Failure::failed(why)),
                Message::Line(line) => {
                    if args.format == Format::Json {
                        let text = serde_json::to_string(&line).unwrap_or_default();
                        progress.print(|| print_line(&text))?;
                    }
                    match line {
                        Line::Job(_) => work.advance(1),
                        Line::Run(run) => ended.push(run),
                    }
                }
            }
        }
        Ok(())
    });
    drop(progress);
    outcome?;
    match args.format {
        Format::Json => Ok(()),
        Format::Text => summary(&scenarios, &ended).iter().try_for_each(|line| print_line(line)),
    }
}

/// Runs what no other thread has begun, until nobody receives the results.
fn run_all(runs: &[(&Scenario, u64)], next: &AtomicUsize, sender: &Sender<Message>) {
    while let Some((scenario, seed)) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
        let mut is_heard = true;
        let clock = Clock::start();
        let begun = clock.now();
        let wall_s = || clock.now().since(begun).0 as f64 / 1e9;
        let end = results::run(scenario, *seed, wall_s, |line| {
            is_heard &= sender.send(Message::Line(line)).is_ok();
        });
        if let Err(error) = end {
            let why = format!("{} with seed {seed}: {error}", scenario.name());
            is_heard &= sender.send(Message::Failed(why)).is_ok();
        }
        if !is_heard {
            return;
        }
    }
}

fn read(path: &Path) -> Result<Scenario, Failure> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        Failure::of_path(format!("cannot read {}: {error}", path.display()), &error)
    })?;
    let folder = path.parent().unwrap_or_else(|| Path::new(""));
    let read =
        |file: &str| std::fs::read_to_string(folder.join(file)).map_err(|error| error.to_string());
    Scenario::parse(&text, &read)
        .map_err(|error| Failure::usage(format!("{}: {error}", path.display())))
}

/// Returns a table with the medians and extremes over the seeds of each scenario.
fn summary(scenarios: &[Scenario], ended: &[RunLine]) -> Vec<String> {
    let rows = scenarios.iter().map(|scenario| {
        let runs = || ended.iter().filter(|run| run.scenario == scenario.name());
        let sorted = |value: fn(&RunLine) -> f64| {
            let mut values: Vec<_> = runs().map(value).collect();
            values.sort_unstable_by(f64::total_cmp);
            values
        };
        let median = sorted(|run| run.median_inflation);
        let hops: u64 = runs().map(|run| run.hops).sum();
        let wall_s: f64 = runs().map(|run| run.wall_s).sum();
        [
            scenario.name().into(),
            runs().count().to_string(),
            scenario.arrivals().len().to_string(),
            format!("{:.3}", quantile(&median, 0.5)),
            format!("{:.3} .. {:.3}", quantile(&median, 0.0), quantile(&median, 1.0)),
            format!("{:.3}", quantile(&sorted(|run| run.p99_inflation), 0.5)),
            format!("{:.3}", quantile(&sorted(|run| run.makespan_s), 0.5)),
            format!("{:.3}", quantile(&sorted(|run| run.sent_bytes as f64), 0.5) / 1e9),
            format!("{:.1}", hops as f64 / wall_s / 1e6),
        ]
    });
    let headings = [
        "scenario",
        "seeds",
        "jobs",
        "inflation",
        "min .. max",
        "p99",
        "makespan s",
        "sent GB",
        "M hops/s",
    ];
    table(headings, rows.collect())
}
